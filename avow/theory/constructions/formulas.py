"""SymPy expressions as functions of balls: what is said in symbols, enclosed at numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from avow.extras import require
from avow.numerics import intervals

FUNCTIONS = ("exp", "log", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "erf")


def compiled(expression: Any, letters: Sequence[Any]) -> Callable[[Sequence[intervals.arb]], intervals.arb]:
    """An expression as a function of the balls that stand for its letters, symbols or entries of arrays.

    It holds the expression's values, and is not finite where it cannot tell.
    """
    require("flint", "sympy", purpose="to enclose formulas")
    import sympy
    from flint import arb

    expression = sympy.sympify(expression)
    if expression in letters:
        place = letters.index(expression)
        return lambda x: x[place]
    parts = [compiled(part, letters) for part in expression.args]
    match expression:
        case sympy.Rational() | sympy.Float():
            exact = Fraction(sympy.Rational(expression))
            return lambda x: intervals.ball(exact)
        case sympy.pi:
            return lambda x: arb.pi()
        case sympy.E:
            return lambda x: arb.const_e()
        case sympy.Add():
            return lambda x: intervals.total(part(x) for part in parts)
        case sympy.Mul():
            return lambda x: math.prod((part(x) for part in parts), start=arb(1))
        case sympy.Pow(exp=sympy.Rational() as exponent):
            return lambda x: _power(parts[0](x), int(exponent.p), int(exponent.q))
        case sympy.Pow():
            return lambda x: parts[0](x) ** parts[1](x)
        case sympy.Abs():
            return lambda x: abs(parts[0](x))
        case sympy.sign():
            return lambda x: parts[0](x).sgn()
        case sympy.DiracDelta():
            return lambda x: arb(0) if parts[0](x) != 0 else arb.nan()
    method = type(expression).__name__
    if method not in FUNCTIONS:
        raise TypeError(f"{expression} is nothing that balls are known for here")
    return lambda x: getattr(parts[0](x), method)()


def _power(base: intervals.arb, up: int, root: int) -> intervals.arb:
    """base^(up/root), on the part of the base where that is a real number."""
    from flint import arb

    if root > 1:
        # A ball around [0, h] always reaches a little below zero, where there is no root to enclose.
        if base < 0:
            return arb.nan()
        base = base.root(root) if base > 0 else arb(0).union(base.upper().root(root))
    if base > 0 or base < 0 or base == 0:
        return base**up
    if up < 0:
        return arb.nan()
    most = base.abs_upper() ** up
    return arb(0).union(most) if up % 2 == 0 else (-most).union(most)
