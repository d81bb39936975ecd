r"""Random features where every row sees every key: one reading of keys and values, one of queries.

Rows meet one state, relative to the largest key's logarithm; gradients are rows and keys that meet one state each, that
of keys and values, and that of queries and gradients with rows that weigh 2^-lse. Features are never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import causal_scan, cuts, feature_meeting, feature_scan
from avow.kernels.cuts import padded
from avow.kernels.feature_attention import added, in_part, row_lengths, shared_out
from avow.kernels.feature_layout import constants_of, layout, numbers_of, shortened
from avow.kernels.feature_meeting import KEYS, MEANS, QUERIES
from avow.kernels.linear_attention import check, shared
from avow.kernels.log_prefixes import log_prefixes

# Chunks of rows per program.
_MANY = 4


class WholeMean(NamedTuple):
    """The answer, and whether it is sound: logarithms of normalisers to base 2, not finite where float32 was left."""

    out: Float[Tensor, "b h n e"]
    log_normaliser: Float32[Tensor, "b h n"]


def _whole(
    y: Tensor, z: Tensor, along: Tensor, scale: float, lse: Tensor | None, slope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, totals and tops over all keys and values, or over all rows and gradients."""
    (b, h, n, d), e, m = y.shape, z.shape[3], along.shape[0]
    chosen, numbers = layout(m, d, e, y.dtype), numbers_of(scale, m)
    shares = triton.cdiv(e, chosen.columns) * triton.cdiv(m, chosen.features)
    parts = cuts.cut_for(n, b * h * shares, 2)
    sums = y.new_empty(b * h, parts.parts, m, e, dtype=torch.float32)
    totals = y.new_empty(b * h, parts.parts, m, dtype=torch.float32)
    tops, lower = (y.new_empty(b * h, parts.parts, dtype=torch.float32) for _ in range(2))
    feature_scan.feature_sums[(b * h, parts.parts, shares)](
        y,
        z,
        row_lengths(y),
        sums if lse is None else lse,
        sums if slope is None else slope,
        along,
        None,
        sums,
        totals,
        tops,
        *y.stride()[:3],
        *z.stride()[:3],
        n,
        parts.length,
        numbers["key_factor" if lse is None else "factor"],
        numbers["lift"],
        numbers["half"],
        numbers["power"],
        H=h,
        KEYS=lse is None,
        WHOLE=True,
        PACKED=False,
        **constants_of(m, d, e, chosen, y.dtype, scale),
    )
    found = (y.new_empty(b, h, m, e, dtype=torch.float32), y.new_empty(b, h, m, dtype=torch.float32))
    top = y.new_empty(b, h, dtype=torch.float32)
    for held, width, final in ((sums, e, found[0]), (totals, 1, found[1])):
        block = min(1024, padded(m * width))
        log_prefixes[(b * h, triton.cdiv(m * width, block), 1)](
            held,
            tops,
            lower,
            sums,
            sums,
            None,
            final,
            top,
            parts.parts,
            b * h,
            SIZE=m * width,
            WIDTH=width,
            LOGS=1,
            BLOCK=block,
            GIVEN=False,
            WHOLE=True,
            REVERSE=lse is not None,
            PACKED=False,
            num_warps=4,
        )
    return *found, top


def _meet(
    mode: int,
    x: Tensor,
    g: Tensor,
    lse: Tensor,
    slope: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    along: Tensor,
    back: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Means and their normalisers' logarithms; or gradients of values, and of x, over the state of their heads."""
    (b, h, n, d), (m, e) = x.shape, known[0].shape[2:]
    chosen, numbers = layout(m, d, e, x.dtype), numbers_of(scale, m)
    blocks, columns, kept = triton.cdiv(m, chosen.features), triton.cdiv(e, chosen.columns), in_part(x.dtype)
    out = x.new_empty(blocks, b, h, n, e if mode != QUERIES else 0, dtype=kept)
    normalisers = x.new_empty(blocks, b, h, n if mode == MEANS else 0, dtype=torch.float32)
    gradient = x.new_empty(blocks * columns, b, h, n, d if mode != MEANS else 0, dtype=kept)
    seen = torch.empty_like(lse) if mode == MEANS else lse
    feature_meeting.met[(b * h, max(1, triton.cdiv(n, chosen.chunk * _MANY)), blocks * columns)](
        x,
        g,
        row_lengths(x),
        seen,
        slope,
        along,
        back,
        *known,
        out,
        normalisers,
        gradient,
        *x.stride()[:3],
        *g.stride()[:3],
        n,
        numbers["key_factor" if mode == KEYS else "factor"],
        numbers["lift"],
        numbers["half"],
        numbers["power"],
        H=h,
        R=h // known[0].shape[1],
        MANY=_MANY,
        MODE=mode,
        **constants_of(m, d, e, chosen, x.dtype, scale),
    )
    if mode == MEANS:
        return shared_out(out, normalisers, seen, x.dtype)
    return added(out, x.dtype), added(gradient, x.dtype)


def feature_attention_whole(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
) -> WholeMean:
    """What every row collects from all keys, by the features of these directions."""
    check(q, q[:, : k.shape[1]], q[:, : k.shape[1]], None)
    check(k, k, v, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return WholeMean(*_forward(q, k, v, directions.detach().float(), scale)[:2])


@torch.library.custom_op("avow::feature_attention_whole", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, their normalisers' logarithms, and the state."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    along, back = shortened(directions, q.dtype)
    known = _whole(k, v, along, scale, None, None)
    blank = q.new_empty(q.shape[:3], dtype=torch.float32)
    out, lse = _meet(MEANS, q, q, blank, blank, known, along, back, scale)
    return out, lse, *known


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, n, _), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    lse, sums, total, top = (
        q.new_empty(shape, dtype=torch.float32) for shape in ((b, h, n), (b, g, m, e), (b, g, m), (b, g))
    )
    return q.new_empty(b, h, n, e), lse, sums, total, top


@torch.library.custom_op("avow::feature_attention_whole_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    sums: Tensor,
    total: Tensor,
    top: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    along, back = shortened(directions, q.dtype)
    slope = causal_scan.slopes(gradient, out, torch.ones_like(lse))[1]
    _, dq = _meet(QUERIES, q, gradient, lse, slope, (sums, total, top), along, back, scale)
    felt = _whole(q, gradient, along, scale, lse, slope)
    groups = k.shape[1]
    if groups != q.shape[1]:
        # Sums of the heads that share keys, relative to the largest of their tops.
        tops = felt[2].unflatten(1, (groups, -1))  # (b, g, r)
        higher = tops.amax(-1)
        weight = torch.exp2(tops - higher.unsqueeze(-1)).flatten(1)
        felt = (shared(felt[0] * weight[..., None, None], groups), shared(felt[1] * weight[..., None], groups), higher)
    dv, dk = _meet(KEYS, k, v, lse, slope, felt, along, back, scale)
    return dq, dk, dv


@_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    sums: Tensor,
    total: Tensor,
    top: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output):
    q, k, v, directions, scale = inputs
    ctx.save_for_backward(q, k, v, directions, *output)
    ctx.scale = scale
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    q, k, v, directions, *found = ctx.saved_tensors
    return *_backward(gradient, q, k, v, directions, ctx.scale, *found), None, None


_forward.register_autograd(_gradients, setup_context=_keep)
