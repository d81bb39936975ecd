"""Try to break sparse attention over shards: `python -m tests.fuzz_shards --rows 100000`.

Heads come from the families of `tests.sparse_cases`, and from `tests.generators`; their keys are dealt to one to seven
shards, some of them empty, side by side in one process. Half of the calls ask for a tolerance, which must be kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from avow.attend import Attended
from avow.contract import Problem
from avow.distributed.rounds import side_by_side
from avow.distributed.readings import Reading
from avow.distributed.sparse_rounds import Wish, shard_script
from avow.errors import RangeError, ToleranceUnreachable
from avow.links import Load
from avow.methods.sparse import Sparse
from tests.fuzz import Tally, judged
from tests.generators import draw_case
from tests.sparse_cases import FAMILIES, draw_sparse_case


class Whole(NamedTuple):
    """What all shards answered alike, and what each of them read and sent."""

    answer: Attended
    readings: list[Reading]
    loads: list[Load]


def over_shards(p: Problem, ends: Sequence[int], method: Sparse, tol: float | None = None) -> Whole:
    """The answer of shards that end at these keys; all of them must give the same."""
    starts = [0, *ends[:-1]]
    parts = [
        dataclasses.replace(p, k=p.k[:, :, start:end], v=p.v[:, :, start:end], norms=None)
        for start, end in zip(starts, ends, strict=True)
    ]
    wish = Wish(tol, method, ends[-1], max(end - start for start, end in zip(starts, ends, strict=True)), len(ends))
    found, loads = side_by_side([shard_script(part, wish) for part in parts])
    first = found[0][0]
    for other, _ in found:
        assert torch.equal(other.out, first.out) and torch.equal(other.certificate.rows, first.certificate.rows)
    return Whole(first, [reading for _, reading in found], loads)


def run(rows: int, seed: int, heads: int = 16) -> Tally:
    """Rows until there are enough."""
    rng, total = random.Random(seed), Tally()
    while total.rows < rows:
        family, drawn = rng.choice([*FAMILIES, "any"]), rng.getrandbits(48)
        case = draw_case(drawn, heads, "sparse") if family == "any" else draw_sparse_case(family, drawn, heads, 0.0)
        p = case.problem
        if p.allowed is not None or p.bias is not None:
            continue
        method = Sparse(**(case.method.parameters | {"chance": 0.0}))
        case = dataclasses.replace(case, problem=dataclasses.replace(p, causal=False), method=method)
        tol = 10 ** rng.uniform(-4, 0) if rng.random() < 0.5 else None
        s = p.k.shape[-2]
        ends = sorted(
            [*(rng.choice((0, s, rng.randint(0, s), rng.randint(0, s))) for _ in range(rng.randint(0, 6))), s]
        )
        try:
            answer = over_shards(case.problem, ends, method, tol).answer
        except (RangeError, ToleranceUnreachable):
            continue
        except Exception as problem:
            problem.add_note(f"{family}, seed {drawn}: {method.parameters} {p.sizes} {ends} {tol}")
            raise
        found = judged(case, answer)
        found.cases[family] = found.cases.pop("sparse")
        if tol is not None and not answer.certificate.keeps(tol):
            found.broken += 1
            found.stories.append(f"tol={tol} was not kept")
        found.stories = [f"{family} {drawn} {ends} {tol}: {story}" for story in found.stories]
        total.add(found)
    return total


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.fuzz_shards", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows to judge at least")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total, piece = Tally(), 0
    while total.rows < chosen.rows:
        total.add(run(min(10_000, chosen.rows), chosen.seed * 1_000_003 + piece, heads=96))
        piece += 1
        print(total, *total.stories[:3], sep="\n", flush=True)
    print("every certificate was kept" if total.sound else "CERTIFICATES WERE BROKEN")
    return 0 if total.sound else 1


if __name__ == "__main__":
    sys.exit(main())
