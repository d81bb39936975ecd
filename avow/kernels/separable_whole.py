r"""Gradients of separable attention over all keys: one reading of queries and gradients, one of keys and values.

With the columns' shares :math:`κ_{jf} = e^{k_{jf}/T} / t_f`, their means :math:`m_f = \sum_j κ_{jf} v_j` and the
gradient g of the rows,

.. math:: T\,dq_{if} &= ρ_{if} (g_i \cdot m_f - δ_i), \quad δ_i = g_i \cdot out_i, \quad G_f = \sum_i ρ_{if} g_i \\
          dv_j &= \sum_f κ_{jf} G_f, \quad T\,dk_{jf} = κ_{jf} (v_j \cdot G_f - m_f \cdot G_f).
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.separable_columns import keys
from avow.kernels.separable_gradients import mixture_block
from avow.kernels.tile_ops import exp2_near, nearest, short, span, tile


@triton.jit
def mixed_gradients(
    x,
    g,
    out,
    means,
    dx,
    sums,
    x_batch,
    x_head,
    x_row,
    g_batch,
    g_head,
    g_row,
    rows,
    length,
    factor,
    cold,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """dq of a part's rows, and what they add to G."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, _ends = span(part, parts, length, rows, x, False, False)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x += batch * x_batch + own * x_head + start * x_row
    g += batch * g_batch + own * g_head + start * g_row
    rest = head.to(tl.int64) * rows + start
    row, column = tl.arange(0, C), tl.arange(0, EB)
    feature = block * FB + tl.arange(0, FB)
    inside = (feature < D)[:, None] & (column < E)[None, :]
    entry = feature[:, None] * E + column[None, :]
    mean = tl.load(means + (head // R).to(tl.int64) * (D * E) + entry, mask=inside, other=0.0)
    mean = nearest(short(mean, KIND, FAST), PRECISION)
    added = tl.zeros((FB, EB), tl.float32)
    for step in range(tl.cdiv(many, C)):
        ahead = tl.cast(step, tl.int64) * C
        left = many - step * C
        gs = tile(g + ahead * g_row, g_row, row, column, left, E, EB).to(KIND)
        share = mixture_block(x + ahead * x_row, x_row, row, feature, left, factor, D, DP, FB, FAST)
        found = tl.dot(gs, tl.trans(mean), input_precision=PRECISION)
        if FB == DP:
            slope = tl.sum(share * found, 1)
        else:
            outs = tile(out + (rest + ahead) * E, E, row, column, left, E, EB)
            slope = tl.sum(gs.to(tl.float32) * outs.to(tl.float32), 1)
        target = dx + (rest + ahead) * D + row[:, None] * D + feature[None, :]
        answer = share * (found - slope[:, None]) * cold
        tl.store(target, short(answer, dx.dtype.element_ty, FAST), mask=(row < left)[:, None] & (feature < D)[None, :])
        added = tl.dot(tl.trans(nearest(short(share, KIND, FAST), PRECISION)), gs, added, input_precision=PRECISION)
    tl.store(sums + (head.to(tl.int64) * parts + part) * (D * E) + entry, added, mask=inside)


@triton.jit
def column_gradients(
    y,
    z,
    total,
    tops,
    felt,
    pulls,
    dy,
    dz,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
    rows,
    factor,
    cold,
    H: tl.constexpr,
    D: tl.constexpr,
    FB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MANY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """dk and dv of some keys, from G; dk needs all columns of values, dv all features."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head
    z += batch * z_batch + own * z_head
    row = tl.arange(0, C)
    if KEYS:
        feature, column = block * FB + tl.arange(0, FB), tl.arange(0, EB)
    else:
        feature, column = tl.arange(0, FB), block * EB + tl.arange(0, EB)
    inside = (feature < D)[:, None] & (column < E)[None, :]
    place = head.to(tl.int64) * D + feature
    held = tl.load(felt + place[:, None] * E + column[None, :], mask=inside, other=0.0)
    held = nearest(short(held, KIND, FAST), PRECISION)
    pull = tl.load(pulls + place, mask=feature < D, other=0.0)
    top = tl.load(tops + place, mask=feature < D, other=0.0)
    inverse = 1 / tl.load(total + place, mask=feature < D, other=1.0)
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        ys = keys(tile(y + start * y_row, y_row, row, feature, left, D, FB), row, left)
        share = exp2_near(tl.fma(ys, factor, -top[None, :]), FAST) * inverse[None, :]
        if KEYS:
            zs = tile(z + start * z_row, z_row, row, column, left, E, EB).to(KIND)
            found = tl.dot(zs, tl.trans(held), input_precision=PRECISION) - pull[None, :]
            answer = short(share * found * cold, dy.dtype.element_ty, FAST)
            target = dy + rest * D + row[:, None] * D + feature[None, :]
            tl.store(target, answer, mask=(row < left)[:, None] & (feature < D)[None, :])
        if VALUES:
            found = tl.dot(nearest(short(share, KIND, FAST), PRECISION), held, input_precision=PRECISION)
            target = dz + rest * E + row[:, None] * E + column[None, :]
            answer = short(found, dz.dtype.element_ty, FAST)
            tl.store(target, answer, mask=(row < left)[:, None] & (column < E)[None, :])
