r"""The answer from parts of a list, and the proof of how far other tokens and all rounding may have moved it.

With H the tokens read, T the others and ν > 0 any length,

.. math:: \|o^* - out\| \le \frac{\sum_T w_j (\|v_j\| + \|out\|)}{Z_H}
          \le \frac{\sum_T w_j (\|v_j\| + ν)}{Z_H} \max\Bigl(1, \frac{\|out\|}{ν}\Bigr)   [claim tail-mass-output]

so that one sum over T, taken before `out` was known, is enough. Where tokens were drawn, `avow.kernels.sample_bounds`
says how far the others may have moved the answer.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from avow.kernels.sample_bounds import FUZZY, NONE, missed
from avow.kernels.work_partition import TILE
from avow.numerics.rounding import gamma, tiny, unit

_TILE = tl.constexpr(TILE)
# Answers are expected to be at most this much longer than the last ones, whose lengths are forgotten slowly.
_LONGER, _FADING = tl.constexpr(1.1), tl.constexpr(0.9)
# The unit of sums in float32: tensor cores may truncate where IEEE rounds.
UNIT = tl.constexpr(2.0**-23)


@triton.jit
def _apart(top, high):
    """A logarithm above another, at least: the difference is rounded, and its parts may be large."""
    return top - high + (tl.abs(top) + tl.abs(high) + 1) * 2.0**-21


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
    nu,
    most,
    out,
    report,
    rows,
    scale,
    logit_error,
    per_tile,
    narrow,
    halves,
    vanished,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST: tl.constexpr,
    within=None,
    drop=None,
    limit=None,
    tails=None,
    widest=None,
    spans=None,
    SPANS: tl.constexpr = 1,
    rims=None,
    light=None,
    heavy=None,
    mean_log=None,
    variance_log=None,
    log=None,
):
    """A row's answer from the slots of its head, and its bound.

    What was not read has tails, or rims where tokens were drawn; without both, everything was. Whether the row is
    `within` what was allowed is said where that is asked.
    """
    DRAWN: tl.constexpr = rims is not None
    CUT: tl.constexpr = tails is not None
    head = row // R
    column, channel = tl.arange(0, EP), tl.arange(0, DP)
    # What is needed in the end is asked for now, so that nothing waits for it then.
    query = tl.load(q + row * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    unit, wide = tl.load(most + head), tl.load(nu + head)
    if DRAWN:
        rim, fine = tl.load(rims + row * 2), tl.load(rims + row * 2 + 1)
    elif CUT:
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
    delta = scale * asked * longest * logit_error + (tiles + 2) * 2.0**-20 + 900 * UNIT
    if DRAWN:
        # The logarithm of odds and lengths, and that of the odds beside a logit.
        delta += 2.0**-15
    depth = (tiles * per_tile + (beyond - first).to(tl.float32) + 2 * _TILE + 16) * UNIT
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
    elif CUT:
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
    tl.store(report + row, whole)
    tl.store(report + rows + row, own)
    tl.store(report + 2 * rows + row, unit)
    # What the next answers are expected not to exceed: a guess, which only decides what is read.
    old = tl.load(report + 3 * rows + row)
    tl.store(report + 3 * rows + row, tl.maximum(own * _LONGER, tl.where(old < float("inf"), old * _FADING, 0.0)))
    if within is not None:
        tl.store(within + row, ((moved <= drop) & (whole <= limit) & (whole < float("inf"))).to(tl.int8))


def rounding_of(q: Tensor, v: Tensor, scale: float) -> tuple[float, float, float, float, float, float]:
    """What the shapes and types say of rounding, for the kernel that sums it up.

    In turn: the scale, with which |q|·|k| makes nats; the error of a logit relative to that; the additions that a
    tile makes to a sum; the unit of the answer's type; what a weight loses in two halves; and what vanishes.
    """
    d, (s, e), kind = q.shape[-1], v.shape[-2:], v.dtype
    coarse = kind != torch.float32
    logit = gamma(d + 8, UNIT.value) + 8 * UNIT.value
    # Tensor cores add up eight or more products at a time, of both halves; then there is rescaling.
    per_tile = 2 * TILE / 8 + 4.0 if coarse else TILE + 4.0
    halves = unit(kind) ** 2 * 1.1 if coarse else 0.0
    narrow = unit(q.dtype) if coarse else 0.0
    vanished = math.sqrt(e) * (tiny(q.dtype) + 4 * s * tiny(torch.float32))
    return abs(scale), logit, per_tile, narrow, halves, vanished
