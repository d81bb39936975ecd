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
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels import chunking, feature_kernels
from avow.kernels.chunking import Cut, Layout, Sums, blank, by_key_head, check, divided, launch, padded
from avow.kernels.linear_attention import slopes
from avow.kernels.tile_ops import Shape, row_contiguous
from avow.numerics.kernel_rounding import NEAR

_LOG2E = math.log2(math.e)


def layout(m: int, d: int, e: int, kind: torch.dtype, of: str = "rows") -> Layout:
    """Tiles that stay in registers: a program takes one block of features and some columns of values.

    Gradients have less room for loads under way than rows; sums of parts hold less in registers.
    """
    if kind != torch.bfloat16:
        return Layout(32, min(padded(e), 32), 4, 1, features=min(padded(m), 32))
    chosen = Layout(64, min(padded(e), 64), 4, 3 if of == "rows" else 2, features=min(padded(m), 64))
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
    blocks, scaled = divided(m, chosen.features), numbers_of(scale, m).power != 1
    return chosen.shape(h, r, d, e, kind, M=m, MB=chosen.features, NB=blocks, SCALED=scaled)


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
    return chunking.cut_for(n, _programs(b * h, m, e, chosen), chosen.resident, q.device)


def steps(q: Tensor, m: int, e: int) -> int:
    """How often sums of a whole sequence are rescaled and added to, at most."""
    (b, h, _, d), parts = q.shape, _parts(q, m, e)
    chosen = layout(m, d, e, q.dtype, "sums")
    pieces = chunking.pieces_of(parts, _programs(b * h, m, e, chosen), chosen.resident)
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
    (b, h, n, d), layout = x.shape, Layout(128, 0, 4, 3)
    (out,) = blank(x, (b, h, n))
    grid, shape = (b * h, divided(n, layout.chunk)), layout.shape(h, 1, d, 0, x.dtype)
    launch(feature_kernels.row_lengths, grid, {"x": x}, out, n, shape=shape, layout=layout)
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
    rows: tuple[Tensor | None, Tensor | None, Tensor | None],
    parts: Cut,
    along: Float[Tensor, "m d"],
    scale: float,
    begin: Sums | None = None,
) -> Sums:
    """Sums before each part over keys and values, or from the end over rows and gradients.

    `rows` are the lengths of y, and for sums from the end the normalisers of its rows and their slopes.
    """
    (b, h, _, d), e, m = y.shape, z.shape[3], along.shape[0]
    chosen = layout(m, d, e, y.dtype, "sums")
    pieces = chunking.pieces_of(parts, _programs(b * h, m, e, chosen), chosen.resident)
    shape = _shape(chosen, h, 1, m, d, e, y.dtype, scale)._replace(REVERSE=rows[1] is not None, PIECES=pieces)
    given = (*rows, along, numbers_of(scale, m))
    return chunking.sums_before(feature_kernels.feature_sums, y, z, given, ((m,), ()), parts, shape, chosen, begin)


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
    parts, short, chosen = _parts(q, m, e), shortened(directions, q.dtype), layout(m, d, e, q.dtype)
    lengths = row_lengths(q), row_lengths(k)
    begin = None
    if initial is not None and initial_total is not None:
        begin = Sums(initial, initial_total, initial_top)
    before = _before(k, v, (lengths[1], None, None), parts, short.along, scale, begin)
    blocks = divided(m, chosen.features)
    numerators = q.new_empty(blocks, b, h, n, e, dtype=_in_part(q.dtype))
    normalisers, lse, sums, totals, tops = blank(q, (blocks, b, h, n), (b, h, n), (b, g, m, e), (b, g, m), (b, g))
    known = None, lengths, lse, None, short, before
    sizes = numbers_of(scale, m), n, parts.length
    grid, shape = (b * h, parts.parts, _programs(1, m, e, chosen)), _shape(chosen, h, h // g, m, d, e, q.dtype, scale)
    rows = *known, numerators, normalisers, Sums(sums, totals, tops), *sizes
    launch(feature_kernels.feature_rows, grid, {"x": q, "y": k, "z": v}, *rows, shape=shape, layout=chosen)
    out = q.new_empty(b, h, n, e)
    feature_kernels.divide_shares[(divided(b * h * n, 64),)](
        numerators, normalisers, lse, out, b * h * n, S=shape._replace(EB=padded(e), C=64), num_warps=4
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
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, held: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the directions, and what the forward pass returned but for the final sums."""
    gradient, q, k, v = row_contiguous(gradient, q, k, v)
    directions, out, lse, *before, x_lengths, y_lengths = held
    (b, h, n, d), g, e, m = q.shape, k.shape[1], v.shape[3], directions.shape[0]
    parts, short, slope = _parts(q, m, e), shortened(directions, q.dtype), slopes(gradient, out).slope
    after = _before(q, gradient, (x_lengths, lse, slope), parts, short.along, scale)
    chosen = layout(m, d, e, q.dtype, "gradients")
    blocks, programs = divided(m, chosen.features), _programs(1, m, e, chosen)
    dq, dk = (q.new_empty(programs, b, h, n, d, dtype=_in_part(q.dtype)) for _ in range(2))
    dv = q.new_empty(blocks, b, h, n, e, dtype=_in_part(q.dtype))
    inputs, known = {"x": q, "y": k, "z": v, "g": gradient}, ((x_lengths, y_lengths), lse, slope, short)
    sizes = numbers_of(scale, m), n, parts.length
    grid, shape = (b * h, parts.parts, programs), _shape(chosen, h, h // g, m, d, e, q.dtype, scale)
    rows, keys = (*known, Sums(*before), dq, None, None, *sizes), (*known, after, dk, dv, *sizes)
    launch(feature_kernels.feature_rows, grid, inputs, *rows, shape=shape, layout=chosen)
    launch(feature_kernels.feature_key_gradients, grid, inputs, *keys, shape=shape, layout=chosen)
    # What siblings add to a key is rounded once, too.
    dtype = torch.float32 if g != h else k.dtype
    dk, dv = (by_key_head(added(x, dtype), g).to(k.dtype) for x in (dk, dv))
    return added(dq, q.dtype), dk, dv


chunking.register_gradients(_forward, _backward, tensors=4, unused=(2, 3, 4))
