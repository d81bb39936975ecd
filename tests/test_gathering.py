"""Gathering reads what was chosen and nothing else, and proves what a mask over everything proves."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from avow.core import Computed, Problem
from avow.core.certify import certify
from avow.methods import sparse
from avow.methods.sparse import Sparse
from avow.numerics.shard_steps import Steps, alone
from avow.numerics.sketch import Sketch, sketched
from avow.numerics.sparse_reading import Answer
from tests.helpers.caches import queries


def problem(n: int = 3, s: int = 700, d: int = 24, heads: int = 6, groups: int = 2, batch: int = 1) -> Problem:
    k, v = torch.randn(2, batch, groups, s, d).unbind()
    return Problem.of(queries(k, heads, n), k, v, enable_gqa=True)


@pytest.mark.parametrize("chance", [0.0, 1e-2], ids=["deterministic", "statistical"])
@pytest.mark.parametrize("drop", [1e-1, 1e-3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_gathering_reads_the_same_tokens_and_proves_the_same(
    chance: float, drop: float, causal: bool, batch: int
) -> None:
    p = dataclasses.replace(problem(n=20 if causal else 3, s=400, batch=batch), causal=causal)
    method = Sparse(drop, chance=chance)
    sketches = (None, sketched(p.k))
    masked, gathered = (method.compute(p, torch.Generator().manual_seed(0), sketch=sketch) for sketch in sketches)
    assert torch.equal(masked.trace.read, gathered.trace.read)
    torch.testing.assert_close(gathered.trace.tails, masked.trace.tails, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(gathered.out, masked.out)
    rows = [certify(method, p, computed, 0.99).rows for computed in (masked, gathered)]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-10, atol=1e-15)
    # Another sketch chooses other tokens, so the equality above says something.
    other = method.compute(p, torch.Generator().manual_seed(0), sketch=sketched(p.k, 2))
    assert causal or not torch.equal(other.trace.read, masked.trace.read)


def spied(method: Sparse, p: Problem, sketch: Sketch) -> tuple[Computed, Tensor]:
    """What the method gives, and which tokens it touched."""
    touched: list[Tensor] = []

    def spying(steps: Steps) -> Answer:
        answer = alone(steps)
        touched.append(answer.touched)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "alone", spying)
        computed = method.compute(p, torch.Generator().manual_seed(0), sketch)
    (only,) = touched
    return computed, only


@pytest.mark.parametrize("chance", [0.0, 1e-2], ids=["deterministic", "statistical"])
def test_gathering_touches_no_token_that_it_did_not_choose(chance: float) -> None:
    p = problem(n=1, s=4096)
    p, sketch, method = p.measure_norms(), sketched(p.k), Sparse(0.05, chance=chance)
    plain, chosen = spied(method, p, sketch)
    unread = ~chosen.any(2)  # (b, g, s)
    assert float(unread.double().mean()) > 0.5
    poisoned = [x.masked_fill(unread.unsqueeze(-1), math.nan) for x in (p.k, p.v)]
    after = method.compute(
        dataclasses.replace(p, k=poisoned[0], v=poisoned[1]).with_norms(p.norms),
        torch.Generator().manual_seed(0),
        sketch,
    )
    assert torch.equal(after.out, plain.out) and torch.equal(after.trace.tails, plain.trace.tails)
    # One chosen token that is poisoned shows.
    chosen_one = tuple(chosen.any(2).nonzero()[0])
    poisoned[1][chosen_one] = math.nan
    worse = dataclasses.replace(p, k=poisoned[0], v=poisoned[1]).with_norms(p.norms)
    assert bool(method.compute(worse, torch.Generator().manual_seed(0), sketch).out.isnan().any())
