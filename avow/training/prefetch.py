"""Batches made before they are asked for, by processes of their own, so that a GPU never waits for them.

Makers are started afresh, not forked: a process that trains has threads, of its devices, its connections, its log, and
what one of them holds at that moment a forked child would hold for ever. Each maker makes every so many steps and
writes them into a pipe, which holds some of them; when nobody reads it any more, the maker ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import torch

from avow.errors import FileError, LostRank
from avow.training.batches import Batches, Micro, Step
from avow.worker_pool import environment

# Processes that make batches, where there are cores for them, and the bytes that each may be ahead.
_MAKERS, _ROOM = 4, 2**20
# Ctrl-C and SIGTERM, which may reach every process of a run, are left to the one that trains: it has a step to end.
_PROGRAM = """
import signal, sys
for kind in (signal.SIGINT, signal.SIGTERM):
    signal.signal(kind, signal.SIG_IGN)
from avow.training.prefetch import make
make(*map(int, sys.argv[1:]))
"""


def ahead(batches: Batches, until: int) -> Iterator[Step]:
    """The steps from where `batches` stands until a last one, in order, in memory from which a GPU can fetch."""
    begin, count = batches.position, max(1, min(_MAKERS, (os.cpu_count() or 1) // 2))
    with _written(batches) as told:
        # They begin now, and not when the first step is asked for: until then there is time.
        makers = [_Maker(told, range(begin + first, until, count)) for first in range(count)]
    return _in_turn(batches, makers, until - begin)


def _written(batches: Batches) -> IO[bytes]:
    """A file without a name that holds them."""
    try:
        with contextlib.ExitStack() as closing:
            told = closing.enter_context(tempfile.TemporaryFile())
            pickle.dump(batches, told)
            told.flush()
            closing.pop_all()
            return told
    except OSError as error:
        folder = tempfile.tempdir or "none"
        rule, remedy = f"cannot hold the batches ({error.strerror})", "make room there, or name another in TMPDIR"
        raise FileError("temporary folder", folder, rule, remedy) from error


def _in_turn(batches: Batches, makers: list[_Maker], count: int) -> Iterator[Step]:
    for number in range(count):
        step = makers[number % len(makers)].next()
        batches.position += 1
        yield step


class _Maker:
    """A process that makes some steps of batches, which lie in a file; it ends when this is forgotten."""

    def __init__(self, batches: IO[bytes], steps: range) -> None:
        self._pinned = torch.cuda.is_available()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, (steps.start, steps.stop, steps.step))],
            stdin=batches,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        # Only Linux has large pipes, and no user more than some of them; steps go through a small one, too.
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, _ROOM)

    def next(self) -> Step:
        """The next of its steps."""
        assert self._process.stdout is not None
        try:
            micros, targets, positions = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            rule = "must make batches until the last step"
            remedy = "see what it said, or what else ended it, and resume from the last checkpoint"
            raise LostRank("maker of batches", "gone", rule, remedy) from error
        return Step(tuple(Micro(*map(self._tensor, micro)) for micro in micros), targets, positions)

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        room = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=self._pinned)
        return room.copy_(torch.from_numpy(numbers))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def make(begin: int, until: int, every: int) -> None:
    """Write steps of the batches in standard input to standard output: what a maker does."""
    torch.set_num_threads(1)
    # Others read the same file: none may move the place where it is read.
    with mmap.mmap(0, 0, access=mmap.ACCESS_READ) as whole:
        batches: Batches = pickle.loads(whole)
    told = os.dup(1)
    os.dup2(2, 1)  # What else prints must not mix with the steps.
    with contextlib.suppress(BrokenPipeError), open(told, "wb") as steps:
        for number in range(begin, until, every):
            pickle.dump(_plain(batches.at(number)), steps)
            steps.flush()


def _plain(step: Step) -> Any:
    """A step without tensors, which take long to pickle; numbers of characters fit into half the bytes."""
    return [[x.numpy().astype(np.int32) for x in micro] for micro in step.micros], step.targets, step.positions
