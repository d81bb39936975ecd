r"""One look at every sketched token: how much each, left unread, may weigh for each query head.

With :math:`l_j` the logit of token j in octaves (logits count powers of two here), its term is at most

.. math:: \log_2\frac{e^{q \cdot k_j} (\|v_j\| + ν)}{ν}
          \le middle_j + half_j + \log_2\Bigl(1 + \frac{\|v_j\|}{ν}\Bigr) \le \frac{top - offset_j}{8}

where `top` is a whole number for each group of 64 tokens and head, and `offset` a byte for each token and head: what is
written is a byte, not a number of four. A token whose offset would not fit is taken for larger than it is. Terms above
`LIMIT`, and those that came out as nan, are said to be `LIMIT`: they are the largest there are, and so always read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.pausing import Used, groups_in
from avow.kernels.step_constants import CONSTANTS, FEWEST, LIMIT, LOWEST_TERM, Prepared, StepShape, tile_of
from avow.kernels.tile_ops import HeadView, at_head, by_head, chained, exp2_near, follow, interpreted, log2_near
from avow.numerics.sketch import GROUP, Sketch

_GROUP, _FEWEST = tl.constexpr(GROUP), tl.constexpr(FEWEST)
# Queries times scales are rounded to float16; this power of two keeps them away from the ends of its range.
_LIFT = tl.constexpr(2.0**12)
# Covers what log2 and its sums round, in steps, and the half that makes the nearest whole number one above.
_PAD = tl.constexpr(0.5 + 2.0**-6)
_HIGHEST = tl.constexpr(float(LIMIT))
# Added to a number of at most 2^22, it leaves the nearest whole number in the lowest bits, and there without it.
_WHOLE, _BARE = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
# What a token is expected to weigh is taken this share of its interval below the middle: where few tokens make up the
# whole mass, a guess too high would have too little read. Errors of products spread about an eighth of their bound.
_DOUBT = tl.constexpr(0.25)
# Warps that an H200 runs at once, eight to a processor; programs of few rows have one each, others one to so many rows.
_AT_ONCE, _ROWS_OF_WARP = 132 * 8, 16


class Terms(NamedTuple):
    """What is known of every sketched token; h counts query heads, r of them for each key head.

    There is room for more groups than are in use: what stands behind those means nothing.
    """

    offset: UInt8[Tensor, "bh rows"]
    top: Int32[Tensor, "bg room r"]
    mass: Float32[Tensor, "bg room r"]
    """What the weights of a group are expected to sum to at least, as multiples of 2^(top / 8): a guess."""
    nu: Float32[Tensor, "bg"]
    widest: Int32[Tensor, "bh"]
    """The largest `top` of a head."""
    counts: Int32[Tensor, "bh bins"]
    """Zeros: an empty histogram."""
    arrived: Int32[Tensor, "bh"]
    """Zeros: how many programs have filled in their part."""
    lengths: Float[Tensor, "bg s"]
    """Those of values that terms count with."""
    used: Used


class _Codes(NamedTuple):
    """What a sketch says of tokens and of groups of them, and the lengths of values."""

    codes: HeadView
    scale: HeadView
    radius: HeadView
    reach: HeadView
    lengths: HeadView


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
def _bounded(q, sketch, known, terms, room, S: tl.constexpr, EARLY: tl.constexpr):
    """Offsets, tops and masses of some groups of a key head, for its R query heads.

    Programs take groups in turns, so that what all of them read at a time lies together.
    """
    follow(EARLY)
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, c = groups_in(terms.used, head)
    if first >= c:
        return
    RP: tl.constexpr = S.RP
    W: tl.constexpr = S.D // 2
    column, byte, token = tl.arange(0, RP), tl.arange(0, S.WP), tl.arange(0, _GROUP)
    # Two groups at once: the columns of a tile are query heads of the first, then of the second.
    TWO: tl.constexpr = 2 * S.R <= _FEWEST
    STRIDE: tl.constexpr = 2 if TWO else 1
    STAGES: tl.constexpr = 3 if TWO else 4
    row, second = column % (RP // STRIDE), column // (RP // STRIDE)
    own = known.table + (head * RP + row) * CONSTANTS
    inverse, grown, spread = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    error, least = tl.load(own + 3), tl.load(own + 4)
    there = (row < S.R)[None, :] & (byte < W)[:, None]
    entry = q + (head * S.R + row)[None, :] * S.D + byte[:, None]
    lift = inverse * _LIFT
    lower = tl.load(entry, mask=there, other=0.0).to(tl.float32) * lift[None, :]  # (WP, RP)
    upper = tl.load(entry + W, mask=there, other=0.0).to(tl.float32) * (lift * 0.0625)[None, :]
    grown = grown * (2.0**24 / _LIFT)
    ratio = 1 / tl.load(terms.nu + head)
    highest = tl.full((RP,), LOWEST_TERM, tl.int32)
    codes, offset = at_head(sketch.codes, head), terms.offset + head * S.R * room * _GROUP
    scale, radius = at_head(sketch.scale, head), at_head(sketch.radius, head)
    lengths, reach = at_head(sketch.lengths, head), at_head(sketch.reach, head)
    # Said here, the number of stages holds for every load; said at the launch, for those of products alone.
    for group in tl.range(first + part * STRIDE, c, tl.num_programs(1) * STRIDE, num_stages=STAGES):
        # Behind the last group comes the last group again: what is written twice is the same.
        after = tl.minimum(group + 1, c - 1)
        mine = tl.where(second == 0, group, after)  # (RP,)
        low, high = _codes(_words(codes, group, token, byte, S), S.FAST)
        low_steps, high_steps = _steps(scale, group, byte, S)
        far = tl.load(radius + group * _GROUP + token).to(tl.float32)[:, None]
        long = tl.load(lengths + group * _GROUP + token).to(tl.float32)[:, None]
        if TWO:
            other_low, other_high = _steps(scale, after, byte, S)
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
        shift = tl.load(known.bias + at, mask=row < S.R, other=0.0)
        margin = error * tl.load(reach + mine) + least
        middle = sums * grown[None, :] + shift[None, :]
        half = spread[None, :] * far + margin[None, :]
        term = middle + half + (8.0 * log2_near(1 + long * ratio, S.FAST) + _PAD)
        # nan is not below the limit, either.
        term = tl.maximum(tl.where(term < _HIGHEST, term, _HIGHEST), -_HIGHEST)
        place = (term + _WHOLE).to(tl.int32, bitcast=True)
        peak = tl.max(place, 0)  # (RP,)
        short = tl.minimum(peak[None, :] - place, 255).to(tl.uint8)
        peak = peak - _BARE
        spot = (row * room + mine)[None, :] * _GROUP + token[:, None]
        tl.store(offset + spot, short, mask=(row < S.R)[None, :])
        weight = tl.sum(exp2_near((middle - _DOUBT * half - peak.to(tl.float32)[None, :]) * 0.125, S.FAST), 0)
        tl.store(terms.top + at, peak, mask=row < S.R)
        tl.store(terms.mass + at, weight, mask=row < S.R)
        highest = tl.maximum(highest, peak)
    tl.atomic_max(terms.widest + head * S.R + row, highest, mask=row < S.R, sem="relaxed")


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
def _steps(scale, group, byte, S: tl.constexpr):
    """A group's scales, of the lower codes and of the upper ones."""
    W: tl.constexpr = S.D // 2
    steps = scale + group * S.D + byte
    low = tl.load(steps, mask=byte < W, other=0.0).to(tl.float32)
    high = tl.load(steps + W, mask=byte < W, other=0.0).to(tl.float32)
    return low[:, None], high[:, None]


def bounded(q: Tensor, sketch: Sketch, lengths: Tensor, known: Prepared, used: Used) -> Terms:
    """The terms of every sketched token in use."""
    heads, (b, h, d), room = known.nu.shape[0], q.shape, sketch.codes.shape[2]
    views = {name: by_head(getattr(sketch, name), f"sketch.{name}") for name in ("codes", "scale", "radius", "reach")}
    codes = _Codes(**views, lengths=by_head(lengths, "lengths"))
    r = b * h // heads
    terms = Terms(
        q.new_empty(b * h, room * GROUP, dtype=torch.uint8),
        q.new_empty(heads, room, r, dtype=torch.int32),
        q.new_empty(heads, room, r, dtype=torch.float32),
        *known[2:],
        codes.lengths.base,
        used,
    )
    shape = StepShape(r, tile_of(r), D=d, WP=padded(d // 2), FAST=not interpreted())
    warps = max(1, shape.RP // _ROWS_OF_WARP)
    programs = min(triton.cdiv(room, 2 if 2 * r <= FEWEST else 1), triton.cdiv(_AT_ONCE // warps, heads))
    _bounded[(heads, max(1, programs))](q, codes, known, terms, room, S=shape, num_warps=warps, **chained(q.device))
    return terms
