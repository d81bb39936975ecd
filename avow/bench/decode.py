"""A certified step of decoding beside exact attention: the calls that a user makes, and on a GPU the kernels alone.

`run` times `append` and `attend` of a `KeyValueCache`. Exact attention is called the same way: a token is copied behind
the others, then PyTorch attends to all of them. Calls come one after the other as a loop makes them, nothing is
captured, and the time of Python is included.

`run_kernels` replays the kernels of a step in a CUDA graph, beside exact attention replayed the same way; no call of a
user takes so little. With the kernels interpreted, every line of it runs on a CPU at tiny sizes.

Every answer is compared with float64 first. An answer that breaks its bound or the tolerance is not timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.attend import Attended
from avow.bench.cases import Case, Sizes, cases, distances, exact
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, rate_row, tell_row
from avow.nn import KeyValueCache
from avow.nn.key_value_cache import next_pause
from avow.numerics.sketch import GROUP, Sketch, sketched

FULL = {
    "cpu": Sizes((16384, 65536), 8, 2, 3, 2, torch.float32),
    "cuda": Sizes((16384, 131072, 524288), 32, 8, 15, 20),
}
QUICK = {"cpu": Sizes((4224,), 4, 2, 3, 1, torch.float32), "cuda": Sizes((4224,), 8, 2, 3, 5)}
FULL_KERNELS = Sizes((131072, 1048576), 32, 8, 15, 20)
QUICK_KERNELS = Sizes((4096,), 8, 2, 3, 5)
_DROP, _TOL = 5e-3, 1e-2
# The probabilities with which a row's bound holds; and steps whose draws are checked.
_CONFIDENCES, _DRAWS = (1.0, 0.999), 4
# From this length on, a step that certifies should take no longer than one that does not.
_LONG = 65536
_PART = 2**16
# Steps over which the cost of looking at a sketch that saves nothing is spread.
_STEPS = 64
# Keys, tokens, confidence, and how many times as fast as exact attention the kernels should be.
_KERNEL_GOALS = (
    ("real", 1048576, 1.0, 2.5),
    ("real", 131072, 1.0, 1.6),
    ("diffuse", 1048576, 1.0, 0.93),
    ("diffuse", 131072, 1.0, 0.93),
    ("real", 1048576, 0.999, 4.0),
)

_REAL_KEYS = "Real keys are windows of neighbouring tokens of a text, of all layers but the first."
_SYNTHETIC = "No folder of real heads was given: only synthetic keys."


def run(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """One table: a step for every case and confidence."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    rows, failures = list[Row](), list[str]()
    for case in cases(device, sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        exact_steps = [_after(_copy_token(case), call) for _, call in exact(case)]
        for confidence in _CONFIDENCES:
            cache, draws = filled(case), torch.Generator(case.q.device).manual_seed(0)
            attend = partial(cache.attend, case.q.unsqueeze(2), _TOL, confidence, case.scale, draws)
            answer = attend()
            error, faults = check(case, answer)
            failures += [f"{label}, confidence {confidence:g}: {fault}" for fault in faults]
            if faults:
                continue
            append = partial(cache.append, case.k[:, :, :1].clone(), case.v[:, :, :1].clone())
            own, *others = clock.in_turns(_after(append, attend), *exact_steps, graph=False)
            certificate, best = answer.certificate, min(others)
            row: Row = {"keys": case.name, "n": case.length, "confidence": confidence}
            row |= {"step ms": 1e3 * own, "exact ms": 1e3 * best, "times faster": best / own}
            row |= {"error": error, "bound": certificate.bound}
            rows.append(row | {"answered by": certificate.method, "because": certificate.reason})
            tell_row(rows[-1])
    shape = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {str(sizes.dtype)[6:]}, {device}"
    remarks = [
        f"A step is `KeyValueCache.append` of one token and `attend` at tol = {_TOL:g}, called from Python, with its "
        "certificate; after steps that saved nothing the cache uses its sketch less often.",
        f"Medians of {sizes.rounds} rounds of {sizes.calls} steps. Exact is the fastest of PyTorch's, called from "
        "Python too, after a copy of one token behind the others; sibling heads are heads or rows.",
        _SYNTHETIC if folder is None else _REAL_KEYS,
    ]
    return [Result(f"decode: one certified step, as it is called ({shape})", rows, goals(rows), remarks, failures)]


def filled(case: Case) -> KeyValueCache:
    """A cache that holds a case's tokens; they come in parts, since sketching takes many times their memory."""
    k, v = case.k, case.v
    cache = KeyValueCache(k.shape[1], k.shape[3], v.shape[3], dtype=k.dtype, device=k.device)
    for start in range(0, case.length, _PART):
        cache.append(k[:, :, start : start + _PART], v[:, :, start : start + _PART])
    return cache


def goals(rows: list[Row]) -> list[Goal]:
    """Which of the goals this run could judge, and whether it met them."""
    judged = []
    for row in rows:
        if row["keys"] == "real" and int(row["n"] or 0) >= _LONG and row["confidence"] == 1:
            ratio = float(row["times faster"] or 0)
            judged.append(Goal(f"real keys, n = {row['n']}: not slower than exact", f"{ratio:.3g}", ratio >= 1))
    return judged


def check(case: Case, answer: Attended) -> tuple[float, list[str]]:
    """The largest error of an answer, and what is wrong with it."""
    certificate, errors = answer.certificate, distances(case, answer.out[:, :, 0])
    faults = _faults(answer.out, errors, certificate.rows.reshape(errors.shape))
    if not certificate.bound <= _TOL:
        faults.append(f"the bound {certificate.bound:.3g} exceeds the tolerance {_TOL:g}")
    return float(errors.max()), faults


def _faults(out: Tensor, errors: Tensor, bounds: Tensor) -> list[str]:
    faults = [] if bool(torch.isfinite(out).all()) else ["an answer is not finite"]
    if not bool((errors <= bounds).all()):
        faults.append(f"a bound was broken: error {float(errors.max()):.3g}, bound {float(bounds.max()):.3g}")
    return faults


def _after(first: Callable[[], object], call: Callable[[], object]) -> Callable[[], object]:
    """Two calls as one."""

    def both() -> object:
        first()
        return call()

    return both


def _copy_token(case: Case) -> Callable[[], None]:
    k, v = case.k[:, :, -1:].clone(), case.v[:, :, -1:].clone()

    def copy() -> None:
        case.k[:, :, -1:] = k
        case.v[:, :, -1:] = v

    return copy


class Checked(NamedTuple):
    """A case with all that a step needs, what it answered, and what is wrong with that."""

    confidence: float
    step: Callable[[], Any]
    sketch: Sketch
    lengths: Any
    hint: Tensor | None
    seed: Tensor | None
    answer: Any
    error: float
    faults: list[str]


def run_kernels(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """The table of whole steps in a CUDA graph, and that of their kernels."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    limit = clock.bandwidth()
    steps, kernels, failures = list[Row](), list[Row](), list[str]()
    for case in cases(device, sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        exact_times: dict[str, float] = {}
        for checked in check_kernels(case):
            failures += [f"{label}, confidence {checked.confidence:g}: {fault}" for fault in checked.faults]
            if checked.faults:
                continue
            own, answer = clock.seconds(checked.step), checked.answer
            exact_times = exact_times or {name: clock.seconds(call) for name, call in exact(case)}
            name, best = min(exact_times.items(), key=lambda item: item[1])
            read = float(answer.kept.double().mean()) / case.length
            with_pauses = None
            from avow.kernels.pausing import WORTHWHILE

            if read > WORTHWHILE or not bool(answer.within.all()):
                many = clock._replace(calls=1).seconds(paused(checked.step, dict(exact(case))[name])) / _STEPS
                with_pauses = best / many
            row: Row = {"keys": case.name, "n": case.length, "confidence": checked.confidence, "read": read}
            row |= {"read again": int((~answer.within).sum()), "bound": float(answer.bound.max())}
            row |= {"error": checked.error, "step ms": 1e3 * own, "exact ms": 1e3 * best, "exact by": name}
            steps.append(row | {"times faster": best / own, "with pauses": with_pauses})
            tell_row(steps[-1])
            kernels += profile(case, checked, clock, limit)
            del checked, answer
        if device == "cuda":
            torch.cuda.empty_cache()
    remarks = [
        f"Steps include the certificate; unread tokens aim at {_DROP:g}, bounds are at most {_TOL:g}; medians of "
        f"{sizes.rounds} rounds of {sizes.calls} replays.",
        f"With a confidence below 1 tokens are drawn, again in every step; {_DRAWS} steps were checked.",
        f"With pauses: the first {_STEPS} steps of a cache whose sketch saves nothing, and which is exact for a while.",
        "Exact is the fastest of cuDNN, flash and efficient, with sibling heads as heads or as rows.",
        _SYNTHETIC if folder is None else f"{_REAL_KEYS} Hints are another step's lengths.",
    ]
    shape = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {device}"
    title = f"sparse decode: kernels of one certified step in a CUDA graph ({shape})"
    stages = f"sparse decode: its kernels (reading and writing runs at {limit / 1e12:.3g} TB/s here)"
    bytes_remark = "Bytes are what a kernel must read and write; `of the limit` is their rate over that of a product."
    return [
        Result(title, steps, kernel_goals(steps, kernels), remarks, failures),
        Result(stages, kernels, remarks=[bytes_remark]),
    ]


def kernel_goals(steps: list[Row], kernels: list[Row]) -> list[Goal]:
    """Which of the goals this run could judge, and whether it met them."""
    judged = []
    for name, n, confidence, goal in _KERNEL_GOALS:
        label = f"{name} keys, n = {n}" + (f", confidence {confidence:g}" if confidence < 1 else "")
        for row in (row for row in steps if (row["keys"], row["n"], row["confidence"]) == (name, n, confidence)):
            ratio = float(row["with pauses"] or row["times faster"] or 0)
            judged.append(Goal(f"{label}: at least {goal:g} times exact", f"{ratio:.3g}", ratio >= goal))
    for row in kernels:
        if row["kernel"] == "bounds" and row["n"] == 1048576 and row["confidence"] == 1:
            share = float(row["of the limit"] or 0)
            label = f"{row['keys']}: the sketch pass at 60% of the memory limit"
            judged.append(Goal(label, f"{share:.0%}", share >= 0.6))
    return judged


def paused(step: Callable[[], Any], rest: Callable[[], Any]) -> Callable[[], None]:
    """The first steps of a cache for which the sketch saves nothing: one look, then pauses, each twice as long."""
    looks: list[bool] = []
    pause = 0
    while len(looks) < _STEPS:
        pause = next_pause(pause)
        looks += [True, *[False] * pause]

    def call() -> None:
        for look in looks[:_STEPS]:
            (step if look else rest)()

    return call


def check_kernels(case: Case) -> Iterator[Checked]:
    """One step for each confidence, and how far it is from the truth in float64; of draws, several steps."""
    from avow.kernels.sparse_decode import decode, value_lengths

    sketch, lengths = sketched_by_head(case.k), value_lengths(case.v)
    hint = None
    if case.before is not None:
        hint = 1.1 * decode(case.before, case.k, case.v, sketch, lengths, _DROP, case.scale).length
    for confidence in _CONFIDENCES:
        seed = torch.tensor([case.length], device=case.k.device) if confidence < 1 else None
        # Draws aim at what the limit leaves.
        aim = _DROP if seed is None else _TOL
        tensors = (case.q, case.k, case.v, sketch, lengths)
        step = partial(decode, *tensors, aim, case.scale, hint, _TOL, confidence, seed)
        answer = step()
        several = [answer, *(step() for _ in range(0 if seed is None else _DRAWS - 1))]
        if seed is not None:
            seed -= _DRAWS
        again = step()
        errors = torch.cat([distances(case, some.out) for some in several])
        bounds = torch.cat([some.bound for some in several])
        faults = _faults(torch.cat([some.out for some in several]), errors, bounds)
        if not all(torch.equal(x, y) for x, y in zip(answer, again, strict=True)):
            faults.append("two runs differ")
        if not bool((bounds <= _TOL * (1 + 2.0**-20)).all()):
            faults.append(f"{int((bounds > _TOL).sum())} rows are beyond {_TOL:g}")
        yield Checked(confidence, step, sketch, lengths, hint, seed, answer, float(errors.max()), faults)


def sketched_by_head(k: Tensor) -> Sketch:
    """The sketch of all keys, computed head by head: it needs float64, which is too much memory for all at once."""
    parts = [sketched(k[:, i : i + 1]) for i in range(k.shape[1])]
    names = ("codes", "scale", "zero", "radius", "reach", "metric", "size")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in names}
    return dataclasses.replace(parts[0], **joined)


def profile(case: Case, checked: Checked, clock: Clock, limit: float) -> Iterator[Row]:
    """Each stage alone: its time, the bytes it must move, and how near the memory limit that is."""
    from avow.kernels import planning
    from avow.kernels.pausing import Used, blank_state
    from avow.kernels.sample_bounds import Logs
    from avow.kernels.sparse_decode import KERNELS

    q, k, v, scale, sketch, lengths = case.q, case.k, case.v, case.scale, checked.sketch, checked.lengths
    heads, n, d, e = k.shape[1], case.length, k.shape[3], v.shape[3]
    r, c = q.shape[1] // heads, sketch.codes.shape[2]
    used = Used(
        torch.full((k.shape[0] * heads,), n, dtype=torch.int32, device=k.device), blank_state(k.device, always=True)
    )
    prepare = partial(KERNELS.prepared, q, sketch, lengths.most, checked.hint, scale, used)
    bound = partial(KERNELS.bounded, q, sketch, lengths.each, prepare(), used)
    terms = bound()
    count: Callable[[], Any]
    # What is counted is counted once here, since every further time adds to the histogram.
    if checked.seed is None:
        names, count = ("histogram", "cut and list"), partial(KERNELS.counted, terms)
        choose = partial(KERNELS.marked, terms, count(), lengths.most, _DROP, n)
    else:
        names, logs = ("histogram and odds", "draws and list"), Logs.of(checked.confidence)
        count = partial(KERNELS.planned, terms, lengths.most, planning.goal(_TOL, _TOL, q.dtype), logs)
        choose = partial(KERNELS.drawn, terms, count(), logs, checked.seed, n)
    chosen = choose()
    attend = partial(KERNELS.attended, q, k, v, chosen, scale, used)
    parts = attend()
    merge = partial(KERNELS.merged, q, v, parts, terms, chosen, lengths.most)
    step = merge(math.inf, scale)
    read_again = partial(KERNELS.read_again, q, k, v, terms, lengths.most, scale, step)
    tokens_read = float(step.kept.double().mean())
    rows, per_group = c * GROUP, heads * c
    sampled = min(rows, 2 * planning._ENOUGH)
    part_bytes = sum(x.numel() * 4 for x in (parts.peak, parts.total, parts.weighted))
    stages: list[tuple[str, Callable[[], Any], float]] = [
        ("constants", prepare, per_group * (4 * d + 32)),
        ("bounds", bound, heads * rows * (d / 2 + 4 + r) + per_group * (2 * d + 36 + 8 * r)),
        (names[0], count, heads * r * (sampled + 8 * c)),
        (names[1], choose, heads * (r * (rows + 4 * c) + 4 * tokens_read)),
        ("attention", attend, heads * tokens_read * (2 * (d + e) + 4) + part_bytes),
        ("merge", partial(merge, _DROP, scale), part_bytes),
        ("nothing to read again", read_again, heads * r),
    ]
    for name, call, moved in stages:
        row: Row = {"kernel": name, "keys": case.name, "n": n, "confidence": checked.confidence}
        yield row | rate_row(clock.seconds(call), moved, limit)
