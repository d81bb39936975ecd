"""A part of each sequence, where several processes hold one sequence between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """The tokens of this process: those from place `start` on; `group` holds the whole sequence, in order of ranks."""

    start: int
    group: ProcessGroup
