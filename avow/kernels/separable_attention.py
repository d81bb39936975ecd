"""Separable attention: softmax over the features of Q, softmax over the positions of K, both inside the kernels.

Without a mask, keys and values are read once and so are queries: the least there is. Causal rows read keys and values
a second time. Gradients go through features that are written out, which are no wider than the keys themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from avow.errors import ParameterError, ShapeError
from avow.kernels import causal_scan, cuts, separable_scan
from avow.kernels.cuts import Cut, padded
from avow.kernels.linear_attention import LinearState, check, linear_attention
from avow.kernels.log_prefixes import log_prefixes
from avow.kernels.separable_twin import ColumnSums, SeparableMean, separable_attention_twin

_LOG2E = math.log2(math.e)
# Rows of a chunk, and chunks of rows per program.
_CHUNK, _MANY = 64, 8


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
        begin = [initial.sums.contiguous(), initial.total.contiguous(), initial.top * _LOG2E]
    out, missing, sums, total, top = _forward(q, k, v, causal, temperature, *begin, starts)
    return SeparableMean(out, missing.any(), ColumnSums(sums, total, top / _LOG2E))


def steps(q: Tensor, k: Tensor, e: int, causal: bool) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    constants = _constants(q.shape[3], e, q.dtype)
    parts = _parts(q, k, e, causal)
    return triton.cdiv(parts.length, constants["C"]) + parts.parts


def _parts(q: Tensor, k: Tensor, e: int, causal: bool) -> Cut:
    (b, h), d = q.shape[:2], q.shape[3]
    blocks = triton.cdiv(e, _constants(d, e, q.dtype)["EB"])
    return cuts.cut_for(k.shape[2], b * (h if causal else k.shape[1]) * blocks, 2 if d <= 64 else 1)


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


def _summed(
    k: Tensor, v: Tensor, factor: float, parts: Cut, begin: tuple[Tensor | None, ...], whole: bool
) -> list[Tensor]:
    """What lies before each part, relative to tops; or, of all parts, the whole sums and tops."""
    (b, g, n, d), e = k.shape, v.shape[3]
    constants = _constants(d, e, k.dtype)
    blocks = triton.cdiv(e, constants["EB"])
    sums = k.new_empty(b * g, parts.parts, d, e, dtype=torch.float32)
    totals, tops, lower = (k.new_empty(b * g, parts.parts, d, dtype=torch.float32) for _ in range(3))
    packed = parts.table is not None
    if whole or parts.parts > 1:
        separable_scan.column_sums[(b * g, parts.parts, blocks)](
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
            PACKED=packed,
            **constants,
        )
    shapes = ((b, g, d, e), (b, g, d), (b, g, d)) if whole else ((0,), (0,), (0,))
    last = [k.new_empty(shape, dtype=torch.float32) for shape in shapes]
    sequences = 1 if parts.ends is None else len(parts.ends) - 1
    for held, width, given, final in ((sums, e, begin[0], last[0]), (totals, 1, begin[1], last[1])):
        block = min(1024, padded(d * width))
        log_prefixes[(b * g, triton.cdiv(d * width, block), sequences)](
            held,
            tops,
            lower,
            sums if given is None else given,
            sums if begin[2] is None else begin[2],
            parts.ends,
            final,
            last[2],
            parts.parts,
            b * g,
            SIZE=d * width,
            WIDTH=width,
            LOGS=d,
            BLOCK=block,
            GIVEN=given is not None,
            WHOLE=whole,
            REVERSE=False,
            PACKED=packed,
            num_warps=4,
        )
    return last if whole else [sums, totals, lower]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, what was lost, and the sums over all keys."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    factor, constants = _LOG2E / temperature, _constants(d, e, q.dtype)
    blocks = triton.cdiv(e, constants["EB"])
    whole = _parts(q, k, e, causal)
    parts = whole if starts is None else cuts.cut_packed(whole, starts, n)
    begin = (initial, initial_total, initial_top)
    known = _summed(k, v, factor, parts, begin, not causal)
    out = q.new_empty(b, h, n, e)
    if not causal:
        lost = torch.zeros(b * h, 1, dtype=torch.int32, device=q.device)
        separable_scan.mixed_rows[(b * h, triton.cdiv(n, constants["C"] * _MANY), blocks)](
            q, known[0], known[1], out, *q.stride()[:3], n, factor, H=h, R=h // g, MANY=_MANY, **constants
        )
        return out, lost, *known  # type: ignore[return-value]
    sequences = b if starts is None else len(starts) - 1
    last = [q.new_empty(sequences, g, *rest, dtype=torch.float32) for rest in ((d, e), (d,), (d,))]
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
        **constants,
    )
    return out, lost, *last  # type: ignore[return-value]


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    temperature: float,
    initial: Tensor | None,
    initial_total: Tensor | None,
    initial_top: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    sequences = b if starts is None else len(starts) - 1
    parts: int | torch.SymInt = 1
    if causal:
        parts = _parts(q, k, e, True).parts if starts is None else torch.library.get_ctx().new_dynamic_size()
    last = (q.new_empty(sequences, g, *rest, dtype=torch.float32) for rest in ((d, e), (d,), (d,)))
    return q.new_empty(b, h, n, e), q.new_empty(b * h, parts, dtype=torch.int32), *last  # type: ignore[return-value]


def _keep(ctx, inputs, output):
    q, k, v, causal, temperature, *begin, starts = inputs
    ctx.save_for_backward(q, k, v, *begin, starts)
    ctx.causal, ctx.temperature = causal, temperature
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    q, k, v, *begin, starts = ctx.saved_tensors
    initial = None if begin[0] is None else ColumnSums(begin[0], begin[1], begin[2] / _LOG2E)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if ctx.causal and starts is None:
            out = _by_linear(q, k, v, ctx.temperature, initial)
        else:
            out = separable_attention_twin(q, k, v, ctx.causal, ctx.temperature, initial, starts).out
        found = torch.autograd.grad(out, (q, k, v), gradient)
    return *found, None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _by_linear(q: Tensor, k: Tensor, v: Tensor, temperature: float, initial: ColumnSums | None) -> Tensor:
    """Causal rows as linear attention of features that are written out, as wide as the head: for their gradients.

    One reference serves all keys of a feature, so that gradients of rows before a rise of e^80 are lost.
    """
    log = k.float() / temperature
    top = log.detach().amax(-2, keepdim=True)  # (b, g, 1, d)
    begin = None
    if initial is not None:
        top = torch.maximum(top, initial.top.unsqueeze(-2))
        shrink = torch.exp(initial.top.unsqueeze(-2) - top).mT  # (b, g, d, 1)
        begin = LinearState(initial.sums * shrink, initial.total * shrink.squeeze(-1))
    keys = torch.exp(log - top)
    prefix = keys.cumsum(-2)
    if begin is not None:
        prefix = prefix + begin.total.unsqueeze(-2)
    prefix = prefix.repeat_interleave(q.shape[1] // k.shape[1], 1)
    rows = torch.softmax(q.float() / temperature, -1) / prefix.clamp(min=torch.finfo(torch.float32).tiny)
    return linear_attention(rows, keys, v.float(), False, begin)[0].to(q.dtype)
