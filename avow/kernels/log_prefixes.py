"""What lies before each part, where the sums of parts are relative to references of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from avow.kernels.feature_tiles import LOWEST


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
    GIVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    PIECES: tl.constexpr = 1,
    before=None,
):
    """Sums of parts, each relative to its own top, become what lies before each part, relative to `lower`.

    Of SIZE sums, every WIDTH share a feature, and features share LOGS tops. The sum of all parts is asked for where
    nothing comes after that knows it. Sums of parts may come in pieces; there is a tensor of its own, then, for what
    lies `before` parts.
    """
    head, block, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    at = (place // WIDTH) % LOGS
    leads = inside & (place % WIDTH == 0) & (place // WIDTH < LOGS)
    first, behind = 0, parts
    if PACKED:
        first, behind = tl.load(ends + sequence), tl.load(ends + sequence + 1)
    state = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    if GIVEN:
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
