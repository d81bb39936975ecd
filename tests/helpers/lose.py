"""`kill -9` of one process of several at random moments; the run ends the same: `python -m tests.helpers.lose`.

The agent of torchrun starts the processes and, after each kill, starts them again. Every survivor must end with an
error that names the lost rank, before its patience with the others is over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from avow import file_io
from avow.training import Progress, checkpoint, train
from avow.training.run_folder import read_log
from tests.helpers.launch import launched, said
from tests.helpers.runs import small

ROOT = Path(__file__).parents[2]
# Seconds that a process waits for the others.
TIMEOUT = 20.0
# A kill follows the step it waited for within this many seconds; that many steps before the end are left alone.
SOON, SPARED = 0.1, 5


class Loss(NamedTuple):
    """One kill: the rank, the last step before it, where the run went on, and how the others took it.

    `seconds` went by until the last survivor had ended; `named` says whether each of them named the rank.
    """

    rank: int
    step: int
    resumed: int
    in_a_save: bool
    seconds: float
    named: bool


def flags(sequence: int, steps: int) -> tuple[str, ...]:
    run = (f"run.sequence={sequence}", f"run.timeout={TIMEOUT:g}", "run.save_every=3", "run.log_every=1")
    return *run, f"schedule.steps={steps}", "run.parallel=sharded"


@contextlib.contextmanager
def running(folder: Path, ranks: int, restarts: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Processes at work in `folder`, each with its words in a file of its own; they are started again so many times."""
    small(folder)  # The corpus, before several processes want to make it.
    command = [
        sys.executable,
        "-m",
        "tests.helpers.lose",
        f"--ranks={ranks}",
        f"--times={restarts}",
        "--launch",
        str(folder),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "agent.txt").open("w") as told:
        process = subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stderr=told, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def work(folder: Path, flags: list[str]) -> None:
    """What each process does: train, and leave notes of itself."""
    torch.set_num_threads(1)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    (notes / f"{attempt}.{rank}.pid").write_text(str(os.getpid()))

    def note(progress: Progress) -> None:
        file_io.write(notes / f"{attempt}.step", str(progress.step))
        first = notes / f"{attempt}.first"
        if not first.exists():
            file_io.write(first, str(progress.step))

    train(small(folder, *flags), folder / "run", resume=True, progress=note)


def lost(folder: Path, ranks: int, sequence: int, times: int, steps: int, seed: int, stalls: int = 0) -> list[Loss]:
    """Kill one of the processes so many times, let the run come to its end, and tell how each kill went.

    The last `stalls` of them are not killed but stopped: they keep their connections and say nothing more.
    """
    draw, kills = random.Random(seed), []
    with running(folder, ranks, times, *flags(sequence, steps)) as process:
        for attempt in range(times):
            # The steps that are left are shared among the kills that are left: each finds a run to kill.
            begin = _at_step(folder, attempt, 0, process)
            reach = max(1, (steps - begin) // (times - attempt) - SPARED)
            _at_step(folder, attempt, begin + draw.randrange(reach), process)
            time.sleep(draw.uniform(0, SOON))
            kind = signal.SIGKILL if attempt < times - stalls else signal.SIGSTOP
            kills.append(_killed(folder, attempt, draw.randrange(ranks), ranks, kind))
        _ended(process, folder)
    resumed = [int(_note(folder, f"{attempt + 1}.first")) - 1 for attempt in range(times)]
    return [kill._replace(resumed=step) for kill, step in zip(kills, resumed, strict=True)]


def undisturbed(folder: Path, ranks: int, sequence: int, steps: int) -> None:
    """The same run, left in peace."""
    with running(folder, ranks, 0, *flags(sequence, steps)) as process:
        _ended(process, folder)


def ends_alike(run: Path, other: Path) -> bool:
    """Whether two runs have the same losses, and ended in the same bits."""
    ends = [checkpoint.load(checkpoint.checkpoints(one / "checkpoints")[-1]) for one in (run, other)]
    curves = [[(row.step, row.loss) for row in read_log(one / "log.csv")] for one in (run, other)]
    same = all(torch.equal(x, ends[1].weights[name]) for name, x in ends[0].weights.items())
    return same and curves[0] == curves[1] and len(curves[0]) == ends[0].step == ends[1].step


def _killed(folder: Path, attempt: int, rank: int, ranks: int, kind: signal.Signals) -> Loss:
    pids = [int(_note(folder, f"{attempt}.{one}.pid")) for one in range(ranks)]
    step, began = int(_note(folder, f"{attempt}.step")), time.monotonic()
    os.kill(pids[rank], kind)
    in_a_save = any((folder / "run" / "checkpoints").glob(".writing-*"))
    survivors = [pid for one, pid in enumerate(pids) if one != rank]
    while any(_alive(pid) for pid in survivors) and time.monotonic() < began + 2 * TIMEOUT:
        time.sleep(0.02)
    seconds = time.monotonic() - began
    words = [said(folder / "words", attempt, one) for one in range(ranks) if one != rank]
    named = all(f"LostRank: rank {rank}=lost" in text for text in words)
    return Loss(rank, step, -1, in_a_save, seconds, named)


def _note(folder: Path, name: str) -> str:
    return (folder / "notes" / name).read_text()


def _at_step(folder: Path, attempt: int, step: int, process: subprocess.Popen[str]) -> int:
    """The step that an attempt has reached, when it is `step` or more and the first of its own."""
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if (now := int(_note(folder, f"{attempt}.step"))) >= step:
                return now
        time.sleep(0.005)
    raise AssertionError(f"attempt {attempt} never came to step {step}: {(folder / 'agent.txt').read_text()[-2000:]}")


def _ended(process: subprocess.Popen[str], folder: Path) -> None:
    if process.wait(timeout=300):
        raise AssertionError((folder / "agent.txt").read_text()[-3000:])


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # A process that ended and that nobody asked about yet is there, too, as Z.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--launch", type=Path)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--sequence", type=int, default=2)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--stalls", type=int, default=0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("flags", nargs="*")
    given = options.parse_args()
    if given.launch:
        launched(work, given.launch, given.flags, ranks=given.ranks, words=given.launch / "words", restarts=given.times)
        return 0
    with tempfile.TemporaryDirectory() as name:
        killed, whole = Path(name) / "killed", Path(name) / "whole"
        kills = lost(killed, given.ranks, given.sequence, given.times, given.steps, given.seed, given.stalls)
        undisturbed(whole, given.ranks, given.sequence, given.steps)
        same = ends_alike(killed / "run", whole / "run")
    print("kill  rank  at step  resumed from  in a save  seconds  named by all")
    for number, k in enumerate(kills, 1):
        words = "yes" if k.in_a_save else "no", f"{k.seconds:.1f}", "yes" if k.named else "NO"
        print(f"{number:4}  {k.rank:4}  {k.step:7}  {k.resumed:12}  {words[0]:>9}  {words[1]:>7}  {words[2]:>12}")
    # One that is only stopped is waited for until the timeout; to say who it is takes a part of that again.
    in_time = all(k.named and k.seconds < 1.5 * TIMEOUT for k in kills)
    how = f"{len(kills) - given.stalls} kills and {given.stalls} stops in {given.steps} steps"
    print(f"{how} of {given.ranks} processes, sequences over {given.sequence}")
    print(f"survivors {'all named the rank in time' if in_time else 'FAILED'}; ", end="")
    print(f"losses and weights {'equal bit for bit' if same else 'DIFFER'} those of a run that lost nobody")
    return 0 if same and in_time else 1


if __name__ == "__main__":
    sys.exit(main())
