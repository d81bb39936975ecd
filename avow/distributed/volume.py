"""What a call sends, in closed form: bytes that one process puts on its way to others. `traffic.counted` counts them.

Every process tells each other one page before an answer and one after a promise. In a ring, with n tokens and w bytes
of key and value a token, a process sends each block but the one that ends its journey there; where rows only see what
is before them, block c stops at the last process, and process r sends those up to its own. Gradients, wider, follow
each block, and go home from the last process that adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from avow.contract import Sizes
from avow.distributed.partials import COLUMNS
from avow.distributed.traffic import PAGE
from avow.links import added_up, sparse_rounds
from avow.maths import rounding


def ring_bytes(
    sizes: Sizes, tokens: Sequence[int], rank: int, *, promised: bool = False, gradients: bool = False
) -> int:
    """What a process sends in a ring where ranks hold so many tokens each, rows and keys alike, none of them none.

    `promised` is `ring_attend` in one arithmetic, else `ring_attention`; `gradients` adds the way back.
    """
    z, ranks = sizes, len(tokens)
    token = z.batch * z.key_heads * (z.dim + z.value_dim)
    through = sum(tokens[: rank + 1]) if z.causal else sum(tokens) - tokens[(rank + 1) % ranks]
    last = rank == ranks - 1
    if z.causal and last:
        through = 0
    sent = (ranks - 1) * PAGE * (2 if promised else 1) + through * token * z.item
    if gradients and ranks > 1:
        home = (sum(tokens[:-1]) if last else through) if z.causal else sum(tokens)
        sent += through * token * z.item + home * token * rounding.accumulator(z.dtype).itemsize
    return sent


def sparse_bytes(
    sizes: Sizes, ranks: int, *, reports: int = 1, rungs: int | None = None, gradients: bool = False
) -> int:
    """What each process sends in `attend_sparse`, where all rows are worked on at once, whatever it holds of the keys.

    `reports` and `rungs` are those of `avow.links.sparse_rounds`; `gradients` adds the way back.
    """
    z = sizes
    sent = (ranks - 1) * PAGE + sparse_rounds(z, ranks, reports, rungs).sent
    if gradients:
        sent += (ranks - 1) * PAGE + added_up(z.batch * z.heads * z.queries * z.dim, 8, ranks).sent
    return sent


def shard_bytes(sizes: Sizes, ranks: int, *, gradients: bool = False) -> int:
    """What each process sends in `attend`, in one arithmetic, whatever it holds of the keys."""
    z = sizes
    rows = z.batch * z.heads * z.queries
    apiece = 2 * PAGE + rows * (COLUMNS + z.value_dim) * 8
    if gradients:
        apiece += PAGE + rows * z.dim * rounding.accumulator(z.dtype).itemsize
    return (ranks - 1) * apiece
