"""Sequences cut into a few long parts, just enough to fill the device, and how programs are laid out over them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Int, Int32
from torch import Tensor

# Processors of an H200.
_PROCESSORS = 132
# Rows that parts are multiples of, and so every chunk divides.
_WHOLE = 128
# Programs that may share the sums of one part.
MOST_PIECES = 6


class Cut(NamedTuple):
    """A sequence in parts of `length` rows; packed sequences have a table of their parts, and ends in it."""

    parts: int
    length: int
    table: Int32[Tensor, "parts 4"] | None = None
    """The first row of each part, the row after its last, 1 or 2 where a sequence begins or ends, and which it is."""
    ends: Int32[Tensor, "sequences+1"] | None = None
    """Where each sequence's parts begin in the table."""

    @property
    def sequences(self) -> int:
        """How many sequences each entry of a batch is."""
        return 1 if self.ends is None else len(self.ends) - 1


class Config(NamedTuple):
    """How a scan is laid out: rows of a chunk, columns of values per program, warps, loads under way, and how many
    programs a processor holds at once."""

    chunk: int
    columns: int
    warps: int
    stages: int
    resident: int


# Layouts for keys of 65 to 128 numbers of 16 bits: of scans, of those without normalisers, and of sums of parts.
WIDE, WIDE_PLAIN, WIDE_SUMS = Config(64, 64, 4, 4, 1), Config(64, 128, 4, 4, 1), Config(64, 128, 8, 3, 2)


def config(m: int, e: int, itemsize: int, plain: bool = True) -> Config:
    """The layout for keys of m numbers and values of e: the largest state that stays in registers.

    Where normalisers go with the sums, not everything is `plain`, and there is less room.
    """
    m, e = padded(m), padded(e)
    if itemsize == 4:
        if m > 128:
            return Config(16, min(e, 16), 8, 1, 1)
        return Config(64, min(e, 32), 4, 2, 2) if m <= 64 else Config(32, min(e, 32), 8, 2, 1)
    if m <= 64:
        return Config(64, min(e, 64), 4, 4, 2)
    if m <= 128:
        wide = WIDE_PLAIN if plain else WIDE
        return wide._replace(columns=min(e, wide.columns))
    return Config(64 if m <= 256 else 32, min(e, 16384 // m), 8, 2, 1)


def config_of_sums(m: int, e: int, itemsize: int) -> Config:
    """The layout of sums of parts, which have more room in registers: wide keys are read once for all columns."""
    if itemsize == 2 and 64 < m <= 128:
        return WIDE_SUMS._replace(columns=min(padded(e), WIDE_SUMS.columns))
    return config(m, e, itemsize)


def padded(width: int) -> int:
    """The next width that a tile can have."""
    return max(16, 1 << (int(width) - 1).bit_length())


def divided(count: int, size: int) -> int:
    """How many blocks of a size hold so many: what `triton.cdiv` says, which takes microseconds to say it."""
    return -(-count // size)


def pieces(cut: Cut, programs: int, resident: int, whole: bool) -> int:
    """How many programs share the sums of one part: the fewest that fill the device about as well as any number does.

    The last part needs no sums but for the whole.
    """
    summed = cut.parts if whole or cut.table is not None else cut.parts - 1
    if not summed * programs:
        return 1

    def idle(many: int) -> float:
        busy = summed * programs * many / (_PROCESSORS * resident)
        return math.ceil(busy) / busy

    counts = range(1, max(1, min(MOST_PIECES, cut.length // _WHOLE)) + 1)
    least = min(map(idle, counts))
    return next(many for many in counts if idle(many) <= 1.05 * least)


def cut(rows: int, heads: int, m: int, e: int, itemsize: int, plain: bool = True) -> Cut:
    """Parts of one sequence that fill the device once, of whole chunks."""
    chosen = config(m, e, itemsize, plain)
    return cut_for(rows, heads * divided(e, chosen.columns), chosen.resident)


def cut_for(rows: int, programs: int, resident: int) -> Cut:
    """Parts that so many programs work on at once, where each processor holds `resident` of them."""
    parts = max(1, min(_PROCESSORS * resident // max(programs, 1), divided(rows, 2 * _WHOLE)))
    length = max(1, divided(divided(rows, parts), _WHOLE)) * _WHOLE
    return Cut(max(1, divided(rows, length)), length)


def cut_packed(whole: Cut, starts: Int[Tensor, "sequences+1"] | None, rows: int) -> Cut:
    """Packed sequences in parts as long as those of `whole`, which it is where nothing is packed.

    How many parts there are follows from the shapes: some may be empty.
    """
    if starts is None:
        return whole
    length, sequences = whole.length, len(starts) - 1
    parts = divided(rows, length) + sequences
    starts = starts.to(torch.int64)
    counts = torch.clamp((starts[1:] - starts[:-1] + length - 1) // length, min=1)  # an empty sequence has a part
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(parts, device=starts.device)
    owner = torch.searchsorted(ends[1:], place, right=True).clamp(max=sequences - 1)
    first = starts[owner] + (place - ends[owner]) * length
    stop = torch.minimum(first + length, starts[owner + 1])
    edge = (place == ends[owner]).long() + 2 * (place == ends[owner + 1] - 1).long()
    unused = place >= ends[-1]
    table = torch.stack([first, stop, edge, owner], -1).masked_fill(unused[:, None], 0)
    return Cut(parts, length, table.int().contiguous(), ends.int())
