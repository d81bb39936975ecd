"""Batches by number: step s of a run is always the same examples, cut by length so that padding is not computed.

The stream of examples is epoch after epoch, each shuffled by itself, and step s reads places s·size … (s + 1)·size − 1
of it. Within a step, examples are sorted by length and cut into micro-batches, each as wide as its longest: the sum of
their losses is the loss of the whole step, whatever the number of micro-batches or ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import types
import weakref
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from avow.errors import LostRank, ParameterError
from avow.parameters import check_count, declared
from avow.training.examples import Examples, uniform
from avow.training.tokenizer import PAD

# Widths are rounded up to this: tensor cores are faster, and a compiler meets few shapes.
MULTIPLE = 8
# Processes that make batches ahead, if there are cores for them.
WORKERS = 4


class Micro(NamedTuple):
    """What a model reads in one pass, and the tokens that follow; 0 is padding, never a target."""

    ids: Int[Tensor, "b n"]
    targets: Int[Tensor, "b n"]


class Step(NamedTuple):
    """One rank's share of a step; `targets` and `positions` count all ranks, without padding."""

    micros: tuple[Micro, ...]
    targets: int
    positions: int


def shuffled(seed: int, epoch: int, count: int) -> Int[np.ndarray, "count"]:
    """The order in which an epoch reads its examples: a permutation of 0 … count − 1."""
    (keys,) = uniform(seed, np.full(count, epoch), np.arange(count), 0)
    return np.argsort(keys, kind="stable")


# A step may touch the end of one epoch and the beginning of the next, or several small epochs.
_order = functools.lru_cache(maxsize=4)(shuffled)


class Batches(Dataset[Step], Iterator[Step]):
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
        for name, value in (("block", block), ("accumulate", accumulate), ("world", world)):
            check_count(name, value)
        if size < accumulate * world:
            rule = f"is fewer examples than {accumulate} micro-batches on each of {world} ranks"
            raise ParameterError("batch", size, rule, f"use batch>={accumulate * world} or a smaller accumulate")
        self.examples, self.size, self.seed, self.block = examples, size, seed, block
        self.accumulate, self.rank, self.world, self.position = accumulate, rank, world, position
        # Every sequence is padded to so many tokens: one at least for each process that shares it.
        self.narrowest = narrowest

    def __next__(self) -> Step:
        step = self[self.position]
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

    def __getitem__(self, step: int) -> Step:
        """This rank's share of a step."""
        inputs, targets = self.examples.rows(*self.read(step))
        lengths = (inputs != PAD).sum(1)
        # Dealt from the longest down, every rank gets the same work to within one example.
        mine = np.argsort(-lengths, kind="stable")[self.rank :: self.world]
        micros = [
            Micro(self._cut(inputs, rows, lengths), self._cut(targets, rows, lengths))
            for rows in np.array_split(mine, self.accumulate)
        ]
        # A step of documents of one token has nothing to predict: its loss is 0, not 0/0.
        return Step(tuple(micros), max(1, int((targets != PAD).sum())), int(lengths.sum()))

    def once(self) -> Iterator[Micro]:
        """This rank's share of every example, once and in order: `size` at a time over all ranks.

        Every rank gets as many, since they compute together: one for which nothing is left gets padding.
        """
        for first in range(0, len(self.examples), self.size):
            indices = np.arange(first, min(first + self.size, len(self.examples)))
            inputs, targets = self.examples.rows(np.zeros_like(indices), indices)
            lengths = (inputs != PAD).sum(1)
            mine = np.arange(len(indices))[self.rank :: self.world]
            if not len(mine):
                inputs, targets, mine = np.full_like(inputs[:1], PAD), np.full_like(targets[:1], PAD), np.array([0])
            yield Micro(self._cut(inputs, mine, lengths), self._cut(targets, mine, lengths))

    def _cut(self, numbers: Int[np.ndarray, "size n"], rows: Int[np.ndarray, "b"], lengths: np.ndarray) -> Tensor:
        longest = int(lengths[rows].max())
        width = min(max(-(-longest // MULTIPLE) * MULTIPLE, self.narrowest), self.block)
        padded = torch.full((len(rows), width), PAD)
        within = torch.from_numpy(numbers[rows, :width])
        padded[:, : within.shape[1]] = within
        return padded

    def prefetched(self, until: int) -> Iterator[Step]:
        """The steps from `position` until a last one, made ahead by other processes, so that a GPU never waits."""
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=range(self.position, until),
            num_workers=max(1, min(WORKERS, (os.cpu_count() or 1) // 2)),
            prefetch_factor=8,
            collate_fn=_arrays,
            # Not forked: a process that trains has threads, and a lock that one of them holds stays locked in a fork.
            multiprocessing_context="spawn",
            # Else it draws its seed from torch's own generator, which dropout draws from.
            generator=torch.Generator(),
        )
        with _starting_workers():
            steps = self._counted(iter(loader))  # Workers begin now, not when the first step is asked for.
        # Python ends what is left of its children with SIGTERM, which workers ignore; closing tells them to end.
        atexit.register(_close, weakref.ref(steps))
        return steps

    def _counted(self, steps: Iterator[Any]) -> Generator[Step, None, None]:
        for micros, targets, positions in steps:
            self.position += 1
            yield Step(tuple(Micro(*map(_pinned, micro)) for micro in micros), targets, positions)


def _arrays(step: Any) -> tuple[list[list[np.ndarray]], int, int]:
    """A step as arrays, which one pipe carries: of tensors, torch would send each over a connection of its own."""
    return [[x.numpy().astype(np.int32) for x in micro] for micro in step.micros], step.targets, step.positions


def _pinned(numbers: np.ndarray) -> Tensor:
    """The numbers as a tensor, on a machine with a GPU in memory that it can fetch from."""
    tensor = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    return tensor.copy_(torch.from_numpy(numbers))


def _close(reference: weakref.ref[Generator[Step, None, None]]) -> None:
    if (steps := reference()) is not None:
        steps.close()


@contextlib.contextmanager
def _starting_workers() -> Iterator[None]:
    """Inside, new processes ignore Ctrl-C and SIGTERM, and do not run the caller's script again.

    Signals that reach every process of a run are for the one that trains: it has a step to finish. What `spawn` starts
    imports the main module's file first, which would train again in a script without `if __name__ == "__main__"`.
    """
    main, kinds = sys.modules["__main__"], (signal.SIGINT, signal.SIGTERM)
    resource_tracker.ensure_running()  # When started later, it would unblock the signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Raise `LostRank` if a process that makes batches has ended: torch notices at any moment, not only at `next`."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        remedy = "see what it printed, or what else ended it, and resume from the last checkpoint"
        raise LostRank("batch worker", "lost", f"must run until the last step ({error})", remedy) from error
