"""How time and memory of the linear methods grow with the length of the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import avow
from avow.attend import Attended
from avow.bench.clock import peak_bytes
from avow.bench.results import Goal, Result, Row
from avow.core import Problem
from avow.methods import method_named
from benchmarks.linear import Inputs, inputs
from benchmarks.options import Options
from benchmarks.race import Contender, race
from benchmarks.truth import broken

_AIM = 1.1


class _Line(NamedTuple):
    method: str
    settings: dict[str, Any]
    causal: bool

    @property
    def label(self) -> str:
        return f"{self.method}, causal" if self.causal else self.method


_LINES = (
    _Line("separable", {}, False),
    _Line("separable", {}, True),
    _Line("random_features", {"features": 256}, False),
    _Line("random_features", {"features": 256}, True),
    _Line("low_rank", {"rank": 64}, False),
)


def run(options: Options) -> list[Result]:
    """Slopes of time and memory on log-log paper, and times and peaks of whole calls at every length."""
    lengths = [4096 * 2**i for i in range(3 if options.quick else 5)]
    rows: list[Row] = []
    failures: list[str] = []
    seconds = 4.0 if options.quick else 8.0
    for line in _LINES:
        data = {n: inputs(n) for n in lengths}
        found = race([_contender(line, n, data[n]) for n in lengths], seconds)
        failures += [f"{line.label} at n={n} {why}" for n, why in found.failed.items()]
        if found.failed:
            continue
        peaks = [peak_bytes(_contender(line, n, data[n]).call, torch.device("cpu")) for n in lengths]
        times = [found.median(str(n)) for n in lengths]
        for n, time, peak in zip(lengths, times, peaks, strict=True):
            rows.append(
                {
                    "method": line.label,
                    "n": n,
                    "seconds": time,
                    "time ratio": time / times[0],
                    "peak MiB": round(peak / 2**20, 1),
                    "memory ratio": peak / peaks[0],
                }
            )
    title = f"scaling: n = {lengths[0]} to {lengths[-1]}, 8 heads, d = 64, float32, 256 features, rank 64"
    return [Result(title, slopes(rows), goals(rows), failures=failures), Result("scaling: every length", rows)]


def slopes(rows: list[Row]) -> list[Row]:
    """One row for each method: how steeply its time and its memory grow, and what both are at the longest length."""
    found: list[Row] = []
    for method, mine in _by_method(rows).items():
        lengths = [int(row["n"] or 0) for row in mine]
        time, memory = (slope(lengths, [float(row[x] or 0.0) for row in mine]) for x in ("seconds", "peak MiB"))
        longest = mine[-1]["n"]
        ends: Row = {f"seconds at {longest}": mine[-1]["seconds"], f"MiB at {longest}": mine[-1]["peak MiB"]}
        found.append({"method": method, "slope of time": time, "slope of memory": memory, **ends})
    return found


def _by_method(rows: list[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(str(r["method"]) for r in rows)
    }


def _contender(line: _Line, n: int, qkv: Inputs) -> Contender:
    problem, method = Problem.of(*qkv, causal=line.causal), method_named(line.method)(**line.settings)

    def call() -> Attended:
        generator = torch.Generator().manual_seed(1)
        return avow.attend(*qkv, method=line.method, causal=line.causal, generator=generator, **line.settings)

    return Contender(str(n), call, lambda: broken(*call(), problem, method))


def goals(rows: list[Row]) -> list[Goal]:
    """The slopes of time and memory of each method; one whose times do not even grow was not measured."""
    found = []
    for method, mine in _by_method(rows).items():
        lengths = [int(row["n"] or 0) for row in mine]
        for what, column in (("time", "seconds"), ("memory", "peak MiB")):
            values = [float(row[column] or 0.0) for row in mine]
            steep, steady = slope(lengths, values), values == sorted(values)
            told = f"{steep:.3f}" if steady else "nothing: the machine was too busy, longer took less than shorter"
            found.append(Goal(f"{method}: slope of {what} at most {_AIM}", told, steady and steep <= _AIM))
    return found


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The least-squares slope of log(values) over log(lengths).

    >>> slope([1, 2, 4], [3.0, 12.0, 48.0])
    2.0
    """
    xs, ys = [math.log(n) for n in lengths], [math.log(value) for value in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
