r"""Samples of what is behind the heaviest tokens, drawn by each shard alone, with one proof for the estimate of all.

Token j is read with probability :math:`p_j` and counts :math:`1/p_j`-fold. With c any point that was fixed before the
draws, :math:`\hat N` and :math:`\hat Z` the weighted sum and the mass as drawn, and sums over all tokens of all shards,

.. math:: X = \sum_j (B_j/p_j - 1)\, w_j (v_j - c), \quad M = \sum_j (B_j/p_j - 1)\, w_j, \quad
          o^* - \hat N/\hat Z = \frac{(\hat N/\hat Z - c) M - X}{\hat Z - M} .

Draws are independent from token to token, in whatever shard they are, so X and M are each one sum of independent terms
of mean zero, and Bennett's inequality (`avow.numerics.tails`) bounds it with the largest term and the variance of all
shards: the chance to fail is spent once, not by every shard. The variance itself is bounded from what was drawn, by
Chernoff's inequality, again for all shards at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from avow.numerics import tails
from avow.numerics.gather import Masked, Read
from avow.numerics.shard_steps import Done, Max, Steps, Sum
from avow.numerics.token_ranking import Extent, SketchedRows, in_bins

# Samples, whose proofs depend on the draws, are planned four times, each larger and with the former in it. Plans take
# values for as far apart as they may be; where they are not, a plan for twice the error proves it.
LADDER = (2.2, 1.7, 1.35, 1.0)
# Shares of the chance that the answer's deviation, its variance, the mass's deviation and its variance may fail, and on
# how many sides each may.
_PARTS = ((0.8, 2), (0.1, 1), (0.05, 2), (0.05, 1))
# Nats above the largest term, for odds below one.
_ABOVE = 8
# What is so many nats above what was read first is not sampled: its weight would leave the range of numbers.
_HIGH = 300.0
# The share of an estimated mass that its deviation may have: then (1 + x)/(1 − x·share/(1 − share)) ≤ (1 + x)² up to ½.
_SURE = 0.4


class Basis(NamedTuple):
    """What all shards know of rows when they draw; weights are relative to exp(ref)."""

    drop: Float64[Tensor, "b g r 1"]
    most: Float64[Tensor, "b g #r 1"]
    length: Float64[Tensor, "b g r 1"]
    """About that of the answer."""
    center: Float64[Tensor, "b g r e"]
    """c"""
    ref: Float64[Tensor, "b g r 1"]
    rounded: Float64[Tensor, "b g r 1"] | float
    """What weights and sums over the tokens of all shards may be too large by, as float64 computes them: a factor."""


class Draws(NamedTuple):
    """The rows that sample, and for those what each token's chance was, which count, and what they prove."""

    sampled: Bool[Tensor, "b g r 1"]
    odds: Float64[Tensor, "b g r s"]
    """1 in other rows."""
    drawn: Bool[Tensor, "b g r s"]
    touched: Bool[Tensor, "b g r s"]
    """What any plan read, whether it did or not."""
    tails: Float64[Tensor, "b g r 1"]
    """How far the estimate may be from the truth, in the unit of errors."""


def draw(
    view: SketchedRows,
    whole: Extent,
    read: Read,
    touched: Bool[Tensor, "b g r s"],
    instead: Bool[Tensor, "b g r s"],
    basis: Basis,
    chance: float,
    generator: torch.Generator | None,
) -> Steps:
    """Samples that prove enough, where they are smaller than what would be read `instead`; what is `touched` was read
    already, and counts for certain.
    """
    logs = [math.log(len(LADDER) * sides / (share * chance)) for share, sides in _PARTS]
    terms, plan = _terms(view, whole, basis)
    plan = yield Sum(plan)
    # Fixed before anything is drawn, so that each rung's law is that of independent draws.
    certain = touched | ~view.seen
    rungs = [
        torch.where(edge == -math.inf, 0.0, terms - edge).clamp(max=0.0).exp().masked_fill(certain, 1.0)
        for edge in _edges(view, plan, whole, basis, logs)
    ]
    ranges = [_Ranges.of(view, whole, basis.center, odds) for odds in rungs]
    counts = [(odds * view.seen).sum(-1, keepdim=True) for odds in (instead.double(), *rungs)]
    totals = yield Sum(torch.cat([*counts, *(x for one in ranges for x in one.variances)], -1))
    ends = yield Max(torch.cat([x for one in ranges for x in one.largest], -1))
    many, *expected = totals[..., : 1 + len(rungs)].split(1, -1)
    variances = totals[..., 1 + len(rungs) :].split(2, -1)
    sane = (whole.peak - basis.ref <= _HIGH) & (basis.most > 0)
    home = terms.device if generator is None else generator.device
    draws = torch.rand(terms.shape, generator=generator, device=home, dtype=torch.float64).to(terms.device)
    result = Draws(
        torch.zeros_like(sane),
        torch.ones_like(terms),
        torch.zeros_like(touched),
        touched,
        torch.full_like(basis.drop, math.inf),
    )
    for odds, count, variance, end in zip(rungs, expected, variances, ends.split(2, -1), strict=True):
        tried = sane & (count < many) & ~result.sampled
        if not isinstance(read, Masked) and not bool(tried.any()):
            continue  # a mask over all tokens takes as many steps whatever the numbers
        taken = (draws < odds) & tried & view.seen
        read = read.joined(taken)
        sums = yield Sum(_drawn_sums(read, odds, basis))
        proved = _missed(sums, variance, end, whole, basis, logs)
        # Told to all, so that machines of several kinds, which may differ in a last bit, take the same rows.
        short = yield Max((~(tried & (proved <= basis.drop))).to(torch.uint8))
        now = short == 0
        result = Draws(
            result.sampled | now,
            torch.where(now, odds, result.odds),
            torch.where(now, taken, result.drawn),
            result.touched | taken,
            torch.where(now, proved, result.tails),
        )
    yield Done((result, read))


def _terms(
    view: SketchedRows, whole: Extent, basis: Basis
) -> tuple[Float64[Tensor, "b g r s"], Float[Tensor, "b g r m"]]:
    """Logarithms of what tokens may move a sum, and in bins by that, sums of what their variances are made of."""
    bins, reach = view.resolution.plan, whole.near(view.lengths).double() + basis.length
    # Upper ends have a least one, and odds are to be in proportion to them.
    terms = view.brackets.high.double().log() + view.units(whole)[1].log() + reach.log()
    place = ((_top(whole, basis) - terms) * view.resolution.plan_fine).clamp(0, bins - 1).long()
    low, high = view.ends(whole)
    # Expected weights are the ends' geometric mean.
    parts = (low * reach, low / reach, (low * high).sqrt())
    return terms, torch.cat([in_bins(x, place, bins) for x in parts], -1).to(view.resolution.dtype)


def _top(whole: Extent, basis: Basis) -> Float64[Tensor, "b g r 1"]:
    """The logarithm of the largest term of all shards, and some room above it."""
    longest = whole.near(whole.longest).double() + basis.length
    top = (whole.peak - whole.origin) + longest.log() + _ABOVE
    return top.masked_fill(top == -math.inf, 0.0)  # a row may see nothing


def _edges(
    view: SketchedRows, plan: Float[Tensor, "b g r m"], whole: Extent, basis: Basis, logs: list[float]
) -> list[Float64[Tensor, "b g r 1"]]:
    """The logarithms of terms from which on tokens are read for certain, for each rung: the highest that may be
    expected to prove enough.
    """
    bins = view.resolution.plan
    # Tokens from bin c on have odds term/edge. Sums over them:
    apart, mass, weights = (x.flip(-1).cumsum(-1).flip(-1) for x in plan.double().split(bins, -1))
    edges = _top(whole, basis) - torch.arange(bins, device=plan.device) / view.resolution.plan_fine
    most = edges.exp()
    least = most / (whole.near(-whole.shortest).double() + basis.length)
    moved, lost = (
        tails.deviation(tails.at_most(most * x.nan_to_num(), bound.square(), own_log), bound, log)
        for x, bound, log, own_log in ((apart, most, logs[0], logs[1]), (mass, least, logs[2], logs[3]))
    )
    total = weights[..., :1]
    expected = (moved + lost * weights / total * 2 * basis.length) / ((total - lost) * basis.most)
    first_terms = []
    for aim in LADDER:
        hopeless = (total <= lost) | ~(expected <= aim * basis.drop)
        # The first bin from which on all plans are expected to do.
        first = hopeless.flip(-1).cummax(-1).values.flip(-1).sum(-1, keepdim=True)
        edge = edges.gather(-1, first.clamp(max=bins - 1))
        first_terms.append(torch.where(first >= bins, -math.inf, edge))
    return first_terms


class _Ranges(NamedTuple):
    """Of the terms of X and of M, as sketches have them, relative to exp(origin)."""

    largest: tuple[Float64[Tensor, "b g r 1"], Float64[Tensor, "b g r 1"]]
    variances: tuple[Float64[Tensor, "b g r 1"], Float64[Tensor, "b g r 1"]]

    @staticmethod
    def of(
        view: SketchedRows, whole: Extent, center: Float64[Tensor, "b g r e"], odds: Float64[Tensor, "b g r s"]
    ) -> _Ranges:
        chancy = odds < 1
        # Never drawn, a token may still weigh: its chance of 0 proves nothing, and the bound is infinite.
        p = torch.where(chancy, odds, 1.0)
        high = torch.where(chancy, view.ends(whole)[1], 0.0)
        length = torch.linalg.vector_norm(center, dim=-1, keepdim=True)
        ends = high * (whole.near(view.lengths).double() + length), high
        zero = torch.zeros_like(length)  # a shard may have no tokens
        first, second = (torch.cat([x / p, zero], -1).amax(-1, keepdim=True) for x in ends)
        spread, other = ((x.square() * (1 - p) / p).sum(-1, keepdim=True) for x in ends)
        return _Ranges((first, second), (spread, other))


def _drawn_sums(read: Read, odds: Float64[Tensor, "b g r s"], basis: Basis) -> Float64[Tensor, "b g r m"]:
    """Of the tokens that were drawn: their mass and weighted values, and the estimates of both variances."""
    top = torch.where(read.total > 0, read.top, -math.inf)
    share = (top - basis.ref).clamp(max=_HIGH + 1).exp()
    own = read.at(odds).clamp(min=1e-300)
    counted = read.weights / own
    taken = torch.where(own < 1, read.weights, 0.0).square() * (1 - own) / own.square().clamp(min=1e-300)
    straight = torch.cat([read.sum(counted), read.average(counted)], -1)
    squares = torch.cat([read.sum(taken * read.squares(basis.center)), read.sum(taken)], -1)
    return torch.cat([straight * share, squares * share.square()], -1)


def _missed(
    sums: Float64[Tensor, "b g r m"],
    variances: Float64[Tensor, "b g r 2"],
    ends: Float64[Tensor, "b g r 2"],
    whole: Extent,
    basis: Basis,
    logs: list[float],
) -> Float64[Tensor, "b g r 1"]:
    """How far the estimate is from the truth, at most, up to the chances that `logs` stand for."""
    total, average, *estimates = sums.split([1, basis.center.shape[-1], 1, 1], -1)
    shrunk = (whole.origin - basis.ref).exp()
    far = []
    for i, estimate in enumerate(estimates):
        # Of the weights that were computed, each within the factor of what a sketch allows.
        end = ends[..., i : i + 1] * shrunk * basis.rounded
        proved = variances[..., i : i + 1] * (shrunk * basis.rounded).square()
        # The variance is never taken for more than proved.
        variance = torch.minimum(tails.at_most(estimate * basis.rounded, end.square(), logs[2 * i + 1]), proved)
        far.append(tails.deviation(variance, end, logs[2 * i]))
    out = average / total.clamp(min=1e-300)
    shift = torch.linalg.vector_norm(out - basis.center, dim=-1, keepdim=True)
    # Bounds allow for what rounding does to weights, e^δ, by a factor e^(2δ) of the whole: enough as long as the
    # difference is not much smaller than what it is taken from.
    least = torch.where(far[1] <= _SURE * total, total - far[1], 0.0)
    moved = (far[0] + far[1] * shift) * basis.rounded / (least * basis.most).clamp(min=1e-300)
    return torch.where(least > 0, moved, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
