"""Try to break sparse attention alone: `python -m tests.fuzz_sparse --rows 1000000`.

So many rows at least are held to deterministic bounds, and as many to statistical ones. Their heads come from families
made for the purpose (`tests.helpers.sparse_cases`), and from `tests.fuzz`. Statistical calls are made twice with
different draws, and both answers are judged: rows whose answers differ did sample, and are judged apart as well, since
the others cannot but keep their bounds. Rates come with exact binomial (Clopper–Pearson) intervals.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
from scipy.stats import binomtest

from avow.errors import RangeError
from avow.methods.sparse import Sparse
from tests.fuzz import CONFIDENCE, Tally, answer, judged
from tests.helpers.generators import Case, draw_case
from tests.helpers.sparse_cases import FAMILIES, draw_sparse_case

_SURE = 0.99


class Interval(NamedTuple):
    """Where a rate lies, with probability `_SURE` at least, whatever it is."""

    low: float
    high: float

    @staticmethod
    def of(count: int, rows: int) -> Interval:
        if rows == 0:
            return Interval(0.0, 1.0)
        return Interval(*binomtest(count, rows).proportion_ci(_SURE, method="exact"))

    def __str__(self) -> str:
        return f"between {self.low:.2g} and {self.high:.2g} ({_SURE:.0%})"


@dataclasses.dataclass
class Found:
    """What rows of one kind came to, by the family of their heads."""

    tally: Tally = dataclasses.field(default_factory=Tally)
    families: Counter[str] = dataclasses.field(default_factory=Counter)
    sampled: int = 0

    def add(self, other: Found) -> None:
        self.tally.add(other.tally)
        self.families += other.families
        self.sampled += other.sampled

    @property
    def sound(self) -> bool:
        """No deterministic bound broken, no nan, and misses of those that sampled no proof of too many."""
        t = self.tally
        return t.broken == t.nan == 0 and Interval.of(t.chancy_misses, self.sampled).low <= 1 - CONFIDENCE

    def __str__(self) -> str:
        t = self.tally
        drawn = ", ".join(f"{name} {rows:,}" for name, rows in sorted(self.families.items()))
        more = f"{t.nan} nan, {t.by_balls:,} decided by balls; rows: {drawn}"
        if not t.chancy_rows:
            interval = Interval.of(t.broken, t.rows)
            return f"deterministic: {t.rows:,} rows, {t.broken} broken: a rate {interval}; {more}"
        every, some = (Interval.of(t.chancy_misses, rows) for rows in (t.chancy_rows, self.sampled))
        return (
            f"statistical: {t.chancy_rows:,} rows, {self.sampled:,} of which sampled, {t.chancy_misses} misses where "
            f"{1 - CONFIDENCE:.2g} may: a rate {every}, of those that sampled {some}; {more}"
        )


def run(rows: int, chance: float, seed: int, heads: int = 64) -> Found:
    """Rows of one kind until there are enough."""
    rng, total = random.Random(seed), Found()
    while total.tally.rows < rows:
        family = rng.choice([*FAMILIES, "any"])
        drawn = rng.getrandbits(48)
        if family == "any":
            case = draw_case(drawn, heads, "sparse")
            case = dataclasses.replace(case, method=Sparse(**(case.method.parameters | {"chance": chance})))
        else:
            case = draw_sparse_case(family, drawn, heads, chance)
        try:
            found = _judged(case)
        except RangeError:
            # Logits beyond float64: refused with an error, as promised.
            continue
        except Exception as error:
            error.add_note(f"{family}, seed {drawn}: {case.method.parameters} {case.problem.sizes}")
            raise
        found.families[family] = found.tally.rows
        found.tally.stories = [f"{family}: {story}" for story in found.tally.stories]
        total.add(found)
    return total


def _judged(case: Case) -> Found:
    # The case's own seed drew its heads: draws from it would know the values, and no inequality holds for those.
    case = dataclasses.replace(case, seed=case.seed + 1)
    first = answer(case)
    found = Found(judged(case, first))
    if case.method.parameters["chance"] > 0:
        second = answer(dataclasses.replace(case, seed=case.seed + 1))
        found.tally.add(judged(case, second))
        found.sampled = 2 * int((first.out != second.out).any(-1).sum())
    return found


class Job(NamedTuple):
    """Some rows of one kind."""

    rows: int
    chance: float
    seed: int


def _worker(job: Job) -> tuple[bool, Found]:
    torch.set_num_threads(1)
    return job.chance > 0, run(*job)


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.fuzz_sparse", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each kind to judge at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args(arguments)
    pieces = max(1, chosen.rows // 20_000)
    share = -(-chosen.rows // pieces)
    jobs = [
        Job(share, chance, chosen.seed * 1_000_003 + piece) for piece in range(pieces) for chance in (0, 1 - CONFIDENCE)
    ]
    totals = {False: Found(), True: Found()}
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for statistical, found in pool.imap_unordered(_worker, jobs):
            totals[statistical].add(found)
            print(*found.tally.stories[:3], sep="\n", end="\n" if found.tally.stories else "")
            if time.monotonic() - start > 60:
                print(*totals.values(), sep="\n", flush=True)
                start = time.monotonic()
    print(*totals.values(), sep="\n")
    sound = all(found.sound for found in totals.values())
    print("every certificate was kept" if sound else "CERTIFICATES WERE BROKEN")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
