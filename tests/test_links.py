"""What the planner says that ranks send is what shards do send, to the byte, however many there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from avow.bench import shards
from avow.core import Sizes
from avow.distributed import comm_cost
from avow.distributed.bytes_sent import ring_bytes
from avow.distributed.comm_cost import Interconnect, Traffic
from avow.distributed.parallel_plan import strategies
from avow.distributed.point_to_point import PAGE

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
    assert (found.load.sent > 0) == (ranks > 1)


@pytest.mark.parametrize("name", ["exact (keys)", "separable", "random_features"])
def test_as_many_as_256_shards_send_what_the_model_says(name: str) -> None:
    found = simulated(name, 256)
    assert found.fault == "" and found.load.messages >= 255


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_another_width_send_another_number_of_bytes(dtype: torch.dtype) -> None:
    found = {name: simulated(name, 3, dtype) for name in ("exact (ring)", "separable")}
    assert [one.load for one in found.values()] == [one.modelled for one in found.values()]
    half = simulated("exact (ring)", 3).load.sent
    assert found["exact (ring)"].load.sent == half * dtype.itemsize // 4


def test_a_model_that_forgets_a_number_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_cost, "PARTIAL", 9)
    assert simulated("exact (keys)", 3).fault == ("exact (keys) over 3: sent (2048, 2, 1), modelled (1920, 2, 1)")


def test_an_answer_that_is_not_one_shards_is_caught() -> None:
    found = simulated("exact (ring)", 2)
    assert found._replace(apart=1e-3).fault == "exact (ring) over 2: 0.001 from one shard's answer"
    assert found._replace(apart=float("nan")).fault


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_model_is_that_of_the_calls_themselves(ranks: int, dtype: torch.dtype) -> None:
    """Apart from what processes say to agree; of the other ways `bytes_sent`, which is counted, is made of it."""
    z = Sizes(2, 8, 4, 64 * ranks, 64 * ranks, 32, 24, dtype)
    assert comm_cost.ring(z, ranks).sent == ring_bytes(z, [64] * ranks, 0) - (ranks - 1) * PAGE


def test_a_link_takes_its_bandwidth_and_its_latency() -> None:
    link = Interconnect(1e9, 1e-5)
    assert link.seconds(Traffic(2_000_000, 7, 3)) == pytest.approx(2e-3 + 3e-5)
    assert link.seconds(comm_cost.NOTHING) == 0
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33) and Traffic(1, 2, 3).times(3) == Traffic(
        3, 6, 9
    )


def test_what_is_added_up_costs_twice_its_size_however_many_ranks() -> None:
    for ranks in (2, 8, 64, 1024):
        sent = comm_cost.all_reduce(2**20, 8, ranks).sent
        assert sent == 2 * (ranks - 1) * 2**20 * 8 // ranks
    assert comm_cost.all_reduce(2**20, 8, 1) == comm_cost.NOTHING
    assert comm_cost.all_gather(100, 5) == Traffic(400, 4, 1)


def test_a_ring_sends_every_block_on_but_the_last() -> None:
    z = dataclasses.replace(DECODING, queries=131072)
    block = 131072 // 8 * 8 * (128 + 128) * 2
    assert comm_cost.ring(z, 8) == Traffic(7 * block, 7, 7)
    # All together: each rank's keys and values reach each other rank.
    assert 8 * comm_cost.ring(z, 8).sent == 7 * 131072 * 8 * 256 * 2


def test_what_sparse_attention_sends_does_not_grow_with_the_keys() -> None:
    longer = dataclasses.replace(DECODING, keys=2**24)
    assert comm_cost.sparse_rounds(DECODING, 64) == comm_cost.sparse_rounds(longer, 64)
    assert comm_cost.ring(longer, 64).sent == 128 * comm_cost.ring(DECODING, 64).sent
    alone = dataclasses.replace(DECODING, key_heads=32)
    assert comm_cost.sparse_rounds(alone, 64).waits < comm_cost.sparse_rounds(DECODING, 64).waits
    assert comm_cost.sparse_rounds(DECODING, 64, reports=2).sent > comm_cost.sparse_rounds(DECODING, 64).sent
