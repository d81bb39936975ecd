r"""A square on [0, 1] from one layer of ReLUs, and why no layer as wide comes closer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from sympy import Symbol, cos, sin, sqrt

from avow.core.chart import Chart
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.relu import relu
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions import relu_square
from avow.theory.constructions.relu import square_error
from avow.theory.constructions.relu_network import Layer, Layers

# ε and the units it takes, as the ledger records them.
WIDE = {Fraction(1, 100): 4, Fraction(1, 1000): 11, Fraction(1, 10**4): 35, Fraction(1, 10**6): 354}


class Hinges(NamedTuple):
    """One layer of K units for x², in n = 2K + 1: unit i is σ(weight·x + offset), all with one output weight."""

    weight: Callable[[Any], Any] = lambda n: n
    offset: Callable[[Any], Any] = lambda i: 1 - 2 * i
    out: Callable[[Any], Any] = lambda n: 4 / n**2
    bias: Callable[[Any], Any] = lambda n: 1 / (2 * n**2)
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


@claim(
    "relu-square",
    topic="relu",
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
)
def relu_square_wide(network: Hinges) -> Iterator[Evidence]:
    yield from _within(network)
    yield from _any_eps()
    yield from _no_better()
    yield from _pieces()
    for eps, units in network.units.items():
        error = square_error(network.layers(units))
        says = f"{units} units: the largest error, at the ends and the vertex of every piece, is 1/(2(2K+1)²)"
        yield toolbox.rational(error == Fraction(1, 2 * (2 * units + 1) ** 2), says, units=units, error=error)
        fewer = Fraction(1, 2 * (2 * units - 1) ** 2)
        says = f"it is at most ε = {eps}, and a unit fewer is not enough"
        yield toolbox.rational(error <= eps < fewer, says, error=error, with_one_fewer=fewer)
    yield toolbox.kept(relu_square(1e-3), "the library's network for ε = 1e-3, its weights rounded to float64")


def _within(network: Hinges) -> Iterator[Evidence]:
    """On every piece the error is −cos(2θ)/(2n²)."""
    n, units = Symbol("n", integer=True, positive=True), Symbol("K", integer=True, positive=True)
    i, j = Symbol("i", integer=True, nonnegative=True), Symbol("j", integer=True, positive=True)
    theta = Symbol("theta", real=True)
    knot = -network.offset(j) / network.weight(n)
    yield toolbox.identity(knot, (2 * j - 1) / n, "unit j wakes at (2j − 1)/n")
    offsets = sympy.summation(network.offset(j), (j, 1, i))
    where = (2 * i + sin(theta)) / n
    last = where.subs({i: units, n: 2 * units + 1, theta: sympy.pi / 2})
    yield toolbox.identity(last, 1, "as n = 2K + 1, piece K ends at 1: x = (2i + sin θ)/n, i = 0 … K, is all of [0, 1]")
    value = network.out(n) * (i * network.weight(n) * where + offsets) + network.bias(n)
    yield toolbox.identity(
        where**2 - value,
        -cos(2 * theta) / (2 * n**2),
        "there, i units are awake, and x² − f(x) = −cos(2θ)/(2n²)",
    )
    yield toolbox.nonnegative(1 - cos(2 * theta), "cos(2θ) ≤ 1")
    yield toolbox.nonnegative(1 + cos(2 * theta), "cos(2θ) ≥ −1: the error is at most 1/(2n²), and is that at θ = 0")


def _any_eps() -> Iterator[Evidence]:
    r, more = Symbol("r", positive=True), Symbol("s", nonnegative=True)
    eps, units = r**2 / 8, 1 / r + more
    yield toolbox.nonnegative(
        sympy.expand(2 * eps * (2 * units + 1) ** 2 - 1),
        "for every ε = r²/8 > 0, any whole K ≥ 1/r = 1/√(8ε) has 1/(2(2K+1)²) ≤ ε",
    )


def _no_better() -> Iterator[Evidence]:
    """No K units come closer: upward kinks end stretches that are short, and the first stretch is half as long."""
    a, slope, height = (Symbol(name, real=True) for name in ("a", "s", "c"))
    h, e, k = Symbol("h", positive=True), Symbol("e", positive=True), Symbol("K", positive=True)
    p, q = Symbol("p", nonnegative=True), Symbol("q", nonnegative=True)

    def left(at: Any) -> Any:
        return at**2 - slope * at - height

    yield toolbox.identity(
        left(a) + left(a + h) - 2 * left(a + h / 2), h**2 / 2, "x² minus a line has second difference h²/2 on length h"
    )
    for before, after, words in ((p, p + q, "left of the middle"), (p + q, p, "right of the middle")):
        bent = relu(-before) + relu(after) - 2 * relu((after - before) / 2)
        yield toolbox.nonnegative(
            bent, f"a kink that bends f down, {words}, only adds to it: σ(−u) + σ(v) − 2σ((v − u)/2) ≥ 0"
        )
    yield toolbox.nonnegative(
        sympy.expand((sqrt(8 * e) + p) ** 2 / 2 - 4 * e),
        "off by at most e, it is at most 4e: a stretch without an upward kink is at most √(8e) long",
    )
    yield from _facing_units()
    yield toolbox.nonnegative(
        (h**2 + p * h) - h**2, "all kinks upward: f starts with slope −p ≤ 0, and x² − f climbs by h² + ph ≥ h² there"
    )
    yield toolbox.nonnegative(
        sympy.expand((sqrt(2 * e) + p) ** 2 - 2 * e), "which is at most 2e: the first stretch is at most √(2e) long"
    )
    least = 1 / (2 * (2 * k + 1) ** 2)
    yield toolbox.identity(
        sqrt(2 * least) + k * sqrt(8 * least), 1, "K upward kinks: 1 ≤ √(2e) + K√(8e), so e ≥ 1/(2(2K+1)²)"
    )
    yield toolbox.positive(
        1 / (8 * k**2) - least, "fewer upward kinks inside: 1 ≤ K√(8e), so e ≥ 1/(8K²), which is more than 1/(2(2K+1)²)"
    )


def _facing_units() -> Iterator[Evidence]:
    """What a unit with a kink at t adds to the slope left of it, against the jump it makes there."""
    c, p = Symbol("c", positive=True), Symbol("p", positive=True)
    v, t = Symbol("v", real=True), Symbol("t", real=True)
    for sign, words in ((1, "on the right adds no slope left of its kink"), (-1, "on the left adds minus its jump")):
        before, at, after = (v * relu(sympy.expand(sign * c * (step - t))) for step in (t - p, t, t + p))
        left, right = (at - before) / p, (after - at) / p
        yield toolbox.identity(left, 0 if sign > 0 else -(right - left), f"a unit awake {words}")


def _pieces() -> Iterator[Evidence]:
    n, i = Symbol("N", positive=True), Symbol("i", nonnegative=True)
    theta = Symbol("theta", real=True)
    start, share = i / n, (1 + sin(theta)) / 2
    where = start + share / n
    chord = start**2 + ((start + 1 / n) ** 2 - start**2) * share
    yield toolbox.identity(
        chord - where**2,
        cos(theta) ** 2 / (4 * n**2),
        "N equal pieces through the knots are above x² by cos²θ/(4N²): off by 1/(4N²), and by 1/(8N²) once lowered",
    )
    longest = 1 / n + Symbol("s", nonnegative=True)
    yield toolbox.nonnegative(
        longest**2 / 8 - 1 / (8 * n**2), "of N pieces one is at least 1/N long: none are nearer than h²/8 ≥ 1/(8N²)"
    )
