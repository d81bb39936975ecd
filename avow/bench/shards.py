"""Attention over up to hundreds of shards in one process: what each sends is counted, answers are checked.

Every strategy runs its own protocol, and shards hand each other real tensors. What leaves a shard must be what the
planner counts on meta tensors, to the byte, and the answers those of a single shard that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from avow.bench.results import Result, Row
from avow.core import Problem
from avow.core.chart import Chart
from avow.distributed.exact import Block, merged, packed, partial_answer
from avow.distributed.low_rank import linear_protocol
from avow.distributed.parallel_plan import Strategy, strategies
from avow.distributed.protocols import Protocol, Shard, Traffic, all_gather, side_by_side
from avow.distributed.ring import ring_protocol
from avow.distributed.sparse import Task, sparse_protocol
from avow.methods.sparse import Sparse

# What sparse attention may be off; other strategies are right to the rounding of float32.
_TOL, _ROUNDED = 0.05, 1e-4
# Landmarks of low-rank attention, from two shards on.
_RANK = 16


class Simulated(NamedTuple):
    """A strategy over `ranks` shards: what one sent, the planner's model of it, the distance to one shard's."""

    name: str
    ranks: int
    traffic: Traffic
    modelled: Traffic
    distance: float

    @property
    def fault(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.traffic != self.modelled:
            return f"{self.name} over {self.ranks}: sent {tuple(self.traffic)}, modelled {tuple(self.modelled)}"
        if self.distance <= (2 * _TOL if self.name == "sparse" else _ROUNDED):
            return ""
        return f"{self.name} over {self.ranks}: {self.distance:.2g} from one shard's answer"

    @property
    def row(self) -> Row:
        row: Row = {"shards": self.ranks, "way": self.name, "sent": self.traffic.sent, "modelled": self.modelled.sent}
        return row | {"messages": self.traffic.messages, "apart": self.distance}


def run(counts: list[int], tell: Callable[[str], None]) -> tuple[Result, Chart]:
    """Every strategy over each number of shards, eight keys on each: a table, and what one sends as a chart."""
    runs = []
    for count in counts:
        for strategy in strategies(problem(count, True).sizes, _RANK):
            tell(f"{strategy.name} over {count}")
            runs.append(simulate(strategy, problem(count, not strategy.replicated), count))
    remarks = ["sent: bytes that left one shard, counted; modelled: by the planner; apart: from one shard's answer"]
    where = f"each of up to {max(counts)} shards" if max(counts) > 1 else "one shard"
    title = f"Weak scaling, simulated: 8 keys on {where}"
    result = Result(title, [one.row for one in runs], [], remarks, [one.fault for one in runs if one.fault])
    series: dict[str, tuple[list[float], list[float]]] = {}
    for one in runs:
        xs, ys = series.setdefault(one.name, ([], []))
        xs.append(one.ranks)
        ys.append(one.traffic.sent)
    return result, Chart(title, "shards", "bytes sent by one, counted", series, log_x=True, log_y=True)


def problem(ranks: int, sharded: bool, dtype: torch.dtype = torch.float32) -> Problem:
    """Eight keys for each of `ranks` shards, and two queries for each, or for all."""
    generator = torch.Generator().manual_seed(ranks)
    shapes = ((4, 2 * ranks if sharded else 2, 16), (2, 8 * ranks, 16), (2, 8 * ranks, 6))
    q, k, v = (torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes)
    return Problem.of(q, k, v / v.norm(dim=-1).amax(), enable_gqa=True)


def simulate(strategy: Strategy, p: Problem, ranks: int) -> Simulated:
    """One strategy over shards of equal length."""
    answers, traffic = answers_of(strategy, Shard.split(p, ranks, strategy.replicated))
    (whole,), _ = answers_of(strategy, Shard.split(p, 1, strategy.replicated))
    difference = (answers[0] if strategy.replicated else torch.cat(answers, 2)).double() - whole.double()
    # Shards of equal length send alike.
    sent = traffic[0] if all(one == traffic[0] for one in traffic) else Traffic(-1, -1, -1)
    distance = float(difference.norm(dim=-1).amax())
    return Simulated(strategy.name, ranks, sent, strategy.traffic(p.sizes, ranks), distance)


def answers_of(strategy: Strategy, shards: list[Shard]) -> tuple[list[Tensor], list[Traffic]]:
    """The answer of each shard, or that of all, and what each sent."""
    if strategy.name != "exact (keys)":
        return side_by_side([protocol(strategy, shard) for shard in shards])
    parts = [partial_answer(p.q, Block(p.k, p.v), p.scale) for p in (shard.problem for shard in shards)]
    gathered, traffic = side_by_side([all_gather(packed(part), len(shards)) for part in parts])
    # All have the same numbers, and would merge them alike.
    whole, _ = merged(gathered[0], parts[0].out.shape)
    return [whole.out], traffic


def protocol(strategy: Strategy, shard: Shard) -> Protocol[Tensor]:
    """What one shard does, and its answer."""
    method = strategy.method
    if isinstance(method, Sparse):
        task = Task(_TOL, method, shard.total, max(shard.keys), shard.ranks)
        return (yield from sparse_protocol(shard.problem, task))[0].out
    if method.is_exact:
        return (yield from ring_protocol(shard))[0]
    return (yield from linear_protocol(shard, method, torch.Generator().manual_seed(0)))[1]
