"""Workers answer in messages, are ended at their limit, and say how they ended."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from avow.worker_pool import TimeLimitError, Worker, WorkerError, WorkerPool

pytestmark = pytest.mark.processes

ECHO = functools.partial(Worker, "tests.helpers.worker_handlers:echo", "message ")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(ECHO)
    yield pool
    pool.close()


def ask(pool: WorkerPool, seconds: float | None = None, content: bytes = b"", **request: Any) -> list[bytes]:
    return pool.submit(lambda worker: list(worker.messages(request, seconds, content))).result()


def test_an_answer_is_all_its_messages(pool: WorkerPool) -> None:
    assert ask(pool, messages=3) == [b"message 0", b"message 1", b"message 2"]
    assert ask(pool, messages=0) == []
    assert ask(pool, content=b"\x00\xff") == [b"message 0\x00\xff"]


def test_the_limit_holds_for_each_message(pool: WorkerPool) -> None:
    assert len(ask(pool, seconds=2.0, messages=4, pause=0.6)) == 4
    with pytest.raises(TimeLimitError, match=r"0\.1 s"):
        ask(pool, seconds=0.1, pause=60.0)
    assert ask(pool) == [b"message 0"], "the next task gets a fresh worker"


def test_a_worker_that_stands_still_goes_on_later_and_its_limit_waits_for_it() -> None:
    pool = WorkerPool(ECHO)
    ask(pool)
    answer = pool.submit(lambda worker: list(worker.messages({"messages": 3, "pause": 0.1}, 1.0)))
    pool.suspend()
    time.sleep(2.0)
    assert not answer.done(), "neither an answer nor the end of its time"
    pool.resume()
    assert len(answer.result(60)) == 3
    pool.close()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("exit", "exit code 7"),
        ("segfault", "SIGSEGV"),
        ("raise", "exit code 1: ValueError: on purpose"),
        ("flood", "more than 16777216 bytes"),
    ],
)
def test_how_a_worker_ended_is_said(pool: WorkerPool, act: str, words: str) -> None:
    with pytest.raises(WorkerError, match=re.escape(words)):
        ask(pool, act=act)


def test_a_worker_that_died_between_two_tasks_is_replaced() -> None:
    pool = WorkerPool(ECHO)
    pids: list[int] = []

    def task(worker: Worker) -> list[bytes]:
        pids.append(worker.pid)
        return list(worker.messages({}))

    pool.submit(task).result()
    assert pool.submit(task).result() and len(set(pids)) == 1, "an idle worker is used again"
    (idle,) = pool._idle
    idle.kill()
    assert pool.submit(task).result() == [b"message 0"] and len(set(pids)) == 2
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(task)


def test_closing_ends_what_still_runs() -> None:
    pool = WorkerPool(ECHO)
    future = pool.submit(lambda worker: list(worker.messages({"pause": 60.0})))
    pool.close()
    with pytest.raises(WorkerError, match="SIGKILL"):
        future.result(timeout=30)
