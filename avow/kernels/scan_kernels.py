r"""The kernels of the scan behind every causal linear attention: sums of parts, what lies before each, its rows.

.. math:: out_i = \sum_{j \le i} (x_i \cdot y_j + α_i β_j)\, z_j

`MODE` says what α and β are: gradients of a normalised mean are scans, too, with weights w = 1 / normaliser and slopes
u = −(gradient · mean), the derivatives by the normalisers over w. Scans over the gradients of rows are given w g and
w u: they are weighted once for all scans.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.row_sums import (
    as_columns,
    as_rows,
    columns_grown,
    columns_weighted,
    from_columns,
    rows_grown,
    rows_weighted,
    within,
)
from avow.kernels.tile_ops import TINY, into, piece_of, span, tile

# Only x·y; divide by Σ_j x·y; α = u, β = 1, rows weighted at the end; α = 1, β = w u.
PLAIN, NORMALISED, ROWS, COLUMNS = 0, 1, 2, 3
_NORMALISED, _ROWS, _COLUMNS = (tl.constexpr(mode) for mode in (NORMALISED, ROWS, COLUMNS))
# Products of float32 as three of TF32: within a few units of float32, at tensor cores' speed.
PRECISION = "tf32x3"


@triton.jit
def part_sums(
    y,
    z,
    slope,
    table,
    sums,
    totals,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
    rows,
    length,
    H: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A piece of a part's sum of y zᵀ, and of β y where asked for; the last part needs none but for the whole."""
    head, piece, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces = tl.num_programs(1)
    start, many, _, last = span(piece // PIECES, pieces // PIECES, length, rows, table, REVERSE, PACKED)
    if not WHOLE:
        if last:
            return
    start, many = piece_of(start, many, piece % PIECES, PIECES, C)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head + start * y_row
    z += batch * z_batch + own * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, feature = tl.arange(0, C), tl.arange(0, MP)
    column = block * EB + tl.arange(0, EB)
    state = tl.zeros((MP, EB), tl.float32)
    total = as_columns(tl.zeros((MP,), tl.float32), y.dtype.element_ty)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if REVERSE:
            chunk = step
        else:
            chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        ys = tile(y + ahead * y_row, y_row, row, feature, left, M, MP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        if MODE == _COLUMNS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            total = columns_weighted(total, ys, u)
        if MODE == _NORMALISED:
            total = columns_grown(total, ys)
        state = tl.dot(tl.trans(ys), zs, state, input_precision=PRECISION)
    place = head.to(tl.int64) * pieces + piece
    inside = (feature < M)[:, None] & (column < E)[None, :]
    tl.store(sums + place * (M * E) + feature[:, None] * E + column[None, :], state, mask=inside)
    if MODE == _NORMALISED or MODE == _COLUMNS:
        tl.store(totals + place * M + feature, from_columns(total), mask=(feature < M) & (block == 0))


@triton.jit
def part_prefixes(
    sums,
    before,
    initial,
    ends,
    parts,
    groups,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What lies before each part, in the order of the scan, from the sums of all pieces."""
    head, block, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    first, behind = 0, parts
    if ends is not None:
        first, behind = tl.load(ends + sequence), tl.load(ends + sequence + 1)
    if initial is not None:
        state = tl.load(initial + (sequence * groups + head) * SIZE + place, mask=inside, other=0.0)
    else:
        state = tl.zeros((BLOCK,), tl.float32)
    for step in range(first, behind):
        part = step
        if REVERSE:
            part = first + behind - 1 - step
        tl.store(before + (head * parts + part) * SIZE + place, state, mask=inside)
        # The last part has no sum, and nothing comes after it.
        there = inside & (step < behind - 1)
        for piece in tl.static_range(PIECES):
            state += tl.load(sums + ((head * parts + part) * PIECES + piece) * SIZE + place, mask=there, other=0.0)


@triton.jit
def part_rows(
    x,
    y,
    z,
    weight,
    slope,
    table,
    before,
    totals,
    out,
    norm,
    final,
    final_total,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
    before_row: tl.constexpr,
    before_column: tl.constexpr,
    rows,
    length,
    H: tl.constexpr,
    RX: tl.constexpr,
    RY: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MODE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows of one part; H heads of the output, RX of them to a head of x, RY to a head of y and z."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _, last = span(part, parts, length, rows, table, REVERSE, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + (own // RX).to(tl.int64) * x_head + start * x_row
    y += batch * y_batch + (own // RY).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // RY).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, feature = tl.arange(0, C), tl.arange(0, MP)
    local = tl.arange(0, EB)
    column = block * EB + local
    group = (head // RY).to(tl.int64)
    place = group * parts + part
    inside = (feature < M)[:, None] & (column < E)[None, :]
    entry = feature[:, None] * before_row + column[None, :] * before_column
    state = tl.load(before + place * (M * E) + entry, mask=inside, other=0.0)
    if MODE == _NORMALISED:
        total = as_columns(tl.load(totals + place * M + feature, mask=feature < M, other=0.0), y.dtype.element_ty)
    if MODE == _ROWS or MODE == _COLUMNS:
        total = as_rows(tl.load(totals + place * E + column, mask=column < E, other=0.0), C, z.dtype.element_ty)
    if REVERSE:
        seen = row[:, None] <= row[None, :]
    else:
        seen = row[:, None] >= row[None, :]
    kind = x.dtype.element_ty
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if REVERSE:
            chunk = steps - 1 - step
        else:
            chunk = step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        xs = tile(x + ahead * x_row, x_row, row, feature, left, M, MP)
        ys = tile(y + ahead * y_row, y_row, row, feature, left, M, MP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        pairs = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
        found = into(xs, state, PRECISION)
        if MODE == _ROWS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            pairs += u[:, None]
            found += u[:, None] * total
            total = rows_grown(total, zs)
        if MODE == _COLUMNS:
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            pairs += u[None, :]
            found += total
        pairs = tl.where(seen, pairs, 0.0)
        found = tl.dot(pairs.to(kind), zs, found, input_precision=PRECISION)
        if MODE == _NORMALISED:
            divisor = tl.sum(pairs, 1) + within(xs, total)
            total = columns_grown(total, ys)
            tl.store(norm + rest + ahead + row, divisor, mask=(row < left) & (block == 0))
            found = found * (1 / tl.where(tl.abs(divisor) < TINY, 1.0, divisor))[:, None]
        if MODE == _COLUMNS:
            total = rows_weighted(total, zs, u)
        if MODE == _ROWS:
            found = found * tl.load(weight + rest + ahead + row, mask=row < left, other=0.0)[:, None]
        state = tl.dot(tl.trans(ys), zs, state, input_precision=PRECISION)
        target = out + (rest + ahead) * E + row[:, None] * E + column[None, :]
        if E % EB == 0:
            tl.store(target, found.to(out.dtype.element_ty), mask=(row < left)[:, None])
        else:
            tl.store(target, found.to(out.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])
    if last and (head % RY) == 0:
        at = group
        if PACKED:
            at = tl.load(table + 4 * part + 3).to(tl.int64) * (H // RY) + group
        tl.store(final + at * (M * E) + feature[:, None] * E + column[None, :], state, mask=inside)
        if MODE == _NORMALISED:
            tl.store(final_total + at * M + feature, from_columns(total), mask=(feature < M) & (block == 0))
        if MODE == _COLUMNS:
            tl.store(final_total + at * E + column, tl.max(total, 0), mask=column < E)


@triton.jit
def weighted_rows(
    gradient,
    out,
    norm,
    weight,
    slope,
    weighted,
    weighted_slope,
    batch,
    head,
    stride,
    rows,
    H: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
):
    """1 / normaliser and −(gradient · mean) of some rows, and gradients and slopes times the first."""
    own, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, EP)
    inside = (row < rows)[:, None] & (column < E)[None, :]
    there, place = own * rows * E + row[:, None].to(tl.int64) * E + column[None, :], own * rows + row
    base = gradient + (own // H) * batch + (own % H) * head
    g = tl.load(base + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + there, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(norm + place, mask=row < rows, other=1.0)
    # A row that saw nothing was divided by one.
    empty = tl.abs(z) < TINY
    w, u = 1 / tl.where(empty, 1.0, z), tl.where(empty, 0.0, -tl.sum(g * o, 1))
    tl.store(weight + place, w, mask=row < rows)
    tl.store(slope + place, u, mask=row < rows)
    tl.store(weighted_slope + place, w * u, mask=row < rows)
    tl.store(weighted + there, (g * w[:, None]).to(weighted.dtype.element_ty), mask=inside)


@triton.jit
def row_slopes(
    gradient,
    out,
    slope,
    batch,
    head,
    stride,
    rows,
    H: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
):
    """−(gradient · mean) of some rows."""
    own, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, EP)
    inside = (row < rows)[:, None] & (column < E)[None, :]
    away = row[:, None].to(tl.int64)
    base = gradient + (own // H) * batch + (own % H) * head
    g = tl.load(base + away * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + own * rows * E + away * E + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(slope + own * rows + row, -tl.sum(g * o, 1), mask=row < rows)
