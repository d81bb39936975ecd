r"""The answers of a step, and the proof of how far tokens that were not read and all rounding may have moved them.

With H the tokens read, T the others and ν > 0 any length,

.. math:: \|o^* - out\| \le \frac{\sum_T w_j (\|v_j\| + \|out\|)}{Z_H}
          \le \frac{\sum_T w_j (\|v_j\| + ν)}{Z_H} \max\Bigl(1, \frac{\|out\|}{ν}\Bigr)   [claim tail-mass-output]

so that one sum over T, taken before `out` was known, is enough. Where tokens were drawn, `avow.kernels.sample_bounds`
says how far the others may have moved the answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from avow.kernels.choice import Chosen, Draws
from avow.kernels.pausing import Used, first_seen
from avow.kernels.planning import CIRCLE
from avow.kernels.sample_bounds import FUZZY, NONE, missed
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import ROWS, StepShape
from avow.kernels.tile_ops import HeadView, at_head, chained, filled, follow
from avow.kernels.work_partition import TILE, Parts, list_shape, shares, slots_of, tiles_listed
from avow.numerics.rounding import gamma, tiny, unit

_TILE, _CIRCLE = tl.constexpr(TILE), tl.constexpr(CIRCLE)
# Parts whose largest logits are compared at once, parts that are merged at once and the numbers that they may be, so
# that registers hold them, and by how many warps.
_PARTS, _CHUNK, _HELD, MERGING_WARPS = 256, 128, 2**15, 4
# Answers are expected to be at most this much longer than the last ones, whose lengths are forgotten slowly.
_LONGER, _FADING = tl.constexpr(1.1), tl.constexpr(0.9)
# The unit of sums in float32: tensor cores may truncate where IEEE rounds.
UNIT = tl.constexpr(2.0**-23)
# Rows that share a key head, at most, lengths that are looked at together, and the least share of its length that a
# value has: that was rounded up.
_ROWS, _SPAN, _SURE = tl.constexpr(ROWS), tl.constexpr(2048), tl.constexpr(1 - 2.0**-20)
# Octaves in a nat.
_OCTAVES = tl.constexpr(math.log2(math.e))


class Decoded(NamedTuple):
    """The answers of one step, and what is proved of them; all on the device."""

    out: Float[Tensor, "b h e"]
    report: Float32[Tensor, "5 b h"]
    """Bounds, lengths of answers, at most the longest values, hints for the next step, and shares of tokens read."""
    within: Bool[Tensor, "b h"] | None = None
    """Whether unread tokens moved the row by no more than was allowed, unless all were read. Where not, compute it
    exactly.
    """
    kept: Int32[Tensor, "b g"] | None = None
    """How many tokens of each key head were read, if not all."""

    @property
    def bound(self) -> Float32[Tensor, "b h"]:
        """At most this far is a row from the truth, relative to the longest value; inf where nothing is proved. Where
        tokens were drawn, up to the chance that was allowed.
        """
        return self.report[0]

    @property
    def length(self) -> Float32[Tensor, "b h"]:
        """The answers' lengths."""
        return self.report[1]


class Rounding(NamedTuple):
    """What the shapes and types say of rounding."""

    scale: float
    """With which |q|·|k| makes nats."""
    logit_error: float
    """The error of a logit, relative to that."""
    per_tile: float
    """The additions that a tile makes to a sum."""
    narrow: float
    """The unit of the answer's type."""
    halves: float
    """What a weight loses in two halves."""
    vanished: float
    """What underflows in an answer, at most."""


class Sinks(NamedTuple):
    """A logit of each query head that has no value: it only makes all weights smaller."""

    logits: Float32[Tensor, "heads"]
    heads: int
    queries: int
    """Rows that each query head has."""


class Whole(NamedTuple):
    """What a step that reads all tokens knows of them."""

    lengths: Float[Tensor, "bg s"]
    used: Used


class BoundInputs(NamedTuple):
    """What bounds are made of: queries, lengths ν, at most those of the longest values, and what is rounded.

    And lengths of all values, where rows may not see the longest of a head.
    """

    q: Float[Tensor, "b h d"]
    nu: Float32[Tensor, "bg"]
    most: Float32[Tensor, "b g"]
    rounding: Rounding
    sinks: Sinks | None = None
    lengths: HeadView | None = None

    @staticmethod
    def of(
        q: Tensor, v: Tensor, nu: Tensor, most: Tensor, scale: float, terms: Terms | Whole, sinks: Sinks | None
    ) -> BoundInputs:
        """The same of a step, whose terms know the lengths of values."""
        alike = terms.used.queries is None and terms.used.window is None
        lengths = None if alike else HeadView(terms.lengths, terms.lengths.stride(0))
        return BoundInputs(q, nu, most, rounding_of(q, v, scale), sinks, lengths)


class Unread(NamedTuple):
    """What is known of tokens that were not read, and what they and the whole bound may come to: nothing if all were.

    Tails or draws as in `Chosen`, of lists of so many spans.
    """

    tails: Float32[Tensor, "bh spans"] | None = None
    draws: Draws | None = None
    widest: Int32[Tensor, "bh"] | None = None
    spans: int | None = None
    drop: float | None = None
    limit: float | None = None


@triton.jit
def _apart(top, high):
    """A logarithm above another, at least: the difference is rounded, and its parts may be large."""
    return top - high + (tl.abs(top) + tl.abs(high) + 1) * 2.0**-21


@triton.jit
def _asked(begin, beyond, sibling, parts, S: tl.constexpr):
    """What some slots hold of a row, asked for before it is needed; zeros from `beyond` on."""
    slot, column = begin + tl.arange(0, S.CHUNK), tl.arange(0, S.EP)
    at, inside = slot * S.R + sibling, slot < beyond
    there = inside[:, None] & (column < S.E)[None, :]
    mass = tl.load(parts.total + at, mask=inside, other=0.0)
    sums = tl.load(parts.weighted + at[:, None] * S.E + column[None, :], mask=there, other=0.0)
    squares, large = filled(0.0, S.CHUNK), filled(0.0, S.CHUNK)
    if parts.light is not None:
        squares = tl.load(parts.light + at, mask=inside, other=0.0)
        large = tl.load(parts.heavy + at, mask=inside, other=0.0)
    return mass, sums, squares, large


@triton.jit
def _longest_seen(row, head, given, used):
    """At most the length of the longest value that a row sees, and hardly less."""
    unit = tl.load(given.most + head)
    if given.lengths is not None:
        s, lengths = tl.load(used.tokens + head), at_head(given.lengths, head)
        newest = s - 1
        if used.queries is not None:
            newest = s - used.queries + (row % used.queries).to(tl.int32)
        if used.window is not None:
            oldest, longest = tl.maximum(newest - used.window + 1, 0), 0.0
        else:
            # The longest of all is usually none of the last ones, which the row does not see.
            last = newest + 1 + tl.arange(0, _ROWS)
            # A row of a sequence with fewer tokens than queries sees none, and stands before the first.
            hidden = tl.max(tl.load(lengths + last, mask=(last >= 0) & (last < s), other=0.0), 0)
            oldest, longest = tl.where(hidden < unit, newest + 1, 0), tl.where(hidden < unit, unit, 0.0)
        for begin in range(oldest, newest + 1, _SPAN):
            place = begin + tl.arange(0, _SPAN)
            longest = tl.maximum(longest, tl.max(tl.load(lengths + place, mask=place <= newest, other=0.0), 0) * _SURE)
        # nan says that nothing is proved.
        unit = tl.where(unit == unit, longest, unit)
    return unit


@triton.jit
def merge(row, rows, slots, parts, given, found, unread, used, S: tl.constexpr):
    """A row's answer from the slots of its head, and its bound.

    What was not read has tails, or rims where tokens were drawn; without both, everything was. Whether the row is
    `within` what was allowed is said where that is asked.
    """
    DRAWN: tl.constexpr = unread.draws is not None
    CUT: tl.constexpr = unread.tails is not None
    head, rounded = row // S.R, given.rounding
    first, beyond, share = slots
    column, channel = tl.arange(0, S.EP), tl.arange(0, S.DP)
    # What is needed in the end is asked for now, so that nothing waits for it then.
    query = tl.load(given.q + row * S.D + channel, mask=channel < S.D, other=0.0).to(tl.float32)
    unit, wide = _longest_seen(row, head, given, used), tl.load(given.nu + head)
    if DRAWN:
        rims = unread.draws.rims + row * 2
        rim, fine = tl.load(rims), tl.load(rims + 1)
    elif CUT:
        span = tl.arange(0, S.SPANS)
        tails = tl.load(unread.tails + row * unread.spans + span, mask=span < unread.spans, other=0.0)
        tail = tl.sum(tails, 0) * (1 + 2.0**-10)
        peak_term = tl.load(unread.widest + row).to(tl.float32) * 0.125
    ahead = _asked(first, beyond, row % S.R, parts, S)
    high, longest, sink = float("-inf"), 0.0, float("-inf")
    if given.sinks is not None:
        sink = tl.load(given.sinks.logits + row // given.sinks.queries % given.sinks.heads)
        high = sink * _OCTAVES
    for begin in range(first, beyond, S.PARTS):
        slot = begin + tl.arange(0, S.PARTS)
        peaks = tl.load(parts.peak + slot * S.R + row % S.R, mask=slot < beyond, other=float("-inf"))
        high = tl.maximum(high, tl.max(peaks, 0))
        longest = tl.maximum(longest, tl.max(tl.load(parts.square + slot, mask=slot < beyond, other=0.0), 0))
    mass = filled(0.0, S.CHUNK)
    if given.sinks is not None:
        sunk = tl.exp2(sink * _OCTAVES - high)
        mass = tl.where(tl.arange(0, S.CHUNK) == 0, sunk, mass)
    squares, large = filled(0.0, S.CHUNK), filled(0.0, S.CHUNK)
    sums = filled(0.0, S.EP)
    for begin in range(first, beyond, S.CHUNK):
        slot = begin + tl.arange(0, S.CHUNK)
        weight = tl.exp2(tl.load(parts.peak + slot * S.R + row % S.R, mask=slot < beyond, other=float("-inf")) - high)
        own_mass, own_values, own_squares, own_large = ahead
        mass += own_mass * weight
        squares += own_squares
        large += own_large
        sums += tl.sum(own_values * weight[:, None], 0)
        ahead = _asked(begin + S.CHUNK, beyond, row % S.R, parts, S)
    mass = tl.sum(mass, 0)
    answer = sums / mass
    # Rounding must not carry an average of values beyond what their type holds; nan stays nan.
    answer = tl.where(answer > S.LARGEST, S.LARGEST, tl.where(answer < -S.LARGEST, -S.LARGEST, answer))
    tl.store(found.out + row * S.E + column, answer.to(found.out.dtype.element_ty), mask=column < S.E)
    # Lengths, by way of the largest entry, so that no square overflows or vanishes.
    largest = tl.max(tl.abs(answer), 0)
    scaled = answer / tl.where(largest > 0, largest, 1.0)
    own = largest * tl.sqrt(tl.sum(scaled * scaled, 0)) * (1 + 2.0**-13)
    largest = tl.max(tl.abs(query), 0)
    scaled = query / tl.where(largest > 0, largest, 1.0)
    asked = largest * tl.sqrt(tl.sum(scaled * scaled, 0)) * (1 + 2.0**-13)
    longest = tl.sqrt(longest) * (1 + 2.0**-13) + 2.0**-58
    # Tiles of a program: each rescales what came before, once by exp2 and once by a product.
    tiles = share.to(tl.float32)
    # How far each weight may be off, in nats: its logit, the powers of two it went through, and their arguments, which
    # matter down to −150 octaves.
    delta = rounded.scale * asked * longest * rounded.logit_error + (tiles + 2) * 2.0**-20 + 900 * UNIT
    if DRAWN:
        # The logarithm of odds and lengths, and that of the odds beside a logit.
        delta += 2.0**-15
    if given.sinks is not None:
        # A sink's own logit, which was brought to octaves; one of −inf weighs nothing, exactly.
        delta += tl.where(sink > float("-inf"), tl.abs(sink), 0.0) * 2.0**-21
    depth = (tiles * rounded.per_tile + (beyond - first).to(tl.float32) + 2 * _TILE + 16) * UNIT
    rounding = delta + rounded.halves + 2 * depth / (1 - depth) + 2.0**-20
    rounding = tl.where(depth < 0.5, rounding, float("inf"))
    reach = (own + rounding * unit * 1.1) / wide
    grown = tl.exp(delta) * (1 + rounding) * (1 + 2.0**-16)
    moved = 0.0
    if DRAWN:
        step = _apart(rim - fine, high)
        squares, large = tl.sum(squares, 0) * grown * grown, tl.sum(large, 0) * grown
        # What underflows is less than this.
        squares += 2.0**-40
        moved = missed(squares, large, tl.exp2(step), tl.exp2(fine), mass / grown, reach, unread.draws.logs)
        moved = moved * (wide / unit)
        moved = tl.where(delta < FUZZY, moved, float("inf"))
        # Without a rim, everything was read.
        moved = tl.where(rim < NONE, 0.0, moved)
    elif CUT:
        step = _apart(peak_term, high)
        moved = tail * tl.exp2(step) / mass * (wide / unit) * tl.maximum(reach, 1.0) * grown
        moved = tl.where(tail == 0, 0.0, moved)
    whole = (moved + rounding + rounded.narrow * own / unit + rounded.vanished / unit) * (1 + 2.0**-16)
    # Answer and truth are never further apart than their lengths together.
    lengths = (1 + own / unit * (1 + rounded.narrow) + rounded.vanished / unit) * (1 + 2.0**-16)
    whole = tl.where(whole < lengths, whole, lengths)
    # Where all values are zero, so is every answer.
    whole = tl.where(unit == 0, tl.where(own == 0, 0.0, float("inf")), whole)
    moved = tl.where(unit == 0, 0.0, moved)
    # nan is no bound.
    whole = tl.where(whole < float("inf"), whole, float("inf"))
    report = found.report
    tl.store(report + row, whole)
    tl.store(report + rows + row, own)
    tl.store(report + 2 * rows + row, unit)
    # What the next answers are expected not to exceed: a guess, which only decides what is read.
    old = tl.load(report + 3 * rows + row)
    tl.store(report + 3 * rows + row, tl.maximum(own * _LONGER, tl.where(old < float("inf"), old * _FADING, 0.0)))
    if unread.limit is not None:
        well = (moved <= unread.drop) & (whole <= unread.limit) & (whole < float("inf"))
        tl.store(found.within + row, well.to(tl.int8))


@triton.jit
def without_tokens(row, rows, given, found, S: tl.constexpr):
    """Zero, the answer to a row of a head without tokens."""
    column = tl.arange(0, S.EP)
    tl.store(found.out + row * S.E + column, filled(0.0, S.EP).to(found.out.dtype.element_ty), mask=column < S.E)
    tl.store(found.report + row, 0.0)
    tl.store(found.report + rows + row, 0.0)
    tl.store(found.report + 2 * rows + row, tl.load(given.most + row // S.R))


@triton.jit(do_not_specialize=["heads"])
def _merged(parts, listed, given, found, unread, terms, heads, S: tl.constexpr, EARLY: tl.constexpr):
    """A row's answer, and its bound."""
    follow(EARLY)
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    head = row // S.R
    lists = shares(tiles_listed(listed, heads, unread.spans, S), S)
    slots = slots_of(head, lists, S)
    span = tl.arange(0, S.SPANS)
    read = tl.sum(tl.load(listed + head * unread.spans + span, mask=span < unread.spans, other=0), 0)
    whole = tl.load(terms.used.tokens + head)
    whole = whole - first_seen(whole, terms.used)
    tl.store(found.kept + head, read, mask=row % S.R == 0)
    tl.store(found.report + 4 * rows + row, read.to(tl.float32) / tl.maximum(whole, 1).to(tl.float32))
    # The next step counts from zero on.
    circle = tl.arange(0, _CIRCLE)
    tl.store(terms.counts + row * _CIRCLE + circle, tl.full((_CIRCLE,), 0, tl.int32))
    if unread.draws is not None and row == 0:
        # The next step draws other numbers.
        seed = unread.draws.seed
        tl.store(seed, tl.load(seed) + 1)
    if whole > 0:
        merge(row, rows, slots, parts, given, found, unread, terms.used, S)
    else:
        without_tokens(row, rows, given, found, S)
        tl.store(found.within + row, 1)


def rounding_of(q: Tensor, v: Tensor, scale: float) -> Rounding:
    """What the shapes and types say of rounding, for the kernel that sums it up."""
    d, (s, e), kind = q.shape[-1], v.shape[-2:], v.dtype
    coarse = kind != torch.float32
    logit = gamma(d + 8, UNIT.value) + 8 * UNIT.value
    # Tensor cores add up eight or more products at a time, of both halves; then there is rescaling.
    per_tile = 2 * TILE / 8 + 4.0 if coarse else TILE + 4.0
    halves = unit(kind) ** 2 * 1.1 if coarse else 0.0
    narrow = unit(q.dtype) if coarse else 0.0
    vanished = math.sqrt(e) * (tiny(q.dtype) + 4 * s * tiny(torch.float32))
    return Rounding(abs(scale), logit, per_tile, narrow, halves, vanished)


def blank_report(b: int, h: int, device: torch.device) -> Float32[Tensor, "5 b h"]:
    """The report of a cache that has not decoded yet: nothing is proved, and nothing expected."""
    return torch.full((5, b, h), math.inf, device=device)


def merging_shape(shape: StepShape) -> StepShape:
    """The same shape for programs that merge: with so many parts at once as registers hold."""
    many = triton.next_power_of_2(shape.PROGRAMS)
    return shape._replace(PARTS=min(many, _PARTS), CHUNK=min(many, _CHUNK, _HELD // shape.EP))


def merged(
    q: Tensor,
    v: Tensor,
    parts: Parts,
    terms: Terms,
    chosen: Chosen,
    most: Float32[Tensor, "b g"],
    drop: float,
    scale: float,
    limit: float = math.inf,
    report: Float32[Tensor, "5 b h"] | None = None,
    sinks: Sinks | None = None,
) -> Decoded:
    """The answers and their bounds, in the place of a `report` of the step before; the seed of draws is advanced."""
    (b, h, _), (g, _, e) = q.shape, v.shape[1:]
    report = blank_report(b, h, q.device) if report is None else report
    within, kept = q.new_empty(b, h, dtype=torch.int8), q.new_empty(b, g, dtype=torch.int32)
    found = Decoded(q.new_empty(b, h, e), report, within, kept)
    given = BoundInputs.of(q, v, terms.nu, most, scale, terms, sinks)
    heads, spans = chosen.found.shape
    shape = merging_shape(list_shape(q, v, spans))
    unread = Unread(chosen.tails, chosen.draws, chosen.widest, spans, drop, limit)
    inputs = parts, chosen.found, given, found, unread, terms, heads
    _merged[(b * h,)](*inputs, S=shape, num_warps=MERGING_WARPS, **chained(q.device))
    return found._replace(within=within.view(torch.bool))
