r"""The scan behind every causal linear attention: two readings of keys and values, one of queries, no state per chunk.

.. math:: out_i = \sum_{j \le i} (x_i \cdot y_j + α_i β_j)\, z_j

A sequence is cut into a few long parts, just enough to fill the device. A first kernel adds up each part's
:math:`\sum_j y_j z_j^T`; a second turns them into what lies before each part; a third walks through every part chunk by
chunk with the state in its registers. No number is added by whoever comes first: every run gives the same bits.
The first kernel walks each part away from where the third begins, which therefore finds that end still in the cache.

`MODE` says what α and β are: gradients of a normalised mean are scans, too, with weights w = 1 / normaliser and slopes
u = −(gradient · mean), the derivatives by the normalisers over w.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int, Int32
from torch import Tensor

# Only x·y; divide by Σ_j x·y; α = u, β = 1, rows weighted at the end; z is weighted, α = 1, β = u; z is weighted.
PLAIN, NORMALISED, ROWS, COLUMNS, VALUES = 0, 1, 2, 3, 4
_NORMALISED, _ROWS, _COLUMNS, _VALUES = (tl.constexpr(mode) for mode in (NORMALISED, ROWS, COLUMNS, VALUES))
# Normalisers below this belong to rows that see nothing.
_TINY = tl.constexpr(2.0**-126)
# Processors of an H200.
_PROCESSORS = 132
# Rows that parts are multiples of, and so every chunk divides.
_WHOLE = 128
# Products of float32 as three of TF32: within a few units of float32, at tensor cores' speed.
PRECISION = "tf32x3"


class Cut(NamedTuple):
    """A sequence in parts of `length` rows; packed sequences have a table of their parts, and ends in it."""

    parts: int
    length: int
    table: Int32[Tensor, "parts 4"] | None = None
    """The first row of each part, the row after its last, 1 or 2 where a sequence begins or ends, and which it is."""
    ends: Int32[Tensor, "sequences+1"] | None = None
    """Where each sequence's parts begin in the table."""


class Config(NamedTuple):
    """How a scan is laid out: rows of a chunk, columns of values per program, warps, loads under way, and how many
    programs a processor holds at once."""

    chunk: int
    columns: int
    warps: int
    stages: int
    resident: int


def config(m: int, e: int, itemsize: int, alone: bool = False) -> Config:
    """The layout for keys of m numbers and values of e: the largest state that stays in registers.

    A scan `alone`, with nothing beside x·y, has room for chunks of 128 rows, which eight warps share without repeating
    each other's work.
    """
    m, e = padded(m), padded(e)
    if itemsize == 4:
        if m > 128:
            return Config(16, min(e, 16), 8, 1, 1)
        return Config(64, min(e, 32), 4, 2, 2) if m <= 64 else Config(32, min(e, 32), 8, 2, 1)
    columns = min(e, 128, 16384 // m)
    if max(m, columns) <= 64:
        return Config(64, columns, 4, 4, 2)
    if alone and m <= 128:
        return Config(128, columns, 8, 2, 1)
    return Config(64 if m <= 256 else 32, columns, 8, 3 if m <= 128 else 2, 1)


def padded(width: int) -> int:
    """The next width that a tile can have."""
    return max(16, triton.next_power_of_2(width))


def cut(rows: int, heads: int, m: int, e: int, itemsize: int) -> Cut:
    """Parts of one sequence that fill the device once, of whole chunks."""
    chosen = config(m, e, itemsize)
    return cut_for(rows, heads * triton.cdiv(e, chosen.columns), chosen.resident)


def cut_for(rows: int, programs: int, resident: int) -> Cut:
    """Parts that so many programs work on at once, where each processor holds `resident` of them."""
    parts = max(1, min(_PROCESSORS * resident // max(programs, 1), triton.cdiv(rows, 2 * _WHOLE)))
    length = max(1, triton.cdiv(triton.cdiv(rows, parts), _WHOLE)) * _WHOLE
    return Cut(max(1, triton.cdiv(rows, length)), length)


def cut_packed(whole: Cut, starts: Int[Tensor, "sequences+1"], rows: int) -> Cut:
    """Packed sequences in parts as long as those of `whole`; how many follows from the shapes: some may be empty."""
    length, sequences = whole.length, len(starts) - 1
    parts = triton.cdiv(rows, length) + sequences
    starts = starts.to(torch.int64)
    counts = torch.clamp((starts[1:] - starts[:-1] + length - 1) // length, min=1)  # an empty sequence has a part
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(parts, device=starts.device)
    owner = torch.searchsorted(ends[1:], place, right=True).clamp(max=sequences - 1)
    first = starts[owner] + (place - ends[owner]) * length
    stop = torch.minimum(first + length, starts[owner + 1])
    edge = (place == ends[owner]).long() + 2 * (place == ends[owner + 1] - 1).long()
    unused = place >= ends[-1]
    table = torch.stack([first, stop, edge, owner], -1).masked_fill(unused[:, None], 0)
    return Cut(parts, length, table.int().contiguous(), ends.int())


@triton.jit
def tile(base, stride, row, column, stop, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Some rows of a matrix, zeros beyond its end."""
    place = base + row[:, None] * stride + column[None, :]
    if WIDTH % PADDED == 0:
        found = tl.load(place, mask=(row < stop)[:, None], other=0.0)
    else:
        found = tl.load(place, mask=(row < stop)[:, None] & (column < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def span(part, parts, length, rows, table, REVERSE: tl.constexpr, PACKED: tl.constexpr):
    """The first row of a part, how many it has, and whether it is the first and the last that the scan comes to."""
    if PACKED:
        start = tl.load(table + 4 * part)
        many = tl.load(table + 4 * part + 1) - start
        edge = tl.load(table + 4 * part + 2)
        first, last = (edge & 1) != 0, (edge & 2) != 0
    else:
        start = part * length
        many = tl.minimum(length, rows - start)
        first, last = part == 0, part == parts - 1
    if REVERSE:
        first, last = last, first
    return start.to(tl.int64), many, first, last


@triton.jit
def into(x, y, PRECISION: tl.constexpr):
    """x @ y for a state y in float32: as exact as the type of x is, and never out of range."""
    if x.dtype == tl.bfloat16:
        found = tl.dot(x, y.to(tl.bfloat16))
    elif x.dtype == tl.float16:
        # TF32 has the digits of float16 and the range of float32: sums over many keys leave float16.
        found = tl.dot(x.to(tl.float32), y, input_precision="tf32")
    else:
        found = tl.dot(x, y, input_precision=PRECISION)
    return found


@triton.jit
def _summed(
    y,
    z,
    weight,
    slope,
    table,
    sums,
    totals,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
    rows,
    length,
    H: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A part's sum of y zᵀ, and of β y where that is asked for; the last part needs none but for the whole."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1)
    start, many, _, last = span(part, parts, length, rows, table, REVERSE, PACKED)
    if not WHOLE:  # noqa: SIM102 - a constant, which removes the rest
        if last:
            return
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    y += batch * y_batch + own * y_head + start * y_row
    z += batch * z_batch + own * z_head + start * z_row
    rest = head.to(tl.int64) * rows + start
    row, feature = tl.arange(0, C), tl.arange(0, MP)
    column = block * EB + tl.arange(0, EB)
    state = tl.zeros((MP, EB), tl.float32)
    total = tl.zeros((MP,), tl.float32)
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if REVERSE:  # noqa: SIM108 - a choice between constants is one for Triton only as a statement
            chunk = step
        else:
            chunk = steps - 1 - step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        ys = tile(y + ahead * y_row, y_row, row, feature, left, M, MP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        if MODE == _VALUES:
            w = tl.load(weight + rest + ahead + row, mask=row < left, other=0.0)
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            zs = (zs.to(tl.float32) * w[:, None]).to(z.dtype.element_ty)
            total += tl.sum(ys.to(tl.float32) * (u * w)[:, None], 0)
        if MODE == _NORMALISED:
            total += tl.sum(ys.to(tl.float32), 0)
        state = tl.dot(tl.trans(ys), zs, state, input_precision=PRECISION)
    place = head.to(tl.int64) * parts + part
    inside = (feature < M)[:, None] & (column < E)[None, :]
    tl.store(sums + place * (M * E) + feature[:, None] * E + column[None, :], state, mask=inside)
    if MODE == _NORMALISED or MODE == _VALUES:  # noqa: SIM109
        tl.store(totals + place * M + feature, total, mask=(feature < M) & (block == 0))


@triton.jit
def _prefixed(
    sums,
    initial,
    ends,
    parts,
    groups,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Sums of parts become what lies before each part, in the order of the scan."""
    head, block, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    first, behind = 0, parts
    if PACKED:
        first, behind = tl.load(ends + sequence), tl.load(ends + sequence + 1)
    if GIVEN:
        state = tl.load(initial + (sequence * groups + head) * SIZE + place, mask=inside, other=0.0)
    else:
        state = tl.zeros((BLOCK,), tl.float32)
    for step in range(first, behind):
        part = step
        if REVERSE:
            part = first + behind - 1 - step
        own = sums + (head * parts + part) * SIZE + place
        # The last part has no sum, and nothing comes after it.
        found = tl.load(own, mask=inside & (step < behind - 1), other=0.0)
        tl.store(own, state, mask=inside)
        state += found


@triton.jit
def _scanned(
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
    x_row,
    y_batch,
    y_head,
    y_row,
    z_batch,
    z_head,
    z_row,
    before_row,
    before_column,
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
        total = tl.load(totals + place * M + feature, mask=feature < M, other=0.0)
    if MODE == _ROWS or MODE == _COLUMNS:  # noqa: SIM109
        total = tl.load(totals + place * E + column, mask=column < E, other=0.0)
    if REVERSE:  # noqa: SIM108
        seen = row[:, None] <= row[None, :]
    else:
        seen = row[:, None] >= row[None, :]
    kind = x.dtype.element_ty
    steps = tl.cdiv(many, C)
    for step in range(steps):
        if REVERSE:  # noqa: SIM108
            chunk = steps - 1 - step
        else:
            chunk = step
        ahead = tl.cast(chunk, tl.int64) * C
        left = many - chunk * C
        xs = tile(x + ahead * x_row, x_row, row, feature, left, M, MP)
        ys = tile(y + ahead * y_row, y_row, row, feature, left, M, MP)
        zs = tile(z + ahead * z_row, z_row, row, column, left, E, EB)
        if MODE >= _ROWS:
            w = tl.load(weight + rest + ahead + row, mask=row < left, other=0.0)
            if MODE != _ROWS:
                zs = (zs.to(tl.float32) * w[:, None]).to(kind)
        pairs = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
        found = into(xs, state, PRECISION)
        if MODE == _ROWS or MODE == _COLUMNS:  # noqa: SIM109
            u = tl.load(slope + rest + ahead + row, mask=row < left, other=0.0)
            if MODE == _ROWS:
                pairs += u[:, None]
                found += u[:, None] * total[None, :]
                total += tl.sum(zs.to(tl.float32), 0)
            else:
                pairs += u[None, :]
                found += total[None, :]
                total += tl.sum(zs.to(tl.float32) * u[:, None], 0)
        pairs = tl.where(seen, pairs, 0.0)
        found = tl.dot(pairs.to(kind), zs, found, input_precision=PRECISION)
        if MODE == _NORMALISED:
            divisor = tl.sum(pairs, 1) + tl.sum(xs.to(tl.float32) * total[None, :], 1)
            total += tl.sum(ys.to(tl.float32), 0)
            tl.store(norm + rest + ahead + row, divisor, mask=(row < left) & (block == 0))
            found = found / tl.where(tl.abs(divisor) < _TINY, 1.0, divisor)[:, None]
        if MODE == _ROWS:
            found = found * w[:, None]
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
            tl.store(final_total + at * M + feature, total, mask=(feature < M) & (block == 0))
        if MODE == _COLUMNS:
            tl.store(final_total + at * E + column, total, mask=column < E)


@triton.jit
def _slopes(
    gradient,
    out,
    norm,
    weight,
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
    """1 / normaliser and −(gradient · mean) of some rows; a row that saw nothing was divided by one."""
    own, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, EP)
    inside = (row < rows)[:, None] & (column < E)[None, :]
    away = row[:, None].to(tl.int64)
    base = gradient + (own // H) * batch + (own % H) * head
    g = tl.load(base + away * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + own * rows * E + away * E + column[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(norm + own * rows + row, mask=row < rows, other=1.0)
    empty = tl.abs(z) < _TINY
    tl.store(weight + own * rows + row, 1 / tl.where(empty, 1.0, z), mask=row < rows)
    tl.store(slope + own * rows + row, tl.where(empty, 0.0, -tl.sum(g * o, 1)), mask=row < rows)


class Sums(NamedTuple):
    """What lies before each part: the sums of y zᵀ, and those of β y where they were asked for."""

    sums: Float32[Tensor, "heads parts m e"]
    totals: Float32[Tensor, "heads parts m"]


class Scanned(NamedTuple):
    """The rows, the normalisers they were divided by, and the sums after the last row."""

    out: Float[Tensor, "b h n e"]
    norm: Float32[Tensor, "b h n"]
    final: Float32[Tensor, "s g m e"]
    final_total: Float32[Tensor, "s g c"]


def rowwise(x: Tensor) -> Tensor:
    """The same tensor, with the numbers of a row beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def summed(
    y: Float[Tensor, "b h n m"],
    z: Float[Tensor, "b h n e"],
    parts: Cut,
    mode: int,
    reverse: bool,
    weight: Float32[Tensor, "b h n"] | None,
    slope: Float32[Tensor, "b h n"] | None,
    whole: bool,
) -> Sums:
    """Each part's own sums; those of the last that a scan comes to only where the `whole` is wanted."""
    b, h, n, m = y.shape
    e = z.shape[-1]
    chosen = config(m, e, y.element_size())
    sums = y.new_empty(b * h, parts.parts, m, e, dtype=torch.float32)
    totals = y.new_empty(b * h, parts.parts, m if mode != PLAIN else 0, dtype=torch.float32)
    if whole or parts.parts > 1:
        _summed[(b * h, parts.parts, triton.cdiv(e, chosen.columns))](
            y,
            z,
            sums if weight is None else weight,
            sums if slope is None else slope,
            parts.table,
            sums,
            totals,
            *y.stride()[:3],
            *z.stride()[:3],
            n,
            parts.length,
            H=h,
            M=m,
            MP=padded(m),
            E=e,
            EB=chosen.columns,
            C=chosen.chunk,
            MODE=mode,
            WHOLE=whole,
            REVERSE=reverse,
            PACKED=parts.table is not None,
            PRECISION=PRECISION,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return Sums(sums, totals)


def before(
    y: Float[Tensor, "b h n m"],
    z: Float[Tensor, "b h n e"],
    parts: Cut,
    mode: int = PLAIN,
    reverse: bool = False,
    initial: Float32[Tensor, "s h m e"] | None = None,
    initial_total: Float32[Tensor, "s h m"] | None = None,
    weight: Float32[Tensor, "b h n"] | None = None,
    slope: Float32[Tensor, "b h n"] | None = None,
) -> Sums:
    """Sums over all rows before each part, from an initial state on; `reverse` counts from the end."""
    packed = parts.table is not None
    sums, totals = summed(y, z, parts, mode, reverse, weight, slope, False)
    (b, h), nothing = y.shape[:2], sums
    for held, given in ((sums, initial), (totals, initial_total)):
        size = held[0, 0].numel()
        if size:
            block = min(1024, padded(size))
            sequences = 1 if parts.ends is None else len(parts.ends) - 1
            _prefixed[(b * h, triton.cdiv(size, block), sequences)](
                held,
                nothing if given is None else given,
                parts.ends,
                parts.parts,
                b * h,
                SIZE=size,
                BLOCK=block,
                GIVEN=given is not None,
                REVERSE=reverse,
                PACKED=packed,
                num_warps=4,
            )
    return Sums(sums, totals)


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
    kept: torch.dtype | None = None,
) -> Scanned:
    """Every row's sum over the rows up to it, of the type `kept`; `turned` states are those of z yᵀ."""
    (b, hx, n, m), (hy, e) = x.shape, (z.shape[1], z.shape[3])
    h = max(hx, hy)
    chosen = config(m, e, x.element_size(), mode == PLAIN)
    out = x.new_empty(b, h, n, e, dtype=x.dtype if kept is None else kept)
    norm = x.new_empty(b, h, n if mode == NORMALISED else 0, dtype=torch.float32)
    sequences = b if parts.ends is None else len(parts.ends) - 1
    final = x.new_empty(sequences, hy, m, e, dtype=torch.float32)
    width = m if mode == NORMALISED else e if mode == COLUMNS else 0
    final_total = x.new_empty(sequences, hy, width, dtype=torch.float32)
    _scanned[(b * h, parts.parts, triton.cdiv(e, chosen.columns))](
        x,
        y,
        z,
        final if weight is None else weight,
        final if slope is None else slope,
        parts.table,
        known.sums,
        known.totals,
        out,
        norm,
        final,
        final_total,
        *x.stride()[:3],
        *y.stride()[:3],
        *z.stride()[:3],
        1 if turned else e,
        m if turned else 1,
        n,
        parts.length,
        H=h,
        RX=h // hx,
        RY=h // hy,
        M=m,
        MP=padded(m),
        E=e,
        EB=chosen.columns,
        C=chosen.chunk,
        MODE=mode,
        REVERSE=reverse,
        PACKED=parts.table is not None,
        PRECISION=PRECISION,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return Scanned(out, norm, final, final_total)


def slopes(
    gradient: Float[Tensor, "b h n e"], out: Float[Tensor, "b h n e"], norm: Float32[Tensor, "b h n"]
) -> tuple[Float32[Tensor, "b h n"], Float32[Tensor, "b h n"]]:
    """What every row of a normalised mean is weighted by in its gradients, and the slope by its normaliser."""
    b, h, n, e = out.shape
    weight, slope = torch.empty_like(norm), torch.empty_like(norm)
    grid = (b * h, max(1, triton.cdiv(n, 64)))
    _slopes[grid](
        gradient, out, norm, weight, slope, *gradient.stride()[:3], n, H=h, E=e, EP=padded(e), C=64, num_warps=4
    )
    return weight, slope
