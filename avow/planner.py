"""Which method to run: candidates → costs → certified → cheapest. No tensors here, only numbers about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from avow.calibration import Rates
from avow.core import SOFTMAX, BoundEstimate, Cost, Kind, Method, Sizes
from avow.methods import all_methods

# What finding out may cost, relative to exact attention, before the answer is exact attention after all.
WASTE = 0.1
# A guess must clear the tolerance by this factor to be worth trying.
_MARGIN = 0.7

BOUND_UNIT = "bounds are relative to the longest value that a row sees"

Foresee = Callable[[Method], BoundEstimate]


@dataclass(frozen=True)
class Candidate:
    """A method with settings, what it costs, what it may promise, and why it was not chosen."""

    method: Method
    cost: Cost
    seconds: float
    prospect: BoundEstimate | None = None
    lost: str = ""

    @property
    def label(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.method.parameters.items())
        return f"{self.method.name}({settings})"


@dataclass(frozen=True)
class Plan:
    """Candidates from the chosen one down, each with the reason it lost."""

    ranked: tuple[Candidate, ...]
    tol: float | None
    source: str
    exact_seconds: float = field(default=math.nan)
    rtol: float | None = None
    aim: float | None = None
    """The bound that `rtol` is expected to need, relative to the longest value; whether it does shows in the answer."""

    @property
    def asked(self) -> str:
        """What the plan is for."""
        limits = [] if self.tol is None else [f"tolerance {self.tol:g}"]
        if self.rtol is not None:
            about = "" if self.aim is None else f", which is about {self.aim:.1e} of the longest value"
            limits.append(f"relative tolerance {self.rtol:g}{about}")
        return " and ".join(limits) or "no tolerance"

    @property
    def chosen(self) -> Candidate | None:
        first = self.ranked[0] if self.ranked else None
        return first if first is not None and not first.lost else None

    @property
    def best_bound(self) -> float:
        """The smallest proved bound among all candidates."""
        return min(
            (c.prospect.bound for c in self.ranked if c.prospect is not None and c.prospect.certain), default=math.inf
        )

    @property
    def why_exact(self) -> str:
        """Why no cheaper method may run: the least of each method's settings speaks for it."""
        reasons: dict[str, str] = {}
        for candidate in self.ranked:
            method = candidate.method
            if method.target == SOFTMAX and candidate.lost and not method.is_exact:
                reasons.setdefault(method.name, candidate.lost)
        return "; ".join(f"{name}: {lost}" for name, lost in reasons.items())

    def __str__(self) -> str:
        lines = [f"{'':2}{'method':34}{'seconds':>10}{'memory':>12}{'bound':>10}  why"]
        for candidate in self.ranked:
            bound = "?" if candidate.prospect is None else f"{candidate.prospect.bound:.1e}"
            memory = f"{candidate.cost.peak_bytes / 2**20:.1f} MiB"
            mark = "→ " if candidate is self.chosen else "  "
            kept = (
                "cheapest that keeps its word" if candidate is self.chosen else "keeps its word too, at a higher price"
            )
            why = candidate.lost or kept
            lines.append(f"{mark}{candidate.label:34}{candidate.seconds:>10.2g}{memory:>12}{bound:>10}  {why}")
        return "\n".join([f"plan for {self.asked} ({self.source}); {BOUND_UNIT}", *lines])


def candidates(sizes: Sizes, rates: Rates, methods: Iterable[type[Method]] | None = None) -> list[Candidate]:
    """Every method with every setting worth trying, priced, cheapest first."""
    kinds = all_methods().values() if methods is None else methods
    priced = [
        Candidate(method, method.cost(sizes), rates.seconds(method, sizes))
        for kind in kinds
        for method in kind.settings(sizes)
    ]
    return sorted(priced, key=lambda candidate: candidate.seconds)


def judged(
    offers: list[Candidate],
    tol: float | None,
    accept: frozenset[Kind],
    foresee: Foresee,
    thrifty: bool,
    aim: float | None = None,
) -> list[Candidate]:
    """The same candidates, each with its prospect and, where it cannot win, the reason.

    A `thrifty` judge asks no candidate whose asking and running might cost more than `WASTE` of exact attention. An
    `aim` is what all but exact attention are held to in place of `tol`: a guess of what will be needed.
    """
    limit = tol if aim is None else aim
    exact = min((c.seconds for c in offers if c.method.is_exact), default=math.inf)
    purse = WASTE * exact
    done = []
    for offer in offers:
        if offer.method.is_exact:
            prospect = foresee(offer.method)
            done.append(_verdict(offer, prospect, tol, accept))
        elif offer.method.target != SOFTMAX:
            done.append(replace(offer, lost=f"its target is {offer.method.target}"))
        elif limit is None:
            done.append(replace(offer, lost="no tolerance was given: exact"))
        elif offer.seconds >= exact:
            done.append(replace(offer, lost="costs more than exact"))
        elif thrifty and offer.seconds > purse:
            done.append(replace(offer, lost=f"trying it might waste more than {WASTE:.0%} of exact"))
        else:
            verdict = _verdict(offer, foresee(offer.method), limit, accept)
            purse -= 0.0 if verdict.lost or not thrifty else offer.seconds
            done.append(verdict)
    return done


def _verdict(offer: Candidate, prospect: BoundEstimate, tol: float | None, accept: frozenset[Kind]) -> Candidate:
    offer = replace(offer, prospect=prospect)
    if math.isinf(prospect.bound):
        return replace(offer, lost=prospect.reason or "promises nothing here")
    if prospect.kind not in accept:
        return replace(offer, lost=f"its promise is {prospect.kind}; pass confidence= or coverage= to accept it")
    limit = math.inf if tol is None else tol if prospect.certain else tol * _MARGIN
    if prospect.bound > limit:
        return replace(offer, lost=prospect.reason or f"cannot prove {tol:.3g}")
    return offer


def cheapest(offers: list[Candidate]) -> list[Candidate]:
    """Winners by price, then losers by price."""
    return sorted(offers, key=lambda candidate: (bool(candidate.lost), candidate.seconds))
