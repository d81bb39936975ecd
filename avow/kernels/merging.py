r"""The answer from parts of a list, and the proof of how far other tokens and all rounding may have moved it.

With H the tokens read, T the others and ν > 0 any length,

.. math:: \|o^* - out\| \le \frac{\sum_T w_j (\|v_j\| + \|out\|)}{Z_H}
          \le \frac{\sum_T w_j (\|v_j\| + ν)}{Z_H} \max\Bigl(1, \frac{\|out\|}{ν}\Bigr)   [claim tail-mass-output]

so that one sum over T, taken before `out` was known, is enough. Where tokens were drawn, `avow.kernels.sample_bounds`
says how far the others may have moved the answer. One program for each query head merges its parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Float64, Int32
from torch import Tensor

from avow.kernels.choice import Chosen
from avow.kernels.gather_attention import TILE, Parts, one, programs, shares, tiles_of
from avow.kernels.sample_bounds import FUZZY, NONE, missed, missed_twin
from avow.kernels.sketch_pass import STEPS, Terms
from avow.maths.rounding import gamma, tiny, unit

# Parts whose largest logits are compared at once, parts that are merged at once and the numbers that they may be, so
# that registers hold them, and by how many warps.
_PARTS, _CHUNK, _HELD, _MERGING = 256, 128, 2**15, 4
# The unit of sums in float32: tensor cores may truncate where IEEE rounds.
_UNIT = tl.constexpr(2.0**-23)


class Decoded(NamedTuple):
    """The answers of one step, and what is proved of them; all on the device."""

    out: Float[Tensor, "b h e"]
    bound: Float32[Tensor, "b h"]
    """At most this far is a row from the truth, relative to the longest value; inf where nothing is proved. Where
    tokens were drawn, up to the chance that was allowed.
    """
    within: Bool[Tensor, "b h"]
    """Whether unread tokens moved the row by no more than was allowed. Where not, compute it exactly."""
    length: Float32[Tensor, "b h"]
    """The answers' lengths: hints for the next step."""
    kept: Int32[Tensor, "b g"]
    """How many tokens of each key head were read."""


@triton.jit
def _apart(top, high):
    """A logarithm above another, at least: the difference is rounded, and its parts may be large."""
    return top - high + (tl.abs(top) + tl.abs(high) + 1) * 2.0**-21


@triton.jit
def slots_of(head, ends, counts, share, HEADS: tl.constexpr):
    """The first slot of a head's parts, and the one after the last."""
    count, after = one(counts, head, HEADS), one(ends, head, HEADS)
    first = (after - count) // share + head
    return first, tl.where(count > 0, (after - 1) // share + head + 1, first)


@triton.jit
def _asked(
    begin,
    beyond,
    sibling,
    total,
    values,
    light,
    heavy,
    R: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """What some slots hold of a row, asked for before it is needed; zeros from `beyond` on."""
    slot, column = begin + tl.arange(0, CHUNK), tl.arange(0, EP)
    at, inside = slot * R + sibling, slot < beyond
    there = inside[:, None] & (column < E)[None, :]
    mass = tl.load(total + at, mask=inside, other=0.0)
    sums = tl.load(values + at[:, None] * E + column[None, :], mask=there, other=0.0)
    squares, large = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    if DRAWN:
        squares = tl.load(light + at, mask=inside, other=0.0)
        large = tl.load(heavy + at, mask=inside, other=0.0)
    return mass, sums, squares, large


@triton.jit
def merge(
    row,
    first,
    beyond,
    share,
    q,
    peak,
    total,
    values,
    square,
    light,
    heavy,
    rims,
    tails,
    widest,
    nu,
    most,
    out,
    bound,
    within,
    length,
    drop,
    limit,
    scale,
    logit_error,
    per_tile,
    narrow,
    halves,
    vanished,
    mean_log,
    variance_log,
    log,
    spans,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPANS: tl.constexpr,
    LARGEST: tl.constexpr,
    DRAWN: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """A row's answer from the slots of its head, and its bound; with `AGAIN`, those that all tokens were read for."""
    head = row // R
    column, channel = tl.arange(0, EP), tl.arange(0, DP)
    # What is needed in the end is asked for now, so that nothing waits for it then.
    query = tl.load(q + row * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    unit, wide = tl.load(most + head), tl.load(nu + head)
    if DRAWN:
        rim, fine = tl.load(rims + row * 2), tl.load(rims + row * 2 + 1)
    elif AGAIN == 0:
        span = tl.arange(0, SPANS)
        tail = tl.sum(tl.load(tails + row * spans + span, mask=span < spans, other=0.0), 0) * (1 + 2.0**-10)
        peak_term = tl.load(widest + row).to(tl.float32) * 0.125
    ahead = _asked(first, beyond, row % R, total, values, light, heavy, R, E, EP, CHUNK, DRAWN)
    high, longest = float("-inf"), 0.0
    for begin in range(first, beyond, PARTS):
        slot = begin + tl.arange(0, PARTS)
        peaks = tl.load(peak + slot * R + row % R, mask=slot < beyond, other=float("-inf"))
        high = tl.maximum(high, tl.max(peaks, 0))
        longest = tl.maximum(longest, tl.max(tl.load(square + slot, mask=slot < beyond, other=0.0), 0))
    mass = tl.zeros((CHUNK,), tl.float32)
    squares, large = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    sums = tl.zeros((EP,), tl.float32)
    for begin in range(first, beyond, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(peak + slot * R + row % R, mask=slot < beyond, other=float("-inf")) - high)
        own_mass, own_values, own_squares, own_large = ahead
        mass += own_mass * weight
        squares += own_squares
        large += own_large
        sums += tl.sum(own_values * weight[:, None], 0)
        ahead = _asked(begin + CHUNK, beyond, row % R, total, values, light, heavy, R, E, EP, CHUNK, DRAWN)
    mass = tl.sum(mass, 0)
    answer = sums / mass
    # Rounding must not carry an average of values beyond what their type holds; nan stays nan.
    answer = tl.where(answer > LARGEST, LARGEST, tl.where(answer < -LARGEST, -LARGEST, answer))
    tl.store(out + row * E + column, answer.to(out.dtype.element_ty), mask=column < E)
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
    delta = scale * asked * longest * logit_error + (tiles + 2) * 2.0**-20 + 900 * _UNIT
    if DRAWN:
        # The logarithm of odds and lengths, and that of the odds beside a logit.
        delta += 2.0**-15
    depth = (tiles * per_tile + (beyond - first).to(tl.float32) + 2 * TILE + 16) * _UNIT
    rounding = delta + halves + 2 * depth / (1 - depth) + 2.0**-20
    rounding = tl.where(depth < 0.5, rounding, float("inf"))
    reach = (own + rounding * unit * 1.1) / wide
    grown = tl.exp(delta) * (1 + rounding) * (1 + 2.0**-16)
    moved = 0.0
    if DRAWN:
        step = _apart(rim - fine, high)
        squares, large = tl.sum(squares, 0) * grown * grown, tl.sum(large, 0) * grown
        # What underflows is less than this.
        squares += 2.0**-40
        moved = missed(squares, large, tl.exp2(step), tl.exp2(fine), mass / grown, reach, mean_log, variance_log, log)
        moved = moved * (wide / unit)
        moved = tl.where(delta < FUZZY, moved, float("inf"))
        # Without a rim, everything was read.
        moved = tl.where(rim < NONE, 0.0, moved)
    elif AGAIN == 0:
        step = _apart(peak_term, high)
        moved = tail * tl.exp2(step) / mass * (wide / unit) * tl.maximum(reach, 1.0) * grown
        moved = tl.where(tail == 0, 0.0, moved)
    whole = (moved + rounding + narrow * own / unit + vanished / unit) * (1 + 2.0**-16)
    # Answer and truth are never further apart than their lengths together.
    lengths = (1 + own / unit * (1 + narrow) + vanished / unit) * (1 + 2.0**-16)
    whole = tl.where(whole < lengths, whole, lengths)
    # Where all values are zero, so is every answer.
    whole = tl.where(unit == 0, tl.where(own == 0, 0.0, float("inf")), whole)
    moved = tl.where(unit == 0, 0.0, moved)
    # nan is no bound.
    whole = tl.where(whole < float("inf"), whole, float("inf"))
    tl.store(bound + row, whole)
    tl.store(length + row, own)
    if AGAIN == 0:
        tl.store(within + row, ((moved <= drop) & (whole <= limit) & (whole < float("inf"))).to(tl.int8))


@triton.jit(do_not_specialize=["heads", "s"])
def _merged(
    q,
    peak,
    total,
    values,
    square,
    light,
    heavy,
    rims,
    tails,
    widest,
    nu,
    most,
    found,
    seed,
    arrived,
    kept,
    out,
    bound,
    within,
    length,
    drop,
    limit,
    scale,
    logit_error,
    per_tile,
    narrow,
    halves,
    vanished,
    mean_log,
    variance_log,
    log,
    spans,
    heads,
    s,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPANS: tl.constexpr,
    LARGEST: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """A row's answer, and its bound."""
    row = tl.program_id(0).to(tl.int64)
    head = row // R
    ends, counts, share = shares(found, heads, spans, s, R, HEADS, SPANS, PROGRAMS, TILE, False)
    first, beyond = slots_of(head, ends, counts, share, HEADS)
    span = tl.arange(0, SPANS)
    read = tl.sum(tl.load(found + head * spans + span, mask=span < spans, other=0), 0)
    tl.store(kept + head, read, mask=row % R == 0)
    # Whoever reads again counts who is done.
    tl.store(arrived + row, 0)
    if DRAWN and row == 0:
        # The next step draws anew.
        tl.store(seed, tl.load(seed) + 1)
    merge(
        row,
        first,
        beyond,
        share,
        q,
        peak,
        total,
        values,
        square,
        light,
        heavy,
        rims,
        tails,
        widest,
        nu,
        most,
        out,
        bound,
        within,
        length,
        drop,
        limit,
        scale,
        logit_error,
        per_tile,
        narrow,
        halves,
        vanished,
        mean_log,
        variance_log,
        log,
        spans,
        R,
        D,
        DP,
        E,
        EP,
        TILE,
        PARTS,
        CHUNK,
        SPANS,
        LARGEST,
        DRAWN,
        False,
    )


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
) -> Decoded:
    """The answers and their bounds; the seed of draws is advanced."""
    (b, h, _), (g, _, e) = q.shape, v.shape[1:]
    out = q.new_empty(b, h, e)
    bound, length = (q.new_empty(b, h, dtype=torch.float32) for _ in range(2))
    within = q.new_empty(b, h, dtype=torch.int8)
    kept = q.new_empty(b, g, dtype=torch.int32)
    found = Decoded(out, bound, within.view(torch.bool), length, kept)
    heads, s, d, spans = b * g, v.shape[2], q.shape[2], chosen.found.shape[1]
    draws, nothing, count = chosen.draws, terms.nu, programs(b * g, v.shape[2])
    _merged[(b * h,)](
        q,
        *(nothing if x is None else x for x in parts),
        nothing if draws is None else draws.rims,
        nothing if chosen.tails is None else chosen.tails,
        terms.widest,
        terms.nu,
        most,
        chosen.found,
        nothing if draws is None else draws.seed,
        terms.arrived,
        found.kept,
        found.out,
        found.bound,
        within,
        found.length,
        drop,
        limit,
        *rounding_of(q, v, scale),
        *((0.0, 0.0, 0.0) if draws is None else draws.logs),
        spans,
        heads,
        s,
        R=h // g,
        D=d,
        DP=max(16, triton.next_power_of_2(d)),
        E=e,
        EP=max(16, triton.next_power_of_2(e)),
        TILE=TILE,
        HEADS=triton.next_power_of_2(heads),
        PROGRAMS=count,
        PARTS=min(triton.next_power_of_2(count), _PARTS),
        CHUNK=min(triton.next_power_of_2(count), _CHUNK, _HELD // max(16, triton.next_power_of_2(e))),
        SPANS=triton.next_power_of_2(spans),
        LARGEST=torch.finfo(q.dtype).max,
        DRAWN=draws is not None,
        num_warps=_MERGING,
    )
    return found


def merged_twin(
    q: Tensor,
    v: Tensor,
    parts: Parts,
    terms: Terms,
    chosen: Chosen,
    most: Float32[Tensor, "b g"],
    drop: float,
    scale: float,
    limit: float = math.inf,
) -> Decoded:
    """The same in plain torch."""
    (b, h, d), (g, _, e) = q.shape, v.shape[1:]
    r, (lists, tiles) = h // g, tiles_of(chosen, programs(b * g, v.shape[2]))
    counts = torch.tensor([len(own) for own in lists], device=q.device)
    after, head = counts.cumsum(0), torch.arange(b * g, device=q.device)
    first, beyond = (after - counts) // tiles + head, (after - 1) // tiles + head + 1
    slots = torch.arange(len(parts.square), device=q.device)
    own_slots = (slots >= first[:, None]) & (slots < beyond[:, None])  # (bg, slots)
    mine = own_slots.repeat_interleave(r, 0)[:, :, None]  # (bh, slots, 1)

    def by_row(x: Float32[Tensor, "slots r *e"], blank: float) -> Float32[Tensor, "bh slots *e"]:
        """What each head's own slots hold."""
        x = x.movedim(1, 0).repeat(b * g, *[1] * (x.ndim - 1))
        return torch.where(mine if x.ndim == 3 else mine[..., 0], x, blank)

    peak = by_row(parts.peak, -math.inf)
    high = peak.amax(-1)
    weight = torch.exp2(peak - high[:, None])
    mass = (by_row(parts.total, 0.0) * weight).sum(-1)
    answer = (by_row(parts.values, 0.0) * weight.unsqueeze(-1)).sum(1) / mass[:, None]
    answer = answer.clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
    own, asked = (torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-13) for x in (answer, q.reshape(b * h, d)))
    square = torch.where(own_slots, parts.square, 0.0).amax(-1)
    longest = square.sqrt().repeat_interleave(r) * (1 + 2.0**-13) + 2.0**-58
    scale, logit_error, per_tile, narrow, halves, vanished = rounding_of(q, v, scale)
    count = (beyond - first).repeat_interleave(r)
    delta = scale * asked * longest * logit_error + (tiles + 2) * 2.0**-20 + 900 * _UNIT.value
    delta = delta if chosen.draws is None else delta + 2.0**-15
    depth = (tiles * per_tile + count + 2 * TILE + 16) * _UNIT.value
    rounding = torch.where(depth < 0.5, delta + halves + 2 * depth / (1 - depth) + 2.0**-20, math.inf)
    unit_length, wide = (x.reshape(-1).double().repeat_interleave(r) for x in (most, terms.nu))
    reach = (own + rounding * unit_length * 1.1) / wide
    grown = delta.exp() * (1 + rounding) * (1 + 2.0**-16)

    def above(top: Float64[Tensor, "bh"]) -> Float64[Tensor, "bh"]:
        """What stands that many octaves high, at most, beside the largest weight."""
        return torch.exp2(top - high + (top.abs() + high.abs() + 1) * 2.0**-21)

    if chosen.draws is not None and parts.light is not None and parts.heavy is not None:
        rim, fine = chosen.draws.rims.double().unbind(-1)
        light, heavy = (by_row(x, 0.0).double().sum(-1) * grown for x in (parts.light, parts.heavy))
        moved = missed_twin(
            light * grown + 2.0**-40, heavy, above(rim - fine), fine.exp2(), mass / grown, reach, chosen.draws.logs
        )
        moved = torch.where(delta < FUZZY.value, moved * (wide / unit_length), math.inf)
        moved = torch.where((rim < NONE.value) | (unit_length == 0), 0.0, moved)
    else:
        tail = mass.new_zeros(()) if chosen.tails is None else chosen.tails.double().sum(-1) * (1 + 2.0**-10)
        moved = tail * above(terms.widest.double() / STEPS) / mass * (wide / unit_length) * reach.clamp(min=1.0) * grown
        moved = torch.where((tail == 0) | (unit_length == 0), 0.0, moved)
    whole = (moved + rounding + narrow * own / unit_length + vanished / unit_length) * (1 + 2.0**-16)
    lengths = (1 + own / unit_length * (1 + narrow) + vanished / unit_length) * (1 + 2.0**-16)
    whole = torch.where(whole < lengths, whole, lengths)
    whole = (
        torch.where(unit_length == 0, torch.where(own == 0, 0.0, math.inf), whole)
        .nan_to_num(nan=math.inf, posinf=math.inf)
        .float()
    )
    within = (moved <= drop) & (whole <= limit) & (whole < math.inf)
    bound, within, length = (x.view(b, h) for x in (whole, within, own.float()))
    if chosen.draws is not None:
        chosen.draws.seed.add_(1)
    return Decoded(answer.to(q.dtype).view(b, h, e), bound, within, length, chosen.found.sum(-1).int().view(b, g))


def rounding_of(q: Tensor, v: Tensor, scale: float) -> tuple[float, float, float, float, float, float]:
    """What the shapes and types say of rounding, for the kernel that sums it up.

    In turn: the scale, with which |q|·|k| makes nats; the error of a logit relative to that; the additions that a
    tile makes to a sum; the unit of the answer's type; what a weight loses in two halves; and what vanishes.
    """
    d, (s, e), kind = q.shape[-1], v.shape[-2:], v.dtype
    coarse = kind != torch.float32
    logit = gamma(d + 8, _UNIT.value) + 8 * _UNIT.value
    # Tensor cores add up eight or more products at a time, of both halves; then there is rescaling.
    per_tile = 2 * TILE / 8 + 4.0 if coarse else TILE + 4.0
    halves = unit(kind) ** 2 * 1.1 if coarse else 0.0
    narrow = unit(q.dtype) if coarse else 0.0
    vanished = math.sqrt(e) * (tiny(q.dtype) + 4 * s * tiny(torch.float32))
    return abs(scale), logit, per_tile, narrow, halves, vanished
