"""How well the planner foresees time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch

from avow.bench.clock import peak_bytes
from avow.bench.results import Goal, Result, Row
from avow.calibration import Rates, measure_rates, random_problem
from avow.core import Method, Problem, Sizes
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from benchmarks.options import Options
from benchmarks.race import Contender, race
from benchmarks.truth import distance

_TIME, _MEMORY = 0.25, 0.20


class Point(NamedTuple):
    """One prediction to hold to account."""

    method: Method
    sizes: Sizes


def points(quick: bool) -> Iterator[Point]:
    """Methods and settings over lengths, causality, heads and dimensions."""
    methods = (Exact(), Separable(), RandomFeatures(64), RandomFeatures(256), LowRank(16), LowRank(64))
    lengths = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192)
    for n in lengths:
        for causal in (False, True):
            for method in methods:
                yield Point(method, Sizes(1, 8, 8, n, n, 64, 64, causal=causal))
    for heads, key_heads, dim in ((4, 4, 128), (16, 16, 32), (12, 4, 64)):
        for method in (Exact(), Separable(), RandomFeatures(256), LowRank(64)):
            yield Point(method, Sizes(1, heads, key_heads, 1024 if quick else 2048, 1024 if quick else 2048, dim, dim))
    yield Point(Exact("float64"), Sizes(1, 8, 8, 1024, 1024, 64, 64))


def run(options: Options) -> list[Result]:
    """Predicted over measured seconds and bytes of computing, by rates fitted at the start of the run."""
    measured = measure_rates("cpu")
    if measured is None:
        raise SystemExit("this machine is too busy to be measured; try again when it is at rest")
    rates = Rates(measured, "measured for this run")
    chosen = list(points(options.quick))
    contenders = [_contender(str(i), point) for i, point in enumerate(chosen)]
    found = race(contenders, 10.0 if options.quick else 30.0, least=3, most=5)
    rows: list[Row] = []
    for i, (point, contender) in enumerate(zip(chosen, contenders, strict=True)):
        if str(i) in found.failed:
            continue
        with torch.no_grad():
            peak = peak_bytes(contender.call, torch.device("cpu"))
        z, seconds = point.sizes, found.median(str(i))
        heads = f"{z.heads}" if z.heads == z.key_heads else f"{z.heads}/{z.key_heads}"
        rows.append(
            {
                "method": point.method.label,
                "n": z.queries,
                "heads": heads,
                "d": z.dim,
                "causal": "yes" if z.causal else "no",
                "ms": seconds * 1e3,
                "predicted / measured time": rates.seconds(point.method, z) / seconds,
                "MiB": round(peak / 2**20, 2),
                "predicted / measured memory": point.method.cost(z).peak_bytes / peak,
            }
        )
    failures = [f"{chosen[int(i)]} {why}" for i, why in found.failed.items()]
    title = "planner: predicted against measured time and peak memory of computing (float32)"
    return [Result(title, _by_method(rows), _goals(rows), failures=failures), Result("planner: every point", rows)]


def _contender(name: str, point: Point) -> Contender:
    problem: Problem = random_problem(point.sizes)

    def call() -> torch.Tensor:
        return point.method.compute(problem, torch.Generator().manual_seed(0)).out

    def check() -> str:
        far = float(distance(call(), problem, point.method, count=4).errors.amax())
        return "" if far <= 2 else f"is {far:.2g} off"

    return Contender(name, call, check)


def _errors(rows: list[Row], column: str) -> list[float]:
    return [abs(float(row[f"predicted / measured {column}"] or 0.0) - 1) for row in rows]


def _goals(rows: list[Row]) -> list[Goal]:
    times, peaks = _errors(rows, "time"), _errors(rows, "memory")
    time, memory = statistics.median(times), statistics.median(peaks)
    within = sum(error <= _MEMORY for error in peaks)
    found = f"{within} of {len(peaks)}; median error {memory:.0%}, largest {max(peaks):.0%}"
    aim = f"median error of predicted time over {len(rows)} points, at most {_TIME:.0%}"
    return [
        Goal(aim, f"{time:.0%}", time <= _TIME),
        Goal(f"predicted memory within {_MEMORY:.0%} at every point", found, within == len(peaks)),
    ]


def _by_method(rows: list[Row]) -> list[Row]:
    """The median errors of each method and setting, causal apart."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["method"]), str(row["causal"])), []).append(row)
    return [
        {
            "method": method,
            "causal": causal,
            "points": len(some),
            "error of time": statistics.median(_errors(some, "time")),
            "error of memory": statistics.median(_errors(some, "memory")),
        }
        for (method, causal), some in groups.items()
    ]
