"""How random features could have another mean or variance, or be useless however many there are."""

from __future__ import annotations

from collections.abc import Mapping

from flint import arb

from avow.numerics import intervals
from avow.theory.claims.catalogue.efficient import Formula
from avow.theory.claims.catalogue.features import far_below
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _mean(factor: Formula) -> Excess:
    side = balled(factor, 1)

    def excess(case: Numbers) -> arb:
        m, query, key = case[0], case[1:3], case[3:]
        both = [a + b for a, b in zip(query, key, strict=True)]
        # E e^(w·z) = e^(‖z‖²/2) for w ~ N(0, I).
        one = ((intervals.dot(both, both) - intervals.dot(query, query) - intervals.dot(key, key)) / 2).exp()
        return abs(m * side(m) ** 2 * one / intervals.dot(query, key).exp() - 1)

    return excess


def _useful(variance: Formula) -> Excess:
    def excess(case: Numbers) -> arb:
        doublings, cut, *sum_ = case
        radius = intervals.norm(sum_)
        # To be useful, as the ledger reads it: at least half of the truth, at least every other time.
        return arb(1) / 2 - far_below(radius, arb(2) ** doublings, cut)

    return excess


def _spread(variance: Formula) -> Excess:
    relative = balled(variance, 2)

    def excess(case: Numbers) -> arb:
        doublings, _, *sum_ = case
        m, square = arb(2) ** doublings, intervals.dot(sum_, sum_)
        # One feature is e^(w·z − ‖z‖²/2) of the truth: of mean one, and of mean square E e^(2w·z)·e^(−‖z‖²).
        second = (2 * square - square).exp()
        return abs(relative(square, m) * m - (second - 1)) / second

    return excess


HUNTS: Mapping[str, Hunt] = {
    "features-unbiased": Hunt(
        {"m": (1, 512)} | numbered("q₁ q₂ k₁ k₂", -2, 2),
        lambda factor: _mean(factor.stated),
        lambda factor: _mean(factor.mended),
        whole=frozenset("m"),
    ),
    "features-variance": Hunt(
        {"log₂m": (0, 24), "cut": (0, 30)} | numbered("q₁+k₁ q₂+k₂", -7, 7),
        _useful,
        _spread,
        whole=frozenset({"log₂m"}),
        reads="m is a power of two; the estimate is cut at e to the power of the cut to bound its law.",
    ),
}
