"""How to spread attention over many ranks: every strategy in every sharding → seconds → the fastest.

Ranks are spread over heads, over the sequence, or over both: h groups of heads, each on s ranks. Heads need nothing of
each other, so only the s ranks of a group communicate. A rank's time is what it computes and what it sends after that;
a ring sends the next block while it computes on one. What a rank sends is counted by running the rounds of its protocol
on meta tensors (`protocols.traffic`). What ranks send to agree on a call comes on top: a page to each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from avow.core import Method, Sizes
from avow.distributed.exact import keys_traffic
from avow.distributed.low_rank import low_rank_traffic
from avow.distributed.protocols import NOTHING, Traffic
from avow.distributed.ring import ring_traffic
from avow.distributed.sparse import sparse_traffic
from avow.distributed.states import states_traffic
from avow.errors import ParameterError
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse
from avow.parameters import as_float

# Bytes of a token beside its sketch: how far that may be off, the length of its value, its part of a group's scales.
_BESIDE = 12
# Up to how many ranks it is looked for where communication dominates.
_MOST_RANKS = 4096


@dataclass(frozen=True)
class Interconnect:
    """What connects the ranks: bytes a second that each can send, and seconds until a message is there."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not as_float(self.bandwidth) > 0:
            raise ParameterError("bandwidth", self.bandwidth, "must be above 0 bytes a second", "try bandwidth=1e9")
        if not as_float(self.latency) >= 0:
            raise ParameterError("latency", self.latency, "must be at least 0 seconds", "try latency=1e-4")

    def seconds(self, traffic: Traffic) -> float:
        """How long a rank is busy sending and waiting."""
        return traffic.sent / self.bandwidth + traffic.waits * self.latency


def usual_interconnect(device: str) -> Interconnect:
    """The default: sockets of one machine, or GPUs of one."""
    return Interconnect(1e11, 1e-5) if device == "cuda" else Interconnect(1e9, 1e-4)


class Machine(Protocol):
    """Whatever says how long a rank computes."""

    def seconds(self, method: Method, sizes: Sizes) -> float:
        """The time of one call."""


class Roofline(NamedTuple):
    """A device by two figures: a call takes as long as its products or its reading, whichever is slower.

    Sparse attention reads a sketch of all keys and `kept` of the tokens.
    """

    flops: float
    memory: float
    kept: float = 0.1

    def seconds(self, method: Method, sizes: Sizes) -> float:
        z = sizes
        queries = z.batch * z.heads * z.queries * (z.dim + z.value_dim) * z.item
        keys = z.batch * z.key_heads * z.keys * (z.dim + z.value_dim) * z.item
        if not method.selects_tokens:
            return max(method.cost(z).flops / self.flops, (queries + keys) / self.memory)
        tokens = z.batch * z.key_heads * z.keys
        sketch = tokens * (z.dim * method.parameters["bits"] / 8 + _BESIDE)
        # Products with the sketch and with what is read: its model of costs is that of the CPU's path, which does more.
        flops = 2 * z.batch * z.heads * z.queries * z.keys * (z.dim + self.kept * (z.dim + z.value_dim))
        return max(flops / self.flops, (queries + sketch + self.kept * keys) / self.memory)


class Sharding(NamedTuple):
    """Ranks spread over heads and over the sequence."""

    heads: int
    sequence: int

    def __str__(self) -> str:
        over = [f"{count} over {what}" for what, count in (("heads", self.heads), ("sequence", self.sequence))]
        kept = [words for words, count in zip(over, self, strict=True) if count > 1]
        return " × ".join(kept) or "one rank"


def shardings(sizes: Sizes, ranks: int) -> Iterator[Sharding]:
    """All ways to spread so many ranks evenly over key heads and over the sequence, no rank without a key."""
    for heads in range(1, ranks + 1):
        if ranks % heads == 0 and sizes.key_heads % heads == 0 and ranks // heads <= max(sizes.keys, 1):
            yield Sharding(heads, ranks // heads)


class Time(NamedTuple):
    """Seconds of one rank: computing, sending and waiting, and both, as far as they do not overlap."""

    computing: float
    sending: float
    whole: float


@dataclass(frozen=True)
class Strategy:
    """One way to spread a method over the ranks of a sequence."""

    name: str
    method: Method
    replicated: bool
    """Whether every rank has all queries."""
    overlaps: bool = False

    def traffic(self, sizes: Sizes, ranks: int) -> Traffic:
        """What a rank sends, for the sizes of a group of heads."""
        return _traffic(self.method, self.replicated, sizes, ranks)

    def part(self, z: Sizes, ranks: int) -> Sizes:
        """What a rank computes on at once."""
        keys = -(-z.keys // ranks)
        if self.replicated:
            # Whichever rank has the first keys computes on them for all rows: causality saves it nothing.
            return dataclasses.replace(z, keys=keys, causal=z.causal and ranks == 1)
        queries = -(-z.queries // ranks)
        return dataclasses.replace(z, queries=queries, keys=keys, causal=z.causal and not (self.overlaps and ranks > 1))

    def time(self, sizes: Sizes, sharding: Sharding, link: Interconnect, machine: Machine) -> Time:
        """A rank's seconds; of ranks that differ, those of the slowest."""
        z, ranks = of_heads(sizes, sharding.heads), sharding.sequence
        computing, sending = machine.seconds(self.method, self.part(z, ranks)), link.seconds(self.traffic(z, ranks))
        if not self.overlaps:
            return Time(computing, sending, computing + sending)
        # One block after the other; also if causal, since the last rank sees them all.
        step = sending / max(ranks - 1, 1)
        return Time(ranks * computing, sending, computing + (ranks - 1) * max(computing, step))


@functools.lru_cache(maxsize=4096)
def _traffic(method: Method, replicated: bool, sizes: Sizes, ranks: int) -> Traffic:
    if ranks == 1:
        return NOTHING
    if method.is_exact:
        return keys_traffic(sizes, ranks) if replicated else ring_traffic(sizes, ranks)
    if method.selects_tokens:
        return sparse_traffic(sizes, ranks)
    if isinstance(method, LowRank):
        return low_rank_traffic(method, sizes, ranks)
    return states_traffic(method, sizes, ranks)


def of_heads(sizes: Sizes, groups: int) -> Sizes:
    """The sizes of one of so many equal groups of heads."""
    return dataclasses.replace(sizes, heads=sizes.heads // groups, key_heads=sizes.key_heads // groups)


def strategy(method: Method, replicated: bool) -> Strategy:
    """How to spread a method: for exact attention there are two ways, with all queries in every rank or its own."""
    if method.is_exact:
        return Strategy(f"exact ({'keys' if replicated else 'ring'})", method, replicated, overlaps=not replicated)
    return Strategy(method.name, method, replicated=method.selects_tokens)


def strategies(sizes: Sizes, rank: int = 64) -> list[Strategy]:
    """Every strategy for a problem of these sizes, with so many landmarks if there are as many keys."""
    sparse = [] if sizes.causal else [strategy(Sparse(), True)]
    linear = (Separable(), RandomFeatures(), LowRank(max(1, min(rank, sizes.keys))))
    return [strategy(Exact(), True), strategy(Exact(), False), *sparse, *(strategy(one, False) for one in linear)]


class ShardingTime(NamedTuple):
    """A sharding and a rank's seconds in it."""

    sharding: Sharding
    time: Time


class Offer(NamedTuple):
    """A strategy in its best sharding, and what it costs a rank."""

    strategy: Strategy
    sharding: Sharding
    time: Time
    traffic: Traffic
    from_ranks: int | None
    """The fewest ranks, a power of two, at which communication takes longer than computing; None: up to 4096 never."""
    shardings: tuple[ShardingTime, ...]
    """All of them, from the fastest down."""

    @property
    def dominated(self) -> str:
        """What takes longer."""
        return "communication" if self.time.sending > self.time.computing else "computing"

    @property
    def efficiency(self) -> float:
        """The share of its time that a rank computes."""
        return self.time.computing / self.time.whole if self.time.whole > 0 else 1.0


def sharding_times(
    strategy: Strategy, sizes: Sizes, ranks: int, link: Interconnect, machine: Machine
) -> list[ShardingTime]:
    """A strategy in every sharding, fastest first; of equals the one over more heads, which needs no communication."""
    times = [ShardingTime(one, strategy.time(sizes, one, link, machine)) for one in shardings(sizes, ranks)]
    return sorted(times, key=lambda one: (one.time.whole, -one.sharding.heads))


def offers(sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> list[Offer]:
    """Every strategy in its best sharding, fastest first."""
    check(sizes, ranks)
    best = []
    for each in strategies(sizes):
        times = sharding_times(each, sizes, ranks, link, machine)
        sharding, time = times[0]
        traffic = each.traffic(of_heads(sizes, sharding.heads), sharding.sequence)
        best.append(Offer(each, sharding, time, traffic, crossover(each, sizes, link, machine), tuple(times)))
    return sorted(best, key=lambda offer: offer.time.whole)


def crossover(strategy: Strategy, sizes: Sizes, link: Interconnect, machine: Machine) -> int | None:
    """The fewest ranks, a power of two, at which a rank communicates longer than it computes in the best sharding."""
    ranks = 2
    while ranks <= _MOST_RANKS and any(True for _ in shardings(sizes, ranks)):
        time = sharding_times(strategy, sizes, ranks, link, machine)[0].time
        if time.sending > time.computing:
            return ranks
        ranks *= 2
    return None


def check(sizes: Sizes, ranks: int) -> None:
    """Raise if so many ranks cannot share the work."""
    if ranks < 1:
        raise ParameterError("ranks", ranks, "must be at least 1", "try --ranks 8")
    if not any(True for _ in shardings(sizes, ranks)):
        rule = f"cannot be spread over {sizes.keys} keys and {sizes.key_heads} key heads"
        raise ParameterError("ranks", ranks, rule, "use fewer ranks, or a longer sequence")


class WeakScaling(NamedTuple):
    """A strategy under weak scaling: ranks by powers of two, and seconds."""

    ranks: list[int]
    seconds: list[float]


def weak_scaling(sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> dict[str, WeakScaling]:
    """Weak scaling over the sequence: each rank keeps what one of so many ranks has of these sizes."""
    counts = [2**i for i in range(ranks.bit_length())]
    grown = [(longer(sizes, count, ranks), count) for count in counts]
    return {
        each.name: WeakScaling(counts, [each.time(z, Sharding(1, n), link, machine).whole for z, n in grown])
        for each in strategies(sizes)
    }


def longer(sizes: Sizes, count: int, ranks: int) -> Sizes:
    """The problem of `count` ranks of which each has as many keys as one of `ranks` has of these sizes.

    There are as many queries as before, or as many as keys if it was so.
    """
    keys = -(-sizes.keys // ranks) * count
    return dataclasses.replace(sizes, keys=keys, queries=keys if sizes.queries == sizes.keys else sizes.queries)
