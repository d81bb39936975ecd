r"""Rows in a few bits per number, with a proved bound on every product with them.

Rows come in groups. Within a group, channel c of row j is kept as a whole number,
:math:`\hat k_{jc} = zero_c + scale_c \cdot code_{jc}`, and of what that loses only its length remains,

.. math:: radius_j \ge \|A^{-1}(k_j - \hat k_j)\|, \qquad
          |q \cdot k_j - q \cdot \hat k_j| \le \|Aq\| \cdot radius_j   [claim residual-cauchy-schwarz]

for a positive diagonal A, fixed for each head: wide where rows lose much and queries are expected to be short. The
codes of a row stand in planes: with w bytes to a row, byte i holds channels i, i + w, i + 2w, …, lowest bits first, so
that unpacking needs no shuffling.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, UInt8
from torch import Tensor

from avow.numerics.rounding import SAFETY

# Rows that share a scale and a zero per channel.
GROUP = 64
METRIC_RANGE = (1 / 64, 64.0)
"""A channel counts at most this much more or less than the middle one, however little it lost so far."""
# Squarings of a matrix before its norm is taken: what the norm has above the largest eigenvalue is a 32nd root then.
SQUARINGS = 5
# Groups that are looked at together where all of them would take too much memory.
_AT_A_TIME = 256


@dataclass(frozen=True)
class Sketch:
    """Groups of rows in `bits` bits a number. What it says of rows divided by `size`, a power of two for each head."""

    codes: UInt8[Tensor, "b g c G w"]
    scale: Float[Tensor, "b g c d"]
    zero: Float[Tensor, "b g c d"]
    radius: Float[Tensor, "b g c G"]
    reach: Float32[Tensor, "b g c"]
    """An upper bound on the length of any sketched row of a group: rounding in products with them is relative to it."""
    metric: Float32[Tensor, "b g d"]
    """The squares of A."""
    size: Float64[Tensor, "b g"]
    bits: int
    spread: Float32[Tensor, "b g d"] | None = None
    """For every query q, the squares of its products with what all rows lost sum to at most Σ spread·q²; unknown: None.
    """

    @property
    def rows(self) -> int:
        """How many rows are sketched: whole groups."""
        return self.codes.shape[2] * self.codes.shape[3]

    @property
    def bytes_per_row(self) -> float:
        """What is read for one row of one head."""
        per_group = [self.codes, self.scale, self.zero, self.radius, self.reach]
        heads = self.codes.shape[0] * self.codes.shape[1]
        return sum(x.numel() * x.element_size() for x in per_group) / max(self.rows * heads, 1)

    def followed_by(self, other: Sketch) -> Sketch:
        """Both one after the other; `other` must have been made with this one's metric and size."""
        codes, scale, zero, radius, reach = (
            torch.cat([getattr(self, name), getattr(other, name)], 2)
            for name in ("codes", "scale", "zero", "radius", "reach")
        )
        spread = None if self.spread is None else joined_spread(self.spread, other.spread)
        return dataclasses.replace(self, codes=codes, scale=scale, zero=zero, radius=radius, reach=reach, spread=spread)


def sketched(
    rows: Float[Tensor, "b g s d"],
    bits: int = 4,
    metric: Float32[Tensor, "b g d"] | None = None,
    size: Float64[Tensor, "b g"] | None = None,
) -> Sketch:
    """The sketch of all whole groups of some rows; those after the last whole group are left out.

    To go on where another sketch ended, give its `metric` and `size`.
    """
    b, g, s, d = rows.shape
    whole = rows[:, :, : s // GROUP * GROUP].detach().double().reshape(b, g, s // GROUP, GROUP, d)
    if size is None:
        largest = whole.abs().amax((2, 3, 4)) if whole.numel() else whole.new_ones(b, g)
        size = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-300))))  # at least the largest number
    whole = whole / size[..., None, None, None]
    levels = 2**bits - 1
    low, high = whole.amin(3), whole.amax(3)  # (b, g, c, d)
    zero = _down(low)
    # Rounded up, so that the highest number has a code: 8 bits are what bfloat16 holds.
    scale = _up((high - zero.double()).clamp(min=0) / levels)
    step = scale.double().unsqueeze(3)
    origin = zero.double().unsqueeze(3)
    codes = torch.where(step > 0, ((whole - origin) / step.clamp(min=1e-300)).round(), 0.0).clamp(0, levels)
    lost = whole - (origin + step * codes)
    if metric is None:
        metric = _metric(lost, whole)
    weights = metric.double()[:, :, None]  # (b, g, 1, d)
    reach = torch.linalg.vector_norm(zero.double().abs() + levels * scale.double(), dim=-1)  # (b, g, c)
    # What float64 itself rounds in `lost` is relative to what was subtracted.
    least = torch.linalg.vector_norm((zero.double().abs() + levels * scale.double()) / weights.sqrt(), dim=-1)
    radius = (lost.square() / weights.unsqueeze(3)).sum(-1).sqrt() + 2.0**-48 * least.unsqueeze(-1)
    return Sketch(
        packed(codes.to(torch.uint8), bits),
        scale,
        zero,
        _up(radius),
        (reach * SAFETY).float().nextafter(torch.tensor(torch.inf, device=rows.device)),
        metric,
        size,
        bits,
        _spread(lost, reach),
    )


def packed(codes: UInt8[Tensor, "*lead d"], bits: int) -> UInt8[Tensor, "*lead w"]:
    """Codes of `bits` bits each, in bytes; a last byte is filled up with zeros."""
    parts, bits = 8 // field(bits), field(bits)
    width = -(-codes.shape[-1] // parts)
    planes = torch.nn.functional.pad(codes, (0, width * parts - codes.shape[-1])).unflatten(-1, (parts, width))
    out = planes[..., 0, :].clone()
    for i in range(1, parts):
        out |= planes[..., i, :] << (bits * i)
    return out


def unpacked(words: UInt8[Tensor, "*lead w"], bits: int) -> UInt8[Tensor, "*lead d"]:
    """The codes in some bytes, those that only fill up included."""
    bits = field(bits)
    return torch.cat([(words >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], -1)


def field(bits: int) -> int:
    """The bits that a code takes: fields do not straddle bytes."""
    return next(width for width in (2, 4, 8) if bits <= width)


def _metric(lost: Tensor, rows: Tensor) -> Float32[Tensor, "b g d"]:
    """Squares of A for which ‖Aq‖·‖A⁻¹e‖ is small on average, if queries vary as much in a channel as rows do."""
    if lost.numel() == 0:
        return lost.new_ones(*lost.shape[:2], lost.shape[-1], dtype=torch.float32)
    errors, sizes = (x.square().mean((2, 3)).sqrt() for x in (lost, rows))  # (b, g, d)
    ratio = errors / sizes.clamp(min=1e-30)
    # By sorting: torch's median is refused on a GPU where deterministic algorithms are asked for.
    middle = ratio.sort(-1).values[..., (ratio.shape[-1] - 1) // 2, None].clamp(min=1e-30)
    return (ratio / middle).clamp(*METRIC_RANGE).float()


def joined_spread(
    first: Float32[Tensor, "b g d"] | None, second: Float32[Tensor, "b g d"] | None
) -> Float32[Tensor, "b g d"] | None:
    """The spread of rows after others, of which there may have been none: None."""
    if first is None or second is None:
        return second
    return (first + second) * (1 + 2.0**-20)


def spread_holds(sketch: Sketch, rows: Float[Tensor, "b g s d"]) -> bool:
    """Whether the spread that a sketch carries bounds what it lost of these rows, the ones it was made of.

    Groups beyond a sketch, whose reach is infinite, are left out: they are always read. What `_spread` gives holds by
    a part of 10^-5, of which eigenvalues in float64 need far less than a tenth.
    """
    assert sketch.spread is not None
    root = sketch.spread.double().rsqrt()  # (b, g, d)
    gram = root.new_zeros(*root.shape, root.shape[-1])
    size = sketch.size[..., None, None, None]
    for start in range(0, sketch.codes.shape[2], _AT_A_TIME):
        span = slice(start, start + _AT_A_TIME)
        codes, zero, scale = sketch.codes[:, :, span], sketch.zero[:, :, span], sketch.scale[:, :, span]
        whole = rows[:, :, start * GROUP :][:, :, : codes.shape[2] * GROUP].unflatten(2, (-1, GROUP)).double() / size
        steps = unpacked(codes, sketch.bits)[..., : zero.shape[-1]].double()
        lost = whole - (zero.double().unsqueeze(3) + scale.double().unsqueeze(3) * steps)  # (b, g, c, G, d)
        lost = lost.masked_fill(sketch.reach[:, :, span, None, None].isinf(), 0).flatten(2, 3)
        gram += lost.mT @ lost
    scaled = gram * root.unsqueeze(-1) * root.unsqueeze(-2)
    return bool((torch.linalg.eigvalsh(scaled) <= 1 - 1e-6).all())


def _spread(lost: Float64[Tensor, "b g c G d"], reach: Float64[Tensor, "b g c"]) -> Float32[Tensor, "b g d"]:
    """A diagonal above the Gram matrix of what was lost: Σ (q·e)² ≤ Σ spread·q² for every q.

    With D the Gram matrix's own diagonal, that is D times the largest eigenvalue of the matrix scaled by it, which is
    not far above 1: what channels lose is hardly correlated.
    """
    rows = lost.flatten(2, 3)
    gram = rows.transpose(-1, -2) @ rows
    own = gram.diagonal(dim1=-1, dim2=-2).clamp(min=1e-300)  # (b, g, d)
    root = own.rsqrt()
    power = gram * root.unsqueeze(-1) * root.unsqueeze(-2)
    for _ in range(SQUARINGS):
        power = power @ power
    # No eigenvalue exceeds a norm: here, the largest sum of a row, of a power, and its root.
    largest = power.abs().sum(-1).amax(-1, keepdim=True) ** (1 / 2**SQUARINGS)
    # What float64 rounded in `lost`, 2^-51 of the reach, counts a million times in squares, the rest 1 + 10^-6 times.
    longest = reach.square().amax(-1, keepdim=True) if reach.shape[-1] else reach.new_zeros(*reach.shape[:-1], 1)
    spread = own * largest * (1 + 1e-5) + rows.shape[-2] * (2.0**-82 * longest + 2.0**-100)
    return (spread * (1 + 2.0**-22)).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _down(x: Float64[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Numbers in bfloat16, none of them larger than it was in float32."""
    bits = x.float().view(torch.int32)
    # The upper half of a float32 is a bfloat16. Without the lower half numbers are nearer to 0: negative ones go on.
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _up(x: Float64[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Numbers of at least 0 in bfloat16, none of them smaller than it was."""
    # Rounding to 8 bits loses at most 2^-9 of a number; below the normal range, 2^-134.
    return torch.where(x > 0, x * (1 + 2.0**-8) + 2.0**-133, 0.0).to(torch.bfloat16)
