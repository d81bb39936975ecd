"""ReLU networks in closed form, from rational weights: a line, and the square on [0, 1] in one layer or in many."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from avow.core import named
from avow.core.chart import Chart
from avow.errors import ParameterError, ToleranceUnreachable
from avow.parameters import declared
from avow.theory.constructions.construction import Proof
from avow.theory.constructions.relu_network import (
    Layer,
    Layers,
    Number,
    ReluNetwork,
    as_fractions,
    checked_interval,
    checked_number,
    pieces,
    rounded,
    rounded_up,
)
from avow.theory.constructions.validation import checked_eps

# One layer for x² needs about 1/√(8 eps) units; whoever asks for more than these wants a deep network.
MOST_UNITS = 1 << 14


@dataclass(frozen=True, eq=False)
class ReluLinear(ReluNetwork):
    """Two units that are a straight line."""

    slope: Fraction
    intercept: Fraction
    low: Fraction | float
    high: Fraction | float

    @property
    def promise(self) -> str:
        where = "everywhere" if math.isinf(self.low) else f"on [{float(self.low):g}, {float(self.high):g}]"
        line = f"{float(self.slope):.6g}·x + {float(self.intercept):.6g}"
        return f"within {self.bound:.3g} of {line} {where}, with {self.units} hidden units"

    def verify(self) -> Proof:
        achieved = line_error(as_fractions(self.layers), self.slope, self.intercept, self.low, self.high)
        steps = (
            "σ(z) − σ(−z) = z, so the units m·x + b and −m·x − b, subtracted, are the line [claim relu-linear-a]",
            "every piece of the rounded network is compared with the line at its ends, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(achieved), steps)

    def picture(self) -> Chart:
        m, b = float(self.slope), float(self.intercept)
        low, high = (-2.0, 2.0) if math.isinf(self.low) else (float(self.low), float(self.high))
        return self.drawn("A line from two ReLUs", "line", lambda x: m * x + b, low, high)


@declared("relu_linear")
def relu_linear(
    m: Number, b: Number, interval: tuple[Number, Number] | None = None, dtype: torch.dtype = torch.float64
) -> ReluLinear:
    """The network σ(mx + b) − σ(−mx − b) = mx + b, on the whole line or on an interval.

    On the whole line a slope that the type does not hold exactly would drift away without end, and is refused.

    >>> relu_linear(2, -1).bound
    0.0
    """
    m, b = checked_number("relu_linear: m", m), checked_number("relu_linear: b", b)
    low, high = (-math.inf, math.inf) if interval is None else checked_interval("relu_linear", interval)
    exact = (Layer(((m,), (-m,)), (b, -b)), Layer(((Fraction(1), Fraction(-1)),), (Fraction(0),)))
    layers = rounded("relu_linear", exact, dtype)
    bound = rounded_up(line_error(as_fractions(layers), m, b, low, high))
    if math.isinf(bound):
        raise ParameterError(
            "relu_linear: m",
            m,
            f"is no {named(dtype)} number, and a rounded slope drifts from the line without end",
            "give an interval, or a shorter one, or a slope that the type holds",
        )
    return ReluLinear(exact, layers, bound, m, b, low, high)


@dataclass(frozen=True, eq=False)
class ReluSquare(ReluNetwork):
    """One hidden layer that is x² on [0, 1], as nearly as its number of units allows."""

    exact_error: Fraction

    @property
    def promise(self) -> str:
        return f"within {self.bound:.6g} of x² everywhere on [0, 1], with {self.units} hidden units in one layer"

    def verify(self) -> Proof:
        steps = (
            f"the rational weights are off by exactly {self.exact_error}, and no {self.units} units of one layer are "
            "closer [claim relu-square]",
            "on each piece of the rounded network x² minus a line is largest at an end or at its vertex, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(square_error(as_fractions(self.layers))), steps)

    def picture(self) -> Chart:
        return self.drawn(f"x² from {self.units} ReLUs in one layer", "x²", torch.square, 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class ReluSquareDeep(ReluNetwork):
    """Many narrow layers that are x² on [0, 1]; each divides the error by four."""

    exact_error: Fraction

    @property
    def promise(self) -> str:
        where = "everywhere on [0, 1]"
        return f"within {self.bound:.6g} of x² {where}, with {self.units} hidden units in {self.depth} layers"

    def verify(self) -> Proof:
        steps = (
            f"the rational weights interpolate x² at 2^{self.depth} + 1 equal steps, off by exactly "
            f"4^-{self.depth + 1} [claim relu-square-deep]",
            "what rounding changed in a layer is carried to the output, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(sawtooth_error(as_fractions(self.layers))), steps)

    def picture(self) -> Chart:
        return self.drawn(f"x² from {self.units} ReLUs in {self.depth} layers", "x²", torch.square, 0.0, 1.0)


@declared("relu_square")
def relu_square(eps: Number, deep: bool = False, dtype: torch.dtype = torch.float64) -> ReluSquare | ReluSquareDeep:
    """A network within `eps` of x² on [0, 1]: the fewest units of one layer, or a deep one.

    One layer of K units with an output bias is off by exactly 1/(2(2K+1)²), the least there is. A deep one of m
    layers is off by exactly 4^-(m+1) and has 3m − 1 units: two in the first layer, three in every other. Where
    rounding to `dtype` costs more than `eps` has to spare, units are added.

    >>> [relu_square(eps).units for eps in (1e-2, 1e-3, 1e-4, 1e-6)]
    [4, 11, 35, 354]
    >>> [relu_square(eps, deep=True).units for eps in (1e-2, 1e-3, 1e-4, 1e-6)]
    [8, 11, 17, 26]
    """
    checked_eps("relu_square", eps)
    eps = checked_number("relu_square: eps", eps)
    sizes, made, error = (_depths(eps), sawtooth, sawtooth_error) if deep else (_widths(eps), hinges, square_error)
    best = math.inf
    for size in sizes:
        exact = made(size)
        layers = rounded("relu_square", exact, dtype)
        bound = rounded_up(error(as_fractions(layers)))
        if bound <= eps:
            if deep:
                return ReluSquareDeep(exact, layers, bound, Fraction(1, 4 ** (size + 1)))
            return ReluSquare(exact, layers, bound, Fraction(1, 2 * (2 * size + 1) ** 2))
        best = min(best, bound)
        if bound > 8 * eps:
            break  # what is missing is bits, and more units bring none
    raise ToleranceUnreachable(
        "relu_square: eps",
        f"{float(eps):g}",
        f"is finer than weights of type {named(dtype)} can follow x²",
        f"use eps of at least {best:.2g}, or a wider dtype",
        best,
    )


def hinges(units: int) -> Layers:
    """One layer of K units for x²: with n = 2K + 1, (4/n²) Σ_i σ(nx − (2i − 1)) + 1/(2n²).

    The kinks stand at odd multiples of 1/n. Left of the first nothing is active, so a constant has to do there, which
    costs half a piece; a unit spent on a slope of its own would cost a whole one.
    """
    n = 2 * units + 1
    hidden = Layer(((Fraction(n),),) * units, tuple(Fraction(1 - 2 * i) for i in range(1, units + 1)))
    return hidden, Layer(((Fraction(4, n * n),) * units,), (Fraction(1, 2 * n * n),))


def sawtooth(depth: int) -> Layers:
    """m layers for x²: f_k = f_{k-1} − g_k/4^k, where g_k is the tooth g(y) = 2σ(y) − 4σ(y − ½) applied k times.

    A layer holds σ(g), σ(g − ½) and σ(f); g and f are never negative, so the first and the last are g and f. The first
    layer needs no third unit, as f_0 = g_0 = x. All weights are dyadic: rounding leaves them as they are.
    """
    one, half, nothing = Fraction(1), Fraction(1, 2), Fraction(0)
    layers = [Layer(((one,), (one,)), (nothing, -half))]
    for k in range(1, depth + 1):
        share = Fraction(1, 4**k)
        tooth: tuple[Fraction, ...] = (Fraction(2), Fraction(-4))
        rest: tuple[Fraction, ...] = (half, one)
        if k > 1:
            tooth, rest = (*tooth, nothing), (-2 * share, 4 * share, one)
        if k < depth:
            layers.append(Layer((tooth, tooth, rest), (nothing, -half, nothing)))
        else:
            layers.append(Layer((rest,), (nothing,)))
    return tuple(layers)


def square_error(layers: Layers) -> Fraction:
    """The largest distance of a network of one hidden layer from x² on [0, 1], exactly."""
    worst = Fraction(0)
    for piece in pieces(layers, Fraction(0), Fraction(1)):
        low, high = Fraction(piece.low), Fraction(piece.high)
        for x in (low, high, min(max(piece.slope / 2, low), high)):
            worst = max(worst, abs(x * x - piece.slope * x - piece.height))
    return worst


def line_error(
    layers: Layers, m: Fraction, b: Fraction, low: Fraction | float, high: Fraction | float
) -> Fraction | float:
    """The largest distance of a network of one hidden layer from a line, exactly; inf where there is none."""
    worst: Fraction | float = Fraction(0)
    for piece in pieces(layers, low, high):
        tilt, lift = piece.slope - m, piece.height - b
        for x in (piece.low, piece.high):
            if tilt and math.isinf(x):
                return math.inf
            worst = max(worst, abs(tilt * Fraction(x) + lift) if tilt else abs(lift))
    return worst


def sawtooth_error(layers: Layers) -> Fraction | float:
    """A distance from x² on [0, 1] that a network of the sawtooth's shape never exceeds; exact where nothing differs.

    A unit ŵ·ĥ + b̂ is off from w·h + b by at most Σ|ŵ||ĥ − h| + Σ|ŵ − w||h| + |b̂ − b|, and |h| ≤ 1 for every unit of
    the sawtooth and for its input.
    """
    depth = len(layers) - 1
    exact = sawtooth(depth)
    if [len(layer.bias) for layer in layers] != [len(layer.bias) for layer in exact]:
        return math.inf
    drift = [Fraction(0)]
    for (rows, bias), (true_rows, true_bias) in zip(layers, exact, strict=True):
        drift = [
            sum((abs(w) * d + abs(w - v) for w, v, d in zip(row, true, drift, strict=True)), abs(shift - true_shift))
            for row, true, shift, true_shift in zip(rows, true_rows, bias, true_bias, strict=True)
        ]
    return Fraction(1, 4 ** (depth + 1)) + drift[0]


def _widths(eps: Fraction) -> Iterator[int]:
    """The least K with 1/(2(2K+1)²) ≤ eps, then more, up to twice as many."""
    root = math.isqrt(math.ceil(1 / (2 * eps)) - 1) + 1  # the least whole number whose square is at least 1/(2 eps)
    least = max(1, root // 2)
    if least > MOST_UNITS:
        raise ParameterError(
            "relu_square: eps",
            f"{float(eps):g}",
            f"needs {least:,} units in one layer, and at most {MOST_UNITS:,} are made",
            "use deep=True",
        )
    yield least
    more = 1
    while more <= least:
        yield least + more
        more *= 2


def _depths(eps: Fraction) -> Iterator[int]:
    """The least m with 4^-(m+1) ≤ eps, and one more."""
    depth = 1
    while Fraction(1, 4 ** (depth + 1)) > eps:
        depth += 1
    yield from (depth, depth + 1)
