"""The lists of all key heads, one after the other, in equal shares: some heads read far more than others.

Shares are counted in tiles, none of which has tokens of two spans. What program p finds of key head i is in slot p + i:
along all lists one after the other, no two are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.pausing import first_seen
from avow.kernels.step_constants import StepShape
from avow.kernels.tile_ops import interpreted

# Tokens of a tile, rows of the smallest tile of queries, and warps that an H200 runs at once: one to so many rows.
TILE, FEWEST_ROWS, _WARPS = 16, 16, 132 * 7
_TILE = tl.constexpr(TILE)


class Parts(NamedTuple):
    """Shares of a head's list: their largest logits, sums of weights, weighted values, and longest keys, squared."""

    peak: Float32[Tensor, "slots r"]
    total: Float32[Tensor, "slots r"]
    weighted: Float32[Tensor, "slots r e"]
    square: Float32[Tensor, "slots"]
    light: Float32[Tensor, "slots r"] | None = None
    """Where tokens were drawn: the squares of light terms over their odds, (1 − p)-fold, and the heavy ones, both in
    units of the threshold between them.
    """
    heavy: Float32[Tensor, "slots r"] | None = None


@triton.jit
def tiles_in(number):
    """How many tiles tokens are; without a sign, that is a shift."""
    return ((number + (_TILE - 1)).to(tl.uint32) // _TILE).to(tl.int32)


@triton.jit
def tiles_listed(found, heads, spans, S: tl.constexpr):
    """How many tiles each head's list has."""
    head, span = tl.arange(0, S.HEADS), tl.arange(0, S.SPANS)
    own = (head < heads)[:, None] & (span < spans)[None, :]
    number = tl.load(found + head[:, None] * spans + span[None, :], mask=own, other=0)
    return tl.sum(tiles_in(number), 1)


@triton.jit
def tiles_again(within, used, heads, S: tl.constexpr):
    """The same where heads list all tokens: those with a row that is not `within` what was allowed, or all."""
    head, row = tl.arange(0, S.HEADS), tl.arange(0, S.RP)
    s = tl.load(used.tokens + head, mask=head < heads, other=0)
    tiles = tl.cdiv(s - first_seen(s, used), _TILE)
    if within is not None:
        there = (head < heads)[:, None] & (row < S.R)[None, :]
        well = tl.min(tl.load(within + head[:, None] * S.R + row[None, :], mask=there, other=1), 1)
        tiles = tl.where(well == 0, tiles, 0)
    return tiles


@triton.jit
def shares(counts, S: tl.constexpr):
    """Tiles of each head, where these end when all lists stand one after the other, and how many are a share."""
    share = tl.cdiv(tl.sum(counts, 0), S.PROGRAMS)
    return counts, tl.cumsum(counts, 0), tl.maximum(share, 1)


@triton.jit
def _list_of(head, lists, S: tl.constexpr):
    """Where a head's list begins and ends among all of them, in tiles."""
    counts, ends, _ = lists
    own = tl.arange(0, S.HEADS) == head
    after = tl.sum(tl.where(own, ends, 0), 0)
    return after - tl.sum(tl.where(own, counts, 0), 0), after


@triton.jit
def span_of(head, lists, begin, stop, S: tl.constexpr):
    """Which tiles of a head's list are those of a share of all lists."""
    before, after = _list_of(head, lists, S)
    return tl.maximum(begin, before) - before, tl.minimum(stop, after) - before


@triton.jit
def share_of(program, lists):
    """A program's share of all lists: its tiles from one to another, and the heads that they are of, likewise."""
    _, ends, share = lists
    begin = program * share
    stop = tl.minimum(begin + share, tl.max(ends, 0))
    # Lists that end before a share begins, or before it stops; without a share, there is none from the one on.
    first = tl.sum((ends <= begin).to(tl.int64), 0)
    last = tl.where(begin < stop, tl.sum((ends < stop).to(tl.int64), 0), -1)
    return begin, stop, first, last + 1


@triton.jit
def slots_of(head, lists, S: tl.constexpr):
    """The first slot of a head's parts, the one after the last, and how many tiles a slot stands for at most."""
    before, after = _list_of(head, lists, S)
    share = lists[2]
    first = before // share + head
    return first, tl.where(after > before, (after - 1) // share + head + 1, first), share


def warps_of(rows: int) -> int:
    """How many warps share a tile. One waits for no other, and several of them to a processor keep its memory busy."""
    return max(1, triton.next_power_of_2(rows) // FEWEST_ROWS)


def programs(heads: int, capacity: int, rows: int = 1) -> int:
    """Over how many programs all lists are spread, fixed by the shape."""
    return min(_WARPS // warps_of(rows), heads * triton.cdiv(capacity, TILE))


def list_shape(q: Tensor, v: Tensor, spans: int = 1) -> StepShape:
    """What kernels that share lists of so many spans are compiled for."""
    (b, h, d), (g, s, e) = q.shape, v.shape[1:]
    return StepShape(
        R=h // g,
        RP=triton.next_power_of_2(h // g),
        D=d,
        DP=padded(d),
        E=e,
        EP=padded(e),
        HEADS=triton.next_power_of_2(b * g),
        SPANS=triton.next_power_of_2(spans),
        PROGRAMS=programs(b * g, s, h // g),
        LARGEST=torch.finfo(q.dtype).max,
        FAST=not interpreted(),
    )


def blank_parts(q: Tensor, v: Tensor, drawn: bool = False) -> Parts:
    """Room for what all programs find."""
    (b, h, _), (g, s, e) = q.shape, v.shape[1:]
    slots, r = programs(b * g, s, h // g) + b * g, h // g
    shapes: list[tuple[int, ...]] = [(slots, r), (slots, r), (slots, r, e), (slots,)]
    shapes += [(slots, r)] * (2 * drawn)
    return Parts(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))
