"""How a neighbour's enclosure could miss the truth.

A number's exponential is enclosed wrongly where it is all but a float itself; numbers are drawn so that theirs are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue.neighbours import Bounds, Ends
from avow.theory.claims.interval_checks import Numbers
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _exponential(enclosure: Callable[[float], Ends]) -> Excess:
    def excess(case: Numbers) -> arb:
        x = math.log(1 + 10.0 ** -float(case[0]))
        low, high = map(intervals.ball, enclosure(x))
        truth = arb(x).exp()
        return (low - truth).max(truth - high)

    return excess


def _softmax(bounds: Bounds) -> Excess:
    def excess(case: Numbers) -> arb:
        ends = [sorted(map(float, case[at : at + 2])) for at in (0, 2)]
        low, high = (torch.tensor([end[side] for end in ends], dtype=torch.float64) for side in (0, 1))
        least, top = (x.tolist() for x in bounds(low, high))
        corners = [[ends[0][side], ends[1][1 - side]] for side in (0, 1)]
        missed = []
        for corner in corners:
            weights = intervals.softmax([arb(x) for x in corner])
            missed += [arb(bound) - weight for bound, weight in zip(least, weights, strict=True)]
            missed += [weight - arb(bound) for bound, weight in zip(top, weights, strict=True)]
        return most(missed)

    return excess


HUNTS: Mapping[str, Hunt] = {
    "mpmath-iv-exp": Hunt(
        {"a": (0, 6)},
        _exponential,
        reads="x is the float nearest to ln(1 + 10^−a), a as drawn: eˣ is all but a float itself.",
    ),
    "auto-lirpa-softmax": Hunt(
        numbered("x₁ x₁′ x₂ x₂′", -120, 0),
        _softmax,
        reads="A box for two logits, and its corners.",
    ),
}
