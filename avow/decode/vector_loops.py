"""Loops over vector registers for numba: products with 4-bit codes, products with rows, and sums of rows.

Each is written in LLVM's terms, so that what is added to what, in which order, is what stands here and not what an
optimiser makes of it: rounding is counted from it (`avow.decode.cpu`). A few queries share what is loaded. Lanes are
split into the registers that a processor has. A multiply-add may be one rounding or two; nothing assumes that numbers
are finite. Arrays are addresses, of numbers side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Sums of a product with a row, which are added in pairs at the end; rows that are turned into columns together."""
# Queries that share what a loop loads: of sums that one register holds, and of those that take four.
_QUERIES, _FEW_QUERIES = 8, 4
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


def _size(token_type: int) -> int:
    """The bytes of a number."""
    return 4 if token_type == FLOAT32 else 2


def _load(builder: _Builder, address: _Value, index: _Value, lanes: int, token_type: int = FLOAT32) -> _Value:
    """Numbers from a place on, as float32."""
    size = _size(token_type)
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


def _fetch(
    builder: _Builder, rows: _Value, places: _Value, n: _Value, width: _Value, most: _Value, token_type: int
) -> None:
    """Have the memory bring up to `most` numbers of a row that is wanted later; places go on behind their end."""
    size = _size(token_type)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.mul(builder.zext(builder.load(_at(builder, places, _INT, n, 4)), _LONG), width)
    with cgutils.for_range_slice(builder, _LONG(0), most, _LONG(64 // size)) as (at, _):
        line = _at(builder, rows, _BYTE, builder.add(start, at), size)
        builder.call(function, [line, _INT(0), _INT(3), _INT(1)])


def _blocks(builder: _Builder, queries: _Value, most: int) -> Iterator[tuple[int, _Value]]:
    """Blocks of `most` queries, and of those that are left: how many, and the first. There is code for each number."""
    full = builder.mul(builder.udiv(queries, _LONG(most)), _LONG(most))
    with cgutils.for_range_slice(builder, _LONG(0), full, _LONG(most)) as (row, _):
        yield most, row
    for many in range(1, most):
        with builder.if_then(builder.icmp_signed("==", builder.sub(queries, full), _LONG(many))):
            yield many, full


def _types(builder: _Builder, token_type: _Value) -> Iterator[int]:
    """Every type of tokens, each where it is the one asked for."""
    for kind in (FLOAT32, BFLOAT16, FLOAT16):
        with builder.if_then(builder.icmp_signed("==", token_type, _LONG(kind))):
            yield kind


@intrinsic
def code_products(typing: Any, queries: Any, codes: Any, width: Any, scaled: Any, out: Any) -> Any:
    """out[r, t] = Σ_i scaled[r, i]·low(codes[i, t]) + scaled[r, width + i]·high(codes[i, t]), with i going upwards."""

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        queries, codes, width, scaled, out = args
        full = builder.mul(width, _LONG(2))
        for many, query in _blocks(builder, queries, _QUERIES):
            for first in range(0, _GROUP, _TOKENS):
                sums = _sums(builder, many, _TOKENS)
                with cgutils.for_range(builder, width) as row:
                    place = builder.add(builder.mul(row.index, _LONG(_GROUP)), _LONG(first))
                    held = builder.load(_at(builder, codes, ir.VectorType(_BYTE, _TOKENS), place, 1), align=1)
                    low = builder.and_(held, ir.Constant(held.type, [15] * _TOKENS))
                    high = builder.lshr(held, ir.Constant(held.type, [4] * _TOKENS))
                    planes = [builder.uitofp(x, _vector(_TOKENS)) for x in (low, high)]
                    for r, room in enumerate(sums):
                        own = builder.mul(full, builder.add(query, _LONG(r)))
                        total = builder.load(room)
                        for plane, start in zip(planes, (_LONG(0), width), strict=True):
                            at = builder.add(builder.add(own, start), row.index)
                            factor = builder.load(_at(builder, scaled, _FLOAT, at, 4))
                            total = _multiply_add(builder, plane, _spread(builder, factor, _TOKENS), total)
                        builder.store(total, room)
                for r, room in enumerate(sums):
                    at = builder.add(builder.mul(builder.add(query, _LONG(r)), _LONG(_GROUP)), _LONG(first))
                    _store(builder, builder.load(room), out, at)
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

        def block(many: int, query: _Value, token_type: int) -> None:
            mine = builder.add(q, builder.mul(builder.mul(query, width), _LONG(4)))
            with cgutils.for_range(builder, count) as token:
                later = builder.add(token.index, _LONG(_AHEAD))
                _fetch(builder, rows, places, later, width, _LONG(_COLUMNS), token_type)
                place = builder.zext(builder.load(_at(builder, places, _INT, token.index, 4)), _LONG)
                start = builder.mul(place, width)
                sums, rest = _sums(builder, many, LANES), _sums(builder, many, 1)

                with cgutils.for_range(builder, steps) as step:
                    at = builder.mul(step.index, _LONG(LANES))
                    row = _load(builder, rows, builder.add(start, at), LANES, token_type)
                    _add_products(builder, row, mine, width, at, sums)
                with cgutils.for_range_slice(builder, whole, width, _LONG(1)) as (at, _):
                    row = _load(builder, rows, builder.add(start, at), 1, token_type)
                    _add_products(builder, row, mine, width, at, rest)
                for r, (room, left) in enumerate(zip(sums, rest, strict=True)):
                    last = builder.extract_element(builder.load(left), _INT(0))
                    total = builder.fadd(_added(builder, builder.load(room)), last)
                    at = builder.add(builder.mul(stride, builder.add(query, _LONG(r))), token.index)
                    builder.store(total, _at(builder, out, _FLOAT, at, 4))

        for token_type in _types(builder, kind):
            for many, query in _blocks(builder, queries, _FEW_QUERIES):
                block(many, query, token_type)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


def _transposed(builder: _Builder, rows: list[_Value]) -> list[_Value]:
    """The columns of as many rows as each has lanes: blocks beside the diagonal change places, of one to half of it."""
    lanes, half = len(rows), 1
    while half < lanes:
        low = [i if i & half == 0 else lanes + i - half for i in range(lanes)]
        high = [i + half if i & half == 0 else lanes + i for i in range(lanes)]
        near, far = (ir.Constant(ir.VectorType(_INT, lanes), x) for x in (low, high))
        for i in range(lanes):
            if i & half == 0:
                x, y = rows[i], rows[i + half]
                rows[i], rows[i + half] = builder.shuffle_vector(x, y, near), builder.shuffle_vector(x, y, far)
        half *= 2
    return rows


def _to_columns(
    builder: _Builder,
    rows: _Value,
    places: _Value,
    first: _Value,
    width: _Value,
    whole: _Value,
    space: _Value,
    token_type: int,
) -> None:
    """Turn `LANES` rows from a place on into columns in float32."""
    starts = []
    for i in range(LANES):
        place = builder.load(_at(builder, places, _INT, builder.add(first, _LONG(i)), 4))
        starts.append(builder.mul(builder.zext(place, _LONG), width))
    with cgutils.for_range_slice(builder, _LONG(0), whole, _LONG(LANES)) as (at, _):
        some = [_load(builder, rows, builder.add(start, at), LANES, token_type) for start in starts]
        for i, column in enumerate(_transposed(builder, some)):
            _store(builder, column, space, builder.mul(builder.add(at, _LONG(i)), _LONG(LANES)))
    with cgutils.for_range_slice(builder, whole, width, _LONG(1)) as (at, _):
        for i, start in enumerate(starts):
            one = _load(builder, rows, builder.add(start, at), 1, token_type)
            _store(builder, one, space, builder.add(builder.mul(at, _LONG(LANES)), _LONG(i)))


def _with_columns(
    builder: _Builder,
    many: int,
    q: _Value,
    space: _Value,
    width: _Value,
    whole: _Value,
    meanwhile: Callable[[_Value], None],
) -> list[_Value]:
    """The products of some queries with all columns: sums of `LANES` each, added up."""
    totals, sums = _sums(builder, many, LANES), _sums(builder, many, LANES)

    def add(at: _Value) -> None:
        column = _load(builder, space, builder.mul(at, _LONG(LANES)), LANES)
        for r, room in enumerate(sums):
            own = builder.load(_at(builder, q, _FLOAT, builder.add(builder.mul(width, _LONG(r)), at), 4))
            builder.store(_multiply_add(builder, column, _spread(builder, own, LANES), builder.load(room)), room)

    def settle() -> None:
        for total, room in zip(totals, sums, strict=True):
            builder.store(builder.fadd(builder.load(total), builder.load(room)), total)
            builder.store(ir.Constant(_vector(LANES), [0.0] * LANES), room)

    with cgutils.for_range_slice(builder, _LONG(0), whole, _LONG(LANES)) as (at, _):
        meanwhile(at)
        for i in range(LANES):
            add(builder.add(at, _LONG(i)))
        settle()
    with cgutils.for_range_slice(builder, whole, width, _LONG(1)) as (at, _):
        add(at)
    settle()
    return totals


@intrinsic
def column_products(
    typing: Any,
    queries: Any,
    kind: Any,
    q: Any,
    rows: Any,
    places: Any,
    count: Any,
    width: Any,
    space: Any,
    out: Any,
    stride: Any,
) -> Any:
    """What `row_products` gives, for many queries: `LANES` rows at a time are turned into columns in `space`, (width,
    `LANES`), so that no sum has to be added across lanes.

    Places and results go on behind the count, to a multiple of `LANES`, and places for as many again.
    """

    def emit(context: Any, builder: _Builder, signature: Any, args: Any) -> _Value:
        queries, kind, q, rows, places, count, width, space, out, stride = args
        lanes = _LONG(LANES)
        whole = builder.mul(builder.udiv(width, lanes), lanes)
        # The next rows are fetched while the first queries are at work, as many for each part of the width.
        fetched = builder.udiv(_LONG(LANES * LANES), width)
        with cgutils.for_range_slice(builder, _LONG(0), count, lanes) as (first, _):
            for token_type in _types(builder, kind):
                _to_columns(builder, rows, places, first, width, whole, space, token_type)
            for many, query in _blocks(builder, queries, _QUERIES):

                def fetch(at: _Value, first: _Value = first, query: _Value = query) -> None:
                    with builder.if_then(builder.icmp_signed("==", query, _LONG(0))):
                        start = builder.add(first, builder.mul(builder.udiv(at, lanes), fetched))
                        with cgutils.for_range(builder, fetched) as row:
                            later = builder.add(builder.add(start, row.index), lanes)
                            for token_type in _types(builder, kind):
                                _fetch(builder, rows, places, later, width, width, token_type)

                mine = builder.add(q, builder.mul(builder.mul(query, width), _LONG(4)))
                totals = _with_columns(builder, many, mine, space, width, whole, fetch)
                for r, total in enumerate(totals):
                    at = builder.add(builder.mul(stride, builder.add(query, _LONG(r))), first)
                    _store(builder, builder.load(total), out, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), emit


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

        def block(many: int, query: _Value, token_type: int) -> None:
            done = _LONG(0)
            for columns in (_COLUMNS, LANES, 1):
                blocks = builder.udiv(builder.sub(width, done), _LONG(columns))
                with cgutils.for_range(builder, blocks) as part:
                    first = builder.add(done, builder.mul(part.index, _LONG(columns)))
                    sums = _sums(builder, many, columns)
                    with cgutils.for_range(builder, count) as token:
                        if columns == _COLUMNS:
                            with builder.if_then(builder.icmp_signed("==", query, _LONG(0))):
                                later = builder.add(token.index, _LONG(_AHEAD))
                                _fetch(builder, rows, places, later, width, _LONG(_COLUMNS), token_type)
                        place = builder.zext(builder.load(_at(builder, places, _INT, token.index, 4)), _LONG)
                        row = _load(builder, rows, builder.add(builder.mul(place, width), first), columns, token_type)
                        for r, room in enumerate(sums):
                            at = builder.add(builder.mul(stride, builder.add(query, _LONG(r))), token.index)
                            weight = _spread(builder, builder.load(_at(builder, weights, _FLOAT, at, 4)), columns)
                            builder.store(_multiply_add(builder, weight, row, builder.load(room)), room)
                    for r, room in enumerate(sums):
                        at = builder.add(builder.mul(width, builder.add(query, _LONG(r))), first)
                        _store(builder, builder.load(room), out, at)
                done = builder.add(done, builder.mul(blocks, _LONG(columns)))

        for token_type in _types(builder, kind):
            for many, query in _blocks(builder, queries, _FEW_QUERIES):
                block(many, query, token_type)
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
