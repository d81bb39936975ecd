r"""Which tokens to read: for each head, the largest terms, until what is left is within a share of the expected mass.

Everything that decides is a whole number: terms are counted in bins of a head's histogram, a cut is a bin, and tokens
are listed in ascending order by prefix sums. The same input therefore gives the same list, whatever ran first. A key
head reads what any of its query heads wants, once for all of them; what none of them wants is added up for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32, UInt8
from torch import Tensor

from avow.kernels.sketch_pass import BINS, STEPS, Terms
from avow.maths.sketch import GROUP

# Steps in a bin: 128 bins of three eighths reach 48 octaves below the largest term; what is smaller is in the last.
WIDTH = 3
# Tokens per program, and per program that counts: fewer of those have fewer counts to add up.
_BLOCK, _SPAN = 2048, 8192
# Tokens whose histogram tells where to cut; of more than twice as many only some groups are counted. A bin's terms are
# taken for larger than they are by a seventh on average, which covers what so large a sample may be off.
_ENOUGH = 2**18


class Chosen(NamedTuple):
    """The tokens to read of each key head, in ascending order, and what the others may weigh for each query head."""

    listed: Int32[Tensor, "bg s"]
    """Only the first `kept` of a head mean anything."""
    kept: Int32[Tensor, "bg"]
    tails: Float32[Tensor, "bh blocks"]
    """The terms of tokens that are not read, added up by blocks, as multiples of 2^(widest / 8)."""


class Marked(NamedTuple):
    """One byte for each token: read or not; how many of each block are; and what the others may weigh."""

    flags: UInt8[Tensor, "bg s"]
    per_block: Int32[Tensor, "bg blocks"]
    tails: Float32[Tensor, "bh blocks"]


@triton.jit(do_not_specialize=["c", "blocks", "stride"])
def _counted(
    offset,
    top,
    mass,
    widest,
    counts,
    parts,
    c,
    blocks,
    stride,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Adds one of `stride` groups to a head's histogram, and the expected mass of all of them up."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, sibling = row // R, row % R
    highest = tl.load(widest + row)
    number = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    expected = tl.zeros((BLOCK // GROUP,), tl.float32)
    for k in range(stride):
        group = number * stride + k
        at = (head * c + group) * R + sibling
        weight = tl.load(mass + at, mask=group < c, other=0.0)
        below = highest - tl.load(top + at, mask=group < c, other=0)
        expected += tl.where(group < c, weight * tl.exp2(below.to(tl.float32) * -0.125), 0.0)
    tl.store(parts + row * blocks + block, tl.sum(expected, 0))
    group = number * stride + _which(number, stride)
    below = highest - tl.load(top + (head * c + group) * R + sibling, mask=group < c, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = token < c * GROUP
    short = tl.load(offset + row * c * GROUP + token, mask=there, other=0).to(tl.int32)
    place = tl.minimum((below[:, None] + short) // WIDTH, BINS - 1)
    found = tl.histogram(tl.reshape(place, (BLOCK,)), BINS, mask=tl.reshape(there, (BLOCK,)))
    tl.atomic_add(counts + row * BINS + tl.arange(0, BINS), found, sem="relaxed")


@triton.jit
def _which(number, stride):
    """The one of `stride` groups that is counted: not always the same, since texts repeat themselves."""
    return number * 5 % stride


@triton.jit(do_not_specialize=["blocks"])
def _cut(
    counts,
    parts,
    most,
    nu,
    cuts,
    drop,
    blocks,
    R: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The offset from which on a head's tokens need not be read."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    expected = tl.sum(tl.load(parts + row * blocks + part, mask=part < blocks, other=0.0), 0)
    bins = tl.arange(0, BINS)
    # Each bin's terms are taken for the largest that it may hold.
    terms = tl.load(counts + row * BINS + bins).to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-WIDTH / 8))
    behind = tl.cumsum(terms, 0, reverse=True)
    budget = expected * drop * tl.load(most + row // R) / tl.load(nu + row // R)
    # Where the budget is not a number, everything is read.
    budget = tl.where(budget < float("inf"), budget, -1.0)
    above = tl.sum(tl.where(behind <= budget, 0, 1), 0)
    tl.store(cuts + row, tl.where(above >= BINS, 2**30, tl.maximum(above, 1) * WIDTH))


@triton.jit(do_not_specialize=["c", "s", "blocks"])
def _marked(
    offset,
    top,
    widest,
    cuts,
    flags,
    per_block,
    tails,
    c,
    s,
    blocks,
    R: tl.constexpr,
    RP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Which tokens of a block some sibling wants, how many they are, and what the others may weigh."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, RP)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    rows = head * R + row
    highest = tl.load(widest + rows, mask=row < R, other=0)
    cut = tl.load(cuts + rows, mask=row < R, other=0)
    sketched = (row < R)[:, None] & (group < c)[None, :]
    peak = tl.load(top + (head * c + group)[None, :] * R + row[:, None], mask=sketched, other=0)
    apart = (highest[:, None] - peak)[:, :, None]
    known = sketched[:, :, None]
    place = (rows * c)[:, None, None] * GROUP + token[None]
    short = tl.load(offset + place, mask=known, other=0).to(tl.int32)
    below = apart + short  # (RP, BLOCK // GROUP, GROUP)
    wanted = tl.max((known & (below < cut[:, None, None])).to(tl.int32), 0) > 0
    # What has no sketch is always read.
    wanted = (wanted | (group >= c)[:, None]) & (token < s)
    tl.store(flags + head * s + token, wanted.to(tl.uint8), mask=token < s)
    tl.store(per_block + head * blocks + block, tl.sum(tl.sum(wanted.to(tl.int32), 1), 0))
    terms = tl.where(known & (wanted == 0)[None], tl.exp2(below.to(tl.float32) * -0.125), 0.0)
    tl.store(tails + rows * blocks + block, tl.sum(tl.sum(terms, 2), 1), mask=row < R)


@triton.jit(do_not_specialize=["s", "blocks"])
def _listed(flags, per_block, listed, kept, s, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Writes the marked tokens of a block behind those of all blocks before it."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    every = tl.arange(0, BLOCKS)
    found = tl.load(per_block + head * blocks + every, mask=every < blocks, other=0)
    before = tl.sum(tl.where(every < block, found, 0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(flags + head * s + token, mask=token < s, other=0).to(tl.int32)
    place = before + tl.cumsum(wanted, 0) - 1
    tl.store(listed + head * s + place, token, mask=wanted > 0)
    if block == 0:
        tl.store(kept + head, tl.sum(found, 0))


def cuts(terms: Terms, most: Float32[Tensor, "b g"], drop: float) -> Int32[Tensor, "bh"]:
    """How many steps below its largest term a head stops reading, so that the rest moves it by about `drop`."""
    rows, (_, c, r) = terms.widest.shape[0], terms.top.shape
    stride = _stride(c)
    blocks = max(1, triton.cdiv(triton.cdiv(c, stride) * GROUP, _SPAN))
    parts = terms.mass.new_empty(rows, blocks)
    _counted[(rows, blocks)](
        terms.offset,
        terms.top,
        terms.mass,
        terms.widest,
        terms.counts,
        parts,
        c,
        blocks,
        stride,
        R=r,
        BLOCK=_SPAN,
        GROUP=GROUP,
        BINS=BINS,
        WIDTH=WIDTH,
        num_warps=8,
    )
    found = torch.empty_like(terms.widest)
    _cut[(rows,)](
        terms.counts,
        parts,
        most,
        terms.nu,
        found,
        drop / stride,
        blocks,
        R=r,
        BINS=BINS,
        WIDTH=WIDTH,
        PARTS=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    return found


def cuts_twin(terms: Terms, most: Float32[Tensor, "b g"], drop: float) -> Int32[Tensor, "bh"]:
    """The same in plain torch."""
    heads, c, r = terms.top.shape
    top = terms.top.transpose(1, 2).reshape(heads * r, c)
    stride = _stride(c)
    number = torch.arange(triton.cdiv(c, stride), device=top.device)
    group = number * stride + number * 5 % stride
    below = _below(terms).view(heads * r, c, GROUP)[:, group[group < c]].flatten(1)
    bins = (below // WIDTH).clamp(max=BINS - 1).long()
    counts = torch.zeros_like(terms.counts).scatter_add_(1, bins, torch.ones_like(below))
    mass = terms.mass.transpose(1, 2).reshape(heads * r, c)
    expected = (mass * torch.exp2((top - terms.widest[:, None]) / STEPS)).sum(-1)
    sizes = torch.exp2(-torch.arange(BINS, device=top.device) * (WIDTH / STEPS))
    behind = (counts * sizes).flip(-1).cumsum(-1).flip(-1)
    share = (most.reshape(-1) / terms.nu).repeat_interleave(r)
    budget = (expected * (drop / stride) * share)[:, None]
    budget = torch.where(budget < torch.inf, budget, -1.0)
    above = (~(behind <= budget)).sum(-1)
    return torch.where(above >= BINS, 2**30, above.clamp(min=1) * WIDTH).int()


def _stride(c: int) -> int:
    """Of how many groups one is counted."""
    return max(1, c * GROUP // _ENOUGH)


def marked(terms: Terms, found: Int32[Tensor, "bh"], s: int) -> Marked:
    """Tokens that some sibling wants, and all that have no sketch."""
    heads, c, r = terms.top.shape
    blocks = triton.cdiv(s, _BLOCK)
    out = Marked(
        terms.offset.new_empty(heads, s),
        terms.widest.new_empty(heads, blocks),
        terms.mass.new_empty(heads * r, blocks),
    )
    _marked[(heads, blocks)](
        terms.offset,
        terms.top,
        terms.widest,
        found,
        *out,
        c,
        s,
        blocks,
        R=r,
        RP=triton.next_power_of_2(r),
        BLOCK=_BLOCK,
        GROUP=GROUP,
        num_warps=8,
    )
    return out


def marked_twin(terms: Terms, found: Int32[Tensor, "bh"], s: int) -> Marked:
    """The same in plain torch."""
    heads, c, r = terms.top.shape
    below = _below(terms)
    wanted = (below < found[:, None]).view(heads, r, -1).any(1)
    flags = torch.nn.functional.pad(wanted, (0, s - c * GROUP), value=True)
    left = torch.exp2(-below / STEPS) * ~wanted.repeat_interleave(r, 0)
    blocks = triton.cdiv(s, _BLOCK)
    room = blocks * _BLOCK
    per_block = torch.nn.functional.pad(flags, (0, room - s)).view(heads, blocks, -1).sum(-1).int()
    tails = torch.nn.functional.pad(left, (0, room - c * GROUP)).view(heads * r, blocks, -1).sum(-1)
    return Marked(flags.to(torch.uint8), per_block, tails)


def listed(marks: Marked) -> Chosen:
    """The marked tokens, in ascending order."""
    heads, s = marks.flags.shape
    blocks = marks.per_block.shape[1]
    places, kept = marks.per_block.new_empty(heads, s), marks.per_block.new_empty(heads)
    _listed[(heads, blocks)](
        marks.flags,
        marks.per_block,
        places,
        kept,
        s,
        blocks,
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=8,
    )
    return Chosen(places, kept, marks.tails)


def listed_twin(marks: Marked) -> Chosen:
    """The same in plain torch; behind the last token of a head stands −1."""
    heads, s = marks.flags.shape
    places = torch.full((heads, s), -1, dtype=torch.int32, device=marks.flags.device)
    for head, flags in enumerate(marks.flags):
        found = flags.nonzero()[:, 0].int()
        places[head, : len(found)] = found
    return Chosen(places, marks.flags.sum(-1, dtype=torch.int32), marks.tails)


def _below(terms: Terms) -> Int32[Tensor, "bh rows"]:
    """How many steps each term is below its head's largest."""
    heads, c, r = terms.top.shape
    top = terms.top.transpose(1, 2).reshape(heads * r, c)
    return terms.widest[:, None] - top.repeat_interleave(GROUP, 1) + terms.offset.int()
