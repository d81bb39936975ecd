r"""Exponentials of products with sketched rows, each between two proved ends, in float32.

What a sketch says of a product, :math:`|l_j - m_j| \le h_j`, becomes :math:`low_j \le e^{l_j - origin} \le high_j`.
With the query multiplied by a group's scales, products are those with small whole numbers, which are unpacked a few
groups at a time and never leave a core's own cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from avow.numerics.rounding import SAFETY, Products, products, unit
from avow.numerics.sketch import Sketch, field

# Numbers that are unpacked at once.
_STRIP = 2**19
# Rounding of float32 in a difference from the origin, relative to it; in the ends' own exponents; and in exp.
_MOVED, _GROWN, _EXP = 2.0**-21, 2.0**-18, 2.0**-16
# Beyond this no float32 can follow: such rows are bracketed by 0 and infinity.
_FAR = 1e30


class Brackets(NamedTuple):
    """For every query and every sketched row, the ends of the exponential of their product, relative to exp(origin)."""

    low: Float32[Tensor, "b g r s"]
    high: Float32[Tensor, "b g r s"]
    log_high: Float32[Tensor, "b g r s"]
    origin: Float64[Tensor, "b g r 1"]


class Ends(NamedTuple):
    """How far products with sketched rows are from those with the rows: |factor·q·k − grown·m| ≤ least + slope·radius,
    with m the product of the shrunk query and the sketched row as float32 computes it.
    """

    q: Float32[Tensor, "b g r d"]
    """Queries of entries up to 1, with the sign of the factor."""
    grown: Float64[Tensor, "b g 1 1"]
    slope: Float64[Tensor, "b g r 1"]
    tilt: Float64[Tensor, "b g r 1"]
    """What `least` grows by with the reach of a group: least = tilt·reach + floor."""
    floor: Float64[Tensor, "b g 1 1"]
    length: Float64[Tensor, "b g r 1"]
    """What a group's reach is multiplied by for at least |factor·q·k̂| of its sketched rows."""


def ends(q: Float[Tensor, "b g r d"], sketch: Sketch, factor: float) -> Ends:
    """Bounds on what the sketch and float32 lose in products with some queries."""
    d = q.shape[-1]
    wide = q.detach().double() * math.copysign(1.0, factor)
    largest = wide.abs().amax((-1, -2), keepdim=True)  # (b, g, 1, 1)
    shrunk = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-300))))
    wide = wide / shrunk
    grown = (sketch.size[..., None, None] * shrunk) * abs(factor)  # (b, g, 1, 1)
    # A compiler cannot look up how precise products were asked to be; compiled code only chooses, and proves nothing.
    usual = Products(0.0, unit(torch.float32))
    known = usual if torch.compiler.is_compiling() else products(torch.float32, q.device.type)
    error = known.dot(d + 8) + 2.0**-22
    weighted = (wide.square() @ sketch.metric.double().unsqueeze(-1)).sqrt()  # ‖Aq‖, (b, g, r, 1)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    outward = grown * (SAFETY + _GROWN)
    # Rounding of the products, for a whole group; what is below float32's range loses its smallest normal number.
    tilt = (length * error + 2.0**-90) * outward
    floor = grown * (d * 2.0**-116) + tilt.amax(-2, keepdim=True) * 2.0**-90
    return Ends(wide.float(), grown, (weighted + 2.0**-60) * outward, tilt, floor, (length + 2.0**-90) * outward)


def bracketed(
    q: Float[Tensor, "b g r d"],
    sketch: Sketch,
    factor: float,
    seen: Bool[Tensor, "#b #g #r s"] | None = None,
    bias: Float64[Tensor, "b g r s"] | None = None,
) -> Brackets:
    """The ends of exp(factor·q·k + bias) for every sketched row k; both 0 where a row is not seen."""
    errors = ends(q, sketch, factor)
    middle = products_with(errors.q, sketch)  # (b, g, r, c, G)
    grown = errors.grown
    sane = (grown < _FAR) & (errors.slope < _FAR)
    least = errors.tilt * sketch.reach.double().unsqueeze(-2) + errors.floor  # (b, g, r, c)
    # Of groups of infinite reach nothing is known, also where a factor of 0 leaves nothing to multiply it by.
    least = torch.where(sane & sketch.reach.isfinite().unsqueeze(-2), least, math.inf).float() * (1 + _EXP) + 2.0**-60
    slope = errors.slope.clamp(max=_FAR).float().unsqueeze(-1)
    half = torch.addcmul(least.unsqueeze(-1), slope, sketch.radius.float().unsqueeze(2)).flatten(3)  # (b, g, r, s)
    middle = middle.flatten(3)
    if bias is None:
        origin, below = _below(middle, seen)
        origin = origin.double() * grown
        grown = grown.clamp(max=_FAR).float()
    else:
        exact = middle.double() * grown + bias
        half = half + (2.0**-48 * (bias.abs() + exact.abs())).float()
        origin, below = _below(exact, seen)
        below, grown = below.clamp(min=-_FAR).float(), torch.ones_like(below[:, :, :1, :1], dtype=torch.float32)
    # `below` is at most 0 where it counts, so less of it is more.
    log_high = torch.addcmul(half, below, grown * (1 - _MOVED))
    low = torch.addcmul(half, below, -grown * (1 + _MOVED)).neg_().exp_().mul_(1 - _EXP)
    high = log_high.exp().mul_(1 + _EXP).clamp_(min=2.0**-120)
    if seen is not None:
        low, high = low.masked_fill_(~seen, 0.0), high.masked_fill_(~seen, 0.0)
        log_high = log_high.masked_fill_(~seen, -math.inf)
    return Brackets(low, high, log_high.clamp_(max=_FAR), origin)


def _below(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest that is seen of each row, and all relative to it."""
    shown = x if seen is None else x.masked_fill(~seen, -math.inf)
    top = shown.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    top = top.masked_fill(top == -math.inf, 0.0)
    return top, x - top


def products_with(q: Float32[Tensor, "b g r d"], sketch: Sketch) -> Float32[Tensor, "b g r c G"]:
    """Products with the sketched rows, divided by their size."""
    b, g, r, d = q.shape
    c, rows, width = sketch.codes.shape[2:]
    bits = field(sketch.bits)
    step = max(1, min(c, _STRIP // max(b * g * rows * d, 1)))
    # Unpacked as they are packed: one row after the other, or those of a group side by side.
    aside = sketch.codes.stride(-1) != 1
    held = sketch.codes.transpose(-1, -2) if aside else sketch.codes
    axis = -2 if aside else -1
    # Room made once: fresh pages would cost more than what is written to them.
    out = q.new_empty(b, g, r, c, rows)
    words = held.new_empty(b, g, step, *held.shape[3:])
    codes = torch.cat([words] * (8 // bits), axis).float()
    for first in range(0, c, step):
        some = slice(first, min(first + step, c))
        room, word = codes[:, :, : some.stop - first], words[:, :, : some.stop - first]
        for plane in range(8 // bits):
            torch.bitwise_right_shift(held[:, :, some], bits * plane, out=word)
            room.narrow(axis, plane * width, width).copy_(word.bitwise_and_(2**bits - 1))
        scaled = q.unsqueeze(2) * sketch.scale[:, :, some].float().unsqueeze(3)  # (b, g, c, r, d)
        whole = room.narrow(axis, 0, d)
        out[:, :, :, some] = (scaled @ (whole if aside else whole.transpose(-1, -2))).transpose(2, 3)
    start = q @ sketch.zero.float().transpose(-1, -2)  # (b, g, r, c)
    return out.add_(start.unsqueeze(-1))
