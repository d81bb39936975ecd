"""Figures: one description, drawn on pages by plotly, in files by matplotlib and in terminals in columns.

A `Chart` is what other packages make. A `Plot` says more of how it looks: traces in colours and marks of their own.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from avow.core.chart import Chart, Picture, Table
from avow.extras import require
from avow.report.formatting import number
from avow.report.style import INK, LINE, LOOKS, SOFT, WHISKER, Look
from avow.report.terminal import Columns

# A terminal shows this many points of a long chart, and a line of no more has its points marked.
_SHOWN = 12
# Dashes as plotly and as matplotlib name them: series are told apart without colour too.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STROKES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (9, 2)))

Mode = Literal["line", "line and points", "steps", "points", "open points", "crosses", "bars"]
_LINES = {"line": "lines", "steps": "lines", "line and points": "lines+markers"}


@dataclass(frozen=True)
class Trace:
    """One series: its points, how they are drawn, and what is said of each where a reader points at it.

    `None` among the numbers is a gap; if `hover` is None, nothing is said. `intervals` are of x. `size` may be one for
    each point. Traces of one name are shown and hidden together.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    mode: Mode
    look: Look
    dash: int = 0
    width: float = 2
    size: float | Sequence[float] = 8
    opacity: float = 1.0
    legend: bool = True
    hover: Sequence[str] | None = ()
    intervals: Sequence[tuple[float, float]] = ()

    @property
    def whiskers(self) -> tuple[list[float], list[float]]:
        """How far the intervals reach to the left and to the right of their points."""
        pairs = list(zip(self.x, self.intervals, strict=True))
        return [x - low for x, (low, _) in pairs], [high - x for x, (_, high) in pairs]


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its scale, how its numbers are written (`×` or `%`), and for bars the names along it."""

    title: str
    log: bool = False
    format: str = ""
    names: Sequence[str] = ()
    ticks: Sequence[float] = ()
    range: tuple[float, float] | None = None

    def drawable(self, values: Sequence[Any]) -> list[Any]:
        """Numbers, None where the axis has no place for one; names as a page writes them."""
        if self.names:
            return [escape(name) for name in values]
        numbers = [math.nan if x is None else float(x) for x in values]
        return [x if math.isfinite(x) and (x > 0 or not self.log) else None for x in numbers]


@dataclass(frozen=True)
class Plot:
    """Traces over one pair of axes; `upright` is where a dotted line stands."""

    title: str
    x: Axis
    y: Axis
    traces: Sequence[Trace]
    upright: float | None = None

    @property
    def horizontal(self) -> bool:
        """Whether bars lie on their side: names then go down the y axis."""
        return bool(self.y.names)


def plot_of(picture: Chart | Plot) -> Plot:
    """A plot as it is; a chart with the usual looks in order."""
    if isinstance(picture, Plot):
        return picture
    chart, bars, traces = picture, picture.marks == "bars", []
    for i, (name, (xs, ys)) in enumerate(chart.series.items()):
        mode: Mode = "bars" if bars else "points" if chart.marks == "points" else line_mode(xs)
        x = [number(float(x)) for x in xs] if bars else xs
        traces.append(Trace(name, x, ys, mode, LOOKS[i % len(LOOKS)], i, legend=len(chart.series) > 1))
    names = [number(x) for x in _all_x(chart)] if bars else ()
    zero = not any(y for _, ys in chart.series.values() for y in ys)
    x_axis = Axis(chart.x, chart.log_x and not bars, names=names)
    # An axis of zeros left to itself would go down to −1.
    return Plot(chart.title, x_axis, Axis(chart.y, chart.log_y, range=(0, 1) if zero else None), traces)


def line_mode(xs: Sequence[Any]) -> Mode:
    """A line whose points are marked if there are few."""
    return "line and points" if len(xs) <= _SHOWN else "line"


def picture_from(plain: Mapping[str, Any]) -> Picture:
    """A chart or a table from what its `plain` gave."""
    if "series" not in plain:
        return Table(plain["title"], plain["headings"], plain["rows"])
    # Numbers that JSON cannot hold came as words.
    series = {name: ([float(x) for x in xs], [float(y) for y in ys]) for name, (xs, ys) in plain["series"].items()}
    return Chart(**{**plain, "series": series})


def _all_x(chart: Chart) -> list[float]:
    """Every x at which something stands, in order."""
    return sorted({float(x) for xs, _ in chart.series.values() for x in xs})


# Pages: plotly.


def figure(picture: Chart | Plot, **layout: Any) -> dict[str, Any]:
    """A chart or a plot as plotly reads it; colours of text and grid are left to the page's theme.

    `layout` is what a plot does not say, in plotly's own words: `xaxis={"dtick": 1}`.
    """
    plot = plot_of(picture)
    own: dict[str, Any] = {
        f"{name}axis": _plotly_axis(axis, [value for trace in plot.traces for value in getattr(trace, name)])
        for name, axis in (("x", plot.x), ("y", plot.y))
    }
    if plot.horizontal:
        own["yaxis"]["autorange"] = "reversed"
        own["barmode"] = "overlay"
    if plot.upright is not None:
        line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot"}}
        own["shapes"] = [line | {"x0": plot.upright, "x1": plot.upright}]
    for name, entry in layout.items():
        own[name] = own[name] | entry if name in own and isinstance(entry, dict) else entry
    return {"data": [_plotly_trace(trace, plot) for trace in plot.traces], "layout": own}


def _plotly_axis(axis: Axis, values: list[Any]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"title": {"text": escape(axis.title)}, "type": "log" if axis.log else "linear"}
    if axis.log:
        drawn["exponentformat"] = "power"
        positive = [x for x in axis.drawable(values) if x is not None]
        decades = math.log10(max(positive) / min(positive)) if positive else 0.0
        if decades >= 1:
            drawn["dtick"] = math.ceil(decades / 6)
    if axis.format == "×":
        drawn |= {"ticksuffix": "×", "dtick": "D2", "exponentformat": "none"}
    elif axis.format == "%":
        drawn["tickformat"] = ".0%"
    if axis.ticks:
        drawn |= {"tickvals": list(axis.ticks), "ticktext": [f"{tick:,}" for tick in axis.ticks]}
    if axis.names:
        drawn |= {"type": "category", "categoryorder": "array", "categoryarray": axis.drawable(axis.names)}
    if axis.range is not None:
        drawn["range"] = [math.log10(end) for end in axis.range] if axis.log else list(axis.range)
    return drawn


def _plotly_trace(trace: Trace, plot: Plot) -> dict[str, Any]:
    (colour, symbol, _), name = trace.look, escape(trace.name)
    drawn: dict[str, Any] = {"x": plot.x.drawable(trace.x), "y": plot.y.drawable(trace.y)}
    drawn |= {"name": name, "legendgroup": name, "showlegend": trace.legend}
    marker: dict[str, Any] = {"color": colour}
    if trace.mode == "bars":
        marker["opacity"] = trace.opacity
        drawn |= {"type": "bar", "orientation": "h" if plot.horizontal else "v", "marker": marker}
    else:
        marker |= {"symbol": symbol, "size": trace.size}
        if trace.mode == "open points":
            marker |= {"symbol": f"{symbol}-open", "line": {"width": 2}}
        elif trace.mode == "crosses":
            marker |= {"symbol": "x-thin", "line": {"width": 2, "color": colour}}
        line = {"color": colour, "width": trace.width, "dash": _DASHES[trace.dash % len(_DASHES)]}
        line |= {"shape": "hv"} if trace.mode == "steps" else {}
        drawn |= {"type": "scatter", "mode": _LINES.get(trace.mode, "markers"), "opacity": trace.opacity}
        drawn |= {"line": line, "marker": marker}
    if trace.hover:
        drawn |= {"text": list(trace.hover), "hovertemplate": "%{text}<extra></extra>", "textposition": "none"}
    elif trace.hover is None:
        drawn["hoverinfo"] = "skip"
    if trace.intervals:
        left, right = trace.whiskers
        drawn["error_x"] = {"type": "data", "array": right, "arrayminus": left, "color": WHISKER, "thickness": 2}
    return drawn


# Files: matplotlib.


def png(picture: Picture | Plot) -> bytes:
    """A chart, a table or a plot as a picture file."""
    # A title or a table that is larger than the figure makes the file larger.
    return _saved(drawing(picture), bbox_inches="tight", pad_inches=0.15)


def panels_png(plots: Sequence[Plot], title: str, note: str) -> bytes:
    """Plots side by side on a shared y axis, 1200 × 600, with one legend and a note below them."""
    require("matplotlib", purpose="to draw pictures")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    canvas = Figure(figsize=(12, 6), dpi=100, facecolor="white", layout=ConstrainedLayoutEngine(h_pad=0.1))
    canvas.suptitle(_wrapped(title, 104), x=0.012, ha="left", size=14, weight="bold", color=INK)
    panels = canvas.subplots(1, len(plots), sharey=True, squeeze=False)[0]
    labelled: dict[str, Any] = {}
    for panel, plot in zip(panels, plots, strict=True):
        panel.set_title(_literal(plot.title), loc="left", fontsize=13, color=INK, pad=8)
        _draw(panel, plot)
        panel.set_ylabel("")
        labelled |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    panels[0].set_ylabel(_literal(plots[0].y.title), color=SOFT)
    style = {"frameon": False, "fontsize": 10, "labelcolor": "linecolor", "title": note, "title_fontsize": 9}
    legend = canvas.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled), **style)
    legend.get_title().set_color(SOFT)
    return _saved(canvas)


def drawing(picture: Picture | Plot) -> Any:
    """A chart, a table or a plot as a matplotlib figure."""
    require("matplotlib", purpose="to draw pictures")
    from matplotlib.figure import Figure

    plot = None if isinstance(picture, Table) else plot_of(picture)
    size = (9, 1.6 + 0.5 * len(plot.y.names)) if plot and plot.horizontal else (8, 5)
    canvas = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    panel = canvas.add_subplot()
    panel.set_title(_wrapped(picture.title, 80), loc="left", fontsize=12, color=INK, pad=10, weight="bold")
    if isinstance(picture, Table):
        _draw_table(panel, picture)
    if plot:
        _draw(panel, plot)
        if any(trace.legend for trace in plot.traces):
            panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    return canvas


def _saved(canvas: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    canvas.savefig(file, format="png", **options)
    return file.getvalue()


def _draw(panel: Any, plot: Plot) -> None:
    panel.grid(color=LINE, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(length=0, labelsize=9, colors=SOFT, which="both")
    panel.spines[:].set_visible(False)
    bars = [trace for trace in plot.traces if trace.mode == "bars"]
    for trace in plot.traces:
        if trace.mode == "bars":
            _draw_bars(panel, plot, trace, bars.index(trace), len(bars))
        else:
            _draw_trace(panel, plot, trace)
    if plot.upright is not None:
        panel.axvline(plot.upright, color=SOFT, linewidth=1, linestyle=(0, (1, 2)))
    for name, axis, drawn in (("x", plot.x, panel.xaxis), ("y", plot.y, panel.yaxis)):
        panel.set(**{f"{name}label": _literal(axis.title), f"{name}scale": "log" if axis.log else "linear"})
        drawn.label.set_color(SOFT)
        if axis.format:
            drawn.set_major_formatter(lambda x, _, end=axis.format: f"{x:g}×" if end == "×" else f"{x:.0%}")
            drawn.set_minor_formatter(lambda x, _: "")
        if axis.names:
            every = 1 if plot.horizontal else -(-len(axis.names) // _SHOWN)
            names = [_literal(one) for one in axis.names]
            drawn.set_ticks(range(0, len(names), every), names[::every], color=INK)
        if axis.range is not None:
            panel.set(**{f"{name}lim": axis.range})
    if plot.horizontal:
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")


def _draw_trace(panel: Any, plot: Plot, trace: Trace) -> None:
    style: dict[str, Any] = {"color": trace.look.colour, "alpha": trace.opacity, "linestyle": "none"}
    style["label"] = _literal(trace.name) if trace.legend else "_"
    if trace.mode in _LINES:
        style |= {"linestyle": _STROKES[trace.dash % len(_STROKES)], "linewidth": trace.width}
    if trace.mode == "steps":
        style["drawstyle"] = "steps-post"
    elif trace.mode != "line":
        crossed = {"marker": "x", "markeredgewidth": 2, "markersize": 8}
        style |= crossed if trace.mode == "crosses" else {"marker": trace.look.marker, "markersize": 6}
    if trace.mode == "open points":
        style |= {"markerfacecolor": "white", "markeredgewidth": 1.6}
    panel.plot(_with_gaps(plot.x, trace.x), _with_gaps(plot.y, trace.y), **style)


def _draw_bars(panel: Any, plot: Plot, trace: Trace, i: int, count: int) -> None:
    """Bars over the names of their xs, those of several traces side by side; or on their side with intervals."""
    style = {"color": trace.look.colour, "label": _literal(trace.name)}
    if plot.horizontal:
        more = {"xerr": trace.whiskers, "ecolor": INK, "error_kw": {"lw": 1.2}, "capsize": 3}
        panel.barh([list(plot.y.names).index(name) for name in trace.y], trace.x, 0.62, **style, **more)
        return
    width, names = 0.8 / count, list(plot.x.names)
    left = [names.index(name) + (i - (count - 1) / 2) * width for name in trace.x]
    panel.bar(left, _with_gaps(plot.y, trace.y), width, **style)


def _with_gaps(axis: Axis, values: Sequence[Any]) -> list[float]:
    return [math.nan if x is None else x for x in axis.drawable(values)]


def _draw_table(panel: Any, table: Table) -> None:
    panel.axis("off")
    cells = [[_wrapped(number(cell), 28) for cell in row] for row in table.rows]
    if not cells:
        return
    headings = [_literal(heading) for heading in table.headings]
    drawn = panel.table(cells, colLabels=headings, cellLoc="left", loc="upper left")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    drawn.auto_set_column_width(range(len(table.headings)))
    for (row, _), cell in drawn.get_celld().items():
        lines = max(text.count("\n") + 1 for text in cells[row - 1]) if row else 1
        cell.set(edgecolor=LINE, height=0.03 + 0.04 * lines)
        cell.get_text().set(color=INK if row else SOFT)


def _literal(text: str) -> str:
    """Text in which a dollar is a dollar, not the start of a formula."""
    return text.replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    return _literal("\n".join(textwrap.wrap(text, width)))


# Terminals.


def columns(picture: Picture) -> Columns:
    """A chart or a table for a terminal; of a long chart some points, evenly taken."""
    if isinstance(picture, Chart):
        xs = _all_x(picture)
        if len(xs) > _SHOWN:
            xs = [xs[round(i * (len(xs) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
        by_x = [dict(zip(map(float, xs), map(float, ys), strict=True)) for xs, ys in picture.series.values()]
        points = [(x, *(series.get(x) for series in by_x)) for x in xs]
        picture = Table(f"{picture.title} ({picture.y})", (picture.x, *picture.series), points)
    numeric = [any(isinstance(row[i], int | float) for row in picture.rows) for i in range(len(picture.headings))]
    rows = [[number(cell) for cell in row] for row in picture.rows]
    return Columns("".join("r" if x else "w" for x in numeric), picture.headings, rows, picture.title)
