"""What a tolerance buys in decoding: one query against keys and values that a cache holds.

This is what `sparse` is for. Over all queries at once its choices cost more than they save; here the sketch of the keys
is in place before the query comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from avow.bench.workloads import Workload
from avow.errors import ToleranceUnreachable
from avow.methods import method_named
from avow.nn import KeyValueCache
from avow.report.measure import finite, largest_errors, pace

# Tolerances, and the probability with which a bound may be relied on.
WISHES = ((1e-1, 1.0), (1e-2, 1.0), (1e-3, 1.0), (1e-2, 0.999))
# A step is over so soon that fewer pairs of them tell little.
_LEAST = 5


@dataclass(frozen=True)
class Step:
    """One answer within a tolerance: what it took beside the exact one, how wrong it is, what it promises, and why.

    `error` and `bound` are relative to the longest value that a row sees, the other two to the answer.
    """

    tol: float
    confidence: float
    seconds: float
    ratio: float
    error: float
    bound: float
    method: str
    because: str
    relative_error: float | None
    relative_bound: float | None


@dataclass(frozen=True)
class Decoding:
    """The steps at every tolerance, from a cache of so many keys."""

    keys: int
    steps: tuple[Step, ...]

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def decoding(workload: Workload, seed: int, pairs: int) -> Decoding:
    """The last query of every head against all keys that it sees."""
    load = last_query(workload)
    b, g, s, d = load.k.shape
    cache = KeyValueCache(g, d, load.v.shape[-1], b, load.k.dtype, load.k.device)
    cache.append(load.k, load.v)
    return Decoding(s, tuple(_steps(cache, load, seed, pairs)))


def last_query(workload: Workload) -> Workload:
    """The workload when its last query came: only that one, and the keys up to it."""
    w = workload
    end = w.k.shape[-2]
    if w.causal:
        end = min(end, w.q.shape[-2] if w.positions is None else int(w.positions[-1]) + 1)
    k, v = (x[..., :end, :].contiguous() for x in (w.k, w.v))
    return Workload(w.kind, w.summary, w.q[..., -1:, :].contiguous(), k, v)


def _steps(cache: KeyValueCache, load: Workload, seed: int, pairs: int) -> Iterator[Step]:
    exact = method_named("exact")()
    for tol, confidence in WISHES:
        draws = torch.Generator(load.q.device).manual_seed(seed)

        def call(tol: float = tol, confidence: float = confidence, draws: torch.Generator = draws) -> Any:
            return cache.attend(load.q, tol, confidence, generator=draws, method="sparse")

        try:
            out, certificate = call()
        except ToleranceUnreachable:
            continue  # half precision cannot say it: rounding alone is coarser
        speed = pace(call, lambda: cache.attend(load.q), load.q.device, max(pairs, _LEAST))
        found = largest_errors(out, load, exact, seed)
        yield Step(
            tol,
            confidence,
            speed.seconds,
            speed.ratio,
            found.error,
            certificate.bound,
            certificate.method,
            certificate.reason,
            finite(found.relative),
            finite(certificate.relative),
        )
