"""Numbers and matrices that carry their own error: python-flint's balls, and the operations proofs need of them.

A ball's comparison is true only when it holds for every number of both balls, so a proof is a comparison that came out
true, and what came out false is merely open: `decided` asks again with more bits.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from avow.extras import require

if TYPE_CHECKING:
    from flint import arb as arb
    from flint import arb_mat as arb_mat

T = TypeVar("T")
# Two floats with the true number between them.
Enclosure = tuple[float, float]
# Enough for every proof here: beyond it, two numbers that still cannot be distinguished are taken for equal.
MOST_BITS = 1 << 14


@functools.cache
def _flint() -> Any:
    require("flint", purpose="for rigorous proofs")
    import flint

    return flint


@contextlib.contextmanager
def precision(bits: int) -> Iterator[None]:
    """Balls of so many bits inside."""
    ctx = _flint().ctx
    before = ctx.prec
    ctx.prec = bits
    try:
        yield
    finally:
        ctx.prec = before


def ball(x: float | int | str | Fraction | Tensor) -> arb:
    """A float or a whole number as it is, exactly; a fraction, and a string as the decimal it spells, enclosed."""
    flint = _flint()
    if isinstance(x, Fraction):
        return flint.arb(flint.fmpq(x.numerator, x.denominator))
    return flint.arb(float(x) if isinstance(x, Tensor) else x)


def grid(x: Tensor) -> arb_mat:
    """A matrix as flint's own, exactly: its products and solutions are enclosures too, and quick."""
    return _flint().arb_mat(*x.shape, x.detach().double().flatten().tolist())


def interval(low: float | Fraction, high: float | Fraction) -> arb:
    """A ball that holds every number from `low` to `high`."""
    return ball(low).union(ball(high))


def total(numbers: Iterable[arb]) -> arb:
    return sum(numbers, ball(0))


def most(numbers: Iterable[arb]) -> arb:
    """The largest of some numbers."""
    return functools.reduce(lambda a, b: a.max(b), numbers)


def least(numbers: Iterable[arb]) -> arb:
    """The smallest of some numbers."""
    return functools.reduce(lambda a, b: a.min(b), numbers)


def dot(a: Sequence[arb], b: Sequence[arb]) -> arb:
    return total(x * y for x, y in zip(a, b, strict=True))


def norm(a: Sequence[arb]) -> arb:
    """Euclidean length; a ball whose square reaches below zero is cut at zero."""
    square = dot(a, a)
    if square >= 0:
        return square.sqrt()
    half = square.abs_upper().sqrt() / 2
    return _flint().arb(half.mid(), half.abs_upper())


def softmax(logits: Sequence[arb]) -> list[arb]:
    """Weights of every logit; shifting by one of them cancels exactly."""
    top = max(logits, key=lambda x: x.mid())
    weights = [(x - top).exp() for x in logits]
    whole = total(weights)
    return [weight / whole for weight in weights]


def normal_cdf(x: arb) -> arb:
    r""":math:`\Phi(x)`: how likely a standard normal number is at most x."""
    return (-x / ball(2).sqrt()).erfc() / 2


def upper(x: arb) -> float:
    """A float that is no smaller than any number of the ball."""
    if not x.is_finite():
        return math.inf
    high = x.upper()
    bound = float(high)
    while not ball(bound) >= high:
        bound = math.nextafter(bound, math.inf)
    return bound


def lower(x: arb) -> float:
    """A float that is no larger than any number of the ball."""
    return -upper(-x)


def ends(x: arb) -> Enclosure:
    """Two floats that a ball lies between."""
    return lower(x), upper(x)


def decided(question: Callable[[], T | None], bits: int = 64, most: int = MOST_BITS) -> T | None:
    """The first answer that is not None, asked with more and more bits; None where even the most do not decide."""
    while bits <= most:
        with precision(bits):
            answer = question()
        if answer is not None:
            return answer
        bits *= 2
    return None


def stacked(rows: Iterable[Sequence[arb]]) -> arb_mat:
    """A matrix from its rows."""
    return _flint().arb_mat([list(row) for row in rows])


def rounded(x: arb_mat, dtype: torch.dtype) -> Tensor:
    """The middles of the balls, rounded to a type."""
    flat = [float(entry.mid()) for entry in x.entries()]
    return torch.tensor(flat, dtype=torch.float64).reshape(x.nrows(), x.ncols()).to(dtype)


def frobenius(x: arb_mat) -> arb:
    """The Frobenius norm."""
    return norm(x.entries())


def longest(x: arb_mat) -> arb:
    """The largest norm of a row."""
    return most(norm(row) for row in x.tolist())
