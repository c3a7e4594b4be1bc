"""Chooses how training computes attention on a device: the fastest way that is right there."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .forward import Plan, attend
from .model import PATCH

HEADS, HEAD_DIM, WINDOW = 3, 64, 14

CANDIDATES = {
    "folded, flash": Plan(fold=True, pad=True, backend=SDPBackend.FLASH_ATTENTION),
    "folded, cudnn": Plan(fold=True, pad=False, backend=SDPBackend.CUDNN_ATTENTION),
    "folded, efficient": Plan(fold=True, pad=False, backend=SDPBackend.EFFICIENT_ATTENTION),
    "bias, efficient": Plan(fold=False, backend=SDPBackend.EFFICIENT_ATTENTION),
    "bias, cudnn": Plan(fold=False, backend=SDPBackend.CUDNN_ATTENTION),
}
AUTO = "auto"
# bf16 keeps 8 bits; a wrong kernel errs by far more.
TOLERANCE = 0.04
# A later candidate must be that much faster than an earlier one, which is more widely used.
MARGIN = 0.85


def _inputs(batch: int, grid: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dims = [HEAD_DIM] * 3 + [grid] * 2
    shapes = [(batch, HEADS, grid * grid, dim) for dim in dims]
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def _outputs(inputs: list[Tensor], plan: Plan) -> list[Tensor]:
    """The result of attention and its gradients."""
    q, k, v, rel_h, rel_w = inputs
    out = attend(q, k, v, rel_h, rel_w, plan)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def error_of(plan: Plan, grid: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """The largest relative error of result and gradients against float32 with the positions as a bias tensor."""
    inputs = _inputs(1, grid, device, dtype)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    pairs = zip(_outputs(inputs, plan), _outputs(exact, Plan(fold=False, backend=SDPBackend.MATH)), strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def _milliseconds(plan: Plan, batch: int, grid: int, device: torch.device) -> float:
    inputs = _inputs(batch, grid, device, torch.bfloat16)
    for _ in range(2):
        _outputs(inputs, plan)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        _outputs(inputs, plan)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / 3 * 1e3


def choose_plan(batch: int, grid: int, device: torch.device, wanted: str = AUTO) -> tuple[Plan, str]:
    """The fastest right plan for ``batch`` grids of ``grid`` x ``grid`` tokens, and a line that says how it was chosen.

    Off CUDA nothing is measured: positions are folded, and the backend is torch's choice. ``wanted`` may name one of
    ``CANDIDATES`` instead, which is then taken on CUDA unseen.
    """
    if device.type != "cuda":
        return Plan(), "folded, torch's choice"
    if wanted != AUTO:
        return CANDIDATES[wanted], f"grid {grid}: {wanted}"
    timings: dict[str, float] = {}
    notes = []
    for name, plan in CANDIDATES.items():
        try:
            error = error_of(plan, grid, device)
            if error > TOLERANCE:
                notes.append(f"{name} wrong by {error:.3f}")
                continue
            timings[name] = _milliseconds(plan, batch, grid, device)
        except RuntimeError:
            # The backend does not take these shapes on this device.
            notes.append(f"{name} refused")
    if not timings:
        return Plan(), f"grid {grid}: torch's choice ({', '.join(notes)})"
    best, *others = timings
    for name in others:
        if timings[name] < MARGIN * timings[best]:
            best = name
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in timings.items())
    return CANDIDATES[best], f"grid {grid} x {batch}: {best} ({'; '.join([times, *notes])})"


def choose_plans(size: int, batch: int, device: torch.device, wanted: str = AUTO) -> tuple[Plan, Plan, str]:
    """Plans for the window and the global blocks of images of a size, and the lines that say why."""
    grid = size // PATCH
    windows = batch * (-(-grid // WINDOW)) ** 2
    window_plan, window_note = choose_plan(windows, WINDOW, device, wanted)
    global_plan, global_note = choose_plan(batch, grid, device, wanted)
    return window_plan, global_plan, f"{window_note}; {global_note}"
