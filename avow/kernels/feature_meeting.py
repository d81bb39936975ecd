"""Rows of random features that meet one state: their means, or gradients of queries, keys and values."""

# Triton adds tuples, but does not unpack them into new ones; and they grow, which types of tuples do not.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import math

import triton
import triton.language as tl

from avow.kernels.feature_tiles import FEW, alone, featured, lengths, pieces, state_of, total_of
from avow.kernels.tiles import tile

_LN2 = tl.constexpr(math.log(2))
_TINY = tl.constexpr(2.0**-60)
# What rows ask of the state.
MEANS, QUERIES, KEYS = 0, 1, 2
_MEAN_MODE, _QUERY_MODE, _KEY_MODE = (tl.constexpr(mode) for mode in (MEANS, QUERIES, KEYS))


@triton.jit
def met(
    x,
    g,
    lse,
    slope,
    high,
    low,
    before,
    totals,
    tops,
    out,
    gradient,
    x_batch,
    x_head,
    x_row,
    g_batch,
    g_head,
    g_row,
    rows,
    factor,
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
    MANY: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows and the state they meet: means; gradients of queries; or gradients of keys, and of values as `out`."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x += batch * x_batch + own * x_head
    g += batch * g_batch + own * g_head
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    place = (head // R).to(tl.int64)
    states, counts, known = (), (), ()
    for b in tl.static_range(NB):
        known = known + (pieces(high, low, b, M, MB, D, DP),)
        at, inside = state_of(before + place * (M * E), b, column, M, MB, E)
        states = states + (tl.load(at, mask=inside, other=0.0).to(KIND),)
        at, inside = total_of(totals + place * M, b, M, MB)
        if MODE != _MEAN_MODE:
            # What every block of columns would add is added by the first.
            inside = inside & (block == 0)
        counts = counts + (tl.load(at, mask=inside, other=0.0).to(KIND),)
    top = tl.load(tops + place)
    target = gradient + (block * tl.num_programs(0) + head).to(tl.int64) * rows * D
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        xs = tile(x + start * x_row, x_row, row, entry, left, D, DP)
        square, long = lengths(xs)
        guess = lift * long
        goal = out + (rest + row)[:, None] * E + column[None, :]
        there = (row < left)[:, None] & (column < E)[None, :]
        if MODE == _MEAN_MODE:
            found = tl.zeros((C, EB), tl.float32)
            met = tl.zeros((C, FEW), tl.float32)
            for b in tl.static_range(NB):
                first, second = known[b]
                ones = featured(xs, first, second, factor, guess, b, M, MB, PRECISION).to(KIND)
                found = tl.dot(ones, states[b], found, input_precision=PRECISION)
                met = tl.dot(ones, counts[b], met, input_precision=PRECISION)
            divisor = tl.sum(met, 1)
            sound = (divisor > _TINY) & (divisor < 1 / _TINY)
            found = found / tl.where(sound, divisor, 1.0)[:, None]
            tl.store(goal, found.to(out.dtype.element_ty), mask=there)
            told = tl.where(sound, tl.log2(tl.where(sound, divisor, 1.0)) + top, float("inf"))
            tl.store(lse + rest + row, told, mask=(row < left) & (block == 0))
        else:
            gs = tile(g + start * g_row, g_row, row, column, left, E, EB)
            if MODE == _QUERY_MODE:
                share = tl.exp2(top - tl.load(lse + rest + row, mask=row < left, other=float("inf")))
                single = share * tl.load(slope + rest + row, mask=row < left, other=0.0)
            else:
                share = tl.where(row < left, tl.exp2(top + guess - half * square), 0.0)
                single = share
            scaled = (gs.to(tl.float32) * share[:, None]).to(KIND)
            single_column = alone(single, KIND)
            pulled = tl.zeros((C, DP), tl.float32)
            values = tl.zeros((C, EB), tl.float32)
            sums = tl.zeros((C,), tl.float32)
            for b in tl.static_range(NB):
                first, second = known[b]
                wide = featured(xs, first, second, factor, guess, b, M, MB, PRECISION)
                slopes = tl.dot(scaled, tl.trans(states[b]), input_precision=PRECISION)
                slopes = tl.dot(single_column, tl.trans(counts[b]), slopes, input_precision=PRECISION) * wide
                pulled = tl.dot(slopes.to(first.dtype), tl.trans(first), pulled, input_precision=PRECISION)
                if MODE == _KEY_MODE:
                    sums += tl.sum(slopes, 1)
                    values = tl.dot(wide.to(KIND), states[b], values, input_precision=PRECISION)
            pulled = pulled * factor
            if MODE == _KEY_MODE:
                pulled = pulled - (2 * half) * sums[:, None] * xs.to(tl.float32)
                tl.store(goal, (values * share[:, None]).to(out.dtype.element_ty), mask=there)
            to = target + (start + row)[:, None] * D + entry[None, :]
            kept = (row < left)[:, None] & (entry < D)[None, :]
            tl.store(to, (pulled * _LN2).to(gradient.dtype.element_ty), mask=kept)
