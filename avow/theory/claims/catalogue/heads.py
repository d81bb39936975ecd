r"""What two heads can do that one query cannot, and what they cannot either.

Head i attends by its own query, and the answer is the mean of the heads' outputs. Their keys are the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Rational, Symbol, exp, log

from avow.core.chart import Chart, Table
from avow.numerics import intervals
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.queries import below_one, enough, eps, m, n, slack
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions.laws import AnyScale, GaussianLaw
from avow.theory.constructions.robust import robust_heads


def _discrete_picture() -> Chart:
    counts = [2**i for i in range(1, 24)]

    def weight(n: int, strength: float) -> float:
        raised = (n / 0.01) ** (strength / 2)
        return raised / (raised + n - 1)

    series = {
        "t = ln(n/ε)": (counts, [weight(n, 1) for n in counts]),
        "t = 2·ln(n/ε)": (counts, [weight(n, 2) for n in counts]),
    }
    return Chart("Head 1 when its key comes half as long, ε = 0.01", "keys", "weight on value 1", series, log_x=True)


@claim(
    "heads-discrete",
    topic="heads",
    expected="corrected",
    statement=r"k_1 = c\,u,\ c\in\{\tfrac12,\tfrac32\}:\ q_1 = \ln(n/\varepsilon)u,\ q_2 = \ln(n/\varepsilon)k_2"
    r"\text{ give } \alpha^{(1)}_1, \alpha^{(2)}_2 \ge \frac{1}{1+\varepsilon}",
    plain="Two heads, one for each value, average robustly: even at c = ½ the first head's score dwarfs the rest.",
    amended=r"q_1 = 2\ln(n/\varepsilon)u,\ q_2 = 2\ln(n/\varepsilon)k_2:\ \text{every } c \ge \tfrac12 \text{ gives }"
    r"\alpha^{(1)}_1, \alpha^{(2)}_2 \ge \frac{1}{1+\varepsilon}",
    amended_plain="With queries twice as long it is so for every c ≥ ½. At ln(n/ε) head 1 has √(n/ε) against n − 1, and"
    " loses once n > 1/ε.",
    assumptions=("real arithmetic", "u, k_2, …, k_n orthonormal", "n ≥ 2, 0 < ε < 1"),
    subject=lambda n, eps: 2 * log(n / eps),
    sabotage={
        "no longer than stated": lambda n, eps: log(n / eps),
        "one and a half times": lambda n, eps: Rational(3, 2) * log(n / eps),
        "blind to how many keys there are": lambda n, eps: 4 * log(1 / eps),
    },
    picture=_discrete_picture,
    needs=("copy-gap",),
)
def heads_discrete(strength: Any) -> Iterator[Evidence]:
    for count, near in ((1000, 0.24043574), (10**6, 0.0099)):
        yield _half_length_loses(count, near)
    above = Symbol("x", positive=True)
    yield toolbox.nonnegative((n * (n - 1 / eps)).subs(eps, 1 / (n - above)), "n = 1/ε + x, x > 0: n/ε < n²")
    yield _grows(amended=False)
    yield toolbox.nonnegative(Rational(2, 3) - n / (n + m), "so at c = ½ head 1 has α_1 < n/(2n − 1) ≤ ⅔ once n > 1/ε")

    length = strength(n, eps)
    yield toolbox.nonnegative(length.subs(eps, below_one), "t is not negative", True)
    spare = (length * (Rational(1, 2) + slack) - length / 2).subs(eps, below_one)
    yield toolbox.nonnegative(spare, "c ≥ ½ gives head 1 a score of at least t/2, and head 2's is t", True)
    others = (n - 1) * exp(-length / 2)
    yield toolbox.nonnegative(eps - others, "the others have score 0: n − 1 terms e^(−t/2) sum to at most ε", True)
    yield enough(amended=True)
    weight = Symbol("alpha", positive=True)
    yield toolbox.identity(
        2 * (1 - weight).subs(weight, 1 / (1 + eps)),
        2 * eps / (1 + eps),
        "each head is within 2(1 − α)·max‖v‖ = 2ε/(1+ε)·max‖v‖ of its value, and so is their mean of ½(v_1 + v_2)",
        True,
    )
    made = robust_heads(1000, 0.01, AnyScale(0.5))
    yield toolbox.kept(made, "the library's heads for a thousand keys", True, length=float(made.queries[0, 0]))


def _grows(amended: bool) -> Evidence:
    score, more = Symbol("e", positive=True), Symbol("h", positive=True)
    grown = (score + more) / (score + more + m) - score / (score + m)
    return toolbox.nonnegative(grown, "α = e/(e + n − 1) grows with e = e^s, the others scoring 0", amended)


def _half_length_loses(count: int, near: float) -> Evidence:
    raised = (arb(count) * 100).sqrt()
    weight = raised / (raised + count - 1)
    return toolbox.counterexample(
        bool(abs(weight - near) < 1e-4) and bool(weight < 0.25),
        f"{count} keys, ε = 0.01, c = ½: head 1 has e^(t/2) = √(n/ε) against n − 1",
        "balls",
        n=count,
        eps=0.01,
        weight=weight.str(12),
        promised="100/101",
    )


class Law(NamedTuple):
    """How X, the length of key a, is distributed, and when its head copies."""

    variance: Rational
    least: Any


def _gauss_picture() -> Chart:
    strengths = [10 ** (i / 20) for i in range(10, 81)]

    def chance(n: int, strength: float) -> float:
        return 0.5 * math.erfc(-(1 - math.log((n - 1) / 0.01) / strength))

    series = {f"{n} keys": (strengths, [chance(n, strength) for strength in strengths]) for n in (2, 1000, 10**6)}
    return Chart("How often both heads copy, ε = 0.01", "β", "probability", series, log_x=True)


@claim(
    "heads-gauss",
    topic="heads",
    expected="corrected",
    statement=r"k_a = X\mu_a,\ X\sim N(1,\tfrac12):\ q_1=\beta\mu_a,\ q_2=\beta\mu_b \text{ give } \tfrac12(v_a+v_b)"
    r"\text{ for large } \beta",
    plain="With Gaussian scaling of key a, two separate heads still give the mean of the two values.",
    amended=r"P\bigl(\alpha^{(1)}_a \ge \tfrac{1}{1+\varepsilon}\bigr) = \Phi\Bigl(\sqrt2\bigl(1-\tfrac1\beta"
    r"\ln\tfrac{n-1}{\varepsilon}\bigr)\Bigr) \uparrow 1-\Phi(-\sqrt2) \approx 0.921",
    amended_plain="They do so with probability Φ(√2(1 − ln((n−1)/ε)/β)), which is below 0.921 for every β: X ≤ 0"
    " defeats the first head however long its query.",
    assumptions=("real arithmetic", "isotropic noise → 0: the other keys score 0", "n ≥ 2, 0 < ε < 1, β ≥ ln((n−1)/ε)"),
    subject=Law(Rational(1, 2), lambda n, eps, beta, log: log((n - 1) / eps) / beta),
    sabotage={
        "½ taken for the standard deviation": Law(Rational(1, 4), lambda n, eps, beta, log: log((n - 1) / eps) / beta),
        "head 1 copies for every X": Law(Rational(1, 2), lambda n, eps, beta, log: -1000 * beta / beta),
        "blind to how many keys there are": Law(Rational(1, 2), lambda n, eps, beta, log: log(1 / eps) / beta),
    },
    picture=_gauss_picture,
    needs=("copy-gap",),
)
def heads_gauss(rule: Law) -> Iterator[Evidence]:
    never = intervals.normal_cdf(-arb(2).sqrt())
    shrunk = Symbol("h", nonnegative=True)
    weight = (1 / (1 + shrunk)) / (1 / (1 + shrunk) + m)
    yield toolbox.nonnegative(
        1 / n - weight, "X ≤ 0, e^(βX) = 1/(1+h): head 1 gives v_a a weight of at most 1/n, at any β"
    )
    yield toolbox.counterexample(
        bool(never > 0.0786),
        "X ≤ 0 happens with probability Φ(−√2)",
        "exact law in balls",
        probability=never.str(20),
    )

    beta = Symbol("beta", positive=True)
    least = rule.least(n, eps, beta, log)
    yield toolbox.identity((n - 1) * exp(-beta * least), eps, "head 1 has α_a = 1/(1+ε) at X = ln((n−1)/ε)/β", True)
    yield _grows(amended=True)
    later = eps - (n - 1) * (eps / (n - 1)) / (1 + shrunk)
    yield toolbox.nonnegative(
        later, "so exactly when X is that or more; and head 2, of score β ≥ ln((n−1)/ε), always", True
    )
    sigma = intervals.ball(Fraction(rule.variance)).sqrt()
    for count, strength, low, high in (
        (1000, 20, 0.7258, 0.7259),
        (1000, 50, 0.8618, 0.8619),
        (1000, 1000, 0.9189, 0.9190),
        (10**6, 50, 0.8141, 0.8142),
    ):
        threshold = rule.least(arb(count), arb(1) / 100, arb(strength), lambda x: x.log())
        chance = intervals.normal_cdf((1 - threshold) / sigma)
        says = f"both heads copy, n = {count}, β = {strength}, ε = 0.01"
        yield toolbox.law(chance, low, high, says, True, n=count, beta=strength, eps=0.01)
    yield toolbox.nonnegative(least.subs(eps, below_one), "the threshold is above 0 at every β", True)
    yield toolbox.identity(sympy.limit(least, beta, sympy.oo), 0, "and → 0 as β → ∞", True)
    limit = intervals.normal_cdf(1 / sigma)
    yield toolbox.law(
        limit, 0.921350396474, 0.921350396475, "so P(X ≥ threshold) rises to 1 − Φ(−√2), never past it", True
    )
    yield toolbox.identity(
        (n - 1) * exp(0 - log((n - 1) / eps)),
        eps,
        "a way out: q_1 = −ln((n−1)/ε)·Σ_{j≠a} μ_j scores 0 on k_a whatever X is, and copies always, √(n−1)"
        " times as long",
        True,
    )
    for name, away in (("as here, β = 50", False), ("with the way out", True)):
        heads = robust_heads(1000, 0.01, GaussianLaw(), least=None if away else math.log(99900) / 50, away=away)
        yield toolbox.kept(heads, f"the library's heads, {name}", True, probability=heads.success)


# A head's query is t·(x·u + y·k_2) with t = ln(n/ε): its x and its y.
Heads = Sequence[tuple[int, int]]


def weights_of(heads: Heads, stretch: Fraction, n: int = 100, root: int = 100) -> tuple[Fraction, Fraction]:
    """The mean of the heads' weights on v_1 and v_2 where key 1 is `stretch` times as long, exactly; root = √(n/ε)."""
    first = second = Fraction(0)
    for x, y in heads:
        terms = Fraction(root) ** int(2 * stretch * x), Fraction(root) ** (2 * y)
        total = sum(terms) + n - 2
        first += terms[0] / total / len(heads)
        second += terms[1] / total / len(heads)
    return first, second


def swing(heads: Heads, n: int = 100, root: int = 100) -> Fraction:
    """The variance of the weight on v_1 when c is ½ or 3/2 with equal chances."""
    short, long = (weights_of(heads, c, n, root)[0] for c in (Fraction(1, 2), Fraction(3, 2)))
    return ((long - short) / 2) ** 2


def _identical_picture() -> Table:
    kinds = {"one head": [(1, 1)], "two heads, one query": [(1, 1)] * 2, "two heads, two queries": [(1, 0), (0, 1)]}
    rows = [
        (name, *(float(weights_of(heads, c)[0]) for c in (Fraction(1, 2), Fraction(3, 2))), float(swing(heads)))
        for name, heads in kinds.items()
    ]
    return Table("The weight on v_1 of 100 keys, ε = 0.01", ("heads", "at c = ½", "at c = 3/2", "variance"), rows)


@claim(
    "heads-identical",
    topic="heads",
    expected="refuted",
    statement=r"q_1 = q_2 = \beta(\mu_a+\mu_b):\quad \operatorname{Var}\bigl[\tfrac12(c^{(1)}+c^{(2)})\bigr] <"
    r"\operatorname{Var}\bigl[c^{(1)}\bigr]",
    plain="Two heads with the same query swing less than one when the keys are noisy.",
    assumptions=("real arithmetic", "both heads read the same keys and values"),
    subject=((1, 1), (1, 1)),
    sabotage={
        "a query for each value": ((1, 0), (0, 1)),
        "one head with the average, one for v_1": ((1, 1), (1, 0)),
    },
    picture=_identical_picture,
)
def heads_identical(heads: Heads) -> Iterator[Evidence]:
    one, both = swing(heads[:1]), swing(heads)
    yield toolbox.counterexample(
        both >= one,
        "k_1 = c·u, c = ½ or 3/2 with equal chances, 100 keys, ε = 0.01: the weight on v_1 has the same variance",
        "exact rationals",
        **{"one head": str(one), "two heads": str(both), "about": float(both)},
    )
    apart = swing([(1, 0), (0, 1)])
    yield toolbox.rational(apart < both, "a query for each value does swing less", separate=apart)
    output = Symbol("c", real=True)
    yield toolbox.identity(
        (output + output) / 2, output, "equal queries over equal keys are one function: their mean is it"
    )
    sigma, rho = Symbol("sigma", positive=True), Symbol("rho", real=True)
    variance = (sigma**2 + sigma**2 + 2 * rho * sigma**2) / 4
    yield toolbox.identity(
        variance, sigma**2 * (1 + rho) / 2, "Var of the mean of two heads of correlation ρ is σ²(1+ρ)/2"
    )
    yield toolbox.identity(variance.subs(rho, 1), sigma**2, "shared keys make ρ = 1: nothing is gained")
