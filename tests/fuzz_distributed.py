"""Try to break certificates that travelled: `python -m tests.fuzz_distributed --rows 100000`.

Sequences of every type, of odd lengths, with huge and tiny norms, cut at random; every row of every process is held to
its bound against the truth, which float64, wider arithmetic or balls decide.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from avow.attend import Attended
from avow.core import Problem
from avow.core.compose import select
from avow.distributed import attend
from avow.errors import RangeError, ToleranceUnreachable
from avow.methods.exact import Exact
from tests.helpers.generators import draw_case
from tests.helpers.processes import together
from tests.helpers.truth import judge

EXACT_IS_DEAR = {"exact": [1.0, 1.0, 1.0], "exact/causal": [1.0, 1.0, 1.0]}


class Tally(NamedTuple):
    """What some cases came to."""

    cases: int
    rows: int
    broken: int
    by_balls: int
    refused: int
    story: str = ""

    def plus(self, other: Tally) -> Tally:
        cases, rows, broken, by_balls, refused = (a + b for a, b in zip(self[:5], other[:5], strict=True))
        return Tally(cases, rows, broken, by_balls, refused, self.story or other.story)

    def __str__(self) -> str:
        return (
            f"{self.cases:,} cases, {self.rows:,} rows: {self.broken} broken, {self.by_balls:,} decided by balls, "
            f"{self.refused} cases refused"
        )


def cut(rng: random.Random, length: int, count: int) -> list[int]:
    """Sizes of so many shards of a length, some of them perhaps empty."""
    places = sorted(rng.randint(0, length) for _ in range(count - 1))
    return [end - start for start, end in zip([0, *places], [*places, length], strict=True)]


def judged(p: Problem, answered: Attended, rows: slice, boast: float) -> Tally:
    """Some rows of a problem against the truth, their bounds multiplied by `boast`."""
    out, bounds = answered.out, answered.certificate.rows * boast
    p = p.rows(torch.arange(rows.start, rows.stop))
    if not bounds.numel():
        return Tally(1, 0, 0, 0, 0)
    if not bool(torch.isfinite(out).all()) or bool(bounds.isnan().any()):
        return Tally(1, bounds.numel(), bounds.numel(), 0, 0, f"nan or inf: {p.sizes}")
    found = judge(Exact(), p, out, bounds, None)
    return Tally(1, found.rows, found.broken, found.by_balls, 0, found.story)


def one_case(seed: int, heads: int, boast: float) -> Tally:
    """One problem, cut and answered by all processes; each judges the rows that it alone has, or its share of them."""
    rng = random.Random(seed)
    rank, count = dist.get_rank(), dist.get_world_size()
    p = draw_case(seed, heads, "exact").problem
    ring, causal = rng.random() < 0.6, rng.random() < 0.5
    q, k, v = p.q, p.k, p.v
    keys = cut(rng, k.shape[-2], count)
    rows = cut(rng, q.shape[-2], count)
    if causal and rng.random() < 0.5 and q.shape[-2] == k.shape[-2]:
        rows = keys
    tol = 10 ** rng.uniform(-3, 0) if rng.random() < 0.3 else None
    options: dict[str, Any] = {"causal": causal, "scale": p.scale, "enable_gqa": True}
    mask = None
    if rng.random() < 0.3:
        share = rng.choice((0.1, 0.5, 0.9))
        mask = torch.rand(q.shape[-2], k.shape[-2], generator=torch.Generator().manual_seed(seed)) < share
    whole = Problem.of(q, k, v, mask=mask, **options)
    options |= {"tol": tol, "generator": torch.Generator().manual_seed(seed)}
    start = sum(rows[:rank])
    mine = slice(start, start + rows[rank])

    def held(x: Tensor, sizes: list[int]) -> Tensor:
        return x.split(sizes, -2)[rank]

    try:
        if ring:
            options |= {"shared_queries": False, "mask": None if mask is None else mask[mine]}
            answered = attend(held(q, rows), held(k, keys), held(v, keys), **options)
            assert tol is None or answered.certificate.keeps(tol)
            return judged(whole, answered, mine, boast)
        options["mask"] = None if mask is None else held(mask.mT, keys).mT
        answered = attend(q, held(k, keys), held(v, keys), **options)
        assert tol is None or answered.certificate.keeps(tol)
    except (RangeError, ToleranceUnreachable):
        # Beyond float64, or finer than it: refused in all processes alike.
        return Tally(1, 0, 0, 0, 1)
    certificate = select(answered.certificate, torch.arange(answered.certificate.rows.shape[-1])[mine], -1)
    return judged(whole, Attended(answered.out[..., mine, :], certificate), mine, boast)


def job(rows: int, seed: int, heads: int, boast: float = 1.0) -> Tally:
    """Cases until all processes together have judged enough rows."""
    rng, total, everyone = random.Random(seed), Tally(0, 0, 0, 0, 0), 0
    while everyone < rows:
        case = rng.getrandbits(48)
        # Where there is a tolerance, all that may keep it is tried before exact attention.
        with mock.patch("avow.distributed.attend.own_rates", lambda device: EXACT_IS_DEAR):
            here = one_case(case, heads, boast)
        total = total.plus(here._replace(story=f"{here.story}; seed {case}" if here.story else ""))
        judged_now = torch.tensor(here.rows)
        dist.all_reduce(judged_now)
        everyone += int(judged_now)
    return total


def run(rows: int, count: int, seed: int, heads: int = 64, boast: float = 1.0) -> Tally:
    """What so many processes find."""
    with tempfile.TemporaryDirectory() as name:
        found = together(count, partial(job, rows, seed, heads, boast), Path(name), 600)
    total = found[0]
    for one in found[1:]:
        total = total.plus(one)
    return total._replace(cases=found[0].cases, refused=found[0].refused)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    bad = 0
    for count in (2, 4):
        total = run(given.rows // 2 + 1, count, given.seed + count)
        print(f"{count} processes: {total}", *([total.story] if total.story else []), sep="\n", flush=True)
        bad += total.broken
    print("every certificate was kept" if not bad else "CERTIFICATES WERE BROKEN")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
