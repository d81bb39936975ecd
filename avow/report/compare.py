"""Every method with every setting on every workload: time, memory, measured error, certified bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import avow
from avow.bench.workloads import Workload
from avow.calibration import rates
from avow.core import Method, Sizes, named
from avow.errors import AvowError
from avow.methods import method_named
from avow.report import formatting
from avow.report.decoding import Decoding, decoding
from avow.report.frontier import frontier
from avow.report.measure import finite, largest_errors, pace, peak_bytes, timed

SOFTMAX = "softmax attention"
# The tolerance the headline asks about.
GOAL = 1e-2
# From this many keys on, one run of a call tells its time.
_LONG = 4096
# What takes this many times as long as exact attention, and more seconds than this, is on no frontier.
_FAR, _SOON = 10.0, 0.5

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """What one call took and gave. `error` is to the method's own target, `to_softmax` to softmax attention.

    These and `bound` are relative to the longest value that a row sees; `relative_error` and `relative_bound` are those
    of the method's own target, relative to the answer.
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


@dataclass(frozen=True)
class Row:
    """One method with one setting on one workload; `why` says what kept it from being measured."""

    method: Method
    measured: Measured | None
    why: str = ""
    frontier: bool = False

    @property
    def label(self) -> str:
        return formatting.label(self.method)

    @property
    def own_mechanism(self) -> bool:
        return self.method.target != SOFTMAX

    def proves(self, tol: float) -> bool:
        """Whether it promises softmax attention within `tol`."""
        found = self.measured
        return found is not None and not self.own_mechanism and found.bound is not None and found.bound <= tol

    def plain(self) -> dict[str, Any]:
        method = {"method": self.method.name, "parameters": self.method.parameters, "target": self.method.target}
        blank = dict.fromkeys(field.name for field in dataclasses.fields(Measured))
        numbers = blank if self.measured is None else dataclasses.asdict(self.measured)
        return {**method, **numbers, "frontier": self.frontier, "why": self.why}


@dataclass(frozen=True)
class Board:
    """All rows of one workload."""

    kind: str
    summary: str
    sizes: Sizes
    rows: tuple[Row, ...]
    decoding: Decoding | None = None

    @property
    def winner(self) -> Row | None:
        """The fastest that beats exact attention and proves `GOAL`."""
        able = [(row.measured.ratio, i) for i, row in enumerate(self.rows) if row.measured and row.proves(GOAL)]
        best = min((pair for pair in able if self.rows[pair[1]].method.name != "exact"), default=None)
        return self.rows[best[1]] if best is not None and best[0] < 1 else None

    def plain(self) -> dict[str, Any]:
        names = ("batch", "heads", "key_heads", "queries", "keys", "dim", "value_dim", "causal")
        sizes = {name: getattr(self.sizes, name) for name in names} | {"dtype": named(self.sizes.dtype)}
        steps = None if self.decoding is None else self.decoding.plain()
        rows = [row.plain() for row in self.rows]
        return {"kind": self.kind, "summary": self.summary, "sizes": sizes, "rows": rows, "decoding": steps}


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
    def headline(self) -> str:
        """The finding in a sentence."""
        won = {board.kind: board.winner for board in self.boards if board.winner is not None}
        lost = [board.kind for board in self.boards if board.kind not in won]
        if not won:
            keys = max(board.sizes.keys for board in self.boards)
            instead = self._later() or self._closest()
            goal = f"an error of {GOAL:g} of the longest value"
            return f"At {keys:,} keys nothing faster than exact attention proves {goal}{instead}."
        parts = []
        for kind, row in won.items():
            assert row is not None and row.measured is not None
            likely = f" with probability {row.measured.confidence:g}" if row.measured.kind == "statistical" else ""
            parts.append(
                f"on {kind} heads {row.label} takes {row.measured.ratio:.0%} of exact attention's time"
                f" and proves every row within {_in_units(row.measured)}{likely}"
            )
        rest = f"; on {formatting.listed(lost)} nothing faster than exact proves {GOAL:g}" if lost else ""
        sentence = "; ".join(parts) + rest
        return sentence[0].upper() + sentence[1:] + "."

    def _later(self) -> str:
        """What does win at the longest length of the sweep."""
        longest = max((point.length for point in self.scaling), default=0)
        there = [point for point in self.scaling if point.length == longest and point.method.target == SOFTMAX]
        exact = min((point.seconds for point in there if point.method.name == "exact"), default=0.0)
        won = [point for point in there if point.seconds < exact and point.bound is not None and point.bound <= GOAL]
        if not won:
            return ""
        best = min(won, key=lambda point: point.seconds)
        what = f"{formatting.label(best.method)} proves {best.bound:.1e} in {best.seconds / exact:.0%} of the time"
        return f"; at {longest:,} keys {what} on {best.kind} heads"

    def _closest(self) -> str:
        """The smallest bound among what is faster than exact, beside its measured error."""
        fast = [
            (row.measured.bound, row.measured.error, f"{row.label} on {board.kind} heads")
            for board in self.boards
            for row in board.rows
            if row.measured is not None and row.measured.ratio < 1 and row.measured.bound is not None
            if not row.own_mechanism and row.method.name != "exact" and row.measured.bound < 1
        ]
        if not fast:
            return ""
        bound, error, what = min(fast)
        return f"; {what} comes closest, with {bound:.1e} proved and {error:.1e} measured"

    def plain(self) -> dict[str, Any]:
        return {
            "avow": avow.__version__,
            "torch": torch.__version__,
            "machine": self.machine,
            "headline": self.headline,
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

    def settings(self, name: str, sizes: Sizes) -> Iterator[Method]:
        """What is compared of one method: its own choice of settings, or the one that was asked for."""
        return iter([self.fixed[name]]) if name in self.fixed else method_named(name).settings(sizes)

    def board(self, workload: Workload, tell: Tell, longer: Workload | None = None) -> Board:
        """Every setting of every method on one workload; decoding from a cache of the keys of a `longer` one."""
        sizes, rows = workload.sizes, []
        for name in self.methods:
            for method in self.settings(name, sizes):
                tell(f"{workload.kind}: {formatting.label(method)}")
                rows.append(self._row(method, workload, sizes))
        steps = None
        if "sparse" in self.methods and workload.q.numel() and workload.k.numel():
            tell(f"{workload.kind}: decoding")
            steps = decoding(longer or workload, self.seed, self.pairs)
        return Board(workload.kind, workload.summary, sizes, tuple(_with_frontier(rows)), steps)

    def _row(self, method: Method, workload: Workload, sizes: Sizes) -> Row:
        if too_long := self._too_long(method, sizes):
            return Row(method, None, too_long)
        try:
            return Row(method, self._measured(method, workload))
        except AvowError as error:
            return Row(method, None, str(error))

    def _too_long(self, method: Method, sizes: Sizes) -> str:
        known = rates(sizes.device, measure=False)
        expected, exact = (known.seconds(x, sizes) for x in (method, method_named("exact")()))
        if expected > self.patience:
            return f"expected to take {expected:.0f} s a call; raise --patience to wait"
        if method.name not in self.fixed and expected > max(_FAR * exact, _SOON):
            times = f"{expected / exact:.0f} times as long as exact attention of all queries"
            return f"expected to take {times}; --set one of its settings to wait"
        return ""

    def _measured(self, method: Method, workload: Workload) -> Measured:
        device = workload.q.device
        call = partial(_attend, method, workload, self.seed)
        memory = peak_bytes(call, device)
        out, certificate = call()
        exact = method_named("exact")()
        speed = pace(call, lambda: _attend(exact, workload, self.seed), device, self.pairs)
        ratio = 1.0 if method == exact else speed.ratio
        found = largest_errors(out, workload, method, self.seed)
        softmax = found.error
        if method.target != SOFTMAX:
            softmax = largest_errors(out, workload, exact, self.seed).error
        return Measured(
            speed.seconds,
            ratio,
            memory,
            found.error,
            softmax,
            certificate.kind,
            certificate.confidence,
            _bound(certificate),
            finite(found.relative),
            None if certificate.kind == "none" else finite(certificate.relative),
        )

    def scaling(self, workloads: Iterable[Workload], tell: Tell) -> Iterator[Point]:
        """Time and memory of each method as it comes, at every length."""
        for workload in workloads:
            for name in self.methods:
                method = self.fixed.get(name) or method_named(name)()
                tell(f"{workload.sizes.keys:,} keys: {formatting.label(method)}")
                if self._too_long(method, workload.sizes):
                    continue
                try:
                    yield self._point(method, workload)
                except AvowError:
                    continue  # a rank above the number of keys, say: the curve starts later

    def _point(self, method: Method, workload: Workload) -> Point:
        call = partial(_attend, method, workload, self.seed)
        keys, device = workload.sizes.keys, workload.q.device
        bound = _bound(call()[1])
        repeats = 3 if keys < _LONG else 1
        times = sorted(timed(call, device) for _ in range(repeats))
        return Point(workload.kind, method, keys, times[repeats // 2], peak_bytes(call, device), bound)


def _attend(method: Method, workload: Workload, seed: int) -> tuple[torch.Tensor, avow.Certificate]:
    """One whole call, its certificate included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        more = {"method": method.name, "generator": generator, **workload.call, **method.parameters}
        return avow.attend(workload.q, workload.k, workload.v, **more)


def _bound(certificate: avow.Certificate) -> float | None:
    """What is promised, if anything is."""
    return None if certificate.kind == "none" else finite(certificate.bound)


def _in_units(found: Measured) -> str:
    """The bound in both units."""
    own = "" if found.relative_bound is None else f" ({found.relative_bound:.1e} of the answer)"
    return f"{found.bound:.1e} of the longest value{own}"


def _with_frontier(rows: list[Row]) -> list[Row]:
    """The same rows, those marked that no other beats in time and in distance to softmax attention."""
    there = [row for row in rows if row.measured is not None]
    marks = frontier([(row.measured.ratio, row.measured.to_softmax) for row in there if row.measured is not None])
    best = {id(row) for row, mark in zip(there, marks, strict=True) if mark}
    return [dataclasses.replace(row, frontier=id(row) in best) for row in rows]
