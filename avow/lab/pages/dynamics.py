"""Dynamics: how far back a gradient reaches, what momentum averages, and what a penalty becomes under Adam."""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core.chart import Chart
from avow.lab.page import Answer, Inputs, Page, Presets, Words, control, judgement
from avow.nn import RecurrentCell, gradient_horizon
from avow.nn.recurrent import STEEPEST, gradients_along
from avow.optim import momentum_from_average
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
_WORDS = Words("dynamics.txt")

Activation = Literal["tanh", "relu", "sigmoid"]
Figure = dict[str, Any]


@dataclass(frozen=True)
class DynamicsInputs(Inputs):
    activation: Literal["tanh", "relu", "sigmoid"] = control("tanh", "σ, the activation")
    gain: float = control(0.9, "Largest singular value of W", (0.3, 2), step=0.01)
    back: int = control(50, "Steps back, T", (5, _MOST_STEPS))
    beta: float = control(0.9, "β: what the average keeps", (0, 0.99), step=0.01)
    delta: float = control(0.5, "Step along the average", (0.01, 10), log=True)
    penalty: float = control(0.5, "λ: the penalty, or the decay", (0.01, 3), log=True)
    taken: int = control(50, "Steps of training", (1, _DECAY_STEPS))

    @property
    def rate(self) -> float:
        """δ, the steepest slope times the gain: what a step back multiplies the gradient by, at most."""
        return STEEPEST[self.activation] * self.gain


def preview(inputs: DynamicsInputs) -> Answer:
    """All three panels in float64."""
    measured = measured_gradients(inputs.activation, inputs.gain)[inputs.back]
    average = average_trace(_signal(), inputs.beta, inputs.delta)
    penalised, decoupled = (left[inputs.taken].tolist() for left in _decayed(inputs.penalty))
    figures = {"averages": _averages(average), "decay": _decay(penalised, decoupled)}
    said = {"averages": (average,), "decay": (penalised, decoupled, _RATE)}
    return {
        "facts": _WORDS.facts("measured", inputs.back, measured, inputs.rate),
        "figures": {"gradients": _gradients(inputs)} | figures,
        "words": {name: _WORDS.say(name, *values) for name, values in said.items()},
        "python": _WORDS.html("python", inputs).strip(),
    }


def verdict(inputs: DynamicsInputs) -> Answer:
    """The gradient's bound, every rounding enclosed, at steps along the way; and the measurement held to it."""
    cell, x = cell_of(inputs.activation, inputs.gain), cell_inputs()
    places = sorted({max(1, round(inputs.back * k / _POINTS)) for k in range(1, _POINTS + 1)})
    horizons = {t: gradient_horizon(cell, t, x[:t]) for t in places}
    last = horizons[inputs.back]
    bound, steps = _up(last.bound), [str(one) for one in horizons.values()]
    says = _WORDS.say("product", bound, inputs.rate**inputs.back)
    if last.kind == "contraction":
        says = _WORDS.say("contracts", math.log(2) / -math.log(last.rate), bound)
    judged = judgement("proved", "proved", says, steps)
    broken = [t for t, one in horizons.items() if one.measured > one.bound * _ROUNDED]
    if broken:
        judged = judgement("refuted", "broken", _WORDS.say("broken", broken[0]), [str(horizons[broken[0]])])
    return {
        "facts": _WORDS.facts("proved", inputs.back, last, bound, _up(last.rate, 4)),
        "verdict": judged,
        "figures": {"gradients": _gradients(inputs, {"proved": (places, [horizons[t].bound for t in places])})},
    }


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


def _gradients(inputs: DynamicsInputs, proved: dict[str, Any] | None = None) -> Figure:
    steps = list(range(inputs.back + 1))
    series = {
        "measured": (steps, measured_gradients(inputs.activation, inputs.gain)[: inputs.back + 1]),
        "δᵗ": (steps, [inputs.rate**t for t in steps]),
    }
    # Whole decades, some five ticks of them, and whole tens of steps: axes stand still while what they hold moves.
    decades = [math.log10(y) for _, ys in series.values() for y in ys if y > 0]
    tick = max(1, round((max(decades) - min(decades)) / 5))
    ends = [10 ** (tick * math.floor(min(decades) / tick) - 0.2), 10 ** (tick * math.ceil(max(decades) / tick) + 0.2)]
    drawn = figure(
        Chart("How far back", "steps back, t", "length of the gradient", series | (proved or {}), log_y=True),
        x={"range": [-1, 10 * math.ceil(inputs.back / 10) + 1]},
        y={"every": tick, "range": ends},
    )
    if proved:
        drawn["traces"][-1]["mode"] = "points"
    return drawn


class AverageTrace(NamedTuple):
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
    momentum, rate = momentum_from_average(beta, delta)
    v, buffer, along, by_sgd, apart = 0.0, 0.0, 0.0, 0.0, 0.0
    plain, corrected = [], []
    for step, number in enumerate(numbers, start=1):
        v = beta * v + (1 - beta) * number
        buffer = momentum * buffer + number
        along, by_sgd = along - delta * v, by_sgd - rate * buffer
        apart = max(apart, abs(along - by_sgd))
        plain.append(v)
        corrected.append(v / (1 - beta**step))
    return AverageTrace(plain, corrected, momentum, rate, apart, by_sgd)


@functools.cache
def _signal() -> list[float]:
    noise = torch.randn(_SIGNAL_STEPS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [1 + 0.35 * float(part) for part in noise]


def _averages(trace: AverageTrace) -> Figure:
    steps = list(range(1, _SIGNAL_STEPS + 1))
    series = {"corrected average": trace.corrected, "average from 0": trace.plain, "gradients": _signal()}
    drawn = figure(
        Chart("Averages", "step", "gradient, average", {name: (steps, ys) for name, ys in series.items()}),
        x={"range": [-1, _SIGNAL_STEPS + 2]},
        y={"range": [-0.05, 2.05]},
    )
    drawn["traces"][-1] |= {"mode": "points", "colour": "#8a8f98", "symbol": "circle", "size": 4}
    return drawn


def adam_trace(
    gradients: Float[Tensor, "t w"],
    learning_rate: float,
    betas: tuple[float, float],
    penalty: float = 0.0,
    decay: float = 0.0,
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
        root = (v / (1 - second**step)).sqrt() + 1e-8
        theta = theta * (1 - learning_rate * decay) - learning_rate * m / (1 - first**step) / root
        left.append(theta)
    return torch.stack(left)


@functools.lru_cache(32)
def _decayed(strength: float) -> tuple[Float[Tensor, "t w"], Float[Tensor, "t w"]]:
    """For Adam with L2 and for decoupled decay: after each step, what is left of weights that began at 1."""
    # Each weight's gradients have its own size, + and − in turn, so that nothing but the decay moves it far.
    turns = torch.tensor([(-1.0) ** step for step in range(_DECAY_STEPS)], dtype=torch.float64)
    gradients = turns[:, None] * torch.tensor(_SIZES, dtype=torch.float64)
    penalised = adam_trace(gradients, _RATE, _BETAS, penalty=strength)
    return penalised, adam_trace(gradients, _RATE, _BETAS, decay=strength)


def _decay(penalised: list[float], decoupled: list[float]) -> Figure:
    series = {"Adam with L2": (_SIZES, penalised), "decoupled decay (AdamW)": (_SIZES, decoupled)}
    x, y = "size of the weight's gradients", "weight left"
    chart = Chart("What is left of a weight", x, y, series, log_x=True)
    return figure(chart, x={"every": 1, "range": [_SIZES[0] / 1.4, _SIZES[-1] * 1.4]}, y={"range": [-0.55, 1.08]})


def _up(bound: float, digits: int = 3) -> str:
    """A few digits, rounded so that a bound stays one."""
    shown = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING).create_decimal(bound)
    return f"{float(shown):.{digits}g}"


_SUMMARY = "How far back a gradient reaches, what momentum averages, and what a penalty becomes under Adam."
_PRESETS: Presets = {
    "A gradient vanishes": {},
    "It explodes": {"activation": "relu", "gain": 2.0},
    "Saturation holds it": {"gain": 1.2},
    "Momentum, long memory": {"beta": 0.98},
    "No momentum": {"beta": 0.0},
    "A strong penalty": {"penalty": 2.0},
}
PAGE = Page("dynamics", "Dynamics", _SUMMARY, 50, DynamicsInputs, preview, verdict, _PRESETS, workshop=True)
