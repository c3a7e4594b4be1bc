"""Whether a pass makes the image encoder's blocks faster on this device: what `keep = "if-faster"` asks.

Blocks alike (windowed ones, global ones) take equally long, so one of each kind is timed, on random tokens and compiled
as the recipe's `Compile` would compile it, without and with the pass in turn. That costs seconds, where the whole
encoder would have to be compiled and run twice for each pass.
"""

from __future__ import annotations

import functools
import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samopt.errors import Unsupported
from samopt.rebind import clone
from samopt.structure import encoders, token_grid

if TYPE_CHECKING:
    from samopt.passes import Compile

FASTER = 0.99  # of the time before: medians of calls in turn still differ by a part of a percent from run to run
ROUNDS, SECONDS = 9, 3.0  # times that each block is timed: this many, or as many as fit, but at least 3


@dataclass(frozen=True)
class BlockSpeed:
    """What the blocks of the image encoders take, without a pass and with it.

    Attributes:
        before: seconds an image of all blocks without it.
        after: the same with it.
        batch_size: images per call.
    """

    before: float
    after: float
    batch_size: int

    @property
    def faster(self) -> bool:
        """Whether the pass gains more than the noise of the measurement."""
        return self.after <= FASTER * self.before

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {"before_seconds": self.before, "after_seconds": self.after, "batch_size": self.batch_size}

    def __str__(self) -> str:
        milliseconds = f"{1e3 * self.before:.3g} -> {1e3 * self.after:.3g} ms an image"
        return f"encoder blocks: {milliseconds} at batch {self.batch_size}"


@dataclass(frozen=True)
class Kind:
    """What blocks have in common that take equally long.

    Attributes:
        tokens: rows, columns and channels of their input.
        dtype: of their input.
        device: where they are.
        parts: the modules inside, by what their speed may depend on.
        compiling: how they are compiled; None where they run eagerly.
    """

    tokens: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    parts: tuple[Any, ...]
    compiling: Compile | None


@dataclass(frozen=True)
class Blocks:
    """The encoder blocks of a model as they are at one time, whatever is done to the model later.

    Attributes:
        counts: how many there are of each kind.
        modules: a clone of one of each kind; it shares its weights with the model.
    """

    counts: dict[Kind, int]
    modules: dict[Kind, nn.Module]


def blocks_of(model: nn.Module, compiling: Compile | None) -> Blocks:
    """The blocks of the image encoders in `model`, whether or not their code is SAM's.

    An encoder that does not say how many tokens its blocks take, and of what width, has none here.

    Args:
        model: a Sam, or a part of one.
        compiling: how the blocks will be compiled; None, or where it cannot run here, they are taken to run eagerly.
    """
    if compiling is not None and compiling.scope == "none":
        compiling = None
    if compiling is not None:
        try:
            compiling.requires(model)
        except Unsupported:
            compiling = None
    counts: dict[Kind, int] = {}
    modules: dict[Kind, nn.Module] = {}
    for tokens, dtype, block in _blocks(model):
        kind = Kind(tokens, dtype, next(block.parameters()).device, _parts(block), compiling)
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in modules:
            modules[kind] = clone(block)
    return Blocks(counts, modules)


def _blocks(model: nn.Module) -> Iterator[tuple[tuple[int, int, int], torch.dtype, nn.Module]]:
    for _, encoder in encoders(model):
        grid, width = token_grid(encoder), _width(encoder)
        if grid is None or width is None:
            continue
        for block in encoder.blocks.children():
            # A block without weights of its own takes what the encoder computes in.
            dtypes = [p.dtype for p in (*block.parameters(), *encoder.parameters()) if p.is_floating_point()]
            yield (*grid, width), dtypes[0], block


def _width(encoder: Any) -> int | None:
    if getattr(encoder, "pos_embed", None) is not None:
        return int(encoder.pos_embed.shape[-1])
    weight = getattr(getattr(encoder.patch_embed, "proj", None), "weight", None)
    return None if weight is None else len(weight)


def _parts(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(module), _tensors(module), _settings(module)) for name, module in block.named_modules())


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    held = {**module._parameters, **module._buffers}
    return tuple((name, type(t), t.shape, t.stride(), t.dtype) for name, t in held.items() if t is not None)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """The attributes that choose code or sizes. Not floats, such as the rate of a drop path, other in every block."""
    found = {name: _setting(value) for name, value in vars(module).items()}
    return tuple(sorted((name, value) for name, value in found.items() if value is not None))


def _setting(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return repr([_setting(part) for part in (value.func, *value.args)])
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {hash(value.__code__)}"
    if isinstance(value, (bool, int, str)) or (type(value) is tuple and all(isinstance(v, (int, str)) for v in value)):
        return repr(value)
    return None


@torch.no_grad()
def block_speed(before: Blocks, after: Blocks, batch_size: int) -> BlockSpeed | None:
    """Times the blocks without a pass and with it; None where the pass left them as they were, or there are none.

    Args:
        before: the blocks before the pass.
        after: the same model's with it.
        batch_size: images per call.

    Raises:
        Exception: whatever a block raises, or its compilation does; on a GPU it may run out of memory.
    """
    if before.counts == after.counts:
        return None
    modules = {**after.modules, **before.modules}
    tokens: dict[Any, Tensor] = {}
    calls = []
    for kind, module in modules.items():
        key = kind.tokens, kind.dtype, kind.device
        if key not in tokens:
            generator = torch.Generator(kind.device).manual_seed(0)
            tokens[key] = torch.randn(
                batch_size, *kind.tokens, generator=generator, device=kind.device, dtype=kind.dtype
            )
        call = module if kind.compiling is None else kind.compiling.compiled(module)
        calls.append(functools.partial(call, tokens[key]))
    seconds = dict(zip(modules, median_seconds(calls, next(iter(modules)).device), strict=True))

    def an_image(blocks: Blocks) -> float:
        return sum(count * seconds[kind] for kind, count in blocks.counts.items()) / batch_size

    return BlockSpeed(an_image(before), an_image(after), batch_size)


def median_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """The median time of each call. They are timed in turn, so that a clock that drifts is no advantage for any.

    On a GPU it is the time that the GPU takes, without the time to launch: what is left of it in a CUDA graph, and in a
    batch that keeps the GPU busy.
    """
    from samopt.passes.kernels.tuning import gpu_seconds
    from samopt.timing import cpu_seconds, on

    timer = gpu_seconds if device.type == "cuda" else cpu_seconds
    seconds: list[list[float]] = [[] for _ in calls]
    with on(device):
        for call in calls:  # compiles, and tunes kernels
            call()
        while len(seconds[0]) < ROUNDS and (len(seconds[0]) < 3 or sum(map(sum, seconds)) < SECONDS):
            for call, found in zip(calls, seconds, strict=True):
                found.append(timer(call))
    return [statistics.median(found) for found in seconds]
