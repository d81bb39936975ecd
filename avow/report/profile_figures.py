"""Heat maps of a model's heads, layers from left to right, as plotly reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

from avow.integrations.transformers.profiling import KINDS, Head, Profile
from avow.report.formatting import number
from avow.report.style import LOOKS

Figure = dict[str, Any]

# From pale to strong on white and on black alike: the middle of both is where most heads are.
_SCALE = "Viridis"


def kinds_figure(profile: Profile) -> Figure:
    """Which kind each head is, by colour and by the first letter of its name."""
    steps = [(i / len(KINDS), LOOKS[i].colour) for i in range(len(KINDS))]
    scale = [[edge, colour] for low, colour in steps for edge in (low, low + 1 / len(KINDS))]
    figure = _map(profile, lambda head: KINDS.index(head.figures.kind), "kind", lambda head: head.figures.kind)
    trace = figure["data"][0]
    trace |= {"colorscale": scale, "zmin": -0.5, "zmax": len(KINDS) - 0.5, "zsmooth": False}
    trace["colorbar"] |= {"tickvals": list(range(len(KINDS))), "ticktext": list(KINDS)}
    letters = [[None if x is None else KINDS[x][0] for x in row] for row in trace["z"]]
    trace |= {"text": letters, "texttemplate": "%{text}", "textfont": {"color": "#fff", "size": 11}}
    return figure


def reading_figure(profile: Profile, method: str) -> Figure:
    """What the cheapest certified setting of a method costs each head by itself, relative to exact attention."""

    def share(head: Head) -> float | None:
        offer = head.within_tolerance(method, profile.tol)
        return None if offer is None else offer.share if offer.measured is None else offer.measured

    def told(head: Head) -> str:
        found = share(head)
        return "no promise" if found is None else f"{found:.0%}"

    figure = _map(profile, share, "", told)
    figure["data"][0] |= {"zmin": 0, "zmax": 1, "reversescale": True}
    figure["data"][0]["colorbar"] |= {"tickformat": ".0%"}
    return figure


def number_figure(profile: Profile, value: Callable[[Head], float], log: bool = False) -> Figure:
    """Any number of each head; on a logarithmic scale of colours where it spans decades."""
    if not log:
        return _map(profile, value, "", lambda head: number(value(head)))
    figure = _map(profile, lambda head: math.log10(max(value(head), 1e-300)), "", lambda head: f"{value(head):.3g}")
    numbers = [x for row in figure["data"][0]["z"] for x in row if x is not None]
    low, high = math.floor(min(numbers)), max(math.ceil(max(numbers)), math.floor(min(numbers)) + 1)
    ticks = list(range(low, high + 1))
    figure["data"][0] |= {"zmin": low, "zmax": high}
    figure["data"][0]["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    return figure


def _map(profile: Profile, value: Callable[[Head], float | None], title: str, told: Callable[[Head], str]) -> Figure:
    layers = list(profile.layers.values())
    most = max(len(heads) for heads in layers)

    def grid(cell: Callable[[int, Head], Any]) -> list[list[Any]]:
        return [
            [cell(i, heads[row]) if row < len(heads) else None for i, heads in enumerate(layers)] for row in range(most)
        ]

    names = [escape(name) for name in profile.layers]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": grid(lambda _, head: value(head)),
        "customdata": grid(lambda i, head: f"{names[i]}, {told(head)}"),
        "hovertemplate": "head %{y} of %{customdata}<extra></extra>",
        "colorscale": _SCALE,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": title}},
    }
    axes = {
        "xaxis": {"title": {"text": "layer"}, "showgrid": False, "dtick": 1 if len(layers) <= 16 else 5},
        "yaxis": {
            "title": {"text": "head"},
            "showgrid": False,
            "autorange": "reversed",
            "dtick": 1 if most <= 12 else 4,
        },
    }
    return {"data": [trace], "layout": axes}
