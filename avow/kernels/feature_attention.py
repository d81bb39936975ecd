r"""Causal attention by positive random features, the features computed inside the kernels.

.. math:: out_i = \frac{\sum_f φ_f(q_i) \sum_{j \le i} φ_f(k_j) v_j}{\sum_f φ_f(q_i) \sum_{j \le i} φ_f(k_j)}, \quad
          φ_f(k) = e^{\sqrt{s}\,ω_f·k - s\|k\|^2/2}

with s the scale of the logits, whose sign goes with the queries. Memory holds nothing of the size of n features,
forward or backward; directions are rounded to float16 for products with 16-bit inputs, and not at all for float32.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import feature_kernels
from avow.kernels.chunking import Cut, Sums, before_parts, cut_for, divided, padded, pieces_of
from avow.kernels.linear_attention import blank, by_key_head, check, like_inputs, slopes
from avow.kernels.tile_ops import Shape, interpreted, row_contiguous, view
from avow.numerics.kernel_rounding import NEAR

_LOG2E = math.log2(math.e)


class Layout(NamedTuple):
    """Features of a program, rows of a chunk, columns of values per program, warps, loads under way, and how many
    programs a processor holds at once."""

    features: int
    chunk: int
    columns: int
    warps: int
    stages: int
    resident: int = 2


def layout(m: int, d: int, e: int, kind: torch.dtype, of: str = "rows") -> Layout:
    """Tiles that stay in registers: a program takes one block of features and some columns of values.

    Gradients have less room for loads under way than rows; sums of parts hold less in registers.
    """
    if kind != torch.bfloat16:
        return Layout(min(padded(m), 32), 32, min(padded(e), 32), 4, 1)
    chosen = Layout(min(padded(m), 64), 64, min(padded(e), 64), 4, 3 if of == "rows" else 2)
    if d > 64:
        return chosen._replace(stages=2) if d <= 128 else chosen._replace(stages=1, warps=8)
    return chosen._replace(chunk=128, stages=3) if of == "sums" else chosen


class Directions(NamedTuple):
    """Directions as features are made with them, and as gradients go back along them: these may be of any size."""

    along: Float[Tensor, "m d"]
    back: Float[Tensor, "m d"]


def shortened(directions: Float32[Tensor, "m d"], kind: torch.dtype) -> Directions:
    """Directions in the types of products with inputs of a type."""
    along = directions.to(torch.float32 if kind == torch.float32 else torch.float16).contiguous()
    return Directions(along, along if kind != torch.bfloat16 else directions.to(kind).contiguous())


class Numbers(NamedTuple):
    """What logarithms to base 2 are made of."""

    factor: float
    """Of queries' products with directions."""
    key_factor: float
    lift: float
    """Of lengths, in a guess at the largest logarithm."""
    half: float
    """Of keys' squared lengths."""
    power: float
    """A power of two near the factor, or one where that is near."""


@lru_cache
def numbers_of(scale: float, m: int) -> Numbers:
    """The numbers for a scale of logits and so many features."""
    root = math.sqrt(abs(scale)) * _LOG2E
    power = 1.0 if 1 / NEAR <= root <= NEAR or root == 0 else 2.0 ** math.floor(math.log2(root))
    lift = math.sqrt(2 * math.log(m + 1)) * root
    return Numbers(math.copysign(root, scale), root, lift, 0.5 * abs(scale) * _LOG2E, power)


@lru_cache
def _shape(chosen: Layout, h: int, r: int, m: int, d: int, e: int, kind: torch.dtype, scale: float) -> Shape:
    """What all kernels of random features are compiled for."""
    return Shape(
        h,
        r,
        d,
        padded(d),
        e,
        chosen.columns,
        chosen.chunk,
        # TF32 has the digits of float16; three products of it have nearly those of float32.
        "tf32x3" if kind == torch.float32 else "tf32",
        tl.bfloat16 if kind == torch.bfloat16 else tl.float32,
        not interpreted(),
        m,
        chosen.features,
        divided(m, chosen.features),
        numbers_of(scale, m).power != 1,
    )


class FeatureMean(NamedTuple):
    """The answer, whether every row of it is sound, and the sums after the last key, relative to e^tops."""

    out: Float[Tensor, "b h n e"]
    log_normaliser: Float32[Tensor, "b h n"]
    """To base 2, over the row's own factor; not finite where features left the range of float32."""
    last: Sums


def feature_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
    initial: Sums | None = None,
) -> FeatureMean:
    """What every row collects from the keys up to its own, by the features of these directions.

    Gradients reach q, k and v, through the answer alone.
    """
    check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    begin: list[Tensor | None] = [None, None, None]
    if initial is not None and initial.tops is not None:
        begin = [initial.sums.contiguous(), initial.totals.contiguous(), initial.tops * _LOG2E]
    out, lse, sums, totals, tops, *_ = _forward(q, k, v, directions.detach().float(), scale, *begin)
    return FeatureMean(out, lse, Sums(sums, totals, tops / _LOG2E))


def _programs(heads: int, m: int, e: int, chosen: Layout) -> int:
    """How many programs share a part of all heads."""
    return heads * divided(e, chosen.columns) * divided(m, chosen.features)


def _parts(q: Tensor, m: int, e: int) -> Cut:
    b, h, n, d = q.shape
    chosen = layout(m, d, e, q.dtype)
    return cut_for(n, _programs(b * h, m, e, chosen), chosen.resident, q.device)


def steps(q: Tensor, m: int, e: int) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    (b, h, _, d), parts = q.shape, _parts(q, m, e)
    chosen = layout(m, d, e, q.dtype, "sums")
    pieces = pieces_of(parts, _programs(b * h, m, e, chosen), chosen.resident)
    # Through the sums of a part, those of all before it, and then the rows of another.
    return (
        divided(parts.length, pieces * chosen.chunk)
        + pieces * parts.parts
        + divided(parts.length, layout(m, d, e, q.dtype).chunk)
    )


def _in_part(kind: torch.dtype) -> torch.dtype:
    """The type of what programs add up: sums over many keys leave the range of float16."""
    return torch.bfloat16 if kind == torch.bfloat16 else torch.float32


def row_lengths(x: Float[Tensor, "b h n d"]) -> Float32[Tensor, "b h n"]:
    """How long every row is."""
    b, h, n, d = x.shape
    out = x.new_empty(b, h, n, dtype=torch.float32)
    shape = Shape(h, 1, d, padded(d), 0, 0, 128, "ieee", x_row=x.stride(2))
    feature_kernels.row_lengths[(b * h, divided(n, 128))](view(x), out, n, S=shape, num_warps=4)
    return out


def added(shares: Float[Tensor, "blocks *rest"], kind: torch.dtype) -> Float[Tensor, "*rest"]:
    """The sum of what programs made, rounded once."""
    out = shares.new_empty(shares.shape[1:], dtype=kind)
    count, width = out.numel(), out.shape[-1]
    feature_kernels.add_shares[(divided(count, 4096),)](
        shares, out, count // width, WIDTH=width, NB=len(shares), MANY=4096, num_warps=8
    )
    return out


def _before(
    y: Float[Tensor, "b h n d"],
    z: Float[Tensor, "b h n e"],
    lengths: Float32[Tensor, "b h n"],
    lse: Float32[Tensor, "b h n"] | None,
    slope: Float32[Tensor, "b h n"] | None,
    parts: Cut,
    along: Float[Tensor, "m d"],
    scale: float,
    begin: Sums | None = None,
) -> Sums:
    """Sums before each part over keys and values, or, given normalisers, from the end over rows and gradients."""
    (b, h, n, d), e, m = y.shape, z.shape[3], along.shape[0]
    chosen, reverse = layout(m, d, e, y.dtype, "sums"), lse is not None
    programs = _programs(b * h, m, e, chosen)
    pieces = pieces_of(parts, programs, chosen.resident)
    many = parts.parts * pieces
    found = Sums(*blank(y, (b * h, many, m, e), (b * h, many, m), (b * h, many)))
    if parts.parts > 1:
        shape = _shape(chosen, h, 1, m, d, e, y.dtype, scale)._replace(REVERSE=reverse, PIECES=pieces)
        feature_kernels.feature_sums[(b * h, many, programs // (b * h))](
            view(y),
            view(z),
            lengths,
            lse,
            slope,
            along,
            found,
            numbers_of(scale, m),
            n,
            parts.length,
            S=shape._replace(y_row=y.stride(2), z_row=z.stride(2)),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return before_parts(found, parts, begin, reverse, pieces)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, their normalisers' logarithms, the final sums, what lies before each part, and lengths of rows and keys."""
    q, k, v = row_contiguous(q, k, v)
    (b, h, n, d), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts, short = _parts(q, m, e), shortened(directions, q.dtype)
    lengths = row_lengths(q), row_lengths(k)
    begin = None
    if initial is not None and initial_total is not None:
        begin = Sums(initial, initial_total, initial_top)
    before = _before(k, v, lengths[1], None, None, parts, short.along, scale, begin)
    chosen = layout(m, d, e, q.dtype)
    blocks = divided(m, chosen.features)
    numerators = q.new_empty(blocks, b, h, n, e, dtype=_in_part(q.dtype))
    normalisers, lse, sums, totals, tops = blank(q, (blocks, b, h, n), (b, h, n), (b, g, m, e), (b, g, m), (b, g))
    shape = _shape(chosen, h, h // g, m, d, e, q.dtype, scale)
    feature_kernels.feature_rows[(b * h, parts.parts, blocks * divided(e, chosen.columns))](
        view(q),
        view(k),
        view(v),
        None,
        lengths,
        lse,
        None,
        short,
        before,
        numerators,
        normalisers,
        Sums(sums, totals, tops),
        numbers_of(scale, m),
        n,
        parts.length,
        S=shape._replace(x_row=q.stride(2), y_row=k.stride(2), z_row=v.stride(2)),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    out = q.new_empty(b, h, n, e)
    shape = shape._replace(EB=padded(e), C=64)
    feature_kernels.divide_shares[(divided(b * h * n, 64),)](
        numerators, normalisers, lse, out, b * h * n, S=shape, num_warps=4
    )
    assert before.tops is not None
    return out, lse, sums, totals, tops, before.sums, before.totals, before.tops, *lengths


@_forward.register_fake
def _(q, k, v, directions, scale, initial, initial_total, initial_top):
    (b, h, n, _), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts = _parts(q, m, e).parts
    shapes = ((b, h, n), (b, g, m, e), (b, g, m), (b, g))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradient, q, k, v = row_contiguous(gradient, q, k, v)
    (b, h, n, d), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts, short, slope = _parts(q, m, e), shortened(directions, q.dtype), slopes(gradient, out).slope
    after = _before(q, gradient, x_lengths, lse, slope, parts, short.along, scale)
    chosen = layout(m, d, e, q.dtype, "gradients")
    blocks, columns = divided(m, chosen.features), divided(e, chosen.columns)
    dq, dk = (q.new_empty(blocks * columns, b, h, n, d, dtype=_in_part(q.dtype)) for _ in range(2))
    dv = q.new_empty(blocks, b, h, n, e, dtype=_in_part(q.dtype))
    inputs = (*map(view, (q, k, v, gradient)), (x_lengths, y_lengths), lse, slope, short)
    sizes = numbers_of(scale, m), n, parts.length
    shape = _shape(chosen, h, h // g, m, d, e, q.dtype, scale)
    shape = shape._replace(x_row=q.stride(2), y_row=k.stride(2), z_row=v.stride(2), g_row=gradient.stride(2))
    grid, options = (b * h, parts.parts, blocks * columns), {"num_warps": chosen.warps, "num_stages": chosen.stages}
    feature_kernels.feature_rows[grid](*inputs, Sums(sums, totals, tops), dq, None, None, *sizes, S=shape, **options)
    feature_kernels.feature_key_gradients[grid](*inputs, after, dk, dv, *sizes, S=shape, **options)
    # What siblings add to a key is rounded once, too.
    kept = torch.float32 if g != h else k.dtype
    dk, dv = (by_key_head(added(x, kept), g).to(k.dtype) for x in (dk, dv))
    return added(dq, q.dtype), dk, dv


_backward.register_fake(like_inputs)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], *output[:2], *output[5:])
    ctx.scale = inputs[4]
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, gradient, *rest):
    q, k, v, directions, *held = ctx.saved_tensors
    return *_backward(gradient, q, k, v, directions, ctx.scale, *held), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
