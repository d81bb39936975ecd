r"""The lengths of all rows of up to four tensors in one launch: every number is read once, in any layout.

Numbers are widened in registers: float64 has room for the squares of every narrower type, subnormal ones among them, so
nothing overflows or vanishes, and a length is not finite exactly if a number of its row is not. A sum of d squares in
float64, in any order, and its root are within :math:`(d + 2) u` of the truth; `slack` of float64 is twice that and more
[claim rounding-gamma].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from avow.numerics.norms import slack

WIDEST = 4096
"""Rows of more numbers do not fit into a program's registers."""
_TILE = 4096


class Rows(NamedTuple):
    """A tensor (b, h, n, width) as the kernel reads it: where it is, its steps, and its sizes."""

    base: Tensor
    batch: int
    head: int
    row: int
    column: int
    heads: int
    length: int
    rows: int
    first: int  # which of all programs is its first, and where its lengths begin
    start: int


@triton.jit
def _measure(x, lengths, grown, program, WIDTH: tl.constexpr, PADDED: tl.constexpr, MANY: tl.constexpr):
    """The lengths of `MANY` rows."""
    row = (program - x.first).to(tl.int64) * MANY + tl.arange(0, MANY)
    column = tl.arange(0, PADDED)
    head, inside = row // x.length, row < x.rows
    place = (head // x.heads) * x.batch + (head % x.heads) * x.head + (row % x.length) * x.row
    there = inside[:, None] & (column < WIDTH)[None, :]
    numbers = tl.load(x.base + place[:, None] + column.to(tl.int64)[None, :] * x.column, mask=there, other=0.0)
    wide = numbers.to(tl.float64)
    found = tl.sqrt(tl.sum(wide * wide, 1))
    # Kernels take numbers as float32: what is added may be rounded, a factor near one may not.
    tl.store(lengths + x.start + row, found + found * grown, mask=inside)


@triton.jit
def _row_lengths(
    q,
    k,
    v,
    out,
    lengths,
    grown_d,
    grown_e,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    MANY: tl.constexpr,
    WITH_OUT: tl.constexpr,
):
    program = tl.program_id(0)
    if program < k.first:
        _measure(q, lengths, grown_d, program, D, DP, MANY)
    elif program < v.first:
        _measure(k, lengths, grown_d, program, D, DP, MANY)
    elif WITH_OUT:
        if program < out.first:
            _measure(v, lengths, grown_e, program, E, EP, MANY)
        else:
            _measure(out, lengths, grown_e, program, E, EP, MANY)
    else:
        _measure(v, lengths, grown_e, program, E, EP, MANY)


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel reads such tensors: float64 has no wider type, and needs its rows scaled."""
    return q.dtype != torch.float64 and max(q.shape[-1], v.shape[-1]) <= WIDEST


def row_lengths(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    out: Float[Tensor, "b h n e"] | None = None,
) -> Float[Tensor, "rows"]:
    """What `avow.numerics.norms.row_lengths` says of them, in one launch."""
    tensors = [x.detach() for x in (q, k, v, out) if x is not None]
    d, e = q.shape[-1], v.shape[-1]
    padded = triton.next_power_of_2(d), triton.next_power_of_2(e)
    many = max(1, min(64, _TILE // max(padded)))
    views: list[Rows] = []
    first = start = 0
    for x in tensors:
        _, heads, length, _ = x.shape
        batch, head, row, column = x.stride()
        rows = x.shape[0] * heads * length
        views.append(Rows(x, batch, head, row, column, max(heads, 1), max(length, 1), rows, first, start))
        first, start = first + -(-rows // many), start + rows
    lengths = torch.empty(start, dtype=torch.float64, device=q.device)
    grown = tuple(slack(width, torch.float64) / 2 for width in (d, e))
    last = views[-1]
    if first:
        _row_lengths[(first,)](
            *views[:3], last, lengths, *grown, d, padded[0], e, padded[1], many, out is not None, num_warps=4
        )
    return lengths
