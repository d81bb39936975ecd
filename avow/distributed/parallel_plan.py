"""Which way to spread attention over many ranks: every way in every sharding → seconds → the fastest. No tensors here.

Ranks are spread over heads, over the sequence, or over both: h groups of heads, each on s ranks. Heads need nothing of
each other, so only the s ranks of a group talk. A rank's time is what it computes and what it sends after that; a ring
sends the next block while it computes on one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from avow.core import Method, Sizes
from avow.distributed import comm_cost
from avow.distributed.comm_cost import Interconnect, Traffic
from avow.errors import ParameterError
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.methods.sparse import Sparse

# Bytes of a token beside its sketch: how far that may be off, the length of its value, its part of a group's scales.
_BESIDE = 12
# Where it is looked for how many ranks make communication dominate.
_MOST_RANKS = 4096


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
        if method.name != "sparse":
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
    summary: str
    load: Callable[[Sizes, int], Traffic]
    """What a rank sends, for the sizes of a group of heads."""
    replicated: bool
    """Whether every rank has all queries."""
    overlaps: bool = False

    def part(self, z: Sizes, ranks: int) -> Sizes:
        """What a rank computes on at once."""
        keys = -(-z.keys // ranks)
        if self.replicated:
            # Whichever rank has the first keys computes on them for all rows: causality saves it nothing.
            return dataclasses.replace(z, keys=keys, causal=z.causal and ranks == 1)
        queries = -(-z.queries // ranks)
        return dataclasses.replace(z, queries=queries, keys=keys, causal=z.causal and not (self.overlaps and ranks > 1))

    def spent(self, sizes: Sizes, sharding: Sharding, link: Interconnect, machine: Machine) -> Time:
        """A rank's seconds; of ranks that differ, those of the slowest."""
        z, ranks = of_heads(sizes, sharding.heads), sharding.sequence
        computing, sending = machine.seconds(self.method, self.part(z, ranks)), link.seconds(self.load(z, ranks))
        if not self.overlaps:
            return Time(computing, sending, computing + sending)
        # One block after the other; also where causal, for the last rank sees them all.
        step = sending / max(ranks - 1, 1)
        return Time(ranks * computing, sending, computing + (ranks - 1) * max(computing, step))


def of_heads(sizes: Sizes, groups: int) -> Sizes:
    """The sizes of one of so many equal groups of heads."""
    return dataclasses.replace(sizes, heads=sizes.heads // groups, key_heads=sizes.key_heads // groups)


def strategy(method: Method, replicated: bool) -> Strategy:
    """The way to spread a method: exact attention has two, with all queries in every rank or with those of its own."""
    if method.name == "exact" and replicated:
        return Strategy("exact (keys)", method, "partial answers are told to all", comm_cost.partial_answers, True)
    if method.name == "exact":
        return Strategy("exact (ring)", method, "blocks of keys and values go round", comm_cost.ring, False, True)
    if method.name == "sparse":
        return Strategy(
            "sparse", method, "sums of sketches are told, then what was read", comm_cost.sparse_rounds, True
        )
    told = "landmarks are agreed, states combined" if method.name == "low_rank" else "states are combined"
    return Strategy(method.name, method, told, functools.partial(comm_cost.method_traffic, method), False)


def strategies(sizes: Sizes, rank: int = 64) -> list[Strategy]:
    """Every way there is for a problem of these sizes, with so many landmarks where there are as many keys."""
    found = [strategy(Exact(), True), strategy(Exact(), False)]
    if not sizes.causal:
        found.append(strategy(Sparse(), True))
    return found + [
        strategy(one, False) for one in (Separable(), RandomFeatures(), LowRank(max(1, min(rank, sizes.keys))))
    ]


class Priced(NamedTuple):
    """A sharding and what a way spends in it."""

    sharding: Sharding
    spent: Time


class Offer(NamedTuple):
    """A way in its best sharding, and what it costs a rank."""

    strategy: Strategy
    sharding: Sharding
    spent: Time
    load: Traffic
    from_ranks: int | None
    """The fewest ranks, a power of two, at which communication takes longer than computing; None: up to 4096 never."""
    priced: tuple[Priced, ...]
    """All shardings, from the fastest down."""

    @property
    def dominated(self) -> str:
        """What takes longer."""
        return "communication" if self.spent.sending > self.spent.computing else "computing"

    @property
    def efficiency(self) -> float:
        """The share of its time that a rank computes."""
        return self.spent.computing / self.spent.whole if self.spent.whole > 0 else 1.0


def priced(strategy: Strategy, sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> list[Priced]:
    """A way in every sharding, fastest first; of equals the one over more heads, which needs no talk."""
    found = [Priced(sharding, strategy.spent(sizes, sharding, link, machine)) for sharding in shardings(sizes, ranks)]
    return sorted(found, key=lambda one: (one.spent.whole, -one.sharding.heads))


def offers(sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> list[Offer]:
    """Every way in its best sharding, fastest first."""
    check(sizes, ranks)
    made = []
    for each in strategies(sizes):
        every = priced(each, sizes, ranks, link, machine)
        (sharding, spent), load = (
            every[0],
            each.load(of_heads(sizes, every[0].sharding.heads), every[0].sharding.sequence),
        )
        made.append(Offer(each, sharding, spent, load, crossover(each, sizes, link, machine), tuple(every)))
    return sorted(made, key=lambda offer: offer.spent.whole)


def crossover(strategy: Strategy, sizes: Sizes, link: Interconnect, machine: Machine) -> int | None:
    """The fewest ranks, a power of two, at which a way communicates longer than it computes in its best sharding."""
    ranks = 2
    while ranks <= _MOST_RANKS and any(True for _ in shardings(sizes, ranks)):
        spent = priced(strategy, sizes, ranks, link, machine)[0].spent
        if spent.sending > spent.computing:
            return ranks
        ranks *= 2
    return None


def check(sizes: Sizes, ranks: int) -> None:
    """Raise where so many ranks cannot share the work."""
    if ranks < 1:
        raise ParameterError("ranks", ranks, "must be at least 1", "try --ranks 8")
    if not any(True for _ in shardings(sizes, ranks)):
        rule = f"cannot be spread over {sizes.keys} keys and {sizes.key_heads} key heads"
        raise ParameterError("ranks", ranks, rule, "use fewer ranks, or a longer sequence")


class WeakScaling(NamedTuple):
    """One way under weak scaling: ranks by powers of two, seconds, and bytes that a rank sends."""

    ranks: list[int]
    seconds: list[float]
    sent: list[int]


def weak_scaling(sizes: Sizes, ranks: int, link: Interconnect, machine: Machine) -> dict[str, WeakScaling]:
    """Weak scaling over the sequence: each rank keeps what one of so many ranks has of these sizes."""
    counts = [2**i for i in range(ranks.bit_length())]
    found = {}
    for each in strategies(sizes):
        grown = [longer(sizes, count, ranks) for count in counts]
        pairs = list(zip(grown, counts, strict=True))
        seconds = [each.spent(z, Sharding(1, count), link, machine).whole for z, count in pairs]
        found[each.name] = WeakScaling(counts, seconds, [each.load(z, count).sent for z, count in pairs])
    return found


def longer(sizes: Sizes, count: int, ranks: int) -> Sizes:
    """The problem of `count` ranks of which each has as many keys as one of `ranks` has of these sizes.

    There are as many queries as before, or as many as keys where it was so.
    """
    keys = -(-sizes.keys // ranks) * count
    return dataclasses.replace(sizes, keys=keys, queries=keys if sizes.queries == sizes.keys else sizes.queries)
