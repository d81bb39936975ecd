"""Linear attention against exact attention and its peers: by kernels on a GPU, by the plain path on a CPU.

Every kernel is compared with float64 first, answers and gradients, and steps token by token; the plain path's answers
are checked against their certificates. What fails gets no speed. Nothing here needs a GPU but speed: with the kernels
interpreted, every line runs on a CPU at tiny sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import audit
from avow.bench.clock import Clock
from avow.bench.linear_checks import FEATURES, STEPS, VARIANTS, Call, check_step, checked, fuzzed
from avow.bench.linear_speeds import HEADS, WIDTH, Sizes, crossed, stages, steps, timed, tune
from avow.bench.results import Goal, Result, Row
from avow.core import Method, Problem
from avow.methods import method_named

FULL = Sizes(131072, 16, (64, 128), (2048, 4096, 8192, 16384, 131072), 9, 5)
QUICK = Sizes(16384, 16, (64,), (2048, 8192), 3, 5)
REHEARSAL = Sizes(320, 2, (32,), (200,), 1, 1)
FAMILIES = ("linear", "random", "separable", "step")


def run(
    device: str, sizes: Sizes, only: str | None, tell: Callable[[str], None], rehearsed: bool = False
) -> list[Result]:
    """The tables: whole attention against its peers, its kernels one by one, exact attention, single steps."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    limit = clock.bandwidth()
    names = [name for name in VARIANTS if only is None or name.startswith(only)]
    batches = (2,) if rehearsed else (1, 64)
    tell("checks")
    faults = checked(device, names, rehearsed) if names else {}
    stepping = [name for name in STEPS if only in (None, "step")]
    unsteady = {name: [fault for b in batches for fault in check_step(device, name, b)] for name in stepping}
    sound = [name for name in names if not faults[name]]
    steady = [name for name in stepping if not unsteady[name]]
    tell("sequences")
    rows = list(timed(device, sizes, sound, clock, limit))
    where = f"{sizes.heads} heads, n = {sizes.length}, bf16, {device}; a copy runs at {limit / 1e12:.3g} TB/s"
    remarks = [
        "`of the limit`: the time to read q, k and v and write the answer once, over the time taken; training has to "
        f"read and write 11 such tensors at least. Random features: {FEATURES}; fla is given them from torch.",
    ]
    failures = [fault for name in names for fault in faults[name]]
    results = [Result(f"linear attention ({where})", rows, list(goals(rows)), remarks, failures)] if names else []
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


class PlainSizes(NamedTuple):
    """What is measured: lengths, heads, width, rounds."""

    lengths: tuple[int, ...]
    heads: int
    width: int
    rounds: int


PLAIN_FULL = PlainSizes((2048, 8192), 4, 64, 3)
PLAIN_QUICK = PlainSizes((512, 2048), 2, 32, 2)
_PLAIN_FEATURES = 64
METHODS: dict[str, dict[str, Any]] = {"separable": {}, "random_features": {"features": _PLAIN_FEATURES}}


def run_plain(sizes: PlainSizes, tell: Callable[[str], None]) -> list[Result]:
    """Causal attention of every linear method, with gradients and without, over exact attention."""
    clock, rows, failures = Clock("cpu", sizes.rounds, 1), list[Row](), list[str]()
    for n in sizes.lengths:
        q, k, v = (torch.randn(1, sizes.heads, n, sizes.width) * size for size in (0.5, 0.5, 1.0))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        seed = torch.randn(v.shape)
        for name, settings in METHODS.items():
            tell(f"{name}, n = {n}")
            fault = check_certificate(name, settings, q, k, v)
            if fault:
                # No speed for what may be wrong.
                failures.append(f"{name}, n = {n}: {fault}")
                continue
            method = method_named(name)(**settings)

            calls: dict[str, Callable[[], Any]] = {
                "linear": partial(linear, method, q, k, v),
                "exact": partial(exact, q, k, v),
                "linear training": partial(trained, partial(linear, method), leaves, seed),
                "exact training": partial(trained, exact, leaves, seed),
            }
            for call in calls.values():
                call()  # the first of a kind takes longer
            taken = clock.in_turns(calls)
            rows.append(
                {
                    "method": name,
                    "n": n,
                    "ms": 1e3 * taken["linear"],
                    "exact ms": 1e3 * taken["exact"],
                    "faster": taken["exact"] / taken["linear"],
                    "training ms": 1e3 * taken["linear training"],
                    "exact training ms": 1e3 * taken["exact training"],
                    "training faster": taken["exact training"] / taken["linear training"],
                }
            )
    where = f"{sizes.heads} heads of {sizes.width}, float32, {_PLAIN_FEATURES} features, cpu"
    remarks = ["The plain path, without kernels, which run on GPUs. Medians of turns; answers are checked first."]
    return [Result(f"linear attention beside exact attention, causal ({where})", rows, [], remarks, failures)]


def linear(method: Method, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return method.compute(Problem.of(q, k, v, causal=True)).out


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def trained(call: Call, leaves: list[Tensor], seed: Tensor) -> Any:
    """A pass and its gradients."""
    q, k, v = leaves
    return torch.autograd.grad(call(q, k, v), leaves, seed)


def check_certificate(name: str, settings: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> str:
    """What is wrong with a certified answer beside sampled rows in float64; nothing where it is right."""
    out, certificate = avow.attend(q, k, v, method=name, causal=True, **settings)
    found = audit(out, q, k, v, causal=True, method="exact" if name == "random_features" else name)
    worst = float(found.certificate.bound)
    return "" if worst <= certificate.bound else f"an error of {worst:.3g} where {certificate.bound:.3g} was certified"
