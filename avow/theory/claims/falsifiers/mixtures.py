"""How a query could mix other weights than it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flint import arb

from avow.numerics.intervals import most, total
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _average(query: Any) -> Excess:
    def excess(case: Numbers) -> arb:
        eps, count = case
        scores = query(count, eps, lambda x: x.log())
        whole = scores[0].exp() + scores[1].exp() + (count - 2)
        return most([1 / (2 + eps) - score.exp() / whole for score in scores])

    return excess


def _mixture(score: Any) -> Excess:
    reached = balled(score, 2)

    def excess(case: Numbers) -> arb:
        t, outside, *parts = case
        targets = [part / total(parts) for part in parts]
        terms = [reached(t, target).exp() for target in targets]
        scale = t.exp() / (t.exp() + outside)
        return most([abs(term / (total(terms) + outside) - w * scale) for term, w in zip(terms, targets, strict=True)])

    return excess


HUNTS: Mapping[str, Hunt] = {
    "average-two": Hunt({"ε": (0.01, 0.99), "n": (2, 200)}, _average, whole=frozenset("n")),
    "mixture-any": Hunt(
        {"t": (-5, 10), "n−|S|": (0, 200)} | numbered("w₁ w₂ w₃", 0.01, 1),
        _mixture,
        whole=frozenset({"n−|S|"}),
        reads="Three targets in proportion to w₁, w₂, w₃, among so many other orthonormal keys.",
    ),
}
