"""Dynamics: how far back a gradient reaches, what momentum averages, and what a penalty becomes under Adam."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.core.chart import Chart
from avow.lab.page import Answer, Inputs, Page, control, fact, judgement
from avow.nn import RecurrentCell, gradient_horizon
from avow.nn.recurrent import STEEPEST, gradients_along
from avow.optim import AveragedWeights, momentum_from_average
from avow.report.charts import figure

_MOST_STEPS = 80
_WIDTH, _INPUTS = 12, 2
# The proved points on the curve; the last of them is the reader's own number of steps.
_POINTS = 10
# A measurement rounds too.
_ROUNDED = 1 + 1e-9
# The averages' signal: this many numbers that lie around 1.
_SIGNAL_STEPS = 60
# Decay: Adam's rate, how many steps it may take, and the sizes of gradients, from a thousandth to ten.
_RATE, _BETAS, _DECAY_STEPS = 0.02, (0.9, 0.99), 100
_SIZES = [10 ** (k / 8) for k in range(-24, 9)]

Activation = Literal["tanh", "relu", "sigmoid"]


@dataclass(frozen=True)
class DynamicsInputs(Inputs):
    activation: Literal["tanh", "relu", "sigmoid"] = control("tanh", "σ, the activation")
    gain: float = control(0.9, "Largest singular value of W", low=0.3, high=2, step=0.01)
    back: int = control(50, "Steps back, T", low=5, high=_MOST_STEPS)
    beta: float = control(0.9, "β: what the average keeps", low=0, high=0.99, step=0.01)
    delta: float = control(0.5, "Step along the average", low=0.01, high=10, log=True)
    penalty: float = control(0.5, "λ: the penalty, or the decay", low=0.01, high=3, log=True)
    taken: int = control(50, "Steps of training", low=1, high=_DECAY_STEPS)

    @property
    def rate(self) -> float:
        """δ, the steepest slope times the gain: what a step back multiplies the gradient by, at most."""
        return STEEPEST[self.activation] * self.gain


def preview(inputs: DynamicsInputs) -> Answer:
    """All three panels in float64."""
    measured = measured_gradients(inputs.activation, inputs.gain)[inputs.back]
    averages, averages_say = _averages(inputs)
    decay, decay_says = _decay(inputs)
    bound = f"{inputs.rate**inputs.back:.3g}"
    return {
        "facts": [
            fact(f"‖∂h_{inputs.back}/∂h_0‖, measured", f"{measured:.3g}", "on these inputs, float64"),
            fact(f"At most δ^{inputs.back}", bound, f"δ = {inputs.rate:.3g}, whatever the inputs"),
        ],
        "figures": {"gradients": _gradients(inputs), "averages": averages, "decay": decay},
        "words": {"averages": averages_say, "decay": decay_says},
    }


def verdict(inputs: DynamicsInputs) -> Answer:
    """The gradient's bound, every rounding enclosed, at steps along the way; and the measurement held to it."""
    cell, x = cell_of(inputs.activation, inputs.gain), cell_inputs()
    places = sorted({max(1, round(inputs.back * k / _POINTS)) for k in range(1, _POINTS + 1)})
    horizons = {t: gradient_horizon(cell, t, x[:t]) for t in places}
    last = horizons[inputs.back]
    contracts = last.kind == "contraction"
    facts = [
        fact(f"‖∂h_{inputs.back}/∂h_0‖ is at most", _up(last.bound), f"measured ≈ {last.measured:.3g}, float64"),
        fact("A step, at most", _up(last.rate, 4), "δ" if contracts else f"the {inputs.back}th root of the bound"),
        fact("Which holds for", "every input" if contracts else "these inputs"),
    ]
    broken = [t for t, one in horizons.items() if one.measured > one.bound * _ROUNDED]
    if broken:
        says = f"The measured gradient over {broken[0]} steps is above the bound: this must not happen."
        judged = judgement("refuted", "broken", says, [str(horizons[broken[0]])])
    else:
        if contracts:
            half = math.log(2) / -math.log(last.rate)
            often = "at each step" if half == 1 else f"every {half:.3g} steps"
            says = f"Whatever the inputs, the gradient halves {often}: at most {_up(last.bound)} of it is left."
        else:
            allowed = f"{inputs.rate**inputs.back:.2g}"
            says = f"On these inputs the gradient is at most {_up(last.bound)}; δ alone would allow {allowed}."
        judged = judgement("proved", "proved", says, [str(one) for one in horizons.values()])
    proved = {"proved": (places, [horizons[t].bound for t in places])}
    return {"facts": facts, "verdict": judged, "figures": {"gradients": _gradients(inputs, proved)}}


@functools.lru_cache(64)
def cell_of(activation: Activation, gain: float) -> RecurrentCell:
    """A cell whose W is `gain` times a rotation: every singular value of it is the gain."""
    draws = torch.Generator().manual_seed(8)
    rotation = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH, generator=draws, dtype=torch.float64)).Q
    cell = RecurrentCell(_INPUTS, _WIDTH, activation).double().requires_grad_(False)
    cell.recurrent.weight.copy_(gain * rotation)
    cell.intake.weight.copy_(0.1 * torch.randn(_WIDTH, _INPUTS, generator=draws, dtype=torch.float64))
    cell.intake.bias.zero_()
    return cell


@functools.cache
def cell_inputs() -> Float[Tensor, "t i"]:
    """The inputs that the cell sees."""
    return torch.randn(_MOST_STEPS, _INPUTS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@functools.lru_cache(64)
def measured_gradients(activation: Activation, gain: float) -> list[float]:
    """‖∂h_t/∂h_0‖ for every t from 0 along the computed states, in float64."""
    start = torch.zeros(_WIDTH, dtype=torch.float64)
    products = torch.stack(list(gradients_along(cell_of(activation, gain), cell_inputs(), start)))
    norms: list[float] = torch.linalg.matrix_norm(products, 2).tolist()
    return norms


def _gradients(inputs: DynamicsInputs, proved: dict[str, Any] | None = None) -> dict[str, Any]:
    steps = list(range(inputs.back + 1))
    series = {
        "measured": (steps, measured_gradients(inputs.activation, inputs.gain)[: inputs.back + 1]),
        "δᵗ": (steps, [inputs.rate**t for t in steps]),
    }
    chart = Chart("How far back", "steps back, t", "length of the gradient", series | (proved or {}), log_y=True)
    drawn = figure(chart)
    if proved:
        drawn["data"][-1]["mode"] = "markers"
    # Whole decades, some five ticks of them, and whole tens of steps: axes stand still while what they hold moves.
    decades = [math.log10(y) for _, ys in series.values() for y in ys if y > 0]
    tick = max(1, round((max(decades) - min(decades)) / 5))
    ends = [tick * math.floor(min(decades) / tick) - 0.2, tick * math.ceil(max(decades) / tick) + 0.2]
    drawn["layout"]["yaxis"] |= {"dtick": tick, "range": ends}
    drawn["layout"]["xaxis"]["range"] = [-1, 10 * math.ceil(inputs.back / 10) + 1]
    return drawn


@dataclass(frozen=True)
class AverageTrace:
    """Averages of some numbers, and how far SGD with momentum strays from the walk along the average."""

    plain: list[float]  # from v = 0
    corrected: list[float]
    momentum: float
    learning_rate: float
    apart: float  # largest distance of the two walks
    by_sgd: float  # where SGD ends, from 0


def average_trace(numbers: Sequence[float], beta: float, delta: float) -> AverageTrace:
    """The exponential average with and without correction, walked along, and the walk of SGD with momentum.

    Written out, as `adam_trace` is, since the first step of `torch.optim` loads its compiler.
    """
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    averaged = AveragedWeights(model, decay=beta)
    momentum, rate = momentum_from_average(beta, delta)
    v, buffer, along, by_sgd, apart = 0.0, 0.0, 0.0, 0.0, 0.0
    plain, corrected = [], []
    for number in numbers:
        v = beta * v + (1 - beta) * number
        buffer = momentum * buffer + number
        along, by_sgd = along - delta * v, by_sgd - rate * buffer
        apart = max(apart, abs(along - by_sgd))
        plain.append(v)
        nn.init.constant_(model.weight, number)
        averaged.update()
        corrected.append(float(averaged.state_dict()["averages"]["weight"]))
    return AverageTrace(plain, corrected, momentum, rate, apart, by_sgd)


@functools.cache
def _signal() -> list[float]:
    noise = torch.randn(_SIGNAL_STEPS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [1 + 0.35 * float(part) for part in noise]


@functools.lru_cache(64)
def _signal_average(beta: float, delta: float) -> AverageTrace:
    return average_trace(_signal(), beta, delta)


def _averages(inputs: DynamicsInputs) -> tuple[dict[str, Any], str]:
    trace, steps = _signal_average(inputs.beta, inputs.delta), list(range(1, _SIGNAL_STEPS + 1))
    series = {
        "corrected average": (steps, trace.corrected),
        "average from 0": (steps, trace.plain),
        "gradients": (steps, _signal()),
    }
    drawn = figure(Chart("Averages", "step", "gradient, average", series))
    drawn["data"][-1] |= {"mode": "markers", "marker": {"color": "#8a8f98", "size": 4}}
    drawn["layout"]["yaxis"]["range"] = [-0.05, 2.05]
    drawn["layout"]["xaxis"]["range"] = [-1, _SIGNAL_STEPS + 2]
    says = (
        f"After the first step the plain average is {trace.plain[0]:.2g}, the corrected one {trace.corrected[0]:.2g}. "
        f"SGD with momentum {trace.momentum:.3g} and rate (1 − β) · step = {trace.learning_rate:.3g} walks the same: "
        f"{trace.apart:.1g} apart on a way of {abs(trace.by_sgd):.3g}."
    )
    return drawn, says


def adam_trace(
    gradients: Float[Tensor, "t w"],
    learning_rate: float,
    betas: tuple[float, float],
    *,
    penalty: float = 0.0,
    decay: float = 0.0,
    epsilon: float = 1e-8,
) -> Float[Tensor, "t+1 w"]:
    """What is left, after each step of Adam, of weights that began at 1.

    `penalty` is λ of (λ/2)‖θ‖² in the loss, whose gradient goes through the preconditioner; `decay` is that of AdamW,
    which does not.
    """
    first, second = betas
    theta = torch.ones_like(gradients[0])
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    left = [theta]
    for step, gradient in enumerate(gradients, start=1):
        g = gradient + penalty * theta
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
        root = (v / (1 - second**step)).sqrt() + epsilon
        theta = theta * (1 - learning_rate * decay) - learning_rate * m / (1 - first**step) / root
        left.append(theta)
    return torch.stack(left)


@functools.lru_cache(32)
def _weights_left(strength: float) -> tuple[list[list[float]], list[list[float]]]:
    """For Adam with L2 and for decoupled decay: after each step, what is left of weights that began at 1."""
    # Each weight's gradients have its own size, + and − in turn, so that nothing but the decay moves it far.
    turns = torch.tensor([(-1.0) ** step for step in range(_DECAY_STEPS)], dtype=torch.float64)
    gradients = turns[:, None] * torch.tensor(_SIZES, dtype=torch.float64)
    penalised = adam_trace(gradients, _RATE, _BETAS, penalty=strength)
    return penalised.tolist(), adam_trace(gradients, _RATE, _BETAS, decay=strength).tolist()


def _decay(inputs: DynamicsInputs) -> tuple[dict[str, Any], str]:
    penalised, decoupled = (left[inputs.taken] for left in _weights_left(inputs.penalty))
    series = {"Adam with L2": (_SIZES, penalised), "decoupled decay (AdamW)": (_SIZES, decoupled)}
    x, y = "size of the weight's gradients", "weight left"
    drawn = figure(Chart("What is left of a weight", x, y, series, log_x=True))
    drawn["layout"]["yaxis"]["range"] = [-0.55, 1.08]
    ends = [math.log10(_SIZES[0]) - 0.15, math.log10(_SIZES[-1]) + 0.15]
    drawn["layout"]["xaxis"] |= {"dtick": 1, "range": ends}
    says = (
        f"Adam with L2 leaves {penalised[0]:.2f} of a weight with tiny gradients and {penalised[-1]:.2f} of one with "
        f"large ones; decoupled decay leaves about {decoupled[-1]:.2f} of either. Rate η = {_RATE:g}."
    )
    return drawn, says


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
    inputs=DynamicsInputs,
    preview=preview,
    verdict=verdict,
    presets={
        "A gradient vanishes": {},
        "It explodes": {"activation": "relu", "gain": 2.0},
        "Saturation holds it": {"gain": 1.2},
        "Momentum, long memory": {"beta": 0.98},
        "No momentum": {"beta": 0.0},
        "A strong penalty": {"penalty": 2.0},
    },
)
