"""Steps of a proof: each function checks something by machine and returns the evidence, or raises `Unproved`.

`identity`, `nonnegative`  symbolic, by SymPy          `rational`  exact arithmetic on fractions
`cover`, `enclosed`        balls over a whole domain   `law`       a probability from its exact distribution
`counterexample`           a violation, evaluated again rigorously
`search`, `frequency`      the weakest: support, never proof
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from flint import arb

from avow.claims.claim import Evidence, Unproved
from avow.maths import balls

Box = Sequence[tuple[float, float]]


def identity(left: Any, right: Any, says: str, amended: bool = False) -> Evidence:
    """Two expressions are equal, symbolically."""
    difference = sympy.simplify(sympy.expand(sympy.sympify(left) - sympy.sympify(right)))
    if difference != 0:
        raise Unproved(f"{says}: the two sides differ by {difference}")
    return Evidence("symbolic", says, {"left": sympy.latex(left), "right": sympy.latex(right)}, amended)


def nonnegative(expression: Any, says: str, amended: bool = False) -> Evidence:
    """An expression is never negative under the assumptions its symbols carry; SymPy must be able to see it."""
    expression = sympy.sympify(expression)
    for form in (expression, sympy.simplify(expression), sympy.factor(expression), sympy.expand(expression)):
        if form.is_nonnegative:
            return Evidence("symbolic", says, {"nonnegative": sympy.latex(form)}, amended)
    raise Unproved(f"{says}: cannot see that {expression} is nonnegative")


def rational(holds: bool, says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A comparison of fractions came out true; floats among the facts would betray that it was none."""
    for name, fact in facts.items():
        if isinstance(fact, float):
            raise TypeError(f"{name}={fact} is a float; exact evidence holds fractions and integers")
    if not holds:
        raise Unproved(f"{says}: does not hold for {_shown(facts)}")
    return Evidence("rational", says, {name: str(fact) for name, fact in facts.items()}, amended)


def enclosed(holds: Callable[[], bool], says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A comparison of balls is true; it is asked with more bits until it is."""
    if not balls.decided(lambda: True if holds() else None, most=4096):
        raise Unproved(f"{says}: balls cannot show it for {_shown(facts)}")
    return Evidence("balls", says, facts, amended)


def cover(
    holds: Callable[..., bool], box: Box, says: str, amended: bool = False, most: int = 20000, bits: int = 64
) -> Evidence:
    """A condition on balls is true on every piece of a box, which is halved where it is not yet.

    `holds(x, y, …)` gets one ball per side and may only return True when it is so for all their numbers.
    """
    pieces = [(0.0, 0, tuple((Fraction(low), Fraction(high)) for low, high in box))]
    tried = 0
    with balls.precision(bits):
        while pieces:
            _, _, piece = heapq.heappop(pieces)
            tried += 1
            if tried > most:
                where = ", ".join(f"[{float(low):.6g}, {float(high):.6g}]" for low, high in piece)
                raise Unproved(f"{says}: still open after {most} pieces, at {where}")
            if holds(*(_between(low, high) for low, high in piece)):
                continue
            widest = max(range(len(piece)), key=lambda i: piece[i][1] - piece[i][0])
            low, high = piece[widest]
            middle = (low + high) / 2
            for i, half in enumerate(((low, middle), (middle, high))):
                halved = (*piece[:widest], half, *piece[widest + 1 :])
                heapq.heappush(pieces, (-float(high - low), 2 * tried + i, halved))
    domain = " × ".join(f"[{low:g}, {high:g}]" for low, high in box)
    return Evidence("balls", says, {"domain": domain, "pieces": tried}, amended)


def law(probability: arb, low: float, high: float, says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A probability from its exact law lies between two numbers."""
    if not (probability >= arb(low) and probability <= arb(high)):
        raise Unproved(f"{says}: the law gives {probability}, not within [{low}, {high}]")
    return Evidence("exact law", says, {"probability": probability.str(20), **facts}, amended)


def counterexample(violated: bool, says: str, by: str, **facts: Any) -> Evidence:
    """A concrete case in which the statement fails; `by` names the arithmetic that evaluated it again."""
    if not violated:
        raise Unproved(f"{says}: this is no counterexample ({_shown(facts)})")
    return Evidence("counterexample", says, {"evaluated by": by, **facts})


def search(
    excess: Callable[[torch.Tensor], torch.Tensor],
    start: Callable[[torch.Generator], torch.Tensor],
    says: str,
    restarts: int = 64,
    steps: int = 50,
    amended: bool = False,
) -> Evidence:
    """No violation was found by climbing `excess` (violated where above zero) from random starts."""
    generator = torch.Generator().manual_seed(0)
    worst = -math.inf
    for _ in range(restarts):
        x = start(generator).requires_grad_()
        climber = torch.optim.Adam([x], lr=0.05)
        for _ in range(steps):
            value = excess(x)
            worst = max(worst, float(value.detach()))
            if worst > 0:
                raise Unproved(f"{says}: violated by {worst:.3g} at {x.detach().flatten()[:8].tolist()}")
            climber.zero_grad()
            (-value).backward()
            climber.step()
    return Evidence("search", says, {"trials": restarts * steps, "closest": worst}, amended)


def frequency(hits: int, trials: int, confidence: float = 0.999) -> tuple[float, float]:
    """A two-sided interval that holds the probability with this confidence, by Hoeffding: rigorous, never normal."""
    reach = math.sqrt(math.log(2 / (1 - confidence)) / (2 * trials))
    return max(0.0, hits / trials - reach), min(1.0, hits / trials + reach)


def _between(low: Fraction, high: Fraction) -> arb:
    ends = [arb(end.numerator) / arb(end.denominator) for end in (low, high)]
    return ends[0].union(ends[1])


def _shown(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in facts.items()) or "the case given"
