r"""What the library itself rests on: how weights move, what a dropped tail costs, and how rounding grows.

Keys, values and dimensions are as many as one likes: sums run to symbols.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from flint import arb
from sympy import And, Eq, Implies, Not, Or, Sum

from avow.core.chart import Chart, Function, Table, curves
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.elementary import exp, log, sqrt, tanh
from avow.theory.claims.formal import Exists, Spans, Statement, each, real, sequence, whole
from avow.theory.claims.kernel import Step, put, when_so
from avow.theory.claims.proof import Proof

claim = claims_on("lemmas")
n, m, d, i, j, f, r = whole("n m d i j f r")
a, b, s, v = sequence("a b s v")
delta, reach, tau = real("delta M tau")
all_keys, kept_keys, dropped_keys, all_coordinates = (j, 1, n), (j, 1, m), (j, m + 1, n), (f, 1, d)
KEYS, DIMENSIONS = "the number of keys", "the number of coordinates of a value"
no_longer = each(j, 1, n, Sum(v[j, f] ** 2, all_coordinates) <= reach**2)


def mean_of(weight: Any, limits: Any) -> Any:
    """A coordinate of the mean of some values."""
    return Sum(weight * v[j, f], limits) / Sum(weight, limits)


def positive_sum(proof: Proof, sequence: Any, limits: Any) -> Step:
    """A sum of exponentials over at least one key is positive."""
    return proof.sum_positive(exp(sequence[j]), limits)


def mean_is_short(
    proof: Proof, weight: Any, limits: Any, total: Step, inside: Sequence[Step], sign: Sequence[Step] = ()
) -> Step:
    """A mean of values, by weights that are not negative, is no longer than the longest: both are squared.

    `total` says that the weights' sum is positive, `inside` that the keys are among all keys, `sign` that no weight is
    negative, where it is not plain.
    """
    y, within = real("y"), And(limits[1] <= j, j <= limits[2])
    variance = proof.sum_most(0, weight * (v[j, f] - y) ** 2, limits, *sign)
    mean, squares = mean_of(weight, limits), Sum(weight * v[j, f] ** 2, limits) / Sum(weight, limits)
    own = proof.at(variance, {y: mean})
    says = "a variance is not negative, so the square of a mean is at most the mean of the squares"
    square = proof.have(mean**2 <= squares, own, total, says=says)
    by_coordinate = proof.sum_most(mean**2, squares, all_coordinates, square)
    swapped = proof.sum_swap(weight * v[j, f] ** 2, limits, all_coordinates)
    short = proof.member(no_longer, j)
    length, longest = weight * Sum(v[j, f] ** 2, all_coordinates), weight * reach**2
    long_square = proof.have(Implies(within, length <= longest), *sign, short, proof.given(no_longer), *inside)
    together = proof.sum_most(length, longest, limits, long_square)
    says = "a mean of values is no longer than the longest"
    return proof.have(Sum(mean**2, all_coordinates) <= reach**2, by_coordinate, swapped, together, total, says=says)


def apart(proof: Proof, one: Any, two: Any, *short: Step, when: Any = True) -> Step:
    """Two vectors no longer than M are at most 2M apart: both sides are squared."""
    summed = proof.sum_most((one - two) ** 2, 2 * one**2 + 2 * two**2, all_coordinates)
    far = Sum((one - two) ** 2, all_coordinates) <= 4 * reach**2
    return proof.have(when_so(when, far), summed, *short, says="two vectors no longer than M are at most 2M apart")


def _moved(p: float, delta: float) -> float:
    """The most that a set of weight p can gain or lose, twice, when logits move by delta."""
    odds = math.exp(2 * delta)
    return 2 * (p * odds / (p * odds + 1 - p) - p)


def _perturbation_picture() -> Chart:
    moved: dict[str, Function] = {
        "the bound 2·tanh(δ/2)": lambda d: 2 * math.tanh(d / 2),
        "a set of weight 1/2": lambda d: _moved(0.5, d),
        "a set of weight 1/(1+e^δ)": lambda d: _moved(1 / (1 + math.exp(d)), d),
        "a set of weight 0.01": lambda d: _moved(0.01, d),
    }
    title, height = "How far weights move when logits do", "‖softmax(a) − softmax(b)‖₁"
    return curves(title, "δ, the most any logit moves", height, [0.05 * i for i in range(81)], moved)


p, q = exp(a[j]) / Sum(exp(a[j]), all_keys), exp(b[j]) / Sum(exp(b[j]), all_keys)
logits_move = each(j, 1, n, sympy.Abs(a[j] - b[j]) <= delta)


def _moved_weights(bound: Formula) -> Statement:
    two = sympy.Abs(exp(a[1]) / (exp(a[1]) + exp(a[2])) - exp(b[1]) / (exp(b[1]) + exp(b[2])))
    two += sympy.Abs(exp(a[2]) / (exp(a[1]) + exp(a[2])) - exp(b[2]) / (exp(b[1]) + exp(b[2])))
    near = And(sympy.Abs(a[1] - b[1]) <= delta, sympy.Abs(a[2] - b[2]) <= delta)
    return Statement(
        variables={n: KEYS, a: "the logits", b: "the logits moved", delta: "the most any of them moves"},
        given=[n >= 1, delta >= 0, logits_move],
        then={
            "most": Sum(sympy.Abs(p - q), all_keys) <= bound(delta),
            "reached": Exists(a, Exists(b, And(near, Eq(two, bound(delta))))),
        },
        terms={"bound": bound(delta)},
        notes=["real arithmetic"],
        spans=Spans(
            {"δ": (0.01, 3)} | {f"{x}{i}": (-4, 4) for x in "a" for i in "₁₂₃"} | {f"move{i}": (-1, 1) for i in "₁₂₃"},
            lambda size, *case: {
                n: 3,
                delta: size,
                a: list(case[:3]),
                b: [logit + size * move for logit, move in zip(case[:3], case[3:], strict=True)],
            },
        ),
    )


@claim(
    "softmax-perturbation",
    expected="proved",
    formal=_moved_weights,
    plain="When no logit moves by more than a given amount, the weights move by at most {bound} in sum of absolute"
    " values; no smaller bound holds for all logits.",
    subject=lambda delta: 2 * tanh(delta / 2),
    sabotage={
        "the factor two forgotten": lambda delta: tanh(delta / 2),
        "half the slope": lambda delta: 2 * tanh(delta / 4),
        "true, but not the least": lambda delta: delta,
    },
    picture=_perturbation_picture,
)
def softmax_perturbation(proof: Proof, bound: Formula) -> None:
    some, size, moves = proof.given(n >= 1), proof.given(delta >= 0), proof.given(logits_move)
    before, after = Sum(exp(a[j]), all_keys), Sum(exp(b[j]), all_keys)
    inside, most = And(j >= 1, j <= n), exp(delta)
    # Key by key, and so in sum, exponentials change by e^δ at most, either way.
    move = proof.member(logits_move, j)
    sides, sums = [], []
    for x, y in ((a, b), (b, a)):
        rise = proof.exp_monotone(x[j], y[j] + delta)
        side = proof.have(Implies(inside, exp(x[j]) <= most * exp(y[j])), rise, move, moves)
        sides.append(side)
        sums.append(proof.sum_most(exp(x[j]), most * exp(y[j]), all_keys, side))
    totals = [positive_sum(proof, x, all_keys) for x in (a, b)]
    lowest, highest = before / (most * after), most * before / after
    ends = proof.have(And(lowest <= 1, highest >= 1), *sums, totals[1], some)
    between = proof.have(Implies(inside, And(q / p >= lowest, q / p <= highest)), *sides, *totals)
    line = p * (1 - lowest) * (highest - lowest) + (q - lowest * p) * (highest + lowest - 2)
    below = proof.have(
        Implies(inside, (highest - lowest) * sympy.Abs(p - q) <= line),
        ends,
        between,
        totals[0],
        says="|x − 1| is convex: over an interval that holds 1, it is below its chord",
    )
    chords = proof.sum_most((highest - lowest) * sympy.Abs(p - q), line, all_keys, below)
    moved = Sum(sympy.Abs(p - q), all_keys)
    total = proof.have(
        (highest - lowest) * moved <= 2 * (1 - lowest) * (highest - 1),
        chords,
        says="weights sum to one before and after",
    )
    # At δ = 0 nothing moves; above it, the chord is at its worst where both sums are the same: 2·tanh(δ/2).
    grown = proof.exp_monotone(0, delta)
    same = proof.have(Implies(And(inside, most <= 1), sympy.Abs(p - q) <= 0), *sides, *sums)
    nothing = proof.sum_most(sympy.Abs(p - q), 0, all_keys, same, when=most <= 1)
    proof.conclude("most", total, nothing, *totals, some, grown, size)
    reached = _reached(proof, bound)
    proof.conclude("reached", reached)


def _reached(proof: Proof, bound: Formula) -> Step:
    """Two keys that trade places reach the bound."""
    exists = proof.statement.parts["reached"]
    inner = exists.args[1]
    move = proof.given(delta >= 0)
    rise = proof.exp_monotone(0, delta)
    witness = {1: 0, 2: delta}, {1: delta, 2: 0}
    first = put(inner, a, lambda index: witness[0][int(index)])
    body = put(first.args[1], first.args[0], lambda index: witness[1][int(index)])
    shown = proof.have(body, move, rise, says="two keys that trade places")
    return proof.some(
        exists, lambda index: witness[0][int(index)], proof.some(first, lambda index: witness[1][int(index)], shown)
    )


def _tail_picture() -> Chart:
    taus = [10 ** (-4 + 0.05 * i) for i in range(81)]
    factors = {
        "bound 2τ": 2.0,
        "tail mean opposite to the head's": 2.0,
        "tail mean orthogonal to it": math.sqrt(2),
        "tail mean at half its length, same side": 0.5,
    }
    series = {name: (taus, [factor * tau for tau in taus]) for name, factor in factors.items()}
    return Chart("What dropping a tail costs", "τ, the tail's share", "error / max‖v‖", series, log_x=True, log_y=True)


head, tail, whole_mean = (mean_of(exp(s[j]), limits) for limits in (kept_keys, dropped_keys, all_keys))
tail_mass = Sum(exp(s[j]), dropped_keys) / Sum(exp(s[j]), all_keys)
SOME_KEPT = {n: KEYS, m: "how many are kept, which are listed first", s: "the scores"}


def _moved_output(factor: Formula) -> Statement:
    return Statement(
        variables=SOME_KEPT | {v: "the values", d: DIMENSIONS, reach: "a length that no value exceeds"},
        given=[m >= 1, n >= m + 1, reach >= 0, no_longer],
        then={
            "moves": each(f, 1, d, Eq(whole_mean - head, factor(tau) * (tail - head))),
            "most": sqrt(Sum((whole_mean - head) ** 2, all_coordinates)) <= 2 * factor(tau) * reach,
        },
        where={tau: tail_mass},
        notes=["real arithmetic", "means are weighted by the softmax weights"],
        spans={n: range(3, 4), m: range(2, 3), d: range(1, 2), s: (-3, 3, 3), v: (-2, 2, 3, 1), reach: (2, 3)},
    )


@claim(
    "tail-mass-output",
    expected="proved",
    formal=_moved_output,
    plain="Dropping keys of a total weight and renormalising moves the output by exactly that weight times the distance"
    " between the dropped values' mean and the kept values' mean: at most twice the weight times the longest value.",
    subject=lambda tau: tau,
    sabotage={"τ²": lambda tau: tau**2, "τ/(1−τ)": lambda tau: tau / (1 - tau), "half of it": lambda tau: tau / 2},
    picture=_tail_picture,
)
def tail_mass_output(proof: Proof, factor: Formula) -> None:
    some, more = proof.given(m >= 1), proof.given(n >= m + 1)
    parts = [proof.sum_split(term, all_keys, m) for term in (exp(s[j]), exp(s[j]) * v[j, f])]
    totals = [positive_sum(proof, s, limits) for limits in (kept_keys, dropped_keys)]
    moved = proof.have(
        Eq(whole_mean - head, factor(tau) * (tail - head)), *parts, *totals, some, more, says="(1 − τ)h + τt − h"
    )
    proof.conclude("moves", proof.every(proof.statement.then["moves"], moved))
    positive = [
        proof.have(Sum(exp(s[j]), kept_keys) > 0, totals[0], some),
        proof.have(Sum(exp(s[j]), dropped_keys) > 0, totals[1], more),
    ]
    shorts = [
        mean_is_short(proof, exp(s[j]), limits, total, [among])
        for limits, total, among in zip((kept_keys, dropped_keys), positive, (more, some), strict=True)
    ]
    near = apart(proof, tail, head, *shorts)
    scaled = proof.have(Eq((whole_mean - head) ** 2, factor(tau) ** 2 * (tail - head) ** 2), moved)
    squares = proof.sum_same((whole_mean - head) ** 2, factor(tau) ** 2 * (tail - head) ** 2, all_coordinates, scaled)
    total = proof.have(Sum(exp(s[j]), all_keys) > 0, parts[0], *positive, some, more)
    square = proof.sum_most(0, (whole_mean - head) ** 2, all_coordinates)
    proof.conclude("most", squares, near, square, positive[1], total, proof.given(reach >= 0))


def _dropped_picture() -> Chart:
    shares = {f"{n:,} keys below the gap": lambda gap, n=n: n / (math.exp(gap) + n) for n in (10, 1000, 100_000)}
    title, gaps = "The most a tail can weigh", [0.5 * i for i in range(61)]
    return curves(title, "gap below the kept score", "share of the weight", gaps, shares, log_y=True)


low, high = sequence("l u")
lowest, highest = Sum(exp(low[j]), kept_keys), Sum(exp(high[j]), dropped_keys)
LOW, HIGH = each(j, 1, m, low[j] <= s[j]), each(j, m + 1, n, s[j] <= high[j])


def _bounded_mass(bound: Formula) -> Statement:
    return Statement(
        variables=SOME_KEPT | {low: "what a kept key scores at least", high: "what a dropped key scores at most"},
        given=[m >= 1, n >= m + 1, LOW, HIGH],
        then={
            "most": tau <= bound(lowest, highest),
            "reached": Implies(
                And(each(j, 1, m, low[j] >= s[j]), each(j, m + 1, n, s[j] >= high[j])),
                Eq(tau, bound(lowest, highest)),
            ),
        },
        where={tau: tail_mass},
        notes=["real arithmetic"],
        spans=Spans(
            {f"s{i}": (-3, 3) for i in "₁₂₃"} | {f"off{i}": (0, 1) for i in "₁₂₃"},
            lambda *case: {
                n: 3,
                m: 2,
                s: list(case[:3]),
                low: [case[0] - case[3], case[1] - case[4], case[2]],
                high: [case[0], case[1], case[2] + case[5]],
            },
        ),
    )


@claim(
    "dropped-mass",
    expected="proved",
    formal=_bounded_mass,
    plain="Intervals for the scores bound the weight of a dropped tail: its highest sum, over that and the head's"
    " lowest.",
    subject=lambda low, high: high / (low + high),
    sabotage={
        "the head's highest sum instead": lambda low, high: high / (low + high + 1),
        "both at their lowest": lambda low, high: (high - 1) / (low + high - 1),
    },
    picture=_dropped_picture,
)
def dropped_mass(proof: Proof, bound: Formula) -> None:
    some, more = proof.given(m >= 1), proof.given(n >= m + 1)
    whole_sum = proof.sum_split(exp(s[j]), all_keys, m)
    totals = [positive_sum(proof, one, limits) for one, limits in ((low, kept_keys), (s, dropped_keys))]
    sums, reached = [], []
    for smaller, larger, limits, known in ((low, s, kept_keys, LOW), (s, high, dropped_keys, HIGH)):
        within = And(limits[1] <= j, j <= limits[2])
        rise, at = proof.exp_monotone(smaller[j], larger[j]), proof.member(known, j)
        side = proof.have(Implies(within, exp(smaller[j]) <= exp(larger[j])), rise, at, proof.given(known))
        sums.append(proof.sum_most(exp(smaller[j]), exp(larger[j]), limits, side))
        # Where both bounds are reached, so is that of the sums.
        back = each(j, limits[1], limits[2], smaller[j] >= larger[j])
        fall, also = proof.exp_monotone(larger[j], smaller[j]), proof.member(back, j)
        other = proof.have(Implies(And(back, within), exp(larger[j]) <= exp(smaller[j])), fall, also)
        reached.append(proof.sum_most(exp(larger[j]), exp(smaller[j]), limits, other, when=back))
    says = "T/(H + T) rises with T and falls with H"
    proof.conclude("most", whole_sum, *totals, *sums, some, more, says=says)
    proof.conclude("reached", whole_sum, *sums, *reached, some, more)


def _ratio_picture() -> Table:
    rows = [(f"{miss:g}", f"{2 * miss:g}", f"{2 * miss / (1 - miss):.4g}") for miss in (1e-3, 1e-2, 0.1, 0.5)]
    headings = ("E / Z", "bound where Z̃ = Z", "bound where Z̃ = Z − E")
    return Table("Weights missed by E in all, out of Z", headings, rows)


true, wrong = sequence("a t")
normaliser, total_true, missed = (
    Sum(wrong[j], all_keys),
    Sum(true[j], all_keys),
    Sum(sympy.Abs(wrong[j] - true[j]), all_keys),
)


def _wrong_weights(bound: Formula) -> Statement:
    moved = mean_of(wrong[j], all_keys) - mean_of(true[j], all_keys)
    return Statement(
        variables={
            n: KEYS,
            true: "the weights, not normalised",
            wrong: "the weights as they are, of either sign",
            v: "the values",
            d: DIMENSIONS,
            reach: "a length that no value exceeds",
        },
        given=[each(j, 1, n, true[j] >= 0), total_true > 0, normaliser > 0, reach >= 0, no_longer],
        then={"most": sqrt(Sum(moved**2, all_coordinates)) <= bound(missed, normaliser) * reach},
        notes=["real arithmetic"],
        spans={
            n: range(3, 4),
            d: range(1, 2),
            true: (0.01, 1, 3),
            wrong: (0.01, 1, 3),
            v: (-1, 1, 3, 1),
            reach: (1, 1.2),
        },
    )


@claim(
    "ratio-error",
    expected="proved",
    formal=_wrong_weights,
    plain="A normalised average whose unnormalised weights are off by some amount in all is off by at most twice that"
    " over its own normaliser, in lengths of the longest value.",
    subject=lambda miss, normaliser: 2 * miss / normaliser,
    sabotage={
        "once E": lambda miss, normaliser: miss / normaliser,
        "over twice the normaliser": lambda miss, normaliser: 2 * miss / (2 * normaliser),
    },
    picture=_ratio_picture,
)
def ratio_error(proof: Proof, bound: Formula) -> None:
    signs, total, whole_sum = (
        proof.given(each(j, 1, n, true[j] >= 0)),
        proof.given(total_true > 0),
        proof.given(normaliser > 0),
    )
    inside, mean, off = And(j >= 1, j <= n), mean_of(true[j], all_keys), wrong[j] - true[j]
    sign = proof.have(Implies(inside, true[j] >= 0), proof.member(each(j, 1, n, true[j] >= 0), j), signs)
    short = mean_is_short(proof, true[j], all_keys, total, [], [sign])
    # Σ(t_j − a_j)(v_j − o) = (õ − o)·Z̃, whose square is at most E·Σ|t_j − a_j|(v_j − o)².
    y, moved = real("y"), mean_of(wrong[j], all_keys) - mean
    term = sympy.Abs(off) * (v[j, f] - mean) ** 2
    summed = proof.sum_most(2 * y * off * (v[j, f] - mean), term + y**2 * sympy.Abs(off), all_keys)
    form = Sum(term, all_keys) - 2 * y * moved * normaliser + y**2 * missed
    cauchy = proof.discriminant(form, y, proof.have(form >= 0, summed, whole_sum))
    squares = proof.sum_most((moved * normaliser) ** 2, missed * Sum(term, all_keys), all_coordinates, cauchy)
    swapped = proof.sum_swap(term, all_keys, all_coordinates)
    # Each value is within 2M of their mean.
    own = proof.member(no_longer, j)
    near = apart(proof, v[j, f], mean, short, own, proof.given(no_longer), when=inside)
    far = Sum((v[j, f] - mean) ** 2, all_coordinates)
    weighed = proof.have(Implies(inside, sympy.Abs(off) * far <= 4 * reach**2 * sympy.Abs(off)), near)
    together = proof.sum_most(sympy.Abs(off) * far, 4 * reach**2 * sympy.Abs(off), all_keys, weighed)
    none = proof.sum_most(0, sympy.Abs(off), all_keys)
    square = proof.sum_most(0, moved**2, all_coordinates)
    long = proof.given(reach >= 0)
    proof.conclude("most", squares, swapped, together, none, square, whole_sum, long)


def _residual_picture() -> Chart:
    # One landmark at the origin of a line: φ(x) = e^{-x²/2}, and y stands at 1.
    def phi(x: float) -> float:
        return math.exp(-(x**2) / 2)

    residuals: dict[str, Function] = {
        "|G(x,1) − φ(x)φ(1)|": lambda x: abs(phi(x - 1) - phi(x) * phi(1)),
        "the bound": lambda x: math.sqrt((1 - phi(x) ** 2) * (1 - phi(1) ** 2)),
    }
    xs = [-3 + 0.05 * i for i in range(121)]
    return curves("One landmark at 0: what it leaves over", "x", "residual", xs, residuals)


x, y, u, C = sequence("x y u C")
g, landmarks = whole("g"), (r, 1, m)
# CCᵀ ≼ I does not hold, where C = B·ψ(Z)ᵀ, so that CCᵀ = B·G(Z,Z)·Bᵀ.
grows = Exists(u, Sum(Sum(C[r, f] * u[r], landmarks) ** 2, all_coordinates) > Sum(u[r] ** 2, landmarks))
# A vector is a function of the index.
Vector = Callable[[Any], Any]
point, other = (lambda index: x[index]), (lambda index: y[index])


def product(one: Vector, two: Vector) -> Any:
    return Sum(one(f) * two(f), all_coordinates)


def feature(vector: Vector, place: Any = r) -> Any:
    """A coordinate of φ: what C makes of a vector."""
    return Sum(C[place, g] * vector(g), (g, 1, d))


def residual(one: Vector, two: Vector) -> Any:
    """What the features leave of a product."""
    return product(one, two) - Sum(feature(one) * feature(two), landmarks)


def _residuals(bound: Formula) -> Statement:
    return Statement(
        variables={
            d: "the dimension of the inner product space",
            m: "the number of features",
            x: "a point of the space",
            y: "another point",
            C: "the matrix that makes features of points",
        },
        given=[Not(grows)],
        then={
            "most": sympy.Abs(residual(point, other)) <= bound(residual(point, point), residual(other, other)),
            "real": And(residual(point, point) >= 0, residual(other, other) >= 0),
        },
        notes=[
            "real arithmetic",
            "a kernel is an inner product (Moore–Aronszajn), and two points with any number of landmarks span a space"
            " of finite dimension",
            "a point's product with itself is one, so what is left of it is one minus the square of its features",
        ],
        spans=Spans({"turn of x": (-3, 3), "turn of y": (-3, 3)}, _turned_points, (Not(grows),)),
    )


def _turned_points(one: arb, two: arb) -> dict[Any, Any]:
    """Two points on a circle, and the first axis for the only landmark."""
    return {d: 2, m: 1, C: [[1, 0]], x: [one.cos(), one.sin()], y: [two.cos(), two.sin()]}


@claim(
    "residual-cauchy-schwarz",
    expected="proved",
    formal=_residuals,
    plain="What landmarks leave of a positive semidefinite kernel is itself one, so each residual is at most the"
    " geometric mean of the two on the diagonal.",
    subject=lambda x, y: sqrt(x * y),
    sabotage={
        "the product without its root": lambda x, y: x * y,
        "half of it": lambda x, y: sqrt(x * y) / 2,
        "the smaller factor forgotten": lambda x, y: x,
    },
    picture=_residual_picture,
)
def residual_cauchy_schwarz(proof: Proof, bound: Formula) -> None:
    turn = real("lambda")
    along = _features_are_short(proof, lambda index: x[index] + turn * y[index])
    form = residual(point, point) + 2 * turn * residual(point, other) + turn**2 * residual(other, other)
    never = proof.have(form >= 0, along)
    square = proof.discriminant(form, turn, never)
    own = proof.have(residual(point, point) >= 0, proof.at(along, {turn: 0}))
    also = proof.have(residual(other, other) >= 0, _features_are_short(proof, other))
    proof.conclude("real", own, also)
    proof.conclude("most", square)


def _features_are_short(proof: Proof, vector: Vector) -> Step:
    """Features of a vector are no longer than the vector."""
    back = Sum(C[r, f] * feature(vector), landmarks)
    images, length = Sum(back**2, all_coordinates), Sum(feature(vector) ** 2, landmarks)
    witness = proof.some(grows, lambda place: feature(vector, place), when=images > length)
    shorter = proof.have(images <= length, witness, proof.given(Not(grows)))
    turned = proof.sum_swap(C[r, f] * vector(f) * feature(vector), landmarks, all_coordinates)
    # ‖φ‖⁴ = ⟨v, Cᵀφ⟩² ≤ ‖v‖²‖Cᵀφ‖² ≤ ‖v‖²‖φ‖².
    schwarz = proof.cauchy_schwarz(vector(f), back, all_coordinates)
    square = proof.sum_most(0, vector(f) ** 2, all_coordinates)
    says = "features are no longer than what they are made of"
    return proof.have(length <= product(vector, vector), shorter, turned, schwarz, square, says=says)


Shard = tuple[Any, Any]


def _merged(one: Shard, two: Shard) -> Shard:
    """Two shards as one: the logarithm of their summed exponentials, and the output, each with its share."""
    both = log(exp(one[0]) + exp(two[0]))
    return both, exp(one[0] - both) * one[1] + exp(two[0] - both) * two[1]


def _merge_picture() -> Chart:
    shares: dict[str, Function] = {
        "first shard": lambda g: 1 / (1 + math.exp(-g)),
        "second shard": lambda g: 1 / (1 + math.exp(g)),
    }
    gaps = [-8 + 0.2 * i for i in range(81)]
    return curves("Each shard's share of the merged output", "ℓ₁ − ℓ₂", "share", gaps, shares)


shard = [(ell, o) for ell, o in zip(real("ell_1 ell_2 ell_3"), real("o_1 o_2 o_3"), strict=True)]


def _merging(merge: Formula) -> Statement:
    one, two, three = shard
    parts = [(log(Sum(exp(s[j]), limits)), mean_of(exp(s[j]), limits)) for limits in (kept_keys, dropped_keys)]
    exact = merge(*parts)
    then = {
        "exact logarithm": Eq(exact[0], log(Sum(exp(s[j]), all_keys))),
        "exact output": each(f, 1, d, Eq(exact[1], mean_of(exp(s[j]), all_keys))),
    }
    for place, word in enumerate(("logarithm", "output")):
        grouped = merge(merge(one, two), three)[place], merge(one, merge(two, three))[place]
        then[f"any grouping, {word}"] = Eq(*grouped, evaluate=False)
    return Statement(
        variables=SOME_KEPT
        | {m: "how many keys the first shard holds", v: "the values", d: DIMENSIONS}
        | {name: "a shard's log-sum-exp" for name, _ in shard}
        | {name: "a coordinate of a shard's output" for _, name in shard},
        given=[m >= 1, n >= m + 1],
        then=then,
        notes=["real arithmetic"],
        spans={n: range(3, 4), m: range(2, 3), d: range(1, 2), s: (-4, 4, 3), v: (-2, 2, 3, 1)}
        | {name: (-4, 4) for name, _ in shard}
        | {name: (-2, 2) for _, name in shard},
    )


@claim(
    "lse-merge",
    expected="proved",
    formal=_merging,
    plain="Attention over shards of the keys merges exactly from each shard's log-sum-exp and output, in any grouping.",
    subject=_merged,
    sabotage={
        "outputs averaged": lambda one, two: (_merged(one, two)[0], (one[1] + two[1]) / 2),
        "weighted by the logarithms": lambda one, two: (
            _merged(one, two)[0],
            (one[0] * one[1] + two[0] * two[1]) / (one[0] + two[0]),
        ),
        "the last sum kept": lambda one, two: (two[0], _merged(one, two)[1]),
    },
    picture=_merge_picture,
)
def lse_merge(proof: Proof, merge: Formula) -> None:
    some, more = proof.given(m >= 1), proof.given(n >= m + 1)
    sums = [proof.sum_split(term, all_keys, m) for term in (exp(s[j]), exp(s[j]) * v[j, f])]
    positive = [positive_sum(proof, s, limits) for limits in (kept_keys, dropped_keys)]
    wanted = proof.statement.parts
    proof.conclude("exact logarithm", proof.log_same(*wanted["exact logarithm"].args, sums[0], *positive, some, more))
    output = proof.have(wanted["exact output"].args[3], *sums, some, more)
    proof.conclude("exact output", proof.every(wanted["exact output"], output))
    for name in ("any grouping, logarithm", "any grouping, output"):
        proof.conclude(name, proof.equal(*wanted[name].args))


def _gamma_picture() -> Chart:
    series = {}
    for name, u in (("float32", 2.0**-24), ("float64", 2.0**-53), ("bfloat16", 2.0**-8)):
        counts = [2**i for i in range(24) if 2**i * u < 0.5]
        series[name] = (counts, [n * u / (1 - n * u) for n in counts])
    return Chart("How rounding adds up", "roundings", "γ", series, log_x=True, log_y=True)


unit = real("u")
move, moved = sequence("delta x")
one_step = Or(Eq(moved[i + 1], moved[i] * (1 + move[i])), Eq(moved[i + 1] * (1 + move[i]), moved[i]))


def _rounded_product(gamma: Formula) -> Statement:
    return Statement(
        variables={
            n: "the number of roundings",
            unit: "the most that one rounding moves",
            move: "what each rounding moves",
            moved: "the product so far, from one on",
        },
        given=[
            n >= 1,
            n * unit < 1,
            each(i, 1, n, sympy.Abs(move[i]) <= unit),
            Eq(moved[1], 1),
            each(i, 1, n, one_step),
        ],
        then={"most": sympy.Abs(moved[n + 1] - 1) <= gamma(n, unit)},
        notes=["no overflow or underflow"],
        terms={"unit": unit, "gamma": gamma(n, unit)},
        spans=Spans(
            {"u": (0.01, 0.18)} | {f"δ{i}/u": (-1, 1) for i in "₁₂₃₄₅"},
            _rounded_case,
            (each(i, 1, n, one_step),),
        ),
    )


def _rounded_case(size: arb, *parts: arb) -> dict[Any, Any]:
    """Five roundings, multiplying and dividing in turns."""
    product = [arb(1)]
    for place, part in enumerate(parts):
        factor = 1 + size * part
        product.append(product[-1] * factor if place % 2 == 0 else product[-1] / factor)
    return {n: len(parts), unit: size, move: [size * part for part in parts], moved: product}


@claim(
    "rounding-gamma",
    expected="proved",
    formal=_rounded_product,
    plain="Roundings that each multiply or divide by one plus a number of size {unit} at most move a result by at most"
    " {gamma}.",
    subject=lambda n, u: n * u / (1 - n * u),
    sabotage={
        "to first order alone": lambda n, u: n * u,
        "one rounding too few": lambda n, u: (n - 1) * u / (1 - n * u),
    },
    picture=_gamma_picture,
)
def rounding_gamma(proof: Proof, gamma: Formula) -> None:
    each_move, each_step = each(i, 1, n, sympy.Abs(move[i]) <= unit), each(i, 1, n, one_step)
    so_far = Implies(i <= n, sympy.Abs(moved[i + 1] - 1) <= gamma(i, unit))
    start = proof.have(so_far.subs(i, 0), proof.given(Eq(moved[1], 1)))
    moves, steps = proof.member(each_move, i + 1), proof.member(each_step, i + 1)
    grown = proof.have(
        Implies(And(i >= 0, so_far), so_far.subs(i, i + 1)),
        moves,
        steps,
        proof.given(each_move),
        proof.given(each_step),
        proof.given(n * unit < 1),
        says="one rounding more: γ_n + u + γ_n·u ≤ γ_(n+1), and (γ_n + u)/(1 − u) ≤ γ_(n+1)",
    )
    every = proof.induction(so_far, i, 0, start, grown)
    proof.conclude("most", proof.at(every, {i: n}), proof.given(n >= 1))
