"""What only `low_rank` promises: all keys as landmarks are exact, residuals obey Cauchy–Schwarz, landmarks are seen."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import avow
from avow.core import Problem
from avow.errors import ParameterError
from avow.methods.low_rank import LowRank
from avow.numerics import cholesky
from avow.numerics.softmax import softmax_weights
from tests.helpers.truth import judge

either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clustered(n: int = 96, clusters: int = 6, spread: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys near a few centres."""
    centres = torch.randn(1, 2, clusters, 8, dtype=torch.float64)
    place = torch.randint(clusters, (2, n))
    q, k = (
        centres[:, :, index] + spread * torch.randn(1, 2, n, 8, dtype=torch.float64) for index in (place[0], place[1])
    )
    return q, k, torch.randn(1, 2, n, 5, dtype=torch.float64)


def bound_at(rank: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> float:
    return avow.attend(q, k, v, method="low_rank", rank=rank, generator=seeded(), **options).certificate.bound


@either_way
def test_as_many_landmarks_as_keys_are_exact_attention(causal: bool) -> None:
    q, k, v = (0.3 * torch.randn(2, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    out, certificate = avow.attend(q, k, v, method="low_rank", rank=24, causal=causal)
    torch.testing.assert_close(out, avow.attend(q, k, v, causal=causal).out, rtol=0, atol=1e-7)
    assert certificate.bound < 1e-3
    few = avow.attend(q, k, v, method="low_rank", rank=2, causal=causal)
    assert not torch.allclose(few.out, avow.attend(q, k, v, causal=causal).out, rtol=0, atol=1e-4)
    assert few.certificate.bound > 1e-3


@either_way
def test_the_bound_falls_with_the_rank_and_certifies_clusters(causal: bool) -> None:
    q, k, v = clustered()
    bounds = [bound_at(rank, q, k, v, causal=causal) for rank in (2, 6, 24, 64)]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] < bounds[0] / 10
    out, certificate = avow.attend(q, k, v, method="low_rank", rank=64, tol=1e-2, causal=causal, generator=seeded())
    assert certificate.kind == "deterministic" and certificate.bound <= 1e-2
    problem = Problem.of(q, k, v, causal=causal)
    assert judge(LowRank(64), problem, out, certificate.rows, None).broken == 0


def test_keys_without_clusters_are_not_certified() -> None:
    q, k, v = (3 * torch.randn(1, 2, 96, 8) for _ in range(3))
    assert bound_at(16, q, k, v) > 0.1
    with pytest.raises(avow.ToleranceUnreachable, match=r"low_rank: tol=0.01 is below the .* it can prove"):
        avow.attend(q, k, v, method="low_rank", rank=16, tol=1e-2)


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_what_landmarks_miss_obeys_cauchy_schwarz(size: float) -> None:
    x = size * torch.randn(1, 2, 400, 6, dtype=torch.float64)
    landmarks = x[..., torch.randperm(400)[:40], :]
    radius = torch.linalg.vector_norm(x, dim=-1).amax(-1)
    made = cholesky.factor(landmarks, radius)
    phi = cholesky.features(made, x)
    left = cholesky.residual(phi, made.slack)
    exact = torch.exp(-0.5 * (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1))
    missed = (exact - phi @ phi.transpose(-1, -2)).abs()
    allowed = torch.sqrt(left.unsqueeze(-1) * left.unsqueeze(-2))
    # The float64 of this very test errs by some units too.
    assert bool((missed <= allowed + 1e-13).all())
    wrong = cholesky.residual(1.01 * phi, made.slack)
    assert not bool((missed <= torch.sqrt(wrong.unsqueeze(-1) * wrong.unsqueeze(-2)) + 1e-13).all())


@pytest.mark.parametrize("copies", [1, 5])
def test_features_never_say_more_than_the_kernel_itself(copies: int) -> None:
    # Landmarks that repeat make G(Z,Z) singular; the diagonal left over must still be no less than nothing.
    x = torch.randn(1, 1, 60, 3, dtype=torch.float64)
    landmarks = x[..., :10, :].repeat(1, 1, copies, 1)
    made = cholesky.factor(landmarks, torch.linalg.vector_norm(x, dim=-1).amax(-1))
    phi = cholesky.features(made, x)
    assert float(phi.square().sum(-1).max()) <= 1 + 1e-12
    assert bool(torch.isfinite(phi).all())


def drawn(x: Tensor, log_weight: Tensor, rank: int, seed: int = 0) -> list[list[int]]:
    return cholesky.pivots(x, log_weight, rank, seeded(seed)).flatten(0, 1).tolist()


@pytest.mark.parametrize("keys", ["apart", "alike", "one cluster"])
def test_pivots_never_repeat(keys: str) -> None:
    spread = {"apart": 2.0, "alike": 0.0, "one cluster": 1e-9}[keys]
    x = 1 + spread * torch.randn(2, 3, 20, 4, dtype=torch.float64)
    for row in drawn(x, torch.randn(2, 3, 20, dtype=torch.float64), 20):
        assert sorted(row) == list(range(20))


@pytest.mark.parametrize("keys", ["apart", "alike", "one cluster", "weights that vanish"])
def test_pivots_never_take_a_hidden_key_before_the_visible_ones(keys: str) -> None:
    spread = {"alike": 0.0, "one cluster": 1e-9}.get(keys, 2.0)
    x = 1 + spread * torch.randn(2, 3, 20, 4, dtype=torch.float64)
    weight = torch.randn(2, 3, 20, dtype=torch.float64) * (1000 if keys == "weights that vanish" else 1)
    hidden = torch.zeros(20, dtype=torch.bool)
    hidden[torch.tensor([0, 1, 7, 19])] = True
    for row in drawn(x, weight.masked_fill(hidden, -math.inf), 16):
        assert not hidden[row].any()


def test_pivots_follow_what_is_left() -> None:
    # Two far clusters, one of which weighs e^5 times the other: the heavy one is drawn first, then the light one.
    x = torch.zeros(1, 1, 20, 2, dtype=torch.float64)
    x[..., 10:, 0] = 50.0
    weight = torch.zeros(1, 1, 20, dtype=torch.float64)
    weight[..., 10:] = 5.0
    for seed in range(20):
        ((first, second),) = drawn(x, weight, 2, seed)
        assert first >= 10 > second


def test_more_landmarks_than_keys_are_refused() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 4).unbind()
    text = 'low_rank: rank=96 exceeds 64 keys; use rank<=64 or method="exact"'
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        avow.attend(q, k, v, method="low_rank", rank=96)
    assert avow.attend(q, k, v, method="low_rank", rank=64).out.shape == q.shape


@either_way
def test_hidden_keys_count_neither_in_the_answer_nor_in_the_bound(causal: bool) -> None:
    q, k, v = clustered(64)
    seen = torch.rand(64) < 0.5
    seen[0] = True
    loud_k, loud_v = (torch.where(seen[:, None], x, 40.0) for x in (k, v))
    first = avow.attend(q, k, v, method="low_rank", rank=24, mask=seen, causal=causal, generator=seeded())
    second = avow.attend(q, loud_k, loud_v, method="low_rank", rank=24, mask=seen, causal=causal, generator=seeded())
    torch.testing.assert_close(first.out, second.out, rtol=0, atol=1e-6)
    problem = Problem.of(q, loud_k, loud_v, mask=seen, causal=causal)
    assert judge(LowRank(24), problem, second.out, second.certificate.rows, None).broken == 0
    unmasked = avow.attend(q, loud_k, loud_v, method="low_rank", rank=24, causal=causal, generator=seeded())
    assert judge(LowRank(24), problem, unmasked.out, second.certificate.rows, None).broken > 0


@pytest.mark.parametrize("size", [1e3, 1e5])
@either_way
def test_what_stands_in_hidden_keys_changes_neither_the_answer_nor_the_bound(size: float, causal: bool) -> None:
    # Padding may hold anything at all, and must not cost a visible row its certificate.
    q, k, v = clustered(64)
    seen = torch.arange(64) < 40
    padded = torch.where(seen[:, None], k, size)
    calm, loud = (
        avow.attend(q, key, v, method="low_rank", rank=24, mask=seen, causal=causal, generator=seeded())
        for key in (k, padded)
    )
    torch.testing.assert_close(loud.out, calm.out, rtol=0, atol=1e-7)
    assert loud.certificate.bound <= 1.01 * calm.certificate.bound < 1


def test_no_landmarks_beat_the_singular_values() -> None:
    q, k = (torch.randn(1, 2, 16, 4, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(16, dtype=torch.float64).expand(1, 2, 16, 16)
    problem = Problem.of(q, k, eye)
    weights = softmax_weights(problem)
    for rank in (2, 5, 9):
        mine = LowRank(rank).compute(problem, seeded()).out
        # The least that any matrix of this rank misses, by Eckart and Young.
        least = torch.linalg.vector_norm(torch.linalg.svdvals(weights)[..., rank:], dim=-1)
        assert bool((torch.linalg.matrix_norm(weights - mine) >= least - 1e-12).all())


@either_way
@pytest.mark.parametrize("seed", [6, 9])
def test_gradients_beside_two_very_long_keys_are_numbers(seed: int, causal: bool) -> None:
    draw = seeded(seed)
    q, k, v = (0.6 * torch.randn(1, 2, 24, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    k[..., 7, :], k[..., 15, :] = 500.0, 1000.0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    # Of some rows landmarks know so little that their normalisers lie at the end of float64: to divide by those once
    # more, as a gradient does, leaves it.
    out, certificate = avow.attend(*inputs, method="low_rank", rank=12, causal=causal, generator=draw)
    assert certificate.bound >= 1
    found = torch.autograd.grad(out.sum(), inputs)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    assert (float(found[2].abs().max()) > 1) == causal  # the first rows see neither of them


@pytest.mark.parametrize("seed", [316, 538])
def test_a_row_of_which_little_is_known_does_not_spoil_gradients_where_keys_rise_steeply(seed: int) -> None:
    draw = seeded(seed)
    q, k, v = (0.6 * torch.randn(1, 2, 4, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    k[..., 1::2, :] *= torch.tensor([[1000.0], [2000.0]]) / k[..., 1::2, :].norm(dim=-1, keepdim=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = avow.attend(*inputs, method="low_rank", rank=4, causal=True, generator=draw).out
    assert all(bool(torch.isfinite(x).all()) for x in torch.autograd.grad(out.sum(), inputs))


def test_a_rank_that_no_memory_holds_is_refused_even_where_there_is_nothing_to_attend_to() -> None:
    q, nothing = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    with pytest.raises(ParameterError, match="low_rank: rank=1000000000000 must be from 1 to 65536"):
        avow.attend(q, nothing, nothing, method="low_rank", rank=10**12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_graph_does_not_grow_with_the_rank_and_gives_the_same_answer_and_gradients(causal: bool) -> None:
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 96, 8).unbind()]

    def run(method: LowRank, compiled: bool) -> tuple[int, list[Tensor]]:
        def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return method.compute(Problem.of(q, k, v, causal=causal)).out

        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        answer = (torch.compile(out, backend="aot_eager", fullgraph=True) if compiled else out)(*leaves)
        return counters["stats"]["calls_captured"], [answer, *torch.autograd.grad(answer.square().sum(), leaves)]

    captured = []
    for rank in (8, 64):
        calls, found = run(LowRank(rank), compiled=True)
        captured.append(calls)
        for mine, plain in zip(found, run(LowRank(rank), compiled=False)[1], strict=True):
            torch.testing.assert_close(mine, plain)
    assert captured[0] == captured[1]


def test_a_generator_breaks_the_graph_and_draws_the_same_landmarks() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()

    def out(seed: int, compiled: bool) -> Tensor:
        generator, method = torch.Generator().manual_seed(seed), LowRank(8)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return method.compute(Problem.of(q, k, v), generator).out

        torch._dynamo.reset()
        return (torch.compile(call, backend="aot_eager") if compiled else call)(q, k, v)

    torch.testing.assert_close(out(1, compiled=True), out(1, compiled=False))
    assert not torch.allclose(out(1, compiled=True), out(2, compiled=False))


def test_the_planner_considers_it_on_a_cpu_alone() -> None:
    q, k, v = (x.float() for x in clustered())
    assert LowRank(24).estimate_bound(Problem.of(q, k, v).measure_norms(), 1.0).bound < math.inf
    elsewhere = LowRank(24).estimate_bound(Problem.of(*(x.to("meta") for x in (q, k, v))), 1.0)
    assert elsewhere.bound == math.inf and elsewhere.reason == "low_rank is for CPUs: name it to run it here"
