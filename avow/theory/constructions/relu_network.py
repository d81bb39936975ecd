r"""What every ReLU network here is: fractions, the same weights as tensors, and the lines it consists of.

.. math:: f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1, \quad \sigma(z) = \max(z, 0)

Weights are kept twice: as the fractions of a formula, and as tensors rounded to the type asked for. A proof reads the
tensors: a float is a fraction too, so the network that is really returned is known exactly, as real arithmetic has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from avow.core.chart import Chart
from avow.errors import NonFiniteError, ParameterError, RangeError
from avow.parameters import as_float
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.validation import checked_dtype

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
    promised: float

    @property
    def bound(self) -> float:
        return self.promised

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

    def drawn(self, title: str, of: str, truth: Callable[[Tensor], Tensor], low: float, high: float) -> Chart:
        """The network over what it follows, and their difference, magnified so that it shows."""
        x = torch.linspace(low, high, 401, dtype=torch.float64)
        with torch.no_grad():
            network = self.as_module().double()(x[:, None])[:, 0]
        true = truth(x)
        error, size = network - true, float(true.abs().max())
        largest = float(error.abs().max())
        scale = 10.0 ** math.floor(math.log10(size / largest)) if largest > 0 and size > 0 else 1.0
        drawn = {of: true, "network": network, f"error × {scale:g}": error * scale}
        return Chart(title, "x", "value", {name: (x.tolist(), y.tolist()) for name, y in drawn.items()})


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
    found = []
    for kink, tilt, lift in sorted(kinks):
        if kink > low:
            found.append(Piece(low, kink, slope, height))
        low, slope, height = kink, slope + tilt, height + lift
    return [*found, Piece(low, high, slope, height)]


def rounded(owner: str, exact: Layers, dtype: torch.dtype) -> Rounded:
    """Weights rounded to a type, as a linear map holds them."""
    checked_dtype(owner, dtype)
    made = []
    for rows, bias in exact:
        weight = torch.tensor([[_nearest(entry) for entry in row] for row in rows], dtype=torch.float64).to(dtype)
        shift = torch.tensor([_nearest(entry) for entry in bias], dtype=torch.float64).to(dtype)
        if not bool(torch.isfinite(weight).all() and torch.isfinite(shift).all()):
            raise RangeError(
                f"{owner}: dtype", dtype, "cannot carry the weights", "use a wider type or smaller numbers"
            )
        made.append((weight, shift))
    return tuple(made)


def as_fractions(layers: Rounded) -> Layers:
    """Tensors as the fractions they are."""
    return tuple(
        Layer(
            tuple(tuple(map(Fraction, row)) for row in weight.double().tolist()),
            tuple(map(Fraction, bias.double().tolist())),
        )
        for weight, bias in layers
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
    try:
        found = float(number)
    except OverflowError:
        return math.inf
    return found if found >= number else math.nextafter(found, math.inf)


def _nearest(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
