r"""One decoding step in compiled code: prepare, look at the sketch, choose, read and merge.

Logits are in bits: base-2 logarithms of weights. The tokens of a key head are taken in chunks of 32 groups, each of
which is the work of one thread at a time; what chunks yield is merged in their order, so answers do not depend on how
many threads there are. The constants of `_prepare` and the bound of `_merge` are proved in `avow.decode.cpu`.

The rows of a key head are the queries that share it: of each of its query heads, those of the last tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from avow.decode import vector_loops
from avow.decode.vector_loops import (
    LANES,
    bits_of,
    code_products,
    column_products,
    current,
    float_of,
    pointer,
    row_products,
    row_sums,
    take_next,
)

GROUP = 64
CHUNK_GROUPS = 32
CHUNK = CHUNK_GROUPS * GROUP
# Tokens whose weighted values are summed in float32 before float64 goes on.
TILE = 64
# A chunk's tokens with the open group, a block that fills up and what is asked for ahead.
_ROOM = CHUNK + 3 * GROUP
# From so many rows on, keys are turned into columns for their products.
_MANY_ROWS = 12
ATTEMPTS = 4
"""A first cut, two that were found to be needed, and all tokens."""
# Bins of an eighth of an octave, and the first that may be cut behind: the token of the largest bound is before it.
BINS, _FIRST = 512, 28
_ONE = 0x3F800000
# The size of the sample of a head's tokens that tells where to cut.
SAMPLE = 2048
# If more than this share of a head's tokens would be read, all are, without a look for up to so many steps.
MOST_SHARE, LONGEST_PAUSE = 0.7, 64
# If less than this share would be, half as much is left.
_FEW = 0.05
# Beyond these no float32 can follow: such groups are always read, such queries answered elsewhere.
MOST_LOGIT, MOST_REACH, MOST_QUERY = 2.0**13, 2.0**40, 2.0**20
# Weights of tokens that are always read; smaller ones than 2^-126 are taken for it.
_ALWAYS, _LEAST = 100.0, -126.0
# What rounding may add to sums of weights: of the difference from the origin, exp2, products and sums of 96 terms.
GROWN = 1 + 2.0**-12
# What of float32's rounding is allowed, of what may be left unread; the smallest normal number; rounding of float64.
MOST_ROUNDING, _TINY, _OUTWARD = 0.1, 2.0**-126, 1 + 1e-9
# What is too small for float32 on the way to the bounds.
_FLOOR = 2.0**-40
# The share of what may be left unread that is aimed at; how many times rows divide what others did not use; and the
# least ratio of an answer's length to the longest value that is assumed.
AIM, _TURNS, _LEAST_NU = 0.75, 4, 0.1
UNFIT_RANGE, UNFIT_ROUNDING, UNFIT_SUMS = 1, 2, 3
# Bytes of the counters of a stage: what is to be taken next, how much was done, and of `_merge`, how many are late.
PHASE, PHASES = 24, 2 + 3 * ATTEMPTS

# Arrays are addresses; H heads of keys, R rows of each, N queries of a query head, C chunks of a head.
_SIZES = (
    "heads siblings queries dim value_dim tokens window groups chunks token_type room group_room width whole attempt "
    "status"
)
_TOKENS = "q sinks keys values norms codes scale zero radius reach metric size longest_key longest unit"
_SPACE = "learnt sketch_q key_q upper constants bins chunk_sums partials out reports flags counter"
FRAME = np.dtype(
    [(name, np.int64) for name in f"{_SIZES} {_TOKENS} {_SPACE}".split()]
    + [(name, np.float64) for name in ("factor", "drop")]
    # Compiled code is looked up by its signature and this file alone: other loops make another signature.
    + [(f"loops_{zlib.crc32(Path(vector_loops.__file__).read_bytes())}", np.int64)]
)
"""What a step works on. There is room for `room` tokens and `group_room` groups in the arrays of a head. The queries
are those of the last tokens: each sees the last `window` tokens up to its own. If `whole`, all are read.

Float64 `sinks` are (H, siblings), in bits; `longest` and `unit` (H, N), of what a query sees. Of the space, float64
`learnt` is (H, siblings + 2), `constants` (H, R, CONSTANTS), `bins` (H, R, BINS), `chunk_sums` (H, C, R, 2), `partials`
(ATTEMPTS, H, C, R, SUMS + e), `out` (H, R, e), `reports` (H, R, REPORT); float32 `sketch_q` and `key_q` (H, R, d),
`upper` (H, R, groups·64); int64 `flags` (H, 2), `counter` (PHASES, 3).
"""
AT = {name: place for place, name in enumerate(FRAME.names or ())}
"""Where the fields are, in words of eight bytes."""
# Constants of a query: its length beside sketched keys, the slope of radii, what grows with a group's reach; how far
# float32 may move logarithms of weights (in nats) and the answer (in the unit); the origin, ν beside the longest value,
# what may be left, by itself and beside siblings, and the limits of keys now and before.
_LENGTH, _SLOPE, _TILT, _STRAY, _ROUNDING, _ORIGIN, _NU, _OWN, _BUDGET, _LIMIT, _BEFORE, CONSTANTS = range(12)
# Of a chunk: the largest logit, the sum of weights, what unread tokens may weigh and move, tokens read; sums of values.
_TOP, _TOTAL, _LEFT, _MOVED, _COUNT, SUMS = range(6)
# Of an answer: how far it may be off in the unit, and how many of the tokens that it sees were read.
OFF, COUNT, REPORT = range(3)
# Of a head: whether all tokens are read, and whether it still has to be answered.
WHOLE, _ACTIVE, FLAGS = range(3)


def _stage(function: Callable[..., Any]) -> Any:
    """Compiled code, from a file where an earlier process left it, unless there is no place for files."""
    signature = types.void(types.CPointer(from_dtype(FRAME)))
    try:
        return cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return cfunc(signature, error_model="numpy")(function)


# Errors cannot leave compiled code: a division by zero yields inf or nan, memory is asked for before work is taken.
_inner = njit(error_model="numpy")


@_inner
def _floats(address, shape):
    return carray(pointer(address), shape, np.float32)


@_inner
def _doubles(address, shape):
    return carray(pointer(address), shape, np.float64)


@_inner
def _longs(address, shape):
    return carray(pointer(address), shape, np.int64)


@_inner
def _words(address, shape):
    return carray(pointer(address), shape, np.uint16)


@_inner
def _brain(word):
    """The number that 16 bits are in bfloat16."""
    return float_of(np.int32(word) << np.int32(16))


@_inner
def _gamma(terms):
    """γ of float32."""
    u = terms * 2.0**-24
    return u / (1 - u)


@_inner
def power_of_two(x):
    """2^x for x up to 120, right to a part of 2^-20, and exactly 1 for 0; no less than 2^-126; nan for nan.

    x is a whole number and a rest f of at most a half: Σ (f·ln 2)^i/i! up to the sixth power is off by 1.3e-7, and
    float32 rounds each step by less than that.
    """
    x = np.float32(_LEAST) if x < _LEAST else x  # nan stays
    whole = (x + np.float32(12582912.0)) - np.float32(12582912.0)  # 1.5·2^23: rounds to whole numbers
    f = x - whole
    y = np.float32(1.5403530e-4)
    y = y * f + np.float32(1.3333558e-3)
    y = y * f + np.float32(9.6181291e-3)
    y = y * f + np.float32(5.5504109e-2)
    y = y * f + np.float32(2.4022651e-1)
    y = y * f + np.float32(6.9314718e-1)
    y = y * f + np.float32(1.0)
    return y * float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@_inner
def _seen(f, row):
    """The first token that a row sees, and the one after its own."""
    end = f.tokens - (f.queries - 1 - row % f.queries)
    return max(end - f.window, 0), end


@_inner
def _prepare(f, counter):
    """Constants of every query; `status` says why float32 does not serve. Heads on a pause are read whole."""
    if take_next(counter) > 0:
        return
    heads, siblings, queries, dim = f.heads, f.siblings, f.queries, f.dim
    rows = siblings * queries
    shape = (heads, rows, dim)
    q, sketch_q, key_q = _floats(f.q, shape), _floats(f.sketch_q, shape), _floats(f.key_q, shape)
    metric, size = _floats(f.metric, (heads, dim)), _doubles(f.size, heads)
    longest_key, sinks = _doubles(f.longest_key, heads), _doubles(f.sinks, (heads, siblings))
    longest, unit = _doubles(f.longest, (heads, queries)), _doubles(f.unit, (heads, queries))
    constants = _doubles(f.constants, (heads, rows, CONSTANTS))
    learnt, flags = _doubles(f.learnt, (heads, siblings + 2)), _longs(f.flags, (heads, FLAGS))
    f.status = 0
    for head in range(heads):
        flags[head, _ACTIVE] = 1
        flags[head, WHOLE] = f.whole or learnt[head, siblings + 1] > 0
        learnt[head, siblings + 1] = max(learnt[head, siblings + 1] - 1, 0)
        for row in range(rows):
            most, own = longest[head, row % queries], unit[head, row % queries]
            lost = 4 * f.tokens * math.sqrt(f.value_dim) * _TINY * (1 + 1 / own)
            squares, weighted = 0.0, 0.0
            for c in range(dim):
                x = q[head, row, c] * f.factor
                squares += x * x
                key_q[head, row, c] = x
                x *= size[head]
                weighted += x * x * metric[head, c]
                sketch_q[head, row, c] = x
            length = math.sqrt(squares) * _OUTWARD
            reach = length * longest_key[head] + 2.0**-60
            stray = math.log(2) * reach * (_gamma(dim // 16 + 24) + 2.0**-22) + 2.0**-19
            rounding = 2 * math.tanh(stray / 2) + 2.02 * _gamma(TILE + 8)
            rounding = rounding * (most / own) * _OUTWARD + lost
            sink = sinks[head, row // queries]
            # nan compares false with everything.
            held = reach <= MOST_LOGIT and (abs(sink) <= MOST_LOGIT or sink == -np.inf)
            if not (held and length * size[head] <= MOST_QUERY):
                f.status = UNFIT_RANGE
            elif not (rounding <= MOST_ROUNDING * f.drop):
                f.status = UNFIT_ROUNDING
            x = constants[head, row]
            x[_LENGTH] = length * size[head] + 2.0**-60
            x[_SLOPE] = math.sqrt(weighted) * (1 + 2.0**-20) + 2.0**-60
            x[_TILT] = x[_LENGTH] * (_gamma(dim + 24) + 2.0**-20)
            x[_STRAY], x[_ROUNDING] = stray, rounding
    take_next(counter + 8)


@_inner
def _look(f, counter):
    """An upper bound on the logit of every sketched token, and about what those of each chunk weigh."""
    heads, rows, dim, width = f.heads, f.siblings * f.queries, f.dim, f.width
    constants = _doubles(f.constants, (heads, rows, CONSTANTS))
    flags = _longs(f.flags, (heads, FLAGS))
    upper = _floats(f.upper, (heads, rows, f.groups, GROUP))
    chunk_sums = _doubles(f.chunk_sums, (heads, f.chunks, rows, 2))
    scale = _words(f.scale, (heads, f.group_room, dim))
    radius, reach = _words(f.radius, (heads, f.group_room, GROUP)), _floats(f.reach, (heads, f.group_room))
    places, starts = np.zeros(2 * CHUNK_GROUPS, np.int32), np.empty((rows, CHUNK_GROUPS), np.float32)
    scaled, products = np.zeros((rows, 2 * width), np.float32), np.empty((rows, GROUP), np.float32)
    around, lanes = np.empty((CHUNK_GROUPS, GROUP), np.float32), np.empty(GROUP, np.float32)
    steps, sane = np.empty(dim, np.float32), np.empty(CHUNK_GROUPS, np.bool_)
    (_, first_end), (last_begin, _) = _seen(f, 0), _seen(f, rows - 1)
    while True:
        item = take_next(counter)
        if item >= heads * f.chunks:
            break
        head, chunk = item // f.chunks, item % f.chunks
        if flags[head, WHOLE]:
            take_next(counter + 8)
            continue
        first = chunk * CHUNK_GROUPS
        count = min(CHUNK_GROUPS, f.groups - first)
        for c in range(count):
            places[c] = first + c
        zero, q = f.zero + head * f.group_room * dim * 2, f.sketch_q + head * rows * dim * 4
        row_products(rows, 1, q, zero, places.ctypes.data, count, dim, starts.ctypes.data, CHUNK_GROUPS)
        sketch_q = _floats(q, (rows, dim))
        for c in range(count):
            group = first + c
            far = reach[head, group]
            for t in range(GROUP):
                around[c, t] = _brain(radius[head, group, t])
            sane[c] = far <= MOST_REACH
            for i in range(dim):
                steps[i] = _brain(scale[head, group, i])
            for row in range(rows):
                sane[c] = sane[c] and constants[head, row, _LENGTH] * far <= MOST_LOGIT
                for i in range(dim):
                    scaled[row, i] = sketch_q[row, i] * steps[i]
            if not sane[c]:
                upper[head, :, group] = np.inf
                continue
            codes = f.codes + (head * f.group_room + group) * width * GROUP
            code_products(rows, codes, width, scaled.ctypes.data, products.ctypes.data)
            for row in range(rows):
                start = np.float32(starts[row, c] + (constants[head, row, _TILT] * far + _FLOOR))
                slope = np.float32(constants[head, row, _SLOPE])
                mine = upper[head, row, group]
                for t in range(GROUP):
                    mine[t] = (products[row, t] + start) + slope * around[c, t]
            if group * GROUP < last_begin or first_end < group * GROUP + GROUP:  # not all rows see all of it
                for row in range(rows):
                    begin, end = _seen(f, row)
                    upper[head, row, group, : max(min(begin - group * GROUP, GROUP), 0)] = -np.inf
                    upper[head, row, group, max(min(end - group * GROUP, GROUP), 0) :] = -np.inf
        for row in range(rows):
            mine = upper[head, row, first : first + count]
            lanes[:] = -np.inf
            for c in range(count):
                if sane[c]:
                    for t in range(GROUP):
                        lanes[t] = max(lanes[t], mine[c, t])
            top = np.float32(-np.inf)
            for t in range(GROUP):
                top = max(top, lanes[t])
            lanes[:] = 0
            slope, total = np.float32(constants[head, row, _SLOPE]), 0.0
            for c in range(count):
                if sane[c]:
                    for t in range(GROUP):
                        lanes[t] += power_of_two((mine[c, t] - slope * around[c, t]) - top)
            for t in range(GROUP):
                total += lanes[t]
            chunk_sums[head, chunk, row, 0] = top
            chunk_sums[head, chunk, row, 1] = total
        take_next(counter + 8)


@_inner
def _every(groups):
    """The stride of the sample of tokens: a power of two."""
    step = 1
    while groups * GROUP > SAMPLE * step:
        step *= 2
    return step


@_inner
def _longest(f, head, row):
    """An upper bound on the length of the longest value that a row sees."""
    return _doubles(f.longest, (f.heads, f.queries))[head, row % f.queries]


@_inner
def _sample(f, head, row, keys, near):
    """The keys of every few tokens, relative to the largest that can be; what each bin of all tokens holds about."""
    count, step, rows = f.groups * GROUP, _every(f.groups), f.siblings * f.queries
    upper = _floats(f.upper, (f.heads, rows, count))[head, row]
    lengths, longest = _floats(f.norms, (f.heads, f.room))[head], _longest(f, head, row)
    x = _doubles(f.constants, (f.heads, rows, CONSTANTS))[head, row]
    bins = _doubles(f.bins, (f.heads, rows, BINS))[head, row]
    origin, nu = np.float32(x[_ORIGIN]), np.float32(x[_NU] * longest)
    over = np.float32(1 / ((1 + x[_NU]) * longest))
    some = count // step
    for i in range(some):
        at = i * step + ((i * 5) & (step - 1))  # neighbours are alike: another place of each stretch
        keys[i], near[i] = upper[at], lengths[at]
    for i in range(some):
        keys[i] = power_of_two(min(keys[i] - origin, np.float32(_ALWAYS))) * ((near[i] + nu) * over)
    bins[:] = 0
    for i in range(some):
        bins[min(max((_ONE - bits_of(keys[i])) >> 20, 0), BINS - 1)] += keys[i] * step
    return some


@_inner
def _limit(bins, budget):
    """The key below which about a budget is left, 0 if it is less than that in any case."""
    left, place = 0.0, BINS
    while place > _FIRST and left + bins[place - 1] <= budget:
        place -= 1
        left += bins[place]
    return np.float32(float_of(np.int32(_ONE - (place << 20)))) if place < BINS else np.float32(0.0)


@_inner
def _choose(f, counter, attempt):
    """From which key on each row's tokens are read: keys are bounds on weights times (length + ν).

    No bound rests on it. What is left behind a limit is known for every few tokens; as all rows read what any of them
    wants, each may leave more than its own budget.
    """
    heads, siblings, queries = f.heads, f.siblings, f.queries
    rows = siblings * queries
    constants, bins = _doubles(f.constants, (heads, rows, CONSTANTS)), _doubles(f.bins, (heads, rows, BINS))
    flags, learnt = _longs(f.flags, (heads, FLAGS)), _doubles(f.learnt, (heads, siblings + 2))
    sinks, unit = _doubles(f.sinks, (heads, siblings)), _doubles(f.unit, (heads, queries))
    chunk_sums = _doubles(f.chunk_sums, (heads, f.chunks, rows, 2))
    keys, limits = np.empty((rows, SAMPLE), np.float32), np.empty(rows, np.float32)
    wanted, lanes, near = np.empty(SAMPLE, np.bool_), np.empty(GROUP, np.float32), np.empty(SAMPLE, np.float32)
    while True:
        head = take_next(counter)
        if head >= heads:
            break
        if flags[head, WHOLE] or not flags[head, _ACTIVE]:
            take_next(counter + 8)
            continue
        whole, count = attempt + 1 == ATTEMPTS, 0
        if attempt > 0:
            for row in range(rows):
                limits[row] = _limit(bins[head, row], constants[head, row, _BUDGET])
        else:
            for row in range(rows):
                x, top, total = constants[head, row], -np.inf, 0.0
                for chunk in range(f.chunks):
                    top = max(top, chunk_sums[head, chunk, row, 0])
                for chunk in range(f.chunks):
                    if chunk_sums[head, chunk, row, 0] > -np.inf:
                        total += chunk_sums[head, chunk, row, 1] * 2.0 ** (chunk_sums[head, chunk, row, 0] - top)
                x[_ORIGIN], x[_LIMIT] = top if top > -np.inf else 0.0, np.inf
                total += 2.0 ** min(sinks[head, row // queries] - x[_ORIGIN], _ALWAYS)
                x[_NU] = min(max(learnt[head, row // queries], _LEAST_NU), 1.0)
                x[_BUDGET] = AIM * (f.drop - x[_ROUNDING]) * unit[head, row % queries] * total
                x[_BUDGET] /= (1 + x[_NU]) * _longest(f, head, row)
                x[_OWN] = x[_BUDGET]
                count = _sample(f, head, row, keys[row], near)
            for turn in range(_TURNS):
                wanted[:] = False
                for row in range(rows):
                    limits[row] = _limit(bins[head, row], constants[head, row, _BUDGET])
                    for i in range(count):
                        wanted[i] |= keys[row, i] >= limits[row]
                if turn + 1 == _TURNS or rows == 1:
                    break
                for row in range(rows):
                    x, left = constants[head, row], 0.0
                    lanes[:] = 0
                    for block in range(count // GROUP):
                        own, known = keys[row, block * GROUP :], wanted[block * GROUP :]
                        for t in range(GROUP):
                            lanes[t] += np.float32(0.0) if known[t] else own[t]
                    for t in range(GROUP):
                        left += lanes[t]
                    x[_BUDGET] *= min(max(x[_OWN] / (left * _every(f.groups) + 1e-300), 0.5), 2.0)
            share = 0
            for i in range(count):
                share += wanted[i]
            whole = share > MOST_SHARE * count
            if share < _FEW * count:
                # Their sum rests on few tokens, of which a sketch knows little: some more cost less than a second cut.
                for row in range(rows):
                    constants[head, row, _BUDGET] *= 0.5
                    limits[row] = _limit(bins[head, row], constants[head, row, _BUDGET])
            learnt[head, siblings] = min(max(1.0, 2 * learnt[head, siblings]), LONGEST_PAUSE) if whole else 0.0
            learnt[head, siblings + 1] = learnt[head, siblings]
        flags[head, WHOLE] = whole
        for row in range(rows):
            x = constants[head, row]
            x[_BEFORE] = x[_LIMIT]
            x[_LIMIT] = 0.0 if whole else limits[row] * ((1 + x[_NU]) * _longest(f, head, row))
        take_next(counter + 8)


@_inner
def _wanted(f, attempt, head, chunk, places, weights, wanted, sums):
    """The tokens of a chunk that are read now, and into `sums` what those that are not may weigh and move."""
    rows, first = f.siblings * f.queries, chunk * CHUNK_GROUPS
    last, hidden = min(first + CHUNK_GROUPS, f.groups), _seen(f, 0)[0]
    flags, count = _longs(f.flags, (f.heads, FLAGS)), 0
    sums[:] = 0
    if flags[head, WHOLE] and attempt == 0:
        for place in range(max(first * GROUP, hidden), last * GROUP):
            places[count] = place
            count += 1
        return count
    constants = _doubles(f.constants, (f.heads, rows, CONSTANTS))
    upper = _floats(f.upper, (f.heads, rows, f.groups, GROUP))
    lengths = _floats(f.norms, (f.heads, f.room))
    for group in range(first, last):
        near = lengths[head, group * GROUP : group * GROUP + GROUP]
        wanted[:] = 0
        for row in range(rows):
            x, mine, own = constants[head, row], upper[head, row, group], weights[row]
            origin, limit, before = np.float32(x[_ORIGIN]), np.float32(x[_LIMIT]), np.float32(x[_BEFORE])
            nu = np.float32(x[_NU] * _longest(f, head, row))
            for t in range(GROUP):
                own[t] = power_of_two(min(mine[t] - origin, np.float32(_ALWAYS)))
                key = own[t] * (near[t] + nu)
                # One that was wanted before counts twice as much as all others together.
                wanted[t] |= (0 if key < limit else 1) | (0 if key < before else 2)
        if group == 0:
            wanted[:hidden] = 2
        for row in range(rows):
            own, left, moved = weights[row], sums[0, row], sums[1, row]
            for t in range(GROUP):
                weight = own[t] if wanted[t] == 0 else np.float32(0.0)
                left[t] += weight
                moved[t] += weight * near[t]
        for t in range(GROUP):
            places[count] = group * GROUP + t
            count += wanted[t] == 1
    return count


@_inner
def _read(f, counter, attempt):
    """Weights and weighted values of the tokens that are read now, chunk by chunk; the open group always is."""
    heads, rows, dim, wide = f.heads, f.siblings * f.queries, f.dim, f.value_dim
    flags, size = _longs(f.flags, (heads, FLAGS)), 4 if f.token_type == 0 else 2
    partials = _doubles(f.partials, (ATTEMPTS, heads, f.chunks, rows, SUMS + wide))
    places, wanted = np.zeros(_ROOM, np.int32), np.empty(GROUP, np.int32)
    weights, logits = np.empty((rows, GROUP), np.float32), np.empty((rows, _ROOM // GROUP, GROUP), np.float32)
    sums, lanes = np.empty((2, rows, GROUP), np.float32), np.empty(GROUP, np.float32)
    tile, hidden = np.empty((rows, wide), np.float32), _seen(f, 0)[0]
    columns = np.empty((dim, LANES), np.float32)
    while True:
        item = take_next(counter)
        if item >= heads * f.chunks:
            break
        head, chunk = item // f.chunks, item % f.chunks
        if not flags[head, _ACTIVE]:
            take_next(counter + 8)
            continue
        count = _wanted(f, attempt, head, chunk, places, weights, wanted, sums)
        if chunk + 1 == f.chunks and attempt == 0:
            for place in range(max(f.groups * GROUP, hidden), f.tokens):
                places[count] = place
                count += 1
        mine = partials[attempt, head, chunk]
        mine[:] = 0
        mine[:, _TOP] = -np.inf
        for row in range(rows):
            for t in range(GROUP):
                mine[row, _LEFT] += sums[0, row, t]
                mine[row, _MOVED] += sums[1, row, t]
        if count == 0:
            take_next(counter + 8)
            continue
        q, keys = f.key_q + head * rows * dim * 4, f.keys + head * f.room * dim * size
        values, where = f.values + head * f.room * wide * size, places.ctypes.data
        if rows < _MANY_ROWS:
            row_products(rows, f.token_type, q, keys, where, count, dim, logits.ctypes.data, _ROOM)
        else:
            space = columns.ctypes.data
            column_products(rows, f.token_type, q, keys, where, count, dim, space, logits.ctypes.data, _ROOM)
        blocks = -(-count // GROUP)
        for row in range(rows):
            begin, end = _seen(f, row)
            low, high = 0, count
            while low < count and places[low] < begin:
                low += 1
            while high > low and places[high - 1] >= end:
                high -= 1
            mine[row, _COUNT] = high - low
            flat = logits[row].reshape(_ROOM)
            if low == high:
                flat[:count] = 0
                continue
            flat[:low] = -np.inf
            flat[high : blocks * GROUP] = -np.inf
            # By blocks: an index that is a sum might be negative for all that a compiler knows, and is not vectorised.
            lanes[:] = -np.inf
            for block in range(blocks):
                own = logits[row, block]
                for t in range(GROUP):
                    lanes[t] = max(lanes[t], own[t])
            top = lanes[0]
            for t in range(GROUP):
                top = max(top, lanes[t])
            lanes[:] = 0
            for block in range(blocks):
                own = logits[row, block]
                for t in range(GROUP):
                    own[t] = power_of_two(own[t] - top)
                for t in range(GROUP):
                    lanes[t] += own[t]
            # Not the least power: a value that the row does not see may be longer than all that it sees.
            flat[:low] = 0
            flat[high:count] = 0
            mine[row, _TOP] = top
            for t in range(GROUP):
                mine[row, _TOTAL] += lanes[t]
        for first in range(0, count, TILE):
            some = min(TILE, count - first)
            shares = logits.ctypes.data + first * 4
            row_sums(rows, f.token_type, shares, _ROOM, values, where + first * 4, some, wide, tile.ctypes.data)
            for row in range(rows):
                for c in range(wide):
                    mine[row, SUMS + c] += tile[row, c]
        take_next(counter + 8)


@_inner
def _merge(f, counter, attempt):
    """Answers and their bounds. Queries that are not within `drop` are to be asked again, with less left unread."""
    if take_next(counter) > 0:
        return
    heads, siblings, queries, wide = f.heads, f.siblings, f.queries, f.value_dim
    rows = siblings * queries
    constants, flags = _doubles(f.constants, (heads, rows, CONSTANTS)), _longs(f.flags, (heads, FLAGS))
    partials = _doubles(f.partials, (ATTEMPTS, heads, f.chunks, rows, SUMS + wide))
    sinks, unit = _doubles(f.sinks, (heads, siblings)), _doubles(f.unit, (heads, queries))
    out, reports = _doubles(f.out, (heads, rows, wide)), _doubles(f.reports, (heads, rows, REPORT))
    learnt = _doubles(f.learnt, (heads, siblings + 2))
    lost = f.tokens * 2.0**-120
    f.attempt, late = attempt, _longs(counter + 16, 1)
    for head in range(heads):
        if not flags[head, _ACTIVE]:
            continue
        flags[head, _ACTIVE] = 0
        learnt[head, :siblings] = 0
        for row in range(rows):
            x, answer, sink = constants[head, row], out[head, row], sinks[head, row // queries]
            longest, own = _longest(f, head, row), unit[head, row % queries]
            top, total, left, moved, count = sink, 0.0, 0.0, 0.0, 0.0
            answer[:] = 0
            for each in range(attempt + 1):
                for chunk in range(f.chunks):
                    top = max(top, partials[each, head, chunk, row, _TOP])
            for each in range(attempt + 1):
                left, moved = 0.0, 0.0  # what the last attempt leaves
                for chunk in range(f.chunks):
                    mine = partials[each, head, chunk, row]
                    left += mine[_LEFT]
                    moved += mine[_MOVED]
                    count += mine[_COUNT]
                    if mine[_COUNT] > 0:
                        share = 2.0 ** (mine[_TOP] - top)
                        total += share * mine[_TOTAL]
                        for c in range(wide):
                            answer[c] += share * mine[SUMS + c]
            if sink > -np.inf:
                total += 2.0 ** (sink - top)
            squares = 0.0
            for c in range(wide):
                answer[c] /= total
                squares += answer[c] * answer[c]
            length = math.sqrt(squares) * _OUTWARD
            # nan compares false with everything.
            off = x[_ROUNDING] if total > 0 and length < np.inf else np.inf
            if not flags[head, WHOLE]:
                tail = moved + lost * (1 + longest) + (length + x[_ROUNDING] * longest) * (left + lost)
                tail *= GROWN * 2.0 ** (x[_ORIGIN] - top) * math.exp(2 * x[_STRAY]) * _OUTWARD
                tail /= total * own
                room = (f.drop - x[_ROUNDING]) / tail
                off += tail
                x[_BUDGET] *= min(AIM * room, 1.0) if room > 0 else 0.0
            if not off <= f.drop:
                late[0] += 1
                flags[head, _ACTIVE] = 1
            nu = length / longest if off <= f.drop else 0.5
            learnt[head, row // queries] = max(learnt[head, row // queries], nu)
            reports[head, row, OFF], reports[head, row, COUNT] = off, count
    take_next(counter + 8)


@_inner
def _wait(counter, pieces):
    """Waits until a number of pieces are done: each was taken by a thread that will finish it."""
    while current(counter + 8) < pieces:
        pass


@_stage
def step(frame):
    """A whole step, by every thread that calls it: each takes what no other has taken, and waits for these at the end
    of a stage. One that comes late finds less to do.
    """
    f = carray(frame, 1)[0]
    counter, pieces = f.counter, f.heads * f.chunks
    _prepare(f, counter)
    _wait(counter, 1)
    if f.status != 0:
        return
    _look(f, counter + PHASE)
    _wait(counter + PHASE, pieces)
    for attempt in range(ATTEMPTS):
        counter = f.counter + (2 + 3 * attempt) * PHASE
        _choose(f, counter, attempt)
        _wait(counter, f.heads)
        _read(f, counter + PHASE, attempt)
        _wait(counter + PHASE, pieces)
        _merge(f, counter + 2 * PHASE, attempt)
        _wait(counter + 2 * PHASE, 1)
        if current(counter + 2 * PHASE + 16) == 0:
            return
    f.status = UNFIT_SUMS
