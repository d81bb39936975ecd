"""What lies before each part, where the sums of parts are relative to references of their own."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.chunking import Cut, divided, padded
from avow.kernels.tile_ops import LOWEST


class LogSums(NamedTuple):
    """Sums of each part, before each, or over all, relative to 2^tops; features have tops of their own or share one."""

    sums: Float32[Tensor, "*heads m e"]
    totals: Float32[Tensor, "*heads m"]
    tops: Float32[Tensor, "..."]


class Begin(NamedTuple):
    """The sums that a scan begins with, if any."""

    sums: Tensor | None = None
    totals: Tensor | None = None
    tops: Tensor | None = None


NOTHING = Begin()


@triton.jit
def log_prefixes(
    sums,
    tops,
    lower,
    initial,
    initial_tops,
    ends,
    final,
    final_tops,
    parts,
    groups,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGS: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    PIECES: tl.constexpr,
    before=None,
):
    """Sums of parts, each relative to its own top, become what lies before each part, relative to `lower`.

    Of SIZE sums, every WIDTH share a feature, and features share LOGS tops. The `final` sum of all parts is asked for
    where nothing comes after that knows it. Sums of parts may come in pieces; there is a tensor of its own, then, for
    what lies `before` parts.
    """
    WHOLE: tl.constexpr = final is not None
    head, block, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    at = (place // WIDTH) % LOGS
    leads = inside & (place % WIDTH == 0) & (place // WIDTH < LOGS)
    first, behind = 0, parts
    if ends is not None:
        first, behind = tl.load(ends + sequence), tl.load(ends + sequence + 1)
    state = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    if initial is not None:
        state = tl.load(initial + (sequence * groups + head) * SIZE + place, mask=inside, other=0.0)
        top = tl.load(initial_tops + (sequence * groups + head) * LOGS + at, mask=inside, other=0.0)
    for step in range(first, behind):
        part = step
        if REVERSE:
            part = first + behind - 1 - step
        own = (head * parts + part) * PIECES
        there = inside & ((step < behind - 1) | WHOLE)
        lead = tl.load(sums + own * SIZE + place, mask=there, other=0.0)
        if before is None:
            tl.store(sums + own * SIZE + place, state, mask=inside)
        else:
            tl.store(before + (head * parts + part) * SIZE + place, state, mask=inside)
        tl.store(lower + (head * parts + part) * LOGS + at, top, mask=leads)
        for piece in tl.static_range(PIECES):
            found = lead
            if piece > 0:
                found = tl.load(sums + (own + piece) * SIZE + place, mask=there, other=0.0)
            log = tl.load(tops + (own + piece) * LOGS + at, mask=there, other=LOWEST)
            higher = tl.maximum(top, log)
            settled = tl.where(higher > LOWEST, higher, 0.0)
            state = state * tl.exp2(top - settled) + found * tl.exp2(log - settled)
            top = higher
    if WHOLE:
        tl.store(final + (sequence * groups + head) * SIZE + place, state, mask=inside)
        tl.store(final_tops + (sequence * groups + head) * LOGS + at, top, mask=leads)


def before_parts(
    added: LogSums,
    parts: Cut,
    begin: Begin = NOTHING,
    reverse: bool = False,
    pieces: int | None = None,
    batch: int | None = None,
) -> LogSums:
    """What lies before each part, from what each adds, in its place; or, of a whole batch, the sums over all parts.

    Where parts come in `pieces`, it has a place of its own.
    """
    heads, m, many = added.totals.shape[0], added.totals.shape[2], parts.parts
    lower = added.tops.new_empty(heads, many, *added.tops.shape[2:])
    last = None if batch is None else LogSums(*(x.new_empty(batch, heads // batch, *x.shape[2:]) for x in added))
    before = [x if pieces is None else x.new_empty(heads, many, *x.shape[2:]) for x in added[:2]]
    for i, width in enumerate((added.sums.shape[3], 1)):
        block = min(1024, padded(m * width))
        log_prefixes[(heads, divided(m * width, block), parts.sequences)](
            added[i],
            added.tops,
            lower,
            begin[i],
            begin.tops,
            parts.ends,
            None if last is None else last[i],
            None if last is None else last.tops,
            many,
            heads,
            SIZE=m * width,
            WIDTH=width,
            LOGS=1 if added.tops.ndim == 2 else m,
            BLOCK=block,
            REVERSE=reverse,
            PIECES=1 if pieces is None else pieces,
            before=None if pieces is None else before[i],
            num_warps=4,
        )
    return LogSums(before[0], before[1], lower) if last is None else last
