"""What a search evaluates at numbers: formulas of claims as functions of balls, and numbers as a type holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from flint import arb

from avow.numerics import intervals
from avow.theory.claims import toolbox
from avow.theory.constructions.formulas import compiled

Numbers = Sequence[arb]


def stored(number: Callable[[], arb], dtype: torch.dtype) -> arb:
    """A real number as a type holds it, exactly; what overflows is the largest number there."""
    held = toolbox.rounded(number, dtype)
    return intervals.ball(held if isinstance(held, Fraction) else torch.finfo(dtype).max)


def whole(x: arb) -> int:
    """The number that a ball counts."""
    return round(float(x.mid()))


def balled(function: Callable[..., Any], count: int) -> Callable[..., arb]:
    """A function of symbols, as claims have them, as a function of so many balls."""
    symbols = [sympy.Dummy(f"x{i}", real=True) for i in range(count)]
    at = compiled(function(*symbols), symbols)
    return lambda *numbers: at(numbers)
