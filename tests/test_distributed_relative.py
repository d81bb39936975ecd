"""Processes keep a tolerance relative to the answer together, or all say that they cannot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from avow.attend import Attended
from avow.distributed import ShardedCache, attend
from avow.nn import KeyValueCache
from tests.helpers.processes import message, together

pytestmark = pytest.mark.processes

KEYS, ENDS = 600, (0, 250, 600)


def inputs(dtype: torch.dtype = torch.float32, rows: int = KEYS, common: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Values that nearly cancel, but for what they have in common."""
    draws = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 16, generator=draws) for n in (rows, KEYS, KEYS))
    q[..., 2:], k[..., 2:] = 0.01 * q[..., 2:], 0.01 * k[..., 2:]
    return (0.1 * q).to(dtype), k.to(dtype), (v + common).to(dtype)


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return torch.softmax(q @ k.mT / 4.0, -1) @ v


def shared(dtype: torch.dtype, **options: Any) -> Attended:
    q, k, v = inputs(dtype, 5)
    here = slice(*ENDS[dist.get_rank() : dist.get_rank() + 2])
    return attend(q, k[..., here, :], v[..., here, :], **options)


def own(common: float = 0.0, **options: Any) -> Attended:
    q, k, v = inputs(common=common)
    here = slice(*ENDS[dist.get_rank() : dist.get_rank() + 2])
    return attend(q[..., here, :], k[..., here, :], v[..., here, :], shared_queries=False, **options)


def cached(**options: Any) -> Attended:
    q, k, v = inputs(rows=1)
    cache = ShardedCache(KeyValueCache(2, 16))
    cache.append(k, v)
    return cache.attend(q, **options)


def job() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {
        f"shared, {dtype}, {rtol:g}": tuple(shared(dtype, rtol=rtol, method=method))
        for dtype, rtol, method in (
            (torch.float32, 0.1, "auto"),
            (torch.float32, 1e-4, "exact"),
            (torch.bfloat16, 2e-2, "auto"),
            (torch.float64, 1e-9, "auto"),
        )
    }
    found["sparse"] = tuple(shared(torch.float32, rtol=0.2, method="sparse"))
    found["sparse, both"] = tuple(shared(torch.float32, tol=1e-3, rtol=0.2, method="sparse"))
    found["ring"] = tuple(own(rtol=1e-3))
    found["low_rank"] = tuple(own(3.0, rtol=0.2, method="low_rank", rank=64))
    found["cache"] = tuple(cached(rtol=0.1))
    found["cache, both"] = tuple(cached(tol=1e-3, rtol=0.5))
    found["cache, float64"] = tuple(cached(rtol=1e-5))
    found["refused"] = {
        "shared": message(lambda: shared(torch.float32, rtol=1e-12)),
        "ring": message(lambda: own(rtol=1e-12)),
        "sparse": message(lambda: shared(torch.float32, rtol=1e-8, method="sparse")),
        "low_rank": message(lambda: own(rtol=1e-3, method="low_rank", rank=1)),
        "cache": message(lambda: cached(rtol=1e-12)),
        "unlike": message(lambda: shared(torch.float32, rtol=0.1 + 0.1 * rank)),
        "unlike cache": message(lambda: cached(rtol=0.1 + 0.1 * rank)),
        "no number": message(lambda: shared(torch.float32, rtol=-0.1)),
    }
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("relative")
    return together(2, job, folder)


LIMITS = {
    "shared, torch.float32, 0.1": (0.1, None),
    "shared, torch.float32, 0.0001": (1e-4, None),
    "shared, torch.bfloat16, 0.02": (2e-2, None),
    "shared, torch.float64, 1e-09": (1e-9, None),
    "sparse": (0.2, None),
    "sparse, both": (0.2, 1e-3),
    "cache": (0.1, None),
    "cache, both": (0.5, 1e-3),
    "cache, float64": (1e-5, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_shards_of_the_keys_keep_a_relative_tolerance(answers: list[dict[str, Any]], name: str) -> None:
    rtol, tol = LIMITS[name]
    (out, certificate), (_, other) = (one[name] for one in answers)
    target = truth(*inputs(out.dtype, 1 if "cache" in name else 5))
    errors = (out.double() - target).norm(dim=-1) / target.norm(dim=-1)
    assert certificate.keeps(tol, rtol) and certificate == other
    assert bool((errors <= certificate.relative_rows).all())
    assert certificate.relative == float(certificate.relative_rows.amax())
    assert certificate.method == ("sparse" if "sparse" in name else certificate.method)


@pytest.mark.parametrize(("name", "rtol", "common"), [("ring", 1e-3, 0.0), ("low_rank", 0.2, 3.0)])
def test_rows_of_each_process_keep_it_too(answers: list[dict[str, Any]], name: str, rtol: float, common: float) -> None:
    target = truth(*inputs(common=common))
    for rank, found in enumerate(answers):
        out, certificate = found[name]
        mine = target[..., ENDS[rank] : ENDS[rank + 1], :]
        errors = (out.double() - mine).norm(dim=-1) / mine.norm(dim=-1)
        assert certificate.keeps(rtol=rtol) and 0 < certificate.relative < math.inf
        assert bool((errors <= certificate.relative_rows).all())


REFUSED = {
    "shared": "ToleranceUnreachable: rtol=1e-12 is less than can be proved, ",
    "ring": "ToleranceUnreachable: rtol=1e-12 is less than can be proved, ",
    "sparse": "ToleranceUnreachable: sparse: rtol=1e-08 ",
    "low_rank": "ToleranceUnreachable: low_rank: rtol=0.001 is below the ",
    "cache": "ToleranceUnreachable: rtol=1e-12 is less than can be proved, ",
    "unlike": "InputError: rtol at rank 1=0.2 must be as at rank 0, 0.1",
    "unlike cache": "InputError: rtol at rank 1=0.2 must be as at rank 0, 0.1",
    "no number": "ParameterError: rtol=-0.1 must be a number above 0",
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_processes_refuse_what_they_cannot_prove(answers: list[dict[str, Any]], name: str) -> None:
    for found in answers:
        assert found["refused"][name].startswith(REFUSED[name])
