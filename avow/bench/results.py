"""The results of a benchmark: tables of ratios, goals met or missed, and remarks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")
Value = str | int | float | None
Row = dict[str, Value]


@dataclass(frozen=True)
class Goal:
    """A goal, the value of this run, and whether it meets the goal."""

    aim: str
    found: str
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED'}: {self.aim}; found {self.found}"


@dataclass(frozen=True)
class Result:
    """One benchmark's rows under a title, its goals, its remarks, and whether every answer passed its check."""

    title: str
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    conditions: str = ""

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def notes(self) -> list[str]:
        """The lines below the table: remarks, conditions, goals and failures."""
        failures = [f"FAILED: {failure}" for failure in self.failures]
        return [note for note in (*self.remarks, self.conditions, *map(str, self.goals), *failures) if note]


def shown(value: Value) -> str:
    """A value as a table shows it; nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def rate_row(seconds: float, moved: float, limit: float) -> Row:
    """The columns of a kernel that moves `moved` bytes; memory moves `limit` bytes a second."""
    rate = moved / seconds
    return {"ms": 1e3 * seconds, "MB": moved / 1e6, "TB/s": rate / 1e12, "of the limit": rate / limit}


def attempted(name: str, call: Callable[[], _T]) -> _T | None:
    """What a call gives; None, and a line on stderr, if it does not run here."""
    try:
        return call()
    except Exception as error:  # whatever a peer or a backend raises at what is asked of it
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        print(f"  {name} does not run here ({why})", file=sys.stderr)
        return None


def tell_row(row: Row) -> None:
    """Print a row on stderr as soon as it is measured, so that an interrupted run was not for nothing."""
    print("  " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), file=sys.stderr, flush=True)
