"""What a step knows before it looks at tokens: constants of each head, and its products with the sketch's zeros."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.pausing import Used, tokens_in
from avow.kernels.tile_ops import by_head, early, follow
from avow.numerics.rounding import gamma, unit
from avow.numerics.sketch import GROUP, Sketch

# Terms are counted in eighths of an octave.
STEPS = 8
# The largest term there is, in steps: far below the 2^22 that the sketch pass can round.
LIMIT = 2**21
LOWEST_TERM = tl.constexpr(-LIMIT)
# Query heads that share a key head, at most: the smallest tile of a tensor core.
SIBLINGS = 8
# Bins of the histogram that is emptied here and filled later.
BINS = 128
_BINS, _GROUP = tl.constexpr(BINS), tl.constexpr(GROUP)
# Constants of a head: what its queries are multiplied by, what products are, and what widens intervals.
CONSTANTS = tl.constexpr(5)
# Groups per program.
_MANY = 64


class Prepared(NamedTuple):
    """What the kernel over all tokens needs to know beforehand."""

    bias: Float32[Tensor, "bg room r"]
    table: Float32[Tensor, "bg p constants"]
    nu: Float32[Tensor, "bg"]
    widest: Int32[Tensor, "bh"]
    counts: Int32[Tensor, "bh bins"]
    arrived: Int32[Tensor, "bh"]


def relative_error(d: int) -> float:
    """What a product with a sketched row may be off, relative to the query's length and the group's reach.

    Queries times scales are rounded to float16, |q_c·scale_c·code| summing to ‖q‖·reach at most; both products, with
    the codes and with the zeros (with these in up to three parts), are summed in float32 (on tensor cores, with twice
    its unit); bringing them to steps and adding them up takes less than 2^-20.
    """
    half, u = unit(torch.float16), 2 * unit(torch.float32)
    return half + (gamma(d + 8, u) + gamma(3 * d + 8, u)) * (1 + half) + 2.0**-20


def absolute_error(d: int) -> float:
    """The same for products that are too small for float16: each by 2^-25, lifted by 2^12, times a code of 240."""
    return d * 240 * 2.0**-25 * 2.0**-12 + 2.0**-60


@triton.jit(do_not_specialize=["room"])
def _prepared(
    q,
    zero,
    metric,
    size,
    most,
    hint,
    bias,
    table,
    nu,
    widest,
    counts,
    arrived,
    factor,
    relative,
    absolute,
    least,
    zero_stride,
    used,
    state,
    room,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MANY: tl.constexpr,
    PARTS: tl.constexpr,
    HINTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Constants of each head, and the products of queries with the zeros of `MANY` groups."""
    follow(EARLY)
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tokens_in(used, state, head) // _GROUP
    if (part > 0) & (part * MANY >= c):
        return
    row, channel = tl.arange(0, RP), tl.arange(0, DP)
    there = (row < R)[:, None] & (channel < D)[None, :]
    x = tl.load(q + (head * R + row)[:, None] * D + channel[None, :], mask=there, other=0.0).to(tl.float32)
    # A power of two at most the largest entry, and its inverse, by their exponents.
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 32), 253)
    power, inverse = (
        (exponent << 23).to(tl.float32, bitcast=True),
        ((254 - exponent) << 23).to(tl.float32, bitcast=True),
    )
    x = x * inverse[:, None]
    grown = (tl.load(size + head) * factor * power.to(tl.float64)).to(tl.float32)  # (RP,)
    group = part * MANY + tl.arange(0, MANY)
    inside = (group < c)[:, None] & (channel < D)[None, :]
    zeros = tl.load(zero + head * zero_stride + group[:, None] * D + channel[None, :], mask=inside, other=0.0)
    # Each part holds the next eight bits of the queries, so that every product is exact.
    coarse = x.to(tl.bfloat16)
    shift = tl.dot(zeros, tl.trans(coarse))  # (MANY, RP)
    for _ in tl.static_range(PARTS - 1):
        x = x - coarse.to(tl.float32)
        coarse = x.to(tl.bfloat16)
        shift = tl.dot(zeros, tl.trans(coarse), shift)
    shift = shift * grown[None, :]
    place = (head * room + group)[:, None] * R + row[None, :]
    tl.store(bias + place, shift, mask=(group < c)[:, None] & (row < R)[None, :])
    if part == 0:
        x = tl.load(q + (head * R + row)[:, None] * D + channel[None, :], mask=there, other=0.0).to(tl.float32)
        x = x * inverse[:, None]
        weight = tl.load(metric + head * D + channel, mask=channel < D, other=0.0)
        square = x * x
        # Sums of at most 256 squares, their root and these products round by less than 2^-13.
        spread = tl.sqrt(tl.sum(square * weight[None, :], 1)) * (1 + 2.0**-13) + 2.0**-60
        length = tl.sqrt(tl.sum(square, 1)) * (1 + 2.0**-13) + 2.0**-60
        own = table + (head * RP + row) * CONSTANTS
        tl.store(own, inverse)
        tl.store(own + 1, grown)
        tl.store(own + 2, spread * grown * (1 + 2.0**-18))
        tl.store(own + 3, length * grown * relative)
        tl.store(own + 4, absolute * grown)
        unit = tl.load(most + head)
        wide = unit
        if HINTED:
            wide = tl.maximum(tl.max(tl.load(hint + head * R + row, mask=row < R, other=0.0), 0), unit * least)
        # Some length between the longest value's and a millionth of it; which one, only the choice depends on.
        wide = tl.where((wide > unit * 2.0**-20) & (wide < unit), wide, unit)
        tl.store(nu + head, tl.where(wide > 0, wide, 1.0))
        tl.store(widest + head * R + row, tl.full((RP,), LOWEST_TERM, tl.int32), mask=row < R)
        tl.store(arrived + head * R + row, tl.zeros((RP,), tl.int32), mask=row < R)
        bins = tl.arange(0, _BINS)
        blank = tl.zeros((RP, _BINS), tl.int32)
        tl.store(counts + (head * R + row)[:, None] * _BINS + bins[None, :], blank, mask=(row < R)[:, None])


def prepared(
    q: Tensor,
    sketch: Sketch,
    most: Float32[Tensor, "b g"],
    hint: Float32[Tensor, "b h"] | None,
    scale: float,
    used: Used,
    least: float = 0.0,
) -> Prepared:
    """Constants of every head, and the products with the zeros of all groups of the tokens in use.

    `hint` are lengths that answers may have; those below the share `least` of the longest value are taken for that.
    """
    b, h, d = q.shape
    room, heads = sketch.codes.shape[2], b * most.shape[1]
    zero = by_head(sketch.zero, "sketch.zero")
    out = Prepared(
        q.new_empty(heads, room, b * h // heads, dtype=torch.float32),
        q.new_empty(heads, SIBLINGS, CONSTANTS.value, dtype=torch.float32),
        q.new_empty(heads, dtype=torch.float32),
        q.new_empty(b * h, dtype=torch.int32),
        q.new_empty(b * h, BINS, dtype=torch.int32),
        q.new_empty(b * h, dtype=torch.int32),
    )
    _prepared[(heads, max(1, triton.cdiv(room, _MANY)))](
        q,
        zero,
        sketch.metric.contiguous(),
        sketch.size.contiguous(),
        most,
        most if hint is None else hint,
        *out,
        scale * math.log2(math.e) * STEPS,
        relative_error(d),
        absolute_error(d),
        least,
        zero.stride(0),
        *used,
        room,
        R=b * h // heads,
        RP=SIBLINGS,
        D=d,
        DP=padded(d),
        MANY=_MANY,
        PARTS={torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[q.dtype],
        HINTED=hint is not None,
        EARLY=early(q.device),
        launch_pdl=early(q.device),
        num_warps=4,
    )
    return out
