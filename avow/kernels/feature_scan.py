r"""Random features inside the scan: no feature is ever written to memory.

A row's features are :math:`e^{ω_f·q_i}`, a key's :math:`e^{ω_f·k_j - \|k_j\|^2/2}`, computed where they are needed. A
row's are relative to a guess at the largest of them, λ‖q‖ with λ that of m Gaussians, which cancels in its mean. Those
of keys are relative to the largest :math:`b_j = λ\|k_j\| - \|k_j\|^2/2` up to the end of their chunk, and so are sums
over them: no future key is felt but in rounding. A mean is lost only where features leave float32 on their own: the
logarithm of its normaliser then says so, and is not finite. Logarithms are those to base 2.

A program takes one block of features: a state for more of them has no room in registers. Each adds its share to the
numerators and normalisers of its rows, and `shared_rows` divides their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.feature_tiles import columns, featured, risen, state_of
from avow.kernels.tile_ops import LOWEST, piece_of, short, span, tile

# Normalisers below this, relative to the largest key, may have lost terms that count.
_TINY = tl.constexpr(2.0**-60)


@triton.jit
def feature_sums(
    y,
    z,
    y_lengths,
    lse,
    slope,
    along,
    table,
    sums,
    totals,
    tops,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
    rows,
    length,
    factor,
    lift,
    half,
    power,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
):
    """A piece of a part's sums over keys of features and values, or, from the end, over rows of features and gradients.

    A row weighs 2^-lse, and counts in the totals with its slope.
    """
    head, piece, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % NB, share // NB
    pieces = tl.num_programs(1)
    start, many, _begins, last = span(piece // PIECES, pieces // PIECES, length, rows, table, not KEYS, PACKED)
    if not WHOLE:
        if last:
            return
    start, many = piece_of(start, many, piece % PIECES, PIECES, C)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head + start * y_row
    z += batch * z_batch + own * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, entry, feature = tl.arange(0, C), tl.arange(0, DP), own_features * MB + tl.arange(0, MB)
    column = block * EB + tl.arange(0, EB)
    along_own = columns(along, own_features, M, MB, D, DP)
    state = tl.zeros((EB, MB), tl.float32)
    total = tl.zeros((MB,), tl.float32)
    top = tl.full((), LOWEST, tl.float32)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if KEYS:
            chunk = steps - 1 - step
        else:
            chunk = step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        ys = tile(y + ahead * y_row, y_row, row, entry, left, D, DP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        long = tl.load(y_lengths + rest + ahead + row, mask=row < left, other=0.0)
        guess = lift * long
        if KEYS:
            below = half * long * long
            log = guess - below
        else:
            log = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
            below = guess - log
        higher = tl.maximum(top, tl.max(tl.where(row < left, log, LOWEST), 0))
        settled = tl.where(higher > LOWEST, higher, 0.0)
        shrink = tl.exp2(top - settled)
        top = higher
        # What is not there, and rows that were lost, have no features.
        below = tl.where((row < left) & (log > LOWEST), below + settled, float("inf"))
        keys = short(featured(ys, along_own, factor, power, below, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST)
        counted = keys.to(tl.float32)
        if not KEYS:
            counted = counted * tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)[:, None]
        total = total * shrink + tl.sum(counted, 0)
        state = tl.dot(tl.trans(zs).to(KIND), keys, state * shrink, input_precision=PRECISION)
    place = head.to(tl.int64) * pieces + piece
    at, inside = state_of(sums + place * (M * E), feature, column, M, E)
    tl.store(at, state, mask=inside)
    tl.store(totals + place * M + feature, total, mask=(feature < M) & (block == 0))
    tl.store(tops + place, top, mask=share == 0)


@triton.jit
def feature_rows(
    x,
    y,
    z,
    x_lengths,
    y_lengths,
    along,
    table,
    before,
    totals,
    tops,
    numerators,
    normalisers,
    seen_tops,
    final,
    final_total,
    final_top,
    x_batch,
    x_head,
    x_row: tl.constexpr,
    y_batch,
    y_head,
    y_row: tl.constexpr,
    z_batch,
    z_head,
    z_row: tl.constexpr,
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
    """What one block of features adds to the rows of one part, relative to the largest b up to their chunk's end."""
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % NB, share // NB
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    mine = (own_features * tl.num_programs(0)).to(tl.int64) * rows + rest
    row, entry, feature = tl.arange(0, C), tl.arange(0, DP), own_features * MB + tl.arange(0, MB)
    column = block * EB + tl.arange(0, EB)
    group = (head // R).to(tl.int64)
    shared = group * rows + start
    place = group * parts + part
    along_own = columns(along, own_features, M, MB, D, DP)
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
        long = tl.load(y_lengths + shared + ahead + row, mask=row < left, other=0.0)
        query_guess = lift * tl.load(x_lengths + rest + ahead + row, mask=row < left, other=0.0)
        top, shrink, below = risen(top, long, row, left, lift, half)
        state, total = state * shrink, total * shrink
        queries = short(
            featured(xs, along_own, factor, power, query_guess, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST
        )
        keys = short(
            featured(ys, along_own, key_factor, power, below, feature, M, MB, PRECISION, SCALED, FAST), KIND, FAST
        )
        found = tl.dot(queries, tl.trans(state.to(KIND)), input_precision=PRECISION)
        pairs = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        pairs = tl.where(row[:, None] >= row[None, :], pairs, 0.0)
        # The same rounded features as in the mean: what rounding does to both hardly moves their quotient.
        met = tl.sum(queries.to(tl.float32) * total[None, :], 1) + tl.sum(pairs, 1)
        found = tl.dot(pairs.to(KIND), zs, found, input_precision=PRECISION)
        target = numerators + (mine + ahead) * E + row[:, None] * E + column[None, :]
        there = (row < left)[:, None] & (column < E)[None, :]
        tl.store(target, found.to(numerators.dtype.element_ty), mask=there)
        tl.store(normalisers + mine + ahead + row, met, mask=(row < left) & (block == 0))
        tl.store(seen_tops + rest + ahead + row, top + tl.zeros((C,), tl.float32), mask=(row < left) & (share == 0))
        state = tl.dot(tl.trans(zs), keys, state, input_precision=PRECISION)
        total += tl.sum(keys.to(tl.float32), 0)
    if last and (head % R) == 0:
        to = group
        if PACKED:
            to = tl.load(table + 4 * part + 3).to(tl.int64) * (H // R) + group
        at, inside = state_of(final + to * (M * E), feature, column, M, E)
        tl.store(at, state, mask=inside)
        tl.store(final_total + to * M + feature, total, mask=(feature < M) & (block == 0))
        tl.store(final_top + to, top, mask=share == 0)


@triton.jit(do_not_specialize=["count"])
def shared_rows(
    numerators,
    normalisers,
    seen_tops,
    out,
    lse,
    count,
    NB: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
):
    """Rows from the shares of all blocks of features, and the logarithms of their normalisers."""
    row, column = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C), tl.arange(0, EP)
    there = (row < count)[:, None] & (column < E)[None, :]
    found = tl.zeros((C, EP), tl.float32)
    divisor = tl.zeros((C,), tl.float32)
    for block in tl.static_range(NB):
        one = block * count.to(tl.int64) + row
        found += tl.load(numerators + one[:, None] * E + column[None, :], mask=there, other=0.0).to(tl.float32)
        divisor += tl.load(normalisers + one, mask=row < count, other=1.0)
    # Neither nan nor inf is below anything.
    sound = (divisor > _TINY) & (divisor < 1 / _TINY)
    divisor = tl.where(sound, divisor, 1.0)
    tl.store(out + row[:, None] * E + column[None, :], (found / divisor[:, None]).to(out.dtype.element_ty), mask=there)
    highest = tl.load(seen_tops + row, mask=row < count, other=0.0)
    tl.store(lse + row, tl.where(sound, tl.log2(divisor) + highest, float("inf")), mask=row < count)


@triton.jit(do_not_specialize=["rows"])
def added_shares(shares, out, rows, WIDTH: tl.constexpr, NB: tl.constexpr, MANY: tl.constexpr):
    """Numbers from the shares of all programs that made some; loads are as wide as the width of rows allows."""
    count = rows.to(tl.int64) * WIDTH
    start = tl.program_id(0).to(tl.int64) * MANY
    place, left = tl.arange(0, MANY), count - start
    found = tl.zeros((MANY,), tl.float32)
    for block in tl.static_range(NB):
        own = shares + (block * count + start) + place
        found += tl.load(own, mask=place < left, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + start + place, found.to(out.dtype.element_ty), mask=place < left)


@triton.jit
def row_lengths(
    x, out, x_batch, x_head, x_row, rows, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr
):
    """How long every row is."""
    head, part = tl.program_id(0), tl.program_id(1)
    start = part.to(tl.int64) * C
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    x += (head // H).to(tl.int64) * x_batch + (head % H).to(tl.int64) * x_head + start * x_row
    xs = tile(x, x_row, row, entry, rows - start, D, DP).to(tl.float32)
    tl.store(out + head.to(tl.int64) * rows + start + row, tl.sqrt(tl.sum(xs * xs, 1)), mask=row < rows - start)
