"""Random features: unbiased, and with a variance that q and k foretell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from sympy import Sum, Symbol, exp, oo, sqrt

import avow
from avow.core.chart import Chart, Table
from avow.numerics import intervals
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.efficient import Formula, d, dot, f, k_f, over, q_f
from avow.theory.claims.claim import Evidence, claim
from avow.theory.claims.random_search import Falsifier, Numbers, interval_function, numbered

m = Symbol("m", integer=True, positive=True)


def gauss(exponent: Any, w: Symbol) -> Any:
    """The mean of e^exponent over w ~ N(0, 1)."""
    return sympy.simplify(sympy.integrate(exp(sympy.expand(exponent - w**2 / 2)) / sqrt(2 * sympy.pi), (w, -oo, oo)))


class Factor(NamedTuple):
    """What stands before each side's features: as stated, and as it must be."""

    stated: Formula
    mended: Formula


def _unbiased_picture() -> Table:
    rows = [[count, 1.0, 1 / count, 1.0] for count in (1, 2, 16, 256)]
    return Table("E f(q)·f(k) / e^{q·k}", ["features m", "wanted", "factor 1/m a side", "factor 1/√m a side"], rows)


@claim(
    "features-unbiased",
    topic="efficient",
    expected="corrected",
    statement=r"f(x) = \frac1m e^{-\|x\|^2/2}(e^{w_1 \cdot x}, \dots, e^{w_m \cdot x}),\ w \sim N(0, I):\quad "
    r"E f(q) \cdot f(k) = e^{q \cdot k}",
    plain="Positive random features with a factor of 1/m have e^(q·k) for the mean of their inner product.",
    amended=r"f(x) = \frac{1}{\sqrt m} e^{-\|x\|^2/2}(e^{w_1 \cdot x}, \dots, e^{w_m \cdot x}):\quad "
    r"E f(q) \cdot f(k) = e^{q \cdot k}",
    amended_plain="The factor is 1/√m on each side. With 1/m the mean is too small by m, which attention does not"
    " notice: it cancels between a weight and its normaliser.",
    assumptions=("real arithmetic", "each w_f is N(0, I); they need not be independent of each other"),
    subject=Factor(lambda m: 1 / m, lambda m: 1 / sqrt(m)),
    sabotage={
        "1/√m taken for the mistake": Factor(lambda m: 1 / sqrt(m), lambda m: 1 / sqrt(m)),
        "1/m kept in the correction": Factor(lambda m: 1 / m, lambda m: 1 / m),
    },
    picture=_unbiased_picture,
)
def features_unbiased(factor: Factor) -> Iterator[Evidence]:
    half = factor.stated(sympy.Integer(2)) ** 2 * 2
    yield toolbox.counterexample(
        half != 1,
        "two features, q = k = 0: every entry is the factor itself, so f(q)·f(k) is certain, and is not e^0 = 1",
        "exact fractions",
        product=str(half),
    )
    w, z = sympy.symbols("w z", real=True)
    yield toolbox.identity(gauss(w * z, w), exp(z**2 / 2), "E e^{wz} = e^{z²/2} for w ~ N(0, 1)", True)
    squares = dot(q_f, q_f) + dot(k_f, k_f)
    sum_square = Sum((q_f[f] + k_f[f]) ** 2, over(f, d))
    yield toolbox.identity(
        sum_square / 2 - squares / 2,
        dot(q_f, k_f),
        "coordinates of w are independent, so E e^{w·(q+k)} = e^{‖q+k‖²/2}, and ‖q+k‖² − ‖q‖² − ‖k‖² = 2q·k, in any"
        " dimension",
        True,
    )
    total = Sum(factor.mended(m) ** 2, over(f, m)).doit()
    yield toolbox.identity(total, 1, "m features, each with the factor once from either side, add up to one", True)
    scale, a, b = sympy.symbols("s a b", positive=True)
    yield toolbox.identity(scale * a / (scale * b), a / b, "after normalisation any factor cancels", True)


def _needed_picture() -> Chart:
    radii = [step / 4 for step in range(1, 41)]
    series = {
        f"relative error {error:g}": (radii, [math.expm1(r**2) / error**2 for r in radii]) for error in (1.0, 0.1, 0.01)
    }
    return Chart("Features an error takes", "‖q + k‖", "features", series, log_y=True)


def far_below(radius: int | arb, features: int | arb, cut: int | arb) -> arb:
    r"""No less than the chance that an estimate from so many features reaches half of what it estimates.

    Relative to its mean one feature is X = e^{rw − r²/2}, w ~ N(0, 1). Either one of them exceeds e^cut, or those that
    do not have a mean of ½ or more: P(X > e^cut)·m + 2·E[X; X ≤ e^cut], and X's own density turns w into w + r.
    """
    r, root = arb(radius), arb(2).sqrt()
    above = ((cut + r**2 / 2) / r / root).erfc() / 2
    below = ((r**2 / 2 - cut) / r / root).erfc() / 2
    return features * above + 2 * below


@claim(
    "features-variance",
    topic="efficient",
    expected="corrected",
    statement=r"\text{more random features always mean a useful approximation of } e^{q \cdot k}",
    plain="With enough random features the approximation is always useful.",
    amended=r"\frac{\mathrm{Var}\, f(q) \cdot f(k)}{e^{2 q \cdot k}} = \frac{e^{\|q+k\|^2} - 1}{m},"
    r"\quad \text{so a relative error of } \varepsilon \text{ takes } m = \frac{e^{\|q+k\|^2} - 1}{\varepsilon^2}",
    amended_plain="The variance falls as 1/m, from a height of e^(‖q+k‖²): q and k say how many features an error"
    " takes, and at the norms of trained language models it is more than anyone has.",
    assumptions=(
        "real arithmetic",
        "independent directions w ~ N(0, I)",
        "useful: likely to be at least half of the truth, with 2^24 features; an error is relative, root mean square",
    ),
    subject=lambda square, m: (exp(square) - 1) / m,
    sabotage={
        "as if the square of the mean were nothing": lambda square, m: exp(square) / m,
        "half the exponent": lambda square, m: (exp(square / 2) - 1) / m,
        "a variance that falls as 1/m²": lambda square, m: (exp(square) - 1) / m**2,
    },
    picture=_needed_picture,
)
def features_variance(variance: Formula) -> Iterator[Evidence]:
    w, z = sympy.symbols("w z", real=True)
    density = exp(-(w**2) / 2)
    yield toolbox.identity(
        exp(w * z - z**2 / 2) * density, density.subs(w, w - z), "weighed by a feature, w ~ N(0, 1) becomes N(z, 1)"
    )
    features = 2**24
    with intervals.precision(128):
        chance = far_below(8, features, 16)
    yield toolbox.counterexample(
        bool(chance < arb("0.07")),
        "‖q + k‖ = 8, as of a query and a key of length 4 and logit 16: with 2^24 features the estimate is below half"
        " of the truth with probability at least 0.93",
        "balls: the normal distribution's own law",
        features=features,
        chance_of_half_at_most=intervals.upper(chance),
    )
    coordinate = q_f[f] + k_f[f]
    yield toolbox.identity(
        Sum(coordinate**2, over(f, d)) / 2,
        dot(q_f, k_f) + dot(q_f, q_f) / 2 + dot(k_f, k_f) / 2,
        "relative to e^{q·k} one feature is e^{w·z − ‖z‖²/2} with z = q + k, in any dimension",
        True,
    )
    once, twice = (gauss(times * (w * z - z**2 / 2), w) for times in (1, 2))
    yield toolbox.identity(once, 1, "its mean is one", True)
    yield toolbox.identity(twice, exp(z**2), "its mean square is e^{z²} in each coordinate, so e^{‖z‖²} in all", True)
    square, error = sympy.symbols("r epsilon", positive=True)
    single = twice.subs(z, sqrt(square)) - once**2
    spread = sympy.simplify(Sum(single / m**2, over(f, m)).doit())
    yield toolbox.identity(
        variance(square, m), spread, "the mean of m independent features has 1/m of its variance", True
    )
    enough = single / error**2
    yield toolbox.identity(variance(square, enough), error**2, "so m = (e^{‖q+k‖²} − 1)/ε² gives ε", True)
    yield _library_says()


def _library_says() -> Evidence:
    """The library's own count of features follows this law; what it adds is a confidence for every row at once."""
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 1, 1, 64, 64, generator=generator, dtype=torch.float64).unbind()
    # Norms about √64 times the factor, and a scale of 1/√64.
    quiet, loud = (avow.features_needed(factor * q, factor * keys, tol=0.1) for factor in (0.2, 2.0))
    law = (intervals.ball(quiet.radius) ** 2).exp() - 1
    follows = bool(abs(intervals.ball(quiet.variance) - law) < law / 10**9)
    return toolbox.enclosed(
        lambda: follows and math.isfinite(quiet.features) and math.isinf(loud.features),
        "avow.features_needed says from q and k what an error of 0.1 takes in every row: so many for small norms, and"
        " that it is hopeless for larger ones; its variance of one feature is this law's, to 1e-9",
        True,
        small=str(quiet),
        large=str(loud),
    )


# Searches for counterexamples: the excess of a case over each statement.


def _mean(factor: Formula, case: Numbers) -> arb:
    side = interval_function(factor, 1)
    m, query, key = case[0], case[1:3], case[3:]
    both = [a + b for a, b in zip(query, key, strict=True)]
    # E e^(w·z) = e^(‖z‖²/2) for w ~ N(0, I).
    one = ((intervals.dot(both, both) - intervals.dot(query, query) - intervals.dot(key, key)) / 2).exp()
    return abs(m * side(m) ** 2 * one / intervals.dot(query, key).exp() - 1)


def _useful(variance: Formula, case: Numbers) -> arb:
    doublings, cut, *sum_ = case
    radius = intervals.norm(sum_)
    # To be useful, as the ledger reads it: at least half of the truth, at least every other time.
    return arb(1) / 2 - far_below(radius, arb(2) ** doublings, cut)


def _spread(variance: Formula, case: Numbers) -> arb:
    relative = interval_function(variance, 2)
    doublings, _, *sum_ = case
    m, square = arb(2) ** doublings, intervals.dot(sum_, sum_)
    # One feature is e^(w·z − ‖z‖²/2) of the truth: of mean one, and of mean square E e^(2w·z)·e^(−‖z‖²).
    second = (2 * square - square).exp()
    return abs(relative(square, m) * m - (second - 1)) / second


FALSIFIERS: Mapping[str, Falsifier] = {
    "features-unbiased": Falsifier(
        {"m": (1, 512)} | numbered("q₁ q₂ k₁ k₂", -2, 2),
        lambda factor, case: _mean(factor.stated, case),
        lambda factor, case: _mean(factor.mended, case),
        whole=frozenset("m"),
    ),
    "features-variance": Falsifier(
        {"log₂m": (0, 24), "cut": (0, 30)} | numbered("q₁+k₁ q₂+k₂", -7, 7),
        _useful,
        _spread,
        whole=frozenset({"log₂m"}),
        reads="m is a power of two; the estimate is cut at e to the power of the cut to bound its law.",
    ),
}
