"""Elementary functions of symbols, of balls and of floats alike: a claim writes a formula once, whatever goes in."""

from __future__ import annotations

import math
from typing import Any

import sympy
from flint import arb


def _alike(name: str) -> Any:
    def function(x: Any) -> Any:
        if isinstance(x, arb):
            return getattr(x, name)()
        return getattr(math if isinstance(x, float) else sympy, name)(x)

    return function


exp, log, sqrt, tanh = map(_alike, ("exp", "log", "sqrt", "tanh"))
