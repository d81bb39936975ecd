"""The page's figures as plotly reads them: plain dictionaries, colours of text and grid left to the page's theme."""

from __future__ import annotations

from typing import Any

from avow.report import formatting
from avow.report.compare import Board, Comparison, Row
from avow.report.style import look

Figure = dict[str, Any]


def frontier_figure(board: Board) -> Figure:
    """Time against error: a filled mark where a method was measured, an open one where its bound lies."""
    traces: list[dict[str, Any]] = [_frontier_line(board)]
    for name in dict.fromkeys(row.method.name for row in board.rows):
        rows = [row for row in board.rows if row.method.name == name and row.measured is not None]
        if rows:
            traces += _own_mechanism(name, rows) if rows[0].own_mechanism else _measured_and_proved(name, rows)
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "time relative to exact attention"},
            "dtick": "D2",
            "ticksuffix": "×",
        },
        "yaxis": {"type": "log", "title": {"text": "error"}, "exponentformat": "power", "dtick": 2},
        "shapes": [
            {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot"}}
        ],
    }
    return {"data": traces, "layout": layout}


def _measured_and_proved(name: str, rows: list[Row]) -> list[dict[str, Any]]:
    colour, symbol, _ = look(name)
    found = [(row, row.measured) for row in rows if row.measured is not None]
    bound = [(row, m) for row, m in found if m.bound is not None]
    stems = [(m.ratio, y) for _, m in bound for y in (m.error, m.bound, None)]
    shared = {"legendgroup": name, "hovertemplate": "%{text}<extra></extra>"}
    return [
        _trace(
            [x for x, _ in stems], [y for _, y in stems], "lines", line={"color": colour, "width": 1}, hoverinfo="skip"
        )
        | {"legendgroup": name},
        _trace([m.ratio for _, m in found], [m.error for _, m in found], "markers", name=name, showlegend=True)
        | shared
        | {"text": [_hover(row) for row, _ in found], "marker": {"color": colour, "symbol": symbol, "size": 10}},
        _trace([m.ratio for _, m in bound], [m.bound for _, m in bound], "markers")
        | shared
        | {"text": [_hover(row) for row, _ in bound]}
        | {"marker": {"color": colour, "symbol": f"{symbol}-open", "size": 10, "line": {"width": 2}}},
    ]


def _own_mechanism(name: str, rows: list[Row]) -> list[dict[str, Any]]:
    """Another mechanism's answer has a distance from softmax attention, and no promise about it."""
    found = [(row, row.measured) for row in rows if row.measured is not None]
    marker = {
        "color": look(name).colour,
        "symbol": "x-thin",
        "size": 10,
        "line": {"width": 2, "color": look(name).colour},
    }
    points = [m.ratio for _, m in found], [m.to_softmax for _, m in found]
    texts = {"text": [_hover(row) for row, _ in found], "hovertemplate": "%{text}<extra></extra>"}
    return [_trace(*points, "markers", name=f"{name} (its distance)", showlegend=True, marker=marker) | texts]


def _frontier_line(board: Board) -> dict[str, Any]:
    best = sorted((row.measured.ratio, row.measured.to_softmax) for row in board.rows if row.frontier and row.measured)
    line = {"shape": "hv", "width": 6, "color": "rgba(125,133,144,.22)"}
    drawn = _trace([x for x, _ in best], [y for _, y in best], "lines", name="frontier", showlegend=True, line=line)
    return drawn | {"hoverinfo": "skip"}


def _trace(x: list[Any], y: list[Any], mode: str, **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "x": x, "y": y, "mode": mode, "showlegend": False, **more}


def _hover(row: Row) -> str:
    found = row.measured
    assert found is not None
    lines = [
        f"<b>{row.label}</b>",
        f"{formatting.ratio(found.ratio)} of exact's time",
        f"{formatting.memory(found.peak_bytes)} at the peak",
    ]
    if row.own_mechanism:
        lines.append(f"{formatting.error(found.to_softmax)} from softmax attention: it is another mechanism")
    else:
        lines.append(f"{formatting.error(found.error)} measured, {formatting.error(found.bound)} proved ({found.kind})")
        own = f"{formatting.error(found.relative_error)} measured, {formatting.error(found.relative_bound)} proved"
        lines.append(f"of the answer's length: {own}")
    return "<br>".join(lines)


def scaling_figures(comparison: Comparison) -> list[Figure]:
    """Seconds, then bytes, against the number of keys."""
    return [
        _curves(comparison, "seconds", "seconds a call", "s", 1.0),
        _curves(comparison, "peak_bytes", "memory, MiB", "MiB", 2.0**-20),
    ]


def _curves(comparison: Comparison, field: str, title: str, unit: str, scale: float) -> Figure:
    traces = []
    for name in dict.fromkeys(point.method.name for point in comparison.scaling):
        points = [point for point in comparison.scaling if point.method.name == name]
        colour, symbol, _ = look(name)
        y = [getattr(point, field) * scale for point in points]
        drawn = _trace([point.length for point in points], y, "lines+markers", name=name, showlegend=True)
        template = "%{x:,} keys: %{y:.3g} " + unit
        style = {
            "line": {"color": colour, "width": 2},
            "marker": {"symbol": symbol, "size": 8},
            "hovertemplate": template,
        }
        traces.append(drawn | style)
    lengths = sorted({point.length for point in comparison.scaling})
    ticks = {"tickvals": lengths, "ticktext": [f"{length:,}" for length in lengths]}
    layout = {
        "xaxis": {"type": "log", "title": {"text": "keys"}, **ticks},
        "yaxis": {"type": "log", "title": {"text": title}, "dtick": 1},
    }
    return {"data": traces, "layout": layout}
