"""Batches made ahead are the same batches, in the same order, and leave dropout's draws alone."""

from __future__ import annotations

import errno
import fcntl
import functools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from avow.errors import FileError, LostRank, ParameterError
from avow.training.batches import Batches, Step
from avow.training.graphs import Replayed
from avow.training.loop import Trainer
from avow.training.parallel import Ranks
from avow.training.prefetch import ahead
from tests.helpers.runs import small


def made(folder: Path, position: int) -> Batches:
    batches = Trainer(small(folder), folder / "run", Ranks(0, 1, torch.device("cpu"))).batches
    batches.position = position
    return batches


@pytest.mark.parametrize("position", [0, 5])
def test_steps_come_in_order_and_only_until_the_last(tmp_path: Path, position: int) -> None:
    batches = made(tmp_path, position)
    expected = [batches.at(step) for step in range(position, 12)]
    before = torch.get_rng_state()
    found = []
    for step in ahead(batches, 12):
        found.append(step)
        assert batches.position == position + len(found), "a run knows where it stands from what it was given"
    assert torch.equal(torch.get_rng_state(), before), "dropout would draw otherwise"
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.targets, one.positions) == (other.targets, other.positions)
        for mine, theirs in zip(one.micros, other.micros, strict=True):
            assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.targets, theirs.targets)
    assert not torch.equal(expected[0].micros[0].ids, expected[1].micros[0].ids), "equal steps would show nothing"


@pytest.mark.parametrize(("lack", "words"), [("room", "No space left on device"), ("folder", "No such file or dir")])
def test_where_batches_cannot_be_written_down_one_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str, words: str
) -> None:
    batches = made(tmp_path, 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if lack == "room":
        monkeypatch.setattr(tempfile, "TemporaryFile", functools.partial(open, "/dev/full", "wb"))
    with pytest.raises(FileError) as told:
        ahead(batches, 6)
    first = f"temporary folder={tmp_path / 'none'} cannot hold the batches ({words}"
    assert str(told.value).startswith(first)
    assert str(told.value).endswith("; make room there, or name another in TMPDIR")


def children(process: int) -> list[int]:
    return [int(line) for line in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_makers_leave_signals_to_the_process_that_trains(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = ahead(made(tmp_path, 0), 40)
    next(steps)
    makers = set(children(os.getpid())) - before
    assert makers
    for maker in makers:
        os.kill(maker, signal.SIGTERM)
        os.kill(maker, signal.SIGINT)
    time.sleep(0.1)
    assert len(list(steps)) == 39


def test_steps_come_through_a_small_pipe_where_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(file: object, what: int, *_: int) -> int:
        asked.append(what)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert len(list(ahead(made(tmp_path, 0), 6))) == 6
    assert asked and set(asked) == {fcntl.F_SETPIPE_SZ}


def test_a_maker_that_is_gone_is_missed(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = ahead(made(tmp_path, 0), 10**6)
    next(steps)
    for maker in set(children(os.getpid())) - before:
        os.kill(maker, signal.SIGKILL)
    with pytest.raises(LostRank, match="maker of batches=gone must make batches until the last step; see what it said"):
        list(steps)


def test_makers_end_when_nobody_wants_their_steps(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    steps = ahead(made(tmp_path, 0), 10**6)
    next(steps)
    assert set(children(os.getpid())) - before
    del steps
    assert not set(children(os.getpid())) - before


def program(folder: Path, *last: str) -> list[str]:
    """A process that asks for the first of many steps, tells of it, and goes on so."""
    lines = (
        "import os, pathlib, signal, sys, threading, time",
        "from avow.training.prefetch import ahead",
        "from tests.test_ahead import forked, made",
        f"batches = made(pathlib.Path({str(folder)!r}), 0)",
        *last,
    )
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.mark.parametrize("end, code", [("pass", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_makers_end_with_the_process_that_trains(tmp_path: Path, end: str, code: int) -> None:
    command = program(tmp_path, "steps = ahead(batches, 10**6)", "next(steps)", "print(1, flush=True)", "input()", end)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"1\n"
        makers = children(process.pid)
        assert makers
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == code
    until = time.monotonic() + 60
    while any(alive(maker) for maker in makers):
        assert time.monotonic() < until, "a maker goes on for nobody"
        time.sleep(0.01)


def alive(process: int) -> bool:
    """Whether a process is there and not waiting to be buried."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def forked(batches: Batches, until: int) -> list[Step]:
    """As it must not be done: the child wants what a thread here holds, and no such thread lives in it."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(batches.at, range(until))


@pytest.mark.parametrize("made_by, ends", [("ahead", True), ("forked", False)])
def test_makers_start_whatever_other_threads_hold(tmp_path: Path, made_by: str, ends: bool) -> None:
    waiting = "threading.Thread(target=sys.stdin.read, daemon=True).start(); time.sleep(0.3)"
    begin, whole = "print('began', flush=True)", f"print(len(list({made_by}(batches, 3))), flush=True)"
    command, pipe = program(tmp_path, waiting, begin, whole, "os._exit(0)"), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdout is not None and process.stdout.readline() == b"began\n"
        ready, _, _ = select.select([process.stdout], [], [], 60 if ends else 5)
        assert bool(ready) == ends
        for maker in children(process.pid):
            os.kill(maker, signal.SIGKILL)
        process.kill()


def test_passes_are_recorded_on_a_gpu_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ParameterError, match=r"run: graphs=True needs a model on a GPU; use run\.device=cuda"):
        Replayed(lambda ids, targets, whole: ids, model.parameters())
    with pytest.raises(ParameterError, match="run: graphs=True needs a model on a GPU"):
        Trainer(small(tmp_path, "run.graphs=true"), tmp_path / "run", Ranks(0, 1, torch.device("cpu")))
