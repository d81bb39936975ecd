r"""Causal attention by positive random features, the features computed inside the kernels.

.. math:: out_i = \frac{\sum_f φ_f(q_i) \sum_{j \le i} φ_f(k_j) v_j}{\sum_f φ_f(q_i) \sum_{j \le i} φ_f(k_j)}, \quad
          φ_f(k) = e^{\sqrt{s}\,ω_f·k - s\|k\|^2/2}

with s the scale of the logits, whose sign goes with the queries. Memory holds nothing of the size of n features,
forward or backward; directions are rounded to float16 for products with 16-bit inputs, and not at all for float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from avow.kernels import causal_scan, chunking, feature_gradients, feature_scan
from avow.kernels.chunking import Cut, divided, padded
from avow.kernels.feature_layout import Layout, constants_of, layout, layout_of_sums, numbers_of, shortened
from avow.kernels.linear_attention import blank, check, like_inputs, shared
from avow.kernels.log_prefixes import NOTHING, Begin, LogSums, before_parts

_LOG2E = math.log2(math.e)


class FeatureSums(NamedTuple):
    """All that is remembered of the keys so far: sums relative to e^top, one for each sequence and key head."""

    sums: Float32[Tensor, "s g m e"]
    total: Float32[Tensor, "s g m"]
    top: Float32[Tensor, "s g"]


class FeatureMean(NamedTuple):
    """The answer, whether every row of it is sound, and the sums after the last key."""

    out: Float[Tensor, "b h n e"]
    log_normaliser: Float32[Tensor, "b h n"]
    """To base 2, over the row's own factor; not finite where features left the range of float32."""
    last: FeatureSums


def feature_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
    initial: FeatureSums | None = None,
    starts: Int[Tensor, "sequences+1"] | None = None,
) -> FeatureMean:
    """What every row collects from the keys up to its own, by the features of these directions.

    `starts` are where packed sequences begin in a batch of one, and where the last ends. Gradients reach q, k and v,
    through the answer alone.
    """
    check(q, k, v, starts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    begin: list[Tensor | None] = [None, None, None]
    if initial is not None:
        begin = [initial.sums.contiguous(), initial.total.contiguous(), initial.top * _LOG2E]
    out, lse, last, total, top, *_ = _forward(q, k, v, directions.detach().float(), scale, *begin, starts)
    return FeatureMean(out, lse, FeatureSums(last, total, top / _LOG2E))


def _programs(heads: int, m: int, e: int, chosen: Layout) -> int:
    """How many programs share a part of all heads."""
    return heads * divided(e, chosen.columns) * divided(m, chosen.features)


def _parts(q: Tensor, m: int, e: int, starts: Tensor | None) -> Cut:
    b, h, n, d = q.shape
    whole = chunking.cut_for(n, _programs(b * h, m, e, layout(m, d, e, q.dtype)), 2)
    return chunking.cut_packed(whole, starts, n)


def steps(q: Tensor, m: int, e: int) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    (b, h, _, d), parts = q.shape, _parts(q, m, e, None)
    chosen, resident = layout_of_sums(m, d, e, q.dtype)
    pieces = chunking.pieces(parts, _programs(b * h, m, e, chosen), resident, False)
    # Through the sums of a part, those of all before it, and then the rows of another.
    return (
        divided(parts.length, pieces * chosen.chunk)
        + pieces * parts.parts
        + divided(parts.length, layout(m, d, e, q.dtype).chunk)
    )


def in_part(kind: torch.dtype) -> torch.dtype:
    """The type of what programs add up: sums over many keys leave the range of float16."""
    return torch.bfloat16 if kind == torch.bfloat16 else torch.float32


def row_lengths(x: Float[Tensor, "b h n d"]) -> Float32[Tensor, "b h n"]:
    """How long every row is."""
    b, h, n, d = x.shape
    out = x.new_empty(b, h, n, dtype=torch.float32)
    feature_scan.row_lengths[(b * h, divided(n, 128))](
        x, out, *x.stride()[:3], n, H=h, D=d, DP=padded(d), C=128, num_warps=4
    )
    return out


def added(shares: Float[Tensor, "blocks *rest"], kind: torch.dtype) -> Float[Tensor, "*rest"]:
    """The sum of what programs made, rounded once."""
    out = shares.new_empty(shares.shape[1:], dtype=kind)
    count, width = out.numel(), out.shape[-1]
    if not count:  # queries' gradients have no columns of values beside them
        return out
    grid, rows = (divided(count, 4096),), count // width
    feature_scan.added_shares[grid](shares, out, rows, WIDTH=width, NB=len(shares), MANY=4096, num_warps=8)
    return out


def shared_out(
    numerators: Float[Tensor, "blocks b h n e"],
    normalisers: Float32[Tensor, "blocks b h n"],
    seen: Float32[Tensor, "b h n"],
    kind: torch.dtype,
) -> tuple[Float[Tensor, "b h n e"], Float32[Tensor, "b h n"]]:
    """Rows from all blocks of features, and their normalisers' logarithms, which take the place of the tops seen."""
    blocks, b, h, n, e = numerators.shape
    out, count = numerators.new_empty(b, h, n, e, dtype=kind), b * h * n
    feature_scan.shared_rows[(divided(count, 64),)](
        numerators, normalisers, seen, out, seen, count, NB=blocks, E=e, EP=padded(e), C=64, num_warps=4
    )
    return out, seen


def known(
    y: Float[Tensor, "b h n d"],
    z: Float[Tensor, "b h n e"],
    lengths: Float32[Tensor, "b h n"],
    lse: Float32[Tensor, "b h n"] | None,
    slope: Float32[Tensor, "b h n"] | None,
    parts: Cut,
    along: Float[Tensor, "m d"],
    scale: float,
    initial: Begin | None,
) -> LogSums:
    """Sums over keys and values, or, given normalisers and slopes, over rows and gradients from the end.

    They are those before each part; where nothing is said of what comes `initial`ly, those of all parts.
    """
    (b, h, n, d), e, m = y.shape, z.shape[3], along.shape[0]
    (chosen, resident), numbers = layout_of_sums(m, d, e, y.dtype), numbers_of(scale, m)
    keys, whole = lse is None, initial is None
    programs = _programs(b * h, m, e, chosen)
    pieces = chunking.pieces(parts, programs, resident, whole)
    many = parts.parts * pieces
    sums, totals = (y.new_empty(b * h, many, *rest, dtype=torch.float32) for rest in ((m, e), (m,)))
    tops = y.new_empty(b * h, many, dtype=torch.float32)
    if whole or parts.parts > 1:
        feature_scan.feature_sums[(b * h, many, programs // (b * h))](
            y,
            z,
            lengths,
            lse,
            slope,
            along,
            parts.table,
            sums,
            totals,
            tops,
            *y.stride()[:3],
            *z.stride()[:3],
            n,
            parts.length,
            numbers["key_factor" if keys else "factor"],
            numbers["lift"],
            numbers["half"],
            numbers["power"],
            H=h,
            PIECES=pieces,
            KEYS=keys,
            WHOLE=whole,
            PACKED=parts.table is not None,
            **constants_of(m, d, e, chosen, y.dtype, scale),
        )
    found = LogSums(sums, totals, tops)
    return before_parts(found, parts, initial or NOTHING, not keys, pieces, b if whole else None)


@torch.library.custom_op("avow::feature_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    scale: float,
    initial: Tensor | None,
    initial_total: Tensor | None,
    initial_top: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, their normalisers' logarithms, the final sums, what lies before each part, and lengths of rows and keys."""
    q, k, v = (causal_scan.rowwise(x) for x in (q, k, v))
    (b, h, n, d), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts, (along, _) = _parts(q, m, e, starts), shortened(directions, q.dtype)
    x_lengths, y_lengths = row_lengths(q), row_lengths(k)
    begin = Begin(initial, initial_total, initial_top)
    before = known(k, v, y_lengths, None, None, parts, along, scale, begin)
    chosen = layout(m, d, e, q.dtype)
    sequences = b if starts is None else len(starts) - 1
    blocks = divided(m, chosen.features)
    numerators = q.new_empty(blocks, b, h, n, e, dtype=in_part(q.dtype))
    normalisers = q.new_empty(blocks, b, h, n, dtype=torch.float32)
    seen = q.new_empty(b, h, n, dtype=torch.float32)
    last = LogSums(*blank(q, (sequences, g, m, e), (sequences, g, m), (sequences, g)))
    feature_scan.feature_rows[(b * h, parts.parts, blocks * divided(e, chosen.columns))](
        q,
        k,
        v,
        x_lengths,
        y_lengths,
        along,
        parts.table,
        *before,
        numerators,
        normalisers,
        seen,
        *last,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        n,
        parts.length,
        *numbers_of(scale, m).values(),
        H=h,
        R=h // g,
        PACKED=parts.table is not None,
        **constants_of(m, d, e, chosen, q.dtype, scale),
    )
    out, lse = shared_out(numerators, normalisers, seen, q.dtype)
    return out, lse, *last, *before, x_lengths, y_lengths


@_forward.register_fake
def _(q, k, v, directions, scale, initial, initial_total, initial_top, starts):
    (b, h, n, _), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    sequences = b if starts is None else len(starts) - 1
    parts = torch.library.get_ctx().new_dynamic_size() if starts is not None else _parts(q, m, e, None).parts
    shapes = ((b, h, n), (sequences, g, m, e), (sequences, g, m), (sequences, g))
    held = ((b * g, parts, m, e), (b * g, parts, m), (b * g, parts), (b, h, n), (b, g, n))
    return q.new_empty(b, h, n, e), *blank(q, *shapes, *held)


@torch.library.custom_op("avow::feature_attention_backward", mutates_args=())
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
    totals: Tensor,
    tops: Tensor,
    x_lengths: Tensor,
    y_lengths: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradient, q, k, v = (causal_scan.rowwise(x) for x in (gradient, q, k, v))
    (b, h, n, d), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts, numbers, (along, back) = _parts(q, m, e, starts), numbers_of(scale, m), shortened(directions, q.dtype)
    slope = causal_scan.slopes(gradient, out)
    chosen = layout(m, d, e, q.dtype)
    chosen = chosen._replace(stages=chosen.gradient_stages)
    blocks, columns = divided(m, chosen.features), divided(e, chosen.columns)
    behind = known(q, gradient, x_lengths, lse, slope, parts, along, scale, NOTHING)
    kept = in_part(q.dtype)
    dq, dk = (q.new_empty(blocks * columns, b, h, n, d, dtype=kept) for _ in range(2))
    dv = q.new_empty(blocks, b, h, n, e, dtype=kept)
    given = (q, k, v, gradient, x_lengths, y_lengths, lse, slope, along, back, parts.table)
    strides = [x for tensor in given[:4] for x in tensor.stride()[:3]]
    shape = (n, parts.length, *numbers.values())
    constants = {
        "H": h,
        "R": h // g,
        "PACKED": parts.table is not None,
        **constants_of(m, d, e, chosen, q.dtype, scale),
    }
    grid = (b * h, parts.parts, blocks * columns)
    feature_gradients.query_gradients[grid](*given, sums, totals, tops, dq, *strides, *shape, **constants)
    feature_gradients.key_gradients[grid](*given, *behind, dk, dv, *strides, *shape, **constants)
    # What siblings add to a key is rounded once, too.
    felt = torch.float32 if g != h else k.dtype
    dk, dv = (shared(added(x, felt), g).to(k.dtype) for x in (dk, dv))
    return added(dq, q.dtype), dk, dv


_backward.register_fake(like_inputs)


def _keep(ctx, inputs, output):
    q, k, v, directions, scale, *_, starts = inputs
    out, lse, _, _, _, *rest = output
    ctx.save_for_backward(q, k, v, directions, out, lse, *rest, starts)
    ctx.scale = scale
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    q, k, v, directions, *found = ctx.saved_tensors
    return *_backward(gradient, q, k, v, directions, ctx.scale, *found), None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
