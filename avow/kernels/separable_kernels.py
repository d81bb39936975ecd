r"""Separable attention inside the scan, forward and backward: both softmaxes are computed where they are needed.

.. math:: out_i = \sum_f \frac{ρ_{if}}{Z_{if}} \sum_j w_{jf} v_j, \quad w_{jf} = e^{k_{jf}/T}, \quad
          Z_{if} = \sum_j w_{jf}, \quad ρ_i = softmax_f(q_i / T)

over all keys, or over those up to row i. Every feature has a reference of its own, no smaller than about the largest
key so far; what row i sees is relative to that of its chunk. Where keys rise by more than 2^80 within a chunk, rows
before the rise are lost, and are said to be. Logarithms are those to base 2.

**Gradients of causal rows** are one scan forward over the rows, and one back. With :math:`σ_{if} = ρ_{if} / Z_{if}`,
the gradient g of the rows and :math:`c_{if} = g_i \cdot \sum_{j \le i} w_{jf} v_j / Z_{if}`,

.. math:: T\,dq_{if} &= ρ_{if} (c_{if} - δ_i), \quad δ_i = \sum_f ρ_{if} c_{if} = g_i \cdot out_i \\
          dv_j &= \sum_f w_{jf} Γ_{jf}, \quad Γ_{jf} = \sum_{i \ge j} σ_{if} g_i \\
          T\,dk_{jf} &= w_{jf} \left(v_j \cdot Γ_{jf} - \sum_{i \ge j} σ_{if} c_{if}\right), \quad
          σ_{if} c_{if} = (ρ_{if} δ_i + T\,dq_{if}) / Z_{if}.

The scan forward knows the sums of keys and values, finds dq and δ, and leaves what every part adds to Γ. The scan back
finds dk and dv; it has Z from totals, and sums of σc from sums, that the scan forward left at every chunk (`Marks`),
and c within a chunk from dq. Sums of keys are relative to the largest so far, as in the forward pass, and so is Γ, the
other way round: its terms have the sizes of 1 / Z, which only grow towards the beginning, where its reference falls. No
power of two is ever above one.

**Gradients of rows that see every key** are one reading of queries and gradients, and one of keys and values. With the
columns' shares :math:`κ_{jf} = w_{jf} / Z_f` and their means :math:`m_f = \sum_j κ_{jf} v_j`,

.. math:: T\,dq_{if} &= ρ_{if} (g_i \cdot m_f - δ_i), \quad G_f = \sum_i ρ_{if} g_i \\
          dv_j &= \sum_f κ_{jf} G_f, \quad T\,dk_{jf} = κ_{jf} (v_j \cdot G_f - m_f \cdot G_f).
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.tile_ops import (
    LOWEST,
    as_columns,
    columns_grown,
    exp2_near,
    filled,
    load_state,
    nearest,
    rows_at,
    short,
    span,
    store_state,
    store_tile,
    tile,
)
from avow.numerics import kernel_rounding

# Totals below this, relative to the largest key of a chunk, may have lost terms that count.
_THIN = tl.constexpr(kernel_rounding.THIN)
# Columns that totals are held in for tensor cores, all the same.
_ALIKE = tl.constexpr(32)
# Totals relative to a reference that is not the largest key: those beyond are taken again.
_LARGE = tl.constexpr(2.0**40)
# What is computed of keys: gradients of keys, of values, or both.
KEYS, VALUES, BOTH = 1, 2, 3
_KEYS, _VALUES = tl.constexpr(KEYS), tl.constexpr(VALUES)


@triton.jit
def _keys(y, row, left):
    """A chunk of keys, −inf beyond the last.

    Times a factor, and less a reference, they are logarithms: both at once, for their products are large where their
    differences count.
    """
    return tl.where((row < left)[:, None], y.to(tl.float32), LOWEST)


@triton.jit
def _factors(x, S: tl.constexpr):
    """Numbers rounded to factors of products."""
    return nearest(short(x, S.KIND, S.FAST), S)


@triton.jit
def _mixture(own, x, row, feature, left, factor, NEAR: tl.constexpr, S: tl.constexpr):
    """Some features of the softmax of every row; the others are read again where a program does not hold them."""
    own = own.to(tl.float32)
    if S.D % S.MB != 0:
        own = tl.where((feature < S.D)[None, :], own, LOWEST)
    if S.MB == S.DP:
        weight = exp2_near(tl.fma(own, factor, -(tl.max(own, 1) * factor)[:, None]), NEAR)
        whole = tl.sum(weight, 1)
    else:
        every = tl.arange(0, S.DP)
        others = tile(x, S.x_row, row, every, left, S.D, S.DP).to(tl.float32)
        if S.D != S.DP:
            others = tl.where((every < S.D)[None, :], others, LOWEST)
        top = tl.max(others, 1) * factor
        whole = tl.sum(exp2_near(tl.fma(others, factor, -top[:, None]), NEAR), 1)
        weight = exp2_near(tl.fma(own, factor, -top[:, None]), NEAR)
    return weight * (1 / whole)[:, None]


@triton.jit
def _inverse(prefix, FAST: tl.constexpr):
    """1 / what a row has seen of a feature; zero where that is lost beside what comes after it."""
    if FAST:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [prefix], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1 / prefix
    return tl.where(prefix < _THIN, 0.0, inverse)


@triton.jit
def _grown(state, total, ys, zs, top, factor, NEAR: tl.constexpr, S: tl.constexpr):
    """Sums with some keys and values more."""
    weight = _factors(exp2_near(tl.fma(ys, factor, -top[None, :]), NEAR), S)
    total = columns_grown(total, weight)
    return tl.dot(tl.trans(weight), zs.to(S.KIND), state, input_precision=S.PRECISION), total


@triton.jit
def column_sums(y, z, factor, added, rows, length, S: tl.constexpr):
    """A part's sums of exponentials and values, each feature's relative to a reference of its own.

    The reference is the largest key of the chunk read first; all is read again, with a reference that follows, only
    where others are so much larger that sums might leave float32.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, last = span(part, parts, length, rows, False)
    if not S.WHOLE:
        if last:
            return
    y = rows_at(y, head, start, S.y_row, S.H)
    z = rows_at(z, head, start, S.z_row, S.H)
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.DP), block * S.EB + tl.arange(0, S.EB)
    state = filled(0.0, S.DP, S.EB)
    total = as_columns(filled(0.0, S.DP), S.KIND, _ALIKE)
    steps = tl.cdiv(many, S.C)
    # The last chunk alone may have fewer rows.
    before = tl.maximum(steps - 1, 0)
    left = many - before * S.C
    ahead = tl.cast(before, tl.int64) * S.C
    ys = _keys(tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.DP), row, left)
    zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB)
    top = tl.max(ys, 0) * factor
    top = tl.where(top > LOWEST, top, 0.0)
    state, total = _grown(state, total, ys, zs, top, factor, S.FAST, S)
    for step in range(before):
        ahead = tl.cast(before - 1 - step, tl.int64) * S.C
        ys = tile(y + ahead * S.y_row, S.y_row, row, feature, None, S.D, S.DP).to(tl.float32)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, None, S.E, S.EB)
        state, total = _grown(state, total, ys, zs, top, factor, S.FAST, S)
    # All blocks of columns have the same totals, and so the same answer.
    if ~(tl.max(total) < _LARGE):
        state = filled(0.0, S.DP, S.EB)
        total = as_columns(filled(0.0, S.DP), S.KIND, _ALIKE)
        top = filled(LOWEST, S.DP)
        for step in tl.range(steps, num_stages=1):
            chunk = steps - 1 - step
            ahead = tl.cast(chunk, tl.int64) * S.C
            left = many - chunk * S.C
            ys = _keys(tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.DP), row, left)
            zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB)
            higher = tl.maximum(top, tl.max(ys, 0) * factor)
            shrink = tl.exp2(top - higher)
            top = higher
            total = total * (shrink[:, None] if tl.bfloat16 == S.KIND else shrink)
            state, total = _grown(state * shrink[:, None], total, ys, zs, top, factor, False, S)
    if tl.bfloat16 == S.KIND:
        total = tl.max(total, 1)
    # References move by whole powers of two, to where totals are between 1 and 2: no rounding, and no sum so large
    # that its reference is far below it.
    above = tl.where(total > 0, ((total.to(tl.int32, bitcast=True) >> 23) & 255) - 127, 0)
    scale = ((127 - above) << 23).to(tl.float32, bitcast=True)
    state = state * scale[:, None]
    top = tl.where(total > 0, top + above.to(tl.float32), LOWEST)
    total = total * scale
    place = head.to(tl.int64) * parts + part
    store_tile(added.sums + place * (S.D * S.E), S.E, feature, column, S.D, state, S.E, S.EB)
    if block == 0:
        tl.store(added.totals + place * S.D + feature, total, mask=feature < S.D)
        tl.store(added.tops + place * S.D + feature, top, mask=feature < S.D)


@triton.jit
def causal_rows(x, y, z, g, before, out, lost, marks, added, rows, length, factor, cold, S: tl.constexpr):
    """The rows of one part, each over the keys up to its own, and which features of them were lost.

    Given the gradients g of the rows, and the rows as `out`: dq and δ, the totals before each chunk, and what the part
    adds to Γ and to the sums of σc. Those need all columns of values, rows need all features.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _last = span(part, parts, length, rows, False)
    group = (head // S.R).to(tl.int64)
    x = rows_at(x, head, start, S.x_row, S.H)
    y = rows_at(y, head, start, S.y_row, S.H, S.R)
    z = rows_at(z, head, start, S.z_row, S.H, S.R)
    rest = head.to(tl.int64) * rows + start
    NEAR: tl.constexpr = False if g is None else S.FAST
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.MB), tl.arange(0, S.EB)
    if g is None:
        column += block * S.EB
    else:
        g = rows_at(g, head, start, S.g_row, S.H)
        feature += block * S.MB
    place, there = group * parts + part, head.to(tl.int64) * parts + part
    state = load_state(before.sums + place * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E)
    total = tl.load(before.totals + place * S.D + feature, mask=feature < S.D, other=0.0)
    top = tl.load(before.tops + place * S.D + feature, mask=feature < S.D, other=0.0)
    seen = row[:, None] >= row[None, :]
    ones = tl.where(seen, 1.0, 0.0).to(S.KIND)
    if g is None:
        missing = filled(0, S.C).to(tl.int32)
    else:
        sums = filled(0.0, S.MB, S.EB)
        pulled = filled(0.0, S.MB)
        low = filled(LOWEST, S.MB)
    for step in range(tl.cdiv(many, S.C)):
        ahead = tl.cast(step, tl.int64) * S.C
        left = many - step * S.C
        if g is None:
            xs = tile(x + ahead * S.x_row, S.x_row, row, feature, left, S.D, S.MB)
        ys = _keys(tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.MB), row, left)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB).to(S.KIND)
        if g is not None:
            gs = tile(g + ahead * S.g_row, S.g_row, row, column, left, S.E, S.EB).to(S.KIND)
        higher = tl.maximum(top, tl.max(ys, 0) * factor)
        weight = _factors(exp2_near(tl.fma(ys, factor, -higher[None, :]), NEAR), S)
        shrink = exp2_near(top - higher, NEAR)
        top = higher
        state = state * shrink[:, None]
        total = total * shrink
        # What each row has seen of each feature: the products that make the numerator, summed.
        if g is None:
            prefix = tl.dot(ones, weight, input_precision=S.PRECISION) + total[None, :]
            thin = (prefix < _THIN) & (row < left)[:, None] & (feature < S.D)[None, :]
            missing += tl.sum(thin.to(tl.int32), 1)
            share = _mixture(xs, x, row, feature, left, factor, NEAR, S) / tl.where(prefix < _THIN, 1.0, prefix)
            share = nearest(share.to(S.KIND), S)
            pairs = tl.where(seen, tl.dot(share, tl.trans(weight), input_precision=S.PRECISION), 0.0).to(S.KIND)
            product = tl.dot(share, nearest(state.to(S.KIND), S), input_precision=S.PRECISION)
            product = tl.dot(nearest(pairs, S), zs, product, input_precision=S.PRECISION)
            store_tile(out + (rest + ahead) * S.E, S.E, row, column, left, product, S.E, S.EB)
        else:
            mark = (place * (length // S.C) + step) * S.D + feature
            tl.store(marks.totals + mark, total, mask=(feature < S.D) & (head % S.R == 0))
            tl.store(marks.tops + mark, top, mask=(feature < S.D) & (head % S.R == 0))
            # Γ is relative to the top of the part's first chunk, the lowest.
            low = tl.where(step == 0, -top, low)
            prefix = tl.dot(ones, weight, input_precision=S.PRECISION) + total[None, :]
            base = x + ahead * S.x_row
            xs = tile(base, S.x_row, row, feature, left, S.D, S.MB)
            share = _mixture(xs, base, row, feature, left, factor, NEAR, S)
            inverse = _inverse(prefix, S.FAST)
            near = tl.where(seen, tl.dot(gs, tl.trans(zs), input_precision=S.PRECISION), 0.0)
            product = tl.dot(gs, tl.trans(_factors(state, S)), input_precision=S.PRECISION)
            product = tl.dot(_factors(near, S), weight, product, input_precision=S.PRECISION) * inverse
            if S.MB == S.DP:
                mean = tl.sum(share * product, 1)
            else:
                outs = tile(out + (rest + ahead) * S.E, S.E, row, column, left, S.E, S.EB)
                mean = tl.sum(gs.to(tl.float32) * outs.to(tl.float32), 1)
            tl.store(marks.slopes + rest + ahead + row, mean, mask=(row < left) & (block == 0))
            answer = share * (product - mean[:, None]) * cold
            store_tile(marks.dq + (rest + ahead) * S.D, S.D, row, feature, left, answer, S.D, S.MB, S.FAST)
            share = _factors(share * inverse, S)
            # Of what Γ is made of: where a feature is one key's alone, the two cancel.
            pull = tl.sum(share.to(tl.float32) * product, 0)
            mark = (there * (length // S.C) + step) * S.D + feature
            tl.store(marks.pulls + mark, pull, mask=feature < S.D)
            fall = exp2_near(-low - top, S.FAST)
            pulled += pull * fall
            sums += tl.dot(tl.trans(share), gs, input_precision=S.PRECISION) * fall[:, None]
        state = tl.dot(tl.trans(weight), zs, state, input_precision=S.PRECISION)
        total += tl.sum(weight.to(tl.float32), 0)
    if g is None:
        tl.store(lost + head * parts + part, tl.sum(missing, 0), mask=block == 0)
    else:
        store_state(added.sums + there * (S.D * S.E), sums, feature[:, None], column[None, :], S.D, S.E)
        tl.store(added.totals + there * S.D + feature, pulled, mask=feature < S.D)
        tl.store(added.tops + place * S.D + feature, low, mask=(feature < S.D) & (head % S.R == 0))


@triton.jit
def causal_key_gradients(x, y, z, g, marks, after, dy, dz, rows, length, factor, cold, S: tl.constexpr):
    """dk and dv of a part, from its end; H heads of keys, R of queries to each.

    dk needs all columns of values, dv all features: a program that holds both finds both.
    """
    FIND_KEYS: tl.constexpr = S.MODE != _VALUES
    FIND_VALUES: tl.constexpr = S.MODE != _KEYS
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _last = span(part, parts, length, rows, True)
    first = rows_at(x, head * S.R, start, S.x_row, S.H * S.R)
    first_gradient = rows_at(g, head * S.R, start, S.g_row, S.H * S.R)
    y = rows_at(y, head, start, S.y_row, S.H)
    z = rows_at(z, head, start, S.z_row, S.H)
    rest = head.to(tl.int64) * rows + start
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.MB), tl.arange(0, S.EB)
    if FIND_KEYS:
        feature += block * S.MB
    else:
        column += block * S.EB
    place = head.to(tl.int64) * parts + part
    state = load_state(after.sums + place * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E)
    pulled = tl.load(after.totals + place * S.D + feature, mask=feature < S.D, other=0.0)
    low = tl.load(after.tops + place * S.D + feature, mask=feature < S.D, other=0.0)
    ones = tl.where(row[:, None] >= row[None, :], 1.0, 0.0).to(S.KIND)
    felt = row[:, None] <= row[None, :]
    later = tl.where(felt, -1.0, 0.0).to(S.KIND)
    steps = tl.cdiv(many, S.C)
    for step in range(steps):
        chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * S.C
        left = many - chunk * S.C
        ys = _keys(tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.MB), row, left)
        mark = (place * (length // S.C) + chunk) * S.D + feature
        total = tl.load(marks.totals + mark, mask=feature < S.D, other=1.0)
        top = tl.load(marks.tops + mark, mask=feature < S.D, other=0.0)
        exact = exp2_near(tl.fma(ys, factor, -top[None, :]), S.FAST)
        weight = _factors(exact, S)
        prefix = tl.dot(ones, weight, input_precision=S.PRECISION) + total[None, :]
        inverse = _inverse(prefix, S.FAST)
        shrink = exp2_near(top + low, S.FAST)
        low = -top
        state = state * shrink[:, None]
        held = _factors(state, S)
        if FIND_KEYS:
            zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB).to(S.KIND)
            pulled = pulled * shrink
            by_key = tl.dot(zs, tl.trans(held), input_precision=S.PRECISION) - pulled[None, :]
        if FIND_VALUES:
            by_value = tl.dot(weight, held, input_precision=S.PRECISION)
        for sibling in range(S.R):
            other = tl.cast(sibling, tl.int64)
            gs = first_gradient + other * g.head + ahead * S.g_row
            gs = tile(gs, S.g_row, row, column, left, S.E, S.EB).to(S.KIND)
            base = first + other * x.head + ahead * S.x_row
            xs = tile(base, S.x_row, row, feature, left, S.D, S.MB)
            share = _factors(_mixture(xs, base, row, feature, left, factor, S.FAST, S) * inverse, S)
            if FIND_KEYS:
                from_head = (head.to(tl.int64) * S.R + sibling) * rows + start + ahead
                near = tl.where(felt, tl.dot(zs, tl.trans(gs), input_precision=S.PRECISION), 0.0)
                by_key = tl.dot(_factors(near, S), share, by_key, input_precision=S.PRECISION)
                dxs = tile(marks.dq + from_head * S.D, S.D, row, feature, left, S.D, S.MB).to(tl.float32)
                mean = tl.load(marks.slopes + from_head + row, mask=row < left, other=0.0)
                pull = share.to(tl.float32) * mean[:, None] + dxs * (inverse * (1 / cold))
                left_by = ((head.to(tl.int64) * S.R + sibling) * parts + part) * (length // S.C) + chunk
                pulled += tl.load(marks.pulls + left_by * S.D + feature, mask=feature < S.D, other=0.0)
                most = _factors(pull, S)
                by_key = tl.dot(later, most, by_key, input_precision=S.PRECISION)
                if tl.bfloat16 == S.KIND:
                    by_key = tl.dot(later, short(pull - most.to(tl.float32), S.KIND, S.FAST), by_key)
            if FIND_VALUES:
                pairs = tl.where(felt, tl.dot(weight, tl.trans(share), input_precision=S.PRECISION), 0.0)
                by_value = tl.dot(_factors(pairs, S), gs, by_value, input_precision=S.PRECISION)
            state = tl.dot(tl.trans(share), gs, state, input_precision=S.PRECISION)
        if FIND_KEYS:
            answer = exact * by_key * cold
            store_tile(dy + (rest + ahead) * S.D, S.D, row, feature, left, answer, S.D, S.MB, S.FAST)
        if FIND_VALUES:
            store_tile(dz + (rest + ahead) * S.E, S.E, row, column, left, by_value, S.E, S.EB, S.FAST)


@triton.jit
def whole_rows(x, state, out, rows, factor, S: tl.constexpr):
    """Some rows over all keys: their mixtures of the columns' means."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x = rows_at(x, head, 0, 0, S.H)
    group = (head // S.R).to(tl.int64)
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.DP), block * S.EB + tl.arange(0, S.EB)
    sums = load_state(state.sums + group * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E)
    counted = tl.load(state.totals + group * S.D + feature, mask=feature < S.D, other=1.0)
    means = nearest((sums / tl.where(counted > 0, counted, 1.0)[:, None]).to(S.KIND), S)
    for step in range(S.MANY):
        start = (part * S.MANY + step).to(tl.int64) * S.C
        left = rows - start
        xs = tile(x + start * S.x_row, S.x_row, row, feature, left, S.D, S.DP)
        shares = nearest(_mixture(xs, x, row, feature, left, factor, False, S).to(S.KIND), S)
        product = tl.dot(shares, means, input_precision=S.PRECISION)
        store_tile(out + (head.to(tl.int64) * rows + start) * S.E, S.E, row, column, left, product, S.E, S.EB)


@triton.jit
def whole_query_gradients(x, g, out, means, dx, sums, rows, length, factor, cold, S: tl.constexpr):
    """dq of a part's rows, and what they add to G."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _last = span(part, parts, length, rows, False)
    x = rows_at(x, head, start, S.x_row, S.H)
    g = rows_at(g, head, start, S.g_row, S.H)
    rest = head.to(tl.int64) * rows + start
    row, column, feature = tl.arange(0, S.C), tl.arange(0, S.EB), block * S.MB + tl.arange(0, S.MB)
    mean = load_state(means + (head // S.R).to(tl.int64) * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E)
    mean = _factors(mean, S)
    added = filled(0.0, S.MB, S.EB)
    for step in range(tl.cdiv(many, S.C)):
        ahead = tl.cast(step, tl.int64) * S.C
        left = many - step * S.C
        gs = tile(g + ahead * S.g_row, S.g_row, row, column, left, S.E, S.EB).to(S.KIND)
        base = x + ahead * S.x_row
        xs = tile(base, S.x_row, row, feature, left, S.D, S.MB)
        share = _mixture(xs, base, row, feature, left, factor, S.FAST, S)
        product = tl.dot(gs, tl.trans(mean), input_precision=S.PRECISION)
        if S.MB == S.DP:
            slope = tl.sum(share * product, 1)
        else:
            outs = tile(out + (rest + ahead) * S.E, S.E, row, column, left, S.E, S.EB)
            slope = tl.sum(gs.to(tl.float32) * outs.to(tl.float32), 1)
        answer = share * (product - slope[:, None]) * cold
        store_tile(dx + (rest + ahead) * S.D, S.D, row, feature, left, answer, S.D, S.MB, S.FAST)
        added = tl.dot(tl.trans(_factors(share, S)), gs, added, input_precision=S.PRECISION)
    sums += (head.to(tl.int64) * parts + part) * (S.D * S.E)
    store_state(sums, added, feature[:, None], column[None, :], S.D, S.E)


@triton.jit
def whole_key_gradients(y, z, state, felt, pulls, dy, dz, rows, factor, cold, S: tl.constexpr):
    """dk and dv of some keys, from G; dk needs all columns of values, dv all features."""
    FIND_KEYS: tl.constexpr = S.MODE != _VALUES
    FIND_VALUES: tl.constexpr = S.MODE != _KEYS
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    y = rows_at(y, head, 0, 0, S.H)
    z = rows_at(z, head, 0, 0, S.H)
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.MB), tl.arange(0, S.EB)
    if FIND_KEYS:
        feature += block * S.MB
    else:
        column += block * S.EB
    place = head.to(tl.int64) * S.D + feature
    held = load_state(felt + head.to(tl.int64) * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E)
    held = _factors(held, S)
    pull = tl.load(pulls + place, mask=feature < S.D, other=0.0)
    top = tl.load(state.tops + place, mask=feature < S.D, other=0.0)
    inverse = 1 / tl.load(state.totals + place, mask=feature < S.D, other=1.0)
    for step in range(S.MANY):
        start = (part * S.MANY + step).to(tl.int64) * S.C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        ys = _keys(tile(y + start * S.y_row, S.y_row, row, feature, left, S.D, S.MB), row, left)
        share = exp2_near(tl.fma(ys, factor, -top[None, :]), S.FAST) * inverse[None, :]
        if FIND_KEYS:
            zs = tile(z + start * S.z_row, S.z_row, row, column, left, S.E, S.EB).to(S.KIND)
            product = tl.dot(zs, tl.trans(held), input_precision=S.PRECISION) - pull[None, :]
            store_tile(dy + rest * S.D, S.D, row, feature, left, share * product * cold, S.D, S.MB, S.FAST)
        if FIND_VALUES:
            product = tl.dot(_factors(share, S), held, input_precision=S.PRECISION)
            store_tile(dz + rest * S.E, S.E, row, column, left, product, S.E, S.EB, S.FAST)
