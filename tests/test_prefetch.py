"""Batches made ahead are the same batches, in the same order, and leave dropout's draws alone."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from avow.errors import LostRank, ParameterError
from avow.training import Progress, Trained
from avow.training.batches import Batches, Step, naming_lost_workers
from avow.training.distributed import Ranks
from avow.training.loop import Replayed, Trainer
from tests.helpers.runs import small

pytestmark = pytest.mark.processes


def small_batches(folder: Path, position: int) -> Batches:
    batches = Trainer(small(folder), folder / "run", Ranks(0, 1, torch.device("cpu"))).batches
    batches.position = position
    return batches


@pytest.mark.parametrize("position", [0, 5])
def test_steps_come_in_order_and_only_until_the_last(tmp_path: Path, position: int) -> None:
    batches = small_batches(tmp_path, position)
    expected = [batches[step] for step in range(position, 12)]
    before = torch.get_rng_state()
    steps = []
    for step in batches.prefetched(12):
        steps.append(step)
        assert batches.position == position + len(steps), "a run knows where it is from what it was given"
    assert torch.equal(torch.get_rng_state(), before), "dropout would draw otherwise"
    assert len(steps) == len(expected)
    for one, other in zip(steps, expected, strict=True):
        assert (one.targets, one.positions) == (other.targets, other.positions)
        for mine, theirs in zip(one.micros, other.micros, strict=True):
            assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.targets, theirs.targets)
    assert not torch.equal(expected[0].micros[0].ids, expected[1].micros[0].ids), "equal steps would show nothing"


def children(process: int) -> list[int]:
    """The workers among the children of a process; Python's resource tracker stays."""
    numbers = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(n) for n in numbers if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()]


def test_workers_leave_signals_to_the_process_that_trains(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = small_batches(tmp_path, 0).prefetched(40)
    workers = set(children(os.getpid())) - before
    assert workers
    for delay in (0.0, 0.1):  # before they have loaded anything, and at work
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
        next(steps)
        time.sleep(delay)
    assert len(list(steps)) == 38


def test_a_run_with_workers_stops_at_a_signal_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config, alone = small(tmp_path), Ranks(0, 1, torch.device("cpu"))
    whole = Trainer(config, tmp_path / "whole", alone).run().model.state_dict()

    def run(resume: bool, progress: Callable[[Progress], None] | None) -> Trained:
        trainer = Trainer(config, tmp_path / "run", alone, resume)
        trainer.source = trainer.batches.prefetched(trainer.steps)
        return trainer.run(progress)

    def interrupt(progress: Progress) -> None:
        for process in (os.getpid(), *children(os.getpid())):  # as Ctrl-C on a terminal does
            os.kill(process, signal.SIGINT)

    first = run(False, interrupt)
    assert first.interrupted and first.step == 3 and first.signal == signal.SIGINT
    second = run(True, None)
    assert not second.interrupted and second.step == 14
    assert all(torch.equal(x, whole[name]) for name, x in second.model.state_dict().items())


def test_a_worker_that_is_gone_is_missed(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = small_batches(tmp_path, 0).prefetched(10**6)
    next(steps)
    words = "batch worker=lost must run until the last step (DataLoader worker"
    with pytest.raises(LostRank, match=re.escape(words)), naming_lost_workers():
        for worker in set(children(os.getpid())) - before:
            os.kill(worker, signal.SIGKILL)
        list(steps)
    with pytest.raises(RuntimeError, match="another"), naming_lost_workers():
        raise RuntimeError("another")


def test_workers_end_when_nobody_wants_their_steps(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = small_batches(tmp_path, 0).prefetched(10**6)
    next(steps)
    assert set(children(os.getpid())) - before
    del steps
    assert not set(children(os.getpid())) - before


def program(folder: Path, *last: str) -> list[str]:
    """A process that asks for the first of many steps, says so, and goes on; a script that guards no main."""
    lines = (
        "import os, pathlib, signal, sys, threading, time",
        "from tests.test_prefetch import forked, small_batches",
        f"batches = small_batches(pathlib.Path({str(folder)!r}), 0)",
        *last,
    )
    (folder / "script.py").write_text("\n".join(lines))
    return [sys.executable, str(folder / "script.py")]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.parametrize("end, code", [("pass", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_workers_end_with_the_process_that_trains(tmp_path: Path, end: str, code: int) -> None:
    steps = "steps = batches.prefetched(10**6)"
    command = program(tmp_path, steps, "next(steps)", "print(1, flush=True)", "input()", end)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=ENVIRONMENT) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"1\n"
        workers = children(process.pid)
        assert workers
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == code
    until = time.monotonic() + 60
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < until, "a worker goes on for nobody"
        time.sleep(0.01)


def alive(process: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def forked(batches: Batches, until: int) -> list[Step]:
    """As it must not be done: the child wants what a thread here holds, and no such thread lives in it."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(batches.__getitem__, range(until))


@pytest.mark.parametrize("steps, ends", [("batches.prefetched(3)", True), ("forked(batches, 3)", False)])
def test_workers_start_whatever_other_threads_hold(tmp_path: Path, steps: str, ends: bool) -> None:
    waiting = "threading.Thread(target=sys.stdin.read, daemon=True).start(); time.sleep(0.3)"
    begin, whole = "print('began', flush=True)", f"print(len(list({steps})), flush=True)"
    command, pipe = program(tmp_path, waiting, begin, whole, "os._exit(0)"), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"began\n"
        ready, _, _ = select.select([process.stdout], [], [], 60 if ends else 5)
        assert bool(ready) == ends
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()


def test_passes_are_recorded_on_a_gpu_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ParameterError, match=r"run: graphs=True needs a model on a GPU; use run\.device=cuda"):
        Replayed(lambda ids, targets, whole: ids, model.parameters())
    with pytest.raises(ParameterError, match="run: graphs=True needs a model on a GPU"):
        Trainer(small(tmp_path, "run.graphs=true"), tmp_path / "run", Ranks(0, 1, torch.device("cpu")))
