"""Computations in processes of their own: so many at a time, each with a limit, ended when nobody waits for it.

A thread cannot be stopped; a process can. Previews have a process to themselves, and proofs stand back where there are
too few cores for both, so that a long proof never makes a slider stutter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from typing import Any

from avow.errors import AvowError
from avow.workers import surroundings

# A fresh process loads torch and the provers, on a busy machine too.
_START_SECONDS = 120.0
# Someone who moves on leaves a computation behind; one that is nearly done is cheaper to finish than a new process.
_GRACE_SECONDS = 0.5
# How far processes that stand back do so, as `nice` counts.
_STANDS_BACK = 5
# One answer, at most: enough for figures, too little to fill the memory.
_LINE_BYTES = 1 << 24


class TookTooLong(AvowError):
    """A computation that was ended at its limit."""


class Busy(AvowError):
    """More is asked for than can wait."""


class WorkerPool:
    """Processes that answer questions, `hands` of them at a time; further ones start as they are needed.

    Answers are JSON as the process wrote it. A crew that `stands_back` leaves the cores to whoever else wants them.
    """

    def __init__(self, package: str, hands: int, most_waiting: int = 100, *, stands_back: bool = False) -> None:
        self._package, self._stands_back = package, stands_back
        self._free: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()
        self._gate = asyncio.Semaphore(hands)
        self._room, self._waiting = most_waiting, 0
        self._closed = False
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to start one process; who asks meanwhile waits for it."""
        await self._gate.acquire()
        self._begin_another()

    async def ask(self, question: dict[str, Any], seconds: float, file: tuple[str, bytes] | None = None) -> bytes:
        """The answer; cancelling this ends the computation."""
        if self._waiting >= self._room:
            raise Busy("requests", self._waiting, "wait already", "try again in a moment")
        self._waiting += 1
        try:
            await self._gate.acquire()
        finally:
            self._waiting -= 1
        hand: _Worker | None = None
        try:
            if self._closed:
                raise Busy("the lab", "", "has ended", "start avow lab again, and open the address it prints")
            hand = self._free.popleft() if self._free else await self._started()
            self._busy.add(hand)
            return await _answered(hand, question, seconds, file)
        finally:
            self._busy -= {hand}
            if hand is None or hand.alive:
                self._give_back(hand)
            else:
                # Its place is taken until there is a new one; whoever asked need not wait for that.
                self._begin_another()

    async def _started(self) -> _Worker:
        hand = await _Worker.begun(self._package, self._stands_back)
        self._busy.add(hand)
        try:
            await hand.ready()
        finally:
            self._busy.discard(hand)
        return hand

    def _begin_another(self) -> None:
        task = asyncio.ensure_future(self._another())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _another(self) -> None:
        hand = None
        # Where it cannot be started, the next one who asks hears why.
        with contextlib.suppress(AvowError, OSError, TimeoutError):
            try:
                hand = None if self._closed else await self._started()
            finally:
                self._give_back(hand)

    def _give_back(self, hand: _Worker | None) -> None:
        if hand is not None:
            self._free.append(hand)
        self._gate.release()

    async def close(self) -> None:
        """Leave no process behind; who waits for an answer is told so at once."""
        self._closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(hand.end() for hand in (*self._free, *self._busy)))
        self._free.clear()


async def _answered(hand: _Worker, question: dict[str, Any], seconds: float, file: tuple[str, bytes] | None) -> bytes:
    """What one process says, within the limit; where nobody waits any more, it is ended unless it is nearly done."""
    asked = asyncio.ensure_future(hand.ask(question, file))
    late = False
    try:
        await asyncio.wait({asked}, timeout=seconds)
    except asyncio.CancelledError:
        await asyncio.wait({asked}, timeout=_GRACE_SECONDS)
        raise
    finally:
        if late := not asked.done():
            asked.cancel()
            await hand.end()
    if late:
        rule = f"took longer than {seconds:g} s and was ended"
        raise TookTooLong(question["what"], question["page"], rule, "choose smaller sizes")
    return asked.result()


class _Worker:
    """One process, seen from outside."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._file: str | None = None
        self.alive = True

    @staticmethod
    async def begun(package: str, stands_back: bool) -> _Worker:
        # Threads of its own would only wait for the others'. What is freed goes back: else glibc raises the size from
        # which it does, and a heap of tensors keeps hundreds of megabytes.
        around = surroundings(threads=1) | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
        hand = _Worker(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "avow.lab.worker",
                package,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=around,
                limit=_LINE_BYTES,
            )
        )
        if stands_back and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, hand._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _STANDS_BACK)
        return hand

    async def ready(self) -> None:
        """Wait until it can be asked; where that does not come, end it."""
        try:
            await asyncio.wait_for(self._line(), _START_SECONDS)
        except BaseException:
            await self.end()
            raise

    async def ask(self, question: dict[str, Any], file: tuple[str, bytes] | None) -> bytes:
        handle, content = file if file is not None else (None, b"")
        sent = handle is not None and handle != self._file
        header = question | {"file": handle, "bytes": len(content) if sent else None}
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # where it has ended meanwhile, its silence says so
            self._process.stdin.write(json.dumps(header).encode() + b"\n" + (content if sent else b""))
            await self._process.stdin.drain()
        if sent:
            self._file = handle
        return await self._line()

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError:  # longer than any answer may be
            line = b""
        if not line:
            await self.end()
            raise TookTooLong("this input", "as given", "ended the process that computed it", "choose smaller sizes")
        return line

    async def end(self) -> None:
        """End the process, whatever it is doing."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
