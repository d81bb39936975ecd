r"""What one query can copy, how short it may be, and what it can mix: two values, or any distribution over some.

Keys :math:`k_1 \dots k_n`, scores :math:`s_i = \langle k_i, q \rangle`, weights :math:`\alpha = softmax(s)`. Every
number of keys and every dimension is meant. The key to be copied is listed first, and those to be mixed are, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from sympy import Abs, And, Eq, Equivalent, Implies, KroneckerDelta, Not, Rational, Sum, exp, log, sqrt

from avow.core.chart import Chart, Function, Table, curves
from avow.errors import InsideHull, OutOfReach
from avow.numerics.intervals import ball, total
from avow.theory.claims.catalogue import softmax
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Exists, Spans, Statement, decimal, each, instance, real, sequence, value, whole
from avow.theory.claims.kernel import Step
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import kept, rational
from avow.theory.constructions.queries import average_query, copy_query, mixture_query

claim = claims_on("queries")
d, f, g, i, j, m, n = whole("d f g i j m n")
c, eps, r, t = real("c varepsilon r t")
first, second = real("alpha_1 alpha_2")
k, q, y, logs, share, other_share = sequence("k q y ell lambda kappa")
all_keys, others, all_coordinates = (j, 1, n), (j, 2, n), (f, 1, d)
KEYS = {n: "the number of keys", d: "their dimension", k: "the keys"}
EPS = {eps: "what the other keys may have"}
EPSILON = {"ε": (0.01, 0.99)}
ORTHONORMAL = each(i, 1, n, each(j, 1, n, Eq(Sum(k[i, f] * k[j, f], all_coordinates), KroneckerDelta(i, j))))
BELOW_ONE = [n >= 2, eps > 0, eps < 1]


def score(key: Any, query: Any = q) -> Any:
    return Sum(query[f] * k[key, f], all_coordinates)


def weight(key: Any, query: Any = q) -> Any:
    return exp(score(key, query)) / Sum(exp(score(j, query)), all_keys)


def goes(query: Any) -> Any:
    """That the query is this one, coordinate by coordinate."""
    return each(f, 1, d, Eq(q[f], query))


LENGTH = sqrt(Sum(q[f] ** 2, all_coordinates))


def identity(size: int) -> list[list[int]]:
    """Orthonormal keys."""
    return [[int(row == column) for column in range(size)] for row in range(size)]


def _gap(scores: Any) -> dict[Any, Any]:
    """What stands for the variables of the claim on gaps."""
    return {softmax.n: n, softmax.s: scores, softmax.eps: eps}


def products(proof: Proof, key: int) -> tuple[Step, Step, Step]:
    """What orthonormal keys make of the product of one of them with any."""
    row = proof.member(ORTHONORMAL, sympy.Integer(key))
    return proof.given(ORTHONORMAL), row, proof.member(ORTHONORMAL.args[3].subs(i, key), j)


class Lengths(NamedTuple):
    """How far along k_1 the query goes: as stated for separation 1, and for separation r."""

    stated: Formula = lambda n, eps: 2 * log(n / eps)
    general: Formula = lambda n, eps, r: 2 / r**2 * log((n - 1) / eps)


def _copy_separated_picture() -> Chart:
    # The other unit keys have a cosine of ½ with key 1.
    weights = {f"{n} keys": lambda t, n=n: 1 / (1 + (n - 1) * math.exp(-t / 2)) for n in (10, 100, 1000, 100000)}
    title, lengths = "Other keys at distance 1: the weight copied", [0.5 * i for i in range(61)]
    return curves(title, "length of the query", "weight on key 1", lengths, weights)


UNIT = each(i, 1, n, Eq(Sum(k[i, f] ** 2, all_coordinates), 1))
APART = Sum((k[1, f] - k[i, f]) ** 2, all_coordinates)
COPIED = first >= 1 / (1 + eps)
_SEPARATED = [n >= 2, eps > 0, r > 0, t >= 0, UNIT, each(i, 2, n, r**2 <= APART), goes(t * k[1, f])]


def apart_from_first(distance: Fraction, turns: Sequence[Any]) -> list[list[Fraction]]:
    """Unit keys of the plane in fractions, all at least this far from the first: from there to its opposite."""
    nearest = 2 * math.asin(float(distance) / 2)
    angles = [nearest + float(turn) * (math.pi - nearest) for turn in turns]
    # By the tangent of half an angle, rounded up, sine and cosine are fractions.
    halves = [Fraction(0), *(Fraction(math.ceil(1000 * min(math.tan(angle / 2), 1000)), 1000) for angle in angles)]
    return [[(1 - half**2) / (1 + half**2), 2 * half / (1 + half**2)] for half in halves]


def _separated(lengths: Lengths) -> Statement:
    stated, general = lengths.stated(n, eps), lengths.general(n, eps, r)

    def case(e: Any, distance: Any, which: int, *turns: Any) -> dict[Any, Any]:
        known: dict[Any, Any] = {n: len(turns) + 1, d: 2, eps: decimal(e), r: decimal(distance)}
        keys = apart_from_first(known[r], turns)
        along = max(Fraction(0), decimal(value((stated, general)[which], known)) + Fraction(1, 1000))
        return {**known, k: keys, t: along, q: [along * part for part in keys[0]]}

    return Statement(
        variables=KEYS
        | EPS
        | {r: "a distance that every other key keeps from key 1", t: "how far the query goes", q: "the query"},
        given=[n >= 2, eps > 0, r > 0, t >= 0, UNIT, each(i, 2, n, r**2 <= APART), goes(t * k[1, f])],
        then={
            "stated": Implies(And(r >= 1, t >= stated), COPIED),
            "general": Implies(t >= general, COPIED),
            "length": Eq(LENGTH**2, t**2),
        },
        where={first: weight(1)},
        terms={"apart": r, "one": r >= 1, "stated": stated, "general": general, "enough": 1 / (1 + eps)},
        notes=["real arithmetic"],
        spans=Spans(EPSILON | {"r": (0.2, 1.9), "which": range(2), **dict.fromkeys(("turn₂", "turn₃"), (0, 1))}, case),
    )


@claim(
    "copy-separated",
    expected="proved",
    formal=_separated,
    plain="Unit keys keep a distance of at least {apart} from key one. A query along key one puts at least {enough} of"
    " the weight on it from the length {general} on; for {one}, from {stated} on.",
    subject=Lengths(),
    sabotage={
        "half as long": Lengths(stated=lambda n, eps: log(n / eps)),
        "blind to how many keys there are": Lengths(stated=lambda n, eps: 2 * log(1 / eps)),
        "1/r in place of 1/r²": Lengths(general=lambda n, eps, r: 2 / r * log((n - 1) / eps)),
    },
    picture=_copy_separated_picture,
    needs=("copy-gap",),
)
def copy_separated(proof: Proof, lengths: Lengths) -> None:
    some, above, far, forth, unit, apart, goes_so = map(proof.given, _SEPARATED)
    along, inside = proof.member(goes_so.formula, f), And(j >= 2, j <= n)
    same = proof.sum_same(q[f] * k[j, f], t * k[1, f] * k[j, f], all_coordinates, goes_so, along)
    own, other = proof.member(UNIT, sympy.Integer(1)), proof.member(UNIT, j)
    distance = proof.member(apart.formula, j)
    gaps = proof.have(
        Implies(inside, score(1) - score(j) >= t * r**2 / 2),
        *(same, proof.at(same, {j: sympy.Integer(1)}), unit, own, other, apart, distance, forth),
        says="two unit keys: ‖k_1 − k_j‖² = 2 − 2⟨k_1, k_j⟩",
    )
    square = proof.sum_same(q[f] ** 2, t**2 * k[1, f] ** 2, all_coordinates, goes_so, along)
    proof.conclude("length", square, unit, own, some)
    wide = each(j, 2, n, score(1) - score(j) >= log((n - 1) / eps))
    gap = _gap(score)
    enough = proof.known(softmax.copy_gap, "enough", gap)
    fewer = proof.log_monotone((n - 1) / eps, n / eps, some, above)
    for part, when in (
        ("stated", And(r >= 1, t >= lengths.stated(n, eps))),
        ("general", t >= lengths.general(n, eps, r)),
    ):
        uses = (gaps, fewer, above, forth) if part == "stated" else (gaps, far)
        reach = proof.have(Implies(And(when, inside), score(1) - score(j) >= log((n - 1) / eps)), *uses)
        proof.conclude(part, proof.every(wide, reach, when=when), enough, some, above)
    query = copy_query(torch.eye(20), target=3, eps=0.01)
    proof.shows(kept(query, "the library's query for twenty orthonormal keys"))


AT_LEAST_ONE = each(i, 2, n, APART >= 1)


def _copy_shortest_picture() -> Chart:
    lengths: dict[str, Function] = {
        "2·ln(n/ε)": lambda n: 2 * math.log(n / 0.01),
        "the shortest, orthonormal keys": lambda n: math.sqrt((n - 1) / n) * math.log((n - 1) / 0.01),
    }
    counts = [2**i for i in range(1, 21)]
    return curves("How long a query must be to copy, ε = 0.01", "keys", "length", counts, lengths, log_x=True)


def _shorter(query: Formula, size: int, e: Fraction) -> dict[Any, Any]:
    """Orthonormal keys, and a query by what it has along key 1 and along every other, for a thousandth less than ε."""
    parts = [value(part, {n: size, eps: e * Fraction(999, 1000)}) for part in query(n, eps)]
    along, against = (Fraction(round(float(part) * 10**6), 10**6) for part in parts)
    return {n: size, d: size, k: identity(size), eps: e, q: [along, *[against] * (size - 1)]}


def _half_as_long(query: Formula) -> Statement:
    return Statement(
        variables=KEYS | EPS | {q: "a query"},
        given=[*BELOW_ONE, UNIT, AT_LEAST_ONE, COPIED],
        then={"long": 2 * log(n / eps) <= 2 * LENGTH},
        where={first: weight(1)},
        terms={"stated": 2 * log(n / eps), "enough": 1 / (1 + eps)},
        notes=["real arithmetic"],
        spans=Spans(EPSILON | {"n": range(2, 9)}, lambda e, size: _shorter(query, size, decimal(e))),
    )


@claim(
    "copy-shortest",
    expected="refuted",
    formal=_half_as_long,
    plain="Of unit keys that keep a distance of at least one from key one, the query of length {stated} is about as"
    " short as a query can be that puts {enough} of the weight on key one: none is half as long.",
    # What a query has along the key it copies, and along every other.
    subject=lambda n, eps: ((n - 1) / n * log((n - 1) / eps), -log((n - 1) / eps) / n),
    sabotage={
        "as long, but along key 1 alone": lambda n, eps: (sqrt((n - 1) / n) * log((n - 1) / eps), 0 * eps),
        "half of it": lambda n, eps: ((n - 1) / n * log((n - 1) / eps) / 2, -log((n - 1) / eps) / n / 2),
        "the stated query itself": lambda n, eps: (2 * log(n / eps), 0 * eps),
    },
    picture=_copy_shortest_picture,
)
def copy_shortest(against: Refutation, query: Formula) -> None:
    for count in (2, 10):
        case = _shorter(query, count, Fraction(1, 100))
        against.case(case, f"{count} orthonormal keys: a query less than half as long copies as well")


def _shortest(least: Formula) -> Statement:
    def case(e: Any, scale: Any, *more: Any) -> dict[Any, Any]:
        size, e = len(more), decimal(e)
        shortest = [float(scale) * math.log((size - 1) / e) * (float(at == 0) - 1 / size) for at in range(size)]
        query = [decimal(part + float(extra)) for part, extra in zip(shortest, more, strict=True)]
        return {n: size, d: size, k: identity(size), eps: e, q: query}

    best = log((n - 1) / eps) * (k[1, f] - Sum(k[g, f], (g, 1, n)) / n)
    return Statement(
        variables=KEYS | EPS | {q: "a query"},
        given=[*BELOW_ONE, ORTHONORMAL],
        then={
            "least": Implies(COPIED, least(n, eps) <= LENGTH),
            "reached": Implies(goes(best), And(COPIED, Eq(LENGTH, least(n, eps)))),
        },
        where={first: weight(1)},
        terms={"least": least(n, eps), "enough": 1 / (1 + eps), "best": best},
        notes=["real arithmetic"],
        spans=Spans(EPSILON | {"scale": (0.9, 1.2)} | dict.fromkeys(("q₁", "q₂", "q₃"), (-1, 1)), case),
    )


@claim(
    "copy-least",
    expected="proved",
    formal=_shortest,
    plain="Among orthonormal keys, the shortest query that puts {enough} of the weight on key one is {least} long. Its"
    " coordinates are {best}.",
    subject=lambda n, eps: sqrt((n - 1) / n) * log((n - 1) / eps),
    sabotage={
        "as if along key 1 alone": lambda n, eps: log((n - 1) / eps),
        "one key more": lambda n, eps: sqrt((n - 1) / n) * log(n / eps),
    },
    picture=_copy_shortest_picture,
    needs=("copy-gap",),
)
def copy_least(proof: Proof, least: Formula) -> None:
    some, above, below, ortho = map(proof.given, [*BELOW_ONE, ORTHONORMAL])
    stretch, sum_of = log((n - 1) / eps), Sum(k[g, f], (g, 1, n))
    # What the sum of all keys has along each of them, along itself, and along the query.
    row, unit = proof.member(ORTHONORMAL, g), proof.member(ORTHONORMAL.args[3].subs(i, g), j)
    inside = And(j >= 1, j <= n)
    pair = Sum(k[g, f] * k[j, f], all_coordinates)
    products_ = proof.sum_same(pair, KroneckerDelta(g, j), (g, 1, n), ortho, row, unit, when=inside)
    swapped = proof.sum_swap(k[g, f] * k[j, f], (g, 1, n), all_coordinates)
    only = proof.sum_delta(sympy.Integer(1), (g, 1, n), j)
    on_key = Sum(sum_of * k[j, f], all_coordinates)
    one = proof.have(Implies(inside, Eq(on_key, 1)), swapped, products_, only)
    ones = proof.sum_same(on_key, sympy.Integer(1), all_keys, one)
    itself = proof.have(
        Eq(Sum(sum_of**2, all_coordinates), n), proof.sum_swap(sum_of * k[j, f], all_keys, all_coordinates), ones, some
    )
    of_first = proof.at(one, {j: sympy.Integer(1)})
    own = proof.at(proof.at(unit, {g: sympy.Integer(1)}), {j: sympy.Integer(1)})
    row_1 = proof.at(row, {g: sympy.Integer(1)})
    away = k[1, f] - sum_of / n
    length_ = proof.have(Eq(Sum(away**2, all_coordinates), 1 - 1 / n), itself, of_first, own, row_1, ortho, some)
    # The others' terms are above their tangents at −L, so their mean gap is L or more.
    exactly = proof.known(softmax.copy_gap, "exactly", _gap(score))
    tangent = proof.exp_tangent(score(j) - score(1) + stretch, some, above)
    tangents = proof.sum_most(
        1 + score(j) - score(1) + stretch, (n - 1) / eps * exp(score(j) - score(1)), others, tangent
    )
    along = proof.sum_swap(q[f] * k[g, f], (g, 1, n), all_coordinates)
    all_scores = proof.sum_first(score(j), all_keys)
    mean = proof.have(
        Implies(COPIED, n * Sum(q[f] * away, all_coordinates) >= (n - 1) * stretch),
        *(tangents, exactly, along, all_scores, some, above),
        says="terms that sum to at most ε have a mean gap of at least ln((n − 1)/ε)",
    )
    square = proof.cauchy_schwarz(q[f], away, all_coordinates)
    up = proof.log_monotone(sympy.Integer(1), (n - 1) / eps, some, above)
    forth = proof.have(stretch >= 0, up, some, above, below)
    proof.conclude("least", mean, square, length_, some)
    # The best query has the same gap to every other key.
    best = goes(proof.statement.terms["best"])
    along_it = proof.member(best, f)
    term = proof.statement.terms["best"]
    scores = proof.sum_same(q[f] * k[j, f], term * k[j, f], all_coordinates, along_it, when=best)
    by_rows = products(proof, 1)
    gaps = proof.have(
        Implies(And(best, j >= 2, j <= n), score(1) - score(j) >= stretch),
        *(scores, proof.at(scores, {j: sympy.Integer(1)}), one, of_first, *by_rows, own),
    )
    wide = each(j, 2, n, score(1) - score(j) >= stretch)
    enough = proof.known(softmax.copy_gap, "enough", _gap(score))
    copied = proof.have(Implies(best, COPIED), proof.every(wide, gaps, when=best), enough, some, above)
    squares = proof.sum_same(q[f] ** 2, term**2, all_coordinates, along_it, when=best)
    norm = proof.have(Implies(best, Eq(Sum(q[f] ** 2, all_coordinates), stretch**2 * (1 - 1 / n))), squares, length_)
    proof.conclude("reached", copied, norm, forth, some)


class Hull(NamedTuple):
    """A key between two others at −1 and 1, and whether shares of a combination may not be negative."""

    target: int
    convex: bool = True


def combined(by: Any, hull: Hull) -> Any:
    """That the first key is a combination of the others, with these shares."""
    shares = [each(j, 2, n, by[j] >= 0)] * hull.convex
    return And(*shares, Eq(Sum(by[j], others), 1), each(f, 1, d, Eq(Sum(by[j] * k[j, f], others), k[1, f])))


def _copy_possible_picture() -> Chart:
    targets = {"outside": 1.5, "a corner taken twice": 1.0, "inside": 0.5, "the middle": 0.0}
    weights = {
        f"k_1 = {k:g} ({where})": lambda t, k=k: 1 / (1 + math.exp(t * (1 - k)) + math.exp(-t * (1 + k)))
        for where, k in targets.items()
    }
    title, lengths = "Other keys at −1 and 1: what a longer query copies", [0.25 * i for i in range(81)]
    return curves(title, "length of the query", "weight on key 1", lengths, weights)


COPYING = Exists(y, weight(1, y) >= 1 / (1 + eps))
_ON_A_LINE = EPSILON | dict.fromkeys(("k₁", "k₂", "k₃"), (-3, 3)) | {"λ": (-1, 1), "q": (-9, 9)}


def _on_a_line(hull: Hull, e: Any, one: Any, two: Any, three: Any, part: Any, query: Any) -> dict[Any, Any]:
    """Three keys on a line, and a combination of the last two."""
    e, one, two, three, part, query = map(decimal, (e, one, two, three, part, query))
    return {n: 3, d: 1, eps: e, k: [[one], [two], [three]], q: [query], share: [Fraction(0), part, 1 - part]}


def _uncopied(case: Any) -> Any:
    """What the best of all queries lacks, three keys being on a line."""
    (target,), *rest = ([ball(part) for part in key] for key in case[k])
    (one,), (two,) = rest
    before, after = target - one.min(two), one.max(two) - target
    if not (before > 0 and after > 0):
        # Outside the others, or level with one: a longer query always gains.
        return before.min(after)
    # The weight 1/(1 + e^(after·y) + e^(−before·y)) is largest where its slope is zero.
    best = (before / after).log() / (before + after)
    return 1 / (1 + ball(case[eps])) - 1 / (1 + (after * best).exp() + (-before * best).exp())


def _any_copied(hull: Hull) -> Statement:
    return Statement(
        variables=KEYS | EPS,
        given=BELOW_ONE,
        then={"copied": COPYING},
        terms={"enough": 1 / (1 + eps)},
        notes=["real arithmetic"],
        spans=Spans(_ON_A_LINE, partial(_on_a_line, hull), (), _uncopied),
    )


def _hull(hull: Hull) -> Statement:
    def case(*numbers: Any) -> dict[Any, Any]:
        found = _on_a_line(hull, *numbers)
        (_,), (one,), (two,) = found[k]
        part = abs(found[share][1]) if hull.convex else found[share][1]
        return found | {share: [Fraction(0), part, 1 - part], k: [[part * one + (1 - part) * two], [one], [two]]}

    half = Rational(1, 2)
    return Statement(
        variables=KEYS | EPS | {q: "a query", share: "shares of the others in a combination"},
        given=BELOW_ONE,
        then={
            "exactly": Equivalent(COPYING, Not(Exists(other_share, combined(other_share, hull)))),
            "half": Implies(combined(share, hull), weight(1) <= half),
        },
        terms={"enough": 1 / (1 + eps), "half": half},
        notes=["real arithmetic"],
        spans=Spans(_ON_A_LINE, case),
    )


@claim(
    "copy-possible",
    expected="corrected",
    formal=_any_copied,
    plain="Any value can be copied: some query, long enough, puts as much of the weight on its key as is asked for.",
    amendment=_hull,
    amended_plain="Some query puts at least {enough} of the weight on a key exactly when the key is no convex"
    " combination of the others: when it is outside their hull. Inside, its weight never exceeds {half}.",
    subject=Hull(0),
    sabotage={"a target outside the hull": Hull(2), "the affine hull in place of the convex": Hull(0, convex=False)},
    picture=_copy_possible_picture,
    needs=("copy-gap",),
)
def copy_possible(against: Refutation, proof: Proof, hull: Hull) -> None:
    half = Fraction(1, 2)
    middle = {n: 3, d: 1, k: [[hull.target], [-1], [1]], eps: half}
    denial = against.impossible(middle, "copied", "keys at −1 and 1, and between them the key to be copied")
    exists = instance(COPYING, middle)
    # As e^y + e^−y ≥ 2, its weight is at most ⅓, whatever the query is.
    denial.conclude("copied", denial.whichever(exists, sympy.false))

    some, above, below = map(proof.given, BELOW_ONE)
    at_most = _at_most_half(proof, hull, share, q)
    proof.conclude("half", at_most)
    inside = Exists(other_share, combined(other_share, hull))
    most = proof.whichever(inside, weight(1, y) <= Rational(1, 2), _at_most_half(proof, hull, other_share, y))
    out = proof.have(Implies(COPYING.args[1], Not(inside)), most, above, below)
    outside = proof.whichever(COPYING, Not(inside), out)
    # A query that parts the key from all others by 1 parts it by any gap, once it is long enough.
    parted = proof.inside_or_apart(k[1, f], k[j, f], others, all_coordinates, other_share, y)
    apart = Exists(y, each(j, 2, n, score(1, y) - score(j, y) >= 1))
    stretch = log((n - 1) / eps)
    up = proof.log_monotone(sympy.Integer(1), (n - 1) / eps, some, above)
    gap = proof.have(
        Implies(And(apart.args[1], j >= 2, j <= n), stretch * (score(1, y) - score(j, y)) >= stretch),
        *(proof.member(apart.args[1], j), up, above, below),
    )
    scaled = _gap(lambda j: stretch * score(j, y))
    wide = proof.every(each(j, 2, n, stretch * score(1, y) - stretch * score(j, y) >= stretch), gap, when=apart.args[1])
    enough = proof.known(softmax.copy_gap, "enough", scaled)
    copies = proof.some(COPYING, lambda x: stretch * y[x], wide, enough, some, above, when=apart.args[1])
    proof.conclude("exactly", outside, parted, proof.whichever(apart, COPYING, copies))
    keys = [(0, 0), (1, 0), (-2, 0), (0, 1)]
    try:
        copy_query(torch.tensor(keys, dtype=torch.float64), target=0, eps=0.01)
    except InsideHull as refusal:
        shares = refusal.weights
    else:
        raise Unproved("the library made a query for a key inside the hull of the others")
    point = tuple(sum(share * key[axis] for share, key in zip(shares, keys, strict=True)) for axis in (0, 1))
    exact = point == keys[0] and shares[0] == 0 and sum(shares) == 1 and min(shares) >= 0
    says = "the library refuses a key inside the hull, with the combination: exact fractions"
    proof.shows(rational(exact, says, combination=[str(share) for share in shares]))


def _at_most_half(proof: Proof, hull: Hull, by: Any, query: Any) -> Step:
    """Inside the hull, no query gives more than half."""
    inside, ahead = combined(by, hull), score(j, query) - score(1, query)
    swapped = proof.sum_swap(by[j] * query[f] * k[j, f], all_coordinates, others)
    mixed = each(f, 1, d, Eq(Sum(by[j] * k[j, f], others), k[1, f]))
    here = proof.sum_same(
        query[f] * Sum(by[j] * k[j, f], others),
        query[f] * k[1, f],
        all_coordinates,
        proof.member(mixed, f),
        when=inside,
    )
    mean = proof.have(Implies(inside, Eq(Sum(by[j] * score(j, query), others), score(1, query))), swapped, here)
    sign = proof.member(each(j, 2, n, by[j] >= 0), j)
    not_more = proof.sum_member(by[j], others, i, sign, when=inside)
    tangent = proof.exp_tangent(ahead)
    among = And(inside, j >= 2, j <= n)
    above = proof.have(
        Implies(among, by[j] * (1 + ahead) <= exp(ahead)),
        sign,
        proof.at(not_more, {i: j}),
        tangent,
        says="λ ≤ 1, and e^u is above its tangent 1 + u",
    )
    total_ = proof.sum_most(by[j] * (1 + ahead), exp(ahead), others, above, when=inside)
    sums = proof.sum_first(exp(score(j, query)), all_keys)
    return proof.have(Implies(inside, weight(1, query) <= Rational(1, 2)), total_, mean, sums, proof.given(n >= 2))


def _average_picture() -> Chart:
    weights = {f"{n} keys": lambda t, n=n: t / (2 * t + n - 2) for n in (3, 100, 10000)}
    title, ts = "Averaging two of n orthonormal keys", [10 ** (i / 10) for i in range(71)]
    return curves(title, "t, for q = ln(t)(k_a + k_b)", "each weight", ts, weights, log_x=True)


def _both(query: Formula) -> Any:
    on_first, on_second = query(n, eps)
    return goes(on_first * k[1, f] + on_second * k[2, f])


def _shared(query: Formula) -> Statement:
    def case(size: int, e: Any) -> dict[Any, Any]:
        parts = [value(part, {n: size, eps: e}) for part in query(n, eps)]
        return {n: size, d: size, k: identity(size), eps: e, q: [*parts, *[arb(0)] * (size - 2)]}

    return Statement(
        variables=KEYS | EPS | {q: "the query"},
        given=[*BELOW_ONE, ORTHONORMAL, _both(query)],
        then={
            "even": Eq(first, second),
            "share": Eq(first, n / eps / (2 * n / eps + n - 2)),
            "enough": first >= 1 / (2 + eps),
            "length": Eq(LENGTH, sqrt(2) * log(n / eps)),
            "short": 2 * sqrt(2) * log(n / eps) >= LENGTH,
        },
        where={first: weight(1), second: weight(2)},
        terms={"stretch": log(n / eps), "enough": 1 / (2 + eps), "short": 2 * sqrt(2) * log(n / eps)},
        notes=["real arithmetic"],
        spans=Spans({"n": range(2, 7), "ε": (0.01, 0.99)}, case, (_both(query),)),
    )


@claim(
    "average-two",
    expected="proved",
    formal=_shared,
    plain="Among orthonormal keys, {stretch} times the sum of two of them shares the weight evenly between the two, at"
    " least {enough} each, and is no longer than {short}.",
    subject=lambda n, eps: (log(n / eps), log(n / eps)),
    sabotage={
        "blind to how many keys there are": lambda n, eps: (log(1 / eps), log(1 / eps)),
        "more of one key": lambda n, eps: (log(n / eps), 2 * log(n / eps)),
    },
    picture=_average_picture,
)
def average_two(proof: Proof, query: Formula) -> None:
    some, above, below, _, goes_so = map(proof.given, [*BELOW_ONE, ORTHONORMAL, _both(query)])
    along, term = proof.member(goes_so.formula, f), _both(query).args[3].rhs
    inside = And(j >= 1, j <= n)
    same = proof.sum_same(q[f] * k[j, f], term * k[j, f], all_coordinates, goes_so, along)
    on_keys = KroneckerDelta(1, j) + KroneckerDelta(2, j)
    rows = dict.fromkeys([*products(proof, 1), *products(proof, 2)])
    scores = proof.have(Implies(inside, Eq(score(j), log(n / eps) * on_keys)), same, *rows, some)
    of_one = [proof.at(scores, {j: key}) for key in (1, 2)]
    raised = [proof.same_value(exp, score(key), log(n / eps)) for key in (1, 2)]
    nothing = proof.same_value(exp, score(j), sympy.Integer(0))
    none = proof.have(Implies(And(j >= 3, j <= n), Eq(exp(score(j)), 1)), scores, nothing)
    ones = proof.sum_same(exp(score(j)), sympy.Integer(1), (j, 3, n), none)
    sums = [proof.sum_first(exp(score(j)), (j, low, n)) for low in (1, 2)]
    whole_sum = Eq(Sum(exp(score(j)), all_keys), 2 * n / eps + n - 2)
    total = proof.have(
        And(whole_sum, Eq(exp(score(1)), n / eps), Eq(exp(score(2)), n / eps)), *of_one, *raised, ones, *sums, some
    )
    proof.conclude("even", total)
    share = proof.conclude("share", total)
    proof.conclude("enough", share, some, above)
    squares = proof.sum_same(q[f] ** 2, term * q[f], all_coordinates, goes_so, along)
    log_up = proof.have(n / eps > 1, some, above, below)
    up = proof.log_monotone(sympy.Integer(1), n / eps, some, above)
    norm = proof.conclude("length", squares, *of_one, some, up, log_up)
    proof.conclude("short", norm, up, log_up)
    average = average_query(torch.eye(50), subset=(0, 1), eps=0.01)
    proof.shows(kept(average, "the library's query for two of fifty keys", norm=average.norm))


def _bisected(spare: Any) -> Statement:
    def case(e: Any, both: Any, more: Any) -> dict[Any, Any]:
        both = decimal(both)
        return {n: 3, d: 3, k: identity(3), eps: decimal(e), q: [both, both, decimal(more) * bool(spare)]}

    return Statement(
        variables=KEYS | EPS | {q: "a query"},
        given=[n >= 2, eps > 0, ORTHONORMAL, Eq(score(1), score(2)), weight(1) >= 1 / (2 + eps)],
        then={"bisects": each(g, 1, d, Eq(q[g], score(1) * (k[1, g] + k[2, g])))},
        terms={"enough": 1 / (2 + eps), "bisector": score(1) * (k[1, g] + k[2, g])},
        notes=["real arithmetic"],
        spans=Spans(EPSILON | {"q₁": (0, 9), "q₃": (-3, 0)}, case),
    )


@claim(
    "average-bisector",
    expected="refuted",
    formal=_bisected,
    plain="A query that shares its weight evenly between two of some orthonormal keys, at least {enough} each, must be"
    " on their bisector: its coordinates are {bisector}.",
    # What the query has along a third key.
    subject=-1,
    sabotage={"nothing along the others": 0},
    picture=_average_picture,
)
def average_bisector(against: Refutation, spare: int) -> None:
    case = {n: 3, d: 3, k: identity(3), eps: Fraction(1, 2), q: [5, 5, spare]}
    against.case(case, "three keys, q = (5, 5, −1): pushing the third down is as good as pulling two")


def _nearest(_: Any) -> Statement:
    def case(*numbers: Any) -> dict[Any, Any]:
        x, y, *query = map(decimal, numbers)
        keys = sorted([[x, y], [y, -x / 2]], key=lambda key: sum((a - b) ** 2 for a, b in zip(key, query, strict=True)))
        return {n: 2, d: 2, k: keys, q: query}

    def distance(key: Any) -> Any:
        return Sum((q[f] - k[key, f]) ** 2, all_coordinates)

    return Statement(
        variables=KEYS | {q: "the query"},
        given=[n >= 1, each(i, 1, n, distance(1) <= distance(i))],
        then={"most": each(i, 1, n, weight(1) >= weight(i))},
        terms={"distance": distance(1), "weight": weight(1)},
        notes=["real arithmetic"],
        spans=Spans(dict.fromkeys(("x", "y", "q₁", "q₂"), (-3, 3)), case),
    )


def _nearest_picture() -> Chart:
    weights = {
        "the nearest key, (1, 0)": lambda far: 1 / (1 + math.exp(far - 1)),
        "the longer key, (L, 0)": lambda far: 1 / (1 + math.exp(1 - far)),
    }
    title, lengths = "The query (1, 0) beside the keys (1, 0) and (L, 0)", [1 + i / 10 for i in range(91)]
    return curves(title, "L, how long the other key is", "weight", lengths, weights)


@claim(
    "nearest-key",
    expected="refuted",
    formal=_nearest,
    plain="The key nearest to the query, at the squared distance {distance}, gets the largest weight, {weight}.",
    # The other key, beside (1, 0), which is the query.
    subject=(10, 0),
    sabotage={"keys of one length": (0, 1), "a shorter key": (Fraction(1, 2), 0)},
    picture=_nearest_picture,
)
def nearest_key(against: Refutation, further: Any) -> None:
    says = "q = (1, 0) is key 1 itself, and (10, 0) takes all but 0.00012 of the weight"
    against.case({n: 2, d: 2, k: [[1, 0], list(further)], q: [1, 0]}, says)


def _mixture_picture() -> Table:
    rows = []
    for t in (5, 10, 15, 20):
        whole = math.exp(t) + 1000 - 3
        rows.append((t, *(round(w * math.exp(t) / whole, 6) for w in (0.5, 0.3, 0.2)), (1000 - 3) / whole))
    title = "Weights reached on three of 1000 orthonormal keys, asked for ½, 0.3, 0.2"
    return Table(title, ("t", "first", "second", "third", "distance from the target"), rows)


def _mixes(on: Formula) -> Any:
    return goes(Sum(on(t, logs[g]) * k[g, f], (g, 1, m)))


TARGETS = Eq(Sum(exp(logs[i]), (i, 1, m)), 1)
_SUBSET = [m >= 1, n >= m, ORTHONORMAL, TARGETS]


def _mixed(on: Formula) -> Statement:
    def case(more: int, e: Any, size: Any, *parts: Any) -> dict[Any, Any]:
        targets = [(part / total(parts)).log() for part in parts]
        count = len(parts) + more
        along = [value(on(t, c), {t: size, c: target}) for target in targets]
        return {
            **{n: count, d: count, m: len(parts), k: identity(count), logs: targets, t: size, eps: e},
            q: [*along, *[arb(0)] * more],
        }

    target = exp(logs[i])
    return Statement(
        variables=KEYS
        | {
            m: "how many keys are to be mixed, which are listed first",
            logs: "the logarithms of the targets, which are positive",
            t: "how far the query goes",
            q: "the query",
            eps: "how near the weights are to come",
        },
        given=[*_SUBSET, _mixes(on)],
        then={
            "weights": each(i, 1, m, Eq(weight(i), target * exp(t) / (exp(t) + n - m))),
            "near": Implies(eps * exp(t) >= n - m, each(i, 1, m, Abs(weight(i) - target) <= eps)),
            "all": Implies(Eq(n, m), each(i, 1, m, Eq(weight(i), target))),
        },
        terms={"target": target, "query": q[f], "eps": eps, "far": eps * exp(t) >= n - m},
        notes=["real arithmetic"],
        spans=Spans(
            {"n−m": range(4), "ε": (0.01, 0.9), "t": (-5, 10), **dict.fromkeys(("w₁", "w₂", "w₃"), (0.01, 1))},
            case,
            (TARGETS, _mixes(on)),
        ),
    )


@claim(
    "mixture-any",
    expected="proved",
    formal=_mixed,
    plain="Any positive targets {target} that sum to one are reached on a subset of orthonormal keys, within any {eps}"
    " once {far}; and exactly where the subset is all of the keys.",
    subject=lambda t, log_target: t + log_target,
    sabotage={
        "targets in place of their logarithms": lambda t, log_target: t + exp(log_target),
        "a product in place of the sum": lambda t, log_target: t * log_target,
    },
    picture=_mixture_picture,
)
def mixture_any(proof: Proof, on: Formula) -> None:
    some, most, ortho, targets, goes_so = map(proof.given, [*_SUBSET, _mixes(on)])
    along = proof.member(goes_so.formula, f)
    own = Sum(on(t, logs[g]) * k[g, f], (g, 1, m))
    same = proof.sum_same(q[f] * k[j, f], own * k[j, f], all_coordinates, goes_so, along)
    swapped = proof.sum_swap(on(t, logs[g]) * k[g, f] * k[j, f], (g, 1, m), all_coordinates)
    row = proof.member(ORTHONORMAL, g)
    unit = proof.member(ORTHONORMAL.args[3].subs(i, g), j)
    inside = And(j >= 1, j <= n)
    pair = Sum(k[g, f] * k[j, f], all_coordinates)
    delta = proof.sum_same(
        on(t, logs[g]) * pair, on(t, logs[g]) * KroneckerDelta(g, j), (g, 1, m), ortho, row, unit, most, when=inside
    )
    only = proof.sum_delta(on(t, logs[g]), (g, 1, m), j)
    scores = proof.have(Implies(And(j >= 1, j <= m), Eq(score(j), t + logs[j])), same, swapped, delta, only, most)
    away = proof.sum_same(on(t, logs[g]) * KroneckerDelta(g, j), sympy.Integer(0), (g, 1, m), when=j > m)
    none = proof.have(Implies(And(j > m, j <= n), Eq(score(j), 0)), same, swapped, delta, away, some)
    raised = proof.same_value(exp, score(j), t + logs[j])
    part = proof.have(Implies(And(j >= 1, j <= m), Eq(exp(score(j)), exp(t) * exp(logs[j]))), scores, raised)
    inner = proof.sum_same(exp(score(j)), exp(logs[j]), (j, 1, m), part, times=exp(t))
    still = proof.same_value(exp, score(j), sympy.Integer(0))
    one = proof.have(Implies(And(j > m, j <= n), Eq(exp(score(j)), 1)), none, still)
    outer = proof.sum_same(exp(score(j)), sympy.Integer(1), (j, m + 1, n), one)
    split = proof.sum_split(exp(score(j)), all_keys, m)
    total_ = proof.have(Eq(Sum(exp(score(j)), all_keys), exp(t) + n - m), inner, outer, split, targets, some, most)
    mine = proof.at(part, {j: i})
    listed = And(i >= 1, i <= m)
    found = Eq(weight(i), exp(logs[i]) * exp(t) / (exp(t) + n - m))
    shown = proof.have(Implies(listed, found), mine, total_)
    proof.conclude("weights", proof.every(each(i, 1, m, found), shown))
    small = proof.sum_member(exp(logs[g]), (g, 1, m), i)
    near = Abs(weight(i) - exp(logs[i])) <= eps
    close = proof.have(Implies(And(listed, eps * exp(t) >= n - m), near), shown, small, targets, most)
    proof.conclude("near", proof.every(each(i, 1, m, near), close, when=eps * exp(t) >= n - m))
    exact = proof.have(Implies(And(listed, Eq(n, m)), Eq(weight(i), exp(logs[i]))), shown)
    proof.conclude("all", proof.every(each(i, 1, m, Eq(weight(i), exp(logs[i]))), exact, when=Eq(n, m)))
    query = mixture_query(torch.eye(50), [0.5, 0.3, 0.2] + [0.0] * 47, eps=0.01)
    proof.shows(kept(query, "the library's query for ½, 0.3, 0.2 on three of fifty keys", norm=query.norm))


ALL_TARGETS = Sum(exp(logs[j]), all_keys)
GIVEN = each(i, 1, n, Eq(weight(i), exp(logs[i]) / ALL_TARGETS))


def _in_range(taken: Formula) -> Any:
    return each(i, 1, n, Eq(score(i) - taken(logs[i]), score(1) - taken(logs[1])))


def _ranged(taken: Formula) -> Statement:
    def case(more: Any, *targets: Any) -> dict[Any, Any]:
        aims = list(map(decimal, targets))
        query = [Fraction(taken(aim)) + decimal(more) for aim in aims]
        return {n: len(aims), d: len(aims), k: identity(len(aims)), logs: aims, q: query}

    return Statement(
        variables=KEYS | {logs: "the logarithms of the targets, or of what they are in proportion to", q: "the query"},
        given=[n >= 1],
        then={"exactly": Equivalent(GIVEN, _in_range(taken))},
        terms={"target": exp(logs[i]) / ALL_TARGETS, "range": _in_range(taken)},
        notes=["real arithmetic", "some query does so exactly when the logarithms are scores and a constant"],
        spans=Spans(dict.fromkeys(("c", "ℓ₁", "ℓ₂", "ℓ₃"), (-2, 2)), case),
    )


@claim(
    "mixture-range",
    expected="proved",
    formal=_ranged,
    plain="Whatever the keys are, a query gives each of them its target {target} exactly when its scores are the"
    " logarithms, but for one constant: {range}.",
    subject=lambda log_target: log_target,
    sabotage={
        "twice the logarithms": lambda log_target: 2 * log_target,
        "no targets": lambda log_target: 0 * log_target,
    },
    picture=_mixture_picture,
)
def mixture_range(proof: Proof, taken: Formula) -> None:
    some, aimed, inside = proof.given(n >= 1), _in_range(taken), And(i >= 1, i <= n)
    apart, total_ = score(1) - logs[1], Sum(exp(score(j)), all_keys)
    sums = [
        proof.have(whole > 0, proof.sum_positive(term, all_keys), some)
        for whole, term in ((total_, exp(score(j))), (ALL_TARGETS, exp(logs[j])))
    ]
    # One constant more in every score is one factor more in every exponential.
    raised = proof.same_value(exp, score(i), logs[i] + apart)
    own = proof.have(
        Implies(And(aimed, inside), Eq(exp(score(i)), exp(apart) * exp(logs[i]))), proof.member(aimed, i), raised
    )
    whole_sum = proof.sum_same(exp(score(i)), exp(logs[i]), (i, 1, n), own, times=exp(apart), when=aimed)
    back = proof.have(Implies(And(aimed, inside), Eq(weight(i), exp(logs[i]) / ALL_TARGETS)), own, whole_sum, sums[1])
    backwards = proof.every(GIVEN, back, when=aimed)
    # And weights in proportion to the targets come from scores that differ from the logarithms as the sums do.
    rise = log(total_) - log(ALL_TARGETS)
    up, down = (proof.exp_monotone(*pair, *sums) for pair in ((score(i), logs[i] + rise), (logs[i] + rise, score(i))))
    one = proof.have(
        Implies(And(GIVEN, inside), Eq(score(i), logs[i] + rise)), proof.member(GIVEN, i), up, down, sums[0]
    )
    first_ = proof.at(one, {i: sympy.Integer(1)})
    forth = proof.have(Implies(And(GIVEN, inside), Eq(score(i) - logs[i], apart)), one, first_)
    proof.conclude("exactly", proof.every(aimed, forth, when=GIVEN), backwards)
    wanted = [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]
    try:
        mixture_query(torch.tensor([[0.0], [1.0], [2.0]]), [float(weight) for weight in wanted], eps=0.01)
    except OutOfReach as refusal:
        combination = refusal.combination
    else:
        raise Unproved("the library made a query for weights that no query gives")
    holds = sum(combination) == 0 and sum(c * key for key, c in enumerate(combination)) == 0 and any(combination)
    says = "keys 0, 1, 2 on a line: the library refuses ¼, ½, ¼, with a combination of the keys that vanishes"
    proof.shows(rational(holds, says, combination=[str(c) for c in combination]))
