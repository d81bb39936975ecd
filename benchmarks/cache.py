"""A long cache against PyTorch's attention on a CPU, whole calls with certificates: `python -m benchmarks.cache`.

Keys and values are those of real heads where a folder is given, made up otherwise, drawn in runs of 256 neighbours
until the cache is long enough. PyTorch is asked in both forms that mean the same, siblings as heads and siblings as
rows of their key head, and the faster one counts. Times are taken in turns; ratios are those of the same moment, and
beside them those of the best times of each query, which others' work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from avow.bench.machine import machine
from avow.bench.results import Goal, Result, Row
from avow.nn import KeyValueCache, key_value_cache
from avow.workloads import read

_TOL = 1e-2
_RUN = 256
_GOALS = ("layer09", "layer18", "layer27", "made up")


def run(folder: Path | None, lengths: list[int], types: list[torch.dtype], rounds: int, steps: int) -> Result:
    """Ratios of speed for every layer, length and type, after the answers were found within their bounds."""
    rows: list[Row] = []
    failures: list[str] = []
    for name, q, k, v in _layers(folder):
        for length in lengths:
            for kind in types:
                row, broken = _point(q, k, v, length, kind, rounds, steps)
                about: Row = {"heads": name, "length": length, "type": str(kind).removeprefix("torch.")}
                rows.append(about | row)
                if broken:
                    failures.append(f"{name}, {length}, {kind}: {broken} rows outside their bounds")
    title = f"cache: one query of each head at tol={_TOL:g}, {torch.get_num_threads()} threads, times as fast as SDPA"
    return Result(title, rows if not failures else [], _goals(rows), failures=failures)


def _layers(folder: Path | None) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Queries, keys and values by the name of their layer: 9 query heads on 3 key heads where they are made up."""
    if folder is not None:
        found = [(path.stem, read(path, causal=True).problem) for path in sorted(folder.glob("*.safetensors"))]
        return [(name, p.q, p.k, p.v) for name, p in found]
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 3, 8192, 64).unbind()
    aims = k[:, :, torch.randint(8192, (64,))].repeat_interleave(3, 1)
    return [("made up", 2 * aims + torch.randn(aims.shape), k, v)]


@torch.no_grad()
def _point(q: Tensor, k: Tensor, v: Tensor, length: int, kind: torch.dtype, rounds: int, steps: int) -> tuple[Row, int]:
    generator = torch.Generator().manual_seed(0)
    runs = torch.randint(k.shape[2] // _RUN, (-(-length // _RUN),), generator=generator)
    places = (runs[:, None] * _RUN + torch.arange(_RUN)).flatten()[:length]
    k, v = (x[:, :, places].to(kind).contiguous() for x in (k, v))
    cache = KeyValueCache(k.shape[1], k.shape[3], v.shape[3], dtype=kind)
    cache.append(k, v)
    some = torch.randperm(q.shape[2], generator=generator)[:steps].tolist()
    queries = [q[:, :, i : i + 1].to(kind).contiguous() for i in some]
    broken, shares, methods = 0, [], []
    for one in queries:
        out, certificate = cache.attend(one, _TOL)
        broken += int((_errors(one, k, v, out) > certificate.rows).sum())
        methods.append(certificate.method)
        if certificate.method == "sparse":
            shares.append(float(certificate.reason.split("%")[0].split()[-1]))
    ratios: list[float] = []
    seconds: list[list[float]] = [[], [], []]
    best = [[math.inf, math.inf] for _ in queries]
    for _ in range(rounds):
        for one, least in zip(queries, best, strict=True):
            rows = one.reshape(one.shape[0], k.shape[1], -1, one.shape[3])
            times = [
                _seconds(lambda one=one: scaled_dot_product_attention(one, k, v, enable_gqa=True)),  # type: ignore[misc]
                _seconds(lambda rows=rows: scaled_dot_product_attention(rows, k, v)),  # type: ignore[misc]
                _seconds(lambda one=one: cache.attend(one, _TOL)),  # type: ignore[misc]
            ]
            for all_of, taken in zip(seconds, times, strict=True):
                all_of.append(taken)
            ratios.append(min(times[:2]) / times[2])
            least[:] = min(*times[:2], least[0]), min(times[2], least[1])
    heads, as_rows, mine = (1e3 * statistics.median(x) for x in seconds)
    row: Row = {
        "as heads ms": heads,
        "as rows ms": as_rows,
        "cache ms": mine,
        "times as fast": statistics.median(ratios),
        "at best": statistics.geometric_mean(theirs / ours for theirs, ours in best),
        "tokens read %": statistics.mean(shares) if shares else 100.0,
        "sparse answers": methods.count("sparse") / len(methods),
    }
    return row, broken


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def _errors(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """How far each row is from the truth in float64, in units of the longest value."""
    wide, keys, values = (x.double() for x in (q, k, v))
    rows = wide.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    truth = torch.softmax(rows @ keys.transpose(-1, -2) / q.shape[3] ** 0.5, -1) @ values
    units = torch.linalg.vector_norm(values, dim=-1).amax(-1)[:, :, None]  # (b, g, 1)
    far = torch.linalg.vector_norm(out.double().reshape(truth.shape) - truth, dim=-1) / units
    return far.reshape(q.shape[:3])


def _goals(rows: list[Row]) -> list[Goal]:
    found = [float(row["times as fast"] or 0) for row in rows if row["heads"] in _GOALS]
    least, mean = min(found, default=0.0), statistics.geometric_mean(found) if found else 0.0
    told = f"{mean:.2f} on average, {least:.2f} at least"
    return [Goal("no slower than PyTorch's faster form", told, least >= 1.0)]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a bound was broken."""
    parser = argparse.ArgumentParser("python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--heads", type=Path, help="a folder of .safetensors with q, k, v, q_positions")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65_536, 262_144], help="tokens in the cache")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], help="types of the cache")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each query")
    parser.add_argument("--steps", type=int, default=6, help="queries of each head")
    parser.add_argument("--force", action="store_true", help="skim whatever it costs")
    parsed = parser.parse_args(arguments)
    if parsed.force:
        key_value_cache._COSTS = dict.fromkeys(key_value_cache._COSTS, (0.0, 0.0, 1.0))
    print(machine())
    kinds = [getattr(torch, name) for name in parsed.types]
    result = run(parsed.heads, parsed.lengths, kinds, parsed.rounds, parsed.steps)
    print(result.text())
    return int(bool(result.failures))


if __name__ == "__main__":
    raise SystemExit(main())
