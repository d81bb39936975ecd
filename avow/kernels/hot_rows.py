"""Rows of keys and values that were read lately, kept on the device for a cache whose tokens are in host memory.

Token j of a head has one place, j modulo the number of places: neighbours lie side by side, and no table has to be
searched. A row that a step reads from host memory takes its place, unless this very step reads the row that is there.
On heads of consecutive tokens that loses little to a place that is found by the time of last use, which keeps nothing
at all where a step reads more rows than there are places: the rows come in order, and each drives out the one that is
asked for first in the next step.

No two threads of a step meet in a place. A kernel of its own first marks the rows that the step will read there, with
the number of the step. Whoever then brings in a row raises the mark of its place to that number: the first one sees a
smaller number and owns the place, all others see the number itself. A row that is read was marked, so nobody owns its
place. Tokens that are appended, also in the place of others that were forgotten, empty their places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from avow.kernels.choice import PLACES, Chosen
from avow.kernels.pausing import Used, read_in_order
from avow.kernels.tile_ops import chained, follow

_BLOCK, _PLACE = tl.constexpr(1024), tl.constexpr(2**PLACES - 1)
# Bytes beside a row's own: whose it is, and the step that read it last.
_BESIDE = 4 + 8


class HotRows(NamedTuple):
    """What is kept of each key head."""

    k: Float[Tensor, "bg places d"]
    v: Float[Tensor, "bg places e"]
    owner: Int32[Tensor, "bg places"]
    """The token whose row is there; −1: none."""
    mark: Int64[Tensor, "bg places"]
    """The last step that read the row from here, or brought it in."""
    step: Int64[Tensor, "1"]
    """The number of the step that is under way, or of the last one."""
    reads: Int32[Tensor, "bg spans 2"]
    """How many rows the last step read from here, and how many from host memory, by the spans of its lists."""

    @staticmethod
    def blank(k: Float[Tensor, "bg capacity d"], v: Float[Tensor, "bg capacity e"], places: int, spans: int) -> HotRows:
        """No rows yet, of heads with such keys and values."""
        heads, device = k.shape[0], k.device
        return HotRows(
            torch.empty(heads, places, k.shape[2], dtype=k.dtype, device=device),
            torch.empty(heads, places, v.shape[2], dtype=v.dtype, device=device),
            torch.full((heads, places), -1, dtype=torch.int32, device=device),
            torch.zeros(heads, places, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(heads, spans, 2, dtype=torch.int32, device=device),
        )


def bytes_of_place(dim: int, value_dim: int, item: int) -> int:
    """What one row takes."""
    return (dim + value_dim) * item + _BESIDE


class Places(NamedTuple):
    """The same as kernels read it, with the number of places."""

    k: Tensor
    v: Tensor
    owner: Tensor
    mark: Tensor
    step: Tensor
    reads: Tensor
    places: int

    @staticmethod
    def of(hot: HotRows) -> Places:
        return Places(*hot, hot.owner.shape[1])


@triton.jit
def place_of(hot, head, token, there):
    """A head's place of each token, and whether the token's row is in it."""
    spot = head * hot.places + token % hot.places
    return spot, there & (tl.load(hot.owner + spot, mask=there, other=-1) == token)


@triton.jit
def bring_in(hot, spot, token, missed, keys, values, S: tl.constexpr):
    """Puts rows that came from host memory into their places, where the step reads no other row."""
    step = tl.load(hot.step)
    before = tl.atomic_max(hot.mark + spot, step + tl.zeros_like(spot), mask=missed, sem="relaxed")
    own = missed & (before < step)
    channel, column = tl.arange(0, S.DP), tl.arange(0, S.EP)
    tl.store(hot.k + spot[:, None] * S.D + channel[None, :], keys, mask=own[:, None] & (channel < S.D)[None, :])
    tl.store(hot.v + spot[:, None] * S.E + column[None, :], values, mask=own[:, None] & (column < S.E)[None, :])
    tl.store(hot.owner + spot, token.to(tl.int32), mask=own)


@triton.jit(do_not_specialize=["room"])
def _sought(hot, listed, found, used, room, DRAWN: tl.constexpr, EARLY: tl.constexpr):
    """Marks the rows of a span of a list that are in their places, and counts them and the others."""
    follow(EARLY)
    head, part, spans = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number = tl.load(found + head * spans + part)
    step, whole = tl.load(hot.step), read_in_order(tl.load(used.tokens + head), used)
    near = 0
    # Where all tokens are read in order, there is no list.
    for begin in range(0, tl.where(whole, 0, number), _BLOCK):
        at = begin + tl.arange(0, _BLOCK)
        token = tl.load(listed + (head * spans + part) * room + at, mask=at < number, other=0)
        if DRAWN:
            token = token & _PLACE
        spot, there = place_of(hot, head, token, at < number)
        tl.store(hot.mark + spot, step + tl.zeros_like(spot), mask=there)
        near += tl.sum(there.to(tl.int32), 0)
    reads = hot.reads + (head * spans + part) * 2
    tl.store(reads, near)
    tl.store(reads + 1, number - near)


def sought(hot: HotRows, chosen: Chosen, used: Used) -> Places:
    """The rows as the kernel reads them that attends to listed tokens, after those that it will read were marked."""
    heads, spans = chosen.found.shape
    hot.step.add_(1)
    places, room = Places.of(hot), chosen.listed.shape[1] // spans
    inputs = places, chosen.listed, chosen.found, used, room
    _sought[(heads, spans)](*inputs, DRAWN=chosen.draws is not None, num_warps=4, **chained(hot.k.device))
    return places
