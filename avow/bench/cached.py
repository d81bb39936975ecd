"""Decoding by the calls that a user makes: `append` and `attend` of a `KeyValueCache`, beside exact attention.

Exact attention is called the same way: a token is copied behind the others, then PyTorch attends to all of them. Calls
come one after the other as a loop makes them, nothing is captured, and what Python takes is part of the time. Every
answer is compared with float64 first; what breaks its bound or the tolerance gets no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from avow.attend import Attended
from avow.bench.cases import Case, Sizes, cases, distances
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, tell_row
from avow.bench.rivals import exact
from avow.nn import KeyValueCache

FULL = {
    "cpu": Sizes((16384, 65536), 8, 2, 3, 2, torch.float32),
    "cuda": Sizes((16384, 131072, 524288), 32, 8, 15, 20),
}
QUICK = {"cpu": Sizes((4224,), 4, 2, 3, 1, torch.float32), "cuda": Sizes((4224,), 8, 2, 3, 5)}
_TOL = 1e-2
# What a row may rely on: always, or with this probability.
_CONFIDENCES = (1.0, 0.999)
# From this length on, a step that certifies should take no longer than one that does not.
_LONG = 65536
_PART = 2**16


def run(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """One table: a step for every case and confidence."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    rows: list[Row] = []
    failures: list[str] = []
    for case in cases(device, sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        rivals = {name: _after_a_copy(case, call) for name, call in exact(case)}
        for confidence in _CONFIDENCES:
            cache = filled(case)
            attend = _attend(cache, case, confidence)
            found = attend()
            error, faults = check(case, found)
            failures += [f"{label}, confidence {confidence:g}: {fault}" for fault in faults]
            if faults:
                # No speed for what may be wrong.
                continue
            times = clock.eagerly({"": _step(cache, case, attend)} | rivals)
            best = min(rivals, key=lambda name: times[name])
            rows.append(
                {
                    "keys": case.name,
                    "n": case.length,
                    "confidence": confidence,
                    "step ms": 1e3 * times[""],
                    "exact ms": 1e3 * times[best],
                    "times faster": times[best] / times[""],
                    "error": error,
                    "bound": found.certificate.bound,
                    "answered by": found.certificate.method,
                    "because": found.certificate.reason,
                }
            )
            tell_row(rows[-1])
    told = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {str(sizes.dtype)[6:]}, {device}"
    remarks = [
        f"A step is `KeyValueCache.append` of one token and `attend` at tol = {_TOL:g}, called from Python, with its "
        "certificate; after steps that saved nothing the cache asks its sketch less often.",
        f"Medians of {sizes.rounds} rounds of {sizes.calls} steps. Exact is the fastest of PyTorch's, called from "
        "Python too, after a copy of one token behind the others; sibling heads are heads or rows.",
    ]
    if folder is None:
        remarks.append("No folder of real heads was given: only made-up keys.")
    else:
        remarks.append("Real keys are windows of neighbouring tokens of a text, of all layers but the first.")
    return [Result(f"decode: one certified step, as it is called ({told})", rows, goals(rows), remarks, failures)]


def filled(case: Case) -> KeyValueCache:
    """A cache that holds a case's tokens; they come in parts, since sketching takes many times their memory."""
    k, v = case.k, case.v
    cache = KeyValueCache(k.shape[1], k.shape[3], v.shape[3], dtype=k.dtype, device=k.device)
    for start in range(0, case.length, _PART):
        cache.append(k[:, :, start : start + _PART], v[:, :, start : start + _PART])
    return cache


def goals(rows: list[Row]) -> list[Goal]:
    """Which of the aims this run could judge, and whether it met them."""
    found = []
    for row in rows:
        if row["keys"] == "real" and int(row["n"] or 0) >= _LONG and row["confidence"] == 1:
            ratio = float(row["times faster"] or 0)
            found.append(Goal(f"real keys, n = {row['n']}: not slower than exact", f"{ratio:.3g}", ratio >= 1))
    return found


def check(case: Case, found: Attended) -> tuple[float, list[str]]:
    """The largest error of an answer, and what is wrong with it."""
    errors = distances(case, found.out[:, :, 0])
    bounds = found.certificate.rows.reshape(errors.shape)
    faults = []
    if not bool(torch.isfinite(found.out).all()):
        faults.append("an answer is not finite")
    if not bool((errors <= bounds).all()):
        faults.append(f"a bound was broken: error {float(errors.max()):.3g}, bound {found.certificate.bound:.3g}")
    if not found.certificate.bound <= _TOL:
        faults.append(f"the bound {found.certificate.bound:.3g} exceeds the tolerance {_TOL:g}")
    return float(errors.max()), faults


def _attend(cache: KeyValueCache, case: Case, confidence: float) -> Callable[[], Attended]:
    q, draws = case.q.unsqueeze(2), torch.Generator(case.q.device).manual_seed(0)
    return lambda: cache.attend(q, _TOL, confidence, case.scale, draws)


def _step(cache: KeyValueCache, case: Case, attend: Callable[[], Attended]) -> Callable[[], Attended]:
    k, v = case.k[:, :, :1].clone(), case.v[:, :, :1].clone()

    def step() -> Attended:
        cache.append(k, v)
        return attend()

    return step


def _after_a_copy(case: Case, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    k, v = case.k[:, :, -1:].clone(), case.v[:, :, -1:].clone()

    def step() -> Tensor:
        case.k[:, :, -1:] = k
        case.v[:, :, -1:] = v
        return call()

    return step
