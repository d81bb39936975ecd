r"""Which tokens rows leave unread, and how far those can move each row's answer, in one process or over shards.

A row's answer from the tokens H that were read is :math:`out = \sum_H w_j v_j / Z_H`. Of each of the others, T, a
sketch knows that :math:`low_j \le w_j \le high_j`, and its value is at most :math:`n_j` long. Then

.. math:: \|o^* - out\| \le \frac{\sum_T high_j (n_j + \|out\|)}{Z_H + \sum_T low_j}   [claim tail-mass-output]

and every sum is one over shards, in any order and grouping. Nor can all unread tokens be at their worst at once: those
of shard i weigh :math:`β_j e^{x_j}`, with :math:`|x_j| \le h_j` and :math:`\sum x_j^2 \le S_i^2`
(`avow.numerics.aggregate_error`). For every :math:`μ \ge 0`, the same for all shards,

.. math:: \sum_j β_j e^{x_j} \le \sum_j (β_j + r_j) + μ \sum_i S_i^2, \qquad
          r_j = \max_{|x| \le h_j} β_j (e^x - 1) - μ x^2

and with :math:`γ_j = β_j (e^{h_j} - 1 - h_j)/h_j^2`, a token with :math:`γ_j \ge μ` is at its worst at
:math:`x = h_j`, and any other has :math:`r_j \le \min(β_j h_j, β_j^2 / 4(μ - γ_j))`.

A token that one of several rows reads costs the others nothing. So rows that share a key head share one order of its
tokens, by the sum of what each may still move an answer, in each row's own budget, and there is one cut for all of
them. Weights are relative to :math:`e^O` with O the largest origin of any shard; values are divided by one power of 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.numerics.aggregate_error import NEAR, AggregateError, aggregate_error
from avow.numerics.brackets import Brackets, bracketed
from avow.numerics.sketch import Sketch

# Float64 sums over fewer than 2^22 tokens, products of a few factors, and exp itself.
SUMS = 1e-9
# Shares of the budget that μ·ΣS² may be; the best one is taken.
SHARES = (0.02, 0.1, 0.3)
# Above this, in nats, a bracket says nothing of its middle; up to here, what differences of float64 lose of the largest
# weight is little beside the middle one.
_WIDE, _LOST = 20.0, 1e-13
# A shard so many nats below all others is taken for that heavy: products of its weights then stay numbers.
_LIGHTEST = -300.0
# Lengths of values in float32, rounded up, and the least of them.
_UP, _SHORTEST = 1 + 2.0**-22, 2.0**-120


class Resolution(NamedTuple):
    """Bins that tokens are counted in and bins of a nat, at the first look, for the cut and for samples.

    What is lighter than the last bin is taken together. Sums are in `dtype`.
    """

    first: int
    first_fine: int
    cut: int
    cut_fine: int
    plan: int
    plan_fine: int
    dtype: torch.dtype


ALONE = Resolution(512, 16, 640, 32, 640, 16, torch.float64)
SHARDED = Resolution(128, 4, 160, 8, 256, 8, torch.float32)
"""Coarser, since shards send each other the sums of bins."""


class Extent(NamedTuple):
    """The largest of a few numbers, of one shard or of all of them."""

    origin: Float64[Tensor, "b g r 1"]
    peak: Float64[Tensor, "b g r 1"]
    """The largest logarithm of a weight's upper end."""
    longest: Float64[Tensor, "b g 1 1"]
    """An upper bound on the length of any value, tight up to the slack of norms."""
    shortest: Float64[Tensor, "b g 1 1"]
    """Minus a lower bound on the length of any value."""

    @property
    def size(self) -> Float64[Tensor, "b g 1 1"]:
        """The power of two that values are divided by."""
        return torch.exp2(torch.floor(torch.log2(self.longest.clamp(min=4 * torch.finfo(torch.float64).tiny))))

    def near(self, lengths: Float64[Tensor, "b g 1 #s"]) -> Float32[Tensor, "b g 1 #s"]:
        """Lengths divided by the size, rounded up to float32."""
        return (lengths / self.size * _UP).float().clamp(min=_SHORTEST)

    def ratio(
        self, length: Float64[Tensor, "b g r 1"], other: Float64[Tensor, "b g r 1"]
    ) -> Float64[Tensor, "b g r 1"]:
        """An upper bound on (n + length)/(n + other) for values of every length n: monotone in n."""
        ends = (self.near(x).double() for x in (-self.shortest, self.longest))
        least, most = ((n + length) / (n + other).clamp(min=1e-300) for n in ends)
        return torch.maximum(least, most)


@dataclass(frozen=True)
class SketchedRows:
    """Rows of queries beside tokens, all of them or one shard's, of which only the sketch and lengths are looked at."""

    brackets: Brackets
    lengths: Float64[Tensor, "b g 1 s"]
    """Upper bounds on those of the values."""
    seen: Bool[Tensor, "b g r s"]
    known: int
    """So many tokens have a sketch, or more than there are; the others are always read."""
    stray: AggregateError | None
    siblings: int
    """So many rows share each order of tokens: rows are (siblings · n), the first index being the slower one."""
    resolution: Resolution

    @staticmethod
    def of(
        q: Float[Tensor, "b g r d"],
        sketch: Sketch,
        lengths: Float64[Tensor, "b g s"],
        scale: float,
        siblings: int,
        resolution: Resolution,
        seen: Bool[Tensor, "b g r s"] | None = None,
        bias: Float64[Tensor, "b g r s"] | None = None,
    ) -> SketchedRows:
        """What a sketch says of some of the keys, or of more than there are; rows see all, or those `seen`."""
        s = lengths.shape[-1]
        more = sketch.rows - s  # what is negative is cut off
        shown = torch.ones(1, 1, 1, s, dtype=torch.bool, device=q.device) if seen is None else seen
        ends = bracketed(q, sketch, scale, pad(shown, (0, more)), None if bias is None else pad(bias, (0, more)))
        low, high = (pad(x, (0, -more)) for x in (ends.low, ends.high))
        brackets = Brackets(low, high, pad(ends.log_high, (0, -more), value=-math.inf), ends.origin)
        # Biases round in ways of their own.
        stray = aggregate_error(q, sketch, scale) if bias is None else None
        return SketchedRows(
            brackets, lengths.unsqueeze(-2), shown.expand(high.shape), sketch.rows, stray, siblings, resolution
        )

    @property
    def extent(self) -> Extent:
        b, g, r, s = self.brackets.high.shape
        if s == 0:
            rows, heads = self.lengths.new_full((b, g, r, 1), -math.inf), self.lengths.new_zeros(b, g, 1, 1)
            return Extent(rows, rows, heads, heads - math.inf)
        peak = self.brackets.origin + self.brackets.log_high.double().amax(-1, keepdim=True)
        ends = self.lengths.amax(-1, keepdim=True), -self.lengths.amin(-1, keepdim=True)
        return Extent(self.brackets.origin, peak, *ends)

    @property
    def strays(self) -> Float64[Tensor, "b g r 1"]:
        """S²; 0 where nothing is known of it, as all tokens are taken at their worst then."""
        return torch.zeros_like(self.brackets.origin) if self.stray is None else self.stray.whole.square()

    def units(self, whole: Extent) -> tuple[Float64[Tensor, "b g r 1"], Float64[Tensor, "b g r 1"]]:
        """The brackets' unit in that of all shards, from below and from above."""
        gap = self.brackets.origin - whole.origin
        return gap.exp(), gap.clamp(min=_LIGHTEST).exp()

    def ends(self, whole: Extent) -> tuple[Float64[Tensor, "b g r s"], Float64[Tensor, "b g r s"]]:
        """The least and the most that tokens weigh, in the unit of all shards."""
        below, above = self.units(whole)
        return self.brackets.low.double() * below, self.brackets.high.double() * above

    def expected(self, whole: Extent, read: Bool[Tensor, "b g r s"]) -> Float64[Tensor, "b g r 1"]:
        """About what the tokens that were not read weigh."""
        middle = (self.brackets.low.double() * self.brackets.high).sqrt() * self.units(whole)[1]
        return torch.where(read, 0.0, middle).nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True)

    def together(self, which: Bool[Tensor, "b g r #s"]) -> Bool[Tensor, "b g r #s"]:
        """What any of the rows that share an order has, for each of them."""
        if self.siblings == 1:
            return which
        apart = which.unflatten(2, (self.siblings, which.shape[2] // self.siblings))  # (b, g, siblings, n, s)
        return apart.any(2, keepdim=True).expand(apart.shape).flatten(2, 3)

    def first_look(self, whole: Extent, counts: bool) -> tuple[Float[Tensor, "b g r m"], Int[Tensor, "b g r s"]]:
        """Of the tokens by what they may move a short answer: the sums of that in each bin; all their upper and lower
        ends; with `counts`, how many are in each bin. And the bins.
        """
        bins, fine, *_ = self.resolution
        near, longest = whole.near(self.lengths), whole.near(whole.longest)
        # ν: it only orders the tokens, and no bound rests on it.
        usual = 0.5 * longest
        top = (whole.peak - whole.origin) + (longest + usual).log()
        top = top.masked_fill(top == -math.inf, 0.0)  # a row may see nothing
        height = self.brackets.log_high + self.units(whole)[1].log() + (near + usual).log()
        place = ((top - height) * fine + 1).clamp(1, bins - 1).long()
        place[..., self.known :] = 0  # always read
        low, high = self.ends(whole)
        parts = [in_bins(high * near, place, bins), *(x.sum(-1, keepdim=True) for x in (high, low))]
        if counts:
            parts.append(in_bins(self.brackets.high.gt(0).double(), place, bins))
        return torch.cat(parts, -1).to(self.resolution.dtype), place

    def first_cut(
        self, look: Float[Tensor, "b g r m"], drop: Float64[Tensor, "b g r 1"], most: Float64[Tensor, "b g #r 1"]
    ) -> Int[Tensor, "b g r 1"]:
        """The first bin behind which the tokens of all shards may be expected to move a short answer by `drop`."""
        bins = self.resolution.first
        high, low = look[..., bins : bins + 2].double().split(1, -1)
        budget = torch.where(most > 0, drop * most * (high * low).sqrt(), math.inf)
        return (~(behind(look[..., :bins].double()) <= budget)).sum(-1, keepdim=True).clamp(2, bins)

    def heaviest(self, look: Float[Tensor, "b g r m"], count: float) -> Int[Tensor, "b g r 1"]:
        """The first bin up to which more than so many tokens of all shards stand, if they were counted."""
        within = look[..., self.resolution.first + 2 :].double().cumsum(-1) <= count
        return within.sum(-1, keepdim=True)

    def terms(self, whole: Extent, length: Float64[Tensor, "b g r 1"]) -> Terms:
        """All tokens for answers of about this length, in the unit of all shards."""
        own = Terms.of(self.brackets, whole.near(self.lengths).double() + length, self.stray is not None)
        below, above = self.units(whole)
        return own._replace(
            low=own.low * below, worst=own.worst * above, beta=own.beta * above, gamma=own.gamma * above
        )

    def places(self, terms: Terms, read: Bool[Tensor, "b g r s"], weights: Tensor) -> Int[Tensor, "b g r s"]:
        """The bins of tokens by what they are worth to the rows that share them, each row's needs times its weight.

        The first holds what was read already, and what is worth a row's whole budget.
        """
        worth = (torch.where(terms.gamma > 0, terms.gamma, terms.worst) * weights).nan_to_num(nan=0.0)
        if self.siblings > 1:
            apart = worth.unflatten(2, (self.siblings, worth.shape[2] // self.siblings))  # (b, g, siblings, n, s)
            worth = apart.sum(2, keepdim=True).expand(apart.shape).flatten(2, 3)
        bins, fine = self.resolution.cut, self.resolution.cut_fine
        return (worth.clamp(min=1e-300).log() * -fine).clamp(0, bins - 1).long().masked_fill(read, 0)

    def cut_at(
        self, moved: Float64[Tensor, "b g r bins"], budget: Float64[Tensor, "b g r 1"]
    ) -> Int[Tensor, "b g r 1"]:
        """The first bin behind which all rows that share tokens keep their budgets."""
        return self.together(~(moved <= budget)).sum(-1, keepdim=True).clamp(1, self.resolution.cut)


class Terms(NamedTuple):
    """Tokens at the middles of their brackets, and how far from there they may be."""

    low: Float64[Tensor, "b g r s"]
    worst: Float64[Tensor, "b g r s"]
    """With the largest weight."""
    beta: Float64[Tensor, "b g r s"]
    half: Float64[Tensor, "b g r s"]
    gamma: Float64[Tensor, "b g r s"]

    @staticmethod
    def of(brackets: Brackets, reach: Float64[Tensor, "b g r s"], crowd: bool) -> Terms:
        """Tokens that move a sum by their weight times `reach`; without a `crowd`, only their worst is known."""
        low, high = brackets.low.double(), brackets.high.double()
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


class Budget(NamedTuple):
    """What unread tokens may move each row's sum, and the slopes μ at which they are judged."""

    whole: Float64[Tensor, "b g r 1"]
    length: Float64[Tensor, "b g r 1"]
    """ℓ: the length of answers that is reckoned with."""
    spent: tuple[Float64[Tensor, "b g r 1"], ...]
    """μ·ΣS², for each slope."""
    slopes: tuple[Float64[Tensor, "b g r 1"], ...]

    @staticmethod
    def of(whole: Tensor, length: Tensor, strays: Float64[Tensor, "b g r 1"]) -> Budget:
        spent = tuple(share * whole.clamp(max=1e300) for share in SHARES)
        # Rounded up, what the squares add up to makes μ smaller, which is the safe way for a given μ·ΣS².
        slopes = tuple(x / (strays * (1 + 1e-9)).clamp(min=1e-300) for x in spent)
        return Budget(whole, length, spent, slopes)

    def parts(self, terms: Terms) -> list[Float64[Tensor, "b g r s"]]:
        """What is added up over tokens: lower ends, the worst, β, and r for each slope."""
        return [terms.low, terms.worst, terms.beta, *(terms.rest(slope) for slope in self.slopes)]

    def most_moved(self, worst: Tensor, crowds: list[Tensor]) -> Tensor:
        """How far unread tokens may move a row's sum: the sums of their worst and, for each slope, of β + r."""
        for spent, crowd in zip(self.spent, crowds, strict=True):
            worst = torch.fmin(worst, crowd + spent)
        return worst


def in_bins(x: Float64[Tensor, "b g r s"], place: Int[Tensor, "b g r s"], bins: int) -> Float64[Tensor, "b g r bins"]:
    """What x adds up to in each bin."""
    return x.new_zeros(*x.shape[:-1], bins).scatter_add(-1, place, x)


def behind(x: Float64[Tensor, "b g r bins"]) -> Float64[Tensor, "b g r bins+1"]:
    """The sums over each bin and all after it; after the last, 0."""
    return pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1))
