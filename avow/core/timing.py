"""How long a call takes on its device: the timer of calibration, of methods that choose a backend, of benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds per call, averaged over `calls` in a row; the device is synchronized after the last."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def least_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least time of a call, after one warm-up: what else runs on the machine only ever adds."""
    timed(call, device)
    return min(timed(call, device) for _ in range(repeats))
