"""How long calls take that no graph can hold, and the memory they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from avow.bench.clock import Clock


class Timer(Clock):
    """Also times calls as they come, for those that a graph cannot hold."""

    def eager(self, call: Callable[[], Any]) -> float:
        """What one call takes when many follow each other."""
        if self.device != "cuda":
            return statistics.median(self._each(call) for _ in range(self.rounds))
        for _ in range(2):
            call()
        times = []
        for _ in range(self.rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(self.calls):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / self.calls)
        return statistics.median(times)

    def peak(self, call: Callable[[], Any]) -> float:
        """The bytes that a call takes beyond what was there before it."""
        if self.device != "cuda":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
