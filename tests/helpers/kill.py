"""`kill -9` at random moments of a run; every resume loads, and the end is the same: `python -m tests.helpers.kill`."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from avow.training import checkpoint, train
from tests.helpers.runs import small

ROOT = Path(__file__).parents[2]
# Steps at the end that no kill aims at: the run would be over before it comes.
SPARED = 20
# Seconds within which a kill follows the step it aims at: a few steps, each with its save.
SOON = 0.1


class Kill(NamedTuple):
    """One kill: the step it waited for, the step of the checkpoint that it left, and whether a save was cut short."""

    aim: int
    survived: int
    in_a_save: bool


def flags(steps: int) -> tuple[str, ...]:
    # Saved at every step, so that most kills fall into or near a save.
    return ("run.save_every=1", f"schedule.steps={steps}")


def killed(folder: Path, times: int, seed: int, steps: int) -> list[Kill]:
    """Kill the run in `folder` so many times, resuming it in between.

    The steps that kills wait for are drawn uniformly over the run, and taken in order; the moment is drawn too.
    """
    draw, kills = random.Random(seed), []
    saved = folder / "run" / "checkpoints"
    for aim in sorted(draw.randrange(steps - SPARED) for _ in range(times)):
        before = _last(saved)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.runs", str(folder), *flags(steps)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        # Before this process has saved something of its own, there is nothing it could break.
        until = time.monotonic() + 120
        while process.poll() is None and _last(saved) < max(aim, before + 1) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, SOON))
        over = process.poll() is not None
        process.kill()
        _, complaint = process.communicate()
        if over:
            raise AssertionError(f"not killed, ended with {process.returncode}: {complaint.decode()[-2000:]}")
        # The last one, whatever it is, and not the last good one.
        survived = checkpoint.load(checkpoint.checkpoints(saved)[-1]).step
        kills.append(Kill(aim, survived, any(saved.glob(".writing-*"))))
    return kills


def ends_alike(folder: Path, steps: int) -> bool:
    """Whether the run in `folder`, resumed to its end, ends in the bits of one that nobody killed."""
    config, threads = small(folder, *flags(steps)), torch.get_num_threads()
    # As the killed processes had it: sums are split over threads, and other splits round otherwise.
    torch.set_num_threads(1)
    try:
        ends = [train(config, folder / "run", resume=True), train(config, folder / "whole")]
    finally:
        torch.set_num_threads(threads)
    one, other = (checkpoint.load(end.checkpoint) for end in ends)
    same = all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())
    return same and one.step == other.step == steps


def _last(saved: Path) -> int:
    """The number of the last checkpoint, or -1: its name alone, since it may be gone when it is read."""
    return max((int(path.name.removeprefix("step-")) for path in saved.glob("step-*")), default=-1)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=400)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kills = killed(Path(name), given.times, given.seed, given.steps)
        same = ends_alike(Path(name), given.steps)
    print("kill  aimed at  survived  in a save")
    for number, kill in enumerate(kills, 1):
        print(f"{number:4}  {kill.aim:8}  {kill.survived:8}  {'yes' if kill.in_a_save else 'no'}")
    print(f"{len(kills)} kills in {given.steps} steps; final weights {'equal bit for bit' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
