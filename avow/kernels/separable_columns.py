"""Separable attention's first reading: what the columns of K and the values beside them add up to.

Logarithms are those to base 2. What sums are relative to need not be the largest key, as long as they stay in range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.tile_ops import LOWEST, exp2_near, nearest, short, span, tile

# Columns of ones that totals are products with, all the same.
_ONES = tl.constexpr(32)
# Totals relative to a reference that is not the largest key: those beyond are taken again.
_LARGE = tl.constexpr(2.0**40)


@triton.jit
def keys(y, row, left):
    """A chunk of keys, −inf beyond the last.

    Times a factor, and less a reference, they are logarithms: both at once, for their products are large where their
    differences count.
    """
    return tl.where((row < left)[:, None], y.to(tl.float32), LOWEST)


@triton.jit
def _whole_rows(base, stride, row, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Some rows of a matrix that has them all."""
    place = base + row[:, None] * stride + column[None, :]
    if WIDTH % PADDED == 0:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def _nothing(DP: tl.constexpr, KIND: tl.constexpr):
    """Totals of no keys; in bfloat16 as many times as products have columns."""
    if tl.bfloat16 == KIND:
        total = tl.zeros((DP, _ONES), tl.float32)
    else:
        total = tl.zeros((DP,), tl.float32)
    return total


@triton.jit
def _weighed(total, weight, C: tl.constexpr, KIND: tl.constexpr):
    """Totals with a chunk's weights added."""
    if tl.bfloat16 == KIND:
        # Products with ones: tensor cores add up rows faster than threads tell each other.
        total = tl.dot(tl.trans(weight), tl.full((C, _ONES), 1.0, tl.float32).to(KIND), total)
    else:
        total += tl.sum(weight, 0)
    return total


@triton.jit
def column_sums(
    y,
    z,
    table,
    sums,
    totals,
    tops,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
    rows,
    length,
    factor,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """A part's sums of exponentials and values, each feature's relative to a reference of its own.

    The reference is the largest key of the chunk read first; all is read again, with a reference that follows, only
    where others are so much larger that sums might leave float32.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, False, PACKED)
    if not WHOLE:
        if last:
            return
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head + start * y_row
    z += batch * z_batch + own * z_head + start * z_row
    row, feature = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    state = tl.zeros((DP, EB), tl.float32)
    total = _nothing(DP, KIND)
    top = tl.full((DP,), LOWEST, tl.float32)
    steps = tl.cdiv(many, C)
    # The last chunk alone may have fewer rows.
    before = tl.maximum(steps - 1, 0)
    left = many - before * C
    ahead = tl.cast(before, tl.int64) * C
    given = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, DP), row, left)
    zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
    top = tl.max(given, 0) * factor
    top = tl.where(top > LOWEST, top, 0.0)
    weight = nearest(short(exp2_near(tl.fma(given, factor, -top[None, :]), FAST), KIND, FAST), PRECISION)
    total = _weighed(total, weight, C, KIND)
    state = tl.dot(tl.trans(weight), zs.to(KIND), state, input_precision=PRECISION)
    for step in range(before):
        ahead = tl.cast(before - 1 - step, tl.int64) * C
        ys = _whole_rows(y + ahead * y_row, y_row, row, feature, D, DP)
        zs = _whole_rows(z + ahead * z_row, z_row, row, column, E, EB)
        log = tl.fma(ys.to(tl.float32), factor, -top[None, :])
        weight = nearest(short(exp2_near(log, FAST), KIND, FAST), PRECISION)
        total = _weighed(total, weight, C, KIND)
        state = tl.dot(tl.trans(weight), zs.to(KIND), state, input_precision=PRECISION)
    # All blocks of columns have the same totals, and so the same answer.
    if ~(tl.max(total) < _LARGE):
        state = tl.zeros((DP, EB), tl.float32)
        total = _nothing(DP, KIND)
        top = tl.full((DP,), LOWEST, tl.float32)
        for step in tl.range(steps, num_stages=1):
            chunk = steps - 1 - step
            ahead = tl.cast(chunk, tl.int64) * C
            left = many - chunk * C
            ys = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, DP), row, left)
            zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
            higher = tl.maximum(top, tl.max(ys, 0) * factor)
            weight = nearest(short(tl.exp2(tl.fma(ys, factor, -higher[None, :])), KIND, FAST), PRECISION)
            shrink = tl.exp2(top - higher)
            top = higher
            total = _weighed(total * (shrink[:, None] if tl.bfloat16 == KIND else shrink), weight, C, KIND)
            state = tl.dot(tl.trans(weight), zs.to(KIND), state * shrink[:, None], input_precision=PRECISION)
    if tl.bfloat16 == KIND:
        total = tl.max(total, 1)
    # References move by whole powers of two, to where totals are between 1 and 2: no rounding, and no sum so large
    # that its reference is far below it.
    above = tl.where(total > 0, ((total.to(tl.int32, bitcast=True) >> 23) & 255) - 127, 0)
    scale = ((127 - above) << 23).to(tl.float32, bitcast=True)
    state = state * scale[:, None]
    top = tl.where(total > 0, top + above.to(tl.float32), LOWEST)
    total = total * scale
    place = head.to(tl.int64) * parts + part
    inside = (feature < D)[:, None] & (column < E)[None, :]
    tl.store(sums + place * (D * E) + feature[:, None] * E + column[None, :], state, mask=inside)
    if block == 0:
        tl.store(totals + place * D + feature, total, mask=feature < D)
        tl.store(tops + place * D + feature, top, mask=feature < D)
