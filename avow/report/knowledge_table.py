"""The knowledge experiment as a table: the same cells for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from avow.report import formatting
from avow.report.terminal import Columns
from avow.training import Evaluation
from avow.training.knowledge import Experiment, Row

MAJORITY = "majority answer"
HEADINGS = ("arm", "right", "accuracy", "interval", "over seeds", "at half", "weights", "time", "CPU")
SEEDS, CPU = HEADINGS.index("over seeds"), HEADINGS.index("CPU")


@dataclass(frozen=True)
class Line:
    """A line of the table: its cells under `HEADINGS`, its answers where it has any, whether it is the best read."""

    cells: tuple[str, ...]
    evaluation: Evaluation | None
    best: bool = False

    @property
    def label(self) -> str:
        return self.cells[0]


def lines(experiment: Experiment) -> Iterator[Line]:
    """The majority's line, then one for each arm."""
    told = _answered(experiment.majority)
    yield Line((MAJORITY, *told[:3], "", told[3], formatting.NOTHING, "", ""), experiment.majority)
    for row in experiment.rows:
        middle = row.middle
        if middle is None or middle.evaluation is None:
            yield Line((row.label, "failed", *[formatting.NOTHING] * 7), None)
            continue
        right, accuracy, interval, half = _answered(middle.evaluation)
        spent = (formatting.seconds(middle.seconds), formatting.seconds(middle.cpu_seconds))
        cells = (row.label, right, accuracy, interval, _spread(row), half, f"{middle.parameters:,}", *spent)
        yield Line(cells, middle.evaluation, row is experiment.best)


def knowledge_table(experiment: Experiment) -> Columns:
    """The table for a terminal; the best of those that read is bold, and columns that say nothing are left out."""
    found = list(lines(experiment))
    kept = columns(found)
    if SEEDS in kept:
        kept.remove(CPU)  # Eighty characters have no room for it.
    rows = [[line.cells[place] for place in kept] for line in found]
    styles = ["bold" if line.best else "" for line in found]
    return Columns("l" + "r" * (len(kept) - 1), [HEADINGS[place] for place in kept], rows, styles=styles)


def columns(found: list[Line]) -> list[int]:
    """The places of those columns in which something stands."""
    return [place for place in range(len(HEADINGS)) if any(line.cells[place] for line in found)]


def _answered(found: Evaluation) -> tuple[str, str, str, str]:
    low, high = found.interval
    # Rounded outward, as its ends were found.
    interval = f"{math.floor(100 * low)}–{math.ceil(100 * high)}%"
    return f"{found.right}/{found.asked}", f"{found.accuracy:.1%}", interval, f"{found.accuracy_at(0.5):.1%}"


def _spread(row: Row) -> str:
    if row.spread is None:
        return ""
    low, high = row.spread
    return f"{low:.0%}–{high:.0%}"
