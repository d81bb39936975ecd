r"""Which tokens to draw: those that may weigh much for certain, the others by odds that their bounds propose.

Let :math:`u_j \ge w_j (\|v_j\| + ν)/ν` be what the sketch proves of a token. For each query head there is a rim R:
token j is read with probability at least :math:`\min(1, u_j / R)`, the largest that any sibling asks for, and counts
:math:`1/p_j`-fold. So no term of any estimate exceeds R, which is what `avow.kernels.sample_bounds` needs to know.

Odds are numbers of four bits times a power of two: :math:`p(8a + m) = 2^{-a} (16 - m)/16 \ge 2^{-a - m/8}`. They are
exact, and what draws are compared with is a whole number. Draws are a keyed function of the token's place: Philox 2x32
with seven rounds, the fewest that Salmon et al. (2011) found to pass every test of BigCrush. Its key and half of its
counter come from a seed on the device, which each step advances there, so that a captured step draws afresh whenever it
is replayed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from avow.kernels import choice
from avow.kernels.choice import PLACES, WIDTH, Chosen, Draws, appended, counting, listed_twin
from avow.kernels.sample_bounds import Logs
from avow.kernels.sketch_pass import BINS, LIMIT, STEPS, Terms
from avow.kernels.tiles import interpreted
from avow.maths.rounding import unit
from avow.maths.sketch import GROUP

# Odds are not below 2^-12.8: of a million tokens that weigh nothing, 144 are drawn.
_RAREST = tl.constexpr(103)
# Draws have this many bits, so that all odds are whole numbers of them.
_BITS = 16
# What only plans rest on: how long values are, as a share of the longest; and what the sketch pass took off the
# expected mass in doubt comes back as far as intervals are wide, up to this factor.
_USUAL, _DOUBTED = tl.constexpr(0.8), tl.constexpr(1.15)
# Of a limit on the whole bound, plans leave this share to what they cannot foresee.
_SPARE = 0.15
# Steps between a rim and the largest term of a group, at most: more makes no difference, and float16 can hold it.
_FAR = tl.constexpr(900)
# A rim is at most 30 octaves above the largest term, in steps.
_HIGHEST = tl.constexpr(-240.0)
# How many times the error that is aimed at ν should be at least.
_ROOM = 8.0
# Philox 2x32: its multiplier, what its key grows by, and its rounds.
_FACTOR, _GROWTH, _ROUNDS = tl.constexpr(0xD256D193), tl.constexpr(0x9E3779B9), tl.constexpr(7)


@triton.jit
def _stirred(x, y, key):
    """Two numbers of 32 bits from two others and a key, between which nothing is left to be seen."""
    for _ in tl.static_range(_ROUNDS):
        product = x.to(tl.uint64) * _FACTOR
        x, y = (product >> 32).to(tl.uint32) ^ key ^ y, product.to(tl.uint32)
        key += _GROWTH
    return x, y


@triton.jit
def _keys(seed, head):
    """Two keys of 32 bits from a seed and a head."""
    x = tl.load(seed).to(tl.uint64) + (head + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _plan(
    expected,
    behind,
    highest,
    aim,
    slim,
    LIMIT: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    mean_log,
    log,
):
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
    bins = tl.arange(0, BINS)
    edge = tl.where(bins == 0, 2.0**30, tl.exp2(bins.to(tl.float32) * (-WIDTH / 8)))
    rim = tl.max(tl.minimum(size * size, edge), 0)
    # Terms at the limit may be anything above it, and are always read.
    steps = tl.maximum(tl.ceil(-8 * tl.log2(rim)), tl.where(highest < LIMIT, _HIGHEST, 1.0))
    # Where there is nothing to expect, or nothing to aim at, everything is read.
    rim = tl.where(aim > 0, tl.where(slim < float("inf"), rim, 0.0), 0.0)
    known = (expected > 0) & (expected < float("inf")) & (whole < float("inf")) & (rim > 0)
    return tl.where(known, steps, 2.0**30).to(tl.int32), fine


@triton.jit(do_not_specialize=["c", "blocks", "stride", "share"])
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
    c,
    blocks,
    stride,
    share,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASSES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """A part of a row's histogram; whoever is the last to have filled in a part plans for the row."""
    row = tl.program_id(0).to(tl.int64)
    slim = tl.load(nu + row // R) / tl.load(most + row // R)
    highest = tl.load(widest + row)
    counting(offset, top, mass, widest, counts, masses, c, blocks, stride, share, R, BLOCK, GROUP, BINS, WIDTH, MASSES)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before % blocks == blocks - 1:
        bins, program = tl.arange(0, BINS), tl.arange(0, PROGRAMS)
        parts = tl.load(masses + row * blocks + program, mask=program < blocks, other=0.0)
        number = tl.load(counts + row * BINS + bins)
        terms = number.to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-WIDTH / 8)) * stride.to(tl.float32)
        aim = tl.minimum(drop, room - narrow * slim)
        behind = tl.cumsum(terms, 0, reverse=True)
        cut, fine = _plan(tl.sum(parts, 0), behind, highest, aim, slim, LIMIT, BINS, WIDTH, mean_log, log)
        tl.store(rims + row * 2, (highest - cut).to(tl.float32) * 0.125)
        tl.store(rims + row * 2 + 1, fine)


@triton.jit
def _rarer(short, down, rare, FAST: tl.constexpr):
    """The smaller one of `rare` and `short` + `down`: a byte, and whole numbers of at most 1,000, as float16."""
    if FAST:
        # A byte behind that of 1,024 is that much above it, so that four bytes become two pairs without conversion.
        least = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd;
            prmt.b32 even, $2, 0x64646464, 0x4140;
            prmt.b32 odd, $2, 0x64646464, 0x4342;
            add.rn.f16x2 even, even, $3;
            add.rn.f16x2 odd, odd, $4;
            min.f16x2 $0, even, $5;
            min.f16x2 $1, odd, $6;
            }
            """,
            "=r,=r,r,r,r,r,r",
            [short, down - 1024, rare],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        least = tl.minimum(rare, short.to(tl.float16) + down)
    return least


@triton.jit
def _block(
    block,
    offset,
    top,
    own,
    count,
    rims,
    first_key,
    second_key,
    c,
    s,
    WHOLE: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lists what is drawn from a block of tokens, with `WHOLE` one in which all have a sketch; how long the list is."""
    token = tl.arange(0, GROUP)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    place = group[:, None] * GROUP + token[None, :]
    # By how many steps a token is below the rim that it is nearest to; what has no sketch is always read.
    rare = tl.full((BLOCK // GROUP, GROUP), _RAREST, tl.float16)
    if not WHOLE:
        rare = tl.where((group < c)[:, None], rare, tl.zeros_like(rare))
    for sibling in tl.static_range(R):
        # A whole number of steps, but where everything is read: then it is far below all terms.
        rim = (tl.load(rims + sibling * 2) * 8).to(tl.int32)
        at = offset + sibling * c * GROUP + place
        if WHOLE:
            peak = tl.load(top + group * R + sibling)
            short = tl.load(at)
        else:
            peak = tl.load(top + group * R + sibling, mask=group < c, other=0)
            short = tl.load(at, mask=(group < c)[:, None], other=0)
        down = tl.minimum(tl.maximum(rim - peak, -_FAR), _FAR).to(tl.float16)
        rare = _rarer(short, down[:, None] + tl.zeros_like(rare), rare, FAST)
    # Whole numbers above 1,024 are the lowest bits of a float16.
    rare = (tl.maximum(rare, tl.zeros_like(rare)) + 1024).to(tl.float16)
    rare = rare.to(tl.int16, bitcast=True).to(tl.int32) & 1023
    odds = ((127 << 23) - rare * 2**20).to(tl.float32, bitcast=True)
    # Four tokens share 64 bits, 16 for each: as the lowest of a float32, they count from 2^23 on.
    four = (group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]).to(tl.uint32)
    x, y = _stirred(four, second_key, first_key)
    pair = tl.reshape(tl.join(x, y), (BLOCK // GROUP, GROUP // 2))
    draw = tl.reshape(tl.join(pair & 0xFFFF, pair >> 16), (BLOCK // GROUP, GROUP)) | 0x4B000000
    wanted = draw.to(tl.float32, bitcast=True) < odds * 2.0**16 + 2.0**23
    if not WHOLE:
        wanted = wanted & (place < s)
    return appended(own, count, place + (rare << PLACES), wanted.to(tl.int32), BLOCK)


@triton.jit(do_not_specialize=["c", "s", "blocks", "spans", "span"])
def _drawn(
    offset,
    top,
    rims,
    seed,
    listed,
    found,
    c,
    s,
    blocks,
    spans,
    span,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lists which tokens of `span` blocks are drawn, and by which odds."""
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_key, second_key = _keys(seed, head)
    count = 0
    offset += head * R * c * GROUP
    top += head * c * R
    rims += head * R * 2
    listed += (head * spans + part) * span * BLOCK
    end = tl.minimum(part * span + span, blocks)
    whole = tl.minimum(tl.maximum(c * GROUP // BLOCK, part * span), end)
    for block in range(part * span, whole):
        count = _block(
            block, offset, top, listed, count, rims, first_key, second_key, c, s, True, R, BLOCK, GROUP, PLACES, FAST
        )
    for block in range(whole, end):
        count = _block(
            block, offset, top, listed, count, rims, first_key, second_key, c, s, False, R, BLOCK, GROUP, PLACES, FAST
        )
    tl.store(found + head * spans + part, count)


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
    layout = choice.counting_of(terms)
    masses, rims = terms.mass.new_empty(layout.grid), terms.mass.new_empty(layout.grid[0], 2)
    known = (terms.offset, terms.top, terms.mass, terms.widest, terms.counts)
    _planned[layout.grid](
        *known,
        masses,
        terms.arrived,
        most,
        terms.nu,
        rims,
        *aim,
        logs.mean,
        logs.sum,
        *layout.numbers,
        **layout.constants,
        PROGRAMS=triton.next_power_of_2(layout.grid[1]),
        LIMIT=LIMIT,
        num_warps=choice.WARPS,
    )
    return rims


def planned_twin(terms: Terms, most: Float32[Tensor, "b g"], goal: Goal, logs: Logs) -> Float32[Tensor, "bh 2"]:
    """The same in plain torch."""
    known, (_, c, r) = choice.counted_twin(terms), terms.top.shape
    sizes = torch.exp2(-torch.arange(BINS, device=known.counts.device) * (WIDTH / STEPS))
    behind = (known.counts * sizes * float(choice.stride_of(c))).flip(-1).cumsum(-1).flip(-1)
    expected, whole = known.masses.sum(-1), behind[:, 0]
    slim = (terms.nu / most.reshape(-1)).repeat_interleave(r)
    aim = (goal.room - goal.narrow * slim).clamp(max=goal.drop)
    long = _USUAL.value / slim
    wide = (whole / (expected * (1 + long))).clamp(min=1.0).log2()
    mass = expected * torch.exp2(wide * 0.1).clamp(max=_DOUBTED.value)
    wide = (whole / (mass * (1 + long))).clamp(min=1.0).log2()
    fine = (wide * 0.5 + 1.4).floor().clamp(1.0, 3.0)
    wished = (aim * mass / slim)[:, None]
    share = (mass * (long.square() + 1).sqrt() / whole).clamp(max=1.0)[:, None]

    def solved(linear: Tensor | float, root: Tensor) -> Tensor:
        return ((root.square() + 4 * linear * wished).sqrt() - root) / (2 * linear)

    calm = solved(
        (logs.mean + torch.exp2(-fine) * 2.83 * logs.sum)[:, None], 1.42 * share * (2.4 * logs.sum * behind).sqrt()
    )
    rough = solved(0.95 * logs.sum + 2.83, 1.6 * (2 * logs.sum * share * behind).sqrt())
    size = torch.where((wide < fine + 0.5)[:, None], rough, torch.maximum(calm, rough))
    edges = sizes.clone()
    edges[0] = 2.0**30
    rim = torch.minimum(size.square(), edges).amax(-1)
    steps = torch.maximum((-STEPS * rim.log2()).ceil(), torch.where(terms.widest < LIMIT, _HIGHEST.value, 1.0))
    sure = (expected > 0) & (expected < torch.inf) & (whole < torch.inf) & (rim > 0)
    sure &= (aim > 0) & (slim < torch.inf)
    cuts = torch.where(sure, steps, 2.0**30).int()
    return torch.stack([(terms.widest - cuts).float() / STEPS, fine], -1)


def drawn(terms: Terms, rims: Float32[Tensor, "bh 2"], logs: Logs, seed: Int64[Tensor, "1"], s: int) -> Chosen:
    """Tokens drawn by the odds that belong to rims."""
    heads, c, r = terms.top.shape
    blocks, spans, span = choice.spans_of(heads, s)
    listed = terms.widest.new_empty(heads, spans * span * choice.BLOCK)
    found = terms.widest.new_empty(heads, spans)
    _drawn[(heads, spans)](
        terms.offset,
        terms.top,
        rims,
        seed,
        listed,
        found,
        c,
        s,
        blocks,
        spans,
        span,
        R=r,
        BLOCK=choice.BLOCK,
        GROUP=GROUP,
        PLACES=PLACES,
        FAST=not interpreted(),
        num_warps=4,
        maxnreg=choice.REGISTERS,
    )
    return Chosen(listed, found, None, Draws(rims, terms.nu, terms.lengths, logs, seed))


def drawn_twin(terms: Terms, rims: Float32[Tensor, "bh 2"], logs: Logs, seed: Int64[Tensor, "1"], s: int) -> Chosen:
    """The same in plain torch."""
    heads, c, r = terms.top.shape
    cuts = (terms.widest - rims[:, 0] * STEPS).round().int()
    above = (cuts[:, None] - choice.steps_below(terms)).view(heads, r, c * GROUP).amax(1)
    rare = torch.nn.functional.pad((-above).clamp(0, _RAREST.value), (0, s - c * GROUP))
    chance = (16 - (rare & 7)) << (_BITS - 4 - (rare >> 3))
    wanted = draws_twin(seed, heads, s) < chance
    return listed_twin(torch.where(wanted, rare + 1, 0), None, Draws(rims, terms.nu, terms.lengths, logs, seed))


def draws_twin(seed: Int64[Tensor, "1"], heads: int, s: int) -> Int32[Tensor, "bg s"]:
    """Uniform whole numbers of 16 bits."""
    mask = 2**32 - 1
    keys = [_keys_twin(int(seed), head) for head in range(heads)]
    key, y = torch.tensor(keys, device=seed.device).unsqueeze(-1).unbind(1)  # each (bg, 1)
    place = torch.arange(s, device=seed.device)
    x = place >> 2
    for _ in range(_ROUNDS.value):
        product = x * _FACTOR.value
        x, y = (product >> 32 & mask) ^ key ^ y, product & mask
        key = key + _GROWTH.value & mask
    return (torch.where(place & 2 > 0, y, x) >> (place & 1) * _BITS & 2**_BITS - 1).int()


def _keys_twin(seed: int, head: int) -> tuple[int, int]:
    x, mask = seed + (head + 1) * 0x9E3779B97F4A7C15, 2**64 - 1
    x &= mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x & (2**32 - 1), x >> 32
