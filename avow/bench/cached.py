"""Decoding from a `KeyValueCache` with a tolerance, against exact attention over the same keys and values.

This is the path without kernels: what a CPU runs. Every answer is compared with float64 first; what breaks its bound or
the tolerance gets no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from avow.attend import Attended
from avow.bench.cases import Case, Sizes, cases, distances
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row
from avow.bench.rivals import exact
from avow.nn import KeyValueCache

FULL = Sizes((16384, 65536), 8, 2, 3, 2, torch.float32)
QUICK = Sizes((4224,), 4, 2, 3, 1, torch.float32)
_TOL = 1e-2
# What a row may rely on: always, or with this probability.
_CONFIDENCES = (1.0, 0.999)
# From this length on, a step that certifies should take no longer than one that does not.
_LONG = 65536


def run(sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """One table: a step for every case and confidence."""
    clock = Clock("cpu", sizes.rounds, sizes.calls)
    rows: list[Row] = []
    failures: list[str] = []
    for case in cases("cpu", sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        cache = KeyValueCache(case.k.shape[1], case.k.shape[3], case.v.shape[3], dtype=case.k.dtype)
        cache.append(case.k, case.v)
        rivals = dict(exact(case))
        for confidence in _CONFIDENCES:
            step = _step(cache, case, confidence)
            found = step()
            error, faults = check(case, found)
            failures += [f"{label}, confidence {confidence:g}: {fault}" for fault in faults]
            if faults:
                # No speed for what may be wrong.
                continue
            times = clock.in_turns({"": step} | rivals)
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
    told = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {str(sizes.dtype)[6:]}, cpu"
    remarks = [
        f"Steps are `KeyValueCache.attend` at tol = {_TOL:g}, certificate included; after steps that saved nothing it "
        "asks its sketch less often.",
        f"Medians of {sizes.rounds} rounds of {sizes.calls} steps, in turns with exact attention: the fastest of "
        "PyTorch's, with sibling heads as heads or as rows.",
    ]
    if folder is None:
        remarks.append("No folder of real heads was given: only made-up keys.")
    else:
        remarks.append("Real keys are windows of neighbouring tokens of a text, of all layers but the first.")
    return [Result(f"decode: one certified step ({told})", rows, goals(rows), remarks, failures)]


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


def _step(cache: KeyValueCache, case: Case, confidence: float) -> Callable[[], Attended]:
    q, draws = case.q.unsqueeze(2), torch.Generator().manual_seed(0)
    return lambda: cache.attend(q, _TOL, confidence, case.scale, draws)
