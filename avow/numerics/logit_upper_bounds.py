r"""The most that each token may weigh, for every sketched row: in one pass over the codes.

A sketch bounds every product from above, :math:`l_j \le u_j`; what is kept of that is :math:`e^{u_j - origin}`, with an
origin near the largest of a row, as the middles of groups tell it. A compiler turns unpacking, products, bounds and
exponentials into one loop, in which the rows of a group stand side by side, so that nothing is added across a register;
plain torch has to write every code down as a float first. Both ways stay within the same bounds, as those hold for sums
in any order, with or without fused multiply-adds.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from avow.numerics.brackets import Ends, products_with
from avow.numerics.fused import Fused
from avow.numerics.sketch import Sketch, field

# Differences of rounding between here and `Ends`: additions, relative to the products, the origin among them; and what
# is so small that the factors which bring a code's bits to their place leave the range of float32.
ADDED, CONSTANT = 2.0**-21, 2.0**-40
# About so many groups tell the origin.
_SOME = 64
# Rounding of the bounds themselves.
_OUTWARD = 1 + 2.0**-20


class Uppers(NamedTuple):
    """At least exp(factor·q·k) of every sketched row k, but for factors that `skimming` allows for."""

    weights: Float32[Tensor, "b g r c G"]
    """Relative to exp(origin); infinite where that was far too low."""
    origin: Float32[Tensor, "b g r"]
    tops: Float32[Tensor, "b g r c"]
    """The largest weight of each group."""
    sums: Float32[Tensor, "b g r c"]
    """Of each group's weights."""
    radii: Float32[Tensor, "b g r c"]
    """Sums of weights times radii."""


def uppers(told: Ends, sketch: Sketch, compiled: bool, first: int = 0) -> Uppers:
    """What the sketch says, for products within 1e6; groups from `first` on tell the origin.

    Raises `NotCompiled` where a compiler is asked for and there is none.
    """
    # All but the smallest part grows with a group's reach; bounds in float32 are rounded outward.
    tilt = ((told.tilt + told.length * ADDED) * _OUTWARD).float().squeeze(-1)  # (b, g, r)
    floor = ((told.floor + CONSTANT) * _OUTWARD).float().squeeze(-1)  # (b, g, 1)
    slope, grown = (told.slope * _OUTWARD).float().squeeze(-1), told.grown.float().squeeze(-1)
    # Some groups tell it well enough: no bound rests on it.
    some = slice(first, None, max(1, sketch.zero.shape[2] // _SOME))
    middle = sketch.zero[:, :, some].float() + (2**sketch.bits - 1) / 2 * sketch.scale[:, :, some].float()
    origin = (told.q @ middle.transpose(-1, -2)).amax(-1) * grown  # (b, g, r)
    if not compiled:
        half = torch.addcmul(floor.unsqueeze(-1), tilt.unsqueeze(-1), sketch.reach.unsqueeze(2))  # (b, g, r, c)
        radius = sketch.radius.float()
        half = torch.addcmul(half.unsqueeze(-1), slope[..., None, None], radius.unsqueeze(2))
        ends = half.addcmul_(products_with(told.q, sketch), grown[..., None, None])
        weights = ends.sub_(origin[..., None, None]).exp_()
        return Uppers(weights, origin, weights.amax(-1), weights.sum(-1), (weights * radius.unsqueeze(2)).sum(-1))
    planes = sketch.codes.shape[-1] * (8 // field(sketch.bits))
    more = planes - told.q.shape[-1]
    q, scale, zero = (torch.nn.functional.pad(x, (0, more)) if more else x for x in (told.q, sketch.scale, sketch.zero))
    long = (sketch.codes.transpose(-1, -2), scale, zero, sketch.radius, sketch.reach)
    weights, *others = _all_heads(long, q, slope, tilt, floor - origin, grown, sketch.bits)
    return Uppers(weights, origin, *others)


def _of_all_heads(
    codes: UInt8[Tensor, "b g c w G"],
    scale: Float[Tensor, "b g c p"],
    zero: Float[Tensor, "b g c p"],
    radius: Float[Tensor, "b g c G"],
    reach: Float32[Tensor, "b g c"],
    q: Float32[Tensor, "b g r p"],
    slope: Float32[Tensor, "b g r"],
    tilt: Float32[Tensor, "b g r"],
    floor: Float32[Tensor, "b g r"],
    grown: Float32[Tensor, "b g 1"],
    bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width, taken = codes.shape[-2], field(bits)
    # Codes stay where they are in their bytes: the query is divided by what that makes of them, a power of two.
    planes = [(codes & ((2**taken - 1) << at) if taken < 8 else codes).float() for at in range(0, 8, taken)]
    scale, zero, radius = scale.float(), zero.float(), radius.float()
    weights = []
    for i in range(q.shape[2]):
        row = (q[:, :, i] * grown).unsqueeze(2)  # (b, g, 1, p)
        scaled = (row * scale).unsqueeze(-1)  # (b, g, c, p, 1)
        parts = [
            x * (scaled[..., at * width : (at + 1) * width, :] * 2.0 ** (-at * taken)) for at, x in enumerate(planes)
        ]
        start = (row * zero).sum(-1) + (tilt[:, :, i, None] * reach + floor[:, :, i, None])  # (b, g, c)
        middle = functools.reduce(torch.add, parts).sum(-2)  # (b, g, c, G)
        weights.append((middle + (radius * slope[:, :, i, None, None] + start.unsqueeze(-1))).exp())
    tops, sums, radii = (
        [x.amax(-1) for x in weights],
        [x.sum(-1) for x in weights],
        [(x * radius).sum(-1) for x in weights],
    )
    return torch.stack(weights, 2), torch.stack(tops, 2), torch.stack(sums, 2), torch.stack(radii, 2)


_all_heads = Fused(_of_all_heads, axis=2)
