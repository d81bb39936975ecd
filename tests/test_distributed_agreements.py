"""Every call agrees once, in one message of one page, before anything else is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from avow.distributed import ShardedCache, attend, consensus
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.ring import ring_attention
from avow.nn import KeyValueCache
from tests.helpers.processes import together
from tests.test_distributed_choice import DEAR, FEATURES, LANDMARKS, LINK, SPARSE, inputs

pytestmark = pytest.mark.processes

apart = partial(attend, shared_queries=False)
# Each kind of call, its options, the rates that the planner sees, and the method that answers.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[float]], str]] = {
    "exact": (attend, {"method": "exact"}, {}, "exact"),
    "exact within a tolerance": (attend, {"method": "exact", "tol": 1e-3, "rtol": 0.1}, {}, "exact"),
    "exact in float64 after float32": (attend, {"method": "exact", "tol": 1e-7}, {}, "exact"),
    "ring": (apart, {"method": "exact"}, {}, "exact"),
    "ring in float64 after float32": (apart, {"method": "exact", "tol": 1e-7}, {}, "exact"),
    "sparse": (attend, {"method": "sparse", "tol": 0.1}, {}, "sparse"),
    "sparse by samples": (attend, {"method": "sparse", "tol": 0.1, "confidence": 0.99}, {}, "sparse"),
    "separable": (apart, {"method": "separable"}, {}, "separable"),
    "random features": (apart, {"method": "random_features"}, {}, "random_features"),
    "random features within a tolerance": (
        apart,
        {"method": "random_features", "features": 64, "tol": 2.0, "confidence": 0.9},
        {},
        "random_features",
    ),
    "landmarks": (apart, {"method": "low_rank", "tol": 1.0}, {}, "low_rank"),
    "chosen sparse": (attend, {"tol": 0.1}, SPARSE, "sparse"),
    "chosen landmarks": (apart, {"tol": 0.2}, LANDMARKS, "low_rank"),
    "chosen features": (apart, {"tol": 0.3, "confidence": 0.9}, FEATURES, "random_features"),
    "chosen exact": (apart, {"tol": 1e-3}, LANDMARKS, "exact"),
}


class Seen:
    """What a call sent when it agreed, each time."""

    def __init__(self, call: Callable[[], Any], rates: dict[str, list[float]]) -> None:
        self.before: list[int] = []
        agreement = consensus.allgather_json

        def watched(value: Any, group: dist.ProcessGroup) -> list[Any]:
            self.before.append(traffic.sent)
            told = agreement(value, group)
            self.pages = (traffic.sent - self.before[-1]) / PAGE
            return told

        with (
            mock.patch.object(consensus, "allgather_json", watched),
            mock.patch("avow.distributed.attend.own_rates", lambda device: rates or {"exact": DEAR}),
            counted() as traffic,
        ):
            self.result = call()


def ask() -> dict[str, tuple[list[int], float, str]]:
    rank, found = dist.get_rank(), {}
    for name, (call, options, rates, _) in CALLS.items():
        p = inputs(0.05 if "features" in name else 0.7 if call is apart else 3.0)
        here = slice(0, 100) if rank == 0 else slice(100, 300)
        given = [(p.q[:, :, here] if call is apart else p.q), p.k[:, :, here], p.v[:, :, here]]
        tensors = [x.clone().requires_grad_() for x in given]
        chosen = {"link": LINK} if rates else {}
        seen = Seen(lambda: call(*tensors, enable_gqa=True, **options, **chosen), rates)  # noqa: B023  # called at once
        out, certificate = seen.result
        found[name] = seen.before, seen.pages, certificate.method
        back = Seen(lambda: torch.autograd.grad(out.sum(), tensors), {})  # noqa: B023  # called at once
        assert back.before == [], name
    q, k, v = inputs(0.7).q[:, :, :50], inputs(0.7).k[:, :, :50], inputs(0.7).v[:, :, :50]
    seen = Seen(lambda: ring_attention(q, k, v, enable_gqa=True), {})
    found["ring without a certificate"] = seen.before, seen.pages, "exact"
    made = Seen(lambda: ShardedCache(KeyValueCache(2, 8)), {})
    cache: ShardedCache = made.result
    cache.append(k, v)
    for name, tol in {"cache": 0.3, "exact cache": None}.items():
        seen = Seen(lambda: cache.attend(q[:, :, :1], tol=tol), {})  # noqa: B023  # called at once
        found[name] = seen.before, seen.pages, seen.result.certificate.method
    found["making a cache"] = made.before, made.pages, ""
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(2, ask, tmp_path_factory.mktemp("agreements"))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_once_before_it_sends_anything(said: list[dict[str, Any]], name: str) -> None:
    for one in said:
        assert one[name] == ([0], 1.0, CALLS[name][-1])


def test_calls_without_a_certificate_and_of_caches_agree_once(said: list[dict[str, Any]]) -> None:
    names = ["ring without a certificate", "cache", "exact cache", "making a cache"]
    for one in said:
        assert [one[name][:2] for name in names] == [([0], 1.0)] * len(names)
