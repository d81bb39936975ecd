r"""The rounds in which shards find one cut through all their tokens, read what is before it, and prove the rest.

With :math:`\hat l` the logits as float64 computes them, off by at most δ in all that matters, the answer errs by

.. math:: tails \cdot e^{2δ} + 2\tanh(δ/2)

where the tails are those of `sparse_budget` at what was computed: the weights of read tokens are right up to
:math:`e^{\pm δ}`, once in the answer [claim softmax-perturbation], and once in what unread ones are compared with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from avow.attend import Attended
from avow.core import Certificate, Problem
from avow.core.certify import absolute_errors, relative_errors
from avow.distributed.protocols import Protocol, all_gather, all_max, all_reduce
from avow.distributed.sparse_budget import (
    BINS,
    Budget,
    Extent,
    SketchedShard,
    binned,
    cut_at,
    first_cut,
    heaviest,
    left,
    most_moved,
    moved_behind,
    whole_sketch,
)
from avow.distributed.sparse_draws import Basis, Draws, draw
from avow.errors import ToleranceUnreachable
from avow.methods.sparse import Sparse
from avow.numerics import rounding
from avow.numerics.gather import Gathered, Tokens
from avow.numerics.masks import row_tiles
from avow.numerics.norms import length_floors
from avow.numerics.sketch import Sketch
from avow.numerics.tail_histogram import SUMS
from avow.numerics.token_ranking import Terms, together

# What is read first may be expected to leave so many times the error that is allowed, if that is little of the answer:
# it tells what the rest is worth.
_FIRST, _LITTLE = 16.0, 0.5
# Where the tail may be sampled, at most this share is read first: it only tells how long the answer is about.
_COARSE = 1 / 64
# How often rows that share tokens weigh each other's needs, and how much less those of a row count each time at most.
ROUNDS, _LEAST = 2, 0.05
# Values shorter than this are measured too coarsely for a proof.
_FAINT = 1e-290
# What float32 rounds in the bins, which only say where to cut: proofs rest on sums in float64.
_COARSELY = 1 - 1e-4
# The second cut is sure to do, but for what float32 cannot hold; the third leaves nothing unread.
_CUTS = 3


class Kept(NamedTuple):
    """Tokens of one shard that some rows count, and by how much."""

    rows: slice
    head: Int[Tensor, " m"]
    place: Int[Tensor, " m"]
    logs: Float64[Tensor, "m r"]
    """Logits, less the logarithms of odds; −inf where a row does not count a token."""


class Reading(NamedTuple):
    """How many tokens each row read in full: in all shards, and in this one; and the answer before it was rounded, the
    logarithm of its normaliser, and what this shard has in both.
    """

    everywhere: Float64[Tensor, "b h n"]
    here: Float64[Tensor, "b h n"]
    out: Float64[Tensor, "b h n e"]
    lse: Float64[Tensor, "b h n"]
    kept: tuple[Kept, ...]
    """Empty if no gradient will be asked for."""


class Task(NamedTuple):
    """What is asked of all shards; how many keys they have, how many the largest, and how many shards there are."""

    tol: float | None
    method: Sparse
    keys: int
    widest: int
    ranks: int
    followed: bool = False
    """Whether gradients will be asked for."""


def sparse_protocol(
    problem: Problem, task: Task, sketch: Sketch | None = None, generator: torch.Generator | None = None
) -> Protocol[tuple[Attended, Reading]]:
    """The answer of all shards, and what this one read.

    A `sketch` of the first keys may be given. The `generator` must be unlike that of every other shard.
    """
    p = problem
    b, h, n, d = p.q.shape
    groups, e = p.v.shape[1], p.v.shape[-1]
    out = p.q.new_zeros(b, h, n, e, dtype=torch.float64)
    bound, everywhere, here, lse, longest = out.new_zeros(5, b, h, n).unbind(0)
    kept: list[Kept] = []
    if task.keys and out.numel():
        norms = p.norms
        sketch = whole_sketch(p.k, task.method.bits, sketch)
        # Samples are each row's own; else query heads of a key head read what any of them does.
        siblings = 1 if task.method.chance > 0 else h // groups
        for rows in row_tiles(n, 16 * b * h * task.widest):
            q = p.q[:, :, rows].reshape(b, groups, -1, d)  # (b, g, r, d)
            shard = SketchedShard.of(q, sketch, norms.v, norms.k, p.scale, siblings)
            tile = _Tile(p, shard, norms.q[:, :, rows].reshape(b, groups, -1, 1), norms.slack, task, generator)
            answer = yield from tile.protocol()
            parts = (answer.out, answer.rows, answer.everywhere, answer.here, answer.lse, answer.longest)
            for x, part in zip((out, bound, everywhere, here, lse, longest), parts, strict=True):
                x[:, :, rows] = part.reshape(x[:, :, rows].shape)
            if task.followed:
                kept.append(Kept(rows, answer.read.head, answer.read.place, answer.logs))
    reading = Reading(everywhere, here, out, lse, tuple(kept))
    rounded = rounding.saturating_cast(out, p.q.dtype)
    own = relative_errors(absolute_errors(bound, longest), length_floors(rounded))
    return Attended(rounded, _certificate(bound, own, reading, task)), reading


def _certificate(
    bound: Float64[Tensor, "b h n"], own: Float64[Tensor, "b h n"], reading: Reading, task: Task
) -> Certificate:
    largest = float(bound.amax()) if bound.numel() else 0.0
    if task.tol is not None and not largest <= task.tol:
        remedy = "ask for less, or convert q, k and v to a wider type"
        rule = f"is less than can be proved, {largest:.3g}"
        raise ToleranceUnreachable("tol", task.tol, rule, remedy, largest)
    drop = {} if task.tol is None else {"drop": task.tol}
    share = float(reading.everywhere.sum()) / max(bound.numel() * task.keys, 1)
    assumed = "sums and exp of float64 are right to 1e-9" if task.keys else "there was nothing to attend to"
    return Certificate(
        task.method.name,
        {**task.method.parameters, **drop},
        task.method.target,
        "statistical" if task.method.chance else "deterministic",
        largest,
        bound,
        1 - task.method.chance,
        assumptions=(assumed,),
        reason=f"read {share:.1%} of the tokens of all shards in full",
        relative=float(own.amax()) if own.numel() else 0.0,
        relative_rows=own,
    )


class _TileAnswer(NamedTuple):
    """The answer, the bounds of its rows, what was read, the logarithm of the normaliser, and its parts."""

    out: Float64[Tensor, "b g r e"]
    rows: Float64[Tensor, "b g r 1"]
    everywhere: Float64[Tensor, "b g r 1"]
    here: Float64[Tensor, "b g r 1"]
    lse: Float64[Tensor, "b g r 1"]
    read: Gathered
    logs: Float64[Tensor, "m r"]
    """What the tokens that were read count, by logarithms."""
    longest: Float64[Tensor, "b g r 1"]
    """At least the length of the longest value."""


class _First(NamedTuple):
    """What all shards know after the first reading; `state` tells also what the rest may weigh, and ΣS²."""

    whole: Extent
    most: Float64[Tensor, "b g 1 1"]
    """The longest value, in the size of values."""
    drop: Float64[Tensor, "b g r 1"]
    """What unread tokens may move each row, in the unit of errors."""
    touched: Bool[Tensor, "b g r s"]
    read: Gathered
    state: State


class _Cut(NamedTuple):
    """Tokens in bins by what they are worth, and the bin from which on they are not read."""

    budget: Budget
    terms: Terms
    moved: Float64[Tensor, "b g r bins"]
    """What the tokens of each bin and all after it may move a row's sum."""
    place: Int[Tensor, "b g r s"]
    bin: Int[Tensor, "b g r 1"]

    @property
    def before(self) -> Bool[Tensor, "b g r s"]:
        """The tokens that are read."""
        return self.place < self.bin


class _Tile(NamedTuple):
    """Some rows of all queries beside one shard."""

    problem: Problem
    shard: SketchedShard
    queries: Float64[Tensor, "b g r 1"]
    """At least their lengths."""
    slack: float
    """How far lengths of values may be from what they are said to be."""
    task: Task
    generator: torch.Generator | None

    def protocol(self) -> Protocol[_TileAnswer]:
        """A first look and a first reading; one cut through all tokens; samples, where chance may help; the proof."""
        first = yield from self._first_reading()
        cut = yield from self._one_cut(first)
        if self.task.method.chance == 0:
            return (yield from self._proved(first, cut, None, first.read))
        draws, read = yield from self._drawn(first, cut)
        return (yield from self._proved(first, cut, draws, read))

    def _first_reading(self) -> Protocol[_First]:
        """What sketches say of all tokens, and the heaviest of them read: enough to tell what the rest is worth."""
        shard, p, ranks, sampling = self.shard, self.problem, self.task.ranks, self.task.method.chance > 0
        own = shard.extent
        whole = own.unpacked((yield from all_max(own.packed(), ranks)))
        most = self._unit(whole) / whole.size
        drop = self._drop(whole)
        look, place = shard.first_look(whole, counts=sampling)
        look = yield from all_reduce(look, ranks)
        if sampling:
            cut = torch.minimum(first_cut(look, drop, most), heaviest(look, _COARSE * self.task.keys))
        else:
            cut = first_cut(look, torch.maximum(drop, (_FIRST * drop).clamp(max=_LITTLE)), most)
        touched = together(place < cut, shard.siblings)
        tokens = Tokens(shard.q.double() * p.scale, p.k, p.v, None, whole.size)
        read = Gathered.of(tokens).joined(touched)
        state = yield from reported(read, None, whole, ranks, shard.expected(whole, touched), shard.strays)
        return _First(whole, most, drop, touched, read, state)

    def _one_cut(self, first: _First) -> Protocol[_Cut]:
        """Where all tokens may be cut so that what is behind moves no row by more than it may be moved."""
        shard, (whole, most, drop, touched, _, state) = self.shard, first
        rest, strays = state.more
        allowed = (drop * most * (state.total * state.grown + rest)).nan_to_num(nan=0.0)
        length = torch.minimum(state.length + drop * most, most)
        budget = Budget.of(torch.where(most > 0, allowed, math.inf), length, strays)
        terms = shard.terms(whole, length)
        weights = torch.ones_like(allowed)
        for _ in range(ROUNDS if shard.siblings > 1 else 1):
            mine, place = binned(terms, touched, budget, weights, shard.siblings)
            moved = moved_behind((yield from all_reduce(mine, self.task.ranks)), budget)
            cut = cut_at(moved, budget.whole, shard.siblings)
            needs = moved.gather(-1, cut) / budget.whole.clamp(min=1e-300)
            weights = weights * needs.nan_to_num(nan=1.0).clamp(_LEAST, 1.0)
        return _Cut(budget, terms, moved, place, cut)

    def _drawn(self, first: _First, cut: _Cut) -> Protocol[tuple[Draws, Gathered]]:
        """Samples of what is behind the heaviest tokens, where they prove enough and are smaller than the cut."""
        whole, most, drop, touched, read, state = first
        rest, _ = state.more
        ref = torch.where(state.total > 0, state.top, whole.origin)
        # What was read, if the values of the rest cancel.
        center = state.out * state.total / (state.total + rest * (whole.origin - ref).exp())
        center = center.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        rounded = (1 + 2 * self._sums) * self._rounding(whole).clamp(max=rounding.NEGLIGIBLE_NATS).exp()
        basis = Basis(drop, most, state.length, center, ref, rounded)
        task = self.task
        drawn = yield from draw(
            self.shard, whole, read, touched, cut.before, basis, task.method.chance, self.generator, task.ranks
        )
        return drawn

    def _proved(self, first: _First, cut: _Cut, draws: Draws | None, read: Gathered) -> Protocol[_TileAnswer]:
        """All tokens before the cut read, and what that proves; where it is too little, the cut goes further."""
        shard, (whole, most, drop, *_), (budget, terms, moved, *_) = self.shard, first, cut
        odds = None if draws is None else draws.odds
        for attempt in range(_CUTS):
            kept = seen = cut.before
            if draws is not None:
                kept = torch.where(draws.sampled, draws.drawn, kept)
                seen = kept | draws.touched
            read = read.joined(kept)
            here = seen.sum(-1, keepdim=True).double()
            state = yield from reported(read, odds, whole, self.task.ranks, left(terms, kept, budget), here)
            rest, everywhere = state.more
            ratio = whole.ratio(state.length, budget.length) * (1 + self._sums)
            tail = most_moved(rest, budget) * ratio
            low = rest[..., :1]
            tails = tail * state.shrunk / ((state.total + low * state.shrunk) * most).clamp(min=1e-300)
            tails = torch.where((most > 0) & ~(tail <= 0), tails.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
            if draws is not None:
                tails = torch.where(draws.sampled, draws.tails, tails)
            short = ~(tails <= drop)
            if attempt + 1 == _CUTS:
                break
            # Machines of several kinds may differ in a last bit: all go on where any has to, or one would wait forever.
            more = yield from all_gather(short.any().to(torch.uint8), self.task.ranks)
            if not bool(more.any()):
                break
            # What joins weighs at least its lower end, and may make the answer longer.
            least = state.total * state.grown + low
            joining = tail / (state.total * state.grown).clamp(min=1e-300)
            longer = torch.minimum(
                (state.length + joining).nan_to_num(nan=math.inf, posinf=math.inf), most * (1 + 1e-3)
            )
            enough = (drop * most * least * _COARSELY / whole.ratio(longer, budget.length)).nan_to_num(nan=0.0)
            further = cut_at(moved, enough, shard.siblings) if attempt == 0 else torch.full_like(cut.bin, BINS)
            further = torch.maximum(cut.bin, further)
            cut = cut._replace(bin=torch.where(together(short, shard.siblings), further, cut.bin))
        lse = state.top + state.total.log()
        logs = read.logits if odds is None else read.logits - read.at(odds).log()
        longest = whole.longest.expand(lse.shape)
        return _TileAnswer(
            state.out * whole.size, self._bounds(tails, whole), everywhere, here, lse, read, logs, longest
        )

    @property
    def _sums(self) -> float:
        """What float64 rounds in sums over the tokens of all shards, and in exp."""
        return SUMS * max(1.0, self.task.keys / 2**22)

    def _rounding(self, whole: Extent) -> Float64[Tensor, "b g r 1"]:
        """δ: of logits, and of differences from a shard's top and of that from the row's, up to 4S + ln s + 100."""
        u, d = rounding.unit(torch.float64), self.shard.q.shape[-1]
        reach = abs(self.problem.scale) * self.queries * whole.key
        misread = rounding.misread_logits(self.queries, whole.key, self.problem.scale, d, self.problem.q.dtype)
        shifted = 16 * u * (math.log(max(self.task.keys, 1)) + rounding.NEGLIGIBLE_NATS)
        return reach * (rounding.gamma(d + 8, u) + 64 * u) + shifted + misread

    def _lost(self, whole: Extent) -> Float64[Tensor, "b g 1 1"]:
        """What sums and the answer may lose to underflow, relative to the longest value."""
        terms, width = self.task.keys + 8, math.sqrt(self.problem.v.shape[-1])
        kind = self.problem.q.dtype
        lost = (
            terms * rounding.tiny(torch.float64) * whole.size + rounding.tiny(kind) + rounding.largest_subnormal(kind)
        )
        return width * lost / self._unit(whole).clamp(min=2.0**-1022)

    def _unit(self, whole: Extent) -> Float64[Tensor, "b g 1 1"]:
        return whole.longest * (1 - 2 * self.slack)

    @property
    def _final(self) -> float:
        kind = self.problem.q.dtype
        return 0.0 if kind == torch.float64 else rounding.unit(kind)

    def _bounds(self, tails: Float64[Tensor, "b g r 1"], whole: Extent) -> Float64[Tensor, "b g r 1"]:
        """Bounds on whole rows: what was not read, and the rounding of what was."""
        delta = self._rounding(whole)
        rows = (
            tails * torch.exp(2 * delta.clamp(max=rounding.NEGLIGIBLE_NATS)) * (1 + self._sums)
            + 2 * torch.tanh(delta / 2)
            + self._sums
        )
        rows = rows.clamp(max=2 + self._sums)  # Answer and target are both averages of values.
        rows = (rows * (1 + self._final) + self._final) * rounding.SAFETY + self._lost(whole)
        # Where all values are zero, so is the answer; lengths near the end of float64 are no longer sharp.
        unit = self._unit(whole)
        return torch.where(unit == 0, 0.0, torch.where(unit < _FAINT, math.inf, rows))

    def _drop(self, whole: Extent) -> Float64[Tensor, "b g r 1"]:
        """What unread tokens may move each row: all of the tolerance that rounding does not need."""
        delta = self._rounding(whole)
        if self.task.tol is None:
            return torch.full_like(delta, self.task.method.drop)
        room = (self.task.tol / rounding.SAFETY - self._lost(whole) - self._final) / (1 + self._final)
        room = (room - 2 * torch.tanh(delta / 2) - self._sums) / (
            (1 + self._sums) * torch.exp(2 * delta.clamp(max=rounding.NEGLIGIBLE_NATS))
        )
        return (room * (1 - 1e-6)).nan_to_num(nan=0.0).clamp(min=0.0)


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


def reported(
    read: Gathered, odds: Float64[Tensor, "b g r s"] | None, whole: Extent, ranks: int, *more: Tensor
) -> Protocol[State]:
    """What all shards have read, each token counted once or by its odds, and the sums of what else they tell."""
    own = torch.where(read.total > 0, read.top, -math.inf)
    top = yield from all_max(own, ranks)
    top = top.masked_fill(top == -math.inf, 0.0)
    share = (own - top).exp()
    weights = read.weights if odds is None else read.weights / read.at(odds).clamp(min=1e-300)
    values = read.average(weights) * share
    sums = yield from all_reduce(torch.cat([read.sum(weights) * share, values, *more], -1), ranks)
    total, average, *others = sums.split([1, values.shape[-1], *(x.shape[-1] for x in more)], -1)
    out = average / total.clamp(min=1e-300)
    length = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
    grown = (top - whole.origin).clamp(max=700.0).exp()
    return State(out, length, top, total, grown, (whole.origin - top).exp(), tuple(others))
