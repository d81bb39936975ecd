"""What was measured, kept: one small file for each benchmark, with the command, the machine and the day.

A run on another machine leaves the same kind of file, and `python -m benchmarks.page` makes the page of them all.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.bench.results import Goal, Result, Row, Value, shown
from avow.file_io import write

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
_OF_MANY: dict[str, Callable[[Sequence[float]], float]] = {
    "largest": max,
    "smallest": min,
    "median": statistics.median,
    "total": sum,
}


class NoFigure(Exception):
    """A question that no file answers, and why."""


@dataclass(frozen=True)
class Measured:
    """One benchmark's results, and everything one needs to know to repeat them."""

    name: str
    command: str
    machine: str
    date: str
    seconds: float
    results: list[Result]

    @property
    def goals(self) -> list[Goal]:
        """The goals of all its tables."""
        return [goal for result in self.results for goal in result.goals]

    def save(self, folder: Path) -> Path:
        """Put it where `load` finds it, numbers to six digits: more are noise, and would change with every run."""
        path = folder / f"{self.name}.json"
        write(path, json.dumps(_rounded(dataclasses.asdict(self)), indent=1, ensure_ascii=False) + "\n")
        return path

    @staticmethod
    def load(path: Path) -> Measured:
        stored = json.loads(path.read_text())
        return Measured(**(stored | {"results": [result_of(one) for one in stored["results"]]}))


def result_of(plain: dict[str, Any]) -> Result:
    """The result that its `plain` described."""
    return Result(**(plain | {"goals": [Goal(**goal) for goal in plain["goals"]]}))


def text(result: Result) -> str:
    """A result as plain text: the machines of benchmarks may have torch and nothing that draws tables."""
    lines = [result.title]
    if result.rows:
        cells = [list(result.rows[0]), *([shown(x) for x in row.values()] for row in result.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *rest in cells:
            aligned = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            lines.append("  ".join(["", first.ljust(widths[0]), *aligned]))
    return "\n".join([*lines, *(f"  {note}" for note in result.notes)])


def everything(folder: Path = FOLDER) -> dict[str, Measured]:
    """All that was ever measured and kept, by name."""
    found = [Measured.load(path) for path in sorted(folder.glob("*.json"))]
    return {one.name: one for one in found}


def answer(question: str, known: Mapping[str, Measured]) -> float:
    """The figure that a question asks for: `overhead; n=2048; largest on top`.

    First the benchmark, then what its rows must say, last the column; `largest`, `smallest`, `median` or `total` before
    it where several rows are meant. `seconds of all` is what the whole benchmark took.
    """
    name, *conditions, column = (part.strip() for part in question.split(";"))
    if name not in known:
        raise NoFigure(f"{question}: {name} was never measured")
    if column == "seconds of all":
        return known[name].seconds
    how, _, rest = column.partition(" ")
    several = how in _OF_MANY and not _rows(known[name], [], column)
    values = [row[rest if several else column] for row in _rows(known[name], conditions, rest if several else column)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if not numbers:
        raise NoFigure(f"{question}: no row of {name} says that")
    if several:
        return _OF_MANY[how](numbers)
    if len(set(numbers)) > 1:
        raise NoFigure(f"{question}: {len(numbers)} rows say that, and differently")
    return numbers[0]


def table(question: str, known: Mapping[str, Measured]) -> list[Row]:
    """The rows and columns that a question asks for: `decode; keys=real; n, read %, times faster`.

    A column may be given another name, `n as tokens`; shares whose name then ends in % are told in hundredths.
    """
    name, *conditions, wanted = (part.strip() for part in question.split(";"))
    if name not in known:
        raise NoFigure(f"{question}: {name} was never measured")
    # A column such as `times as fast` is a name, not two.
    columns = [part.strip() for part in wanted.split(",")]
    pairs = [(x, "", "") if _rows(known[name], [], x) else x.partition(" as ") for x in columns]
    rows = _rows(known[name], conditions, *(old for old, _, _ in pairs))
    if not rows:
        raise NoFigure(f"{question}: no row of {name} says that")
    return [{new or old: _told(row[old], new) for old, _, new in pairs} for row in rows]


def _told(value: Value, column: str) -> Value:
    return 100 * value if column.endswith("%") and isinstance(value, int | float) else value


def _rows(measured: Measured, conditions: Sequence[str], *columns: str) -> list[Row]:
    """Rows of all tables that have such columns and meet the conditions; `a=x|y` is met by either."""
    wanted = [(left.strip(), right.strip().split("|")) for left, _, right in (c.partition("=") for c in conditions)]
    return [
        row
        for result in measured.results
        for row in result.rows
        if all(column in row for column in columns)
        and all(left in row and any(_same(row[left], one) for one in right) for left, right in wanted)
    ]


def _same(value: Value, text: str) -> bool:
    if isinstance(value, int | float):
        try:
            return float(value) == float(text)
        except ValueError:
            return False
    return value is not None and str(value) == text


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
