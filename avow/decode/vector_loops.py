"""Loops over vector registers for numba: products with 4-bit codes, products with rows, and sums of rows.

Each is written in LLVM's terms, so that what is added to what, in which order, is what stands here and not what an
optimiser makes of it: rounding is counted from it (`avow.decode.cpu`). Up to four queries share what is loaded. Lanes
are split into the registers that a processor has. A multiply-add may be one rounding or two; nothing assumes that
numbers are finite. Arrays are addresses, of numbers side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

MOST_QUERIES = 4
"""Queries that share what a loop loads."""
LANES = 16
"""Sums of a product with a row, which are added in pairs at the end."""
# Columns of rows that are summed at a time, and rows that are asked for ahead of their use.
_COLUMNS, _AHEAD = 64, 12
# A group of the sketch, and how many of its tokens are taken at a time.
_GROUP, _TOKENS = 64, 32

_FLOAT, _BYTE, _SHORT, _INT, _LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
# Types of tokens, by the number that stands for them in compiled code.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_Builder = Any
_Value = Any


def _vector(lanes: int) -> ir.Type:
    return ir.VectorType(_FLOAT, lanes)


def _at(builder: _Builder, address: _Value, kind: ir.Type, index: _Value, size: int) -> _Value:
    """A pointer to the number at a place of an array whose numbers have so many bytes."""
    place = builder.add(address, builder.mul(index, _LONG(size)))
    return builder.inttoptr(place, kind.as_pointer())


def _load(builder: _Builder, address: _Value, index: _Value, lanes: int, token_type: int = FLOAT32) -> _Value:
    """Numbers from a place on, as float32."""
    size = 4 if token_type == FLOAT32 else 2
    stored = {FLOAT32: _FLOAT, BFLOAT16: _SHORT, FLOAT16: ir.HalfType()}[token_type]
    held = builder.load(_at(builder, address, ir.VectorType(stored, lanes), index, size), align=size)
    if token_type == FLOAT16:
        return builder.fpext(held, _vector(lanes))
    if token_type == BFLOAT16:  # the upper half of a float32
        wide = builder.zext(held, ir.VectorType(_INT, lanes))
        wide = builder.shl(wide, ir.Constant(wide.type, [16] * lanes))
        return builder.bitcast(wide, _vector(lanes))
    return held


def _store(builder: _Builder, x: _Value, address: _Value, index: _Value) -> None:
    builder.store(x, _at(builder, address, x.type, index, 4), align=4)


def _spread(builder: _Builder, x: _Value, lanes: int) -> _Value:
    """A number in every lane."""
    first = builder.insert_element(ir.Constant(_vector(lanes), ir.Undefined), x, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


def _multiply_add(builder: _Builder, x: _Value, y: _Value, z: _Value) -> _Value:
    """x·y + z, rounded once or twice."""
    name = f"llvm.fmuladd.v{x.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return builder.call(function, [x, y, z])


def _added(builder: _Builder, x: _Value) -> _Value:
    """The sum of all lanes, in pairs."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(ir.VectorType(_INT, lanes), [*range(at, at + lanes)]) for at in (0, lanes))
        x = builder.fadd(builder.shuffle_vector(x, x, low), builder.shuffle_vector(x, x, high))
    return builder.extract_element(x, _INT(0))


def _sums(builder: _Builder, queries: int, lanes: int) -> list[_Value]:
    """Variables that begin with zero."""
    rooms = [cgutils.alloca_once(builder, _vector(lanes)) for _ in range(queries)]
    for room in rooms:
        builder.store(ir.Constant(_vector(lanes), [0.0] * lanes), room)
    return rooms


def _ask_ahead(builder: _Builder, rows: _Value, places: _Value, n: _Value, width: _Value, token_type: int) -> None:
    """Have the memory bring the first lines of a row that is wanted a little later; places go on behind their end."""
    size = 4 if token_type == FLOAT32 else 2
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.load(_at(builder, places, _INT, builder.add(n, _LONG(_AHEAD)), 4))
    start = builder.mul(builder.zext(place, _LONG), builder.mul(width, _LONG(size)))
    for line in range(0, 64 * size, 64):
        builder.call(
            function, [_at(builder, rows, _BYTE, builder.add(start, _LONG(line)), 1), _INT(0), _INT(3), _INT(1)]
        )


def _forms(builder: _Builder, queries: _Value, token_type: _Value | None = None) -> Iterator[tuple[int, int]]:
    """Every number of queries and type of tokens there is code for, each where that is the one asked for."""
    kinds = (FLOAT32,) if token_type is None else (FLOAT32, BFLOAT16, FLOAT16)
    for many, kind in itertools.product(range(1, MOST_QUERIES + 1), kinds):
        asked = builder.icmp_signed("==", queries, _LONG(many))
        if token_type is not None:
            asked = builder.and_(asked, builder.icmp_signed("==", token_type, _LONG(kind)))
        with builder.if_then(asked):
            yield many, kind


@intrinsic
def code_products(typing: Any, queries: Any, codes: Any, width: Any, scaled: Any, out: Any) -> Any:
    """out[r, t] = Σ_i scaled[r, i]·low(codes[i, t]) + scaled[r, width + i]·high(codes[i, t]), with i going upwards."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        queries, codes, width, scaled, out = args
        full = builder.mul(width, _LONG(2))
        for many, _ in _forms(builder, queries):
            for first in range(0, _GROUP, _TOKENS):
                sums = _sums(builder, many, _TOKENS)
                with cgutils.for_range(builder, width) as row:
                    place = builder.add(builder.mul(row.index, _LONG(_GROUP)), _LONG(first))
                    held = builder.load(_at(builder, codes, ir.VectorType(_BYTE, _TOKENS), place, 1), align=1)
                    low = builder.and_(held, ir.Constant(held.type, [15] * _TOKENS))
                    high = builder.lshr(held, ir.Constant(held.type, [4] * _TOKENS))
                    planes = [builder.uitofp(x, _vector(_TOKENS)) for x in (low, high)]
                    for r, room in enumerate(sums):
                        total = builder.load(room)
                        for plane, start in zip(planes, (_LONG(0), width), strict=True):
                            at = builder.add(builder.add(builder.mul(full, _LONG(r)), start), row.index)
                            factor = builder.load(_at(builder, scaled, _FLOAT, at, 4))
                            total = _multiply_add(builder, plane, _spread(builder, factor, _TOKENS), total)
                        builder.store(total, room)
                for r, room in enumerate(sums):
                    _store(builder, builder.load(room), out, _LONG(r * _GROUP + first))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


def _add_products(builder: _Builder, row: _Value, q: _Value, width: _Value, at: _Value, sums: list[_Value]) -> None:
    """Add the products of a part of a row with each query's, from a place on, to the queries' sums."""
    for r, room in enumerate(sums):
        mine = _load(builder, q, builder.add(builder.mul(width, _LONG(r)), at), row.type.count)
        builder.store(_multiply_add(builder, mine, row, builder.load(room)), room)


@intrinsic
def row_products(
    typing: Any, queries: Any, kind: Any, q: Any, rows: Any, places: Any, count: Any, width: Any, out: Any, stride: Any
) -> Any:
    """out[r, n] = q[r]·rows[places[n]]: sums in `LANES` lanes, these in pairs, and what is left of the width."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        queries, kind, q, rows, places, count, width, out, stride = args
        steps = builder.udiv(width, _LONG(LANES))
        whole = builder.mul(steps, _LONG(LANES))
        for many, token_type in _forms(builder, queries, kind):
            with cgutils.for_range(builder, count) as token:
                _ask_ahead(builder, rows, places, token.index, width, token_type)
                place = builder.zext(builder.load(_at(builder, places, _INT, token.index, 4)), _LONG)
                start = builder.mul(place, width)
                sums, rest = _sums(builder, many, LANES), _sums(builder, many, 1)

                with cgutils.for_range(builder, steps) as step:
                    at = builder.mul(step.index, _LONG(LANES))
                    row = _load(builder, rows, builder.add(start, at), LANES, token_type)
                    _add_products(builder, row, q, width, at, sums)
                with cgutils.for_range_slice(builder, whole, width, _LONG(1)) as (at, _):
                    row = _load(builder, rows, builder.add(start, at), 1, token_type)
                    _add_products(builder, row, q, width, at, rest)
                for r, (room, left) in enumerate(zip(sums, rest, strict=True)):
                    last = builder.extract_element(builder.load(left), _INT(0))
                    total = builder.fadd(_added(builder, builder.load(room)), last)
                    at = builder.add(builder.mul(stride, _LONG(r)), token.index)
                    builder.store(total, _at(builder, out, _FLOAT, at, 4))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


@intrinsic
def row_sums(
    typing: Any,
    queries: Any,
    kind: Any,
    weights: Any,
    stride: Any,
    rows: Any,
    places: Any,
    count: Any,
    width: Any,
    out: Any,
) -> Any:
    """out[r] = Σ_n weights[r, n]·rows[places[n]], with n going upwards."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        queries, kind, weights, stride, rows, places, count, width, out = args
        for many, token_type in _forms(builder, queries, kind):
            done = _LONG(0)
            for columns in (_COLUMNS, LANES, 1):
                blocks = builder.udiv(builder.sub(width, done), _LONG(columns))
                with cgutils.for_range(builder, blocks) as block:
                    first = builder.add(done, builder.mul(block.index, _LONG(columns)))
                    sums = _sums(builder, many, columns)
                    with cgutils.for_range(builder, count) as token:
                        if columns == _COLUMNS:
                            _ask_ahead(builder, rows, places, token.index, width, token_type)
                        place = builder.zext(builder.load(_at(builder, places, _INT, token.index, 4)), _LONG)
                        row = _load(builder, rows, builder.add(builder.mul(place, width), first), columns, token_type)
                        for r, room in enumerate(sums):
                            at = builder.add(builder.mul(stride, _LONG(r)), token.index)
                            weight = _spread(builder, builder.load(_at(builder, weights, _FLOAT, at, 4)), columns)
                            builder.store(_multiply_add(builder, weight, row, builder.load(room)), room)
                    for r, room in enumerate(sums):
                        _store(builder, builder.load(room), out, builder.add(builder.mul(width, _LONG(r)), first))
                done = builder.add(done, builder.mul(blocks, _LONG(columns)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """What lies at an address."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        return builder.inttoptr(args[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """The bits of a float32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _INT)


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def take_next(typing: Any, counter: Any) -> Any:
    """The number at an address, which is one more for whoever asks next, in whatever thread."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _LONG.as_pointer()), _LONG(1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def current(typing: Any, counter: Any) -> Any:
    """The number at an address, with all that other threads did before they made it so."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        return builder.load_atomic(builder.inttoptr(args[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit
