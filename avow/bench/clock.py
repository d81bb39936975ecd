"""How long a call takes on the device it runs on, and how much memory."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Clock:
    """Medians of times: of CUDA graphs by events on a GPU, of calls elsewhere."""

    def __init__(self, device: str, rounds: int, calls: int) -> None:
        self.device, self.rounds, self.calls = device, rounds, calls

    def seconds(self, call: Callable[[], Any]) -> float:
        """What one call takes."""
        if self.device != "cuda":
            return self.in_turns({"": call})[""]
        try:
            replay = self._captured(call).replay
        except RuntimeError as error:
            print(f"  timed without a graph ({str(error).splitlines()[0][:80]})", file=sys.stderr)
            replay = call
        return self._by_events(replay)

    def eager(self, call: Callable[[], Any]) -> float:
        """What one call takes as it comes, without a graph: for those that no graph can hold."""
        if self.device != "cuda":
            return self.in_turns({"": call})[""]
        for _ in range(2):
            call()
        return self._by_events(call)

    def in_turns(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """What each call takes; they take turns, so that a busy machine slows them all."""
        if self.device == "cuda":
            return {name: self.seconds(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                times[name].append(self._each(call))
        return {name: statistics.median(found) for name, found in times.items()}

    def eagerly(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """What each call takes as it comes, without a graph; on a CPU they take turns."""
        if self.device == "cuda":
            return {name: self.eager(call) for name, call in calls.items()}
        return self.in_turns(calls)

    def bandwidth(self) -> float:
        """Bytes that a simple kernel reads and writes in a second; what CUDA graphs copy by themselves is slower."""
        room = torch.ones(2**28 if self.device == "cuda" else 2**22, device=self.device)
        target = torch.empty_like(room)
        return 2 * 4 * room.numel() / self.seconds(lambda: torch.mul(room, 2, out=target))

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

    def _by_events(self, call: Callable[[], Any]) -> float:
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

    def _each(self, call: Callable[[], Any]) -> float:
        before = time.perf_counter()
        for _ in range(self.calls):
            call()
        return (time.perf_counter() - before) / self.calls

    @staticmethod
    def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph
