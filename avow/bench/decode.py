"""A certified step of decoding beside exact attention, by the calls that a user makes.

A step is `append` of one token and `attend` of a `KeyValueCache`: called from Python, and on a GPU also captured in one
CUDA graph and replayed while the cache grows. Exact attention is called the same ways: a token is copied behind the
others, then PyTorch attends to all of them. Steps of two queries take turns, so that what a cache learns from one is
not what the next one needs.

Real heads are measured on each text of which there are files, at every length, and goals are judged on the worst of
them. Other shapes (a batch, more siblings, several queries) and runs of single steps are measured on the text that was
the worst at the nearest length: what differs between texts is how many tokens are read, which the lengths show, and
every further text would take as long again.

Every answer is compared with float64 first, those of a graph after a replay. An answer that breaks its bound or the
tolerance is not timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from avow.attend import Attended
from avow.bench.cases import Case, Shape, Sizes, cases, distances, exact, real, stored
from avow.bench.clock import Clock
from avow.bench.results import Goal, Result, Row, tell_row
from avow.bench.workloads import Workload
from avow.core.timing import timed
from avow.nn import KeyValueCache

_SHAPES = (
    Shape("16 sequences", 32768, batch=16),
    Shape("8 siblings", 131072, siblings=8),
    Shape("8 queries", 131072, queries=8),
)
FULL = {
    "cpu": Sizes((16384, 65536), 8, 2, 3, 2, torch.float32),
    "cuda": Sizes((32768, 131072, 1048576), 32, 8, 15, 10, shapes=_SHAPES, steady=(262144, 524288)),
}
QUICK = {
    "cpu": Sizes((4224,), 4, 2, 3, 1, torch.float32),
    "cuda": Sizes((8192,), 8, 2, 3, 5, shapes=tuple(shape._replace(length=8192) for shape in _SHAPES), steady=(8192,)),
}
_TOL = 1e-2
# The probabilities with which a row's bound holds.
_CONFIDENCES = (1.0, 0.999)
_PART = 2**16
# Room for the tokens that are appended while steps are timed.
_ROOM = 8192
# Steps that are timed one by one.
_STEPS = 64
# Exact attention that takes so many times as long as the fastest in a short trial is not timed further.
_HOPELESS = 1.2
# The row of the text on which real heads fare worst.
WORST = "worst of the texts"
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
# The same for other shapes.
_CAPTURED_SHAPES = {("16 sequences", 32768): 2.0, ("8 siblings", 131072): 1.8, ("8 queries", 131072): 1.8}
# Tokens, and the most milliseconds that a step called from Python should take.
_EAGER = (131072, 0.2)
# How many times the median the slowest of single steps in a graph may take.
_SLOWEST = 1.5


def run(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """One table of a step for every case and confidence; for real heads also other shapes and single steps if asked."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    rows, failures = list[Row](), list[str]()
    for case in cases(device, sizes, folder):
        label = f"{case.name}, n = {case.length}"
        tell(label)
        for row, faults in _measure(case, clock, _CONFIDENCES, label):
            failures += faults
            if row is not None:
                head: Row = {"keys": case.name, "n": case.length}
                rows.append(head | row)
                tell_row(rows[-1])
    texts = {} if folder is None else stored(folder)
    rows = with_worst(rows, list(texts))
    shape = f"{sizes.heads} query heads over {sizes.groups} key heads, d = 128, {str(sizes.dtype)[6:]}, {device}"
    remarks = [
        f"A step is `KeyValueCache.append` of one token and `attend` at tol = {_TOL:g}, with its certificate: called "
        "from Python, and captured in a CUDA graph. After steps that saved nothing the sketch is used less often.",
        f"Medians of {sizes.rounds} rounds of {sizes.calls} steps. Exact is the fastest of PyTorch's, called and "
        "captured the same way, after a copy of one token behind the others; sibling heads are heads or rows.",
        "No folder of real heads was given: only synthetic keys."
        if folder is None
        else f"Real keys are windows of neighbouring tokens of a text, of all layers but the first. Texts: "
        f"{', '.join(texts)}.",
    ]
    title = f"decode: one certified step, as it is called ({shape})"
    results = [Result(title, rows, goals(rows, list(texts)), remarks, failures)]
    if texts and sizes.shapes:
        results.append(_other_shapes(device, sizes, clock, texts, rows, tell))
    if texts and sizes.steady:
        results.append(_single_steps(device, sizes, texts, rows, tell))
    return results


def _measure(
    case: Case, clock: Clock, confidences: Iterable[float], label: str
) -> Iterable[tuple[Row | None, list[str]]]:
    """A row for each confidence, None if the answer failed its check, and what is wrong with answers."""
    rivals = [_after(_copy_tokens(case), call) for _, call in exact(case)]
    on_gpu = clock.device == "cuda"
    eager, captured = (_fastest(rivals, clock, graph) for graph in (False, True)) if on_gpu else (None, None)
    for confidence in confidences:
        cache = filled(case)
        steps = [step(cache, case, q, confidence) for q in (case.before, case.q) if q is not None]
        for one in steps:
            answer = one()
        error, faults = check(case, cache, answer)
        if faults:
            yield None, [f"{label}, confidence {confidence:g}: {fault}" for fault in faults]
            continue
        certificate, both = answer.certificate, _after(*steps)
        row: Row = {"confidence": confidence}
        if eager is None:
            own, *others = clock.in_turns(both, *rivals, graph=False)
            row |= _beside(own / len(steps), min(others), "")
        else:
            row |= _beside(clock.seconds(both, graph=False) / len(steps), eager, "")
            row |= _beside(None, captured, "captured ")
            # Exact answers of calls that no kernel serves wait for the device, and cannot be captured.
            if certificate.method == "sparse":
                replays, last = captured_steps(steps)
                _after(*replays)()
                again, found = check(case, cache, last)
                faults = [f"{label}, confidence {confidence:g}, captured: {fault}" for fault in found]
                if not found:
                    own = clock.seconds(_after(*replays), graph=False) / len(steps)
                    row |= _beside(own, captured, "captured ")
                error = max(error, again)
        row |= {"error": error, "bound": certificate.bound}
        yield row | {"answered by": certificate.method, "because": certificate.reason}, faults
        del cache, steps, both, answer
    if on_gpu:
        torch.cuda.empty_cache()


def _fastest(calls: list[Callable[[], object]], clock: Clock, graph: bool) -> float:
    """What the fastest of some calls takes; those that are far behind in one round are not timed again."""
    trial = clock._replace(rounds=1).in_turns(*calls, graph=graph)
    near = [call for call, seconds in zip(calls, trial, strict=True) if seconds <= _HOPELESS * min(trial)]
    return min(clock.in_turns(*near, graph=graph))


def _other_shapes(
    device: str,
    sizes: Sizes,
    clock: Clock,
    texts: dict[str, list[Workload]],
    rows: list[Row],
    tell: Callable[[str], None],
) -> Result:
    """Steps of other shapes, on the text that was the worst at the nearest length."""
    table, failures = list[Row](), list[str]()
    for shape in sizes.shapes:
        text = worst_text(rows, list(texts), shape.length)
        label = f"{shape.name}, {text}, n = {shape.length}"
        tell(label)
        case = real(device, sizes.of(shape), shape.length, texts[text], text)
        for row, faults in _measure(case, clock, (1.0,), label):
            failures += faults
            if row is not None:
                head: Row = {"shape": shape.name, "text": text, "n": shape.length}
                table.append(head | row)
                tell_row(table[-1])
        del case
    remarks = [
        "Other shapes: sequences of a batch are other samples of the text; several queries are those of tokens that "
        "are appended together, and exact attention lets each see all of them, which spares it a mask."
    ]
    return Result("decode: steps of other shapes, on the worst text", table, shape_goals(table), remarks, failures)


def _single_steps(
    device: str, sizes: Sizes, texts: dict[str, list[Workload]], rows: list[Row], tell: Callable[[str], None]
) -> Result:
    """How long each of many steps takes that follow each other, in graphs on a GPU."""
    table, failures = list[Row](), list[str]()
    for n in sizes.steady:
        text = worst_text(rows, list(texts), n)
        label = f"{_STEPS} single steps, {text}, n = {n}"
        tell(label)
        case = real(device, sizes, n, texts[text], text)
        cache = filled(case)
        steps = [step(cache, case, q, 1.0) for q in (case.before, case.q) if q is not None]
        for one in steps * 2:
            last = one()
        if device == "cuda" and last.certificate.method == "sparse":
            replays, last = captured_steps(steps)
            times = consecutive(replays, _STEPS, device)
        else:
            times = consecutive(steps, _STEPS, device)
            last = steps[-1]()
        _, faults = check(case, cache, last)
        failures += [f"{label}: {fault}" for fault in faults]
        if not faults:
            median, slowest = 1e3 * statistics.median(times), 1e3 * max(times)
            row: Row = {"single steps": _STEPS, "text": text, "n": n, "median ms": median, "slowest ms": slowest}
            table.append(row | {"slowest over median": slowest / median})
            tell_row(table[-1])
        del case, cache, steps
    return Result(
        "decode: single steps one after the other, on the worst text", table, steady_goals(table), [], failures
    )


def consecutive(steps: Sequence[Callable[[], object]], count: int, device: str) -> list[float]:
    """Seconds of each of so many steps in turn, none of which waits for the host on a GPU; ends with the last one."""
    if device != "cuda":
        return [timed(steps[i % len(steps)], torch.device(device)) for i in range(count)]
    for one in steps:
        one()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for i, event in enumerate(events[1:]):
        steps[i % len(steps)]()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]


def filled(case: Case) -> KeyValueCache:
    """A cache that holds a case's tokens and has room for more; they come in parts, as the prompts of a user do."""
    k, v = case.k, case.v
    room, sizes = case.length + _ROOM if k.is_cuda else None, (k.shape[1], k.shape[3], v.shape[3], k.shape[0])
    cache = KeyValueCache(*sizes, dtype=k.dtype, device=k.device, capacity=room)
    for start in range(0, case.length, _PART):
        cache.append(k[:, :, start : start + _PART], v[:, :, start : start + _PART])
    return cache


def step(cache: KeyValueCache, case: Case, q: Tensor, confidence: float) -> Callable[[], Attended]:
    """The tokens of some queries more, and the answers to these."""
    k, v = (x[:, :, : q.shape[2]].clone() for x in (case.k, case.v))

    def call() -> Attended:
        cache.append(k, v)
        return cache.attend(q, _TOL, confidence, case.scale)

    return call


def captured_steps(steps: list[Callable[[], Attended]]) -> tuple[list[Callable[[], object]], Attended]:
    """Replays of steps in a CUDA graph each, and where the last one's answer appears."""
    replays = list[Callable[[], object]]()
    for one in steps:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = one()
        replays.append(graph.replay)
    return replays, answer


def with_worst(rows: list[Row], texts: list[str]) -> list[Row]:
    """The rows, and after those of several texts at a length the slowest of each confidence."""
    if len(texts) < 2:
        return rows
    table: list[Row] = []
    for n in dict.fromkeys(row["n"] for row in rows):
        here = [row for row in rows if row["n"] == n]
        own = [row for row in here if row["keys"] in texts]
        table += own
        for confidence in dict.fromkeys(row["confidence"] for row in own):
            worst = min((row for row in own if row["confidence"] == confidence), key=_ratio)
            table.append(worst | {"keys": WORST, "because": f"{worst['keys']}: {worst['because']}"})
        table += [row for row in here if row["keys"] not in texts]
    return table


def worst_text(rows: list[Row], texts: list[str], n: int) -> str:
    """The text whose steps without chance were the slowest beside exact ones at the measured length nearest to n."""
    own = [row for row in rows if row["keys"] in texts and row["confidence"] == 1]
    nearest = min((abs(int(row["n"] or 0) - n) for row in own), default=0)
    there = [row for row in own if abs(int(row["n"] or 0) - n) == nearest]
    return str(min(there, key=_ratio)["keys"]) if there else texts[0]


def _ratio(row: Row) -> float:
    """How many times as fast as exact a step is: in a graph, if there was one."""
    return float(row.get("captured times faster", row["times faster"]) or 0)


def goals(rows: list[Row], texts: Iterable[str] = ("real",)) -> list[Goal]:
    """Which of the goals this run could judge, and whether it met them; with several texts, on the worst."""
    judged, texts = list[Goal](), list(texts)
    called = [row for row in rows if row["keys"] in texts and row["n"] == _EAGER[0] and row["confidence"] == 1]
    if called and "captured ms" in called[0]:
        took = max(float(row["step ms"] or 0) for row in called)
        judged.append(
            Goal(f"called at {_EAGER[0]} tokens: at most {_EAGER[1]} ms", f"{took:.3g} ms", took <= _EAGER[1])
        )
    for row in rows:
        name, n, confidence = row["keys"], row["n"], row["confidence"]
        kind = "real" if name in ("real", WORST) else name
        label = (f"{name} keys" if name != WORST else WORST) + f", n = {n}"
        if "captured ms" not in row:
            if kind == "real" and int(n or 0) >= _LONG and confidence == 1:
                ratio = float(row["times faster"] or 0)
                judged.append(Goal(f"{label}: not slower than exact", f"{ratio:.3g}", ratio >= 1))
            continue
        for *key, goal in _CAPTURED:
            if key == [kind, n, confidence]:
                sure = f", confidence {confidence:g}" if confidence != 1 else ""
                judged.append(_captured_goal(label + sure, row, goal))
    return judged


def shape_goals(rows: list[Row]) -> list[Goal]:
    """The goals of steps of other shapes."""
    goals_of = [(row, _CAPTURED_SHAPES.get((str(row["shape"]), int(row["n"] or 0)))) for row in rows]
    return [
        _captured_goal(f"{row['shape']}, {row['text']}, n = {row['n']}", row, goal)
        for row, goal in goals_of
        if goal is not None and "captured ms" in row
    ]


def steady_goals(rows: list[Row]) -> list[Goal]:
    """Whether single steps take about as long as each other, at the lengths of a full run on a GPU."""
    judged = []
    for row in rows:
        if row["n"] in FULL["cuda"].steady:
            ratio = float(row["slowest over median"] or 0)
            aim = f"slowest of {row['single steps']} steps, {row['text']}, n = {row['n']}: at most {_SLOWEST:g} medians"
            judged.append(Goal(aim, f"{ratio:.3g}", ratio <= _SLOWEST))
    return judged


def _captured_goal(label: str, row: Row, goal: float) -> Goal:
    ratio = float(row["captured times faster"] or 0)
    found = f"{ratio:.3g}" if ratio else f"not captured ({row['because']})"
    return Goal(f"{label}: captured, {goal:g} times exact", found, ratio >= goal)


def check(case: Case, cache: KeyValueCache, answer: Attended) -> tuple[float, list[str]]:
    """The largest error of an answer to the case's queries from all that the cache holds, and what is wrong with it."""
    keys, values = cache.tokens
    errors = distances(dataclasses.replace(case, k=keys, v=values), answer.out)
    certificate = answer.certificate
    bounds = certificate.rows.reshape(errors.shape)
    faults = [] if bool(torch.isfinite(answer.out).all()) else ["an answer is not finite"]
    if not bool((errors <= bounds).all()):
        faults.append(f"a bound was broken: error {float(errors.max()):.3g}, bound {float(bounds.max()):.3g}")
    if not certificate.bound <= _TOL:
        faults.append(f"the bound {certificate.bound:.3g} exceeds the tolerance {_TOL:g}")
    return float(errors.max()), faults


def _beside(own: float | None, other: float | None, how: str) -> Row:
    """The columns of a step beside an exact one; None for a step that was not timed."""
    times, ratio = [None if x is None else 1e3 * x for x in (own, other)], None if not own else (other or 0) / own
    return {f"{how or 'step '}ms": times[0], f"{how}exact ms": times[1], f"{how}times faster": ratio}


def _after(*calls: Callable[[], object]) -> Callable[[], object]:
    """Several calls as one."""

    def all_of_them() -> object:
        for call in calls:
            result = call()
        return result

    return all_of_them


def _copy_tokens(case: Case) -> Callable[[], None]:
    n = case.q.shape[2]
    k, v = (x[:, :, -n:].clone() for x in (case.k, case.v))

    def copy() -> None:
        case.k[:, :, -n:] = k
        case.v[:, :, -n:] = v

    return copy
