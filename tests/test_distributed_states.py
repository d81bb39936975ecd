"""Separable attention and random features over two and four processes: states travel, answers are those of one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from avow.distributed.states import states_traffic
from avow.methods.random_features import RandomFeatures
from tests.helpers.linear_shards import (
    COUNTS,
    LENGTHS,
    NEAR,
    PAIRED,
    SABOTAGED,
    SABOTAGES,
    cases,
    joined,
    said,
    sent_backward,
    sent_forward,
)

pytestmark = pytest.mark.processes

MINE = [name for name in cases(2) if "landmarks" not in name]
# The truth about a long sequence is quadratic.
SHORT = [name for name in MINE if "long" not in name]
DETERMINISTIC = [name for name in MINE if name.startswith("separable")]

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
@pytest.mark.parametrize(
    "name", ["separable, whole, float32", "separable, causal, float32", "separable, causal, bfloat16"]
)
def test_a_bound_a_thousand_times_smaller_would_be_broken(count: int, name: str) -> None:
    case = cases(count)[name]
    out, rows = joined([one[name] for one in said(count)])
    assert case.judged(out, rows * (1e-3 if case.dtype == torch.bfloat16 else 1e-5)).broken > 0


@counts
@pytest.mark.parametrize("name", SABOTAGED[:2])
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_sabotaged_exchange_shows(count: int, name: str, sabotage: str) -> None:
    case = cases(count)[name]
    answers = [one["sabotaged"][sabotage, name] for one in said(count)]
    with pytest.raises(AssertionError, match="not close"):
        case.compare(answers, NEAR[case.dtype])
    if name in DETERMINISTIC:
        assert (case.judged(*joined(answers)).broken > 0) == (sabotage != "gradients kept")


@counts
@pytest.mark.parametrize("time", ["again", "autocast"])
def test_every_run_gives_the_same_bits_even_where_others_compute_in_less(count: int, time: str) -> None:
    for one in said(count):
        assert one[time]
        for name, again in one[time].items():
            first = one[name]
            assert torch.equal(first.out, again.out) and torch.equal(first.certificate.rows, again.certificate.rows)
            assert all(torch.equal(*pair) for pair in zip(first.gradients, again.gradients, strict=True))


@counts
@pytest.mark.parametrize("name", MINE)
def test_the_bytes_sent_are_those_foretold(count: int, name: str) -> None:
    case = cases(count)[name]
    sizes = case.problem.sizes
    for one in said(count):
        assert one[name].sent == sent_forward(case, count)
        assert one[name].sent_back == sent_backward(case.method, sizes, count)
    assert states_traffic(case.method, sizes, count) == states_traffic(case.method, sizes.with_keys(10**6), count)


def test_a_process_sends_no_more_than_two_states_whatever_their_number() -> None:
    sizes = dataclasses.replace(cases(2)["features, causal, float32"].problem.sizes, value_dim=64)
    state = 4 * sizes.batch * sizes.key_heads * 1024 * (64 + 2)
    few, many = (sent_backward(RandomFeatures(1024), sizes, ranks) for ranks in (2, 64))
    assert few == state and many == 2 * state * 63 / 64


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_a_mesh_answer_as_two_processes_do(name: str) -> None:
    for rank, one in enumerate(said(4)):
        mine, theirs = one["pairs"][name], said(2)[rank % 2][name]
        assert torch.equal(mine.out, theirs.out) and torch.equal(mine.certificate.rows, theirs.certificate.rows)
        assert all(torch.equal(*pair) for pair in zip(mine.gradients, theirs.gradients, strict=True))


@counts
def test_processes_without_generators_take_the_seed_of_the_first(count: int) -> None:
    first, *others = (one["unseeded"] for one in said(count))
    for other in others:
        assert torch.equal(first["features"], other["features"])
    assert not torch.equal(first["features"], first["features, again"])


@counts
@pytest.mark.parametrize("method", ["separable", "features"])
def test_where_nobody_has_a_key_all_answer_zero(count: int, method: str) -> None:
    for one in said(count):
        none, empty = one["nothing"][f"{method}, no keys"], one["nothing"][f"{method}, no rows"]
        assert none.out.shape == (2, 4, 3, 5) and not none.out.any() and none.certificate.bound == 0
        assert empty.out.shape == (2, 4, 0, 5) and empty.certificate.bound == 0
        assert not any(x.any() for x in empty.gradients + none.gradients)


@counts
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generators", "InputError: digest of generator at rank 1="),
        ("directions", "InputError: digest of directions at rank 1="),
        ("features", "InputError: features at rank 1=5"),
        ("causal", "InputError: causal at rank 1=True must be as at rank 0, False; give all processes the same"),
        ("confidence", "InputError: confidence at rank 1=0.9 must be as at rank 0, 0.99; give all processes the same"),
        ("type", "InputError: type of q at rank 1=torch.float64 must be as at rank 0, torch.float32; give all"),
        ("heads", "InputError: shape of q without its length at rank 1=(1, 1, 4) must be as at rank 0, (1, 2, 4)"),
        ("nan", "NonFiniteError: rank 1: k[0, 0, 0, 0]=nan must be finite; remove NaN and inf from k"),
        ("gradient", "InputError: gradient of k at rank 1=True must be as at rank 0, False; give all processes the"),
        (
            "rows",
            "ShapeError: rank 1: q.shape[-2]=7 must equal k.shape[-2]=8 if causal; give each process the queries",
        ),
        ("scale", "ParameterError: separable: scale=0.5 has no meaning for separable attention, which has no logits"),
        ("latent", "UnknownMethod: method='latent' has no form over shards; use one of exact, sparse, separable, "),
        (
            "shared",
            "ParameterError: separable: shared_queries=True must not be the same rows; pass shared_queries=False",
        ),
    ],
)
def test_all_processes_are_told_who_is_to_blame(count: int, name: str, words: str) -> None:
    first, *others = (one["mistakes"][name] for one in said(count))
    if count == 4 and name in ("generators", "features"):
        words = words.partition("=")[0]  # each of the four asks for something else
    assert all(other == first for other in others)
    assert words in first


def test_one_process_of_the_four_has_no_keys() -> None:
    assert 0 in LENGTHS[4]
