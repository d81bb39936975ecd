"""What a benchmark found: tables of ratios, goals met or missed, and remarks; as text or plain data."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | None
Row = dict[str, Value]


@dataclass(frozen=True)
class Goal:
    """What was aimed at, and whether this run got there."""

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

    @staticmethod
    def of(plain: dict[str, Any]) -> Result:
        """The result that `plain` described."""
        return Result(**(plain | {"goals": [Goal(**goal) for goal in plain["goals"]]}))

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        """The table as plain text, goals and remarks below it."""
        # `avow bench` shows the same in `avow.report.terminal.Columns`, which is above and takes rich; this one is for
        # `benchmarks/`, whose machines may have torch and nothing for people to look at.
        lines = [self.title]
        if self.rows:
            cells = [list(self.rows[0]), *([shown(x) for x in row.values()] for row in self.rows)]
            widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
            lines += [_line(line, widths) for line in cells]
        lines += [f"  {remark}" for remark in (*self.remarks, self.conditions) if remark]
        lines += [f"  {goal}" for goal in self.goals]
        lines += [f"  FAILED: {failure}" for failure in self.failures]
        return "\n".join(lines)


def shown(value: Value) -> str:
    """A value as a table shows it; nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def tell_row(row: Row) -> None:
    """A row on stderr as soon as it is found, so that a run that is cut short was not for nothing."""
    print("  " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), file=sys.stderr, flush=True)


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join(["", first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)])
