"""Separable attention's gradients, launched: programs hold as many features and columns as fit into registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from avow.kernels import chunking
from avow.kernels.chunking import Cut, padded
from avow.kernels.log_prefixes import LogSums, before_parts
from avow.kernels.separable_gradients import key_gradients, query_gradients
from avow.kernels.separable_whole import column_gradients, mixed_gradients
from avow.kernels.tile_ops import interpreted

# Chunks of keys per program where nothing is carried from one to the next.
_MANY = 8
# Rows of a chunk and warps of a program for causal rows of at most 64 channels.
_NARROW = 16, 4


class Gradients(NamedTuple):
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]


class _Block(NamedTuple):
    """Features and columns that a program holds, and which gradients it finds."""

    features: int
    columns: int
    programs: int
    keys: bool
    values: bool


def _width(x: int) -> int:
    """How wide a tile is: factors of 16 columns, once computed, are not multiplied rightly by every Triton."""
    return max(32, padded(x))


def _blocks(d: int, e: int, kind: torch.dtype, causal: bool) -> tuple[_Block, ...]:
    """One launch for dk and dv where a state fits whole; else one for features, one for columns of values."""
    # Products of float32 are three, with the factors of each in registers.
    room = 8192 if kind == torch.bfloat16 else 2048 if causal and kind == torch.float32 else 4096
    features, columns = (min(_width(x), max(32, room // _width(y))) for x, y in ((d, e), (e, d)))
    if features == _width(d):
        return (_Block(features, _width(e), 1, True, True),)
    return (
        _Block(features, _width(e), triton.cdiv(d, features), True, False),
        _Block(_width(d), columns, triton.cdiv(e, columns), False, True),
    )


def _constants(d: int, e: int, kind: torch.dtype, causal: bool) -> dict[str, Any]:
    wide = kind != torch.bfloat16
    large = max(_width(d), _width(e))
    narrow = large <= 64 and not wide
    if causal:
        # Four matrices of as many rows as a chunk has are in registers at once.
        chunk, warps = _NARROW if narrow else (16, 8)
    else:
        chunk, warps = (64, 4) if narrow else (16 if wide and large > 64 else 32, 8)
    deep = large <= 128 and kind != torch.float32 and not (wide and causal and large > 64)
    return {
        "D": d,
        "E": e,
        "C": chunk,
        "KIND": tl.float32 if wide else tl.bfloat16,
        "PRECISION": "tf32x3" if kind == torch.float32 else "tf32",
        "FAST": not interpreted(),
        "num_warps": warps,
        "num_stages": 2 if deep else 1,
    }


def whole_gradients(
    gradient: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    out: Float[Tensor, "b h n e"],
    known: LogSums,
    factor: float,
    cold: float,
) -> Gradients:
    """Gradients of rows that see every key; scores are inputs times `cold`, exponents of two times `factor`."""
    (b, h, n, d), (g, s), e = q.shape, k.shape[1:3], v.shape[3]
    constants, blocks = _constants(d, e, q.dtype, False), _blocks(d, e, q.dtype, False)
    first = blocks[0]
    totals = torch.where(known.totals > 0, known.totals, 1.0)
    means = known.sums / totals.unsqueeze(-1)
    found = Gradients(*(x.new_empty(x.shape) for x in (q, k, v)))
    parts = chunking.cut_for(n, b * h * first.programs, 2 if first.values else 1)
    sums = q.new_empty(b * h, parts.parts, d, e, dtype=torch.float32)
    mixed_gradients[(b * h, parts.parts, first.programs)](
        q,
        gradient,
        out,
        means,
        found.q,
        sums,
        *q.stride()[:3],
        *gradient.stride()[:3],
        n,
        parts.length,
        factor,
        cold,
        H=h,
        R=h // g,
        DP=_width(d),
        FB=first.features,
        EB=first.columns,
        **constants,
    )
    felt = sums.view(b, g, -1, d, e).sum(2)  # (b, g, d, e)
    # Of the factors that products are made of: where a feature is one key's alone, the two cancel.
    factors = felt.to(torch.bfloat16).float() if q.dtype == torch.bfloat16 else felt
    pulls = (factors * means).sum(-1)
    for block in blocks:
        column_gradients[(b * g, triton.cdiv(max(s, 1), constants["C"] * _MANY), block.programs)](
            k,
            v,
            totals,
            known.tops,
            felt,
            pulls,
            found.k,
            found.v,
            *k.stride()[:3],
            *v.stride()[:3],
            s,
            factor,
            cold,
            H=g,
            FB=block.features,
            EB=block.columns,
            MANY=_MANY,
            KEYS=block.keys,
            VALUES=block.values,
            **constants,
        )
    return found


def causal_gradients(
    gradient: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    out: Float[Tensor, "b h n e"],
    known: LogSums,
    parts: Cut,
    factor: float,
    cold: float,
) -> Gradients:
    """Gradients of rows that see the keys up to their own, given what lies before each part."""
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[3]
    constants, blocks = _constants(d, e, q.dtype, True), _blocks(d, e, q.dtype, True)
    first, packed = blocks[0], parts.table is not None
    found = Gradients(*(x.new_empty(x.shape) for x in (q, k, v)))
    slope = q.new_empty(b, h, n, dtype=torch.float32)
    chunks = parts.parts * (parts.length // constants["C"])
    marks, mark_tops = (q.new_empty(b * g, chunks, d, dtype=torch.float32) for _ in range(2))
    mark_pulls = q.new_empty(b * h, chunks, d, dtype=torch.float32)
    sums = q.new_empty(b * h, parts.parts, d, e, dtype=torch.float32)
    pulls = q.new_empty(b * h, parts.parts, d, dtype=torch.float32)
    lows = q.new_empty(b * g, parts.parts, d, dtype=torch.float32)
    strides = [stride for x in (q, k, v, gradient) for stride in x.stride()[:3]]
    query_gradients[(b * h, parts.parts, first.programs)](
        q,
        k,
        v,
        gradient,
        out,
        parts.table,
        *known,
        found.q,
        slope,
        marks,
        mark_tops,
        mark_pulls,
        sums,
        pulls,
        lows,
        *strides,
        n,
        parts.length,
        factor,
        cold,
        H=h,
        R=h // g,
        DP=_width(d),
        FB=first.features,
        EB=first.columns,
        PACKED=packed,
        **constants,
    )
    if h > g:
        sums, pulls = (x.unflatten(0, (b * g, -1)).sum(1) for x in (sums, pulls))
    after = before_parts(LogSums(sums, pulls, lows), parts, reverse=True)
    for block in blocks:
        key_gradients[(b * g, parts.parts, block.programs)](
            q,
            k,
            v,
            gradient,
            found.q,
            slope,
            parts.table,
            marks,
            mark_tops,
            mark_pulls,
            *after,
            found.k,
            found.v,
            *strides,
            n,
            parts.length,
            factor,
            cold,
            H=g,
            R=h // g,
            DP=_width(d),
            FB=block.features,
            EB=block.columns,
            KEYS=block.keys,
            VALUES=block.values,
            PACKED=packed,
            **constants,
        )
    return found
