"""The ReLU builder's figures: the network over what it follows, its error, and units against error.

Axes stand still while a slider moves: they reach to round numbers, and errors are drawn in parts of what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from avow.core.chart import Chart
from avow.report.charts import figure
from avow.report.style import LOOKS

Figure = dict[str, Any]
Line = tuple[Any, Any]

# More kinks than these are no longer told apart.
_MARKED = 40
# Points of an error that are drawn of each piece, at least; of so many pieces every point is.
_FINE = 100
# Numbers of units that an axis names: those of a formula lie within a decade or two.
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 400)


class Followed(NamedTuple):
    """A function and a network at the same points, and where the network's lines meet."""

    name: str
    x: Any
    true: Any
    network: Any
    kinks: Any
    heights: Any


def graph(found: Followed) -> Figure:
    """The network over the function."""
    lines = {
        found.name: (_few(found.x[::4]), _few(found.true[::4])),
        "network, with its kinks": (_few(found.kinks), _few(found.heights)),
    }
    made = figure(Chart("", "x", "value", lines))
    for trace, look in zip(made["data"], ({"width": 5}, {"width": 2, "dash": "solid"}), strict=True):
        trace["line"] |= look
        trace["marker"]["size"] = 7
    made["data"][0]["opacity"] = 0.55
    made["data"][1]["mode"] = "lines+markers" if len(found.kinks) <= _MARKED else "lines"
    made["layout"]["xaxis"]["range"] = _ends(found.x)
    made["layout"]["yaxis"]["range"] = _ends(found.true, 0.06)
    return made


def error(found: Followed, allowed: float) -> Figure:
    """The error in parts of what is allowed, between the lines it must keep to."""
    every = 2 if len(found.kinks) <= _FINE else 1
    off = np.round((found.network - found.true)[::every] / allowed, 3)
    made = figure(Chart("", "x", "error", {"error": (_few(found.x[::every]), off)}))
    made["layout"]["xaxis"]["range"] = _ends(found.x)
    made["layout"]["yaxis"] |= {"range": [-1.35, 1.35], "tickvals": [-1, 0, 1], "ticktext": ["−ε", "0", "ε"]}
    made["layout"]["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"dash": "dot", "width": 1.5}}
        for y in (1, -1)
    ]
    return made


def growth(series: Mapping[str, Line], units: int, allowed: float, own: bool) -> Figure:
    """Units against error, both in factors, and where this network stands."""
    here = {"this one": ([allowed], [float(units)])}
    made = figure(Chart("", "error allowed", "hidden units", {**series, **here}, log_x=True, log_y=True))
    decades, most = ((-4.2, -0.4), 400) if own else ((-7.2, -0.9), 512)
    made["layout"]["xaxis"] |= {"dtick": 1 if own else 2, "range": list(decades)}
    made["layout"]["yaxis"] |= {"range": [-0.1, math.log10(most) + 0.1]}
    made["layout"]["yaxis"] |= {"tickvals": _COUNTS} if own else {"dtick": 1}
    # The caption names it, and the page's style has its colour: a third name would leave a small plot no room.
    made["data"][-1] |= {"marker": {"color": LOOKS[2].colour, "symbol": LOOKS[2].symbol, "size": 13}}
    made["data"][-1] |= {"showlegend": False, "mode": "markers"}
    made["data"][0]["showlegend"] = not own
    return made


def _few(numbers: Any) -> Any:
    """The same numbers with as many digits as a screen can show."""
    span = float(np.ptp(numbers)) or 1.0
    return np.round(numbers, max(0, 5 - math.floor(math.log10(span))))


def _ends(numbers: Any, room: float = 0.03) -> list[float]:
    """From where to where an axis reaches: to the next round numbers, and a part of the way beyond."""
    low, high = float(np.min(numbers)), float(np.max(numbers))
    if not high > low:
        return [low - 1, high + 1]
    step = 2.0 ** math.floor(math.log2((high - low) / 5))
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return [low - room * (high - low), high + room * (high - low)]
