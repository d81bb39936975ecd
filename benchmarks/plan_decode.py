"""What `avow plan-decode` predicts beside what steps take: `append` and `attend` of a cache of real heads.

For each shape of heads, type and number of threads, steps are measured as the command measures them, then steps over
long caches follow. Keys and values are those of a trained model, in runs of neighbours until the cache is long enough;
heads of 64 dimensions are also paired to 128. Every time is the least of several steps of a query, averaged over
queries that take turns. On one thread it is processor time, to which other work on the machine adds little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from avow.attend import Attended
from avow.bench.cases import Sizes as Shape
from avow.bench.cases import real, stored
from avow.bench.results import Goal, Result, Row
from avow.bench.workloads import Workload, read
from avow.cli.options import use_threads
from avow.core import Sizes, dtype_name
from avow.decode.plan import share_of_heads
from avow.decode.step_rates import StepRates, StepTimer, TooBusy, measure_steps, share_read
from avow.nn import KeyValueCache
from benchmarks.options import Options

_TOL, _WITHIN = 1e-2, 0.25
_RUN, _ROOM = 256, 4096
# Rounds in which the queries of a point take turns: at least and at most these, and for these seconds between. Steps of
# 300 rounds of six queries, exact and sparse, append 3,600 tokens, which the room above holds.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 8, 300, 2.0


class Heads(NamedTuple):
    """A name, and the queries, keys and values of so many tokens in a type, with their scale."""

    name: str
    heads: int
    key_heads: int
    dim: int
    drawn: Callable[[int, torch.dtype], tuple[list[Tensor], Tensor, Tensor, float]]


def run(options: Options) -> Result:
    """Predicted over measured time of exact and sparse steps and of SDPA, for every shape, type, length and thread."""
    assert options.heads is not None
    lengths = (16_384,) if options.quick else (32_768, 65_536, 131_072)
    kinds = (torch.float32,) if options.quick else (torch.float32, torch.bfloat16)
    rows, remarks = list[Row](), list[str]()
    files, loads = sorted(options.heads.glob("*.safetensors")), next(iter(stored(options.heads).values()))
    shapes = [_layer(read(files[len(files) // 2])), _paired(loads)]
    for threads in sorted({1, torch.get_num_threads()}):
        with use_threads(threads):
            for heads, kind in itertools.product(shapes, kinds):
                try:
                    rows += _rows(heads, kind, lengths, threads)
                except TooBusy:
                    several = f"{threads} thread{'s' if threads > 1 else ''}"
                    remarks.append(f"{heads.name}, {dtype_name(kind)}, {several}: left out, other work disturbed it.")
    title = f"plan-decode: predicted beside measured steps at tol={_TOL:g}"
    return Result(title, rows, _goals(rows), remarks)


def _layer(load: Workload) -> Heads:
    """The heads of one layer as they are."""

    def drawn(length: int, kind: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, float]:
        generator = torch.Generator().manual_seed(0)
        runs = torch.randint(load.k.shape[2] // _RUN, (-(-length // _RUN),), generator=generator)
        places = (runs[:, None] * _RUN + torch.arange(_RUN)).flatten()[:length]
        k, v = (x[:, :, places].to(kind).contiguous() for x in (load.k, load.v))
        last = load.q.shape[2] - 1
        some = torch.linspace(last // 2, last, 6).long().tolist()  # those of late tokens, as decoding has them
        return [load.q[:, :, i : i + 1].to(kind).contiguous() for i in some], k, v, load.q.shape[3] ** -0.5

    return Heads(load.kind, load.q.shape[1], load.k.shape[1], load.k.shape[3], drawn)


def _paired(loads: list[Workload]) -> Heads:
    """Heads of all layers, paired: 32 on 8 of 128 dimensions."""

    def drawn(length: int, kind: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, float]:
        case = real("cpu", Shape((length,), 32, 8, 1, 1, kind), length, loads)
        assert case.before is not None
        return [case.before, case.q], case.k, case.v, case.scale

    return Heads("pairs of all layers", 32, 8, 128, drawn)


@torch.no_grad()
def _rows(heads: Heads, kind: torch.dtype, lengths: tuple[int, ...], threads: int) -> list[Row]:
    """A row for each length, predicted by steps that are measured first; raises `TooBusy` if other work disturbs."""
    name, many, groups, dim, drawn = heads
    rates, disturbed = measure_steps(Sizes(1, many, groups, 1, 0, dim, dim, kind), patience=60.0)
    if disturbed:
        raise TooBusy
    q, k, v, scale = drawn(8192, kind)
    foreseen = share_of_heads(torch.cat(q, 2), k, v, _TOL, scale)
    rows = []
    for length in lengths:
        about: Row = {"heads": f"{many} on {groups}, d = {dim}", "from": name, "type": dtype_name(kind)}
        about |= {"threads": threads, "tokens": length}
        rows.append(about | _point(rates, foreseen, length, *drawn(length, kind)))
    return rows


def _point(
    rates: StepRates, foreseen: float, length: int, queries: list[Tensor], k: Tensor, v: Tensor, scale: float
) -> Row:
    cache = KeyValueCache(k.shape[1], k.shape[3], dtype=k.dtype, capacity=length + _ROOM)
    cache.append(k, v)
    one = tuple(x[:, :, :1].clone() for x in (k, v))

    def step(q: Tensor, tol: float | None) -> Attended:
        cache.append(*one)
        return cache.attend(q, tol, scale=scale)

    def sdpa(q: Tensor) -> Tensor:
        k[:, :, -1:], v[:, :, -1:] = one
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    for q in queries * 2:
        step(q, _TOL)  # the first sketches all tokens, the others let heads learn
    exact, sparse, theirs = (
        _in_turns([partial(call, q) for q in queries])
        for call in (partial(step, tol=None), partial(step, tol=_TOL), sdpa)
    )
    share = statistics.mean(share_read(step(q, _TOL).certificate) for q in queries)
    priced = [rates.sparse_seconds(length, x) or 0.0 for x in (share, foreseen)]
    assert rates.sdpa is not None
    ratios = rates.exact.seconds(length) / exact, priced[0] / sparse
    return {
        "exact ms": 1e3 * exact,
        "predicted / exact": ratios[0],
        "sparse ms": 1e3 * sparse,
        "read": share,
        "predicted / sparse": ratios[1],
        "error": max(abs(ratio - 1) for ratio in ratios),
        "read at 8192": foreseen,
        "with that / sparse": priced[1] / sparse,
        "SDPA ms": 1e3 * theirs,
        "predicted / SDPA": rates.sdpa.seconds(length) / theirs,
        "SDPA / exact": theirs / exact,
        "SDPA / sparse": theirs / sparse,
    }


def _in_turns(calls: list[Callable[[], object]]) -> float:
    """The least seconds of each call, averaged; raises `TooBusy` if most calls waited for a processor."""
    timer, end, rounds = StepTimer("cpu"), time.monotonic() + _SECONDS, list[list[float]]()
    while len(rounds) < _ROUNDS or (len(rounds) < _MOST_ROUNDS and time.monotonic() < end):
        rounds.append([timer.once(call) for call in calls])
    if timer.disturbed:
        raise TooBusy
    return statistics.mean(min(times) for times in zip(*rounds, strict=True))


def _goals(rows: list[Row]) -> list[Goal]:
    goals = []
    for column in ("exact", "sparse", "SDPA"):
        errors = [abs(float(row[f"predicted / {column}"] or 0) - 1) for row in rows]
        within = sum(error <= _WITHIN for error in errors)
        found = f"{within} of {len(errors)}, largest error {max(errors, default=1.0):.0%}"
        goals.append(Goal(f"{column}: predicted within {_WITHIN:.0%} at every point", found, within == len(errors) > 0))
    return goals
