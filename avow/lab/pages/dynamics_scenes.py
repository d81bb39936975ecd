"""What stands on the dynamics page: a cell with its inputs, a noisy signal, gradients of many sizes."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from avow.lab import optimizer_traces
from avow.nn import RecurrentCell
from avow.nn.recurrent import gradients_along

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


@functools.lru_cache(64)
def measured(activation: Activation, gain: float) -> list[float]:
    """‖∂h_t/∂h_0‖ for t = 0 … MOST_STEPS along the computed states, in float64."""
    start = torch.zeros(_WIDTH, dtype=torch.float64)
    products = torch.stack(list(gradients_along(cell_of(activation, gain), inputs_of(), start)))
    norms: list[float] = torch.linalg.matrix_norm(products, 2).tolist()
    return norms


@functools.cache
def signal() -> list[float]:
    """The numbers that are averaged."""
    draws = torch.Generator().manual_seed(5)
    noise = torch.randn(SEEN, generator=draws, dtype=torch.float64)
    return [1 + 0.35 * float(part) for part in noise]


@functools.lru_cache(64)
def averaged(beta: float, delta: float) -> optimizer_traces.Averaged:
    return optimizer_traces.averaged(signal(), beta, delta)


@functools.cache
def gradients() -> Float[Tensor, "t w"]:
    """Each weight's gradients: of its own size, + and − in turn, so that nothing but the decay moves it far."""
    turns = torch.tensor([(-1.0) ** step for step in range(DECAY_STEPS)], dtype=torch.float64)
    return turns[:, None] * torch.tensor(SIZES, dtype=torch.float64)


@functools.lru_cache(32)
def decayed(strength: float) -> dict[str, list[list[float]]]:
    """For Adam with L2 and for decoupled decay: after each step, what is left of weights that began at 1."""
    return {
        "Adam with L2": optimizer_traces.adam(gradients(), RATE, BETAS, penalty=strength).tolist(),
        "decoupled decay (AdamW)": optimizer_traces.adam(gradients(), RATE, BETAS, decay=strength).tolist(),
    }
