"""The ReLU builder: x², or a formula of the reader's, from a few units, with the error that is proved."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import numpy as np
import torch

from avow.cli.parsing import parse
from avow.errors import InputError, ParameterError, ToleranceUnreachable
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.lab.pages import relu_figures as figures
from avow.lab.pages.relu_figures import Followed
from avow.theory.constructions import relu_piecewise, relu_square
from avow.theory.constructions.construction import Proof
from avow.theory.constructions.formulas import FUNCTIONS
from avow.theory.constructions.relu import ReluNetwork
from avow.theory.constructions.relu_curves import Curve, chain, curve_of

# What a preview can follow while a slider moves.
_MOST_UNITS = 400
_POINTS = 1601
# Tolerances at which units are counted for the figure of units against error, so many of them all together.
_TOLERANCES = (0.1, 0.03, 0.01, 0.003, 0.001)
_MOST_COUNTED = 400

_OWN = {"follow": ("a formula",)}
_SQUARE = {"follow": ("x² on [0, 1]",)}


class Built(Inputs):
    follow: Literal["x² on [0, 1]", "a formula"] = control("x² on [0, 1]", "What to follow")
    formula: str = control(
        "sin(3*x)",
        "A formula in x",
        longest=400,
        about=f"+ - * / **, sqrt, {', '.join(FUNCTIONS)}, pi, e. It is read, never run.",
        when=_OWN,
    )
    start: float = control(0.0, "From", low=-10, high=10, step=0.1, when=_OWN)
    end: float = control(3.0, "To", low=-10, high=10, step=0.1, when=_OWN)
    within: float = control(0.03, "ε: the error allowed", low=1e-4, high=0.3, log=True, when=_OWN)
    layers: Literal["one", "many"] = control("one", "Hidden layers", when=_SQUARE)
    eps: float = control(0.01, "ε: the error allowed", low=1e-6, high=0.1, log=True, when=_SQUARE)


def preview(inputs: Built) -> Answer:
    """The network against what it follows, its units, and its error as float64 sees it at some points."""
    if inputs.follow == "a formula":
        return _checked(inputs, lambda: _sketched(inputs))
    made = _square(inputs.eps, inputs.layers == "many")
    x = np.linspace(0.0, 1.0, _POINTS)
    network, kinks = _values(made, x), _kinks(made)
    facts = [*_units(inputs), _measured(x * x, network)]
    layers = [len(bias) for _, bias in made.layers[:-1]]
    found = Followed("x²", x, x * x, network, kinks, _values(made, kinks))
    return _drawn(inputs, found, layers) | {"facts": facts}


def verdict(inputs: Built) -> Answer:
    """The weights that are returned, proved: in fractions for x², in balls for a formula."""
    if inputs.follow == "a formula":
        answer = _checked(inputs, lambda: _proved(inputs, _network(inputs)))
        series = {"one layer": _counted(inputs.formula, inputs.start, inputs.end)}
        return answer | {"figures": {"growth": figures.growth(series, sum(answer["built"]), inputs.within, True)}}
    return _proved(inputs, _square(inputs.eps, inputs.layers == "many"))


def _proved(inputs: Built, made: ReluNetwork) -> Answer:
    proof = made.verify()
    low, high = (inputs.start, inputs.end) if inputs.follow == "a formula" else (0.0, 1.0)
    x = np.linspace(low, high, _POINTS)
    true = _curve(inputs.formula).values(x) if inputs.follow == "a formula" else x * x
    facts = _units(inputs) if inputs.follow != "a formula" else [fact("Hidden units", f"{made.units:,}", "one layer")]
    facts += [
        fact("Proven error", f"≤ {proof.achieved:.6g}", "everywhere, the rounding of the weights included"),
        _measured(true, _values(made, x), mark="≈ "),
    ]
    return {"facts": facts, "verdict": _judged(proof, made, inputs), "built": [len(b) for _, b in made.layers[:-1]]}


def _judged(proof: Proof, made: ReluNetwork, inputs: Built) -> dict[str, Any]:
    allowed = inputs.within if inputs.follow == "a formula" else inputs.eps
    kept = bool(proof) and proof.achieved <= allowed
    units = f"{made.units:,} unit{'' if made.units == 1 else 's'}"
    depth = "one layer" if made.depth == 1 else f"{made.depth} layers"
    stay = "stays" if made.units == 1 else "stay"
    what = f"{units} in {depth} {stay} within {proof.achieved:.4g} everywhere, and {allowed:g} was allowed."
    if not kept:
        what = f"{units} in {depth} could be off by {proof.achieved:.4g}, and {allowed:g} was allowed."
    steps = [proof.promise, *proof.steps]
    return {
        "tone": "proved" if kept else "refuted",
        "word": "kept" if kept else "not kept",
        "says": what,
        "steps": steps,
    }


def _sketched(inputs: Built) -> Answer:
    curve = _curve(inputs.formula)
    points = chain(curve, (inputs.start, inputs.end), inputs.within, _MOST_UNITS)
    kinks, heights = (np.array(column) for column in zip(*points, strict=True))
    x = np.linspace(inputs.start, inputs.end, _POINTS)
    true, network = curve.values(x), np.interp(x, kinks, heights)
    units = len(points) - 1
    facts = [fact("Hidden units", f"{units:,}", "one layer"), _measured(true, network)]
    return _drawn(inputs, Followed(curve.text, x, true, network, kinks, heights), [units]) | {"facts": facts}


def _checked(inputs: Built, work: Any) -> Answer:
    """What is wrong with a formula is said of the field it was typed into, or of the slider that asks too much."""
    if not inputs.start < inputs.end:
        raise ParameterError("end", inputs.end, f"must lie beyond the start, {inputs.start:g}", "move it to the right")
    try:
        answer: Answer = work()
    except (InputError, ToleranceUnreachable) as error:
        field = "within" if error.name.endswith("eps") else "formula"
        value = error.value if field == "formula" else f"{inputs.within:g}"
        raise type(error)(field, value, error.rule, error.remedy) from error
    return answer


@functools.lru_cache(64)
def _curve(formula: str) -> Curve:
    return curve_of(parse(formula))


@functools.lru_cache(64)
def _square(eps: float, deep: bool) -> ReluNetwork:
    return relu_square(eps, deep)


def _network(inputs: Built) -> ReluNetwork:
    return relu_piecewise(parse(inputs.formula), (inputs.start, inputs.end), inputs.within)


def _kinks(made: ReluNetwork) -> Any:
    """Where the lines of a network for x² meet, and both ends."""
    if made.depth > 1:
        return np.linspace(0.0, 1.0, 2**made.depth + 1)
    weight, bias = (part.flatten().numpy() for part in made.layers[0])
    return np.concatenate(([0.0], np.sort(-bias / weight), [1.0]))


def _values(made: ReluNetwork, x: Any) -> Any:
    with torch.no_grad():
        return made.as_module()(torch.from_numpy(x)[:, None])[:, 0].numpy()


def _units(inputs: Built) -> list[dict[str, str]]:
    """How many units x² takes either way."""
    wide, deep = _square(inputs.eps, False), _square(inputs.eps, True)
    return [
        fact("Units in one layer", f"{wide.units:,}", "built here" if inputs.layers == "one" else ""),
        fact("Units in many layers", f"{deep.units:,}", f"{deep.depth} layers"),
    ]


def _measured(true: Any, network: Any, mark: str = "") -> dict[str, str]:
    """The error at some points; beside a proof it is marked, for it is none."""
    about = f"the largest of {_POINTS:,} points in float64"
    return fact("Measured error", f"{mark}{float(np.abs(true - network).max()):.6g}", about)


def _drawn(inputs: Built, found: Followed, units: list[int]) -> Answer:
    """The network over the function, its error within the band, and units against error."""
    own = inputs.follow == "a formula"
    allowed = inputs.within if own else inputs.eps
    growth = figures.growth({"one layer": ([], [])} if own else _both_ways(), sum(units), allowed, own)
    if own:
        growth["data"][0] = None  # counting takes longer than a slider waits: it comes with the verdict
    drawn = {"graph": figures.graph(found), "error": figures.error(found, allowed), "growth": growth}
    return {"built": units, "figures": drawn}


@functools.lru_cache(64)
def _counted(formula: str, start: float, end: float) -> tuple[list[float], list[float]]:
    """Units that a formula takes at some tolerances, until there are too many."""
    curve, found = _curve(formula), list[tuple[float, int]]()
    for eps in _TOLERANCES:
        # Four times as fine takes about twice as many: what would be too many is not begun.
        left = _MOST_COUNTED - sum(units for _, units in found)
        if found and found[-1][1] * math.sqrt(found[-1][0] / eps) > left:
            break
        try:
            found.append((eps, len(chain(curve, (start, end), eps, left)) - 1))
        except (InputError, ToleranceUnreachable):
            break
    return [float(eps) for eps, _ in found], [float(units) for _, units in found]


def _both_ways() -> dict[str, tuple[list[float], list[float]]]:
    """Off by 1/(2(2K+1)²) with K units of one layer [claim relu-square], by 4^-(m+1) with 3m − 1 of m layers
    [claim relu-square-deep]."""
    wide = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    deep = list(range(1, 11))
    return {
        "one layer": ([1 / (2 * (2 * k + 1) ** 2) for k in wide], [float(k) for k in wide]),
        "many layers": ([4.0 ** -(m + 1) for m in deep], [3.0 * m - 1 for m in deep]),
    }


PAGE = Page(
    name="relu",
    title="ReLU builder",
    summary="How many kinks make a curve? Straight lines follow x², or a formula of yours, as closely as you ask.",
    order=40,
    inputs=Built,
    preview=preview,
    verdict=verdict,
    sign=(
        '<path class="faint" stroke-width="4" d="M6 43C40 42 70 26 90 4"/><path d="M6 43 34 39 64 25 90 4"/>'
        '<circle class="dot" cx="34" cy="39" r="3"/><circle class="dot" cx="64" cy="25" r="3"/>'
    ),
    body="""<div class="figure stays" id="graph"></div>
<div class="pair"><div><p class="caption">Error, and what is allowed</p>
<div class="figure" id="error"></div></div>
<div><p class="caption">Units against error <span class="soft">
(<b class="here">◆</b> this one)</span></p><div class="figure" id="growth"></div></div></div>
<div class="net"><p class="caption">The network <span id="sizes" class="soft"></span></p>
<svg id="network" role="img" aria-label="The network" preserveAspectRatio="xMidYMid meet"></svg></div>""",
    formulas=(
        r"f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1, \quad \sigma(z) = \max(z, 0)",
        r"x^2 \text{ on } [0,1]: \quad \frac{1}{2(2K+1)^2} \text{ with } K \text{ units of one layer}, \quad"
        r"4^{-(m+1)} \text{ with } 3m - 1 \text{ units of } m \text{ layers}",
    ),
    presets={
        "x², one layer": {},
        "x², many layers": {"layers": "many", "eps": 1e-4},
        "A wave": {"follow": "a formula"},
        "A bump": {"follow": "a formula", "formula": "exp(-x**2)", "start": -3.0},
        "A step": {"follow": "a formula", "formula": "tanh(8*x)", "start": -2.0, "end": 2.0},
        "A corner": {"follow": "a formula", "formula": "sqrt(x**2)", "start": -1.0, "end": 1.0},
    },
)
