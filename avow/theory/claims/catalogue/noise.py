r"""What one query does when the keys it was made for are noisy.

The query of an average, :math:`q = \beta(\mu_a + \mu_b)` with orthonormal means, holds while the noise of its scores is
small, and picks one key at random when it is not.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Abs, And, Eq, Implies, KroneckerDelta, Rational, Sum, erf, exp, log, sqrt

from avow.core.chart import Chart, Function, Table, curves
from avow.theory.claims.catalogue.singular import inner_products
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Chance, Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.kernel import Step, put_all
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import enclosed
from avow.theory.constructions.noise import DiscreteLaw, GaussianLaw, noise_analysis

claim = claims_on("queries")
n, d, i, j, f, k = whole("n d i j f k")
alpha, beta, delta, eps, x, t = real("alpha beta delta varepsilon x t")
mu, w = sequence("mu w")
coordinates, every_key = (f, 1, d), (j, 1, n)
HALF = Rational(1, 2)


def orthonormal(count: Any) -> Any:
    """The means, so many of them, are orthonormal."""
    products = Eq(Sum(mu[i, f] * mu[j, f], coordinates), KroneckerDelta(i, j))
    return each(i, 1, count, each(j, 1, count, products))


def query(place: Any) -> Any:
    """A coordinate of the query of an average of the first two keys."""
    return beta * (mu[1, place] + mu[2, place])


def erf_is_below(proof: Proof) -> Step:
    """For t from 0 on, erf(t) is at most 2t."""
    falls = proof.exp_monotone(-(t**2), 0)
    slope = proof.have(Implies(t >= 0, sympy.diff(2 * t - erf(t), t) >= 0), falls)
    return proof.rising(2 * t - erf(t), t, 0, slope)


def erf_is_not_negative(proof: Proof) -> Step:
    """For t from 0 on, erf(t) is not negative."""
    return proof.rising(erf(t), t, 0)


def as_probable(proof: Proof, one: Any, other: Any, *uses: Step) -> Step:
    """Two events are as probable where steps say that one is the other."""
    both = proof.chance_implied(w, one, other, *uses), proof.chance_implied(w, other, one, *uses)
    return proof.have(Eq(Chance(w, one), Chance(w, other)), *both)


def _even_picture() -> Chart:
    chance: dict[str, Function] = {"erf(ln 3/√(8αβ²))": lambda product: math.erf(math.log(3) / math.sqrt(8 * product))}
    title = "Two noisy keys: how often both weights are within ¼ of ½"
    return curves(title, "αβ²", "probability", [10 ** (i / 10) for i in range(-40, 41)], chance, log_x=True)


def noisy_score(j: Any) -> Any:
    """The score of a key with noise of variance α in every coordinate."""
    return Sum((mu[j, f] + sqrt(alpha) * w[j, f]) * query(f), coordinates)


gap, variance, first, second, least, failing = real("Delta v alpha_1 alpha_2 ell eta")
_MEANS = {n: "the number of keys", d: "the dimension", mu: "the means of the keys", beta: "the query's length, over √2"}
_NOISE = _MEANS | {alpha: "the variance of the noise, of every coordinate of every key"}
_NORMAL = "the noise is √α·w: the coordinates of w are independent of each other, normal, of mean zero and variance one"
_OF_AVERAGE = "the query is β times the sum of the first two means"


def _two_turned(*case: arb) -> dict[Any, Any]:
    """Two keys whose means are turned by a part of a full turn."""
    quiet, loud, turn, *size = case
    sine, cosine = (2 * arb.pi() * turn).sin_cos()
    more = dict(zip((delta,), size, strict=True))
    return {n: 2, d: 2, mu: [[cosine, sine], [-sine, cosine]], alpha: 10**-quiet, beta: 10**loud} | more


_QUIET_AND_LOUD = {"−log₁₀α": (3, 8), "log₁₀β": (1, 5), "turn": (0, 1)}


def _still_averages(_: Formula) -> Statement:
    even = Abs(gap) <= log(3)
    return Statement(
        variables=_NOISE,
        given=[n >= 2, alpha > 0, alpha <= Rational(1, 1000), beta >= 10, orthonormal(n)],
        then={"average": Chance(w, even) >= Rational(1, 2)},
        where={gap: noisy_score(1) - noisy_score(2)},
        terms={"small": Rational(1, 1000), "long": beta >= 10, "log": log(3), "half": Rational(1, 2)},
        notes=["real arithmetic", _NORMAL, _OF_AVERAGE],
        spans=Spans(_QUIET_AND_LOUD, _two_turned, (orthonormal(n),)),
    )


def _law_of_gap(spread: Formula) -> Statement:
    total = Sum(exp(noisy_score(j)), every_key)
    within = And(first <= exp(delta) * second, second <= exp(delta) * first)
    return Statement(
        variables=_NOISE | {delta: "how far apart the two scores may be"},
        given=[n >= 2, alpha > 0, beta > 0, delta > 0, orthonormal(n)],
        then={
            "law": Eq(Chance(w, Abs(gap) <= delta), erf(delta / sqrt(2 * variance))),
            "not where": Chance(w, within) <= 2 * delta / sqrt(2 * variance),
            "average": Chance(w, And(first >= least, second >= least)) >= erf(delta / sqrt(2 * variance)) - failing,
        },
        where={
            variance: spread(alpha, beta),
            gap: noisy_score(1) - noisy_score(2),
            first: exp(noisy_score(1)) / total,
            second: exp(noisy_score(2)) / total,
            least: 1 / (1 + exp(delta) + (n - 2) * exp(delta - beta / 2)),
            failing: (n - 2) * (1 - erf(beta / 2 / sqrt(2 * variance))) / 2,
        },
        terms={
            "variance": spread(alpha, beta),
            "law": erf(delta / sqrt(2 * variance)),
            "apart": delta,
            "ratio": exp(delta),
            "most": 2 * delta / sqrt(2 * variance),
            "least": least,
            "failing": failing,
        },
        notes=["real arithmetic", _NORMAL, _OF_AVERAGE],
        spans=Spans(_QUIET_AND_LOUD | {"δ": (0.1, 5)}, _two_turned, (orthonormal(n),)),
    )


@claim(
    "noise-isotropic",
    expected="corrected",
    formal=_still_averages,
    amendment=_law_of_gap,
    plain="Keys with small isotropic noise, of variance {small} at most: the query of an average, where {long}, still"
    " averages. With a probability of {half} at least its two scores are within {log} of each other.",
    amended_plain="The gap between the two scores is normal with variance {variance}. It is at most {apart} with"
    " probability {law}, so both weights are at least {least} with that probability less {failing}, and the query"
    " averages where this variance vanishes. Where it does not, the weights are within a factor of {ratio} of each"
    " other with a probability of {most} at most.",
    subject=lambda alpha, beta: 4 * alpha * beta**2,
    sabotage={
        "only one of the two keys moves": lambda alpha, beta: 2 * alpha * beta**2,
        "a query that does not amplify noise": lambda alpha, beta: 4 * alpha,
    },
    picture=_even_picture,
)
def noise_isotropic(against: Refutation, proof: Proof, spread: Formula) -> None:
    case = {n: 2, d: 2, mu: [[1, 0], [0, 1]], alpha: Fraction(1, 10**6), beta: 10**4}
    against.case(case, "α = 10⁻⁶, β = 10⁴: the gap has variance 400", probability="about 0.04")
    some, quiet, loud, size = (proof.given(one) for one in (n >= 2, alpha > 0, beta > 0, delta > 0))
    law = _gap_is_normal(proof, spread(alpha, beta), delta)
    even, apart = Abs(noisy_score(1) - noisy_score(2)) <= delta, proof.statement.expanded(variance)
    found = proof.conclude("law", law, size)
    # Weights within a factor are scores within its logarithm, and erf(t) is at most 2t.
    low, high, total = real("a b T")
    below = proof.exp_monotone(low - high, delta), proof.exp_monotone(high - low, delta)
    factor = And(exp(low) / total <= exp(delta) * exp(high) / total, exp(high) / total <= exp(delta) * exp(low) / total)
    near = proof.have(Implies(And(total > 0, factor), Abs(low - high) <= delta), *below)
    whole_sum = Sum(exp(noisy_score(j)), every_key)
    scores = {low: noisy_score(1), high: noisy_score(2), total: whole_sum}
    positive = proof.sum_positive(exp(noisy_score(j)), every_key)
    within = proof.chance_implied(w, put_all(factor, scores), even, proof.at(near, scores), positive, some)
    small = proof.at(erf_is_below(proof), {t: delta / sqrt(2 * apart)})
    proof.conclude("not where", within, small, found, quiet, loud, size)
    _averages(proof, spread(alpha, beta), found)


def _averages(proof: Proof, spread: Any, found: Step) -> None:
    """What all gaps but the first allow, and how often they do."""
    some, quiet, loud = proof.given(n >= 2), proof.given(alpha > 0), proof.given(beta > 0)
    even, far = (
        Abs(noisy_score(1) - noisy_score(2)) <= delta,
        each(j, 3, n, noisy_score(1) - noisy_score(j) >= beta / 2),
    )
    away = far.args[3]
    inside = And(j >= 3, j <= n)
    # A gap to any other key has mean β, and the same variance.
    products = [inner_products(proof, orthonormal(n), *pair) for pair in ((1, 1), (1, 2), (2, 2), (j, 1), (j, 2))]
    slope = sqrt(alpha) * query(f)
    noise = Sum(slope * w[j, f], coordinates) + Sum(-slope * w[1, f], coordinates)
    moved = proof.have(
        Implies(inside, Eq(noisy_score(1) - noisy_score(j), beta - noise, evaluate=False)),
        *(products[place] for place in (0, 1, 3, 4)),
    )
    calm = proof.chance_normal(
        w, {j: slope, 1: -slope}, coordinates, beta / 2, spread, *products[:3], quiet, loud, when=inside
    )
    chance = (1 + erf(beta / 2 / sqrt(2 * spread))) / 2
    other = proof.chance_implied(w, noise <= beta / 2, away, moved, when=inside)
    least_of = proof.have(Implies(inside, Chance(w, away) >= chance), calm, other)
    fails = proof.sum_most(1 - Chance(w, away), 1 - chance, (j, 3, n), least_of)
    together = proof.chance_all(w, even, far)
    # The weights that this leaves.
    low, high, rest, total = real("a b R T")
    behind = proof.exp_monotone(noisy_score(j), noisy_score(1) - beta / 2, quiet)
    behind = proof.have(
        Implies(And(far, inside), exp(noisy_score(j)) <= exp(noisy_score(1) - beta / 2)), behind, proof.member(far, j)
    )
    summed = proof.sum_most(exp(noisy_score(j)), exp(noisy_score(1) - beta / 2), (j, 3, n), behind, when=far)
    first_two = proof.sum_first(exp(noisy_score(j)), every_key), proof.sum_first(exp(noisy_score(j)), (j, 2, n))
    scores = {
        low: noisy_score(1),
        high: noisy_score(2),
        rest: Sum(exp(noisy_score(j)), (j, 3, n)),
        total: Sum(exp(noisy_score(j)), every_key),
    }
    ends = [proof.exp_monotone(*pair) for pair in ((high, low + delta), (low, high + delta))]
    least_ = proof.statement.expanded(least)
    goal = And(exp(low) / total >= least_, exp(high) / total >= least_)
    known = And(
        Eq(total, exp(low) + exp(high) + rest),
        rest >= 0,
        rest <= (n - 2) * exp(low - beta / 2),
        Abs(low - high) <= delta,
    )
    weights = proof.have(Implies(known, goal), *ends)
    none = proof.sum_most(0, exp(noisy_score(j)), (j, 3, n))
    holds = proof.chance_implied(
        w, And(even, far), put_all(goal, scores), proof.at(weights, scores), *first_two, summed, none, some
    )
    proof.conclude("average", holds, together, fails, found, some)


def _gap_is_normal(proof: Proof, spread: Any, most: Any) -> Step:
    """The gap of the first two scores is normal, of mean zero and this variance."""
    some, quiet, loud = (proof.given(one) for one in (n >= 2, alpha > 0, beta > 0))
    products = [inner_products(proof, orthonormal(n), *pair) for pair in ((1, 1), (1, 2), (2, 2))]
    slope = sqrt(alpha) * query(f)
    noise = Sum(slope * w[1, f], coordinates) + Sum(-slope * w[2, f], coordinates)
    normal = proof.chance_normal(w, {1: slope, 2: -slope}, coordinates, most, spread, *products, some, quiet, loud)
    gap_, size = noisy_score(1) - noisy_score(2), proof.given(most > 0)
    moved = proof.have(Eq(gap_, noise, evaluate=False), products[0], products[2], some)
    same = as_probable(proof, Abs(noise) <= most, Abs(gap_) <= most, moved)
    return proof.have(Eq(Chance(w, Abs(gap_) <= most), erf(most / sqrt(2 * spread))), normal, same, size)


def _stretch_picture() -> Table:
    rows = []
    for n, eps, c in itertools.product((10, 1000, 100000), (0.1, 0.01), (0.5, 1.0, 1.5)):
        t = n / eps
        whole = t**c + t + n - 2
        rows.append((n, eps, c, t**c / whole, t / whole))
    return Table("Weights when key 1 comes c times as long", ("keys", "ε", "c", "on value 1", "on value 2"), rows)


c, root = real("c z")
_PAIRS: tuple[tuple[Any, Any], ...] = ((1, 1), (1, 2), (2, 2), (j, 1), (j, 2))
_OTHERS = And(j >= 3, j <= n)


def stretched_score(c: Any, j: Any, query: Any) -> Any:
    """A key's score, the first of them c times as long."""
    return Sum((1 + (c - 1) * KroneckerDelta(j, 1)) * mu[j, f] * query(f), coordinates)


def first_and_others(proof: Proof, score: Any) -> tuple[Step, Step]:
    """A sum over all keys is that of the first two and of the rest."""
    return proof.sum_first(exp(score(j)), every_key), proof.sum_first(exp(score(j)), (j, 2, n))


def _stretched(place: Any) -> Any:
    return stretched_score(c, place, lambda f: log(n / eps) * (mu[1, f] + mu[2, f]))


def _one_or_other(stretch: tuple[Any, Any]) -> Statement:
    def case(which: int, size: arb, count: int) -> dict[Any, Any]:
        return {n: count, d: count, mu: along_axes(count), eps: decimal(size), c: Fraction(str(stretch[which]))}

    total = Sum(exp(_stretched(j)), every_key)
    short, long = 1 / (1 + eps + 1 / root), 1 / (1 + (1 + eps) / root)
    return Statement(
        variables={
            n: _MEANS[n],
            d: _MEANS[d],
            mu: "the keys",
            eps: "what the others may have",
            c: "how long key 1 comes",
        },
        given=[n >= 2, eps > 0, orthonormal(n)],
        then={
            "ratio": Eq(first / second, exp((c - 1) * log(n / eps))),
            "short": Implies(Eq(c, stretch[0]), second >= short),
            "long": Implies(Eq(c, stretch[1]), first >= long),
        },
        where={first: exp(_stretched(1)) / total, second: exp(_stretched(2)) / total, root: sqrt(n / eps)},
        terms={
            "ratio": exp((c - 1) * log(n / eps)),
            "short": short,
            "long": long,
            "z": sqrt(n / eps),
            "root": root,
            "c": c,
        },
        notes=["real arithmetic", "the query is ln(n/ε) times the sum of keys 1 and 2, as they were meant"],
        spans=Spans({"c is ½ or 3/2": range(2), "ε": (0.01, 0.99), "n": range(2, 7)}, case),
    )


def along_axes(count: int) -> list[list[int]]:
    """Orthonormal keys."""
    return [[int(one == axis) for axis in range(count)] for one in range(count)]


@claim(
    "noise-one-key-discrete",
    expected="proved",
    formal=_one_or_other,
    plain="If the first key comes {c} times as long, the query of an average gives weights in a ratio of {ratio}. Half"
    " as long, it has {short} for the other value at least, and one and a half times as long {long} for its own, where"
    " {root} is {z}: the larger that is, the more the answer is one value or the other, and not their mean.",
    subject=(Rational(1, 2), Rational(3, 2)),
    sabotage={
        "a key of the right length": (sympy.Integer(1), sympy.Integer(1)),
        "a key that is only ever too long": (Rational(5, 4), Rational(3, 2)),
    },
    picture=_stretch_picture,
)
def noise_one_key_discrete(proof: Proof, stretch: tuple[Any, Any]) -> None:
    some, size = proof.given(n >= 2), proof.given(eps > 0)
    far = log(n / eps)
    products = {pair: inner_products(proof, orthonormal(n), *pair) for pair in _PAIRS}
    known = proof.have(
        And(n >= 2, eps > 0, *(products[pair].formula for pair in _PAIRS[:3])),
        some,
        size,
        *(products[pair] for pair in _PAIRS[:3]),
    )
    others = proof.have(Implies(_OTHERS, Eq(_stretched(j), 0)), products[j, 1], products[j, 2])
    others = proof.have(
        Implies(_OTHERS, Eq(exp(_stretched(j)), 1)), others, proof.same_value(exp, _stretched(j), sympy.Integer(0))
    )
    on = []
    for place, number in ((1, c * far), (2, far)):
        score = proof.have(Eq(_stretched(place), number), known)
        on.append(
            proof.have(Eq(exp(_stretched(place)), exp(number)), score, proof.same_value(exp, _stretched(place), number))
        )
    summed = proof.sum_same(exp(_stretched(j)), 1, (j, 3, n), others)
    total = proof.have(
        Eq(Sum(exp(_stretched(j)), every_key), exp(c * far) + n / eps + n - 2),
        *first_and_others(proof, _stretched),
        summed,
        *on,
        some,
    )
    proof.conclude("ratio", *on)
    for part, own in (("short", on[1]), ("long", on[0])):
        when = proof.statement.parts[part].args[0]
        level = proof.same_value(exp, c * far, when.rhs * far)
        proof.conclude(part, own, total, level, some, size)
    analysis = noise_analysis(
        1000,
        [{0: math.log(1e5), 1: math.log(1e5)}],
        DiscreteLaw((Fraction(1, 2), Fraction(3, 2)), (Fraction(1, 2), Fraction(1, 2))),
        eta=0.9,
    )
    says = "the library's analysis, 1,000 keys, ε = 0.01: neither outcome comes within 0.9·max‖v‖ of the mean"
    proof.shows(enclosed(analysis.success == (0.0, 0.0), says, errors=[one.error[0] for one in analysis.outcomes]))


class Scaled(NamedTuple):
    """The weights of two keys when key a is X times its mean, and the variance of X."""

    weight_a: Formula = lambda beta, x: 1 / (1 + exp(-beta * (x - 1)))
    weight_b: Formula = lambda beta, x: 1 / (1 + exp(-beta * (1 - x)))
    variance: Any = Rational(1, 2)


def _scaled_picture() -> Chart:
    series = {
        f"β = {strength}": lambda w, strength=strength: 0.5 * (1 + math.erf(math.log(w / (1 - w)) / strength))
        for strength in (1, 5, 25, 500)
    }
    title = "Key a is X ~ N(1, ½) times its mean: how its weight is distributed"
    return curves(title, "w", "P(α_a ≤ w)", [i / 200 for i in range(1, 200)], series)


_STRENGTH = {beta: "the query's length, over √2"}
_LENGTH = {x: "how long key a comes"}


share, own_score, other_score, length = real("omega s_a s_b X")


def _scaled_case(quiet: arb, loud: arb, at: arb, part: arb) -> dict[Any, Any]:
    return {d: 2, mu: along_axes(2), alpha: decimal(quiet), beta: loud, x: at, share: part}


_SCALED = Spans({"α": (0, 1), "β": (0.1, 20), "x": (-2, 4), "ω": (0.01, 0.99)}, _scaled_case)


def _within_reach(_: Scaled) -> Statement:
    stated, scores = 1 / (1 + exp(beta * (1 - x))), [exp(beta * x), exp(beta)]
    half = Rational(1, 2)
    return Statement(
        variables=_STRENGTH | _LENGTH,
        given=[beta > 0],
        then={
            "first": Eq(scores[0] / sum(scores), stated),
            "second": Eq(scores[1] / sum(scores), stated),
            "within": Eq(Chance(w, Abs(sqrt(half) * w[1, 1]) <= half), 1),
        },
        terms={"stated": stated, "half": half},
        notes=["real arithmetic", "X is 1 + w/√2 with a normal w, and the isotropic noise is nothing"],
        spans=_SCALED,
    )


def key_a(place: Any, own: Any = HALF) -> Any:
    """A coordinate of key a: isotropic noise, and noise of a variance of its own along its mean."""
    along = sqrt(own) * mu[1, place] * Sum(mu[1, k] * w[3, k], (k, 1, d))
    return mu[1, place] + sqrt(alpha) * w[1, place] + along


def _bernoulli(scaled: Scaled) -> Statement:
    still = [Sum(x * mu[1, f] * query(f), coordinates), Sum(mu[2, f] * query(f), coordinates)]
    total = sum(map(exp, still))
    law = (1 + erf((x - 1) / sqrt(2 * (scaled.variance + alpha)))) / 2
    spread = beta**2 * (scaled.variance + 4 * alpha)
    level = log(share / (1 - share))
    below = Chance(w, first <= share)

    return Statement(
        variables=_STRENGTH
        | _LENGTH
        | {d: _MEANS[d], mu: "the means of the two keys", alpha: "the variance of the isotropic noise"}
        | {share: "a weight"},
        given=[alpha >= 0, beta > 0, share > 0, share < 1, orthonormal(2)],
        then={
            "law": Eq(Chance(w, length <= x), law),
            "negative": Implies(Eq(alpha, 0), Eq(Chance(w, length <= 0), (1 - erf(1)) / 2)),
            "first": Eq(exp(still[0]) / total, scaled.weight_a(beta, x)),
            "second": Eq(exp(still[1]) / total, scaled.weight_b(beta, x)),
            "coin": Eq(below, (1 + erf(level / sqrt(2 * spread))) / 2),
            "half": Abs(below - Rational(1, 2)) <= Abs(level) / sqrt(2 * spread),
        },
        where={
            length: Sum(key_a(f) * mu[1, f], coordinates),
            first: exp(own_score) / (exp(own_score) + exp(other_score)),
            own_score: Sum(key_a(f) * query(f), coordinates),
            other_score: Sum((mu[2, f] + sqrt(alpha) * w[2, f]) * query(f), coordinates),
        },
        terms={
            "law": law,
            "negative": (1 - erf(1)) / 2,
            "first": scaled.weight_a(beta, x),
            "second": scaled.weight_b(beta, x),
            "share": share,
            "coin": (1 + erf(level / sqrt(2 * spread))) / 2,
            "half": Rational(1, 2),
            "off": Abs(level) / sqrt(2 * spread),
        },
        notes=["real arithmetic", _NORMAL.replace("the noise is √α·w: ", ""), _OF_AVERAGE],
        spans=_SCALED,
    )


@claim(
    "noise-one-key-gauss",
    expected="corrected",
    formal=_within_reach,
    amendment=_bernoulli,
    plain="With noise of variance {half} along its own mean, key a is X times its mean, and X is within {half} of one;"
    " both weights are {stated}.",
    amended_plain="X is normal: at most x with probability {law}, and negative with probability {negative} where there"
    " is no other noise. The weights are {first} and {second}. That of key a is at most {share} with probability"
    " {coin}, which is within {off} of {half}: as the query grows, one key takes all, each half of the time.",
    subject=Scaled(),
    sabotage={
        "the same weight for both": Scaled(weight_b=Scaled().weight_a),
        "½ taken for the standard deviation": Scaled(variance=Rational(1, 4)),
    },
    picture=_scaled_picture,
)
def noise_one_key_gauss(against: Refutation, proof: Proof, scaled: Scaled) -> None:
    against.case({beta: 10, x: Fraction(3, 2)}, "β = 10, X = 3/2: key b has weight 0.0067, not the 0.9933 stated")
    against.case({beta: 10, x: 1}, "X is further than ½ from 1 nearly half of the time", probability="2Φ(−1/√2)")
    quiet, loud, some, less = (proof.given(one) for one in (alpha >= 0, beta > 0, share > 0, share < 1))
    products = [inner_products(proof, orthonormal(2), *pair) for pair in ((1, 1), (1, 2), (2, 2))]
    root, variance = sqrt(Rational(1, 2)), scaled.variance + alpha
    # X is one and a normal number.
    along = {1: sqrt(alpha) * mu[1, f], 3: root * mu[1, f]}
    noise = sum(Sum(slope * w[place, f], coordinates) for place, slope in along.items())
    own = Sum(key_a(f) * mu[1, f], coordinates)
    moved = proof.have(Eq(own, 1 + noise, evaluate=False), products[0])
    for part, most in (("law", x), ("negative", sympy.Integer(0))):
        normal = proof.chance_normal(w, along, coordinates, most - 1, variance, products[0], quiet)
        same = as_probable(proof, noise <= most - 1, own <= most, moved)
        if part == "law":
            proof.conclude(part, normal, same)
        else:
            value = proof.same_value(lambda a: erf(-1 / sqrt(2 * (scaled.variance + a))), alpha, sympy.Integer(0))
            proof.conclude(part, normal, same, value)
    # Without isotropic noise the scores are βX and β.
    still = [Sum(x * mu[1, f] * query(f), coordinates), Sum(mu[2, f] * query(f), coordinates)]
    powers = []
    for score, number, given in zip(still, (beta * x, beta), (products[:2], products[1:]), strict=True):
        comes_to = proof.have(Eq(score, number), *given)
        powers.append(proof.have(Eq(exp(score), exp(number)), comes_to, proof.same_value(exp, score, number)))
    proof.conclude("first", *powers)
    proof.conclude("second", *powers)
    # The gap is normal, and the weight rises with it.
    a, b = real("a b")
    level = log(share / (1 - share))
    spread = beta**2 * (scaled.variance + 4 * alpha)
    slopes = {1: sqrt(alpha) * query(f), 2: -sqrt(alpha) * query(f), 3: root * beta * mu[1, f]}
    noise = sum(Sum(slope * w[place, f], coordinates) for place, slope in slopes.items())
    scores = {a: proof.statement.expanded(own_score), b: proof.statement.expanded(other_score)}
    gap = proof.have(Eq(scores[a] - scores[b], noise, evaluate=False), *products)
    normal = proof.chance_normal(w, slopes, coordinates, level, spread, *products, quiet, loud)
    rises = proof.exp_monotone(a - b, level, some, less)
    weight = exp(a) / (exp(a) + exp(b))
    below = proof.have(sympy.Equivalent(weight <= share, a - b <= level), rises, less)
    same = as_probable(proof, noise <= level, put_all(weight, scores) <= share, gap, proof.at(below, scores))
    law = proof.conclude("coin", normal, same)
    size = level / sqrt(2 * spread)
    sides = [
        proof.at(side, {t: z}) for side in (erf_is_below(proof), erf_is_not_negative(proof)) for z in (size, -size)
    ]
    proof.conclude("half", law, *sides, loud, quiet)
    analysis = noise_analysis(2, [{0: 1000.0, 1: 1000.0}], GaussianLaw(1.0, float(scaled.variance)), eta=0.01)
    says = "the library's analysis at β = 1000: the weight's variance is nearly that of a fair coin, ¼"
    proof.shows(
        enclosed(analysis.variance[0] > 0.249, says, mean=list(analysis.mean), variance=list(analysis.variance))
    )
