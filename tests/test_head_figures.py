"""What is said of a head follows from its weights: each kind by its inequality, each figure by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.bench.workloads import workload
from avow.core import Problem
from avow.integrations.transformers.profiling import HeadFigures, head_figures, sampled_rows, tokens_for


def figures(problem: Problem, rows: int = 64) -> HeadFigures:
    (found,) = head_figures(problem, rows)
    return found


def biased(bias: Tensor) -> Problem:
    """A head whose logits are these and nothing else."""
    n, s = bias.shape
    return Problem.of(torch.zeros(1, 1, n, 8), torch.zeros(1, 1, s, 8), torch.ones(1, 1, s, 8), mask=bias)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["copying", "averaging", "diffuse"])
def test_drawn_heads_are_of_the_kind_they_were_drawn_as(kind: str, causal: bool) -> None:
    load = workload(kind, heads=1, length=512, dim=32, causal=causal)
    assert figures(load.problem).kind == kind


def test_a_head_that_looks_around_itself_is_local_until_it_looks_further() -> None:
    distance = (torch.arange(512)[:, None] - torch.arange(512)).abs().float()
    near = figures(biased(-distance / 6))
    assert near.kind == "local" and near.local is not None and near.local > 0.5 > near.top
    assert figures(biased(-distance / 30)).kind == "averaging"


def test_in_a_short_text_nothing_is_far_and_so_nothing_is_local() -> None:
    short = figures(biased(-(torch.arange(64)[:, None] - torch.arange(64)).abs().float() / 6))
    assert short.local is None and short.kind != "local"


def test_a_flat_head_has_the_figures_of_the_uniform_distribution() -> None:
    flat = figures(biased(torch.zeros(100, 100)))
    assert flat.kind == "diffuse"
    assert flat.entropy == pytest.approx(math.log(100))
    assert flat.tokens == (90, 99, 100) and flat.seen == 100
    assert flat.effective_rank == pytest.approx(1, abs=1e-3) and flat.flatness == pytest.approx(1)
    assert flat.spread == 0 and flat.first == pytest.approx(0.01)


def test_a_head_that_copies_each_its_own_has_one_token_and_full_rank() -> None:
    own = figures(biased(torch.eye(40) * 60))
    assert own.kind == "copying" and own.tokens == (1, 1, 1)
    assert own.effective_rank == pytest.approx(40) and own.spread == 60 and own.entropy < 1e-9


def test_only_what_a_row_sees_counts() -> None:
    hidden = torch.zeros(50, 50).masked_fill(torch.ones(50, 50).triu(1) > 0, -math.inf)
    half = figures(biased(hidden))
    assert half.spread == 0 and half.flatness == pytest.approx(1)
    assert half.seen == pytest.approx(26)  # rows 2 to 50: one that sees a single key says nothing


def test_norms_and_the_largest_logit_are_those_of_the_tensors() -> None:
    q, k, v = torch.randn(3, 1, 1, 30, 8)
    found = figures(Problem.of(q, k, v))
    assert found.query_norm == pytest.approx(float(q.norm(dim=-1).mean()), rel=1e-5)
    longest = float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) / math.sqrt(8)
    assert found.largest_logit == pytest.approx(longest, rel=1e-5)
    assert found.largest_logit >= float((q @ k.mT).abs().amax()) / math.sqrt(8)


def test_tokens_for_a_share_are_counted_among_those_seen() -> None:
    assert tokens_for(biased(torch.zeros(10, 100)), 0.5) == [0.5]
    assert tokens_for(biased(torch.eye(10, 100) * 60), 0.999) == [0.01]


def test_sampled_rows_reach_the_last() -> None:
    assert sampled_rows(100, 4).tolist() == [0, 33, 66, 99]
    assert sampled_rows(3, 16).tolist() == [0, 1, 2]
    assert sampled_rows(10, 2, start=5).tolist() == [5, 9]
