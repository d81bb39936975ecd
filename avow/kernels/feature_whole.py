r"""Random features where every row sees every key: one reading of keys and values, one of queries.

Rows meet one state, relative to the largest key's logarithm; gradients are rows and keys that meet one state each, that
of keys and values, and that of queries and gradients with rows that weigh 2^-lse. Features are never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import causal_scan, chunking, feature_apply_state
from avow.kernels.chunking import divided
from avow.kernels.feature_apply_state import KEYS, MEANS, QUERIES
from avow.kernels.feature_attention import added, in_part, known, row_lengths, shared_out
from avow.kernels.feature_layout import constants_of, layout, layout_of_sums, numbers_of, shortened
from avow.kernels.linear_attention import blank, check, like_inputs, shared
from avow.kernels.log_prefixes import LogSums

# Chunks of rows per program.
_MANY = 4


class WholeMean(NamedTuple):
    """The answer, and whether it is sound: logarithms of normalisers to base 2, not finite where float32 was left."""

    out: Float[Tensor, "b h n e"]
    log_normaliser: Float32[Tensor, "b h n"]


def _whole(
    y: Tensor, z: Tensor, lengths: Tensor, along: Tensor, scale: float, lse: Tensor | None, slope: Tensor | None
) -> LogSums:
    """Sums, totals and tops over all keys and values, or over all rows and gradients."""
    (b, h, n, d), e, m = y.shape, z.shape[3], along.shape[0]
    chosen, resident = layout_of_sums(m, d, e, y.dtype)
    parts = chunking.cut_for(n, b * h * divided(e, chosen.columns) * divided(m, chosen.features), resident)
    return known(y, z, lengths, lse, slope, parts, along, scale, None)


def _meet(
    mode: int,
    x: Tensor,
    g: Tensor,
    lse: Tensor,
    slope: Tensor,
    lengths: Tensor,
    state: LogSums,
    along: Tensor,
    back: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Means and their normalisers' logarithms; or gradients of values, and of x, over the state of their heads."""
    (b, h, n, d), (m, e) = x.shape, state.sums.shape[2:]
    chosen, numbers = layout(m, d, e, x.dtype), numbers_of(scale, m)
    blocks, columns, kept = divided(m, chosen.features), divided(e, chosen.columns), in_part(x.dtype)
    out = x.new_empty(blocks, b, h, n, e if mode != QUERIES else 0, dtype=kept)
    normalisers = x.new_empty(blocks, b, h, n if mode == MEANS else 0, dtype=torch.float32)
    gradient = x.new_empty(blocks * columns, b, h, n, d if mode != MEANS else 0, dtype=kept)
    seen = torch.empty_like(lse) if mode == MEANS else lse
    feature_apply_state.apply_state[(b * h, max(1, divided(n, chosen.chunk * _MANY)), blocks * columns)](
        x,
        g,
        lengths,
        seen,
        slope,
        along,
        back,
        *state,
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
        R=h // state.sums.shape[1],
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, their normalisers' logarithms, the state, and how long rows and keys are."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    along, back = shortened(directions, q.dtype)
    x_lengths, y_lengths = row_lengths(q), row_lengths(k)
    state = _whole(k, v, y_lengths, along, scale, None, None)
    blank = q.new_empty(q.shape[:3], dtype=torch.float32)
    out, lse = _meet(MEANS, q, q, blank, blank, x_lengths, state, along, back, scale)
    return out, lse, *state, x_lengths, y_lengths


@_forward.register_fake
def _(q, k, v, directions, scale):
    (b, h, n, _), (g, s), e, m = q.shape, k.shape[1:3], v.shape[3], directions.shape[0]
    shapes = ((b, h, n), (b, g, m, e), (b, g, m), (b, g), (b, h, n), (b, g, s))
    return q.new_empty(b, h, n, e), *blank(q, *shapes)


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
    x_lengths: Tensor,
    y_lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    along, back = shortened(directions, q.dtype)
    slope = causal_scan.slopes(gradient, out)
    _, dq = _meet(QUERIES, q, gradient, lse, slope, x_lengths, LogSums(sums, total, top), along, back, scale)
    felt = _whole(q, gradient, x_lengths, along, scale, lse, slope)
    groups = k.shape[1]
    if groups != q.shape[1]:
        # Sums of the heads that share keys, relative to the largest of their tops.
        tops = felt.tops.unflatten(1, (groups, -1))  # (b, g, r)
        higher = tops.amax(-1)
        weight = torch.exp2(tops - higher.unsqueeze(-1)).flatten(1)
        sums, total = felt.sums * weight[..., None, None], felt.totals * weight[..., None]
        felt = LogSums(shared(sums, groups), shared(total, groups), higher)
    dv, dk = _meet(KEYS, k, v, lse, slope, y_lengths, felt, along, back, scale)
    return dq, dk, dv


_backward.register_fake(like_inputs)


def _keep(ctx, inputs, output):
    q, k, v, directions, scale = inputs
    ctx.save_for_backward(q, k, v, directions, *output)
    ctx.scale = scale
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    q, k, v, directions, *found = ctx.saved_tensors
    return *_backward(gradient, q, k, v, directions, ctx.scale, *found), None, None


_forward.register_autograd(_gradients, setup_context=_keep)
