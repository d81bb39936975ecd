"""Claims on the lemmas, and the code that rests on them."""

from __future__ import annotations

import math

import pytest
import torch
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from avow.numerics import intervals, rounding
from avow.theory.claims import Claim
from avow.theory.claims.catalogue import lemmas
from tests.helpers.judging import claims_of, judged

CLAIMS = claims_of(lemmas)


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: one.id)
def test_each_lemma_is_proved_in_symbols_alone(one: Claim) -> None:
    assert judged(one).kinds == ("symbolic",)


def test_the_lemmas_are_these() -> None:
    assert {one.id for one in CLAIMS} == {
        "softmax-perturbation",
        "tail-mass-output",
        "dropped-mass",
        "ratio-error",
        "residual-cauchy-schwarz",
        "lse-merge",
        "rounding-gamma",
    }


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.5, 3.0, 40.0])
def test_the_rounding_model_uses_the_constant_that_is_proved(delta: float) -> None:
    used = float(rounding.softmax_l1_bound(torch.tensor(delta, dtype=torch.float64)))
    proved = 2 * (arb(delta) / 2).tanh()
    assert bool(abs(arb(used) - proved) <= proved * arb("1e-15"))


@given(st.lists(st.tuples(st.floats(-8, 8), st.floats(-1, 1)), min_size=1, max_size=6), st.floats(0, 5))
def test_weights_never_move_further_than_the_lemma_says(moves: list[tuple[float, float]], delta: float) -> None:
    before = [arb(a) for a, _ in moves]
    after = [arb(a) + arb(d) * arb(delta) for a, d in moves]
    moved = sum((abs(p - q) for p, q in zip(intervals.softmax(before), intervals.softmax(after), strict=True)), arb(0))
    assert bool(moved <= 2 * (arb(delta) / 2).tanh() + arb("1e-12"))


def test_the_bound_on_moving_weights_is_reached() -> None:
    delta = 0.7
    before, after = torch.tensor([0.0, delta], dtype=torch.float64), torch.tensor([delta, 0.0], dtype=torch.float64)
    moved = (torch.softmax(before, -1) - torch.softmax(after, -1)).abs().sum()
    assert float(moved) == pytest.approx(2 * math.tanh(delta / 2), rel=1e-12)


def test_dropping_a_tail_costs_what_the_lemma_says() -> None:
    weights = torch.softmax(torch.randn(9, dtype=torch.float64), -1)
    values = torch.randn(9, 4, dtype=torch.float64)
    tau = weights[6:].sum()
    means = [weights[part] @ values[part] / weights[part].sum() for part in (slice(0, 6), slice(6, 9))]
    moved = (weights @ values - means[0]).norm()
    assert float(moved) == pytest.approx(float(tau * (means[1] - means[0]).norm()), rel=1e-12)
    assert float(moved) <= 2 * float(tau) * float(values.norm(dim=-1).max())


@pytest.mark.parametrize("terms", [1, 10, 10**6])
def test_the_rounding_model_grows_as_the_lemma_says(terms: int) -> None:
    u = rounding.unit(torch.float32)
    assert rounding.gamma(terms, u) == pytest.approx(terms * u / (1 - terms * u), rel=1e-15)
    assert (1 + u) ** terms - 1 <= rounding.gamma(terms, u) * (1 + 1e-9)
    assert 1 / (1 - u) ** terms - 1 <= rounding.gamma(terms, u) * (1 + 1e-9)


def test_shards_merge_to_the_whole() -> None:
    scores, values = torch.randn(12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    shards = [
        (torch.logsumexp(s, -1), torch.softmax(s, -1) @ v)
        for s, v in zip(scores.split(4), values.split(4), strict=True)
    ]
    (l1, o1), (l2, o2), (l3, o3) = shards
    both = torch.logaddexp(l1, l2)
    out = (l1 - both).exp() * o1 + (l2 - both).exp() * o2
    whole = torch.logaddexp(both, l3)
    out = (both - whole).exp() * out + (l3 - whole).exp() * o3
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ values)
    torch.testing.assert_close(whole, torch.logsumexp(scores, -1))
