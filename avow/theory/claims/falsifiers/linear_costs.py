"""How attention in linear time could take more than is said of it: counted at drawn sizes, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from flint import arb

from avow.theory.claims import counting
from avow.theory.claims.catalogue.costs import Program
from avow.theory.claims.catalogue.linear_costs import Perceiver, put_together
from avow.theory.claims.falsifiers.costs import GENEROUS, between
from avow.theory.claims.interval_checks import Numbers, whole
from avow.theory.claims.random_search import Excess, Hunt


def _by_factors(product: Program) -> Excess:
    def excess(case: Numbers) -> arb:
        length, rank, width = map(whole, case)
        rank = min(rank, length)
        inputs = counting.ones((length, rank), (rank, rank), (length, rank), (length, width))
        # Ones add up to whole numbers that float32 holds: what differs, differs.
        wrong = not torch.equal(product(*inputs), put_together(*inputs))
        return between(counting.flops(lambda: product(*inputs)), length * rank * width, 0, 6).max(arb(wrong))

    return excess


def _separable(program: Program) -> Excess:
    def excess(case: Numbers) -> arb:
        length, width = map(whole, case)
        inputs = counting.ones(*[(length, width)] * 3)
        time = between(counting.flops(lambda: program(*inputs)), length * width**2, 4, 4)
        # It holds at most 3nd + d².
        return time.max(between(max(counting.held(program, *inputs)), length * width + width**2, 1, 3))

    return excess


def _features(program: Program) -> Excess:
    def excess(case: Numbers) -> arb:
        length, features, width = map(whole, case)
        inputs = counting.ones(*[(length, width)] * 3, (features, width))
        time = between(counting.flops(lambda: program(*inputs)), length * features * width, 8, 10)
        order = length * features + features * width + length * width
        # It holds at most 3nm, or md + 2nd + 2nm + m + n.
        return time.max(between(max(counting.held(program, *inputs)), order, 1, 3))

    return excess


def _counts(perceiver: Perceiver, case: Numbers) -> tuple[int, int, int, int, int]:
    """ℓ, m and d, and the operations of cross-attention and of a latent block."""
    length, latents, width = map(whole, case)
    inputs, state = counting.ones((length, width), (latents, width))
    cross, block = (counting.flops(partial(part, state, inputs)) for part in perceiver)
    return length, latents, width, cross, block


def _as_sloppy(perceiver: Perceiver) -> Excess:
    def excess(case: Numbers) -> arb:
        _, latents, width, cross, block = _counts(perceiver, case)
        return between(cross, latents * width, 0, GENEROUS).max(between(block, latents**2, 0, GENEROUS))

    return excess


def _perceiver(perceiver: Perceiver) -> Excess:
    def excess(case: Numbers) -> arb:
        length, latents, width, cross, block = _counts(perceiver, case)
        return between(cross, length * latents * width, 4, 4).max(between(block, latents**2 * width, 4, 4))

    return excess


def _sizes(names: str) -> Mapping[str, tuple[float, float]]:
    return dict.fromkeys(names, (1, 48))


HUNTS: Mapping[str, Hunt] = {
    "low-rank-cost": Hunt(
        _sizes("nkd"),
        _by_factors,
        whole=frozenset("nkd"),
        reads="Run and counted, k being n where it is larger.",
    ),
    "separable-cost": Hunt(_sizes("nd"), _separable, whole=frozenset("nd"), reads="Run and counted."),
    "features-cost": Hunt(_sizes("nmd"), _features, whole=frozenset("nmd"), reads="Run and counted."),
    "perceiver-cost": Hunt(
        _sizes("ℓmd"),
        _as_sloppy,
        _perceiver,
        whole=frozenset("ℓmd"),
        reads=f"Run and counted; as stated, {GENEROUS} times its order is allowed.",
    ),
}
