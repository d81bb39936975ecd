"""One run at a time writes a folder, and a lock never outlives its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from avow.errors import FileError
from avow.training import Progress, train
from avow.training.distributed import Ranks
from avow.training.knowledge import arms
from avow.training.run_folder import LOCK, locked, locked_by_first
from avow.training.run_many import run_arm, side_by_side
from tests.helpers.processes import message, together
from tests.helpers.runs import small

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.processes

HOLD = """
import sys
from pathlib import Path
from avow.training.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def refusal(folder: Path, pid: int, name: str = "run") -> str:
    rule = f"{name}={folder} is being written by process {pid} on {platform.node()}"
    return re.escape(f"{rule}; wait until that ends, or name another folder")


def test_a_folder_that_another_process_writes_is_refused_and_its_process_named(tmp_path: Path) -> None:
    config = small(tmp_path)
    run = tmp_path / "run"
    with held(run) as other:
        for resume in (False, True):
            with pytest.raises(FileError, match=refusal(run, other.pid)):
                train(config, run, resume=resume)
        assert [path.name for path in run.iterdir()] == [LOCK], "something was written beside the other"
    assert train(config, run).step == 14


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(tmp_path: Path, kind: signal.Signals) -> None:
    with held(tmp_path) as other:
        other.send_signal(kind)
        other.wait()
    assert (tmp_path / LOCK).read_text().startswith(f"{other.pid} "), "what is left tells nobody to wait"
    with locked(tmp_path):
        pass


def test_two_trainers_in_one_process_do_not_meet_in_a_folder(tmp_path: Path) -> None:
    config, told = small(tmp_path), []

    def second(progress: Progress) -> None:
        if progress.step == 6:
            thread = threading.Thread(target=lambda: told.append(message(lambda: train(config, tmp_path / "run"))))
            thread.start()
            thread.join()

    assert train(config, tmp_path / "run", progress=second).step == 14
    assert re.match(f"FileError: {refusal(tmp_path / 'run', os.getpid())}", told[0])


def test_a_run_that_fails_gives_its_folder_back(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="step-7 does not exist"):
        train(small(tmp_path), tmp_path / "run", resume=tmp_path / "step-7")
    with locked(tmp_path / "run"):
        pass


def test_a_lock_leaves_nothing_behind_and_takes_nothing_along(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "note").write_text("kept")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["note"]


def test_only_one_of_many_holds_a_folder_that_comes_and_goes(tmp_path: Path) -> None:
    inside, most = 0, 0

    def visit() -> None:
        nonlocal inside, most
        for _ in range(50):
            with locked(tmp_path / "run", wait=60):
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    crowd = [threading.Thread(target=visit) for _ in range(4)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert most == 1 and not (tmp_path / "run" / LOCK).exists()


def test_who_waits_gets_the_folder_when_it_is_free(tmp_path: Path) -> None:
    with held(tmp_path) as other:
        timer = threading.Timer(0.3, other.kill)
        timer.start()
        with locked(tmp_path, wait=60):
            assert other.wait() == -signal.SIGKILL
        timer.join()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    words = f"cannot be locked ({os.strerror(errno.ENOLCK)}); name a folder on a file system that has locks"
    with pytest.raises(FileError, match=re.escape(words)), locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"run=.* cannot be written \(Not a directory\); name another folder"):
        train(small(tmp_path), tmp_path / "file" / "run")


def test_an_experiment_holds_its_folder_and_its_arms_theirs(tmp_path: Path) -> None:
    flags = ["model.width=16", "model.heads=2", "model.layers=1", "data.batch=8"]
    (arm, *_) = arms(attentions=["exact"], steps=2, device="cpu", flags=flags)
    out = tmp_path / "out"
    with held(out) as other, pytest.raises(FileError, match=refusal(out, other.pid, "out")):
        side_by_side([arm], out)
    # An arm whose experiment was killed saves, and then makes way.
    with held(out / arm.name) as other:
        timer = threading.Timer(0.3, other.kill)
        timer.start()
        assert run_arm(arm.config, out / arm.name) == "finished"
        timer.join()


def refused_to_all(folder: str) -> str:
    here = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def hold() -> None:
        with locked_by_first(Path(folder), here):
            pass

    return message(hold)


@pytest.mark.processes
def test_all_processes_of_a_run_are_refused_together(tmp_path: Path) -> None:
    job = functools.partial(refused_to_all, str(tmp_path / "run"))
    with held(tmp_path / "run") as other:
        first, second = together(2, job, tmp_path / "refused")
    for words in (first, second):
        assert re.match(f"FileError: {refusal(tmp_path / 'run', other.pid)}", words)
    assert together(2, job, tmp_path / "free") == ["no error"] * 2
