"""What a call really costs and how wrong it really is."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from avow.bench.workloads import Workload
from avow.core import Method
from avow.core.audit import audit_rows

Call = Callable[[], object]

# Seconds to spend on one ratio: a call that takes longer is timed once, and needs no more to be called slow.
_ENOUGH = 0.8


class Pace(NamedTuple):
    """The median time of a call, and the median of its ratios to the call run right before it."""

    seconds: float
    ratio: float


def pace(call: Call, baseline: Call, device: torch.device, pairs: int) -> Pace:
    """How fast a warm call is beside a baseline: run in turns, so that a busy machine slows both."""
    timed(baseline, device)
    times: list[float] = []
    ratios: list[float] = []
    spent = 0.0
    while not times or (len(times) < pairs and spent < _ENOUGH):
        base, own = timed(baseline, device), timed(call, device)
        times.append(own)
        ratios.append(own / base)
        spent += base + own
    return Pace(statistics.median(times), statistics.median(ratios))


def timed(call: Call, device: torch.device) -> float:
    """The seconds of one call, the device's queue drained."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory a call holds at once beyond what was held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler announces each start and stop on stderr unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def finite(x: float) -> float | None:
    """The number where it is one; nothing is proved by an infinite bound."""
    return x if math.isfinite(x) else None


class LargestErrors(NamedTuple):
    """The largest errors among sampled rows: relative to the longest value that a row sees, and to the true answer."""

    error: float
    relative: float


def largest_errors(out: Tensor, workload: Workload, target: Method, seed: int) -> LargestErrors:
    """The largest errors among sampled rows, each recomputed in float64 by the target's definition."""
    problem = workload.problem
    generator = torch.Generator().manual_seed(seed)
    found = audit_rows(out, problem, target, 0.99, 0.99, generator).certificate
    return LargestErrors(found.bound, found.relative)
