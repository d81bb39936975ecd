"""What a rank sends when attention is spread over many, and how long that takes: numbers about sizes, no tensors.

Of each way to spread it over the sequence a formula says what one rank sends. Everything that is told to all is sent by
each to each; what is added up over ranks is added up in shares, one for each rank, and the shares are told to all, so
that it costs a rank about twice its size however many there are. What ranks say to agree on a call before it comes on
top: a page or two to each other rank, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from avow.core import Method, Sizes
from avow.numerics.cholesky import candidates, rounds

# Numbers beside its answer that a row of a partial answer travels with, so that its certificate can be merged.
PARTIAL = 10
# Bins that tokens of sparse attention are told in: at a first look, of what is left after it, and of plans to draw.
FIRST_BINS, BINS, PLAN_BINS = 128, 160, 256
# How many shares of the budget `avow.distributed.sparse_budget` weighs, and samples `sparse_draws` plans.
_SHARES, _LADDER = 3, 4

# Numbers of a channel's frame: moments told, a frame heard.
_FRAME = 4 + 3


class Traffic(NamedTuple):
    """What one rank sends, in how many messages, and how often in turn it has to wait for one."""

    sent: int
    messages: int
    waits: int

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]  # loads add up; as tuples they would be joined
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Traffic:
        """The same, so many times one after the other."""
        return Traffic(*(count * x for x in self))


NOTHING = Traffic(0, 0, 0)


class Interconnect(NamedTuple):
    """What connects the ranks: bytes a second that each can send, and seconds until a message is there."""

    bandwidth: float
    latency: float

    def seconds(self, load: Traffic) -> float:
        """How long a rank is busy sending and waiting."""
        return load.sent / self.bandwidth + load.waits * self.latency


def usual_interconnect(device: str) -> Interconnect:
    """What is taken for granted where nobody said: sockets of one machine, or GPUs of one."""
    return Interconnect(1e11, 1e-5) if device == "cuda" else Interconnect(1e9, 1e-4)


def all_gather(size: int, ranks: int) -> Traffic:
    """So many bytes for each other rank: the same for all, or not."""
    return Traffic((ranks - 1) * size, ranks - 1, 1) if ranks > 1 else NOTHING


def all_reduce(numbers: int, item: int, ranks: int) -> Traffic:
    """So many numbers of each rank added up, or the largest taken, and that known to all: an all-reduce."""
    return combined(1, numbers, 2, item, ranks)


def combined(heads: int, rows: int, columns: int, item: int, ranks: int) -> Traffic:
    """Numbers by heads and rows, each rank combining a share of the rows; `columns` counts what it gets and gives."""
    gets_and_gives = all_gather(heads * -(-rows // ranks) * columns * item, ranks)
    return gets_and_gives._replace(messages=2 * gets_and_gives.messages, waits=2 * gets_and_gives.waits)


def partial_answers(z: Sizes, ranks: int) -> Traffic:
    """Exact attention, keys sharded, every rank with all queries: partial answers are told to all."""
    return all_gather(z.batch * z.heads * z.queries * (z.value_dim + PARTIAL) * 8, ranks)


def ring_block(z: Sizes, ranks: int) -> Traffic:
    """One step of a ring: a block of keys and values goes to the next rank."""
    size = z.batch * z.key_heads * -(-z.keys // ranks) * (z.dim + z.value_dim) * z.item
    return Traffic(size, 1, 1) if ranks > 1 else NOTHING


def ring(z: Sizes, ranks: int) -> Traffic:
    """Exact attention round a ring, all sharded: each rank sends every block on but the one whose journey ends."""
    return ring_block(z, ranks).times(ranks - 1)


def sparse_rounds(z: Sizes, ranks: int, reports: int = 1, rungs: int | None = None) -> Traffic:
    """Sparse attention, keys sharded, every rank with all queries; `reports` until all rows are proved, 1 to 3.

    Where rows may be sampled, `rungs` are the samples that some row tried, 0 to 4.
    """
    rows, heads = z.batch * z.heads * z.queries, z.batch * z.key_heads
    # Rows that sample share nothing with their siblings, and so need not weigh each other's needs.
    sums = 1 if z.heads == z.key_heads or rungs is not None else 2
    wide = [2 * rows + 3 * heads, rows, rows * (1 + z.value_dim + 2)]
    wide += [rows, rows * (1 + z.value_dim + 2 + _SHARES + 1)] * reports
    narrow = [rows * (FIRST_BINS + 2), *[rows * BINS * (3 + _SHARES)] * sums]
    byte: list[int] = []
    if rungs is not None:
        narrow[0] += rows * FIRST_BINS
        narrow.append(rows * 3 * PLAN_BINS)
        wide += [rows * (1 + 3 * _LADDER), rows * 2 * _LADDER, *[rows * (1 + z.value_dim + 2)] * rungs]
        byte = [rows] * rungs
    told = _sum(
        all_reduce(count, item, ranks) for item, counts in ((8, wide), (4, narrow), (1, byte)) for count in counts
    )
    # After each report but a third, a byte says whether to go on.
    return told + all_gather(1, ranks).times(min(reports, 2))


def states(z: Sizes, ranks: int, features: int) -> Traffic:
    """Linear attention, all sharded: states are combined, added up over all ranks or, causal, over those before each.

    A feature's state is a sum of values, a total and a reference.
    """
    return combined(z.batch * z.key_heads, features, 2 * (z.value_dim + 2), 4 if z.item < 8 else 8, ranks)


def random_features(z: Sizes, ranks: int, features: int) -> Traffic:
    """Linear attention by random features: unless causal, first a frame for the keys, and how long the longest is."""
    heads, item = z.batch * z.key_heads, 4 if z.item < 8 else 8
    load = states(z, ranks, features)
    if z.causal:
        return load
    return load + combined(heads, z.dim, _FRAME, item, ranks) + all_gather(item * heads, ranks)


def landmarks(z: Sizes, ranks: int, rank: int) -> Traffic:
    """Low-rank attention, all sharded: landmarks are agreed in rounds of proposals, then states are combined.

    Proposals are shared out by heads: more ranks than heads send more.
    """
    return proposals(z, ranks, rank, -(-z.keys // ranks)) + around_landmarks(z, ranks, rank)


def proposals(z: Sizes, ranks: int, rank: int, longest: int) -> Traffic:
    """What choosing so many landmarks takes, where the longest shard has `longest` keys."""
    heads, few = z.batch * z.key_heads, candidates(z.keys, rank)
    sought = NOTHING if few == z.keys else combined(1, heads, 2 * min(few, longest), 8, ranks)
    return sought + _sum(
        combined(1, heads, 2 * (span.stop - span.start) * (1 + z.dim + span.start), 8, ranks) for span in rounds(rank)
    )


def around_landmarks(z: Sizes, ranks: int, rank: int) -> Traffic:
    """What attention by landmarks takes besides: a frame, the factor of their kernel, sums for bounds, and states."""
    heads = z.batch * z.key_heads
    frame = combined(heads, z.dim, _FRAME, 8, ranks)
    factor = combined(1, heads, 2 * (rank * z.dim + 1) + rank * rank + 1, 8, ranks)
    bounds = all_gather(8 * 3 * heads, ranks)
    return frame + factor + bounds + combined(heads, rank, 2 * (z.value_dim + 2), 8, ranks)


def method_traffic(method: Method, z: Sizes, ranks: int) -> Traffic:
    """What a rank sends for a method whose queries, keys and values are all sharded."""
    if method.name == "low_rank":
        return landmarks(z, ranks, method.parameters["rank"])
    if method.name == "random_features":
        return random_features(z, ranks, method.parameters["features"])
    return states(z, ranks, z.dim)


def _sum(loads: Iterator[Traffic]) -> Traffic:
    total = NOTHING
    for load in loads:
        total += load
    return total
