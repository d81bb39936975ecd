"""The ReLU builder: x², or a formula of the reader's, from a few units, with the error that is proved.

Axes stand still while a slider moves: they reach to round numbers, and errors are drawn in parts of what is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from avow.errors import InputError, ParameterError, ToleranceUnreachable
from avow.lab.page import Answer, Inputs, Page, Presets, Words, control, expectation, judgement
from avow.report.charts import Axis, Mode, Plot, Trace, figure, line_mode
from avow.report.style import LOOKS
from avow.theory.constructions import relu_piecewise, relu_square
from avow.theory.constructions.formulas import FUNCTIONS, parse
from avow.theory.constructions.relu import ReluNetwork
from avow.theory.constructions.relu_curves import Curve, chain, curve_of

Points = tuple[list[float], list[float]]

# What a preview can follow while a slider moves.
_MOST_UNITS = 400
_POINTS = 1601
# Tolerances at which units are counted for the figure of units against error, so many of them all together.
_TOLERANCES = (0.1, 0.03, 0.01, 0.003, 0.001)
_MOST_COUNTED = 400
# More kinks than these are not marked; from so many pieces on, every point of an error is drawn.
_MARKED, _FINE = 40, 100
# Numbers of units that an axis names: those of a formula lie within a decade or two.
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 400)

_FORMULA, _SQUARE = {"follow": ("a formula",)}, {"follow": ("x² on [0, 1]",)}
_SYNTAX = f"+ - * / **, sqrt, {', '.join(FUNCTIONS)}, pi, e. It is read, never run."
_WORDS = Words("relu.txt")


@dataclass(frozen=True)
class ReluInputs(Inputs):
    follow: Literal["x² on [0, 1]", "a formula"] = control("x² on [0, 1]", "What to follow")
    formula: str = control("sin(3*x)", "A formula in x", longest=400, about=_SYNTAX, when=_FORMULA)
    start: float = control(0.0, "From", (-10, 10), step=0.1, when=_FORMULA)
    end: float = control(3.0, "To", (-10, 10), step=0.1, when=_FORMULA)
    within: float = control(0.03, "ε: the error allowed", (1e-4, 0.3), log=True, when=_FORMULA)
    layers: Literal["one", "many"] = control("one", "Hidden layers", when=_SQUARE)
    eps: float = control(0.01, "ε: the error allowed", (1e-6, 0.1), log=True, when=_SQUARE)

    @property
    def is_formula(self) -> bool:
        return self.follow == "a formula"

    @property
    def allowed(self) -> float:
        return self.within if self.is_formula else self.eps

    @property
    def interval(self) -> tuple[float, float]:
        return (self.start, self.end) if self.is_formula else (0.0, 1.0)


class Sketch(NamedTuple):
    """A function and a network at the same points, where the network's lines meet, and the units of its layers."""

    name: str
    x: Any
    true: Any
    network: Any
    kinks: Any
    heights: Any
    layers: list[int]


def preview(inputs: ReluInputs) -> Answer:
    """The network against what it follows, its units, and its error as float64 sees it at some points."""
    with _said_of_fields(inputs):
        sketch = _sketch(inputs)
    units, error = sum(sketch.layers), float(np.abs(sketch.true - sketch.network).max())
    growth = _growth({"one layer": ([], [])} if inputs.is_formula else _both_ways(), units, inputs)
    if inputs.is_formula:
        growth["traces"][0] = None  # counting takes longer than a slider waits: it comes with the verdict
    holds = error <= inputs.allowed
    return {
        "live": expectation(holds, _WORDS.say("expects", units, len(sketch.layers), error, holds, inputs.allowed)),
        "python": _WORDS.html("python", inputs, _typed(inputs.formula) if inputs.is_formula else "").strip(),
        "facts": _facts(inputs, units, error),
        "built": sketch.layers,
        "figures": {"graph": _graph(sketch), "error": _error(sketch, inputs.allowed), "growth": growth},
    }


def verdict(inputs: ReluInputs) -> Answer:
    """The weights that are returned, proved: in fractions for x², in balls for a formula."""
    with _said_of_fields(inputs):
        network = _network(inputs)
    proof = network.verify()
    x = np.linspace(*inputs.interval, _POINTS)
    true = _curve(inputs.formula).values(x) if inputs.is_formula else x * x
    measured = float(np.abs(true - _values(network, x)).max())
    holds = bool(proof) and proof.achieved <= inputs.allowed
    tone, word = ("proved", "kept") if holds else ("refuted", "not kept")
    says = _WORDS.say("says", network, proof.achieved, holds, inputs.allowed)
    answer = {
        "facts": _facts(inputs, network.units, measured, proof.achieved),
        "verdict": judgement(tone, word, says, [proof.promise, *proof.steps]),
        "built": [len(bias) for _, bias in network.layers[:-1]],
    }
    if inputs.is_formula:
        series = {"one layer": _counted(inputs.formula, inputs.start, inputs.end)}
        answer["figures"] = {"growth": _growth(series, network.units, inputs)}
    return answer


def _facts(inputs: ReluInputs, units: int, measured: float, proved: float | None = None) -> list[dict[str, str]]:
    """How many units a formula takes, or x² either way, and how far off the network is."""
    wide, deep = (None, None) if inputs.is_formula else (_square(inputs.eps, False), _square(inputs.eps, True))
    return _WORDS.facts("facts", inputs.layers, units, wide, deep, measured, _POINTS, proved)


@contextlib.contextmanager
def _said_of_fields(inputs: ReluInputs) -> Iterator[None]:
    """What is wrong with a formula is said of the field it was typed into, or of the slider that asks too much."""
    if inputs.is_formula and not inputs.start < inputs.end:
        raise ParameterError("end", inputs.end, f"must lie beyond the start, {inputs.start:g}", "move it to the right")
    try:
        yield
    except (InputError, ToleranceUnreachable) as error:
        field = "within" if error.name.endswith("eps") else "formula"
        value = error.value if field == "formula" else f"{inputs.within:g}"
        raise type(error)(field, value, error.rule, error.remedy) from error


def _sketch(inputs: ReluInputs) -> Sketch:
    x = np.linspace(*inputs.interval, _POINTS)
    if inputs.is_formula:
        curve = _curve(inputs.formula)
        points = chain(curve, inputs.interval, inputs.within, _MOST_UNITS)
        kinks, heights = (np.array(column) for column in zip(*points, strict=True))
        return Sketch(curve.text, x, curve.values(x), np.interp(x, kinks, heights), kinks, heights, [len(points) - 1])
    network = _network(inputs)
    kinks = np.linspace(0.0, 1.0, 2**network.depth + 1)
    if network.depth == 1:
        weight, bias = (part.flatten().numpy() for part in network.layers[0])
        kinks = np.concatenate(([0.0], np.sort(-bias / weight), [1.0]))
    layers = [len(bias) for _, bias in network.layers[:-1]]
    return Sketch("x²", x, x * x, _values(network, x), kinks, _values(network, kinks), layers)


@functools.lru_cache(64)
def _typed(formula: str) -> str:
    """A formula as SymPy writes it: what was read of it, and nothing else that a reader would run."""
    return str(parse(formula))


@functools.lru_cache(64)
def _curve(formula: str) -> Curve:
    return curve_of(parse(formula))


@functools.lru_cache(64)
def _square(eps: float, deep: bool) -> ReluNetwork:
    return relu_square(eps, deep)


def _network(inputs: ReluInputs) -> ReluNetwork:
    if inputs.is_formula:
        return relu_piecewise(parse(inputs.formula), inputs.interval, inputs.within)
    return _square(inputs.eps, inputs.layers == "many")


def _values(network: ReluNetwork, x: Any) -> Any:
    with torch.no_grad():
        return network.as_module()(torch.from_numpy(x)[:, None])[:, 0].numpy()


@functools.lru_cache(64)
def _counted(formula: str, start: float, end: float) -> Points:
    """Units that a formula takes at some tolerances, until there are too many."""
    counts: list[tuple[float, int]] = []
    for eps in _TOLERANCES:
        # Four times as fine takes about twice as many: what would be too many is not begun.
        left = _MOST_COUNTED - sum(units for _, units in counts)
        if counts and counts[-1][1] * math.sqrt(counts[-1][0] / eps) > left:
            break
        try:
            counts.append((eps, len(chain(_curve(formula), (start, end), eps, left)) - 1))
        except (InputError, ToleranceUnreachable):
            break
    return [float(eps) for eps, _ in counts], [float(units) for _, units in counts]


def _both_ways() -> dict[str, Points]:
    """Off by 1/(2(2K+1)²) with K units of one layer [claim relu-square], by 4^-(m+1) with 3m − 1 of m layers
    [claim relu-square-deep]."""
    wide, deep = [2.0**i for i in range(10)], range(1, 11)
    return {
        "one layer": ([1 / (2 * (2 * k + 1) ** 2) for k in wide], wide),
        "many layers": ([4.0 ** -(m + 1) for m in deep], [3.0 * m - 1 for m in deep]),
    }


def _graph(sketch: Sketch) -> dict[str, Any]:
    """The network over the function."""
    mode: Mode = "line and points" if len(sketch.kinks) <= _MARKED else "line"
    kinks, heights = _few(sketch.kinks), _few(sketch.heights)
    traces = [
        Trace(sketch.name, _few(sketch.x[::4]), _few(sketch.true[::4]), "line", LOOKS[0], width=5, opacity=0.55),
        Trace("network, with its kinks", kinks, heights, mode, LOOKS[1], size=7),
    ]
    axes = Axis("x", range=_ends(sketch.x)), Axis("value", range=_ends(sketch.true, 0.06))
    return figure(Plot("", *axes, traces))


def _error(sketch: Sketch, allowed: float) -> dict[str, Any]:
    """The error in parts of what is allowed, between the lines it must keep to."""
    every = 2 if len(sketch.kinks) <= _FINE else 1
    off = np.round((sketch.network - sketch.true)[::every] / allowed, 3)
    x = Axis("x", range=_ends(sketch.x))
    y = Axis("error", range=(-1.35, 1.35), ticks=(-1, 0, 1), labels=("−ε", "0", "ε"))
    trace = Trace("error", _few(sketch.x[::every]), off, "line", LOOKS[0], legend=False)
    return figure(Plot("", x, y, [trace], levels={1: "", -1: ""}))


def _growth(series: dict[str, Points], units: int, inputs: ReluInputs) -> dict[str, Any]:
    """Units against error, both in factors, and where this network stands."""
    traces = [
        Trace(name, *points, line_mode(points[0]), LOOKS[i], i, legend=not inputs.is_formula)
        for i, (name, points) in enumerate(series.items())
    ]
    # The caption names it, and the page's style has its colour: a third name would leave a small plot no room.
    traces.append(Trace("this one", [inputs.allowed], [float(units)], "points", LOOKS[2], size=13, legend=False))
    ends, most = ((10**-4.2, 10**-0.4), 400) if inputs.is_formula else ((10**-7.2, 10**-0.9), 512)
    x = Axis("error allowed", log=True, range=ends, every=1 if inputs.is_formula else 2)
    y = Axis("hidden units", log=True, range=(0.8, 1.25 * most), ticks=_COUNTS if inputs.is_formula else (1, 10, 100))
    return figure(Plot("", x, y, traces))


def _few(numbers: Any) -> Any:
    """The same numbers with as many digits as a screen can show."""
    span = float(np.ptp(numbers)) or 1.0
    return np.round(numbers, max(0, 5 - math.floor(math.log10(span))))


def _ends(numbers: Any, room: float = 0.03) -> tuple[float, float]:
    """The range of an axis: to the next round numbers, and a part of the way beyond."""
    low, high = float(np.min(numbers)), float(np.max(numbers))
    if not high > low:
        return low - 1, high + 1
    step = 2.0 ** math.floor(math.log2((high - low) / 5))
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return low - room * (high - low), high + room * (high - low)


_SUMMARY = "How many kinks make a curve? Straight lines follow x² and other curves, as closely as you ask."
_PRESETS: Presets = {
    "x², one layer": {},
    "x², many layers": {"layers": "many", "eps": 1e-4},
    "A wave": {"follow": "a formula"},
    "A bump": {"follow": "a formula", "formula": "exp(-x**2)", "start": -3.0},
    "A step": {"follow": "a formula", "formula": "tanh(8*x)", "start": -2.0, "end": 2.0},
    "A corner": {"follow": "a formula", "formula": "sqrt(x**2)", "start": -1.0, "end": 1.0},
}
PAGE = Page("relu", "ReLU builder", _SUMMARY, 40, ReluInputs, preview, verdict, _PRESETS, workshop=True)
