"""What every scan does: tiles of rows, spans of parts, products with a state, sums of rows, and roundings."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from avow.errors import ShapeError

# The logarithm of nothing.
LOWEST = tl.constexpr(float("-inf"))
# Normalisers below this belong to rows that see nothing.
TINY = tl.constexpr(2.0**-126)
# Columns that hold the same sums. Of fewer, computed factors of products are read wrongly by Triton 3.6 on Hopper.
_ALIKE = tl.constexpr(64)


class View(NamedTuple):
    """A tensor (b, h, n, width) as kernels read it: where it is, and how far batches and heads are apart."""

    base: Tensor
    batch: int
    head: int


def view(x: Tensor) -> View:
    return View(x, x.stride(0), x.stride(1))


class Shape(NamedTuple):
    """What a kernel is compiled for; fields that it does not read stay at their defaults."""

    H: int  # heads of the output
    R: int  # query heads to a head of keys and values
    D: int  # width of queries and keys, in tiles of DP
    DP: int
    E: int  # width of values, of which EB are a program's
    EB: int
    C: int  # rows of a chunk
    PRECISION: str
    KIND: Any = tl.float32  # the type of products' factors
    FAST: bool = False  # whether the device has instructions of its own for exponentials and roundings
    M: int = 0  # features, of which MB are a program's; NB programs have them all
    MB: int = 0
    NB: int = 1
    SCALED: bool = False  # whether rows are multiplied by a power of two before they are rounded to float16
    RX: int = 1  # heads of the output to a head of x, where keys are the rows
    x_row: int = 0  # how far rows of x are apart, and those of y, z and g
    y_row: int = 0
    z_row: int = 0
    g_row: int = 0
    MODE: int = 0
    REVERSE: bool = False
    TURNED: bool = False  # whether states are those of z yᵀ
    PIECES: int = 1  # programs that share the sums of a part
    MANY: int = 1  # chunks of a program, where nothing is carried from one to the next
    WHOLE: bool = False  # whether sums are over all keys, for rows that see them all


def row_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, with the numbers of a row beside each other."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


class HeadView(NamedTuple):
    """A tensor (bg, ...) as decoding reads it: where it is, and how far heads are apart, each of them in one piece."""

    base: Tensor
    stride: int


def by_head(x: Tensor, name: str) -> HeadView:
    """A view with batch and heads as one axis; heads must lie in one piece each."""
    b, g = x.shape[:2]
    joined = x.stride(0) == g * x.stride(1) or b == 1 or g == 1
    if not joined or not x[0, 0].is_contiguous():
        remedy = "pass a slice x[:, :, :s] of one contiguous tensor, or x.contiguous()"
        raise ShapeError(f"{name}.stride()", x.stride(), "must be that of heads in one piece each", remedy)
    x = x.view(b * g, *x.shape[2:])
    return HeadView(x, x.stride(0))


@triton.jit
def filled(VALUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr = None):
    """A tile, or a vector, of one number."""
    if COLUMNS is None:
        block = tl.full((ROWS,), VALUE, tl.float32)
    else:
        block = tl.full((ROWS, COLUMNS), VALUE, tl.float32)
    return block


@triton.jit
def rows_at(x, head, start, ROW: tl.constexpr, H: tl.constexpr, R: tl.constexpr = 1):
    """Where some rows begin, of a head of all batches' H; R of these share a head of x."""
    return x.base + (head // H).to(tl.int64) * x.batch + (head % H // R).to(tl.int64) * x.head + start * ROW


@triton.jit
def at_head(x, head):
    """Where a head begins, of all batches'."""
    return x.base + head * x.stride


@triton.jit
def load_state(base, feature, column, M: tl.constexpr, E: tl.constexpr, TURNED: tl.constexpr = False):
    """A tile of a state of M features and E columns, zeros beyond them; a turned state has columns for rows."""
    if TURNED:
        place = feature + column * M
    else:
        place = feature * E + column
    return tl.load(base + place, mask=(feature < M) & (column < E), other=0.0)


@triton.jit
def store_state(base, state, feature, column, M: tl.constexpr, E: tl.constexpr):
    """A tile of a state, written where `load_state` reads it."""
    tl.store(base + (feature * E + column), state, mask=(feature < M) & (column < E))


@triton.jit
def tile(base, stride, row, column, stop, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Some rows of a matrix, zeros beyond its end; without a row to stop at, all of them are there."""
    place = base + row[:, None] * stride + column[None, :]
    if stop is None:
        if WIDTH % PADDED == 0:
            values = tl.load(place)
        else:
            values = tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    elif WIDTH % PADDED == 0:
        values = tl.load(place, mask=(row < stop)[:, None], other=0.0)
    else:
        values = tl.load(place, mask=(row < stop)[:, None] & (column < WIDTH)[None, :], other=0.0)
    return values


@triton.jit
def store_tile(
    base, stride, row, column, stop, numbers, WIDTH: tl.constexpr, PADDED: tl.constexpr, FAST: tl.constexpr = False
):
    """Some rows of a matrix, rounded to its type and written."""
    place = base + row[:, None] * stride + column[None, :]
    if WIDTH % PADDED == 0:
        tl.store(place, short(numbers, base.dtype.element_ty, FAST), mask=(row < stop)[:, None])
    else:
        inside = (row < stop)[:, None] & (column < WIDTH)[None, :]
        tl.store(place, short(numbers, base.dtype.element_ty, FAST), mask=inside)


@triton.jit
def span(part, parts, length, rows, REVERSE: tl.constexpr):
    """The first row of a part, how many it has, and whether it is the last that the scan comes to."""
    start = part * length
    if REVERSE:
        last = part == 0
    else:
        last = part == parts - 1
    return start.to(tl.int64), tl.minimum(length, rows - start), last


@triton.jit
def chunk_of(step, steps, REVERSE: tl.constexpr):
    """Which chunk a scan comes to in a step."""
    if REVERSE:
        chunk = steps - 1 - step
    else:
        chunk = step
    return chunk


@triton.jit
def piece_of(piece, pieces, length, rows, S: tl.constexpr):
    """The first row of one of the pieces that parts are cut into, how many it has, and whether its part is the last.

    Pieces are of whole chunks but for the last of a part.
    """
    start, many, last = span(piece // S.PIECES, pieces // S.PIECES, length, rows, S.REVERSE)
    size, place = tl.cdiv(many, S.PIECES * S.C) * S.C, piece % S.PIECES
    return start + place * size, tl.maximum(tl.minimum(size, many - place * size), 0), last


@triton.jit
def _nearest_tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x, S: tl.constexpr):
    """Factors of a product in TF32, each the nearest that it has: tensor cores cut digits off, always towards zero."""
    if S.PRECISION == "tf32" and x.dtype == tl.float32:
        x = _nearest_tf32(x)
    return x


@triton.jit
def into(x, y, S: tl.constexpr):
    """x @ y for a state y in float32: as exact as the type of x is, and never out of range."""
    if x.dtype == tl.bfloat16:
        product = tl.dot(x, y.to(tl.bfloat16))
    elif x.dtype == tl.float16:
        # TF32 has the digits of float16 and the range of float32: sums over many keys leave float16.
        product = tl.dot(x.to(tl.float32), _nearest_tf32(y), input_precision="tf32")
    else:
        product = tl.dot(x, y, input_precision=S.PRECISION)
    return product


@triton.jit
def short(x, KIND: tl.constexpr, FAST: tl.constexpr):
    """Numbers of float32 rounded to the type of products."""
    if FAST and tl.bfloat16 == KIND:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(KIND)
    return y


@triton.jit
def log2_near(x, FAST: tl.constexpr):
    """Within 2^-21 of the logarithm, absolutely or relatively; numbers below the normal ones may count as zero."""
    if FAST:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def exp2_near(x, FAST: tl.constexpr):
    """A power of two to two units; what is smaller than normal numbers may vanish."""
    if FAST:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


# Sums of rows beside a scan's state. In bfloat16, tensor cores add to columns, or to rows, that are all alike: a sum
# over a chunk's rows by itself would be one of shuffles and barriers in every step. As a product with ones it is as
# exact, for both factors are; weights, and sums that rows meet, are two numbers of bfloat16 each, which are right to
# 2^-16. Other types keep a vector.


@triton.jit
def _high(x):
    """Numbers of float32 cut to the digits of bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _parted(x):
    """Columns that are alike, as bfloat16: the leading digits in even ones, what these leave in odd ones."""
    even = (tl.arange(0, _ALIKE) % 2 == 0)[None, :]
    return tl.where(even, _high(x), x - _high(x)).to(tl.bfloat16)


@triton.jit
def as_columns(total, KIND: tl.constexpr, ALIKE: tl.constexpr = _ALIKE):
    """Sums as a scan of rows of a type carries them to multiply rows by."""
    if tl.bfloat16 == KIND:
        held = total[:, None] + tl.zeros((total.shape[0], ALIKE), tl.float32)
    else:
        held = total
    return held


@triton.jit
def from_columns(total):
    """One number for each entry again."""
    if len(total.shape) == 2:
        entries = tl.sum(total, 1) * (1 / _ALIKE)
    else:
        entries = total
    return entries


@triton.jit
def columns_grown(total, ys, weight=None):
    """Sums with some rows more, each times its weight if given; columns are then alike in pairs, on average."""
    if len(total.shape) == 2:
        if weight is None:
            factors = tl.full((ys.shape[0], total.shape[1]), 1.0, tl.float32).to(ys.dtype)
        else:
            factors = _parted((2 * weight)[:, None] + tl.zeros((1, _ALIKE), tl.float32))
        total = tl.dot(tl.trans(ys), factors, total)
    elif weight is None:
        total += tl.sum(ys.to(tl.float32), 0)
    else:
        total += tl.sum(ys.to(tl.float32) * weight[:, None], 0)
    return total


@triton.jit
def within(xs, total):
    """Products of rows with the sums."""
    if len(total.shape) == 2:
        products = tl.sum(tl.dot(xs, _parted(total)), 1) * (2 / _ALIKE)
    else:
        products = tl.sum(xs.to(tl.float32) * total[None, :], 1)
    return products


@triton.jit
def as_rows(total, C: tl.constexpr, KIND: tl.constexpr):
    """Sums as a scan of rows of a type carries them to add to rows."""
    if tl.bfloat16 == KIND:
        held = total[None, :] + tl.zeros((C, total.shape[0]), tl.float32)
    else:
        held = total[None, :]
    return held


@triton.jit
def rows_grown(total, zs, weight=None):
    """Sums with some rows more, each times a weight of its own if given."""
    if weight is None:
        if total.shape[0] > 1:
            total = tl.dot(tl.full((total.shape[0], zs.shape[0]), 1.0, tl.float32).to(zs.dtype), zs, total)
        else:
            total += tl.sum(zs.to(tl.float32), 0)[None, :]
    elif total.shape[0] > 1:
        wide = weight[None, :] + tl.zeros((total.shape[0], zs.shape[0]), tl.float32)
        total = tl.dot(_high(wide).to(tl.bfloat16), zs, total)
        total = tl.dot((wide - _high(wide)).to(tl.bfloat16), zs, total)
    else:
        total += tl.sum(zs.to(tl.float32) * weight[:, None], 0)[None, :]
    return total


@triton.jit
def precede(EARLY: tl.constexpr):
    """Lets the next kernel start to wait. Where few programs do little, they would end before it was in place if they
    only did so after their own wait.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_last(EARLY: tl.constexpr):
    """Waits until the kernel before this one is done."""
    if EARLY:
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Lets the next kernel start to wait, and waits until the one before this is done.

    Every program of a step's kernels does both before it reads what decides anything, so that a kernel is done only
    after all before it. A GPU then has the next kernels in place when one ends, which saves microseconds each time.
    """
    precede(EARLY)
    await_last(EARLY)


@triton.jit
def send_for(place):
    """Has what lies at some places brought to the cache that all processors share; nothing waits for it.

    That is no read: what others write there meanwhile is what is read later.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def early(device: torch.device) -> bool:
    """Whether kernels on a device may be put in place before the last one is done; `chained` alone asks."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, bool]:
    """What a kernel is launched with that calls `follow(EARLY)` first."""
    return {"EARLY": early(device), "launch_pdl": early(device)}


def interpreted() -> bool:
    """Whether kernels run in Python, as they do where TRITON_INTERPRET=1 was set before they were loaded."""
    return not isinstance(tile, triton.JITFunction)
