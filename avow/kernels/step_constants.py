"""What a step knows before it looks at tokens: constants of each head, and its products with the sketch's zeros."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Float64, Int32
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.pausing import Used, groups_in, read_in_order
from avow.kernels.tile_ops import HeadView, at_head, by_head, chained, follow
from avow.numerics.rounding import gamma, unit
from avow.numerics.sketch import Sketch

# Terms are counted in eighths of an octave.
STEPS = 8
# The largest term there is, in steps: far below the 2^22 that the sketch pass can round.
LIMIT = 2**21
LOWEST_TERM = tl.constexpr(-LIMIT)
# Rows that share a key head, at most: its query heads times the queries of each. And in the smallest tile of a tensor
# core, of which there are powers of two.
ROWS, FEWEST = 64, 8
# Bins of the histogram that is emptied here and filled later.
BINS = 128
_BINS = tl.constexpr(BINS)
# Constants of a head: what its queries are multiplied by, what products are, and what widens intervals.
CONSTANTS = tl.constexpr(5)
# Groups per program.
_MANY = tl.constexpr(64)


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


class StepShape(NamedTuple):
    """What a kernel of a step is compiled for; fields that it does not read stay at their defaults."""

    R: int  # rows to a key head, in tiles of RP, of which so many are looked at in turns as divide R
    RP: int = 1
    TURN: int = 1
    D: int = 0  # width of queries and keys, in tiles of DP, and of codes, two to a byte, in tiles of WP
    DP: int = 0
    WP: int = 0
    E: int = 0  # width of values, in tiles of EP
    EP: int = 0
    BLOCK: int = 0  # tokens that a program counts or lists at once
    ENOUGH: int = 0  # tokens that a histogram counts, of more than twice as many
    HEADS: int = 0  # powers of two that are at least the number of key heads, and of spans of a list
    SPANS: int = 0
    PROGRAMS: int = 0  # programs that share lists, or a power of two that is at least as many as count a row
    PARTS: int = 0  # parts whose largest logits are compared at once, and parts that are merged at once
    CHUNK: int = 0
    LARGEST: float = 0.0  # what the type of answers can hold
    FAST: bool = True  # whether the device has instructions of its own


class _Zeros(NamedTuple):
    """What is the same for all tokens of a group of a sketch, or of a head."""

    zero: HeadView
    metric: Float32[Tensor, "b g d"]
    size: Float64[Tensor, "b g"]


class _Numbers(NamedTuple):
    """What makes steps of products, their relative and absolute errors, and the least share of the longest value."""

    factor: float
    relative: float
    absolute: float
    least: float


@triton.jit(do_not_specialize=["room"])
def _prepared(q, sketch, most, hint, out, numbers, used, room, S: tl.constexpr, EARLY: tl.constexpr):
    """Constants of each head, and the products of queries with the zeros of `_MANY` groups."""
    follow(EARLY)
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, c = groups_in(used, head)
    if (part > 0) & ((part * _MANY >= c) | (part * _MANY + _MANY <= first)):
        return
    row, channel = tl.arange(0, S.RP), tl.arange(0, S.DP)
    if part == 0:
        unit = tl.load(most + head)
        wide = unit
        if hint is not None:
            wide = tl.maximum(
                tl.max(tl.load(hint + head * S.R + row, mask=row < S.R, other=0.0), 0), unit * numbers.least
            )
        # Some length between the longest value's and a millionth of it; which one, only the choice depends on.
        wide = tl.where((wide > unit * 2.0**-20) & (wide < unit), wide, unit)
        tl.store(out.nu + head, tl.where(wide > 0, wide, 1.0))
    # Nothing else is asked for where all tokens are read.
    if read_in_order(tl.load(used.tokens + head), used):
        return
    # The numbers of bfloat16 that a query's digits fill.
    TWO: tl.constexpr = q.dtype.element_ty == tl.float16
    PARTS: tl.constexpr = 1 if q.dtype.element_ty == tl.bfloat16 else (2 if TWO else 3)
    there = (row < S.R)[:, None] & (channel < S.D)[None, :]
    x = tl.load(q + (head * S.R + row)[:, None] * S.D + channel[None, :], mask=there, other=0.0).to(tl.float32)
    # A power of two at most the largest entry, and its inverse, by their exponents.
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 32), 253)
    power, inverse = (
        (exponent << 23).to(tl.float32, bitcast=True),
        ((254 - exponent) << 23).to(tl.float32, bitcast=True),
    )
    x = x * inverse[:, None]
    grown = (tl.load(sketch.size + head) * numbers.factor * power.to(tl.float64)).to(tl.float32)  # (ROWS,)
    group = part * _MANY + tl.arange(0, _MANY)
    inside = (group < c)[:, None] & (channel < S.D)[None, :]
    zeros = tl.load(at_head(sketch.zero, head) + group[:, None] * S.D + channel[None, :], mask=inside, other=0.0)
    # Each part holds the next eight bits of the queries, so that every product is exact.
    coarse = x.to(tl.bfloat16)
    shift = tl.dot(zeros, tl.trans(coarse))  # (MANY, ROWS)
    for _ in tl.static_range(PARTS - 1):
        x = x - coarse.to(tl.float32)
        coarse = x.to(tl.bfloat16)
        shift = tl.dot(zeros, tl.trans(coarse), shift)
    shift = shift * grown[None, :]
    place = (head * room + group)[:, None] * S.R + row[None, :]
    tl.store(out.bias + place, shift, mask=(group < c)[:, None] & (row < S.R)[None, :])
    if part == 0:
        x = tl.load(q + (head * S.R + row)[:, None] * S.D + channel[None, :], mask=there, other=0.0).to(tl.float32)
        x = x * inverse[:, None]
        weight = tl.load(sketch.metric + head * S.D + channel, mask=channel < S.D, other=0.0)
        square = x * x
        # Sums of at most 256 squares, their root and these products round by less than 2^-13.
        spread = tl.sqrt(tl.sum(square * weight[None, :], 1)) * (1 + 2.0**-13) + 2.0**-60
        length = tl.sqrt(tl.sum(square, 1)) * (1 + 2.0**-13) + 2.0**-60
        own = out.table + (head * S.RP + row) * CONSTANTS
        tl.store(own, inverse)
        tl.store(own + 1, grown)
        tl.store(own + 2, spread * grown * (1 + 2.0**-18))
        tl.store(own + 3, length * grown * numbers.relative)
        tl.store(own + 4, numbers.absolute * grown)
        tl.store(out.widest + head * S.R + row, tl.full((S.RP,), LOWEST_TERM, tl.int32), mask=row < S.R)
        tl.store(out.arrived + head * S.R + row, tl.full((S.RP,), 0, tl.int32), mask=row < S.R)
        bins = tl.arange(0, _BINS)
        blank = tl.full((S.RP, _BINS), 0, tl.int32)
        tl.store(out.counts + (head * S.R + row)[:, None] * _BINS + bins[None, :], blank, mask=(row < S.R)[:, None])


def tile_of(rows: int) -> int:
    """The tile of a tensor core that so many rows fit in."""
    return max(FEWEST, triton.next_power_of_2(rows))


def turn_of(rows: int) -> int:
    """How many rows to look at in a turn, so that turns are equal: loops over all of them would be long."""
    return max(many for many in range(1, FEWEST + 1) if rows % many == 0)


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
    shape = StepShape(b * h // heads, tile_of(b * h // heads), D=d, DP=padded(d))
    out = Prepared(
        q.new_empty(heads, room, b * h // heads, dtype=torch.float32),
        q.new_empty(heads, shape.RP, CONSTANTS.value, dtype=torch.float32),
        q.new_empty(heads, dtype=torch.float32),
        q.new_empty(b * h, dtype=torch.int32),
        q.new_empty(b * h, BINS, dtype=torch.int32),
        q.new_empty(b * h, dtype=torch.int32),
    )
    zeros = _Zeros(by_head(sketch.zero, "sketch.zero"), sketch.metric.contiguous(), sketch.size.contiguous())
    numbers = _Numbers(scale * math.log2(math.e) * STEPS, relative_error(d), absolute_error(d), least)
    _prepared[(heads, max(1, triton.cdiv(room, _MANY.value)))](
        q, zeros, most, hint, out, numbers, used, room, S=shape, num_warps=4, **chained(q.device)
    )
    return out
