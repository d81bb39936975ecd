"""Landmarks over two and four processes: agreed once, the same for all, and those that one process would draw."""

from __future__ import annotations

import pytest
import torch

from avow.core import Sizes
from avow.distributed.low_rank import low_rank_traffic
from avow.methods.low_rank import LowRank
from tests.helpers.linear_shards import (
    COUNTS,
    NEAR,
    SABOTAGED,
    SABOTAGES,
    cases,
    joined,
    said,
    sent_backward,
    sent_forward,
)

pytestmark = pytest.mark.processes

MINE = [name for name in cases(2) if "landmarks" in name]
# The truth about a long sequence is quadratic.
SHORT = [name for name in MINE if "long" not in name]

counts = pytest.mark.parametrize("count", COUNTS)


@counts
@pytest.mark.parametrize("name", MINE)
def test_answers_and_gradients_are_those_of_one_process(count: int, name: str) -> None:
    case = cases(count)[name]
    case.compare([one[name] for one in said(count)], NEAR[case.dtype])


@counts
@pytest.mark.parametrize("name", SHORT)
def test_certificates_hold_and_promise_little_less_than_those_of_one_process(count: int, name: str) -> None:
    cases(count)[name].keeps([one[name] for one in said(count)])


@counts
@pytest.mark.parametrize("name", ["landmarks, whole, float64", "landmarks, causal, float64"])
def test_bounds_say_something_and_much_smaller_ones_would_be_broken(count: int, name: str) -> None:
    case = cases(count)[name]
    out, rows = joined([one[name] for one in said(count)])
    assert float(rows.max()) < 0.5
    assert case.judged(out, rows * 1e-3).broken > 0


@counts
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_sabotaged_exchange_shows(count: int, sabotage: str) -> None:
    name = SABOTAGED[2]
    case = cases(count)[name]
    answers = [one["sabotaged"][sabotage, name] for one in said(count)]
    with pytest.raises(AssertionError, match="not close"):
        case.compare(answers, NEAR[case.dtype])
    broken = case.judged(*joined(answers)).broken
    assert (broken > 0) == (sabotage != "gradients kept")


@counts
@pytest.mark.parametrize("name", MINE)
def test_the_bytes_sent_are_those_foretold(count: int, name: str) -> None:
    case = cases(count)[name]
    for one in said(count):
        assert one[name].sent == sent_forward(case, count)
        assert one[name].sent_back == sent_backward(case.method, case.problem.sizes, count)


def test_what_is_sent_does_not_grow_with_the_sequence() -> None:
    sizes = Sizes(1, 8, 8, 8192, 8192, 64, 64)
    short, long = (low_rank_traffic(LowRank(64), sizes.with_keys(n), 4).sent for n in (2**14, 2**24))
    assert short == long
    keys_of_a_shard = 8 * 2**22 * 64 * 4
    assert long < keys_of_a_shard / 500


def test_what_is_sent_grows_little_with_the_processes_where_there_is_a_head_for_each() -> None:
    sizes = Sizes(1, 64, 64, 2**20, 2**20, 64, 64)
    few, many = (low_rank_traffic(LowRank(64), sizes, ranks).sent for ranks in (2, 64))
    assert few < many < 2 * few + 64 * 2048


@counts
def test_processes_without_generators_take_the_seed_of_the_first(count: int) -> None:
    first, *others = (one["unseeded"] for one in said(count))
    for other in others:
        assert torch.equal(first["few landmarks"], other["few landmarks"])
    assert not torch.equal(first["few landmarks"], first["few landmarks, again"])


@counts
def test_where_nobody_has_a_key_all_answer_zero(count: int) -> None:
    for one in said(count):
        none, empty = (one["nothing"][f"few landmarks, no {word}"] for word in ("keys", "rows"))
        assert none.out.shape == (2, 4, 3, 5) and not none.out.any() and none.certificate.bound == 0
        assert empty.out.shape == (2, 4, 0, 5) and empty.certificate.bound == 0
        assert not any(x.any() for x in empty.gradients + none.gradients)


@counts
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generators of landmarks", "InputError: digest of generator at rank 1="),
        ("range", "RangeError: largest norm of scale*|q|*|k|="),
        ("tol", "ToleranceUnreachable: low_rank: tol=0.001 is below the "),
    ],
)
def test_all_processes_are_told_who_is_to_blame(count: int, name: str, words: str) -> None:
    first, *others = (one["mistakes"][name] for one in said(count))
    assert all(other == first for other in others)
    assert words in first


@counts
def test_no_more_landmarks_than_keys_of_all_shards(count: int) -> None:
    words = f'ParameterError: low_rank: rank=99 exceeds {8 * count} keys; use rank<={8 * count} or method="exact"'
    assert {one["mistakes"]["rank"] for one in said(count)} == {words}
