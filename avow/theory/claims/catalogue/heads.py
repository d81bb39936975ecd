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
    along_axes,
    as_probable,
    first_and_others,
    mu,
    orthonormal,
    stretched_score,
    w,
)
from avow.theory.claims.catalogue.singular import inner_products
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Chance, Spans, Statement, decimal, real, whole
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
    positive = proof.have(And(n / eps > 0, eps > 0), some, size)
    t = strength(n, eps)
    grows = proof.log_monotone(sympy.Integer(1), n / eps, positive)
    half = proof.exp_monotone(t / 2, c * t, positive)
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
    positive = proof.have(And((n - 1) / eps > 0, eps > 0), some, size)
    rises = proof.exp_monotone(beta * bound, beta * t, positive, loud)
    ahead = proof.exp_monotone(log((n - 1) / eps), beta, positive)
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
        bound >= 0, proof.log_monotone(sympy.Integer(1), (n - 1) / eps, positive), some, size, less, loud
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
