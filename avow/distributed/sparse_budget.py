r"""What shards of the keys leave unread together: one budget for all of them, spent where it saves the most reading.

A row's answer from the tokens H that were read, wherever they are, is :math:`out = \sum_H w_j v_j / Z_H`. Of each of
the others, T, a shard's sketch knows that :math:`low_j \le w_j \le high_j`, and its value is :math:`n_j` long. Then

.. math:: \|o^* - out\| \le \frac{\sum_T high_j (n_j + \|out\|)}{Z_H + \sum_T low_j}   [claim tail-mass-output]

and every sum is one over shards: what they promise merges by adding up, in any order and grouping. Nor can all unread
tokens be at their worst at once. Shard i knows that :math:`w_j = β_j e^{x_j}` with :math:`\sum_j x_j^2 \le S_i^2`, so
with one :math:`μ \ge 0` for all shards (`avow.numerics.token_ranking`)

.. math:: \sum_T w_j (n_j + ℓ) \le \sum_T (β_j + r_j(μ)) + μ \sum_i S_i^2 .

Weights are relative to :math:`e^O` with O the largest origin of any shard; values are divided by one power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.numerics.aggregate_error import AggregateError, aggregate_error
from avow.numerics.brackets import Brackets, bracketed
from avow.numerics.sketch import GROUP, Sketch, sketched
from avow.numerics.token_ranking import Terms, together

# Bins that tokens are counted in, at a first look at weights and of what is left after it, and bins of a nat: what is
# lighter than the last bin is taken together.
FIRST_BINS, BINS = 128, 160
_FIRST_FINE, _FINE = 4, 8
# Shares of the budget that μ·ΣS² may be; the best one is taken.
SHARES = (0.02, 0.1, 0.3)
# A shard so many nats below all others is taken for that heavy: products of its weights then stay numbers.
_LIGHTEST = -300.0
# Groups that reach further, in the unit of a sketch of others, are beyond it.
_BEYOND = 1e30
# Lengths of values in float32, rounded up, and the least of them.
_UP, _SHORTEST = 1 + 2.0**-22, 2.0**-120


class Extent(NamedTuple):
    """The largest of a few numbers, of one shard or of all of them."""

    origin: Float64[Tensor, "b g r 1"]
    peak: Float64[Tensor, "b g r 1"]
    """The largest logarithm of a weight's upper end."""
    longest: Float64[Tensor, "b g 1 1"]
    """At least the length of any value, and at most that but for the slack of norms."""
    shortest: Float64[Tensor, "b g 1 1"]
    """Minus at most the length of any value."""
    key: Float64[Tensor, "b g 1 1"]
    """At least the length of any key."""

    def packed(self) -> Float64[Tensor, " m"]:
        return torch.cat([x.flatten() for x in self])

    def unpacked(self, numbers: Float64[Tensor, " m"]) -> Extent:
        parts = numbers.split([x.numel() for x in self])
        return Extent(*(part.reshape(x.shape) for part, x in zip(parts, self, strict=True)))

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
        """At least (n + length)/(n + other) for values of every length n: it falls towards 1 with n, or rises."""
        ends = (self.near(x).double() for x in (-self.shortest, self.longest))
        least, most = ((n + length) / (n + other).clamp(min=1e-300) for n in ends)
        return torch.maximum(least, most)


def whole_sketch(k: Float[Tensor, "b g s d"], bits: int, known: Sketch | None) -> Sketch:
    """The sketch of all keys, from one of the first of them where that is `known`.

    A last group that is not full is filled up with its last key.
    """
    s, done = k.shape[-2], 0 if known is None else known.rows
    if known is not None and done and bool((known.reach <= _BEYOND).all()):
        more = sketched(_filled(k[:, :, done:]), bits, known.metric, known.size)
        if bool((more.reach <= _BEYOND).all()):
            return known.followed_by(more) if done < s else known
    # Numbers this far from the first ones': a new scale is chosen for all of them.
    return sketched(_filled(k), bits)


def _filled(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g filled d"]:
    missing = -k.shape[-2] % GROUP
    return torch.cat([k, k[:, :, -1:].expand(-1, -1, missing, -1)], 2) if missing else k


@dataclass(frozen=True)
class SketchedShard:
    """One shard's tokens, of which nothing but the sketch and lengths are looked at, beside the rows of all queries."""

    q: Float[Tensor, "b g r d"]
    lengths: Float64[Tensor, "b g 1 s"]
    """At least those of the values."""
    keys: Float64[Tensor, "b g s"]
    brackets: Brackets
    stray: AggregateError | None
    siblings: int

    @staticmethod
    def of(
        q: Float[Tensor, "b g r d"],
        sketch: Sketch,
        lengths: Float64[Tensor, "b g s"],
        keys: Float64[Tensor, "b g s"],
        scale: float,
        siblings: int,
    ) -> SketchedShard:
        """What a sketch says of the keys: it may hold more rows than there are keys."""
        s = lengths.shape[-1]
        seen = torch.arange(sketch.rows, device=q.device) < s
        ends = bracketed(q, sketch, scale, seen.expand(1, 1, 1, -1))
        brackets = Brackets(ends.low[..., :s], ends.high[..., :s], ends.log_high[..., :s], ends.origin)
        return SketchedShard(q, lengths.unsqueeze(-2), keys, brackets, aggregate_error(q, sketch, scale), siblings)

    @property
    def extent(self) -> Extent:
        b, g, r, s = self.brackets.high.shape
        if s == 0:
            rows, heads = self.q.new_full((b, g, r, 1), -math.inf).double(), self.q.new_zeros(b, g, 1, 1).double()
            return Extent(rows, rows, heads, heads - math.inf, heads)
        origin = self.brackets.origin
        peak = origin + self.brackets.log_high.double().amax(-1, keepdim=True)
        ends = (self.lengths.amax(-1, keepdim=True), -self.lengths.amin(-1, keepdim=True))
        return Extent(origin, peak, *ends, self.keys.amax(-1)[..., None, None])

    def units(self, whole: Extent) -> tuple[Float64[Tensor, "b g r 1"], Float64[Tensor, "b g r 1"]]:
        """The brackets' unit in that of all shards, from below and from above."""
        gap = self.brackets.origin - whole.origin
        return gap.exp(), gap.clamp(min=_LIGHTEST).exp()

    def first_look(self, whole: Extent, counts: bool) -> tuple[Float32[Tensor, "b g r m"], Int[Tensor, "b g r s"]]:
        """Of the tokens by what they may move a short answer: the sums of that in each bin; all their upper and lower
        ends; with `counts`, how many are in each bin. And the bins.
        """
        below, above = self.units(whole)
        near = whole.near(self.lengths)
        longest = whole.near(whole.longest)
        # ν: it only orders the tokens, and no bound rests on it.
        usual = 0.5 * longest
        top = (whole.peak - whole.origin) + (longest + usual).log()
        height = self.brackets.log_high + above.log() + (near + usual).log()
        place = ((top - height) * _FIRST_FINE).clamp(0, FIRST_BINS - 1).long()
        low, high = self.brackets.low.double() * below, self.brackets.high.double() * above
        room = near.new_zeros(*high.shape[:-1], FIRST_BINS, dtype=torch.float64)
        parts = [room.scatter_add(-1, place, high * near), *(x.sum(-1, keepdim=True) for x in (high, low))]
        if counts:
            parts.append(room.scatter_add(-1, place, torch.ones_like(high)))
        return torch.cat(parts, -1).float(), place

    def terms(self, whole: Extent, length: Float64[Tensor, "b g r 1"]) -> Terms:
        """All tokens for answers of about this length, in the unit of all shards."""
        below, above = self.units(whole)
        near = whole.near(self.lengths)
        own = Terms.of(self.brackets, near, self.stray is not None, slice(None), length)
        return own._replace(
            low=own.low * below, worst=own.worst * above, beta=own.beta * above, gamma=own.gamma * above
        )

    def expected(self, whole: Extent, read: Bool[Tensor, "b g r s"]) -> Float64[Tensor, "b g r 1"]:
        """About what the tokens that were not read weigh."""
        middle = (self.brackets.low.double() * self.brackets.high).sqrt() * self.units(whole)[1]
        return torch.where(read, 0.0, middle).nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True)

    @property
    def strays(self) -> Float64[Tensor, "b g r 1"]:
        """S²; 0 where nothing is known of it, as all tokens are taken at their worst then."""
        return torch.zeros_like(self.brackets.origin) if self.stray is None else self.stray.whole.square()


def first_cut(
    sums: Float32[Tensor, "b g r m"], drop: Float64[Tensor, "b g r 1"], most: Float64[Tensor, "b g 1 1"]
) -> Int[Tensor, "b g r 1"]:
    """The first bin behind which the tokens of all shards may be expected to move a short answer by `drop` at most."""
    high, low = sums[..., FIRST_BINS : FIRST_BINS + 2].double().split(1, -1)
    behind = _behind(sums[..., :FIRST_BINS].double())
    budget = torch.where(most > 0, drop * most * (high * low).sqrt(), math.inf)
    return (~(behind <= budget)).sum(-1, keepdim=True).clamp(1, FIRST_BINS)


def heaviest(sums: Float32[Tensor, "b g r m"], count: float) -> Int[Tensor, "b g r 1"]:
    """The first bin up to which more than so many tokens of all shards stand, where they were counted."""
    within = sums[..., FIRST_BINS + 2 :].double().cumsum(-1) <= count
    return within.sum(-1, keepdim=True)


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


def binned(
    terms: Terms,
    read: Bool[Tensor, "b g r s"],
    budget: Budget,
    weights: Float64[Tensor, "b g r 1"],
    siblings: int,
) -> tuple[Float32[Tensor, "b g r m"], Int[Tensor, "b g r s"]]:
    """The tokens' sums in bins by what they are worth to the rows that share them, and the bins; the first holds what
    was read already, and what is worth a row's whole budget.
    """
    worth = terms.worth(weights / budget.whole.clamp(min=1e-300), siblings)
    place = (worth.clamp(min=1e-300).log() * -_FINE).clamp(0, BINS - 1).long().masked_fill(read, 0)
    parts = [terms.low, terms.worst, terms.beta, *(terms.rest(slope) for slope in budget.slopes)]
    room = terms.low.new_zeros(*terms.low.shape[:-1], BINS)
    return torch.cat([room.scatter_add(-1, place, x) for x in parts], -1).float(), place


def moved_behind(sums: Float32[Tensor, "b g r m"], budget: Budget) -> Float64[Tensor, "b g r bins"]:
    """How far the tokens of each bin and all after it may move a row's sum; after the last, 0. Rounded to float32."""
    _, worst, beta, *rests = (_behind(x) for x in sums.double().split(BINS, -1))
    for spent, rest in zip(budget.spent, rests, strict=True):
        worst = torch.fmin(worst, beta + spent + rest)
    return worst


def cut_at(
    moved: Float64[Tensor, "b g r bins"], budget: Float64[Tensor, "b g r 1"], siblings: int
) -> Int[Tensor, "b g r 1"]:
    """The first bin behind which all rows that share tokens keep their budgets."""
    return together(~(moved <= budget), siblings).sum(-1, keepdim=True).clamp(1, BINS)


def left(terms: Terms, read: Bool[Tensor, "b g r s"], budget: Budget) -> Float64[Tensor, "b g r m"]:
    """Of the tokens that were not read: sums of lower ends, of the worst, and of β + r for each slope."""
    parts = [terms.low, terms.worst, *(terms.beta + terms.rest(slope) for slope in budget.slopes)]
    return torch.cat([torch.where(read, 0.0, x).sum(-1, keepdim=True) for x in parts], -1)


def most_moved(sums: Float64[Tensor, "b g r m"], budget: Budget) -> Float64[Tensor, "b g r 1"]:
    """How far unread tokens of all shards may move a row's sum, from what `left` added up to."""
    _, worst, *crowds = sums.split(1, -1)
    for spent, crowd in zip(budget.spent, crowds, strict=True):
        worst = torch.fmin(worst, crowd + spent)
    return worst


def _behind(x: Float64[Tensor, "b g r bins"]) -> Float64[Tensor, "b g r bins+1"]:
    return pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1))
