"""Reads the profiles that `samopt profile` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from samopt.errors import InvalidInput
from samopt.profiling.comparison import Comparison
from samopt.profiling.compilations import Compilation, Compilations, GraphBreak
from samopt.profiling.kernels import Kernel
from samopt.profiling.memory import Memory
from samopt.profiling.profiler import Profile, StageTime
from samopt.profiling.sync_audit import Audit
from samopt.profiling.syncs import Sync

T = TypeVar("T")


def comparison_from_dict(found: Mapping[str, Any], path: str | Path) -> Comparison:
    """What `Comparison.to_dict` made of a comparison; `path` is where it comes from.

    The places of its audit stay as they were written: the files are those of the machine that was profiled.

    Raises:
        InvalidInput: it is none, or of another version.
    """
    try:
        compilations = found["compilations"]
        return Comparison(
            found["model"],
            found["recipe"],
            found["image"],
            _profile(found["before"]),
            _profile(found["after"]),
            tuple((entry["pass"], entry["status"]) for entry in found["passes"]),
            None if compilations is None else _compilations(compilations),
            found["versions"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{path}: no profile of this version of samopt ({type(error).__name__}: {error})"
        raise InvalidInput(f"{problem}; name the profile.json that samopt profile wrote") from error


def _made(kind: type[T], found: Mapping[str, Any], **other: Any) -> T:
    """A dataclass from its fields in JSON; those in `other` as they are."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: found[name] for name in names if name in found} | other)


def _profile(found: Mapping[str, Any]) -> Profile:
    return _made(
        Profile,
        found,
        stages=tuple(_made(StageTime, stage) for stage in found["stages"]),
        kernels=tuple(_made(Kernel, kernel) for kernel in found["kernels"]),
        audit=None if found["audit"] is None else _audit(found["audit"]),
        memory=None if found["memory"] is None else _made(Memory, found["memory"]),
        notes=tuple(found["notes"]),
    )


def _audit(found: Mapping[str, Any]) -> Audit:
    syncs = ((_made(Sync, sync, file=sync["place"].rpartition(":")[0]), sync["count"]) for sync in found["syncs"])
    return Audit(tuple(syncs), found["stopped"])


def _compilations(found: Mapping[str, Any]) -> Compilations:
    return Compilations(
        [_made(Compilation, one) for one in found["compiled"]], [_made(GraphBreak, one) for one in found["breaks"]]
    )
