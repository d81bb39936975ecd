r"""One look at every sketched token: how much each, left unread, may weigh for each query head.

Tokens of some groups are counted by the size of their terms on the way, for `avow.kernels.planning`.

With :math:`l_j` the logit of token j in octaves (logits count powers of two here), its term is at most

.. math:: \log_2\frac{e^{q \cdot k_j} (\|v_j\| + ν)}{ν}
          \le middle_j + half_j + \log_2\Bigl(1 + \frac{\|v_j\|}{ν}\Bigr) \le \frac{top - offset_j}{8}

where `top` is a whole number for each group of 64 tokens and head, and `offset` a byte for each token and head: what is
written is a byte, not a number of four. A token whose offset would not fit is taken for larger than it is. Terms above
`LIMIT`, and those that came out as nan, are said to be `LIMIT`: they are the largest there are, and so always read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Float64, Int32, UInt8
from torch import Tensor

from avow.kernels import planning
from avow.kernels.chunking import padded
from avow.kernels.pausing import Used, groups_in
from avow.kernels.planning import CIRCLE, bin_of, counts_group, sampled_in
from avow.kernels.step_constants import (
    FEWEST,
    LIMIT,
    LOWEST_TERM,
    STEPS,
    StepShape,
    absolute_error,
    relative_error,
    tile_of,
)
from avow.kernels.tile_ops import (
    HeadView,
    at_head,
    await_last,
    by_head,
    chained,
    exp2_near,
    filled,
    interpreted,
    log2_near,
    precede,
    send_for,
)
from avow.numerics.sketch import GROUP, Sketch

_GROUP, _FEWEST, _CIRCLE = tl.constexpr(GROUP), tl.constexpr(FEWEST), tl.constexpr(CIRCLE)
# Queries times scales are rounded to float16; this power of two keeps them away from the ends of its range.
_LIFT = tl.constexpr(2.0**12)
# Covers what log2 and its sums round, in steps, and the half that makes the nearest whole number one above.
_PAD = tl.constexpr(0.5 + 2.0**-6)
_HIGHEST = tl.constexpr(float(LIMIT))
# Added to a number of at most 2^22, it leaves the nearest whole number in the lowest bits, and there without it.
_WHOLE, _BARE = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
# How many turns of a program are sent for before it can begin.
_AHEAD = tl.constexpr(2)
# Groups whose products with the queries a program makes at once.
_MANY = tl.constexpr(32)
# What a token is expected to weigh is taken this share of its interval below the middle: where few tokens make up the
# whole mass, a guess too high would have too little read. Errors of products spread about an eighth of their bound.
_DOUBT = tl.constexpr(0.25)
# Programs of one warp that an H200 runs at once, eight to a processor, and rows of each.
_AT_ONCE, _ROWS = 132 * 8, 16


class Terms(NamedTuple):
    """What is known of every sketched token; h counts query heads, r of them for each key head.

    There is room for more groups than are in use: what stands behind those means nothing.
    """

    offset: UInt8[Tensor, "bh rows"]
    top: Int32[Tensor, "bg room r"]
    shift: Float32[Tensor, "bg room r"]
    """Products with the zeros of groups, in steps."""
    nu: Float32[Tensor, "bg"]
    counts: Int32[Tensor, "bh circle"]
    """A histogram of some of the terms, as `avow.kernels.planning` reads it."""
    peaks: Int32[Tensor, "bg programs r"]
    """The largest `top` that each program found."""
    masses: Float32[Tensor, "bg programs r"]
    """What the weights that it saw are expected to sum to at least, as multiples of 2^(peak / 8): a guess."""
    lengths: Float[Tensor, "bg s"]
    """Those of values that terms count with."""
    used: Used


class _Looked(NamedTuple):
    """What a sketch says of tokens, of groups of them and of heads, and the lengths of values."""

    codes: HeadView
    scale: HeadView
    zero: HeadView
    radius: HeadView
    reach: HeadView
    lengths: HeadView
    metric: Float32[Tensor, "b g d"]
    size: Float64[Tensor, "b g"]


class _Numbers(NamedTuple):
    """What makes steps of products, their relative and absolute errors, and the least share of the longest value."""

    factor: float
    relative: float
    absolute: float
    least: float


@triton.jit
def _length_of(most, hint, head, least, RP: tl.constexpr, R: tl.constexpr):
    """ν: some length between the longest value's and a millionth of it; which one, only the choice depends on."""
    unit = tl.load(most + head)
    wide = unit
    if hint is not None:
        row = tl.arange(0, RP)
        wide = tl.maximum(tl.max(tl.load(hint + head * R + row, mask=row < R, other=0.0), 0), unit * least)
    wide = tl.where((wide > unit * 2.0**-20) & (wide < unit), wide, unit)
    return tl.where(wide > 0, wide, 1.0)


@triton.jit
def _queries(q, sketch, numbers, terms, head, row, groups, room, S: tl.constexpr, STRIDE: tl.constexpr):
    """What queries are multiplied by, what makes steps of products, and what widens intervals, of some rows.

    Their products with the zeros of a program's groups are written to `terms.shift`; `groups` are the first of these,
    the step from one turn to the next, and where all end.
    """
    # The numbers of bfloat16 that a query's digits fill.
    TWO: tl.constexpr = q.dtype.element_ty == tl.float16
    PARTS: tl.constexpr = 1 if q.dtype.element_ty == tl.bfloat16 else (2 if TWO else 3)
    start, leap, c = groups
    channel = tl.arange(0, S.DP)
    there = (row < S.R)[:, None] & (channel < S.D)[None, :]
    x = tl.load(q + (head * S.R + row)[:, None] * S.D + channel[None, :], mask=there, other=0.0).to(tl.float32)
    metric = tl.load(sketch.metric + head * S.D + channel, mask=channel < S.D, other=0.0)
    # A power of two at most the largest entry, and its inverse, by their exponents.
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 32), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    x = x * inverse[:, None]
    grown = (tl.load(sketch.size + head) * numbers.factor * power.to(tl.float64)).to(tl.float32)  # (RP,)
    square = x * x
    # Sums of at most 256 squares, their root and these products round by less than 2^-13.
    spread = tl.sqrt(tl.sum(square * metric[None, :], 1)) * (1 + 2.0**-13) + 2.0**-60
    length = tl.sqrt(tl.sum(square, 1)) * (1 + 2.0**-13) + 2.0**-60
    zero = at_head(sketch.zero, head)
    for begin in range(start, c, leap * (_MANY // STRIDE)):
        number = tl.arange(0, _MANY)
        group = begin + number // STRIDE * leap + number % STRIDE
        inside = (group < c)[:, None] & (channel < S.D)[None, :]
        zeros = tl.load(zero + group[:, None] * S.D + channel[None, :], mask=inside, other=0.0)
        # Each part holds the next eight bits of the queries, so that every product is exact.
        left = x
        coarse = left.to(tl.bfloat16)
        shift = tl.dot(zeros, tl.trans(coarse))  # (MANY, RP)
        for _ in tl.static_range(PARTS - 1):
            left = left - coarse.to(tl.float32)
            coarse = left.to(tl.bfloat16)
            shift = tl.dot(zeros, tl.trans(coarse), shift)
        place = (head * room + group)[:, None] * S.R + row[None, :]
        # Rows of a second group are those of the first.
        own = ((tl.arange(0, S.RP) < S.RP // STRIDE) & (row < S.R))[None, :] & (group < c)[:, None]
        tl.store(terms.shift + place, shift * grown[None, :], mask=own)
    return inverse, grown, spread * grown * (1 + 2.0**-18), length * grown * numbers.relative


@triton.jit
def _codes(words, FAST: tl.constexpr):
    """The lower codes of some bytes, and 16 times the upper ones, in float16 and in units of 2^-24."""
    if FAST:
        # A small whole number as the bits of a float16 is that many of its smallest unit, which tensor cores multiply
        # as exactly as any other number; so a byte only needs its place, and no conversion.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd;
            prmt.b32 even, $4, 0, 0x3120;
            shr.b32 odd, even, 8;
            and.b32 $0, even, 0x000F000F;
            and.b32 $1, odd, 0x000F000F;
            and.b32 $2, even, 0x00F000F0;
            and.b32 $3, odd, 0x00F000F0;
            }
            """,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = (words & 15).to(tl.float16) * 2.0**-24, (words & 240).to(tl.float16) * 2.0**-24
    return low, high


@triton.jit(do_not_specialize=["room"])
def _bounded(q, sketch, most, hint, numbers, terms, room, S: tl.constexpr, EARLY: tl.constexpr):
    """Offsets and tops of some groups of a key head, for its R query heads, and what these add to its histogram.

    Programs take groups in turns, so that what all of them read at a time lies together.
    """
    RP: tl.constexpr = S.RP
    TURNS: tl.constexpr = (S.R + RP - 1) // RP
    head, part = tl.program_id(0).to(tl.int64) // TURNS, tl.program_id(1)
    least_row = tl.program_id(0) % TURNS * RP
    precede(EARLY)
    if EARLY:
        # Memory has nothing to do while the kernel before runs. How many groups there will be is a guess.
        _send_for_codes(sketch, terms, head, part, S)
    await_last(EARLY)
    first, c = groups_in(terms.used, head)
    W: tl.constexpr = S.D // 2
    column, byte, token = tl.arange(0, RP), tl.arange(0, S.WP), tl.arange(0, _GROUP)
    # Two groups at once: the columns of a tile are query heads of the first, then of the second.
    TWO: tl.constexpr = 2 * S.R <= _FEWEST
    STRIDE: tl.constexpr = 2 if TWO else 1
    STAGES: tl.constexpr = 3 if TWO else 4
    kept = least_row + tl.arange(0, RP // STRIDE)
    found = (head * tl.num_programs(1) + part) * S.R + kept
    nu = _length_of(most, hint, head, numbers.least, RP * TURNS, S.R)
    if part == 0:
        tl.store(terms.nu + head, nu)
    if first + part * STRIDE >= c:
        tl.store(terms.peaks + found, tl.full((RP // STRIDE,), LOWEST_TERM, tl.int32), mask=kept < S.R)
        tl.store(terms.masses + found, filled(0.0, RP // STRIDE), mask=kept < S.R)
        return
    row, second = least_row + column % (RP // STRIDE), column // (RP // STRIDE)
    # The first groups that a program looks at, and the steps from each to the next.
    start, leap = first + part * STRIDE, tl.num_programs(1) * STRIDE
    inverse, grown, spread, error = _queries(q, sketch, numbers, terms, head, row, (start, leap, c), room, S, STRIDE)
    least = numbers.absolute * grown
    # All threads have written their groups' shifts before one of them reads.
    tl.debug_barrier()
    there = (row < S.R)[None, :] & (byte < W)[:, None]
    entry = q + (head * S.R + row)[None, :] * S.D + byte[:, None]
    lift = inverse * _LIFT
    lower = tl.load(entry, mask=there, other=0.0).to(tl.float32) * lift[None, :]  # (WP, RP)
    upper = tl.load(entry + W, mask=there, other=0.0).to(tl.float32) * (lift * 0.0625)[None, :]
    # Codes are in units of 2^-24.
    unlift = grown * (2.0**24 / _LIFT)
    ratio = 1 / nu
    highest, masses = tl.full((RP,), LOWEST_TERM, tl.int32), filled(0.0, 8, RP)
    codes, offset = at_head(sketch.codes, head), terms.offset + head * S.R * room * _GROUP
    scale, radius = at_head(sketch.scale, head), at_head(sketch.radius, head)
    lengths, reach = at_head(sketch.lengths, head), at_head(sketch.reach, head)
    sampled = sampled_in(c - first, S.ENOUGH)
    # Said here, the number of stages holds for every load; said at the launch, for those of products alone.
    for group in tl.range(start, c, leap, num_stages=STAGES):
        # Behind the last group comes the last group again: what is written twice is the same.
        after = tl.minimum(group + 1, c - 1)
        mine = tl.where(second == 0, group, after)  # (RP,)
        low, high = _codes(_words(codes, group, token, byte, S), S.FAST)
        low_steps, high_steps = _halves(scale + group * S.D, byte, S)
        far = tl.load(radius + group * _GROUP + token).to(tl.float32)[:, None]
        long = tl.load(lengths + group * _GROUP + token).to(tl.float32)[:, None]
        if TWO:
            other_low, other_high = _halves(scale + after * S.D, byte, S)
            low_steps = tl.where(second[None, :] == 0, low_steps, other_low)
            high_steps = tl.where(second[None, :] == 0, high_steps, other_high)
        low_side = (lower * low_steps).to(tl.float16)
        high_side = (upper * high_steps).to(tl.float16)
        sums = tl.dot(high, high_side, tl.dot(low, low_side))  # (GROUP, RP)
        if TWO:
            low, high = _codes(_words(codes, after, token, byte, S), S.FAST)
            sums = tl.where(second[None, :] == 0, sums, tl.dot(high, high_side, tl.dot(low, low_side)))
            other_far = tl.load(radius + after * _GROUP + token).to(tl.float32)[:, None]
            far = tl.where(second[None, :] == 0, far, other_far)
            other_long = tl.load(lengths + after * _GROUP + token).to(tl.float32)[:, None]
            long = tl.where(second[None, :] == 0, long, other_long)
        at = (head * room + mine) * S.R + row
        shift = tl.load(terms.shift + at, mask=row < S.R, other=0.0)
        margin = error * tl.load(reach + mine) + least
        middle = sums * unlift[None, :] + shift[None, :]
        half = spread[None, :] * far + margin[None, :]
        term = middle + half + (8.0 * log2_near(1 + long * ratio, S.FAST) + _PAD)
        # nan is not below the limit, either.
        term = tl.maximum(tl.where(term < _HIGHEST, term, _HIGHEST), -_HIGHEST)
        place = (term + _WHOLE).to(tl.int32, bitcast=True)
        peak = tl.max(place, 0)  # (RP,)
        short = tl.minimum(peak[None, :] - place, 255)
        peak = peak - _BARE
        spot = (row * room + mine)[None, :] * _GROUP + token[:, None]
        tl.store(offset + spot, short.to(tl.uint8), mask=(row < S.R)[None, :])
        tl.store(terms.top + at, peak, mask=row < S.R)
        # What comes twice counts once.
        own = (row < S.R) & ((second == 0) | (group + 1 < c))
        risen = tl.maximum(highest, peak)
        fade = exp2_near((highest - risen).to(tl.float32) * 0.125, S.FAST)
        least_weight = tl.where(own, risen.to(tl.float32) * -0.125, float("-inf"))
        weights = exp2_near((middle - _DOUBT * half) * 0.125 + least_weight[None, :], S.FAST)
        # A thread has every eighth token, and adds up its own.
        masses = masses * fade[None, :] + tl.sum(tl.reshape(weights, (_GROUP // 8, 8, RP)), 0)
        highest = risen
        if counts_group((group - first) // STRIDE, sampled):
            into = (head * S.R + row)[None, :] * _CIRCLE + bin_of(peak[None, :] - short)
            tl.atomic_add(terms.counts + into, 1, mask=own[None, :], sem="relaxed")
    mass = tl.sum(masses, 0)
    if TWO:
        halves = tl.reshape(highest, (STRIDE, RP // STRIDE))
        best = tl.max(halves, 0)
        fade = exp2_near((halves - best[None, :]).to(tl.float32) * 0.125, S.FAST)
        highest, mass = best, tl.sum(tl.reshape(mass, (STRIDE, RP // STRIDE)) * fade, 0)
    tl.store(terms.peaks + found, highest, mask=kept < S.R)
    tl.store(terms.masses + found, mass, mask=kept < S.R)


@triton.jit
def _send_for_codes(sketch, terms, head, part, S: tl.constexpr):
    """Has the codes brought near that a program looks at first, of as many groups as are likely to be there."""
    STRIDE: tl.constexpr = 2 if 2 * S.R <= _FEWEST else 1
    BYTES: tl.constexpr = _GROUP * (S.D // 2)
    LINES: tl.constexpr = _GROUP * S.WP // 128
    first, c = groups_in(terms.used, head, True)
    line = tl.arange(0, _AHEAD * STRIDE * LINES)
    number = line // LINES
    group = first + part * STRIDE + number // STRIDE * (tl.num_programs(1) * STRIDE) + number % STRIDE
    if first + part * STRIDE < c:
        group = tl.minimum(group, c - 1)
        send_for(at_head(sketch.codes, head) + group * BYTES + tl.minimum(line % LINES * 128, BYTES - 1))


@triton.jit
def _words(codes, group, token, byte, S: tl.constexpr):
    """The bytes of a group's codes."""
    W: tl.constexpr = S.D // 2
    place = (group * _GROUP + token)[:, None] * W + byte[None, :]
    if W == S.WP:
        words = tl.load(codes + place)
    else:
        words = tl.load(codes + place, mask=(byte < W)[None, :], other=0)
    return words


@triton.jit
def _halves(channels, byte, S: tl.constexpr):
    """What there is for each channel: for those of the lower codes and of the upper ones."""
    W: tl.constexpr = S.D // 2
    low = tl.load(channels + byte, mask=byte < W, other=0.0).to(tl.float32)
    high = tl.load(channels + W + byte, mask=byte < W, other=0.0).to(tl.float32)
    return low[:, None], high[:, None]


def bounded(
    q: Tensor,
    sketch: Sketch,
    lengths: Tensor,
    most: Float32[Tensor, "b g"],
    hint: Float32[Tensor, "b h"] | None,
    scale: float,
    used: Used,
    counts: Int32[Tensor, "bh circle"],
    least: float = 0.0,
) -> Terms:
    """The terms of every sketched token in use, some of which are counted where there are zeros: in `counts`.

    `hint` are lengths that answers may have; those below the share `least` of the longest value are taken for that.
    """
    heads, (b, h, d), room = most.numel(), q.shape, sketch.codes.shape[2]
    names = ("codes", "scale", "zero", "radius", "reach")
    views = {name: by_head(getattr(sketch, name), f"sketch.{name}") for name in names}
    own = _Looked(
        **views, lengths=by_head(lengths, "lengths"), metric=sketch.metric.contiguous(), size=sketch.size.contiguous()
    )
    r = b * h // heads
    shape = StepShape(
        r,
        min(tile_of(r), _ROWS),
        D=d,
        DP=padded(d),
        WP=padded(d // 2),
        ENOUGH=planning.enough(b * h),
        FAST=not interpreted(),
    )
    # Rows are shared out among programs: one of several warps waits at each of its sums.
    turns = triton.cdiv(r, shape.RP)
    programs = min(triton.cdiv(room, 2 if 2 * r <= FEWEST else 1), triton.cdiv(_AT_ONCE, heads * turns))
    programs = max(1, programs)
    terms = Terms(
        q.new_empty(b * h, room * GROUP, dtype=torch.uint8),
        q.new_empty(heads, room, r, dtype=torch.int32),
        q.new_empty(heads, room, r, dtype=torch.float32),
        q.new_empty(heads, dtype=torch.float32),
        counts,
        q.new_empty(heads, programs, r, dtype=torch.int32),
        q.new_empty(heads, programs, r, dtype=torch.float32),
        own.lengths.base,
        used,
    )
    numbers = _Numbers(scale * math.log2(math.e) * STEPS, relative_error(d), absolute_error(d), least)
    inputs = q, own, most, hint, numbers, terms, room
    _bounded[(heads * turns, programs)](*inputs, S=shape, num_warps=1, **chained(q.device))
    return terms
