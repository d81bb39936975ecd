r"""How far an answer from drawn tokens is from the truth, up to a chance, by inequalities for finitely many draws.

Token j of the tail was read with probability :math:`p_j < 1`, fixed before the draw, and counts :math:`1/p_j`-fold;
let :math:`I_j` say whether it was. Of what the tail adds, :math:`X = \sum_j (I_j/p_j - 1) w_j (v_j, ν)` is missing, and

.. math:: o^* - out = -\frac1Z \sum_j (I_j/p_j - 1)\, w_j (v_j - out).

The sketch proves :math:`w_j (l_j + ν)/p_j \le νR`, with :math:`l_j \ge \|v_j\|` as it is known beside the cache; mostly
it is far less. So tokens are split at κR: *light* ones have :math:`w_j \|(l_j, ν)\| / p_j \le νκR`, the others are
*heavy*. Which they are is a property of the token, not of the draws. In units of νκR:

- The heavy add up to M at most, by Chernoff's bound from the sum f of those that were drawn: terms lie in [0, 1/κ].
  They move the answer by :math:`(f + M) \max(1, \|out\|/ν)` at most, drawn or not.
- The light have a variance of V at most, by Chernoff's bound again, from the squares of those that were drawn; and
  so they stray by :math:`D = L/3 + \sqrt{L^2/9 + 2VL}` at most, by Bernstein's inequality for vectors of any dimension
  (Pinelis 1994, theorem 3.4). A vector :math:`(a, b)` of that length moves the answer by
  :math:`\|a - b \cdot out/ν\| \le D \sqrt{1 + \|out\|^2/ν^2}`.
- Or both stray together, with terms up to 1/κ and a variance of :math:`V + M/κ` at most.

The normaliser is at least the estimate less D and f, in the one case, and less what strays in the other. Each of the
four statements fails with its share of the chance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

# Shares of the chance that the heavy sum, the variance, and either of both deviations may fail.
_SHARES = (0.7, 0.1, 0.1)
# Terms are computed with an error: those within this of the threshold count as light and as heavy. Where the error may
# be larger, nothing is proved.
ABOVE, BELOW, FUZZY = tl.constexpr(1.02), tl.constexpr(0.98), tl.constexpr(2.0**-6)
# Beyond, the start of Newton's method is near enough, and single precision would not improve it.
_MANY = tl.constexpr(64.0)
# A rim below this stands for none: every token was read.
NONE = tl.constexpr(-(2.0**25))


class Logs(NamedTuple):
    """How unlikely each inequality's failure is, as negative logarithms: the heavy sum, the variance, a deviation."""

    mean: float
    variance: float
    sum: float

    @staticmethod
    def of(confidence: float) -> Logs:
        """For rows that are right with at least this probability."""
        chance = (1 - confidence) * (1 - 1e-9)
        # Deviations fail on two sides.
        return Logs(*(math.log(k / (part * chance)) * (1 + 1e-6) for k, part in zip((1, 1, 2), _SHARES, strict=True)))


@triton.jit
def _at_most(found, largest, log):
    """What the expectation of a sum of independent terms in [0, largest] exceeds with probability exp(−log) at most."""
    f = found / largest
    half = tl.sqrt(log * 0.5)
    # The exponent is convex and this is above its root, so Newton's steps stay above it.
    v = tl.sqrt(f + log * 0.5) + half
    v = v * v
    w = v
    for _ in tl.static_range(2):
        w = w - (w - f - f * tl.log(tl.maximum(w / tl.maximum(f, 1e-30), 1.0)) - log) / (1 - f / w)
    return tl.where(f < _MANY, w, v) * largest * (1 + 2.0**-12)


@triton.jit
def _strayed(variance, largest, log):
    """What a sum of independent vectors of mean zero exceeds with probability 2·exp(−log) at most."""
    third = largest * log * (1.0 / 3.0)
    return (third + tl.sqrt(third * third + 2 * variance * log)) * (1 + 2.0**-12)


@triton.jit
def missed(light, heavy, unit, fine, mass, reach, logs):
    """How far draws may have moved an answer, relative to ν.

    `light` and `heavy` are sums over the draws in units of κR, which is `unit`; 1/κ is `fine`; `mass` is at most the
    estimated normaliser, and `reach` at least the answer's length over ν.
    """
    most = _at_most(heavy, fine, logs.mean)
    variance = _at_most(light, 1.0, logs.variance)
    slant = tl.sqrt(1 + reach * reach)
    stray = _strayed(variance, 1.0, logs.sum)
    apart = (heavy + most) * tl.maximum(reach, 1.0) + stray * slant
    left = mass - unit * (stray + heavy)
    apart = tl.where(left > 0, unit * apart / left, float("inf"))
    stray = _strayed(variance + fine * most, fine, logs.sum)
    left = mass - unit * stray
    together = tl.where(left > 0, unit * stray * slant / left, float("inf"))
    # nan is no bound.
    apart = tl.where(apart >= 0, apart, float("inf"))
    together = tl.where(together >= 0, together, float("inf"))
    return tl.minimum(apart, together) * (1 + 2.0**-10)
