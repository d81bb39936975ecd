"""`kill -9` at random moments of a run; every resume loads, and the end is the same: `python -m tests.kill`."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from avow.training import checkpoint, train
from tests.runs import small

ROOT = Path(__file__).parent.parent
# Saved at every step, so that most kills fall into or near a save.
FLAGS = ("run.save_every=1", "schedule.steps=400")


def begin(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.runs", str(folder), *FLAGS]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def killed(folder: Path, times: int, seed: int, patience: float) -> list[int]:
    """Kill the run in `folder` so many times at random moments after its start; the step of each survivor."""
    draw, steps = random.Random(seed), []
    saved = folder / "run" / "checkpoints"
    for _ in range(times):
        before = checkpoint.newest(saved)
        process = begin(folder)
        # The clock starts when this run has saved something of its own: before, there is nothing to break.
        until = time.monotonic() + 120
        while process.poll() is None and checkpoint.newest(saved) == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, patience))
        finished = process.poll() is not None
        process.kill()
        _, complaint = process.communicate()
        if finished and process.returncode != 0:
            raise AssertionError(f"a resume failed: {complaint.decode()[-2000:]}")
        found = checkpoint.checkpoints(saved)
        steps.append(checkpoint.load(found[-1]).step)  # The last one, whatever it is, and not the last good one.
        if finished:
            break
    return steps


def compare(folder: Path) -> bool:
    """Whether the run in `folder`, finished at last, ends in the bits of one that nobody killed."""
    torch.set_num_threads(1)
    if begin(folder).wait() != 0:
        return False
    whole = train(small(folder, *FLAGS), folder / "whole")
    other = checkpoint.load(checkpoint.checkpoints(folder / "run" / "checkpoints")[-1])
    same = all(torch.equal(x, other.weights[name]) for name, x in whole.model.state_dict().items())
    return same and other.step == whole.step


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--patience", type=float, default=0.3, help="seconds a run lives at most after its first save")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        steps = killed(Path(name), given.times, given.seed, given.patience)
        same = compare(Path(name))
    print(f"{len(steps)} kills, surviving steps {steps}; final weights {'equal' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
