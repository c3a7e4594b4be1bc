"""SAM's encoder attention, windowed or global, as one operator: `torch.ops.samopt.attention`.

It takes queries, keys and values as the projection leaves them, on the token grid, and returns the grid: windows are
index arithmetic in the kernels. On a GPU it runs Triton kernels, on a CPU plain PyTorch; fake tensors give shapes.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels.tuning import Config, Problem, choose

LARGEST_WINDOW = 62  # rows and columns: with two marks, 128 slots
LOG2E = 1.4426950408889634
TERMS_BLOCK_M, TERMS_WARPS = 64, 4  # of position_terms: the fastest of six on an H200, by up to a fifth


def reference(
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    heads: int,
    rows: int,
    columns: int,
    scale: float,
) -> Tensor:
    """Attention within windows of a token grid, with decomposed relative positions (MViTv2, arXiv:2112.01526, eq. 4).

    In plain PyTorch: what the operator computes on a CPU, and what its kernels are checked against.

    Windows that reach past the grid's bottom or right see the padding there: `padding` is what a token outside the
    grid has for q, k and v.

    Args:
        qkv: [B, H, W, 3 * heads * D], contiguous.
        padding: [3 * heads * D].
        rel_pos_h: one vector per distance of rows, [2 * rows - 1, D].
        rel_pos_w: likewise of columns, [2 * columns - 1, D].
        heads: number of heads.
        rows: height of a window in tokens; of the grid for global attention.
        columns: its width.
        scale: of q.k; the positions are added unscaled.

    Returns:
        [B, H, W, heads * D], contiguous.
    """
    B, H, W, _ = qkv.shape
    windows = partition(qkv, padding, rows, columns).unflatten(-1, (3, heads, -1))
    q, k, v = windows.permute(3, 0, 4, 1, 2, 5).unbind(0)  # each [windows, heads, rows, columns, D]
    term_h = torch.einsum("bnhwc,hkc->bnhwk", q, skewed(rel_pos_h, rows))
    term_w = torch.einsum("bnhwc,wkc->bnhwk", q, skewed(rel_pos_w, columns))
    bias = (term_h[..., :, None] + term_w[..., None, :]).flatten(4, 5).flatten(2, 3)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)  # [windows, heads, rows * columns, D]
    out = out.transpose(1, 2).reshape(-1, rows, columns, heads * q.shape[-1])
    return unpartition(out, B, H, W).contiguous()


attention = torch.library.custom_op("samopt::attention", reference, mutates_args=(), device_types="cpu")


@attention.register_fake
def _fake(
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    heads: int,
    rows: int,
    columns: int,
    scale: float,
) -> Tensor:
    return qkv.new_empty((*qkv.shape[:3], qkv.shape[3] // 3))


@attention.register_kernel("cuda")
def _cuda(
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    heads: int,
    rows: int,
    columns: int,
    scale: float,
) -> Tensor:
    _, H, W, channels = qkv.shape
    geometry = Geometry(H, W, rows, columns, heads, channels // 3 // heads)
    try:
        config = choose(problem(geometry, qkv.dtype, qkv.device))
    except Unsupported as failure:  # a model moved to another GPU, or an image of another size than the pass saw
        warnings.warn(f"attention runs without its kernels, slowly: {failure}", stacklevel=1)
        return reference(qkv, padding, rel_pos_h, rel_pos_w, heads, rows, columns, scale)
    return launch(config, geometry, qkv, padding, rel_pos_h, rel_pos_w, scale)


def partition(x: Tensor, padding: Tensor, rows: int, columns: int) -> Tensor:
    """Windows [B * windows, rows, columns, C] of a grid [B, H, W, C], filled up with `padding` [C]."""
    B, H, W, C = x.shape
    if (H % rows, W % columns) != (0, 0):
        full = padding.expand(B, H + -H % rows, W + -W % columns, C).clone()
        full[:, :H, :W] = x
        x = full
    windows = x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))  # [B, down, rows, across, columns, C]
    return windows.transpose(2, 3).flatten(0, 2)


def unpartition(windows: Tensor, B: int, H: int, W: int) -> Tensor:
    """The grid [B, H, W, C] of windows [B * windows, rows, columns, C], without what they were filled up with."""
    rows, columns = windows.shape[1:3]
    down, across = -(-H // rows), -(-W // columns)
    grid = windows.unflatten(0, (B, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return grid[:, :H, :W]


def skewed(rel_pos: Tensor, size: int) -> Tensor:
    """R[h, i] = rel_pos[h - i + size - 1]: [size, size, D]."""
    tokens = torch.arange(size, device=rel_pos.device)
    return rel_pos[tokens[:, None] - tokens[None, :] + (size - 1)]


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
        h, w = _power(rows + 2), _power(columns)
        return cls(h, w, _power(h + w))


def _power(size: int) -> int:
    """The smallest power of two that is at least `size` and 16, the least a product on matrix units takes."""
    return max(16, 1 << (size - 1).bit_length())


def launch(
    config: Config,
    geometry: Geometry,
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Runs the kernels with a configuration; see `reference` for the arguments."""
    qkv, padding, rel_pos_h, rel_pos_w = (x.contiguous() for x in (qkv, padding, rel_pos_h, rel_pos_w))
    if out is None:
        out = qkv.new_empty((*qkv.shape[:3], qkv.shape[3] // 3))
    run = _launch_global if geometry.is_global else _launch_windows
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU, wherever the tensors are
        run(config, geometry, qkv, padding, rel_pos_h, rel_pos_w, scale, out)
    return out


def _launch_global(
    config: Config,
    geometry: Geometry,
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from samopt.passes.kernels.global_attention import global_attention

    B, (H, W), heads, (d1, d2) = qkv.shape[0], (geometry.H, geometry.W), geometry.heads, geometry.halves
    N = H * W
    row_terms, column_terms = qkv.new_empty((B, heads, H, N)), qkv.new_empty((B, heads, N, W))
    _launch_terms(geometry, qkv, padding, rel_pos_h, rel_pos_w, row_terms, column_terms, LOG2E, marks=False)
    options = config.launch_options()
    options["BLOCK_N"] = min(options["BLOCK_N"], _power(W))
    # A step that reaches past the last row gives what it finds there weight 0, which does not undo NaN: so each image
    # is then launched on its own, with zeros past its end and not the next image.
    images = B if W % options["BLOCK_N"] == 0 else 1
    for x, *terms, to in zip(*(each.split(images) for each in (qkv, row_terms, column_terms, out)), strict=True):
        tokens = x.view(len(x) * N, -1)
        keys = [TensorDescriptor.from_tensor(tokens, [options["BLOCK_N"], d or d1]) for d in (d1, d2)]
        global_attention[(-(-N // options["BLOCK_M"]) * heads * len(x),)](
            x, *keys, *terms, to, H, W, heads, scale, d1, d2,
            LAZY=qkv.dtype == torch.bfloat16, CHUNKS=-(-W // options["BLOCK_N"]), STAGES=config.num_stages, **options,
        )  # fmt: skip


def _launch_windows(
    config: Config,
    geometry: Geometry,
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from samopt.passes.kernels.window_attention import window_attention

    B, (H, W), heads, (d1, d2) = qkv.shape[0], (geometry.H, geometry.W), geometry.heads, geometry.halves
    rows, columns = geometry.rows, geometry.columns
    slots = Slots.of(rows, columns)
    terms = qkv.new_empty((B, H, W, heads, slots.total))
    if slots.h + slots.w < slots.total:
        terms[..., slots.h + slots.w :] = 0
    to = terms.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, heads, H * W, slots]
    _launch_terms(geometry, qkv, padding, rel_pos_h, rel_pos_w, to, to[..., slots.h :], 1 / scale, marks=True)
    options = config.launch_options()
    box_h, box_w = 1 << (rows - 1).bit_length(), _box_width(columns)
    options["K_ROWS"], options["Q_ROWS"] = (
        max(least // box_w, min(options[name], box_h), 1) for name, least in (("K_ROWS", 16), ("Q_ROWS", 16))
    )
    box_h = max(box_h, options["K_ROWS"])
    keys = [TensorDescriptor.from_tensor(qkv, [1, options["K_ROWS"], box_w, d or d1]) for d in (d1, d2)]
    one_hot = marks_of(geometry, box_h, box_w, qkv.dtype, qkv.device)
    across = -(-W // columns)
    windows = -(-H // rows) * across
    window_attention[(B * windows * heads * -(-rows // options["Q_ROWS"]),)](
        qkv, *keys, padding, terms, one_hot, out, H, W, across, windows, heads, scale, rows, columns,
        box_h, box_w, slots.total, d1, d2, LAZY=qkv.dtype == torch.bfloat16, STAGES=config.num_stages, **options,
    )  # fmt: skip


def _box_width(columns: int) -> int:
    return 1 << (columns - 1).bit_length()


def _launch_terms(
    geometry: Geometry,
    qkv: Tensor,
    padding: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    out_h: Tensor,
    out_w: Tensor,
    factor: float,
    marks: bool,
) -> None:
    """Fills `out_h` and `out_w`: of windows [B, heads, tokens, slots]; of the grid [B, heads, rows, tokens], and
    [B, heads, tokens, columns]."""
    from samopt.passes.kernels.position_terms import position_terms

    H, W, rows, columns = geometry.H, geometry.W, geometry.rows, geometry.columns
    strides_h = out_h.stride() if marks else out_h.transpose(2, 3).stride()
    slots = Slots.of(rows, columns) if marks else Slots(_power(rows), _power(columns), 0)
    block_m = TERMS_BLOCK_M
    programs = qkv.shape[0] * geometry.heads * (H * -(-W // block_m) + W * -(-H // block_m))
    position_terms[(programs,)](
        qkv, padding, rel_pos_h, rel_pos_w, out_h, out_w, *strides_h, *out_w.stride(), H, W, rows, columns,
        geometry.heads, factor, *geometry.halves, marks, slots.h, slots.w, block_m, num_warps=TERMS_WARPS,
    )  # fmt: skip


@functools.cache
def marks_of(geometry: Geometry, box_h: int, box_w: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one-hot rows of `window_attention`'s keys: [2, 2, box_h * box_w, slots].

    Of key (i, j): 1 in the slot of row i and in that of column j; in the first mark where it is a key outside the
    grid, for windows at the bottom or right border. What is no key has only the second mark.
    """
    rows, columns = geometry.rows, geometry.columns
    slots = Slots.of(rows, columns)
    i, j = torch.meshgrid(torch.arange(box_h), torch.arange(box_w), indexing="ij")
    key = (i < rows) & (j < columns)
    hot = torch.zeros(2, 2, box_h, box_w, slots.total)
    hot.scatter_(4, i.clamp(max=rows - 1).expand(2, 2, -1, -1)[..., None], 1.0)
    hot.scatter_(4, (slots.h + j.clamp(max=columns - 1)).expand(2, 2, -1, -1)[..., None], 1.0)
    below, beside = i >= (geometry.H % rows or rows), j >= (geometry.W % columns or columns)
    for bottom in (0, 1):
        for right in (0, 1):
            hot[bottom, right, :, :, rows] = (key & (below & bool(bottom) | beside & bool(right))).float()
    hot[..., ~key, :] = 0
    hot[..., ~key, rows + 1] = 30000.0
    return hot.flatten(2, 3).to(device, dtype)


def problem(geometry: Geometry, dtype: torch.dtype, device: torch.device, batch: int = 4) -> Problem:
    """What `choose` needs to find a configuration for this geometry: random inputs, made when asked for."""
    scale = geometry.D**-0.5

    @functools.cache
    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        channels = 3 * geometry.heads * geometry.D

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

        return (
            normal(batch, geometry.H, geometry.W, channels),
            normal(channels),
            normal(2 * geometry.rows - 1, geometry.D, std=0.1),
            normal(2 * geometry.columns - 1, geometry.D, std=0.1),
        )

    shape = (batch, geometry.H, geometry.W, geometry.heads * geometry.D)
    return Problem(
        kernel="global_attention" if geometry.is_global else "window_attention",
        shape=tuple(vars(geometry).items()),
        dtype=dtype,
        device=device,
        candidates=GLOBAL_CANDIDATES if geometry.is_global else WINDOW_CANDIDATES,
        output=lambda: torch.empty(shape, dtype=dtype, device=device),
        run=lambda config, out: launch(config, geometry, *inputs(), scale, out),
        reference=lambda: by_head(geometry, *inputs(), scale),
    )


def by_head(
    geometry: Geometry, qkv: Tensor, padding: Tensor, rel_pos_h: Tensor, rel_pos_w: Tensor, scale: float
) -> Tensor:
    """`reference` in float32, image by image and head by head: the logits of one head alone take 64 MiB for 64x64
    tokens."""
    split = qkv.float().unflatten(-1, (3, geometry.heads, -1))
    pads = padding.float().unflatten(-1, (3, geometry.heads, -1))
    images = []
    for image in split.split(1):
        heads = [
            reference(
                image[..., head, :].flatten(3), pads[:, head].flatten(), rel_pos_h.float(), rel_pos_w.float(),
                1, geometry.rows, geometry.columns, scale,
            )
            for head in range(geometry.heads)
        ]  # fmt: skip
        images.append(torch.cat(heads, dim=-1))
    return torch.cat(images)


# A pipeline of at least two stages: with one, Triton 3.6 reads windows of two-part heads from outside shared memory.
GLOBAL_CANDIDATES = (
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3, maxnreg=168),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, maxnreg=128),
    Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=2),
    Config.of(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2),
)
WINDOW_CANDIDATES = (
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=2, maxnreg=128),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=4, K_ROWS=4, num_warps=4, num_stages=3, maxnreg=168),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=8, num_stages=2, maxnreg=128),
    Config.of(Q_ROWS=8, K_ROWS=4, num_warps=8, num_stages=3, maxnreg=128),
    Config.of(Q_ROWS=4, K_ROWS=8, num_warps=4, num_stages=2, maxnreg=168),
    Config.of(Q_ROWS=16, K_ROWS=4, num_warps=8, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=2, num_warps=4, num_stages=2),
    Config.of(Q_ROWS=4, K_ROWS=2, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=8, K_ROWS=2, num_warps=4, num_stages=3),
    Config.of(Q_ROWS=8, K_ROWS=2, num_warps=8, num_stages=3),
)
