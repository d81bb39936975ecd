"""ReLU networks drawn at random, each with a broken variant that its own proof must reject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import Tensor

from avow.theory.constructions import ReluPiecewise, relu_linear, relu_piecewise, relu_square
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.relu import ReluNetwork

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
X = sympy.Symbol("x")


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def whole(generator: torch.Generator, low: int, high: int) -> int:
    """From `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def line(generator: torch.Generator) -> ReluNetwork:
    """Dyadic slopes on the whole line, or any fraction in any type on an interval."""
    if whole(generator, 0, 1):
        return relu_linear(uniform(generator, -50, 50), uniform(generator, -50, 50))
    slope = Fraction(whole(generator, -999, 999), whole(generator, 1, 999))
    low = uniform(generator, -5, 5)
    interval = (low, low + uniform(generator, 0.1, 5))
    return relu_linear(slope, uniform(generator, -5, 5), interval, DTYPES[whole(generator, 0, 3)])


def square(generator: torch.Generator) -> ReluNetwork:
    return relu_square(10 ** uniform(generator, -3.3, -0.1), dtype=DTYPES[whole(generator, 0, 1)])


def deep_square(generator: torch.Generator) -> ReluNetwork:
    return relu_square(10 ** uniform(generator, -6, -0.1), deep=True, dtype=DTYPES[whole(generator, 0, 3)])


def curve(generator: torch.Generator) -> ReluPiecewise:
    """Convex, concave and bent both ways, of a random width."""
    wide = sympy.Rational(whole(generator, 1, 12), 4)
    function, low, high = (
        (sympy.exp(wide * X), -1.0, 0.5),
        (sympy.log(1 + wide * X), 0.0, 3.0),
        (sympy.sin(wide * X), -1.0, 1.5),
        (sympy.tanh(wide * X), -1.5, 1.0),
        (wide * X**3 - X, -1.0, 1.0),
        (sympy.sqrt(wide * X + 1), -0.2, 2.0),
    )[whole(generator, 0, 5)]
    eps = 10 ** uniform(generator, -1.7, -0.7)
    return relu_piecewise(function, (low, high), eps, DTYPES[whole(generator, 0, 1)])


DRAWS: dict[str, Callable[[torch.Generator], Construction]] = {
    "relu-linear": line,
    "relu-square": square,
    "relu-square-deep": deep_square,
    "relu-piecewise": curve,
}


def with_output(network: ReluNetwork, weight: Tensor) -> ReluNetwork:
    """The same network, its last weights others."""
    return dataclasses.replace(network, layers=(*network.layers[:-1], (weight, network.layers[-1][1])))


def leading(network: ReluNetwork) -> int:
    """The unit with the largest say in the output."""
    return int(network.layers[-1][0][0].abs().argmax())


def stretched(network: ReluNetwork) -> Construction:
    """All output weights half as large again: one of them alone may be of a unit that the interval never wakes."""
    return with_output(network, network.layers[-1][0] * 1.5)


def nudged(network: ReluNetwork) -> Construction:
    """One output weight half as large again."""
    weight = network.layers[-1][0].clone()
    weight[0, leading(network)] *= 1.5
    return with_output(network, weight)


def silenced(network: ReluPiecewise) -> Construction:
    """One unit dropped: the one that moves the right end the most."""
    weight = network.layers[-1][0].clone()
    moves = weight[0].double() * (float(network.high) + network.layers[0][1].double())
    weight[0, int(moves.abs().argmax())] = 0
    return with_output(network, weight)


WEAKENED: dict[str, Callable[[Any], Construction]] = {
    "relu-linear": stretched,
    "relu-square": nudged,
    "relu-square-deep": nudged,
    "relu-piecewise": silenced,
}
