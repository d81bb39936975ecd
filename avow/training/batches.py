"""Batches by number: step s of a run is always the same examples, cut by length so that padding is not computed.

The stream of examples is epoch after epoch, each shuffled by itself, and step s reads places s·size … (s + 1)·size − 1
of it. Within a step, examples are sorted by length and cut into micro-batches, each as wide as its longest: the sum of
their losses is the loss of the whole step, whatever the number of micro-batches or ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from avow.errors import ParameterError
from avow.parameters import declared
from avow.training.corpus import check_some
from avow.training.draws import shuffled
from avow.training.vocabulary import PAD

# Widths are rounded up to this: what tensor cores like, and few shapes for a compiler to meet.
MULTIPLE = 8
# A step may touch the end of one epoch and the beginning of the next, or several small epochs.
_order = functools.lru_cache(maxsize=4)(shuffled)


@runtime_checkable
class Examples(Protocol):
    """Numbered examples that may differ from epoch to epoch."""

    def __len__(self) -> int: ...

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them."""


class Micro(NamedTuple):
    """What a model reads in one pass, and the characters that follow; 0 is padding, and no target."""

    ids: Int[Tensor, "b n"]
    targets: Int[Tensor, "b n"]


@dataclass(frozen=True)
class Step:
    """One rank's share of a step; `targets` and `positions` count all ranks, without padding."""

    micros: tuple[Micro, ...]
    targets: int
    positions: int


class Mixture:
    """Several kinds of examples as one; an epoch reads each of them once."""

    @declared()
    def __init__(self, parts: Sequence[Examples]) -> None:
        check_some("parts", parts)
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them."""
        kind = np.searchsorted(self._ends, indices, side="right")
        found = []
        for number, part in enumerate(self._parts):
            (mine,) = np.nonzero(kind == number)
            if len(mine):
                begin = int(self._ends[number]) - len(part)
                found.append((mine, *part.rows(epochs[mine], indices[mine] - begin)))
        width = max(inputs.shape[1] for _, inputs, _ in found)
        whole = np.full((2, len(indices), width), PAD, dtype=np.int64)
        for mine, *both in found:
            for side, rows in enumerate(both):
                whole[side, mine, : rows.shape[1]] = rows
        return whole[0], whole[1]


class Batches(Iterator[Step]):
    """Steps from `position` on, without end; `position` is all that a resumed run needs to know."""

    @declared()
    def __init__(
        self,
        examples: Examples,
        size: int,
        seed: int,
        *,
        block: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
        narrowest: int = 1,
    ) -> None:
        if size < accumulate * world:
            rule = f"is fewer examples than {accumulate} micro-batches on each of {world} ranks"
            raise ParameterError("batch", size, rule, f"use batch>={accumulate * world} or a smaller accumulate")
        self.examples, self.size, self.seed, self.block = examples, size, seed, block
        self.accumulate, self.rank, self.world, self.position = accumulate, rank, world, position
        self.narrowest = narrowest  # Tokens that every sequence is padded to, where each of some processes needs one.

    def __next__(self) -> Step:
        step = self.at(self.position)
        self.position += 1
        return step

    def steps_in(self, epochs: int) -> int:
        """The steps after which every example was read `epochs` times."""
        return -(-epochs * len(self.examples) // self.size)

    def read(self, step: int) -> tuple[Int[np.ndarray, "size"], Int[np.ndarray, "size"]]:
        """The epoch and the index of every example of a step."""
        epochs, places = np.divmod(np.arange(step * self.size, (step + 1) * self.size), len(self.examples))
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            order = _order(self.seed, int(epoch), len(self.examples))
            indices[epochs == epoch] = order[places[epochs == epoch]]
        return epochs, indices

    def at(self, step: int) -> Step:
        """This rank's share of a step."""
        inputs, targets = self.examples.rows(*self.read(step))
        lengths = (inputs != PAD).sum(1)
        # Dealt from the longest down, every rank gets the same work to within one example.
        mine = np.argsort(-lengths, kind="stable")[self.rank :: self.world]
        micros = [
            Micro(self._cut(inputs, rows, lengths), self._cut(targets, rows, lengths))
            for rows in np.array_split(mine, self.accumulate)
        ]
        return Step(tuple(micros), int((targets != PAD).sum()), int(lengths.sum()))

    def _cut(self, numbers: Int[np.ndarray, "size n"], rows: Int[np.ndarray, "b"], lengths: np.ndarray) -> Tensor:
        longest = int(lengths[rows].max())
        width = min(max(-(-longest // MULTIPLE) * MULTIPLE, self.narrowest), self.block)
        kept = torch.full((len(rows), width), PAD)
        within = torch.from_numpy(numbers[rows, :width])
        kept[:, : within.shape[1]] = within
        return kept
