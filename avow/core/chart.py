"""A drawing as data: what is drawn and how it is labelled, without a word on how.

Constructions and claims make these; files, pages and terminals draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes: by name, the xs and the ys."""

    title: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    marks: Literal["lines", "points", "bars"] = "lines"

    def plain(self) -> dict[str, Any]:
        """The chart as JSON has it."""
        series = {name: [list(map(float, xs)), list(map(float, ys))] for name, (xs, ys) in self.series.items()}
        return vars(self) | {"series": series}


Function = Callable[[float], float]


def curves(title: str, x: str, y: str, xs: Sequence[float], functions: Mapping[str, Function], **looks: Any) -> Chart:
    """Functions of one number, drawn at the same points; `looks` are those of `Chart`."""
    return Chart(title, x, y, {name: (xs, [f(at) for at in xs]) for name, f in functions.items()}, **looks)


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]] = field(default_factory=tuple)

    def plain(self) -> dict[str, Any]:
        """The table as JSON has it."""
        return {"title": self.title, "headings": list(self.headings), "rows": [list(row) for row in self.rows]}


Picture = Chart | Table
