"""The search for a counterexample: cases drawn at random and climbed from, each evaluated in balls.

What is found is a violation for certain, since balls never say so otherwise. What is not found proves nothing: a search
sees a few thousand points, and a claim speaks of all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb, fmpq

from avow.claims.claim import Claim
from avow.errors import ParameterError
from avow.maths import balls

STATED, AMENDED = "as stated", "what is true instead"
MOST_CASES = 100_000
# Cases are short decimals, so that what is found can be read and checked by hand.
GRID = 1000
BITS = 128

# By how much a case, one ball for each of its numbers, breaks a statement: above zero it does.
Excess = Callable[[Sequence[arb]], arb]


class Hunt(NamedTuple):
    """The numbers of a case with their ranges, and the excess of a case for a subject of the claim."""

    ranges: Mapping[str, tuple[float, float]]
    stated: Callable[[Any], Excess]
    amended: Callable[[Any], Excess] | None = None
    # Numbers that count something.
    whole: frozenset[str] = frozenset()


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


def hunted(
    claim: Claim, hunt: Hunt, variant: str = STATED, cases: int = 2000, seed: int = 0, seconds: float = 10.0
) -> Outcome:
    """The outcome of a search that stops at the first violation, after so many cases, or when its time is up."""
    if variant not in variants(claim):
        known = ", ".join(map(repr, variants(claim)))
        raise ParameterError("variant", repr(variant), f"is none of {claim.id}", f"one of {known}")
    if not 1 <= cases <= MOST_CASES:
        raise ParameterError("cases", cases, f"must lie between 1 and {MOST_CASES:,}", "try 2000")
    excess = _attacked(claim, hunt, variant)
    start, tried, most, nearest = time.monotonic(), 0, -float("inf"), [Fraction(0)] * len(hunt.ranges)
    with balls.precision(BITS):
        draws = _drawn(random.Random(seed), hunt, cases)
        case = next(draws)
        while True:
            tried += 1
            found = excess([arb(fmpq(x.numerator, x.denominator)) for x in case])
            broken = bool(found > 0)
            if found.is_finite() and (broken or float(found.mid()) > most):
                most, nearest = float(found.mid()), case
            if broken or time.monotonic() - start > seconds:
                break
            try:
                case = draws.send(nearest)
            except StopIteration:
                break
    named = dict(zip(hunt.ranges, nearest, strict=True))
    return Outcome(variant, seed, tried, cases, broken, most, named, time.monotonic() - start)


def _attacked(claim: Claim, hunt: Hunt, variant: str) -> Excess:
    subject = claim.sabotage.get(variant, claim.subject)
    # Of a claim that was corrected, what is broken on purpose is the correction.
    corrected = hunt.amended is not None and variant != STATED
    return hunt.amended(subject) if corrected and hunt.amended else hunt.stated(subject)


def _drawn(rng: random.Random, hunt: Hunt, cases: int) -> Generator[list[Fraction], list[Fraction]]:
    """Cases: every other one anywhere, the ends more often than chance has them; the rest near the nearest so far."""
    ranges = list(hunt.ranges.values())
    grids = [1 if name in hunt.whole else GRID for name in hunt.ranges]
    nearest: list[Fraction] = []
    for number in range(cases):
        if not nearest or number % 2 == 0:
            case = [rng.choice(ends) if rng.random() < 0.1 else rng.uniform(*ends) for ends in ranges]
        else:
            reach = 10.0 ** rng.uniform(-3, -0.5)
            case = [
                min(max(float(x) + rng.gauss(0, reach) * (high - low), low), high)
                for x, (low, high) in zip(nearest, ranges, strict=True)
            ]
        nearest = yield [Fraction(round(x * grid), grid) for x, grid in zip(case, grids, strict=True)]


def balled(function: Callable[..., Any], count: int) -> Callable[..., arb]:
    """A function of symbols, as claims have them, as a function of so many balls."""
    symbols = [sympy.Dummy(f"x{i}", real=True) for i in range(count)]
    compiled = _compiled(sympy.sympify(function(*symbols)), {symbol: i for i, symbol in enumerate(symbols)})
    return lambda *numbers: compiled(numbers)


def _compiled(expression: Any, places: Mapping[Any, int]) -> Callable[[Sequence[arb]], arb]:
    parts = [_compiled(part, places) for part in expression.args]
    match expression:
        case sympy.Symbol():
            place = places[expression]
            return lambda x: x[place]
        case sympy.Rational():
            exact = fmpq(int(expression.p), int(expression.q))
            return lambda x: arb(exact)
        case sympy.Add():
            return lambda x: sum((part(x) for part in parts), arb(0))
        case sympy.Mul():
            return lambda x: _product(part(x) for part in parts)
        case sympy.Pow(exp=sympy.Integer() as exponent):
            whole = int(exponent)
            return lambda x: parts[0](x) ** whole
        case sympy.Pow(exp=sympy.Rational(p=1, q=2)):
            return lambda x: parts[0](x).sqrt()
        case sympy.Pow():
            return lambda x: parts[0](x) ** parts[1](x)
        case sympy.exp() | sympy.log() | sympy.tanh():
            name = type(expression).__name__
            return lambda x: getattr(parts[0](x), name)()
        case sympy.Abs():
            return lambda x: abs(parts[0](x))
    raise TypeError(f"{expression} is nothing that balls are known for here")


def _product(balls_: Iterator[arb]) -> arb:
    made = arb(1)
    for ball in balls_:
        made *= ball
    return made
