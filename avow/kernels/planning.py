"""How many terms of a head are how large, and how much of what is small is left to chance.

Many programs count a row's terms, in bins of steps below its largest. If tokens are drawn, the last of them plans the
rim that `avow.kernels.sampling` draws by, and its threshold. The smaller a rim, the more tokens are read and the less
the answer strays. Rims are planned so that what `avow.kernels.sample_bounds` will prove is about what is aimed at; what
it proves holds whatever they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32
from torch import Tensor

from avow.kernels.pausing import groups_in, read_in_order
from avow.kernels.sample_bounds import NONE, Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import BINS, LIMIT, StepShape
from avow.kernels.tile_ops import chained, filled, follow
from avow.numerics.rounding import unit
from avow.numerics.sketch import GROUP

# Steps in a bin: 128 bins of three eighths reach 48 octaves below the largest term; what is smaller is in the last.
WIDTH = 3
_BINS, _GROUP, _LIMIT, _WIDTH = (tl.constexpr(number) for number in (BINS, GROUP, LIMIT, WIDTH))
# Tokens that a program counts, groups whose masses it adds up at once, and its warps.
_SPAN, _MASSES, _WARPS = 2048, tl.constexpr(2048), 8
# Tokens whose histogram tells where to cut; of more than twice as many only some groups are counted. A bin's terms are
# taken for larger than they are by a seventh on average, which covers what so large a sample may be off. For many rows
# counting takes longer than a smaller sample costs.
_ENOUGH, _LEAST_ENOUGH, _FEW = 2**13, 2**12, 64
# What only plans rest on: how long values are, as a share of the longest; and what the sketch pass took off the
# expected mass in doubt comes back as far as intervals are wide, up to this factor.
_USUAL, _DOUBTED = tl.constexpr(0.8), tl.constexpr(1.15)
# Of a limit on the whole bound, plans leave this share to what they cannot foresee.
_SPARE = 0.15
# A rim is at most 30 octaves above the largest term, in steps.
_HIGHEST = tl.constexpr(-240.0)
# How many times the error that is aimed at ν should be at least.
_ROOM = 8.0


class Counted(NamedTuple):
    """Histograms of terms, of all of them or of a sample, and the mass that all of them are expected to have."""

    counts: Int32[Tensor, "bh bins"]
    masses: Float32[Tensor, "bh programs"]
    """In parts, as multiples of 2^(widest / 8)."""


@triton.jit
def stride_in(c, ENOUGH: tl.constexpr):
    """Of how many groups one is counted."""
    return tl.maximum(1, c * _GROUP // ENOUGH)


@triton.jit
def blocks_in(c, stride, BLOCK: tl.constexpr):
    """How many programs count so many groups."""
    return tl.maximum(1, tl.cdiv(tl.cdiv(c, stride) * _GROUP, BLOCK))


@triton.jit(do_not_specialize=["room"])
def counting(terms, masses, room, S: tl.constexpr, EARLY: tl.constexpr = False):
    """Adds some groups of a sample to a row's histogram, and the expected mass of its share of all groups up."""
    follow(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, sibling = row // S.R, row % S.R
    if read_in_order(tl.load(terms.used.tokens + head), terms.used):
        return
    start, c = groups_in(terms.used, head)
    stride = stride_in(c - start, S.ENOUGH)
    share = tl.cdiv(c - start, blocks_in(c - start, stride, S.BLOCK))
    highest = tl.load(terms.widest + row)
    number = block * (S.BLOCK // _GROUP) + tl.arange(0, S.BLOCK // _GROUP)
    # Not always the same of them, since texts repeat themselves.
    group = start + number * stride + number * 5 % stride
    inside = group < c
    below = highest - tl.load(terms.top + (head * room + group) * S.R + sibling, mask=inside, other=0)
    place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    short = tl.load(terms.offset + row * room * _GROUP + place, mask=inside[:, None], other=0).to(tl.int32)
    # What is not there goes to the last bin and is taken out again: Triton 3.6 reorders what a histogram counts and
    # its mask each in a way of its own.
    which = tl.where(inside[:, None], tl.minimum((below[:, None] + short) // _WIDTH, _BINS - 1), _BINS - 1)
    beyond = (S.BLOCK // _GROUP - tl.sum(inside.to(tl.int32), 0)) * _GROUP
    bins = tl.arange(0, _BINS)
    found = tl.histogram(tl.reshape(which, (S.BLOCK,)), _BINS) - tl.where(bins == _BINS - 1, beyond, 0)
    tl.atomic_add(terms.counts + row * _BINS + bins, found, sem="relaxed")
    expected = filled(0.0, _MASSES)
    end = tl.minimum(start + block * share + share, c)
    for first in range(start + block * share, end, _MASSES):
        each = first + tl.arange(0, _MASSES)
        at = (head * room + each) * S.R + sibling
        weight = tl.load(terms.mass + at, mask=each < end, other=0.0)
        apart = highest - tl.load(terms.top + at, mask=each < end, other=0)
        expected += tl.where(each < end, weight * tl.exp2(apart.to(tl.float32) * -0.125), 0.0)
    tl.store(masses + row * tl.num_programs(1) + block, tl.sum(expected, 0))


@triton.jit
def _plan(expected, behind, highest, aim, slim, logs):
    """Steps below the largest term, `highest`, that a row's rim is at, and octaves below which a term is light.

    `behind` are the terms of each bin and all after it, `aim` is the error that is aimed at and `slim` is ν over the
    longest value. What `sample_bounds` will prove is foreseen from how much smaller weights are than their bounds.
    """
    whole = tl.max(behind, 0)
    long = _USUAL / slim
    wide = tl.log2(tl.maximum(whole / (expected * (1 + long)), 1.0))
    mass = expected * tl.minimum(tl.exp2(wide * 0.1), _DOUBTED)
    wide = tl.log2(tl.maximum(whole / (mass * (1 + long)), 1.0))
    fine = tl.minimum(tl.maximum(tl.floor(wide * 0.5 + 1.4), 1.0), 3.0)
    goal = aim * mass / slim
    # The answer is about as long as ν.
    share = tl.minimum(mass * tl.sqrt(long * long + 1) / whole, 1.0)
    linear = logs.mean + tl.exp2(-fine) * 2.83 * logs.sum
    root = 1.42 * share * tl.sqrt(2.4 * logs.sum * behind)
    calm = (tl.sqrt(root * root + 4 * linear * goal) - root) / (2 * linear)
    # Where bounds are tight, what is heavy is usual, and its variance decides.
    linear = 0.95 * logs.sum + 2.83
    root = 1.6 * tl.sqrt(2 * logs.sum * share * behind)
    rough = (tl.sqrt(root * root + 4 * linear * goal) - root) / (2 * linear)
    size = tl.where(wide < fine + 0.5, rough, tl.maximum(calm, rough))
    bins = tl.arange(0, _BINS)
    edge = tl.where(bins == 0, 2.0**30, tl.exp2(bins.to(tl.float32) * (-_WIDTH / 8)))
    rim = tl.max(tl.minimum(size * size, edge), 0)
    # Terms at the limit may be anything above it, and are always read.
    steps = tl.maximum(tl.ceil(-8 * tl.log2(rim)), tl.where(highest < _LIMIT, _HIGHEST, 1.0))
    # Where there is nothing to expect, or nothing to aim at, everything is read.
    rim = tl.where(aim > 0, tl.where(slim < float("inf"), rim, 0.0), 0.0)
    known = (expected > 0) & (expected < float("inf")) & (whole < float("inf")) & (rim > 0)
    return tl.where(known, steps, 2.0**30).to(tl.int32), fine


@triton.jit(do_not_specialize=["room"])
def _planned(terms, masses, most, rims, goal, logs, room, S: tl.constexpr, EARLY: tl.constexpr):
    """A part of a row's histogram; whoever is the last to have filled in a part plans for the row."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if read_in_order(tl.load(terms.used.tokens + row // S.R), terms.used):
        # Far below all terms: nothing is left to chance.
        tl.store(rims + row * 2, 2 * NONE)
        tl.store(rims + row * 2 + 1, 1.0)
        return
    slim = tl.load(terms.nu + row // S.R) / tl.load(most + row // S.R)
    highest = tl.load(terms.widest + row)
    counting(terms, masses, room, S)
    blocks = tl.num_programs(1)
    first, c = groups_in(terms.used, row // S.R)
    stride = stride_in(c - first, S.ENOUGH)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    before = tl.atomic_add(terms.arrived + row, 1, sem="acq_rel")
    if before % blocks == blocks - 1:
        bins, program = tl.arange(0, _BINS), tl.arange(0, S.PROGRAMS)
        parts = tl.load(masses + row * blocks + program, mask=program < blocks, other=0.0)
        number = tl.load(terms.counts + row * _BINS + bins)
        sizes = number.to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-_WIDTH / 8)) * stride.to(tl.float32)
        aim = tl.minimum(goal.drop, goal.room - goal.narrow * slim)
        behind = tl.cumsum(sizes, 0, reverse=True)
        cut, fine = _plan(tl.sum(parts, 0), behind, highest, aim, slim, logs)
        tl.store(rims + row * 2, (highest - cut).to(tl.float32) * 0.125)
        tl.store(rims + row * 2 + 1, fine)


class Goal(NamedTuple):
    """What is aimed at: the error that draws may cause, and a little less than what it and the rounding of an answer
    as long as the longest value, `narrow`, may come to.
    """

    drop: float
    room: float
    narrow: float


def shortest(drop: float, limit: float | None, confidence: float) -> float:
    """The least share of the longest value that ν should be: draws leave the normaliser open by the error over ν."""
    if confidence == 1:
        return 0.0
    return min(1.0, _ROOM * min(drop, math.inf if limit is None else limit))


def goal(drop: float, limit: float | None, dtype: torch.dtype) -> Goal:
    """What a step aims at whose whole bound must not exceed a limit."""
    room = math.inf if limit is None else limit * (1 - _SPARE)
    return Goal(drop, room, 0.0 if dtype == torch.float32 else unit(dtype))


def enough(rows: int) -> int:
    """How many tokens the histogram of each of so many rows needs to count."""
    return max(_LEAST_ENOUGH, _ENOUGH * _FEW // max(rows, _FEW))


def programs_for(room: int, rows: int) -> int:
    """How many programs count each of so many rows, at most."""
    return max(1, triton.cdiv(min(room * GROUP, 2 * enough(rows)), _SPAN))


def _masses(terms: Terms) -> tuple[Float32[Tensor, "bh programs"], StepShape]:
    """Room for expected masses, in parts, and what `counting` is compiled for."""
    rows, (_, room, r) = terms.widest.shape[0], terms.top.shape
    return terms.mass.new_empty(rows, programs_for(room, rows)), StepShape(r, BLOCK=_SPAN, ENOUGH=enough(rows))


def counted(terms: Terms) -> Counted:
    """Histograms of terms, and their expected mass."""
    masses, shape = _masses(terms)
    counting[masses.shape](terms, masses, terms.top.shape[1], S=shape, num_warps=_WARPS, **chained(masses.device))
    return Counted(terms.counts, masses)


def planned(terms: Terms, most: Float32[Tensor, "b g"], aim: Goal, logs: Logs) -> Float32[Tensor, "bh 2"]:
    """Each row's rim in octaves, and from how many octaves below it on terms are heavy."""
    masses, shape = _masses(terms)
    rims, shape = masses.new_empty(len(masses), 2), shape._replace(PROGRAMS=triton.next_power_of_2(masses.shape[1]))
    _planned[masses.shape](
        terms, masses, most, rims, aim, logs, terms.top.shape[1], S=shape, num_warps=_WARPS, **chained(masses.device)
    )
    return rims
