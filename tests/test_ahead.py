"""Batches made ahead are the same batches, in the same order, and leave dropout's draws alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from avow.errors import ParameterError
from avow.training.ahead import ahead
from avow.training.batches import Batches
from avow.training.graphs import Replayed
from avow.training.loop import Trainer
from avow.training.parallel import Ranks
from tests.runs import small


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


def test_makers_leave_signals_to_the_process_that_trains(tmp_path: Path) -> None:
    batches = made(tmp_path, 0)
    steps = ahead(batches, 40)
    next(steps)
    makers = [int(line) for line in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    assert makers
    for maker in makers:
        os.kill(maker, signal.SIGTERM)
        os.kill(maker, signal.SIGINT)
    time.sleep(0.1)
    assert len(list(steps)) == 39


def test_a_process_ends_though_it_did_not_ask_for_every_step(tmp_path: Path) -> None:
    program = f"""if True:
        import pathlib
        from avow.training.ahead import _made, ahead
        from tests.test_ahead import made
        steps = MAKE(made(pathlib.Path({str(tmp_path)!r}), 0), 40)
        next(steps)
        print("one", flush=True)
    """
    command = [sys.executable, "-c", program.replace("MAKE", "ahead")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("one\n", 0), done.stderr
    # Without that, the makers do not hear that they should go, and Python waits for them for ever.
    command = [sys.executable, "-c", program.replace("MAKE", "_made")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None and stuck.stdout.readline() == "one\n"
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(3)
        for maker in Path(f"/proc/{stuck.pid}/task/{stuck.pid}/children").read_text().split():
            os.kill(int(maker), signal.SIGKILL)


@pytest.mark.parametrize("waits, ends", [("one_arm._heed_the_end", True), ("sys.stdin.read", False)])
def test_makers_start_while_an_arm_waits_for_its_input_to_end(tmp_path: Path, waits: str, ends: bool) -> None:
    program = f"""if True:
        import pathlib, sys, threading, time
        from avow.training import one_arm
        from avow.training.ahead import ahead
        from tests.test_ahead import made
        threading.Thread(target={waits}, daemon=True).start()
        time.sleep(0.3)
        steps = ahead(made(pathlib.Path({str(tmp_path)!r}), 0), 3)
        print("began", flush=True)
        print(len(list(steps)), flush=True)
    """
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdout is not None and process.stdout.readline() == b"began\n"
        ready, _, _ = select.select([process.stdout], [], [], 60 if ends else 5)
        assert bool(ready) == ends
        for maker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(maker), signal.SIGKILL)
        process.kill()


def test_passes_are_recorded_on_a_gpu_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ParameterError, match=r"run: graphs=True needs a model on a GPU; use run\.device=cuda"):
        Replayed(lambda ids, targets, whole: ids, model.parameters())
    with pytest.raises(ParameterError, match="run: graphs=True needs a model on a GPU"):
        Trainer(small(tmp_path, "run.graphs=true"), tmp_path / "run", Ranks(0, 1, torch.device("cpu")))
