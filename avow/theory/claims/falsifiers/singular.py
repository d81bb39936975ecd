"""How singular values could hold more of a matrix, or less, than is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _values(entries: Numbers) -> list[arb]:
    """The singular values of a matrix of three rows and two columns: roots of AᵀA's eigenvalues, in closed form."""
    one, two = entries[0::2], entries[1::2]
    a, b, c = intervals.dot(one, one), intervals.dot(one, two), intervals.dot(two, two)
    apart = intervals.norm([a - c, 2 * b])
    # The smaller eigenvalue is the determinant over the larger: nothing cancels, and none is below zero.
    larger = (a + c + apart) / 2
    crossed = [one[i] * two[j] - one[j] * two[i] for i, j in ((0, 1), (0, 2), (1, 2))]
    return [larger.sqrt(), intervals.norm(crossed) / larger.sqrt()]


def _energy(energy: Callable[[Any], Any]) -> Excess:
    part = balled(energy, 1)
    return lambda entries: abs(total(part(sigma) for sigma in _values(entries)) - intervals.dot(entries, entries))


def _kth(bound: Callable[[Any, Any], Any]) -> Excess:
    def excess(entries: Numbers) -> arb:
        square = intervals.dot(entries, entries)
        return most([sigma * sigma - bound(square, k + 1) for k, sigma in enumerate(_values(entries))])

    return excess


def _spectral(kept: Callable[[Any], Any]) -> Excess:
    def excess(entries: Numbers) -> arb:
        values, length = _values(entries), intervals.norm(entries)
        broken = []
        for k in (1, 2):
            count = max(kept(k), 0)
            # What B keeps beyond k − 1 must be nothing, and what it leaves short enough.
            broken += values[k - 1 : count]
            broken += [left - length / arb(k).sqrt() for left in values[count:][:1]]
        return most(broken)

    return excess


# Entries that are never all zero: a matrix of zeros has nothing to say here.
_ENTRIES = {"a₁₁": (0.1, 2.0)} | numbered("a₁₂ a₂₁ a₂₂ a₃₁ a₃₂", -2, 2)

_READS = "A matrix of three rows and two columns."

HUNTS: Mapping[str, Hunt] = {
    "svd-energy": Hunt(_ENTRIES, _energy, reads=_READS),
    "svd-kth": Hunt(_ENTRIES, _kth, reads=_READS),
    "svd-spectral": Hunt(_ENTRIES, _spectral, reads=_READS),
}
