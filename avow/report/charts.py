"""Charts and tables drawn: for pages by plotly, for files by matplotlib, for terminals in columns."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from avow.core.chart import Chart, Picture, Table
from avow.report.formatting import number
from avow.report.markup import html_table as html_table
from avow.report.style import INK, LINE, LOOKS, SOFT, calm
from avow.report.terminal import Columns

# A terminal shows this many points of a long chart, and a line of no more has its points marked.
_SHOWN = 12


def picture_from(plain: Mapping[str, Any]) -> Picture:
    """A chart or a table from what its `plain` gave."""
    if "series" not in plain:
        return Table(plain["title"], plain["headings"], plain["rows"])
    # Numbers that JSON cannot hold came as words.
    series = {name: ([float(x) for x in xs], [float(y) for y in ys]) for name, (xs, ys) in plain["series"].items()}
    return Chart(**{**plain, "series": series})


def figure(chart: Chart) -> dict[str, Any]:
    """A chart as plotly reads it; colours of text and grid are left to the page's theme."""
    several = len(chart.series) > 1
    traces = []
    for i, (name, (xs, ys)) in enumerate(chart.series.items()):
        colour, symbol, _ = LOOKS[i % len(LOOKS)]
        named = {"name": escape(name), "showlegend": several}
        if chart.marks == "bars":
            traces.append(
                {"type": "bar", "x": [number(float(x)) for x in xs], "y": _drawable(ys, chart.log_y), **named}
            )
            traces[-1]["marker"] = {"color": colour}
            continue
        traces.append(
            {
                "type": "scatter",
                "x": _drawable(xs, chart.log_x),
                "y": _drawable(ys, chart.log_y),
                "mode": "markers" if chart.marks == "points" else "lines+markers" if len(xs) <= _SHOWN else "lines",
                "line": {"color": colour, "width": 2, "dash": _DASHES[i % len(_DASHES)]},
                "marker": {"color": colour, "symbol": symbol, "size": 8},
                **named,
            }
        )
    axes = {
        "xaxis": {"title": {"text": escape(chart.x)}, **_scale(chart.log_x)},
        "yaxis": {"title": {"text": escape(chart.y)}, **_scale(chart.log_y)},
    }
    if not any(y for _, ys in chart.series.values() for y in ys):
        axes["yaxis"]["range"] = [0, 1]  # Left to itself, plotly would go down to −1.
    if chart.marks == "bars":
        axes["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": _categories(chart)}
    return {"data": traces, "layout": axes}


# Told apart without colour too.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STROKES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (9, 2)))


def _scale(log: bool) -> dict[str, Any]:
    return {"type": "log", "exponentformat": "power"} if log else {"type": "linear"}


def _drawable(numbers: Sequence[float], log: bool) -> list[float | None]:
    """Numbers with gaps where the axis has no place for them."""
    found = [float(x) for x in numbers]
    return [x if math.isfinite(x) and (x > 0 or not log) else None for x in found]


def _places(chart: Chart) -> list[float]:
    """Every x at which something stands, in order."""
    return sorted({float(x) for xs, _ in chart.series.values() for x in xs})


def _categories(chart: Chart) -> list[str]:
    return [number(x) for x in _places(chart)]


def columns(picture: Picture) -> Columns:
    """A chart or a table for a terminal; of a long chart some points, evenly taken."""
    if isinstance(picture, Chart):
        return columns(_tabled(picture))
    numeric = [any(isinstance(row[i], int | float) for row in picture.rows) for i in range(len(picture.headings))]
    rows = [[number(cell) for cell in row] for row in picture.rows]
    return Columns("".join("r" if x else "w" for x in numeric), picture.headings, rows, picture.title)


def _tabled(chart: Chart) -> Table:
    xs = _places(chart)
    if len(xs) > _SHOWN:
        xs = [xs[round(i * (len(xs) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
    by_x = [dict(zip(map(float, xs), map(float, ys), strict=True)) for xs, ys in chart.series.values()]
    rows = [(x, *(points.get(x) for points in by_x)) for x in xs]
    return Table(f"{chart.title} ({chart.y})", (chart.x, *chart.series), rows)


def drawing(picture: Picture) -> Any:
    """A chart or a table as a matplotlib figure."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 5), dpi=150, facecolor="white", layout="constrained")
    panel = made.add_subplot()
    title = "\n".join(textwrap.wrap(picture.title, 80))
    panel.set_title(_literal(title), loc="left", fontsize=12, color=INK, pad=10, weight="bold")
    if isinstance(picture, Chart):
        _draw_chart(panel, picture)
    else:
        _draw_table(panel, picture)
    return made


def png(picture: Picture) -> bytes:
    """A chart or a table as a picture file."""
    held = io.BytesIO()
    drawing(picture).savefig(held, format="png", bbox_inches="tight", pad_inches=0.15)
    return held.getvalue()


def _draw_chart(panel: Any, chart: Chart) -> None:
    calm(panel)
    panel.set_xlabel(_literal(chart.x), color=SOFT)
    panel.set_ylabel(_literal(chart.y), color=SOFT)
    if chart.log_y:
        panel.set_yscale("log")
    if chart.marks == "bars":
        _draw_bars(panel, chart)
    else:
        if chart.log_x:
            panel.set_xscale("log")
        for i, (name, (xs, ys)) in enumerate(chart.series.items()):
            colour, _, marker = LOOKS[i % len(LOOKS)]
            style: dict[str, Any] = {"linestyle": _STROKES[i % len(_STROKES)], "linewidth": 2}
            if chart.marks == "points":
                style["linestyle"] = "none"
            if chart.marks == "points" or len(xs) <= _SHOWN:
                style |= {"marker": marker, "markersize": 6}
            panel.plot(*_gaps(chart, xs, ys), color=colour, label=_literal(name), **style)
    if len(chart.series) > 1:
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)


def _gaps(chart: Chart, xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    nan = float("nan")
    return (
        [nan if x is None else x for x in _drawable(xs, chart.log_x)],
        [nan if y is None else y for y in _drawable(ys, chart.log_y)],
    )


def _draw_bars(panel: Any, chart: Chart) -> None:
    """Bars stand side by side over the names of their xs."""
    places = {name: i for i, name in enumerate(_categories(chart))}
    width = 0.8 / len(chart.series)
    for i, (name, (xs, ys)) in enumerate(chart.series.items()):
        left = [places[number(x)] + (i - (len(chart.series) - 1) / 2) * width for x in map(float, xs)]
        panel.bar(left, _gaps(chart, xs, ys)[1], width, color=LOOKS[i % len(LOOKS)].colour, label=_literal(name))
    every = -(-len(places) // _SHOWN)
    panel.set_xticks(list(places.values())[::every], list(places)[::every])


def _draw_table(panel: Any, table: Table) -> None:
    panel.axis("off")
    cells = [[_literal("\n".join(textwrap.wrap(number(cell), 28))) for cell in row] for row in table.rows]
    if not cells:
        return
    drawn = panel.table(
        cells, colLabels=[_literal(heading) for heading in table.headings], cellLoc="left", loc="upper left"
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    drawn.auto_set_column_width(range(len(table.headings)))
    for (row, _), cell in drawn.get_celld().items():
        lines = max(text.count("\n") + 1 for text in cells[row - 1]) if row else 1
        cell.set(edgecolor=LINE, height=0.03 + 0.04 * lines)
        cell.get_text().set(color=INK if row else SOFT)


def _literal(text: str) -> str:
    """Words in which a dollar is a dollar, not the start of a formula."""
    return text.replace("$", r"\$")
