"""Random features of some rows, some at a time, and the states they are collected in: what their kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def pieces(high, low, block, M: tl.constexpr, MB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A block of directions, as columns, in two pieces that add up to them; float32 has all of them in the first."""
    feature, entry = block * MB + tl.arange(0, MB), tl.arange(0, DP)
    place = feature[None, :] * D + entry[:, None]
    inside = (feature < M)[None, :] & (entry < D)[:, None]
    first = tl.load(high + place, mask=inside, other=0.0)
    if high.dtype.element_ty == tl.float32:  # noqa: SIM108
        second = first
    else:
        second = tl.load(low + place, mask=inside, other=0.0)
    return first, second


@triton.jit
def lengths(x):
    """The squared length of every row, and the length."""
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return square, tl.sqrt(square)


@triton.jit
def featured(x, first, second, factor, below, feature, M: tl.constexpr, MB: tl.constexpr, PRECISION: tl.constexpr):
    """A block of features of every row, each row's relative to a logarithm of its own."""
    log = tl.dot(x, first, input_precision=PRECISION)
    if x.dtype != tl.float32:
        log = tl.dot(x, second, log)
    log = log * factor - below[:, None]
    if M % MB != 0:
        log = tl.where((feature < M)[None, :], log, LOWEST)
    return tl.exp2(log)


@triton.jit
def state_of(base, feature, column, M: tl.constexpr, E: tl.constexpr):
    """Where a block of a state lies, one row for each column of values, and what of it is there."""
    return base + feature[None, :] * E + column[:, None], (feature < M)[None, :] & (column < E)[:, None]
