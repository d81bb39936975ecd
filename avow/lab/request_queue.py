"""Computations for the pages, in worker processes: limited in number and time, ended when nobody waits for them.

Previews have a process to themselves, and while somebody moves something proofs stand still, so that a long proof never
makes a slider stutter. Niceness alone does not do that: Linux shares cores first among sessions, and a browser is in
another one than the lab.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import weakref
from typing import Any

import torch

from avow.errors import AvowError
from avow.lab.page import all_pages, error_body, json_bytes
from avow.lab.uploads import tensors_of
from avow.worker_pool import Handler, Send, TimeLimitError, Worker, WorkerError, WorkerPool

# Someone who moves on leaves a computation behind; one that is nearly done is cheaper to finish than a new process.
_GRACE_SECONDS = 0.5
# What low priority adds to the niceness of a process.
_NICENESS = 5
# After the last preview, proofs stand still for this long; after so many seconds of that, they work for a while.
_REST, _MOST_REST, _WORK = 0.25, 20.0, 2.0
# What is freed goes back to the system: else glibc raises the size from which it does, and a heap of tensors keeps
# hundreds of megabytes.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


class TookTooLong(AvowError):
    """A computation that was ended at its limit."""


class Busy(AvowError):
    """More requests than the queue holds."""

    status = 503


class RequestQueue:
    """Requests to the pages of a package, for `workers` processes; further ones start as they are needed.

    Answers are JSON as the process wrote it. With `low_priority` the processes leave the cores to others. Those of the
    queue that this one comes `before` stand still while it is asked. With `keep` a process outlives whoever gave up
    waiting for it, for it is slow to load.
    """

    def __init__(
        self,
        package: str,
        workers: int,
        most_waiting: int = 100,
        *,
        low_priority: bool = False,
        before: RequestQueue | None = None,
        keep: bool = False,
        threads: int = 1,
    ) -> None:
        self._package, self._low_priority, self._threads = package, low_priority, threads
        self._before, self._keep = before, keep
        self._resting: asyncio.TimerHandle | None = None
        self._rested_since = self._worked_since = float("-inf")
        self._pool = WorkerPool(self._worker)
        self._gate = asyncio.Semaphore(workers)
        self._room, self._waiting = most_waiting, 0
        self._closed = False
        self._starting: set[asyncio.Task[None]] = set()
        # The file that a worker has read last: it is sent once.
        self._files: weakref.WeakKeyDictionary[Worker, str] = weakref.WeakKeyDictionary()

    async def start(self) -> None:
        """Start one process; requests wait for it."""
        await self._gate.acquire()
        await asyncio.gather(*self._start_worker())

    def rest(self) -> None:
        """Have every process stand still for a moment, but not for ever: who waits for a proof gets it some day."""
        loop = asyncio.get_running_loop()
        if self._resting is None:
            if loop.time() < self._worked_since + _WORK:
                return
            self._rested_since = loop.time()
        else:
            self._resting.cancel()
        if loop.time() > self._rested_since + _MOST_REST:
            self._worked_since = loop.time()
            self._work()
        else:
            self._pool.suspend()
            self._resting = loop.call_later(_REST, self._work)

    def _work(self) -> None:
        self._resting = None
        self._pool.resume()

    async def ask(self, request: dict[str, Any], seconds: float, file: tuple[str, bytes] | None = None) -> bytes:
        """The answer; cancelling this ends the computation."""
        if self._before is not None:
            self._before.rest()
        if self._waiting >= self._room:
            raise Busy("requests", self._waiting, "fill the queue", "try again in a moment")
        self._waiting += 1
        try:
            await self._gate.acquire()
        finally:
            self._waiting -= 1
        if self._closed:
            self._gate.release()
            raise Busy("the lab", "", "has ended", "start avow lab again, and open the address it prints")
        try:
            future = self._pool.submit(lambda worker: self._answer(worker, request, seconds, file))
        except BaseException:
            self._gate.release()
            raise
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            await asyncio.wait({answer}, timeout=0 if self._keep else _GRACE_SECONDS)
            raise
        finally:
            if answer.done() and answer.exception() is None:
                self._gate.release()
            elif self._keep and not answer.done():
                self._starting.add(finishing := asyncio.ensure_future(self._finish(answer)))
                finishing.add_done_callback(self._starting.discard)
            else:
                self._pool.kill(future)
                answer.cancel()
                # The place stays taken until there is a new process; whoever asked need not wait for that.
                self._start_worker()
        try:
            return answer.result()
        except TimeLimitError as error:
            rule = f"took longer than {seconds:g} s and was ended"
            remedy = "choose smaller sizes, or wait until this machine has less to do"
            raise TookTooLong(request["what"], request["page"], rule, remedy) from error
        except WorkerError as error:
            rule = "ended the process that computed it"
            raise TookTooLong("this input", "as given", rule, "choose smaller sizes") from error

    async def close(self) -> None:
        """Leave no process behind; whoever waits for an answer gets an error at once."""
        self._closed = True
        if self._resting is not None:
            self._resting.cancel()
        self._pool.close()
        await asyncio.gather(*self._starting, return_exceptions=True)

    async def _finish(self, answer: asyncio.Future[bytes]) -> None:
        """Wait for an answer that nobody wants any more; the place in the gate is free when the process is."""
        await asyncio.wait({answer})
        if answer.exception() is None:
            self._gate.release()
        else:
            self._start_worker()

    def _worker(self) -> Worker:
        handler = "avow.lab.request_queue:handler"
        worker = Worker(handler, self._package, threads=self._threads, variables=_VARIABLES)
        if self._low_priority and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, worker.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        return worker

    def _start_worker(self) -> tuple[asyncio.Task[None], ...]:
        """Start a process; the place in the gate, which the caller holds, is free when it is loaded.

        The task that waits for that; none if the queue is closed.
        """

        async def start() -> None:
            # Where it cannot be started, the next request says why.
            try:
                with contextlib.suppress(WorkerError, OSError):
                    await asyncio.wrap_future(self._pool.submit(Worker.load))
            finally:
                self._gate.release()

        if self._closed:
            self._gate.release()
            return ()
        task = asyncio.ensure_future(start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return (task,)

    def _answer(self, worker: Worker, request: dict[str, Any], seconds: float, file: tuple[str, bytes] | None) -> bytes:
        name, content = file or (None, b"")
        if name is not None and self._files.get(worker) == name:
            content = b""
        elif name is not None:
            self._files[worker] = name
        (answer,) = worker.messages(request | {"file": name}, seconds, content)
        return answer


def handler(package: str) -> Handler:
    """What a worker does with a request: it names a page, what of it is called, the inputs, and a file if any.

    It sends what the page says as JSON, or the parts of its mistake; where the page still has something to say, both.
    """
    _end_with_parent()
    pages = all_pages(package)
    tensors: dict[str, torch.Tensor] = {}

    def handle(request: dict[str, Any], content: bytes, send: Send) -> None:
        nonlocal tensors
        try:
            if content:
                tensors = tensors_of(content)
            page = pages[request["page"]]
            files = [tensors if request["file"] else {}] if page.takes_files else []
            compute = page.calls.get(request["what"]) or getattr(page, request["what"])
            answer = compute(page.inputs.of(request["inputs"]), *files)
            trouble = answer.pop("trouble", None)
            body = json_bytes((error_body(trouble) if trouble else {}) | {"answer": answer})
        except Exception as error:
            body = json_bytes(error_body(error))
        send(body)

    return handle


def _end_with_parent() -> None:
    """Have the system end this process with the lab: one that stands still cannot notice by itself that it is alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
