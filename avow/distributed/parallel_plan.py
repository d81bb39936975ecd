"""How to spread attention over many ranks: every strategy in every sharding → seconds → the fastest.

Ranks are spread over heads, over the sequence, or over both: h groups of heads, each on s ranks. Heads need nothing of
each other, so only the s ranks of a group communicate. A rank's time is what it computes and what it sends after that;
a ring sends the next block while it computes on one. What a rank sends is counted by running the rounds of its protocol
on meta tensors (`protocols.traffic`). What ranks send to agree on a call comes on top: a page to each.
"""

from __future__ import annotations

import dataclasses
import functools
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
    """What connects the ranks: bytes a second that each can send, and seconds until a message is there.

    Attributes:
        bandwidth: bytes a second that each rank can send.
        latency: seconds until a message is there.

    >>> from avow.distributed import Interconnect
    >>> Interconnect(bandwidth=50e9, latency=5e-6).bandwidth
    50000000000.0
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not as_float(self.bandwidth) > 0:
            raise ParameterError("bandwidth", self.bandwidth, "must be above 0 bytes a second", "try bandwidth=1e9")
        if not as_float(self.latency) >= 0:
            raise ParameterError("latency", self.latency, "must be at least 0 seconds", "try latency=1e-4")

    def seconds(self, traffic: Traffic) -> float:
        """How long a rank is busy sending and waiting.

        Args:
            traffic: what it sends, and how often it waits.

        Returns:
            Seconds.
        """
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


def shardings(sizes: Sizes, ranks: int) -> list[Sharding]:
    """All ways to spread so many ranks evenly over key heads and over the sequence, no rank without a key."""
    every = (Sharding(heads, ranks // heads) for heads in range(1, ranks + 1) if ranks % heads == 0)
    return [one for one in every if sizes.key_heads % one.heads == 0 and one.sequence <= max(sizes.keys, 1)]


class Time(NamedTuple):
    """Seconds of one rank in a sharding: computing, sending and waiting, and both, as far as they do not overlap."""

    sharding: Sharding
    computing: float
    sending: float
    whole: float


@dataclass(frozen=True)
class Strategy:
    """One way to spread a method over the ranks of a sequence."""

    method: Method
    replicated: bool
    """Whether every rank has all queries."""

    @property
    def name(self) -> str:
        if not self.method.is_exact:
            return self.method.name
        return f"exact ({'keys' if self.replicated else 'ring'})"

    @property
    def overlaps(self) -> bool:
        """Whether a rank computes while it sends."""
        return self.method.is_exact and not self.replicated

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # strategies are small, and equal ones share their prices
    def traffic(self, sizes: Sizes, ranks: int) -> Traffic:
        """What a rank sends, for the sizes of a group of heads."""
        if ranks == 1:
            return NOTHING
        if self.method.is_exact:
            return keys_traffic(sizes, ranks) if self.replicated else ring_traffic(sizes, ranks)
        if self.method.selects_tokens:
            return sparse_traffic(sizes, ranks)
        if isinstance(self.method, LowRank):
            return low_rank_traffic(self.method, sizes, ranks)
        return states_traffic(self.method, sizes, ranks)

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
            return Time(sharding, computing, sending, computing + sending)
        # One block after the other; also if causal, since the last rank sees them all.
        step = sending / max(ranks - 1, 1)
        return Time(sharding, ranks * computing, sending, computing + (ranks - 1) * max(computing, step))


def of_heads(sizes: Sizes, groups: int) -> Sizes:
    """The sizes of one of so many equal groups of heads."""
    return dataclasses.replace(sizes, heads=sizes.heads // groups, key_heads=sizes.key_heads // groups)


def strategies(sizes: Sizes, rank: int = 64) -> list[Strategy]:
    """Every strategy for a problem of these sizes, with so many landmarks if there are as many keys."""
    sparse = [] if sizes.causal else [Strategy(Sparse(), True)]
    linear = (Separable(), RandomFeatures(), LowRank(max(1, min(rank, sizes.keys))))
    return [Strategy(Exact(), True), Strategy(Exact(), False), *sparse, *(Strategy(one, False) for one in linear)]


class Offer(NamedTuple):
    """A strategy in its best sharding, and what it costs a rank."""

    strategy: Strategy
    time: Time
    traffic: Traffic
    from_ranks: int | None
    """The fewest ranks, a power of two, at which communication takes longer than computing; None: up to 4096 never."""
    shardings: tuple[Time, ...]
    """All of them, from the fastest down."""

    @property
    def sharding(self) -> Sharding:
        return self.time.sharding

    @property
    def dominated(self) -> str:
        """What takes longer."""
        return "communication" if self.time.sending > self.time.computing else "computing"

    @property
    def efficiency(self) -> float:
        """The share of its time that a rank computes."""
        return self.time.computing / self.time.whole if self.time.whole > 0 else 1.0


def sharding_times(strategy: Strategy, sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> list[Time]:
    """A strategy in every sharding, fastest first; of equals the one over more heads, which needs no communication."""
    times = [strategy.time(sizes, one, link, machine) for one in shardings(sizes, ranks)]
    return sorted(times, key=lambda time: (time.whole, -time.sharding.heads))


def offers(sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> list[Offer]:
    """Every strategy in its best sharding, fastest first."""
    check(sizes, ranks)
    best = []
    for each in strategies(sizes):
        times = sharding_times(each, sizes, ranks, link, machine)
        heads, sequence = times[0].sharding
        traffic = each.traffic(of_heads(sizes, heads), sequence)
        best.append(Offer(each, times[0], traffic, crossover(each, sizes, link, machine), tuple(times)))
    return sorted(best, key=lambda offer: offer.time.whole)


def crossover(strategy: Strategy, sizes: Sizes, link: Interconnect, machine: Machine) -> int | None:
    """The fewest ranks, a power of two, at which a rank communicates longer than it computes in the best sharding."""
    ranks = 2
    while ranks <= _MOST_RANKS and (times := sharding_times(strategy, sizes, ranks, link, machine)):
        if times[0].sending > times[0].computing:
            return ranks
        ranks *= 2
    return None


def check(sizes: Sizes, ranks: int) -> None:
    """Raise if so many ranks cannot share the work."""
    if ranks < 1:
        raise ParameterError("ranks", ranks, "must be at least 1", "try --ranks 8")
    if not shardings(sizes, ranks):
        rule = f"cannot be spread over {sizes.keys} keys and {sizes.key_heads} key heads"
        raise ParameterError("ranks", ranks, rule, "use fewer ranks, or a longer sequence")


def weak_scaling(
    sizes: Sizes, ranks: int, link: Interconnect, machine: Machine
) -> dict[str, tuple[list[int], list[float]]]:
    """Weak scaling over the sequence, by strategy: ranks by powers of two, and seconds.

    Each rank keeps what one of so many ranks has of these sizes.
    """
    counts = [2**i for i in range(ranks.bit_length())]
    grown = [(sizes.with_keys(-(-sizes.keys // ranks) * count), count) for count in counts]
    return {
        each.name: (counts, [each.time(z, Sharding(1, n), link, machine).whole for z, n in grown])
        for each in strategies(sizes)
    }
