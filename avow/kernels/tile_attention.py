"""Softmax attention of a key head's queries over some tiles of its list, or of all its tokens. Logits count octaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from avow.kernels.choice import PLACES
from avow.kernels.sample_bounds import ABOVE, BELOW
from avow.kernels.tile_ops import exp2_near, log2_near
from avow.kernels.work_partition import TILE, tiles_in

_TILE, _PLACES, _PLACE = tl.constexpr(TILE), tl.constexpr(PLACES), tl.constexpr(2**PLACES - 1)
# Warps that share a tile, and rows of a tile of queries. One warp waits for no other, and eight of them to a processor
# keep its memory busy.
WARPS, ROWS = 1, 16


@triton.jit
def _spot(tile, ends, moves, limits):
    """Where a tile of a list stands in it, and how many tokens are from there on to the end of its span.

    With where the tiles of each span end, by how much its tokens stand behind where they would without spans, and
    where they would end then. No number is below the one before it, so that the least is that of the first span that
    ends behind the tile: one step finds both.
    """
    behind = ends > tile
    move = tl.min(tl.where(behind, moves, 2**31 - 1), 0)
    limit = tl.min(tl.where(behind, limits, 2**31 - 1), 0)
    return tile * _TILE + move, limit - tile * _TILE


@triton.jit
def _entry(own, tile, token, after, moves, limits, whole):
    """What a tile of a list holds: its entries, or if `whole` as many tokens in order; and how many are left."""
    spot, left = _spot(tile, after, moves, limits)
    entry = tl.load(own + spot + token, mask=(token < left) & (whole == 0), other=0)
    return tl.where((whole != 0) & (token < left), tile * _TILE + token, entry), left


@triton.jit
def attend(
    program,
    head,
    start,
    end,
    q,
    k,
    v,
    peak,
    total,
    values,
    square,
    factor,
    k_stride,
    v_stride,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    LIFT: tl.constexpr,
    FAST: tl.constexpr,
    s=None,
    listed=None,
    found=None,
    spans=None,
    room=None,
    SPANS: tl.constexpr = 1,
    whole=None,
    rims=None,
    nu=None,
    each=None,
    each_stride=None,
    light=None,
    heavy=None,
):
    """Some tiles of a head's list, from `start` to `end`: what a program finds of them.

    Without a list, tokens are the first `s` of all; of a list that is `whole` only the length counts. Lists with rims
    are of draws.
    """
    LISTED: tl.constexpr = listed is not None
    DRAWN: tl.constexpr = rims is not None
    row, channel, column = tl.arange(0, RP), tl.arange(0, DP), tl.arange(0, EP)
    token = tl.arange(0, _TILE)
    asked = (row < R)[:, None] & (channel < D)[None, :]
    x = tl.load(q + (head * R + row)[:, None] * D + channel[None, :], mask=asked, other=0.0)
    high = tl.full((RP,), float("-inf"), tl.float32)
    mass = tl.zeros((RP,), tl.float32)
    sums = tl.zeros((RP, EP), tl.float32)
    longest = tl.zeros((_TILE, _TILE), tl.float32)
    if DRAWN:
        rim = rims + (head * R + row) * 2
        threshold = tl.load(rim, mask=row < R, other=0.0) - tl.load(rim + 1, mask=row < R, other=0.0)
        ratio = 1 / tl.load(nu + head)
        squares = tl.zeros((RP,), tl.float32)
        large = tl.zeros((RP,), tl.float32)
    if LISTED:
        span = tl.arange(0, SPANS)
        number = tl.load(found + head * spans + span, mask=span < spans, other=0)
        tiles = tiles_in(number)
        after = tl.cumsum(tiles, 0)
        moves, limits = span * room - (after - tiles) * _TILE, (after - tiles) * _TILE + number
        # What is behind the list has the limit of the last span, and so no token.
        after = tl.where(span == SPANS - 1, 2**31 - 1, after)
        own = listed + head * spans * room
    rows = k + head * k_stride
    carriers = v + head * v_stride
    if DRAWN:
        # Lengths of values are fetched a tile ahead, and the list that says where two: nothing else waits for them.
        lengths = each + head * each_stride
        next_entry, _ = _entry(own, start, token, after, moves, limits, whole)
        next_long = tl.load(lengths + (next_entry & _PLACE))
        next_entry, _ = _entry(own, start + 1, token, after, moves, limits, whole)
    for tile in range(start, end):
        if LISTED:
            entry, left = _entry(own, tile, token, after, moves, limits, whole)
            there = token < left
            place = (entry & _PLACE if DRAWN else entry).to(tl.int64)
        else:
            there = tile * _TILE + token < s
            place = tl.where(there, tile * _TILE + token, 0).to(tl.int64)
        keys = tl.load(
            rows + place[:, None] * D + channel[None, :], mask=there[:, None] & (channel < D)[None, :], other=0.0
        )
        carried = tl.load(
            carriers + place[:, None] * E + column[None, :], mask=there[:, None] & (column < E)[None, :], other=0.0
        )
        counted = tl.where(there, 0.0, float("-inf"))
        if DRAWN:
            # The odds of `sampling`, as the bits of a float32.
            rare = entry >> _PLACES
            odds = ((127 << 23) - (rare << 20)).to(tl.float32, bitcast=True)
            counted = counted - log2_near(odds, FAST)
        logits = tl.dot(x, tl.trans(keys), input_precision="ieee") * factor + counted[None, :]  # (RP, TILE)
        if DRAWN:
            length = next_long.to(tl.float32) * ratio
            next_long = tl.load(lengths + (next_entry & _PLACE))
            next_entry, _ = _entry(own, tile + 2, token, after, moves, limits, whole)
            slanted = tl.sqrt(length * length + 1)
            # What was read for certain is no draw.
            bonus = tl.where(rare > 0, log2_near(slanted, FAST), float("-inf"))
            term = exp2_near(logits + bonus[None, :] - threshold[:, None], FAST)
            clipped = tl.minimum(term, ABOVE)
            squares += tl.sum(clipped * clipped * (1 - odds)[None, :], 1)
            large += tl.sum(tl.where(term > BELOW, term * ((length + 1) / slanted)[None, :], 0.0), 1)
        if keys.dtype == tl.float32:
            met = tl.sum(keys * keys, 1)[:, None]
        else:
            # A square of a length is where a token meets itself: tensor cores are sooner done with all pairs.
            met = tl.dot(keys, tl.trans(keys))
        longest = tl.maximum(longest, tl.where(token[:, None] == token[None, :], met, 0.0))
        risen = tl.maximum(high, tl.max(logits, 1))
        fade = exp2_near(high - risen, FAST)
        weights = exp2_near(logits - risen[:, None], FAST)
        mass = mass * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None]
        high = risen
        if carried.dtype == tl.float32:
            sums = tl.dot(weights, carried, sums, input_precision="ieee")
        else:
            # Two halves carry a weight to twice their bits.
            lifted = weights * LIFT
            coarse = lifted.to(carried.dtype)
            fine = (lifted - coarse.to(tl.float32)).to(carried.dtype)
            sums = tl.dot(coarse, carried, sums)
            sums = tl.dot(fine, carried, sums)
    out = (program + head) * R + row
    tl.store(peak + out, high, mask=row < R)
    tl.store(total + out, mass, mask=row < R)
    inside = (row < R)[:, None] & (column < E)[None, :]
    tl.store(values + out[:, None] * E + column[None, :], sums * (1 / LIFT), mask=inside)
    tl.store(square + program + head, tl.max(tl.max(longest, 1), 0))
    if DRAWN:
        tl.store(light + out, squares, mask=row < R)
        tl.store(heavy + out, large, mask=row < R)


def lift(dtype: torch.dtype) -> float:
    """What weights of at most one are multiplied by, so that their halves do not vanish in float16."""
    return 2.0**14 if dtype == torch.float16 else 1.0
