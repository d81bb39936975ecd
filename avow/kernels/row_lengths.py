r"""The lengths of all rows of up to four tensors in one launch: every number is read once, in any layout.

Numbers are widened in registers: float64 has room for the squares of every narrower type, subnormal ones among them, so
nothing overflows or vanishes, and a length is not finite exactly if a number of its row is not. A sum of d squares in
float64, in any order, and its root are within :math:`(d + 2) u` of the truth; `slack` of float64 is twice that and more
[claim rounding-gamma].
"""

from __future__ import annotations

import math
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
def _store(x, place, inside, lengths, grown, WIDTH: tl.constexpr, PADDED: tl.constexpr, column_step, at):
    """The lengths of rows that begin at these places, written where `at` says."""
    column = tl.arange(0, PADDED)
    there = inside[:, None] & (column < WIDTH)[None, :]
    numbers = tl.load(x + place[:, None] + column.to(tl.int64)[None, :] * column_step, mask=there, other=0.0)
    wide = numbers.to(tl.float64)
    found = tl.sqrt(tl.sum(wide * wide, 1))
    # Kernels take numbers as float32: what is added may be rounded, a factor near one may not.
    tl.store(lengths + at, found + found * grown, mask=inside)


@triton.jit
def _measure(x, lengths, grown, program, WIDTH: tl.constexpr, PADDED: tl.constexpr, MANY: tl.constexpr):
    """The lengths of `MANY` rows in any layout."""
    row = (program - x.first).to(tl.int64) * MANY + tl.arange(0, MANY)
    head = row // x.length
    place = (head // x.heads) * x.batch + (head % x.heads) * x.head + (row % x.length) * x.row
    _store(x.base, place, row < x.rows, lengths, grown, WIDTH, PADDED, x.column, x.start + row)


@triton.jit
def _measure_flat(
    x, lengths, grown, program, rows, start, WIDTH: tl.constexpr, PADDED: tl.constexpr, MANY: tl.constexpr
):
    """The lengths of `MANY` rows that follow one another."""
    row = program.to(tl.int64) * MANY + tl.arange(0, MANY)
    _store(x, row * WIDTH, row < rows, lengths, grown, WIDTH, PADDED, 1, start + row)


@triton.jit(do_not_specialize=["rows_q", "rows_k", "rows_v", "rows_out"])
def _flat_row_lengths(
    q,
    k,
    v,
    out,
    lengths,
    grown_d,
    grown_e,
    rows_q,
    rows_k,
    rows_v,
    rows_out,
    D: tl.constexpr,
    DP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    MANY: tl.constexpr,
):
    program = tl.program_id(0)
    first_k = tl.cdiv(rows_q, MANY)
    first_v = first_k + tl.cdiv(rows_k, MANY)
    first_out = first_v + tl.cdiv(rows_v, MANY)
    start_k = rows_q.to(tl.int64)
    start_v = start_k + rows_k
    if program < first_k:
        _measure_flat(q, lengths, grown_d, program, rows_q, start_k - rows_q, D, DP, MANY)
    elif program < first_v:
        _measure_flat(k, lengths, grown_d, program - first_k, rows_k, start_k, D, DP, MANY)
    elif program < first_out:
        _measure_flat(v, lengths, grown_e, program - first_v, rows_v, start_v, E, EP, MANY)
    else:
        _measure_flat(out, lengths, grown_e, program - first_out, rows_out, start_v + rows_v, E, EP, MANY)


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
    tensors = [x.detach() if x.requires_grad else x for x in (q, k, v, out) if x is not None]
    d, e = q.shape[-1], v.shape[-1]
    padded = triton.next_power_of_2(d), triton.next_power_of_2(e)
    many = max(1, min(64, _TILE // max(padded)))
    rows = [math.prod(x.shape[:-1]) for x in tensors]
    lengths = torch.empty(sum(rows), dtype=torch.float64, device=q.device)
    grown = tuple(slack(width, torch.float64) / 2 for width in (d, e))
    programs = sum(-(-count // many) for count in rows)
    if not programs:
        return lengths
    sizes = d, padded[0], e, padded[1], many
    if all(x.is_contiguous() for x in tensors):
        # The usual layout: fewer arguments to launch with, and no divisions.
        given, counts = (*tensors, tensors[2])[:4], (*rows, 0)[:4]
        _flat_row_lengths[(programs,)](*given, lengths, *grown, *counts, *sizes, num_warps=4)
        return lengths
    views: list[Rows] = []
    first = start = 0
    for x, count in zip(tensors, rows, strict=True):
        _, heads, length, _ = x.shape
        batch, head, row, column = x.stride()
        views.append(Rows(x, batch, head, row, column, max(heads, 1), max(length, 1), count, first, start))
        first, start = first + -(-count // many), start + count
    _row_lengths[(programs,)](*views[:3], views[-1], lengths, *grown, *sizes, out is not None, num_warps=4)
    return lengths
