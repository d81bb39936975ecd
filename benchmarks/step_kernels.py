"""Where the time of a captured step of decoding goes, launch by launch.

`python -m benchmarks.step_kernels --heads DIR` measures that alone. A step is measured with dependent launches, where a
GPU puts the next kernels in place before one ends, and without. Without a folder of heads, keys are synthetic. Answers
are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from avow.bench import decode
from avow.bench.cases import Case, Shape, cases, real, stored
from avow.bench.clock import Clock
from avow.bench.results import Result, Row, tell_row

_SIZES = decode.FULL["cuda"]
# Steps of real heads, by name and length; and those of synthetic heads, of which diffuse ones read all tokens.
SHAPES = (
    *(Shape("one query", n) for n in (32768, 131072, 1048576)),
    Shape("8 siblings", 131072, siblings=8),
    Shape("8 queries", 131072, queries=8),
    Shape("16 sequences", 32768, batch=16),
)
_SYNTHETIC = (32768, 131072)
# The text on which sparse decoding saves least.
_TEXT = "table"
# Replays of both captured steps that are looked at launch by launch.
_REPLAYS = 20


class Launch(NamedTuple):
    """A kernel, or a copy, as a GPU ran it: from when to when, in microseconds."""

    name: str
    start: float
    end: float


def run(folder: Path | None, tell: Callable[[str], None], quick: bool = False) -> Result:
    """What every launch of a step takes, and the whole step, for every case."""
    rows, failures = list[Row](), list[str]()
    for case in _cases(folder, quick):
        for early in (True, False):
            label = f"{case.name}, n = {case.length}, dependent launches {'on' if early else 'off'}"
            tell(label)
            with _launches(early):
                found, faults = _measure(case)
            head: Row = {"keys": case.name, "n": case.length, "dependent launches": "on" if early else "off"}
            rows += [head | row for row in found]
            failures += [f"{label}: {fault}" for fault in faults]
            for row in found:
                tell_row(head | row)
        torch.cuda.empty_cache()
    remarks = [
        "`us` is how long a launch runs, waiting for the one before included; `us apart` is from the end of the launch "
        "before to its own, which add up to the step. The profiler makes both longer: `whole step` is without it."
    ]
    return Result("decode: the launches of a captured step", rows, remarks=remarks, failures=failures)


def _cases(folder: Path | None, quick: bool) -> Iterator[Case]:
    lengths = (8192,) if quick else _SYNTHETIC
    yield from cases("cuda", _SIZES._replace(lengths=lengths, shapes=(), steady=()), None)
    if folder is None:
        return
    texts = stored(folder)
    text = _TEXT if _TEXT in texts else next(iter(texts))
    for shape in SHAPES:
        n = 8192 if quick else shape.length
        yield real("cuda", _SIZES.of(shape), n, texts[text], f"{text}, {shape.name}")


@contextlib.contextmanager
def _launches(early: bool) -> Iterator[None]:
    """Kernels are launched before the last one is done, if the device can; or never."""
    from avow.kernels import tile_ops

    if early:
        yield
    else:
        with mock.patch.object(tile_ops, "early", lambda device: False):
            yield


def _measure(case: Case) -> tuple[list[Row], list[str]]:
    """A row for each launch of a step and for the whole; none if an answer fails its check."""
    cache = decode.filled(case)
    steps = [decode.step(cache, case, q, 1.0) for q in (case.before, case.q) if q is not None]
    for one in steps:
        answer = one()
    _, faults = decode.check(case, cache, answer)
    if faults:
        return [], faults
    replays, last = decode.captured_steps(steps)
    for replay in replays * 4:
        replay()
    torch.cuda.synchronize()
    _, faults = decode.check(case, cache, last)
    if faults:
        return [], [f"captured: {fault}" for fault in faults]

    def all_of_them() -> None:
        for replay in replays:
            replay()

    seconds = Clock("cuda", 15, 10).seconds(all_of_them, graph=False) / len(replays)
    rows = launch_rows(_profiled(all_of_them), _REPLAYS * len(replays))
    return [*rows, {"launch": "whole step", "times a step": 1.0, "us": None, "us apart": 1e6 * seconds}], []


def _profiled(call: Callable[[], None]) -> list[Launch]:
    """What the GPU did in some calls, in the order of its ends."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_REPLAYS):
            call()
        torch.cuda.synchronize()
    on_device = [x for x in profile.events() or [] if x.device_type.name == "CUDA"]
    launches = [Launch(x.name, x.time_range.start, x.time_range.end) for x in on_device]
    return sorted(launches, key=lambda x: x.end)


def launch_rows(launches: Sequence[Launch], steps: int) -> list[Row]:
    """Means over the launches of each name, in the order in which they first ended."""
    apart = [0.0, *(x.end - before.end for before, x in itertools.pairwise(launches))]
    rows = list[Row]()
    for name in dict.fromkeys(x.name for x in launches):
        own = [i for i, x in enumerate(launches) if x.name == name]
        # What comes before the very first launch is no part of a step.
        known = [apart[i] for i in own if i] or [0.0]
        long = sum(launches[i].end - launches[i].start for i in own) / len(own)
        mean = sum(known) / len(known)
        rows.append({"launch": name, "times a step": len(own) / steps, "us": long, "us apart": mean})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Tell of every launch on stderr; 1 where an answer failed its check."""
    parser = argparse.ArgumentParser("python -m benchmarks.step_kernels", description=__doc__)
    parser.add_argument("--heads", type=Path, metavar="DIR", help="*.safetensors files with q, k, v and q_positions")
    parser.add_argument("--quick", action="store_true", help="short caches")
    chosen = parser.parse_args(arguments)
    result = run(chosen.heads, lambda step: print(f"  {step}", file=sys.stderr, flush=True), chosen.quick)
    print(*result.notes, sep="\n")
    return int(bool(result.failures))


if __name__ == "__main__":
    raise SystemExit(main())
