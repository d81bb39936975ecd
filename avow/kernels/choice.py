r"""Which tokens to read: for each head, the largest terms, until what is left is within a share of the expected mass.

Everything that decides is a whole number: terms are counted in bins of a head's histogram, a cut is a bin, and tokens
are listed in ascending order by prefix sums, span by span. The same input therefore gives the same list, whatever ran
first. A key head reads what any of its query heads wants, once for all of them; what none of them wants is added up for
each.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from avow.kernels import planning
from avow.kernels.pausing import first_seen, read_in_order
from avow.kernels.planning import cut_steps
from avow.kernels.sample_bounds import Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.step_constants import StepShape, turn_of
from avow.kernels.tile_ops import chained, filled, follow, interpreted
from avow.numerics.sketch import GROUP

_GROUP = tl.constexpr(GROUP)
# Tokens that a program marks at once, and programs of four warps that an H200 runs at once, eight to a processor: where
# there is more to mark, each of those marks more. A thread may have so many registers: with fewer, some are spilled.
BLOCK, _AT_ONCE, REGISTERS = 2048, 132 * 8, 128
# Bits of a listed token's place, where the step of its odds stands in those above.
PLACES = 24
# Groups further below the largest term than this many steps are taken for no further, so that their terms stay normal
# numbers whatever their offsets.
_DEEPEST = tl.constexpr(700)


class Draws(NamedTuple):
    """What is known of terms where tokens were drawn, with odds, and not all were read that matter."""

    rims: Float32[Tensor, "bh 2"]
    """What a token's term divided by its odds is at most, in octaves, and by how many octaves it is below that if it
    is light.
    """
    nu: Float32[Tensor, "bg"]
    lengths: Float[Tensor, "bg s"]
    """Upper bounds on those of values: what terms count with."""
    logs: Logs
    seed: Int64[Tensor, "1"]
    """What decided the draws; whoever makes an answer of them advances it."""


class Chosen(NamedTuple):
    """The tokens to read of each key head, and what the others may weigh for each query head."""

    listed: Int32[Tensor, "bg room"]
    """In spans of equal room: the first `found` of a span are its tokens, in ascending order. Where tokens were drawn,
    upper bits hold the step of the odds that each had.
    """
    found: Int32[Tensor, "bg spans"]
    tails: Float32[Tensor, "bh spans"] | None
    """Upper bounds on the terms of tokens that are not read, added up by spans, as multiples of 2^(widest / 8)."""
    widest: Int32[Tensor, "bh"] | None
    """The largest term of a head, in steps."""
    draws: Draws | None = None


@triton.jit
def appended(own, count, entry, wanted, BLOCK: tl.constexpr):
    """Writes those entries of a block that are wanted behind `count` others; how many there are then."""
    # Each thread counts sixteen neighbours by itself before it asks the others.
    wanted = tl.reshape(wanted, (BLOCK // 16, 16))
    entry = tl.reshape(entry, (BLOCK // 16, 16))
    rows = tl.sum(wanted, 1)
    before = tl.cumsum(rows, 0) - rows
    place = (count + before)[:, None] + tl.cumsum(wanted, 1) - 1
    tl.store(own + place, entry, mask=wanted > 0)
    return count + tl.sum(rows, 0)


@triton.jit
def _below(terms, widest, head, sibling, group, place, c, room, S: tl.constexpr):
    """How many steps groups are below a sibling's largest term, and their tokens below the group's."""
    row = head * S.R + sibling
    top = tl.load(terms.top + (head * room + group) * S.R + sibling, mask=group < c, other=0)
    apart = tl.sum(tl.where(tl.arange(0, S.RP) == sibling, widest, 0), 0) - top
    short = tl.load(terms.offset + row * room * _GROUP + place, mask=(group < c)[:, None], other=0).to(tl.int32)
    return apart, short


@triton.jit
def span_in(s, part, spans, BLOCK: tl.constexpr):
    """The first of the blocks of s tokens that one of `spans` programs has, and the one after its last."""
    blocks = tl.cdiv(s, BLOCK)
    span = tl.cdiv(blocks, spans)
    return part * span, tl.minimum(part * span + span, blocks)


@triton.jit
def span_to_list(terms, chosen, head, part, spans, BLOCK: tl.constexpr):
    """The first token of a head that is seen, the one after the last, and likewise the blocks that a program lists.

    Blocks are counted from the first token. And whether there is nothing to list, since all tokens are read in order:
    their number is all that is written then.
    """
    s = tl.load(terms.used.tokens + head)
    first, whole = first_seen(s, terms.used), read_in_order(s, terms.used)
    begin, end = span_in(s - first, part, spans, BLOCK)
    if whole:
        tl.store(chosen.found + head * spans + part, tl.maximum(tl.minimum(end * BLOCK, s - first) - begin * BLOCK, 0))
    return first, s, begin, end, whole


@triton.jit(do_not_specialize=["room", "spans", "span", "programs"])
def _marked(terms, most, chosen, drop, room, spans, span, programs, S: tl.constexpr, EARLY: tl.constexpr):
    """Lists the tokens of some blocks, at most `span`, that some sibling wants, and adds up what others may weigh."""
    follow(EARLY)
    R: tl.constexpr = S.R
    TURN: tl.constexpr = S.TURN
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, s, begin, end, whole = span_to_list(terms, chosen, head, part, spans, S.BLOCK)
    row = tl.arange(0, S.RP)
    rows = head * R + row
    if whole:
        tl.store(chosen.tails + rows * spans + part, filled(0.0, S.RP), mask=row < R)
        return
    start, c = start // _GROUP, s // _GROUP
    # Where to cut: every program finds the same itself, which is faster than reading it.
    widest, cuts = cut_steps(terms, most, head, c - start, drop, programs, S)
    if part == 0:
        tl.store(chosen.widest + rows, widest, mask=row < R)
    own_list = chosen.listed + (head * spans + part) * span * S.BLOCK
    count = 0
    left = filled(0.0, S.BLOCK // _GROUP, S.RP)
    token = tl.arange(0, _GROUP)
    for block in range(begin, end):
        group = start + block * (S.BLOCK // _GROUP) + tl.arange(0, S.BLOCK // _GROUP)
        place = group[:, None] * _GROUP + token[None, :]
        sketched = group < c
        # By how many steps a token is above some sibling's cut; what has no sketch is always read.
        above = tl.where(sketched, 0, 1)[:, None] + tl.zeros((S.BLOCK // _GROUP, _GROUP), tl.int32)
        for turn in range(0, R, TURN):
            for nth in tl.static_range(TURN):
                sibling = turn + nth
                apart, short = _below(terms, widest, head, sibling, group, place, c, room, S)
                cut = tl.sum(tl.where(row == sibling, cuts, 0), 0)
                above = tl.maximum(above, tl.where(sketched, cut - apart, 0)[:, None] - short)
        wanted = tl.where((above > 0) & (place < s), 1, 0)
        unread = 1.0 - wanted.to(tl.float32)
        count = appended(own_list, count, place, wanted, S.BLOCK)
        for turn in range(0, R, TURN):
            for nth in tl.static_range(TURN):
                sibling = turn + nth
                apart, short = _below(terms, widest, head, sibling, group, place, c, room, S)
                # As the bits of a float32, whole steps make a power of two, or where the steps are no whole octave what
                # lies between two of them on a line: that is above the power, by 6% at most.
                bits = (127 << 23) - (tl.where(sketched, tl.minimum(apart, _DEEPEST), 0) << 20)
                term = (bits[:, None] - (short << 20)).to(tl.float32, bitcast=True)
                sums = tl.where(sketched, tl.sum(term * unread, 1), 0.0)
                left += tl.where((row == sibling)[None, :], sums[:, None], 0.0)
    tl.store(chosen.found + head * spans + part, count)
    tl.store(chosen.tails + rows * spans + part, tl.sum(left, 0), mask=row < R)


def marked(terms: Terms, most: Float32[Tensor, "b g"], drop: float, capacity: int) -> Chosen:
    """Tokens that some sibling wants, so that the rest moves it by about `drop`, and all that have no sketch."""
    heads, room, r = terms.top.shape
    spans, span = spans_of(heads, capacity)
    tails, widest = terms.nu.new_empty(heads * r, spans), terms.top.new_empty(heads * r)
    chosen = blank_lists(terms, spans, span)._replace(tails=tails, widest=widest)
    inputs = terms, most, chosen, drop, room, spans, span, terms.peaks.shape[1]
    shape = choosing_shape(terms)
    _marked[(heads, spans)](*inputs, S=shape, num_warps=4, maxnreg=REGISTERS, **chained(most.device))
    return chosen


def choosing_shape(terms: Terms) -> StepShape:
    """What kernels that list tokens are compiled for."""
    heads, programs, r = terms.peaks.shape
    most, many = triton.next_power_of_2(programs), planning.enough(heads * r)
    return StepShape(
        r, triton.next_power_of_2(r), turn_of(r), BLOCK=BLOCK, ENOUGH=many, PROGRAMS=most, FAST=not interpreted()
    )


def blank_lists(terms: Terms, spans: int, span: int, draws: Draws | None = None) -> Chosen:
    """Room for the lists of all heads, in so many spans of so many blocks."""
    heads = terms.top.shape[0]
    listed = terms.top.new_empty(heads, spans * span * BLOCK)
    return Chosen(listed, terms.top.new_empty(heads, spans), None, None, draws)


def spans_of(heads: int, capacity: int) -> tuple[int, int]:
    """How many spans there are to a head's tokens, and how many blocks may be a span: fixed by the shape."""
    blocks = triton.cdiv(capacity, BLOCK)
    span = triton.cdiv(heads * blocks, _AT_ONCE)
    return triton.cdiv(blocks, span), span
