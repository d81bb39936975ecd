r"""Causal linear attention, forward and backward, at the speed of memory.

.. math:: out_i = \frac{q_i S_i}{q_i \cdot t_i}, \quad S_i = \sum_{j \le i} k_j v_j^T, \quad t_i = \sum_{j \le i} k_j

and without the division where no normaliser is asked for. There is no feature map: q and k are the features. Sums are
in float32 for inputs of 16 and 32 bits. One kernel adds up :math:`\sum_j y_j z_j^T` over each part of a sequence,
another turns these into the sums before each part, and a third goes through every part chunk by chunk with the state in
its registers:

.. math:: out_i = \sum_{j \le i} (x_i \cdot y_j + α_i β_j)\, z_j

`MODE` says what α and β are. Backward, the gradient of q is a scan over v and k, and those of k and v are scans from
the end over q and the gradient; with a normaliser they have weights w = 1 / normaliser and slopes u = −(gradient ·
mean), the derivatives by the normalisers over w. Scans over the gradients of rows are given w g and w u: they are
weighted once for all scans. The first kernel reads each part away from where the third begins, which therefore finds
that end still in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import chunking, tile_ops
from avow.kernels.chunking import Cut, Layout, Sums, blank, by_key_head, check, cut_for, divided, launch, padded
from avow.kernels.tile_ops import (
    TINY,
    chunk_of,
    filled,
    into,
    load_state,
    piece_of,
    row_contiguous,
    rows_at,
    span,
    store_state,
    store_tile,
    tile,
)

# Only x·y; divide by Σ_j x·y; α = u, β = 1, rows weighted at the end; α = 1, β = w u.
PLAIN, NORMALISED, ROWS, COLUMNS = 0, 1, 2, 3
_NORMALISED, _ROWS, _COLUMNS = (tl.constexpr(mode) for mode in (NORMALISED, ROWS, COLUMNS))


# Layouts for keys of 65 to 128 numbers of 16 bits: of scans, of those without normalisers, and of sums of parts.
WIDE, WIDE_PLAIN, WIDE_SUMS = Layout(64, 64, 4, 4, 1), Layout(64, 128, 4, 4, 1), Layout(64, 128, 8, 3, 2)


def config(m: int, e: int, itemsize: int, plain: bool = True) -> Layout:
    """The layout for keys of m numbers and values of e: the largest state that stays in registers.

    Where normalisers go with the sums, not everything is `plain`, and there is less room.
    """
    m, e = padded(m), padded(e)
    if itemsize == 4:
        if m > 128:
            return Layout(16, min(e, 16), 8, 1, 1)
        return Layout(64, min(e, 32), 4, 2, 2) if m <= 64 else Layout(32, min(e, 32), 8, 2, 1)
    if m <= 64:
        # Alone on its processor, a program that has no normalisers reads faster than two do.
        return Layout(64, min(e, 64), 4, 4, 1 if plain else 2)
    if m <= 128:
        wide = WIDE_PLAIN if plain else WIDE
        return wide._replace(columns=min(e, wide.columns))
    return Layout(64 if m <= 256 else 32, min(e, 16384 // m), 8, 2, 1)


def config_of_sums(m: int, e: int, itemsize: int) -> Layout:
    """The layout of sums of parts, which have more room in registers: wide keys are read once for all columns."""
    if itemsize == 2 and 64 < m <= 128:
        return WIDE_SUMS._replace(columns=min(padded(e), WIDE_SUMS.columns))
    return config(m, e, itemsize)


def cut(q: Float[Tensor, "b h n m"], e: int, normalise: bool) -> Cut:
    """Parts of q that fill the device once."""
    b, h, n, m = q.shape
    # Sums that float16 meets are in float32, and take twice the room.
    chosen = config(m, e, q.element_size(), not normalise and q.dtype != torch.float16)
    return cut_for(n, b * h * divided(e, chosen.columns), chosen.resident, q.device)


@triton.jit
def part_sums(y, z, slope, added, rows, length, S: tl.constexpr):
    """A piece of a part's sum of y zᵀ, and of β y where the mode needs it; the last part needs none."""
    head, piece, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces = tl.num_programs(1)
    start, many, last = piece_of(piece, pieces, length, rows, S)
    if last:
        return
    y = rows_at(y, head, start, S.y_row, S.H)
    z = rows_at(z, head, start, S.z_row, S.H)
    rest = head.to(tl.int64) * rows + start
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.DP), block * S.EB + tl.arange(0, S.EB)
    state = filled(0.0, S.DP, S.EB)
    total = tile_ops.as_columns(filled(0.0, S.DP), y.dtype.element_ty)
    steps = tl.cdiv(many, S.C)
    for step in range(steps):
        chunk = chunk_of(step, steps, not S.REVERSE)
        ahead = tl.cast(chunk, tl.int64) * S.C
        left = many - chunk * S.C
        ys = tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.DP)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB)
        if S.MODE == _COLUMNS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            total = tile_ops.columns_grown(total, ys, u)
        if S.MODE == _NORMALISED:
            total = tile_ops.columns_grown(total, ys)
        state = tl.dot(tl.trans(ys), zs, state, input_precision=S.PRECISION)
    place = head.to(tl.int64) * pieces + piece
    store_tile(added.sums + place * (S.D * S.E), S.E, feature, column, S.D, state, S.E, S.EB)
    if S.MODE == _NORMALISED or S.MODE == _COLUMNS:
        tl.store(
            added.totals + place * S.D + feature, tile_ops.from_columns(total), mask=(feature < S.D) & (block == 0)
        )


@triton.jit
def part_rows(x, y, z, weight, slope, before, out, norm, last, rows, length, S: tl.constexpr):
    """The rows of one part; normalised ones also leave the sums after the last row."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, final = span(part, parts, length, rows, S.REVERSE)
    x = rows_at(x, head, start, S.x_row, S.H, S.RX)
    y = rows_at(y, head, start, S.y_row, S.H, S.R)
    z = rows_at(z, head, start, S.z_row, S.H, S.R)
    rest = head.to(tl.int64) * rows + start
    row, feature, column = tl.arange(0, S.C), tl.arange(0, S.DP), block * S.EB + tl.arange(0, S.EB)
    group = (head // S.R).to(tl.int64)
    place = group * parts + part
    state = load_state(before.sums + place * (S.D * S.E), feature[:, None], column[None, :], S.D, S.E, S.TURNED)
    if S.MODE == _NORMALISED:
        held = tl.load(before.totals + place * S.D + feature, mask=feature < S.D, other=0.0)
        total = tile_ops.as_columns(held, y.dtype.element_ty)
    if S.MODE == _ROWS or S.MODE == _COLUMNS:
        held = tl.load(before.totals + place * S.E + column, mask=column < S.E, other=0.0)
        total = tile_ops.as_rows(held, S.C, z.dtype.element_ty)
    if S.REVERSE:
        seen = row[:, None] <= row[None, :]
    else:
        seen = row[:, None] >= row[None, :]
    steps = tl.cdiv(many, S.C)
    for step in range(steps):
        chunk = chunk_of(step, steps, S.REVERSE)
        ahead = tl.cast(chunk, tl.int64) * S.C
        left = many - chunk * S.C
        xs = tile(x + ahead * S.x_row, S.x_row, row, feature, left, S.D, S.DP)
        ys = tile(y + ahead * S.y_row, S.y_row, row, feature, left, S.D, S.DP)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB)
        pairs = tl.dot(xs, tl.trans(ys), input_precision=S.PRECISION)
        answer = into(xs, state, S)
        if S.MODE == _ROWS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            pairs += u[:, None]
            answer += u[:, None] * total
            total = tile_ops.rows_grown(total, zs)
        if S.MODE == _COLUMNS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            pairs += u[None, :]
            answer += total
        pairs = tl.where(seen, pairs, 0.0)
        answer = tl.dot(pairs.to(xs.dtype), zs, answer, input_precision=S.PRECISION)
        if S.MODE == _NORMALISED:
            divisor = tl.sum(pairs, 1) + tile_ops.within(xs, total)
            total = tile_ops.columns_grown(total, ys)
            tl.store(norm + rest + ahead + row, divisor, mask=(row < left) & (block == 0))
            answer = answer * (1 / tl.where(tl.abs(divisor) < TINY, 1.0, divisor))[:, None]
        if S.MODE == _COLUMNS:
            total = tile_ops.rows_grown(total, zs, u)
        if S.MODE == _ROWS:
            answer = answer * tl.load(weight + rest + ahead + row, mask=row < left, other=0.0)[:, None]
        state = tl.dot(tl.trans(ys), zs, state, input_precision=S.PRECISION)
        store_tile(out + (rest + ahead) * S.E, S.E, row, column, left, answer, S.E, S.EB)
    # Without these stores the loop spills twice as many registers: 128-wide keys took 1.98 ms on an H200, not 1.22.
    if S.MODE == _NORMALISED:
        if final and (head % S.R) == 0:
            store_state(last.sums + group * (S.D * S.E), state, feature[:, None], column[None, :], S.D, S.E)
            tl.store(
                last.totals + group * S.D + feature, tile_ops.from_columns(total), mask=(feature < S.D) & (block == 0)
            )


@triton.jit
def row_slopes(gradient, out, norm, slope, weight, weighted, weighted_slope, rows, S: tl.constexpr):
    """−(gradient · mean) of some rows; given normalisers, also their inverses, and gradients and slopes times these."""
    own, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.EB)
    inside = (row < rows)[:, None] & (column < S.E)[None, :]
    away, place = row[:, None].to(tl.int64), own * rows + row
    there = own * rows * S.E + away * S.E + column[None, :]
    base = rows_at(gradient, own, 0, 0, S.H)
    g = tl.load(base + away * S.g_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + there, mask=inside, other=0.0).to(tl.float32)
    u = -tl.sum(g * o, 1)
    if norm is not None:
        z = tl.load(norm + place, mask=row < rows, other=1.0)
        # A row that saw nothing was divided by one.
        empty = tl.abs(z) < TINY
        w, u = 1 / tl.where(empty, 1.0, z), tl.where(empty, 0.0, u)
        tl.store(weight + place, w, mask=row < rows)
        tl.store(weighted_slope + place, w * u, mask=row < rows)
        tl.store(weighted + there, (g * w[:, None]).to(weighted.dtype.element_ty), mask=inside)
    tl.store(slope + place, u, mask=row < rows)


def before(
    y: Float[Tensor, "b h n m"],
    z: Float[Tensor, "b h n e"],
    parts: Cut,
    mode: int = PLAIN,
    reverse: bool = False,
    slope: Float32[Tensor, "b h n"] | None = None,
) -> Sums:
    """Sums over all rows before each part; `reverse` counts from the end."""
    (b, h, _, m), e = y.shape, z.shape[-1]
    layout = config_of_sums(m, e, y.element_size())
    pieces = chunking.pieces_of(parts, b * h * divided(e, layout.columns), layout.resident)
    shape = layout.shape(h, 1, m, e, y.dtype, MODE=mode, REVERSE=reverse, PIECES=pieces)
    return chunking.sums_before(part_sums, y, z, (slope,), ((m if mode != PLAIN else 0,),), parts, shape, layout)


def scanned(
    x: Float[Tensor, "b hx n m"],
    y: Float[Tensor, "b hy n m"],
    z: Float[Tensor, "b hy n e"],
    known: Sums,
    parts: Cut,
    mode: int = PLAIN,
    reverse: bool = False,
    turned: bool = False,
    weight: Float32[Tensor, "b h n"] | None = None,
    slope: Float32[Tensor, "b h n"] | None = None,
    dtype: torch.dtype | None = None,
    plain: bool = True,
) -> tuple[Float[Tensor, "b h n e"], Float32[Tensor, "b h n"]]:
    """Every row's sum over the rows up to it, of type `dtype`, and its normaliser; `turned` states are those of z yᵀ.

    Parts that others than `plain` scans go through, too, are longer: fewer columns are taken at a time.
    """
    (b, hx, n, m), (hy, e) = x.shape, (z.shape[1], z.shape[3])
    h = max(hx, hy)
    layout = config(m, e, x.element_size(), plain and mode == PLAIN and x.dtype != torch.float16)
    out = x.new_empty(b, h, n, e, dtype=x.dtype if dtype is None else dtype)
    (norm,) = blank(x, (b, h, n if mode == NORMALISED else 0))
    last = Sums(*blank(x, (b, hy, m, e), (b, hy, m))) if mode == NORMALISED else None
    shape = layout.shape(h, h // hy, m, e, x.dtype, MODE=mode, REVERSE=reverse, TURNED=turned, RX=h // hx)
    others = weight, slope, known, out, norm, last, n, parts.length
    grid = (b * h, parts.parts, divided(e, layout.columns))
    launch(part_rows, grid, {"x": x, "y": y, "z": z}, *others, shape=shape, layout=layout)
    return out, norm


class Slopes(NamedTuple):
    """Slopes of rows by their normalisers; what they are weighted by, gradients and slopes times that, if asked for."""

    slope: Float32[Tensor, "b h n"] | None
    weight: Float32[Tensor, "b h n"] | None = None
    gradient: Float[Tensor, "b h n e"] | None = None
    weighted_slope: Float32[Tensor, "b h n"] | None = None


def slopes(
    gradient: Float[Tensor, "b h n e"], out: Float[Tensor, "b h n e"], norm: Float32[Tensor, "b h n"] | None = None
) -> Slopes:
    """How the rows of a normalised mean depend on their normalisers, as gradients of keys and values need it."""
    b, h, n, e = out.shape
    result = Slopes(out.new_empty(b, h, n, dtype=torch.float32))
    if norm is not None:
        result = Slopes(result.slope, torch.empty_like(norm), torch.empty_like(out), torch.empty_like(norm))
    layout = Layout(64, padded(e), 4, 3)
    grid, shape = (b * h, max(1, divided(n, layout.chunk))), layout.shape(h, 1, 0, e, out.dtype)
    launch(row_slopes, grid, {"g": gradient}, out, norm, *result, n, shape=shape, layout=layout)
    return result


def linear_attention(
    q: Float[Tensor, "b h n m"], k: Float[Tensor, "b g n m"], v: Float[Tensor, "b g n e"], normalise: bool = False
) -> Float[Tensor, "b h n e"]:
    """What every row collects from the keys up to its own; query heads that share a key head lie beside each other."""
    check(q, k, v)
    return _forward(q, k, v, normalise)[0]


@torch.library.custom_op("avow::linear_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, normalise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, normalisers, and the sums before each part, for the backward pass."""
    q, k, v = row_contiguous(q, k, v)
    parts, mode = cut(q, v.shape[3], normalise), NORMALISED if normalise else PLAIN
    known = before(k, v, parts, mode)
    return *scanned(q, k, v, known, parts, mode), known.sums, known.totals


@_forward.register_fake
def _(q, k, v, normalise):
    (b, h, n, m), g, e = q.shape, k.shape[1], v.shape[3]
    parts, wide = cut(q, e, normalise).parts, m if normalise else 0
    shapes = ((b, h, n if normalise else 0), (b * g, parts, m, e), (b * g, parts, wide))
    return q.new_empty(b, h, n, e), *blank(q, *shapes)


@torch.library.custom_op("avow::linear_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, held: list[Tensor], normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from all that the forward pass returned."""
    gradient, q, k, v = row_contiguous(gradient, q, k, v)
    out, norm, *sums = held
    parts = cut(q, v.shape[3], normalise)
    rows, columns = (ROWS, COLUMNS) if normalise else (PLAIN, PLAIN)
    slope, weight, weighted, weighted_slope = slopes(gradient, out, norm) if normalise else Slopes(None)
    weighted = gradient if weighted is None else weighted
    dq, _ = scanned(gradient, v, k, Sums(*sums), parts, rows, False, True, weight, slope)
    known = before(q, weighted, parts, columns, True, weighted_slope)
    # Sums over the heads that share a key head are rounded once.
    dtype = q.dtype if q.shape[1] == k.shape[1] else torch.float32
    dv, _ = scanned(k, q, weighted, known, parts, PLAIN, True, dtype=dtype, plain=not normalise)
    dk, _ = scanned(v, weighted, q, known, parts, columns, True, True, None, weighted_slope, dtype)
    return dq, by_key_head(dk, k.shape[1]).to(k.dtype), by_key_head(dv, k.shape[1]).to(v.dtype)


chunking.register_gradients(_forward, _backward)
