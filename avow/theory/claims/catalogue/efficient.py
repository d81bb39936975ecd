r"""Other forms of attention: by a kernel of distances, as a kernel matrix, separable, and by random features.

Sums over n keys and d features are shown for every n and d: SymPy keeps them as sums, and moves out of them what does
not depend on their index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from flint import arb, arb_mat
from sympy import (
    And,
    Eq,
    Equivalent,
    Implies,
    KroneckerDelta,
    Sum,
)

import avow
from avow.core.chart import Chart, Function, Table, curves
from avow.numerics import intervals
from avow.theory.claims.catalogue.singular import inner_products, part_is_shorter, r
from avow.theory.claims.claim import Formula, Versions, claims_on, numbered
from avow.theory.claims.elementary import exp, log, sqrt
from avow.theory.claims.formal import Mean, Spans, Statement, each, real, sequence, whole
from avow.theory.claims.kernel import Step, put
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import enclosed, rational

claim = claims_on("efficient")
m = whole("m")


def _rbf_picture() -> Chart:
    # Beside a unit key in the query's own direction, query of length 2.
    def weight(length: float, shift: float, angle: float) -> float:
        return 1 / (1 + math.exp(-(2 * (length * math.cos(angle) - 1) - shift)))

    weights: dict[str, Function] = {}
    for length in (1.0, 2.0):
        weights[f"dot, key of length {length:g}"] = partial(weight, length, 0.0)
        weights[f"rbf, key of length {length:g}"] = partial(weight, length, (length**2 - 1) / 2)
    title = "Unit keys: the two kernels agree; longer keys: they part"
    return curves(title, "angle to the query", "weight", [math.pi * i / 40 for i in range(-40, 41)], weights)


n, d = whole("n d")
i, j, f, c = whole("i j f c")
q, key, v = sequence("q k v")
sigma = real("sigma")
every_key, every_coordinate = (j, 1, n), (f, 1, d)
KEYS, WIDTH, TRUE_NUMBERS = "the number of keys", "the number of coordinates", "real arithmetic"


def product(row: Any, other: Any = None) -> Any:
    """The inner product of a key with the query, or with itself."""
    return Sum((q[f] if other is None else key[row, f]) * key[row, f], every_coordinate)


def softmax_of(logit: Callable[[Any], Any], place: Any) -> Any:
    """A weight, by the logit of every key."""
    return exp(logit(place)) / Sum(exp(logit(j)), every_key)


def _by_distance(place: Any) -> Any:
    return -Sum((q[f] - key[place, f]) ** 2, every_coordinate) / (2 * sigma)


def _kernel_of_distances(logit: Formula) -> Statement:
    unit = each(j, 1, n, Eq(product(j, key), 1))
    at_one = softmax_of(lambda place: _by_distance(place).subs(sigma, 1), i)
    return Statement(
        variables={n: KEYS, d: WIDTH, q: "the query", key: "the keys", sigma: "the bandwidth"},
        given=[sigma > 0],
        then={
            "unit keys": Implies(unit, each(i, 1, n, Eq(at_one, softmax_of(product, i)))),
            "any keys": each(i, 1, n, Eq(softmax_of(_by_distance, i), softmax_of(_logits(logit), i))),
        },
        terms={"logit": _logits(logit)(i), "one": sympy.Integer(1)},
        notes=[TRUE_NUMBERS, "the kernel is e to minus the squared distance over twice the bandwidth"],
        spans={n: range(2, 3), d: range(2, 3), q: (-2, 2, 2), key: (-2, 2, 2, 2), sigma: (0.5, 2)},
    )


def _logits(logit: Formula) -> Callable[[Any], Any]:
    return lambda place: logit(product(place), product(place, key), sigma)


@claim(
    "rbf-equals-dot",
    expected="proved",
    formal=_kernel_of_distances,
    plain="With unit keys and a bandwidth of {one}, attention by the RBF kernel has the weights of dot-product"
    " attention. In general it is softmax with logits {logit}.",
    subject=lambda inner, square, sigma: (inner - square / 2) / sigma,
    sabotage={
        "−‖k‖² in place of −‖k‖²/2": lambda inner, square, sigma: (inner - square) / sigma,
        "no shift by the key at all": lambda inner, square, sigma: inner / sigma,
    },
    picture=_rbf_picture,
)
def rbf_equals_dot(proof: Proof, logit: Formula) -> None:
    parts = proof.statement.parts
    general = parts["any keys"]
    # −‖q − k‖²/2σ is the logit less ‖q‖²/2σ, which no key changes and which cancels.
    proof.conclude("any keys", proof.every(general))
    # For unit keys the logit is q·k less a constant, which cancels, too.
    unit, wanted = parts["unit keys"].args
    length = proof.member(unit, j)
    at_one = _by_distance(j).subs(sigma, 1)
    moved = product(j) - (Sum(q[f] ** 2, every_coordinate) + 1) / 2
    inside = And(j >= 1, j <= n)
    equal = proof.have(Implies(And(unit, inside), Eq(at_one, moved)), length)
    rises = proof.exp_monotone(at_one, moved), proof.exp_monotone(moved, at_one)
    exponentials = proof.have(Implies(And(unit, inside), Eq(exp(at_one), exp(moved))), *rises, equal)
    summed = proof.sum_same(exp(at_one), exp(moved), every_key, exponentials, when=unit)
    positive = proof.sum_positive(exp(product(j)), every_key)
    own = proof.at(exponentials, {j: i})
    shown = proof.have(Implies(And(unit, i >= 1, i <= n), wanted.args[3]), summed, own, positive)
    proof.conclude("unit keys", proof.every(wanted, shown, when=unit))


Q, K = sequence("Q K")


def kernel(row: Any, column: Any) -> Any:
    """A's entry: e to the inner product of a query and a key."""
    return exp(Sum(Q[row, f] * K[column, f], every_coordinate))


def _two_readings() -> tuple[list[Any], list[Any]]:
    """q = (0, 1), k = (0, ln 2), v = (0, 1): attention, and the answer of products entry by entry."""
    q, keys, v = sympy.Matrix([0, 1]), sympy.Matrix([0, sympy.log(2)]), sympy.Matrix([0, 1])
    matrix = (q * keys.T).applyfunc(exp)
    attention = sympy.diag(*(matrix * sympy.ones(2, 1))).inv() * matrix * v
    entries = q.multiply_elementwise(keys).applyfunc(exp)
    return list(attention), [entries[row] * v[row] / entries[row] for row in range(2)]


def _kernel_picture() -> Table:
    readings = zip(("A = exp(QKᵀ), 2 × 2: D⁻¹AV", "A = exp(Q∘K), 2 × 1, entry by entry"), _two_readings(), strict=True)
    rows = [[name, *map(str, answer)] for name, answer in readings]
    return Table("q = (0, 1), k = (0, ln 2), v = (0, 1)", ["reading", "row 1", "row 2"], rows)


def _matrix_form(form: Formula) -> Statement:
    attention = Sum(kernel(i, j) / Sum(kernel(i, j), every_key) * v[j, c], every_key)
    return Statement(
        variables={n: KEYS, d: WIDTH, Q: "the queries", K: "the keys", v: "the values", m: "their coordinates"},
        then={
            "form": each(i, 1, n, each(c, 1, m, Eq(attention, form(i, c)))),
            "positive": each(i, 1, n, Sum(kernel(i, j), every_key) > 0),
        },
        notes=[TRUE_NUMBERS, "the matrix has a row for each query and a column for each key"],
        spans={n: range(2, 3), d: range(2, 3), m: range(2, 3), Q: (-2, 2, 2, 2), K: (-2, 2, 2, 2), v: (-1, 1, 2, 2)},
    )


@claim(
    "kernel-form",
    expected="proved",
    formal=_matrix_form,
    plain="Softmax attention is a positive square matrix times the values, each row divided by its sum.",
    subject=lambda i, c: Sum(kernel(i, j) * v[j, c], every_key) / Sum(kernel(i, j), every_key),
    sabotage={
        "divided by the sums of columns": lambda i, c: (
            Sum(kernel(i, j) * v[j, c], every_key) / Sum(kernel(j, i), every_key)
        ),
        "entry by entry, n × d": lambda i, c: (
            exp(Q[i, c] * K[i, c]) * v[i, c] / Sum(exp(Q[i, f] * K[i, f]), every_coordinate)
        ),
    },
    picture=_kernel_picture,
)
def kernel_form(proof: Proof, form: Formula) -> None:
    parts = proof.statement.parts
    proof.conclude("positive", proof.every(parts["positive"], proof.sum_positive(kernel(i, j), every_key)))
    # Softmax's weights are A's entries over their row's sum.
    proof.conclude("form", proof.every(parts["form"]))
    right, by_entry = _two_readings()
    says = (
        "the derivation that writes A = exp(Q∘K), n × d, with products entry by entry is refuted by q = (0, 1),"
        " k = (0, ln 2), v = (0, 1)"
    )
    proof.shows(rational(right != by_entry, says, attention=right, entry_by_entry=by_entry))


def _separable_rows_picture() -> Table:
    q, keys = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    matrix = (torch.softmax(q, -1) @ torch.softmax(keys, -2).T).tolist()
    rows = [[f"row {i}", *(f"{x:.3f}" for x in row), f"{sum(row):.3f}"] for i, row in enumerate(matrix, start=1)]
    return Table("Three queries and keys in the plane", ["", "key 1", "key 2", "key 3", "sum"], rows)


e_key, e_query = exp(K[j, f]), exp(q[f])


def _separable_weights(column: Formula) -> Statement:
    weight = Sum(e_query / Sum(e_query, every_coordinate) * column(K), every_coordinate)
    return Statement(
        variables={n: KEYS, d: "the number of features", q: "the query", K: "the keys"},
        given=[n >= 1, d >= 1],
        then={"positive": each(j, 1, n, weight > 0), "sum": Eq(Sum(weight, every_key), 1)},
        notes=[TRUE_NUMBERS, "every row sees all keys"],
        spans={n: range(3, 4), d: range(2, 3), q: (-6, 6, 2), K: (-6, 6, 3, 2)},
    )


@claim(
    "separable-rows",
    expected="proved",
    formal=_separable_weights,
    plain="The rows of separable attention's weights are distributions over the keys.",
    subject=lambda keys: exp(keys[j, f]) / Sum(exp(keys[j, f]), every_key),
    sabotage={
        "keys, too, normalised over their features": lambda keys: (
            exp(keys[j, f]) / Sum(exp(keys[j, f]), every_coordinate)
        ),
        "keys not normalised": lambda keys: exp(keys[j, f]),
    },
    picture=_separable_rows_picture,
)
def separable_rows(proof: Proof, column: Formula) -> None:
    keys, features, parts = proof.given(n >= 1), proof.given(d >= 1), proof.statement.parts
    share = e_query / Sum(e_query, every_coordinate)
    by_feature, by_key = proof.sum_positive(e_query, every_coordinate), proof.sum_positive(e_key, every_key)
    above = proof.have(share * column(K) > 0, by_feature, by_key, keys, features)
    weight = proof.sum_positive(share * column(K), every_coordinate, above)
    proof.conclude("positive", proof.every(parts["positive"], weight, features))
    swapped = proof.sum_swap(share * column(K), every_coordinate, every_key)
    # Each feature's column sums to one.
    proof.conclude("sum", swapped, by_feature, features)


def _circle(keys: int, stretch: float) -> list[list[arb]]:
    """Softmax weights of keys on a circle, the queries being the keys, stretched."""
    points = [(((2 * arb.pi() * at) / keys).cos(), ((2 * arb.pi() * at) / keys).sin()) for at in range(keys)]
    return [intervals.softmax([stretch * intervals.dot(a, b) for b in points]) for a in points]


def from_identity(weights: Sequence[Sequence[arb]]) -> arb:
    """‖I − weights‖²."""
    # A ball's power of two is nan where it holds zero; its product with itself is not.
    off = [weight - (row == column) for row, line in enumerate(weights) for column, weight in enumerate(line)]
    return intervals.dot(off, off)


def _weaker_picture() -> Chart:
    missed: dict[str, Function] = {
        "softmax attention": lambda stretch: float(from_identity(_circle(8, stretch)).mid()),
        "no separable weights below": lambda stretch: 6.0,
    }
    title, stretches = "Copying 8 values in the plane", [2.0**step for step in range(9)]
    return curves(title, "length of the queries", "‖I − weights‖²", stretches, missed, log_x=True)


x, t, b, eps = sequence("x"), real("t"), whole("b"), real("varepsilon")
column = exp(K[j, f]) / Sum(exp(K[j, f]), every_key)
separable = Sum(exp(Q[i, f]) / Sum(exp(Q[i, f]), every_coordinate) * column, every_coordinate)
every_query = (i, 1, n)
UNIT = each(b, 1, n - d, each(c, 1, n - d, Eq(Sum(x[j, b] * x[j, c], every_key), KroneckerDelta(b, c))))
UNSEEN = each(b, 1, n - d, each(f, 1, d, Eq(Sum(column * x[j, b], every_key), 0)))
parabola = exp(t * (2 * i * j - j**2))
near_softmax = parabola / Sum(parabola, every_key)


def off_identity(weight: Any) -> Any:
    """‖I − M‖², entry by entry."""
    return Sum(Sum((KroneckerDelta(i, j) - weight) ** 2, every_key), every_query)


def _three_keys(*case: arb) -> dict[Any, Any]:
    """Three queries and keys in the plane, and the one direction that neither feature sees."""
    rows = [list(case[at : at + 2]) for at in range(0, 12, 2)]
    one, two = (intervals.softmax(features) for features in zip(*rows[3:], strict=True))
    unseen = [one[i - 2] * two[i - 1] - one[i - 1] * two[i - 2] for i in range(3)]
    length = intervals.norm(unseen)
    return {
        n: 3,
        d: 2,
        Q: rows[:3],
        K: rows[3:],
        x: [[number / length] for number in unseen],
        t: case[12],
        eps: case[13],
    }


def _cannot_copy(bound: Formula) -> Statement:
    return Statement(
        variables={
            n: "the number of keys, and of queries",
            d: "the number of features",
            Q: "the queries",
            K: "the keys",
            x: "directions that no feature sees",
            t: "how far the queries are stretched",
            eps: "how close softmax attention is to come",
        },
        given=[n >= 1, d >= 1, t >= 0, eps > 0, UNIT, UNSEEN],
        then={
            "separable": off_identity(separable) >= bound(n, d),
            "softmax": Implies(t >= log(2 * n**2 / eps), off_identity(near_softmax) <= eps),
        },
        terms={"bound": bound(n, d)},
        notes=[
            TRUE_NUMBERS,
            "every row sees all keys: causal weights are triangular and may have full rank",
            "a linear map from n to d dimensions sends n − d orthonormal vectors to zero",
            "softmax attention in the plane: keys (2j, −j²), queries t·(i, 1)",
        ],
        spans=Spans(
            numbered("q₁₁ q₁₂ q₂₁ q₂₂ q₃₁ q₃₂ k₁₁ k₁₂ k₂₁ k₂₂ k₃₁ k₃₂", -12, 12) | {"t": (0, 20), "ε": (0.0001, 0.01)},
            _three_keys,
            (UNIT, UNSEEN),
        ),
    )


@claim(
    "separable-weaker",
    expected="proved",
    formal=_cannot_copy,
    plain="Separable attention is less expressive than softmax attention: the squares of what its matrix misses of the"
    " identity sum to {bound} at least, so it cannot copy more values than it has features, which softmax attention"
    " does in the plane as closely as wanted.",
    subject=lambda n, d: n - d,
    sabotage={"a bound of n − d + 1": lambda n, d: n - d + 1, "a bound of n": lambda n, d: n},
    picture=_weaker_picture,
)
def separable_weaker(proof: Proof, bound: Formula) -> None:
    _misses(proof)
    _reaches(proof)
    says = "eight keys in the plane: softmax attention copies all eight values, and separable attention misses by 6"
    facts = {"keys": 8, "dim": 2, "softmax_misses_at_most": "1e-20", "separable_misses_at_least": 6}
    proof.shows(enclosed(from_identity(_circle(8, 100.0)) < arb(10) ** -20, says, False, **facts))
    # Softmax's log-weights, less their row's first, are a product through d dimensions; separable's need not be.
    columns = [[arb(x) / 10 for x in column] for column in ((1, 2, 3, 4), (1, 5, 2, 2))]
    rows = []
    for share in (arb(1) / 5, arb(1) / 2, arb(4) / 5):
        logs = [(share * a + (1 - share) * b).log() for a, b in zip(*columns, strict=True)]
        rows.append([x - logs[0] for x in logs[1:]])
    says = (
        "nor does softmax reach all that separable does: for d = 2 these separable log-weights have rank 3, softmax's 2"
    )
    proof.shows(enclosed(arb_mat(rows).det() != 0, says))


def _misses(proof: Proof) -> None:
    """What no feature sees is missed whole by separable attention: I − M keeps it, and M sends it to nothing."""
    missed, unseen = KroneckerDelta(i, j) - separable, (r, 1, n - d)
    outer = proof.member(UNSEEN, r)
    inner = proof.member(put(UNSEEN.args[3], UNSEEN.args[0], r), f)
    nothing = Sum(column * x[j, r], every_key)
    within = And(r >= 1, r <= n - d)
    none = proof.have(Implies(And(within, f >= 1, f <= d), Eq(nothing, 0)), outer, inner, proof.given(UNSEEN))
    share = exp(Q[i, f]) / Sum(exp(Q[i, f]), every_coordinate)
    seen = proof.sum_same(share * nothing, 0, every_coordinate, none, when=within)
    swapped = proof.sum_swap(share * column * x[j, r], every_coordinate, every_key)
    own = proof.sum_delta(x[j, r], every_key, i)
    kept = Sum(x[j, r] * missed, every_key)
    query = And(i >= 1, i <= n)
    same = proof.have(Implies(And(query, within), Eq(kept**2, x[i, r] ** 2)), seen, swapped, own)
    squares = proof.sum_same(kept**2, x[i, r] ** 2, unseen, same, when=query)
    shorter = part_is_shorter(proof, missed, x, UNIT, every_key, unseen)
    row = Sum(x[i, r] ** 2, unseen), Sum(missed**2, every_key)
    rows = proof.sum_most(row[0], row[1], every_query, proof.have(Implies(query, row[0] <= row[1]), squares, shorter))
    across = proof.sum_swap(x[i, r] ** 2, unseen, every_query)
    ones = proof.sum_same(Sum(x[j, r] ** 2, every_key), 1, unseen, inner_products(proof, UNIT, r, r))
    proof.conclude("separable", rows, across, ones)


def _reaches(proof: Proof) -> None:
    """Keys on a parabola: the j-th is behind the i-th by t(i − j)², for the i-th query."""
    some, size, stretched = proof.given(n >= 1), proof.given(eps > 0), proof.given(t >= 0)
    small, own, same = exp(-t), exp(t * i**2), KroneckerDelta(i, j)
    level = parabola.args[0]
    neighbours = proof.next_whole(i, j), proof.next_whole(j, i)
    behind, itself = proof.exp_monotone(level, t * i**2 - t), proof.exp_monotone(level, t * i**2)
    most = (small + same * (1 - small)) * own
    far = proof.have(parabola <= most, *neighbours, behind, itself, stretched, says="whole numbers are one apart")
    total, query = Sum(parabola, every_key), And(i >= 1, i <= n)
    once, first = proof.sum_delta(1, every_key, i), proof.sum_delta(parabola, every_key, i)
    summed = proof.sum_most(parabola, most, every_key, far)
    share = proof.have(Implies(query, total <= (1 + (n - 1) * small) * own), summed, once)
    above = proof.sum_positive(parabola, every_key)
    largest = proof.sum_member(parabola, every_key, b)
    term = parabola.subs(j, b)
    square = proof.have(Implies(And(b >= 1, b <= n), term**2 <= term * total), largest)
    squares = proof.sum_most(term**2, term * total, (b, 1, n), square)
    off = Sum((same - near_softmax) ** 2, every_key)
    weight = proof.have(Implies(query, off <= 2 - 2 * own / total), once, first, squares)
    row = proof.have(Implies(query, off <= 2 * (n - 1) * small), weight, share, above)
    rows = proof.sum_most(off, 2 * (n - 1) * small, every_query, row)
    positive = proof.have(2 * n**2 / eps > 0, some, size)
    wanted = proof.exp_monotone(log(2 * n**2 / eps), t, positive, size)
    proof.conclude("softmax", rows, wanted, size)


def _unbiased_picture() -> Table:
    rows = [[count, 1.0, 1 / count, 1.0] for count in (1, 2, 16, 256)]
    return Table("E f(q)·f(k) / e^{q·k}", ["features m", "wanted", "factor 1/m a side", "factor 1/√m a side"], rows)


w, directions = sequence("w u")
a, scale = whole("a"), real("c")
every_feature = (a, 1, m)
other_query, other_key = sequence("q' k'")
LAW = "the coordinates of the directions w are independent of each other, each normal of mean zero and variance one"


def exponent(draws: Any, x: Any, y: Any, place: Any = a) -> Any:
    """A feature of x times that of y is e to this."""
    return (
        Sum(draws[place, f] * (x(f) + y(f)), every_coordinate)
        - Sum(x(f) ** 2, every_coordinate) / 2
        - Sum(y(f) ** 2, every_coordinate) / 2
    )


halves = -Sum(q[f] ** 2, every_coordinate) / 2 - Sum(key[f] ** 2, every_coordinate) / 2


def estimate(factor: Any, draws: Any, x: Any, y: Any) -> Any:
    """The inner product of the features of x and y, each with a factor."""
    return Sum(factor**2 * exp(exponent(draws, x, y)), every_feature)


def vector(of: Any) -> Callable[[Any], Any]:
    return lambda index: of[index]


FEATURES_SPANS = {m: range(1, 3), d: range(1, 2), q: (-1, 1, 1), key: (-1, 1, 1)}


def _features(factor: Formula) -> Statement:
    return Statement(
        variables={m: "the number of features", d: WIDTH, q: "the query", key: "the key"},
        given=[m >= 1],
        then={"mean": Eq(Mean(w, estimate(scale, w, vector(q), vector(key))), exp(Sum(q[f] * key[f], (f, 1, d))))},
        where={scale: factor(m)},
        terms={"factor": factor(m)},
        notes=[TRUE_NUMBERS, LAW],
        spans=FEATURES_SPANS,
    )


def _corrected_features(factor: Versions) -> Statement:
    unbiased = _features(factor.amended)

    def estimates(of: Any, place: Any) -> Any:
        return estimate(of, directions, vector(q), lambda index: K[place, index])

    def share(of: Any) -> Any:
        return estimates(of, i) / Sum(estimates(of, j), every_key)

    small = Mean(w, estimate(1 / m, w, vector(q), vector(key)))
    return replace(
        unbiased,
        variables=dict(unbiased.variables) | {n: KEYS, K: "keys", directions: "directions, as they were drawn"},
        then=dict(unbiased.then)
        | {
            "small": Eq(small, exp(Sum(q[f] * key[f], (f, 1, d))) / m),
            "positive": Implies(n >= 1, Sum(estimates(1, j), every_key) > 0),
            "cancels": each(i, 1, n, Eq(share(1 / m), share(scale))),
        },
        terms=dict(unbiased.terms) | {"small": 1 / m, "m": m},
        spans=FEATURES_SPANS | {n: range(2, 3), K: (-1, 1, 2, 1), directions: (-1, 1, 2, 1)},
    )


@claim(
    "features-unbiased",
    expected="corrected",
    formal=lambda factor: _features(factor.stated),
    amendment=_corrected_features,
    plain="Positive random features, each with a factor of {factor}, have e to the product of query and key for the"
    " mean of their inner product.",
    amended_plain="The factor is {factor} on each side. With {small} the mean is too small by a factor of {m}, which"
    " attention does not notice: it cancels between a weight and its normaliser.",
    subject=Versions(lambda m: 1 / m, lambda m: 1 / sqrt(m)),
    sabotage={
        "1/√m taken for the mistake": Versions(lambda m: 1 / sqrt(m), lambda m: 1 / sqrt(m)),
        "1/m kept in the correction": Versions(lambda m: 1 / m, lambda m: 1 / m),
    },
    picture=_unbiased_picture,
)
def features_unbiased(against: Refutation, proof: Proof, factor: Versions) -> None:
    says = "two features, q = k = 0: every entry is the factor itself, so f(q)·f(k) is certain, and is not e^0 = 1"
    against.case({m: 2, d: 1, q: [0], key: [0]}, says)
    some, one = proof.given(m >= 1), one_feature(proof)
    drawn = exponent(w, vector(q), vector(key))
    for part, own in (("mean", factor.amended(m)), ("small", 1 / m)):
        linear = proof.mean_sum(w, own**2, exponent(w, vector(q), vector(key)), every_feature)
        same = proof.sum_same(own**2 * Mean(w, exp(drawn)), own**2 * exp(logit), every_feature, one)
        proof.conclude(part, linear, same, some)
    share = exp(exponent(directions, vector(q), lambda f: K[j, f]))
    positive = proof.sum_positive(share, every_feature)
    proof.conclude("positive", proof.sum_positive(Sum(share, every_feature), every_key, positive, some))
    # Whatever the directions, every estimate has the same factor.
    proof.conclude("cancels")


def one_feature(proof: Proof) -> Step:
    """The mean of one feature of q times that of k, each without its factor."""
    own = exponent(w, vector(q), vector(key))
    law = proof.mean_exp(w, {a: q[f] + key[f]}, every_coordinate, halves)
    return proof.have(Eq(Mean(w, exp(own)), exp(Sum(q[f] * key[f], every_coordinate))), law)


def _needed_picture() -> Chart:
    radii = [step / 4 for step in range(1, 41)]
    series = {f"relative error {e:g}": (radii, [math.expm1(r**2) / e**2 for r in radii]) for e in (1.0, 0.1, 0.01)}
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


together = Sum((q[f] + key[f]) ** 2, every_coordinate)
logit = Sum(q[f] * key[f], every_coordinate)


def spread(x: Any, y: Any) -> Any:
    """The variance of an estimate with the right factor, over the square of what it estimates."""
    drawn = estimate(1 / sqrt(m), w, x, y)
    return (Mean(w, drawn**2) - Mean(w, drawn) ** 2) * exp(-2 * Sum(x(f) * y(f), every_coordinate))


ENOUGH = (m >= 1, eps > 0)
COUNTED = {m: "the number of features", d: WIDTH, q: "a query", key: "a key", eps: "an error, relative"}
ERROR = "the error of an estimate is the root of its mean square, over what is estimated"


def _always_useful(_: Formula) -> Statement:
    one, other = spread(vector(q), vector(key)), spread(vector(other_query), vector(other_key))
    return Statement(
        variables=COUNTED | {other_query: "another query", other_key: "another key"},
        given=ENOUGH,
        then={"also": Implies(one <= eps**2, other <= eps**2)},
        notes=[TRUE_NUMBERS, LAW, ERROR],
    )


def _law_of_variance(variance: Formula) -> Statement:
    relative = spread(vector(q), vector(key))
    needed = (exp(together) - 1) / eps**2
    return Statement(
        variables=COUNTED,
        given=ENOUGH,
        then={
            "law": Eq(relative, variance(together, m)),
            "needed": Equivalent(relative <= eps**2, m >= needed),
        },
        terms={"variance": variance(together, m), "needed": needed, "error": eps},
        notes=[TRUE_NUMBERS, LAW, ERROR],
        # Also those of the statement that is corrected.
        spans={m: range(1, 3), d: range(1, 2), eps: (0.1, 2)}
        | dict.fromkeys((q, key, other_query, other_key), (-1, 1, 1)),
    )


@claim(
    "features-variance",
    expected="corrected",
    formal=_always_useful,
    amendment=_law_of_variance,
    plain="Random features that are enough for one query and key are enough for every other: with enough of them the"
    " approximation is always useful.",
    amended_plain="The variance over the square of the mean is {variance}: it falls as one over the number of features,"
    " from a height that grows with the length of query and key together. An error of {error} takes {needed} features,"
    " so that the query and the key say how many.",
    subject=lambda square, m: (exp(square) - 1) / m,
    sabotage={
        "as if the square of the mean were nothing": lambda square, m: exp(square) / m,
        "half the exponent": lambda square, m: (exp(square / 2) - 1) / m,
        "a variance that falls as 1/m²": lambda square, m: (exp(square) - 1) / m**2,
    },
    picture=_needed_picture,
    needs=("features-unbiased",),
)
def features_variance(against: Refutation, proof: Proof, variance: Formula) -> None:
    case = {m: 1, d: 1, q: [0], key: [0], other_query: [1], other_key: [1], eps: 7}
    against.case(case, "one feature is certain for q = k = 0, and off by √(e⁴ − 1) > 7 times the truth for q = k = 1")
    some, size = proof.given(m >= 1), proof.given(eps > 0)
    own = {name: name for name in (m, d, n)} | {name: vector(name) for name in (q, key)}
    own |= {name: lambda i, f, name=name: name[i, f] for name in (K, directions)}
    mean = proof.known(features_unbiased, "mean", own)
    # The square of a sum of features is a sum over pairs, whose exponents are normal, too.
    pairs = every_feature, (b, 1, m)
    both = exponent(w, vector(q), vector(key)) + exponent(w, vector(q), vector(key), b)
    linear = proof.mean_sum(w, 1 / m**2, both, *pairs)
    law = proof.mean_exp(w, {a: q[f] + key[f], b: q[f] + key[f]}, every_coordinate, 2 * halves)
    same = KroneckerDelta(a, b)
    ends = [proof.exp_monotone(*pair) for pair in ((same * t, t), (t, same * t), (same * t, 0), (0, same * t))]
    either = proof.at(proof.have(Eq(exp(same * t), 1 + same * (exp(t) - 1)), *ends), {t: together})
    by_pair = exp(2 * logit) * (1 + same * (exp(together) - 1)) / m**2
    says = "a pair has the mean of a square if it is one feature twice, and the square of a mean if it is two"
    of_pair = Mean(w, exp(both)) / m**2
    pair = proof.have(Eq(of_pair, by_pair), law, either, says=says)
    inner = proof.sum_same(of_pair, by_pair, every_feature, pair)
    summed = proof.sum_same(Sum(of_pair, every_feature), Sum(by_pair, every_feature), (b, 1, m), inner)
    once = proof.sum_delta(1, every_feature, b)
    all_once = proof.sum_same(Sum(same, every_feature), 1, (b, 1, m), once)
    found = proof.conclude("law", mean, linear, summed, all_once, some)
    proof.conclude("needed", found, some, size)
    features = 2**24
    with intervals.precision(128):
        chance = far_below(8, features, 16)
    says = (
        "‖q + k‖ = 8, as of a query and a key of length 4 and logit 16: with 2^24 features the estimate is below half"
        " of the truth with probability at least 0.93"
    )
    at_most = intervals.upper(chance)
    proof.shows(enclosed(bool(chance < arb("0.07")), says, features=features, chance_of_half_at_most=at_most))
    # The library's own count of features follows this law; what it adds is a confidence for every row at once.
    queries, keys = torch.randn(
        2, 1, 1, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).unbind()
    # Norms about √64 times the factor, and a scale of 1/√64.
    quiet, loud = (avow.features_needed(factor * queries, factor * keys, tol=0.1) for factor in (0.2, 2.0))
    expected = (intervals.ball(quiet.radius) ** 2).exp() - 1
    follows = bool(abs(intervals.ball(quiet.variance) - expected) < expected / 10**9)
    says = (
        "avow.features_needed says from q and k what an error of 0.1 takes in every row: so many for small norms, and"
        " that no feasible number suffices for larger ones; its variance of one feature is this law's, to 1e-9"
    )
    holds = follows and math.isfinite(quiet.features) and math.isinf(loud.features)
    proof.shows(enclosed(holds, says, small=str(quiet), large=str(loud)))
