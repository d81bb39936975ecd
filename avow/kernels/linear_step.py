r"""One token more: a state is read, changed and written back, and the token's rows are answered on the way.

Every linear attention ends in the same step, :math:`S_f \leftarrow c_f S_f + φ_f v^T` and :math:`out = \sum_f ρ_f S_f`,
which moves the state once through the processor and costs what that costs. A small kernel before it makes the key's
features φ, the rows' features ρ over their normalisers, and the factors c by which older sums shrink when references
rise. Whatever ran first, nothing is read after another program wrote it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from avow.kernels.chunking import Sums, blank, divided, padded
from avow.kernels.tile_ops import LOWEST, TINY, Shape, filled

_LOG2E = tl.constexpr(math.log2(math.e))
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
# Columns of a state that a program holds at a time, where it has at most 64 features and where it has more of them; and
# features at a time.
_FEW, _MANY, _FEATURES = 32, 64, 256
# Heads whose features a program makes, and how many numbers of directions it holds at a time.
_HEADS, _HELD = 16, 2**14


class _Prepared(NamedTuple):
    """Features of the key, of its rows over their normalisers, and what older sums shrink by."""

    key: Float32[Tensor, "bg m"]
    rows: Float32[Tensor, "bh m"]
    shrink: Float32[Tensor, "bg m"]


@triton.jit
def _projected(x, head, heads, directions, feature, S: tl.constexpr):
    """Products of some heads' rows with all directions, and the rows' squared lengths."""
    products, square = filled(0.0, S.C, S.MB), filled(0.0, S.C)
    for start in range(0, S.D, S.DP):
        entry = start + tl.arange(0, S.DP)
        there = (head < heads)[:, None] & (entry < S.D)[None, :]
        row = tl.load(x + head[:, None] * S.D + entry[None, :], mask=there, other=0.0).to(tl.float32)
        inside = (entry < S.D)[:, None] & (feature < S.M)[None, :]
        along = tl.load(directions + feature[None, :] * S.D + entry[:, None], mask=inside, other=0.0)
        products = tl.dot(row, along, products, input_precision=S.PRECISION)
        square += tl.sum(row * row, 1)
    return products, square


@triton.jit(do_not_specialize=["heads"])
def _random(q, k, directions, state, token, factor, key_factor, half, heads, S: tl.constexpr):
    """Random features of C heads, each relative to one reference for all of them; to base e, as states are."""
    head = tl.program_id(0).to(tl.int64) * S.C + tl.arange(0, S.C)
    feature = tl.arange(0, S.MB)
    inside = (head < heads)[:, None] & (feature < S.M)[None, :]
    place = head[:, None] * S.M + feature[None, :]
    log, square = _projected(k, head, heads, directions, feature, S)
    real = (feature < S.M)[None, :]
    log = tl.where(real, log * key_factor - half * square[:, None], LOWEST)
    before = tl.load(state.tops + head, mask=head < heads, other=0.0)
    higher = tl.maximum(before, tl.max(log, 1))
    own, less = tl.exp2((log - higher[:, None]) * _LOG2E), tl.exp2((before - higher) * _LOG2E)
    grown = tl.load(state.totals + place, mask=inside, other=0.0) * less[:, None] + own
    tl.store(state.totals + place, grown, mask=inside)
    tl.store(state.tops + head, higher, mask=head < heads)
    tl.store(token.key + place, own, mask=inside)
    tl.store(token.shrink + place, less[:, None] + filled(0.0, S.C, S.MB), mask=inside)
    for sibling in range(S.R):
        own_log, _ = _projected(q + sibling * S.D, head * S.R, heads * S.R, directions, feature, S)
        own_log = tl.where(real, own_log * factor, LOWEST)
        row = tl.exp2((own_log - tl.max(own_log, 1)[:, None]) * _LOG2E)
        divisor = tl.sum(row * grown, 1)
        row = row / tl.where(divisor < TINY, 1.0, divisor)[:, None]
        tl.store(token.rows + (head[:, None] * S.R + sibling) * S.M + feature[None, :], row, mask=inside)


@triton.jit
def _cooled(x, temperature):
    """Numbers over the temperature; what leaves the type stops at its end, as in the whole pass."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / temperature, -_MOST), _MOST)


@triton.jit
def _softmaxes(q, k, state, token, temperature, S: tl.constexpr):
    """Separable attention's columns, each with a reference of its own, and its rows."""
    head, feature = tl.program_id(0).to(tl.int64), tl.arange(0, S.MB)
    inside = feature < S.M
    place = head * S.M + feature
    log = _cooled(tl.load(k + place, mask=inside, other=0.0), temperature)
    before = tl.load(state.tops + place, mask=inside, other=0.0)
    higher = tl.maximum(before, log)
    own, less = tl.exp2((log - higher) * _LOG2E), tl.exp2((before - higher) * _LOG2E)
    grown = tl.load(state.totals + place, mask=inside, other=0.0) * less + own
    tl.store(state.totals + place, grown, mask=inside)
    tl.store(state.tops + place, higher, mask=inside)
    tl.store(token.key + place, own, mask=inside)
    tl.store(token.shrink + place, less, mask=inside)
    for sibling in range(S.R):
        there = (head * S.R + sibling) * S.M + feature
        y = _cooled(tl.load(q + there, mask=inside, other=0.0), temperature)
        y = tl.where(inside, y, -float("inf"))
        row = tl.exp2((y - tl.max(y, 0)) * _LOG2E)
        tl.store(token.rows + there, row / tl.sum(row, 0) / grown, mask=inside)


@triton.jit
def _stepped(state, v, token, out, R: tl.constexpr, RP: tl.constexpr, S: tl.constexpr):
    """Some columns of a head's state, changed in place, and what its rows collect from them."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, sibling = block * S.EB + tl.arange(0, S.EB), tl.arange(0, RP)
    value = tl.load(v + head * S.E + column, mask=column < S.E, other=0.0).to(tl.float32)
    answers = filled(0.0, RP, S.EB)
    for start in range(0, S.M, S.MB):
        feature = start + tl.arange(0, S.MB)
        inside = (feature < S.M)[:, None] & (column < S.E)[None, :]
        place = state + head * (S.M * S.E) + feature[:, None] * S.E + column[None, :]
        sums = tl.load(place, mask=inside, other=0.0)
        own = tl.load(token.key + head * S.M + feature, mask=feature < S.M, other=0.0)
        less = tl.load(token.shrink + head * S.M + feature, mask=feature < S.M, other=0.0)
        sums = sums * less[:, None] + own[:, None] * value[None, :]
        tl.store(place, sums, mask=inside)
        for r in tl.static_range(R):
            row = tl.load(token.rows + (head * R + r) * S.M + feature, mask=feature < S.M, other=0.0)
            part = tl.sum(sums * row[:, None], 0)
            answers += tl.where((sibling == r)[:, None], part[None, :], 0.0)
    goal = out + (head * R + sibling)[:, None] * S.E + column[None, :]
    tl.store(goal, answers.to(out.dtype.element_ty), mask=(sibling < R)[:, None] & (column < S.E)[None, :])


def _room(q: Tensor, groups: int, m: int) -> _Prepared:
    b, h = q.shape[:2]
    return _Prepared(*blank(q, (b * groups, m), (b * h, m), (b * groups, m)))


def _step(q: Tensor, v: Tensor, sums: Tensor, token: _Prepared) -> Tensor:
    (b, h), (g, e), m = q.shape[:2], v.shape[1:], sums.shape[2]
    out = q.new_empty(b, h, e)
    columns = min(_FEW if m <= 64 else _MANY, padded(e))
    shape = Shape(h, h // g, 0, 0, e, columns, 0, "ieee", M=m, MB=min(_FEATURES, padded(m)))
    _stepped[(b * g, divided(e, columns))](
        sums, v.contiguous(), token, out, R=h // g, RP=triton.next_power_of_2(h // g), S=shape, num_warps=4
    )
    return out


def feature_step(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b g d"],
    v: Float[Tensor, "b g e"],
    directions: Float32[Tensor, "m d"],
    state: Sums,
    scale: float | None = None,
) -> Float[Tensor, "b h e"]:
    """The answers to one token's queries by random features; the state, which must be contiguous, takes in the token.

    A state that has read nothing has tops of −inf and sums of zero.
    """
    (b, h, d), g, m = q.shape, k.shape[1], directions.shape[0]
    scale = d**-0.5 if scale is None else scale
    root, token = math.sqrt(abs(scale)), _room(q, g, m)
    held = min(padded(d), max(16, _HELD // padded(m)))
    # Numbers of 16 bits are exact in TF32, and three products of it leave of directions what float32 does.
    precision = "ieee" if q.dtype == torch.float32 else "tf32x3"
    shape = Shape(h, h // g, d, held, 0, 0, _HEADS, precision, M=m, MB=padded(m))
    inputs = q.contiguous(), k.contiguous(), directions.contiguous()
    factors = math.copysign(root, scale), root, 0.5 * abs(scale)
    _random[(divided(b * g, _HEADS),)](*inputs, state, token, *factors, b * g, S=shape, num_warps=8)
    return _step(q, v, state.sums, token)


def separable_step(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b g d"],
    v: Float[Tensor, "b g e"],
    state: Sums,
    temperature: float = 1.0,
) -> Float[Tensor, "b h e"]:
    """The same for separable attention."""
    (b, h, d), g = q.shape, k.shape[1]
    token = _room(q, g, d)
    shape = Shape(h, h // g, 0, 0, 0, 0, 0, "ieee", M=d, MB=padded(d))
    _softmaxes[(b * g,)](q.contiguous(), k.contiguous(), state, token, temperature, S=shape, num_warps=4)
    return _step(q, v, state.sums, token)
