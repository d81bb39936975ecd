"""How a key is scaled: by one of a few numbers, by a Gaussian, or by any number of a range.

A law gives the probability of a range of scales exactly: a fraction where it is discrete, a ball where it is Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from avow.errors import ParameterError
from avow.numerics import intervals
from avow.parameters import as_float, declared

if TYPE_CHECKING:
    from flint import arb

# Beyond so many standard deviations a Gaussian keeps less than 1e-18 of its mass.
REACH = 9


@dataclass(frozen=True)
class DiscreteLaw:
    """Finitely many scales with their odds, as fractions; floats are taken as the fractions they are."""

    values: tuple[Fraction, ...]
    probabilities: tuple[Fraction, ...]

    @declared("DiscreteLaw")
    def __init__(self, values: Iterable[Fraction | float], probabilities: Iterable[Fraction | float]) -> None:
        object.__setattr__(self, "values", tuple(_fraction("values", value) for value in values))
        object.__setattr__(self, "probabilities", tuple(_fraction("probabilities", p) for p in probabilities))
        if not self.values or len(self.values) != len(self.probabilities):
            raise ParameterError(
                "DiscreteLaw: probabilities",
                f"{len(self.probabilities)} numbers",
                f"must be one for each of the {len(self.values)} values, of which there is at least one",
                "try DiscreteLaw((Fraction(1, 2), Fraction(3, 2)), (Fraction(1, 2), Fraction(1, 2)))",
            )
        if len(set(self.values)) != len(self.values):
            raise ParameterError("DiscreteLaw: values", _listed(self.values), "must differ", "add up the odds of each")
        if min(self.probabilities) < 0:
            raise ParameterError(
                "DiscreteLaw: probabilities",
                _listed(self.probabilities),
                "must not be negative",
                "leave out what never comes",
            )
        if sum(self.probabilities) != 1:
            raise ParameterError(
                "DiscreteLaw: probabilities",
                _listed(self.probabilities),
                f"must sum to 1, and sum to {sum(self.probabilities)}",
                "give fractions.Fraction where a float is not exact",
            )

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> arb:
        """P(least ≤ X ≤ most)."""
        with intervals.precision(128):
            return intervals.ball(self.share(least, most))

    @declared("share")
    def share(self, least: float | Fraction, most: float | Fraction) -> Fraction:
        """P(least ≤ X ≤ most), as the fraction it is."""
        odds = zip(self.values, self.probabilities, strict=True)
        return sum((p for value, p in odds if least <= value <= most), Fraction(0))

    def __str__(self) -> str:
        odds = zip(self.values, self.probabilities, strict=True)
        return "X = " + " or ".join(f"{value} (probability {p})" for value, p in odds)


@dataclass(frozen=True)
class GaussianLaw:
    """X ~ N(mean, variance): unbounded, and below zero with probability above zero."""

    mean: float = 1.0
    variance: float = 0.5

    def __post_init__(self) -> None:
        if not math.isfinite(as_float(self.mean)):
            raise ParameterError("GaussianLaw: mean", self.mean, "must be finite", "try mean=1")
        if not 0 < as_float(self.variance) < math.inf:
            raise ParameterError(
                "GaussianLaw: variance", self.variance, "must be above 0 and finite", "try variance=0.5"
            )
        for name in ("mean", "variance"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> arb:
        """P(least ≤ X ≤ most), enclosed to some 110 bits."""
        with intervals.precision(128):
            return self._above(least) - self._above(most) if least < most else intervals.ball(0)

    def _above(self, x: float | Fraction) -> arb:
        if x in (-math.inf, math.inf):
            return intervals.ball(1 if x < 0 else 0)
        return ((intervals.ball(x) - intervals.ball(self.mean)) / (2 * intervals.ball(self.variance)).sqrt()).erfc() / 2

    def __str__(self) -> str:
        return f"X ~ N({float(self.mean):g}, {float(self.variance):g})"


@dataclass(frozen=True)
class AnyScale:
    """Every scale from `least` to `most`, without a word on how likely each is."""

    least: float
    most: float = math.inf

    def __post_init__(self) -> None:
        if not as_float(self.least) <= as_float(self.most) or self.least == math.inf:
            raise ParameterError(
                "AnyScale: least", self.least, f"must be at most most={self.most}", "try AnyScale(0.5)"
            )

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> arb:
        """1 where the range lies within the two, which is all that can be said; 0 where it does not."""
        return intervals.ball(1 if least <= self.least and self.most <= most else 0)

    def __str__(self) -> str:
        return f"any X from {float(self.least):g} to {float(self.most):g}"


Law = DiscreteLaw | GaussianLaw | AnyScale


def _fraction(name: str, x: Fraction | float) -> Fraction:
    try:
        return Fraction(x)
    except (ValueError, OverflowError, TypeError):
        raise ParameterError(f"DiscreteLaw: {name}", x, "must be a finite number", "try Fraction(1, 2)") from None


def _listed(numbers: Iterable[Fraction]) -> str:
    return "(" + ", ".join(map(str, numbers)) + ")"
