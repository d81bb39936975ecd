"""Computations for the pages, in worker processes: limited in number and time, ended when nobody waits for them.

Previews have a process to themselves, and proofs give way to them where there are too few cores for both, so that a
long proof never makes a slider stutter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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

    Answers are JSON as the process wrote it. With `low_priority` the processes leave the cores to others.
    """

    def __init__(self, package: str, workers: int, most_waiting: int = 100, *, low_priority: bool = False) -> None:
        self._package, self._low_priority = package, low_priority
        self._pool = WorkerPool(self._worker)
        self._gate = asyncio.Semaphore(workers)
        self._room, self._waiting = most_waiting, 0
        self._closed = False
        self._starting: set[asyncio.Task[None]] = set()
        # The file that a worker has read last: it is sent once.
        self._files: weakref.WeakKeyDictionary[Worker, str] = weakref.WeakKeyDictionary()

    async def start(self) -> None:
        """Begin to start one process; requests wait for it."""
        await self._gate.acquire()
        self._start_worker()

    async def ask(self, request: dict[str, Any], seconds: float, file: tuple[str, bytes] | None = None) -> bytes:
        """The answer; cancelling this ends the computation."""
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
            await asyncio.wait({answer}, timeout=_GRACE_SECONDS)
            raise
        finally:
            if answer.done() and answer.exception() is None:
                self._gate.release()
            else:
                self._pool.kill(future)
                answer.cancel()
                # The place stays taken until there is a new process; whoever asked need not wait for that.
                self._start_worker()
        try:
            return answer.result()
        except TimeLimitError as error:
            rule = f"took longer than {seconds:g} s and was ended"
            raise TookTooLong(request["what"], request["page"], rule, "choose smaller sizes") from error
        except WorkerError as error:
            rule = "ended the process that computed it"
            raise TookTooLong("this input", "as given", rule, "choose smaller sizes") from error

    async def close(self) -> None:
        """Leave no process behind; whoever waits for an answer gets an error at once."""
        self._closed = True
        self._pool.close()
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _worker(self) -> Worker:
        worker = Worker("avow.lab.request_queue:handler", self._package, variables=_VARIABLES)
        if self._low_priority and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, worker.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        return worker

    def _start_worker(self) -> None:
        """Start a process; the place in the gate, which the caller holds, is free when it is loaded."""

        async def start() -> None:
            # Where it cannot be started, the next request says why.
            try:
                with contextlib.suppress(WorkerError, OSError):
                    await asyncio.wrap_future(self._pool.submit(Worker.load))
            finally:
                self._gate.release()

        if self._closed:
            self._gate.release()
            return
        task = asyncio.ensure_future(start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _answer(self, worker: Worker, request: dict[str, Any], seconds: float, file: tuple[str, bytes] | None) -> bytes:
        name, content = file or (None, b"")
        if name is not None and self._files.get(worker) == name:
            content = b""
        elif name is not None:
            self._files[worker] = name
        (answer,) = worker.messages(request | {"file": name}, seconds, content)
        return answer


def handler(package: str) -> Handler:
    """What a worker does with a request: it names a page, `preview` or `verdict`, the inputs, and a file if any.

    It sends what the page says as JSON, or the parts of its mistake; where the page still has something to say, both.
    """
    pages = all_pages(package)
    tensors: dict[str, torch.Tensor] = {}

    def handle(request: dict[str, Any], content: bytes, send: Send) -> None:
        nonlocal tensors
        try:
            if content:
                tensors = tensors_of(content)
            page = pages[request["page"]]
            files = [tensors if request["file"] else {}] if page.takes_files else []
            answer = getattr(page, request["what"])(page.inputs.of(request["inputs"]), *files)
            trouble = answer.pop("trouble", None)
            body = json_bytes((error_body(trouble) if trouble else {}) | {"answer": answer})
        except Exception as error:
            body = json_bytes(error_body(error))
        send(body)

    return handle
