"""Where lines that follow a function may meet: each reaches as far as the band around the function lets it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from avow.errors import NonFiniteError, ParameterError, ToleranceUnreachable

if TYPE_CHECKING:
    from avow.theory.constructions.relu_curves import Curve

# A line is tried against this many points of the function; what they miss, the balls find.
SAMPLES = 129


def knots_of(curve: Curve, low: float, high: float, band: float, most: int) -> list[tuple[float, float]]:
    """Where lines meet, and how far above the function: each line reaches as far as `band` lets it."""
    starts = [(low, rise) for rise in (0.0, -band, band)]
    firsts = [(start, _reached(curve, start, high, (high - low) / 1024, band)) for start in starts]
    knots = [*max(firsts, key=lambda line: line[1][0])]
    while knots[-1][0] < high:
        if len(knots) > most:
            raise ParameterError(
                "relu_piecewise: eps", f"{band:.2g}", f"needs more than {most:,} units", "give a larger eps"
            )
        knots.append(_reached(curve, knots[-1], high, knots[-1][0] - knots[-2][0], band))
    return knots


def _reached(curve: Curve, start: tuple[float, float], high: float, step: float, band: float) -> tuple[float, float]:
    """The farthest end of a line from `start` that samples find within the band, and its height over the function."""
    left, rise = start
    far, shorter = min(left + 2 * step, high), False
    base = float(_finite(curve, np.array([left]))[0]) + rise
    rises = np.array(sorted((-band, 0.0, band), key=lambda one: abs(one - rise)))
    while True:
        seen = _sight(curve, (left, base), np.linspace(left, far, SAMPLES)[1:], rises)
        if seen.out == far and seen.last == far:
            # A window that was cut at its first sample out of reach, and is in reach now, is as far as there is.
            if shorter or far == high:
                return far, seen.rise
            far = min(left + 2 * (far - left), high)
        elif seen.last - left >= (far - left) / 2:
            break
        else:
            far, shorter = seen.out, True
            if left + (far - left) / SAMPLES == left:
                raise ToleranceUnreachable(
                    "relu_piecewise: eps",
                    f"{band:.2g}",
                    f"is finer than float64 can follow {curve.text} at x={left:g}",
                    "give a larger eps",
                )
    for _ in range(2):
        # Between the last sample in reach and the first that is not, as many more.
        seen = _sight(curve, (left, base), np.linspace(seen.last, seen.out, SAMPLES)[1:], rises, seen)
    return seen.last, seen.rise


class _Sight(NamedTuple):
    """How far lines from a point reach, sample by sample: to the last one in reach, at its rise over the function; the
    first out of reach, or the last again; and the slopes of the lines that stay in the band so far."""

    last: float
    rise: float
    out: float
    least: float
    most: float


def _sight(
    curve: Curve,
    start: tuple[float, float],
    xs: np.ndarray[Any, Any],
    rises: np.ndarray[Any, Any],
    nearer: _Sight | None = None,
) -> _Sight:
    """What lines from `start` reach of samples one after the other, beyond what they reach of nearer ones.

    A line keeps to the band if its slope lies between the steepest of the slopes to the band's lower edge and the
    flattest of those to its upper edge. Of rises that fit the first is taken.
    """
    left, base = start
    found = nearer or _Sight(left, math.nan, left, -math.inf, math.inf)
    values = _finite(curve, xs)
    # Of values and lines as float64 has them: up to each sample, for a curve may be huge beyond.
    noise = 2.0**-49 * np.maximum(np.maximum.accumulate(np.abs(values)), abs(base))
    room = float(rises.max()) * (1 + 1e-9) + noise
    run, climb = xs - left, values - base
    # A climb may be steeper than float64 can tell: no line of numbers follows it.
    with np.errstate(over="ignore"):
        least = np.maximum(np.maximum.accumulate((climb - room) / run), found.least)
        most = np.minimum(np.minimum.accumulate((climb + room) / run), found.most)
        slopes = (climb + rises[:, None]) / run
    fits = (slopes >= least) & (slopes <= most) & np.isfinite(slopes)
    missed = ~fits.any(0)
    i = int(missed.argmax()) if missed.any() else len(xs)
    if i == 0:
        return found._replace(out=float(xs[0]))
    rise = float(rises[fits[:, i - 1].argmax()])
    out = float(xs[min(i, len(xs) - 1)])
    return _Sight(float(xs[i - 1]), rise, out, float(least[i - 1]), float(most[i - 1]))


def _finite(curve: Curve, xs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = curve.values(xs)
    if not np.isfinite(values).all():
        where = float(xs[~np.isfinite(values)][0])
        raise NonFiniteError(
            f"relu_piecewise: {curve.text}", f"nan or inf at x={where:g}", "must be finite", "change the interval"
        )
    return values
