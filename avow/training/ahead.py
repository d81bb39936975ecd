"""Batches made before they are asked for, so that a GPU never waits for them."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from avow.training.batches import Batches, Step

# Processes that make batches, where there are cores for them, and the steps each is ahead.
_MAKERS, _DEPTH = 4, 8


class _Steps(Dataset[Step]):
    """Steps by number: what a step reads depends on nothing else, so any process can make it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Step:
        return self._batches.at(step)


def _deaf(maker: int) -> None:
    """Leave Ctrl-C and SIGTERM, which reach every process of a run, to the one that trains: it ends its makers."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)


def ahead(batches: Batches, until: int) -> Iterator[Step]:
    """The steps from where `batches` stands until a last one, in order, in memory from which a GPU can fetch."""
    steps = _made(batches, until)
    # Makers are deaf to the signal that Python sends them before it waits for their end; this one they heed.
    atexit.register(_close, weakref.ref(steps))
    return steps


def _close(steps: weakref.ref[Generator[Step, None, None]]) -> None:
    if (left := steps()) is not None:
        left.close()


def _made(batches: Batches, until: int) -> Generator[Step, None, None]:
    makers = max(1, min(_MAKERS, (os.cpu_count() or 1) // 2))
    loader: DataLoader[Any] = DataLoader(
        _Steps(batches),
        batch_size=None,
        sampler=range(batches.position, until),
        num_workers=makers,
        prefetch_factor=_DEPTH,
        pin_memory=torch.cuda.is_available(),
        # Makers never touch the GPU, and what they read is already in memory: nothing needs to be sent to them.
        multiprocessing_context="fork",
        # Else the loader would draw from torch's own generator, which belongs to dropout.
        generator=torch.Generator(),
        worker_init_fn=_deaf,
    )
    for step in loader:
        batches.position += 1
        yield step
