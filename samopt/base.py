"""The form of a pass: match sites, build every replacement, then install them all, or nothing."""

from __future__ import annotations

import abc
import dataclasses
import enum
import inspect
import operator
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import nn

from samopt.errors import AlreadyApplied, InvalidInput, NoSites, SamoptError, Unsupported
from samopt.rebind import retarget, set_module
from samopt.result import PassResult, Site, Skip, by_reason

if typing.TYPE_CHECKING:
    from samopt.samples import Sample

APPLIED = "_samopt_passes"  # on a rewritten module: the names of the passes that rewrote it


class Phase(enum.IntEnum):
    """When a pass runs. A recipe's entries never go back to an earlier phase."""

    FLOAT = 0
    SPARSIFY = 1
    QUANTIZE = 2
    COMPILE = 3


class Numerics(enum.Enum):
    """What a pass may do to the outputs; verification holds it to that.

    EXACT: bit-equal. ROUNDING: against float64, errs at most twice as much as the unmodified model in the same
    dtype. LOSSY: anything else, paid from the recipe's accuracy budget.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Pass(abc.ABC):
    """One rewrite of a model. A subclass is a frozen dataclass, final, and its fields are its options.

    Calling a pass rewrites the model in place and returns a `PassResult` with the sites, the skips and `undo()`.
    A pass that fails or refuses has changed nothing.
    """

    phase: ClassVar[Phase]
    numerics: ClassVar[Numerics]
    between_blocks: ClassVar[bool] = False  # its gain is not seen in the encoder's blocks, which are timed one by one

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            if issubclass(base, Pass) and not inspect.isabstract(base):
                raise TypeError(f"{cls.__name__} inherits from {base.__name__}, but passes are final: share functions")

    def __post_init__(self) -> None:
        cls = type(self)
        if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
            raise TypeError(f"{cls.__name__} must be decorated with @dataclass(frozen=True)")
        for missing in (name for name in ("phase", "numerics") if not hasattr(cls, name)):
            raise TypeError(f"{cls.__name__} must say its {missing}")
        hints = typing.get_type_hints(cls)
        for option in dataclasses.fields(self):
            _check_option(cls.__name__, option.name, getattr(self, option.name), hints[option.name])

    def requires(self, model: nn.Module) -> None:  # noqa: B027 - optional, most passes run anywhere
        """Raises Unsupported where the pass cannot run at all: no CUDA, wrong dtype, no compiler."""

    @abc.abstractmethod
    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the sites to rewrite and the look-alikes declined, each with its reason. Changes nothing."""

    def calibrate(self, model: nn.Module, sites: Sequence[Site], samples: Sequence[Sample] | None) -> Any:  # noqa: B027 - likewise
        """Returns what `rewrite` needs to know from sample inputs; None for most passes."""

    @abc.abstractmethod
    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        """Returns a new module for `site`, usually from `clone(module)`. Never touches `module`.

        Args:
            module: what is at the site now.
            site: what `match` yielded.
            stats: what `calibrate` returned.
        """

    @final
    def __call__(self, model: nn.Module, samples: Sequence[Sample] | None = None) -> PassResult:
        """Rewrites `model` in place.

        Args:
            model: a Sam, or a part of one.
            samples: sample inputs, for passes that calibrate.

        Raises:
            Unsupported: the pass cannot run here; `NoSites` if nothing fits, `AlreadyApplied` if it ran before.
        """
        start = time.perf_counter()
        if self.phase is Phase.COMPILE:
            refuse_compiled(model, "undo that first")
        else:
            refuse_compiled(model, f"apply {_title(self)} before Compile, or undo Compile first")
        self.requires(model)
        sites, skipped = self._match_unmarked(model)
        if not sites:
            raise self._nothing_to_do(model, skipped)
        undo = self._rewrite(model, sites, samples)
        return PassResult(repr(self), tuple(sites), tuple(skipped), time.perf_counter() - start, undo)

    @final
    def reapply(self, model: nn.Module, sites: Sequence[Site]) -> None:
        """Rewrites the sites that this pass was applied to before in a model of the same form, without weights.

        Nothing is matched, measured or calibrated again: what the device or the samples decided is in the sites, and
        in the weights that are loaded afterwards.

        Args:
            model: a Sam on the meta device, to which the passes before this one were reapplied.
            sites: of a `PassResult` or a report.
        """
        self._rewrite(model, list(sites), None)

    def _rewrite(self, model: nn.Module, sites: list[Site], samples: Sequence[Sample] | None) -> Callable[[], None]:
        stats = self.calibrate(model, sites, samples)
        # Outermost first, so that a site inside another lands in its parent's replacement.
        sites.sort(key=lambda site: site.fqn.count(".") + bool(site.fqn))
        replacements = []
        for site in sites:
            old = model.get_submodule(site.fqn)
            new = self.rewrite(old, site, stats)
            if new is old:
                raise TypeError(f"{_title(self)}.rewrite must return a new module for {site}, not the one it was given")
            marks = [mark for mark in vars(new).get(APPLIED, ()) if mark != _title(self)]
            vars(new)[APPLIED] = (*marks, _title(self))
            replacements.append((site, new))
        return _install(model, replacements, repr(self))

    def _match_unmarked(self, model: nn.Module) -> tuple[list[Site], list[Skip]]:
        sites: list[Site] = []
        skipped: list[Skip] = []
        for found in self.match(model):
            if isinstance(found, Skip):
                skipped.append(found)
            elif self._has_rewritten(model.get_submodule(found.fqn)):
                skipped.append(Skip(found.fqn, f"{_title(self)} was applied already"))
            elif any(site.fqn == found.fqn for site in sites):
                raise TypeError(f"{_title(self)}.match must yield {found} once")
            else:
                sites.append(found)
        return sites, skipped

    def _has_rewritten(self, module: nn.Module) -> bool:
        # A deep copy of a compiled module keeps its marks and loses its compilation (torch drops it).
        lost = self.phase is Phase.COMPILE and module._compiled_call_impl is None
        return _title(self) in vars(module).get(APPLIED, ()) and not lost

    def _nothing_to_do(self, model: nn.Module, skipped: Sequence[Skip]) -> Unsupported:
        name = _title(self)
        if any(map(self._has_rewritten, model.modules())):
            return AlreadyApplied(
                f"{name} was applied to this model already", "undo it first, or start from the unmodified model"
            )
        if not skipped:
            return NoSites("no module of the kind it looks for", "leave it out, or check that this is a Sam", name)
        reasons = by_reason(skipped)
        if len(reasons) == 1 and len(skipped) > 1:
            return NoSites(f"{skipped[0].reason} ({len(skipped)} modules)", name=name)
        return NoSites("; ".join(reasons), name=name)


def refuse_compiled(model: nn.Module, remedy: str) -> None:
    """Raises AlreadyApplied where a part of `model` is compiled: a copy of it would not be, without a word."""
    for fqn, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise AlreadyApplied(f"{fqn or 'the model'} is compiled already", remedy)
        if "_orig_mod" in module._modules:
            remedy = "put its _orig_mod in its place, and compile with samopt.passes.Compile"
            raise AlreadyApplied(f"{fqn or 'the model'} is wrapped by torch.compile", remedy)


def _title(pass_: Pass) -> str:
    return type(pass_).__name__


def _install(model: nn.Module, replacements: Sequence[tuple[Site, nn.Module]], name: str) -> Callable[[], None]:
    """Puts all replacements in, or none, and returns the function that puts the old modules back."""
    replaced: list[tuple[str, Any]] = []
    try:
        for site, new in replacements:
            if site.fqn:
                replaced.append((site.fqn, model.get_submodule(site.fqn)))
                set_module(model, site.fqn, new)
            else:
                # The caller holds the root, so the object stays and its contents are exchanged.
                replaced.append(("", vars(model)))
                model.__dict__ = retarget(vars(new), new, model)
    except BaseException:
        _put_back(model, replaced)
        raise
    standing = {site.fqn: _identities(model, site.fqn) for site, _ in replacements}

    def undo() -> None:
        for fqn, those in standing.items():
            now = _identities(model, fqn)
            if len(now) != len(those) or not all(map(operator.is_, now, those)):
                raise SamoptError(
                    f"{name} cannot be undone: a later pass rewrote {fqn or 'the model'}; undo that one first"
                )
        if _devices([vars(model) if not fqn else model.get_submodule(fqn) for fqn, _ in replaced]) != _devices(
            [old for _, old in replaced]
        ):
            raise SamoptError(f"{name} cannot be undone: the model was moved since; move it back first")
        _put_back(model, replaced)

    return undo


def _devices(parts: Sequence[nn.Module | dict[str, Any]]) -> set[torch.device]:
    """Where the weights of modules, or of a root's contents, are."""
    modules = [module for part in parts for module in (part["_modules"].values() if isinstance(part, dict) else [part])]
    return {parameter.device for module in modules if module is not None for parameter in module.parameters()}


def _put_back(model: nn.Module, replaced: Sequence[tuple[str, Any]]) -> None:
    for fqn, old in reversed(replaced):
        if fqn:
            set_module(model, fqn, old)
        else:
            model.__dict__ = old


def _identities(model: nn.Module, fqn: str) -> list[Any]:
    """The objects a pass put at a site: the module and those inside it, or the root's contents."""
    try:
        module = model.get_submodule(fqn)
    except AttributeError:
        return [None]
    return [vars(module) if module is model else module, *module.modules()]


def _check_option(owner: str, name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise InvalidInput(f"{owner}: option {name} must be {_describe(hint)}, not {value!r}")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args and type(value) in {type(arg) for arg in args}
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple and isinstance(value, tuple):
        wanted = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(value) == len(wanted) and all(map(_fits, value, wanted))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(arg) for arg in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)
