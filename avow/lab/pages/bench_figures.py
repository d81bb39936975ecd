"""The bench's figures as plotly reads them: where a method breaks, every row's bound, every method's cost and error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from avow.bench.compare import frontier
from avow.lab.pages.bench_heads import Tried
from avow.report.formatting import error, ratio
from avow.report.style import look

Figure = dict[str, Any]
Points = Sequence[tuple[float, float]]

# Below this an error is rounding, and one axis holds all methods.
_FLOOR, _CEILING = 1e-9, 8.0
# Some hundred rows tell the story; the one nearest to its bound is always among them.
_MARKS = 200
_USELESS = "no use"
_LETTERS = {"square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼", "pentagon": "⬟", "hexagon": "⬢"}
_PRICES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


def breaking(
    name: str, title: str, places: Sequence[float], found: Sequence[Tried], here: tuple[float, Tried]
) -> Figure:
    """Measured error and certified bound over the one number that decides, and where the reader stands."""
    colour = look(name).colour
    line = {"color": colour, "width": 2.5}
    own = [(place, one.error) for place, one in zip(places, found, strict=True)]
    promised = [(place, one.bound) for place, one in zip(places, found, strict=True)]
    place, one = here
    traces = [
        _trace(promised, "lines", name="certified bound", line=line | {"dash": "dash"}),
        _trace(own, "lines", name="measured error", line=line, fill="tonexty", fillcolor=_faint(colour)),
        _trace([(place, one.bound)], "markers", marker=_marker(colour, "circle-open", 13)),
        _trace([(place, one.error)], "markers", marker=_marker(colour, "circle", 13)),
    ]
    if not math.isnan(one.read):
        read = [(at, one.read) for at, one in zip(places, found, strict=True)]
        traces.append(
            _trace(read, "lines", name="share of tokens read", line={"color": "#7d8590", "width": 2, "dash": "dot"})
        )
    for trace in traces[2:4]:
        trace["showlegend"] = False
    layout = _layout(title, "error", min(y for _, y in [*own, (place, one.error)])) | {"shapes": [_level(1.0)]}
    # Room for a mark at either end, and never another: what moves along the knob is moved alone.
    ends = math.log10(places[0]), math.log10(places[-1])
    room = 0.04 * (ends[1] - ends[0])
    layout["xaxis"] |= {"range": [ends[0] - room, ends[1] + room], "dtick": 1}
    return {"data": traces, "layout": layout}


def promises(found: Tried) -> Figure:
    """Every row: what it is off by, and what was promised; on the line a bound would be met exactly."""
    colour, symbol, _ = look(found.method.name)
    rows = sorted(zip(found.errors.tolist(), found.bounds.tolist(), strict=True), key=_nearness)
    rows = rows[:: -(-len(rows) // _MARKS)]
    kept = _trace(
        rows, "markers", name="a row", marker=_marker(colour, symbol, 7) | {"opacity": 0.55}, showlegend=False
    )
    kept["hovertemplate"] = "measured %{x:.1e}<br>promised %{y:.1e}<extra></extra>"
    even = _trace(
        [(_FLOOR, _FLOOR), (_CEILING, _CEILING)], "lines", line={"color": "#7d8590", "width": 1, "dash": "dot"}
    )
    even |= {"showlegend": False, "hoverinfo": "skip"}
    layout = _layout("measured error of a row", "its bound", min(error for error, _ in rows))
    layout["xaxis"] |= {"range": list(layout["yaxis"]["range"]), "dtick": 1}
    return {"data": [even, kept], "layout": layout}


def costs(found: Sequence[Tried], prices: Sequence[float], title: str) -> Figure:
    """Every setting of every method: what it costs beside exact attention, its error, and above it its bound."""
    points = [(price, max(one.error, _FLOOR)) for one, price in zip(found, prices, strict=True)]
    best = sorted(point for point, wins in zip(points, frontier(points), strict=True) if wins)
    line = {"shape": "hv", "width": 6, "color": "rgba(125,133,144,.25)"}
    traces = [_trace(best, "lines", name="frontier", line=line, hoverinfo="skip")]
    for name in dict.fromkeys(one.method.name for one in found):
        some = [(one, price) for one, price in zip(found, prices, strict=True) if one.method.name == name]
        colour, symbol, _ = look(name)
        texts = {
            "text": [_hover(*pair) for pair in some],
            "hovertemplate": "%{text}<extra></extra>",
            "legendgroup": name,
        }
        measured = [(price, one.error) for one, price in some]
        if some[0][0].own_mechanism:
            mark = {"color": colour, "symbol": "x-thin", "size": 10, "line": {"width": 2, "color": colour}}
            traces.append(
                _trace(measured, "markers", name=f"{words_of(name)} (another mechanism)", marker=mark) | texts
            )
            continue
        stems = [(price, y) for one, price in some for y in (one.error, one.bound, math.nan)]
        bounds = [(price, one.bound) for one, price in some]
        traces += [
            _trace(
                stems, "lines", line={"color": colour, "width": 1}, hoverinfo="skip", showlegend=False, legendgroup=name
            ),
            _trace(measured, "markers", name=words_of(name), marker=_marker(colour, symbol, 10)) | texts,
            _trace(bounds, "markers", showlegend=False, marker=_marker(colour, f"{symbol}-open", 10)) | texts,
        ]
    layout = _layout(title, "error", min(one.error for one in found))
    layout["xaxis"] |= {"tickvals": list(_PRICES), "ticktext": [f"{price:g}×" for price in _PRICES]}
    upright = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot"}}
    # A legend of plotly's would leave a phone no room for the figure.
    return {"data": traces, "layout": layout | {"shapes": [upright], "showlegend": False}}


def legend(found: Sequence[Tried]) -> list[dict[str, str]]:
    """How each method is drawn, in words and as a letter."""
    kinds = {one.method.name: one.own_mechanism for one in found}
    return [
        {
            "words": f"{words_of(name)}, another mechanism" if own else words_of(name),
            "colour": look(name).colour,
            "mark": "×" if own else _LETTERS.get(look(name).symbol, "●"),
        }
        for name, own in kinds.items()
    ]


def words_of(name: str) -> str:
    """A method's name as a reader says it."""
    return name.replace("_", " ")


def _nearness(row: tuple[float, float]) -> float:
    error, bound = row
    return -error / bound if bound > 0 else -math.inf


def _hover(found: Tried, price: float) -> str:
    lines = [f"<b>{found.label}</b>", f"{ratio(price)} of exact attention"]
    if found.own_mechanism:
        return "<br>".join([*lines, f"{error(found.error)} from softmax attention: it is another mechanism"])
    return "<br>".join([*lines, f"{error(found.error)} measured, {error(found.bound)} promised"])


def _layout(x: str, y: str, lowest: float) -> dict[str, Any]:
    """Two axes in factors; the upright one holds all from the lowest error, in steps that do not follow every move."""
    power = {"type": "log", "exponentformat": "power"}
    bottom = max(2 * math.floor(math.log10(max(lowest, _FLOOR)) / 2 - 0.05), math.log10(_FLOOR))
    return {
        "xaxis": {**power, "title": {"text": x}},
        "yaxis": {
            **power,
            "title": {"text": y},
            "range": [bottom, math.log10(_CEILING)],
            "dtick": 1 if bottom > -5 else 2,
        },
    }


def _level(y: float) -> dict[str, Any]:
    label = {"text": _USELESS, "textposition": "start", "yanchor": "top", "font": {"size": 11}}
    line = {"width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line, "label": label}


def _trace(points: Points, mode: str, **more: Any) -> dict[str, Any]:
    """Points, those below the floor on it; gaps where there is no number."""
    y = [max(y, _FLOOR) if math.isfinite(y) else None for _, y in points]
    x = [max(x, _FLOOR) if mode == "markers" else x for x, _ in points]
    return {"type": "scatter", "x": x, "y": y, "mode": mode, **more}


def _marker(colour: str, symbol: str, size: int) -> dict[str, Any]:
    return {"color": colour, "symbol": symbol, "size": size, "line": {"width": 2, "color": colour}}


def _faint(colour: str) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},.12)"
