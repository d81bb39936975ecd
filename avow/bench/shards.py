"""Attention over up to hundreds of shards, simulated in one process: what each sends is counted, answers are checked.

Every way runs as a script (`avow.distributed.simulated`) whose shards hand each other real tensors. What leaves a shard
must be what the model of links says, to the byte, and the answers those of a single shard that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from avow.bench.results import Result, Row
from avow.core import Problem
from avow.core.chart import Chart
from avow.distributed import simulated
from avow.distributed.comm_cost import Traffic
from avow.distributed.parallel_plan import Strategy, strategies
from avow.distributed.protocols import Protocol, side_by_side
from avow.distributed.simulated_landmarks import low_rank

# What sparse attention may be off; other ways are right to the rounding of float32.
_TOL, _ROUNDED = 0.05, 1e-4
# Landmarks of the low-rank way, from two shards on.
_RANK = 16


class Simulated(NamedTuple):
    """A way over so many shards: what one sent, what the model says, and how far the answer is from one shard's."""

    name: str
    ranks: int
    load: Traffic
    modelled: Traffic
    apart: float

    @property
    def fault(self) -> str:
        """What is wrong; nothing where all is as it should be."""
        if self.load != self.modelled:
            return f"{self.name} over {self.ranks}: sent {tuple(self.load)}, modelled {tuple(self.modelled)}"
        allowed = 2 * _TOL if self.name == "sparse" else _ROUNDED
        return (
            "" if self.apart <= allowed else f"{self.name} over {self.ranks}: {self.apart:.2g} from one shard's answer"
        )


def run(counts: list[int], tell: Callable[[str], None]) -> tuple[Result, Chart]:
    """Every way over each number of shards, eight keys on each: a table, and what one sends as a chart."""
    found = []
    for count in counts:
        for way in strategies(problem(count, True).sizes, _RANK):
            tell(f"{way.name} over {count}")
            found.append(simulate(way, problem(count, not way.replicated), count))
    rows: list[Row] = [
        {
            "shards": one.ranks,
            "way": one.name,
            "sent": one.load.sent,
            "modelled": one.modelled.sent,
            "messages": one.load.messages,
            "apart": one.apart,
        }
        for one in found
    ]
    remarks = ["sent: bytes that left one shard, counted; modelled: by the planner; apart: from one shard's answer"]
    where = f"each of up to {max(counts)} shards" if max(counts) > 1 else "one shard"
    title = f"Weak scaling, simulated: 8 keys on {where}"
    result = Result(title, rows, [], remarks, [one.fault for one in found if one.fault])
    series: dict[str, tuple[list[float], list[float]]] = {}
    for one in found:
        xs, ys = series.setdefault(one.name, ([], []))
        xs.append(one.ranks)
        ys.append(one.load.sent)
    return result, Chart(title, "shards", "bytes sent by one, counted", series, log_x=True, log_y=True)


def problem(ranks: int, sharded: bool, dtype: torch.dtype = torch.float32) -> Problem:
    """Eight keys for each of so many shards, and two queries for each, or for all."""
    generator = torch.Generator().manual_seed(ranks)
    shapes = ((4, 2 * ranks if sharded else 2, 16), (2, 8 * ranks, 16), (2, 8 * ranks, 6))
    q, k, v = (torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes)
    return Problem.of(q, k, v / v.norm(dim=-1).amax(), enable_gqa=True)


def simulate(way: Strategy, p: Problem, ranks: int) -> Simulated:
    """One way over so many shards of equal length."""
    keys = p.k.shape[-2]
    parts = simulated.dealt(p, ranks, queries=not way.replicated)
    answers, loads = side_by_side([script(way, part, ranks, keys) for part in parts])
    (whole,), _ = side_by_side([script(way, p, 1, keys)])
    apart = (answers[0] if way.replicated else torch.cat(answers, 2)).double() - whole.double()
    # Shards of equal length send alike.
    load = loads[0] if all(one == loads[0] for one in loads) else Traffic(-1, -1, -1)
    return Simulated(way.name, ranks, load, way.load(p.sizes, ranks), float(apart.norm(dim=-1).amax()))


def script(way: Strategy, p: Problem, ranks: int, keys: int) -> Protocol[Tensor]:
    """What one shard does in a way."""
    match way.name:
        case "exact (keys)":
            return simulated.partial_answers(p, ranks)
        case "exact (ring)":
            return simulated.ring(p, ranks)
        case "sparse":
            return simulated.sparse(p, ranks, keys, _TOL)
        case "separable":
            return simulated.separable(p, ranks)
        case "random_features":
            return simulated.random_features(p, ranks, way.method.parameters["features"])
        case _:
            return low_rank(p, ranks, way.method.parameters["rank"])
