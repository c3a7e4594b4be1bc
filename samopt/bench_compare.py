"""Two runs of a benchmark side by side: which rows took longer, and whether the runs can be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samopt.bench_table import check_results, read_json
from samopt.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

SAME = ("model", "weights", "pictures", "seed", "device")  # of a setting, besides its versions


@dataclass(frozen=True)
class Pair:
    """One configuration in both runs.

    Attributes:
        what: the row's name.
        batch_size: images per call.
        before: milliseconds per image in the first run; None where it was not timed.
        after: likewise in the second.
        spreads: of the timed calls in either.
    """

    what: str
    batch_size: int
    before: float | None
    after: float | None
    spreads: tuple[float | None, float | None]

    @property
    def ratio(self) -> float | None:
        """Time in the second run over that in the first."""
        return None if self.before is None or self.after is None else self.after / self.before

    def differs(self, threshold: float) -> bool:
        """Whether the longer time is more than `threshold`, a share, above the shorter, or only one run has a time."""
        if self.ratio is None:
            return (self.before is None) != (self.after is None)
        return max(self.ratio, 1 / self.ratio) > 1 + threshold


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        pairs: the rows that both have.
        only: names of rows that one of them has.
        warnings: what differs besides times: machine, versions, seed.
    """

    pairs: tuple[Pair, ...]
    only: tuple[str, ...]
    warnings: tuple[str, ...]

    def beyond(self, threshold: float) -> list[Pair]:
        """The pairs that differ by more than a share."""
        return [pair for pair in self.pairs if pair.differs(threshold)]

    def table(self, threshold: float) -> Table:
        """The pairs, those that differ by more than a share marked."""
        from rich.table import Table
        from rich.text import Text

        shown = Table("what")
        for heading in ("batch", "first ms/img", "spread", "second ms/img", "spread", "second/first", ""):
            shown.add_column(heading, justify="right")
        for pair in self.pairs:
            times = [_shown("{:.2f}", pair.before), _shown("{:.1%}", pair.spreads[0])]
            times += [_shown("{:.2f}", pair.after), _shown("{:.1%}", pair.spreads[1])]
            verdict = f"differs by more than {threshold:.1%}" if pair.differs(threshold) else ""
            shown.add_row(Text(pair.what), str(pair.batch_size), *times, _shown("{:.3f}", pair.ratio), verdict)
        return shown


def compare_runs(first: str | Path, second: str | Path) -> Comparison:
    """Matches the rows of two files that `samopt bench ... --json` wrote, by model, name and batch size.

    Raises:
        InvalidInput: a file that is missing or is none of these; or the two have no row in common.
    """
    one, other = (check_results(read_json(path), path) for path in (first, second))
    mine, theirs = _rows(one), _rows(other)
    pairs = tuple(
        Pair(
            what,
            batch_size,
            row["milliseconds"],
            theirs[key]["milliseconds"],
            (row.get("spread"), theirs[key].get("spread")),
        )
        for key, row in mine.items()
        if key in theirs
        for _, what, batch_size in [key]
    )
    if not pairs:
        raise InvalidInput(
            f"{first} and {second} have no row in common: they must be of one model, and time the same at a batch size"
        )
    only = [_only(first, key) for key in mine if key not in theirs]
    only += [_only(second, key) for key in theirs if key not in mine]
    return Comparison(pairs, tuple(only), tuple(_warnings(one, other)))


def _rows(run: Mapping[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {(run["model"], row["what"], row["batch_size"]): row for row in run["rows"]}


def _only(path: str | Path, key: tuple[str, str, int]) -> str:
    return f"only in {path}: {key[0]} {key[1]} batch {key[2]}"


def _warnings(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    both = [name for name in SAME if name in one and name in other]  # earlier files say less
    versions = [run.get("versions", {}) for run in (one, other)]
    pairs = [(name, one[name], other[name]) for name in both]
    pairs += [(name, *(of.get(name) for of in versions)) for name in dict.fromkeys((*versions[0], *versions[1]))]
    for name, mine, theirs in pairs:
        if mine != theirs:
            yield f"{name} differs: {mine} and {theirs}"


def _shown(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)
