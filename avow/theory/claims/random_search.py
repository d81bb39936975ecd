"""The search for a counterexample: cases drawn at random and climbed from, each evaluated in balls.

What is found is a violation for certain, since balls never say so otherwise. What is not found proves nothing: a search
sees a few thousand points, and a claim speaks of all of them.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb

from avow.errors import ParameterError
from avow.numerics import intervals
from avow.theory.claims.claim import Claim
from avow.theory.claims.toolbox import rounded
from avow.theory.constructions.formulas import compiled

STATED, AMENDED = "as stated", "what is true instead"
MOST_CASES = 100_000
# Cases are short decimals, so that what is found can be read and checked by hand.
GRID = 1000
BITS = 128

Excess = Callable[..., arb]
"""By how much a case breaks a statement, from its subject and one ball for each number: above zero it does.

An equality is broken by the size of the difference of its sides, an inequality by what one side has over the other.
"""


def stored(number: Callable[[], arb], dtype: torch.dtype) -> arb:
    """A real number as a type holds it, exactly; what overflows is the largest number there."""
    value = rounded(number, dtype)
    return intervals.ball(value if isinstance(value, Fraction) else torch.finfo(dtype).max)


def whole(x: arb) -> int:
    """The number that a ball counts."""
    return round(float(x.mid()))


@functools.cache
def interval_function(function: Callable[..., Any], count: int) -> Callable[..., arb]:
    """A function of symbols, as claims have them, as a function of so many balls."""
    symbols = [sympy.Dummy(f"x{i}", real=True) for i in range(count)]
    at = compiled(function(*symbols), symbols)
    return lambda *numbers: at(numbers)


class Falsifier(NamedTuple):
    """How to search for a counterexample to a claim: the numbers of a case with their ranges, and its excess."""

    ranges: Mapping[str, tuple[float, float]]
    stated: Excess
    amended: Excess | None = None
    # Numbers that count something.
    whole: frozenset[str] = frozenset()
    # Whether equality, where balls can be sure of it, breaks the statement too.
    strict: bool = False
    # What the numbers of a case stand for, where their names do not say it.
    reads: str = ""


def numbered(names: str, low: float, high: float) -> dict[str, tuple[float, float]]:
    """Numbers with these names, all of one range."""
    return dict.fromkeys(names.split(), (low, high))


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
    seconds: float


def variants(claim: Claim) -> list[str]:
    """What can be attacked: the claim, its correction, and what was broken on purpose."""
    return [STATED, *([AMENDED] if claim.amended else []), *claim.sabotage]


def search(
    claim: Claim, falsifier: Falsifier, variant: str = STATED, cases: int = 2000, seed: int = 0, seconds: float = 10.0
) -> Outcome:
    """The outcome of a search that stops at the first violation, after so many cases, or when its time is up."""
    if variant not in variants(claim):
        known = ", ".join(map(repr, variants(claim)))
        raise ParameterError("variant", repr(variant), f"is not a variant of {claim.id}", f"one of {known}")
    if not 1 <= cases <= MOST_CASES:
        raise ParameterError("cases", cases, f"must lie between 1 and {MOST_CASES:,}", "try 2000")
    start, tried, most, nearest = time.monotonic(), 0, -float("inf"), [Fraction(0)] * len(falsifier.ranges)
    subject = claim.sabotage.get(variant, claim.subject)
    # Of a claim that was corrected, what is broken on purpose is the correction.
    excess = falsifier.stated if variant == STATED else falsifier.amended or falsifier.stated
    with intervals.precision(BITS):
        draws = _drawn(random.Random(seed), falsifier, cases)
        case = next(draws)
        while True:
            tried += 1
            value = excess(subject, *map(intervals.ball, case))
            broken = bool(value > 0) or (falsifier.strict and bool(value >= 0))
            if value.is_finite() and (broken or float(value.mid()) > most):
                most, nearest = float(value.mid()), case
            if broken or time.monotonic() - start > seconds:
                break
            try:
                case = draws.send(nearest)
            except StopIteration:
                break
    named = dict(zip(falsifier.ranges, nearest, strict=True))
    return Outcome(variant, seed, tried, cases, broken, most, named, time.monotonic() - start)


def _drawn(rng: random.Random, falsifier: Falsifier, cases: int) -> Generator[list[Fraction], list[Fraction]]:
    """Cases: every other one anywhere, with ends and ties that chance alone seldom has; the rest near the nearest."""
    ranges = list(falsifier.ranges.values())
    grids = [1 if name in falsifier.whole else GRID for name in falsifier.ranges]
    nearest: list[Fraction] = []
    for number in range(cases):
        fresh = not nearest or number % 2 == 0
        case = _anywhere(rng, ranges) if fresh else _nearby(rng, ranges, nearest)
        nearest = yield [Fraction(round(x * grid), grid) for x, grid in zip(case, grids, strict=True)]


def _anywhere(rng: random.Random, ranges: Sequence[tuple[float, float]]) -> list[float]:
    drawn: list[float] = []
    for place, ends in enumerate(ranges):
        alike = [x for x, others in zip(drawn, ranges[:place], strict=True) if others == ends]
        match rng.random():
            case luck if luck < 0.1:
                drawn.append(rng.choice(ends))
            case luck if luck < 0.2 and alike:
                drawn.append(rng.choice(alike))
            case _:
                drawn.append(rng.uniform(*ends))
    return drawn


def _nearby(rng: random.Random, ranges: Sequence[tuple[float, float]], nearest: Sequence[Fraction]) -> list[float]:
    """Some of its numbers moved, by little or by much: all at once, a step towards a corner would seldom be one."""
    reach, sure = 10.0 ** rng.uniform(-3, -0.5), rng.randrange(len(ranges))
    moved = [float(x) for x in nearest]
    for place, (low, high) in enumerate(ranges):
        if place == sure or rng.random() < 0.4:
            moved[place] = min(max(moved[place] + rng.gauss(0, reach) * (high - low), low), high)
    return moved
