"""Small pieces of HTML for notebooks: a card with a headline, facts and tables, all escaped, with its style in line.

Colours are the notebook's own, so that a card is legible on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LINE = "1px solid color-mix(in srgb, currentColor 18%, transparent)"
_CELL = "padding:.15em .8em .15em 0;text-align:left;vertical-align:top;background:none;border:0"
_TABLE = "border-collapse:collapse;margin:.3em 0;font-size:inherit;font-variant-numeric:tabular-nums"
# Of a card that promises something, and of one that does not.
_PROMISE, _NO_PROMISE = "#2a9d6f", "#c9831c"


def card(headline: str, *parts: str, promise: bool = True) -> str:
    """A headline in bold above parts that are HTML already; the colour at its edge says whether something is promised.

    >>> "<b>a &lt; b</b>" in card("a < b")
    True
    """
    edge = _PROMISE if promise else _NO_PROMISE
    style = f"border-left:4px solid {edge};padding:.2em 0 .2em .9em;max-width:60em;line-height:1.5"
    return f'<div style="{style}"><b>{escape(headline)}</b>{"".join(parts)}</div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what there is to say of each, a line for each."""
    return _table(
        f'<tr><td style="{_CELL};opacity:.7">{escape(name)}</td><td style="{_CELL}">{escape(text)}</td></tr>'
        for name, text in pairs
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], marked: int | None = None) -> str:
    """Rows under headings, one of them in bold; a long table scrolls."""
    head = "".join(f'<th style="{_CELL};opacity:.7;font-weight:600">{escape(heading)}</th>' for heading in headings)
    lines = [f"<tr>{head}</tr>"]
    for i, row in enumerate(rows):
        *first, last = (escape(str(cell)) for cell in row)
        # The last column is prose, which may wrap.
        cells = [f'<td style="{_CELL};white-space:nowrap">{cell}</td>' for cell in first]
        style = f"border-top:{_LINE}" + (";font-weight:700" if i == marked else "")
        lines.append(f'<tr style="{style}">{"".join(cells)}<td style="{_CELL}">{last}</td></tr>')
    return f'<div style="max-height:22em;overflow:auto">{_table(lines)}</div>'


def _table(rows: Iterable[str]) -> str:
    return f'<table style="{_TABLE}"><tbody>{"".join(rows)}</tbody></table>'
