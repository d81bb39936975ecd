"""How noise on the keys could do less, or more, to a query than is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue.noise import Scaled, Stretch
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt


def _turned(turn: arb) -> tuple[tuple[arb, arb], tuple[arb, arb]]:
    """Two orthonormal means, turned in their plane."""
    sine, cosine = (2 * arb.pi() * turn).sin_cos()
    return (cosine, sine), (-sine, cosine)


def _still_averages(variance: Any) -> Excess:
    def excess(case: Numbers) -> arb:
        alpha, beta = 10 ** -case[0], 10 ** case[1]
        # To average is to have both weights within ¼ of ½, which is |gap| ≤ ln 3, at least every other time.
        return arb(1) / 2 - (arb(3).log() / (8 * alpha * beta * beta).sqrt()).erf()

    return excess


def _variance(variance: Any) -> Excess:
    def excess(case: Numbers) -> arb:
        alpha, beta = 10 ** -case[0], 10 ** case[1]
        one, two = _turned(case[2])
        query = [beta * (a + b) for a, b in zip(one, two, strict=True)]
        # Each of the two keys moves by itself, each coordinate with variance α.
        true = 2 * alpha * intervals.dot(query, query)
        return abs(variance(alpha, beta) / true - 1)

    return excess


def _one_or_other(stretch: Stretch) -> Excess:
    lengths = [intervals.ball(Fraction(c)) for c in stretch]

    def excess(case: Numbers) -> arb:
        eps, n = case
        ratio = n / eps
        broken = []
        for length, root in zip(lengths, (1 / ratio.sqrt(), ratio.sqrt()), strict=True):
            first = (length * ratio.log()).exp()
            weights = [term / (first + ratio + n - 2) for term in (first, ratio)]
            broken.append(abs(weights[0] / weights[1] / root - 1))
        return most(broken)

    return excess


def _within_reach(scaled: Scaled) -> Excess:
    def excess(case: Numbers) -> arb:
        beta, x, _ = case
        stated = 1 / (1 + (beta * (1 - x)).exp())
        return (abs(x - 1) - arb(1) / 2).max(abs(intervals.softmax([beta * x, beta])[1] - stated))

    return excess


def _logistic(scaled: Scaled) -> Excess:
    weights = [balled(weight, 2) for weight in (scaled.weight_a, scaled.weight_b)]
    spread = intervals.ball(Fraction(scaled.variance)).sqrt()

    def excess(case: Numbers) -> arb:
        beta, x, turn = case
        true = intervals.softmax([beta * x, beta])
        # Along its own mean, a covariance of ½μμᵀ has this variance.
        mean, _ = _turned(turn)
        along = intervals.dot(mean, mean) ** 2 / 2
        chances = [intervals.normal_cdf((x - 1) / sigma) for sigma in (spread, along.sqrt())]
        apart = [abs(weight(beta, x) - share) for weight, share in zip(weights, true, strict=True)]
        return most([*apart, abs(chances[0] - chances[1])])

    return excess


HUNTS: Mapping[str, Hunt] = {
    "noise-isotropic": Hunt(
        {"−log₁₀α": (2, 8), "log₁₀β": (0, 5), "turn": (0, 1)},
        _still_averages,
        _variance,
        reads="Two keys with orthonormal means, turned by a part of a full turn.",
    ),
    "noise-one-key-discrete": Hunt({"ε": (0.01, 0.99), "n": (2, 1000)}, _one_or_other, whole=frozenset("n")),
    "noise-one-key-gauss": Hunt(
        {"β": (0.1, 20), "X": (-2, 4), "turn": (0, 1)},
        _within_reach,
        _logistic,
        reads="Key a is X times its mean, which is turned by a part of a full turn.",
    ),
}
