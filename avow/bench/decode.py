"""A certified step of decoding beside exact attention, by the calls that a user makes.

A step is `append` of one token and `attend` of a `KeyValueCache`: called from Python, and on a GPU also captured in one
CUDA graph and replayed while the cache grows. Exact attention is called the same ways: a token is copied behind the
others, then PyTorch attends to all of them. Steps of two queries take turns, so that what a cache learns from one is
not what the next one needs.

Every answer is compared with float64 first, those of a graph after a replay. An answer that breaks its bound or the
tolerance is not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from avow.attend import Attended
from avow.bench.cases import Case, Sizes, cases, distances, exact
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, tell_row
from avow.nn import KeyValueCache

FULL = {
    "cpu": Sizes((16384, 65536), 8, 2, 3, 2, torch.float32),
    "cuda": Sizes((32768, 131072, 1048576), 32, 8, 15, 10),
}
QUICK = {"cpu": Sizes((4224,), 4, 2, 3, 1, torch.float32), "cuda": Sizes((8192,), 8, 2, 3, 5)}
_TOL = 1e-2
# The probabilities with which a row's bound holds.
_CONFIDENCES = (1.0, 0.999)
_PART = 2**16
# Room for the tokens that are appended while steps are timed.
_ROOM = 8192
# From this length on, a step on a CPU that certifies should take no longer than one that does not.
_LONG = 65536
# In a graph: keys, tokens, confidence, and how many times as fast as exact attention a step should be.
_CAPTURED = (
    ("real", 32768, 1.0, 1.3),
    ("real", 131072, 1.0, 2.2),
    ("real", 1048576, 1.0, 3.2),
    ("real", 1048576, 0.999, 4.5),
    *(("diffuse", n, 1.0, 0.93) for n in FULL["cuda"].lengths),
)
# Tokens, and the most milliseconds that a step called from Python should take.
_EAGER = (131072, 0.2)


def run(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """One table: a step for every case and confidence."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    rows, failures = list[Row](), list[str]()
    for case in cases(device, sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        exact_steps = [_after(_copy_token(case), call) for _, call in exact(case)]
        eager = min(clock.in_turns(*exact_steps, graph=False)) if device == "cuda" else None
        captured = min(clock.in_turns(*exact_steps)) if device == "cuda" else None
        for confidence in _CONFIDENCES:
            cache = filled(case)
            steps = [step(cache, case, q, confidence) for q in (case.before, case.q) if q is not None]
            for one in steps:
                answer = one()
            error, faults = check(case, cache, answer)
            failures += [f"{label}, confidence {confidence:g}: {fault}" for fault in faults]
            if faults:
                continue
            certificate = answer.certificate
            row: Row = {"keys": case.name, "n": case.length, "confidence": confidence}
            both = _after(*steps)
            if eager is None:
                own, *others = clock.in_turns(both, *exact_steps, graph=False)
                row |= _beside(own / len(steps), min(others), "")
            else:
                row |= _beside(clock.seconds(both, graph=False) / len(steps), eager, "")
                replays, last = captured_steps(steps)
                replays()
                again, faults = check(case, cache, last)
                failures += [f"{label}, confidence {confidence:g}, captured: {fault}" for fault in faults]
                if not faults:
                    row |= _beside(clock.seconds(replays, graph=False) / len(steps), captured or 0.0, "captured ")
                error = max(error, again)
            row |= {"error": error, "bound": certificate.bound}
            rows.append(row | {"answered by": certificate.method, "because": certificate.reason})
            tell_row(rows[-1])
            del cache, steps, both, answer
        if device == "cuda":
            torch.cuda.empty_cache()
    shape = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {str(sizes.dtype)[6:]}, {device}"
    remarks = [
        f"A step is `KeyValueCache.append` of one token and `attend` at tol = {_TOL:g}, with its certificate: called "
        "from Python, and captured in a CUDA graph. After steps that saved nothing the sketch is used less often.",
        f"Medians of {sizes.rounds} rounds of {sizes.calls} steps. Exact is the fastest of PyTorch's, called and "
        "captured the same way, after a copy of one token behind the others; sibling heads are heads or rows.",
        "No folder of real heads was given: only synthetic keys."
        if folder is None
        else "Real keys are windows of neighbouring tokens of a text, of all layers but the first.",
    ]
    return [Result(f"decode: one certified step, as it is called ({shape})", rows, goals(rows), remarks, failures)]


def filled(case: Case) -> KeyValueCache:
    """A cache that holds a case's tokens and has room for more; they come in parts, as the prompts of a user do."""
    k, v = case.k, case.v
    room = {"capacity": case.length + _ROOM} if k.is_cuda else {}
    cache = KeyValueCache(k.shape[1], k.shape[3], v.shape[3], dtype=k.dtype, device=k.device, **room)
    for start in range(0, case.length, _PART):
        cache.append(k[:, :, start : start + _PART], v[:, :, start : start + _PART])
    return cache


def step(cache: KeyValueCache, case: Case, q: Tensor, confidence: float) -> Callable[[], Attended]:
    """One token more, and the answer to a query of each head."""
    k, v, q = case.k[:, :, :1].clone(), case.v[:, :, :1].clone(), q.unsqueeze(2)

    def call() -> Attended:
        cache.append(k, v)
        return cache.attend(q, _TOL, confidence, case.scale)

    return call


def captured_steps(steps: list[Callable[[], Attended]]) -> tuple[Callable[[], None], Attended]:
    """Steps in a CUDA graph each, to be replayed one after the other, and where the last one's answer appears."""
    graphs = []
    for one in steps:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = one()
        graphs.append(graph)

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    return replay, answer


def goals(rows: list[Row]) -> list[Goal]:
    """Which of the goals this run could judge, and whether it met them."""
    judged = []
    for row in rows:
        name, n, confidence = row["keys"], row["n"], row["confidence"]
        if "captured ms" not in row:
            if name == "real" and int(n or 0) >= _LONG and confidence == 1:
                ratio = float(row["times faster"] or 0)
                judged.append(Goal(f"real keys, n = {n}: not slower than exact", f"{ratio:.3g}", ratio >= 1))
            continue
        if (name, n, confidence) == ("real", _EAGER[0], 1.0):
            took = float(row["step ms"] or 0)
            judged.append(Goal(f"called at {n} tokens: at most {_EAGER[1]} ms", f"{took:.3g} ms", took <= _EAGER[1]))
        for *key, goal in _CAPTURED:
            if key == [name, n, confidence]:
                label = f"{name} keys, n = {n}" + (f", confidence {confidence:g}" if confidence != 1 else "")
                ratio = float(row["captured times faster"] or 0)
                judged.append(Goal(f"{label}: captured, {goal:g} times exact", f"{ratio:.3g}", ratio >= goal))
    return judged


def check(case: Case, cache: KeyValueCache, answer: Attended) -> tuple[float, list[str]]:
    """The largest error of an answer to the case's query from all that the cache holds, and what is wrong with it."""
    keys, values = cache.tokens
    errors = distances(dataclasses.replace(case, k=keys, v=values), answer.out[:, :, 0])
    certificate = answer.certificate
    bounds = certificate.rows.reshape(errors.shape)
    faults = [] if bool(torch.isfinite(answer.out).all()) else ["an answer is not finite"]
    if not bool((errors <= bounds).all()):
        faults.append(f"a bound was broken: error {float(errors.max()):.3g}, bound {float(bounds.max()):.3g}")
    if not certificate.bound <= _TOL:
        faults.append(f"the bound {certificate.bound:.3g} exceeds the tolerance {_TOL:g}")
    return float(errors.max()), faults


def _beside(own: float, other: float, how: str) -> Row:
    return {f"{how or 'step '}ms": 1e3 * own, f"{how}exact ms": 1e3 * other, f"{how}times faster": other / own}


def _after(*calls: Callable[[], object]) -> Callable[[], object]:
    """Several calls as one."""

    def all_of_them() -> object:
        for call in calls:
            result = call()
        return result

    return all_of_them


def _copy_token(case: Case) -> Callable[[], None]:
    k, v = case.k[:, :, -1:].clone(), case.v[:, :, -1:].clone()

    def copy() -> None:
        case.k[:, :, -1:] = k
        case.v[:, :, -1:] = v

    return copy
