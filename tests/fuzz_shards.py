"""Try to break sparse attention over shards: `python -m tests.fuzz_shards --rows 100000`.

So many rows at least are held to deterministic bounds, and as many that sampled to statistical ones. Heads come from
the families of `sparse_cases` and `generators` in tests/helpers; their keys are dealt to one to seven shards, some of
them empty, side by side in one process. Half of the calls ask for a tolerance, which must be kept; some have sketches
of a part of the keys at hand, as caches do. Statistical calls are made twice with different draws, and rows whose
answers differ did sample: only those can miss their bounds.
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
from avow.core import Problem
from avow.distributed.protocols import Traffic, side_by_side
from avow.distributed.sparse import Reading, Task, sparse_protocol
from avow.errors import RangeError, ToleranceUnreachable
from avow.methods.sparse import Sparse
from avow.numerics.sketch import GROUP, sketched
from tests.fuzz import CONFIDENCE, judged
from tests.fuzz_sparse import Found
from tests.helpers.generators import draw_case
from tests.helpers.sparse_cases import FAMILIES, draw_sparse_case


class Whole(NamedTuple):
    """What all shards answered alike, and what each of them read and sent."""

    answer: Attended
    readings: list[Reading]
    loads: list[Traffic]


def parted(p: Problem, ends: Sequence[int]) -> list[Problem]:
    """The problems of shards that end at these keys."""
    return [
        dataclasses.replace(p, k=p.k[:, :, start:end], v=p.v[:, :, start:end])
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def drawing(seed: int, ranks: int) -> list[torch.Generator]:
    """Draws of so many shards, each its own."""
    return [torch.Generator().manual_seed((1_000_003 * seed + rank) % 2**63) for rank in range(ranks)]


def over_shards(
    p: Problem,
    ends: Sequence[int],
    method: Sparse,
    tol: float | None = None,
    draws: Sequence[torch.Generator | None] | None = None,
    followed: bool = False,
    groups: int | None = None,
) -> Whole:
    """The answer of shards that end at these keys; all of them must give the same.

    Of each, up to so many `groups` of keys are sketched before, as those of a cache are.
    """
    parts = parted(p, ends)
    task = Task(tol, method, ends[-1], max(part.k.shape[-2] for part in parts), len(ends), followed)
    known = [None if groups is None else sketched(part.k[:, :, : groups * GROUP], method.bits) for part in parts]
    draws = drawing(0, len(ends)) if draws is None else draws
    protocols = [sparse_protocol(*given) for given in zip(parts, [task] * len(ends), known, draws, strict=True)]
    found, loads = side_by_side(protocols)
    first = found[0][0]
    for other, _ in found:
        assert torch.equal(other.out, first.out) and torch.equal(other.certificate.rows, first.certificate.rows)
    return Whole(first, [reading for _, reading in found], loads)


def run(rows: int, seed: int, heads: int = 16, chance: float = 0.0) -> Found:
    """Rows until there are enough; with a chance, so many that sampled."""
    rng, total = random.Random(seed), Found()
    while (total.sampled if chance else total.tally.rows) < rows:
        family, drawn = rng.choice([*FAMILIES, "any"]), rng.getrandbits(48)
        case = draw_case(drawn, heads, "sparse") if family == "any" else draw_sparse_case(family, drawn, heads, chance)
        p = case.problem
        if p.allowed is not None or p.bias is not None:
            continue
        method = Sparse(**(case.method.parameters | {"chance": chance}))
        case = dataclasses.replace(case, problem=dataclasses.replace(p, causal=False), method=method)
        tol = None
        if rng.random() < 0.5:
            # Samples pay where much may be off.
            tol = 10 ** (rng.uniform(-0.8, 0) if chance else rng.uniform(-4, 0))
        s = p.k.shape[-2]
        ends = sorted(
            [*(rng.choice((0, s, rng.randint(0, s), rng.randint(0, s))) for _ in range(rng.randint(0, 6))), s]
        )
        groups = rng.choice((None, None, 0, 1, 3))
        try:
            answers = [
                over_shards(case.problem, ends, method, tol, drawing(drawn + i, len(ends)), groups=groups).answer
                for i in range(2 if chance else 1)
            ]
        except (RangeError, ToleranceUnreachable):
            continue
        except Exception as error:
            error.add_note(f"{family}, seed {drawn}: {method.parameters} {p.sizes} {ends} {tol} {groups}")
            raise
        for answer in answers:
            found = Found(judged(case, answer))
            found.families[family] = found.tally.rows
            if tol is not None and not answer.certificate.keeps(tol):
                found.tally.broken += 1
                found.tally.stories.append(f"tol={tol} was not kept")
            found.tally.stories = [f"{family} {drawn} {ends} {tol} {groups}: {story}" for story in found.tally.stories]
            total.add(found)
        if chance:
            total.sampled += 2 * int((answers[0].out != answers[1].out).any(-1).sum())
    return total


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.fuzz_shards", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each kind to judge at least")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sound = True
    for chance in (0.0, 1 - CONFIDENCE):
        total, piece = Found(), 0
        while (total.sampled if chance else total.tally.rows) < chosen.rows:
            total.add(run(min(10_000, chosen.rows), chosen.seed * 1_000_003 + piece, heads=96, chance=chance))
            piece += 1
            print(total, *total.tally.stories[:3], sep="\n", flush=True)
        sound = sound and total.sound
    print("every certificate was kept" if sound else "CERTIFICATES WERE BROKEN")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
