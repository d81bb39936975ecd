"""Try to break a certificate: `python -m tests.fuzz --cases 1000000`.

A case is one head with its own q, k and v; every row of it is held to its bound against the truth. Statistical
promises may fail at their stated rate and no more: the count is held to the exact binomial tail.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import random
import sys
import time
from collections import Counter

import torch
from scipy.stats import binom

from avow.attend import Attended, attend_exact, run_certified
from avow.core.requirement import Requirement
from avow.errors import RangeError
from avow.methods import all_methods
from tests.helpers.generators import Case, draw_case
from tests.helpers.late import stated_later
from tests.helpers.truth import judge

CONFIDENCE = 0.999


@dataclasses.dataclass
class Tally:
    """What a run of cases came to."""

    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    rows: int = 0
    broken: int = 0
    nan: int = 0
    by_balls: int = 0
    chancy_rows: int = 0
    chancy_misses: int = 0
    stories: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        for name in ("rows", "broken", "nan", "by_balls", "chancy_rows", "chancy_misses"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stories += other.stories

    @property
    def sound(self) -> bool:
        """No bound broken, no nan, and no more statistical misses than chance explains once in a million."""
        allowed = binom.isf(1e-6, max(self.chancy_rows, 1), 1 - CONFIDENCE)
        return self.broken == 0 and self.nan == 0 and self.chancy_misses <= allowed

    def __str__(self) -> str:
        per_method = ", ".join(f"{name} {count:,}" for name, count in sorted(self.cases.items()))
        return (
            f"{self.cases.total():,} cases ({per_method}), {self.rows:,} rows: {self.broken} broken, {self.nan} nan, "
            f"{self.chancy_misses} misses in {self.chancy_rows:,} statistical rows at confidence {CONFIDENCE}, "
            f"{self.by_balls:,} rows decided by balls"
        )


def answer(case: Case) -> Attended:
    """What the method answers, certified; its draws follow from the case's seed."""
    p, method = case.problem, case.method
    wish = Requirement(None, CONFIDENCE, None)
    if method.name == "exact":
        late = stated_later(method, p) if case.seed % 2 else None
        return late or attend_exact(p, wish)
    return run_certified(method, p, wish, torch.Generator().manual_seed(case.seed))


def run_case(case: Case) -> Tally:
    """Compute, certify, judge."""
    return judged(case, answer(case))


def judged(case: Case, answered: Attended) -> Tally:
    """One case's rows against the truth."""
    p, method = case.problem, case.method
    out, certificate = answered
    tally = Tally()
    tally.cases[method.name] = p.q.shape[0] * p.q.shape[1]
    rows = certificate.rows.reshape(p.q.shape[:-1])
    tally.rows = rows.numel()
    out = out.reshape(*p.q.shape[:-1], -1)
    if not bool(torch.isfinite(out).all()) or bool(rows.isnan().any()):
        tally.nan = 1
        tally.stories.append(f"nan or inf: {method.name}{method.parameters} seed {case.seed} {p.sizes}")
        return tally
    verdict = judge(method, p, out, rows, case.mask)
    tally.by_balls = verdict.by_balls
    if certificate.kind == "statistical":
        tally.chancy_rows, tally.chancy_misses = verdict.rows, verdict.broken
    else:
        tally.broken = verdict.broken
        if verdict.broken:
            tally.stories.append(f"{verdict.story}; seed {case.seed}, scale {p.scale}, kernel {p.kernel}")
    return tally


def run(cases: int, seed: int, heads: int = 64, progress: bool = False, only: str | None = None) -> Tally:
    """Cases until there are enough of them, of every method or of one."""
    rng, total, start = random.Random(seed), Tally(), time.monotonic()
    while total.cases.total() < cases:
        case = draw_case(rng.getrandbits(48), heads, only)
        try:
            total.add(run_case(case))
        except RangeError:
            # Logits beyond float64: refused with an error, as promised; not a case.
            continue
        except Exception as error:
            error.add_note(f"seed {case.seed}: {case.method.name}{case.method.parameters} {case.problem.sizes}")
            raise
        if progress and time.monotonic() - start > 30:
            print(total, flush=True)
            start = time.monotonic()
    return total


def _worker(job: tuple[int, int, str | None]) -> Tally:
    torch.set_num_threads(1)
    cases, seed, only = job
    return run(cases, seed, only=only)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", choices=list(all_methods()), help="of this method alone")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args(arguments)
    pieces = max(1, chosen.cases // 10_000)
    some = -(-chosen.cases // pieces)
    jobs = [(some, chosen.seed * 1_000_003 + piece, chosen.method) for piece in range(pieces)]
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for done, tally in enumerate(pool.imap_unordered(_worker, jobs), 1):
            total.add(tally)
            if done % max(1, pieces // 20) == 0 or not tally.sound:
                print(total, flush=True)
                print(*tally.stories[:3], sep="\n", end="\n" if tally.stories else "")
    print(total)
    print("every certificate was kept" if total.sound else "CERTIFICATES WERE BROKEN")
    return 0 if total.sound else 1


if __name__ == "__main__":
    sys.exit(main())
