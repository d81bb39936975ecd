"""How tokens could attend to others than is said, and how a layer could tell in which order they came."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from flint import arb
from sympy import Matrix

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue import layers
from avow.theory.claims.interval_checks import Numbers, whole
from avow.theory.claims.random_search import Excess, Hunt, numbered

Vector = list[arb]


def _coordinates(x: Matrix) -> Vector:
    return [arb(int(entry)) for entry in x]


def _attended(beta: arb, query: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> Vector:
    """Attention in coordinates of the u's, of length β: an inner product is β² times the plain one."""
    weights = intervals.softmax([beta * beta * intervals.dot(query, key) for key in keys])
    return [intervals.dot(weights, column) for column in zip(*values, strict=True)]


def _distance(beta: arb, one: Vector, two: Vector) -> arb:
    return beta * intervals.norm([a - b for a, b in zip(one, two, strict=True)])


def _copies_itself(tokens: Sequence[Matrix]) -> Excess:
    first, own, third = map(_coordinates, tokens)

    def excess(case: Numbers) -> arb:
        beta, gamma, delta = case
        sure = [first, own, third]
        error = _distance(beta, _attended(beta, own, sure, sure), own)
        added = (arb(0), arb(0), gamma, delta)
        moved = [first, [x + more for x, more in zip(own, added, strict=True)], third]
        away = _distance(beta, _attended(beta, moved[1], moved, moved), _coordinates(layers.u_b))
        e = (beta * beta).exp()
        return (error - arb(10).sqrt() * beta / (e + 2)).max(arb(2).sqrt() * beta / 3 - away)

    return excess


def _routes(weights: layers.Weights) -> Excess:
    tokens = [_coordinates(token) for token in layers.tokens]
    queries, values = (
        [_coordinates(matrix * token) for token in layers.tokens] for matrix in (weights.query, weights.value)
    )
    targets = [_coordinates(target) for target in (layers.u_b - layers.u_c, layers.u_b)]

    def excess(case: Numbers) -> arb:
        (beta,) = case
        e = (beta * beta).exp()
        errors = [
            _distance(beta, _attended(beta, query, tokens, values), target)
            for query, target in zip(queries, targets, strict=False)
        ]
        return most([error - arb(square).sqrt() * beta / (e + 2) for error, square in zip(errors, (5, 2), strict=True)])

    return excess


_ORDERS = list(itertools.permutations(range(3)))


def _layer(layer: layers.Layer, weights: Numbers, tokens: Sequence[Vector]) -> list[Vector]:
    """Attention, then a feed-forward of tanh, each with its residual and a norm, on tokens of two numbers."""
    entered = [[x + i * layer.positions for x in token] for i, token in enumerate(tokens)]
    rows = []
    for i, own in enumerate(entered):
        seen = entered[: i + 1] if layer.causal else entered
        asked = [intervals.dot(own, weights[:2]), intervals.dot(own, weights[2:])]
        shares = intervals.softmax([intervals.dot(asked, key) for key in seen])
        mixed = _normed(
            [x + intervals.dot(shares, column) for x, column in zip(own, zip(*seen, strict=True), strict=True)]
        )
        rows.append(_normed([x + (2 * x).tanh() for x in mixed]))
    return rows


def _normed(x: Vector) -> Vector:
    length = (1 + intervals.dot(x, x)).sqrt()
    return [entry / length for entry in x]


def _permuted(layer: layers.Layer) -> Excess:
    def excess(case: Numbers) -> arb:
        order, weights, entries = _ORDERS[whole(case[0])], case[1:5], case[5:]
        tokens = [[*entries[i : i + 2]] for i in range(0, 6, 2)]
        straight = _layer(layer, weights, tokens)
        permuted = _layer(layer, weights, [tokens[i] for i in order])
        pairs = ((a, b) for row, i in zip(permuted, order, strict=True) for a, b in zip(row, straight[i], strict=True))
        return most([abs(a - b) for a, b in pairs])

    return excess


HUNTS: Mapping[str, Hunt] = {
    "self-attend-copies-self": Hunt(
        {"β": (0.01, 4)} | numbered("γ δ", -3, 3),
        _copies_itself,
        reads="γ of u_c and δ of u_d are added to the second token.",
    ),
    "route-by-weights": Hunt({"β": (0.01, 4)}, _routes),
    "permutation": Hunt(
        {"order": (0, 5)} | numbered("w₁₁ w₁₂ w₂₁ w₂₂ x₁₁ x₁₂ x₂₁ x₂₂ x₃₁ x₃₂", -2, 2),
        _permuted,
        whole=frozenset({"order"}),
        reads="Three tokens of two numbers, the matrix of their scores, and one of their six orders.",
    ),
}
