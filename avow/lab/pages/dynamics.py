"""Dynamics: how far back a gradient reaches, what momentum averages, and what a penalty becomes under Adam."""

from __future__ import annotations

import math
from typing import Any, Literal

from avow.core.chart import Chart
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.lab.pages import dynamics_scenes as scenes
from avow.nn import gradient_horizon
from avow.nn.recurrent import STEEPEST
from avow.report.charts import figure

# The proved points on the curve; the last of them is the reader's own number of steps.
_POINTS = 10
# A measurement rounds too.
_ROUNDED = 1 + 1e-9


class Moved(Inputs):
    activation: Literal["tanh", "relu", "sigmoid"] = control("tanh", "σ, the activation")
    gain: float = control(0.9, "Largest singular value of W", low=0.3, high=2, step=0.01)
    back: int = control(50, "Steps back, T", low=5, high=scenes.MOST_STEPS)
    beta: float = control(0.9, "β: what the average keeps", low=0, high=0.99, step=0.01)
    delta: float = control(0.5, "Step along the average", low=0.01, high=10, log=True)
    penalty: float = control(0.5, "λ: the penalty, or the decay", low=0.01, high=3, log=True)
    taken: int = control(50, "Steps of training", low=1, high=scenes.DECAY_STEPS)


def preview(inputs: Moved) -> Answer:
    """All three panels in float64."""
    rate, most = STEEPEST[inputs.activation] * inputs.gain, _worst(inputs)
    there = scenes.measured(inputs.activation, inputs.gain)[inputs.back]
    facts = [
        fact(f"‖∂h_{inputs.back}/∂h_0‖, measured", f"{there:.3g}", "on these inputs, float64"),
        fact(f"At most δ^{inputs.back}", f"{most[-1]:.3g}", f"δ = {rate:.3g}, whatever the inputs"),
    ]
    return {
        "facts": facts,
        "figures": {"gradients": _gradients(inputs), "averages": _averages(inputs), "decay": _decay(inputs)},
        "words": {"averages": _averages_say(inputs), "decay": _decay_says(inputs)},
    }


def verdict(inputs: Moved) -> Answer:
    """The gradient's bound, every rounding enclosed, at steps along the way; and the measurement held to it."""
    cell, x = scenes.cell_of(inputs.activation, inputs.gain), scenes.inputs_of()
    places = sorted({max(1, round(inputs.back * k / _POINTS)) for k in range(1, _POINTS + 1)})
    found = {t: gradient_horizon(cell, t, x[:t]) for t in places}
    last = found[inputs.back]
    anyhow = last.kind == "contraction"
    facts = [
        fact(f"‖∂h_{inputs.back}/∂h_0‖ is at most", _up(last.bound), f"measured ≈ {last.measured:.3g}, float64"),
        fact("A step, at most", _up(last.rate, 4), "δ" if anyhow else f"the {inputs.back}th root of the bound"),
        fact("Which holds for", "every input" if anyhow else "these inputs"),
    ]
    broken = [t for t, one in found.items() if one.measured > one.bound * _ROUNDED]
    if broken:
        says = f"The measured gradient over {broken[0]} steps is above the bound: this must not happen."
        judged = {"tone": "refuted", "word": "broken", "says": says, "steps": [str(found[broken[0]])]}
    else:
        judged = {"tone": "proved", "word": "proved", "says": _gradients_say(inputs, last.bound, last.rate, anyhow)}
        judged["steps"] = [str(one) for one in found.values()]
    proved = {"proved": (places, [found[t].bound for t in places])}
    return {"facts": facts, "verdict": judged, "figures": {"gradients": _gradients(inputs, proved)}}


def _worst(inputs: Moved) -> list[float]:
    """δ^t for t = 0 … T, in floats; δ is the steepest slope times the gain."""
    return [(STEEPEST[inputs.activation] * inputs.gain) ** t for t in range(inputs.back + 1)]


def _gradients_say(inputs: Moved, bound: float, rate: float, anyhow: bool) -> str:
    if anyhow:
        half = math.log(2) / -math.log(rate)
        often = "at each step" if half == 1 else f"every {half:.3g} steps"
        return f"Whatever the inputs, the gradient halves {often}: at most {_up(bound)} of it is left."
    allowed = (STEEPEST[inputs.activation] * inputs.gain) ** inputs.back
    return f"On these inputs the gradient is at most {_up(bound)}; δ alone would allow {allowed:.2g}."


def _gradients(inputs: Moved, proved: dict[str, Any] | None = None) -> dict[str, Any]:
    steps = list(range(inputs.back + 1))
    series = {
        "measured": (steps, scenes.measured(inputs.activation, inputs.gain)[: inputs.back + 1]),
        "δᵗ": (steps, _worst(inputs)),
    }
    drawn = figure(
        Chart("How far back", "steps back, t", "length of the gradient", series | (proved or {}), log_y=True)
    )
    if proved:
        drawn["data"][-1]["mode"] = "markers"
    # Whole decades, some five ticks of them, and whole tens of steps: axes stand still while what they hold moves.
    decades = [math.log10(y) for _, ys in series.values() for y in ys if y > 0]
    tick = max(1, round((max(decades) - min(decades)) / 5))
    ends = [tick * math.floor(min(decades) / tick) - 0.2, tick * math.ceil(max(decades) / tick) + 0.2]
    drawn["layout"]["yaxis"] |= {"dtick": tick, "range": ends}
    drawn["layout"]["xaxis"]["range"] = [-1, 10 * math.ceil(inputs.back / 10) + 1]
    return drawn


def _averages(inputs: Moved) -> dict[str, Any]:
    found, steps = scenes.averaged(inputs.beta, inputs.delta), list(range(1, scenes.SEEN + 1))
    series = {
        "corrected average": (steps, found.corrected),
        "average from 0": (steps, found.plain),
        "gradients": (steps, scenes.signal()),
    }
    drawn = figure(Chart("Averages", "step", "gradient, average", series))
    drawn["data"][-1] |= {"mode": "markers", "marker": {"color": "#8a8f98", "size": 4}}
    drawn["layout"]["yaxis"]["range"] = [-0.05, 2.05]
    drawn["layout"]["xaxis"]["range"] = [-1, scenes.SEEN + 2]
    return drawn


def _averages_say(inputs: Moved) -> str:
    found = scenes.averaged(inputs.beta, inputs.delta)
    first = (
        f"After the first step the plain average is {found.plain[0]:.2g}, the corrected one {found.corrected[0]:.2g}."
    )
    same = (
        f"SGD with momentum {found.momentum:.3g} and rate (1 − β) · step = {found.learning_rate:.3g} walks the same: "
        f"{found.apart:.1g} apart on a way of {abs(found.by_sgd):.3g}."
    )
    return f"{first} {same}"


def _decay(inputs: Moved) -> dict[str, Any]:
    found = scenes.decayed(inputs.penalty)
    series = {words: (scenes.SIZES, left[inputs.taken]) for words, left in found.items()}
    title, y = "What is left of a weight", "weight left"
    drawn = figure(Chart(title, "size of the weight's gradients", y, series, log_x=True))
    drawn["layout"]["yaxis"]["range"] = [-0.55, 1.08]
    ends = [math.log10(scenes.SIZES[0]) - 0.15, math.log10(scenes.SIZES[-1]) + 0.15]
    drawn["layout"]["xaxis"] |= {"dtick": 1, "range": ends}
    return drawn


def _decay_says(inputs: Moved) -> str:
    (first, penalised), (_, decoupled) = scenes.decayed(inputs.penalty).items()
    small, large = penalised[inputs.taken][0], penalised[inputs.taken][-1]
    return (
        f"{first} leaves {small:.2f} of a weight with tiny gradients and {large:.2f} of one with large ones; "
        f"decoupled decay leaves about {decoupled[inputs.taken][-1]:.2f} of either. Rate η = {scenes.RATE:g}."
    )


def _up(bound: float, digits: int = 3) -> str:
    """A few digits, rounded so that a bound stays one."""
    if bound == 0 or not math.isfinite(bound):
        return f"{bound:g}"
    shown = f"{bound:.{digits}g}"
    last = 10.0 ** (math.floor(math.log10(bound)) - digits + 1)
    return shown if float(shown) >= bound else f"{bound + last:.{digits}g}"


PAGE = Page(
    name="dynamics",
    title="Dynamics",
    summary="How far back a gradient reaches, what momentum averages, and what a penalty becomes under Adam.",
    order=50,
    inputs=Moved,
    preview=preview,
    verdict=verdict,
    sign=(
        '<path class="faint" d="M4 44h88M4 44V4"/><path stroke-dasharray="4 4" d="M6 6 90 30"/>'
        '<path d="M6 6C30 12 40 22 56 27S80 38 90 42"/>'
    ),
    body="""<section class="panel card" id="panel-gradients"><h2>A gradient on its way back</h2>
<p class="soft">Through T steps of h ← σ(Wh + Ux). Below δ = 1 it vanishes whatever the inputs; above, saturation
may still hold it.</p><div class="figure" id="gradients"></div>
<div class="knobs"><slot name="activation"></slot><slot name="gain"></slot><slot name="back"></slot></div></section>
<section class="panel card" id="panel-averages"><h2>Momentum is an average</h2>
<p class="soft">An average that starts from 0 is too small at first; the correction mends that.</p>
<div class="figure" id="averages"></div>
<div class="knobs"><slot name="beta"></slot><slot name="delta"></slot></div>
<p class="said" id="says-averages"></p></section>
<section class="panel card" id="panel-decay"><h2>A penalty is no decay under Adam</h2>
<p class="soft">Weights that began at 1, by the size of their gradients, which point up and down in turn.</p>
<div class="figure" id="decay"></div>
<div class="knobs"><slot name="penalty"></slot><slot name="taken"></slot></div>
<p class="said" id="says-decay"></p></section>""",
    formulas=(
        r"\left\|\frac{\partial h_T}{\partial h_0}\right\| \le \delta^T, \quad \delta = \max|\sigma'| \cdot"
        r" \sigma_{\max}(W)",
        r"v_t = \beta v_{t-1} + (1-\beta) g_t, \quad \frac{v_t}{1-\beta^t}",
        r"\text{one step takes} \quad \frac{\eta\lambda}{\sqrt{\hat v}+\epsilon} \quad \text{off a weight with L2, and}"
        r" \quad \eta\lambda \quad \text{decoupled}",
    ),
    presets={
        "A gradient vanishes": {},
        "It explodes": {"activation": "relu", "gain": 2.0},
        "Saturation holds it": {"gain": 1.2},
        "Momentum, long memory": {"beta": 0.98},
        "No momentum": {"beta": 0.0},
        "A strong penalty": {"penalty": 2.0},
    },
)
