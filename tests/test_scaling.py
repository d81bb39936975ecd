"""Plans for many ranks: all shardings are weighed, what overlaps is not paid twice, links rule where they should."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from avow.calibration import Rates
from avow.core import Method, Sizes
from avow.distributed.parallel_plan import (
    Interconnect,
    Offer,
    Roofline,
    Sharding,
    crossover,
    offers,
    sharding_times,
    shardings,
    strategies,
    weak_scaling,
)
from avow.errors import ParameterError

PREFILL = Sizes(1, 32, 8, 131072, 131072, 128, 128, torch.bfloat16)
DECODE = dataclasses.replace(PREFILL, queries=1, keys=2**20)
FAST, SLOW = Interconnect(400e9, 5e-6), Interconnect(1e9, 1e-4)
DEVICE = Roofline(400e12, 4.8e12)


class Flat:
    """A machine that takes a second for every key of a rank."""

    def seconds(self, method: Method, sizes: Sizes) -> float:
        return float(sizes.keys)


def named(made: list[Offer], name: str) -> Offer:
    (found,) = (offer for offer in made if offer.strategy.name == name)
    return found


def test_ranks_go_over_heads_over_the_sequence_and_over_both() -> None:
    found = set(shardings(PREFILL, 16))
    assert found == {Sharding(1, 16), Sharding(2, 8), Sharding(4, 4), Sharding(8, 2)}
    # No key head is cut in two, and no rank is left without a key.
    assert set(shardings(PREFILL, 7)) == {Sharding(1, 7)}
    short = dataclasses.replace(PREFILL, keys=4)
    assert set(shardings(short, 16)) == {Sharding(4, 4), Sharding(8, 2)}
    assert str(Sharding(4, 2)) == "4 over heads × 2 over sequence" and str(Sharding(1, 1)) == "one rank"


def test_as_many_ranks_as_key_heads_need_not_talk() -> None:
    for offer in offers(PREFILL, 8, SLOW, DEVICE):
        assert offer.sharding == Sharding(8, 1)
        assert offer.traffic.sent == 0 and offer.time.sending == 0 and offer.dominated == "computing"


def test_every_way_is_offered_fastest_first_in_its_best_sharding() -> None:
    made = offers(PREFILL, 64, FAST, DEVICE)
    names = {"exact (keys)", "exact (ring)", "sparse", "separable", "random_features", "low_rank"}
    assert {offer.strategy.name for offer in made} == names
    assert [offer.time.whole for offer in made] == sorted(offer.time.whole for offer in made)
    for offer in made:
        every = [offer.strategy.time(PREFILL, sharding, FAST, DEVICE).whole for sharding in shardings(PREFILL, 64)]
        assert offer.time.whole == min(every) and len(offer.shardings) == len(every)


def test_a_ring_sends_while_it_computes() -> None:
    (ring,) = (way for way in strategies(PREFILL) if way.name == "exact (ring)")
    quick = ring.time(PREFILL, Sharding(1, 64), FAST, DEVICE)
    assert quick.whole == pytest.approx(quick.computing) and quick.sending > 0
    slow = ring.time(PREFILL, Sharding(1, 64), SLOW, DEVICE)
    assert slow.whole == pytest.approx(slow.sending + slow.computing / 64)
    # Causal or not: the last rank computes on every block.
    causal = dataclasses.replace(PREFILL, causal=True)
    assert ring.time(causal, Sharding(1, 64), FAST, DEVICE) == quick


def test_others_compute_first_and_send_then() -> None:
    (keys,) = (way for way in strategies(PREFILL) if way.name == "exact (keys)")
    spent = keys.time(PREFILL, Sharding(2, 4), FAST, DEVICE)
    assert spent.whole == spent.computing + spent.sending


def test_links_rule_where_they_are_slow_and_sooner() -> None:
    fast, slow = (named(offers(PREFILL, 64, link, DEVICE), "exact (ring)") for link in (FAST, SLOW))
    assert fast.dominated == "computing" and slow.dominated == "communication"
    assert fast.from_ranks is not None and slow.from_ranks is not None and slow.from_ranks < fast.from_ranks
    assert fast.efficiency > 0.99 and slow.efficiency < 0.5
    # At that many ranks links take longer, at half as many they do not.
    ring = fast.strategy
    for ranks, ruled in ((fast.from_ranks, True), (fast.from_ranks // 2, False)):
        spent = sharding_times(ring, PREFILL, ranks, FAST, DEVICE)[0]
        assert (spent.sending > spent.computing) == ruled
    assert crossover(ring, PREFILL, Interconnect(math.inf, 0.0), DEVICE) is None


def test_decoding_tells_answers_and_does_not_move_keys() -> None:
    made = offers(DECODE, 64, FAST, DEVICE)
    assert named(made, "exact (keys)").time.whole < named(made, "exact (ring)").time.whole / 10
    prefill = offers(PREFILL, 64, FAST, DEVICE)
    assert named(prefill, "exact (ring)").time.whole < named(prefill, "exact (keys)").time.whole


def test_sparse_attention_reads_less_and_waits_more() -> None:
    alike = dataclasses.replace(DECODE, keys=2**26)
    for kept, faster in ((0.1, True), (1.0, False)):
        made = offers(alike, 16, FAST, DEVICE._replace(kept=kept))
        sparse, exact = named(made, "sparse"), named(made, "exact (keys)")
        assert (sparse.time.whole < exact.time.whole) == faster
        assert sparse.traffic.waits > exact.traffic.waits
    # Nothing of it is causal over shards.
    assert "sparse" not in {way.name for way in strategies(dataclasses.replace(PREFILL, causal=True))}


def test_shards_of_the_sequence_share_the_work() -> None:
    (keys,) = (way for way in strategies(PREFILL) if way.name == "exact (keys)")
    times = [keys.time(PREFILL, Sharding(1, ranks), FAST, Flat()).computing for ranks in (1, 2, 64)]
    assert times == [131072, 65536, 2048]


def test_measured_rates_price_ranks_like_this_machine() -> None:
    made = offers(PREFILL, 64, FAST, Rates({}, "made up"))
    assert all(offer.time.computing > 0 for offer in made)


def test_weak_scaling_keeps_what_a_rank_has() -> None:
    for sizes, keys in ((PREFILL, 2048), (DECODE, 2**14)):
        _, seconds = weak_scaling(sizes, 64, Interconnect(math.inf, 0.0), Flat())["separable"]
        assert seconds == [keys] * 7
    found = weak_scaling(PREFILL, 256, FAST, DEVICE)
    assert found["separable"][0] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for name, grows in (("separable", False), ("exact (ring)", True)):
        _, seconds = found[name]
        assert (seconds[-1] > 10 * seconds[1]) == grows


@pytest.mark.parametrize(
    ("ranks", "keys", "words"),
    [
        (0, 8, "ranks=0 must be at least 1; try --ranks 8"),
        (1000, 8, "ranks=1000 cannot be spread over 8 keys and 8 key heads; use fewer ranks, or a longer sequence"),
    ],
)
def test_ranks_that_cannot_share_the_work_are_refused(ranks: int, keys: int, words: str) -> None:
    with pytest.raises(ParameterError) as problem:
        offers(dataclasses.replace(PREFILL, keys=keys), ranks, FAST, DEVICE)
    assert str(problem.value) == words
