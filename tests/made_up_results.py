"""A benchmark and a profile that nothing measured, for tests of how they are shown."""

from __future__ import annotations

from samopt.bench_table import LEFT_OUT, Row, Setting
from samopt.profiling import Audit, Comparison, Compilation, Compilations, Kernel, Memory, Profile, StageTime, Sync

SETTING = Setting(
    "vit_q",
    3,
    "cuda",
    5.96,
    712.3,
    {"torch": "2.11.0", "gpu": "Some GPU"},
    bench="waterfall",
    recipes=("quick",),
    command="samopt bench waterfall --recipe 'a<b>.toml'",
)


def _row(what: str, size: int, speed: float, before: float | None, gib: float, iou: float | None = None) -> Row:
    gain = None if before is None else speed / before
    return Row(
        what,
        size,
        1e3 / speed,
        0.01,
        speed,
        speed / 20,
        peak_gib=gib,
        error=0.01,
        ratio_before=gain,
        mask_iou=iou,
        miou=iou and iou / 2,
    )


BASE = _row("unmodified", 1, 20.0, None, 4.0, 1.0)
ROWS = [
    BASE,
    _row("+ dtype", 1, 60.0, 20.0, 2.5, 0.999),
    _row("+ sdpa & <b>", 1, 48.0, 60.0, 2.0, 0.998),
    Row("+ sparse24", 1, status=LEFT_OUT, remark="sparse24 dropped"),
    _row("+ dtype", 8, 80.0, 20.0, 6.0, 0.999),
    _row("+ sdpa & <b>", 8, 200.0, 80.0, 5.0, 0.998),
    Row("+ sparse24", 8, status=LEFT_OUT, remark="sparse24 dropped"),
]

_SYNC = Sync("reads with a boolean mask", "segment_anything/a.py", 7, "f", "x[m < 1 & y]", "prompt encoder")


def _profile(name: str, scale: float) -> Profile:
    kernels = (Kernel("gemm", "matmul", 0.08 * scale, 10), Kernel("flash", "attention", 0.02 * scale, 5))
    audit = Audit(((_SYNC, 4),)) if name == "before" else Audit((), "a branch on a value")
    stages = (StageTime("set_image", 0.1 * scale, 0.09 * scale),)
    return Profile(name, "cuda", 0.11 * scale, stages, kernels, audit, Memory(2**30, 2**29), ("a note",))


COMPARISON = Comparison(
    "Toy",
    "quick",
    "scene <1>",
    _profile("before", 1.0),
    _profile("after", 0.25),
    (("SDPAttention()", "applied"), ("Int8Dynamic()", "skipped")),
    Compilations([Compilation("forward", "a.py", 3, 1.5, "x.shape[0] == 1")]),
    {"torch": "2.11.0"},
)
