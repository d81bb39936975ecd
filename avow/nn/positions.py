r"""Where a token stands: learned, by sines and cosines of its place, or by turning queries and keys.

Attention alone does not know the order of its keys. `Learned` and `Sinusoidal` are added to the embeddings; `Rotary`
is applied to queries and keys, whose products then depend on the distance between them alone.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from avow.errors import ParameterError, ShapeError
from avow.nn.config import check_count
from avow.parameters import as_float, declared

_BASE = 10_000.0


class Learned(nn.Module):
    """A vector for each place, learned like the embeddings of tokens."""

    @declared()
    def __init__(self, block: int, width: int) -> None:
        super().__init__()
        check_count("block", block)
        check_count("width", width)
        self.block = block
        self.places = nn.Embedding(block, width)

    def forward(self, length: int, start: int = 0) -> Float[Tensor, "n w"]:
        """The vectors of `length` places from `start` on."""
        return self.places.weight[_span(length, start, self.block)]


class Sinusoidal(nn.Module):
    r"""Sines and cosines of the place at geometrically spaced rates, nothing to learn.

    .. math:: p_{i,2f} = a \sin(i \cdot 10000^{-2f/w}), \quad p_{i,2f+1} = a \cos(i \cdot 10000^{-2f/w})

    The amplitude a is for the caller: it decides how loud places are beside tokens.
    """

    table: Tensor

    @declared()
    def __init__(self, block: int, width: int, amplitude: float = 1.0) -> None:
        super().__init__()
        check_count("block", block)
        check_count("width", width)
        if not math.isfinite(as_float(amplitude)):
            raise ParameterError("amplitude", amplitude, "must be finite", "the default is 1.0")
        if width % 2:
            rule = "must be even: sines and cosines come in pairs"
            raise ParameterError("width", width, rule, f"use width={width + 1}")
        self.block = block
        angles = _angles(block, width)
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)  # (block, width)
        self.register_buffer("table", (float(amplitude) * table).to(torch.get_default_dtype()), persistent=False)

    def forward(self, length: int, start: int = 0) -> Float[Tensor, "n w"]:
        """The vectors of `length` places from `start` on."""
        return self.table[_span(length, start, self.block)]


class Rotary(nn.Module):
    r"""Turns each pair of features of a query or key by an angle that grows with its place.

    Feature f and f + d/2 make a pair, turned at place i by :math:`\theta = i \cdot 10000^{-2f/d}`. Turning both a query
    and a key leaves in their product the difference of the angles, :math:`R_i q \cdot R_j k = q \cdot R_{j-i} k`, and
    every norm as it was. The same table serves all heads and layers.
    """

    cosine: Tensor
    sine: Tensor

    @declared()
    def __init__(self, dim: int, block: int) -> None:
        super().__init__()
        check_count("block", block)
        if dim < 2 or dim % 2:
            rule = "must be even: features are turned in pairs"
            raise ParameterError("dim", dim, rule, f"use dim={dim + dim % 2 or 2}")
        self.dim, self.block = dim, block
        angles = _angles(block, dim)
        # Angles in float64: a place of a few thousand times a rounded rate would be off by 1e-4 in float32.
        for name, table in (("cosine", angles.cos()), ("sine", angles.sin())):
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Float[Tensor, "b h n d"], start: int = 0) -> Float[Tensor, "b h n d"]:
        """The same queries or keys, turned as at places `start`, `start` + 1, …"""
        if x.shape[-1] != self.dim:
            rule = f"must be {self.dim}, the dimension this was made for"
            raise ShapeError("head dimension", x.shape[-1], rule, f"make Rotary({x.shape[-1]}, …)")
        span = _span(x.shape[-2], start, self.block)
        return _turned(x, self.cosine[span], self.sine[span])  # (n, d/2) each

    def at(self, x: Float[Tensor, "b h n d"], places: Int[Tensor, "#b n"]) -> Float[Tensor, "b h n d"]:
        """The same turned as at any places, each sequence at its own."""
        return _turned(x, *(table[places].unsqueeze(1) for table in (self.cosine, self.sine)))  # (b, 1, n, d/2) each


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)
    return turned.to(x.dtype)  # half precision is turned in the table's type


def _angles(block: int, dim: int) -> Float[Tensor, "block half"]:
    rates = _BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(block, dtype=torch.float64)[:, None] * rates


def _span(length: int, start: int, block: int) -> slice:
    """Places `start` to `start + length`, which must exist."""
    if start + length > block:
        rule = f"exceeds block={block}"
        raise ShapeError("length", start + length, rule, "shorten the sequence or make a longer block")
    return slice(start, start + length)
