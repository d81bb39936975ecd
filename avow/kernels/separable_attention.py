"""Separable attention: softmax over the features of Q, softmax over the positions of K, both inside the kernels.

Without a mask, keys and values are read once and so are queries: the least there is. Causal rows read keys and values
a second time. Gradients, too, compute the softmaxes where they need them, and write nothing of a sequence's length but
themselves and a number per row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from avow.errors import ShapeError
from avow.kernels import chunking, separable_kernels
from avow.kernels.chunking import Cut, Layout, Sums, before_parts, blank, cut_for, divided, launch, padded
from avow.kernels.separable_kernels import BOTH, KEYS, VALUES
from avow.kernels.tile_ops import Shape, row_contiguous

_LOG2E = math.log2(math.e)
# Rows of a chunk, and chunks of a program where nothing is carried from one to the next.
_CHUNK, _MANY = 64, 8
# Rows of a chunk and warps of a program for gradients of causal rows of at most 64 channels.
_NARROW = 16, 4


class SeparableMean(NamedTuple):
    """The answer, and whether keys rose too steeply for float32 to carry it."""

    out: Float[Tensor, "b h n e"]
    lost: Bool[Tensor, ""]


def separable_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    temperature: float = 1.0,
) -> SeparableMean:
    """Every row's mixture of the columns of K and V, over all keys or over those up to its own."""
    chunking.check(q, k, v, paired=causal)
    if q.shape[3] > 256:
        raise ShapeError("dim of q", q.shape[3], "must be at most 256", "split the head")
    out, missing, *_ = _forward(q, k, v, causal, temperature)
    return SeparableMean(out, missing.any())


def steps(q: Tensor, k: Tensor, e: int, causal: bool) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    chunk, parts = _layout(q, e, causal).chunk, _parts(q, k, e, causal)
    # Through the sums of a part and those of all before it; a causal key then goes through the rows of another.
    return (2 if causal else 1) * divided(parts.length, chunk) + parts.parts


def _layout(q: Tensor, e: int, causal: bool) -> Layout:
    """Tiles of kernels of rows."""
    d, wide = q.shape[3], q.dtype != torch.bfloat16
    columns = min(padded(e), 32 if wide else max(16, min(128, 16384 // padded(d))))
    # Programs that a processor's registers hold: those of causal rows have more to remember.
    resident = 1 if d > 64 else 3 if not causal and e <= 64 and not wide else 2
    warps, stages = 4 if max(d, columns) <= 64 else 8, 2 if wide else 3
    return Layout(32 if wide or d > 128 else _CHUNK, columns, warps, stages, resident)


def _parts(q: Tensor, k: Tensor, e: int, causal: bool) -> Cut:
    layout = _layout(q, e, causal)
    programs = q.shape[0] * (q if causal else k).shape[1] * divided(e, layout.columns)
    return cut_for(k.shape[2], programs, layout.resident, q.device)


def _shape(layout: Layout, q: Tensor, k: Tensor, e: int) -> Shape:
    """What kernels of a layout are compiled for."""
    h, g, d = q.shape[1], k.shape[1], q.shape[3]
    return layout.shape(h, h // g, d, e, q.dtype, MB=padded(d), MANY=_MANY)


def _width(x: int) -> int:
    """How wide a tile of gradients is: factors of 16 columns, once computed, are not multiplied rightly by every
    Triton."""
    return max(32, padded(x))


def _gradient_layout(q: Tensor, e: int, causal: bool) -> Layout:
    """Tiles of kernels of gradients, but for the features and columns of a program."""
    d, wide = q.shape[3], q.dtype != torch.bfloat16
    large = max(_width(d), _width(e))
    narrow = large <= 64 and not wide
    if causal:
        # Four matrices of as many rows as a chunk has are in registers at once.
        chunk, warps = _NARROW if narrow else (16, 8)
    else:
        chunk, warps = (64, 4) if narrow else (16 if wide and large > 64 else 32, 8)
    deep = large <= 128 and q.dtype != torch.float32 and not (wide and causal and large > 64)
    return Layout(chunk, 0, warps, 2 if deep else 1)


class _Block(NamedTuple):
    """Features and columns that a program holds, how many programs have all, and which gradients they find."""

    features: int
    columns: int
    programs: int
    finds: int

    def of(self, shape: Shape) -> Shape:
        return shape._replace(DP=_width(shape.D), MB=self.features, EB=self.columns, MODE=self.finds)


def _blocks(d: int, e: int, kind: torch.dtype, causal: bool) -> tuple[_Block, ...]:
    """One launch for dk and dv where a state fits whole; else one for features, one for columns of values."""
    # Products of float32 are three, with the factors of each in registers.
    room = 8192 if kind == torch.bfloat16 else 2048 if causal and kind == torch.float32 else 4096
    features, columns = (min(_width(x), max(32, room // _width(y))) for x, y in ((d, e), (e, d)))
    if features == _width(d):
        return (_Block(features, _width(e), 1, BOTH),)
    return (
        _Block(features, _width(e), divided(d, features), KEYS),
        _Block(_width(d), columns, divided(e, columns), VALUES),
    )


@torch.library.custom_op("avow::separable_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, how much was lost, and the sums before each part, or over all keys."""
    q, k, v = row_contiguous(q, k, v)
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    factor, parts, layout = _LOG2E / temperature, _parts(q, k, e, causal), _layout(q, e, causal)
    shape, columns = _shape(layout, q, k, e), divided(e, layout.columns)
    whole = shape._replace(H=g, WHOLE=not causal)
    known = chunking.sums_before(separable_kernels.column_sums, k, v, (factor,), ((d,), (d,)), parts, whole, layout)
    out = q.new_empty(b, h, n, e)
    if causal:
        lost = q.new_empty(b * h, parts.parts, dtype=torch.int32)
        rest = None, known, out, lost, None, None, n, parts.length, factor, 1.0
        grid, inputs = (b * h, parts.parts, columns), {"x": q, "y": k, "z": v}
        launch(separable_kernels.causal_rows, grid, inputs, *rest, shape=shape, layout=layout)
    else:
        lost = torch.zeros(b * h, 1, dtype=torch.int32, device=q.device)
        grid = (b * h, divided(n, shape.C * _MANY), columns)
        launch(separable_kernels.whole_rows, grid, {"x": q}, known, out, n, factor, shape=shape, layout=layout)
    assert known.tops is not None
    return out, lost, known.sums, known.totals, known.tops


@_forward.register_fake
def _(q, k, v, causal, temperature):
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    parts = _parts(q, k, e, True).parts if causal else 1
    held = (b * g, parts) if causal else (b, g)
    lost = q.new_empty(b * h, parts, dtype=torch.int32)
    return q.new_empty(b, h, n, e), lost, *blank(q, (*held, d, e), (*held, d), (*held, d))


class _Marks(NamedTuple):
    """What the scan forward leaves for the scan back: dq, δ, and totals, tops and sums of σc before each chunk."""

    dq: Float[Tensor, "b h n d"]
    slopes: Float32[Tensor, "b h n"]
    totals: Float32[Tensor, "bg chunks d"]
    tops: Float32[Tensor, "bg chunks d"]
    pulls: Float32[Tensor, "bh chunks d"]


def _causal_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, known: Sums, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows that see the keys up to their own, given what lies before each part."""
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    layout, parts, blocks = _gradient_layout(q, e, True), _parts(q, k, e, True), _blocks(d, e, q.dtype, True)
    shape = _shape(layout, q, k, e)
    chunks = parts.parts * (parts.length // shape.C)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    marks = _Marks(dq, *blank(q, (b, h, n), (b * g, chunks, d), (b * g, chunks, d), (b * h, chunks, d)))
    sums, pulls, lows = blank(q, (b * h, parts.parts, d, e), (b * h, parts.parts, d), (b * g, parts.parts, d))
    inputs, sizes = {"x": q, "y": k, "z": v, "g": gradient}, (n, parts.length, _LOG2E / temperature, 1 / temperature)
    rows = known, out, None, marks, Sums(sums, pulls, lows), *sizes
    grid = (b * h, parts.parts, blocks[0].programs)
    launch(separable_kernels.causal_rows, grid, inputs, *rows, shape=blocks[0].of(shape), layout=layout)
    if h > g:
        sums, pulls = (x.unflatten(0, (b * g, -1)).sum(1) for x in (sums, pulls))
    keys = marks, before_parts(Sums(sums, pulls, lows), parts, reverse=True), dk, dv, *sizes
    for block in blocks:
        grid, own = (b * g, parts.parts, block.programs), block.of(shape)._replace(H=g)
        launch(separable_kernels.causal_key_gradients, grid, inputs, *keys, shape=own, layout=layout)
    return dq, dk, dv


def _whole_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, known: Sums, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows that see every key, given the sums over all of them."""
    (b, h, n, d), (g, s), e = q.shape, k.shape[1:3], v.shape[3]
    layout, blocks = _gradient_layout(q, e, False), _blocks(d, e, q.dtype, False)
    shape, first, sizes = _shape(layout, q, k, e), blocks[0], (_LOG2E / temperature, 1 / temperature)
    known = known._replace(totals=torch.where(known.totals > 0, known.totals, 1.0))
    means = known.sums / known.totals.unsqueeze(-1)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    parts = cut_for(n, b * h * first.programs, 2 if first.finds == BOTH else 1, q.device)
    (sums,) = blank(q, (b * h, parts.parts, d, e))
    grid, rows = (b * h, parts.parts, first.programs), (out, means, dq, sums, n, parts.length, *sizes)
    inputs = {"x": q, "g": gradient}
    launch(separable_kernels.whole_query_gradients, grid, inputs, *rows, shape=first.of(shape), layout=layout)
    felt = sums.view(b, g, -1, d, e).sum(2)  # (b, g, d, e)
    # Of the factors that products are made of: where a feature is one key's alone, the two cancel.
    factors = felt.to(torch.bfloat16).float() if q.dtype == torch.bfloat16 else felt
    keys = known, felt, (factors * means).sum(-1), dk, dv, s, *sizes
    for block in blocks:
        grid = (b * g, divided(max(s, 1), shape.C * _MANY), block.programs)
        own = block.of(shape)._replace(H=g)
        launch(separable_kernels.whole_key_gradients, grid, {"y": k, "z": v}, *keys, shape=own, layout=layout)
    return dq, dk, dv


@torch.library.custom_op("avow::separable_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, held: list[Tensor], causal: bool, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the rows and from the sums over all keys, or before each part."""
    gradient, q, k, v = row_contiguous(gradient, q, k, v)
    out, *sums = held
    gradients = _causal_gradients if causal else _whole_gradients
    return gradients(gradient, q, k, v, out, Sums(*sums), temperature)


chunking.register_gradients(_forward, _backward, unused=(1,))
