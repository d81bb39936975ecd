"""What `attend`, the planner and modules cost on a GPU: whole calls by the clock on the wall, beside PyTorch's SDPA.

Answers are held to their certificates first, those of a graph after a replay: rows recomputed in float64. What fails is
not timed.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import Attended
from avow.bench.results import Goal, Result, Row, tell_row
from avow.calibration import random_problem, rates
from avow.core.timing import timed
from avow.nn import Attention
from benchmarks.options import Options
from benchmarks.planner import points

_TOL = 1e-2
# Beyond SDPA a call may take this share of its time, or so many seconds.
_EXACT, _TOLERANT = (0.03, 40e-6), (0.10, 80e-6)
_MODULE, _FORESEEN, _CROSSING = 1.05, 0.25, 8192
_LINEAR = ("separable", "random_features")


class Sizes(NamedTuple):
    """What is measured, and how often."""

    lengths: tuple[int, ...]
    trained: tuple[int, ...]
    heads: int
    dim: int
    dtype: torch.dtype
    rounds: int
    quick: bool


FULL = Sizes(
    (1024, 2048, 4096, 8192, 16384, 32768, 65536), (2048, 4096, 8192, 16384), 16, 128, torch.bfloat16, 15, False
)
QUICK = Sizes((1024, 4096), (2048,), 16, 128, torch.bfloat16, 3, True)


def run(options: Options) -> list[Result]:
    return measure(torch.device("cuda"), QUICK if options.quick else FULL)


def measure(device: torch.device, sizes: Sizes) -> list[Result]:
    """Calls, the planner, modules, and where linear methods overtake exact attention in training."""
    return [_calls(device, sizes), _planner(device, sizes), _modules(device, sizes), _crossings(device, sizes)]


def _seconds(device: torch.device, rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Median times of calls that take turns, each with its wait for the device; warm, planner and all."""
    for call in calls:
        timed(call, device, 3)
    found = [[timed(call, device) for call in calls] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _calls(device: torch.device, sizes: Sizes) -> Result:
    rows, failures = list[Row](), list[str]()
    over: dict[str, list[tuple[int, float]]] = {"attend": [], "tol": [], "captured": []}
    for n in sizes.lengths:
        q, k, v = (torch.randn(1, sizes.heads, n, sizes.dim, device=device).to(sizes.dtype) for _ in range(3))

        def bare() -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023

        def attend(tol: float | None = None) -> Attended:
            return avow.attend(q, k, v, causal=True, tol=tol)  # noqa: B023

        calls = {"attend": attend, "tol": lambda: attend(_TOL)}
        wrong = {name: _fault(call(), q, k, v) for name, call in calls.items()}
        replays, (graph, answer) = _captured(bare, device), _captured(attend, device)
        wrong["captured"] = "" if answer is None else _fault(answer, q, k, v)
        failures += [f"n = {n}: {name} {fault}" for name, fault in wrong.items() if fault]
        if any(wrong.values()):
            continue
        plain, *own = _seconds(device, sizes.rounds, bare, *calls.values())
        row: Row = {"n": n, "SDPA ms": 1e3 * plain}
        for name, seconds, (share, least) in zip(calls, own, (_EXACT, _TOLERANT), strict=True):
            row |= {f"{name} ms": 1e3 * seconds, f"{name} us on top": 1e6 * (seconds - plain)}
            over[name].append((n, (seconds - plain) / max(share * plain, least)))
        row["chosen"] = calls["tol"]().certificate.method
        if graph is not None and replays[0] is not None:
            first, second = _seconds(device, sizes.rounds, replays[0], graph)
            row |= {"captured SDPA ms": 1e3 * first, "captured attend ms": 1e3 * second}
            over["captured"].append((n, (second - first) / max(_EXACT[0] * first, _EXACT[1])))
        rows.append(row)
        tell_row(row)
    aims = {
        "attend": "attend takes at most 3% or 40 us more than SDPA at every n",
        "tol": f"attend(tol={_TOL:g}) takes at most 10% or 80 us more than SDPA at every n, from the third call on",
        "captured": "the same of attend without a tolerance in a CUDA graph",
    }
    goals = []
    for name, aim in aims.items():
        n, worst = max(over[name], key=lambda pair: pair[1], default=(0, float("inf")))
        goals.append(Goal(aim, f"{worst:.2f} of that at n = {n}", worst <= 1 and len(over[name]) == len(sizes.lengths)))
    kind = f"causal, {str(sizes.dtype)[6:]}, {sizes.heads} heads of {sizes.dim}, {device.type}"
    remark = "A call with a tolerance reads norms from the device before it decides, and cannot be captured."
    return Result(f"attend: whole calls ({kind})", rows, goals, [remark], failures)


def _captured(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], object] | None, Attended | None]:
    """The replay of a call, and what it gave after one; nothing where there are no graphs."""
    if device.type != "cuda":
        return None, None
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, given if isinstance(given, Attended) else None


def _fault(answer: Attended, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What is wrong with an answer, by rows recomputed in float64; nothing if it is within its bound."""
    generator = torch.Generator().manual_seed(0)
    seen = avow.audit(answer.out, q, k, v, causal=True, coverage=0.8, confidence=0.9, generator=generator)
    far, bound = float(seen.errors.amax()), answer.certificate.bound
    return "" if far <= bound <= 1 else f"is {far:.1e} off, and its bound is {bound:.1e}"


def _planner(device: torch.device, sizes: Sizes) -> Result:
    known, rows = rates(device.type), list[Row]()
    for method, plain in points(sizes.quick):
        z = dataclasses.replace(plain, device=device.type)
        problem = random_problem(z)
        with torch.no_grad():
            (seconds,) = _seconds(device, sizes.rounds, lambda: method.compute(problem))  # noqa: B023
        ratio = known.seconds(method, z) / seconds
        kind: Row = {"method": method.label, "n": z.queries, "d": z.dim, "causal": "yes" if z.causal else "no"}
        rows.append(kind | {"ms": 1e3 * seconds, "predicted over measured": ratio})
    error = statistics.median(abs(float(row["predicted over measured"] or 0.0) - 1) for row in rows)
    aim = f"median error of predicted times over {len(rows)} points, at most {_FORESEEN:.0%}"
    goals = [Goal(aim, f"{error:.0%}", error <= _FORESEEN)]
    return Result(f"planner: predicted against measured times (float32, {device.type})", rows, goals, [known.source])


class Plain(nn.Module):
    """What an attention module is without avow: two projections around SDPA."""

    def __init__(self, inward: nn.Linear, outward: nn.Linear, heads: int) -> None:
        super().__init__()
        self.inward, self.outward, self.heads = inward, outward, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outward(out.transpose(1, 2).flatten(2))


def _trained(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A forward and a backward pass, whose output it returns."""

    def call() -> Tensor:
        module.zero_grad(set_to_none=True)
        out: Tensor = module(x)
        out.sum().backward()
        return out

    return call


def _modules(device: torch.device, sizes: Sizes) -> Result:
    rows, failures, worst = list[Row](), list[str](), 0.0
    for n in sizes.trained:
        own, x = _module("exact", device, sizes), _input(n, device, sizes)
        calls = [_trained(Plain(own.inward, own.outward, sizes.heads), x), _trained(own, x)]
        plain, certified = (call().detach().float() for call in calls)
        apart = float((plain - certified).abs().amax() / plain.abs().amax())
        if not apart <= 2e-2:
            failures.append(f"n = {n}: modules are {apart:.1e} apart")
            continue
        first, second = _seconds(device, sizes.rounds, *calls)
        worst = max(worst, second / first)
        rows.append({"n": n, "plain ms": 1e3 * first, "avow ms": 1e3 * second, "ratio": second / first})
        tell_row(rows[-1])
    aim = f"forward and backward of Attention(method='exact') within {_MODULE:.2f} of a plain module"
    goals = [Goal(aim, f"{worst:.3f} at worst", 0 < worst <= _MODULE)]
    return Result(f"modules: forward and backward ({device.type})", rows, goals, failures=failures)


def _crossings(device: torch.device, sizes: Sizes) -> Result:
    rows, failures = list[Row](), list[str]()
    first: dict[str, int] = {}
    for n in sizes.trained:
        x, names = _input(n, device, sizes), ("exact", *_LINEAR)
        calls = [_trained(_module(name, device, sizes), x) for name in names]
        odd = [name for name, call in zip(names, calls, strict=True) if not bool(torch.isfinite(call()).all())]
        failures += [f"n = {n}: {name} is not finite" for name in odd]
        exact, *linear = _seconds(device, sizes.rounds, *calls)
        row: Row = {"n": n, "exact ms": 1e3 * exact}
        for name, seconds in zip(_LINEAR, linear, strict=True):
            row[f"{name} ms"] = 1e3 * seconds
            if seconds < exact:
                first.setdefault(name, n)
        rows.append(row)
        tell_row(row)
    goals = [
        Goal(
            f"a training step of {name} is faster than exact from n = {_CROSSING:,} on",
            f"from {first[name]:,} on" if name in first else f"not up to {sizes.trained[-1]:,}",
            first.get(name, _CROSSING + 1) <= _CROSSING,
        )
        for name in _LINEAR
    ]
    return Result(f"training: where linear methods overtake exact ({device.type})", rows, goals, failures=failures)


def _module(name: str, device: torch.device, sizes: Sizes) -> Attention:
    torch.manual_seed(0)
    width = sizes.heads * sizes.dim
    return Attention(width, heads=sizes.heads, method=name, causal=True).to(device, sizes.dtype)


def _input(n: int, device: torch.device, sizes: Sizes) -> Tensor:
    return torch.randn(1, n, sizes.heads * sizes.dim, device=device).to(sizes.dtype).requires_grad_()
