"""Where to cut, and how much of what is small is left to chance, by a histogram of terms.

The sketch pass counts terms in bins of their own size, in a circle: bins as far apart as the circle is long share a
place, so that nothing needs to be known of the largest term beforehand. Whoever chooses tokens then reads the bins from
the largest term on. A histogram only guides the choice; what is proved holds whatever it says.

Rims that `avow.kernels.sampling` draws by are planned so that what `avow.kernels.sample_bounds` will prove is about
what is aimed at. The smaller a rim, the more tokens are read and the less the answer strays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor

from avow.kernels.step_constants import LIMIT, LOWEST_TERM
from avow.numerics.rounding import unit
from avow.numerics.sketch import GROUP

# Steps in a bin: 128 bins of three eighths reach 48 octaves below the largest term; all tokens may be just below that.
# The circle is 192 octaves long.
WIDTH, BINS, CIRCLE, BEYOND = 3, 128, 512, 2.0**-47
_BINS, _CIRCLE, _GROUP, _LIMIT, _WIDTH = (tl.constexpr(number) for number in (BINS, CIRCLE, GROUP, LIMIT, WIDTH))
# Makes terms positive, and is whole circles.
ORIGIN = -(-LIMIT // (WIDTH * CIRCLE)) * WIDTH * CIRCLE
_ORIGIN, _BEYOND = tl.constexpr(ORIGIN), tl.constexpr(BEYOND)
# Tokens whose histogram tells where to cut; of more than twice as many only some groups are counted. A bin's terms are
# taken for larger than they are by a seventh on average, which covers what so large a sample may be off. For many rows
# counting takes longer than a smaller sample costs.
_ENOUGH, _LEAST_ENOUGH, _FEW = 2**13, 2**12, 64
# One of 16 groups is counted at least (the logarithm), which takes about a hundredth of looking at all: a sample that
# misleads has whole heads read.
RAREST = 4
_RAREST = tl.constexpr(RAREST)
# What only plans rest on: how long values are, as a share of the longest; and what the sketch pass took off the
# expected mass in doubt comes back as far as intervals are wide, up to this factor.
_USUAL, _DOUBTED = tl.constexpr(0.8), tl.constexpr(1.15)
# Of a limit on the whole bound, plans leave this share to what they cannot foresee.
_SPARE = 0.15
# A rim is at most 30 octaves above the largest term, in steps.
_HIGHEST = tl.constexpr(-240.0)
# How many times the error that is aimed at ν should be at least.
_ROOM = 8.0


@triton.jit
def sampled_in(c, ENOUGH: tl.constexpr):
    """Of how many of c groups one is counted: the logarithm of a power of two."""
    many = tl.maximum(1, c * _GROUP // ENOUGH).to(tl.float32)
    return tl.minimum((many.to(tl.int32, bitcast=True) >> 23) - 127, _RAREST)


@triton.jit
def counts_group(number, sampled):
    """Whether a group is counted: not always the same of as many, since texts repeat themselves."""
    return ((number - (number >> sampled) * 5) & ((1 << sampled) - 1)) == 0


@triton.jit
def bin_of(term):
    """Which place of the circle a term of so many steps is counted in."""
    return ((term + _ORIGIN) // _WIDTH) & (_CIRCLE - 1)


class Goal(NamedTuple):
    """What is aimed at: the error that draws may cause, and a little less than what it and the rounding of an answer
    as long as the longest value, `narrow`, may come to.
    """

    drop: float
    room: float
    narrow: float


@triton.jit
def foreseen(terms, head, c, programs, S: tl.constexpr):
    """What a histogram says of each row of a head: its largest term, and the mass expected as a multiple of that.

    With the largest multiple that terms of each bin may be, in octaves, and how much these and all after them are. Some
    of a head's c groups were counted, for all of them. Rows and bins are axes in this order.
    """
    row, bins, program = tl.arange(0, S.RP), tl.arange(0, _BINS), tl.arange(0, S.PROGRAMS)
    own = row < S.R
    at = (head * programs + program[:, None]) * S.R + row[None, :]
    there = (program < programs)[:, None] & own[None, :]
    peaks = tl.load(terms.peaks + at, mask=there, other=LOWEST_TERM)
    masses = tl.load(terms.masses + at, mask=there, other=0.0)
    widest = tl.max(peaks, 0)  # (RP,)
    expected = tl.sum(masses * tl.exp2((peaks - widest[None, :]).to(tl.float32) * 0.125), 0)
    place = (bin_of(widest)[:, None] - bins[None, :]) & (_CIRCLE - 1)
    number = tl.load(terms.counts + (head * S.R + row)[:, None] * _CIRCLE + place, mask=own[:, None], other=0)
    # Each bin's terms are taken for the largest that it may hold.
    above = (_WIDTH - 1) - (widest + _ORIGIN) % _WIDTH
    edges = tl.maximum(bins[None, :] * _WIDTH - above[:, None], 0).to(tl.float32) * -0.125  # (RP, BINS)
    sizes = (number << sampled_in(c, S.ENOUGH)).to(tl.float32) * tl.exp2(edges)
    # Beyond the last bin there may be all other tokens.
    return widest, expected, edges, tl.cumsum(sizes, 1, reverse=True) + (c * _GROUP).to(tl.float32) * _BEYOND


@triton.jit
def cut_steps(terms, most, head, c, drop, programs, S: tl.constexpr):
    """A row's largest term, and how many steps below it what is left is within a share of the expected mass."""
    widest, expected, _, behind = foreseen(terms, head, c, programs, S)
    budget = expected * drop * (tl.load(most + head) / tl.load(terms.nu + head))
    # Where the budget is not a number, everything is read.
    budget = tl.where(budget < float("inf"), budget, -1.0)
    over = tl.sum(tl.where(behind <= budget[:, None], 0, 1), 1)
    # The first bin begins above the largest term, and is read at least.
    above = (_WIDTH - 1) - (widest + _ORIGIN) % _WIDTH
    return widest, tl.where(over >= _BINS, 2**30, tl.maximum(over, 1) * _WIDTH - above)


@triton.jit
def rims_of(terms, most, head, c, goal, logs, programs, S: tl.constexpr):
    """Each row's rim in octaves, and from how many octaves below it on terms are light.

    What `sample_bounds` will prove is foreseen from how much smaller weights are than their bounds.
    """
    widest, expected, edges, behind = foreseen(terms, head, c, programs, S)
    slim = tl.load(terms.nu + head) / tl.load(most + head)  # ν over the longest value
    aim = tl.minimum(goal.drop, goal.room - goal.narrow * slim)
    whole = tl.max(behind, 1)
    long = _USUAL / slim
    wide = tl.log2(tl.maximum(whole / (expected * (1 + long)), 1.0))
    mass = expected * tl.minimum(tl.exp2(wide * 0.1), _DOUBTED)
    wide = tl.log2(tl.maximum(whole / (mass * (1 + long)), 1.0))
    fine = tl.minimum(tl.maximum(tl.floor(wide * 0.5 + 1.4), 1.0), 3.0)
    wished = (aim * mass / slim)[:, None]
    # The answer is about as long as ν.
    share = tl.minimum(mass * tl.sqrt(long * long + 1) / whole, 1.0)[:, None]
    linear = (logs.mean + tl.exp2(-fine) * 2.83 * logs.sum)[:, None]
    root = 1.42 * share * tl.sqrt(2.4 * logs.sum * behind)
    calm = (tl.sqrt(root * root + 4 * linear * wished) - root) / (2 * linear)
    # Where bounds are tight, what is heavy is usual, and its variance decides.
    linear = 0.95 * logs.sum + 2.83
    root = 1.6 * tl.sqrt(2 * logs.sum * share * behind)
    rough = (tl.sqrt(root * root + 4 * linear * wished) - root) / (2 * linear)
    size = tl.where((wide < fine + 0.5)[:, None], rough, tl.maximum(calm, rough))
    first = (tl.arange(0, _BINS) == 0)[None, :]
    rim = tl.max(tl.minimum(size * size, tl.where(first, 2.0**30, tl.exp2(edges))), 1)
    # Terms at the limit may be anything above it, and are always read.
    steps = tl.maximum(tl.ceil(-8 * tl.log2(rim)), tl.where(widest < _LIMIT, _HIGHEST, 1.0))
    # Where there is nothing to expect, or nothing to aim at, everything is read.
    rim = tl.where(aim > 0, tl.where(slim < float("inf"), rim, 0.0), 0.0)
    known = (expected > 0) & (expected < float("inf")) & (whole < float("inf")) & (rim > 0)
    return (widest - tl.where(known, steps, 2.0**30).to(tl.int32)).to(tl.float32) * 0.125, fine


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


def blank_counts(rows: int, device: torch.device) -> Int32[Tensor, "bh circle"]:
    """Empty histograms. A step leaves them empty, for the next one: nothing has to be emptied before it."""
    return torch.zeros(rows, CIRCLE, dtype=torch.int32, device=device)
