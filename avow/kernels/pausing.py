"""Whether a step looks at the sketch at all: decided on the device, so that it works in a CUDA graph.

Where the sketch saved nothing, the next step is exact, and each time that it saves nothing again twice as many are.
Short heads are always read in full.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor

from avow.numerics.sketch import GROUP

_GROUP = tl.constexpr(GROUP)
# Places in a state: exact steps after the sketch saved nothing the last time, those left of them, tokens below which a
# head is read in full, and whether the sketch is used whatever it saves.
PAUSE, LEFT, SHORTEST, ALWAYS = range(4)
_PAUSE, _LEFT, _SHORTEST, _ALWAYS = (tl.constexpr(x) for x in (PAUSE, LEFT, SHORTEST, ALWAYS))
LONGEST = 64
_LONGEST = tl.constexpr(LONGEST)
# If more than this share of the tokens has to be read, the look at the sketch costs more than it saves; less for each
# row beyond some, of which every token gets a byte that is written once and read twice.
WORTHWHILE, _LESS, _ROWS = 0.6, 3 / 512, 8


class Used(NamedTuple):
    """How many tokens each key head has, the rest being room for others; and the state of a cache's steps."""

    tokens: Int32[Tensor, "bg"]
    state: Int32[Tensor, "4"] | None
    """None where all tokens are read, whatever the steps before found."""
    queries: int | None = None
    """How many of the last tokens ask, if not one alone: their rows stand side by side, and see the tokens up to each
    one's own.
    """
    window: int | None = None
    """How many tokens a row sees, its own the last, if not all."""


def blank_state(device: torch.device, shortest: int = 0, always: bool = False) -> Int32[Tensor, "4"]:
    """The state of a cache that has not decoded yet."""
    return torch.tensor([0, 0, shortest, always], dtype=torch.int32, device=device)


def worthwhile(rows: int) -> float:
    """Which share of the tokens may have to be read for the sketch to pay with so many rows to a key head."""
    return WORTHWHILE - _LESS * max(0, rows - _ROWS)


@triton.jit
def first_seen(s, used):
    """The first token of the first group that some row of s tokens sees."""
    first = s * 0
    if used.window is not None:
        first = s - used.window
        if used.queries is not None:
            first = first - (used.queries - 1)
        first = tl.maximum(first, 0) // _GROUP * _GROUP
    return first


@triton.jit
def read_in_order(s, used, GUESS: tl.constexpr = False):
    """Whether a step reads all tokens that are seen of s: while the sketch pauses, and where they are few.

    A `GUESS`, while the step before may change it, leaves nothing in a cache that is read later.
    """
    CACHE: tl.constexpr = ".cg" if GUESS else ""
    left = tl.load(used.state + _LEFT, cache_modifier=CACHE)
    always = tl.load(used.state + _ALWAYS, cache_modifier=CACHE)
    shortest = tl.load(used.state + _SHORTEST, cache_modifier=CACHE)
    return ((left > 0) & (always == 0)) | (s - first_seen(s, used) < shortest)


@triton.jit
def groups_in(used, head, GUESS: tl.constexpr = False):
    """From which group to which a step chooses among the tokens of a head: none if it reads all that are seen."""
    CACHE: tl.constexpr = ".cg" if GUESS else ""
    s = tl.load(used.tokens + head, cache_modifier=CACHE)
    first = first_seen(s, used) // _GROUP
    return first, tl.where(read_in_order(s, used, GUESS), first, s // _GROUP)


@triton.jit
def settle(used, found, heads, worthwhile, S: tl.constexpr):
    """Says, after all rows are answered, whether the next steps look at the sketch."""
    head, row, state = tl.arange(0, S.HEADS), tl.arange(0, S.RP), used.state
    s = tl.load(used.tokens + head, mask=head < heads, other=0)
    pause, left = tl.load(state + _PAUSE), tl.load(state + _LEFT)
    paused = (left > 0) & (tl.load(state + _ALWAYS) == 0)
    s = tl.where(read_in_order(s, used), 0, s - first_seen(s, used))
    there = (head < heads)[:, None] & (row < S.R)[None, :]
    well = tl.min(tl.load(found.within + head[:, None] * S.R + row[None, :], mask=there, other=1), 1)
    # A head with a row that is not within what was allowed is read in full besides.
    cost = tl.load(found.kept + head, mask=head < heads, other=0) + tl.where(well == 0, s, 0)
    cost = tl.sum(tl.where(s > 0, cost, 0).to(tl.float32), 0)
    paid = cost <= worthwhile * tl.sum(s.to(tl.float32), 0)
    longer = tl.minimum(tl.maximum(2 * pause, 1), _LONGEST)
    tl.store(state + _PAUSE, tl.where(paused, pause, tl.where(paid, 0, longer)))
    tl.store(state + _LEFT, tl.where(paused, left - 1, tl.where(paid, 0, longer)))
