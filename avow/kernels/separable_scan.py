r"""Separable attention in two readings: one for the columns of K with V, one for the rows of Q.

.. math:: out_i = \sum_f \frac{ρ_{if}}{t_{if}} \sum_j e^{k_{jf}/T} v_j, \quad t_{if} = \sum_j e^{k_{jf}/T}, \quad
          ρ_i = softmax_f(q_i / T)

over all keys, or over those up to row i. Every feature has a reference of its own, no smaller than about the largest
key so far; what row i sees is relative to that of its chunk. Where keys rise by more than 2^80 within a chunk, rows
before the rise are lost, and are said to be. Logarithms are those to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.separable_columns import keys
from avow.kernels.tile_ops import LOWEST, nearest, short, span, tile
from avow.numerics import kernel_rounding

# Totals below this, relative to the largest key of a chunk, may have lost terms that count.
_THIN = tl.constexpr(kernel_rounding.THIN)


@triton.jit
def mixture(x, factor, column, D: tl.constexpr, DP: tl.constexpr):
    """The softmax of every row over its features."""
    x = x.to(tl.float32)
    if D != DP:
        x = tl.where((column < D)[None, :], x, LOWEST)
    weight = tl.exp2(tl.fma(x, factor, -(tl.max(x, 1) * factor)[:, None]))
    return weight * (1 / tl.sum(weight, 1))[:, None]


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
        thin = (prefix < _THIN) & (row < left)[:, None] & (feature < D)[None, :]
        missing += tl.sum(thin.to(tl.int32), 1)
        share = (mixture(xs, factor, feature, D, DP) / tl.where(prefix < _THIN, 1.0, prefix)).to(KIND)
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
