r"""A square on [0, 1] from ReLUs in many layers: a sawtooth, composed with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from sympy import Rational, Symbol, cos, log, sin, sqrt

from avow.core.chart import Table
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.relu import cut, evaluated, relu
from avow.theory.claims.catalogue.relu_square import WIDE
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions import relu_square
from avow.theory.constructions.relu import sawtooth

# ε and the units it takes, as the ledger records them.
DEEP = {Fraction(1, 100): 8, Fraction(1, 1000): 11, Fraction(1, 10**4): 17, Fraction(1, 10**6): 26}


class Sawtooth(NamedTuple):
    """The deep network: the tooth from its two units' outputs, what f_k takes of g_k, the units of m layers."""

    tooth: Callable[[Any, Any], Any] = lambda a, b: 2 * a - 4 * b
    share: Callable[[Any], Any] = lambda k: Rational(1, 4) ** k
    units: Callable[[Any], Any] = lambda m: 3 * m - 1


def _deep_picture() -> Table:
    rows = []
    for eps, wide in WIDE.items():
        made = relu_square(eps, deep=True)
        rows.append([f"{float(eps):g}", wide, made.units, made.depth, str(made.exact_error)])
    headings = ("ε", "units in one layer", "units, deep", "layers", "deep error, exactly")
    return Table("x² on [0, 1] to within ε", headings, rows)


@claim(
    "relu-square-deep",
    topic="relu",
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
)
def relu_square_deep(network: Sawtooth) -> Iterator[Evidence]:
    yield from _interpolates(network)
    yield from _off_by_a_quarter()
    m = Symbol("m", integer=True, positive=True)
    yield toolbox.identity(
        network.units(m), 2 + 3 * (m - 1), "g, g − ½ and f in every layer, but no f in the first: 3m − 1 units"
    )
    for depth in (1, 2, 3, 4):
        yield _library_sawtooth(depth)
    for eps, units in DEEP.items():
        depth = next(m for m in range(1, 99) if Fraction(1, 4 ** (m + 1)) <= eps)
        says = f"ε = {eps}: the least m with 4^-(m+1) ≤ ε has {units} units"
        error = Fraction(1, 4 ** (depth + 1))
        yield toolbox.rational(int(network.units(depth)) == units, says, layers=depth, error=error)
    yield from _fewer_than_one_layer()
    yield toolbox.kept(relu_square(1e-6, deep=True), "the library's network for ε = 1e-6, rounded to float64")


def _interpolates(network: Sawtooth) -> Iterator[Evidence]:
    """f_k is the chord of x² on every dyadic piece, by induction on k."""
    w, u = Symbol("w", nonnegative=True), Symbol("u", real=True)
    i, k = Symbol("i", integer=True, nonnegative=True), Symbol("k", integer=True, nonnegative=True)
    half = Rational(1, 2)

    def chord(j: Any, u: Any, k: Any) -> Any:
        return (j**2 + (2 * j + 1) * u) / 4**k

    yield from cut()
    yield toolbox.identity(network.tooth(half - w, relu(-w)), 1 - 2 * w, "left of ½ the tooth is 2y: g(½ − w) = 1 − 2w")
    yield toolbox.identity(
        network.tooth(half + w, relu(w)), 1 - 2 * w, "right of ½ it comes down again: g(½ + w) = 1 − 2w"
    )
    yield toolbox.identity(
        chord(0, u, 0), u, "f_0 = g_0 = x: the chord of x² on [0, 1], and a tooth that rises (x = u, piece 0)"
    )
    # On piece i of level k, x = (i + s)/2^k, g_k is s where i is even and 1 − s where it is odd.
    for part, s, tooth in (("left", u / 2, u), ("right", (1 + u) / 2, 1 - u)):
        for parity, y in (("even", s), ("odd", 1 - s)):
            lower = (part == "left") == (parity == "even")
            found = network.tooth(y, 0) if lower else network.tooth(y, y - half)
            yield toolbox.identity(
                found, tooth, f"on the {part} half of a piece of {parity} number g_(k+1) = g(g_k) is {tooth}"
            )
        j = 2 * i + (0 if part == "left" else 1)
        yield toolbox.identity(
            chord(i, s, k) - network.share(k + 1) * tooth,
            chord(j, u, k + 1),
            f"if f_k is the chord of x² on piece i, f_(k+1) = f_k − 4^-(k+1) g_(k+1) is the one on its {part} half",
        )


def _off_by_a_quarter() -> Iterator[Evidence]:
    j, m = Symbol("j", integer=True, nonnegative=True), Symbol("m", integer=True, positive=True)
    u, theta = Symbol("u", real=True), Symbol("theta", real=True)
    above = (j**2 + (2 * j + 1) * u) / 4**m - ((j + u) / 2**m) ** 2
    yield toolbox.identity(above, u * (1 - u) / 4**m, "a chord on a piece of length 2^-m is u(1 − u)/4^m above x²")
    inside = (sin(theta) * cos(theta)) ** 2
    says = "for u = sin²θ in [0, 1] u(1 − u) is sin²θ cos²θ"
    yield toolbox.identity((u * (1 - u)).subs(u, sin(theta) ** 2), inside, says)
    yield toolbox.nonnegative(inside, "so f_m is never below x², nor below 0, and σ(f_m) = f_m")
    gap = sympy.Integer(1) / 4 - u * (1 - u)
    yield toolbox.identity(gap, (u - Rational(1, 2)) ** 2, "and ¼ − u(1 − u) = (u − ½)²")
    yield toolbox.nonnegative(
        (u - Rational(1, 2)) ** 2 / 4**m, "so f_m − x² ≤ 4^-(m+1), which is reached in the middle, at u = ½"
    )


def _library_sawtooth(depth: int) -> Evidence:
    layers = sawtooth(depth)
    grid = [Fraction(i, 2 ** (depth + 1)) for i in range(2 ** (depth + 1) + 1)]
    errors = [evaluated(layers, x) - x * x for x in grid]
    worst = Fraction(1, 4 ** (depth + 1))
    says = f"the library's {depth} layers are x² at every multiple of 2^-{depth}, and 4^-{depth + 1} above in between"
    return toolbox.rational(errors[0::2] == [0] * len(errors[0::2]) and set(errors[1::2]) == {worst}, says, error=worst)


def _fewer_than_one_layer() -> Iterator[Evidence]:
    """With ε = 4^-y: at most 3y − 1 deep units against at least (2^y/√2 − 1)/2 of one layer."""
    y, d, z = Symbol("y", positive=True), Symbol("d", nonnegative=True), Symbol("z", nonnegative=True)
    one_layer = (1 / sqrt(2 * 4**-y) - 1) / 2
    yield toolbox.identity(
        1 / (2 * (2 * one_layer + 1) ** 2),
        4**-y,
        "ε = 4^-y takes K ≥ (2^y/√2 − 1)/2 units of one layer, or m < y layers",
    )
    start = log(10**4) / log(4)
    lead = one_layer.subs(y, start) - (3 * start - 1)
    yield toolbox.positive(lead, "at ε = 1e-4 that is more than the 3m − 1 < 3y − 1 of a deep network")
    growth = sympy.diff(one_layer, y).subs(y, start)
    yield toolbox.positive(growth - 3, "and there K grows by more than 3 for every y")
    yield toolbox.nonnegative(
        sympy.expand((3 + d) * (1 + z) - 3),
        "further on, K's growth, 3 + d there, is 2^s = 1 + z ≥ 1 times that",
    )
