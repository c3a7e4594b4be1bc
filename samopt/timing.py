"""Time and memory of an image encoder, and the two figures that tell how good a time is.

Those are the arithmetic of one image, and what the chip does at best in one large matrix product.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from samopt.memory import peak_bytes
from samopt.precision import tf32_convolutions

Encoder = Callable[[Tensor], Tensor]  # pixels [B, 3, H, W] to an embedding [B, C, h, w]

REPEATS, SECONDS = 20, 3.0  # timed calls: this many, or as many as fit, but at least 3
GPU_PRODUCT, CPU_PRODUCT = 8192, 1024  # rows and columns of the product that measures a chip


@dataclass(frozen=True)
class Timed:
    """What was measured of one call.

    Attributes:
        output: the first call's, on the CPU.
        seconds: median of the timed calls.
        spread: (90th - 10th percentile) / median of them.
        first_seconds: time of the first call, compilation included.
        peak_gib: peak GPU memory of the calls after the first, weights and inputs included, and what CUDA graphs keep
            for themselves; 0 on a CPU.
    """

    output: Tensor
    seconds: float
    spread: float
    first_seconds: float
    peak_gib: float


@torch.no_grad()
def timed(encoder: Encoder, pixels: Tensor) -> Timed:
    """Calls `encoder` until its time is known; see `repeated`."""
    device = pixels.device
    cuda = device.type == "cuda"
    with on(device):
        start = time.perf_counter()
        output = encoder(pixels)
        if cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        output = output.cpu()  # off the GPU before memory is counted, and before a CUDA graph writes over it
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, spread = repeated(lambda: encoder(pixels), device)
        peak = peak_bytes(device) / 2**30 if cuda else 0.0
    return Timed(output, seconds, spread, first, peak)


@torch.no_grad()
def repeated(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """The median time of a call in seconds, after two to warm up, and (90th - 10th percentile) / median.

    Every call is waited for before the next one starts: at batch 1 the time is a latency, with the gaps in which the
    GPU waits for its next kernel, or for the host.
    """
    timer = _cuda_seconds if device.type == "cuda" else cpu_seconds
    seconds: list[float] = []
    with on(device):
        for _ in range(2):  # a CUDA graph is recorded in the first of them
            timer(call)
        while len(seconds) < REPEATS and (len(seconds) < 3 or sum(seconds) < SECONDS):
            seconds.append(timer(call))
    deciles = statistics.quantiles(seconds, n=10)
    median = statistics.median(seconds)
    return median, (deciles[-1] - deciles[0]) / median


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: events are recorded on that, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Time of a call that is done when it returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 in float32 matrix products and convolutions. PyTorch's default is one of each."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        with tf32_convolutions(allowed):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def encoder_tflop(encoder: Any) -> float:
    """The arithmetic of one image in an unmodified image encoder, in 10^12 operations: two for a multiply-add.

    Counted are matrix products and convolutions, those on padded windows too.
    """
    meta = copy.deepcopy(encoder).to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        meta(torch.empty(1, 3, encoder.img_size, encoder.img_size, device="meta"))
    return counter.get_total_flops() / 1e12


def matmul_tflops(device: torch.device) -> float:
    """What the chip does in one large square product, in 10^12 operations a second: the yardstick of a row's share.

    bfloat16 on a GPU, float32 on a CPU, many of which have no bfloat16. The data are random: a GPU that multiplies
    zeros stays cool, and is faster than it ever is at work.
    """
    cuda = device.type == "cuda"
    size, dtype = (GPU_PRODUCT, torch.bfloat16) if cuda else (CPU_PRODUCT, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(left.matmul, right).seconds / 1e12
