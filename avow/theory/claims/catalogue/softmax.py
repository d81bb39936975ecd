r"""What softmax gives: a distribution, its extremes, when one weight takes all, and what masks must be.

Scores :math:`s_1 \dots s_n`, weights :math:`\alpha_i = e^{s_i} / \sum_j e^{s_j}`. Sums over any number of keys are
built one key at a time: what holds of a sum, and of that sum with one more term, holds of them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from flint import arb
from sympy import And, Eq, Equivalent, Implies, Sum, Symbol

from avow.core import dtype_name
from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball, most, total
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Falsifier, Formula, claims_on, numbered
from avow.theory.claims.elementary import exp, log
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.formal import Statement, each, real, sequence, whole
from avow.theory.claims.proof import Proof
from avow.theory.claims.toolbox import counterexample, identity, nonnegative, positive, rational, rising, symbols

claim = claims_on("softmax")
# A score; the exponential of one, that of another, and the sum of the others' or of all.
score, own, other, rest, denominator = symbols(real="s", positive="e f R Z")
keys, further = symbols(integer_positive="n", nonnegative="d")
eps, first_weight = real("varepsilon alpha_1")


def sum_is_positive(amended: bool = False) -> Iterator[Evidence]:
    """A sum of exponentials is above zero, however many there are."""
    yield positive(exp(score), "one key: e^s > 0 for every real score", amended)
    yield positive(denominator + exp(score), "one more key: a positive sum and e^s is positive", amended)


def _categorical_picture() -> Chart:
    scores, numbers = torch.linspace(-3, 3, 9, dtype=torch.float64), list(range(1, 10))
    weights = {f"scores times {loud:g}": torch.softmax(loud * scores, -1).tolist() for loud in (0.25, 1.0, 4.0)}
    series = {name: (numbers, heights) for name, heights in weights.items()}
    return Chart("Nine evenly spaced scores, and louder", "key", "weight", series, marks="bars")


n, i, j = whole("n i j")
s = sequence("s")
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
    """What is subtracted from every score, given the largest, and the gap at which a weight becomes zero, by type."""

    shift: Formula
    gaps: dict[str, str]


_GAPS = {"float32": "103.97", "float64": "745.13", "float16": "17.33"}


def _half_of_least(dtype: torch.dtype) -> Fraction:
    """Half the smallest positive number of a type: what is no larger rounds to zero, ties going to even."""
    return Fraction(torch.finfo(dtype).eps) * Fraction(torch.finfo(dtype).tiny) / 2


def _power(half: Fraction) -> str:
    return f"2^-{half.denominator.bit_length() - 1}"


def _behind(gap: arb) -> arb:
    """The weight of the second of two keys, so far behind."""
    return 1 / (1 + gap.exp())


def _bounds_picture() -> Table:
    rows = []
    for name, gap in _GAPS.items():
        dtype = getattr(torch, name)
        weights = [torch.softmax(torch.tensor([0.0, -float(gap) - move], dtype=dtype), -1)[1] for move in (-0.02, 0.02)]
        rows.append((name, _power(_half_of_least(dtype)), gap, *map(float, weights)))
    headings = ("type", "half its least number", "gap", "weight 0.02 before", "weight 0.02 after")
    return Table("Where a weight becomes exactly zero: two keys, PyTorch's softmax", headings, rows)


def _never_zero(safe: Safe, one: arb, two: arb) -> arb:
    """Two scores; their weights are rounded to float32, float64 and float16."""
    weight = toolbox.stored(partial(_behind, one - two), torch.float32)
    # Terms that are both zero as stored leave a denominator of zero.
    return -weight.min(total(toolbox.stored(score.exp, torch.float32) for score in (one, two)))


def _zero_from(safe: Safe, one: arb, two: arb) -> arb:
    top, apart, beside = one.max(two), abs(one - two), arb("0.01")
    broken = [1 - total((score - safe.shift(top)).exp() for score in (one, two))]
    # Balls of the decimals that the gaps are given to.
    for dtype, gap in ((getattr(torch, name), arb(gap)) for name, gap in safe.gaps.items()):
        weight, half = toolbox.stored(partial(_behind, apart), dtype), ball(_half_of_least(dtype))
        # It must be zero beyond the gap, and for two keys only there.
        broken += [(apart - gap - beside).min(weight - half), (gap - beside - apart).min(half - weight)]
    return most(broken)


@claim(
    "softmax-bounds",
    expected="corrected",
    statement=r"0 < \alpha_i < \infty \quad\text{and}\quad \textstyle\sum_j e^{s_j} \ne 0, \text{ as computed}",
    plain="No weight is infinite, none is exactly zero, and the denominator is never zero.",
    amended=r"\text{In } \mathbb{R}: 0 < \alpha_i < 1 \ (n \ge 2).\ \text{In floating point with least positive number"
    r" } 2h:\ \max_j s_j - s_i \ge \ln\tfrac1h \Rightarrow \mathrm{fl}(\alpha_i) = 0,\ \text{and } \textstyle\sum_j"
    r" e^{s_j - \max s} \ge 1",
    amended_plain="In real arithmetic weights lie strictly between 0 and 1 (one key alone has exactly 1). In floating"
    " point a weight is 0 once its score is 103.97 (float32), 745.13 (float64) or 17.33 (float16) below the largest,"
    " and the plain formula divides 0 by 0 or inf by inf; with the maximum subtracted the denominator lies between 1"
    " and n.",
    assumptions=("n ≥ 1 finite scores", "floating point: results rounded to the nearest number, subnormals kept"),
    subject=Safe(lambda top: top, _GAPS),
    sabotage={
        "float32 by the threshold of exp's overflow": Safe(lambda top: top, _GAPS | {"float32": "88.72"}),
        "float16 by its smallest normal number": Safe(lambda top: top, _GAPS | {"float16": "9.70"}),
        "one more than the maximum subtracted": Safe(lambda top: top + 1, _GAPS),
    },
    picture=_bounds_picture,
    needs=("softmax-categorical",),
    falsifier=Falsifier(numbered("s₁ s₂", -400, 400), _never_zero, _zero_from, strict=True),
)
def softmax_bounds(safe: Safe) -> Iterator[Evidence]:
    yield from _computed_extremes()
    yield from sum_is_positive(amended=True)
    yield identity(own / own, 1, "one key alone has weight exactly 1", True)
    yield positive(own / (own + rest), "two keys or more: every weight is above 0", True)
    yield positive(1 - own / (own + rest), "and below 1, for the others' sum R is positive", True)
    top, others, short = symbols(real="s_max", nonnegative="R_0 d_n")
    shifted = exp(top - safe.shift(top))
    yield nonnegative(shifted + others - 1, "shifted, the largest term alone makes the denominator ≥ 1", True)
    yield rising(1 - exp(-further), further, 0, "no shifted term exceeds 1, since no gap is negative", True)
    says = "n terms of at most 1, and one more: at most n + 1"
    yield nonnegative((keys + 1) - ((keys - short) + (1 - further)), says, True)
    # The gap at which a weight becomes zero in any type: enough whatever the other keys, and tight for two.
    inverse, factor = 1 + Symbol("H", positive=True), 1 + Symbol("g", positive=True)  # 1/h > 1, and g > 1
    says = (
        "a gap of ln(1/h) or more leaves e^-gap ≤ h, half the least number of the type; over a denominator ≥ 1 the"
        " weight is no larger, and rounds to 0"
    )
    yield rising(1 - inverse * exp(-log(inverse) - further), further, 0, says, True)
    says = "two keys with a gap below ln(1/h − 1): the weight exceeds h, and does not round to 0"
    yield positive(1 / (1 + (inverse - 1) / factor) - 1 / inverse, says, True)
    for name, gap in safe.gaps.items():
        yield from _vanishing_in(getattr(torch, name), gap)


def _computed_extremes() -> Iterator[Evidence]:
    """Weights that are zero, and denominators that are zero and infinite, as float32 has them."""
    kind = torch.float32
    small = torch.softmax(torch.tensor([0.0, -104.0], dtype=kind), -1)[1]
    nearest = toolbox.rounded(lambda: 1 / (1 + arb(104).exp()), kind)
    facts = {"scores": [0, -104], "weight": float(small), "1/(1 + e^104) rounds to": str(nearest)}
    by = "PyTorch, and balls rounded to float32"
    yield counterexample(bool(small == 0) and nearest == 0, "a weight that is exactly zero", by, **facts)
    for scores, limit, word in (((-200, -201), 0, "zero"), ((100, 99), math.inf, "infinite")):
        terms = torch.exp(torch.tensor(scores, dtype=kind))
        weights = terms / terms.sum()
        exact = [toolbox.rounded(arb(s).exp, kind) for s in scores]
        agree = float(terms.sum()) == limit and exact == [limit, limit]
        says = f"without the shift: a denominator that is {word}, and weights that are nan"
        shifted = torch.softmax(torch.tensor(scores, dtype=kind), -1)
        facts = {"scores": list(scores), "terms": terms, "weights": weights, "softmax": shifted}
        yield counterexample(agree and bool(weights.isnan().all()), says, by, **facts)


def _vanishing_in(dtype: torch.dtype, gap: str) -> Iterator[Evidence]:
    """That gap in one type, from its format."""
    half, name = _half_of_least(dtype), dtype_name(dtype)
    inverse = half.denominator
    says = f"{name}: half the least positive number is a power of two, as the format gives it"
    yield rational(half.numerator == 1 and inverse == 1 << (inverse.bit_length() - 1), says, True, h=_power(half))
    yield toolbox.enclosed(
        lambda: all(abs(arb(whole).log() - arb(gap)) < arb("0.005") for whole in (inverse, inverse - 1)),
        f"{name}: ln(1/h) and ln(1/h − 1) are both {gap} to two decimals",
        True,
        gap=arb(inverse).log().str(12, radius=False),
    )
    before, after = (toolbox.rounded(partial(_behind, arb(gap) + arb(move)), dtype) for move in ("-0.01", "0.01"))
    says = f"{name}: rounded to the type, 0.01 to either side of {gap}, the weight is the least number, then zero"
    yield rational(before == 2 * half and after == 0, says, True, before=_power(2 * half), after=after)


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


def _hidden(masks: tuple[float, ...], hidden: arb, exponent: arb) -> arb:
    """Two keys, one hidden, whose weight is rounded to float32; the allowed one has the lower score."""
    gaps = [-(10**exponent) - hidden - arb(mask) for mask in masks if math.isfinite(mask)]
    # With −∞ the hidden key has no weight at all.
    return most([arb(0), *(toolbox.stored(partial(_behind, gap), torch.float32) for gap in gaps)])


@claim(
    "finite-mask",
    expected="refuted",
    statement=r"\mathrm{softmax}(s + M \cdot \mathrm{hidden}) = \mathrm{softmax}(s - \infty \cdot \mathrm{hidden})"
    r"\quad\text{for } M = -10^5,\, -10^9",
    plain="A large finite negative number (−1e5, −1e9) in the mask is as good as −∞.",
    assumptions=("scores may be any finite numbers of their type", "with −∞, a row that may see no key has no weights"),
    subject=(-1e5, -1e9),
    sabotage={"infinite masks": (-math.inf,), "one finite, one infinite": (-1e5, -math.inf)},
    picture=_mask_picture,
    falsifier=Falsifier({"hidden score": (-5, 5), "log₁₀(−allowed score)": (0, 10)}, _hidden),
)
def finite_mask(masks: tuple[float, ...]) -> Iterator[Evidence]:
    by = "PyTorch in float32, and balls in real arithmetic"
    for mask in masks:
        # A row whose every allowed score is lower still than what the mask makes of the hidden one.
        allowed = 3 * max(mask, -1e9)
        seen = torch.softmax(torch.tensor([allowed, 0.0 + mask]), -1)[1]
        violated = bool(seen > 0.99) and bool(_behind(arb(allowed) - arb(mask)) > arb("0.99"))
        says = f"mask {mask:g}: the hidden key has all the weight where the allowed score is {allowed:g}"
        yield counterexample(violated, says, by, weight_of_hidden=float(seen), with_infinity=0, mask=mask)
        # A row that may see nothing, and sees everything.
        computed, shift = torch.softmax(torch.tensor([1.0, 2.0, 3.0]) + mask, -1), arb(mask)
        terms = [(arb(s) + shift - (arb(3) + shift)).exp() for s in (1, 2, 3)]
        weights = [term / sum(terms) for term in terms]
        violated = bool((computed > 0).all()) and all(bool(weight > 0) for weight in weights)
        says = f"mask {mask:g} on every key: the row still has weights, those of no mask at all"
        real = [weight.str(6, radius=False) for weight in weights]
        yield counterexample(violated, says, by, computed=computed, real=real, mask=mask)
        # float16 has no such number: the finite mask is −∞ after all, and a row that sees nothing becomes nan.
        stored_mask = torch.tensor(mask, dtype=torch.float16)
        row = torch.softmax(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16) + stored_mask, -1)
        overflows = math.isfinite(mask) and toolbox.rounded(partial(arb, mask), torch.float16) == -math.inf
        violated = overflows and bool(stored_mask == -math.inf) and bool(row.isnan().all())
        says = f"mask {mask:g} in float16 is −∞, and a row with every key hidden is nan"
        facts = {"largest": torch.finfo(torch.float16).max, "mask": mask}
        yield counterexample(violated, says, "PyTorch in float16, and balls rounded to float16", **facts)
