"""Time and memory of a call on the device it runs on, and the name of the machine that was measured."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from avow.core.timing import timed

Call = Callable[[], object]

# Seconds to spend on one ratio: a call that takes longer is timed once, and needs no more to be called slow.
_ENOUGH = 0.8


# A call that computes on a CPU and was given less of one than this had to wait for other processes.
_OWN_SHARE = 0.85


class Pace(NamedTuple):
    """The median time of a call, the median of its ratios to the baseline run right before it, and the median time of
    that; `waited` is whether the process had to wait for a CPU meanwhile.
    """

    seconds: float
    ratio: float
    baseline: float = 0.0
    waited: bool = False


def pace(call: Call, baseline: Call, device: torch.device, pairs: int) -> Pace:
    """How fast a warm call is beside a baseline: run in turns, so that a busy machine slows both."""
    timed(baseline, device)
    times: list[float] = []
    bases: list[float] = []
    spent, used = 0.0, time.process_time()
    while not times or (len(times) < pairs and spent < _ENOUGH):
        base, own = timed(baseline, device), timed(call, device)
        times.append(own)
        bases.append(base)
        spent += base + own
    waited = device.type == "cpu" and time.process_time() - used < _OWN_SHARE * spent
    ratio = statistics.median(own / base for own, base in zip(times, bases, strict=True))
    return Pace(statistics.median(times), ratio, statistics.median(bases), waited)


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory a call holds at once beyond what was held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Otherwise the profiler announces each start and stop on stderr.
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


class Clock(NamedTuple):
    """Median times over `rounds` of `calls` calls each."""

    device: str
    rounds: int
    calls: int

    def seconds(self, call: Call, graph: bool = True) -> float:
        """What one call takes."""
        return self.in_turns(call, graph=graph)[0]

    def in_turns(self, *calls: Call, graph: bool = True) -> list[float]:
        """What each call takes: on a GPU in a CUDA graph, if `graph`; on a CPU in turns, slowed alike if it is busy."""
        if self.device == "cuda":
            return [self._by_events(_replay(call) if graph else call) for call in calls]
        device = torch.device(self.device)
        rounds = [[timed(call, device, self.calls) for call in calls] for _ in range(self.rounds)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def bandwidth(self) -> float:
        """Bytes that a simple kernel reads and writes in a second; what CUDA graphs copy by themselves is slower."""
        room = torch.ones(2**28 if self.device == "cuda" else 2**22, device=self.device)
        target = torch.empty_like(room)
        return 2 * 4 * room.numel() / self.seconds(lambda: torch.mul(room, 2, out=target))

    def _by_events(self, call: Call) -> float:
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


def _replay(call: Call) -> Call:
    """The call's CUDA graph; the call itself if it cannot be captured."""
    aside = torch.cuda.Stream()
    try:
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
    except RuntimeError as error:
        print(f"  timed without a graph ({str(error).splitlines()[0][:80]})", file=sys.stderr)
        return call
    return graph.replay


def machine(device: str = "cpu") -> str:
    """The processor, its cores, and the torch that ran on them; or the GPU."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}, CPU"
