"""Random features of some rows, some at a time, and the states they are collected in: what their kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))
# Columns of the narrowest product there is.
FEW = tl.constexpr(16)


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
def featured(x, first, second, factor, guess, block, M: tl.constexpr, MB: tl.constexpr, PRECISION: tl.constexpr):
    """A block of features of every row, relative to a guess at the largest."""
    log = tl.dot(x, first, input_precision=PRECISION)
    if x.dtype != tl.float32:
        log = tl.dot(x, second, log)
    log = log * factor - guess[:, None]
    if M % MB != 0:
        log = tl.where((block * MB + tl.arange(0, MB) < M)[None, :], log, LOWEST)
    return tl.exp2(log)


@triton.jit
def alone(x, KIND: tl.constexpr):
    """A matrix with one column that is not zero: sums over features are products too, and take fewer registers."""
    return tl.where((tl.arange(0, FEW) == 0)[None, :], x[:, None], 0.0).to(KIND)


@triton.jit
def counted_in(counts):
    """The one column of such a matrix that is not zero.

    As a factor of a product, so narrow a matrix goes wrong: Triton 3.6 reads beyond what it wrote of it.
    """
    return tl.sum(counts, 1)


@triton.jit
def state_of(base, block, column, M: tl.constexpr, MB: tl.constexpr, E: tl.constexpr):
    """Where a block of a state lies, and what of it is there."""
    feature = block * MB + tl.arange(0, MB)
    return base + feature[:, None] * E + column[None, :], (feature < M)[:, None] & (column < E)[None, :]


@triton.jit
def total_of(base, block, M: tl.constexpr, MB: tl.constexpr):
    """The same for totals, which are the first column of a few."""
    feature, few = block * MB + tl.arange(0, MB), tl.arange(0, FEW)
    return base + feature[:, None] + few[None, :], (feature < M)[:, None] & (few == 0)[None, :]


@triton.jit
def raised(top, log):
    """A reference at least as high as before, the weights of new logarithms under it, and what old sums shrink by."""
    higher = tl.maximum(top, tl.max(log, 0))
    settled = tl.where(higher > LOWEST, higher, 0.0)
    return higher, tl.exp2(log - settled), tl.exp2(top - settled)
