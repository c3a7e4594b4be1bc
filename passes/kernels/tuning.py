"""Which configuration of a kernel to run: correct first, then fast.

Every candidate computes the given problem before it is timed, and one whose result is off, or that the GPU cannot
launch (too little shared memory, say), is passed over. What was found is kept in a JSON file in the user's cache
folder, under a key of GPU, versions, the kernels' source and the problem's shape: a changed kernel is tuned anew.
Configurations for some GPUs are shipped, in `tuned.json`, made by `python -m samopt.passes.kernels.tune`; with other
versions of torch or Triton than they were made with, each must give the right result first.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from samopt.errors import Unsupported, first_line
from samopt.passes.kernels.devices import GPU_ALONE

# Of the candidates that are no slower than this times the fastest by one measurement, the first so many are measured
# so many times more.
CLOSE, FINALISTS, ROUNDS = 1.05, 4, 3
# Relative error of a correct result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 4e-2}
SHIPPED = Path(__file__).with_name("tuned.json")

_found: dict[str, Config | str] = {}  # by key: the configuration, or why there is none
_offered: dict[str, Any] = {}  # entries that came with a saved model
_lock = threading.RLock()


@dataclass(frozen=True)
class Config:
    """A kernel's compile-time choices.

    Attributes:
        blocks: the kernel's own constants.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        maxnreg: most registers a thread may use; None leaves it to the compiler.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None

    @classmethod
    def of(cls, num_warps: int = 4, num_stages: int = 3, maxnreg: int | None = None, **blocks: int) -> Config:
        """A configuration from keywords."""
        return cls(tuple(sorted(blocks.items())), num_warps, num_stages, maxnreg)

    def launch_options(self) -> dict[str, Any]:
        """The keywords that Triton's launcher takes."""
        limit = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


@dataclass(frozen=True)
class Problem:
    """What a configuration is chosen for.

    Attributes:
        kernel: the kernel's name.
        shape: what its best configuration may depend on: names and numbers.
        dtype: of its result.
        device: the GPU.
        sources: modules of this package that its result and its speed depend on.
        candidates: configurations to try.
        output: makes a tensor for the result of a made-up problem of this shape.
        run: computes that problem with a configuration, into such a tensor.
        reference: its right answer, in float32 or better.
    """

    kernel: str
    shape: tuple[tuple[str, int], ...]
    dtype: torch.dtype
    device: torch.device
    sources: tuple[str, ...]
    candidates: Sequence[Config]
    output: Callable[[], Tensor]
    run: Callable[[Config, Tensor], object]
    reference: Callable[[], Tensor]

    def key(self) -> str:
        """Kernel, shape, dtype and GPU, and what else would make a stored configuration wrong or stale."""
        shape = ",".join(f"{name}={value}" for name, value in self.shape)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}({shape}) {dtype} on {_gpu(self.device)}, source {source_hash(self.sources)}"

    def versioned_key(self) -> str:
        """The key, with the versions of torch and Triton."""
        import triton

        return f"{self.key()}, torch {torch.__version__}, triton {triton.__version__}"


def choose(problem: Problem) -> Config:
    """The configuration for a problem: known from before, shipped, or found by trying.

    Raises:
        Unsupported: no candidate gave a right answer on this GPU, and the message says why each failed; or there is
            no Triton.
    """
    if not has_triton_package():
        raise Unsupported("Triton is not installed")
    key = problem.versioned_key()
    with _lock:
        found = _found.get(key)
    if found is None:
        with GPU_ALONE, _lock:  # in this order, as in a capture, in which kernels ask for their configurations
            if key not in _found:
                _found[key] = (
                    _stored(problem, cache_file(), key)
                    or _candidate(problem, "a saved model", _offered, key)
                    or _stored(problem, SHIPPED, key)
                    or _seek(problem)
                )
            found = _found[key]
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def found_here() -> dict[str, Any]:
    """The configurations that this process uses, as entries of a file."""
    with _lock:
        return {key: encode(config) for key, config in _found.items() if isinstance(config, Config)}


def offer(entries: dict[str, Any]) -> None:
    """Takes entries that `found_here` gave elsewhere: used where a key, which names GPU and versions, is sought."""
    with _lock:
        _offered.update(entries)


def _seek(problem: Problem) -> Config | str:
    """The fastest right configuration, or why there is none. One shipped for other versions is tried alone first."""
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"{problem.kernel} has no configuration for {dict(problem.shape)} yet and none can be sought while a CUDA "
            "graph is captured",
            "run the model once before the capture",
        )
    shipped = next((key for key in _read(SHIPPED) if key.startswith(f"{problem.key()}, ")), None)
    stored = shipped and _stored(problem, SHIPPED, shipped)
    for candidates in ([stored] if stored else [], problem.candidates):
        try:
            config = tune(dataclasses.replace(problem, candidates=candidates))
        except Unsupported as failure:
            reason = failure.reason
        else:
            _keep(problem.versioned_key(), config)
            return config
    return reason


@torch.no_grad()
def tune(problem: Problem) -> Config:
    """The fastest of the candidates whose result is right; see `choose` for what it raises.

    A GPU warms up, and slows down, while it measures one candidate after the other: those that come close to the
    fastest are measured again, in turns.
    """
    try:
        reference, out = problem.reference().float(), problem.output()
    except torch.OutOfMemoryError as failure:
        raise Unsupported(
            f"{problem.kernel} cannot be checked for {dict(problem.shape)}: {first_line(failure)}"
        ) from None
    times: dict[Config, list[float]] = {}
    failures: list[str] = []

    def seconds(config: Config) -> float:
        with torch.cuda.device_of(out):
            return gpu_seconds(functools.partial(problem.run, config, out))

    for config in problem.candidates:
        try:
            problem.run(config, out.fill_(float("nan")))  # what it does not write, it cannot pass for right
            error = relative_error(out, reference)
            if not error <= TOLERANCE[problem.dtype]:
                failures.append(f"wrong result, relative error {error:.1e}")
                continue
            times[config] = [seconds(config)]
        except Exception as failure:  # a compiler or a driver may refuse in ways of its own
            failures.append(first_line(failure))
    if not times:
        reasons = "; ".join(list(dict.fromkeys(failures))[:3])
        raise Unsupported(
            f"no configuration of {problem.kernel} works for {dict(problem.shape)} on {_gpu(problem.device)}: {reasons}"
        )
    fastest = sorted(times, key=lambda config: times[config])[:FINALISTS]
    close = [config for config in fastest if times[config][0] <= CLOSE * times[fastest[0]][0]]
    for config in close * ROUNDS if len(close) > 1 else ():
        times[config].append(seconds(config))
    return min(close, key=lambda config: statistics.median(times[config]))


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference||; NaN where the result has one, so that no comparison lets it pass."""
    return float((result.float() - reference).norm() / reference.norm())


def gpu_seconds(run: Callable[[], Any]) -> float:
    """Median time that the GPU takes for a call, without the time to launch it."""
    run()
    torch.cuda.synchronize()
    before = time.perf_counter()
    run()
    launching = time.perf_counter() - before
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The GPU waits meanwhile, so that launching is not what is timed: 2e9 cycles a second are more than it has.
        torch.cuda._sleep(int(1e6 + 2 * launching * 2e9))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


@functools.cache
def source_hash(sources: tuple[str, ...]) -> str:
    """A digest of the code of a kernel's modules, comments and docstrings aside."""
    code = [code_of((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")) for name in sources]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def code_of(source: str) -> str:
    """A module's code without its comments, docstrings and layout; the same text with every version of Python, which
    `ast.unparse` and `ast.dump` do not give."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return _text(tree)


def _text(part: Any) -> str:
    if isinstance(part, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(part) if value is not None and value != []}
        return f"{type(part).__name__}({', '.join(f'{name}={_text(value)}' for name, value in fields.items())})"
    return f"[{', '.join(map(_text, part))}]" if isinstance(part, list) else repr(part)


def cache_file() -> Path:
    """Where found configurations are kept: in SAMOPT_CACHE_DIR, or `samopt` in the user's cache folder."""
    folder = os.environ.get("SAMOPT_CACHE_DIR")
    if folder is None:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "samopt")
    return Path(folder) / "kernels.json"


@functools.cache
def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"


def read(file: Path) -> dict[str, Any]:
    """The entries of a file, none where there is no file; OSError or ValueError where they cannot be read."""
    if not file.exists():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(entries, dict):
        raise ValueError("it holds no entries")
    return entries


def write(file: Path, entries: dict[str, Any]) -> None:
    """Replaces a file at once, so that an interruption leaves the old or the new one."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        os.replace(new, file)


def _read(file: Path) -> dict[str, Any]:
    """The entries of a file; one that cannot be read costs a warning, not the run."""
    try:
        return read(file)
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} is ignored: {first_line(error)}", stacklevel=1)
        return {}


def _stored(problem: Problem, file: Path, key: str) -> Config | None:
    """The candidate that a file has for a problem; whatever else it has there is ignored."""
    return _candidate(problem, str(file), _read(file), key)


def _candidate(problem: Problem, where: str, entries: dict[str, Any], key: str) -> Config | None:
    if key not in entries:
        return None
    for config in problem.candidates:
        if entries[key] == encode(config):
            return config
    warnings.warn(f"{where}: what it has for {key} is ignored, as it is no candidate", stacklevel=1)
    return None


def _keep(key: str, config: Config) -> None:
    """Adds an entry to the cache file; a folder that cannot be written costs a warning, not the run."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, {**_read(file), key: encode(config)})
    except OSError as error:
        warnings.warn(f"tuned configurations are not kept: {first_line(error)}", stacklevel=2)


def encode(config: Config) -> dict[str, Any]:
    """A configuration as JSON gives it back."""
    return {**dataclasses.asdict(config), "blocks": [list(block) for block in config.blocks]}
