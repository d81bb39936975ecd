r"""What a network of ReLUs can be: a line, a square on [0, 1] from one layer or many, and no square on the whole line.

:math:`f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1`, :math:`\sigma(z) = \max(z, 0) = (z + |z|)/2`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Rational, Symbol, cos, log, sin, sqrt

from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball, most, total
from avow.theory.claims.claim import Evidence, Falsifier, Formula, Versions, claims_on, numbered, of_versions
from avow.theory.claims.toolbox import counterexample, identity, kept, nonnegative, positive, rational, symbols
from avow.theory.constructions import relu_linear, relu_square
from avow.theory.constructions.relu import Layer, Layers, hinges, sawtooth, square_error

claim = claims_on("relu")
m, b, x = symbols(real="m b x")


def relu(z: Any) -> Any:
    """:math:`\\sigma(z) = (z + |z|)/2`, for symbols and for fractions alike."""
    return (z + abs(z)) / 2


def evaluated(layers: Layers, x: Fraction) -> Fraction:
    """A network at a point, in fractions."""
    values = [x]
    for number, (rows, bias) in enumerate(layers, start=1):
        sums = [sum(map(operator.mul, row, values), shift) for row, shift in zip(rows, bias, strict=True)]
        values = sums if number == len(layers) else [relu(z) for z in sums]
    return values[0]


class Units(NamedTuple):
    """Weights w_0, biases b_0 and output weights w_1 as functions of the line's m and b."""

    weights: Formula
    biases: Formula
    outs: Formula

    def at(self, m: Any, b: Any, x: Any) -> Any:
        """The network at x."""
        parts = zip(self.weights(m, b), self.biases(m, b), self.outs(m, b), strict=True)
        return sum((out * relu(weight * x + bias) for weight, bias, out in parts), 0 * x)


ONE_UNIT = Units(lambda m, b: [m, 0], lambda m, b: [b, 0], lambda m, b: [1, 0])
OUTPUT_SLOPE = Units(lambda m, b: [1, 1], lambda m, b: [0, 0], lambda m, b: [m, 0])
TWO_UNITS = Units(lambda m, b: [m, -m], lambda m, b: [b, -b], lambda m, b: [1, -1])


def cut(amended: bool = False) -> Iterator[Evidence]:
    """The ReLU's formula is the ReLU."""
    size = Symbol("p", nonnegative=True)
    yield identity(relu(size), size, "σ(z) = (z + |z|)/2 is z where z = p ≥ 0", amended)
    yield identity(relu(-size), 0, "and 0 where z = −p ≤ 0", amended)


def _lines_picture(units: Units, name: str) -> Chart:
    heights: Any = {"x + 1": lambda x: x + 1, name: partial(units.at, 1, 1), "two units": partial(TWO_UNITS.at, 1, 1)}
    xs: Any = [Fraction(i, 10) for i in range(-30, 31)]
    return curves("The line x + 1 and networks said to be it", "x", "f(x)", xs, heights)


def _line(units: Units, m: arb, b: arb, x: arb) -> arb:
    return abs(units.at(m, b, x) - (m * x + b))


@claim(
    "relu-linear-a",
    expected="corrected",
    statement=r"w_0 = [m, 0],\ b_0 = [b, 0],\ w_1 = [1, 0] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b",
    plain="One ReLU with slope m and bias b computes the line mx + b.",
    amended=r"w_0 = [m, -m],\ b_0 = [b, -b],\ w_1 = [1, -1] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b"
    r"\quad\text{for all real } m, b, x",
    amended_plain="One unit gives 0 wherever the line is negative. Two units, one for each sign, subtracted, are the"
    " line everywhere.",
    assumptions=("real arithmetic", "any real m, b and x"),
    subject=Versions(ONE_UNIT, TWO_UNITS),
    sabotage={
        "two units added": Versions(ONE_UNIT, TWO_UNITS._replace(outs=lambda m, b: [1, 1])),
        "the same bias twice": Versions(ONE_UNIT, TWO_UNITS._replace(biases=lambda m, b: [b, b])),
        "a network that is right to begin with": Versions(TWO_UNITS, TWO_UNITS),
    },
    picture=lambda: _lines_picture(ONE_UNIT, "one unit"),
    falsifier=Falsifier(numbered("m b x", -3, 3), *of_versions(_line)),
)
def relu_linear_a(lines: Versions) -> Iterator[Evidence]:
    one, zero = Fraction(1), Fraction(0)
    value = lines.stated.at(one, zero, -one)
    says = "m = 1, b = 0, x = −1: the line is −1"
    yield counterexample(value != -1, says, "fractions", network=str(value), line="-1")
    steep, below = Symbol("m", real=True, nonzero=True), Symbol("p", positive=True)
    where = (-below - b) / steep
    yield identity(lines.stated.at(steep, b, where), 0, "for every m ≠ 0 and b the network is 0 where mx + b = −p < 0")
    yield from cut(amended=True)
    says = "σ(mx + b) − σ(−mx − b) = mx + b for all m, b, x"
    yield identity(lines.amended.at(m, b, x), m * x + b, says, amended=True)
    yield kept(relu_linear(Fraction(-7, 4), 3), "the library's −7/4·x + 3, on the whole line", amended=True)


@claim(
    "relu-linear-b",
    expected="refuted",
    statement=r"w_0 = [1, 1],\ b_0 = 0,\ w_1 = [m, 0] \;\Rightarrow\; w_1^\top\sigma(w_0 x + b_0) = mx + b",
    plain="Two units of slope 1 without biases, the first weighted by m, compute the line mx + b.",
    assumptions=("real arithmetic", "any real m, b and x"),
    subject=OUTPUT_SLOPE,
    sabotage={"the two units that do it": TWO_UNITS},
    picture=lambda: _lines_picture(OUTPUT_SLOPE, "w_0 = [1, 1], w_1 = [1, 0]"),
    falsifier=Falsifier(numbered("m b x", -3, 3), _line),
)
def relu_linear_b(units: Units) -> Iterator[Evidence]:
    one, zero = Fraction(1), Fraction(0)
    for slope, shift, where, says in (
        (one, one, zero, "m = 1, b = 1, x = 0: without a bias the network is 0 at 0, whatever b is"),
        (one, zero, -one, "m = 1, b = 0, x = −1: left of 0 no unit is awake, whatever m is"),
    ):
        value, line = units.at(slope, shift, where), slope * where + shift
        yield counterexample(value != line, says, "fractions", network=str(value), line=str(line))
    yield identity(units.at(m, b, sympy.Integer(0)), 0, "at x = 0 it is 0 for every m and b: wrong if b ≠ 0")
    left = -Symbol("p", positive=True)
    yield identity(units.at(m, b, left), 0, "at every x < 0 it is 0: wrong if m ≠ 0, all but once")


# ε and the units it takes, as the ledger records them.
WIDE = {Fraction(1, 100): 4, Fraction(1, 1000): 11, Fraction(1, 10**4): 35, Fraction(1, 10**6): 354}


class Hinges(NamedTuple):
    """One layer of K units for x², in n = 2K + 1: unit i is σ(weight·x + offset), all with one output weight."""

    weight: Formula = lambda n: n
    offset: Formula = lambda i: 1 - 2 * i
    out: Formula = lambda n: 4 / n**2
    bias: Formula = lambda n: 1 / (2 * n**2)
    units: Mapping[Fraction, int] = WIDE

    def layers(self, units: int) -> Layers:
        """The network in fractions."""
        n = Fraction(2 * units + 1)
        offsets = tuple(Fraction(self.offset(i)) for i in range(1, units + 1))
        hidden = Layer(((Fraction(self.weight(n)),),) * units, offsets)
        return hidden, Layer(((Fraction(self.out(n)),) * units,), (Fraction(self.bias(n)),))


def _square_picture() -> Chart:
    units = [*range(1, 20), *range(20, 401, 20)]
    series = {
        "one layer, best": (units, [1 / (2 * (2 * k + 1) ** 2) for k in units]),
        "one layer, through the knots": (units, [1 / (4 * k**2) for k in units]),
        "deep": ([3 * m - 1 for m in range(1, 14)], [4.0 ** -(m + 1) for m in range(1, 14)]),
    }
    return Chart("How near ReLUs come to x² on [0, 1]", "hidden units", "largest error", series, True, True)


def _hinges(network: Hinges, units: int, which: int, x: arb, *one: arb) -> arb:
    """K units at x; the units of one of the four ε, from 1e-2 on; and any one unit of weights w₀, b₀, w₁, b₁."""

    def off(units: int) -> arb:
        n = arb(2 * units + 1)
        awake = total(relu(network.weight(n) * x + network.offset(i)) for i in range(1, units + 1))
        return abs(network.out(n) * awake + network.bias(n) - x * x)

    eps, enough = list(network.units.items())[which]
    broken = [off(units) - arb(1) / (2 * (2 * units + 1) ** 2), off(enough) - ball(eps)]
    return most([*broken, arb(1) / 18 - _farthest(*one)])


def _farthest(weight: arb, bias: arb, out: arb, shift: arb) -> arb:
    """The largest distance of one unit to x² on [0, 1]: at an end, at its kink, or where the slopes agree."""
    inside = [x.max(arb(0)).min(arb(1)) for x in (arb(0), arb(1), -bias / weight, out * weight / 2)]
    return most([abs(out * relu(weight * x + bias) + shift - x * x) for x in inside])


@claim(
    "relu-square",
    expected="proved",
    statement=r"\forall \varepsilon > 0\ \exists K:\ \Big|\tfrac{4}{n^2}\sum_{i=1}^{K}\sigma(nx - (2i-1)) +"
    r"\tfrac{1}{2n^2} - x^2\Big| \le \tfrac{1}{2n^2} \le \varepsilon \text{ on } [0,1],\ n = 2K + 1,"
    r"\text{ and no } K \text{ units come closer}",
    plain="For any ε some finite network is within ε of x² on [0, 1]. One hidden layer of K units with an output bias"
    " comes within exactly 1/(2(2K+1)²), and no layer of K units comes closer: 4, 11, 35 and 354 units for 1e-2, 1e-3,"
    " 1e-4 and 1e-6.",
    assumptions=("real arithmetic", "x in [0, 1]", "one hidden layer with an output bias", "K ≥ 1"),
    subject=Hinges(),
    sabotage={
        "without the output bias": Hinges(bias=lambda n: 0 * n),
        "knots at multiples of 1/K": Hinges(weight=lambda n: (n - 1) / 2, offset=lambda i: 1 - i),
        "jumps half as large": Hinges(out=lambda n: 2 / n**2),
        "one unit fewer": Hinges(units={eps: units - 1 for eps, units in WIDE.items()}),
    },
    picture=_square_picture,
    falsifier=Falsifier(
        {"K": range(1, 41), "ε, of four": range(4), "x": (0, 1), "w₀": (0.01, 3)} | numbered("b₀ w₁ b₁", -2, 2), _hinges
    ),
)
def relu_square_wide(network: Hinges) -> Iterator[Evidence]:
    yield from _within(network)
    r, more = symbols(positive="r", nonnegative="s")
    says = "for every ε = r²/8 > 0, any whole K ≥ 1/r = 1/√(8ε) has 1/(2(2K+1)²) ≤ ε"
    yield nonnegative(sympy.expand(2 * (r**2 / 8) * (2 * (1 / r + more) + 1) ** 2 - 1), says)
    yield from _no_better()
    yield from _pieces()
    for eps, units in network.units.items():
        error = square_error(network.layers(units))
        says = f"{units} units: the largest error, at the ends and the vertex of every piece, is 1/(2(2K+1)²)"
        yield rational(error == Fraction(1, 2 * (2 * units + 1) ** 2), says, units=units, error=error)
        fewer = Fraction(1, 2 * (2 * units - 1) ** 2)
        says = f"it is at most ε = {eps}, and a unit fewer is not enough"
        yield rational(error <= eps < fewer, says, error=error, with_one_fewer=fewer)
    yield kept(relu_square(1e-3), "the library's network for ε = 1e-3, its weights rounded to float64")


def _within(network: Hinges) -> Iterator[Evidence]:
    """On every piece the error is −cos(2θ)/(2n²)."""
    n, units, j, i, theta = symbols(integer_positive="n K j", integer_nonnegative="i", real="theta")
    knot = -network.offset(j) / network.weight(n)
    yield identity(knot, (2 * j - 1) / n, "unit j wakes at (2j − 1)/n")
    offsets = sympy.summation(network.offset(j), (j, 1, i))
    where = (2 * i + sin(theta)) / n
    last = where.subs({i: units, n: 2 * units + 1, theta: sympy.pi / 2})
    yield identity(last, 1, "as n = 2K + 1, piece K ends at 1: x = (2i + sin θ)/n, i = 0 … K, is all of [0, 1]")
    value = network.out(n) * (i * network.weight(n) * where + offsets) + network.bias(n)
    says = "there, i units are awake, and x² − f(x) = −cos(2θ)/(2n²)"
    yield identity(where**2 - value, -cos(2 * theta) / (2 * n**2), says)
    yield nonnegative(1 - cos(2 * theta), "cos(2θ) ≤ 1")
    yield nonnegative(1 + cos(2 * theta), "cos(2θ) ≥ −1: the error is at most 1/(2n²), and is that at θ = 0")


def _no_better() -> Iterator[Evidence]:
    """No K units come closer: upward kinks end stretches that are short, and the first stretch is half as long."""
    a, slope, height, h, e, k, p, q = symbols(real="a s c", positive="h e K", nonnegative="p q")

    def left(at: Any) -> Any:
        return at**2 - slope * at - height

    says = "x² minus a line has second difference h²/2 on length h"
    yield identity(left(a) + left(a + h) - 2 * left(a + h / 2), h**2 / 2, says)
    for before, after, words in ((p, p + q, "left of the middle"), (p + q, p, "right of the middle")):
        bent = relu(-before) + relu(after) - 2 * relu((after - before) / 2)
        yield nonnegative(bent, f"a kink that bends f down, {words}, only adds to it: σ(−u) + σ(v) − 2σ((v − u)/2) ≥ 0")
    says = "off by at most e, it is at most 4e: a stretch without an upward kink is at most √(8e) long"
    yield nonnegative(sympy.expand((sqrt(8 * e) + p) ** 2 / 2 - 4 * e), says)
    # What a unit with a kink at t adds to the slope left of it, against the jump it makes there.
    c, step, v, t = symbols(positive="c p", real="v t")
    for sign, words in ((1, "on the right adds no slope left of its kink"), (-1, "on the left adds minus its jump")):
        before, at, after = (v * relu(sympy.expand(sign * c * (x - t))) for x in (t - step, t, t + step))
        fall, rise = (at - before) / step, (after - at) / step
        yield identity(fall, 0 if sign > 0 else -(rise - fall), f"a unit awake {words}")
    says = "all kinks upward: f starts with slope −p ≤ 0, and x² − f climbs by h² + ph ≥ h² there"
    yield nonnegative((h**2 + p * h) - h**2, says)
    says = "which is at most 2e: the first stretch is at most √(2e) long"
    yield nonnegative(sympy.expand((sqrt(2 * e) + p) ** 2 - 2 * e), says)
    least = 1 / (2 * (2 * k + 1) ** 2)
    yield identity(sqrt(2 * least) + k * sqrt(8 * least), 1, "K upward kinks: 1 ≤ √(2e) + K√(8e), so e ≥ 1/(2(2K+1)²)")
    says = "fewer upward kinks inside: 1 ≤ K√(8e), so e ≥ 1/(8K²), which is more than 1/(2(2K+1)²)"
    yield positive(1 / (8 * k**2) - least, says)


def _pieces() -> Iterator[Evidence]:
    n, i, more, theta = symbols(positive="N", nonnegative="i s", real="theta")
    start, share = i / n, (1 + sin(theta)) / 2
    where = start + share / n
    chord = start**2 + ((start + 1 / n) ** 2 - start**2) * share
    says = "N equal pieces through the knots are above x² by cos²θ/(4N²): off by 1/(4N²), and by 1/(8N²) once lowered"
    yield identity(chord - where**2, cos(theta) ** 2 / (4 * n**2), says)
    says = "of N pieces one is at least 1/N long: none are nearer than h²/8 ≥ 1/(8N²)"
    yield nonnegative((1 / n + more) ** 2 / 8 - 1 / (8 * n**2), says)


# ε and the units it takes, as the ledger records them.
DEEP = {Fraction(1, 100): 8, Fraction(1, 1000): 11, Fraction(1, 10**4): 17, Fraction(1, 10**6): 26}


class Sawtooth(NamedTuple):
    """The deep network: the tooth from its two units' outputs, what f_k takes of g_k, the units of m layers."""

    tooth: Formula = lambda a, b: 2 * a - 4 * b
    share: Formula = lambda k: Rational(1, 4) ** k
    units: Formula = lambda m: 3 * m - 1


def _deep_picture() -> Table:
    networks = {eps: relu_square(eps, deep=True) for eps in WIDE}
    rows = [[f"{float(eps):g}", WIDE[eps], x.units, x.depth, str(x.exact_error)] for eps, x in networks.items()]
    headings = ("ε", "units in one layer", "units, deep", "layers", "deep error, exactly")
    return Table("x² on [0, 1] to within ε", headings, rows)


def _sawtooth(network: Sawtooth, depth: int, x: arb) -> arb:
    tooth = value = x
    for k in range(1, depth + 1):
        tooth = network.tooth(relu(tooth), relu(tooth - arb(1) / 2))
        value = value - ball(Fraction(network.share(k))) * tooth
    units = sum(len(layer.bias) for layer in sawtooth(depth)[:-1])
    return (abs(value - x * x) - arb(4) ** -(depth + 1)).max(arb(units - network.units(depth)))


@claim(
    "relu-square-deep",
    expected="proved",
    statement=r"f_m = x - \sum_{k=1}^{m} 4^{-k} g^{\circ k}(x),\ g(y) = 2\sigma(y) - 4\sigma(y - \tfrac12):\quad"
    r"\max_{[0,1]} |f_m - x^2| = 4^{-(m+1)} \text{ with } 3m - 1 \text{ units in } m \text{ layers}",
    plain="Depth helps: a sawtooth composed with itself m times comes within exactly 4^-(m+1) of x² on [0, 1] with"
    " 3m − 1 units in m layers: 8, 11, 17 and 26 units for 1e-2, 1e-3, 1e-4 and 1e-6. From ε = 1e-4 on, that is fewer"
    " than any single layer can do with; at 1e-2 a single layer needs only 4.",
    assumptions=("real arithmetic", "x in [0, 1]", "m ≥ 1", "that one layer needs more: claim relu-square"),
    subject=Sawtooth(),
    sabotage={
        "a tooth that does not come back down": Sawtooth(tooth=lambda a, b: 2 * a - 2 * b),
        "halves in place of quarters": Sawtooth(share=lambda k: Rational(1, 2) ** k),
        "two units a layer": Sawtooth(units=lambda m: 2 * m),
    },
    picture=_deep_picture,
    needs=("relu-square",),
    falsifier=Falsifier({"m": range(1, 9), "x": (0, 1)}, _sawtooth),
)
def relu_square_deep(network: Sawtooth) -> Iterator[Evidence]:
    yield from _interpolates(network)
    yield from _off_by_a_quarter()
    m = Symbol("m", integer=True, positive=True)
    says = "g, g − ½ and f in every layer, but no f in the first: 3m − 1 units"
    yield identity(network.units(m), 2 + 3 * (m - 1), says)
    for depth in (1, 2, 3, 4):
        layers, worst = sawtooth(depth), Fraction(1, 4 ** (depth + 1))
        grid = [Fraction(i, 2 ** (depth + 1)) for i in range(2 ** (depth + 1) + 1)]
        errors = [evaluated(layers, x) - x * x for x in grid]
        says = (
            f"the library's {depth} layers are x² at every multiple of 2^-{depth}, and 4^-{depth + 1} above in between"
        )
        yield rational(errors[0::2] == [0] * len(errors[0::2]) and set(errors[1::2]) == {worst}, says, error=worst)
    for eps, units in DEEP.items():
        depth = next(m for m in range(1, 99) if Fraction(1, 4 ** (m + 1)) <= eps)
        says = f"ε = {eps}: the least m with 4^-(m+1) ≤ ε has {units} units"
        error = Fraction(1, 4 ** (depth + 1))
        yield rational(int(network.units(depth)) == units, says, layers=depth, error=error)
    yield from _fewer_than_one_layer()
    yield kept(relu_square(1e-6, deep=True), "the library's network for ε = 1e-6, rounded to float64")


def _interpolates(network: Sawtooth) -> Iterator[Evidence]:
    """f_k is the chord of x² on every dyadic piece, by induction on k."""
    w, u, i, k = symbols(nonnegative="w", real="u", integer_nonnegative="i k")
    half = Rational(1, 2)

    def chord(j: Any, u: Any, k: Any) -> Any:
        return (j**2 + (2 * j + 1) * u) / 4**k

    yield from cut()
    yield identity(network.tooth(half - w, relu(-w)), 1 - 2 * w, "left of ½ the tooth is 2y: g(½ − w) = 1 − 2w")
    yield identity(network.tooth(half + w, relu(w)), 1 - 2 * w, "right of ½ it comes down again: g(½ + w) = 1 − 2w")
    says = "f_0 = g_0 = x: the chord of x² on [0, 1], and a tooth that rises (x = u, piece 0)"
    yield identity(chord(0, u, 0), u, says)
    # On piece i of level k, x = (i + s)/2^k, g_k is s where i is even and 1 − s where it is odd.
    for part, s, tooth in (("left", u / 2, u), ("right", (1 + u) / 2, 1 - u)):
        for parity, y in (("even", s), ("odd", 1 - s)):
            lower = (part == "left") == (parity == "even")
            height = network.tooth(y, 0) if lower else network.tooth(y, y - half)
            says = f"on the {part} half of a piece of {parity} number g_(k+1) = g(g_k) is {tooth}"
            yield identity(height, tooth, says)
        j = 2 * i + (0 if part == "left" else 1)
        says = f"if f_k is the chord of x² on piece i, f_(k+1) = f_k − 4^-(k+1) g_(k+1) is the one on its {part} half"
        yield identity(chord(i, s, k) - network.share(k + 1) * tooth, chord(j, u, k + 1), says)


def _off_by_a_quarter() -> Iterator[Evidence]:
    j, m, u, theta = symbols(integer_nonnegative="j", integer_positive="m", real="u theta")
    above = (j**2 + (2 * j + 1) * u) / 4**m - ((j + u) / 2**m) ** 2
    yield identity(above, u * (1 - u) / 4**m, "a chord on a piece of length 2^-m is u(1 − u)/4^m above x²")
    inside = (sin(theta) * cos(theta)) ** 2
    yield identity((u * (1 - u)).subs(u, sin(theta) ** 2), inside, "for u = sin²θ in [0, 1] u(1 − u) is sin²θ cos²θ")
    yield nonnegative(inside, "so f_m is never below x², nor below 0, and σ(f_m) = f_m")
    gap = sympy.Integer(1) / 4 - u * (1 - u)
    yield identity(gap, (u - Rational(1, 2)) ** 2, "and ¼ − u(1 − u) = (u − ½)²")
    says = "so f_m − x² ≤ 4^-(m+1), which is reached in the middle, at u = ½"
    yield nonnegative((u - Rational(1, 2)) ** 2 / 4**m, says)


def _fewer_than_one_layer() -> Iterator[Evidence]:
    """With ε = 4^-y: at most 3y − 1 deep units against at least (2^y/√2 − 1)/2 of one layer."""
    y, d, z = symbols(positive="y", nonnegative="d z")
    one_layer = (1 / sqrt(2 * 4**-y) - 1) / 2
    says = "ε = 4^-y takes K ≥ (2^y/√2 − 1)/2 units of one layer, or m < y layers"
    yield identity(1 / (2 * (2 * one_layer + 1) ** 2), 4**-y, says)
    start = log(10**4) / log(4)
    lead = one_layer.subs(y, start) - (3 * start - 1)
    yield positive(lead, "at ε = 1e-4 that is more than the 3m − 1 < 3y − 1 of a deep network")
    growth = sympy.diff(one_layer, y).subs(y, start)
    yield positive(growth - 3, "and there K grows by more than 3 for every y")
    says = "further on, K's growth, 3 + d there, is 2^s = 1 + z ≥ 1 times that"
    yield nonnegative(sympy.expand((3 + d) * (1 + z) - 3), says)


class Growth(NamedTuple):
    """What a network is to follow on the whole line."""

    function: Formula
    name: str


def _line_picture() -> Chart:
    heights: Any = {"x²": lambda x: x * x, "11 units, within 1e-3 on [0, 1]": partial(evaluated, hinges(11))}
    xs: Any = [Fraction(i, 20) for i in range(-40, 61)]
    return curves("Beyond its last kink a network is a straight line", "x", "f(x)", xs, heights)


def _everywhere(target: Growth, kinks: int, reach: arb, eps: arb, x: arb) -> arb:
    """A network through the target at 0 and at points up to the reach on either side."""
    step, network = reach / kinks, target.function(arb(0))
    for side in (1, -1):
        heights = [target.function(side * i * step) for i in range(kinks + 1)]
        slopes = [arb(0), *((b - a) / step for a, b in itertools.pairwise(heights))]
        network += total((slopes[i + 1] - slopes[i]) * relu(side * x - i * step) for i in range(kinks))
    return abs(network - target.function(x)) - eps


@claim(
    "relu-square-line",
    expected="refuted",
    statement=r"\forall \varepsilon > 0 \text{ some finite ReLU network has } |f(x) - x^2| \le \varepsilon"
    r"\text{ for all } x \in \mathbb{R}",
    plain="What works on [0, 1] works everywhere: some finite network is within ε of x² on the whole line.",
    assumptions=("real arithmetic", "finitely many units, in any number of layers"),
    subject=Growth(lambda x: x**2, "x²"),
    sabotage={
        "something a network can follow: |x|": Growth(lambda x: abs(x), "|x|"),
        "a line": Growth(lambda x: 3 * x + 1, "3x + 1"),
    },
    picture=_line_picture,
    falsifier=Falsifier(
        {"kinks a side": range(1, 9), "reach": (0.1, 50), "ε": (0.001, 1), "x": (-200, 200)}, _everywhere
    ),
)
def relu_square_line(target: Growth) -> Iterator[Evidence]:
    p, eps, q, d, last = symbols(positive="p varepsilon", nonnegative="q d T")
    slope, height = symbols(nonnegative="|s| |c|")
    beyond = q / p + d
    for c, words in ((q, "q"), (-q, "−q")):
        rising, falling = p * beyond + c, -p * beyond + c
        says = f"from x = q/p on, σ(px + {words}) is that line: so it goes layer after layer"
        yield identity(relu(sympy.expand(rising)), rising, says)
        yield identity(relu(sympy.expand(falling)), 0, f"and σ(−px + {words}) is 0: each unit ends as a line")
    where = last + 1 + slope + height + eps
    yield positive(
        sympy.expand(target.function(where) - slope * where - height - eps),
        f"whatever line sx + c a network ends as after its last kink T, at x = T + 1 + |s| + |c| + ε it is more than ε"
        f" below {target.name}",
    )
    for deep in (False, True):
        square = relu_square(Fraction(1, 1000), deep=deep)
        for at in (Fraction(2), Fraction(10)):
            network, true = evaluated(square.exact, at), Fraction(target.function(at))
            says = f"the library's {square.units} units in {square.depth} layers, within 1e-3 on [0, 1], at x = {at}"
            facts = {"network": str(network), "true": str(true)}
            yield counterexample(abs(network - true) > Fraction(1, 1000), says, "fractions", **facts)
