r"""Random features inside the scan, forward and backward: no feature is ever written to memory.

A row's features are :math:`e^{ω_f·q_i}`, a key's :math:`e^{ω_f·k_j - \|k_j\|^2/2}`, computed where they are needed. A
row's are relative to a guess at the largest of them, λ‖q‖ with λ that of m Gaussians, which cancels in its mean. Those
of keys are relative to the largest :math:`b_j = λ\|k_j\| - \|k_j\|^2/2` up to the end of their chunk, and so are sums
over them: no future key is felt but in rounding. A mean is lost only where features leave float32 on their own: the
logarithm of its normaliser then says so, and is not finite. Logarithms are those to base 2.

With :math:`A_{ij} = \sum_f φ_{if} φ_{jf} / Z_i` the weight of key j in row i and
:math:`G_{ij} = g_i·v_j - g_i·out_i`, g the gradient of the output,

.. math:: \frac{∂}{∂\log φ_{if}} = \frac{φ_{if}}{Z_i} \sum_{j \le i} G_{ij} φ_{jf}, \quad
          \frac{∂}{∂\log φ_{jf}} = φ_{jf} \sum_{i \ge j} G_{ij} \frac{φ_{if}}{Z_i}, \quad
          \frac{∂}{∂v_j} = \sum_{i \ge j} A_{ij} g_i

The first is a scan over keys and values, the others are one from the end over queries and gradients, whose rows weigh
2^-lse. A program takes one block of features and of columns of values, since a state for more of them has no room in
registers, and adds its share to its rows: `divide_shares` and `add_shares` add these up.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from avow.kernels.tile_ops import (
    LOWEST,
    chunk_of,
    exp2_near,
    filled,
    load_state,
    piece_of,
    rows_at,
    short,
    span,
    store_state,
    store_tile,
    tile,
)

# Normalisers below this, relative to the largest key, may have lost terms that count.
_TINY = tl.constexpr(2.0**-60)
# Factors are those of logarithms to base 2.
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _columns(directions, feature, entry, S: tl.constexpr):
    """A block of directions, as columns."""
    inside = (feature < S.M)[None, :] & (entry < S.D)[:, None]
    return tl.load(directions + feature[None, :] * S.D + entry[:, None], mask=inside, other=0.0)


@triton.jit
def _halved(x, power, SCALED: tl.constexpr, FAST: tl.constexpr):
    """Numbers as float16, times a power of two where that is not one."""
    if FAST and x.dtype == tl.bfloat16 and not SCALED:
        # Two at a time, which Triton's own conversion is not.
        y = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .f32 even, odd;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xFFFF0000;
            mov.b32 even, low;
            mov.b32 odd, high;
            cvt.rn.f16x2.f32 $0, odd, even;
            }
            """,
            "=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif SCALED:
        y = (x.to(tl.float32) * power).to(tl.float16)
    else:
        y = x.to(tl.float16)
    return y


@triton.jit
def _features(x, along, factor, power, below, feature, S: tl.constexpr):
    """A block of features of every row, each row's relative to a logarithm of its own.

    Numbers of eight bits or eleven fit into float16 as they are, or once multiplied by a power of two near the factor.
    """
    if along.dtype == tl.float32:
        log = tl.dot(x, along, input_precision=S.PRECISION) * factor
    else:
        log = tl.dot(_halved(x, power, S.SCALED, S.FAST), along) * (factor / power)
    log = log - below[:, None]
    if S.M % S.MB != 0:
        log = tl.where((feature < S.M)[None, :], log, LOWEST)
    return exp2_near(log, S.FAST)


@triton.jit
def feature_sums(y, z, lengths, lse, slope, along, numbers, added, rows, length, S: tl.constexpr):
    """A piece of a part's sums over keys of features and values, or, in reverse, over rows of features and gradients.

    A row weighs 2^-lse, and counts in the totals with its slope.
    """
    head, piece, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % S.NB, share // S.NB
    pieces = tl.num_programs(1)
    start, many, last = piece_of(piece, pieces, length, rows, S)
    if last:
        return
    y = rows_at(y, head, start, S.y_row, S.H)
    z = rows_at(z, head, start, S.z_row, S.H)
    rest = head.to(tl.int64) * rows + start
    row, entry, feature = tl.arange(0, S.C), tl.arange(0, S.DP), own_features * S.MB + tl.arange(0, S.MB)
    column = block * S.EB + tl.arange(0, S.EB)
    along_own = _columns(along, feature, entry, S)
    factor = numbers.key_factor
    if S.REVERSE:
        factor = numbers.factor
    state = filled(0.0, S.EB, S.MB)
    total = filled(0.0, S.MB)
    top = tl.full((), LOWEST, tl.float32)
    steps = tl.cdiv(many, S.C)
    for step in range(steps):
        chunk = chunk_of(step, steps, not S.REVERSE)
        ahead = tl.cast(chunk, tl.int64) * S.C
        left = many - chunk * S.C
        ys = tile(y + ahead * S.y_row, S.y_row, row, entry, left, S.D, S.DP)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB)
        long = tl.load(lengths + rest + ahead + row, mask=row < left, other=0.0)
        guess = numbers.lift * long
        if S.REVERSE:
            log = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
            below = guess - log
        else:
            below = numbers.half * long * long
            log = guess - below
        higher = tl.maximum(top, tl.max(tl.where(row < left, log, LOWEST), 0))
        finite = tl.where(higher > LOWEST, higher, 0.0)
        shrink = tl.exp2(top - finite)
        top = higher
        # What is not there, and rows that were lost, have no features.
        below = tl.where((row < left) & (log > LOWEST), below + finite, float("inf"))
        keys = short(_features(ys, along_own, factor, numbers.power, below, feature, S), S.KIND, S.FAST)
        counted = keys.to(tl.float32)
        if S.REVERSE:
            counted = counted * tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)[:, None]
        total = total * shrink + tl.sum(counted, 0)
        state = tl.dot(tl.trans(zs).to(S.KIND), keys, state * shrink, input_precision=S.PRECISION)
    place = head.to(tl.int64) * pieces + piece
    store_state(added.sums + place * (S.M * S.E), state, feature[None, :], column[:, None], S.M, S.E)
    tl.store(added.totals + place * S.M + feature, total, mask=(feature < S.M) & (block == 0))
    tl.store(added.tops + place, top, mask=share == 0)


@triton.jit
def feature_rows(
    x, y, z, g, lengths, lse, slope, directions, before, out, normalisers, last, numbers, rows, length, S: tl.constexpr
):
    """What one block of features adds to the rows of one part, relative to the largest b up to their chunk's end.

    Given the gradients g of the rows, it is what the block adds to the gradients of queries.
    """
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % S.NB, share // S.NB
    parts = tl.num_programs(1)
    start, many, final = span(part, parts, length, rows, False)
    group = (head // S.R).to(tl.int64)
    x = rows_at(x, head, start, S.x_row, S.H)
    y = rows_at(y, head, start, S.y_row, S.H, S.R)
    z = rows_at(z, head, start, S.z_row, S.H, S.R)
    if g is not None:
        g = rows_at(g, head, start, S.g_row, S.H)
    rest, shared = head.to(tl.int64) * rows + start, group * rows + start
    row, entry, feature = tl.arange(0, S.C), tl.arange(0, S.DP), own_features * S.MB + tl.arange(0, S.MB)
    column = block * S.EB + tl.arange(0, S.EB)
    place = group * parts + part
    along = _columns(directions.along, feature, entry, S)
    if g is not None:
        back = _columns(directions.back, feature, entry, S)
        mine = (share * tl.num_programs(0)).to(tl.int64) * rows + rest
    else:
        mine = (own_features * tl.num_programs(0)).to(tl.int64) * rows + rest
    state = load_state(before.sums + place * (S.M * S.E), feature[None, :], column[:, None], S.M, S.E)
    total = tl.load(before.totals + place * S.M + feature, mask=feature < S.M, other=0.0)
    top = tl.load(before.tops + place)
    for step in range(tl.cdiv(many, S.C)):
        ahead = tl.cast(step, tl.int64) * S.C
        left = many - step * S.C
        xs = tile(x + ahead * S.x_row, S.x_row, row, entry, left, S.D, S.DP)
        ys = tile(y + ahead * S.y_row, S.y_row, row, entry, left, S.D, S.DP)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB).to(S.KIND)
        if g is not None:
            gs = tile(g + ahead * S.g_row, S.g_row, row, column, left, S.E, S.EB).to(S.KIND)
            weigh = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
            u = tl.load(slope + rest + ahead + row, mask=(row < left) & (block == 0), other=0.0)
        long = tl.load(lengths[1] + shared + ahead + row, mask=row < left, other=0.0)
        guess = numbers.lift * tl.load(lengths[0] + rest + ahead + row, mask=row < left, other=0.0)
        # Sums are relative to the largest b of all keys so far; older ones shrink when it rises.
        fall = numbers.half * long * long
        higher = tl.maximum(top, tl.max(tl.where(row < left, numbers.lift * long - fall, LOWEST), 0))
        shrink = tl.exp2(top - higher)
        below = tl.where(row < left, fall + higher, float("inf"))
        top = higher
        state, total = state * shrink, total * shrink
        if g is None:
            queries = _features(xs, along, numbers.factor, numbers.power, guess, feature, S)
            queries = short(queries, S.KIND, S.FAST)
        keys = short(_features(ys, along, numbers.key_factor, numbers.power, below, feature, S), S.KIND, S.FAST)
        if g is None:
            answer = tl.dot(queries, tl.trans(state.to(S.KIND)), input_precision=S.PRECISION)
            pairs = tl.dot(queries, tl.trans(keys), input_precision=S.PRECISION)
            pairs = tl.where(row[:, None] >= row[None, :], pairs, 0.0)
            # The same rounded features as in the mean: what rounding does to both hardly moves their quotient.
            divisor = tl.sum(queries.to(tl.float32) * total[None, :], 1) + tl.sum(pairs, 1)
            answer = tl.dot(pairs.to(S.KIND), zs, answer, input_precision=S.PRECISION)
            store_tile(out + (mine + ahead) * S.E, S.E, row, column, left, answer, S.E, S.EB)
            tl.store(normalisers + mine + ahead + row, divisor, mask=(row < left) & (block == 0))
            tl.store(lse + rest + ahead + row, top + filled(0.0, S.C), mask=(row < left) & (share == 0))
        else:
            pull = tl.dot(gs, tl.trans(zs), input_precision=S.PRECISION) + u[:, None]
            pull = tl.where(row[:, None] >= row[None, :], pull, 0.0).to(S.KIND)
            slopes = tl.dot(gs, state.to(S.KIND), input_precision=S.PRECISION)
            slopes = tl.dot(pull, keys, slopes, input_precision=S.PRECISION) + u[:, None] * total[None, :]
            # A row's weight, 2^(top - lse), is part of its features; a row that was lost has none.
            slopes *= _features(xs, along, numbers.factor, numbers.power, guess - weigh - top, feature, S)
            answer = tl.dot(slopes.to(back.dtype), tl.trans(back), input_precision=S.PRECISION)
            answer = answer * (numbers.factor * _LN2)
            store_tile(out + (mine + ahead) * S.D, S.D, row, entry, left, answer, S.D, S.DP)
        state = tl.dot(tl.trans(zs), keys, state, input_precision=S.PRECISION)
        total += tl.sum(keys.to(tl.float32), 0)
    if last is not None:
        if final and (head % S.R) == 0:
            store_state(last.sums + group * (S.M * S.E), state, feature[None, :], column[:, None], S.M, S.E)
            tl.store(last.totals + group * S.M + feature, total, mask=(feature < S.M) & (block == 0))
            tl.store(last.tops + group, top, mask=share == 0)


@triton.jit
def feature_key_gradients(
    x, y, z, g, lengths, lse, slope, directions, after, dk, dv, numbers, rows, length, S: tl.constexpr
):
    """What one block of features adds to the gradients of one part's keys and values, as each query head sees them."""
    head, part, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_features, block = share % S.NB, share // S.NB
    parts, heads = tl.num_programs(1), tl.num_programs(0)
    start, many, _last = span(part, parts, length, rows, True)
    x = rows_at(x, head, start, S.x_row, S.H)
    g = rows_at(g, head, start, S.g_row, S.H)
    y = rows_at(y, head, start, S.y_row, S.H, S.R)
    z = rows_at(z, head, start, S.z_row, S.H, S.R)
    rest, shared = head.to(tl.int64) * rows + start, (head // S.R).to(tl.int64) * rows + start
    dk += ((share * heads + head).to(tl.int64) * rows + start) * S.D
    dv += ((own_features * heads + head).to(tl.int64) * rows + start) * S.E
    row, entry, feature = tl.arange(0, S.C), tl.arange(0, S.DP), own_features * S.MB + tl.arange(0, S.MB)
    column = block * S.EB + tl.arange(0, S.EB)
    place = head.to(tl.int64) * parts + part
    along = _columns(directions.along, feature, entry, S)
    back = _columns(directions.back, feature, entry, S)
    state = load_state(after.sums + place * (S.M * S.E), feature[None, :], column[:, None], S.M, S.E)
    # Totals are of slopes, which count once.
    total = tl.load(after.totals + place * S.M + feature, mask=(feature < S.M) & (block == 0), other=0.0)
    top = tl.load(after.tops + place)
    seen = row[:, None] <= row[None, :]
    steps = tl.cdiv(many, S.C)
    for step in range(steps):
        chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * S.C
        left = many - chunk * S.C
        xs = tile(x + ahead * S.x_row, S.x_row, row, entry, left, S.D, S.DP)
        ys = tile(y + ahead * S.y_row, S.y_row, row, entry, left, S.D, S.DP)
        zs = tile(z + ahead * S.z_row, S.z_row, row, column, left, S.E, S.EB).to(S.KIND)
        gs = tile(g + ahead * S.g_row, S.g_row, row, column, left, S.E, S.EB).to(S.KIND)
        weigh = -tl.load(lse + rest + ahead + row, mask=row < left, other=float("inf"))
        u = tl.load(slope + rest + ahead + row, mask=(row < left) & (block == 0), other=0.0)
        long = tl.load(lengths[1] + shared + ahead + row, mask=row < left, other=0.0)
        guess = numbers.lift * tl.load(lengths[0] + rest + ahead + row, mask=row < left, other=0.0)
        higher = tl.maximum(top, tl.max(weigh, 0))
        finite = tl.where(higher > LOWEST, higher, 0.0)
        shrink = tl.exp2(top - finite)
        top = higher
        # What is not there, and rows that were lost, have no features.
        below = tl.where(weigh > LOWEST, guess - weigh + finite, float("inf"))
        state, total = state * shrink, total * shrink
        fall = tl.where(row < left, numbers.half * long * long - finite, float("inf"))
        queries = short(_features(xs, along, numbers.factor, numbers.power, below, feature, S), S.KIND, S.FAST)
        keys = short(_features(ys, along, numbers.key_factor, numbers.power, fall, feature, S), S.KIND, S.FAST)
        pull = tl.dot(zs, tl.trans(gs), input_precision=S.PRECISION) + u[None, :]
        pull = tl.where(seen, pull, 0.0).to(S.KIND)
        slopes = tl.dot(zs, state.to(S.KIND), input_precision=S.PRECISION)
        slopes = tl.dot(pull, queries, slopes, input_precision=S.PRECISION) + total[None, :]
        slopes = slopes * keys.to(tl.float32)
        gradient = tl.dot(slopes.to(back.dtype), tl.trans(back), input_precision=S.PRECISION) * numbers.key_factor
        gradient = (gradient - (2 * numbers.half) * tl.sum(slopes, 1)[:, None] * ys.to(tl.float32)) * _LN2
        store_tile(dk + ahead * S.D, S.D, row, entry, left, gradient, S.D, S.DP)
        pairs = tl.where(seen, tl.dot(keys, tl.trans(queries), input_precision=S.PRECISION), 0.0)
        values = tl.dot(keys, tl.trans(state.to(S.KIND)), input_precision=S.PRECISION)
        values = tl.dot(pairs.to(S.KIND), gs, values, input_precision=S.PRECISION)
        store_tile(dv + ahead * S.E, S.E, row, column, left, values, S.E, S.EB)
        state = tl.dot(tl.trans(gs), queries, state, input_precision=S.PRECISION)
        total += tl.sum(queries.to(tl.float32) * u[:, None], 0)


@triton.jit(do_not_specialize=["count"])
def divide_shares(numerators, normalisers, lse, out, count, S: tl.constexpr):
    """Rows from the shares of all blocks of features; the logarithms of their normalisers replace the tops in `lse`."""
    row, column = tl.program_id(0).to(tl.int64) * S.C + tl.arange(0, S.C), tl.arange(0, S.EB)
    there = (row < count)[:, None] & (column < S.E)[None, :]
    numerator = filled(0.0, S.C, S.EB)
    divisor = filled(0.0, S.C)
    NB: tl.constexpr = S.NB
    for block in tl.static_range(NB):
        one = block * count.to(tl.int64) + row
        numerator += tl.load(numerators + one[:, None] * S.E + column[None, :], mask=there, other=0.0).to(tl.float32)
        divisor += tl.load(normalisers + one, mask=row < count, other=1.0)
    # Neither nan nor inf is below anything.
    sound = (divisor > _TINY) & (divisor < 1 / _TINY)
    divisor = tl.where(sound, divisor, 1.0)
    tl.store(
        out + row[:, None] * S.E + column[None, :], (numerator / divisor[:, None]).to(out.dtype.element_ty), mask=there
    )
    highest = tl.load(lse + row, mask=row < count, other=0.0)
    tl.store(lse + row, tl.where(sound, tl.log2(divisor) + highest, float("inf")), mask=row < count)


@triton.jit(do_not_specialize=["rows"])
def add_shares(shares, out, rows, WIDTH: tl.constexpr, NB: tl.constexpr, MANY: tl.constexpr):
    """Numbers from the shares of all programs that made some; loads are as wide as the width of rows allows."""
    count = rows.to(tl.int64) * WIDTH
    start = tl.program_id(0).to(tl.int64) * MANY
    place, left = tl.arange(0, MANY), count - start
    total = tl.zeros((MANY,), tl.float32)
    for block in tl.static_range(NB):
        own = shares + (block * count + start) + place
        total += tl.load(own, mask=place < left, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + start + place, total.to(out.dtype.element_ty), mask=place < left)


@triton.jit
def row_lengths(x, out, rows, S: tl.constexpr):
    """How long every row is."""
    head = tl.program_id(0)
    start = tl.program_id(1).to(tl.int64) * S.C
    row, entry, left = tl.arange(0, S.C), tl.arange(0, S.DP), rows - start
    x = rows_at(x, head, start, S.x_row, S.H)
    xs = tile(x, S.x_row, row, entry, left, S.D, S.DP).to(tl.float32)
    tl.store(out + head.to(tl.int64) * rows + start + row, tl.sqrt(tl.sum(xs * xs, 1)), mask=row < left)
