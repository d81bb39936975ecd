r"""What may still be unread: tokens by how much each can move a sum, and what all behind a point can move it together.

Token j, its weight between :math:`low_j` and :math:`high_j` and its value at most :math:`\|v_j\|` long, moves an answer
of length :math:`\ell` by no more than :math:`high_j (\|v_j\| + \ell)`. Tokens stand in bins by
:math:`high_j (\|v_j\| + \nu)`, with one ν for a head, so that one look at them gives the sums behind every bin,
whatever :math:`\ell` turns out to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from avow.numerics import tails
from avow.numerics.aggregate_error import NEAR, AggregateError, Crowd
from avow.numerics.brackets import Brackets
from avow.numerics.gather import Read

# Float64 sums over fewer than 2^22 tokens, products of a few factors, and exp itself.
SUMS = 1e-9
# The share of an estimated mass that its deviation may have: then (1 + x)/(1 − x·share/(1 − share)) ≤ (1 + x)² up to ½.
_SURE = 0.4
# Tokens that are widened to float64 at once: few enough that they never leave a core's own cache.
_SPAN = 8192


class Behind(NamedTuple):
    """Sums over the tokens of each bin and all after it; after the last bin, 0."""

    most: Float64[Tensor, "b g r bins"]
    """Of the largest weights, each times the length of its value."""
    high: Float64[Tensor, "b g r bins"]
    low: Float64[Tensor, "b g r bins"]
    crowd: Crowd | None

    def moved(self, length: Tensor | float) -> Float64[Tensor, "b g r bins"]:
        """How far the tokens behind each bin may move a sum with an answer of this length."""
        singly = self.most + length * self.high
        return singly if self.crowd is None else torch.fmin(singly, self.crowd.moved(length))


@dataclass(frozen=True)
class Outlook:
    """Rows beside the tokens: what the sketch says of the first `known` of all that are seen."""

    brackets: Brackets
    seen: Bool[Tensor, "b g r s"]
    lengths: Float32[Tensor, "b g 1 s0"]
    """At least the lengths of the sketched tokens' values."""
    most: Float64[Tensor, "b g r 1"]
    """At most the length of the longest value that a row sees: its unit of error."""
    bins: tails.Bins
    behind: Behind
    stray: AggregateError | None

    @staticmethod
    def of(
        brackets: Brackets,
        seen: Bool[Tensor, "b g r s"],
        lengths: Float64[Tensor, "b g 1 s"],
        most: Float64[Tensor, "b g r 1"],
        stray: AggregateError | None = None,
    ) -> Outlook:
        known = brackets.high.shape[-1]
        # Rounded up; what is far too small for float32 is taken for a little more.
        near = (lengths[..., :known] * (1 + 2.0**-22)).float().clamp(min=2.0**-120)
        # ν: it only orders the tokens, and no bound rests on it.
        usual = (0.5 * lengths.amax(-1, keepdim=True)).float().clamp(min=2.0**-120)
        bins = tails.binned(brackets.log_high + (near + usual).log())
        edges = bins.edges()
        together = stray is not None and known > 0
        sums = [brackets.origin.new_zeros(edges.shape) for _ in range(7 if together else 3)]
        for start in range(0, known, _SPAN):
            span = slice(start, min(start + _SPAN, known))
            some = bins._replace(place=bins.place[..., span])
            low, high = (x[..., span].double() for x in (brackets.low, brackets.high))
            parts = [high * near[..., span], high, low]
            if together:
                middle = (low * high).sqrt_()
                most_middle = middle * near[..., span]
                parts += [most_middle, middle, most_middle.square(), middle.square()]
            for total, x in zip(sums, parts, strict=True):
                total += some.sums(x)
        singly, high_sums, low_sums, *middles = (pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in sums)
        crowd = None
        if stray is not None and known > 0:
            # Float32 rounds what bins hold and where they end by less than a thousandth.
            largest = pad(edges.double().exp() * (1 + 1e-3), (0, 1))
            far = torch.where(brackets.low < NEAR, brackets.high, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
            longest = near.amax(-1, keepdim=True).double()
            crowd = Crowd(largest, far, stray, longest, usual.double(), *middles)
        return Outlook(brackets, seen, near, most, bins, Behind(singly, high_sums, low_sums, crowd), stray)

    @property
    def known(self) -> int:
        return self.lengths.shape[-1]

    def before(self, cut: Int[Tensor, "b g r 1"]) -> Bool[Tensor, "b g r s"]:
        """The tokens before a bin, and all those without a sketch."""
        tokens = self.seen.clone()
        tokens[..., : self.known] &= self.bins.place < cut
        return tokens

    def first_cut(self, drop: float) -> Int[Tensor, "b g r 1"]:
        """The first bin behind which tokens may be expected to move a short answer by `drop` at most."""
        expected = (self.behind.high[..., :1] * self.behind.low[..., :1]).sqrt()
        return self._cut(self.behind.moved(0.0), drop * self.most * expected)

    @staticmethod
    def _cut(moved: Float64[Tensor, "b g r bins"], budget: Float64[Tensor, "b g r 1"]) -> Int[Tensor, "b g r 1"]:
        return (~(moved <= budget)).sum(-1, keepdim=True).clamp(1, moved.shape[-1] - 1)

    def unit(self, read: Read) -> Float64[Tensor, "b g r 1"]:
        """The brackets' unit in that of the weights that were read."""
        return (self.brackets.origin - read.top).exp()

    def heaviest(self, share: float) -> Int[Tensor, "b g r 1"]:
        """The first bin up to which more than a share of the tokens stand."""
        within = self.bins.sums(self.brackets.high.gt(0).double()).cumsum(-1) <= share * self.known
        return within.sum(-1, keepdim=True)

    def odds(
        self,
        drops: Sequence[float],
        certain: Bool[Tensor, "b g r s"],
        length: Float64[Tensor, "b g r 1"],
        logs: Sequence[float],
    ) -> list[Float64[Tensor, "b g r s"]]:
        """Chances to read each token, so small that the estimate may still be expected to prove each of `drops`; those
        that are `certain` count whatever is drawn.
        """
        low, high, near = self.brackets.low.double(), self.brackets.high.double(), self.lengths.double()
        reach = near + length
        terms = self.brackets.log_high + reach.log()
        bins = tails.binned(terms)
        # Expected weights are the ends' geometric mean; tokens from bin c on have odds term/edge. Sums over them of
        # what their variance is made of:
        apart, mass, weights = (
            bins.sums(x).flip(-1).cumsum(-1).flip(-1) for x in (low * reach, low / reach, (low * high).sqrt())
        )
        edges = bins.edges()
        largest = edges.exp()
        least = largest / reach.amin(-1, keepdim=True)
        moved, lost = (
            tails.deviation(tails.at_most(largest * x.nan_to_num(), bound.square(), own_log), bound, log)
            for x, bound, log, own_log in ((apart, largest, logs[0], logs[1]), (mass, least, logs[2], logs[3]))
        )
        total = weights[..., :1]
        expected = (moved + lost * weights / total * 2 * length) / ((total - lost) * self.most)
        plans = []
        for drop in drops:
            hopeless = (total <= lost) | ~(expected <= drop)
            # The first bin from which on all plans are expected to do.
            first = hopeless.flip(-1).cummax(-1).values.flip(-1).sum(-1, keepdim=True)
            edge = edges.gather(-1, first.clamp(max=edges.shape[-1] - 1))
            odds = self.seen.double()
            odds[..., : self.known] *= torch.where(first >= edges.shape[-1], 0.0, terms - edge).clamp(max=0.0).exp()
            plans.append(odds.masked_fill_(certain, 1.0))
        return plans

    def missed(
        self,
        odds: Float64[Tensor, "b g r s"],
        read: Read,
        out: Float64[Tensor, "b g r e"] | None,
        logs: Sequence[float],
    ) -> Float64[Tensor, "b g r 1"]:
        """How far the estimate from these draws is from the truth, at most, up to the chances that `logs` stand for.

        `read` holds the tokens that were drawn with these odds.
        """
        weights, own = read.weights, read.at(odds)
        counted = weights / own.clamp(min=1e-300)
        total = read.sum(counted)
        if out is None:
            out = read.average(counted) / total.clamp(min=1e-300)
        p = odds[..., : self.known]
        tail = self.seen[..., : self.known] & (p < 1)
        # Never drawn, a token may still weigh: its chance of 0 proves nothing, and the bound is infinite.
        p = torch.where(tail, p, 1.0)
        # Fixed before the draws: what the tokens that are read for certain give, if the others' values cancel.
        core = torch.where(own == 1, weights, 0.0)
        others = torch.where(tail, self.brackets.low.double() * self.brackets.high, 0.0).sqrt().sum(-1, keepdim=True)
        most = (read.sum(core) + others.nan_to_num(posinf=0.0) * self.unit(read)).clamp(min=1e-300)
        center = read.average(core) / most
        length = torch.linalg.vector_norm(center, dim=-1, keepdim=True)
        taken = torch.where(own < 1, weights, 0.0).square() * (1 - own) / own.square().clamp(min=1e-300)
        estimates = read.sum(taken * read.squares(center)), read.sum(taken)
        high = torch.where(tail, self.brackets.high.double(), 0.0) * self.unit(read)
        far, mass = (
            _far(x, bound, p, log, own_log)
            for x, bound, log, own_log in (
                (estimates[0], high * (self.lengths.double() + length), logs[0], logs[1]),
                (estimates[1], high, logs[2], logs[3]),
            )
        )
        shift = torch.linalg.vector_norm(out - center, dim=-1, keepdim=True)
        # Callers allow for what rounding does to weights, e^δ, by a factor e^(2δ) of the whole: enough as long as the
        # difference is not much smaller than what it is taken from.
        least = torch.where(mass <= _SURE * total, total - mass, 0.0)
        moved = (far + mass * shift) * (1 + SUMS) / (least * self.most).clamp(min=1e-300)
        moved = torch.where(least > 0, moved, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where((self.most > 0) & tail.any(-1, keepdim=True), moved, 0.0)


def _far(estimate: Tensor, most: Tensor, p: Tensor, log: float, own_log: float) -> Float64[Tensor, "b g r 1"]:
    """How far a sum that counts what is drawn 1/p-fold may be from the whole sum, given the estimate of its variance
    from the draws and the most that each term can be; the variance is never taken for more than proved.
    """
    largest = (most / p).amax(-1, keepdim=True)
    proved = (most.square() * (1 - p) / p).sum(-1, keepdim=True)
    variance = torch.minimum(tails.at_most(estimate, largest.square(), own_log), proved)
    return tails.deviation(variance * (1 + SUMS), largest * (1 + SUMS), log)
