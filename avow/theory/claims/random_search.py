"""The search for a counterexample: cases drawn at random and climbed from, each evaluated in balls.

What is found is a violation for certain, since balls never say so otherwise. What is not found proves nothing: a search
sees a few thousand points, and a claim speaks of all of them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from avow.errors import ParameterError
from avow.numerics import intervals
from avow.theory.claims.claim import Claim, Excess, Falsifier

STATED, AMENDED = "as stated", "what is true instead"
MOST_CASES = 100_000
# Cases are short decimals, so that what is found can be read and checked by hand.
GRID = 1000
BITS = 128


@dataclass(frozen=True)
class Outcome:
    """What a search saw: the case that breaks the statement, if any, else the one that came nearest."""

    variant: str
    seed: int
    tried: int
    budget: int
    broken: bool
    excess: float
    case: Mapping[str, Fraction]
    # What the numbers of a case stand for, where their names do not say it.
    reads: str
    seconds: float


def variants(claim: Claim) -> list[str]:
    """What can be attacked: the claim, its correction, and what was broken on purpose."""
    return [STATED, *([AMENDED] if claim.amended else []), *claim.sabotage]


def check_variant(claim: Claim, variant: str) -> None:
    """Raise where a claim has no variant of this name."""
    if variant not in variants(claim):
        known = ", ".join(map(repr, variants(claim)))
        raise ParameterError("variant", repr(variant), f"is not a variant of {claim.id}", f"one of {known}")


class Trial(NamedTuple):
    """One case that was tried: its numbers in the order of the falsifier's ranges, and by how much it breaks a variant.

    `excess` is None where balls cannot evaluate the case; `nearest` says that no case before came as near.
    """

    number: int
    case: tuple[Fraction, ...]
    excess: float | None
    broken: bool
    nearest: bool


def trials(claim: Claim, variant: str = STATED, seed: int = 0) -> Iterator[Trial]:
    """Cases without end, each evaluated in balls: the same ones for the same seed, however far one goes."""
    excess_of, subject, falsifier = _attacked(claim, variant)
    ends = [(span[0], span[-1]) for span in falsifier.ranges.values()]
    grids = _grids(falsifier)
    rng, most, nearest = random.Random(seed), -float("inf"), (Fraction(0),) * len(ends)
    for number in itertools.count(1):
        # Every other case is anywhere, with ends and ties that chance alone seldom has; the rest near the nearest.
        drawn = _anywhere(rng, ends) if number % 2 else _nearby(rng, ends, nearest)
        case = tuple(Fraction(round(x * grid), grid) for x, grid in zip(drawn, grids, strict=True))
        value = _evaluated(excess_of, subject, case, grids)
        broken = bool(value > 0) or (falsifier.strict and bool(value >= 0))
        excess = float(value.mid()) if value.is_finite() else None
        nearer = excess is not None and (broken or excess > most)
        if nearer and excess is not None:
            most, nearest = excess, case
        yield Trial(number, case, excess, broken, nearer)


def search(claim: Claim, variant: str = STATED, cases: int = 2000, seed: int = 0, seconds: float = 10.0) -> Outcome:
    """The outcome of a search that stops at the first violation, after so many cases, or when its time is up."""
    if not 1 <= cases <= MOST_CASES:
        raise ParameterError("cases", cases, f"must lie between 1 and {MOST_CASES:,}", "try 2000")
    start, most = time.monotonic(), -float("inf")
    _, _, falsifier = _attacked(claim, variant)
    nearest: Sequence[Fraction] = [Fraction(0)] * len(falsifier.ranges)
    for trial in trials(claim, variant, seed):
        if trial.nearest and trial.excess is not None:
            most, nearest = trial.excess, trial.case
        if trial.broken or trial.number == cases or time.monotonic() - start > seconds:
            break
    named = dict(zip(falsifier.ranges, nearest, strict=True))
    reads = falsifier.stated.__doc__ or ""
    return Outcome(variant, seed, trial.number, cases, trial.broken, most, named, reads, time.monotonic() - start)


def excess_along(
    claim: Claim, variant: str, case: Sequence[Fraction], place: int, points: int = 41
) -> Iterator[tuple[float, float]]:
    """By how much a variant is broken as one number of a case runs through its range and the others stay.

    Where balls cannot evaluate a case, its point is left out.
    """
    excess_of, subject, falsifier = _attacked(claim, variant)
    grids = _grids(falsifier)
    span = list(falsifier.ranges.values())[place]
    low, high, grid = Fraction(span[0]), Fraction(span[-1]), grids[place]
    places = {Fraction(round((low + (high - low) * i / (points - 1)) * grid), grid) for i in range(points)}
    for x in sorted(places | {case[place]}):
        value = _evaluated(excess_of, subject, (*case[:place], x, *case[place + 1 :]), grids)
        if value.is_finite():
            yield float(x), float(value.mid())


def _attacked(claim: Claim, variant: str) -> tuple[Excess, Any, Falsifier]:
    """What evaluates a case of a variant, what it is evaluated on, and where cases lie."""
    check_variant(claim, variant)
    falsifier = claim.falsifier
    if falsifier is None:
        raise ParameterError(f"claim {claim.id}: falsifier", None, "is needed to search", "say where to look for cases")
    # Of a claim that was corrected, what is broken on purpose is the correction.
    excess = falsifier.stated if variant == STATED else falsifier.amended or falsifier.stated
    return excess, claim.sabotage.get(variant, claim.subject), falsifier


def _grids(falsifier: Falsifier) -> list[int]:
    return [1 if isinstance(span, range) else GRID for span in falsifier.ranges.values()]


def _evaluated(excess_of: Excess, subject: Any, case: Sequence[Fraction], grids: Sequence[int]) -> Any:
    """The excess of one case, a ball."""
    with intervals.precision(BITS):
        numbers = (int(x) if grid == 1 else intervals.ball(x) for x, grid in zip(case, grids, strict=True))
        return excess_of(subject, *numbers)


def _anywhere(rng: random.Random, ranges: Sequence[tuple[float, float]]) -> list[float]:
    drawn: list[float] = []
    for place, ends in enumerate(ranges):
        alike = [x for x, others in zip(drawn, ranges[:place], strict=True) if others == ends]
        luck = rng.random()
        if luck < 0.1:
            drawn.append(rng.choice(ends))
        else:
            drawn.append(rng.choice(alike) if luck < 0.2 and alike else rng.uniform(*ends))
    return drawn


def _nearby(rng: random.Random, ranges: Sequence[tuple[float, float]], nearest: Sequence[Fraction]) -> list[float]:
    """Some of its numbers moved, by little or by much: all at once, a step towards a corner would seldom be one."""
    reach, sure = 10.0 ** rng.uniform(-3, -0.5), rng.randrange(len(ranges))
    moved = [float(x) for x in nearest]
    for place, (low, high) in enumerate(ranges):
        if place == sure or rng.random() < 0.4:
            moved[place] = min(max(moved[place] + rng.gauss(0, reach) * (high - low), low), high)
    return moved
