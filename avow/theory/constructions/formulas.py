"""Formulas: read from text without running it, and as functions of balls that enclose their values."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from avow.errors import ParameterError
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


_CONSTANTS = {"pi": "pi", "e": "E"}
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200
# Numbers raised to powers stay small enough to be written down.
_BASE, _EXPONENT = 10**6, 64


def parse(text: str, letters: Mapping[str, Any] | None = None) -> Any:
    """The SymPy expression of a formula such as `exp(-x**2) / 2`; decimals are taken as the fractions they are.

    Its letters are those given, by default a real x.

    >>> parse("0.1 * x + sqrt(2)")
    x/10 + sqrt(2)
    """
    require("sympy", purpose="to read formulas")
    import sympy

    letters = {"x": sympy.Symbol("x", real=True)} if letters is None else letters
    if len(text) > _LONGEST:
        _refuse(f"{text[:20]}…", f"is {len(text)} characters long", f"use at most {_LONGEST}")
    try:
        # What Python would only warn of is a mistake here.
        with warnings.catch_warnings(action="error"):
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, SyntaxWarning, DeprecationWarning) as error:
        known = f"numbers, {', '.join(letters)}, pi, e, + - * / **, {', '.join(_functions())}"
        raise ParameterError("formula", repr(text), "is not a formula", f"use {known}") from error
    expression = _read(tree.body, text, letters)
    if expression.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
        _refuse(text, "is not a real number", "keep roots and logarithms to positive numbers")
    return expression


def _read(node: ast.expr, text: str, letters: Mapping[str, Any]) -> Any:
    import sympy

    match node:
        case ast.Constant(value=int() | float() as value) if type(value) is not bool and math.isfinite(value):
            return sympy.Rational(repr(value))
        case ast.Name(id=name) if name in letters:
            return letters[name]
        case ast.Name(id=name) if name in _CONSTANTS:
            return getattr(sympy, _CONSTANTS[name])
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_read(inner, text, letters)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _read(inner, text, letters)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _raised(_read(left, text, letters), _read(right, text, letters), text)
        case ast.BinOp(op=ast.BitXor()):
            _refuse(text, "uses ^, which is not a power here", "write x**2")
        case ast.BinOp(left=left, op=operation, right=right):
            if type(operation) not in _OPERATORS:
                _refuse(text, "uses an operator that is not known here", "use + - * / and **")
            divisor = _read(right, text, letters)
            if isinstance(operation, ast.Div) and divisor.is_zero:
                _refuse(text, "divides by zero", "change the divisor")
            return _OPERATORS[type(operation)](_read(left, text, letters), divisor)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _functions():
            return getattr(sympy, name)(_read(argument, text, letters))
    rule = f"holds {ast.unparse(node)!r}, which is not known here"
    _refuse(text, rule, f"known: {', '.join(_functions())}, {', '.join(letters)}, pi, e")


def _raised(base: Any, exponent: Any, text: str) -> Any:
    """A power, unless it is a number too long to write: exact arithmetic would never come back from 9**9**9."""
    if exponent.is_Rational and abs(exponent) > _EXPONENT:
        _refuse(text, f"holds a power above {_EXPONENT}", f"use powers of at most {_EXPONENT}")
    if base.is_Rational and exponent.is_Rational and max(abs(base.p), base.q) > _BASE:
        _refuse(text, f"raises a number beyond {_BASE:,} to a power", "write a smaller number")
    if base.is_zero and exponent.is_negative:
        _refuse(text, "divides by zero", "change the divisor")
    return base**exponent


def _refuse(text: str, rule: str, remedy: str) -> NoReturn:
    raise ParameterError("formula", repr(text), rule, remedy)


def _functions() -> tuple[str, ...]:
    """The functions that balls are known for, the root, which is a power, and another name of the logarithm."""
    return ("sqrt", "ln", *FUNCTIONS)
