r"""What many weigh together: less than each at its worst, for no query lies along everything that a sketch has lost.

Let tokens weigh :math:`a_j e^{x_j}`, with :math:`|x_j| \le h_j` and :math:`\sum x_j^2 \le S^2`. Since
:math:`e^x \le 1 + x + φ(h) x^2` for :math:`|x| \le h`, where :math:`φ(h) = (e^h - 1 - h)/h^2`,

.. math:: \sum_j c_j a_j e^{x_j} \le \sum_j c_j a_j + S \sqrt{\sum_j c_j^2 a_j^2} + S^2 \max_j c_j a_j φ(h_j)

by Cauchy and Schwarz. Each by itself is only known to weigh at most :math:`a_j e^{h_j}`, which for thousands of tokens
adds up to several times as much. S is known from the Gram matrix M of what the sketch has lost of all rows,
:math:`\sum_j (q \cdot e_j)^2 = q^T M q`, with a diagonal in the place of M.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.numerics.rounding import Products, products, unit
from avow.numerics.sketch import Sketch

# Tokens whose lower end is below this, relative to exp(origin), are not among those that S is about.
NEAR = 2.0**-100
# What float32 rounds in the middles of the others, in nats: all their exponents are below 70.
_MIDDLE = 2.0**-12


class AggregateError(NamedTuple):
    """How far logits are from the middles of their brackets."""

    whole: Float64[Tensor, "b g r 1"]
    """S: at least the root of the summed squares, over all sketched rows with a lower end of at least `NEAR`."""
    least: Float64[Tensor, "b g r 1"]
    """A lower bound on half the width of any bracket."""


def aggregate_error(q: Float[Tensor, "b g r d"], sketch: Sketch, factor: float) -> AggregateError | None:
    """How far logits, factor·q·k without biases, are from the middles of their brackets; None where it is unknown."""
    if sketch.spread is None:
        return None
    wide = q.detach().double()
    shrunk = wide.abs().amax((-1, -2), keepdim=True).clamp(min=1e-300)
    wide = wide / shrunk
    grown = sketch.size[..., None, None] * shrunk * abs(factor)  # (b, g, 1, 1)
    squares = wide.square()
    lost = (squares @ sketch.spread.double().unsqueeze(-1)).sqrt()  # (b, g, r, 1)
    weighted = (squares @ sketch.metric.double().unsqueeze(-1)).sqrt()
    # Groups of infinite reach have lower ends of 0.
    reach = torch.where(sketch.reach.isfinite(), sketch.reach, 0.0)
    longest, narrowest = torch.zeros_like(grown), torch.zeros_like(grown)
    if sketch.rows:
        longest = reach.amax(-1)[..., None, None].double()
        narrowest = sketch.radius.amin((-1, -2))[..., None, None].double()
    # Twice what brackets allow for the rounding of products, relative to the longest sketched row.
    usual = Products(0.0, unit(torch.float32))
    known = usual if torch.compiler.is_compiling() else products(torch.float32, q.device.type)
    error = 2 * (known.dot(q.shape[-1] + 8) + 2.0**-22)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rounded = (length * error + 2.0**-88) * (longest + 2.0**-88) * grown + _MIDDLE
    whole = (lost * grown + math.sqrt(sketch.rows) * rounded) * (1 + 1e-6)
    least = weighted * grown * narrowest * (1 - 1e-3)
    return AggregateError(whole.nan_to_num(nan=math.inf, posinf=math.inf), least.nan_to_num(nan=0.0, posinf=0.0))
