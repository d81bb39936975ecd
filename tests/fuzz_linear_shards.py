"""Try to break linear attention over shards: `python -m tests.fuzz_linear_shards --rows 100000 --processes 4`.

Problems are those of `tests.fuzz` without their masks, cut into shards of any lengths, empty ones among them, and asked
of processes that know each other. So many rows at least of each method are held to the truth.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from avow.core import Method, Problem
from avow.distributed import attend
from avow.errors import RangeError
from avow.methods.low_rank import LowRank
from tests.helpers.generators import draw_case
from tests.helpers.processes import together
from tests.helpers.truth import judge

METHODS = ("separable", "random_features", "low_rank")


def draw(seed: int, name: str, count: int) -> tuple[Method, Problem, list[int], list[int]]:
    """A method, a problem without a mask, and how many rows and keys each process has."""
    rng = random.Random(seed)
    case = draw_case(seed, heads=64, only=name)
    p, method = case.problem, case.method
    q, k, v = p.q, p.k, p.v
    causal = rng.random() < 0.5
    if causal:
        length = min(q.shape[-2], k.shape[-2])
        q, k, v = (x[..., :length, :] for x in (q, k, v))
    if isinstance(method, LowRank):
        method = LowRank(min(method.rank, k.shape[-2]))
    scale = None if p.default_scale or p.kernel == "rbf" else p.scale
    problem = Problem.of(q, k, v, causal=causal, scale=scale, enable_gqa=True)
    keys = _cut(rng, k.shape[-2], count)
    return method, problem, keys if causal else _cut(rng, q.shape[-2], count), keys


def _cut(rng: random.Random, length: int, count: int) -> list[int]:
    ends = sorted(rng.randint(0, length) for _ in range(count - 1))
    return [end - start for start, end in zip([0, *ends], [*ends, length], strict=True)]


def hunt(rows: int, seed: int) -> dict[str, Counter[str]]:
    """What so many rows of each method came to; the first process judges."""
    rank, count = dist.get_rank(), dist.get_world_size()
    found: dict[str, Counter[str]] = {name: Counter() for name in METHODS}
    stories = []
    for name, tally in found.items():
        while tally["rows"] < rows:
            seed += 1
            method, p, lengths, keys = draw(seed, name, count)
            mine = [x.split(cut, -2)[rank] for x, cut in ((p.q, lengths), (p.k, keys), (p.v, keys))]
            scale = None if p.default_scale else p.scale
            try:
                out, certificate = attend(
                    *mine,
                    method=method.name,
                    shared_queries=False,
                    causal=p.causal,
                    scale=scale,
                    enable_gqa=True,
                    generator=torch.Generator().manual_seed(seed),
                    **method.parameters,
                )
            except RangeError:
                tally["beyond float64"] += 1
                continue
            everyone: list[Any] = [None] * count
            dist.all_gather_object(everyone, (out, certificate.rows))
            whole, bounds = torch.cat([x for x, _ in everyone], -2), torch.cat([x for _, x in everyone], -1)
            if rank == 0:
                verdict = judge(method, p, whole, bounds, None)
                tally["broken"] += verdict.broken
                tally["by balls"] += verdict.by_balls
                tally["below one"] += int((bounds < 1).sum())
                if verdict.broken:
                    stories.append(f"seed {seed}, {lengths}, {keys}: {verdict.story}")
            tally["rows"] += bounds.numel()
            tally["problems"] += 1
    for story in stories:
        print(story, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each method")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = functools.partial(hunt, options.rows, options.seed)
        found = together(options.processes, job, Path(folder), seconds=600)[0]
    for name, tally in found.items():
        print(name, dict(tally))
    print(f"{options.processes} processes, {time.monotonic() - started:.0f} s")
    raise SystemExit(any(tally["broken"] for tally in found.values()))


if __name__ == "__main__":
    main()
