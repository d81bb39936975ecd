r"""What two heads can do that one query cannot, and what they cannot either.

Head i attends by its own query, and the answer is the mean of the heads' outputs. Their keys are the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import And, Eq, Equivalent, Implies, Or, Rational, Sum, erf, exp, log, sqrt

from avow.core.chart import Chart, Function, Table, curves
from avow.numerics import intervals
from avow.theory.claims.catalogue.noise import (
    HALF,
    along_axes,
    as_probable,
    first_and_others,
    key_a,
    mu,
    orthonormal,
    stretched_score,
    w,
)
from avow.theory.claims.catalogue.singular import inner_products
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Chance, Spans, Statement, decimal, each, real, whole
from avow.theory.claims.kernel import Step, when_so
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import enclosed, kept
from avow.theory.constructions.noise import AnyScale, GaussianLaw
from avow.theory.constructions.robust import robust_heads

claim = claims_on("heads")
eps, c, beta, length = real("varepsilon c beta X")
n, d, j, f = whole("n d j f")
first, second, lame, root, t = real("alpha_1 alpha_2 alpha_1' z t")
every_key = (j, 1, n)
_OTHERS = And(j >= 3, j <= n)
_KEYS = {
    n: "the number of keys",
    d: "the dimension",
    mu: "the keys, as they were meant",
    eps: "what the others may have",
}
_TWO_HEADS = ["real arithmetic", "a head for each of the keys 1 and 2, its query along that key"]


def _score(head: int, strength: Any, length: Any, j: Any) -> Any:
    """A head's score for a key, the first of them longer or shorter."""
    return stretched_score(length, j, lambda f: strength * mu[head, f])


def _weight(head: int, strength: Any, length: Any) -> Any:
    """What a head gives its own key."""
    total = Sum(exp(_score(head, strength, length, j)), every_key)
    return exp(_score(head, strength, length, head)) / total


def _alone(proof: Proof, head: int, strength: Any, length: Any, *defined: Step) -> Step:
    """A head sees its own key, and every other score is nothing: its exponential, and the sum of all."""
    other, on = 3 - head, strength * (length if head == 1 else 1)
    some, products = proof.given(n >= 2), {at: inner_products(proof, orthonormal(n), at, head) for at in (1, 2, j)}

    def score(j: Any) -> Any:
        return _score(head, strength, length, j)

    powers = []
    for at, number in ((head, on), (other, 0), (j, 0)):
        when = _OTHERS if at is j else True
        own = proof.have(when_so(when, Eq(score(at), number)), products[at], *(() if at is j else (some,)))
        same = proof.same_value(exp, score(at), sympy.sympify(number))
        powers.append(proof.have(when_so(when, Eq(exp(score(at)), exp(number))), own, same))
    summed = proof.sum_same(exp(score(j)), 1, (j, 3, n), powers.pop())
    total = Eq(Sum(exp(score(j)), every_key), exp(on) + n - 1)
    found = proof.have(total, *first_and_others(proof, score), summed, *powers, some)
    return proof.have(And(Eq(exp(score(head)), exp(on)), total), powers[0], found)


def _discrete_picture() -> Chart:
    weights: dict[str, Function] = {
        "t = ln(n/ε)": lambda n: (n / 0.01) ** 0.5 / ((n / 0.01) ** 0.5 + n - 1),
        "t = 2·ln(n/ε)": lambda n: (n / 0.01) / (n / 0.01 + n - 1),
    }
    title, counts = "Head 1 when its key comes half as long, ε = 0.01", [2**i for i in range(1, 24)]
    return curves(title, "keys", "weight on value 1", counts, weights, log_x=True)


_LENGTHS = {"ε": (0.01, 0.99), "n": range(2, 7), "c": (0.5, 2)}


def _half_case(size: arb, count: int, length: Any) -> dict[Any, Any]:
    return {n: count, d: count, mu: along_axes(count), eps: decimal(size), c: length}


def _heads(strength: Any, lengths: Any) -> Statement:
    near = 1 / (1 + eps)
    return Statement(
        variables=_KEYS | {c: "how long key 1 comes"},
        given=[n >= 2, eps > 0, eps < 1, orthonormal(n)],
        then={"both": Implies(lengths, And(first >= near, second >= near))},
        where={first: _weight(1, t, c), second: _weight(2, t, c), t: strength},
        terms={"near": near, "length": strength},
        notes=_TWO_HEADS,
    )


def _as_stated(_: Formula) -> Statement:
    def case(size: arb, count: int, length: arb) -> dict[Any, Any]:
        return _half_case(size, count, Fraction(1, 2) if length < 1 else Fraction(3, 2))

    stated = _heads(log(n / eps), Or(Eq(c, Rational(1, 2)), Eq(c, Rational(3, 2))))
    return replace(stated, spans=Spans(_LENGTHS, case))


def _twice_as_long(strength: Formula) -> Statement:
    near = 1 / (1 + eps)
    enough = _heads(strength(n, eps), c >= Rational(1, 2))
    lost = 2 / sqrt(n * eps)
    return replace(
        enough,
        then={
            "both": enough.then["both"],
            "half": Eq(lame, root / (root + n - 1)),
            "short": Implies(n >= 3, lame < near),
            "lost": lame <= lost,
        },
        where=dict(enough.where) | {lame: _weight(1, log(n / eps), Rational(1, 2)), root: sqrt(n / eps)},
        terms=dict(enough.terms)
        | {
            "least": Rational(1, 2),
            "half": root / (root + n - 1),
            "root": root,
            "z": sqrt(n / eps),
            "lost": lost,
            "many": n >= 3,
        },
        spans=Spans(_LENGTHS, _half_case),
    )


@claim(
    "heads-discrete",
    expected="corrected",
    formal=_as_stated,
    amendment=_twice_as_long,
    plain="Two heads of length {length}, one for each value, average robustly: each has a weight of {near} on its value"
    " at least, even when the first key comes half as long, for its score still dwarfs the rest.",
    amended_plain="Heads of length {length} do, for every length of the first key from {least} on. The shorter ones do"
    " not: at half the length the first head has {half}, where {root} is {z}, which falls short where {many}, and is"
    " {lost} at most.",
    subject=lambda n, eps: 2 * log(n / eps),
    sabotage={
        "no longer than stated": lambda n, eps: log(n / eps),
        "one and a half times": lambda n, eps: 3 * log(n / eps) / 2,
        "blind to how many keys there are": lambda n, eps: 4 * log(1 / eps),
    },
    picture=_discrete_picture,
)
def heads_discrete(against: Refutation, proof: Proof, strength: Formula) -> None:
    case = {n: 3, d: 3, mu: along_axes(3), eps: Fraction(1, 100), c: Fraction(1, 2)}
    against.case(case, "three keys, ε = 0.01, c = ½: head 1 has √300 against 2, and 0.9 of the weight")
    some, size, less = proof.given(n >= 2), proof.given(eps > 0), proof.given(eps < 1)
    t = strength(n, eps)
    grows = proof.log_monotone(sympy.Integer(1), n / eps, some, size)
    half = proof.exp_monotone(t / 2, c * t, some, size)
    own, other = _alone(proof, 1, t, c), _alone(proof, 2, t, c)
    proof.conclude("both", own, other, half, grows, some, size, less)
    halved = _alone(proof, 1, log(n / eps), Rational(1, 2))
    found = proof.conclude("half", halved)
    proof.conclude("short", found, size, less)
    proof.conclude("lost", found, some, size)
    heads = robust_heads(1000, 0.01, AnyScale(0.5))
    proof.shows(kept(heads, "the library's heads for a thousand keys", length=float(heads.queries[0, 0])))


class Law(NamedTuple):
    """How X, the length of key a, is distributed, and when its head copies."""

    variance: Any = Rational(1, 2)
    least: Formula = lambda n, eps, beta: log((n - 1) / eps) / beta


def _gauss_picture() -> Chart:
    chances = {
        f"{n} keys": lambda strength, n=n: 0.5 * math.erfc(-(1 - math.log((n - 1) / 0.01) / strength))
        for n in (2, 1000, 10**6)
    }
    strengths = [10 ** (i / 20) for i in range(10, 81)]
    return curves("How often both heads copy, ε = 0.01", "β", "probability", strengths, chances, log_x=True)


least = real("ell")
drawn = 1 + sqrt(Rational(1, 2)) * w[1, 1]


def _both(x: Any) -> Any:
    near = 1 / (1 + eps)
    return And(_weight(1, beta, x) >= near, _weight(2, beta, x) >= near)


def _gauss(long: Any, **more: Any) -> Statement:
    return Statement(
        variables=_KEYS | {beta: "the length of the queries", length: "how long key 1 comes"},
        given=[n >= 2, eps > 0, eps < 1, beta > 0, long, orthonormal(n)],
        **more,
    )


def _gauss_as_stated(_: Law) -> Statement:
    near = 1 / (1 + eps)
    return _gauss(
        beta >= 100 * log((n - 1) / eps),
        then={"both": And(first >= near, second >= near)},
        where={first: _weight(1, beta, length), second: _weight(2, beta, length)},
        terms={"near": near, "length": length, "long": beta >= 100 * log((n - 1) / eps)},
        notes=_TWO_HEADS,
        spans=_gauss_spans(100),
    )


def _gauss_spans(least_times: int) -> Spans:
    def case(size: arb, count: int, x: arb, times: arb) -> dict[Any, Any]:
        strength = least_times * (1 + times) * ((count - 1) / size).log()
        return {n: count, d: count, mu: along_axes(count), eps: decimal(size), beta: strength, length: x}

    return Spans({"ε": (0.01, 0.99), "n": range(2, 7), "X": (-2, 4), "times": (0, 20)}, case)


def _gauss_law(law: Law) -> Statement:
    chance = (1 + erf((1 - least) / sqrt(2 * law.variance))) / 2
    limit = (1 + erf(1)) / 2
    both = Chance(w, _both(drawn))
    return _gauss(
        beta >= log((n - 1) / eps),
        then={
            "law": Eq(both, chance),
            "exactly": Equivalent(_both(length), length >= least),
            "never": Implies(length <= 0, first <= 1 / n),
            "below": chance <= limit,
            "rises": chance >= limit - least,
        },
        where={first: _weight(1, beta, length), least: law.least(n, eps, beta)},
        terms={
            "near": 1 / (1 + eps),
            "law": chance,
            "limit": limit,
            "least": least,
            "short": length <= 0,
            "few": 1 / n,
            "is": law.least(n, eps, beta),
        },
        notes=[
            *_TWO_HEADS,
            "key 1 comes 1 + w/√2 times as long, with a normal w of mean zero and variance one",
        ],
        spans=_gauss_spans(1),
    )


@claim(
    "heads-gauss",
    expected="corrected",
    formal=_gauss_as_stated,
    amendment=_gauss_law,
    plain="With Gaussian scaling of the first key, two separate heads, of {long}, still give the mean of the two"
    " values: whatever the length {length} that it comes in, each head gives its own value a weight of {near} or more.",
    amended_plain="They do so with probability {law}, where {least} is {is}: exactly when the key is that long. As the"
    " query grows, this rises to {limit}, and never past it: a key of length {short} leaves the first head {few} at"
    " most, however long its query.",
    subject=Law(),
    sabotage={
        "½ taken for the standard deviation": Law(Rational(1, 4)),
        "head 1 copies for every X": Law(least=lambda n, eps, beta: -1000 * beta / beta),
        "blind to how many keys there are": Law(least=lambda n, eps, beta: log(1 / eps) / beta),
    },
    picture=_gauss_picture,
)
def heads_gauss(against: Refutation, proof: Proof, law: Law) -> None:
    case = {n: 2, d: 2, mu: along_axes(2), eps: Fraction(1, 2), beta: 1000, length: -1}
    against.case(case, "X = −1: head 1 gives the other key all of its weight, however long its query")
    some, size, less, loud = (proof.given(one) for one in (n >= 2, eps > 0, eps < 1, beta > 0))
    long, bound = proof.given(beta >= log((n - 1) / eps)), law.least(n, eps, beta)
    own, other = _alone(proof, 1, beta, t), _alone(proof, 2, beta, t)
    rises = proof.exp_monotone(beta * bound, beta * t, some, size)
    ahead = proof.exp_monotone(log((n - 1) / eps), beta, some, size)
    exactly = proof.have(Equivalent(_both(t), t >= bound), own, other, rises, ahead, long, some, size, loud)
    proof.conclude("exactly", proof.at(exactly, {t: length}))
    none = proof.at(own, {t: length}), proof.exp_monotone(beta * length, 0)
    proof.conclude("never", *none, loud, some)
    # X is one and a normal number of variance ½.
    slope, room = -sqrt(Rational(1, 2)), 1 - bound
    noise = Sum(slope * w[1, f], (f, 1, 1))
    normal = proof.chance_normal(w, {1: slope}, (f, 1, 1), room, law.variance)
    same = as_probable(proof, noise <= room, _both(drawn), proof.at(exactly, {t: drawn}))
    proof.conclude("law", normal, same)
    # Towards the limit: erf rises, with a slope of less than two.
    gone = erf(1) - erf(1 - t)
    slow = proof.have(sympy.diff(2 * t - gone, t) >= 0, proof.exp_monotone(-((1 - t) ** 2), 0))
    ahead = proof.have(
        bound >= 0, proof.log_monotone(sympy.Integer(1), (n - 1) / eps, some, size), some, size, less, loud
    )
    for part, difference, slopes in (("below", gone, ()), ("rises", 2 * t - gone, (slow,))):
        proof.conclude(part, proof.at(proof.rising(difference, t, 0, *slopes), {t: bound}), ahead)
    limit = (1 + intervals.ball(1).erf()) / 2
    proof.shows(
        enclosed(bool(abs(limit - arb("0.92135")) < arb("1e-6")), "the limit, in numbers", probability=limit.str(12))
    )
    for name, away in (("as here, β = 50", False), ("by −ln((n−1)/ε) on every other key", True)):
        heads = robust_heads(1000, 0.01, GaussianLaw(), least=None if away else math.log(99900) / 50, away=away)
        proof.shows(kept(heads, f"the library's heads, {name}", probability=heads.success))


alpha, level = real("alpha L")


class Gaps(NamedTuple):
    """The variance of a head's gap over β²: under isotropic noise, and with the first key's own beside it."""

    isotropic: Formula = lambda alpha: 2 * alpha
    own: Formula = lambda alpha: 2 * alpha + Rational(1, 2)

    def law(self, own: bool) -> Any:
        """How often a gap of mean β and this variance is at least L."""
        variance = beta**2 * (self.own if own else self.isotropic)(alpha)
        return (1 + erf((beta - level) / sqrt(2 * variance))) / 2


def _ahead(head: int, own: bool) -> Any:
    """That a head's key is far enough ahead of the other key, without and with the first key's own noise."""
    query, keys = beta * mu[head, f], (key_a(f, HALF if own else 0), mu[2, f] + sqrt(alpha) * w[2, f])
    return Sum(keys[head - 1] * query, (f, 1, d)) - Sum(keys[2 - head] * query, (f, 1, d)) >= level


def _under_both(**more: Any) -> Statement:
    def case(quiet: arb, loud: arb, size: arb) -> dict[Any, Any]:
        return {d: 2, mu: along_axes(2), alpha: decimal(quiet), beta: loud, eps: decimal(size)}

    return Statement(
        variables={
            **{d: _KEYS[d], mu: "the means of the two keys", alpha: "the variance of the isotropic noise"},
            **{beta: "the length of the queries", eps: "what the other key may have"},
        },
        given=[alpha > 0, beta > 0, eps > 0, eps < 1, orthonormal(2)],
        where={level: log(1 / eps)},
        notes=[
            *_TWO_HEADS,
            "the noise is normal, of mean zero; the first key's own has variance ½, lies along its mean, and comes"
            " beside the isotropic noise",
            "a score that is ln(1/ε) ahead has a weight of 1/(1 + ε), and one that is less has less",
        ],
        spans=Spans({"α": (0.001, 0.1), "β": (1, 100), "ε": (0.01, 0.9)}, case),
        **more,
    )


def _equally_well(_: Gaps) -> Statement:
    pairs = ((Chance(w, _ahead(head, own=False)), Chance(w, _ahead(head, own=True))) for head in (1, 2))
    return _under_both(
        then={name: Eq(*pair) for name, pair in zip(("first", "second"), pairs, strict=True)},
        terms={"ahead": log(1 / eps)},
    )


def _one_of_them(gaps: Gaps) -> Statement:
    alone, limit, calm = gaps.law(own=False), (1 + erf(1)) / 2, (1 + erf(1 / (4 * sqrt(alpha)))) / 2
    return _under_both(
        then={
            "isotropic": Eq(Chance(w, _ahead(1, own=False)), alone),
            "own": Eq(Chance(w, _ahead(1, own=True)), gaps.law(own=True)),
            "second": And(*(Eq(Chance(w, _ahead(2, own)), alone) for own in (False, True))),
            "both": Chance(w, And(*(_ahead(head, own=False) for head in (1, 2)))) >= 2 * alone - 1,
            "calm": Implies(beta >= 2 * level, alone >= calm),
            "never": gaps.law(own=True) <= limit,
        },
        terms={
            **{"alone": alone, "own": gaps.law(own=True), "both": 2 * alone - 1, "limit": limit, "calm": calm},
            **{"long": beta >= 2 * level, "level": level, "ahead": log(1 / eps)},
        },
    )


@claim(
    "heads-both-noises",
    expected="corrected",
    formal=_equally_well,
    amendment=_one_of_them,
    plain="Two heads, one for each value, perform equally well under isotropic noise and where the first key has noise"
    " along its own mean, too: each head's key is ahead of the other by {ahead} as often.",
    amended_plain="Under isotropic noise each head's key is ahead by {level}, which is {ahead}, with probability"
    " {alone}, and both are at once with {both} or more. Where {long}, each head's is at least {calm}, which rises to"
    " one as the noise vanishes, however long the queries are. With noise along the first key's mean the second head"
    " does as well as before, and the first with probability {own}, which never exceeds {limit}.",
    subject=Gaps(),
    sabotage={
        "only one of the two keys moves": Gaps(isotropic=lambda alpha: alpha),
        "½ taken for the standard deviation": Gaps(own=lambda alpha: 2 * alpha + Rational(1, 4)),
        "the isotropic noise forgotten": Gaps(own=lambda alpha: Rational(1, 2) + 0 * alpha),
    },
    picture=_gauss_picture,
)
def heads_both_noises(against: Refutation, proof: Proof, gaps: Gaps) -> None:
    case = {d: 2, mu: along_axes(2), alpha: Fraction(1, 1000), beta: 100, eps: Fraction(1, 100)}
    says = "α = 0.001, β = 100, ε = 0.01: the first head is ahead nearly always, or 91 times in 100"
    against.case(case, says, "first")
    quiet, loud, size, less = (proof.given(one) for one in (alpha > 0, beta > 0, eps > 0, eps < 1))
    products = {pair: inner_products(proof, orthonormal(2), *pair) for pair in ((1, 1), (1, 2), (2, 2))}
    bound = log(1 / eps)
    room = beta - bound

    def law(head: int, own: bool) -> Step:
        """A gap is β and a normal number."""
        slope = sqrt(alpha) * beta * mu[head, f]
        slopes = {head: -slope, 3 - head: slope}
        if own and head == 1:
            slopes |= {3: -sqrt(Rational(1, 2)) * beta * mu[1, f]}
        noise = sum(Sum(one * w[place, f], (f, 1, d)) for place, one in slopes.items())
        used = products[head, head], products[1, 2]
        gap = proof.have(Eq(proof.statement.expanded(_ahead(head, own).lhs), beta - noise, evaluate=False), *used)
        spread = beta**2 * (gaps.own if own and head == 1 else gaps.isotropic)(alpha)
        normal = proof.chance_normal(w, slopes, (f, 1, d), room, spread, used[0], quiet, loud)
        event = proof.statement.expanded(_ahead(head, own))
        same = as_probable(proof, noise <= room, event, gap)
        return proof.have(Eq(Chance(w, event), (1 + erf(room / sqrt(2 * spread))) / 2), normal, same)

    first, second = proof.conclude("isotropic", law(1, own=False)), law(2, own=False)
    proof.conclude("own", law(1, own=True))
    proof.conclude("second", second, law(2, own=True))
    one, two = (proof.statement.expanded(_ahead(head, own=False)) for head in (1, 2))
    every = proof.chance_all(w, one, each(j, 2, 2, two))
    alike = proof.chance_implied(w, And(one, each(j, 2, 2, two)), And(one, two), proof.member(each(j, 2, 2, two), 2))
    proof.conclude("both", every, alike, first, second)
    # erf rises.
    lowest = 1 / (4 * sqrt(alpha))
    rises = proof.rising(erf(t) - erf(lowest), t, lowest, quiet)
    proof.conclude("calm", proof.at(rises, {t: room / sqrt(2 * beta**2 * gaps.isotropic(alpha))}), quiet, loud)
    falls = proof.rising(erf(1) - erf(1 - t), t, 0)
    ahead = proof.log_monotone(sympy.Integer(1), 1 / eps, size)
    furthest = 1 - room / sqrt(2 * beta**2 * gaps.own(alpha))
    proof.conclude("never", proof.at(falls, {t: furthest}), ahead, quiet, loud, size, less)


def _identical(heads: Heads) -> Statement:
    weights = [real(f"alpha_{length}{head}") for length in "sl" for head in (1, 2)]
    terms = [
        root ** (power * x_) / (root ** (power * x_) + root ** (2 * y_) + n - 2) for power in (1, 3) for x_, y_ in heads
    ]
    short, long = weights[:2], weights[2:]
    return Statement(
        variables={n: _KEYS[n], root: "the root of n/ε"},
        given=[n >= 2, root > 1],
        then={"less": ((sum(long) - sum(short)) / 4) ** 2 < ((long[0] - short[0]) / 2) ** 2},
        where=dict(zip(weights, terms, strict=True)),
        notes=[
            "real arithmetic",
            "orthonormal keys, the first half or one and a half times as long with equal chances: the variance of what"
            " depends on that is the square of half the difference",
            "a query of length ln(n/ε) along a key: its exponential is n/ε to the length of the key",
        ],
        spans=Spans({"n": range(2, 101), "√(n/ε)": range(11, 201)}, lambda count, ratio: {n: count, root: ratio}),
    )


# A head's query is ln(n/ε) times x·u + y·k_2: its x and its y.
Heads = Sequence[tuple[int, int]]


def _identical_picture() -> Table:
    kinds = {"one head": [(1, 1)] * 2, "two heads, two queries": [(1, 0), (0, 1)]}
    rows = []
    for name, heads in kinds.items():
        weights = [[100 ** (c * x_) / (100 ** (c * x_) + 100 ** (2 * y_) + 98) for x_, y_ in heads] for c in (1, 3)]
        short, long = (sum(pair) / 2 for pair in weights)
        rows.append((name, short, long, ((long - short) / 2) ** 2))
    return Table("The weight on v_1 of 100 keys, ε = 0.01", ("heads", "at c = ½", "at c = 3/2", "variance"), rows)


@claim(
    "heads-identical",
    expected="refuted",
    formal=_identical,
    plain="Two heads with the same query swing less than one when the keys are noisy: the variance of the mean of their"
    " weights is smaller than that of the weight of one.",
    subject=((1, 1), (1, 1)),
    sabotage={"a query for each value": ((1, 0), (0, 1)), "one head with the average, one for v_1": ((1, 1), (1, 0))},
    picture=_identical_picture,
)
def heads_identical(against: Refutation, _: Heads) -> None:
    says = "100 keys, ε = 0.01: the heads read the same keys by the same query, so their mean is either of them"
    against.case({n: 100, root: 100}, says)
