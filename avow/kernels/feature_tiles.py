"""Random features of some rows, some at a time, and the states they are collected in: what their kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def columns(directions, block, M: tl.constexpr, MB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A block of directions, as columns."""
    feature, entry = block * MB + tl.arange(0, MB), tl.arange(0, DP)
    place = feature[None, :] * D + entry[:, None]
    inside = (feature < M)[None, :] & (entry < D)[:, None]
    return tl.load(directions + place, mask=inside, other=0.0)


@triton.jit
def lengths(x):
    """The squared length of every row, and the length."""
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return square, tl.sqrt(square)


@triton.jit
def featured(x, along, factor, power, below, feature, M: tl.constexpr, MB: tl.constexpr, PRECISION: tl.constexpr):
    """A block of features of every row, each row's relative to a logarithm of its own.

    Numbers of eight bits or eleven fit into float16 as they are, once multiplied by a power of two near the factor.
    """
    if along.dtype == tl.float32:
        log = tl.dot(x, along, input_precision=PRECISION) * factor
    else:
        log = tl.dot((x.to(tl.float32) * power).to(tl.float16), along) * (factor / power)
    log = log - below[:, None]
    if M % MB != 0:
        log = tl.where((feature < M)[None, :], log, LOWEST)
    return tl.exp2(log)


@triton.jit
def state_of(base, feature, column, M: tl.constexpr, E: tl.constexpr):
    """Where a block of a state lies, one row for each column of values, and what of it is there."""
    return base + feature[None, :] * E + column[:, None], (feature < M)[None, :] & (column < E)[:, None]
