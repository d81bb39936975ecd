"""What this machine does per second: measured once in under two seconds, cached, and easy to ignore.

A method's time is modelled as launches·a + pointwise·b + flops·c, the three rates fitted to a few small runs of
that method. `AVOW_CALIBRATION=off` uses built-in rates and touches no file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from avow import file_io
from avow.core import Cost, Method, Problem, Sizes
from avow.core.timing import least_seconds
from avow.errors import FileError
from avow.methods import all_methods
from avow.parameters import as_float

# Raise when the cost model or the way it is fitted changes: older files are then measured again.
VERSION = 4


@dataclass(frozen=True)
class Rate:
    """Seconds per launch, per pointwise element and per floating-point operation of one method."""

    launch: float
    pointwise: float
    flop: float

    def seconds(self, cost: Cost) -> float:
        work = self.pointwise * cost.pointwise + self.flop * cost.flops
        return self.launch * cost.launches + work * cost.weight


# Seconds of single runs. A machine at rest needs less than one; if other work has its cores, threads wait for one
# another, and all the runs would take minutes and tell nothing.
_PATIENCE = 5.0
# Methods that take this many seconds are not measured at larger sizes.
_LONG = 0.03

# A two-core machine of 2026; only ratios between methods matter if nothing was measured.
TYPICAL = Rate(5e-6, 4e-10, 8e-12)


@dataclass(frozen=True)
class Rates:
    """The rates of every measured method; `causal` forms are measured apart."""

    measured: dict[str, Rate]
    source: str

    def seconds(self, method: Method, sizes: Sizes) -> float:
        """How long a method is predicted to take."""
        return self.measured.get(_key(method.name, sizes.causal), TYPICAL).seconds(method.cost(sizes))


def _key(name: str, causal: bool) -> str:
    return f"{name}/causal" if causal else name


def rates(device: str = "cpu", measure: bool = True) -> Rates:
    """The rates of this device: from the cache, else measured and cached, else typical ones."""
    if os.environ.get("AVOW_CALIBRATION") == "off":
        return Rates({}, "typical rates: AVOW_CALIBRATION=off")
    path = cache_file(device)
    stored = _read(path)
    if stored is not None and set(all_methods()) <= {name.split("/")[0] for name in stored}:
        return Rates(stored, f"measured, cached in {path}")
    if not measure:
        return Rates({}, "typical rates: nothing measured yet")
    fresh = measure_rates(device)
    if fresh is None:
        return Rates({}, "typical rates: this machine is too busy to be measured")
    # A cache that cannot be written costs two seconds next time, nothing else.
    with contextlib.suppress(FileError):
        _write(path, fresh)
    return Rates(fresh, "measured just now")


def cache_file(device: str) -> Path:
    """Where the measurements of this device, this torch and this many threads are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    release = torch.__version__.split("+")[0]
    return root / "avow" / f"rates-v{VERSION}-{device}-torch{release}-{torch.get_num_threads()}threads.json"


def _read(path: Path) -> dict[str, Rate] | None:
    try:
        plain = json.loads(file_io.read_document(path))
        measured = {name: Rate(**rate) for name, rate in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    # More than a second for one operation was never measured, and would overflow if many are counted.
    known = all(0 <= as_float(x) <= 1 for rate in measured.values() for x in dataclasses.astuple(rate))
    return measured if known else None


def _write(path: Path, measured: dict[str, Rate]) -> None:
    file_io.write(path, json.dumps({name: dataclasses.asdict(rate) for name, rate in measured.items()}, indent=1))


def measure_rates(device: str = "cpu") -> dict[str, Rate] | None:
    """The rates of every method on this device, fitted to runs of a few milliseconds; None if it is too busy."""
    fitted, spent = {}, 0.0
    for name, kind in all_methods().items():
        for causal in (False, True):
            runs: list[tuple[Cost, float]] = []
            for length, heads, dim in ((64, 2, 32), (256, 2, 32), (768, 4, 32), (1536, 4, 64)):
                if any(seconds > _LONG for _, seconds in runs):
                    break  # what is slow already says enough, and would take seconds
                sizes = Sizes(1, heads, heads, length, length, dim, dim, torch.float32, device, causal)
                problem = random_problem(sizes)
                for method in itertools.islice(kind.grid(sizes), 2):
                    compute = functools.partial(method.compute, problem, torch.Generator().manual_seed(0))
                    with torch.no_grad():
                        seconds = least_seconds(compute, problem.q.device, repeats=2)
                    runs.append((method.cost(sizes), seconds))
                    spent += seconds
                    if spent > _PATIENCE:
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
