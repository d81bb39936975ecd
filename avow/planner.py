"""Which method to run: candidates, priced → screened → ranked. No tensors here, only numbers about them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from avow.calibration import Rates
from avow.core import SOFTMAX, BoundEstimate, Cost, Kind, Method, Sizes, notebook
from avow.core.schema import json_schema
from avow.methods import all_methods

# What finding out may cost, relative to exact attention, before the answer is exact attention after all.
WASTE = 0.1
# A guess must clear the tolerance by this factor to be worth trying.
_MARGIN = 0.7

_NOTHING = "nothing here is expected to meet it: ask for less, or for it in a wider type"
BOUND_UNIT = "bounds are relative to the longest value that a row sees"

SCHEMA = "avow.plan/1"

Estimator = Callable[[Method], BoundEstimate]


@dataclass(frozen=True)
class Candidate:
    """A method with settings, what it costs, what it may promise, and why it was not chosen."""

    method: Method
    cost: Cost
    seconds: float
    estimate: BoundEstimate | None = None
    lost: str = ""


class CandidateDocument(TypedDict):
    """A candidate in JSON.

    Attributes:
        method: its name.
        parameters: its settings.
        seconds: how long a call is predicted to take.
        peak_bytes: the most memory a call holds beside its inputs.
        bound: the bound it is expected to prove; null if none, or if it was not asked.
        kind: the kind of that promise.
        certain: whether that bound is proved already, rather than a guess.
        lost: why it was not chosen; empty if it meets what was asked.
    """

    method: str
    parameters: dict[str, Any]
    seconds: float
    peak_bytes: int
    bound: float | None
    kind: Kind | None
    certain: bool | None
    lost: str


class PlanDocument(TypedDict):
    """A plan in JSON.

    Attributes:
        tol: the error that every row may have, relative to the longest value that it sees; null if none was asked.
        rtol: the same, relative to the length of the row's answer.
        aim: the bound that `rtol` is expected to need, relative to the longest value.
        rates: where the predicted times come from.
        exact_seconds: how long exact attention is predicted to take.
        chosen: the place among the candidates of the one that would run; null if none meets what was asked.
        candidates: every method in every setting, from the chosen one down.
    """

    tol: float | None
    rtol: float | None
    aim: float | None
    rates: str
    exact_seconds: float
    chosen: int | None
    candidates: list[CandidateDocument]


@dataclass(frozen=True)
class Plan:
    """Candidates from the chosen one down, each with the reason it lost.

    Attributes:
        ranked: every method with every setting worth trying: those that meet the tolerance first, each group by its
            price.
        tol: the tolerance that was planned for.
        source: where the prices come from: measured here, or typical.
        exact_seconds: what exact attention would take.
        rtol: the tolerance relative to the answer.
        aim: the bound that `rtol` is expected to need, relative to the longest value; whether it does shows in the
            answer.
    """

    ranked: tuple[Candidate, ...]
    tol: float | None
    source: str
    exact_seconds: float = field(default=math.nan)
    rtol: float | None = None
    aim: float | None = None
    """The bound that `rtol` is expected to need, relative to the longest value; whether it does shows in the answer."""

    @property
    def goal(self) -> str:
        """What the plan is for."""
        limits = [] if self.tol is None else [f"tolerance {self.tol:g}"]
        if self.rtol is not None:
            about = "" if self.aim is None else f", which is about {self.aim:.1e} of the longest value"
            limits.append(f"relative tolerance {self.rtol:g}{about}")
        return " and ".join(limits) or "no tolerance"

    @property
    def chosen(self) -> Candidate | None:
        return next((candidate for candidate in self.ranked[:1] if not candidate.lost), None)

    @property
    def best_bound(self) -> float:
        """The smallest proved bound among all candidates."""
        estimates = [c.estimate for c in self.ranked if c.estimate is not None]
        return min((estimate.bound for estimate in estimates if estimate.certain), default=math.inf)

    @property
    def why_exact(self) -> str:
        """Why no cheaper method may run: of each method, the reason of its cheapest setting."""
        reasons: dict[str, str] = {}
        for candidate in self.ranked:
            method = candidate.method
            if method.target == SOFTMAX and candidate.lost and not method.is_exact:
                reasons.setdefault(method.name, candidate.lost)
        return "; ".join(f"{name}: {lost}" for name, lost in reasons.items())

    def plain(self) -> dict[str, Any]:
        """Everything as JSON has it, in the form that `json_schema` says; null where nothing finite is known."""
        document: PlanDocument = {
            "tol": self.tol,
            "rtol": self.rtol,
            "aim": self.aim,
            "rates": self.source,
            "exact_seconds": self.exact_seconds,
            "chosen": None if self.chosen is None else 0,
            "candidates": [_plain_candidate(candidate) for candidate in self.ranked],
        }
        return {"schema": SCHEMA, **document}

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The schema of what `plain` returns and `avow plan --json` prints."""
        return json_schema(PlanDocument, SCHEMA)

    def __str__(self) -> str:
        lines = [f"{'':2}{'method':34}{'seconds':>10}{'memory':>12}{'bound':>10}  why"]
        for candidate in self.ranked:
            mark = "→ " if candidate is self.chosen else "  "
            method, seconds, memory, bound, why = self._row(candidate)
            lines.append(f"{mark}{method:34}{seconds:>10}{memory:>12}{bound:>10}  {why}")
        if self.chosen is None:
            lines.append(_NOTHING)
        return "\n".join([f"plan for {self.goal} ({self.source}); {BOUND_UNIT}", *lines])

    def _repr_html_(self) -> str:
        chosen = self.chosen
        what = _NOTHING if chosen is None else f"{chosen.method.label} would run"
        rows = [
            (*self._row(x)[:4], "?" if x.estimate is None else x.estimate.kind, self._row(x)[4]) for x in self.ranked
        ]
        headings = ("method", "seconds", "memory", "bound", "kind", "why")
        parts = (
            notebook.facts([("times", self.source), ("unit", BOUND_UNIT)]),
            notebook.table(headings, rows, None if chosen is None else 0),
        )
        return notebook.card(f"{self.goal}: {what}", *parts, promise=chosen is not None)

    def _row(self, candidate: Candidate) -> tuple[str, str, str, str, str]:
        """Method, seconds, memory, bound, and why it was chosen or not."""
        bound = "?" if candidate.estimate is None else f"{candidate.estimate.bound:.1e}"
        memory = f"{candidate.cost.peak_bytes / 2**20:.1f} MiB"
        verdict = "cheapest that meets it" if candidate is self.chosen else "also meets it, slower"
        return candidate.method.label, f"{candidate.seconds:.2g}", memory, bound, candidate.lost or verdict


def _plain_candidate(candidate: Candidate) -> CandidateDocument:
    estimate = candidate.estimate
    finite = estimate is not None and math.isfinite(estimate.bound)
    return {
        "method": candidate.method.name,
        "parameters": candidate.method.parameters,
        "seconds": candidate.seconds,
        "peak_bytes": candidate.cost.peak_bytes,
        "bound": estimate.bound if estimate is not None and finite else None,
        "kind": None if estimate is None else estimate.kind,
        "certain": None if estimate is None else estimate.certain,
        "lost": candidate.lost,
    }


@dataclass
class _Pause:
    """A method that proved too little of problems of one kind: why, how many calls it rests, and until which."""

    reason: str
    calls: int
    until: int


class Trials:
    """What trials of cheaper methods cost and brought, for each kind of problem: those that failed rest for a while.

    A method that proved enough is run in the next call of that kind, and neither it nor a dearer one is asked first.
    One that proved too little is not asked in the next call, then in the next two, then four, up to `LONGEST`; and for
    so many calls that asking it takes at most `WASTE` of the time of exact attention, by the clock.
    """

    LONGEST = 64
    # More kinds than a model has layers; the oldest are forgotten.
    _KINDS = 1024

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._calls: OrderedDict[Hashable, int] = OrderedDict()
        self._pauses: dict[Hashable, dict[Method, _Pause]] = {}
        self._kept: dict[Hashable, dict[Method, BoundEstimate]] = {}
        self._idle: dict[Hashable, tuple[str, int]] = {}

    def begin(self, kind: Hashable) -> None:
        """Count a call of this kind."""
        self._calls[kind] = self._calls.pop(kind, 0) + 1
        while len(self._calls) > self._KINDS:
            oldest, _ = self._calls.popitem(last=False)
            self._pauses.pop(oldest, None)
            self._kept.pop(oldest, None)
            self._idle.pop(oldest, None)

    def nothing_to_try(self, kind: Hashable) -> str:
        """Why exact attention answers this call, if that is known without a plan; else empty."""
        reason, until = self._idle.get(kind, ("", 0))
        return reason if self._calls.get(kind, 0) <= until else ""

    def settle(self, kind: Hashable, reason: str) -> None:
        """Remember that a plan left nothing to try, until one of the methods that rest is asked again."""
        calls = self._calls.get(kind, 0)
        ends = [pause.until for pause in list(self._pauses.get(kind, {}).values())]  # other threads may add to them
        self._idle[kind] = reason, min(ends, default=calls + self.LONGEST)

    def resting(self, kind: Hashable, method: Method) -> str:
        """Why a method is not asked in this call; empty if it is."""
        pause = self._pauses.get(kind, {}).get(method)
        return "" if pause is None or self._calls.get(kind, 0) > pause.until else pause.reason

    def failed(self, kind: Hashable, method: Method, reason: str, seconds: float, exact: float) -> None:
        """Have a method rest that took so long to prove too little, where exact attention takes `exact` seconds."""
        pauses = self._pauses.setdefault(kind, {})
        self._kept.get(kind, {}).pop(method, None)
        before = pauses[method].calls if method in pauses else 0
        doubled = min(max(2 * before, 1), self.LONGEST)
        paid = math.ceil(seconds / (WASTE * exact)) - 1 if 0 < exact < math.inf else 0
        calls = self._calls.get(kind, 0)
        pauses[method] = _Pause(reason, doubled, calls + max(doubled, min(paid, self.LONGEST**2)))

    def kept(self, kind: Hashable, method: Method, bound: float, promise: Kind) -> None:
        """Remember what a method proved, which was enough, and forget its failures."""
        self._pauses.get(kind, {}).pop(method, None)
        self._kept.setdefault(kind, {})[method] = BoundEstimate(bound, promise, True)

    def proved(self, kind: Hashable, method: Method) -> BoundEstimate | None:
        """What a method proved when it was run last, if that was enough."""
        return self._kept.get(kind, {}).get(method)


def candidates(sizes: Sizes, rates: Rates, methods: Iterable[type[Method]] | None = None) -> list[Candidate]:
    """Every method with every setting worth trying, priced, cheapest first."""
    kinds = all_methods().values() if methods is None else methods
    priced = [
        Candidate(method, method.cost(sizes), rates.seconds(method, sizes))
        for kind in kinds
        for method in kind.grid(sizes)
    ]
    return sorted(priced, key=lambda candidate: candidate.seconds)


def screened(
    offers: list[Candidate],
    tol: float | None,
    accept: frozenset[Kind],
    estimator: Estimator,
    thrifty: bool,
    aim: float | None = None,
    trials: Trials | None = None,
    kind: Hashable = None,
) -> list[Candidate]:
    """The same candidates, winners first and each by price, with their estimates and the reasons of the losers.

    If `thrifty`, no candidate is asked whose asking and running might cost more than `WASTE` of exact attention, and
    none that `trials` have rest for problems of this `kind`. An `aim` is what they are held to in place of `tol`: a
    guess of what will be needed.
    """
    limit = tol if aim is None else aim
    exact = min((c.seconds for c in offers if c.method.is_exact), default=math.inf)
    purse, sure = WASTE * exact, False
    candidates = []
    for offer in offers:
        estimate: BoundEstimate | None = None
        if offer.method.is_exact:
            estimate = estimator(offer.method)
            lost = _shortfall(estimate, limit, accept, 1.0)
        elif offer.method.target != SOFTMAX:
            lost = f"its target is {offer.method.target}"
        elif limit is None:
            lost = "no tolerance was given"
        elif offer.seconds >= exact:
            lost = "costs more than exact"
        elif thrifty and offer.seconds > purse:
            lost = f"estimated trial cost exceeds {WASTE:.0%} of exact"
        elif sure:
            lost = "a cheaper method proved enough in the last call of this kind"
        elif trials is not None and (resting := trials.resting(kind, offer.method)):
            lost = resting
        else:
            start = 0.0 if trials is None else trials.clock()
            known = None if trials is None else trials.proved(kind, offer.method)
            estimate = known or estimator(offer.method)
            lost = _shortfall(estimate, limit, accept)
            sure = known is not None and not lost
            if trials is not None and lost:
                trials.failed(kind, offer.method, lost, trials.clock() - start, exact)
            purse -= 0.0 if lost or not thrifty else offer.seconds
        candidates.append(replace(offer, estimate=estimate, lost=lost))
    return sorted(candidates, key=lambda candidate: (bool(candidate.lost), candidate.seconds))


def _shortfall(estimate: BoundEstimate, tol: float | None, accept: frozenset[Kind], margin: float = _MARGIN) -> str:
    """Why an estimate does not meet the tolerance; empty if it does. A guess must clear it by the margin."""
    if math.isinf(estimate.bound):
        return estimate.reason or "makes no promise here"
    if estimate.kind not in accept:
        return f"its promise is {estimate.kind}; pass confidence= or coverage= to accept it"
    if tol is None or estimate.bound <= (tol if estimate.certain else tol * margin):
        return ""
    near = f"expected {estimate.bound:.1e}, too near to {tol:.3g} to try"
    return estimate.reason or (near if estimate.bound <= tol else f"cannot prove {tol:.3g}")
