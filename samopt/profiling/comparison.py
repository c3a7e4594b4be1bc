"""A model's profile before a recipe and after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from samopt.optimize import optimize
from samopt.profiling.compilations import Compilations, record_compilations
from samopt.profiling.profiler import Profile, profile
from samopt.recipe import Recipe
from samopt.report import report, versions
from samopt.samples import as_samples, scene_samples
from samopt.shown import Shown
from samopt.structure import describe

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Comparison(Shown):
    """A model's profile before a recipe and after.

    Attributes:
        model: what was profiled, in words.
        recipe: its name.
        image: the picture's name.
        before: of the unmodified model.
        after: of the optimised one.
        passes: the recipe's entries, each with what became of it.
        compilations: what torch.compile did; None where that was not asked.
        versions: of Python and the libraries the figures depend on.
    """

    model: str
    recipe: str
    image: str
    before: Profile
    after: Profile
    passes: tuple[tuple[str, str], ...]
    compilations: Compilations | None
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON.

        {model, recipe, image, versions, passes: [{pass, status}], before, after: see `Profile.to_dict`,
        compilations: see `Compilations.to_dict`, or null}
        """
        return {
            "model": self.model,
            "recipe": self.recipe,
            "image": self.image,
            "versions": self.versions,
            "passes": [{"pass": name, "status": status} for name, status in self.passes],
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "compilations": self.compilations and self.compilations.to_dict(),
        }

    def __rich__(self) -> Group:
        from samopt.profiling.tables import of_comparison

        return of_comparison(self)


def compare(
    sam: nn.Module,
    recipe: str | Path | Recipe = "fast",
    samples: Any = None,
    *,
    out: str | Path | None = None,
    logs: bool = False,
    inplace: bool = False,
) -> Comparison:
    """Profiles a model before a recipe and after it.

    Args:
        sam: an unmodified Sam, on the device it will run on.
        recipe: as for `optimize`.
        samples: as for `optimize`; the first of them is the picture that is profiled.
        out: a folder for the traces, "before" and "after"; see `profile`. None writes nothing.
        logs: record what torch.compile does, graph breaks and recompilations among it.
        inplace: optimise `sam` itself.

    Raises:
        SamoptError: what `optimize` and `profile` raise.
    """
    recipe = Recipe.of(recipe)
    pictures = scene_samples() if samples is None else as_samples(samples)
    before = profile(sam, pictures[0], out=out, name="before")
    words = describe(sam)
    recorder: Any = record_compilations() if logs else contextlib.nullcontext()
    with recorder as compilations, named_loops():
        fast = optimize(sam, recipe, samples=None if samples is None else pictures, inplace=inplace)
        after = profile(fast, pictures[0], out=out, name="after")
    passes = tuple((step.name, step.status) for step in report(fast).steps)
    return Comparison(words, recipe.name, pictures[0].name, before, after, passes, compilations, versions())


@contextlib.contextmanager
def named_loops() -> Iterator[None]:
    """Has TorchInductor name, for the profiler, the loops it writes for a CPU, as kernels have names on a GPU."""
    import torch._inductor.config

    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        yield
