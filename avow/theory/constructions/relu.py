r"""ReLU networks in closed form, from rational weights: a line, and the square on [0, 1] in one layer or in many.

.. math:: f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1, \quad \sigma(z) = \max(z, 0)

Weights are kept twice: as the fractions of a formula, and as tensors rounded to the type asked for. A proof reads the
tensors: a float is a fraction too, so the network that is really returned is known exactly, as real arithmetic has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from avow.core import check_dtype, dtype_name
from avow.core.chart import Chart
from avow.errors import NonFiniteError, ParameterError, RangeError, ToleranceUnreachable
from avow.parameters import as_float, declared
from avow.theory.constructions.construction import Construction, Proof, checked_eps

Number = int | float | Fraction


class Layer(NamedTuple):
    """Rows of weights and a bias for each, as fractions."""

    rows: tuple[tuple[Fraction, ...], ...]
    bias: tuple[Fraction, ...]


Layers = tuple[Layer, ...]
Rounded = tuple[tuple[Tensor, Tensor], ...]


class Piece(NamedTuple):
    """A stretch on which a network is the line slope·x + height."""

    low: Fraction | float
    high: Fraction | float
    slope: Fraction
    height: Fraction


@dataclass(frozen=True, eq=False)
class ReluNetwork(Construction):
    """A network from numbers to numbers: its rational weights, the same rounded, and the error it promises."""

    exact: Layers
    layers: Rounded
    eps: float

    @property
    def units(self) -> int:
        """Hidden units, all layers together."""
        return sum(len(bias) for _, bias in self.layers[:-1])

    @property
    def depth(self) -> int:
        """Hidden layers."""
        return len(self.layers) - 1

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"w_{i}": weight for i, (weight, _) in enumerate(self.layers)}
        return weights | {f"b_{i}": bias for i, (_, bias) in enumerate(self.layers)}

    def as_module(self) -> nn.Sequential:
        """Linear maps with ReLUs between; inputs and outputs have one feature, (…, 1)."""
        steps: list[nn.Module] = []
        for weight, bias in self.layers:
            linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
            linear.load_state_dict({"weight": weight, "bias": bias})
            steps += [linear, nn.ReLU()]
        return nn.Sequential(*steps[:-1])

    def with_proved_error(self) -> Self:
        """The same network; it promises the error that its proof finds."""
        return replace(self, eps=self.verify().achieved)

    def error_chart(self, title: str, of: str, truth: Callable[[Tensor], Tensor], low: float, high: float) -> Chart:
        """The network over what it follows, and their difference, magnified so that it shows."""
        x = torch.linspace(low, high, 401, dtype=torch.float64)
        with torch.no_grad():
            network = self.as_module().double()(x[:, None])[:, 0]
        true = truth(x)
        error, size = network - true, float(true.abs().max())
        largest = float(error.abs().max())
        scale = 10.0 ** math.floor(math.log10(size / largest)) if largest > 0 and size > 0 else 1.0
        curves = {of: true, "network": network, f"error × {scale:g}": error * scale}
        return Chart(title, "x", "value", {name: (x.tolist(), y.tolist()) for name, y in curves.items()})


def pieces(layers: Layers, low: Fraction | float, high: Fraction | float) -> list[Piece]:
    """A network of one hidden layer as the lines it consists of from `low` to `high`, exactly."""
    (rows, bias), (outs, shifts) = layers
    slope, height = Fraction(0), shifts[0]
    kinks: list[tuple[Fraction, Fraction, Fraction]] = []
    for (weight,), offset, out in zip(rows, bias, outs[0], strict=True):
        tilt, lift = out * weight, out * offset
        if weight == 0:
            height += out * max(offset, Fraction(0))
            continue
        kink = -offset / weight
        if kink <= low if weight > 0 else kink > low:  # active right of `low`
            slope, height = slope + tilt, height + lift
        if low < kink < high:
            kinks.append((kink, tilt, lift) if weight > 0 else (kink, -tilt, -lift))
    points = []
    for kink, tilt, lift in sorted(kinks):
        if kink > low:
            points.append(Piece(low, kink, slope, height))
        low, slope, height = kink, slope + tilt, height + lift
    return [*points, Piece(low, high, slope, height)]


def round_layers(owner: str, exact: Layers, dtype: torch.dtype) -> Rounded:
    """Weights rounded to a type, as a linear map holds them."""
    check_dtype(f"{owner}: dtype", dtype, "use dtype=torch.float64")
    layers = []
    for rows, bias in exact:
        weight = torch.tensor([[as_float(entry) for entry in row] for row in rows], dtype=torch.float64).to(dtype)
        shift = torch.tensor([as_float(entry) for entry in bias], dtype=torch.float64).to(dtype)
        if not bool(weight.isfinite().all() and shift.isfinite().all()):
            remedy = "use a wider type or smaller numbers"
            raise RangeError(f"{owner}: dtype", dtype, "cannot carry the weights", remedy)
        layers.append((weight, shift))
    return tuple(layers)


def as_fractions(layers: Rounded) -> Layers:
    """Tensors as the fractions they are."""
    numbers = [(weight.double().tolist(), bias.double().tolist()) for weight, bias in layers]
    return tuple(
        Layer(tuple(tuple(map(Fraction, row)) for row in rows), tuple(map(Fraction, b))) for rows, b in numbers
    )


def checked_interval(owner: str, interval: tuple[Number, Number]) -> tuple[Fraction, Fraction]:
    """Two finite ends, the lower first, exactly."""
    if len(interval) != 2:
        raise ParameterError(f"{owner}: interval", interval, "must have two ends", "try interval=(0, 1)")
    low, high = (checked_number(f"{owner}: interval", end) for end in interval)
    if not abs(as_float(low)) + abs(as_float(high)) < math.inf:
        raise RangeError(f"{owner}: interval", interval, "reaches beyond float64", "keep it within ±1e307")
    if not float(low) < float(high):
        given = f"({low}, {high})"
        raise ParameterError(f"{owner}: interval", given, "must rise from its first end to its second", "swap them")
    return low, high


def checked_number(name: str, number: Number) -> Fraction:
    """A finite number, exactly."""
    if not isinstance(number, Number) or (isinstance(number, float) and not math.isfinite(number)):
        raise NonFiniteError(name, number, "must be a finite number", "give an int, a float or a Fraction")
    return Fraction(number)


def rounded_up(number: Fraction | float) -> float:
    """A float that is no smaller: infinity beyond them all."""
    value = as_float(number)
    return math.inf if math.isnan(value) else value if value >= number else math.nextafter(value, math.inf)


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
        errors: list[Fraction | float] = []
        for low, high, slope, height in pieces(as_fractions(self.layers), self.low, self.high):
            tilt, lift = slope - self.slope, height - self.intercept
            # Lines that are not parallel part without end.
            ends = [math.inf if abs(x) == math.inf else abs(tilt * Fraction(x) + lift) for x in (low, high)]
            errors += ends if tilt else [abs(lift)]
        steps = (
            "σ(z) − σ(−z) = z, so the units m·x + b and −m·x − b, subtracted, are the line [claim relu-linear-a]",
            "every piece of the rounded network is compared with the line at its ends, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(max(errors)), steps)

    def picture(self) -> Chart:
        m, b = float(self.slope), float(self.intercept)
        low, high = (-2.0, 2.0) if math.isinf(self.low) else (float(self.low), float(self.high))
        return self.error_chart("A line from two ReLUs", "line", lambda x: m * x + b, low, high)


@declared("relu_linear")
def relu_linear(
    m: Number, b: Number, interval: tuple[Number, Number] | None = None, dtype: torch.dtype = torch.float64
) -> ReluLinear:
    """The network σ(mx + b) − σ(−mx − b) = mx + b, on the whole line or on an interval.

    On the whole line a slope that the type does not hold exactly would drift away without end, and is refused.

    Args:
        m: the slope.
        b: the intercept.
        interval: where it must hold; None is the whole line.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The network, with its bound and a proof.

    Raises:
        ParameterError: a number is not finite.
        ToleranceUnreachable: the type does not hold the slope, on the whole line.

    >>> from avow.theory.constructions import relu_linear
    >>> relu_linear(2, -1).bound
    0.0
    """
    m, b = checked_number("relu_linear: m", m), checked_number("relu_linear: b", b)
    low, high = (-math.inf, math.inf) if interval is None else checked_interval("relu_linear", interval)
    exact = (Layer(((m,), (-m,)), (b, -b)), Layer(((Fraction(1), Fraction(-1)),), (Fraction(0),)))
    network = ReluLinear(exact, round_layers("relu_linear", exact, dtype), 0.0, m, b, low, high).with_proved_error()
    if math.isinf(network.bound):
        rule = f"is not a {dtype_name(dtype)} number, and a rounded slope drifts from the line without end"
        remedy = "give an interval, or a shorter one, or a slope that the type holds"
        raise ParameterError("relu_linear: m", m, rule, remedy)
    return network


@dataclass(frozen=True, eq=False)
class ReluSquare(ReluNetwork):
    """One hidden layer that is x² on [0, 1], as nearly as its number of units allows."""

    @property
    def exact_error(self) -> Fraction:
        """The error of the rational weights."""
        return Fraction(1, 2 * (2 * self.units + 1) ** 2)

    @property
    def promise(self) -> str:
        return f"within {self.bound:.6g} of x² everywhere on [0, 1], with {self._size('hidden units')}"

    def _size(self, units: str) -> str:
        return f"{self.units} {units} in {'one layer' if self.depth == 1 else f'{self.depth} layers'}"

    def verify(self) -> Proof:
        steps = (
            f"the rational weights are off by exactly {self.exact_error}, and no {self.units} units of one layer are "
            "closer [claim relu-square-best]",
            "on each piece of the rounded network x² minus a line is largest at an end or at its vertex, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(square_error(as_fractions(self.layers))), steps)

    def picture(self) -> Chart:
        return self.error_chart(f"x² from {self._size('ReLUs')}", "x²", torch.square, 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class ReluSquareDeep(ReluSquare):
    """Many narrow layers that are x² on [0, 1]; each divides the error by four."""

    @property
    def exact_error(self) -> Fraction:
        return Fraction(1, 4 ** (self.depth + 1))

    def verify(self) -> Proof:
        steps = (
            f"the rational weights interpolate x² at 2^{self.depth} + 1 equal steps, off by exactly "
            f"4^-{self.depth + 1} [claim relu-square-deep]",
            "what rounding changed in a layer is carried to the output, in fractions",
        )
        return Proof(self.promise, self.bound, rounded_up(sawtooth_error(as_fractions(self.layers))), steps)


@declared("relu_square")
def relu_square(eps: Number, deep: bool = False, dtype: torch.dtype = torch.float64) -> ReluSquare:
    """A network within `eps` of x² on [0, 1]: the fewest units of one layer, or a deep one.

    One layer of K units with an output bias is off by exactly 1/(2(2K+1)²), the least there is. A deep one of m
    layers is off by exactly 4^-(m+1) and has 3m − 1 units: two in the first layer, three in every other. If
    rounding to `dtype` costs more than `eps` has to spare, units are added.

    Args:
        eps: ε, between 0 and 1.
        deep: whether to use many layers of three units instead of one.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The network, with its bound and a proof.

    Raises:
        ParameterError: eps is out of range.
        ToleranceUnreachable: the type's rounding is coarser than eps.

    >>> from avow.theory.constructions import relu_square
    >>> [relu_square(eps).units for eps in (1e-2, 1e-3, 1e-4, 1e-6)]
    [4, 11, 35, 354]
    >>> [relu_square(eps, deep=True).units for eps in (1e-2, 1e-3, 1e-4, 1e-6)]
    [8, 11, 17, 26]
    """
    checked_eps("relu_square", eps)
    eps = checked_number("relu_square: eps", eps)
    kind, weights = (ReluSquareDeep, sawtooth) if deep else (ReluSquare, hinges)
    best = math.inf
    for size in _depths(eps) if deep else _widths(eps):
        exact = weights(size)
        network = kind(exact, round_layers("relu_square", exact, dtype), 0.0).with_proved_error()
        if network.bound <= eps:
            return network
        best = min(best, network.bound)
        if network.bound > 8 * eps:
            break  # what is missing is bits, and more units bring none
    rule = f"is finer than weights of type {dtype_name(dtype)} can follow x²"
    remedy = f"use eps of at least {best:.2g}, or a wider dtype"
    raise ToleranceUnreachable("relu_square: eps", f"{float(eps):g}", rule, remedy, best)


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


def _widths(eps: Fraction) -> list[int]:
    """The least K with 1/(2(2K+1)²) ≤ eps, then more, up to twice as many."""
    root = math.isqrt(math.ceil(1 / (2 * eps)) - 1) + 1  # the least whole number whose square is at least 1/(2 eps)
    least = max(1, root // 2)
    if least > MOST_UNITS:
        rule = f"needs {least:,} units in one layer, and at most {MOST_UNITS:,} are made"
        raise ParameterError("relu_square: eps", f"{float(eps):g}", rule, "use deep=True")
    return [least, *(least + 2**k for k in range(least.bit_length()))]


def _depths(eps: Fraction) -> list[int]:
    """The least m with 4^(m+1) ≥ 1/eps, and one more."""
    bits = (math.ceil(1 / eps) - 1).bit_length()  # the least power of two that is no smaller
    depth = max(1, math.ceil(bits / 2) - 1)
    return [depth, depth + 1]
