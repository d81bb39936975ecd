"""Softmax attention by a polynomial: limit cases, algebra, which heads it certifies, and bounds that could break."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import avow
from avow.bench.workloads import workload
from avow.core import Problem
from avow.core.certify import certify
from avow.methods import polynomial
from avow.methods.polynomial import Polynomial
from tests.helpers.truth import judge

degrees = pytest.mark.parametrize("degree", [1, 2])
either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def quiet(spread: float, n: int = 200, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys whose logits have about this standard deviation, and values."""
    q, k, v = torch.randn(3, 2, 3, n, d).unbind()
    return spread * q, k, v


def broken(degree: int, problem: Problem) -> int:
    method = Polynomial(degree)
    computed = method.compute(problem)
    certificate = certify(method, problem, computed, 1.0)
    return judge(method, problem, computed.out, certificate.rows.reshape(problem.q.shape[:-1]), None).broken


@degrees
def test_equal_keys_are_averaged_exactly_however_long_they_are(degree: int) -> None:
    q, _, v = quiet(3.0)
    k = (100 * torch.randn(2, 3, 1, 8)).expand(2, 3, 200, 8)
    out, certificate = avow.attend(q, k, v, method="polynomial", degree=degree)
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out), rtol=0, atol=1e-5)
    assert certificate.bound < 1e-3


@degrees
def test_the_answer_does_not_change_when_all_keys_are_shifted(degree: int) -> None:
    q, k, v = (x.double() for x in quiet(0.5))
    there = avow.attend(q, k, v, method="polynomial", degree=degree).out
    shifted = avow.attend(q, k + 30, v, method="polynomial", degree=degree).out
    torch.testing.assert_close(there, shifted, rtol=0, atol=1e-9)
    causal = [avow.attend(q, x, v, method="polynomial", degree=degree, causal=True).out for x in (k, k + 30)]
    assert not torch.allclose(*causal, rtol=0, atol=1e-3), "a mean of the keys would tell causal rows of later ones"


@degrees
@pytest.mark.parametrize("size", [1.0, 1e-170, 1e-290])
def test_a_bound_is_kept_where_the_squares_of_values_vanish(degree: int, size: float) -> None:
    """One key draws the query, and its value points against all others, so that the error is almost its bound."""
    k = torch.zeros(1, 1, 400, 4, dtype=torch.float64)
    k[..., 0, 0] = 1.0
    v = torch.tensor([size, 0.0], dtype=torch.float64).repeat(1, 1, 400, 1)
    v[..., 0, :] *= -1
    q = torch.tensor([0.6, 0, 0, 0], dtype=torch.float64).reshape(1, 1, 1, 4)
    out, certificate = avow.attend(q, k, v, method="polynomial", degree=degree, scale=1.0)
    truth = torch.softmax(q @ k.mT, -1) @ (v / size)
    error = torch.linalg.vector_norm(out / size - truth, dim=-1)
    assert 0.99 * certificate.bound < float(error) <= certificate.bound


@degrees
@either_way
def test_it_is_the_taylor_polynomial_of_the_weights(degree: int, causal: bool) -> None:
    q, k, v = (x.double() for x in quiet(0.3, n=40))
    t = q @ (k if causal else k - k.mean(-2, keepdim=True)).mT / math.sqrt(8)
    weights = 1 + t + (t.square() / 2 if degree == 2 else 0)
    weights = weights.tril() if causal else weights
    out, _ = avow.attend(q, k, v, method="polynomial", degree=degree, causal=causal)
    torch.testing.assert_close(out, weights @ v / weights.sum(-1, keepdim=True))
    assert not torch.allclose(out, (1 + t).exp() @ v, rtol=0, atol=1e-3)


@either_way
def test_bounds_fall_with_the_spread_of_logits_and_with_the_degree(causal: bool) -> None:
    bounds = {
        degree: [
            avow.attend(*quiet(spread), method="polynomial", degree=degree, causal=causal).certificate.bound
            for spread in (0.3, 0.1, 0.03)
        ]
        for degree in (1, 2)
    }
    assert all(values == sorted(values, reverse=True) for values in bounds.values())
    assert bounds[2][1] < bounds[1][1] < 0.2 and bounds[1][2] < 1e-2


@degrees
@either_way
def test_loud_heads_get_an_answer_within_their_values_and_no_promise(degree: int, causal: bool) -> None:
    q, k, v = quiet(30.0)
    out, certificate = avow.attend(q, k, v, method="polynomial", degree=degree, causal=causal)
    longest = float(torch.linalg.vector_norm(v, dim=-1).amax())
    assert float(torch.linalg.vector_norm(out, dim=-1).amax()) <= longest * (1 + 1e-5)
    assert certificate.bound > 0.5
    with pytest.raises(avow.ToleranceUnreachable, match=r"polynomial: tol=0.01 is below the .* it can prove"):
        avow.attend(q, k, v, method="polynomial", degree=degree, causal=causal, tol=1e-2)


@degrees
@either_way
@pytest.mark.parametrize("spread", [0.01, 0.1, 0.4, 1.0])
def test_bounds_hold_and_would_not_without_the_remainder(
    degree: int, causal: bool, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Values that point along the logits: whatever weights are wrong, errors add up.
    q, k, _ = (x.double() for x in quiet(spread))
    v = torch.tanh(3 * k[..., :1]) * torch.ones(4, dtype=torch.float64)
    problem = Problem.of(q, k, v, causal=causal)
    assert broken(degree, problem) == 0
    monkeypatch.setattr(polynomial, "_remainder", lambda reach, degree: torch.zeros_like(reach))
    assert broken(degree, problem) > 0


def test_the_remainder_of_exp_is_bounded_on_both_sides_and_no_tighter() -> None:
    reach = torch.tensor([1e-9, 1e-3, 0.1, 0.999, 1.0, 1.001, 3.0, 30.0], dtype=torch.float64)
    grid = torch.linspace(0.05, 1, 500, dtype=torch.float64)
    t = torch.cat([-grid, grid])[:, None] * reach
    for degree in (1, 2):
        exp = torch.expm1(t) - t - (t.square() / 2 if degree == 2 else 0)
        share = (exp.abs() / t.square().clamp(min=1e-300)).amax(0)
        bound = polynomial._remainder(reach, degree)
        # expm1 minus its first terms cancels if these are small.
        known = reach > 1e-2
        assert bool((share[known] <= bound[known] * (1 + 1e-9)).all())
        assert bool((share[known] >= bound[known] * (1 - 1e-6)).all())
    assert float(polynomial._remainder(reach[:1], 1)) == pytest.approx(0.5)


@degrees
@either_way
def test_diffuse_heads_are_expected_to_be_certified_and_sharp_ones_not(degree: int, causal: bool) -> None:
    for kind, wanted in (("diffuse", True), ("copying", False)):
        load = workload(kind, heads=2, length=512, causal=causal)
        problem = load.problem
        estimate = Polynomial(degree).estimate_bound(problem.measure_norms(), 1.0)
        assert (estimate.bound < 1e-2) is wanted
        assert wanted or estimate.reason == "logits vary too much for a polynomial"
    mask = torch.rand(512, 512) < 0.9
    estimate = Polynomial(degree).estimate_bound(Problem.of(load.q, load.k, load.v, mask=mask).measure_norms(), 1.0)
    assert estimate.kind == "none" and "a mask that differs by row" in estimate.reason


@degrees
@either_way
@pytest.mark.parametrize("kind", ["plain", "shifted keys", "uneven lengths", "shared keys", "hidden keys"])
def test_what_is_expected_is_seldom_below_what_is_proved(degree: int, causal: bool, kind: str) -> None:
    q, k, v = torch.randn(3, 1, 4, 1000, 32).unbind()
    q, k, options = q / 5, k / 5, {"causal": causal}
    if kind == "shifted keys":
        k = k + torch.randn(32) / 4
    elif kind == "uneven lengths":
        q, k = (x * 2 * torch.rand(1, 4, 1000, 1) for x in (q, k))
    elif kind == "shared keys":
        k, v, options = k[:, :2], v[:, :2], options | {"enable_gqa": True}
    elif kind == "hidden keys":
        hidden = torch.rand(1, 1, 1, 1000) < 0.5
        k, options = torch.where(hidden.mT, k, 9 * k), options | {"mask": hidden}
    problem = Problem.of(q, k, v, **options).measure_norms()
    method = Polynomial(degree)
    proved = float(method.promise(problem, method.compute(problem), 1.0).rows.amax())
    assert 0.9 * proved <= method.estimate_bound(problem, 1.0).bound <= 2 * proved


def test_a_plan_does_not_deny_what_the_method_proves() -> None:
    q, k, v = torch.randn(3, 1, 4, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
    plan = avow.plan(q / 4, k / 4, v, causal=True, tol=1e-2)
    (line,) = (c for c in plan.ranked if c.method == Polynomial(1))
    proved = avow.attend(q / 4, k / 4, v, causal=True, method="polynomial", degree=1).certificate.bound
    assert line.estimate is not None and proved <= line.estimate.bound < 1e-2
    assert line.lost == f"expected {line.estimate.bound:.1e}, too near to 0.01 to try"
