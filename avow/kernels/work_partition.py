"""The lists of all key heads, one after the other, in equal shares: some heads read far more than others.

Shares are counted in tiles, none of which has tokens of two spans. What program p finds of key head i is in slot p + i:
along all lists one after the other, no two are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a tile, and programs that an H200 runs at once.
TILE, _PROGRAMS = 16, 132 * 7
_TILE = tl.constexpr(TILE)


@triton.jit
def tiles_in(number):
    """How many tiles tokens are; without a sign, that is a shift."""
    return ((number + (_TILE - 1)).to(tl.uint32) // _TILE).to(tl.int32)


@triton.jit
def tiles_listed(found, heads, spans, HEADS: tl.constexpr, SPANS: tl.constexpr):
    """How many tiles each head's list has."""
    head, span = tl.arange(0, HEADS), tl.arange(0, SPANS)
    own = (head < heads)[:, None] & (span < spans)[None, :]
    number = tl.load(found + head[:, None] * spans + span[None, :], mask=own, other=0)
    return tl.sum(tiles_in(number), 1)


@triton.jit
def tiles_again(within, used, heads, R: tl.constexpr, HEADS: tl.constexpr):
    """The same where heads with a row that is not within what was allowed list all tokens, and the others none."""
    head = tl.arange(0, HEADS)
    s = tl.load(used + head, mask=head < heads, other=0)
    counts = tl.zeros((HEADS,), tl.int32)
    for sibling in tl.static_range(R):
        well = tl.load(within + head * R + sibling, mask=head < heads, other=1)
        counts = tl.where(well == 0, tl.cdiv(s, _TILE), counts)
    return counts


@triton.jit
def shares(counts, PROGRAMS: tl.constexpr):
    """Where each head's tiles end when all lists stand one after the other, and how many are a program's share."""
    share = tl.cdiv(tl.sum(counts, 0), PROGRAMS)
    return tl.cumsum(counts, 0), tl.maximum(share, 1)


@triton.jit
def _one(x, index, HEADS: tl.constexpr):
    """One entry of a block."""
    return tl.sum(tl.where(tl.arange(0, HEADS) == index, x, 0), 0)


@triton.jit
def span_of(head, ends, counts, begin, stop, HEADS: tl.constexpr):
    """Which tiles of a head's list are those of a share of all lists."""
    after = _one(ends, head, HEADS)
    before = after - _one(counts, head, HEADS)
    return tl.maximum(begin, before) - before, tl.minimum(stop, after) - before


@triton.jit
def share_of(program, ends, share):
    """A program's share of all lists: its tiles from one to another, and the heads that they are of, likewise."""
    begin = program * share
    stop = tl.minimum(begin + share, tl.max(ends, 0))
    # Lists that end before a share begins, or before it stops; without a share, there is none from the one on.
    first = tl.sum((ends <= begin).to(tl.int64), 0)
    last = tl.where(begin < stop, tl.sum((ends < stop).to(tl.int64), 0), -1)
    return begin, stop, first, last + 1


@triton.jit
def slots_of(head, ends, counts, share, HEADS: tl.constexpr):
    """The first slot of a head's parts, and the one after the last."""
    count, after = _one(counts, head, HEADS), _one(ends, head, HEADS)
    first = (after - count) // share + head
    return first, tl.where(count > 0, (after - 1) // share + head + 1, first)


def programs(heads: int, capacity: int) -> int:
    """Over how many programs all lists are spread, fixed by the shape."""
    return min(_PROGRAMS, heads * triton.cdiv(capacity, TILE))
