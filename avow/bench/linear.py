"""Linear attention by kernels, against exact attention and its peers.

Every kernel is compared with float64 first, answers and gradients, and steps token by token; what fails there gets no
speed. Nothing here needs a GPU but speed: with the kernels interpreted, every line runs on a CPU at tiny sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from avow.bench.clock import Clock
from avow.bench.linear_checks import check_step, checked, fuzzed
from avow.bench.linear_speeds import Sizes, crossed, stages, timed, tune
from avow.bench.linear_steps import HEADS, STEPS, WIDTH, steps
from avow.bench.linear_variants import FEATURES, variants
from avow.bench.results import Goal, Result, Row

FULL = Sizes(131072, 16, (64, 128), (2048, 4096, 8192, 16384, 131072), 9, 5)
QUICK = Sizes(16384, 16, (64,), (2048, 8192), 3, 5)
REHEARSAL = Sizes(320, 2, (32,), (200,), 1, 1)
FAMILIES = ("linear", "all keys", "random", "separable", "step")


def run(
    device: str, sizes: Sizes, only: str | None, tell: Callable[[str], None], rehearsed: bool = False
) -> list[Result]:
    """The tables: whole attention against its peers, its kernels one by one, exact attention, single steps."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    limit = clock.bandwidth()
    names = [name for name in variants() if only is None or name.startswith(only)]
    batches = (2,) if rehearsed else (1, 64)
    tell("checks")
    faults = checked(device, names, rehearsed) if names else {}
    stepping = [name for name in STEPS if only in (None, "step")]
    unsteady = {name: [fault for b in batches for fault in check_step(device, name, b)] for name in stepping}
    sound = [name for name in names if not faults[name]]
    steady = [name for name in stepping if not unsteady[name]]
    tell("sequences")
    rows = list(timed(device, sizes, sound, clock, limit))
    told = f"{sizes.heads} heads, n = {sizes.length}, bf16, {device}; a copy runs at {limit / 1e12:.3g} TB/s"
    remarks = [
        "`of the limit`: the time to read q, k and v and write the answer once, over the time taken; training has to "
        f"read and write 11 such tensors at least. Random features: {FEATURES}; fla is given them from torch.",
    ]
    failures = [fault for name in names for fault in faults[name]]
    results = [Result(f"linear attention ({told})", rows, list(goals(rows)), remarks, failures)] if names else []
    tell("kernels")
    if "linear" in sound:
        results.append(Result("linear attention: its kernels", list(stages(device, sizes, clock, limit))))
    tell("exact attention")
    beside = [
        row
        for name in sound
        if name in ("random features", "separable, causal")
        for row in crossed(device, sizes, name)
    ]
    if beside:
        results.append(Result("linear attention beside exact attention, causal", beside))
    tell("steps")
    if stepping:
        taken = list(steps(device, clock, limit, steady, batches))
        wrong = [fault for name in stepping for fault in unsteady[name]]
        results.append(
            Result(f"single tokens, {HEADS} heads of {WIDTH}", taken, list(step_goals(taken)), failures=wrong)
        )
    return results


def layouts(device: str, sizes: Sizes) -> list[Result]:
    """Times of the plain scan under other layouts."""
    return [Result("layouts (chunk, columns, warps, stages, resident)", tune(device, sizes))]


def shapes(device: str, count: int, rehearsed: bool) -> list[Result]:
    """Random shapes and types, and what is wrong at them."""
    faults = [fault for found in fuzzed(device, count, rehearsed).values() for fault in found]
    return [Result(f"{count} random shapes and types, {len(faults)} faults", failures=faults)]


def goals(rows: list[Row]) -> Iterator[Goal]:
    """Which of the aims this run could judge, and whether it met them."""
    aims: dict[str, tuple[tuple[str, float], ...]] = {
        "linear": (("faster", 2.0), ("training faster", 1.6), ("of the limit", 0.6)),
        "random features": (("faster", 4.0), ("training faster", 3.0)),
        "separable": (("of the limit", 0.7),),
    }
    for row in rows:
        for key, aim in aims.get(str(row["kernel"]), ()):
            if row[key] is not None:
                found = float(row[key] or 0)
                yield Goal(f"{row['kernel']}, d = {row['d']}: {key} at least {aim:g}", f"{found:.3g}", found >= aim)


def step_goals(rows: list[Row]) -> Iterator[Goal]:
    """A step should take what the state's way takes; a launch alone takes longer than a small state."""
    for row in rows:
        if row["batch"] == 64:
            found = float(row["over the state's way"] or 0)
            yield Goal(f"{row['step']}: a step within 1.5 of its state's way", f"{found:.3g}", found <= 1.5)
