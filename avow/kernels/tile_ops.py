"""What every scan does: tiles of rows, spans of parts, products with a state, and numbers rounded as it needs them."""

from __future__ import annotations

import triton
import triton.language as tl

# The logarithm of nothing.
LOWEST = tl.constexpr(float("-inf"))
# Normalisers below this belong to rows that see nothing.
TINY = tl.constexpr(2.0**-126)


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
def piece_of(start, many, piece, PIECES: tl.constexpr, C: tl.constexpr):
    """The rows of one of the pieces that a part is cut into, of whole chunks but for the last."""
    size = tl.cdiv(many, PIECES * C) * C
    return start + piece * size, tl.maximum(tl.minimum(size, many - piece * size), 0)


@triton.jit
def nearest(x, PRECISION: tl.constexpr):
    """Factors of a product in TF32, each the nearest that it has: tensor cores cut digits off, always towards zero."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def into(x, y, PRECISION: tl.constexpr):
    """x @ y for a state y in float32: as exact as the type of x is, and never out of range."""
    if x.dtype == tl.bfloat16:
        found = tl.dot(x, y.to(tl.bfloat16))
    elif x.dtype == tl.float16:
        # TF32 has the digits of float16 and the range of float32: sums over many keys leave float16.
        found = tl.dot(x.to(tl.float32), nearest(y, "tf32"), input_precision="tf32")
    else:
        found = tl.dot(x, y, input_precision=PRECISION)
    return found


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


def interpreted() -> bool:
    """Whether kernels run in Python, as they do where TRITON_INTERPRET=1 was set before they were loaded."""
    return not isinstance(tile, triton.JITFunction)
