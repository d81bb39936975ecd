"""Accuracies with their intervals, as plotly and as matplotlib draw them."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from avow.report.knowledge_table import Line, lines
from avow.report.style import INK, LOOKS, SOFT, calm
from avow.training import Evaluation, knowledge
from avow.training.knowledge import Experiment

# What has read has a colour of its own, what has not is grey.
NOT_READ, WHISKER = "#9aa4af", "#7d8590"


def colour(experiment: Experiment, label: str) -> str:
    """The colour of an arm, the same in every figure."""
    read = [row.label for row in experiment.rows if row.label != knowledge.NOT_READ]
    return LOOKS[read.index(label) % len(LOOKS)].colour if label in read else NOT_READ


def bars(experiment: Experiment) -> dict[str, Any]:
    """The figure as plotly reads it; colours of text and grid are left to the page's theme."""
    found = _judged(experiment)
    accuracies = [known.accuracy for _, known in found]
    whiskers = [known.interval for _, known in found]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [line.label for line, _ in found],
        "x": accuracies,
        # Pale enough that a whisker is seen upon it, in the light and in the dark.
        "marker": {"color": [colour(experiment, line.label) for line, _ in found], "opacity": 0.6},
        "error_x": {
            "type": "data",
            "array": [high - x for x, (_, high) in zip(accuracies, whiskers, strict=True)],
            "arrayminus": [x - low for x, (low, _) in zip(accuracies, whiskers, strict=True)],
            "color": WHISKER,
            "thickness": 2,
        },
        "text": [f"{known.right}/{known.asked}" for _, known in found],
        "textposition": "none",
        "hovertemplate": "%{y}: %{x:.1%}, %{text}<extra></extra>",
    }
    axes = {
        "xaxis": {"title": {"text": "questions answered right"}, "tickformat": ".0%", "range": [0, 1.02], "dtick": 0.2},
        "yaxis": {"type": "category", "autorange": "reversed", "title": {"text": ""}},
    }
    return {"data": [trace], "layout": {**axes, "showlegend": False}}


def png(experiment: Experiment) -> bytes:
    """The same as a picture file."""
    from matplotlib.figure import Figure

    found = _judged(experiment)
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(found)), dpi=120, facecolor="white", layout="constrained")
    panel = figure.add_subplot()
    calm(panel)
    panel.grid(visible=False, axis="y")
    title = "\n".join(textwrap.wrap(experiment.headline, 78)).replace("$", r"\$")
    panel.set_title(title, loc="left", fontsize=12, color=INK, weight="bold", pad=10)
    places = range(len(found))
    accuracies = [known.accuracy for _, known in found]
    whiskers = [known.interval for _, known in found]
    errors = [
        [x - low for x, (low, _) in zip(accuracies, whiskers, strict=True)],
        [high - x for x, (_, high) in zip(accuracies, whiskers, strict=True)],
    ]
    colours = [colour(experiment, line.label) for line, _ in found]
    panel.barh(places, accuracies, 0.62, color=colours, xerr=errors, ecolor=INK, error_kw={"lw": 1.2}, capsize=3)
    for place, (_, known) in zip(places, found, strict=True):
        told = f"{known.accuracy:.0%}"
        panel.text(known.interval[1] + 0.012, place, told, va="center", color=INK, fontsize=10)
    panel.set_yticks(places, [line.label.replace("$", r"\$") for line, _ in found], color=INK, fontsize=10)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.06)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    panel.set_xlabel("questions answered right, with 95% intervals", color=SOFT)
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return held.getvalue()


def _judged(experiment: Experiment) -> list[tuple[Line, Evaluation]]:
    return [(line, line.evaluation) for line in lines(experiment) if line.evaluation is not None]
