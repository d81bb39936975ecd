"""Tokens written behind the others of a cache, measured and sketched, by one kernel that waits for nothing.

How many tokens a head has is known to the device alone. A group of 64 is sketched when its last token comes, in float64
as `avow.numerics.sketch` does it: what a sketch lost is measured from the codes that are stored, so bounds hold however
these were rounded. Tokens that are not finite, values whose lengths leave float32's middle range, tokens without room
and counts beyond what was given make a head's `most` nan, and with it every bound of that head infinite from then on;
`flags` says which it was.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Float32, Float64, Int, Int32, UInt8
from torch import Tensor

from avow.kernels.chunking import padded
from avow.kernels.step_constants import StepShape
from avow.kernels.tile_ops import HeadView, at_head, chained, follow, row_contiguous, rows_at, view
from avow.numerics.sketch import GROUP

_GROUP = tl.constexpr(GROUP)
# What went wrong with a head's tokens.
NOT_FINITE, OUT_OF_RANGE, NO_ROOM, MISCOUNTED = 1, 2, 4, 8
_NOT_FINITE, _OUT_OF_RANGE, _NO_ROOM, _MISCOUNTED = (
    tl.constexpr(flag) for flag in (NOT_FINITE, OUT_OF_RANGE, NO_ROOM, MISCOUNTED)
)
# Lengths of values that are neither zero nor between these are out of range.
_SHORTEST, _LONGEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)
# Groups whose numbers are this far from the first ones' are beyond a sketch: they are always read.
_BEYOND = tl.constexpr(1e30)
# The longest value is at least this share of its bound: float64 measured it, and float32 rounded up once.
SURE = 1 - 2.0**-20
_SURE = tl.constexpr(SURE)
# Groups that one program writes after each other, if that is all there is to append.
_ALONE = 2
# Lengths that are compared at once where tokens go.
_AT_ONCE = tl.constexpr(1024)


class TokenStore(NamedTuple):
    """The buffers of a cache with room for tokens to come; heads of all sequences stand one after the other."""

    k: Float[Tensor, "bg capacity d"]
    v: Float[Tensor, "bg capacity e"]
    norms: Float32[Tensor, "bg capacity"]
    """Upper bounds on the lengths of values."""
    codes: UInt8[Tensor, "bg groups G w"]
    scale: Float[Tensor, "bg groups d"]
    zero: Float[Tensor, "bg groups d"]
    radius: Float[Tensor, "bg groups G"]
    reach: Float32[Tensor, "bg groups"]
    metric: Float32[Tensor, "bg d"]
    size: Float64[Tensor, "bg"]
    """A power of two for each head, by which its keys are divided before they are sketched; 0 before the first."""
    longest: Float64[Tensor, "bg"]
    """At least the length of any key."""
    extremes: Float64[Tensor, "bg 2"]
    """A lower bound on the shortest, and an upper bound on the longest value."""
    most: Float32[Tensor, "bg"]
    """At most the length of the longest value, and hardly less; nan once something went wrong."""
    used: Int32[Tensor, "bg"]
    flags: Int32[Tensor, "bg"]
    owner: Int32[Tensor, "bg places"] | None = None
    """Whose rows are among the hot ones (`hot_rows`), if any are kept: those of tokens that come are not."""


class _Found(NamedTuple):
    """What the programs of a head found, for another to put together."""

    longest: Float64[Tensor, "bg programs"]
    extremes: Float64[Tensor, "bg programs 2"]
    flags: Int32[Tensor, "bg programs"]


class Append(NamedTuple):
    """What the kernel is compiled for: G key heads to a sequence, of widths D and E, in tiles of ROWS rows."""

    G: int
    D: int
    DP: int
    WP: int
    E: int
    EP: int
    ROWS: int
    ALONE: bool
    SKETCHED: bool


@triton.jit
def _squares(x):
    """Sums over the rows of squares, exact but for float64's own rounding: float32 has no number too small for it."""
    wide = x.to(tl.float64)
    return tl.sum(wide * wide, 1)


@triton.jit
def _up32(x):
    """A number of float64 that is at least 0, rounded up to float32."""
    near = x.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True) + tl.where(near.to(tl.float64) < x, 1, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _up16(x):
    """Numbers of at least 0 in bfloat16, none of them smaller than it was."""
    # Rounding to 8 bits loses at most 2^-9 of a number; below the normal range, 2^-134.
    return tl.where(x > 0, x * (1 + 2.0**-8) + 2.0**-133, 0.0).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _down16(x):
    """Numbers in bfloat16, none of them larger than it was in float32."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits + 0xFFFF, bits) & -65536
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _half(keys, metric, size, channel, inside, D: tl.constexpr):
    """Codes of some channels of a group, and what these add to the squares of radii, of the reach and of its bound."""
    place = tl.arange(0, _GROUP)[:, None] * D + channel[None, :]
    rows = tl.load(keys + place, mask=inside[None, :], other=0.0).to(tl.float64)
    # Divisions of float64 are slow; by a power of two, a product is as exact.
    whole = rows * (1.0 / size)
    low = _down16(tl.min(whole, 0))
    origin = low.to(tl.float32).to(tl.float64)
    # Rounded up, so that the highest number has a code.
    step = _up16(tl.maximum(tl.max(whole, 0) - origin, 0.0) / 15)
    size_of_step = step.to(tl.float32).to(tl.float64)
    steps = 1.0 / tl.where(size_of_step > 0, size_of_step, 1.0)
    codes = tl.floor((whole - origin[None, :]) * steps[None, :] + 0.5)
    codes = tl.minimum(tl.maximum(codes, 0.0), tl.where(size_of_step > 0, 15.0, 0.0)[None, :])
    lost = whole - (origin[None, :] + size_of_step[None, :] * codes)
    weight = 1.0 / tl.load(metric + channel, mask=inside, other=1.0).to(tl.float64)
    far = tl.where(inside, tl.abs(origin) + 15 * size_of_step, 0.0)
    radius = tl.sum(tl.where(inside[None, :], lost * lost * weight[None, :], 0.0), 1)
    return codes.to(tl.int32), low, step, radius, tl.sum(far * far, 0), tl.sum(far * far * weight, 0)


@triton.jit
def _sketch(store, head, group, capacity, S: tl.constexpr):
    """Sketches a group whose tokens have all been written."""
    W: tl.constexpr = S.D // 2
    groups = capacity // _GROUP
    byte, token, channel = tl.arange(0, S.WP), tl.arange(0, _GROUP), tl.arange(0, S.DP)
    base = store.k + (head * capacity + group * _GROUP) * S.D
    size = tl.load(store.size + head)
    if size == 0 and not S.ALONE:
        # Several programs would each say something else, and a sketch has one unit.
        size = tl.full((), 1.0, tl.float64)
        tl.store(store.size + head, size)
    if size == 0:
        # The first group of a head says how large its keys are; nothing but zeros says nothing.
        rows = tl.load(base + token[:, None] * S.D + channel[None, :], mask=(channel < S.D)[None, :], other=0.0)
        largest = tl.max(tl.max(tl.abs(rows.to(tl.float32)), 1), 0)
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) + 1
        exponent = tl.where(largest > 0, tl.minimum(tl.maximum(exponent, 1), 253), 127)
        size = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(store.size + head, size)
    inside = byte < W
    metric = store.metric + head * S.D
    codes, zero, scale, radius, reach, least = _half(base, metric, size, byte, inside, S.D)
    upper, upper_zero, upper_scale, more, further, beyond = _half(base, metric, size, byte + W, inside, S.D)
    reach = tl.sqrt(reach + further)
    # What float64 itself rounds in what was lost is relative to what was subtracted.
    radius = tl.sqrt(radius + more) * (1 + 2.0**-40) + 2.0**-48 * tl.sqrt(least + beyond)
    # nan is not below anything.
    usual = reach <= _BEYOND
    place = head * groups + group
    words = (codes | (upper << 4)).to(tl.uint8)
    tl.store(store.codes + (place * _GROUP + token)[:, None] * W + byte[None, :], words, mask=inside[None, :])
    nothing = tl.zeros_like(zero)
    at = place * S.D + byte
    tl.store(store.zero + at, tl.where(usual, zero, nothing), mask=inside)
    tl.store(store.zero + at + W, tl.where(usual, upper_zero, nothing), mask=inside)
    tl.store(store.scale + at, tl.where(usual, scale, nothing), mask=inside)
    tl.store(store.scale + at + W, tl.where(usual, upper_scale, nothing), mask=inside)
    tl.store(store.radius + place * _GROUP + token, _up16(tl.where(usual, radius, 0.0)))
    tl.store(store.reach + place, tl.where(usual, (reach * (1 + 2.0**-20)).to(tl.float32), float("inf")))


@triton.jit
def _count_of(counts, head, given, G: tl.constexpr):
    """How many of the given tokens a head's sequence takes, and the flag of a count that is not one of those."""
    count, flag = given, tl.full((), 0, tl.int32)
    if counts is not None:
        wanted = tl.load(counts + head // G)
        flag = tl.where((wanted < 0) | (wanted > given), _MISCOUNTED, flag)
        count = tl.minimum(tl.maximum(wanted, 0), given).to(tl.int32)
    return count, flag


@triton.jit
def _held(store, head):
    """What is known of the tokens that a head has: asked for at first, so that nothing waits for it in the end."""
    extremes = store.extremes + head * 2
    lengths = tl.load(store.longest + head), tl.load(extremes), tl.load(extremes + 1)
    return tl.load(store.used + head), tl.load(store.flags + head), lengths


@triton.jit
def _note(store, head, held, longest, shortest_value, longest_value, flags, count, capacity):
    """Takes note of a head's new tokens."""
    before, known, lengths = held
    tl.store(store.longest + head, tl.maximum(lengths[0], longest))
    shortest_value, longest_value = tl.minimum(lengths[1], shortest_value), tl.maximum(lengths[2], longest_value)
    tl.store(store.extremes + head * 2, shortest_value)
    tl.store(store.extremes + head * 2 + 1, longest_value)
    flags = flags | known | tl.where(before + count > capacity, _NO_ROOM, 0)
    tl.store(store.flags + head, flags)
    tl.store(store.most + head, tl.where(flags == 0, (longest_value * _SURE).to(tl.float32), float("nan")))
    tl.store(store.used + head, tl.minimum(before + count, capacity))


@triton.jit
def _given(k, v, k_row, v_row, row, there, S: tl.constexpr):
    """Some rows of the given keys and values."""
    channel, column = tl.arange(0, S.DP), tl.arange(0, S.EP)
    mask = there[:, None]
    xs = tl.load(k + row[:, None] * k_row + channel[None, :], mask=mask & (channel < S.D)[None, :], other=0.0)
    zs = tl.load(v + row[:, None] * v_row + column[None, :], mask=mask & (column < S.E)[None, :], other=0.0)
    return xs, zs


@triton.jit(do_not_specialize=["count", "capacity"])
def _append(k, v, counts, store, found, owner, k_row, v_row, count, capacity, S: tl.constexpr, EARLY: tl.constexpr):
    """Writes, measures and sketches the tokens of some groups of a head."""
    follow(EARLY)
    head, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    held = _held(store, head)
    before = held[0]
    count, flags = _count_of(counts, head, count, S.G)
    after = tl.minimum(before + count, capacity)
    k = rows_at(k, head, 0, 0, S.G)
    v = rows_at(v, head, 0, 0, S.G)
    row, channel, column = tl.arange(0, S.ROWS), tl.arange(0, S.DP), tl.arange(0, S.EP)
    longest = tl.full((), 0.0, tl.float64)
    shortest_value, longest_value = tl.full((), float("inf"), tl.float64), tl.full((), 0.0, tl.float64)
    first = before // _GROUP
    last = tl.cdiv(after, _GROUP)
    if S.ROWS == 1:
        # A single token is asked for before it is known where it belongs.
        xs, zs = _given(k, v, k_row, v_row, row.to(tl.int64), row < count, S)
    for group in range(first + program, last, tl.num_programs(1)):
        place = group * _GROUP + row
        if S.ROWS == 1:
            place = before + row
        new = (place >= before) & (place < after)
        if S.ROWS > 1:
            xs, zs = _given(k, v, k_row, v_row, (place - before).to(tl.int64), new, S)
        spot = head * capacity + place
        tl.store(store.k + spot[:, None] * S.D + channel[None, :], xs, mask=new[:, None] & (channel < S.D)[None, :])
        tl.store(store.v + spot[:, None] * S.E + column[None, :], zs, mask=new[:, None] & (column < S.E)[None, :])
        if owner is not None:
            # Other tokens may have had these numbers, and their rows be among the hot ones.
            tl.store(at_head(owner, head) + place % owner.stride, tl.full((S.ROWS,), -1, tl.int32), mask=new)
        key_norms = tl.sqrt(_squares(xs)) * (1 + 2.0**-40)
        exact = tl.sqrt(_squares(zs)) * (1 + 2.0**-40)
        # Neither nan nor inf is below anything.
        sound = (key_norms < float("inf")) & (exact < float("inf"))
        usual = (exact == 0) | ((exact >= _SHORTEST) & (exact <= _LONGEST))
        flags = flags | tl.max(tl.where(new, tl.where(sound, tl.where(usual, 0, _OUT_OF_RANGE), _NOT_FINITE), 0), 0)
        norms = _up32(tl.where(new & sound & usual, exact, 0.0))
        tl.store(store.norms + spot, norms, mask=new)
        wide = norms.to(tl.float64)
        longest = tl.maximum(longest, tl.max(tl.where(new & sound, key_norms, 0.0), 0))
        longest_value = tl.maximum(longest_value, tl.max(tl.where(new, wide, 0.0), 0))
        shortest_value = tl.minimum(shortest_value, tl.min(tl.where(new, wide, float("inf")), 0))
        if S.SKETCHED:
            # All threads have written before one of them reads.
            tl.debug_barrier()
            if group * _GROUP + _GROUP <= after:
                _sketch(store, head, tl.cast(group, tl.int64), capacity, S)
    if S.ALONE:
        _note(store, head, held, longest, shortest_value, longest_value, flags, count, capacity)
    else:
        at = head * tl.num_programs(1) + program
        tl.store(found.longest + at, longest)
        tl.store(found.extremes + at * 2, shortest_value)
        tl.store(found.extremes + at * 2 + 1, longest_value)
        tl.store(found.flags + at, flags)


@triton.jit(do_not_specialize=["count", "capacity", "programs"])
def _noted(
    counts, store, found, count, capacity, programs, G: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr
):
    """Puts together what all programs of a head found."""
    follow(EARLY)
    head, program = tl.program_id(0).to(tl.int64), tl.arange(0, PROGRAMS)
    held = _held(store, head)
    count, miscounted = _count_of(counts, head, count, G)
    at, there = head * programs + program, program < programs
    longest = tl.max(tl.load(found.longest + at, mask=there, other=0.0), 0)
    shortest_value = tl.min(tl.load(found.extremes + at * 2, mask=there, other=float("inf")), 0)
    longest_value = tl.max(tl.load(found.extremes + at * 2 + 1, mask=there, other=0.0), 0)
    flags = tl.load(found.flags + at, mask=there, other=0)
    flags = tl.max(flags & _NOT_FINITE, 0) | tl.max(flags & _OUT_OF_RANGE, 0) | miscounted
    _note(store, head, held, longest, shortest_value, longest_value, flags, count, capacity)


def append(
    store: TokenStore,
    k: Float[Tensor, "b g l d"],
    v: Float[Tensor, "b g l e"],
    sketched: bool = True,
    counts: Int[Tensor, "b"] | None = None,
) -> None:
    """Puts tokens behind the others, of each sequence the first `counts`, or all; with sketches of whole groups.

    What stands behind the first `counts` is not read.
    """
    (b, g, count, d), e, capacity = k.shape, v.shape[3], store.k.shape[1]
    groups = -(-count // GROUP) + 1
    alone = groups <= _ALONE
    programs = 1 if alone else min(groups, 1024)
    shape = Append(g, d, padded(d), padded(d // 2), e, padded(e), 1 if count == 1 else GROUP, alone, sketched)
    shapes: tuple[tuple[int, ...], ...] = ((b * g, programs), (b * g, programs, 2))
    found = None
    if not alone:
        longest, extremes = (store.longest.new_empty(one) for one in shapes)
        found = _Found(longest, extremes, store.flags.new_empty(shapes[0]))
    k, v = row_contiguous(k, v)
    owner = None if store.owner is None else HeadView(store.owner, store.owner.shape[1])
    inputs = view(k), view(v), counts, store, found, owner, k.stride(2), v.stride(2), count, capacity
    _append[(b * g, programs)](*inputs, S=shape, num_warps=8, **chained(k.device))
    if found is not None:
        arguments, more = (counts, store, found, count, capacity, programs), triton.next_power_of_2(programs)
        _noted[(b * g,)](*arguments, G=g, PROGRAMS=more, num_warps=4, **chained(k.device))


@triton.jit(do_not_specialize=["capacity"])
def _cropped(store, lengths, capacity, G: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr):
    """Has a head keep its first tokens; lengths are measured again only if one of those that go was an extreme."""
    follow(EARLY)
    head, channel = tl.program_id(0).to(tl.int64), tl.arange(0, S.DP)
    used = tl.load(store.used + head)
    kept = tl.minimum(tl.maximum(tl.load(lengths + head // G), 0), used).to(tl.int32)
    if kept == used:
        return
    norms, place = store.norms + head * capacity, tl.arange(0, _AT_ONCE)
    shortest, longest = tl.load(store.extremes + head * 2), tl.load(store.extremes + head * 2 + 1)
    least, most = tl.full((), float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(kept, used, _AT_ONCE):
        gone = begin + place < used
        least = tl.minimum(least, tl.min(tl.load(norms + begin + place, mask=gone, other=float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.load(norms + begin + place, mask=gone, other=0.0), 0))
    if (least.to(tl.float64) <= shortest) | (most.to(tl.float64) >= longest):
        least, most = tl.full((), float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
        for begin in range(0, kept, _AT_ONCE):
            left = begin + place < kept
            least = tl.minimum(least, tl.min(tl.load(norms + begin + place, mask=left, other=float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.load(norms + begin + place, mask=left, other=0.0), 0))
        shortest, longest = least.to(tl.float64), most.to(tl.float64)
        tl.store(store.extremes + head * 2, shortest)
        tl.store(store.extremes + head * 2 + 1, longest)
    flags = tl.where(kept == 0, 0, tl.load(store.flags + head))
    tl.store(store.flags + head, flags)
    tl.store(store.most + head, tl.where(flags == 0, (longest * _SURE).to(tl.float32), float("nan")))
    tl.store(store.used + head, kept)
    if kept == 0:
        # Longer keys than those that are left bound these, too.
        tl.store(store.longest + head, 0.0)
    if kept < _GROUP:
        # Without a whole group there is no sketch, and the next first group says how large keys are.
        tl.store(store.size + head, 0.0)
        tl.store(store.metric + head * S.D + channel, tl.full((S.DP,), 1.0, tl.float32), mask=channel < S.D)


def crop(store: TokenStore, lengths: Int[Tensor, "b"]) -> None:
    """Has each sequence keep at most its first `lengths` tokens; one that keeps none begins again, without flags."""
    (heads, capacity), d = store.norms.shape, store.metric.shape[1]
    inputs = store, lengths.contiguous(), capacity, heads // len(lengths), StepShape(1, D=d, DP=padded(d))
    _cropped[(heads,)](*inputs, num_warps=4, **chained(store.used.device))
