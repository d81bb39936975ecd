"""Which points no other point beats."""

from __future__ import annotations

from collections.abc import Sequence


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For every (cost, error), whether no other point is at least as good in both and better in one.

    >>> frontier([(1.0, 1e-7), (0.5, 1e-2), (0.7, 1e-1)])
    [True, True, False]
    """
    return [not any(_beats(other, point) for other in points) for point in points]


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b
