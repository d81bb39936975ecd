"""Sequences cut into parts of whole chunks, just enough to fill the device, and the sums before each part.

No program adds to what another one writes, so every run gives the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from avow.kernels.tile_ops import LOWEST

# Rows that parts are multiples of, and so every chunk divides.
_WHOLE = 128
# Programs that may share the sums of one part.
MOST_PIECES = 6


class Cut(NamedTuple):
    """A sequence in parts of `length` rows, for so many processors."""

    parts: int
    length: int
    processors: int


class Sums(NamedTuple):
    """Sums over keys of features times values and of features, relative to powers of `tops` if there are any.

    They are those of each part, of its pieces, before each part, or over all. Features have a top each, or share one.
    Powers are those of 2 inside scans, and of e in the states that outlast them.
    """

    sums: Float32[Tensor, "*heads m e"]
    totals: Float32[Tensor, "*heads m"]
    tops: Float32[Tensor, "..."] | None = None


@functools.cache
def processors(device: torch.device) -> int:
    """How many processors a device has; interpreted kernels are laid out as on an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def padded(width: int) -> int:
    """The next width that a tile can have."""
    return max(16, 1 << (int(width) - 1).bit_length())


def divided(count: int, size: int) -> int:
    """How many blocks of a size hold so many: what `triton.cdiv` says, which takes microseconds to say it."""
    return -(-count // size)


def cut_for(rows: int, programs: int, resident: int, device: torch.device) -> Cut:
    """Parts that so many programs work on at once, if each processor holds `resident` of them."""
    count = processors(device)
    parts = max(1, min(count * resident // max(programs, 1), divided(rows, 2 * _WHOLE)))
    length = max(1, divided(divided(rows, parts), _WHOLE)) * _WHOLE
    return Cut(max(1, divided(rows, length)), length, count)


def pieces_of(cut: Cut, programs: int, resident: int) -> int:
    """How many programs share the sums of one part: the fewest that fill the device about as well as any number does.

    The last part needs no sums.
    """
    summed = cut.parts - 1
    if not summed * programs:
        return 1

    def idle(pieces: int) -> float:
        busy = summed * programs * pieces / (cut.processors * resident)
        return math.ceil(busy) / busy

    counts = range(1, max(1, min(MOST_PIECES, cut.length // _WHOLE)) + 1)
    least = min(map(idle, counts))
    return next(pieces for pieces in counts if idle(pieces) <= 1.05 * least)


@triton.jit
def part_prefixes(
    added,
    tops,
    begin,
    begin_tops,
    before,
    before_tops,
    parts,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    REVERSE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Sums of the pieces of parts become those before each part, in the order of the scan, or the WHOLE sum.

    Of SIZE sums, every WIDTH share a feature, and features share LOGS tops.
    """
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    at = (place // WIDTH) % LOGS
    leads = inside & (place % WIDTH == 0) & (place // WIDTH < LOGS)
    state = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    if begin is not None:
        state = tl.load(begin + head * SIZE + place, mask=inside, other=0.0)
        top = tl.load(begin_tops + head * LOGS + at, mask=inside, other=0.0)
    for step in range(parts):
        part = step
        if REVERSE:
            part = parts - 1 - step
        own = head * parts + part
        if not WHOLE:
            tl.store(before + own * SIZE + place, state, mask=inside)
            if tops is not None:
                tl.store(before_tops + own * LOGS + at, top, mask=leads)
        # The last part has no sum, and nothing comes after it.
        there = inside & ((step < parts - 1) | WHOLE)
        for piece in tl.static_range(PIECES):
            found = tl.load(added + (own * PIECES + piece) * SIZE + place, mask=there, other=0.0)
            if tops is None:
                state += found
            else:
                log = tl.load(tops + (own * PIECES + piece) * LOGS + at, mask=there, other=LOWEST)
                higher = tl.maximum(top, log)
                finite = tl.where(higher > LOWEST, higher, 0.0)
                state = state * tl.exp2(top - finite) + found * tl.exp2(log - finite)
                top = higher
    if WHOLE:
        tl.store(before + head * SIZE + place, state, mask=inside)
        tl.store(before_tops + head * LOGS + at, top, mask=leads)


def before_parts(
    added: Sums, cut: Cut, begin: Sums | None = None, reverse: bool = False, pieces: int = 1, batch: int | None = None
) -> Sums:
    """The sums before each part, from those of its pieces and from what the scan begins with.

    Given the size of a `batch`, they are the sums over all parts instead.
    """
    heads = added.sums.shape[0]
    shape = (heads, cut.parts) if batch is None else (batch, heads // batch)
    found = Sums(*(None if x is None else x.new_empty(*shape, *x.shape[2:]) for x in added))  # type: ignore[arg-type]
    features = added.sums.shape[2]
    for i, width in enumerate((added.sums.shape[3], 1)):
        size = math.prod(added[i].shape[2:])  # type: ignore[union-attr]
        if not size:  # totals that nobody asked for
            continue
        block = min(1024, padded(size))
        part_prefixes[(heads, divided(size, block))](
            added[i],
            added.tops,
            None if begin is None else begin[i],
            None if begin is None else begin.tops,
            found[i],
            found.tops,
            cut.parts,
            SIZE=size,
            WIDTH=width,
            LOGS=1 if added.tops is None or added.tops.ndim == 2 else features,
            BLOCK=block,
            PIECES=pieces,
            REVERSE=reverse,
            WHOLE=batch is not None,
            num_warps=4,
        )
    return found
