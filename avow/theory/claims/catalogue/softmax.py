r"""What softmax gives: a distribution, its extremes, when one weight takes all, and what masks must be.

Scores :math:`s_1 \dots s_n`, weights :math:`\alpha_i = e^{s_i} / \sum_j e^{s_j}`. Sums over any number of keys are
built one key at a time: what holds of a sum, and of that sum with one more term, holds of them all.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from sympy import Abs, And, Eq, Equivalent, Implies, KroneckerDelta, Ne, Rational, Sum, Symbol, exp, log

from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.stored import float16, float32

claim = claims_on("softmax")
eps, half, first_weight, mask = real("varepsilon h alpha_1 M")


def _categorical_picture() -> Chart:
    scores, numbers = torch.linspace(-3, 3, 9, dtype=torch.float64), list(range(1, 10))
    weights = {f"scores times {loud:g}": torch.softmax(loud * scores, -1).tolist() for loud in (0.25, 1.0, 4.0)}
    series = {name: (numbers, heights) for name, heights in weights.items()}
    return Chart("Nine evenly spaced scores, and louder", "key", "weight", series, marks="bars")


i, j, k, n = whole("i j k n")
r, s = sequence("r s")
weight = Symbol("alpha_i", real=True)
every_score, all_terms = (j, 1, n), Sum(exp(s[j]), (j, 1, n))


def _distribution(of: Formula) -> Statement:
    return Statement(
        variables={n: "the number of keys", s: "the scores"},
        given=[n >= 1],
        then={"positive": each(i, 1, n, weight > 0), "sum": Eq(Sum(weight, (i, 1, n)), 1)},
        where={weight: of(exp(s[i]), all_terms)},
        notes=["real arithmetic"],
        spans={n: range(4, 5), s: (-8, 8, 4)},
    )


@claim(
    "softmax-categorical",
    expected="proved",
    formal=_distribution,
    plain="Attention weights are a categorical distribution: all positive, and they sum to one.",
    subject=lambda own, total: own / total,
    sabotage={
        "one more in the denominator": lambda own, total: own / (1 + total),
        "squares of the weights": lambda own, total: (own / total) ** 2,
        "one taken from each exponential": lambda own, total: (own - 1) / total,
    },
    picture=_categorical_picture,
)
def softmax_categorical(proof: Proof, _: Formula) -> None:
    some = proof.given(n >= 1)
    total = proof.sum_positive(exp(s[j]), every_score)
    above = proof.have(weight > 0, some, total, says="a quotient of positive numbers")
    proof.conclude("positive", proof.every(each(i, 1, n, weight > 0), above))
    proof.conclude("sum", some, total, says="over one denominator, the weights add as their exponentials do")


class Safe(NamedTuple):
    """A weight, of its exponential and the sum of all, and what is subtracted from every score, given the largest."""

    weight: Formula = lambda own, total: own / total
    shift: Formula = lambda top: top


_LARGEST = [n >= 1, k >= 1, k <= n, each(j, 1, n, s[j] <= s[k])]


def _bounds(safe: Safe) -> Statement:
    def case(size: int, *scores: Any) -> dict[Any, Any]:
        drawn = list(map(decimal, scores[:size]))
        return {n: size, s: drawn, k: drawn.index(max(drawn)) + 1}

    shifted = Sum(exp(s[j] - safe.shift(s[k])), every_score)
    return Statement(
        variables={n: "the number of keys", s: "the scores", k: "a key with the largest score"},
        given=_LARGEST,
        then={
            "positive": each(i, 1, n, weight > 0),
            "below one": Implies(n >= 2, each(i, 1, n, weight < 1)),
            "one": Implies(Eq(n, 1), Eq(safe.weight(exp(s[1]), all_terms), 1)),
            "denominator": all_terms > 0,
            "shifted": And(shifted >= 1, shifted <= n),
        },
        where={weight: safe.weight(exp(s[i]), all_terms)},
        terms={"few": n >= 2, "alone": Eq(n, 1), "all": all_terms, "shifted": shifted},
        notes=["real arithmetic"],
        spans=Spans({"n": range(1, 4), **dict.fromkeys(("s₁", "s₂", "s₃"), (-8, 8))}, case),
    )


@claim(
    "softmax-bounds",
    expected="proved",
    formal=_bounds,
    plain="No weight is infinite, none is exactly nought, and the denominator {all} never is. For {few}, all weights"
    " lie strictly between nought and one; one key alone has exactly one. With the largest score subtracted, the"
    " denominator {shifted} lies between one and the number of keys.",
    subject=Safe(),
    sabotage={
        "one more in the denominator": Safe(weight=lambda own, total: own / (1 + total)),
        "one more than the maximum subtracted": Safe(shift=lambda top: top + 1),
        "half the maximum subtracted": Safe(shift=lambda top: top / 2),
    },
    picture=_categorical_picture,
)
def softmax_bounds(proof: Proof, safe: Safe) -> None:
    some, one, last, largest = map(proof.given, _LARGEST)
    own, inside = safe.weight(exp(s[i]), all_terms), And(i >= 1, i <= n)
    total = proof.sum_positive(exp(s[j]), every_score)
    above = proof.have(Implies(inside, own > 0), total)
    proof.conclude("positive", proof.every(each(i, 1, n, own > 0), above))
    proof.conclude("denominator", total, some)
    # What all others have is more than nothing: key 1 is another, or key 2 is.
    rest = exp(s[j]) * (1 - KroneckerDelta(j, i))
    only = proof.sum_delta(exp(s[j]), every_score, i)
    others_ = [proof.sum_member(rest, every_score, key) for key in (1, 2)]
    less = proof.have(Implies(And(inside, n >= 2), own < 1), only, *others_)
    proof.conclude("below one", proof.every(each(i, 1, n, own < 1), less, when=n >= 2))
    alone = proof.sum_first(exp(s[j]), every_score), proof.sum_empty(exp(s[j]), (j, 2, n))
    proof.conclude("one", *alone)
    shifted = exp(s[j] - safe.shift(s[k]))
    gap = proof.exp_monotone(s[j] - safe.shift(s[k]), 0)
    small = proof.have(Implies(And(j >= 1, j <= n), shifted <= 1), gap, proof.member(_LARGEST[3], j), largest)
    most = proof.sum_most(shifted, 1, every_score, small)
    least = proof.sum_member(shifted, every_score, k)
    proof.conclude("shifted", most, least, one, last)


def _bounds_picture() -> Table:
    rows = []
    for name, (power, gap) in GAPS.items():
        scores = [torch.tensor([0.0, -float(gap) + move], dtype=getattr(torch, name)) for move in (0.02, -0.02)]
        rows.append((name, f"2^-{power}", str(float(gap)), *(float(torch.softmax(score, -1)[1]) for score in scores)))
    headings = ("type", "half its least number", "gap", "weight 0.02 before", "weight 0.02 after")
    return Table("Where a weight becomes exactly zero: two keys, PyTorch's softmax", headings, rows)


def _kept(stored: Any) -> Statement:
    def case(*scores: Any) -> dict[Any, Any]:
        return {n: len(scores), s: list(map(decimal, scores))}

    term, largest = stored(exp(s[j])), Fraction(torch.finfo(torch.float32).max)
    return Statement(
        variables={n: "the number of keys", s: "the scores"},
        given=[n >= 1],
        then={
            "positive": each(i, 1, n, stored(exp(s[i]) / all_terms) > 0),
            "denominator": Ne(Sum(term, every_score), 0),
            "finite": each(j, 1, n, term <= Rational(largest.numerator)),
        },
        terms={"weight": stored(exp(s[i]) / all_terms), "denominator": Sum(term, every_score)},
        notes=["each stored number is the nearest one of the type; one too large for it is infinite"],
        spans=Spans(dict.fromkeys(("s₁", "s₂"), (-400, 400)), case),
    )


@claim(
    "softmax-stored",
    expected="refuted",
    formal=_kept,
    plain="In the numbers that single precision stores, no weight {weight} is nought either, the denominator"
    " {denominator} never is, and no term of it is infinite.",
    subject=float32,
    sabotage={"real numbers": lambda number: number},
    picture=_bounds_picture,
)
def softmax_stored(against: Refutation, stored: Any) -> None:
    for scores, says in (
        ([0, -104], "a weight that is exactly zero"),
        ([-200, -201], "a denominator of zero: without the shift, the weights are nan"),
        ([100, 99], "an infinite denominator: without the shift, the weights are nan"),
    ):
        terms = torch.exp(torch.tensor(scores, dtype=torch.float32))
        computed: dict[str, Any] = {"terms in PyTorch": terms, "weights without the shift": terms / terms.sum()}
        against.case({n: 2, s: scores}, says, **computed)


# Half the least positive number of a type as a power of two, and the gap at which a weight becomes zero.
GAPS = {
    "float32": (150, Rational(10397, 100)),
    "float64": (1075, Rational(74513, 100)),
    "float16": (25, Rational(1733, 100)),
}
_VANISHES, _STAYS = each(i, 1, n, Implies(weight <= half, Eq(r[i], 0))), each(i, 1, n, Implies(weight > half, r[i] > 0))


def _near(gap: Any) -> Any:
    ends, digits = (log(1 / half), log(1 / half - 1)), Rational(1, 200)
    return And(*(part for end in ends for part in (gap - end <= digits, end - gap <= digits)))


def _vanishing(gaps: Any) -> Statement:
    def case(type_: int, size: Any) -> dict[Any, Any]:
        power = [power for power, _ in gaps.values()][type_]
        scores, least = [Fraction(0), -decimal(size)], Fraction(1, 2**power)
        return {n: 2, s: scores, k: 1, half: least, r: [Fraction(1), Fraction(float(size) < math.log(2**power - 1))]}

    shared = {"far": log(1 / half), "near": log(1 / half - 1)}
    return Statement(
        variables={
            n: "the number of keys",
            s: "the scores",
            k: "any key",
            half: "half the least positive number of a type",
            r: "the weights as stored",
        },
        given=[k >= 1, k <= n, half > 0, half < 1, _VANISHES, _STAYS],
        then={
            "zero": each(i, 1, n, Implies(s[k] - s[i] >= log(1 / half), Eq(r[i], 0))),
            "two": Implies(And(Eq(n, 2), s[1] - s[2] < log(1 / half - 1)), r[2] > 0),
            **{name: Implies(Eq(half, Rational(1, 2**power)), _near(gap)) for name, (power, gap) in gaps.items()},
        },
        where={weight: exp(s[i]) / all_terms},
        terms=shared | {name: gap for name, (_, gap) in gaps.items()},
        notes=["a number rounds to the nearest one of the type, half the least positive one to zero"],
        spans=Spans({"type": range(3), "gap": (0, 800)}, case),
    )


@claim(
    "softmax-vanishing",
    expected="proved",
    formal=_vanishing,
    plain="A stored weight is nought once its score is {far} or more below another, and with two keys not before"
    " {near}: to two decimals, at {float32} in single precision, {float64} in double, {float16} in half.",
    subject=GAPS,
    sabotage={
        "float32 by the threshold of exp's overflow": GAPS | {"float32": (150, Rational(8872, 100))},
        "float16 by its smallest normal number": GAPS | {"float16": (25, Rational(970, 100))},
    },
    picture=_bounds_picture,
)
def softmax_vanishing(proof: Proof, gaps: Any) -> None:
    one, last, above, below = map(proof.given, [k >= 1, k <= n, half > 0, half < 1])
    vanishes, stays = proof.given(_VANISHES), proof.given(_STAYS)
    share, inside = exp(s[i]) / all_terms, And(i >= 1, i <= n)
    far = Implies(s[k] - s[i] >= log(1 / half), Eq(r[i], 0))
    drop = proof.exp_monotone(log(1 / half), s[k] - s[i], above)
    member = proof.sum_member(exp(s[j]), every_score, k)
    small = proof.have(
        Implies(And(inside, s[k] - s[i] >= log(1 / half)), share <= half), drop, member, one, last, above
    )
    gone = proof.have(Implies(inside, far), small, proof.member(_VANISHES, i), vanishes)
    proof.conclude("zero", proof.every(each(i, 1, n, far), gone))
    rise = proof.exp_monotone(log(1 / half - 1), s[1] - s[2], above, below)
    two = [proof.sum_first(exp(s[j]), (j, low, n)) for low in (1, 2)] + [proof.sum_empty(exp(s[j]), (j, 3, n))]
    proof.conclude("two", rise, *two, proof.member(_STAYS, 2), stays)
    for name, (power, gap) in gaps.items():
        least = Rational(1, 2**power)
        proof.conclude(name, proof.covered(_near(gap), {half: (least, least)}, most=4))


class Gap(NamedTuple):
    """The sum the others may have for a weight of 1/(1+ε), the gap that suffices, and the gap that is needed."""

    others: Formula = lambda eps: eps
    enough: Formula = lambda n, eps: log((n - 1) / eps)
    needed: Formula = lambda eps: log(1 / eps)


def _gap_picture() -> Chart:
    weights = {f"{n:,} keys": lambda g, n=n: 1 / (1 + (n - 1) * math.exp(-g)) for n in (2, 100, 10_000, 10**6)}
    gaps = [0.25 * i for i in range(121)]
    return curves("How far ahead a score must be", "gap to all other scores", "its weight", gaps, weights)


others = (j, 2, n)
behind = exp(s[j] - s[1])


def _wide_gap(gap: Gap) -> Statement:
    near = first_weight >= 1 / (1 + eps)
    wide, needed = (each(j, 2, n, s[1] - s[j] >= length) for length in (gap.enough(n, eps), gap.needed(eps)))
    return Statement(
        variables={n: "the number of keys", s: "the scores", eps: "what the other keys may have"},
        given=[n >= 2, eps > 0],
        then={
            "exactly": Equivalent(near, Sum(behind, others) <= gap.others(eps)),
            "enough": Implies(wide, near),
            "needed": Implies(near, needed),
        },
        where={first_weight: exp(s[1]) / all_terms},
        terms={"near": 1 / (1 + eps), "enough": gap.enough(n, eps), "needed": gap.needed(eps)},
        notes=["real arithmetic"],
        spans={n: range(4, 5), eps: (0.01, 0.99), s: (-12, 12, 4)},
    )


@claim(
    "copy-gap",
    expected="proved",
    formal=_wide_gap,
    plain="One weight is near one exactly when its score exceeds all others by a wide gap: {enough} is enough for"
    " {near}, and {needed} is needed.",
    subject=Gap(),
    sabotage={
        "the number of keys forgotten": Gap(enough=lambda n, eps: log(1 / eps)),
        "twice the others allowed": Gap(others=lambda eps: 2 * eps),
        "a gap needed that is not": Gap(needed=lambda eps: log(2 / eps)),
    },
    picture=_gap_picture,
)
def copy_gap(proof: Proof, gap: Gap) -> None:
    near, wide = first_weight >= 1 / (1 + eps), each(j, 2, n, s[1] - s[j] >= gap.enough(n, eps))
    some, positive = proof.given(n >= 2), proof.given(eps > 0)
    whole_sum, rest = proof.sum_first(exp(s[j]), every_score), proof.sum_most(0, behind, others)
    exactly = proof.have(
        Equivalent(near, Sum(behind, others) <= gap.others(eps)),
        some,
        positive,
        whole_sum,
        rest,
        says="over e^(s_1), the weight is 1/(1 + R) with R the sum of the others",
    )
    proof.conclude("exactly", exactly)
    # Enough: each of n − 1 others is at most ε/(n − 1).
    own = proof.exp_monotone(s[j] - s[1], -gap.enough(n, eps), some, positive)
    at = proof.member(wide, j)
    small = proof.have(Implies(And(wide, j >= 2, j <= n), behind <= exp(-gap.enough(n, eps))), own, at)
    together = proof.sum_most(behind, exp(-gap.enough(n, eps)), others, small, when=wide)
    proof.conclude("enough", together, exactly, some, says="n − 1 terms of ε/(n − 1) at most sum to ε at most")
    # Needed: no single other exceeds their sum.
    member = proof.sum_member(behind, others, i)
    apart = proof.exp_monotone(s[i] - s[1], -gap.needed(eps), positive)
    one = proof.have(
        Implies(And(near, i >= 2, i <= n), s[1] - s[i] >= gap.needed(eps)),
        member,
        apart,
        exactly,
        says="one term is at most the sum of all",
    )
    proof.conclude("needed", proof.every(each(i, 2, n, s[1] - s[i] >= gap.needed(eps)), one, when=near))


def _equal_share(share: Any) -> Statement:
    own, rest = exp(s[1]) / all_terms, Sum(exp(s[j]) / all_terms, others)

    def case(score: Any, more: int) -> dict[Any, Any]:
        # The others share what key 1 has.
        return {n: 1 + 2**more, s: [decimal(score), *[ball(decimal(score)) - more * arb(2).log()] * 2**more]}

    return Statement(
        variables={n: "the number of keys", s: "the scores"},
        given=[n >= 1, Eq(own, rest)],
        then={"share": Eq(own, share)},
        terms={"own": own, "rest": rest, "share": share},
        notes=["real arithmetic"],
        spans=Spans({"s₁": (-3, 3), "doublings": range(3)}, case, (Eq(own, rest),)),
    )


@claim(
    "share-of-the-rest",
    expected="refuted",
    formal=_equal_share,
    plain="A key whose weight {own} is that of all others together, {rest}, has the weight {share}.",
    subject=sympy.Integer(1),
    sabotage={"one half": Rational(1, 2)},
    picture=_gap_picture,
)
def share_of_the_rest(against: Refutation, _: Any) -> None:
    against.case({n: 2, s: [0, 0]}, "two keys with one score: each has ½")


def _mask_picture() -> Table:
    rows = []
    for name, scores, hidden in (
        ("ordinary scores", [1.0, 2.0, 3.0], [False, False, True]),
        ("allowed scores lower still", [-3e9, -3e9, 0.0], [False, False, True]),
        ("every key hidden", [1.0, 2.0, 3.0], [True, True, True]),
    ):
        for mask in (-math.inf, -1e5, -1e9):
            added = torch.tensor(scores) + torch.where(torch.tensor(hidden), mask, 0.0)
            seen = torch.softmax(added, -1)[torch.tensor(hidden)].sum()
            rows.append((name, f"{mask:g}", f"{float(seen):.3g}"))
    return Table("Weight on keys that must not be seen, in float32", ("row", "mask", "weight on hidden keys"), rows)


def _masked(added: Any) -> Statement:
    def case(hidden: Any, exponent: Any) -> dict[Any, Any]:
        return {n: 2, s: [decimal(hidden), -Fraction(round(10 ** float(exponent)))]}

    then: dict[str, Any] = {}
    for number in added:
        # With −∞, e to the score is nought.
        seen = exp(s[1] + number) if math.isfinite(number) else 0 * exp(s[1])
        then[f"hidden {number}"] = Eq(float32(seen / (seen + Sum(exp(s[j]), (j, 2, n)))), 0)
        if math.isfinite(number):
            row = exp(s[i] + number) / Sum(exp(s[j] + number), every_score)
            then[f"nothing {number}"] = each(i, 1, n, Eq(float32(row), 0))
            then[f"held {number}"] = Abs(float16(number)) <= 65504
    return Statement(
        variables={n: "the number of keys", s: "the scores, of which the first is to be hidden"},
        given=[n >= 2],
        then=then,
        notes=["with −∞ a hidden key has no weight, and a row of hidden keys has none at all"],
        spans=Spans({"hidden score": (-5, 5), "log₁₀(−allowed score)": (0, 10)}, case),
    )


@claim(
    "finite-mask",
    expected="refuted",
    formal=_masked,
    plain="A large finite negative number in the mask is as good as an infinite one: a hidden key has no weight, a row"
    " in which all keys are hidden has none, and half precision holds the number.",
    subject=(-(10**5), -(10**9)),
    sabotage={"infinite masks": (-math.inf,), "one finite, one infinite": (-(10**5), -math.inf)},
    picture=_mask_picture,
)
def finite_mask(against: Refutation, added: Any) -> None:
    for number in added:
        low = 3 * max(number, -(10**9))
        says = f"mask {number}: the hidden key has all the weight where the allowed score is {low}"
        seen = torch.softmax(torch.tensor([0.0 + number, low]), -1)
        against.case({n: 2, s: [0, low]}, says, f"hidden {number}", computed=seen)
        says = f"mask {number} on every key: the row still has weights, those of no mask at all"
        row = torch.softmax(torch.tensor([1.0, 2.0, 3.0]) + number, -1)
        against.case({n: 3, s: [1, 2, 3]}, says, f"nothing {number}", computed=row)
        held = torch.tensor(number, dtype=torch.float16)
        says = f"mask {number} in float16 is −∞, and a row with every key hidden is nan"
        nan = torch.softmax(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16) + held, -1)
        against.case({n: 3, s: [1, 2, 3]}, says, f"held {number}", computed=nan)
