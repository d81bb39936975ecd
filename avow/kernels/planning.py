"""How much is left to chance: for each query head the rim that `avow.kernels.sampling` draws by, and its threshold.

The smaller a rim, the more tokens are read and the less the answer strays. Rims are planned so that what
`avow.kernels.sample_bounds` will prove is about what is aimed at; what it proves holds whatever they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.histogram import WARPS, WIDTH, constants_of, counting, programs_for, stride_in
from avow.kernels.pausing import tokens_in
from avow.kernels.sample_bounds import Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import BINS, LIMIT
from avow.kernels.tile_ops import early, follow
from avow.numerics.rounding import unit
from avow.numerics.sketch import GROUP

_BINS, _GROUP, _LIMIT, _WIDTH = (tl.constexpr(number) for number in (BINS, GROUP, LIMIT, WIDTH))
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
def _plan(expected, behind, highest, aim, slim, mean_log, log):
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
    linear = mean_log + tl.exp2(-fine) * 2.83 * log
    root = 1.42 * share * tl.sqrt(2.4 * log * behind)
    calm = (tl.sqrt(root * root + 4 * linear * goal) - root) / (2 * linear)
    # Where bounds are tight, what is heavy is usual, and its variance decides.
    linear = 0.95 * log + 2.83
    root = 1.6 * tl.sqrt(2 * log * share * behind)
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


@triton.jit(do_not_specialize=["groups"])
def _planned(
    offset,
    top,
    mass,
    widest,
    counts,
    masses,
    arrived,
    most,
    nu,
    rims,
    drop,
    room,
    narrow,
    mean_log,
    log,
    used,
    state,
    groups,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    MASSES: tl.constexpr,
    ENOUGH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A part of a row's histogram; whoever is the last to have filled in a part plans for the row."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slim = tl.load(nu + row // R) / tl.load(most + row // R)
    highest = tl.load(widest + row)
    counting(offset, top, mass, widest, counts, masses, used, state, groups, R, BLOCK, MASSES, ENOUGH)
    blocks = tl.num_programs(1)
    stride = stride_in(tokens_in(used, state, row // R) // _GROUP, ENOUGH)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before % blocks == blocks - 1:
        bins, program = tl.arange(0, _BINS), tl.arange(0, PROGRAMS)
        parts = tl.load(masses + row * blocks + program, mask=program < blocks, other=0.0)
        number = tl.load(counts + row * _BINS + bins)
        terms = number.to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-_WIDTH / 8)) * stride.to(tl.float32)
        aim = tl.minimum(drop, room - narrow * slim)
        behind = tl.cumsum(terms, 0, reverse=True)
        cut, fine = _plan(tl.sum(parts, 0), behind, highest, aim, slim, mean_log, log)
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


def planned(terms: Terms, most: Float32[Tensor, "b g"], aim: Goal, logs: Logs) -> Float32[Tensor, "bh 2"]:
    """Each row's rim in octaves, and from how many octaves below it on terms are heavy."""
    rows, room = terms.widest.shape[0], terms.top.shape[1]
    masses, rims = terms.mass.new_empty(rows, programs_for(room)), terms.mass.new_empty(rows, 2)
    known = (terms.offset, terms.top, terms.mass, terms.widest, terms.counts)
    _planned[masses.shape](
        *known,
        masses,
        terms.arrived,
        most,
        terms.nu,
        rims,
        *aim,
        logs.mean,
        logs.sum,
        *terms.used,
        room,
        **constants_of(terms),
        PROGRAMS=triton.next_power_of_2(masses.shape[1]),
        num_warps=WARPS,
        EARLY=early(terms.top.device),
        launch_pdl=early(terms.top.device),
    )
    return rims
