"""The one table that pages have."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from avow.core.chart import Table
from avow.report.formatting import number

# Longer words may wrap; numbers never do.
_LONG = 24


class Raw(NamedTuple):
    """A cell that is HTML already, of a class of its own."""

    html: str
    kind: str = ""


def html_table(table: Table, kind: str = "", marks: Sequence[str] = ()) -> str:
    """A table as a page shows it; it scrolls by itself where it is wider than the window.

    `kind` is its class; `marks` are attributes of each row.
    """
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = ""
    for row, mark in zip(table.rows, marks or [""] * len(table.rows), strict=True):
        body += f"<tr{' ' if mark else ''}{mark}>{''.join(map(_cell, row))}</tr>\n"
    shown = f"<table{_class(kind)}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    return f'<div class="scroll">{shown}</div>'


def _cell(cell: object) -> str:
    if isinstance(cell, Raw):
        return f"<td{_class(cell.kind)}>{cell.html}</td>"
    kind = "wordy" if isinstance(cell, str) and len(cell) > _LONG else ""
    return f"<td{_class(kind)}>{escape(number(cell))}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
