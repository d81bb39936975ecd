r"""What two heads can do that one query cannot, and what they cannot either.

Head i attends by its own query, and the answer is the mean of the heads' outputs. Their keys are the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import sympy
from flint import arb
from sympy import Rational, Symbol

from avow.core.chart import Chart, Function, Table, curves
from avow.numerics.intervals import ball, most, normal_cdf
from avow.theory.claims.claim import Falsifier, Formula, claims_on
from avow.theory.claims.elementary import exp, log
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.toolbox import counterexample, identity, kept, law, nonnegative, rational, symbols
from avow.theory.constructions.noise import AnyScale, GaussianLaw
from avow.theory.constructions.robust import robust_heads

claim = claims_on("heads")
m, eps, slack = symbols(integer_positive="m", positive="varepsilon", nonnegative="delta")
n, below_one, EPSILON = m + 1, 1 / (1 + Symbol("x", positive=True)), {"ε": (0.01, 0.99)}


def enough(amended: bool = False) -> Evidence:
    """A sum of the other exponentials of at most ε is a weight of at least 1/(1+ε)."""
    total = Symbol("S", nonnegative=True)
    short = 1 / (1 + total) - 1 / (1 + total + slack)
    return nonnegative(short, "Σ_{i≠1} e^(s_i − s_1) = S ≤ ε gives α_1 = 1/(1+S) ≥ 1/(1+ε)", amended)


def _discrete_picture() -> Chart:
    weights: dict[str, Function] = {
        "t = ln(n/ε)": lambda n: (n / 0.01) ** 0.5 / ((n / 0.01) ** 0.5 + n - 1),
        "t = 2·ln(n/ε)": lambda n: (n / 0.01) / (n / 0.01 + n - 1),
    }
    title, counts = "Head 1 when its key comes half as long, ε = 0.01", [2**i for i in range(1, 24)]
    return curves(title, "keys", "weight on value 1", counts, weights, log_x=True)


def _stated_length(_: Formula, eps: arb, n: int, c: arb) -> arb:
    """Key 1 is c times as long; as stated c is ½ and 3/2."""
    return _short_of(lambda n, eps: log(n / eps), eps, n, arb(0.5), arb(1.5))


def _short_of(strength: Formula, eps: arb, n: int, *scales: arb) -> arb:
    """What the weights of both heads lack, where key 1 comes in some lengths."""
    t = strength(n, eps)
    return most([1 / (1 + eps) - 1 / (1 + (n - 1) * (-scale * t).exp()) for scale in (*scales, arb(1))])


@claim(
    "heads-discrete",
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
        "one and a half times": lambda n, eps: 3 * log(n / eps) / 2,
        "blind to how many keys there are": lambda n, eps: 4 * log(1 / eps),
    },
    picture=_discrete_picture,
    needs=("copy-gap",),
    falsifier=Falsifier(EPSILON | {"n": range(2, 1001), "c": (0.5, 2)}, _stated_length, _short_of),
)
def heads_discrete(strength: Formula) -> Iterator[Evidence]:
    for count, near in ((1000, 0.24043574), (10**6, 0.0099)):
        raised = (arb(count) * 100).sqrt()
        weight = raised / (raised + count - 1)
        says = f"{count} keys, ε = 0.01, c = ½: head 1 has e^(t/2) = √(n/ε) against n − 1"
        facts = {"n": count, "eps": 0.01, "weight": weight.str(12), "promised": "100/101"}
        yield counterexample(bool(abs(weight - near) < 1e-4) and bool(weight < 0.25), says, "balls", **facts)
    above = Symbol("x", positive=True)
    yield nonnegative((n * (n - 1 / eps)).subs(eps, 1 / (n - above)), "n = 1/ε + x, x > 0: n/ε < n²")
    yield _grows(amended=False)
    yield nonnegative(Rational(2, 3) - n / (n + m), "so at c = ½ head 1 has α_1 < n/(2n − 1) ≤ ⅔ once n > 1/ε")

    length = strength(n, eps)
    yield nonnegative(length.subs(eps, below_one), "t is not negative", True)
    spare = (length * (Rational(1, 2) + slack) - length / 2).subs(eps, below_one)
    yield nonnegative(spare, "c ≥ ½ gives head 1 a score of at least t/2, and head 2's is t", True)
    others = (n - 1) * exp(-length / 2)
    yield nonnegative(eps - others, "the others have score 0: n − 1 terms e^(−t/2) sum to at most ε", True)
    yield enough(amended=True)
    says = "each head is within 2(1 − α)·max‖v‖ = 2ε/(1+ε)·max‖v‖ of its value, and so is their mean of ½(v_1 + v_2)"
    yield identity(2 * (1 - 1 / (1 + eps)), 2 * eps / (1 + eps), says, True)
    heads = robust_heads(1000, 0.01, AnyScale(0.5))
    yield kept(heads, "the library's heads for a thousand keys", True, length=float(heads.queries[0, 0]))


def _grows(amended: bool) -> Evidence:
    score, more = symbols(positive="e h")
    grown = (score + more) / (score + more + m) - score / (score + m)
    return nonnegative(grown, "α = e/(e + n − 1) grows with e = e^s, the others scoring 0", amended)


class Law(NamedTuple):
    """How X, the length of key a, is distributed, and when its head copies."""

    variance: Rational = Rational(1, 2)
    least: Formula = lambda n, eps, beta: log((n - 1) / eps) / beta


def _gauss_picture() -> Chart:
    chances = {
        f"{n} keys": lambda strength, n=n: 0.5 * math.erfc(-(1 - math.log((n - 1) / 0.01) / strength))
        for n in (2, 1000, 10**6)
    }
    strengths = [10 ** (i / 20) for i in range(10, 81)]
    return curves("How often both heads copy, ε = 0.01", "β", "probability", strengths, chances, log_x=True)


x, y = sympy.symbols("x y", commutative=False)


def _gauss_copies(rule: Law, eps: arb, n: int, x: arb, times: arb) -> arb:
    """Key a is X times its mean; what is true instead speaks of all X at once."""
    beta = times * ((n - 1) / eps).log()
    # A head that gives v_a less than half of its weight gives something else.
    return arb(1) / 2 - 1 / (1 + (n - 1) * (-beta * x).exp())


def _gauss_law(rule: Law, eps: arb, n: int, _: arb, times: arb) -> arb:
    beta, sigma = times * ((n - 1) / eps).log(), ball(Fraction(rule.variance)).sqrt()
    least = rule.least(n, eps, beta)
    at_least = 1 / (1 + (n - 1) * (-beta * least).exp())
    stated, true = (1 - least) / sigma, arb(2).sqrt() * (1 - 1 / times)
    return abs(at_least - 1 / (1 + eps)).max(abs(normal_cdf(stated) - normal_cdf(true)))


@claim(
    "heads-gauss",
    expected="corrected",
    statement=r"k_a = X\mu_a,\ X\sim N(1,\tfrac12):\ q_1=\beta\mu_a,\ q_2=\beta\mu_b \text{ give } \tfrac12(v_a+v_b)"
    r"\text{ for large } \beta",
    plain="With Gaussian scaling of key a, two separate heads still give the mean of the two values.",
    amended=r"P\bigl(\alpha^{(1)}_a \ge \tfrac{1}{1+\varepsilon}\bigr) = \Phi\Bigl(\sqrt2\bigl(1-\tfrac1\beta"
    r"\ln\tfrac{n-1}{\varepsilon}\bigr)\Bigr) \uparrow 1-\Phi(-\sqrt2) \approx 0.921",
    amended_plain="They do so with probability Φ(√2(1 − ln((n−1)/ε)/β)), which is below 0.921 for every β: X ≤ 0"
    " defeats the first head however long its query.",
    assumptions=("real arithmetic", "isotropic noise → 0: the other keys score 0", "n ≥ 2, 0 < ε < 1, β ≥ ln((n−1)/ε)"),
    subject=Law(),
    sabotage={
        "½ taken for the standard deviation": Law(Rational(1, 4)),
        "head 1 copies for every X": Law(least=lambda n, eps, beta: -1000 * beta / beta),
        "blind to how many keys there are": Law(least=lambda n, eps, beta: log(1 / eps) / beta),
    },
    picture=_gauss_picture,
    needs=("copy-gap",),
    falsifier=Falsifier(
        EPSILON | {"n": range(2, 1001), "X": (-2, 4), "β/ln((n−1)/ε)": (1, 20)}, _gauss_copies, _gauss_law
    ),
)
def heads_gauss(rule: Law) -> Iterator[Evidence]:
    never = normal_cdf(-arb(2).sqrt())
    shrunk, beta = symbols(nonnegative="h", positive="beta")
    weight = (1 / (1 + shrunk)) / (1 / (1 + shrunk) + m)
    yield nonnegative(1 / n - weight, "X ≤ 0, e^(βX) = 1/(1+h): head 1 gives v_a a weight of at most 1/n, at any β")
    says = "X ≤ 0 happens with probability Φ(−√2)"
    yield counterexample(bool(never > 0.0786), says, "exact law in balls", probability=never.str(20))

    least = rule.least(n, eps, beta)
    yield identity((n - 1) * exp(-beta * least), eps, "head 1 has α_a = 1/(1+ε) at X = ln((n−1)/ε)/β", True)
    yield _grows(amended=True)
    later = eps - (n - 1) * (eps / (n - 1)) / (1 + shrunk)
    yield nonnegative(later, "so exactly when X is that or more; and head 2, of score β ≥ ln((n−1)/ε), always", True)
    sigma = ball(Fraction(rule.variance)).sqrt()
    for count, strength, low in ((1000, 20, 0.7258), (1000, 50, 0.8618), (1000, 1000, 0.9189), (10**6, 50, 0.8141)):
        threshold = rule.least(arb(count), arb(1) / 100, arb(strength))
        chance = normal_cdf((1 - threshold) / sigma)
        says = f"both heads copy, n = {count}, β = {strength}, ε = 0.01"
        yield law(chance, low, low + 1e-4, says, True, n=count, beta=strength, eps=0.01)
    yield nonnegative(least.subs(eps, below_one), "the threshold is above 0 at every β", True)
    yield identity(sympy.limit(least, beta, sympy.oo), 0, "and → 0 as β → ∞", True)
    limit = normal_cdf(1 / sigma)
    yield law(limit, 0.921350396474, 0.921350396475, "so P(X ≥ threshold) rises to 1 − Φ(−√2), never past it", True)
    says = (
        "a way out: q_1 = −ln((n−1)/ε)·Σ_{j≠a} μ_j scores 0 on k_a whatever X is, and copies always, √(n−1)"
        " times as long"
    )
    yield identity((n - 1) * exp(0 - log((n - 1) / eps)), eps, says, True)
    for name, away in (("as here, β = 50", False), ("with the way out", True)):
        heads = robust_heads(1000, 0.01, GaussianLaw(), least=None if away else math.log(99900) / 50, away=away)
        yield kept(heads, f"the library's heads, {name}", True, probability=heads.success)


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


def _swings_less(pair: Heads, n: int, root: int) -> arb:
    return ball(swing(pair, n, root) - swing(pair[:1], n, root))


@claim(
    "heads-identical",
    expected="refuted",
    statement=r"q_1 = q_2 = \beta(\mu_a+\mu_b):\quad \operatorname{Var}\bigl[\tfrac12(c^{(1)}+c^{(2)})\bigr] <"
    r"\operatorname{Var}\bigl[c^{(1)}\bigr]",
    plain="Two heads with the same query swing less than one when the keys are noisy.",
    assumptions=("real arithmetic", "both heads read the same keys and values"),
    subject=((1, 1), (1, 1)),
    sabotage={"a query for each value": ((1, 0), (0, 1)), "one head with the average, one for v_1": ((1, 1), (1, 0))},
    picture=_identical_picture,
    # √(n/ε) is a whole number, so that weights are fractions, and equal ones are known to be.
    falsifier=Falsifier({"n": range(2, 101), "√(n/ε)": range(11, 201)}, _swings_less, strict=True),
)
def heads_identical(heads: Heads) -> Iterator[Evidence]:
    one, both = swing(heads[:1]), swing(heads)
    says = "k_1 = c·u, c = ½ or 3/2 with equal chances, 100 keys, ε = 0.01: the weight on v_1 has the same variance"
    facts = {"one head": str(one), "two heads": str(both), "about": float(both)}
    yield counterexample(both >= one, says, "exact rationals", **facts)
    apart = swing([(1, 0), (0, 1)])
    yield rational(apart < both, "a query for each value does swing less", separate=apart)
    output, rho, sigma = symbols(real="c rho", positive="sigma")
    yield identity((output + output) / 2, output, "equal queries over equal keys are one function: their mean is it")
    variance = (sigma**2 + sigma**2 + 2 * rho * sigma**2) / 4
    yield identity(variance, sigma**2 * (1 + rho) / 2, "Var of the mean of two heads of correlation ρ is σ²(1+ρ)/2")
    yield identity(variance.subs(rho, 1), sigma**2, "shared keys make ρ = 1: nothing is gained")
