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

from avow.kernels.chunking import divided, padded
from avow.kernels.feature_attention import FeatureSums
from avow.kernels.separable_attention import ColumnSums
from avow.kernels.tile_ops import LOWEST, TINY

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
def _projected(
    x, head, heads, directions, feature, D: tl.constexpr, M: tl.constexpr, DB: tl.constexpr, PRECISION: tl.constexpr
):
    """Products of some heads' rows with all directions, and the rows' squared lengths."""
    found = tl.zeros((head.shape[0], feature.shape[0]), tl.float32)
    square = tl.zeros((head.shape[0],), tl.float32)
    for start in range(0, D, DB):
        entry = start + tl.arange(0, DB)
        there = (head < heads)[:, None] & (entry < D)[None, :]
        row = tl.load(x + head[:, None] * D + entry[None, :], mask=there, other=0.0).to(tl.float32)
        inside = (entry < D)[:, None] & (feature < M)[None, :]
        along = tl.load(directions + feature[None, :] * D + entry[:, None], mask=inside, other=0.0)
        found = tl.dot(row, along, found, input_precision=PRECISION)
        square += tl.sum(row * row, 1)
    return found, square


@triton.jit(do_not_specialize=["heads"])
def _random(
    q,
    k,
    directions,
    total,
    top,
    key,
    rows,
    shrink,
    factor,
    key_factor,
    half,
    heads,
    R: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Random features of a few heads, each relative to one reference for all of them; to base e, as states are."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    feature = tl.arange(0, MP)
    inside = (head < heads)[:, None] & (feature < M)[None, :]
    place = head[:, None] * M + feature[None, :]
    log, square = _projected(k, head, heads, directions, feature, D, M, DB, PRECISION)
    real = (feature < M)[None, :]
    log = tl.where(real, log * key_factor - half * square[:, None], LOWEST)
    before = tl.load(top + head, mask=head < heads, other=0.0)
    higher = tl.maximum(before, tl.max(log, 1))
    own, less = tl.exp2((log - higher[:, None]) * _LOG2E), tl.exp2((before - higher) * _LOG2E)
    grown = tl.load(total + place, mask=inside, other=0.0) * less[:, None] + own
    tl.store(total + place, grown, mask=inside)
    tl.store(top + head, higher, mask=head < heads)
    tl.store(key + place, own, mask=inside)
    tl.store(shrink + place, less[:, None] + tl.zeros((HEADS, MP), tl.float32), mask=inside)
    for sibling in range(R):
        own_log, _ = _projected(q + sibling * D, head * R, heads * R, directions, feature, D, M, DB, PRECISION)
        own_log = tl.where(real, own_log * factor, LOWEST)
        row = tl.exp2((own_log - tl.max(own_log, 1)[:, None]) * _LOG2E)
        divisor = tl.sum(row * grown, 1)
        row = row / tl.where(divisor < TINY, 1.0, divisor)[:, None]
        tl.store(rows + (head[:, None] * R + sibling) * M + feature[None, :], row, mask=inside)


@triton.jit
def _cooled(x, temperature):
    """Numbers over the temperature; what leaves the type stops at its end, as in the whole pass."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / temperature, -_MOST), _MOST)


@triton.jit
def _softmaxes(q, k, total, top, key, rows, shrink, temperature, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr):
    """Separable attention's columns, each with a reference of its own, and its rows."""
    head, feature = tl.program_id(0).to(tl.int64), tl.arange(0, MP)
    inside = feature < M
    place = head * M + feature
    log = _cooled(tl.load(k + place, mask=inside, other=0.0), temperature)
    before = tl.load(top + place, mask=inside, other=0.0)
    higher = tl.maximum(before, log)
    own, less = tl.exp2((log - higher) * _LOG2E), tl.exp2((before - higher) * _LOG2E)
    grown = tl.load(total + place, mask=inside, other=0.0) * less + own
    tl.store(total + place, grown, mask=inside)
    tl.store(top + place, higher, mask=inside)
    tl.store(key + place, own, mask=inside)
    tl.store(shrink + place, less, mask=inside)
    for sibling in range(R):
        there = (head * R + sibling) * M + feature
        y = _cooled(tl.load(q + there, mask=inside, other=0.0), temperature)
        y = tl.where(inside, y, -float("inf"))
        row = tl.exp2((y - tl.max(y, 0)) * _LOG2E)
        tl.store(rows + there, row / tl.sum(row, 0) / grown, mask=inside)


@triton.jit
def _stepped(
    state,
    v,
    key,
    rows,
    shrink,
    out,
    R: tl.constexpr,
    RP: tl.constexpr,
    M: tl.constexpr,
    MB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
):
    """Some columns of a head's state, changed in place, and what its rows collect from them."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, sibling = block * EB + tl.arange(0, EB), tl.arange(0, RP)
    value = tl.load(v + head * E + column, mask=column < E, other=0.0).to(tl.float32)
    found = tl.zeros((RP, EB), tl.float32)
    for start in range(0, M, MB):
        feature = start + tl.arange(0, MB)
        inside = (feature < M)[:, None] & (column < E)[None, :]
        place = state + head * (M * E) + feature[:, None] * E + column[None, :]
        sums = tl.load(place, mask=inside, other=0.0)
        own = tl.load(key + head * M + feature, mask=feature < M, other=0.0)
        less = tl.load(shrink + head * M + feature, mask=feature < M, other=0.0)
        sums = sums * less[:, None] + own[:, None] * value[None, :]
        tl.store(place, sums, mask=inside)
        for r in tl.static_range(R):
            row = tl.load(rows + (head * R + r) * M + feature, mask=feature < M, other=0.0)
            part = tl.sum(sums * row[:, None], 0)
            found += tl.where((sibling == r)[:, None], part[None, :], 0.0)
    goal = out + (head * R + sibling)[:, None] * E + column[None, :]
    tl.store(goal, found.to(out.dtype.element_ty), mask=(sibling < R)[:, None] & (column < E)[None, :])


def _room(q: Tensor, groups: int, m: int) -> _Prepared:
    b, h = q.shape[:2]
    shapes = ((b * groups, m), (b * h, m), (b * groups, m))
    return _Prepared(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))


def _step(q: Tensor, v: Tensor, sums: Tensor, known: _Prepared) -> Tensor:
    (b, h), (g, e), m = q.shape[:2], v.shape[1:], sums.shape[2]
    out = q.new_empty(b, h, e)
    columns = min(_FEW if m <= 64 else _MANY, padded(e))
    _stepped[(b * g, divided(e, columns))](
        sums,
        v.contiguous(),
        *known,
        out,
        R=h // g,
        RP=triton.next_power_of_2(h // g),
        M=m,
        MB=min(_FEATURES, padded(m)),
        E=e,
        EB=columns,
        num_warps=4,
    )
    return out


def feature_step(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b g d"],
    v: Float[Tensor, "b g e"],
    directions: Float32[Tensor, "m d"],
    state: FeatureSums,
    scale: float | None = None,
) -> Float[Tensor, "b h e"]:
    """The answers to one token's queries by random features; the state, which must be contiguous, takes in the token.

    A state that has read nothing has tops of −inf and sums of zero.
    """
    (h, d), g, m = q.shape[1:], k.shape[1], directions.shape[0]
    scale = d**-0.5 if scale is None else scale
    root = math.sqrt(abs(scale))
    known, heads = _room(q, g, m), q.shape[0] * g
    _random[(divided(heads, _HEADS),)](
        q.contiguous(),
        k.contiguous(),
        directions.contiguous(),
        state.total,
        state.top,
        *known,
        math.copysign(root, scale),
        root,
        0.5 * abs(scale),
        heads,
        R=h // g,
        D=d,
        DB=min(padded(d), max(16, _HELD // padded(m))),
        M=m,
        MP=padded(m),
        HEADS=_HEADS,
        # Numbers of 16 bits are exact in TF32, and three products of it leave of directions what float32 does.
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32x3",
        num_warps=8,
    )
    return _step(q, v, state.sums, known)


def separable_step(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b g d"],
    v: Float[Tensor, "b g e"],
    state: ColumnSums,
    temperature: float = 1.0,
) -> Float[Tensor, "b h e"]:
    """The same for separable attention."""
    (h, d), g = q.shape[1:], k.shape[1]
    known = _room(q, g, d)
    _softmaxes[(q.shape[0] * g,)](
        q.contiguous(),
        k.contiguous(),
        state.total,
        state.top,
        *known,
        temperature,
        R=h // g,
        M=d,
        MP=padded(d),
        num_warps=4,
    )
    return _step(q, v, state.sums, known)
