r"""Separable attention in two readings: one for the columns of K with V, one for the rows of Q.

.. math:: out_i = \sum_f \frac{ρ_{if}}{t_{if}} \sum_j e^{k_{jf}/T} v_j, \quad t_{if} = \sum_j e^{k_{jf}/T}, \quad
          ρ_i = softmax_f(q_i / T)

over all keys, or over those up to row i. Every feature has a reference of its own, the largest key so far; what row i
sees is relative to the largest of its chunk. Where keys rise by more than 2^80 within a chunk, rows before the rise
are lost, and are said to be. Logarithms are those to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.feature_tiles import LOWEST, short
from avow.kernels.tiles import exp2_near, nearest, span, tile
from avow.maths import kernel_rounding

# Totals below this, relative to the largest key of a chunk, may have lost terms that count.
_TINY = tl.constexpr(kernel_rounding.THIN)
# Columns of ones that totals are products with, all the same.
_ONES = tl.constexpr(32)
# Totals relative to a reference that is not the largest key: those beyond are taken again.
_LARGE = tl.constexpr(2.0**40)


@triton.jit
def mixture(x, factor, column, D: tl.constexpr, DP: tl.constexpr):
    """The softmax of every row over its features."""
    x = x.to(tl.float32)
    if D != DP:
        x = tl.where((column < D)[None, :], x, LOWEST)
    weight = tl.exp2(tl.fma(x, factor, -(tl.max(x, 1) * factor)[:, None]))
    return weight * (1 / tl.sum(weight, 1))[:, None]


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
    if tl.bfloat16 == KIND:  # noqa: SIM108
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
    TRUSTING: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """A part's sums of exponentials and values, each feature's relative to a reference of its own.

    The reference is the largest key. TRUSTING takes the largest of the chunk read first, and reads again only where
    others are so much larger that sums might leave float32.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, False, PACKED)
    if not WHOLE:  # noqa: SIM102 - a constant, which removes the rest
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
    if TRUSTING:
        # The last chunk alone may have fewer rows.
        before = tl.maximum(steps - 1, 0)
        left = many - before * C
        ahead = tl.cast(before, tl.int64) * C
        ys = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, DP), row, left)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        top = tl.max(ys, 0) * factor
        top = tl.where(top > LOWEST, top, 0.0)
        weight = nearest(short(exp2_near(tl.fma(ys, factor, -top[None, :]), FAST), KIND, FAST), PRECISION)
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
        again = ~(tl.max(total) < _LARGE)
        if again:
            state = tl.zeros((DP, EB), tl.float32)
            total = _nothing(DP, KIND)
            top = tl.full((DP,), LOWEST, tl.float32)
    else:
        again = True
    if again:
        for step in tl.range(steps, num_stages=1 if TRUSTING else None):
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
    if TRUSTING:
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


@triton.jit
def causal_rows(
    x,
    y,
    z,
    table,
    before,
    totals,
    tops,
    out,
    lost,
    final,
    final_total,
    final_top,
    x_batch,
    x_head,
    x_row,
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
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """The rows of one part, each over the keys up to its own."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, feature = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    group = (head // R).to(tl.int64)
    place = group * parts + part
    inside = (feature < D)[:, None] & (column < E)[None, :]
    state = tl.load(before + place * (D * E) + feature[:, None] * E + column[None, :], mask=inside, other=0.0)
    total = tl.load(totals + place * D + feature, mask=feature < D, other=0.0)
    top = tl.load(tops + place * D + feature, mask=feature < D, other=0.0)
    seen = row[:, None] >= row[None, :]
    ones = tl.where(seen, 1.0, 0.0).to(KIND)
    missing = tl.zeros((C,), tl.int32)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        ahead = tl.cast(step, tl.int64) * C
        left = many - step * C
        xs = tile(x + ahead * x_row, x_row, row, feature, left, D, DP)
        ys = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, DP), row, left)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB).to(KIND)
        higher = tl.maximum(top, tl.max(ys, 0) * factor)
        weight = nearest(short(tl.exp2(tl.fma(ys, factor, -higher[None, :])), KIND, FAST), PRECISION)
        shrink = tl.exp2(top - higher)
        top = higher
        state = state * shrink[:, None]
        total = total * shrink
        # What each row has seen of each feature: the products that make the numerator, summed.
        prefix = tl.dot(ones, weight, input_precision=PRECISION) + total[None, :]
        thin = (prefix < _TINY) & (row < left)[:, None] & (feature < D)[None, :]
        missing += tl.sum(thin.to(tl.int32), 1)
        share = (mixture(xs, factor, feature, D, DP) / tl.where(prefix < _TINY, 1.0, prefix)).to(KIND)
        share = nearest(share, PRECISION)
        pairs = tl.where(seen, tl.dot(share, tl.trans(weight), input_precision=PRECISION), 0.0).to(KIND)
        found = tl.dot(share, nearest(state.to(KIND), PRECISION), input_precision=PRECISION)
        found = tl.dot(nearest(pairs, PRECISION), zs, found, input_precision=PRECISION)
        target = out + (rest + ahead) * E + row[:, None] * E + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])
        state = tl.dot(tl.trans(weight), zs, state, input_precision=PRECISION)
        total += tl.sum(weight.to(tl.float32), 0)
    tl.store(lost + head * parts + part, tl.sum(missing, 0), mask=block == 0)
    if last and (head % R) == 0:
        to = group
        if PACKED:
            to = tl.load(table + 4 * part + 3).to(tl.int64) * (H // R) + group
        tl.store(final + to * (D * E) + feature[:, None] * E + column[None, :], state, mask=inside)
        if block == 0:
            tl.store(final_total + to * D + feature, total, mask=feature < D)
            tl.store(final_top + to * D + feature, top, mask=feature < D)


@triton.jit
def mixed_rows(
    x,
    state,
    total,
    out,
    x_batch,
    x_head,
    x_row,
    rows,
    factor,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MANY: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows over all keys: their mixtures of the columns' means."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x += batch * x_batch + own * x_head
    group = (head // R).to(tl.int64)
    row, feature = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    inside = (feature < D)[:, None] & (column < E)[None, :]
    sums = tl.load(state + group * (D * E) + feature[:, None] * E + column[None, :], mask=inside, other=0.0)
    counted = tl.load(total + group * D + feature, mask=feature < D, other=1.0)
    means = nearest((sums / tl.where(counted > 0, counted, 1.0)[:, None]).to(KIND), PRECISION)
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        xs = tile(x + start * x_row, x_row, row, feature, left, D, DP)
        shares = nearest(mixture(xs, factor, feature, D, DP).to(KIND), PRECISION)
        found = tl.dot(shares, means, input_precision=PRECISION)
        target = out + (head.to(tl.int64) * rows + start) * E + row[:, None] * E + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])
