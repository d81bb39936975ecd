r"""The steps of sparse attention: find a cut through all tokens, read what is before it, and prove the rest.

Over shards, each takes these steps for its own tokens, and what a step yields is added up over all: so all of them find
one cut, and prove one bound (`avow.distributed.sparse`). One process that has all tokens is a single shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from avow.numerics.gather import Masked, Read
from avow.numerics.shard_steps import AnyTrue, Done, Max, Steps, Sum
from avow.numerics.tail_samples import Basis, Draws, draw
from avow.numerics.token_ranking import SUMS, Budget, Extent, SketchedRows, behind, in_bins

# What is read first may be expected to leave so many times the error that is allowed, if that is little of the answer:
# it tells what the rest is worth.
_FIRST, _LITTLE = 16.0, 0.5
# If the tail may be sampled, at most this share is read first: it only tells how long the answer is about.
_COARSE = 1 / 64
# How often rows that share tokens weigh each other's needs, and how much less those of a row count each time at most.
ROUNDS, _LEAST = 2, 0.05
# What float32 rounds in the bins, which only say where to cut: proofs rest on sums in float64.
_COARSELY = 1 - 1e-4
# The second cut is sure to do, but for what float32 cannot hold; the third leaves nothing unread. With a mask over all
# tokens there are as many steps whatever the numbers, so that they compile, and bins are in float64.
_CUTS, _MASKED_CUTS = 3, 2


class State(NamedTuple):
    """What all shards know of the answer so far, in the unit of weights and in the size of values."""

    out: Float64[Tensor, "b g r e"]
    length: Float64[Tensor, "b g r 1"]
    top: Float64[Tensor, "b g r 1"]
    total: Float64[Tensor, "b g r 1"]
    """What the tokens that were read weigh, relative to exp(top)."""
    grown: Float64[Tensor, "b g r 1"]
    """exp(top − origin)"""
    shrunk: Float64[Tensor, "b g r 1"]
    more: tuple[Tensor, ...]
    """What else shards sent, added up."""


class Answer(NamedTuple):
    """What was read, and what that proves."""

    state: State
    tails: Float64[Tensor, "b g r 1"]
    """How far unread tokens, or the draws, may have moved each row, in the unit of errors."""
    kept: Bool[Tensor, "b g r s"]
    """The tokens that count."""
    touched: Bool[Tensor, "b g r s"]
    """What was read at all."""
    odds: Float64[Tensor, "b g r s"] | None
    read: Read
    everywhere: Float64[Tensor, "b g r 1"]
    """How many tokens of all shards were read."""


class _First(NamedTuple):
    """What all shards know after the first reading; `state` tells also what the rest may weigh, and ΣS²."""

    touched: Bool[Tensor, "b g r s"]
    read: Read
    state: State


class _Cut(NamedTuple):
    """Tokens in bins by what they are worth, and the bin from which on they are not read."""

    budget: Budget
    parts: list[Float64[Tensor, "b g r s"]]
    moved: Float64[Tensor, "b g r bins"]
    """What the tokens of each bin and all after it may move a row's sum."""
    place: Int[Tensor, "b g r s"]
    bin: Int[Tensor, "b g r 1"]


@dataclass(frozen=True)
class SparseReading:
    """Some rows of queries beside all tokens, or one shard's, and how exactly they are to be answered."""

    view: SketchedRows
    nothing: Read
    """The tokens before any was read."""
    whole: Extent
    """Of all shards."""
    most: Float64[Tensor, "b g r 1"]
    """A lower bound on the longest value that a row sees, in the size of values: the unit of its errors."""
    drop: Float64[Tensor, "b g r 1"]
    """How far unread tokens may move each row, in that unit."""
    keys: int
    chance: float = 0.0
    generator: torch.Generator | None = None
    weights_rounded: Float64[Tensor, "b g r 1"] | float = 1.0
    """What weights may be too large by, as float64 computes them: a factor."""

    @property
    def sums(self) -> float:
        """What float64 rounds in sums over the tokens of all shards, and in exp."""
        return SUMS * max(1.0, self.keys / 2**22)

    def steps(self) -> Steps:
        """A first look and a first reading; one cut through all tokens; samples, if chance may help; the proof."""
        first = yield self._first_reading()
        cut = yield self._one_cut(first)
        draws, read = None, first.read
        if self.chance > 0:
            draws, read = yield self._drawn(first, cut)
        answer = yield self._proved(cut, draws, read)
        yield Done(answer)

    def _first_reading(self) -> Steps:
        """What sketches say of all tokens, and the heaviest of them read: enough to tell what the rest is worth."""
        view, drop, sampling = self.view, self.drop, self.chance > 0
        look, place = view.first_look(self.whole, counts=sampling)
        look = yield Sum(look)
        if sampling:
            cut = torch.minimum(view.first_cut(look, drop, self.most), view.heaviest(look, _COARSE * self.keys))
        else:
            cut = view.first_cut(look, torch.maximum(drop, (_FIRST * drop).clamp(max=_LITTLE)), self.most)
        touched = view.together(place < cut) & view.seen
        read = self.nothing.joined(touched)
        state = yield self._reported(read, None, view.expected(self.whole, touched), view.strays)
        yield Done(_First(touched, read, state))

    def _one_cut(self, first: _First) -> Steps:
        """Where all tokens may be cut so that what is behind moves no row by more than it may be moved."""
        view, (touched, _, state) = self.view, first
        rest, strays = state.more
        allowed = (self.drop * self.most * (state.total * state.grown + rest)).nan_to_num(nan=0.0)
        length = torch.minimum(state.length + self.drop * self.most, self.most)
        budget = Budget.of(torch.where(self.most > 0, allowed, math.inf), length, strays)
        terms = view.terms(self.whole, length)
        parts = budget.parts(terms)
        known, bins = view.together(touched), view.resolution.cut
        weights = torch.ones_like(allowed)
        for _ in range(ROUNDS if view.siblings > 1 else 1):
            place = view.places(terms, known, weights / budget.whole.clamp(min=1e-300))
            mine = torch.cat([in_bins(x, place, bins) for x in parts], -1).to(view.resolution.dtype)
            sums = yield Sum(mine)
            _, worst, beta, *rests = (behind(x) for x in sums.double().split(bins, -1))
            moved = budget.most_moved(worst, [beta + rest for rest in rests])
            cut = view.cut_at(moved, budget.whole)
            needs = moved.gather(-1, cut) / budget.whole.clamp(min=1e-300)
            weights = weights * needs.nan_to_num(nan=1.0).clamp(_LEAST, 1.0)
        yield Done(_Cut(budget, parts, moved, place, cut))

    def _drawn(self, first: _First, cut: _Cut) -> Steps:
        """Samples of what is behind the heaviest tokens, if they prove enough and are smaller than the cut."""
        whole, (touched, read, state) = self.whole, first
        rest, _ = state.more
        ref = torch.where(state.total > 0, state.top, whole.origin)
        # What was read, if the values of the rest cancel.
        center = state.out * state.total / (state.total + rest * (whole.origin - ref).exp())
        center = center.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        basis = Basis(self.drop, self.most, state.length, center, ref, (1 + 2 * self.sums) * self.weights_rounded)
        drawn = yield draw(self.view, whole, read, touched, self._before(cut), basis, self.chance, self.generator)
        yield Done(drawn)

    def _proved(self, cut: _Cut, draws: Draws | None, read: Read) -> Steps:
        """All tokens before the cut read, and what that proves; if it is too little, the cut goes further."""
        view, most, whole, budget = self.view, self.most, self.whole, cut.budget
        odds = None if draws is None else draws.odds
        low, worst, beta, *rests = cut.parts
        parts = [low, worst, *(beta + rest for rest in rests)]
        masked = isinstance(read, Masked)
        cuts = _MASKED_CUTS if masked else _CUTS
        for attempt in range(cuts):
            kept = touched = self._before(cut)
            if draws is not None:
                kept = torch.where(draws.sampled, draws.drawn, kept)
                touched = kept | draws.touched
            read = read.joined(kept)
            left = torch.cat([torch.where(kept, 0.0, x).sum(-1, keepdim=True) for x in parts], -1)
            state = yield self._reported(read, odds, left, touched.sum(-1, keepdim=True).double())
            (lower, whole_worst, *crowds), everywhere = state.more[0].split(1, -1), state.more[1]
            tail = budget.most_moved(whole_worst, crowds) * whole.ratio(state.length, budget.length) * (1 + self.sums)
            tails = tail * state.shrunk / ((state.total + lower * state.shrunk) * most).clamp(min=1e-300)
            tails = torch.where((most > 0) & ~(tail <= 0), tails.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
            if draws is not None:
                tails = torch.where(draws.sampled, draws.tails, tails)
            short = ~(tails <= self.drop)
            if attempt + 1 == cuts:
                break
            # Machines of several kinds may differ in a last bit: all go on where any has to, or one would wait forever.
            more = yield AnyTrue(short)
            if not masked and not bool(more.any()):
                break
            # What joins weighs at least its lower end, and may make the answer longer.
            least = state.total * state.grown + lower
            joining = tail / (state.total * state.grown).clamp(min=1e-300)
            longer = (state.length + joining).nan_to_num(nan=math.inf, posinf=math.inf)
            ratio = whole.ratio(torch.minimum(longer, most * (1 + 1e-3)), budget.length)
            enough = (self.drop * most * least * _COARSELY / ratio).nan_to_num(nan=0.0)
            last = torch.full_like(cut.bin, view.resolution.cut)
            further = torch.maximum(cut.bin, view.cut_at(cut.moved, enough) if attempt == 0 else last)
            cut = cut._replace(bin=torch.where(view.together(short), further, cut.bin))
        yield Done(Answer(state, tails, kept, touched, odds, read, everywhere))

    def _reported(self, read: Read, odds: Float64[Tensor, "b g r s"] | None, *more: Tensor) -> Steps:
        """What all shards have read, each token counted once or by its odds, and the sums of what else they tell."""
        own = torch.where(read.total > 0, read.top, -math.inf)
        top = yield Max(own)
        top = top.masked_fill(top == -math.inf, 0.0)
        share = (own - top).exp()
        weights = read.weights if odds is None else read.weights / read.at(odds).clamp(min=1e-300)
        values = read.average(weights) * share
        sums = yield Sum(torch.cat([read.sum(weights) * share, values, *more], -1))
        total, average, *others = sums.split([1, values.shape[-1], *(x.shape[-1] for x in more)], -1)
        out = average / total.clamp(min=1e-300)
        length = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
        grown = (top - self.whole.origin).clamp(max=700.0).exp()
        yield Done(State(out, length, top, total, grown, (self.whole.origin - top).exp(), tuple(others)))

    def _before(self, cut: _Cut) -> Bool[Tensor, "b g r s"]:
        """The tokens before a cut."""
        return (cut.place < cut.bin) & self.view.seen
