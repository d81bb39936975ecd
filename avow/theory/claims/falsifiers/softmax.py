"""How softmax's weights could be no distribution, vanish too early or too late, or see what a mask hides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from flint import arb

from avow.numerics.intervals import least, most, total
from avow.theory.claims.catalogue.softmax import Gap, Safe
from avow.theory.claims.interval_checks import Numbers, balled, stored
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _categorical(weight: Callable[[Any, Any], Any]) -> Excess:
    share = balled(weight, 2)

    def excess(scores: Numbers) -> arb:
        terms = [score.exp() for score in scores]
        weights = [share(term, total(terms)) for term in terms]
        return most([abs(total(weights) - 1), *(-one for one in weights)])

    return excess


def _behind(gap: arb) -> arb:
    """The weight of the second of two keys, so far behind."""
    return 1 / (1 + gap.exp())


def _never_zero(safe: Safe) -> Excess:
    def excess(scores: Numbers) -> arb:
        one, two = scores
        weight = stored(partial(_behind, one - two), torch.float32)
        # Terms that are both zero as stored leave a denominator of zero.
        return -weight.min(total(stored(score.exp, torch.float32) for score in scores))

    return excess


def _zero_from(safe: Safe) -> Excess:
    # Balls of the decimals that the gaps are given to, and half of each type's least number.
    types = [(getattr(torch, name), arb(gap)) for name, gap in safe.gaps.items()]
    halves = [arb(torch.finfo(dtype).eps) * torch.finfo(dtype).tiny / 2 for dtype, _ in types]
    shift, beside = balled(safe.shift, 1), arb("0.01")

    def excess(scores: Numbers) -> arb:
        top, apart = scores[0].max(scores[1]), abs(scores[0] - scores[1])
        broken = [1 - total((score - shift(top)).exp() for score in scores)]
        for (dtype, gap), half in zip(types, halves, strict=True):
            weight = stored(partial(_behind, apart), dtype)
            # It must be zero beyond the gap, and for two keys only there.
            broken += [(apart - gap - beside).min(weight - half), (gap - beside - apart).min(half - weight)]
        return most(broken)

    return excess


def _gap(gap: Gap) -> Excess:
    others, enough, needed = balled(gap.others, 1), balled(gap.enough, 2), balled(gap.needed, 1)

    def excess(case: Numbers) -> arb:
        eps, *gaps = case
        rest = total((-one).exp() for one in gaps)
        weight, near = 1 / (1 + rest), 1 / (1 + eps)
        return most(
            [
                # α ≥ 1/(1+ε) exactly when the others sum to at most what is allowed: one without the other breaks it.
                (weight - near).min(rest - others(eps)),
                (near - weight).min(others(eps) - rest),
                (least(gaps) - enough(arb(len(gaps) + 1), eps)).min(near - weight),
                (weight - near).min(needed(eps) - least(gaps)),
            ]
        )

    return excess


def _hidden(masks: tuple[float, ...]) -> Excess:
    def excess(case: Numbers) -> arb:
        hidden, allowed = case[0], -(10 ** case[1])
        gaps = [allowed - hidden - arb(mask) for mask in masks if math.isfinite(mask)]
        # With −∞ the hidden key has no weight at all.
        return most([arb(0), *(stored(partial(_behind, gap), torch.float32) for gap in gaps)])

    return excess


HUNTS: Mapping[str, Hunt] = {
    "softmax-categorical": Hunt(numbered("s₁ s₂ s₃ s₄", -8, 8), _categorical),
    "softmax-bounds": Hunt(
        numbered("s₁ s₂", -400, 400),
        _never_zero,
        _zero_from,
        strict=True,
        reads="Two scores; their weights are rounded to float32, float64 and float16.",
    ),
    "copy-gap": Hunt({"ε": (0.01, 0.99)} | numbered("s₁−s₂ s₁−s₃ s₁−s₄", -1, 12), _gap),
    "finite-mask": Hunt(
        {"hidden score": (-5, 5), "log₁₀(−allowed score)": (0, 10)},
        _hidden,
        reads="Two keys, one hidden, whose weight is rounded to float32; the allowed one has the lower score.",
    ),
}
