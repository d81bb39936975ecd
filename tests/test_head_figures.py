"""What is said of a head follows from its weights: each kind by its inequality, each figure by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.core import Problem
from avow.integrations.transformers.profiling import HeadFigures, head_figures, sampled_rows, tokens_for


def figures(problem: Problem, rows: int = 64) -> HeadFigures:
    ((found, _),) = head_figures(problem, rows)
    return found


def biased(bias: Tensor) -> Problem:
    """A head whose logits are these and nothing else."""
    n, s = bias.shape
    return Problem.of(torch.zeros(1, 1, n, 8), torch.zeros(1, 1, s, 8), torch.ones(1, 1, s, 8), mask=bias)


def test_the_kind_is_that_of_the_sampled_rows_at_their_positions() -> None:
    distance = torch.arange(512)[:, None] - torch.arange(512)
    assert figures(biased(-distance.abs() / 6.0)).kind == "local"
    assert figures(biased(-distance.abs() / 60.0)).kind == "wide"
    assert figures(biased(60.0 * (distance == 1))).kind == "previous"
    assert figures(biased(60.0 * (torch.arange(512) == 0).expand(512, -1))).kind == "resting"


@pytest.mark.parametrize(("after", "kind"), [(1, "induction"), (0, "same")])
def test_the_ids_of_the_text_tell_heads_that_look_for_words(after: int, kind: str) -> None:
    ids = torch.arange(300) % 60
    sought = (ids[:, None] == ids.roll(after)) & (torch.arange(300)[:, None] > torch.arange(300))
    problem = biased(60.0 * sought)
    ((found, _),) = head_figures(problem, 64, ids)
    assert found.kind == kind
    ((found, _),) = head_figures(problem, 64, ids[:-1])
    assert found.kind == "wide", "ids of another text are not used"


def test_of_each_part_of_a_text_the_row_is_kept_that_reads_most() -> None:
    bias = torch.zeros(160, 160)
    bias[:, 0] = 9.0
    bias[50, 20], bias[150, 30], bias[151, 31] = 9.0, 9.0, 5.0
    ((_, readings),) = head_figures(biased(bias), 160)
    assert len(readings) == 8 and [row.position // 20 for row in readings] == list(range(8))
    assert readings[2].position == 50 and {j for j, _ in readings[2].tokens} == {0, 20}
    assert readings[7].position == 150, "and not 151, which reads less"
    assert all(0.01 <= mass <= 1 for row in readings for _, mass in row.tokens)


def test_queries_of_another_text_have_no_positions() -> None:
    nearest = torch.arange(40)[:, None] - torch.arange(512)
    assert figures(biased(60.0 * (nearest == 1))).kind == "wide"


def test_a_flat_head_has_the_figures_of_the_uniform_distribution() -> None:
    flat = figures(biased(torch.zeros(100, 100)))
    assert flat.kind == "wide"
    assert flat.entropy == pytest.approx(math.log(100))
    assert flat.tokens == (90, 99, 100) and flat.seen == 100
    assert flat.effective_rank == pytest.approx(1, abs=1e-3) and flat.flatness == pytest.approx(1)
    assert flat.spread == 0 and flat.first == pytest.approx(0.01)


def test_a_head_that_copies_each_its_own_has_one_token_and_full_rank() -> None:
    own = figures(biased(torch.eye(40) * 60))
    assert own.top > 0.999 and own.tokens == (1, 1, 1)
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
