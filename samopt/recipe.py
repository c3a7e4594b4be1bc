"""Recipes: which passes run, with which options, in what order, and what they may cost together.

A recipe is a TOML file, one `[[pass]]` table per step; the keys beside `name`, `required`, `on_fail` and
`keep` are the pass's own options. Order is the file's order: phases are checked, never sorted.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from samopt.base import Pass
from samopt.errors import InvalidInput, RecipeError
from samopt.gate import Budget

P = TypeVar("P", bound=Pass)

ATTRIBUTE = "_samopt_recipe"  # on an optimised model

TABLES = {"description", "accuracy", "pass", "bench"}
SETTINGS = ("required", "on_fail", "keep")  # of an entry; its other keys are the pass's options


@dataclass(frozen=True)
class Step:
    """One entry of a recipe.

    Attributes:
        pass_: the pass.
        required: False skips the entry, with the reason in the report, where it does not apply.
        on_fail: what to do when the pass costs too much accuracy: "raise" an AccuracyError, or "drop" the pass.
        keep: "if-faster" undoes the pass where it does not make the encoder's blocks faster on the model's device;
            whether it does is measured, see `samopt.speed`. A required entry may be undone so, too.
    """

    pass_: Pass
    required: bool = True
    on_fail: Literal["raise", "drop"] = "raise"
    keep: Literal["always", "if-faster"] = "always"

    def __post_init__(self) -> None:
        if not isinstance(self.pass_, Pass):
            raise RecipeError(f"a step needs a pass, not {self.pass_!r}; did you forget the parentheses?")
        if not isinstance(self.required, bool):
            raise RecipeError(f"{self.pass_!r}: required must be true or false, not {self.required!r}")
        if self.on_fail not in ("raise", "drop"):
            raise RecipeError(f"{self.pass_!r}: on_fail must be 'raise' or 'drop', not {self.on_fail!r}")
        if self.keep not in ("always", "if-faster"):
            raise RecipeError(f"{self.pass_!r}: keep must be 'always' or 'if-faster', not {self.keep!r}")


@dataclass(frozen=True)
class Recipe:
    """Steps in order, and the accuracy budget they share.

    Attributes:
        steps: the entries.
        accuracy: the budget.
        name: what reports call it.
        description: one line for people.
        bench_rows: the order in which a benchmark's waterfall introduces the entries, as names of passes.

    Raises:
        RecipeError: no entry, one pass twice, or an entry of an earlier phase after one of a later phase; a row of the
            waterfall that introduces nothing, what is no entry, or what was introduced before.
    """

    steps: Sequence[Step]
    accuracy: Budget = field(default_factory=Budget)
    name: str = "recipe"
    description: str = ""
    bench_rows: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Iterable):
            raise RecipeError(f"{self.name}: a recipe is made of steps, not {self.steps!r}")
        steps = tuple(self.steps)
        object.__setattr__(self, "steps", steps)
        if wrong := next((step for step in steps if not isinstance(step, Step)), None):
            raise RecipeError(f"{self.name}: a recipe is made of steps, not {wrong!r}; write Step({wrong!r})")
        if not isinstance(self.accuracy, Budget):
            raise RecipeError(f"{self.name}: accuracy must be a Budget, not {self.accuracy!r}")
        if not steps:
            raise RecipeError(f"{self.name}: a recipe needs at least one pass")
        for index, (step, later) in enumerate(itertools.pairwise(steps), start=1):
            if later.pass_.phase < step.pass_.phase:
                raise RecipeError(
                    f"{self.name}: entry {index + 1} ({later.pass_!r}, phase {later.pass_.phase.name}) must come "
                    f"before entry {index} ({step.pass_!r}, phase {step.pass_.phase.name})"
                )
        seen: dict[type[Pass], int] = {}
        for index, step in enumerate(steps, start=1):
            if (first := seen.setdefault(type(step.pass_), index)) != index:
                raise RecipeError(f"{self.name}: entries {first} and {index} are both {type(step.pass_).__name__}")
        if self.bench_rows:
            self._check_rows([pass_name(step.pass_) for step in steps])

    def _check_rows(self, known: Sequence[str]) -> None:
        introduced: set[str] = set()
        for row in self.bench_rows:
            if not row:
                raise RecipeError(f"{self.name}: [bench] rows: a row introduces nothing; leave it out")
            for name in row:
                if name not in known:
                    raise RecipeError(f"{self.name}: [bench] rows: {name!r} is no entry of this recipe")
                if name in introduced:
                    raise RecipeError(f"{self.name}: [bench] rows: {name!r} is introduced twice")
                introduced.add(name)

    def find(self, kind: type[P]) -> P | None:
        """The pass of a kind among the entries, or None."""
        return next((step.pass_ for step in self.steps if isinstance(step.pass_, kind)), None)

    @staticmethod
    def of(recipe: str | Path | Recipe | Sequence[Pass | Step]) -> Recipe:
        """What users pass as a recipe: a name, a TOML file, a saved model's folder, a `Recipe`, or a list of passes.

        Raises:
            RecipeError: an unknown name, a missing or unreadable file, or a mistake in it: file and entry are named.
            SavedModelError: a folder that `save` did not make, or that was changed since.
        """
        if isinstance(recipe, Recipe):
            return recipe
        if isinstance(recipe, (Pass, Step)):
            raise RecipeError(f"a recipe is a list of passes, not one: write [{recipe!r}]")
        if not isinstance(recipe, (str, Path, Iterable)):
            found = type(recipe).__name__
            raise RecipeError(f"a recipe is a built-in name, a TOML file, a Recipe or a list of passes, not {found}")
        if not isinstance(recipe, (str, Path)):
            return Recipe([step if isinstance(step, Step) else Step(step) for step in recipe])
        if str(recipe) in built_in():
            text = (resources.files("samopt.recipes") / f"{recipe}.toml").read_text(encoding="utf-8")
            return _parse(text, f"recipe {recipe}", str(recipe))
        path = Path(recipe)
        if path.is_dir():
            from samopt.saved_folder import read_manifest

            return Recipe.from_table(read_manifest(path)["recipe"], str(path), path.name)
        if path.suffix != ".toml":
            raise RecipeError(
                f"unknown recipe {str(recipe)!r}; built in: {', '.join(built_in())}, or give a .toml file"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot read this recipe file ({error})") from error
        return _parse(text, str(path), path.stem)

    @staticmethod
    def from_table(
        table: dict[str, Any], where: str, name: str, passes: Mapping[str, type[Pass]] | None = None
    ) -> Recipe:
        """The recipe that a TOML file describes, from what the file holds.

        Args:
            table: its keys and tables.
            where: what errors call it.
            name: what reports call it.
            passes: by the names that entries use; None knows samopt's own.

        Raises:
            RecipeError: a mistake in it.
        """
        from samopt.passes import PASSES

        _no_unknown_keys(table, TABLES, where)
        entries = table.get("pass", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise RecipeError(f"{where}: write each pass as a [[pass]] table")
        steps = [_step(entry, f"{where}, entry {at}", passes or PASSES) for at, entry in enumerate(entries, start=1)]
        rows = _bench_rows(table.get("bench", {}), where)
        budget = table.get("accuracy", {})
        _no_unknown_keys(budget, {field.name for field in dataclasses.fields(Budget)}, f"{where}, [accuracy]")
        try:
            accuracy = Budget(**budget)
        except InvalidInput as error:
            raise RecipeError(f"{where}: {error}") from error
        description = table.get("description", "")
        if not isinstance(description, str):
            raise RecipeError(f"{where}: description must be text, not {description!r}")
        try:
            return Recipe(steps, accuracy, name, description, rows)
        except RecipeError as error:
            raise RecipeError(f"{where}: {str(error).removeprefix(f'{name}: ')}") from error

    def to_table(self, passes: Mapping[str, type[Pass]]) -> dict[str, Any]:
        """What `from_table` makes this recipe of again: text, numbers, lists and tables, all options spelt out.

        Args:
            passes: by the names that entries use.

        Raises:
            RecipeError: a pass that is not among them.
        """
        names = {kind: name for name, kind in passes.items()}
        entries = []
        for step in self.steps:
            if type(step.pass_) not in names:
                raise RecipeError(
                    f"{self.name}: {type(step.pass_).__name__} is a pass of your own, which no file can name; "
                    f"known: {', '.join(passes)}"
                )
            settings = {name: getattr(step, name) for name in SETTINGS}
            entries.append({"name": names[type(step.pass_)], **_given(step.pass_), **settings})
        rows = {"rows": [list(row) for row in self.bench_rows]}
        return {"description": self.description, "accuracy": _given(self.accuracy), "pass": entries, "bench": rows}


def _given(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as TOML has them: lists for tuples, and nothing for None."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None
    }


def pass_name(pass_: Pass) -> str:
    """What recipes call a pass; one that is not built in goes by its class."""
    from samopt.passes import PASSES

    return next((name for name, kind in PASSES.items() if kind is type(pass_)), type(pass_).__name__)


def built_in() -> list[str]:
    """The names of the recipes that come with samopt."""
    files = resources.files("samopt.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def _parse(text: str, where: str, name: str) -> Recipe:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: not valid TOML: {error}") from error
    return Recipe.from_table(table, where, name)


def _bench_rows(bench: Any, where: str) -> tuple[tuple[str, ...], ...]:
    _no_unknown_keys(bench, {"rows"}, f"{where}, [bench]")
    rows = bench.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise RecipeError(f"{where}, [bench] rows: write a list of lists of names")
    return tuple(tuple(row) for row in rows)


def _step(entry: dict[str, Any], where: str, passes: Mapping[str, type[Pass]]) -> Step:
    options = {key: value for key, value in entry.items() if key != "name"}
    settings = {key: options.pop(key) for key in SETTINGS if key in options}
    name = entry.get("name")
    if not isinstance(name, str) or name not in passes:
        found = "has no name" if name is None else f"names an unknown pass {name!r}"
        raise RecipeError(f"{where} {found}; known passes: {', '.join(passes)} (your own go into a Recipe in Python)")
    where = f"{where} ({name})"
    _no_unknown_keys(options, {"name", *SETTINGS, *(f.name for f in dataclasses.fields(passes[name]))}, where)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return Step(passes[name](**options), **settings)
    except (InvalidInput, RecipeError, TypeError) as error:  # TypeError: an option without a default was left out
        raise RecipeError(f"{where}: {error}") from error


def _no_unknown_keys(table: Any, known: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise RecipeError(f"{where} must be a table")
    for key in sorted(table.keys() - known):
        raise RecipeError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(known)) or 'none'}")
