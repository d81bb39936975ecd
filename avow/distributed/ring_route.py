"""Which way blocks of keys travel round a ring, and who needs them: the same in every process.

Rank r asks with rows, and holds a block of keys, both somewhere in one long sequence. Row i sees key j when j ≤ i, or
always. Block c starts at rank c and goes from each rank to the next, as far as somebody still needs it; at tick t it is
at rank c + t. On the way back through the same ring its gradient follows it one tick behind, and from the last rank
that adds to it goes straight home.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Route:
    """How many rows and keys each rank has, and what rows see."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool

    @property
    def ranks(self) -> int:
        return len(self.keys)

    def shift(self, rank: int, block: int) -> int | None:
        """How many keys of a block its first row sees beyond the first one, negative for none; None: rows see all."""
        if not self.causal:
            return None
        ahead = self._starts(self.rows)[rank] - self._starts(self.keys)[block]
        return None if ahead >= self.keys[block] - 1 else ahead

    def needs(self, rank: int, block: int) -> bool:
        """Whether some row of a rank sees some key of a block."""
        if not self.rows[rank] or not self.keys[block]:
            return False
        shift = self.shift(rank, block)
        return shift is None or shift + self.rows[rank] > 0

    def reach(self, block: int) -> int:
        """How many ranks on from its own a block travels."""
        return max((t for t in range(self.ranks) if self.needs((block + t) % self.ranks, block)), default=0)

    @functools.cached_property
    def ticks(self) -> int:
        """How often ranks compute: at tick t, rank r on block r − t."""
        return 1 + max(self.reach(block) for block in range(self.ranks))

    def at(self, rank: int, tick: int) -> int | None:
        """The block that a rank computes on at a tick, if it needs one."""
        block = (rank - tick) % self.ranks
        return block if tick < self.ranks and self.needs(rank, block) else None

    def blocks(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """The blocks that move on at a tick, while ranks compute: block, from, to."""
        for block in range(self.ranks):
            if tick < self.reach(block):
                yield block, (block + tick) % self.ranks, (block + tick + 1) % self.ranks

    def gradients(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """The gradients of blocks that move at a tick, as far as they got at the tick before: block, from, to."""
        for block in range(self.ranks):
            reach = self.reach(block)
            if 0 < tick <= reach:
                yield block, (block + tick - 1) % self.ranks, (block + tick) % self.ranks
            elif reach and tick == reach + 1:
                yield block, (block + reach) % self.ranks, block

    @staticmethod
    def _starts(sizes: Sequence[int]) -> list[int]:
        return [0, *accumulate(sizes)]
