"""The search for a counterexample: cases drawn at random and climbed from, each evaluated in balls.

What is found is a violation for certain, since balls never say so otherwise. What is not found proves nothing: a search
sees a few thousand points, and a claim speaks of all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from avow.errors import ParameterError
from avow.numerics import intervals
from avow.theory.claims.claim import Claim

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


def search(claim: Claim, variant: str = STATED, cases: int = 2000, seed: int = 0, seconds: float = 10.0) -> Outcome:
    """The outcome of a search that stops at the first violation, after so many cases, or when its time is up."""
    if variant not in variants(claim):
        known = ", ".join(map(repr, variants(claim)))
        raise ParameterError("variant", repr(variant), f"is not a variant of {claim.id}", f"one of {known}")
    if not 1 <= cases <= MOST_CASES:
        raise ParameterError("cases", cases, f"must lie between 1 and {MOST_CASES:,}", "try 2000")
    falsifier = claim.falsifier
    if falsifier is None:
        raise ParameterError(f"claim {claim.id}: falsifier", None, "is needed to search", "say where to look for cases")
    subject = claim.sabotage.get(variant, claim.subject)
    # Of a claim that was corrected, what is broken on purpose is the correction.
    excess = falsifier.stated if variant == STATED else falsifier.amended or falsifier.stated
    ends = [(span[0], span[-1]) for span in falsifier.ranges.values()]
    grids = [1 if isinstance(span, range) else GRID for span in falsifier.ranges.values()]
    start, rng, most, nearest = time.monotonic(), random.Random(seed), -float("inf"), [Fraction(0)] * len(ends)
    with intervals.precision(BITS):
        for number in range(cases):
            # Every other case is anywhere, with ends and ties that chance alone seldom has; the rest near the nearest.
            drawn = _nearby(rng, ends, nearest) if number % 2 else _anywhere(rng, ends)
            case = [Fraction(round(x * grid), grid) for x, grid in zip(drawn, grids, strict=True)]
            numbers = (int(x) if grid == 1 else intervals.ball(x) for x, grid in zip(case, grids, strict=True))
            value = excess(subject, *numbers)
            broken = bool(value > 0) or (falsifier.strict and bool(value >= 0))
            if value.is_finite() and (broken or float(value.mid()) > most):
                most, nearest = float(value.mid()), case
            if broken or time.monotonic() - start > seconds:
                break
    named = dict(zip(falsifier.ranges, nearest, strict=True))
    reads = falsifier.stated.__doc__ or ""
    return Outcome(variant, seed, number + 1, cases, broken, most, named, reads, time.monotonic() - start)


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
