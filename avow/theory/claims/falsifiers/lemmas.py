"""How the lemmas could fail: weights that move further, tails that weigh more, rounding that grows faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _perturbation(bound: Callable[[Any], Any]) -> Excess:
    limit = balled(bound, 1)

    def excess(case: Numbers) -> arb:
        logits, moves = case[:3], case[3:]
        moved = intervals.softmax([a + d for a, d in zip(logits, moves, strict=True)])
        distance = total([abs(p - q) for p, q in zip(intervals.softmax(logits), moved, strict=True)])
        return distance - limit(most([abs(d) for d in moves]))

    return excess


def _tail(factor: Callable[[Any], Any]) -> Excess:
    moved = balled(factor, 1)

    def excess(case: Numbers) -> arb:
        scores, values = case[:3], case[3:]
        weights = intervals.softmax(scores)
        tau = weights[2]
        head = (weights[0] * values[0] + weights[1] * values[1]) / (1 - tau)
        out = (1 - tau) * head + tau * values[2]
        return abs(abs(out - head) - moved(tau) * abs(values[2] - head))

    return excess


def _dropped(bound: Callable[[Any, Any], Any]) -> Excess:
    most = balled(bound, 2)

    def excess(case: Numbers) -> arb:
        head, tail, lower, higher = case
        return tail / (head + tail) - most(head / (1 + lower), tail + higher)

    return excess


def _ratio(bound: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(bound, 2)

    def excess(case: Numbers) -> arb:
        true, wrong, values = case[:3], case[3:6], case[6:]
        means = [
            total([a * v for a, v in zip(weights, values, strict=True)]) / total(weights) for weights in (true, wrong)
        ]
        miss = total([abs(a - b) for a, b in zip(true, wrong, strict=True)])
        return abs(means[1] - means[0]) - limit(miss, total(wrong)) * most([abs(v) for v in values])

    return excess


def _residual(bound: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(bound, 2)

    def kernel(x: arb, y: arb) -> arb:
        return (-((x - y) ** 2) / 2).exp()

    def excess(case: Numbers) -> arb:
        x, y = case
        left = [1 - kernel(point, arb(0)) ** 2 for point in (x, y)]
        return abs(kernel(x, y) - kernel(x, arb(0)) * kernel(y, arb(0))) - limit(*left)

    return excess


def _merge(merge: Callable[[Any, Any], Any]) -> Excess:
    parts = [balled(lambda a, b, c, d, i=i: merge((a, b), (c, d))[i], 4) for i in (0, 1)]

    def excess(case: Numbers) -> arb:
        (one, two), values = case[:2], case[2:]
        whole = one.exp() + two.exp()
        output = (one.exp() * values[0] + two.exp() * values[1]) / whole
        merged = [part(one, values[0], two, values[1]) for part in parts]
        return abs(merged[0] - whole.log()).max(abs(merged[1] - output))

    return excess


def _rounding(gamma: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(gamma, 2)

    def excess(case: Numbers) -> arb:
        unit, *parts = case
        product = arb(1)
        for i, part in enumerate(parts):
            product *= (1 + unit * part) if i % 2 == 0 else 1 / (1 + unit * part)
        return abs(product - 1) - limit(arb(len(parts)), unit)

    return excess


HUNTS: Mapping[str, Hunt] = {
    "softmax-perturbation": Hunt(numbered("a₁ a₂ a₃", -4, 4) | numbered("d₁ d₂ d₃", -3, 3), _perturbation),
    "tail-mass-output": Hunt(numbered("s₁ s₂ s₃", -3, 3) | numbered("v₁ v₂ v₃", -2, 2), _tail),
    "dropped-mass": Hunt(
        numbered("H T", 0.01, 3) | numbered("H/L−1 U−T", 0, 1),
        _dropped,
        reads="Head and tail, and by how much their bounds are off.",
    ),
    "ratio-error": Hunt(numbered("a₁ a₂ a₃ ã₁ ã₂ ã₃", 0.01, 1) | numbered("v₁ v₂ v₃", -1, 1), _ratio),
    "residual-cauchy-schwarz": Hunt(
        numbered("x y", -3, 3),
        _residual,
        reads="The Gaussian kernel on a line, and one landmark at 0.",
    ),
    "lse-merge": Hunt(numbered("ℓ₁ ℓ₂", -4, 4) | numbered("o₁ o₂", -2, 2), _merge),
    "rounding-gamma": Hunt({"u": (0.01, 0.18)} | numbered("δ₁/u δ₂/u δ₃/u δ₄/u δ₅/u", -1, 1), _rounding),
}
