"""How the kernel for windows on Hopper GPUs is launched, where it fits, and with what configurations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samopt.passes.kernels.devices import multiprocessors
from samopt.passes.kernels.tuning import Config

if TYPE_CHECKING:
    from samopt.passes.kernels.attention_launch import Geometry, Inputs

# PROGRAMS are those of a multiprocessor at a time. A group of four warps that computes needs 160 registers a thread, or
# spills, so that three of them fit, or two that have more. QUERIES is a multiple of CONSUMERS: so each buffer is always
# read by the same group, which cannot mistake one use of it for the one before the last.
HOPPER_CANDIDATES = (
    Config.of(CONSUMERS=1, PAIRS=1, QUERIES=2, PROGRAMS=2, num_warps=4, num_stages=1, maxnreg=128),
    Config.of(CONSUMERS=2, PAIRS=2, QUERIES=4, PROGRAMS=1, num_warps=4, num_stages=1, maxnreg=168),
    Config.of(CONSUMERS=3, PAIRS=2, QUERIES=3, PROGRAMS=1, num_warps=4, num_stages=1, maxnreg=128),
    Config.of(CONSUMERS=3, PAIRS=2, QUERIES=6, PROGRAMS=1, num_warps=4, num_stages=1, maxnreg=128),
)
ROWS, COLUMNS = 4, 16  # of a box of tokens
LAST_ROWS = 2  # of the last box, where one or two are left for it
LOADER_REGISTERS = 24


def hopper_candidates(geometry: Geometry, device: torch.device) -> tuple[Config, ...]:
    """The configurations to try for windows on a GPU, none where the kernel does not fit.

    A window must be 9 to 16 tokens wide and 3 to 16 high, the first part of the head dimension at most 64, and the GPU
    of compute capability 9.0, whose instructions no later one has.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return ()
    fits = geometry.columns in range(9, 17) and geometry.rows in range(3, 17) and geometry.halves[0] <= 64
    return HOPPER_CANDIDATES if fits else ()


def launch_hopper(
    config: Config, geometry: Geometry, inputs: Inputs, terms: Tensor, one_hot: Tensor, out: Tensor
) -> None:
    """Launches `hopper_window_attention` with one of the candidates.

    Args:
        config: the candidate.
        geometry: one that fits.
        inputs: of the operator.
        terms: of `position_terms` [B, H, W, heads, slots].
        one_hot: of `marks_of`, for boxes of 16 columns.
        out: the result [B, H, W, heads * D].
    """
    from samopt.passes.kernels.hopper_window_attention import hopper_window_attention

    options = config.launch_options()
    programs = options.pop("PROGRAMS") * multiprocessors(inputs.qkv.device)
    d1, d2 = geometry.halves
    keys = [_boxes(inputs.qkv, rows, d or d1) for rows in (ROWS, LAST_ROWS) for d in (d1, d2)]
    down, across = geometry.windows
    windows = down * across
    pairs = len(inputs.qkv) * windows * geometry.heads
    hopper_window_attention[(min(pairs, programs),)](
        *keys, _boxes(terms.flatten(3), ROWS, terms.shape[4]), inputs.padding, one_hot, out, inputs.out_scale,
        geometry.H, geometry.W, geometry.heads, across, windows, pairs, (geometry.rows + 1) // ROWS, inputs.scale,
        geometry.rows, geometry.columns, d1, d2, terms.shape[4], LAZY=inputs.qkv.dtype == torch.bfloat16,
        REGISTERS=registers(options["CONSUMERS"], options["maxnreg"]), **options,
    )  # fmt: skip


def registers(consumers: int, on_average: int) -> int:
    """The registers of a thread that computes, when `on_average` is what the GPU gives each of a program's threads.

    There are as many groups of four warps, and one more, of which a single warp loads; each has a multiple of 8.
    """
    return min(((consumers + 1) * on_average - LOADER_REGISTERS) // consumers // 8 * 8, 256)


def _boxes(tokens: Tensor, rows: int, width: int) -> Any:
    """A descriptor of [B, H, W, channels] in boxes of [1, rows, COLUMNS, width]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tokens, [1, rows, COLUMNS, width], _layout(rows, width, tokens.dtype))


@functools.cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    half = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, rows, COLUMNS, width], half)
