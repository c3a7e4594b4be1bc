"""Toy passes: small, quick, and wrong in every way a pass can be wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from samopt import NoSites, Numerics, Pass, Phase, Sample, Site, Skip, Unsupported, clone
from samopt.rebind import wrap

NECK = "image_encoder.neck"


class ToyError(Exception):
    """What no pass should raise."""


def scaled(attribute: str, inner: Callable[..., Tensor], module: nn.Module, *args: Tensor) -> Tensor:
    """The module's output, times one of its attributes."""
    factor: float = getattr(module, attribute)
    return inner(*args) * factor


def broken(inner: Callable[..., Tensor], module: nn.Module, *args: Tensor) -> Tensor:
    raise ToyError("it does not run\nand here are many details")


def scale(pass_: Pass, module: nn.Module, factor: float, method: str = "forward") -> nn.Module:
    """A clone of `module` whose `method` returns `factor` times as much."""
    new, attribute = clone(module), f"factor_of_{type(pass_).__name__}"
    vars(new)[attribute] = factor
    wrap(new, method, functools.partial(scaled, attribute))
    return new


def counted_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """What each call takes on a machine of one GFLOP a second, in place of `samopt.speed.median_seconds`."""
    seconds = []
    for call in calls:
        with FlopCounterMode(display=False) as counter:
            call()
        seconds.append(counter.get_total_flops() / 1e9)
    return seconds


@dataclass(frozen=True)
class Exact(Pass):
    """Scales the embedding, and claims that nothing changes."""

    factor: float = 1.0
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK, {"factor": self.factor})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return scale(self, module, self.factor)


@dataclass(frozen=True)
class Rounding(Pass):
    """Scales the embedding, and claims to round."""

    factor: float = 1.0
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK)
        yield Skip("image_encoder.patch_embed", "it is [left] alone")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return scale(self, module, self.factor)


@dataclass(frozen=True)
class Lossy(Pass):
    """Scales the embedding, and admits it."""

    factor: float = 1.0
    phase: ClassVar[Phase] = Phase.QUANTIZE
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return scale(self, module, self.factor)


def with_idle_mlp(inner: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    module.mlp(x)  # type: ignore[operator]
    return inner(x)


def nothing_done(inner: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Tensor:
    return x * 1


@dataclass(frozen=True)
class MoreWork(Pass):
    """Every encoder block computes its MLP once more, for nothing."""

    emulated: bool = False
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        for index in range(len(model.image_encoder.blocks)):  # type: ignore[union-attr, arg-type]
            yield Site(f"image_encoder.blocks.{index}", {"emulated": True} if self.emulated else {})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        wrap(new, "forward", with_idle_mlp)
        return new


@dataclass(frozen=True)
class LessWork(Pass):
    """The first encoder block does nothing."""

    emulated: bool = False
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site("image_encoder.blocks.0", {"emulated": True} if self.emulated else {})

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new = clone(module)
        wrap(new, "forward", nothing_done)
        return new


@dataclass(frozen=True)
class Nested(Pass):
    """Doubles an encoder and its neck, told innermost first."""

    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK)
        yield Site("image_encoder")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return scale(self, module, 2.0)


@dataclass(frozen=True)
class Root(Pass):
    """Scales what the model itself computes by `method`, and what its first child does."""

    method: str = "preprocess"
    child: str = ""
    factor: float = 2.0
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        if self.child:
            yield Site(self.child)
        yield Site("")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return scale(self, module, self.factor, "forward" if site.fqn else self.method)


@dataclass(frozen=True)
class Fails(Pass):
    """Fails in one of its methods, or at the model's next forward."""

    where: Literal["requires", "match", "calibrate", "rewrite", "install", "forward"] = "rewrite"
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def requires(self, model: nn.Module) -> None:
        self._fail("requires")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site("image_encoder.blocks.0")
        self._fail("match")
        yield Site("image_encoder.blocks.1")
        if self.where == "install":
            yield Site("image_encoder.blocks.1.attn.qkv")

    def calibrate(self, model: nn.Module, sites: Sequence[Site], samples: Sequence[Sample] | None) -> None:
        self._fail("calibrate")

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        if site.fqn == "image_encoder.blocks.1":
            self._fail("rewrite")
            if self.where == "install":
                return nn.Identity()  # which has no place for the site inside it
        new = clone(module)
        if self.where == "forward":
            wrap(new, "forward", broken)
        return new

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise ToyError(f"failed in {where}")


@dataclass(frozen=True)
class Refuses(Pass):
    """Refuses every model, politely."""

    how: Literal["unsupported", "no_sites", "one_skip", "alike", "only_skips", "nothing"] = "unsupported"
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def requires(self, model: nn.Module) -> None:
        if self.how == "unsupported":
            raise Unsupported("this is the wrong planet", "move to Mars")
        if self.how == "no_sites":
            raise NoSites("there is nothing here")

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        if self.how in ("one_skip", "only_skips"):
            yield Skip("image_encoder", "it is too round")
        if self.how in ("alike", "only_skips"):
            yield from (Skip(f"image_encoder.blocks.{index}", "it is a block") for index in range(12))

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        raise AssertionError("nothing was matched")


@dataclass(frozen=True)
class Careless(Pass):
    """Breaks the rules of `match` or of `rewrite`."""

    how: Literal["same_module", "same_site"]
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK)
        if self.how == "same_site":
            yield Site(NECK)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return module if self.how == "same_module" else clone(module)


@dataclass(frozen=True)
class Options(Pass):
    """One option of every type that passes use."""

    count: int = 1
    ratio: float = 0.5
    flag: bool = False
    mode: Literal["one", "two"] = "one"
    names: tuple[str, ...] = ()
    pair: tuple[int, int] = (1, 2)
    limit: int | None = None
    phase: ClassVar[Phase] = Phase.FLOAT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site(NECK)

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        return clone(module)
