"""How many terms of a head are how large: in bins of steps below its largest, by many programs at once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float32, Int32
from torch import Tensor

from avow.kernels.pausing import tokens_in
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import BINS
from avow.kernels.tile_ops import early, follow
from avow.numerics.sketch import GROUP

# Steps in a bin: 128 bins of three eighths reach 48 octaves below the largest term; what is smaller is in the last.
WIDTH = 3
_BINS, _GROUP, _WIDTH = (tl.constexpr(number) for number in (BINS, GROUP, WIDTH))
# Tokens that a program counts, groups whose masses it adds up at once, and its warps.
_SPAN, _MASSES, WARPS = 2048, 2048, 8
# Tokens whose histogram tells where to cut; of more than twice as many only some groups are counted. A bin's terms are
# taken for larger than they are by a seventh on average, which covers what so large a sample may be off.
_ENOUGH = 2**14


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
def counting(
    offset,
    top,
    mass,
    widest,
    counts,
    masses,
    used,
    state,
    room,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    MASSES: tl.constexpr,
    ENOUGH: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Adds some groups of a sample to a row's histogram, and the expected mass of its share of all groups up."""
    follow(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, sibling = row // R, row % R
    c = tokens_in(used, state, head) // _GROUP
    stride = stride_in(c, ENOUGH)
    share = tl.cdiv(c, blocks_in(c, stride, BLOCK))
    highest = tl.load(widest + row)
    number = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    # Not always the same of them, since texts repeat themselves.
    group = number * stride + number * 5 % stride
    inside = group < c
    below = highest - tl.load(top + (head * room + group) * R + sibling, mask=inside, other=0)
    place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    short = tl.load(offset + row * room * _GROUP + place, mask=inside[:, None], other=0).to(tl.int32)
    # What is not there goes to the last bin and is taken out again: Triton 3.6 reorders what a histogram counts and
    # its mask each in a way of its own.
    which = tl.where(inside[:, None], tl.minimum((below[:, None] + short) // _WIDTH, _BINS - 1), _BINS - 1)
    beyond = (BLOCK // _GROUP - tl.sum(inside.to(tl.int32), 0)) * _GROUP
    bins = tl.arange(0, _BINS)
    found = tl.histogram(tl.reshape(which, (BLOCK,)), _BINS) - tl.where(bins == _BINS - 1, beyond, 0)
    tl.atomic_add(counts + row * _BINS + bins, found, sem="relaxed")
    expected = tl.zeros((MASSES,), tl.float32)
    end = tl.minimum(block * share + share, c)
    for first in range(block * share, end, MASSES):
        each = first + tl.arange(0, MASSES)
        at = (head * room + each) * R + sibling
        weight = tl.load(mass + at, mask=each < end, other=0.0)
        apart = highest - tl.load(top + at, mask=each < end, other=0)
        expected += tl.where(each < end, weight * tl.exp2(apart.to(tl.float32) * -0.125), 0.0)
    tl.store(masses + row * tl.num_programs(1) + block, tl.sum(expected, 0))


def programs_for(room: int) -> int:
    """How many programs count a row, at most."""
    return max(1, triton.cdiv(min(room * GROUP, 2 * _ENOUGH), _SPAN))


def constants_of(terms: Terms) -> dict[str, int]:
    """What `counting` is compiled for."""
    return dict(R=terms.top.shape[2], BLOCK=_SPAN, MASSES=_MASSES, ENOUGH=_ENOUGH)


def counted(terms: Terms) -> Counted:
    """Histograms of terms, and their expected mass."""
    rows, room = terms.widest.shape[0], terms.top.shape[1]
    masses = terms.mass.new_empty(rows, programs_for(room))
    known = (terms.offset, terms.top, terms.mass, terms.widest, terms.counts, masses, *terms.used, room)
    counting[masses.shape](
        *known, **constants_of(terms), num_warps=WARPS, EARLY=early(masses.device), launch_pdl=early(masses.device)
    )
    return Counted(terms.counts, masses)
