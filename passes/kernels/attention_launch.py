"""How the attention kernels are launched: sizes, memory that they share, and their arguments."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samopt.passes.kernels.arithmetic import LOG2E, MASK, power_of_two
from samopt.passes.kernels.hopper_launch import launch_hopper
from samopt.passes.kernels.tuning import Config

LARGEST_WINDOW = 62  # rows and columns: with two marks, 128 slots
LEAST = 16  # tokens, or slots, that a product on the matrix units takes
TERMS_BLOCK_M, TERMS_WARPS = 64, 4  # of position_terms: the fastest of six on an H200, by up to a fifth


@dataclass(frozen=True)
class Geometry:
    """Sizes of a problem: the grid, the window in it, heads and their dimension."""

    H: int
    W: int
    rows: int
    columns: int
    heads: int
    D: int

    @property
    def is_global(self) -> bool:
        """Whether the window is the grid."""
        return (self.rows, self.columns) == (self.H, self.W)

    @property
    def halves(self) -> tuple[int, int]:
        """The head dimension as two powers of two, the second of which may be 0."""
        first = 1 << (self.D.bit_length() - 1)
        return first, self.D - first

    @property
    def windows(self) -> tuple[int, int]:
        """How many there are, one below the other and side by side, those that reach past the grid among them."""
        return -(-self.H // self.rows), -(-self.W // self.columns)

    def unfit(self) -> str | None:
        """Why the kernels cannot take it, or None if they can."""
        first, second = self.halves
        if first < 16 or first > 128 or second & (second - 1) or second in range(1, 16):
            return f"its head dimension {self.D} is not among 16, 32, 48, 64, 80, 96, 128 and the like"
        if not self.is_global and max(self.rows, self.columns) > LARGEST_WINDOW:
            return f"its windows of {self.rows}x{self.columns} tokens are larger than {LARGEST_WINDOW}x{LARGEST_WINDOW}"
        return None


@dataclass(frozen=True)
class Slots:
    """How the terms of a window's queries are laid out: `h` slots for rows, with two marks, then `w` for columns."""

    h: int
    w: int
    total: int

    @classmethod
    def of(cls, rows: int, columns: int) -> Slots:
        """The slots for windows of rows x columns."""
        h, w = power_of_two(rows + 2, LEAST), power_of_two(columns, LEAST)
        return cls(h, w, power_of_two(h + w))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the operator is called with, see `reference`, all contiguous."""

    qkv: Tensor
    padding: Tensor
    rel_pos_h: Tensor
    rel_pos_w: Tensor
    scale: float
    out_scale: Tensor | None


def empty_like(qkv: Tensor, out_scale: Tensor | None) -> Tensor:
    """Memory for the result: in the dtype of `qkv` [B, H, W, 3 * C], or in float8 where there is a scale for it."""
    dtype = qkv.dtype if out_scale is None else torch.float8_e4m3fn
    return qkv.new_empty((*qkv.shape[:3], qkv.shape[3] // 3), dtype=dtype)


def launch(
    config: Config,
    geometry: Geometry,
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Runs the kernels with a configuration; see `reference` for the arguments."""
    qkv, padding, rel_pos_h, rel_pos_w = (x.contiguous() for x in (qkv, padding, rel_pos_h, rel_pos_w))
    inputs = Inputs(qkv, padding, rel_pos_h, rel_pos_w, scale, out_scale)
    if out is None:
        out = empty_like(qkv, out_scale)
    if out.numel() == 0:
        return out
    run = _launch_global if geometry.is_global else _launch_windows
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU, wherever the tensors are
        run(config, geometry, inputs, out)
    return out


def _launch_global(config: Config, geometry: Geometry, inputs: Inputs, out: Tensor) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from samopt.passes.kernels.global_attention import global_attention

    qkv, (H, W), heads, (d1, d2) = inputs.qkv, (geometry.H, geometry.W), geometry.heads, geometry.halves
    B = len(qkv)
    N = H * W
    row_terms, column_terms = qkv.new_empty((B, heads, H, N)), qkv.new_empty((B, heads, N, W))
    _launch_terms(geometry, inputs, row_terms, column_terms, LOG2E)
    options = config.launch_options()
    options["BLOCK_N"] = min(options["BLOCK_N"], power_of_two(W, LEAST))
    # A step that reaches past the last row gives what it finds there weight 0, which does not undo NaN: so each image
    # is then launched on its own, with zeros past its end and not the next image.
    images = B if W % options["BLOCK_N"] == 0 else 1
    for x, *terms, to in zip(*(each.split(images) for each in (qkv, row_terms, column_terms, out)), strict=True):
        tokens = x.view(len(x) * N, -1)
        keys = [TensorDescriptor.from_tensor(tokens, [options["BLOCK_N"], d or d1]) for d in (d1, d2)]
        global_attention[(-(-N // options["BLOCK_M"]) * heads * len(x),)](
            x, *keys, *terms, to, inputs.out_scale, H, W, heads, inputs.scale, d1, d2,
            LAZY=qkv.dtype == torch.bfloat16, CHUNKS=-(-W // options["BLOCK_N"]), STAGES=config.num_stages, **options,
        )  # fmt: skip


def _launch_windows(config: Config, geometry: Geometry, inputs: Inputs, out: Tensor) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from samopt.passes.kernels.window_attention import window_attention

    qkv, (H, W), heads, (d1, d2) = inputs.qkv, (geometry.H, geometry.W), geometry.heads, geometry.halves
    B = len(qkv)
    rows, columns = geometry.rows, geometry.columns
    slots = Slots.of(rows, columns)
    below, beside = H % rows, W % columns
    if (below, beside) == (0, 0):  # no key of the padding counts: it must not overflow float16 either
        inputs = replace(inputs, padding=torch.zeros_like(inputs.padding))
    one = unit_of(inputs.scale)
    terms = qkv.new_empty((B, H, W, heads, slots.total))
    if slots.h + slots.w < slots.total:
        terms[..., slots.h + slots.w :] = 0
    to = terms.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, heads, H * W, slots]
    _launch_terms(geometry, inputs, to, to[..., slots.h :], 1 / (inputs.scale * one), 1 / one)
    options = config.launch_options()
    box_h, box_w = power_of_two(rows), power_of_two(columns)
    for rows_of in {"K_ROWS", "Q_ROWS"} & options.keys():
        options[rows_of] = max(min(options[rows_of], box_h), LEAST // box_w, 1)
    box_h = max(box_h, options.get("K_ROWS", 0))
    last = below or rows, beside or columns
    one_hot = marks_of((rows, columns), last, (box_h, box_w), one, qkv.dtype, qkv.device)
    if "CONSUMERS" in options:
        launch_hopper(config, geometry, inputs, terms, one_hot, out)
        return
    keys = [TensorDescriptor.from_tensor(qkv, [1, options["K_ROWS"], box_w, d or d1]) for d in (d1, d2)]
    down, across = geometry.windows
    windows = down * across
    window_attention[(B * windows * heads * -(-rows // options["Q_ROWS"]),)](
        qkv, *keys, inputs.padding, terms, one_hot, out, inputs.out_scale, H, W, across, windows, heads, inputs.scale,
        rows, columns, box_h, box_w, slots.total, d1, d2,
        LAZY=qkv.dtype == torch.bfloat16, STAGES=config.num_stages, **options,
    )  # fmt: skip


def unit_of(scale: float) -> float:
    """A power of two, no less than 1 / scale and less than twice that, kept from 1 to what float16 has.

    Terms are divided by scale and by it, so that they are no larger than the positions themselves.
    """
    return 2.0 ** min(max(1 - math.frexp(scale)[1], 0), 15)


def _launch_terms(
    geometry: Geometry,
    inputs: Inputs,
    out_h: Tensor,
    out_w: Tensor,
    factor: float,
    padding_factor: float | None = None,
) -> None:
    """Fills `out_h` and `out_w`: of windows, which have a factor for q.k_padding, [B, heads, tokens, slots]; of the
    grid [B, heads, rows, tokens], and [B, heads, tokens, columns]."""
    from samopt.passes.kernels.position_terms import position_terms

    H, W, rows, columns = geometry.H, geometry.W, geometry.rows, geometry.columns
    marks = padding_factor is not None
    strides_h = out_h.stride() if marks else out_h.transpose(2, 3).stride()
    slots = Slots.of(rows, columns) if marks else Slots(power_of_two(rows, LEAST), power_of_two(columns, LEAST), 0)
    block_m = TERMS_BLOCK_M
    programs = len(inputs.qkv) * geometry.heads * (H * -(-W // block_m) + W * -(-H // block_m))
    position_terms[(programs,)](
        inputs.qkv, inputs.padding, inputs.rel_pos_h, inputs.rel_pos_w, out_h, out_w, *strides_h, *out_w.stride(),
        H, W, rows, columns, geometry.heads, factor, padding_factor or 0.0, *geometry.halves, marks, slots.h, slots.w,
        block_m, num_warps=TERMS_WARPS,
    )  # fmt: skip


@functools.cache
def marks_of(
    window: tuple[int, int],
    last: tuple[int, int],
    box: tuple[int, int],
    one: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The one-hot rows of `window_attention`'s keys: [2, 2, box rows * box columns, slots].

    Of key (i, j): `one` in the slot of row i and in that of column j; in the first mark where it is a key outside the
    grid, for windows at the bottom or right border. What is no key has only the second mark.

    Args:
        window: rows and columns of a window.
        last: those inside the grid, of the windows at its bottom and right borders.
        box: rows and columns of the box of keys around a window.
        one: what stands for 1.
        dtype: of the result.
        device: of the result.
    """
    rows, columns = window
    slots = Slots.of(rows, columns)
    i, j = torch.meshgrid(torch.arange(box[0]), torch.arange(box[1]), indexing="ij")
    key = (i < rows) & (j < columns)
    hot = torch.zeros(2, 2, *box, slots.total)
    hot.scatter_(4, i.clamp(max=rows - 1).expand(2, 2, -1, -1)[..., None], one)
    hot.scatter_(4, (slots.h + j.clamp(max=columns - 1)).expand(2, 2, -1, -1)[..., None], one)
    below, beside = i >= last[0], j >= last[1]
    for bottom in (0, 1):
        for right in (0, 1):
            hot[bottom, right, :, :, rows] = (key & (below & bool(bottom) | beside & bool(right))) * one
    hot[..., ~key, :] = 0
    hot[..., ~key, rows + 1] = -MASK
    return hot.flatten(2, 3).to(device, dtype)
