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

import triton
import triton.language as tl
from jaxtyping import Float32, Int64
from torch import Tensor

from avow.kernels import choice
from avow.kernels.choice import PLACES, Chosen, Draws, appended, span_to_list
from avow.kernels.planning import Goal, rims_of
from avow.kernels.sample_bounds import NONE, Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.tile_ops import chained, filled, follow
from avow.numerics.sketch import GROUP

_GROUP, _PLACES = tl.constexpr(GROUP), tl.constexpr(PLACES)
# Odds are not below 2^-12.8: of a million tokens that weigh nothing, 144 are drawn.
_RAREST = tl.constexpr(103)
# Draws have this many bits, so that all odds are whole numbers of them.
_BITS = 16
# Steps between a rim and the largest term of a group, at most: more makes no difference, and float16 can hold it.
_FAR = tl.constexpr(900)
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
def _block(block, own, listed, count, keys, start, c, s, room, WHOLE: tl.constexpr, S: tl.constexpr):
    """Lists what is drawn from a block of tokens, with `WHOLE` one in which all have a sketch; how long the list is."""
    R: tl.constexpr = S.R
    TURN: tl.constexpr = S.TURN
    offset, top, rims = own
    token = tl.arange(0, _GROUP)
    group = start + block * (S.BLOCK // _GROUP) + tl.arange(0, S.BLOCK // _GROUP)
    place = group[:, None] * _GROUP + token[None, :]
    # By how many steps a token is below the rim that it is nearest to; what has no sketch is always read.
    rare = tl.full((S.BLOCK // _GROUP, _GROUP), _RAREST, tl.float16)
    if not WHOLE:
        rare = tl.where((group < c)[:, None], rare, tl.zeros_like(rare))
    for turn in range(0, R, TURN):
        for nth in tl.static_range(TURN):
            sibling = turn + nth
            # A whole number of steps, but where everything is read: then it is far below all terms.
            rim = (tl.load(rims + sibling * 2) * 8).to(tl.int32)
            at = offset + sibling * room * _GROUP + place
            if WHOLE:
                peak = tl.load(top + group * R + sibling)
                short = tl.load(at)
            else:
                peak = tl.load(top + group * R + sibling, mask=group < c, other=0)
                short = tl.load(at, mask=(group < c)[:, None], other=0)
            down = tl.minimum(tl.maximum(rim - peak, -_FAR), _FAR).to(tl.float16)
            rare = _rarer(short, down[:, None] + tl.zeros_like(rare), rare, S.FAST)
    # Whole numbers above 1,024 are the lowest bits of a float16.
    rare = (tl.maximum(rare, tl.zeros_like(rare)) + 1024).to(tl.float16)
    rare = rare.to(tl.int16, bitcast=True).to(tl.int32) & 1023
    odds = ((127 << 23) - rare * 2**20).to(tl.float32, bitcast=True)
    # Four tokens share 64 bits, 16 for each: as the lowest of a float32, they count from 2^23 on.
    four = (group[:, None] * (_GROUP // 4) + tl.arange(0, _GROUP // 4)[None, :]).to(tl.uint32)
    x, y = _stirred(four, keys[1], keys[0])
    pair = tl.reshape(tl.join(x, y), (S.BLOCK // _GROUP, _GROUP // 2))
    draw = tl.reshape(tl.join(pair & 0xFFFF, pair >> 16), (S.BLOCK // _GROUP, _GROUP)) | 0x4B000000
    wanted = draw.to(tl.float32, bitcast=True) < odds * 2.0**16 + 2.0**23
    if not WHOLE:
        wanted = wanted & (place < s)
    return appended(listed, count, place + (rare << _PLACES), wanted.to(tl.int32), S.BLOCK)


@triton.jit(do_not_specialize=["room", "spans", "span", "programs"])
def _drawn(terms, most, chosen, goal, room, spans, span, programs, S: tl.constexpr, EARLY: tl.constexpr):
    """Lists which tokens of some blocks, at most `span`, are drawn, and by which odds."""
    follow(EARLY)
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, s, begin, end, whole = span_to_list(terms, chosen, head, part, spans, S.BLOCK)
    row = tl.arange(0, S.RP)
    own_rims = chosen.draws.rims + (head * S.R + row) * 2
    if whole:
        # Far below all terms: nothing is left to chance.
        tl.store(own_rims, filled(2 * NONE, S.RP), mask=row < S.R)
        tl.store(own_rims + 1, filled(1.0, S.RP), mask=row < S.R)
        return
    start, c = start // _GROUP, s // _GROUP
    # Every program finds the same rims itself, which is faster than reading them.
    rim, fine = rims_of(terms, most, head, c - start, goal, chosen.draws.logs, programs, S)
    tl.store(own_rims, rim, mask=row < S.R)
    tl.store(own_rims + 1, fine, mask=row < S.R)
    # All threads have written before one of them reads.
    tl.debug_barrier()
    keys = _keys(chosen.draws.seed, head)
    count = 0
    offset, top = terms.offset + head * S.R * room * _GROUP, terms.top + head * room * S.R
    own = offset, top, chosen.draws.rims + head * S.R * 2
    listed = chosen.listed + (head * spans + part) * span * S.BLOCK
    sketched = tl.minimum(tl.maximum((c - start) * _GROUP // S.BLOCK, begin), end)
    for block in range(begin, sketched):
        count = _block(block, own, listed, count, keys, start, c, s, room, True, S)
    for block in range(sketched, end):
        count = _block(block, own, listed, count, keys, start, c, s, room, False, S)
    tl.store(chosen.found + head * spans + part, count)


def drawn(
    terms: Terms, most: Float32[Tensor, "b g"], aim: Goal, logs: Logs, seed: Int64[Tensor, "1"], capacity: int
) -> Chosen:
    """Tokens drawn by odds that are planned so that the answer strays by about what is aimed at."""
    heads, room, r = terms.top.shape
    spans, span = choice.spans_of(heads, capacity)
    draws = Draws(terms.nu.new_empty(heads * r, 2), terms.nu, terms.lengths, logs, seed)
    chosen = choice.blank_lists(terms, spans, span, draws)
    inputs = terms, most, chosen, aim, room, spans, span, terms.peaks.shape[1]
    shape = choice.choosing_shape(terms)
    _drawn[(heads, spans)](*inputs, S=shape, num_warps=4, maxnreg=choice.REGISTERS, **chained(most.device))
    return chosen
