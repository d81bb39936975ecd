r"""Gradients of causal separable attention: one walk forward over the rows, and one back.

With :math:`w_{jf} = e^{k_{jf}/T}`, :math:`Z_{if} = \sum_{j \le i} w_{jf}`, :math:`σ_{if} = ρ_{if} / Z_{if}`, the
gradient g of the rows and :math:`c_{if} = g_i \cdot \sum_{j \le i} w_{jf} v_j / Z_{if}`,

.. math:: T\,dq_{if} &= ρ_{if} (c_{if} - δ_i), \quad δ_i = \sum_f ρ_{if} c_{if} = g_i \cdot out_i \\
          dv_j &= \sum_f w_{jf} Γ_{jf}, \quad Γ_{jf} = \sum_{i \ge j} σ_{if} g_i \\
          T\,dk_{jf} &= w_{jf} \left(v_j \cdot Γ_{jf} - \sum_{i \ge j} σ_{if} c_{if}\right), \quad
          σ_{if} c_{if} = (ρ_{if} δ_i + T\,dq_{if}) / Z_{if}.

The walk forward knows the sums of keys and values, finds dq and δ, and leaves what every part adds to Γ. The walk back
finds dk and dv; it has Z from totals, and sums of σc from sums, that the walk forward left at every chunk, and c within
a chunk from dq. Sums of keys are relative to the largest so far, as in the forward pass, and so is Γ, the other way
round: its terms have the sizes of 1 / Z, which only grow towards the beginning, where its reference falls. No power of
two is ever above one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.separable_columns import keys
from avow.kernels.tile_ops import LOWEST, exp2_near, nearest, short, span, tile
from avow.numerics import kernel_rounding

_THIN = tl.constexpr(kernel_rounding.THIN)


@triton.jit
def mixture_block(
    x, stride, row, feature, left, factor, D: tl.constexpr, DP: tl.constexpr, FB: tl.constexpr, FAST: tl.constexpr
):
    """Some features of the softmax of every row."""
    own = tile(x, stride, row, feature, left, D, FB).to(tl.float32)
    if D % FB != 0:
        own = tl.where((feature < D)[None, :], own, LOWEST)
    if FB == DP:
        weight = exp2_near(tl.fma(own, factor, -(tl.max(own, 1) * factor)[:, None]), FAST)
        whole = tl.sum(weight, 1)
    else:
        every = tl.arange(0, DP)
        others = tile(x, stride, row, every, left, D, DP).to(tl.float32)
        if D != DP:
            others = tl.where((every < D)[None, :], others, LOWEST)
        top = tl.max(others, 1) * factor
        whole = tl.sum(exp2_near(tl.fma(others, factor, -top[:, None]), FAST), 1)
        weight = exp2_near(tl.fma(own, factor, -top[:, None]), FAST)
    return weight * (1 / whole)[:, None]


@triton.jit
def inverse_of(prefix, FAST: tl.constexpr):
    """1 / what a row has seen of a feature; zero where that is lost beside what comes after it."""
    if FAST:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [prefix], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = 1 / prefix
    return tl.where(prefix < _THIN, 0.0, found)


@triton.jit
def query_gradients(
    x,
    y,
    z,
    g,
    out,
    table,
    before,
    totals,
    tops,
    dx,
    slope,
    marks,
    mark_tops,
    mark_pulls,
    sums,
    pulls,
    lows,
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
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
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """dq and δ of a part's rows, the totals before each of its chunks, and what it adds to Γ and to the sums of σc."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, _ends = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + own.to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, column = tl.arange(0, C), tl.arange(0, EB)
    feature = block * FB + tl.arange(0, FB)
    group = (head // R).to(tl.int64)
    place, there = group * parts + part, head.to(tl.int64) * parts + part
    inside = (feature < D)[:, None] & (column < E)[None, :]
    entry = feature[:, None] * E + column[None, :]
    state = tl.load(before + place * (D * E) + entry, mask=inside, other=0.0)
    total = tl.load(totals + place * D + feature, mask=feature < D, other=0.0)
    top = tl.load(tops + place * D + feature, mask=feature < D, other=0.0)
    seen = row[:, None] >= row[None, :]
    ones = tl.where(seen, 1.0, 0.0).to(KIND)
    added = tl.zeros((FB, EB), tl.float32)
    pulled = tl.zeros((FB,), tl.float32)
    low = tl.full((FB,), LOWEST, tl.float32)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        ahead = tl.cast(step, tl.int64) * C
        left = many - step * C
        ys = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, FB), row, left)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB).to(KIND)
        gs = tile(g + ahead * g_row, g_row, row, column, left, E, EB).to(KIND)
        higher = tl.maximum(top, tl.max(ys, 0) * factor)
        weight = nearest(short(exp2_near(tl.fma(ys, factor, -higher[None, :]), FAST), KIND, FAST), PRECISION)
        shrink = exp2_near(top - higher, FAST)
        top = higher
        state = state * shrink[:, None]
        total = total * shrink
        mark = (place * (length // C) + step) * D + feature
        tl.store(marks + mark, total, mask=(feature < D) & (own % R == 0))
        tl.store(mark_tops + mark, top, mask=(feature < D) & (own % R == 0))
        # Γ is relative to the top of the part's first chunk, the lowest.
        low = tl.where(step == 0, -top, low)
        prefix = tl.dot(ones, weight, input_precision=PRECISION) + total[None, :]
        share = mixture_block(x + ahead * x_row, x_row, row, feature, left, factor, D, DP, FB, FAST)
        inverse = inverse_of(prefix, FAST)
        near = short(tl.where(seen, tl.dot(gs, tl.trans(zs), input_precision=PRECISION), 0.0), KIND, FAST)
        found = tl.dot(gs, tl.trans(nearest(short(state, KIND, FAST), PRECISION)), input_precision=PRECISION)
        found = tl.dot(nearest(near, PRECISION), weight, found, input_precision=PRECISION) * inverse
        if FB == DP:
            mean = tl.sum(share * found, 1)
        else:
            outs = tile(out + (rest + ahead) * E, E, row, column, left, E, EB)
            mean = tl.sum(gs.to(tl.float32) * outs.to(tl.float32), 1)
        tl.store(slope + rest + ahead + row, mean, mask=(row < left) & (block == 0))
        target = dx + (rest + ahead) * D + row[:, None] * D + feature[None, :]
        answer = share * (found - mean[:, None]) * cold
        tl.store(target, short(answer, dx.dtype.element_ty, FAST), mask=(row < left)[:, None] & (feature < D)[None, :])
        share = nearest(short(share * inverse, KIND, FAST), PRECISION)
        # Of what Γ is made of: where a feature is one key's alone, the two cancel.
        pull = tl.sum(share.to(tl.float32) * found, 0)
        mark = (there * (length // C) + step) * D + feature
        tl.store(mark_pulls + mark, pull, mask=feature < D)
        fall = exp2_near(-low - top, FAST)
        pulled += pull * fall
        added += tl.dot(tl.trans(share), gs, input_precision=PRECISION) * fall[:, None]
        state = tl.dot(tl.trans(weight), zs, state, input_precision=PRECISION)
        total += tl.sum(weight.to(tl.float32), 0)
    tl.store(sums + there * (D * E) + entry, added, mask=inside)
    tl.store(pulls + there * D + feature, pulled, mask=feature < D)
    tl.store(lows + place * D + feature, low, mask=(feature < D) & (own % R == 0))


@triton.jit
def key_gradients(
    x,
    y,
    z,
    g,
    dx,
    slope,
    table,
    marks,
    mark_tops,
    mark_pulls,
    after,
    pulls,
    lows,
    dy,
    dz,
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """dk and dv of a part, from its end; H heads of keys, R of queries to each.

    dk needs all columns of values, dv all features: a program that holds both finds both.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, _ends = span(part, parts, length, rows, table, True, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + (own * R).to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + (own * R).to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + own.to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + own.to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row = tl.arange(0, C)
    if KEYS:
        feature, column = block * FB + tl.arange(0, FB), tl.arange(0, EB)
    else:
        feature, column = tl.arange(0, FB), block * EB + tl.arange(0, EB)
    place = head.to(tl.int64) * parts + part
    inside = (feature < D)[:, None] & (column < E)[None, :]
    state = tl.load(after + place * (D * E) + feature[:, None] * E + column[None, :], mask=inside, other=0.0)
    pulled = tl.load(pulls + place * D + feature, mask=feature < D, other=0.0)
    low = tl.load(lows + place * D + feature, mask=feature < D, other=0.0)
    ones = tl.where(row[:, None] >= row[None, :], 1.0, 0.0).to(KIND)
    felt = row[:, None] <= row[None, :]
    later = tl.where(felt, -1.0, 0.0).to(KIND)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        ys = keys(tile(y + ahead * y_row, y_row, row, feature, left, D, FB), row, left)
        mark = (place * (length // C) + chunk) * D + feature
        total = tl.load(marks + mark, mask=feature < D, other=1.0)
        top = tl.load(mark_tops + mark, mask=feature < D, other=0.0)
        exact = exp2_near(tl.fma(ys, factor, -top[None, :]), FAST)
        weight = nearest(short(exact, KIND, FAST), PRECISION)
        prefix = tl.dot(ones, weight, input_precision=PRECISION) + total[None, :]
        inverse = inverse_of(prefix, FAST)
        shrink = exp2_near(top + low, FAST)
        low = -top
        state = state * shrink[:, None]
        held = nearest(short(state, KIND, FAST), PRECISION)
        if KEYS:
            zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB).to(KIND)
            pulled = pulled * shrink
            by_key = tl.dot(zs, tl.trans(held), input_precision=PRECISION) - pulled[None, :]
        if VALUES:
            by_value = tl.dot(weight, held, input_precision=PRECISION)
        for sibling in range(R):
            other = tl.cast(sibling, tl.int64)
            gs = tile(g + other * g_head + ahead * g_row, g_row, row, column, left, E, EB).to(KIND)
            shares = mixture_block(
                x + other * x_head + ahead * x_row, x_row, row, feature, left, factor, D, DP, FB, FAST
            )
            share = nearest(short(shares * inverse, KIND, FAST), PRECISION)
            if KEYS:
                from_head = (head.to(tl.int64) * R + sibling) * rows + start + ahead
                near = short(tl.where(felt, tl.dot(zs, tl.trans(gs), input_precision=PRECISION), 0.0), KIND, FAST)
                by_key = tl.dot(nearest(near, PRECISION), share, by_key, input_precision=PRECISION)
                dxs = tile(dx + from_head * D, D, row, feature, left, D, FB).to(tl.float32)
                mean = tl.load(slope + from_head + row, mask=row < left, other=0.0)
                pull = share.to(tl.float32) * mean[:, None] + dxs * (inverse * (1 / cold))
                left_by = (((head.to(tl.int64) * R + sibling) * parts + part) * (length // C) + chunk) * D + feature
                pulled += tl.load(mark_pulls + left_by, mask=feature < D, other=0.0)
                most = nearest(short(pull, KIND, FAST), PRECISION)
                by_key = tl.dot(later, most, by_key, input_precision=PRECISION)
                if tl.bfloat16 == KIND:
                    by_key = tl.dot(later, short(pull - most.to(tl.float32), KIND, FAST), by_key)
            if VALUES:
                pairs = short(
                    tl.where(felt, tl.dot(weight, tl.trans(share), input_precision=PRECISION), 0.0), KIND, FAST
                )
                by_value = tl.dot(nearest(pairs, PRECISION), gs, by_value, input_precision=PRECISION)
            state = tl.dot(tl.trans(share), gs, state, input_precision=PRECISION)
        if KEYS:
            target = dy + (rest + ahead) * D + row[:, None] * D + feature[None, :]
            answer = short(exact * by_key * cold, dy.dtype.element_ty, FAST)
            tl.store(target, answer, mask=(row < left)[:, None] & (feature < D)[None, :])
        if VALUES:
            target = dz + (rest + ahead) * E + row[:, None] * E + column[None, :]
            answer = short(by_value, dz.dtype.element_ty, FAST)
            tl.store(target, answer, mask=(row < left)[:, None] & (column < E)[None, :])
