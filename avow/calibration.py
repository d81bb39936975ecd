"""What this machine does per second: measured once in about two seconds, kept in a file, and easy to ignore.

A method's time is modelled as launches·a + pointwise·b + flops·c, the three rates fitted to a few small runs of
that method in float32. `avow.plan` and `avow plan` measure them if no file has them (`calibration_file`); `attend`
never does. Until somebody did, it uses typical rates on a CPU, and on a GPU the `Roofline`: a few figures of the
device that the first call measures in some milliseconds and this process remembers. So what `attend` chooses depends
on its tensors and arguments, on what methods proved lately (`planner.Trials`), and on the rates that this process
found in the file at its first call, or measured itself since. With `AVOW_CALIBRATION=off` rates are typical and
nothing is measured and no file touched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avow.calibration_file import file_for, forget, keep, recall
from avow.core import Cost, Method, Problem, Sizes
from avow.core.timing import least_seconds, timed
from avow.methods import all_methods, exact_method
from avow.parameters import as_float

_LOG = logging.getLogger(__name__)
# Raise when the cost model or the way it is fitted changes: older files are then measured again.
VERSION = 6


@dataclass(frozen=True)
class Rate:
    """Seconds per launch, per pointwise element and per floating-point operation of one method."""

    launch: float
    pointwise: float
    flop: float

    def seconds(self, cost: Cost) -> float:
        work = self.pointwise * cost.pointwise + self.flop * cost.flops
        return self.launch * cost.launches + work * cost.weight


# Seconds in all. A machine at rest needs about two; if other work has its cores, threads wait for one another, and all
# the runs would take minutes and tell nothing.
_PATIENCE = 6.0
# Keys, heads and dimensions of the runs. On a GPU short ones tell what launches cost, and long ones what work does.
_RUNS = {
    "cpu": ((64, 2, 32), (256, 2, 32), (768, 4, 32), (1536, 4, 64)),
    "cuda": ((256, 2, 32), (2048, 8, 64), (8192, 8, 64), (16384, 16, 128)),
}
# Methods that take this many seconds are not measured at larger sizes.
_LONG = 0.03

# A two-core machine of 2026; only ratios between methods matter if nothing was measured.
TYPICAL = Rate(5e-6, 4e-10, 8e-12)
# What a GPU is asked to do once: sizes that take it about a tenth of a millisecond each.
_SIDE, _NUMBERS, _HEADS, _LENGTH, _DIM = 2048, 2**24, 16, 2048, 128
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rates:
    """The rates of every measured method; `causal` forms are measured apart."""

    measured: dict[str, Rate]
    source: str

    def seconds(self, method: Method, sizes: Sizes) -> float:
        """How long a method is predicted to take."""
        return self.measured.get(_key(method.name, sizes.causal), TYPICAL).seconds(method.cost(sizes))


@dataclass(frozen=True)
class Roofline(Rates):
    """The rates of a GPU by five figures: launches take the host's time while the device computes what was launched.

    Attributes:
        launch: seconds of the host for one launch.
        write: seconds of the device for a number that is written.
        product: seconds for an operation of a product in float32, in which linear methods compute.
        exact: seconds for an operation of exact attention, by the type of its inputs.
        exact_causal: the same of causal attention, whose hidden half counts.
    """

    launch: float = 6e-6
    write: float = 4e-12
    product: float = 4e-14
    exact: dict[torch.dtype, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_HALVES, 3e-15))
    exact_causal: dict[torch.dtype, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_HALVES, 2e-15))

    def seconds(self, method: Method, sizes: Sizes) -> float:
        """How long a method is predicted to take: as long as its launches, or as its work if that takes longer."""
        cost = method.cost(sizes)
        work = (self.write * cost.pointwise + self.product * cost.flops) * cost.weight
        if method.is_exact:
            known = self.exact_causal if sizes.causal else self.exact
            work = known.get(method.arithmetic(sizes.dtype), self.product * cost.weight) * cost.flops
        return max(self.launch * cost.launches, work)


def roofline(device: torch.device, time: Callable[[Callable[[], object]], float]) -> Roofline:
    """The figures of a device; `time` says how many seconds a call takes on it."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    one, many, side = ones(1), ones(_NUMBERS), ones(_SIDE, _SIDE)

    def launches() -> None:
        for _ in range(32):
            one.add_(1)

    exact: dict[bool, dict[torch.dtype, float]] = {False: {}, True: {}}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = ones(1, _HEADS, _LENGTH, _DIM, dtype=dtype)
        for causal, found in exact.items():
            problem = Problem.of(x, x, x, causal=causal)
            method = exact_method()()
            found[dtype] = time(functools.partial(method.compute, problem)) / method.cost(problem.sizes).flops
    return Roofline(
        {},
        "measured in the first call on this device",
        time(launches) / 32,
        time(lambda: torch.mul(many, 2.0, out=many)) / _NUMBERS,
        time(lambda: torch.mm(side, side)) / (2 * _SIDE**3),
        exact[False],
        exact[True],
    )


@functools.cache
def _measured_roofline(name: str) -> Roofline:
    """The figures of the current device of this kind, measured once in a process."""
    device = torch.device(name)
    try:
        with torch.no_grad():
            return roofline(device, lambda call: least_seconds(call, device, repeats=3))
    except torch.OutOfMemoryError:
        return Roofline({}, "typical rates: no room to measure the device")


def _key(name: str, causal: bool) -> str:
    return f"{name}/causal" if causal else name


def rates(
    device: str = "cpu",
    measure: bool = True,
    tell: Callable[[str], object] = _LOG.info,
    again: bool = False,
) -> Rates:
    """The rates of this device: those of its file, else measured now and kept, else typical ones.

    A file is read once in a process. If `measure`, what is missing is measured, which takes about two seconds and at
    most six (and on a GPU as long as kernels take to compile), and `tell` is called with a line that says so; if the
    machine is too busy for that, it is left alone for an hour. `again` measures whatever is known. If not `measure`, a
    GPU without a file has the rates of its `Roofline`.
    """
    if is_off():
        return _unfitted(device, "typical rates: AVOW_CALIBRATION=off")
    path = rates_file(device)
    if again:
        forget(path)
    known = recall(path, _parsed)
    if known is not None and known.found is None:
        return _unfitted(device, known.source)
    if known is not None and set(all_methods()) <= {name.split("/")[0] for name in known.found or ()}:
        return Rates(known.found or {}, known.source)
    if not measure:
        return _unfitted(device, "typical rates: nothing measured yet")
    compiling = ", and as long as kernels take to compile" if device == "cuda" else ""
    tell(f"measuring how fast this machine runs each method: about 2 s, at most {_PATIENCE:.0f} s{compiling}, once")
    fresh = measure_rates(device)
    plain = None if fresh is None else {name: dataclasses.asdict(rate) for name, rate in fresh.items()}
    kept = keep(path, fresh, plain, "" if fresh else "the machine was too busy to be measured")
    return Rates(fresh, kept.source) if fresh else _unfitted(device, kept.source)


def _unfitted(device: str, source: str) -> Rates:
    """Rates where no runs of methods were fitted: typical ones, or a GPU's roofline if it may be measured now."""
    if device != "cuda":
        return Rates({}, source)
    if is_off() or torch.cuda.is_current_stream_capturing():
        return Roofline({}, source)
    return _measured_roofline(device)


def is_off() -> bool:
    """Whether nothing may be measured, and no file may be read or written."""
    return os.environ.get("AVOW_CALIBRATION") == "off"


def rates_file(device: str) -> Path:
    """Where the rates of this device are kept."""
    return file_for(f"rates-v{VERSION}", device)


def _parsed(plain: Any) -> dict[str, Rate] | None:
    measured = {name: Rate(**rate) for name, rate in plain.items()}
    # More than a second for one operation was never measured, and would overflow if many are counted.
    known = all(0 <= as_float(x) <= 1 for rate in measured.values() for x in dataclasses.astuple(rate))
    return measured if known else None


def measure_rates(device: str = "cpu") -> dict[str, Rate] | None:
    """The rates of every method on this device, fitted to runs of a few milliseconds; None if it is too busy."""
    fitted, end = {}, time.monotonic() + _PATIENCE
    for name, kind in all_methods().items():
        for causal in (False, True):
            runs: list[tuple[Cost, float]] = []
            for length, heads, dim in _RUNS.get(device, _RUNS["cpu"]):
                if any(seconds > _LONG for _, seconds in runs):
                    break  # what is slow already says enough, and would take seconds
                sizes = Sizes(1, heads, heads, length, length, dim, dim, torch.float32, device, causal)
                problem = random_problem(sizes)
                for method in itertools.islice(kind.grid(sizes), 2):
                    compute = functools.partial(method.compute, problem, torch.Generator().manual_seed(0))
                    with torch.no_grad():
                        if device == "cuda":
                            # Kernels are compiled in the first call; only a busy machine should run out of time.
                            end += timed(compute, problem.q.device)
                        seconds = least_seconds(compute, problem.q.device, repeats=2)
                    runs.append((method.cost(sizes), seconds))
                    if time.monotonic() > end:
                        return None
            fitted[_key(name, causal)] = fit(runs)
    return fitted


def random_problem(sizes: Sizes, seed: int = 0) -> Problem:
    """Gaussian q, k and v of these sizes."""
    z = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(z.batch, heads, length, dim, generator=generator).to(z.device, z.dtype)

    q, k = draw(z.heads, z.queries, z.dim), draw(z.key_heads, z.keys, z.dim)
    return Problem.of(q, k, draw(z.key_heads, z.keys, z.value_dim), causal=z.causal, enable_gqa=True)


def fit(runs: list[tuple[Cost, float]]) -> Rate:
    """The non-negative rates with the least squared relative error over some runs."""
    counted = [[c.launches, c.pointwise * c.weight, c.flops * c.weight] for c, _ in runs]
    terms = torch.tensor(counted, dtype=torch.float64)
    seconds = torch.tensor([t for _, t in runs], dtype=torch.float64)
    scaled = terms / seconds[:, None]
    best, least = TYPICAL, float("inf")
    # Three terms have seven supports: trying them all is the whole active-set method.
    for support in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        chosen = scaled[:, support]
        scale = chosen.abs().amax(0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(chosen / scale, torch.ones(len(runs), 1, dtype=torch.float64)).solution[:, 0]
        solution = solution / scale
        loss = float((chosen @ solution - 1).square().sum())
        if bool((solution >= 0).all()) and loss < least:
            rate = torch.zeros(3, dtype=torch.float64)
            rate[support] = solution
            best, least = Rate(*rate.tolist()), loss
    return best
