r"""Gradients through random features inside the scan; no feature is written to memory here, either.

With :math:`A_{ij} = \sum_f φ_{if} φ_{jf} / Z_i` the weight of key j in row i and
:math:`G_{ij} = g_i·v_j - g_i·out_i`, g the gradient of the output,

.. math:: \frac{∂}{∂\log φ_{if}} = \frac{φ_{if}}{Z_i} \sum_{j \le i} G_{ij} φ_{jf}, \quad
          \frac{∂}{∂\log φ_{jf}} = φ_{jf} \sum_{i \ge j} G_{ij} \frac{φ_{if}}{Z_i}, \quad
          \frac{∂}{∂v_j} = \sum_{i \ge j} A_{ij} g_i

The first is a scan over keys and values, the others are one from the end over queries and gradients, whose rows weigh
2^-lse. Every block of features, and of columns of values, is a program's own, and adds its share.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from avow.kernels.feature_tiles import columns, featured, risen, state_of
from avow.kernels.tile_ops import LOWEST, short, span, tile

# Factors are those of logarithms to base 2.
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def query_gradients(
    x,
    y,
    z,
    g,
    x_lengths,
    y_lengths,
    lse,
    slope,
    along,
    back,
    table,
    before,
    totals,
    tops,
    gradient_q,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
    g_batch,
    g_head,
    g_row: tl.constexpr,
    rows,
    length,
    factor,
    key_factor,
    lift,
    half,
    power,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """What one block of features adds to the gradients of one part's queries."""
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % NB, share // NB
    parts = tl.num_programs(1)
    start, many, _begins, _last = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + own.to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    shared = (head // R).to(tl.int64) * rows + start
    target = gradient_q + ((share * tl.num_programs(0) + head).to(tl.int64) * rows + start) * D
    row, entry, feature = tl.arange(0, C), tl.arange(0, DP), own_features * MB + tl.arange(0, MB)
    column = block * EB + tl.arange(0, EB)
    place = (head // R).to(tl.int64) * parts + part
    along_own = columns(along, own_features, M, MB, D, DP)
    back_own = columns(back, own_features, M, MB, D, DP)
    at, inside = state_of(before + place * (M * E), feature, column, M, E)
    state = tl.load(at, mask=inside, other=0.0)
    total = tl.load(totals + place * M + feature, mask=feature < M, other=0.0)
    top = tl.load(tops + place)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        ahead = tl.cast(step, tl.int64) * C
        left = many - step * C
        xs = tile(x + ahead * x_row, x_row, row, entry, left, D, DP)
        ys = tile(y + ahead * y_row, y_row, row, entry, left, D, DP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB).to(KIND)
        gs = tile(g + ahead * g_row, g_row, row, column, left, E, EB).to(KIND)
        weigh = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
        u = tl.load(slope + rest + ahead + row, mask=(row < left) & (block == 0), other=0.0)
        long = tl.load(y_lengths + shared + ahead + row, mask=row < left, other=0.0)
        query_guess = lift * tl.load(x_lengths + rest + ahead + row, mask=row < left, other=0.0)
        top, shrink, below = risen(top, long, row, left, lift, half)
        state, total = state * shrink, total * shrink
        keys = short(
            featured(ys, along_own, key_factor, power, below, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST
        )
        pull = tl.dot(gs, tl.trans(zs), input_precision=PRECISION) + u[:, None]
        pull = tl.where(row[:, None] >= row[None, :], pull, 0.0).to(KIND)
        slopes = tl.dot(gs, state.to(KIND), input_precision=PRECISION)
        slopes = tl.dot(pull, keys, slopes, input_precision=PRECISION) + u[:, None] * total[None, :]
        # A row's weight, 2^(top - lse), is part of its features; a row that was lost has none.
        above = query_guess - weigh - top
        slopes = slopes * featured(xs, along_own, factor, power, above, feature, M, MB, PRECISION, SCALED, FAST)
        found = tl.dot(slopes.to(back_own.dtype), tl.trans(back_own), input_precision=PRECISION) * (factor * _LN2)
        goal = target + (ahead + row)[:, None] * D + entry[None, :]
        tl.store(goal, found.to(gradient_q.dtype.element_ty), mask=(row < left)[:, None] & (entry < D)[None, :])
        state = tl.dot(tl.trans(zs), keys, state, input_precision=PRECISION)
        total += tl.sum(keys.to(tl.float32), 0)


@triton.jit
def key_gradients(
    x,
    y,
    z,
    g,
    x_lengths,
    y_lengths,
    lse,
    slope,
    along,
    back,
    table,
    before,
    totals,
    tops,
    gradient_k,
    gradient_v,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
    g_batch,
    g_head,
    g_row: tl.constexpr,
    rows,
    length,
    factor,
    key_factor,
    lift,
    half,
    power,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """What one block of features adds to the gradients of one part's keys and values, as each query head sees them."""
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % NB, share // NB
    parts = tl.num_programs(1)
    start, many, _begins, _last = span(part, parts, length, rows, table, True, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + own.to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    shared = (head // R).to(tl.int64) * rows + start
    target = gradient_k + ((share * tl.num_programs(0) + head).to(tl.int64) * rows + start) * D
    value_target = gradient_v + ((own_features * tl.num_programs(0) + head).to(tl.int64) * rows + start) * E
    row, entry, feature = tl.arange(0, C), tl.arange(0, DP), own_features * MB + tl.arange(0, MB)
    column = block * EB + tl.arange(0, EB)
    place = head.to(tl.int64) * parts + part
    along_own = columns(along, own_features, M, MB, D, DP)
    back_own = columns(back, own_features, M, MB, D, DP)
    at, inside = state_of(before + place * (M * E), feature, column, M, E)
    state = tl.load(at, mask=inside, other=0.0)
    # Totals are of slopes, which count once.
    total = tl.load(totals + place * M + feature, mask=(feature < M) & (block == 0), other=0.0)
    top = tl.load(tops + place)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        xs = tile(x + ahead * x_row, x_row, row, entry, left, D, DP)
        ys = tile(y + ahead * y_row, y_row, row, entry, left, D, DP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB).to(KIND)
        gs = tile(g + ahead * g_row, g_row, row, column, left, E, EB).to(KIND)
        weigh = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
        u = tl.load(slope + rest + ahead + row, mask=(row < left) & (block == 0), other=0.0)
        long = tl.load(y_lengths + shared + ahead + row, mask=row < left, other=0.0)
        query_guess = lift * tl.load(x_lengths + rest + ahead + row, mask=row < left, other=0.0)
        higher = tl.maximum(top, tl.max(weigh, 0))
        settled = tl.where(higher > LOWEST, higher, 0.0)
        shrink = tl.exp2(top - settled)
        top = higher
        # What is not there, and rows that were lost, have no features.
        below = tl.where(weigh > LOWEST, query_guess - weigh + settled, float("inf"))
        state, total = state * shrink, total * shrink
        fall = tl.where(row < left, half * long * long - settled, float("inf"))
        queries = short(
            featured(xs, along_own, factor, power, below, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST
        )
        seen = row[:, None] <= row[None, :]
        keys = short(
            featured(ys, along_own, key_factor, power, fall, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST
        )
        pull = tl.dot(zs, tl.trans(gs), input_precision=PRECISION) + u[None, :]
        pull = tl.where(seen, pull, 0.0).to(KIND)
        slopes = tl.dot(zs, state.to(KIND), input_precision=PRECISION)
        slopes = tl.dot(pull, queries, slopes, input_precision=PRECISION) + total[None, :]
        slopes = slopes * keys.to(tl.float32)
        found = tl.dot(slopes.to(back_own.dtype), tl.trans(back_own), input_precision=PRECISION) * key_factor
        found = (found - (2 * half) * tl.sum(slopes, 1)[:, None] * ys.to(tl.float32)) * _LN2
        goal = target + (ahead + row)[:, None] * D + entry[None, :]
        tl.store(goal, found.to(gradient_k.dtype.element_ty), mask=(row < left)[:, None] & (entry < D)[None, :])
        pairs = tl.where(seen, tl.dot(keys, tl.trans(queries), input_precision=PRECISION), 0.0)
        values = tl.dot(keys, tl.trans(state.to(KIND)), input_precision=PRECISION)
        values = tl.dot(pairs.to(KIND), gs, values, input_precision=PRECISION)
        goal = value_target + (ahead + row)[:, None] * E + column[None, :]
        tl.store(goal, values.to(gradient_v.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])
        state = tl.dot(tl.trans(gs), queries, state, input_precision=PRECISION)
        total += tl.sum(queries.to(tl.float32) * u[:, None], 0)
