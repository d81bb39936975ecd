"""Sums of rows beside a scan's state: for bfloat16, tensor cores add to columns, or to rows, that are all alike.

A sum over a chunk's rows by itself would be one of shuffles and barriers in every step. As a product with ones it is
as exact, for both factors are; weights, and sums that rows meet, are two numbers of bfloat16 each, which are right to
2⁻¹⁶. Other types keep a vector.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns that hold the same sums. Of fewer, computed factors of products are read wrongly by Triton 3.6 on Hopper.
_ALIKE = tl.constexpr(64)


@triton.jit
def _high(x):
    """Numbers of float32 cut to the digits of bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _parted(x):
    """Columns that are alike, as bfloat16: the leading digits in even ones, what these leave in odd ones."""
    even = (tl.arange(0, _ALIKE) % 2 == 0)[None, :]
    return tl.where(even, _high(x), x - _high(x)).to(tl.bfloat16)


@triton.jit
def as_columns(total, KIND: tl.constexpr):
    """Sums as a scan of rows of a type carries them to multiply rows by."""
    if tl.bfloat16 == KIND:
        held = total[:, None] + tl.zeros((total.shape[0], _ALIKE), tl.float32)
    else:
        held = total
    return held


@triton.jit
def from_columns(total):
    """One number for each entry again."""
    if len(total.shape) == 2:
        found = tl.sum(total, 1) * (1 / _ALIKE)
    else:
        found = total
    return found


@triton.jit
def columns_grown(total, ys):
    """Sums with some rows more."""
    if len(total.shape) == 2:
        total = tl.dot(tl.trans(ys), tl.full((ys.shape[0], _ALIKE), 1.0, tl.float32).to(ys.dtype), total)
    else:
        total += tl.sum(ys.to(tl.float32), 0)
    return total


@triton.jit
def columns_weighted(total, ys, weight):
    """Sums with some rows more, each times a weight of its own; columns are alike in pairs, on average."""
    if len(total.shape) == 2:
        total = tl.dot(tl.trans(ys), _parted((2 * weight)[:, None] + tl.zeros((1, _ALIKE), tl.float32)), total)
    else:
        total += tl.sum(ys.to(tl.float32) * weight[:, None], 0)
    return total


@triton.jit
def within(xs, total):
    """Products of rows with the sums."""
    if len(total.shape) == 2:
        found = tl.sum(tl.dot(xs, _parted(total)), 1) * (2 / _ALIKE)
    else:
        found = tl.sum(xs.to(tl.float32) * total[None, :], 1)
    return found


@triton.jit
def as_rows(total, C: tl.constexpr, KIND: tl.constexpr):
    """Sums as a scan of rows of a type carries them to add to rows."""
    if tl.bfloat16 == KIND:
        held = total[None, :] + tl.zeros((C, total.shape[0]), tl.float32)
    else:
        held = total[None, :]
    return held


@triton.jit
def rows_grown(total, zs):
    """Sums with some rows more."""
    if total.shape[0] > 1:
        total = tl.dot(tl.full((total.shape[0], zs.shape[0]), 1.0, tl.float32).to(zs.dtype), zs, total)
    else:
        total += tl.sum(zs.to(tl.float32), 0)[None, :]
    return total


@triton.jit
def rows_weighted(total, zs, weight):
    """Sums with some rows more, each times a weight of its own."""
    if total.shape[0] > 1:
        wide = weight[None, :] + tl.zeros((total.shape[0], zs.shape[0]), tl.float32)
        total = tl.dot(_high(wide).to(tl.bfloat16), zs, total)
        total = tl.dot((wide - _high(wide)).to(tl.bfloat16), zs, total)
    else:
        total += tl.sum(zs.to(tl.float32) * weight[:, None], 0)[None, :]
    return total
