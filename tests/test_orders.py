"""Rows that share tokens leave the same ones unread, and no adversary makes those weigh more than was proved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.core import Problem
from avow.core.certify import certify
from avow.methods import sparse
from avow.methods.sparse import Sparse
from avow.numerics import token_ranking
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.sketch import sketched
from avow.numerics.sketched_problem import Known
from tests.helpers.caches import queries


def terms(count: int, wide: float) -> token_ranking.Terms:
    """Tokens anywhere in brackets up to this many nats on either side."""
    beta, half = (torch.rand(1, 1, 1, count, dtype=torch.float64) for _ in range(2))
    beta, half = (3 * beta).exp(), wide * half + 1e-4
    gamma = beta * (torch.expm1(half) - half) / half.square()
    return token_ranking.Terms(beta * (-half).exp(), beta * half.exp(), beta, half, gamma)


def most_of(told: token_ranking.Terms, slope: float) -> Tensor:
    """The largest β·(exp(x) − 1) − μ·x² on a fine grid of x, ends included."""
    x = told.half.unsqueeze(-1) * torch.linspace(-1, 1, 2001, dtype=torch.float64)
    return (told.beta.unsqueeze(-1) * torch.expm1(x) - slope * x.square()).amax(-1)


@pytest.mark.parametrize("wide", [1e-3, 0.3, 3.0, 20.0])
def test_no_token_exceeds_what_is_left_of_it(wide: float) -> None:
    told = terms(300, wide)
    middle = float(told.gamma.median())
    close = 0
    for slope in (0.0, 0.1 * middle, middle, 3 * middle, 100 * middle):
        bound = told.rest(torch.full((1, 1, 1, 1), slope, dtype=torch.float64))
        truth = most_of(told, slope)
        assert bool((truth <= bound + 1e-12 * told.beta).all())
        close += int((truth > 0.9 * bound).sum())
    # A bound of a tenth less would be exceeded by many.
    assert close > 500


def test_an_adversary_with_a_limited_sum_of_squares_stays_below() -> None:
    told, stray = terms(400, 1.5), 4.0
    bounds = [
        told.beta.sum() + slope * stray**2 + told.rest(torch.full((1, 1, 1, 1), slope, dtype=torch.float64)).sum()
        for slope in torch.logspace(-2, 3, 40).tolist()
    ]
    least = float(min(bounds))
    worst = 0.0
    for power in (0.5, 1.0, 2.0, 4.0, 16.0):
        # Along the weights, the more so the heavier; what exceeds a bracket is spent on others.
        x = told.beta**power
        for _ in range(50):
            x = torch.minimum(x * stray / x.square().sum().sqrt(), told.half)
        assert float(x.square().sum()) <= stray**2 * (1 + 1e-9)
        worst = max(worst, float((told.beta * x.exp()).sum()))
    assert worst <= least
    # It comes near: most of what the bound adds to the middles is reached.
    assert worst - float(told.beta.sum()) > 0.6 * (least - float(told.beta.sum()))


def attended(p: Problem, method: Sparse) -> tuple[Tensor, Tensor, sparse.Trace]:
    """Errors of rows, their bounds, and what was read."""
    computed = method.compute(p, torch.Generator().manual_seed(0))
    rows = certify(method, p, computed, 0.99).rows
    unit = longest_seen(p, p.norms.v)
    errors = torch.linalg.vector_norm(computed.out.double() - method.reference(p), dim=-1) / unit.clamp(min=1e-300)
    return errors, rows.reshape(errors.shape), computed.trace


def grouped(n: int = 2, s: int = 1024, heads: int = 6, mask: Tensor | None = None) -> Problem:
    k, v = torch.randn(2, 1, 2, s, 24).unbind()
    return Problem.of(queries(k, heads, n), k, v, mask=mask, enable_gqa=True)


def test_siblings_read_less_together_than_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    p = grouped()
    errors, rows, trace = attended(p, Sparse(0.05))
    assert bool((errors <= rows).all()) and float(rows.max()) <= 0.05 * 1.001 + 1e-6
    # All of them read what any does.
    assert torch.equal(trace.read, per_query_head(trace.distinct, 6))
    view = Known.view
    monkeypatch.setattr(Known, "view", lambda self, rows, siblings, bias: view(self, rows, 1, bias))
    _, _, singly = attended(p, Sparse(0.05))
    assert float(trace.distinct.mean()) < 0.97 * float(singly.distinct.mean())


def test_siblings_that_see_different_tokens_keep_their_own_bounds() -> None:
    mask = torch.rand(1, 6, 2, 1024) < 0.5
    mask[:, 0, 0], mask[:, 1, 1], mask[:, 2, 0, 1:] = False, True, False
    p = grouped(mask=mask)
    errors, rows, trace = attended(p, Sparse(0.05))
    assert bool((errors <= rows).all())
    assert bool((trace.read <= mask.sum(-1)).all()) and float(trace.read[0, 0, 0]) == 0
    assert float(trace.read[:, 1, 1].mean()) < 1024


def test_what_is_left_unread_is_bounded_for_answers_of_any_length() -> None:
    p = grouped(heads=2)
    view = Known.of(p, sketched(p.k), gathers=False).view(slice(0, 2), 1, None)
    whole = view.extent
    n, usual = whole.near(view.lengths).double(), torch.rand_like(whole.origin)
    for length in (0.0, 0.1, 1.0, 10.0):
        longer = torch.full_like(usual, length)
        assert bool(((n + longer) / (n + usual) <= whole.ratio(longer, usual) * (1 + 1e-12)).all())
    assert math.isclose(float(whole.ratio(usual, usual).max()), 1.0, rel_tol=1e-8)
