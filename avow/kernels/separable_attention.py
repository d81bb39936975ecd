"""Separable attention: softmax over the features of Q, softmax over the positions of K, both inside the kernels.

Without a mask, keys and values are read once and so are queries: the least there is. Causal rows read keys and values
a second time. Gradients, too, compute the softmaxes where they need them, and write nothing of a sequence's length but
themselves and a number per row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from avow.errors import ParameterError, ShapeError
from avow.kernels import causal_scan, chunking, separable_columns, separable_scan
from avow.kernels.chunking import Cut, padded
from avow.kernels.linear_attention import blank, check, like_inputs
from avow.kernels.log_prefixes import Begin, LogSums, before_parts
from avow.kernels.separable_backward import causal_gradients, whole_gradients
from avow.kernels.tile_ops import interpreted

_LOG2E = math.log2(math.e)
# Rows of a chunk, and chunks of rows per program.
_CHUNK, _MANY = 64, 8


class ColumnSums(NamedTuple):
    """All that is remembered of the keys so far: sums relative to e^top, feature by feature."""

    sums: Float32[Tensor, "s g d e"]
    total: Float32[Tensor, "s g d"]
    top: Float32[Tensor, "s g d"]


class SeparableMean(NamedTuple):
    """The answer, whether keys rose too steeply for float32 to carry it, and the sums after the last key."""

    out: Float[Tensor, "b h n e"]
    lost: Bool[Tensor, ""]
    last: ColumnSums


def separable_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    temperature: float = 1.0,
    initial: ColumnSums | None = None,
    starts: Int[Tensor, "sequences+1"] | None = None,
) -> SeparableMean:
    """Every row's mixture of the columns of K and V, over all keys or over those up to its own."""
    check(q, k if causal else q[:, : k.shape[1]], v if causal else q[:, : k.shape[1]], starts)
    if q.shape[3] > 256:
        raise ShapeError("dim of q", q.shape[3], "must be at most 256", "split the head")
    if starts is not None and not causal:
        raise ParameterError("causal", causal, "must be True where sequences are packed", "call once per sequence")
    begin: list[Tensor | None] = [None, None, None]
    if initial is not None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in initial):
            raise ParameterError("initial", "a state with gradients", "must be without", "detach it")
        begin = [initial.sums.contiguous(), initial.total.contiguous(), initial.top * _LOG2E]
    out, missing, sums, total, top, *_ = _forward(q, k, v, causal, temperature, *begin, starts)
    return SeparableMean(out, missing.any(), ColumnSums(sums, total, top / _LOG2E))


def steps(q: Tensor, k: Tensor, e: int, causal: bool) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    constants = _constants(q.shape[3], e, q.dtype)
    parts = _parts(q, k, e, causal)
    # Through the sums of a part and those of all before it; a causal key then goes through the rows of another.
    return (2 if causal else 1) * triton.cdiv(parts.length, constants["C"]) + parts.parts


def _parts(q: Tensor, k: Tensor, e: int, causal: bool) -> Cut:
    (b, h), d = q.shape[:2], q.shape[3]
    blocks = triton.cdiv(e, _constants(d, e, q.dtype)["EB"])
    # Programs that a processor's registers hold: those of causal rows have more to remember.
    resident = 1 if d > 64 else 3 if not causal and e <= 64 and q.dtype == torch.bfloat16 else 2
    return chunking.cut_for(k.shape[2], b * (h if causal else k.shape[1]) * blocks, resident)


def _constants(d: int, e: int, kind: torch.dtype) -> dict[str, Any]:
    wide = kind != torch.bfloat16
    columns = min(padded(e), 32 if wide else max(16, min(128, 16384 // padded(d))))
    return {
        "D": d,
        "DP": padded(d),
        "E": e,
        "EB": columns,
        "C": 32 if wide or d > 128 else _CHUNK,
        "KIND": tl.float32 if wide else tl.bfloat16,
        "PRECISION": "tf32x3" if kind == torch.float32 else "tf32",
        "num_warps": 4 if max(d, columns) <= 64 else 8,
        "num_stages": 2 if wide else 3,
    }


def _summed(k: Tensor, v: Tensor, factor: float, parts: Cut, begin: Begin, whole: bool) -> LogSums:
    """What lies before each part, relative to tops; or, of all parts, the whole sums and tops."""
    (b, g, n, d), e = k.shape, v.shape[3]
    constants = _constants(d, e, k.dtype)
    blocks = triton.cdiv(e, constants["EB"])
    sums = k.new_empty(b * g, parts.parts, d, e, dtype=torch.float32)
    totals, tops = (k.new_empty(b * g, parts.parts, d, dtype=torch.float32) for _ in range(2))
    if whole or parts.parts > 1:
        separable_columns.column_sums[(b * g, parts.parts, blocks)](
            k,
            v,
            parts.table,
            sums,
            totals,
            tops,
            *k.stride()[:3],
            *v.stride()[:3],
            n,
            parts.length,
            factor,
            H=g,
            WHOLE=whole,
            PACKED=parts.table is not None,
            FAST=not interpreted(),
            **constants,
        )
    return before_parts(LogSums(sums, totals, tops), parts, begin, batch=b if whole else None)


@torch.library.custom_op("avow::separable_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    temperature: float,
    initial: Tensor | None,
    initial_total: Tensor | None,
    initial_top: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, what was lost, the sums over all keys, and those before each part, for the gradients of causal rows."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    factor, constants = _LOG2E / temperature, _constants(d, e, q.dtype)
    blocks = triton.cdiv(e, constants["EB"])
    parts = chunking.cut_packed(_parts(q, k, e, causal), starts, n)
    known = _summed(k, v, factor, parts, Begin(initial, initial_total, initial_top), not causal)
    out = q.new_empty(b, h, n, e)
    if not causal:
        lost = torch.zeros(b * h, 1, dtype=torch.int32, device=q.device)
        separable_scan.mixed_rows[(b * h, triton.cdiv(n, constants["C"] * _MANY), blocks)](
            q, known.sums, known.totals, out, *q.stride()[:3], n, factor, H=h, R=h // g, MANY=_MANY, **constants
        )
        return out, lost, *known, *LogSums(*blank(q, (0,), (0,), (0,)))
    sequences = b if starts is None else len(starts) - 1
    last = LogSums(*blank(q, *((sequences, g, *rest) for rest in ((d, e), (d,), (d,)))))
    lost = q.new_empty(b * h, parts.parts, dtype=torch.int32)
    separable_scan.causal_rows[(b * h, parts.parts, blocks)](
        q,
        k,
        v,
        parts.table,
        *known,
        out,
        lost,
        *last,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        n,
        parts.length,
        factor,
        H=h,
        R=h // g,
        PACKED=parts.table is not None,
        FAST=not interpreted(),
        **constants,
    )
    return out, lost, *last, *known


@_forward.register_fake
def _(q, k, v, causal, temperature, initial, initial_total, initial_top, starts):
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    sequences = b if starts is None else len(starts) - 1
    parts: int | torch.SymInt = 1
    if causal:
        parts = _parts(q, k, e, True).parts if starts is None else torch.library.get_ctx().new_dynamic_size()
    shapes = [(sequences, g, *rest) for rest in ((d, e), (d,), (d,))]
    shapes += [(b * g, parts, *rest) for rest in ((d, e), (d,), (d,))] if causal else [(0,), (0,), (0,)]
    return q.new_empty(b, h, n, e), q.new_empty(b * h, parts, dtype=torch.int32), *blank(q, *shapes)


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
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the sums over all keys, or from those before each part."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    known, factor, cold = LogSums(sums, totals, tops), _LOG2E / temperature, 1 / temperature
    if not causal:
        return whole_gradients(gradient, q, k, v, out, known, factor, cold)
    parts = chunking.cut_packed(_parts(q, k, v.shape[3], True), starts, q.shape[2])
    return causal_gradients(gradient, q, k, v, out, known, parts, factor, cold)


_backward.register_fake(like_inputs)


def _keep(ctx, inputs, output):
    q, k, v, causal, temperature, *_, starts = inputs
    out, _, *sums = output
    ctx.save_for_backward(q, k, v, out, *(sums[3:] if causal else sums[:3]), starts)
    ctx.causal, ctx.temperature = causal, temperature
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    *kept, starts = ctx.saved_tensors
    return *_backward(gradient, *kept, ctx.causal, ctx.temperature, starts), None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
