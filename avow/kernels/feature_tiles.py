"""Random features of some rows, some at a time, and the states they are collected in: what their kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.tile_ops import LOWEST, exp2_near


@triton.jit
def columns(directions, block, M: tl.constexpr, MB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A block of directions, as columns."""
    feature, entry = block * MB + tl.arange(0, MB), tl.arange(0, DP)
    place = feature[None, :] * D + entry[:, None]
    inside = (feature < M)[None, :] & (entry < D)[:, None]
    return tl.load(directions + place, mask=inside, other=0.0)


@triton.jit
def _halved(x, power, SCALED: tl.constexpr, FAST: tl.constexpr):
    """Numbers as float16, times a power of two where that is not one."""
    if FAST and x.dtype == tl.bfloat16 and not SCALED:
        # Two at a time, which Triton's own conversion is not.
        y = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .f32 even, odd;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xFFFF0000;
            mov.b32 even, low;
            mov.b32 odd, high;
            cvt.rn.f16x2.f32 $0, odd, even;
            }
            """,
            "=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif SCALED:
        y = (x.to(tl.float32) * power).to(tl.float16)
    else:
        y = x.to(tl.float16)
    return y


@triton.jit
def featured(
    x,
    along,
    factor,
    power,
    below,
    feature,
    M: tl.constexpr,
    MB: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """A block of features of every row, each row's relative to a logarithm of its own.

    Numbers of eight bits or eleven fit into float16 as they are, or once multiplied by a power of two near the factor.
    """
    if along.dtype == tl.float32:
        log = tl.dot(x, along, input_precision=PRECISION) * factor
    else:
        log = tl.dot(_halved(x, power, SCALED, FAST), along) * (factor / power)
    log = log - below[:, None]
    if M % MB != 0:
        log = tl.where((feature < M)[None, :], log, LOWEST)
    return exp2_near(log, FAST)


@triton.jit
def risen(top, long, row, left, lift, half):
    """What sums are relative to once they have some keys more, of lengths `long`: the largest b of all.

    With what older sums shrink by, and what the logarithms of these keys' features are less.
    """
    fall = half * long * long
    higher = tl.maximum(top, tl.max(tl.where(row < left, lift * long - fall, LOWEST), 0))
    return higher, tl.exp2(top - higher), tl.where(row < left, fall + higher, float("inf"))


@triton.jit
def state_of(base, feature, column, M: tl.constexpr, E: tl.constexpr):
    """Where a block of a state lies, one row for each column of values, and what of it is there."""
    return base + feature[None, :] * E + column[:, None], (feature < M)[None, :] & (column < E)[:, None]
