r"""How much of a sum can be left out, and how well a sample of what is left out stands for it.

The inequalities are finite: they hold for every number of terms, and no limit theorem is behind them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Steps of Newton's method from above, and what its last one may round below the root.
_NEWTON, _SOLVED = 6, 1e-9


def deviation(
    variance: Float[Tensor, "*shape"], largest: Float[Tensor, "*shape"], log: float
) -> Float[Tensor, "*shape"]:
    r"""What a sum of independent terms of mean zero exceeds in length with probability at most 2·exp(−log).

    For vectors of any dimension, each at most R long, with V the sum of their mean square lengths (Pinelis 1994,
    theorem 3.4: Bennett's inequality in a Hilbert space):

    .. math:: P(\|\textstyle\sum X\| \ge t) \le 2\exp\Bigl(-\frac{V}{R^2} h\bigl(\frac{tR}{V}\bigr)\Bigr), \quad
              h(x) = (1 + x)\ln(1 + x) - x
    """
    # Relative to R; a variance that is too large only makes the bound larger.
    spread = (variance / largest.square().clamp(min=1e-300)).clamp(min=1e-12)
    aim = log / spread
    # Bernstein's inequality, h(x) ≥ x²/(2 + 2x/3), lies above the root; h is convex, so Newton stays above it.
    x = aim / 3 + (aim.square() / 9 + 2 * aim).sqrt()
    for _ in range(_NEWTON):
        rise = torch.log1p(x)
        x = x - ((1 + x) * rise - x - aim) / rise
    return x * spread * largest * (1 + _SOLVED)


def at_most(found: Float[Tensor, "*shape"], largest: Float[Tensor, "*shape"], log: float) -> Float[Tensor, "*shape"]:
    r"""What the expectation of a sum of independent terms in [0, R] exceeds with probability at most exp(−log).

    The lower tail of Chernoff's bound needs no variance; with F the sum that was found it is solved for V in

    .. math:: P(F \le f) \le \exp\Bigl(-\frac{V - f + f\ln(f/V)}{R}\Bigr)
    """
    unit = largest.clamp(min=1e-300)
    f = found / unit
    # Its quadratic form, (V − f)² ≤ 2·V·log, lies above the root; the exponent is convex, so Newton stays above it.
    half = math.sqrt(log / 2)
    v = ((f + half**2).sqrt() + half).square()
    for _ in range(_NEWTON):
        v = v - (v - f - torch.xlogy(f, v / f.clamp(min=1e-300)) - log) / (1 - f / v)
    return v * unit * (1 + _SOLVED)
