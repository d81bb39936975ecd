"""What the planner says that ranks send is what shards do send, to the byte, however many there are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from avow.bench import shards
from avow.core import Sizes
from avow.distributed import exact
from avow.distributed.exact import keys_traffic
from avow.distributed.parallel_plan import Interconnect, strategies
from avow.distributed.protocols import NOTHING, Traffic, all_gather, all_max, all_reduce, side_by_side, traffic
from avow.distributed.ring import ring_traffic
from avow.distributed.sparse import sparse_traffic
from avow.errors import ParameterError

NAMES = [way.name for way in strategies(shards.problem(2, True).sizes)]
DECODING = Sizes(1, 32, 8, 1, 131072, 128, 128, torch.bfloat16)


def simulated(name: str, ranks: int, dtype: torch.dtype = torch.float32) -> shards.Simulated:
    (way,) = (way for way in strategies(shards.problem(ranks, True).sizes) if way.name == name)
    return shards.simulate(way, shards.problem(ranks, not way.replicated, dtype), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("name", NAMES)
def test_shards_send_what_the_model_says(name: str, ranks: int) -> None:
    found = simulated(name, ranks)
    assert found.fault == ""
    assert (found.traffic.sent > 0) == (ranks > 1)


@pytest.mark.parametrize("name", ["exact (keys)", "separable", "random_features"])
def test_as_many_as_256_shards_send_what_the_model_says(name: str) -> None:
    found = simulated(name, 256)
    assert found.fault == "" and found.traffic.messages >= 255


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_another_width_send_another_number_of_bytes(dtype: torch.dtype) -> None:
    found = {name: simulated(name, 3, dtype) for name in ("exact (ring)", "separable")}
    assert [one.traffic for one in found.values()] == [one.modelled for one in found.values()]
    half = simulated("exact (ring)", 3).traffic.sent
    assert found["exact (ring)"].traffic.sent == half * dtype.itemsize // 4


def test_a_model_that_forgets_a_number_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulated("exact (keys)", 3)
    monkeypatch.setattr(exact, "PARTIAL", 9)
    wrong = keys_traffic(shards.problem(3, False).sizes, 3)
    assert found._replace(modelled=wrong).fault == "exact (keys) over 3: sent (6144, 2, 1), modelled (6016, 2, 1)"


def test_an_answer_that_is_not_one_shards_is_caught() -> None:
    found = simulated("exact (ring)", 2)
    assert found._replace(distance=1e-3).fault == "exact (ring) over 2: 0.001 from one shard's answer"
    assert found._replace(distance=float("nan")).fault


def test_a_price_does_not_load_torchs_compiler() -> None:
    code = """
import sys, torch
from avow.core import Sizes
from avow.distributed.parallel_plan import strategies
sizes = Sizes(1, 8, 2, 8192, 8192, 64, 64, torch.bfloat16)
before = set(sys.modules)
print([way.traffic(sizes, 4).sent > 0 for way in strategies(sizes)], "torch._dynamo" in set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[True] * 6} False"


def test_a_link_takes_its_bandwidth_and_its_latency() -> None:
    link = Interconnect(1e9, 1e-5)
    assert link.seconds(Traffic(2_000_000, 7, 3)) == pytest.approx(2e-3 + 3e-5)
    assert link.seconds(NOTHING) == 0
    with pytest.raises(ParameterError, match="bandwidth=0 must be above 0 bytes a second"):
        Interconnect(0, 1e-5)
    with pytest.raises(ParameterError, match="latency=nan must be at least 0 seconds"):
        Interconnect(1e9, float("nan"))
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33)


@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_sums_and_largest_are_those_of_all_shards(count: int) -> None:
    x = torch.arange(3.0 * count).reshape(3, count)
    for reduce, whole in ((all_reduce, x.sum(0)), (all_max, x.amax(0))):
        found, sent = side_by_side([reduce(one, 3) for one in x])
        assert all(torch.equal(one, whole) for one in found)
        assert (sent[0].sent > 0) == (count > 0)


def test_what_is_added_up_costs_twice_its_size_however_many_ranks() -> None:
    numbers = torch.empty(2**20, dtype=torch.float64, device="meta")
    for ranks in (2, 8, 64):
        assert traffic([all_reduce(numbers, ranks)], ranks).sent == 2 * (ranks - 1) * 2**20 * 8 // ranks
    assert traffic([all_reduce(numbers, 1)], 1) == NOTHING
    assert traffic([all_gather(numbers[:25].int(), 5)], 5) == Traffic(400, 4, 1)


def test_a_ring_sends_every_block_on_but_the_last() -> None:
    z = dataclasses.replace(DECODING, queries=131072)
    block = 131072 // 8 * 8 * (128 + 128) * 2
    assert ring_traffic(z, 8) == Traffic(7 * block, 7, 7)
    # All together: each rank's keys and values reach each other rank.
    assert 8 * ring_traffic(z, 8).sent == 7 * 131072 * 8 * 256 * 2


def test_what_sparse_attention_sends_does_not_grow_with_the_keys() -> None:
    longer = dataclasses.replace(DECODING, keys=2**24)
    assert sparse_traffic(DECODING, 64) == sparse_traffic(longer, 64)
    assert ring_traffic(longer, 64).sent == 128 * ring_traffic(DECODING, 64).sent
    alone = dataclasses.replace(DECODING, key_heads=32)
    assert sparse_traffic(alone, 64).waits < sparse_traffic(DECODING, 64).waits
    assert sparse_traffic(DECODING, 64, reports=2).sent > sparse_traffic(DECODING, 64).sent
