"""Constructions drawn by the thousand: each must keep its promise, each weakened one must be caught breaking it.

python -m tests.prove --cases 10000
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from avow.theory.constructions.construction import Construction
from tests.helpers import draws_heads, draws_queries, draws_relu

DRAWS: dict[str, Callable[[torch.Generator], Construction]] = {
    **draws_queries.DRAWS,
    **draws_heads.DRAWS,
    **draws_relu.DRAWS,
}
WEAKENED: dict[str, Callable[[Construction], Construction]] = {
    **draws_queries.WEAKENED,
    **draws_heads.WEAKENED,
    **draws_relu.WEAKENED,
}


class Tally(NamedTuple):
    """How many constructions of a kind were proved, broke their promise, or got away weakened; and one story."""

    kind: str
    proved: int
    broken: int
    missed: int
    story: str

    @property
    def sound(self) -> bool:
        return not self.broken and not self.missed

    def __str__(self) -> str:
        told = f"; {self.story}" if self.story else ""
        return f"{self.kind}: {self.proved:,} proved, {self.broken} broken, {self.missed} weakened ones accepted{told}"


def prove(
    kind: str, cases: int, seed: int, draws: dict[str, Callable[[torch.Generator], Construction]] = DRAWS
) -> Tally:
    """So many constructions of a kind, verified; every hundredth weakened too."""
    generator = torch.Generator().manual_seed(seed)
    proved = broken = missed = 0
    story = ""
    for case in range(cases):
        made = draws[kind](generator)
        proof = made.verify()
        proved, broken = proved + proof.holds, broken + (not proof.holds)
        if not proof.holds:
            story = story or f"case {case} of seed {seed}: {proof}"
        if case % 100 == 0 and WEAKENED[kind](made).verify().holds:
            missed += 1
            story = story or f"case {case} of seed {seed}, weakened, was accepted: {made.promise}"
    return Tally(kind, proved, broken, missed, story)


def _worker(job: tuple[str, int, int]) -> Tally:
    torch.set_num_threads(1)
    return prove(*job)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args(arguments)
    jobs = [(kind, chosen.cases, chosen.seed) for kind in DRAWS]
    sound = True
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for tally in pool.imap(_worker, jobs):
            print(tally, flush=True)
            sound &= tally.sound
    print("every construction keeps its promise" if sound else "PROMISES WERE BROKEN")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
