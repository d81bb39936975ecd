"""A long cache against PyTorch's attention on a CPU, whole calls with certificates.

Keys and values are those of real heads, drawn in runs of 256 neighbours until the cache is long enough. PyTorch is
asked in both forms that mean the same, siblings as heads and siblings as rows of their key head, and the faster one
counts. Times are taken in turns; ratios are those of the same moment, and beside them those of the best times of each
query, which others' work on the machine disturbs less.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from avow.bench.results import Goal, Result, Row
from avow.bench.workloads import read
from avow.decode.step_rates import share_read
from avow.nn import KeyValueCache
from benchmarks.options import Options

_TOL = 1e-2
_RUN = 256
# The first layer of the model looks everywhere: it has to be no slower.
_SPARSE, _FLAT = ("layer09", "layer18", "layer27"), 0.97
_FASTER = {"float32": 1.7, "bfloat16": 1.5}
_OVER_HEADS = 2.5


def run(options: Options) -> Result:
    """Ratios of speed for every layer, length and type, after the answers were found within their bounds."""
    assert options.heads is not None
    lengths, rounds, steps = ((4096,), 2, 2) if options.quick else ((32_768, 131_072, 262_144), 8, 6)
    rows: list[Row] = []
    failures: list[str] = []
    for path in sorted(options.heads.glob("*.safetensors")):
        layer, name = read(path, causal=True).problem, path.stem
        for length in lengths:
            for kind in (torch.float32, torch.bfloat16):
                row, broken = _point(layer.q, layer.k, layer.v, length, kind, rounds, steps)
                about: Row = {"layer": name, "tokens": length, "type": str(kind).removeprefix("torch.")}
                rows.append(about | row)
                if broken:
                    failures.append(f"{name}, {length}, {kind}: {broken} rows outside their bounds")
    title = f"cache: one query of each head at tol={_TOL:g}, {torch.get_num_threads()} threads, times as fast as SDPA"
    return Result(title, rows if not failures else [], _goals(rows), failures=failures)


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
            shares.append(100 * share_read(certificate))
    ratios: list[float] = []
    seconds: list[list[float]] = [[], [], []]
    best = [[math.inf, math.inf] for _ in queries]
    for _ in range(rounds):
        for one, least in zip(queries, best, strict=True):
            rows = one.reshape(one.shape[0], k.shape[1], -1, one.shape[3])
            times = [
                _seconds(partial(scaled_dot_product_attention, one, k, v, enable_gqa=True)),
                _seconds(partial(scaled_dot_product_attention, rows, k, v)),
                _seconds(partial(cache.attend, one, _TOL)),
            ]
            for all_of, taken in zip(seconds, times, strict=True):
                all_of.append(taken)
            ratios.append(min(times[:2]) / times[2])
            least[:] = min(*times[:2], least[0]), min(times[2], least[1])
    heads, as_rows, mine = (1e3 * statistics.median(x) for x in seconds)
    row: Row = {
        "PyTorch ms": min(heads, as_rows),
        "cache ms": mine,
        "times as fast": statistics.median(ratios),
        "over siblings as heads": statistics.median(x / y for x, y in zip(seconds[0], seconds[2], strict=True)),
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
    def least(column: str, kind: str = "", layers: tuple[str, ...] = _SPARSE) -> float:
        some = (row for row in rows if row["layer"] in layers or not layers)
        return min((float(row[column] or 0) for row in some if kind in ("", row["type"])), default=0.0)

    goals = []
    for kind, times in _FASTER.items():
        found = least("times as fast", kind)
        goals.append(Goal(f"{kind}: {times:g} times as fast as PyTorch's faster form", f"{found:.2f}", found >= times))
    found = least("over siblings as heads")
    goals.append(Goal(f"{_OVER_HEADS:g} times as fast as with enable_gqa=True", f"{found:.2f}", found >= _OVER_HEADS))
    found = least("times as fast", layers=())
    return [*goals, Goal(f"nowhere below {_FLAT:g} of PyTorch's faster form", f"{found:.2f}", found >= _FLAT)]
