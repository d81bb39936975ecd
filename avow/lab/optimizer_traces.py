"""What optimisers do to plain numbers, step by step: an average and its momentum, a penalty and a decay.

Written out, since the first step of `torch.optim` loads its compiler; the tests hold each to the optimisers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.optim import AveragedWeights, momentum_from_average


@dataclass(frozen=True)
class Averaged:
    """Averages of some numbers, and how far SGD with momentum strays from the walk along the average."""

    plain: list[float]  # from v = 0
    corrected: list[float]
    momentum: float
    learning_rate: float
    apart: float  # largest distance of the two walks
    by_sgd: float  # where SGD ends, from 0


def averaged(numbers: Sequence[float], beta: float, delta: float) -> Averaged:
    """The exponential average with and without correction, walked along, and the walk of SGD with momentum."""
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
    return Averaged(plain, corrected, momentum, rate, apart, by_sgd)


def adam(
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
