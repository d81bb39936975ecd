r"""Random features where every row sees every key: one reading of keys and values, one of queries.

Rows meet one state, relative to the largest key's logarithm; gradients are rows and keys that meet one state each, that
of keys and values, and that of queries and gradients with rows that weigh 2^-lse. Features are never written.
"""

# Triton adds tuples, but does not unpack them into new ones; and they grow, which types of tuples do not.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import causal_scan, feature_scan
from avow.kernels.causal_scan import padded, tile
from avow.kernels.feature_attention import constants_of, in_pieces, layout, numbers_of
from avow.kernels.feature_scan import FEW, alone, featured, lengths, pieces, state_of, total_of
from avow.kernels.linear_attention import check, shared

_LN2 = tl.constexpr(math.log(2))
_TINY = tl.constexpr(2.0**-60)
_MEANS, _QUERIES, _KEYS = 0, 1, 2
_MEAN_MODE, _QUERY_MODE, _KEY_MODE = (tl.constexpr(mode) for mode in (_MEANS, _QUERIES, _KEYS))
# Chunks of rows per program.
_MANY = 4


class WholeMean(NamedTuple):
    """The answer, and whether it is sound: logarithms of normalisers to base 2, not finite where float32 was left."""

    out: Float[Tensor, "b h n e"]
    log_normaliser: Float32[Tensor, "b h n"]


@triton.jit
def _met(
    x,
    g,
    lse,
    slope,
    high,
    low,
    before,
    totals,
    tops,
    out,
    gradient,
    x_batch,
    x_head,
    x_row,
    g_batch,
    g_head,
    g_row,
    rows,
    factor,
    lift,
    half,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    C: tl.constexpr,
    MANY: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows and the state they meet: means; gradients of queries; or gradients of keys, and of values as `out`."""
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    x += batch * x_batch + own * x_head
    g += batch * g_batch + own * g_head
    row, entry = tl.arange(0, C), tl.arange(0, DP)
    column = block * EB + tl.arange(0, EB)
    place = (head // R).to(tl.int64)
    states, counts, known = (), (), ()
    for b in tl.static_range(NB):
        known = known + (pieces(high, low, b, M, MB, D, DP),)
        at, inside = state_of(before + place * (M * E), b, column, M, MB, E)
        states = states + (tl.load(at, mask=inside, other=0.0).to(KIND),)
        at, inside = total_of(totals + place * M, b, M, MB)
        if MODE != _MEAN_MODE:
            # What every block of columns would add is added by the first.
            inside = inside & (block == 0)
        counts = counts + (tl.load(at, mask=inside, other=0.0).to(KIND),)
    top = tl.load(tops + place)
    target = gradient + (block * tl.num_programs(0) + head).to(tl.int64) * rows * D
    for step in range(MANY):
        start = (part * MANY + step).to(tl.int64) * C
        left = rows - start
        rest = head.to(tl.int64) * rows + start
        xs = tile(x + start * x_row, x_row, row, entry, left, D, DP)
        square, long = lengths(xs)
        guess = lift * long
        goal = out + (rest + row)[:, None] * E + column[None, :]
        there = (row < left)[:, None] & (column < E)[None, :]
        if MODE == _MEAN_MODE:
            found = tl.zeros((C, EB), tl.float32)
            met = tl.zeros((C, FEW), tl.float32)
            for b in tl.static_range(NB):
                first, second = known[b]
                ones = featured(xs, first, second, factor, guess, b, M, MB, PRECISION).to(KIND)
                found = tl.dot(ones, states[b], found, input_precision=PRECISION)
                met = tl.dot(ones, counts[b], met, input_precision=PRECISION)
            divisor = tl.sum(met, 1)
            sound = (divisor > _TINY) & (divisor < 1 / _TINY)
            found = found / tl.where(sound, divisor, 1.0)[:, None]
            tl.store(goal, found.to(out.dtype.element_ty), mask=there)
            told = tl.where(sound, tl.log2(tl.where(sound, divisor, 1.0)) + top, float("inf"))
            tl.store(lse + rest + row, told, mask=(row < left) & (block == 0))
        else:
            gs = tile(g + start * g_row, g_row, row, column, left, E, EB)
            if MODE == _QUERY_MODE:
                share = tl.exp2(top - tl.load(lse + rest + row, mask=row < left, other=float("inf")))
                single = share * tl.load(slope + rest + row, mask=row < left, other=0.0)
            else:
                share = tl.where(row < left, tl.exp2(top + guess - half * square), 0.0)
                single = share
            scaled = (gs.to(tl.float32) * share[:, None]).to(KIND)
            single_column = alone(single, KIND)
            pulled = tl.zeros((C, DP), tl.float32)
            values = tl.zeros((C, EB), tl.float32)
            sums = tl.zeros((C,), tl.float32)
            for b in tl.static_range(NB):
                first, second = known[b]
                wide = featured(xs, first, second, factor, guess, b, M, MB, PRECISION)
                slopes = tl.dot(scaled, tl.trans(states[b]), input_precision=PRECISION)
                slopes = tl.dot(single_column, tl.trans(counts[b]), slopes, input_precision=PRECISION) * wide
                pulled = tl.dot(slopes.to(first.dtype), tl.trans(first), pulled, input_precision=PRECISION)
                if MODE == _KEY_MODE:
                    sums += tl.sum(slopes, 1)
                    values = tl.dot(wide.to(KIND), states[b], values, input_precision=PRECISION)
            pulled = pulled * factor
            if MODE == _KEY_MODE:
                pulled = pulled - (2 * half) * sums[:, None] * xs.to(tl.float32)
                tl.store(goal, (values * share[:, None]).to(out.dtype.element_ty), mask=there)
            to = target + (start + row)[:, None] * D + entry[None, :]
            kept = (row < left)[:, None] & (entry < D)[None, :]
            tl.store(to, (pulled * _LN2).to(gradient.dtype.element_ty), mask=kept)


def _whole(
    y: Tensor, z: Tensor, high: Tensor, low: Tensor, scale: float, lse: Tensor | None, slope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, totals and tops over all keys and values, or over all rows and gradients."""
    (b, h, n, d), e, m = y.shape, z.shape[3], high.shape[0]
    chosen, numbers = layout(m, d, e, y.dtype), numbers_of(scale, m)
    parts = causal_scan.cut_for(n, b * h * triton.cdiv(e, chosen.columns), 1)
    sums = y.new_empty(b * h, parts.parts, m, e, dtype=torch.float32)
    totals = y.new_empty(b * h, parts.parts, m, dtype=torch.float32)
    tops, lower = (y.new_empty(b * h, parts.parts, dtype=torch.float32) for _ in range(2))
    feature_scan.feature_sums[(b * h, parts.parts, triton.cdiv(e, chosen.columns))](
        y,
        z,
        sums if lse is None else lse,
        sums if slope is None else slope,
        high,
        low,
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
        H=h,
        KEYS=lse is None,
        WHOLE=True,
        PACKED=False,
        **constants_of(m, d, e, chosen, y.dtype),
    )
    found = (y.new_empty(b, h, m, e, dtype=torch.float32), y.new_empty(b, h, m, dtype=torch.float32))
    top = y.new_empty(b, h, dtype=torch.float32)
    for held, width, final in ((sums, e, found[0]), (totals, 1, found[1])):
        block = min(1024, padded(m * width))
        feature_scan.log_prefixes[(b * h, triton.cdiv(m * width, block), 1)](
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
    high: Tensor,
    low: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Means or gradients of values, and gradients of x, over the state of their heads."""
    (b, h, n, d), (m, e) = x.shape, known[0].shape[2:]
    chosen, numbers = layout(m, d, e, x.dtype), numbers_of(scale, m)
    blocks = triton.cdiv(e, chosen.columns)
    out = x.new_empty(b, h, n, e if mode != _QUERIES else 0)
    gradient = x.new_empty(blocks, b, h, n, d if mode != _MEANS else 0, dtype=x.dtype if blocks == 1 else torch.float32)
    _met[(b * h, max(1, triton.cdiv(n, chosen.chunk * _MANY)), blocks)](
        x,
        g,
        lse,
        slope,
        high,
        low,
        *known,
        out,
        gradient,
        *x.stride()[:3],
        *g.stride()[:3],
        n,
        numbers["key_factor" if mode == _KEYS else "factor"],
        numbers["lift"],
        numbers["half"],
        H=h,
        R=h // known[0].shape[1],
        MANY=_MANY,
        MODE=mode,
        **constants_of(m, d, e, chosen, x.dtype),
    )
    return out, (gradient[0] if blocks == 1 else gradient.sum(0)).to(x.dtype)


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
    high, low = in_pieces(directions, q.dtype)
    known = _whole(k, v, high, low, scale, None, None)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    out, _ = _meet(_MEANS, q, q, lse, lse, known, high, low, scale)
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
    high, low = in_pieces(directions, q.dtype)
    slope = causal_scan.slopes(gradient, out, torch.ones_like(lse))[1]
    _, dq = _meet(_QUERIES, q, gradient, lse, slope, (sums, total, top), high, low, scale)
    felt = _whole(q, gradient, high, low, scale, lse, slope)
    groups = k.shape[1]
    if groups != q.shape[1]:
        # Sums of the heads that share keys, relative to the largest of their tops.
        tops = felt[2].unflatten(1, (groups, -1))  # (b, g, r)
        higher = tops.amax(-1)
        weight = torch.exp2(tops - higher.unsqueeze(-1)).flatten(1)
        felt = (shared(felt[0] * weight[..., None, None], groups), shared(felt[1] * weight[..., None], groups), higher)
    dv, dk = _meet(_KEYS, k, v, lse, slope, felt, high, low, scale)
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


def feature_attention_whole_twin(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """The same means in plain torch, on any device and for any type, float64 too."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    root, across = math.sqrt(abs(scale)), directions.to(wide).mT
    keys = k.to(wide) * root
    log = keys @ across - 0.5 * keys.square().sum(-1, keepdim=True)
    weight = torch.exp(log - log.detach().amax((-1, -2), keepdim=True))  # (b, g, s, m)
    rows = (q.to(wide) * math.copysign(root, scale) @ across).unflatten(1, (k.shape[1], -1))
    rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))  # (b, g, r, n, m)
    found = rows @ (weight.mT @ v.to(wide)).unsqueeze(2)
    return (found / (rows @ weight.sum(-2)[:, :, None, :, None])).flatten(1, 2).to(q.dtype)
