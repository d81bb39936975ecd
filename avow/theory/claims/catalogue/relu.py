r"""What a network of ReLUs can be: a line, from two units.

:math:`f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1`, :math:`\sigma(z) = \max(z, 0) = (z + |z|)/2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from sympy import Symbol

from avow.core.chart import Chart
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions import relu_linear
from avow.theory.constructions.relu_network import Layers

m, b, x = (Symbol(name, real=True) for name in "mbx")


def relu(z: Any) -> Any:
    """:math:`\\sigma(z) = (z + |z|)/2`, for symbols and for fractions alike."""
    return (z + abs(z)) / 2


def evaluated(layers: Layers, x: Fraction) -> Fraction:
    """A network at a point, in fractions."""
    values = [x]
    for rows, bias in layers[:-1]:
        values = [relu(_affine(row, values, shift)) for row, shift in zip(rows, bias, strict=True)]
    return _affine(layers[-1].rows[0], values, layers[-1].bias[0])


def _affine(row: tuple[Fraction, ...], values: list[Fraction], shift: Fraction) -> Fraction:
    return sum((weight * value for weight, value in zip(row, values, strict=True)), shift)


class Units(NamedTuple):
    """Weights w_0, biases b_0 and output weights w_1 as functions of the line's m and b."""

    weights: Callable[[Any, Any], list[Any]]
    biases: Callable[[Any, Any], list[Any]]
    outs: Callable[[Any, Any], list[Any]]

    def at(self, m: Any, b: Any, x: Any) -> Any:
        """The network at x."""
        parts = zip(self.weights(m, b), self.biases(m, b), self.outs(m, b), strict=True)
        return sum((out * relu(weight * x + bias) for weight, bias, out in parts), 0 * x)


ONE_UNIT = Units(lambda m, b: [m, 0], lambda m, b: [b, 0], lambda m, b: [1, 0])
OUTPUT_SLOPE = Units(lambda m, b: [1, 1], lambda m, b: [0, 0], lambda m, b: [m, 0])
TWO_UNITS = Units(lambda m, b: [m, -m], lambda m, b: [b, -b], lambda m, b: [1, -1])


class Lines(NamedTuple):
    """The network as stated and as amended."""

    stated: Units
    amended: Units


def cut(amended: bool = False) -> Iterator[Evidence]:
    """The ReLU's formula is the ReLU."""
    size = Symbol("p", nonnegative=True)
    yield toolbox.identity(relu(size), size, "σ(z) = (z + |z|)/2 is z where z = p ≥ 0", amended)
    yield toolbox.identity(relu(-size), 0, "and 0 where z = −p ≤ 0", amended)


def _lines_picture(units: Units, name: str) -> Chart:
    xs = [Fraction(i, 10) for i in range(-30, 31)]
    series = {
        "x + 1": [x + 1 for x in xs],
        name: [units.at(Fraction(1), Fraction(1), x) for x in xs],
        "two units": [TWO_UNITS.at(Fraction(1), Fraction(1), x) for x in xs],
    }
    drawn = {label: ([float(x) for x in xs], [float(y) for y in ys]) for label, ys in series.items()}
    return Chart("The line x + 1 and networks said to be it", "x", "f(x)", drawn)


@claim(
    "relu-linear-a",
    topic="relu",
    expected="corrected",
    statement=r"w_0 = [m, 0],\ b_0 = [b, 0],\ w_1 = [1, 0] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b",
    plain="One ReLU with slope m and bias b computes the line mx + b.",
    amended=r"w_0 = [m, -m],\ b_0 = [b, -b],\ w_1 = [1, -1] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b"
    r"\quad\text{for all real } m, b, x",
    amended_plain="One unit gives 0 wherever the line is negative. Two units, one for each sign, subtracted, are the"
    " line everywhere.",
    assumptions=("real arithmetic", "any real m, b and x"),
    subject=Lines(ONE_UNIT, TWO_UNITS),
    sabotage={
        "two units added": Lines(ONE_UNIT, TWO_UNITS._replace(outs=lambda m, b: [1, 1])),
        "the same bias twice": Lines(ONE_UNIT, TWO_UNITS._replace(biases=lambda m, b: [b, b])),
        "a network that is right to begin with": Lines(TWO_UNITS, TWO_UNITS),
    },
    picture=lambda: _lines_picture(ONE_UNIT, "one unit"),
)
def relu_linear_a(lines: Lines) -> Iterator[Evidence]:
    one, zero = Fraction(1), Fraction(0)
    found = lines.stated.at(one, zero, -one)
    yield toolbox.counterexample(
        found != -1, "m = 1, b = 0, x = −1: the line is −1", "fractions", network=str(found), line="-1"
    )
    steep, below = Symbol("m", real=True, nonzero=True), Symbol("p", positive=True)
    where = (-below - b) / steep
    yield toolbox.identity(
        lines.stated.at(steep, b, where), 0, "for every m ≠ 0 and b the network is 0 where mx + b = −p < 0"
    )
    yield from cut(amended=True)
    yield toolbox.identity(
        lines.amended.at(m, b, x), m * x + b, "σ(mx + b) − σ(−mx − b) = mx + b for all m, b, x", amended=True
    )
    yield toolbox.kept(relu_linear(Fraction(-7, 4), 3), "the library's −7/4·x + 3, on the whole line", amended=True)


@claim(
    "relu-linear-b",
    topic="relu",
    expected="refuted",
    statement=r"w_0 = [1, 1],\ b_0 = 0,\ w_1 = [m, 0] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b",
    plain="Two units of slope 1 without biases, the first weighted by m, compute the line mx + b.",
    assumptions=("real arithmetic", "any real m, b and x"),
    subject=OUTPUT_SLOPE,
    sabotage={"the two units that do it": TWO_UNITS},
    picture=lambda: _lines_picture(OUTPUT_SLOPE, "w_0 = [1, 1], w_1 = [1, 0]"),
)
def relu_linear_b(units: Units) -> Iterator[Evidence]:
    one, zero = Fraction(1), Fraction(0)
    for slope, shift, where, says in (
        (one, one, zero, "m = 1, b = 1, x = 0: without a bias the network is 0 at 0, whatever b is"),
        (one, zero, -one, "m = 1, b = 0, x = −1: left of 0 no unit is awake, whatever m is"),
    ):
        found, line = units.at(slope, shift, where), slope * where + shift
        yield toolbox.counterexample(found != line, says, "fractions", network=str(found), line=str(line))
    yield toolbox.identity(units.at(m, b, sympy.Integer(0)), 0, "at x = 0 it is 0 for every m and b: wrong if b ≠ 0")
    left = -Symbol("p", positive=True)
    yield toolbox.identity(units.at(m, b, left), 0, "at every x < 0 it is 0: wrong if m ≠ 0, all but once")
