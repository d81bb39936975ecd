r"""Random features inside the scan: no feature is ever written to memory.

A row's features are :math:`e^{ω_f·q_i}`, a key's :math:`e^{ω_f·k_j - \|k_j\|^2/2}`, computed where they are needed,
some at a time, relative to a guess at the largest of them, λ‖q‖ and λ‖k‖ with λ that of m Gaussians. A row's guess
cancels in its mean. A key's is kept as part of its logarithm :math:`b_j = λ\|k_j\| - \|k_j\|^2/2`: sums over keys are
relative to the largest b so far, and a row relates each key of its chunk to the largest b that it sees. No future key
is felt, and a mean is lost only where features leave float32 on their own: the logarithm of its normaliser then says
so, and is not finite. Logarithms are those to base 2.
"""

from __future__ import annotations

# Triton adds tuples, but does not unpack them into new ones; and they grow, which types of tuples do not.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated, index"
import triton
import triton.language as tl

from avow.kernels.feature_tiles import (
    FEW,
    LOWEST,
    alone,
    counted_in,
    featured,
    lengths,
    pieces,
    raised,
    state_of,
    total_of,
)
from avow.kernels.tiles import span, tile

# Normalisers below this, relative to the largest key, may have lost terms that count.
_TINY = tl.constexpr(2.0**-60)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def feature_sums(
    y,
    z,
    lse,
    slope,
    high,
    low,
    table,
    sums,
    totals,
    tops,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
    rows,
    length,
    factor,
    lift,
    half,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A part's sums over keys of features and values, or, from the end, over rows of features and gradients.

    A row weighs 2^-lse, and counts in the totals with its slope.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, not KEYS, PACKED)
    if not WHOLE:  # noqa: SIM102 - a constant, which removes the rest
        if last:
            return
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head + start * y_row
    z += batch * z_batch + own * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    states, counts, known = (), (), ()
    for b in tl.static_range(NB):
        known = known + (pieces(high, low, b, M, MB, D, DP),)
        states = states + (tl.zeros((MB, EB), tl.float32),)
        counts = counts + (tl.zeros((MB, FEW), tl.float32),)
    top = tl.full((), LOWEST, tl.float32)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if KEYS:  # noqa: SIM108 - a choice between constants is one for Triton only as a statement
            chunk = steps - 1 - step
        else:
            chunk = step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        ys = tile(y + ahead * y_row, y_row, row, entry, left, D, DP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        square, long = lengths(ys)
        guess = lift * long
        if KEYS:  # noqa: SIM108
            log = guess - half * square
        else:
            log = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
        top, weight, shrink = raised(top, tl.where(row < left, log, LOWEST))
        counted = weight
        if not KEYS:
            counted = weight * tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
        given, counted = (zs.to(tl.float32) * weight[:, None]).to(KIND), alone(counted, KIND)
        new, newer = (), ()
        for b in tl.static_range(NB):
            first, second = known[b]
            keys = featured(ys, first, second, factor, guess, b, M, MB, PRECISION).to(KIND)
            new = new + (tl.dot(tl.trans(keys), given, states[b] * shrink, input_precision=PRECISION),)
            newer = newer + (tl.dot(tl.trans(keys), counted, counts[b] * shrink, input_precision=PRECISION),)
        states, counts = new, newer
    place = head.to(tl.int64) * parts + part
    for b in tl.static_range(NB):
        at, inside = state_of(sums + place * (M * E), b, column, M, MB, E)
        tl.store(at, states[b], mask=inside)
        at, inside = total_of(totals + place * M, b, M, MB)
        tl.store(at, counts[b], mask=inside & (block == 0))
    tl.store(tops + place, top, mask=block == 0)


@triton.jit
def feature_rows(
    x,
    y,
    z,
    high,
    low,
    table,
    before,
    totals,
    tops,
    out,
    lse,
    final,
    final_total,
    final_top,
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
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
    """The rows of one part: their means of values, and the logarithms of their normalisers."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _begins, last = span(part, parts, length, rows, table, False, PACKED)
    batch, own = (head // H).to(tl.int64), head % H
    x += batch * x_batch + own.to(tl.int64) * x_head + start * x_row
    y += batch * y_batch + (own // R).to(tl.int64) * y_head + start * y_row
    z += batch * z_batch + (own // R).to(tl.int64) * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    group = (head // R).to(tl.int64)
    place = group * parts + part
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
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        square, long = lengths(ys)
        size = lengths(xs)[1]
        guess, query_guess = lift * long, lift * size
        log = tl.where(row < left, guess - half * square, LOWEST)
        # The largest logarithm that each row sees.
        highest = tl.maximum(tl.associative_scan(log, 0, _larger), top)
        earlier = tl.exp2(top - highest)
        top, weight, shrink = raised(top, log)
        given, counted = (zs.to(tl.float32) * weight[:, None]).to(KIND), alone(weight, KIND)
        pairs = tl.zeros((C, C), tl.float32)
        found = tl.zeros((C, EB), tl.float32)
        met = tl.zeros((C,), tl.float32)
        new, newer = (), ()
        for b in tl.static_range(NB):
            first, second = known[b]
            queries = featured(xs, first, second, factor, query_guess, b, M, MB, PRECISION).to(KIND)
            found = tl.dot(queries, states[b].to(KIND), found, input_precision=PRECISION)
            # The same rounded features as in the mean: what rounding does to both hardly moves their quotient.
            met += tl.sum(queries.to(tl.float32) * counted_in(counts[b])[None, :], 1)
            keys = featured(ys, first, second, key_factor, guess, b, M, MB, PRECISION).to(KIND)
            pairs = tl.dot(queries, tl.trans(keys), pairs, input_precision=PRECISION)
            new = new + (tl.dot(tl.trans(keys), given, states[b] * shrink, input_precision=PRECISION),)
            newer = newer + (tl.dot(tl.trans(keys), counted, counts[b] * shrink, input_precision=PRECISION),)
        states, counts = new, newer
        pairs = tl.where(seen, pairs * tl.exp2(log[None, :] - highest[:, None]), 0.0)
        found = found * earlier[:, None]
        found = tl.dot(pairs.to(KIND), zs.to(KIND), found, input_precision=PRECISION)
        divisor = met * earlier + tl.sum(pairs, 1)
        # Neither nan nor inf is below anything.
        sound = (divisor > _TINY) & (divisor < 1 / _TINY)
        found = found / tl.where(sound, divisor, 1.0)[:, None]
        target = out + (rest + ahead) * E + row[:, None] * E + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=(row < left)[:, None] & (column < E)[None, :])
        told = tl.where(sound, tl.log2(tl.where(sound, divisor, 1.0)) + highest, float("inf"))
        tl.store(lse + rest + ahead + row, told, mask=(row < left) & (block == 0))
    if last and (head % R) == 0:
        to = group
        if PACKED:
            to = tl.load(table + 4 * part + 3).to(tl.int64) * (H // R) + group
        for b in tl.static_range(NB):
            at, inside = state_of(final + to * (M * E), b, column, M, MB, E)
            tl.store(at, states[b], mask=inside)
            at, inside = total_of(final_total + to * M, b, M, MB)
            tl.store(at, counts[b], mask=inside & (block == 0))
        tl.store(final_top + to, top, mask=block == 0)
