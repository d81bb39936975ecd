r"""Gradients through random features inside the scan; no feature is written to memory here, either.

With :math:`A_{ij} = \sum_f φ_{if} φ_{jf} / Z_i` the weight of key j in row i and
:math:`G_{ij} = g_i·v_j - g_i·out_i`, g the gradient of the output,

.. math:: \frac{∂}{∂\log φ_{if}} = \frac{φ_{if}}{Z_i} \sum_{j \le i} G_{ij} φ_{jf}, \quad
          \frac{∂}{∂\log φ_{jf}} = φ_{jf} \sum_{i \ge j} G_{ij} \frac{φ_{if}}{Z_i}, \quad
          \frac{∂}{∂v_j} = \sum_{i \ge j} A_{ij} g_i

The first is a scan over keys and values, the others are one from the end over queries and gradients, whose rows weigh
2^-lse. Where values take several programs, each adds its columns' share.
"""

from __future__ import annotations

# Triton adds tuples, but does not unpack them into new ones; and they grow, which types of tuples do not.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated, index"
import math

import triton
import triton.language as tl

from avow.kernels.feature_tiles import LOWEST, alone, counted_in, featured, lengths, pieces, raised, state_of, total_of
from avow.kernels.tiles import span, tile

# Factors are those of logarithms to base 2.
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def query_gradients(
    x,
    y,
    z,
    g,
    lse,
    slope,
    high,
    low,
    table,
    before,
    totals,
    tops,
    gradient_q,
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
    key_factor,
    lift,
    half,
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
):
    """The gradients of one part's queries."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, _last = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + own.to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    target = gradient_q + ((block * tl.num_programs(0) + head).to(tl.int64) * rows + start) * D
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    place = (head // R).to(tl.int64) * parts + part
    states, counts, known = (), (), ()
    for b in tl.static_range(NB):
        known = known + (pieces(high, low, b, M, MB, D, DP),)
        at, inside = state_of(before + place * (M * E), b, column, M, MB, E)
        states = states + (tl.load(at, mask=inside, other=0.0),)
        at, inside = total_of(totals + place * M, b, M, MB)
        counts = counts + (tl.load(at, mask=inside, other=0.0),)
    top = tl.load(tops + place)
    seen = row[:, None] >= row[None, :]
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
        square, long = lengths(ys)
        guess, query_guess = lift * long, lift * lengths(xs)[1]
        log = tl.where(row < left, guess - half * square, LOWEST)
        earlier = tl.exp2(top + weigh)
        top, weight, shrink = raised(top, log)
        given, counted = (zs.to(tl.float32) * weight[:, None]).to(KIND), alone(weight, KIND)
        pull = tl.dot(gs, tl.trans(zs), input_precision=PRECISION) + u[:, None]
        pull = tl.where(seen, pull * tl.exp2(log[None, :] + weigh[:, None]), 0.0).to(KIND)
        scaled = (gs.to(tl.float32) * earlier[:, None]).to(KIND)
        single = u * earlier
        found = tl.zeros((C, DP), tl.float32)
        new, newer = (), ()
        for b in tl.static_range(NB):
            first, second = known[b]
            keys = featured(ys, first, second, key_factor, guess, b, M, MB, PRECISION).to(KIND)
            slopes = tl.dot(scaled, tl.trans(states[b].to(KIND)), input_precision=PRECISION)
            slopes += single[:, None] * counted_in(counts[b])[None, :]
            slopes = tl.dot(pull, keys, slopes, input_precision=PRECISION)
            slopes = slopes * featured(xs, first, second, factor, query_guess, b, M, MB, PRECISION)
            found = tl.dot(slopes.to(first.dtype), tl.trans(first), found, input_precision=PRECISION)
            new = new + (tl.dot(tl.trans(keys), given, states[b] * shrink, input_precision=PRECISION),)
            newer = newer + (tl.dot(tl.trans(keys), counted, counts[b] * shrink, input_precision=PRECISION),)
        states, counts = new, newer
        goal = target + (ahead + row)[:, None] * D + entry[None, :]
        found = found * (factor * _LN2)
        tl.store(goal, found.to(gradient_q.dtype.element_ty), mask=(row < left)[:, None] & (entry < D)[None, :])


@triton.jit
def key_gradients(
    x,
    y,
    z,
    g,
    lse,
    slope,
    high,
    low,
    table,
    before,
    totals,
    tops,
    gradient_k,
    gradient_v,
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
    key_factor,
    lift,
    half,
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
):
    """The gradients of one part's keys and values, as each query head sees them, from the end."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, _last = span(part, parts, length, rows, table, True, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    g += batch * g_batch + own.to(tl.int64) * g_head + start * g_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    target = gradient_k + ((block * tl.num_programs(0) + head).to(tl.int64) * rows + start) * D
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    place = head.to(tl.int64) * parts + part
    states, counts, known = (), (), ()
    for b in tl.static_range(NB):
        known = known + (pieces(high, low, b, M, MB, D, DP),)
        at, inside = state_of(before + place * (M * E), b, column, M, MB, E)
        states = states + (tl.load(at, mask=inside, other=0.0),)
        at, inside = total_of(totals + place * M, b, M, MB)
        # Totals are of slopes, which count once.
        counts = counts + (tl.load(at, mask=inside & (block == 0), other=0.0),)
    top = tl.load(tops + place)
    seen = row[:, None] <= row[None, :]
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
        square, long = lengths(ys)
        guess, query_guess = lift * long, lift * lengths(xs)[1]
        log = tl.where(row < left, guess - half * square, LOWEST)
        later = tl.exp2(top + log)
        top, weight, shrink = raised(top, weigh)
        given = (gs.to(tl.float32) * weight[:, None]).to(KIND)
        counted = alone(weight * u, KIND)
        share = tl.where(seen, tl.exp2(log[:, None] + weigh[None, :]), 0.0)
        pull = (share * (tl.dot(zs, tl.trans(gs), input_precision=PRECISION) + u[None, :])).to(KIND)
        scaled = (zs.to(tl.float32) * later[:, None]).to(KIND)
        pairs = tl.zeros((C, C), tl.float32)
        found_k = tl.zeros((C, DP), tl.float32)
        found_v = tl.zeros((C, EB), tl.float32)
        sums = tl.zeros((C,), tl.float32)
        new, newer = (), ()
        for b in tl.static_range(NB):
            first, second = known[b]
            queries = featured(xs, first, second, factor, query_guess, b, M, MB, PRECISION).to(KIND)
            slopes = tl.dot(scaled, tl.trans(states[b].to(KIND)), input_precision=PRECISION)
            slopes += later[:, None] * counted_in(counts[b])[None, :]
            slopes = tl.dot(pull, queries, slopes, input_precision=PRECISION)
            wide = featured(ys, first, second, key_factor, guess, b, M, MB, PRECISION)
            slopes = slopes * wide
            sums += tl.sum(slopes, 1)
            found_k = tl.dot(slopes.to(first.dtype), tl.trans(first), found_k, input_precision=PRECISION)
            keys = wide.to(KIND)
            pairs = tl.dot(keys, tl.trans(queries), pairs, input_precision=PRECISION)
            found_v = tl.dot(keys, states[b].to(KIND), found_v, input_precision=PRECISION)
            new = new + (tl.dot(tl.trans(queries), given, states[b] * shrink, input_precision=PRECISION),)
            newer = newer + (tl.dot(tl.trans(queries), counted, counts[b] * shrink, input_precision=PRECISION),)
        states, counts = new, newer
        found_v = found_v * later[:, None]
        found_v = tl.dot((pairs * share).to(KIND), gs, found_v, input_precision=PRECISION)
        found_k = (found_k * key_factor - (2 * half) * sums[:, None] * ys.to(tl.float32)) * _LN2
        goal = target + (ahead + row)[:, None] * D + entry[None, :]
        tl.store(goal, found_k.to(gradient_k.dtype.element_ty), mask=(row < left)[:, None] & (entry < D)[None, :])
        value_goal = gradient_v + (rest + ahead + row)[:, None] * E + column[None, :]
        tl.store(
            value_goal, found_v.to(gradient_v.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :]
        )
