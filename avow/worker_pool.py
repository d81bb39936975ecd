"""Worker processes: each handles one request at a time, with a time limit on the wait for every message.

A process can be stopped while it computes; a thread cannot. Pools of libraries (concurrent.futures, pebble) give one
result per task and limit the whole task. Here an answer is a series of messages, each with the limit again, and a
worker can be asked to save its work before it ends. Workers are started, not forked: a lock that a thread holds at the
moment of a fork stays locked in the child for ever.

A request is a dictionary with bytes of content. The answer is a series of non-empty messages, closed by an empty one;
the first empty message says that the worker is loaded. Messages are bytes, never pickled: a worker may have computed
what a stranger asked for. A worker whose connection ends, because whoever started it is gone, sends itself SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

Send = Callable[[bytes], None]
Handler = Callable[[dict[str, Any], bytes, Send], None]
"""Takes a request, its content, and a function that sends one message of the answer."""

# A fresh process loads torch and the provers, on a busy machine too.
_START_SECONDS = 120.0
# The longest message: enough for figures, too little to fill the memory.
_MESSAGE_BYTES = 1 << 24
# A process whose connection has ended is about to exit, with a code that says why.
_EXIT_SECONDS = 10.0


class WorkerError(Exception):
    """A worker that ended before its answer did; the message is a predicate, such as "was ended by SIGKILL"."""


class TimeLimitError(WorkerError):
    """A worker that was ended at its time limit."""


class Worker:
    """A process that handles requests; other threads may call `terminate`, `kill`, `suspend` and `resume` alone.

    `handler` is "module:function"; the function takes `arguments` and returns the `Handler`. With `own_session`, a
    Ctrl-C or Ctrl-Z in the terminal does not reach the process.
    """

    def __init__(
        self,
        handler: str,
        *arguments: str,
        threads: int = 1,
        own_session: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        # In append mode, because it is emptied before each request.
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # `end` closes it
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "avow.worker_pool", str(theirs.fileno()), handler, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                # The same modules as here, and this many threads to compute with.
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)} | dict(variables or {}),
                start_new_session=own_session,
            )
        self.pid = self._process.pid
        self.loaded = False
        # Seconds that the process has stood still, and since when it does now.
        self._stood = 0.0
        self._since: float | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self) -> None:
        """Wait until the worker can take requests."""
        if not self.loaded:
            for _ in self._messages(_START_SECONDS):
                pass
            self.loaded = True

    def messages(self, request: dict[str, Any], seconds: float | None = None, content: bytes = b"") -> Iterator[bytes]:
        """Send a request; the messages of its answer, each within the time limit.

        They must be read to the end before the next request. Raises WorkerError where the worker does not get there.
        """
        self.load()
        self._stderr.truncate(0)
        with contextlib.suppress(OSError):  # It has ended: `_messages` says so.
            self._connection.send((request, content))
        yield from self._messages(seconds)

    def terminate(self) -> None:
        """Ask the process to save its work and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()

    def suspend(self) -> None:
        """Have the process stand still; its time limits do so too."""
        if self._since is None:
            self._since = time.monotonic()
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have a process that stands still go on."""
        if self._since is not None:
            self._process.send_signal(signal.SIGCONT)
            stood, self._since = time.monotonic() - self._since, None
            self._stood += stood

    def end(self) -> None:
        """End the process and close what connects it with this one."""
        self.kill()
        self._connection.close()
        self._stderr.close()

    def _messages(self, seconds: float | None) -> Iterator[bytes]:
        while True:
            error: WorkerError | None = None
            try:
                if self._arrives(seconds):
                    message = self._connection.recv_bytes(_MESSAGE_BYTES)
                else:
                    error = TimeLimitError(f"ran out of time: {seconds:g} s")
            except (EOFError, ConnectionError):
                error = WorkerError(self._ending())
            except OSError:
                error = WorkerError(f"sent a message of more than {_MESSAGE_BYTES} bytes")
            if error is not None:
                self.end()
                raise error
            if not message:
                return
            yield message

    def _arrives(self, seconds: float | None) -> bool:
        """Whether a message comes within the limit, which does not count the time that the process stands still."""
        began = self._time()
        while seconds is not None and (left := began + seconds - self._time()) > 0:
            if self._connection.poll(left):
                return True
        return self._connection.poll(None if seconds is None else 0)

    def _time(self) -> float:
        """Seconds on a clock that stands still with the process."""
        now, since = time.monotonic(), self._since
        return now - self._stood - (0.0 if since is None else now - since)

    def _ending(self) -> str:
        """How a process ended that has closed its connection, and the last line it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self.kill()
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._stderr.seek(0)
        printed = self._stderr.read().decode(errors="replace").strip().splitlines()
        return how + (f": {printed[-1]}" if printed else "")


class WorkerPool:
    """Workers that are used again for the next task; whoever submits tasks decides how many run at once."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: dict[Future[Any], Worker] = {}
        self._closed = False

    def submit(self, task: Callable[[Worker], T]) -> Future[T]:
        """The result of a task, which is called in a thread with a worker of its own."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            # The process starts in this thread: a child belongs to the thread that started it.
            while self._idle and not self._idle[0].alive:
                self._idle.pop(0).end()
            worker = self._busy[future] = self._idle.pop(0) if self._idle else self._start()
        threading.Thread(target=self._run, args=(future, worker, task), daemon=True).start()
        return future

    def kill(self, future: Future[Any]) -> None:
        """End the worker of a task that nobody waits for any more; where the task is done, nothing happens."""
        with self._lock:  # Held until the end, so that no other task gets the worker meanwhile.
            if future in self._busy:
                self._busy[future].kill()

    def suspend(self) -> None:
        """Have every worker that is at work stand still."""
        with self._lock:
            for worker in self._busy.values():
                worker.suspend()

    def resume(self) -> None:
        """Have every worker go on; one may have finished its task when it was suspended."""
        with self._lock:
            for worker in (*self._busy.values(), *self._idle):
                worker.resume()

    def close(self) -> None:
        """End every worker; tasks that still run end with WorkerError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy.values())
        for worker in busy:
            worker.kill()
        for worker in idle:
            worker.end()

    def _run(self, future: Future[T], worker: Worker, task: Callable[[Worker], T]) -> None:
        failure = None
        try:
            result = task(worker)
        except BaseException as error:
            failure = error
        with self._lock:
            del self._busy[future]
            if usable := failure is None and not self._closed:
                self._idle.append(worker)
        if not usable:
            worker.end()
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)


def _serve(descriptor: str, handler: str, *arguments: str) -> None:
    """Handle requests until there are no more."""
    # Ctrl-C reaches the whole group of processes; the one that started this worker ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(descriptor))
    waiting: queue.Queue[tuple[dict[str, Any], bytes] | None] = queue.Queue()

    def receive() -> None:
        """Pass requests on; after the last one, stop whatever is being computed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                waiting.put(connection.recv())
        waiting.put(None)
        os.kill(os.getpid(), signal.SIGTERM)

    def send(message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # Nobody listens any more, and `receive` stops this process.
            connection.send_bytes(message)

    threading.Thread(target=receive, daemon=True).start()
    module, _, function = handler.partition(":")
    handle: Handler = getattr(importlib.import_module(module), function)(*arguments)
    send(b"")
    while (request := waiting.get()) is not None:
        handle(*request, send)
        send(b"")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
