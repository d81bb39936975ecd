"""Separable attention: softmax over the features of Q, softmax over the positions of K, both inside the kernels.

Without a mask, keys and values are read once and so are queries: the least there is. Causal rows read keys and values
a second time. Gradients, too, compute the softmaxes where they need them, and write nothing of a sequence's length but
themselves and a number per row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from avow.errors import ShapeError
from avow.kernels import separable_kernels
from avow.kernels.chunking import Cut, Sums, before_parts, cut_for, divided, padded
from avow.kernels.linear_attention import blank, check, like_inputs
from avow.kernels.separable_kernels import BOTH, KEYS, VALUES
from avow.kernels.tile_ops import Shape, interpreted, row_contiguous, view

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
    check(q, k if causal else q[:, : k.shape[1]], v if causal else q[:, : k.shape[1]])
    if q.shape[3] > 256:
        raise ShapeError("dim of q", q.shape[3], "must be at most 256", "split the head")
    out, missing, *_ = _forward(q, k, v, causal, temperature)
    return SeparableMean(out, missing.any())


def steps(q: Tensor, k: Tensor, e: int, causal: bool) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    shape, parts = _shape(q, k, e)[0], _parts(q, k, e, causal)
    # Through the sums of a part and those of all before it; a causal key then goes through the rows of another.
    return (2 if causal else 1) * divided(parts.length, shape.C) + parts.parts


def _parts(q: Tensor, k: Tensor, e: int, causal: bool) -> Cut:
    (b, h), d = q.shape[:2], q.shape[3]
    blocks = divided(e, _shape(q, k, e)[0].EB)
    # Programs that a processor's registers hold: those of causal rows have more to remember.
    resident = 1 if d > 64 else 3 if not causal and e <= 64 and q.dtype == torch.bfloat16 else 2
    return cut_for(k.shape[2], b * (h if causal else k.shape[1]) * blocks, resident, q.device)


def _shape(q: Tensor, k: Tensor, e: int) -> tuple[Shape, dict[str, int]]:
    """What kernels of rows are compiled for, and their warps and loads under way."""
    h, g, d, kind = q.shape[1], k.shape[1], q.shape[3], q.dtype
    wide = kind != torch.bfloat16
    columns = min(padded(e), 32 if wide else max(16, min(128, 16384 // padded(d))))
    precision = "tf32x3" if kind == torch.float32 else "tf32"
    shape = Shape(h, h // g, d, padded(d), e, columns, 32 if wide or d > 128 else _CHUNK, precision)
    shape = shape._replace(KIND=tl.float32 if wide else tl.bfloat16, FAST=not interpreted(), MB=padded(d), MANY=_MANY)
    return shape, {"num_warps": 4 if max(d, columns) <= 64 else 8, "num_stages": 2 if wide else 3}


def _width(x: int) -> int:
    """How wide a tile of gradients is: factors of 16 columns, once computed, are not multiplied rightly by every
    Triton."""
    return max(32, padded(x))


def _gradient_shape(q: Tensor, k: Tensor, e: int, causal: bool) -> tuple[Shape, dict[str, int]]:
    """What kernels of gradients are compiled for, but for the features and columns of a program."""
    (shape, _), d, kind = _shape(q, k, e), q.shape[3], q.dtype
    wide = kind != torch.bfloat16
    large = max(_width(d), _width(e))
    narrow = large <= 64 and not wide
    if causal:
        # Four matrices of as many rows as a chunk has are in registers at once.
        chunk, warps = _NARROW if narrow else (16, 8)
    else:
        chunk, warps = (64, 4) if narrow else (16 if wide and large > 64 else 32, 8)
    deep = large <= 128 and kind != torch.float32 and not (wide and causal and large > 64)
    return shape._replace(DP=_width(d), C=chunk), {"num_warps": warps, "num_stages": 2 if deep else 1}


class _Block(NamedTuple):
    """Features and columns that a program holds, how many programs have all, and which gradients they find."""

    features: int
    columns: int
    programs: int
    finds: int

    def of(self, shape: Shape) -> Shape:
        return shape._replace(MB=self.features, EB=self.columns, MODE=self.finds)


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
    (b, h, n, d), (g, s), e = q.shape, k.shape[1:3], v.shape[3]
    factor, (shape, options), parts = _LOG2E / temperature, _shape(q, k, e), _parts(q, k, e, causal)
    shape = shape._replace(x_row=q.stride(2), y_row=k.stride(2), z_row=v.stride(2))
    blocks = divided(e, shape.EB)
    added = Sums(*blank(q, *((b * g, parts.parts, *rest) for rest in ((d, e), (d,), (d,)))))
    if parts.parts > 1 or not causal:
        separable_kernels.column_sums[(b * g, parts.parts, blocks)](
            view(k), view(v), added, s, parts.length, factor, S=shape._replace(H=g, WHOLE=not causal), **options
        )
    known = before_parts(added, parts, batch=None if causal else b)
    out = q.new_empty(b, h, n, e)
    if causal:
        lost = q.new_empty(b * h, parts.parts, dtype=torch.int32)
        unused = (None, None)
        inputs = view(q), view(k), view(v), None
        separable_kernels.causal_rows[(b * h, parts.parts, blocks)](
            *inputs, known, out, lost, *unused, n, parts.length, factor, 1.0, S=shape, **options
        )
    else:
        lost = torch.zeros(b * h, 1, dtype=torch.int32, device=q.device)
        separable_kernels.whole_rows[(b * h, divided(n, shape.C * _MANY), blocks)](
            view(q), known, out, n, factor, S=shape, **options
        )
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
    shape, options = _gradient_shape(q, k, e, True)
    shape = shape._replace(x_row=q.stride(2), y_row=k.stride(2), z_row=v.stride(2), g_row=gradient.stride(2))
    parts, blocks = _parts(q, k, e, True), _blocks(d, e, q.dtype, True)
    chunks = parts.parts * (parts.length // shape.C)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    marks = _Marks(dq, *blank(q, (b, h, n), (b * g, chunks, d), (b * g, chunks, d), (b * h, chunks, d)))
    sums, pulls, lows = blank(q, (b * h, parts.parts, d, e), (b * h, parts.parts, d), (b * g, parts.parts, d))
    inputs, sizes = map(view, (q, k, v, gradient)), (n, parts.length, _LOG2E / temperature, 1 / temperature)
    x, y, z, w = inputs
    separable_kernels.causal_rows[(b * h, parts.parts, blocks[0].programs)](
        x, y, z, w, known, out, None, marks, Sums(sums, pulls, lows), *sizes, S=blocks[0].of(shape), **options
    )
    if h > g:
        sums, pulls = (x.unflatten(0, (b * g, -1)).sum(1) for x in (sums, pulls))
    after = before_parts(Sums(sums, pulls, lows), parts, reverse=True)
    for block in blocks:
        separable_kernels.causal_key_gradients[(b * g, parts.parts, block.programs)](
            x, y, z, w, marks, after, dk, dv, *sizes, S=block.of(shape)._replace(H=g), **options
        )
    return dq, dk, dv


def _whole_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, known: Sums, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows that see every key, given the sums over all of them."""
    (b, h, n, d), (g, s), e = q.shape, k.shape[1:3], v.shape[3]
    shape, options = _gradient_shape(q, k, e, False)
    shape = shape._replace(x_row=q.stride(2), y_row=k.stride(2), z_row=v.stride(2), g_row=gradient.stride(2))
    factor, cold, blocks = _LOG2E / temperature, 1 / temperature, _blocks(d, e, q.dtype, False)
    first = blocks[0]
    known = known._replace(totals=torch.where(known.totals > 0, known.totals, 1.0))
    means = known.sums / known.totals.unsqueeze(-1)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    parts = cut_for(n, b * h * first.programs, 2 if first.finds == BOTH else 1, q.device)
    (sums,) = blank(q, (b * h, parts.parts, d, e))
    separable_kernels.whole_query_gradients[(b * h, parts.parts, first.programs)](
        view(q), view(gradient), out, means, dq, sums, n, parts.length, factor, cold, S=first.of(shape), **options
    )
    felt = sums.view(b, g, -1, d, e).sum(2)  # (b, g, d, e)
    # Of the factors that products are made of: where a feature is one key's alone, the two cancel.
    factors = felt.to(torch.bfloat16).float() if q.dtype == torch.bfloat16 else felt
    pulls = (factors * means).sum(-1)
    for block in blocks:
        separable_kernels.whole_key_gradients[(b * g, divided(max(s, 1), shape.C * _MANY), block.programs)](
            view(k), view(v), known, felt, pulls, dk, dv, s, factor, cold, S=block.of(shape)._replace(H=g), **options
        )
    return dq, dk, dv


@torch.library.custom_op("avow::separable_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    totals: Tensor,
    tops: Tensor,
    causal: bool,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the sums over all keys, or from those before each part."""
    gradient, q, k, v = row_contiguous(gradient, q, k, v)
    gradients = _causal_gradients if causal else _whole_gradients
    return gradients(gradient, q, k, v, out, Sums(sums, totals, tops), temperature)


_backward.register_fake(like_inputs)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.temperature = inputs
    ctx.save_for_backward(q, k, v, output[0], *output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, gradient: Tensor, *rest: Any) -> Any:
    return *_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.temperature), None, None


_forward.register_autograd(_gradients, setup_context=_keep)
