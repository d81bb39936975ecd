"""What the dynamics page draws: a gradient on its way back, averages of a noisy signal, weights that decay."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.nn import RecurrentCell
from avow.nn.recurrent import STEEPEST
from avow.optim import AveragedWeights, momentum_from_average

Activation = Literal["tanh", "relu", "sigmoid"]

MOST_STEPS = 80
_WIDTH, _INPUTS = 12, 2
# The averages' signal: this many numbers that lie around 1.
SEEN = 60
# Decay: Adam's rate, and how many steps it may take.
RATE, BETAS = 0.02, (0.9, 0.99)
DECAY_STEPS = 100
# Sizes of gradients, from a thousandth to ten.
SIZES = [10 ** (k / 8) for k in range(-24, 9)]


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
def inputs_of() -> Float[Tensor, "t i"]:
    """The inputs that the cell sees."""
    return torch.randn(MOST_STEPS, _INPUTS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def worst(activation: Activation, gain: float, steps: int) -> list[float]:
    """δ^t for t = 0 … steps, in floats; δ is the steepest slope times the gain."""
    return [(STEEPEST[activation] * gain) ** t for t in range(steps + 1)]


@functools.lru_cache(64)
def measured(activation: Activation, gain: float) -> list[float]:
    """‖∂h_t/∂h_0‖ for t = 0 … MOST_STEPS along the computed states, in float64."""
    cell = cell_of(activation, gain)
    state = torch.zeros(_WIDTH, dtype=torch.float64)
    products = [torch.eye(_WIDTH, dtype=torch.float64)]
    for x in inputs_of():
        z = cell.recurrent(state) + cell.intake(x)
        products.append(_slope(activation, z)[:, None] * (cell.recurrent.weight @ products[-1]))
        state = cell.activated(z)
    norms: list[float] = torch.linalg.matrix_norm(torch.stack(products), 2).tolist()
    return norms


def _slope(activation: Activation, z: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    """σ'(z)."""
    if activation == "relu":
        return (z > 0).double()
    return torch.cosh(z) ** -2 if activation == "tanh" else torch.sigmoid(z) * torch.sigmoid(-z)


@dataclass(frozen=True)
class Averages:
    """Averages of the same numbers, and how far SGD with momentum strays from the walk along the average."""

    numbers: list[float]
    plain: list[float]  # from v = 0
    corrected: list[float]
    momentum: float
    learning_rate: float
    apart: float  # largest distance of the two walks
    by_sgd: float  # where SGD ends, from 0


@functools.cache
def _signal() -> list[float]:
    draws = torch.Generator().manual_seed(5)
    noise = torch.randn(SEEN, generator=draws, dtype=torch.float64)
    return [1 + 0.35 * float(part) for part in noise]


@functools.lru_cache(64)
def averages(beta: float, delta: float) -> Averages:
    """The exponential average with and without correction, walked along, and the walk of SGD with momentum."""
    numbers = _signal()
    held = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    kept = AveragedWeights(held, decay=beta)
    momentum, rate = momentum_from_average(beta, delta)
    v, buffer, along, by_sgd = 0.0, 0.0, 0.0, 0.0
    plain, corrected, apart = [], [], 0.0
    for number in numbers:
        v = beta * v + (1 - beta) * number
        buffer = momentum * buffer + number
        along, by_sgd = along - delta * v, by_sgd - rate * buffer
        apart = max(apart, abs(along - by_sgd))
        plain.append(v)
        nn.init.constant_(held.weight, number)
        kept.update()
        corrected.append(float(kept.state_dict()["averages"]["weight"]))
    return Averages(numbers, plain, corrected, momentum, rate, apart, by_sgd)


def gradients_at(step: int) -> Float[Tensor, "w"]:
    """Each weight's gradient: of its own size, + and − in turn, so that nothing but the decay moves it far."""
    return torch.tensor(SIZES, dtype=torch.float64) * (-1) ** step


@functools.lru_cache(32)
def decayed(penalty: float) -> dict[str, list[list[float]]]:
    """For Adam with L2 and for decoupled decay: after each step, what is left of weights that began at 1.

    Adam written out: the first step of `torch.optim` loads its compiler, which no preview can wait for. The tests hold
    both rows to `avow.optim`.
    """
    first, second, epsilon = *BETAS, 1e-8
    coupled = torch.tensor([[penalty], [0.0]], dtype=torch.float64)  # λ that goes through the preconditioner
    aside = torch.tensor([[0.0], [penalty]], dtype=torch.float64)  # λ that does not
    theta = torch.ones(2, len(SIZES), dtype=torch.float64)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    left = [theta]
    for step in range(DECAY_STEPS):
        g = gradients_at(step) + coupled * theta
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
        root = (v / (1 - second ** (step + 1))).sqrt() + epsilon
        theta = theta * (1 - RATE * aside) - RATE * m / (1 - first ** (step + 1)) / root
        left.append(theta)
    both = torch.stack(left)  # (steps + 1, 2, weights)
    return {"Adam with L2": both[:, 0].tolist(), "decoupled decay (AdamW)": both[:, 1].tolist()}


def half_life(rate: float) -> float:
    """Steps after which a bound that shrinks by `rate` a step has halved."""
    return math.log(2) / -math.log(rate) if 0 < rate < 1 else math.inf
