"""Subnormal numbers may be read as zeros (torch.set_flush_denormal, some GPUs): certificates say what that costs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import avow
from avow.nn import KeyValueCache
from avow.numerics.norms import lengths, norm_floor, row_norms, slack, widened

Given = Callable[[], tuple[Tensor, Tensor, Tensor, float]]


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    """Subnormal numbers are read as zeros, by this thread at least."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def softmax_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Errors of rows against softmax attention in float64."""
    q, k, v = q.double(), k.double(), v.double()
    truth = torch.softmax(scale * q @ k.mT, -1) @ v
    return (out.double() - truth).norm(dim=-1) / v.norm(dim=-1).amax(-1)[..., None]


def subnormal_keys() -> tuple[Tensor, Tensor, Tensor, float]:
    torch.manual_seed(0)
    k = (torch.randn(1, 1, 64, 4) * 3e-39).contiguous()
    return torch.randn(1, 1, 5, 4) * 1e18, k, torch.randn(1, 1, 64, 4), 1e21


def subnormal_queries() -> tuple[Tensor, Tensor, Tensor, float]:
    torch.manual_seed(0)
    q = (torch.randn(1, 1, 5, 4) * 3e-39).contiguous()
    return q, torch.randn(1, 1, 64, 4) * 1e18, torch.randn(1, 1, 64, 4), 1e21


def subnormal_values() -> tuple[Tensor, Tensor, Tensor, float]:
    torch.manual_seed(0)
    v = (torch.randn(1, 1, 64, 4) * 3e-39).contiguous()
    return torch.randn(1, 1, 5, 4), torch.randn(1, 1, 64, 4), v, 1.0


PROBLEMS = [subnormal_keys, subnormal_queries, subnormal_values]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("method", ["auto", "exact", "sparse", "low_rank"])
def test_flushing_breaks_no_bound(problem: Given, method: str) -> None:
    q, k, v, scale = problem()
    with flushing():
        out, certificate = avow.attend(q, k, v, scale=scale, method=method)
    error = softmax_error(out, q, k, v, scale)
    assert bool((error <= certificate.rows).all())
    # Reading zeros does cost: the bound that holds for numbers as they are would be broken.
    assert float(error.amax()) > 1e-2


@pytest.mark.parametrize("problem", PROBLEMS)
def test_flushing_breaks_no_bound_of_a_cache(problem: Given) -> None:
    q, k, v, scale = problem()
    with flushing():
        cache = KeyValueCache(key_heads=1, dim=4)
        cache.append(k, v)
        out, certificate = cache.attend(q[:, :, -1:], scale=scale)
    assert bool((softmax_error(out, q[:, :, -1:], k, v, scale) <= certificate.rows).all())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_audit_sees_what_flushing_did(problem: Given) -> None:
    q, k, v, scale = problem()
    with flushing():
        out, _ = avow.attend(q, k, v, scale=scale)
        found = avow.audit(out, q, k, v, scale=scale)
    assert bool((softmax_error(out, q, k, v, scale)[0, 0] <= found.errors).all())


def test_subnormal_numbers_among_separable_logits_are_charged() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 16, 4) * size for size in (1e-39, 1e-39, 1.0))
    with flushing():
        out, certificate = avow.attend(q, k, v, method="separable", temperature=1e-39)
    rows, columns = torch.softmax(q.double() / 1e-39, -1), torch.softmax(k.double() / 1e-39, -2)
    error = (out.double() - rows @ (columns.mT @ v.double())).norm(dim=-1) / v.double().norm(dim=-1).amax()
    assert bool((error <= certificate.rows).all()) and float(error.amax()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_widened_as_they_are(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-39, -1e-40, 1e-45, 6e-8, -6e-8]).to(dtype)
    expected = numbers.double()
    with flushing():
        found = widened(numbers)
        read = numbers.double()
    assert torch.equal(found, expected)
    assert torch.equal(read, expected) == (dtype == torch.float16)  # float16 is read whole; others are not


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_are_bounds_while_numbers_are_flushed(dtype: torch.dtype) -> None:
    low = 1e-310 if dtype == torch.float64 else 1e-40
    sizes = torch.tensor([0.0, low, 1e3 * low, 1e-30, 1.0], dtype=torch.float64)
    x = (torch.randn(5, 8, dtype=torch.float64) * sizes[:, None]).to(dtype)
    tops = x.double().abs().amax(-1)
    inner = [math.hypot(*(x[i].double() / max(float(tops[i]), 5e-324)).tolist()) for i in range(5)]
    true = [float(top) * length for top, length in zip(tops, inner, strict=True)]
    with flushing():
        found = row_norms(x, "x", faithful=True)
        least = norm_floor(found, slack(8, dtype), 8)
        long = lengths(x)
        loose = row_norms(x[1:3], "x")
    for i, norm in enumerate(true):
        assert float(least[i]) <= norm <= float(found[i])
        assert norm <= float(long[i])
    assert float(found[0]) == float(long[0]) == 0.0  # zeros are zeros
    assert all(norm <= float(x) for norm, x in zip(true[1:3], loose, strict=True))
