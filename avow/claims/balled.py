"""Formulas of claims as functions of balls: what SymPy proves for symbols, a search evaluates at numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from flint import arb, fmpq

from avow.claims import toolbox

Numbers = Sequence[arb]


def exactly(x: Fraction | int) -> arb:
    """A fraction as a ball of the precision there is."""
    return arb(fmpq(x.numerator, x.denominator))


def stored(number: Callable[[], arb], dtype: torch.dtype) -> arb:
    """A real number as a type holds it, exactly; what overflows is the largest number there."""
    held = toolbox.rounded(number, dtype)
    return exactly(held) if isinstance(held, Fraction) else arb(torch.finfo(dtype).max)


def whole(x: arb) -> int:
    """The number that a ball counts."""
    return round(float(x.mid()))


def most(found: Sequence[arb]) -> arb:
    return functools.reduce(lambda a, b: a.max(b), found)


def least(found: Sequence[arb]) -> arb:
    return functools.reduce(lambda a, b: a.min(b), found)


def total(found: Iterable[arb]) -> arb:
    return sum(found, arb(0))


def balled(function: Callable[..., Any], count: int) -> Callable[..., arb]:
    """A function of symbols, as claims have them, as a function of so many balls."""
    symbols = [sympy.Dummy(f"x{i}", real=True) for i in range(count)]
    at = compiled(function(*symbols), symbols)
    return lambda *numbers: at(numbers)


def compiled(expression: Any, letters: Sequence[Any]) -> Callable[[Numbers], arb]:
    """An expression as a function of the balls that stand for its letters, symbols or entries of arrays."""
    return _compiled(sympy.sympify(expression), {letter: i for i, letter in enumerate(letters)})


def _compiled(expression: Any, places: Mapping[Any, int]) -> Callable[[Numbers], arb]:
    if expression in places:
        place = places[expression]
        return lambda x: x[place]
    parts = [_compiled(part, places) for part in expression.args]
    match expression:
        case sympy.Rational():
            exact = fmpq(int(expression.p), int(expression.q))
            return lambda x: arb(exact)
        case sympy.Add():
            return lambda x: total(part(x) for part in parts)
        case sympy.Mul():
            return lambda x: functools.reduce(lambda a, part: a * part(x), parts, arb(1))
        case sympy.Pow(exp=sympy.Integer() as exponent):
            power = int(exponent)
            return lambda x: parts[0](x) ** power
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
