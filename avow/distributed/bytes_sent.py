"""What a call sends, in closed form: bytes that one process puts on its way to others. `traffic.counted` counts them.

It is what `comm_cost` says, which the planner reckons with, and what processes say to agree. Every process tells each
other one page before an answer and one after a promise. In a ring, with n tokens and w bytes of key and value a token,
a process sends each block but the one that ends its journey there; where rows only see what is before them, block c
stops at the last process, and process r sends those up to its own. Gradients, wider, follow each block, and go home
from the last process that adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from avow.core import Method, Sizes
from avow.distributed import comm_cost
from avow.distributed.point_to_point import PAGE
from avow.distributed.shards import LONGEST
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.numerics import rounding


def shard_bytes(sizes: Sizes, ranks: int, *, gradients: bool = False) -> int:
    """What each process sends in exact attention with shared queries, in one arithmetic, whatever it holds of the keys.

    `gradients` adds the way back.
    """
    z, pages = sizes, 3 if gradients else 2
    sent = _pages(ranks, pages) + comm_cost.partial_answers(z, ranks).sent
    if gradients:
        size = z.batch * z.heads * z.queries * z.dim * rounding.accumulator(z.dtype).itemsize
        sent += comm_cost.all_gather(size, ranks).sent
    return sent


def ring_bytes(
    sizes: Sizes, tokens: Sequence[int], rank: int, *, promised: bool = False, gradients: bool = False
) -> int:
    """What a process sends in a ring where ranks hold so many tokens each, rows and keys alike, none of them none.

    `promised` is `attend_ring` in one arithmetic, else `ring_attention`; `gradients` adds the way back.
    """
    z, ranks = sizes, len(tokens)
    token = z.batch * z.key_heads * (z.dim + z.value_dim)
    through = sum(tokens[: rank + 1]) if z.causal else sum(tokens) - tokens[(rank + 1) % ranks]
    last = rank == ranks - 1
    if z.causal and last:
        through = 0
    sent = _pages(ranks, 2 if promised else 1) + through * token * z.item
    if gradients and ranks > 1:
        home = (sum(tokens[:-1]) if last else through) if z.causal else sum(tokens)
        sent += through * token * z.item + home * token * rounding.accumulator(z.dtype).itemsize
    return sent


def sparse_bytes(
    sizes: Sizes, ranks: int, *, reports: int = 1, rungs: int | None = None, gradients: bool = False
) -> int:
    """What each process sends in `attend_sparse`, where all rows are worked on at once, whatever it holds of the keys.

    `reports` and `rungs` are those of `avow.distributed.comm_cost.sparse_rounds`; `gradients` adds the way back.
    """
    z = sizes
    sent = _pages(ranks) + comm_cost.sparse_rounds(z, ranks, reports, rungs).sent
    if gradients:
        sent += _pages(ranks) + comm_cost.all_reduce(z.batch * z.heads * z.queries * z.dim, 8, ranks).sent
    return sent


def states_bytes(method: Method, sizes: Sizes, ranks: int, backward: bool = False) -> int:
    """What one of so many processes sends in `attend_states`, or in its `backward`; `sizes` of the whole problem.

    It does not depend on how long the sequence is. Random features of norms so large that they take float64 send twice
    as much.
    """
    z, random = sizes, isinstance(method, RandomFeatures)
    sent = comm_cost.method_traffic(method, z, ranks).sent
    if not backward:
        return sent + meeting_bytes(z, ranks) + (_pages(ranks) if random else 0)
    # How long the longest key is has no gradient.
    longest = z.batch * z.key_heads * rounding.accumulator(z.dtype).itemsize if random and not z.causal else 0
    return sent - comm_cost.all_gather(longest, ranks).sent


def low_rank_bytes(method: LowRank, sizes: Sizes, ranks: int, longest: int, backward: bool = False) -> int:
    """What one of so many processes sends in `attend_low_rank`, or in its `backward`.

    `sizes` are those of the whole problem, `longest` is the number of keys of the longest shard: beyond some thousands
    of keys neither matters. Landmarks are shared out by heads, so that more processes than heads send more.
    """
    sent = comm_cost.around_landmarks(sizes, ranks, method.rank).sent
    if backward:
        return sent
    return sent + comm_cost.proposals(sizes, ranks, method.rank, longest).sent + meeting_bytes(sizes, ranks)


def meeting_bytes(sizes: Sizes, ranks: int) -> int:
    """What a process sends until all know how long the longest vectors of each are."""
    return _pages(ranks) + comm_cost.all_gather(8 * LONGEST * sizes.batch * sizes.key_heads, ranks).sent


def _pages(ranks: int, count: int = 1) -> int:
    return comm_cost.all_gather(count * PAGE, ranks).sent
