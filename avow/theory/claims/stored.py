"""Numbers as a floating-point type stores them, in formulas of claims and in proofs by balls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from flint import arb

from avow.numerics import intervals
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Measured


class Stored(Measured):
    """The number of a floating-point type nearest to a real one, by its format alone; twice the largest in place of ∞.

    A subclass names the type. It is known at numbers, not in general: a claim on it can be refuted by a case.
    """

    nargs = (1,)
    dtype: ClassVar[torch.dtype]

    def measured(self, values: Sequence[arb]) -> arb:
        try:
            found = rounded(lambda: values[0], self.dtype)
        except Unproved:
            return arb("nan")
        largest = torch.finfo(self.dtype).max
        return intervals.ball(
            found if isinstance(found, Fraction) else int(math.copysign(2, found)) * Fraction(largest)
        )


class float64(Stored):  # noqa: N801 - types are printed by their names
    dtype = torch.float64


class float32(Stored):  # noqa: N801
    dtype = torch.float32


class float16(Stored):  # noqa: N801
    dtype = torch.float16


class bfloat16(Stored):  # noqa: N801
    dtype = torch.bfloat16


def rounded(number: Callable[[], arb], dtype: torch.dtype) -> Fraction | float:
    """The number of a floating point type nearest to a real one, exactly, or ±inf where it overflows.

    `number` is asked with more bits until its ball lies strictly between two halfway points; on one, it never does.
    """
    form = torch.finfo(dtype)
    top, relative, tiny = Fraction(form.max), Fraction(form.eps), Fraction(form.tiny)

    def spacing(size: Fraction) -> Fraction:
        """From one number of the type to the next; below the smallest normal number it stays the same."""
        if size < 2 * tiny:
            return relative * tiny
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        # 2^exponent is within a factor of two of the size.
        return relative * Fraction(2) ** (exponent if Fraction(2) ** exponent <= size else exponent - 1)

    overflow, vanish = top + spacing(top) / 2, spacing(Fraction(0)) / 2

    def nearest() -> Any:
        x = number()
        if not x.is_finite():
            return None
        # Far beyond either end of the type, the number itself would be too long to write out.
        if abs(x) < intervals.ball(vanish):
            return Fraction(0)
        sign = -1 if x < 0 else 1
        magnitude = sign * x
        if magnitude > intervals.ball(overflow):
            return sign * math.inf
        mantissa, exponent = (int(part) for part in x.mid().man_exp())
        size = abs(mantissa) * Fraction(2) ** exponent
        candidate = round(size / spacing(size)) * spacing(size)
        # Half the way to either neighbour; the one below is nearer where the exponent changes.
        above, below = spacing(candidate) / 2, spacing(candidate * (1 - relative / 4)) / 2
        low, high = intervals.ball(candidate - below), intervals.ball(min(candidate + above, overflow))
        return sign * candidate if low < magnitude < high else None

    decided = intervals.decided(nearest)
    if decided is None:
        raise Unproved(f"balls cannot tell which {dtype} is nearest to {number()}")
    return decided
