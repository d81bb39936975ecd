"""Rows of random features that meet one state: their means, or gradients of queries, keys and values."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from avow.kernels.feature_tiles import columns, featured, state_of
from avow.kernels.tile_ops import short, tile

_LN2 = tl.constexpr(math.log(2))
# What rows ask of the state.
MEANS, QUERIES, KEYS = 0, 1, 2
_MEAN_MODE, _QUERY_MODE, _KEY_MODE = (tl.constexpr(mode) for mode in (MEANS, QUERIES, KEYS))


@triton.jit
def apply_state(
    x,
    g,
    x_lengths,
    lse,
    slope,
    along,
    back,
    before,
    totals,
    tops,
    out,
    normalisers,
    gradient,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    g_batch,
    g_head,
    g_row: tl.constexpr,
    rows,
    factor,
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
    MANY: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """What one block of features adds where rows meet a state: to means; to gradients of queries; or of keys, and of
    values as `out`.
    """
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % NB, share // NB
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x += batch * x_batch + own * x_head
    g += batch * g_batch + own * g_head
    row, entry, feature = tl.arange(0, C), tl.arange(0, DP), own_features * MB + tl.arange(0, MB)
    column = block * EB + tl.arange(0, EB)
    place = (head // R).to(tl.int64)
    along_own = columns(along, own_features, M, MB, D, DP)
    back_own = columns(back, own_features, M, MB, D, DP)
    at, inside = state_of(before + place * (M * E), feature, column, M, E)
    state = tl.load(at, mask=inside, other=0.0).to(KIND)
    # What every block of columns would add is added by the first.
    total = tl.load(totals + place * M + feature, mask=(feature < M) & (block == 0), other=0.0)
    top = tl.load(tops + place)
    heads = tl.num_programs(0)
    out += (own_features * heads + head).to(tl.int64) * rows * E
    gradient += (share * heads + head).to(tl.int64) * rows * D
    normalisers += (own_features * heads + head).to(tl.int64) * rows
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        xs = tile(x + start * x_row, x_row, row, entry, left, D, DP)
        long = tl.load(x_lengths + rest + row, mask=row < left, other=0.0)
        guess = lift * long
        goal = out + (start + row)[:, None] * E + column[None, :]
        there = (row < left)[:, None] & (column < E)[None, :]
        wide = featured(xs, along_own, factor, power, guess, feature, M, MB, PRECISION, SCALED, FAST)
        ones = short(wide, KIND, FAST)
        if MODE == _MEAN_MODE:
            found = tl.dot(ones, tl.trans(state), input_precision=PRECISION)
            tl.store(goal, found.to(out.dtype.element_ty), mask=there)
            apply_state = tl.sum(ones.to(tl.float32) * total[None, :], 1)
            tl.store(normalisers + start + row, apply_state, mask=(row < left) & (block == 0))
            tl.store(lse + rest + row, top + tl.zeros((C,), tl.float32), mask=(row < left) & (share == 0))
        else:
            gs = tile(g + start * g_row, g_row, row, column, left, E, EB)
            if MODE == _QUERY_MODE:
                weight = tl.exp2(top - tl.load(lse + rest + row, mask=row < left, other=float("inf")))
                single = weight * tl.load(slope + rest + row, mask=row < left, other=0.0)
            else:
                weight = tl.where(row < left, tl.exp2(top + guess - half * long * long), 0.0)
                single = weight
            scaled = (gs.to(tl.float32) * weight[:, None]).to(KIND)
            slopes = tl.dot(scaled, state, input_precision=PRECISION) + single[:, None] * total[None, :]
            slopes = slopes * wide
            pulled = tl.dot(slopes.to(back_own.dtype), tl.trans(back_own), input_precision=PRECISION) * factor
            if MODE == _KEY_MODE:
                pulled = pulled - (2 * half) * tl.sum(slopes, 1)[:, None] * xs.to(tl.float32)
                values = tl.dot(ones, tl.trans(state), input_precision=PRECISION) * weight[:, None]
                tl.store(goal, values.to(out.dtype.element_ty), mask=there)
            to = gradient + (start + row)[:, None] * D + entry[None, :]
            kept = (row < left)[:, None] & (entry < D)[None, :]
            tl.store(to, (pulled * _LN2).to(gradient.dtype.element_ty), mask=kept)
