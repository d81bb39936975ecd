"""Every method with every setting on every workload: time, memory, measured error, certified bound.

Decoding is measured too: one query against keys and values that a cache holds. This is what `sparse` is for: over all
queries at once its choices cost more than they save; in a cache the sketch of the keys is there before the query.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import avow
from avow.bench.clock import Pace, pace, peak_bytes
from avow.bench.workloads import Workload
from avow.calibration import rates
from avow.core import SOFTMAX as SOFTMAX
from avow.core import Certificate, Method, Sizes, dtype_name
from avow.core.audit import Audit, audit_rows
from avow.core.timing import timed
from avow.errors import AvowError, ToleranceUnreachable
from avow.methods import exact_method, method_named
from avow.nn import KeyValueCache

# The tolerance the headline is about.
GOAL = 1e-2
# Tolerances of decoding steps, and the probability with which each bound holds.
DECODING_TOLERANCES = ((1e-1, 1.0), (1e-2, 1.0), (1e-3, 1.0), (1e-2, 0.999))
# A decoding step is so short that fewer pairs of them tell little.
_LEAST_PAIRS = 5
# A promise that holds with a probability is refuted by what it allows once in so many comparisons, in so many draws.
_SURE, _DRAWS = 1000.0, 3
# The same call, timed beside every method, takes this many times as long at most unless other work disturbs it.
_STEADY = 2.0
# From this many keys on, one run of a call tells its time.
_LONG = 4096
# What takes this many times as long as exact attention, and more seconds than this, is on no frontier.
_FAR, _SOON = 10.0, 0.5

Tell = Callable[[str], None]
Answer = Callable[[int], tuple[Tensor, Certificate]]


@dataclass(frozen=True)
class Measured:
    """One call. `error` is to the method's own target, `to_softmax` to softmax attention. These and `bound` are
    relative to the longest value that a row sees, the other two to the answer of its own target. A bound is `broken` if
    measured errors refute it.
    """

    seconds: float
    ratio: float
    peak_bytes: int
    error: float
    to_softmax: float
    kind: str
    confidence: float
    bound: float | None
    relative_error: float | None
    relative_bound: float | None
    broken: bool = False


@dataclass(frozen=True)
class Row:
    """One method with one setting on one workload; `why` says why it was not measured."""

    method: Method
    measured: Measured | None
    why: str = ""
    frontier: bool = False

    @property
    def own_mechanism(self) -> bool:
        return self.method.target != SOFTMAX

    def proves(self, tol: float) -> bool:
        """Whether it promises softmax attention within `tol`, and no measured error is beyond its promise."""
        m = self.measured
        return m is not None and not self.own_mechanism and not m.broken and m.bound is not None and m.bound <= tol

    @property
    def broken(self) -> bool:
        """Whether measured errors refute the bound."""
        return self.measured is not None and self.measured.broken

    def plain(self) -> dict[str, Any]:
        method = {"method": self.method.name, "parameters": self.method.parameters, "target": self.method.target}
        blank = dict.fromkeys(field.name for field in dataclasses.fields(Measured))
        numbers = blank if self.measured is None else dataclasses.asdict(self.measured)
        return {**method, **numbers, "frontier": self.frontier, "why": self.why}


@dataclass(frozen=True)
class Step:
    """One decoding step within a tolerance, beside an exact one. `error` and `bound` are relative to the longest value
    that a row sees, the other two to the answer. A bound is `broken` if measured errors refute it.
    """

    tol: float
    confidence: float
    seconds: float
    ratio: float
    error: float
    bound: float
    method: str
    because: str
    relative_error: float | None
    relative_bound: float | None
    broken: bool = False


@dataclass(frozen=True)
class Decoding:
    """The steps at every tolerance, from a cache of `keys` keys."""

    keys: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Board:
    """All rows of one workload."""

    kind: str
    summary: str
    sizes: Sizes
    rows: tuple[Row, ...]
    decoding: Decoding | None = None
    busy: bool = False
    """Whether other work disturbed the measurement: times are then not reliable."""

    @property
    def winner(self) -> Row | None:
        """The fastest that beats exact attention and proves `GOAL`."""
        rows = [row for row in self.rows if row.proves(GOAL) and not row.method.is_exact]
        ratios = {i: row.measured.ratio for i, row in enumerate(rows) if row.measured and row.measured.ratio < 1}
        return rows[min(ratios, key=lambda i: ratios[i])] if ratios else None

    def plain(self) -> dict[str, Any]:
        names = ("batch", "heads", "key_heads", "queries", "keys", "dim", "value_dim", "causal")
        sizes = {name: getattr(self.sizes, name) for name in names} | {"dtype": dtype_name(self.sizes.dtype)}
        steps = None if self.decoding is None else dataclasses.asdict(self.decoding)
        rows = [row.plain() for row in self.rows]
        head = {"kind": self.kind, "summary": self.summary, "sizes": sizes, "busy": self.busy}
        return {**head, "rows": rows, "decoding": steps}


@dataclass(frozen=True)
class Point:
    """What one method took and proved at one length."""

    kind: str
    method: Method
    length: int
    seconds: float
    peak_bytes: int
    bound: float | None

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"method": self.method.name, "parameters": self.method.parameters}


@dataclass(frozen=True)
class Comparison:
    """The boards of every workload, and how time and memory grow with length."""

    boards: tuple[Board, ...]
    scaling: tuple[Point, ...]
    machine: str

    @property
    def busy(self) -> bool:
        """Whether times are not reliable, for other work disturbed them."""
        return any(board.busy for board in self.boards)

    def plain(self) -> dict[str, Any]:
        return {
            "avow": avow.__version__,
            "torch": torch.__version__,
            "machine": self.machine,
            "workloads": [board.plain() for board in self.boards],
            "scaling": [point.plain() for point in self.scaling],
        }


@dataclass(frozen=True)
class Bench:
    """How to measure: which methods, at which fixed settings, how often, and how long is too long."""

    methods: Sequence[str]
    fixed: Mapping[str, Method]
    seed: int = 0
    pairs: int = 5
    patience: float = 20.0

    @property
    def decodes(self) -> bool:
        """Whether decoding steps are measured: if a method is compared that selects tokens."""
        return any(method_named(name).selects_tokens for name in self.methods)

    def grid(self, name: str, sizes: Sizes) -> Iterator[Method]:
        """The settings of one method to compare: its own choice, or the one that was given."""
        return iter([self.fixed[name]]) if name in self.fixed else method_named(name).grid(sizes)

    def board(self, workload: Workload, tell: Tell, longer: Workload | None = None) -> Board:
        """Every setting of every method on one workload; decoding from a cache of the keys of a `longer` one."""
        sizes, rows = workload.sizes, []
        paces: list[Pace] = []
        for method in (method for name in self.methods for method in self.grid(name, sizes)):
            tell(f"{workload.kind}: {method.label}")
            measured, why = None, self._too_long(method, sizes)
            try:
                if not why:
                    measured, speed = self._measured(method, workload)
                    paces.append(speed)
            except AvowError as error:
                why = str(error)
            rows.append(Row(method, measured, why))
        steps = None
        if self.decodes and workload.q.numel() and workload.k.numel():
            tell(f"{workload.kind}: decoding")
            steps = decoding(longer or workload, self.seed, self.pairs)
        return Board(workload.kind, workload.summary, sizes, tuple(_with_frontier(rows)), steps, disturbed(paces))

    def _too_long(self, method: Method, sizes: Sizes) -> str:
        known = rates(sizes.device, measure=False)
        expected, exact = (known.seconds(x, sizes) for x in (method, exact_method()()))
        if expected > self.patience:
            return f"expected to take {expected:.0f} s a call; raise --patience to wait"
        if method.name not in self.fixed and expected > max(_FAR * exact, _SOON):
            times = f"{expected / exact:.0f} times as long as exact attention of all queries"
            return f"expected to take {times}; --set one of its settings to wait"
        return ""

    def _measured(self, method: Method, workload: Workload) -> tuple[Measured, Pace]:
        device, exact = workload.q.device, exact_method()()
        answer = partial(_attend, method, workload)
        call = partial(answer, self.seed)
        out, certificate = call()
        # After a call: the first of a process also measures how the CPU sums, in memory of its own.
        memory = peak_bytes(call, device)
        speed = pace(call, partial(_attend, exact, workload, self.seed), device, self.pairs)
        # What softmax attention is, a method that approximates it does not say.
        target = exact if method.target == SOFTMAX else method
        rows = audit(out, workload, target, self.seed)
        own = rows.certificate
        softmax = own if target is exact else audited(out, workload, exact, self.seed)
        measured = Measured(
            seconds=speed.seconds,
            ratio=1.0 if method == exact else speed.ratio,
            peak_bytes=memory,
            error=own.bound,
            to_softmax=softmax.bound,
            kind=certificate.kind,
            confidence=certificate.confidence,
            bound=_promised(certificate, certificate.bound),
            relative_error=_finite(own.relative),
            relative_bound=_promised(certificate, certificate.relative),
            broken=_is_refuted(certificate, rows, answer, workload, target, self.seed),
        )
        return measured, speed

    def scaling(self, workloads: Iterable[Workload], tell: Tell) -> Iterator[Point]:
        """Time and memory of each method at its default setting, at every length."""
        for workload, name in product(workloads, self.methods):
            method = self.fixed.get(name) or method_named(name)()
            keys, device = workload.sizes.keys, workload.q.device
            tell(f"{keys:,} keys: {method.label}")
            if self._too_long(method, workload.sizes):
                continue
            call = partial(_attend, method, workload, self.seed)
            try:
                certificate = call()[1]
                seconds = statistics.median(timed(call, device) for _ in range(3 if keys < _LONG else 1))
                memory = peak_bytes(call, device)
            except AvowError:
                continue  # a rank above the number of keys, say: the curve starts later
            yield Point(workload.kind, method, keys, seconds, memory, _promised(certificate, certificate.bound))


def disturbed(paces: Sequence[Pace]) -> bool:
    """Whether other work disturbed timings: calls waited for a CPU, or the baseline's time was not steady.

    >>> disturbed([Pace(1.0, 1.0, 1.0), Pace(0.5, 0.5, 1.1)]), disturbed([Pace(1.0, 1.0, 1.0), Pace(1.0, 0.2, 5.0)])
    (False, True)
    """
    bases = [pace.baseline for pace in paces]
    return any(pace.waited for pace in paces) or max(bases, default=0.0) > _STEADY * min(bases, default=0.0)


def _attend(method: Method, workload: Workload, seed: int) -> tuple[Tensor, Certificate]:
    """One whole call, its certificate included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return avow.attend(workload.q, workload.k, workload.v, method=method, generator=generator, **workload.call)


def _promised(certificate: Certificate, bound: float) -> float | None:
    return None if certificate.kind == "none" else _finite(bound)


def _finite(x: float) -> float | None:
    """The number if it is finite; an infinite bound proves nothing."""
    return x if math.isfinite(x) else None


def audit(out: Tensor, workload: Workload, target: Method, seed: int) -> Audit:
    """The errors of sampled rows, recomputed in float64 by the target's definition."""
    return audit_rows(out, workload.problem, target, 0.99, 0.99, torch.Generator().manual_seed(seed))


def audited(out: Tensor, workload: Workload, target: Method, seed: int) -> Certificate:
    """The largest errors among sampled rows: `bound`, `relative`."""
    return audit(out, workload, target, seed).certificate


def beyond(certificate: Certificate, rows: Audit) -> float:
    """The share of the audited rows whose error is surely beyond the bound of that row."""
    bounds = certificate.rows.cpu().reshape(-1, *certificate.rows.shape[-2:])[tuple(rows.rows.unbind(-1))]
    return float((rows.least_errors > bounds).double().mean()) if len(bounds) else 0.0


def _is_refuted(
    certificate: Certificate, rows: Audit, answer: Answer, workload: Workload, target: Method, seed: int
) -> bool:
    """Whether the errors of audited rows refute a promise: one of them a certain one, too many of them another.

    A promise of probability c lets a share of at most 1 − c of the rows be beyond its bound, on average over draws. So
    (share beyond)/(1 − c) is at most 1 on average, and so is its product over independent draws: by Markov's inequality
    it reaches `_SURE` with a probability of at most 1/`_SURE`.
    """
    share = beyond(certificate, rows)
    if certificate.kind not in ("deterministic", "statistical") or share == 0:
        return False
    allowed = 0.0 if certificate.kind == "deterministic" else 1 - certificate.confidence
    if allowed == 0:
        return True
    evidence = share / allowed
    for other in range(seed + 1, seed + _DRAWS):
        if evidence >= _SURE or evidence <= 1:
            break
        out, certificate = answer(other)
        evidence *= beyond(certificate, audit(out, workload, target, other)) / allowed
    return evidence >= _SURE


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For every (cost, error), whether no other point is at least as good in both and better in one.

    >>> frontier([(1.0, 1e-7), (0.5, 1e-2), (0.7, 1e-1)])
    [True, True, False]
    """
    return [not any(a <= cost and b <= error and (a, b) != (cost, error) for a, b in points) for cost, error in points]


def _with_frontier(rows: list[Row]) -> list[Row]:
    """The same rows; `frontier` is true of those that no other beats in time and in distance to softmax attention."""
    points = {i: (row.measured.ratio, row.measured.to_softmax) for i, row in enumerate(rows) if row.measured}
    best = {i for i, wins in zip(points, frontier(list(points.values())), strict=True) if wins}
    return [dataclasses.replace(row, frontier=i in best) for i, row in enumerate(rows)]


def decoding(workload: Workload, seed: int, pairs: int) -> Decoding:
    """The last query of every head against all keys that it sees."""
    load = last_query(workload)
    b, g, s, d = load.k.shape
    cache = KeyValueCache(g, d, load.v.shape[-1], b, load.k.dtype, load.k.device)
    cache.append(load.k, load.v)
    steps = []
    exact = exact_method()()
    for tol, confidence in DECODING_TOLERANCES:
        answer = partial(_step, cache, load.q, tol, confidence)
        try:
            out, certificate = answer(seed)
        except ToleranceUnreachable:
            continue  # half precision cannot say it: rounding alone is coarser
        speed = pace(partial(answer, seed), partial(cache.attend, load.q), load.q.device, max(pairs, _LEAST_PAIRS))
        rows = audit(out, load, exact, seed)
        errors = rows.certificate
        step = Step(
            tol=tol,
            confidence=confidence,
            seconds=speed.seconds,
            ratio=speed.ratio,
            error=errors.bound,
            bound=certificate.bound,
            method=certificate.method,
            because=certificate.reason,
            relative_error=_finite(errors.relative),
            relative_bound=_finite(certificate.relative),
            broken=_is_refuted(certificate, rows, answer, load, exact, seed),
        )
        steps.append(step)
    return Decoding(s, tuple(steps))


def _step(cache: KeyValueCache, q: Tensor, tol: float, confidence: float, seed: int) -> tuple[Tensor, Certificate]:
    """One sparse step from a cache."""
    generator = torch.Generator(q.device).manual_seed(seed)
    return cache.attend(q, tol, confidence, generator=generator, method="sparse")


def last_query(workload: Workload) -> Workload:
    """The workload when its last query came: only that one, and the keys up to it."""
    if not workload.causal:
        return workload.last(1)
    end = workload.q.shape[-2] if workload.positions is None else int(workload.positions[-1]) + 1
    return workload.first(end).last(1)
