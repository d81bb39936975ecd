"""Figures: one description, drawn on pages by chart.js, in files by matplotlib and in terminals in columns.

A `Chart` is what other packages make. A `Plot` says more of how it looks: traces in colours and marks of their own.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from avow.core.chart import Chart, Picture, Table
from avow.extras import require
from avow.report.formatting import number
from avow.report.style import INK, LINE, LOOKS, SOFT, WHISKER, Look
from avow.report.terminal import Columns

# A terminal shows this many points of a long chart, and a line of no more has its points marked.
_SHOWN = 12
# Dashes as matplotlib writes them, in the order of chart.js: series can be distinguished without colour too.
_STROKES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (9, 2)))

Mode = Literal["line", "line and points", "steps", "points", "open points", "crosses", "bars"]
_LINES = ("line", "steps", "line and points")


@dataclass(frozen=True)
class Trace:
    """One series: its points, how they are drawn, and what is said of each where a reader points at it.

    `None` among the numbers is a gap. If `hover` is None, nothing is said; of several lines the first is a heading.
    `intervals` are of x. `size` may be one for each point. On pages, `fill` colours what lies between this trace and
    the one before it, and `labels` stand beside the points where there is room. Traces of one name are shown and hidden
    together.
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
    fill: bool = False
    labels: Sequence[str] = ()

    @property
    def whiskers(self) -> tuple[list[float], list[float]]:
        """How far the intervals reach to the left and to the right of their points."""
        pairs = list(zip(self.x, self.intervals, strict=True))
        return [x - low for x, (low, _) in pairs], [high - x for x, (_, high) in pairs]


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its scale, how its numbers are written (`×` or `%`), and for bars the names along it.

    `ticks` are written as `labels`, else as numbers. Without ticks, `every` is the step between them; on a logarithmic
    axis it counts powers of ten.
    """

    title: str
    log: bool = False
    format: str = ""
    names: Sequence[str] = ()
    ticks: Sequence[float] = ()
    labels: Sequence[str] = ()
    every: float | None = None
    range: tuple[float, float] | None = None

    def drawable(self, values: Sequence[Any]) -> list[Any]:
        """Numbers, None where the axis has no place for one; names as they are."""
        if self.names:
            return list(values)
        numbers = [math.nan if x is None else float(x) for x in values]
        return [x if math.isfinite(x) and (x > 0 or not self.log) else None for x in numbers]


@dataclass(frozen=True)
class Plot:
    """Traces over one pair of axes; a dotted line stands at `upright`, and on pages one lies at each of `levels`, with
    its words.
    """

    title: str
    x: Axis
    y: Axis
    traces: Sequence[Trace]
    upright: float | None = None
    levels: Mapping[float, str] = field(default_factory=dict)

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


# Pages: chart.js.


def figure(
    picture: Chart | Plot, x: Mapping[str, Any] | None = None, y: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A chart or a plot as chart.js draws it, in JSON's types; colours of text and grid are the page's.

    `x` and `y` replace fields of the axes: `x={"range": (0, 1)}`.
    """
    plot = plot_of(picture)
    plot = replace(plot, x=replace(plot.x, **(x or {})), y=replace(plot.y, **(y or {})))
    described: dict[str, Any] = {"title": plot.title, "x": _axis(plot.x), "y": _axis(plot.y)}
    if plot.upright is not None:
        described["upright"] = plot.upright
    if plot.levels:
        described["levels"] = [{"at": at, "text": text} for at, text in plot.levels.items()]
    return described | {"traces": [_trace(trace, plot) for trace in plot.traces]}


def _axis(axis: Axis) -> dict[str, Any]:
    described: dict[str, Any] = {"title": axis.title}
    sequences = {"names": axis.names, "ticks": axis.ticks, "labels": axis.labels, "range": axis.range or ()}
    described |= {name: list(values) for name, values in sequences.items() if len(values)}
    single = {"log": axis.log, "format": axis.format, "every": axis.every}
    return described | {name: value for name, value in single.items() if value}


def _trace(trace: Trace, plot: Plot) -> dict[str, Any]:
    described: dict[str, Any] = {"name": trace.name, "mode": trace.mode, "legend": trace.legend}
    described |= {"x": plot.x.drawable(trace.x), "y": plot.y.drawable(trace.y)}
    described |= {"colour": trace.look.colour, "symbol": trace.look.symbol, "dash": trace.dash, "width": trace.width}
    described["size"] = trace.size if isinstance(trace.size, float | int) else list(trace.size)
    if trace.opacity != 1:
        described["opacity"] = trace.opacity
    if trace.hover is None or len(trace.hover):
        described["hover"] = None if trace.hover is None else list(trace.hover)
    if trace.labels:
        described["labels"] = list(trace.labels)
    if trace.intervals:
        described |= {"intervals": [list(ends) for ends in trace.intervals], "whisker": WHISKER}
    return described | ({"fill": True} if trace.fill else {})


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
