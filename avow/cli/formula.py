"""A formula in x, read from what a person typed and never run as code."""

from __future__ import annotations

import ast
import math
import warnings
from typing import Any, NoReturn

from avow.errors import ParameterError

_CONSTANTS = {"pi": "pi", "e": "E"}
_LONGEST = 200
# Numbers raised to powers stay small enough to be written down.
_BASE, _EXPONENT = 10**6, 64


def parse(text: str) -> Any:
    """The SymPy expression of a formula such as `exp(-x**2) / 2`; decimals are taken as the fractions they are.

    >>> parse("0.1 * x + sqrt(2)")
    x/10 + sqrt(2)
    """
    import sympy

    if len(text) > _LONGEST:
        _refuse(f"{text[:20]}…", f"is {len(text)} characters long", f"use at most {_LONGEST}")
    try:
        # What Python would only warn of is a mistake here.
        with warnings.catch_warnings(action="error"):
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, SyntaxWarning, DeprecationWarning) as error:
        known = f"numbers, x, pi, e, + - * / **, {', '.join(_functions())}"
        raise ParameterError("formula", repr(text), "is no formula", f"use {known}") from error
    made = _read(tree.body, text)
    if made.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
        _refuse(text, "is no real number", "keep roots and logarithms to positive numbers")
    return made


def _read(node: ast.expr, text: str) -> Any:
    import sympy

    match node:
        case ast.Constant(value=int() | float() as value) if type(value) is not bool and math.isfinite(value):
            return sympy.Rational(repr(value))
        case ast.Name(id="x"):
            return sympy.Symbol("x", real=True)
        case ast.Name(id=name) if name in _CONSTANTS:
            return getattr(sympy, _CONSTANTS[name])
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_read(inner, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _read(inner, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_read(left, text), _read(right, text), text)
        case ast.BinOp(op=ast.BitXor()):
            _refuse(text, "uses ^, which is no power here", "write x**2")
        case ast.BinOp(left=left, op=operation, right=right):
            return _combined(_read(left, text), operation, _read(right, text), text)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _functions():
            return getattr(sympy, name)(_read(argument, text))
    _refuse(
        text, f"holds {ast.unparse(node)!r}, which is not known here", f"known: {', '.join(_functions())}, x, pi, e"
    )


def _combined(left: Any, operation: ast.operator, right: Any, text: str) -> Any:
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            if right.is_zero:
                _refuse(text, "divides by zero", "change the divisor")
            return left / right
    _refuse(text, "uses a sign that is not known here", "use + - * / and **")


def _power(base: Any, exponent: Any, text: str) -> Any:
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
    """Those that a network can follow, and the root, which is a power."""
    from avow.theory.constructions.formulas import FUNCTIONS

    return ("sqrt", *FUNCTIONS)
