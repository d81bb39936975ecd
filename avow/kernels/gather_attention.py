"""Attention over listed tokens, or over all of them, in parts that `avow.kernels.finalize` puts together.

Each program reads its share of all lists, and keeps the largest logit, the sum of weights and the weighted values of
what it read of each head. Heads that a step's bounds do not suffice for are then read in full, by two kernels that do
nothing unless there is such a head: programs share all tokens of those heads, and one for each row merges what they
found. Logits count octaves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.choice import PLACES, Chosen, Draws
from avow.kernels.finalize import (
    MERGING_WARPS,
    BoundInputs,
    Decoded,
    Sinks,
    Unread,
    Whole,
    merge,
    merging_shape,
    without_tokens,
)
from avow.kernels.hot_rows import HotRows, Places, bring_in, place_of, sought
from avow.kernels.pausing import Used, first_seen, read_in_order, settle, worthwhile
from avow.kernels.sample_bounds import ABOVE, BELOW
from avow.kernels.sketch_pass import Terms
from avow.kernels.tile_ops import (
    HeadView,
    at_head,
    await_last,
    by_head,
    chained,
    exp2_near,
    filled,
    follow,
    log2_near,
    precede,
    send_for,
)
from avow.kernels.work_partition import (
    FEWEST_ROWS,
    TILE,
    Parts,
    blank_parts,
    list_shape,
    share_of,
    shares,
    slots_of,
    span_of,
    tiles_again,
    tiles_in,
    tiles_listed,
    warps_of,
)

_TILE, _PLACES, _PLACE = tl.constexpr(TILE), tl.constexpr(PLACES), tl.constexpr(2**PLACES - 1)
_FEWEST = tl.constexpr(FEWEST_ROWS)
# Rows that are sent for before a program can begin.
_AHEAD = tl.constexpr(32)
# Below all logits, so that where a row sees no token of a tile, none weighs anything.
_LOWEST = tl.constexpr(-3.4e38)


class _Inputs(NamedTuple):
    """Queries, keys and values, what makes octaves of products, and the lengths of values if tokens were drawn.

    Where keys and values are in host memory, rows of them may be on the device, too.
    """

    q: Tensor
    k: HeadView
    v: HeadView
    factor: float
    lengths: HeadView | None = None
    hot: Places | None = None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, scale: float, draws: Draws | None = None, hot: Places | None = None
    ) -> _Inputs:
        lengths = None if draws is None else HeadView(draws.lengths, draws.lengths.stride(0))
        return _Inputs(q, by_head(k, "k"), by_head(v, "v"), scale * math.log2(math.e), lengths, hot)


@triton.jit
def _entry(own, tile, token, places, first, whole):
    """What a tile of a list holds: its entries, or if `whole` as many tokens from the first on; and how many are left.

    With where the tiles of each span end, by how much its tokens stand behind where they would without spans, and
    where they would end then. No number is below the one before it, so that the least is that of the first span that
    ends behind the tile: one step finds both.
    """
    ends, moves, limits = places
    behind = ends > tile
    move = tl.min(tl.where(behind, moves, 2**31 - 1), 0)
    limit = tl.min(tl.where(behind, limits, 2**31 - 1), 0)
    spot, left = tile * _TILE + move, limit - tile * _TILE
    entry = tl.load(own + spot + token, mask=(token < left) & (whole == 0), other=0)
    return tl.where((whole != 0) & (token < left), first + tile * _TILE + token, entry), left


@triton.jit
def attend(program, head, tiles, inputs, parts, used, S: tl.constexpr, chosen=None, spans=None, room=None):
    """Some tiles of a head's list: what a program finds of them.

    Without a list, all tokens are read in order; of a list whose head does not choose only the length counts.
    """
    LISTED: tl.constexpr = room is not None
    DRAWN: tl.constexpr = LISTED and chosen.draws is not None
    HOT: tl.constexpr = LISTED and inputs.hot is not None
    # Weights of at most one are multiplied by this, so that their halves do not vanish in float16.
    LIFT: tl.constexpr = 2.0**14 if inputs.v.base.dtype.element_ty == tl.float16 else 1.0
    MASKED: tl.constexpr = used.queries is not None or used.window is not None
    ROWS: tl.constexpr = S.RP if S.RP > _FEWEST else _FEWEST
    start, end = tiles
    s = tl.load(used.tokens + head)
    first = first_seen(s, used)
    row, channel, column = tl.arange(0, ROWS), tl.arange(0, S.DP), tl.arange(0, S.EP)
    token = tl.arange(0, _TILE)
    asked = (row < S.R)[:, None] & (channel < S.D)[None, :]
    x = tl.load(inputs.q + (head * S.R + row)[:, None] * S.D + channel[None, :], mask=asked, other=0.0)
    high = filled(_LOWEST, ROWS)
    mass = filled(0.0, ROWS)
    sums = filled(0.0, ROWS, S.EP)
    longest = filled(0.0, _TILE, _TILE)
    if DRAWN:
        rim = chosen.draws.rims + (head * S.R + row) * 2
        threshold = tl.load(rim, mask=row < S.R, other=0.0) - tl.load(rim + 1, mask=row < S.R, other=0.0)
        ratio = 1 / tl.load(chosen.draws.nu + head)
        squares = filled(0.0, ROWS)
        large = filled(0.0, ROWS)
    if LISTED:
        span = tl.arange(0, S.SPANS)
        number = tl.load(chosen.found + head * spans + span, mask=span < spans, other=0)
        many = tiles_in(number)
        after = tl.cumsum(many, 0)
        moves, limits = span * room - (after - many) * _TILE, (after - many) * _TILE + number
        # What is behind the list has the limit of the last span, and so no token.
        places = tl.where(span == S.SPANS - 1, 2**31 - 1, after), moves, limits
        own, whole = chosen.listed + head * spans * room, read_in_order(s, used).to(tl.int32)
    if MASKED:
        # The place of each row's own token.
        newest = s - 1 + row * 0
        if used.queries is not None:
            newest = s - used.queries + row % used.queries
    rows, carriers = at_head(inputs.k, head), at_head(inputs.v, head)
    if DRAWN:
        # Lengths of values are fetched a tile ahead, and the list that says where two: nothing else waits for them.
        lengths = at_head(inputs.lengths, head)
        next_entry, _ = _entry(own, start, token, places, first, whole)
        next_long = tl.load(lengths + (next_entry & _PLACE))
        next_entry, _ = _entry(own, start + 1, token, places, first, whole)
    for tile in range(start, end):
        if LISTED:
            entry, left = _entry(own, tile, token, places, first, whole)
            there = token < left
            place = (entry & _PLACE if DRAWN else entry).to(tl.int64)
        else:
            there = first + tile * _TILE + token < s
            place = tl.where(there, first + tile * _TILE + token, 0).to(tl.int64)
        if HOT:
            spot, near = place_of(inputs.hot, head, place, there & (whole == 0))
            keys_at = tl.where(near, inputs.hot.k + spot * S.D, rows + place * S.D)[:, None] + channel[None, :]
            carried_at = tl.where(near, inputs.hot.v + spot * S.E, carriers + place * S.E)[:, None] + column[None, :]
        else:
            keys_at = rows + place[:, None] * S.D + channel[None, :]
            carried_at = carriers + place[:, None] * S.E + column[None, :]
        keys = tl.load(keys_at, mask=there[:, None] & (channel < S.D)[None, :], other=0.0)
        carried = tl.load(carried_at, mask=there[:, None] & (column < S.E)[None, :], other=0.0)
        if HOT:
            bring_in(inputs.hot, spot, place, there & (near == 0) & (whole == 0), keys, carried, S)
        counted = tl.where(there, 0.0, float("-inf"))
        if DRAWN:
            # The odds of `sampling`, as the bits of a float32.
            rare = entry >> _PLACES
            odds = ((127 << 23) - (rare << 20)).to(tl.float32, bitcast=True)
            counted = counted - log2_near(odds, S.FAST)
        logits = tl.dot(x, tl.trans(keys), input_precision="ieee") * inputs.factor + counted[None, :]  # (ROWS, TILE)
        if MASKED:
            seen = place[None, :] <= newest[:, None]
            if used.window is not None:
                seen = seen & (place[None, :] > newest[:, None] - used.window)
            logits = tl.where(seen, logits, float("-inf"))
        if DRAWN:
            length = next_long.to(tl.float32) * ratio
            next_long = tl.load(lengths + (next_entry & _PLACE))
            next_entry, _ = _entry(own, tile + 2, token, places, first, whole)
            slanted = tl.sqrt(length * length + 1)
            # What was read for certain is no draw.
            bonus = tl.where(rare > 0, log2_near(slanted, S.FAST), float("-inf"))
            term = exp2_near(logits + bonus[None, :] - threshold[:, None], S.FAST)
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
        fade = exp2_near(high - risen, S.FAST)
        weights = exp2_near(logits - risen[:, None], S.FAST)
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
    out = (program + head) * S.R + row
    tl.store(parts.peak + out, high, mask=row < S.R)
    tl.store(parts.total + out, mass, mask=row < S.R)
    inside = (row < S.R)[:, None] & (column < S.E)[None, :]
    tl.store(parts.weighted + out[:, None] * S.E + column[None, :], sums * (1 / LIFT), mask=inside)
    tl.store(parts.square + program + head, tl.max(tl.max(longest, 1), 0))
    if DRAWN:
        tl.store(parts.light + out, squares, mask=row < S.R)
        tl.store(parts.heavy + out, large, mask=row < S.R)


@triton.jit
def _send_for_rows(program, inputs, used, heads, S: tl.constexpr):
    """Has the keys and values brought near that a program reads first, if all heads are likely to be read in order."""
    # Numbers in a line of the cache.
    KEYS: tl.constexpr = 1024 // inputs.k.base.dtype.element_ty.primitive_bitwidth
    VALUES: tl.constexpr = 1024 // inputs.v.base.dtype.element_ty.primitive_bitwidth
    head = tl.arange(0, S.HEADS)
    s = tl.load(used.tokens + head, mask=head < heads, other=0, cache_modifier=".cg")
    ordered = read_in_order(s, used, True).to(tl.int32)
    if tl.min(ordered, 0) > 0:
        lists = shares(tiles_in(s - first_seen(s, used)), S)
        begin, stop, one, _ = share_of(program, lists)
        if begin < stop:
            start, _end = span_of(one, lists, begin, stop, S)
            own = tl.load(used.tokens + one, cache_modifier=".cg")
            row = first_seen(own, used) + start * _TILE + tl.arange(0, _AHEAD)
            row = tl.minimum(row, own - 1).to(tl.int64)[:, None]
            channel = tl.minimum(tl.arange(0, max(1, S.DP // KEYS)) * KEYS, S.D - 1)
            column = tl.minimum(tl.arange(0, max(1, S.EP // VALUES)) * VALUES, S.E - 1)
            send_for(at_head(inputs.k, one) + row * S.D + channel[None, :])
            send_for(at_head(inputs.v, one) + row * S.E + column[None, :])


@triton.jit(do_not_specialize=["heads", "room"])
def _attended(inputs, chosen, used, parts, heads, spans, room, S: tl.constexpr, EARLY: tl.constexpr):
    """One share of all lists, as long as any other: the end of one head's, perhaps, and the beginning of the next's."""
    program = tl.program_id(0)
    precede(EARLY)
    if EARLY:
        _send_for_rows(program, inputs, used, heads, S)
    await_last(EARLY)
    lists = shares(tiles_listed(chosen.found, heads, spans, S), S)
    begin, stop, first, beyond = share_of(program, lists)
    for head in range(first, beyond):
        tiles = span_of(head, lists, begin, stop, S)
        attend(program, head, tiles, inputs, parts, used, S, chosen, spans, room)


@triton.jit(do_not_specialize=["heads"])
def _read_again(inputs, parts, found, terms, worthwhile, heads, S: tl.constexpr, EARLY: tl.constexpr):
    """One share of all tokens of heads with a row that is not within what was allowed, or of all heads.

    Where there were answers before, the first program says whether the next steps look at the sketch.
    """
    follow(EARLY)
    program = tl.program_id(0)
    if worthwhile is not None:
        if program == 0:
            settle(terms.used, found, heads, worthwhile, S)
    lists = shares(tiles_again(found.within, terms.used, heads, S), S)
    begin, stop, first, beyond = share_of(program, lists)
    for head in range(first, beyond):
        tiles = span_of(head, lists, begin, stop, S)
        attend(program, head, tiles, inputs, parts, terms.used, S)


@triton.jit(do_not_specialize=["heads"])
def _merged_again(parts, given, found, unread, terms, heads, S: tl.constexpr, EARLY: tl.constexpr):
    """The answer to a row of a head that was read again, from what all programs found of it."""
    follow(EARLY)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    slots = slots_of(row // S.R, shares(tiles_again(found.within, terms.used, heads, S), S), S)
    if slots[1] > slots[0]:
        tl.store(found.report + 4 * rows + row, 1.0)
        merge(row, rows, slots, parts, given, found, unread, terms.used, S)
    elif found.within is None:
        without_tokens(row, rows, given, found, S)


def attended(
    q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, used: Used, hot: HotRows | None = None
) -> Parts:
    """Attention over the listed tokens, in parts; rows that are among the hot ones are read there."""
    heads, spans = chosen.found.shape
    shape, parts = list_shape(q, v, spans), blank_parts(q, v, chosen.draws is not None)
    near = None if hot is None else sought(hot, chosen, used)
    inputs, room = _Inputs.of(q, k, v, scale, chosen.draws, near), chosen.listed.shape[1] // spans
    # Lists and rows are fetched one after the other: five stages hold two tiles, three hold one.
    stages = 5 if q.element_size() * (shape.D + shape.E) <= 512 else 3
    _attended[(shape.PROGRAMS,)](
        inputs,
        chosen,
        used,
        parts,
        heads,
        spans,
        room,
        S=shape,
        num_warps=warps_of(shape.R),
        num_stages=stages,
        **chained(q.device),
    )
    return parts


def read_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    most: Float32[Tensor, "b g"],
    scale: float,
    found: Decoded,
    sinks: Sinks | None = None,
) -> None:
    """Puts answers from all tokens in the place of those that are not within what was allowed, without a look at them.

    `within` stays as it was: it tells what the answers were that had to be replaced.
    """
    assert found.within is not None
    found = found._replace(within=found.within.view(torch.int8))
    _read_all(q, k, v, terms, most, scale, found, sinks, worthwhile(q.shape[1] // k.shape[1]))


def read_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Float32[Tensor, "b g s"],
    most: Float32[Tensor, "b g"],
    scale: float,
    used: Used,
    report: Float32[Tensor, "5 b h"],
    sinks: Sinks | None = None,
) -> Tensor:
    """Attention over all tokens in use, of which the device alone knows how many there are; `report` tells of it."""
    found = Decoded(q.new_empty(*q.shape[:2], v.shape[3]), report)
    _read_all(q, k, v, Whole(by_head(lengths, "lengths").base, used), most, scale, found, sinks, None)
    return found.out


def _read_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms | Whole,
    most: Float32[Tensor, "b g"],
    scale: float,
    found: Decoded,
    sinks: Sinks | None,
    share: float | None,
) -> None:
    given = BoundInputs.of(q, v, most, most, scale, terms, sinks)
    shape, parts, heads = list_shape(q, v), blank_parts(q, v), most.numel()
    inputs = _Inputs.of(q, k, v, scale), parts, found, terms, share, heads
    _read_again[(shape.PROGRAMS,)](*inputs, S=shape, num_warps=warps_of(shape.R), num_stages=3, **chained(q.device))
    # One program for each row: all rows of a head in turn took several times as long as reading it.
    shape, outputs = merging_shape(shape), (parts, given, found, Unread(), terms, heads)
    _merged_again[(q.shape[0] * q.shape[1],)](*outputs, S=shape, num_warps=MERGING_WARPS, **chained(q.device))
