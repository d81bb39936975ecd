r"""Which tokens rows that share them leave unread together, and how far those can move each row's answer.

A token that one of several rows reads costs the others nothing. So these rows share one order of their tokens, by the
sum of what each may still move an answer, in each row's own budget, and there is one cut for all of them. What is
behind a cut weighs :math:`β_j e^{x_j}` in a row, with :math:`|x_j| \le h_j` and :math:`\sum x_j^2 \le S^2`
(`avow.numerics.aggregate_error`). For every :math:`μ \ge 0`

.. math:: \sum_j β_j e^{x_j} \le \sum_j β_j + μ S^2 + \sum_j r_j, \qquad
          r_j = \max_{|x| \le h_j} β_j (e^x - 1) - μ x^2

and with :math:`γ_j = β_j (e^{h_j} - 1 - h_j)/h_j^2`, a token with :math:`γ_j \ge μ` is at its worst at
:math:`x = h_j`, and any other has :math:`r_j \le \min(β_j h_j, β_j^2 / 4(μ - γ_j))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.numerics.aggregate_error import NEAR
from avow.numerics.brackets import Brackets
from avow.numerics.gather import Read
from avow.numerics.tail_histogram import SUMS, Outlook

# Bins of a nat below a token that by itself is worth the whole budget, and all bins: what is 20 nats lighter is taken
# together.
_FINE, _BINS = 32, 640
# Shares of the budget that μ·S² may be; the best one is taken.
_SHARES = (0.01, 0.1, 0.2, 0.4)
# How often rows weigh each other's needs, where there are several.
_ROUNDS = 3
# In each round, a row that needs little has its needs counted this much less at most.
_LEAST = 0.05
# Above this, in nats, a bracket says nothing of its middle; up to here, what differences of float64 lose of the largest
# weight is little beside the middle one.
_WIDE, _LOST = 20.0, 1e-13
# Tokens that are widened to float64 at once: few enough that they never leave a core's own cache.
_SPAN = 8192


@dataclass(frozen=True)
class Order:
    """Tokens in bins, those first that rows need most. Sums are over the tokens of each bin and all after it."""

    view: Outlook
    place: Int[Tensor, "b g r s0"]
    moved: Float64[Tensor, "b g r bins"]
    """How far they may move a sum with an answer as long as `length`, ℓ."""
    low: Float64[Tensor, "b g r bins"]
    """Of their lower ends."""
    length: Float64[Tensor, "b g r 1"]
    siblings: int
    expected: Int[Tensor, "b g r 1"]
    """The first bin behind which tokens may be expected to move answers by no more than may be."""

    @staticmethod
    def of(
        view: Outlook,
        read: Read,
        touched: Bool[Tensor, "b g r s"],
        drop: float,
        length: Float64[Tensor, "b g r 1"],
        siblings: int,
    ) -> Order:
        """Tokens that were not read yet, for answers of about this length; `siblings` rows share each order.

        Rows of a head are (siblings · n), the first index being the slower one.
        """
        unit = view.unit(read)
        known = together(touched[..., : view.known], siblings)
        # Where nothing is known, nothing is expected.
        expected = torch.where(known, 0.0, (view.brackets.low.double() * view.brackets.high).sqrt())
        rest = expected.nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True)
        whole = read.total / unit.clamp(min=1e-300) + rest
        budget = (drop * view.most * whole).nan_to_num(nan=0.0)
        weights = torch.ones_like(budget)
        for i in range(rounds := _ROUNDS if siblings > 1 else 1):
            place, moved, low = _sorted(view, known, length, weights / budget.clamp(min=1e-300), budget, siblings)
            cut = _cut(moved, budget, siblings)
            if i + 1 < rounds:
                needs = moved.gather(-1, cut) / budget.clamp(min=1e-300)
                weights = weights * needs.nan_to_num(nan=1.0).clamp(_LEAST, 1.0)
        return Order(view, place, moved, low, length, siblings, cut)

    def proved_cut(self, drop: float, read: Read) -> Int[Tensor, "b g r 1"]:
        """The first bin behind which tokens move answers by `drop` at most, when all before `expected` were read.

        What joins those weighs at least its lower end.
        """
        cut, unit = self.expected, self.view.unit(read)
        least = read.total + self.low.gather(-1, cut) * unit
        budget = (drop * (1 - 1e-7) * self.view.most * least / unit.clamp(min=1e-300)).nan_to_num(nan=0.0)
        # What joins may make the answer longer.
        whole = read.total.clamp(min=1e-300)
        length = torch.linalg.vector_norm(read.average(read.weights) / whole, dim=-1, keepdim=True)
        joining = self.moved.gather(-1, cut) * self._ratio(length) * unit / whole
        longest = ((length + joining) * (1 + SUMS)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        ratio = self._ratio(torch.minimum(longest, self.view.most * (1 + 1e-3)))
        return torch.maximum(cut, _cut(self.moved, budget / ratio, self.siblings))

    def before(self, cut: Int[Tensor, "b g r 1"]) -> Bool[Tensor, "b g r s"]:
        """The tokens before a bin, and all those without a sketch."""
        tokens = self.view.seen.clone()
        tokens[..., : self.view.known] &= self.place < cut
        return tokens

    def dropped(
        self, cut: Int[Tensor, "b g r 1"], read: Read, length: Float64[Tensor, "b g r 1"]
    ) -> Float64[Tensor, "b g r 1"]:
        """How far the tokens behind `cut` may move the answer of this length, at most; all others were read."""
        unit = self.view.unit(read)
        whole = read.total + self.low.gather(-1, cut) * unit
        tail = self.moved.gather(-1, cut) * self._ratio(length)
        moved = (tail * unit / (whole * self.view.most).clamp(min=1e-300)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where((self.view.most > 0) & (tail > 0), moved, 0.0)

    def _ratio(self, length: Float64[Tensor, "b g r 1"]) -> Float64[Tensor, "b g r 1"]:
        """At least (n + length)/(n + ℓ) for values of every length n: it falls towards 1 with n, or rises."""
        if self.view.known == 0:
            return torch.ones_like(length)
        n = (end(-1, keepdim=True).double() for end in (self.view.lengths.amin, self.view.lengths.amax))
        least, most = ((x + length) / (x + self.length) for x in n)
        return torch.maximum(least, most) * (1 + SUMS)


def _cut(
    moved: Float64[Tensor, "b g r bins"], budget: Float64[Tensor, "b g r 1"], siblings: int
) -> Int[Tensor, "b g r 1"]:
    """The first bin behind which all rows of an order keep their budgets."""
    short = together(~(moved <= budget), siblings)
    return short.sum(-1, keepdim=True).clamp(1, _BINS)


def together(which: Bool[Tensor, "b g r s"], siblings: int) -> Bool[Tensor, "b g r s"]:
    """What any of the rows that share an order has, for each of them."""
    if siblings == 1:
        return which
    apart = which.unflatten(2, (siblings, which.shape[2] // siblings))  # (b, g, siblings, n, s)
    return apart.any(2, keepdim=True).expand(apart.shape).flatten(2, 3)


class Terms(NamedTuple):
    """Tokens at the middles of their brackets, and how far from there they may be."""

    low: Float64[Tensor, "b g r s"]
    worst: Float64[Tensor, "b g r s"]
    """With the largest weight."""
    beta: Float64[Tensor, "b g r s"]
    half: Float64[Tensor, "b g r s"]
    gamma: Float64[Tensor, "b g r s"]

    @staticmethod
    def of(
        brackets: Brackets,
        lengths: Float32[Tensor, "b g 1 s0"],
        crowd: bool,
        span: slice,
        length: Float64[Tensor, "b g r 1"],
    ) -> Terms:
        """Some tokens, for answers of this length; without a `crowd`, nothing but their worst is known."""
        low, high = (x[..., span].double() for x in (brackets.low, brackets.high))
        reach = lengths[..., span].double() + length
        worst = high * reach
        if not crowd:
            nothing = torch.zeros_like(worst)
            return Terms(low, worst, worst, nothing, nothing)
        half = 0.5 * (high / low.clamp(min=NEAR)).log()
        crowded = (low >= NEAR) & (half <= _WIDE)
        # The others are taken at their worst, which nothing exceeds.
        half = torch.where(crowded, half, 0.0)
        beta = torch.where(crowded, (low * high).sqrt() * reach, worst)
        gamma = beta * (torch.expm1(half) - half) / half.square().clamp(min=1e-300)
        return Terms(low, worst, beta, half, gamma)

    def rest(self, slope: Float64[Tensor, "b g r 1"]) -> Float64[Tensor, "b g r s"]:
        """r_j with this μ."""
        light = torch.minimum(self.beta * self.half, self.beta.square() / (4 * (slope - self.gamma)).clamp(min=1e-300))
        heavy = self.worst - self.beta - slope * self.half.square()
        return torch.where(self.gamma >= slope, heavy, light) + _LOST * self.worst

    def worth(self, weights: Float64[Tensor, "b g r 1"], siblings: int) -> Float64[Tensor, "b g r s"]:
        """The sum of what each token is worth to the rows of its order."""
        worth = (torch.where(self.gamma > 0, self.gamma, self.worst) * weights).nan_to_num(nan=0.0)
        if siblings > 1:
            apart = worth.unflatten(2, (siblings, worth.shape[2] // siblings))  # (b, g, siblings, n, s)
            worth = apart.sum(2, keepdim=True).expand(apart.shape).flatten(2, 3)
        return worth


def _sorted(
    view: Outlook,
    read: Bool[Tensor, "b g r s0"],
    length: Float64[Tensor, "b g r 1"],
    weights: Float64[Tensor, "b g r 1"],
    budget: Float64[Tensor, "b g r 1"],
    siblings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The bins of tokens; how far those of each bin and all after it may move a sum; and their lower ends."""
    spent: list[Tensor] = []
    slopes: list[Tensor] = []
    if view.stray is not None:
        spent = [share * budget for share in _SHARES]
        slopes = [x / view.stray.whole.square().clamp(min=1e-300) for x in spent]
    place = torch.empty_like(view.brackets.high, dtype=torch.int64)
    sums = [budget.new_zeros(*budget.shape[:-1], _BINS) for _ in range(3 + len(slopes))]
    for start in range(0, view.known, _SPAN):
        span = slice(start, min(start + _SPAN, view.known))
        terms = Terms.of(view.brackets, view.lengths, view.stray is not None, span, length)
        bins = (terms.worth(weights, siblings).clamp(min=1e-300).log() * -_FINE).clamp(0, _BINS - 1).long()
        place[..., span] = bins.masked_fill(read[..., span], 0)
        parts = [terms.low, terms.worst, terms.beta, *(terms.rest(slope) for slope in slopes)]
        for total, x in zip(sums, parts, strict=True):
            total.scatter_add_(-1, place[..., span], x)
    low, moved, beta, *rests = (pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in sums)
    for more, rest in zip(spent, rests, strict=True):
        moved = torch.fmin(moved, (beta + more + rest) * (1 + SUMS))
    return place, moved, low
