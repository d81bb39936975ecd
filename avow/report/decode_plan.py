"""Plans of decode loops as tables of a terminal."""

from __future__ import annotations

from rich.text import Text

from avow.decode.plan import DecodePlan
from avow.report.terminal import Columns

_ADVICE = "name it with --kept, or find it with --input or --kind"


def plan_table(plan: DecodePlan) -> Columns:
    """A step by each way with its memory, and below what the figures rest on."""
    title, heads = plan.heading
    rows = plan.table
    styles = ["bold" if row[0] == plan.chosen else "" for row in rows]
    headings = ("", "predicted", "of SDPA", "memory")
    return Columns("lrrr", headings, rows, Text.assemble((title, "bold"), "\n", heads), plan.notes(_ADVICE), styles)
