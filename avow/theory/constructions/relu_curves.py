"""ReLU networks that follow any smooth or convex function of one number, with an error proved by balls.

Kinks are placed from left to right, each as far as a line can reach before it is `eps` away from the function. Where
the function is convex or concave no continuous chain of lines has fewer pieces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from avow.core import check_dtype, dtype_name
from avow.core.chart import Chart
from avow.errors import NonFiniteError, ParameterError, RangeError, ToleranceUnreachable, value_text
from avow.extras import require
from avow.numerics import intervals
from avow.parameters import declared
from avow.theory.constructions import relu
from avow.theory.constructions.construction import Proof, checked_eps
from avow.theory.constructions.formulas import FUNCTIONS, compiled
from avow.theory.constructions.relu import Layer, Layers, Number, Piece, ReluNetwork

if TYPE_CHECKING:
    import sympy

    Array = NDArray[np.float64]
    Ball = Callable[[intervals.arb], intervals.arb]

# Where two lines meet, and how far above the function: x and the rise.
Knot = tuple[float, float]
MOST_UNITS = 1 << 11
BITS = 128
# Parts of eps that are aimed at, one after the other: what is left covers rounding and what the samples missed.
AIMS = (0.999, 0.98, 0.9, 0.6)
# The bound is refined until this part of it is doubt.
SHARPNESS = 2.0**-10


@dataclass(frozen=True)
class Curve:
    """A function of one number: its values as floats, and balls around it and its first two derivatives."""

    text: str
    values: Callable[[Array], Array]
    ball: Ball
    slope: Ball
    bend: Ball


@dataclass(frozen=True, eq=False)
class ReluPiecewise(ReluNetwork):
    """One hidden layer whose kinks stand where a function bends most."""

    curve: Curve
    low: Fraction
    high: Fraction

    @property
    def promise(self) -> str:
        where = f"on [{float(self.low):g}, {float(self.high):g}]"
        return f"within {self.bound:.6g} of {self.curve.text} everywhere {where}, with {self.units} hidden units"

    def verify(self) -> Proof:
        lines = relu.pieces(relu.as_fractions(self.layers), self.low, self.high)
        steps = (
            f"the rounded network is {len(lines)} lines, known in fractions",
            f"balls bound the distance on every line: {self.curve.text} is convex or concave there, or is cut until a "
            "Taylor bound is sharp",
        )
        return Proof(self.promise, self.bound, distance(self.curve, lines), steps)

    def picture(self) -> Chart:
        def truth(x: Tensor) -> Tensor:
            return torch.tensor(self.curve.values(x.numpy()))

        title = f"{self.curve.text} from {self.units} ReLUs"
        return self.error_chart(title, self.curve.text, truth, float(self.low), float(self.high))


@declared("relu_piecewise")
def relu_piecewise(
    f: sympy.Expr, interval: tuple[Number, Number], eps: Number, dtype: torch.dtype = torch.float64
) -> ReluPiecewise:
    """A network within `eps` of a SymPy expression of one symbol, everywhere on an interval.

    The expression may be built from numbers, + − × ÷, powers, roots, absolute values and
    exp, log, sin, cos, tan, atan, sinh, cosh, tanh, erf.

    Args:
        f: the expression.
        interval: where it must hold: both ends.
        eps: the largest error.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The network, with its bound and a proof.

    Raises:
        ParameterError: this is not such an expression, or a number is out of range.
        ToleranceUnreachable: the type's rounding is coarser than eps.

    >>> import sympy
    >>> from avow.theory.constructions import relu_piecewise
    >>> relu_piecewise(sympy.exp(sympy.Symbol("x")), (0, 1), 1e-2).units
    4
    """
    curve = curve_of(f)
    check_dtype("relu_piecewise: dtype", dtype, "use dtype=torch.float64")
    low, high = relu.checked_interval("relu_piecewise", interval)
    checked_eps("relu_piecewise", eps)
    eps = relu.checked_number("relu_piecewise: eps", eps)
    if high - low < max(abs(low), abs(high)) * Fraction(1e-9) + Fraction(1e-290):
        raise RangeError("relu_piecewise: interval", interval, "is too narrow for float64", "widen it")
    best = math.inf
    for aim in AIMS:
        exact = _layers_through(curve, knots_of(curve, float(low), float(high), aim * float(eps), MOST_UNITS), dtype)
        layers = relu.round_layers("relu_piecewise", exact, dtype)
        network = ReluPiecewise(exact, layers, 0.0, curve, low, high).with_proved_error()
        if network.bound <= eps:
            return network
        best = min(best, network.bound)
    remedy = "keep to where it is finite"
    if math.isfinite(best):
        remedy = f"use eps of at least {best:.2g}{'' if dtype == torch.float64 else ', or a wider dtype'}"
    rule = f"is finer than can be proved for {curve.text} with weights of type {dtype_name(dtype)}"
    raise ToleranceUnreachable("relu_piecewise: eps", f"{float(eps):g}", rule, remedy, best)


def chain(curve: Curve, interval: tuple[Number, Number], eps: Number, most: int = MOST_UNITS) -> list[Knot]:
    """Where the lines of a network within about `eps` would meet, in float64: a sketch, nothing of it proved.

    One unit a line, as `relu_piecewise` first tries it; more than `most` of them are refused.
    """
    low, high = relu.checked_interval("relu_piecewise", interval)
    band = AIMS[0] * checked_eps("relu_piecewise", eps)
    knots = knots_of(curve, float(low), float(high), band, most)
    xs, rises = (np.array(column) for column in zip(*knots, strict=True))
    return list(zip(xs.tolist(), (curve.values(xs) + rises).tolist(), strict=True))


def distance(curve: Curve, lines: Sequence[Piece]) -> float:
    """A float that the distance of a function from some lines exceeds nowhere; hardly larger than it need be."""
    counter = itertools.count()
    heap: list[tuple[float, int, Piece]] = []
    seen = 0.0
    with intervals.precision(BITS):

        def push(piece: Piece) -> None:
            nonlocal seen
            least, most = _error_on(curve, piece)
            seen = max(seen, least)
            heapq.heappush(heap, (-most, next(counter), piece))

        for piece in lines:
            push(piece)
        for _ in range(1000 + 40 * len(lines)):
            if -heap[0][0] <= seen * (1 + SHARPNESS):
                break
            low, high, slope, height = heapq.heappop(heap)[2]
            middle = (Fraction(low) + Fraction(high)) / 2
            push(Piece(low, middle, slope, height))
            push(Piece(middle, high, slope, height))
    return -heap[0][0]


def _error_on(curve: Curve, piece: Piece) -> tuple[float, float]:
    """What |f − line| reaches on a piece for certain, and what it does not exceed."""
    low, high, tilt, lift = (intervals.ball(number) for number in piece)
    box, center, reach = low.union(high), (low + high) / 2, (high - low) / 2

    def error(x: intervals.arb) -> intervals.arb:
        return curve.ball(x) - tilt * x - lift

    def turn(x: intervals.arb) -> intervals.arb:
        return curve.slope(x) - tilt

    points = [error(low), error(high)]
    bend = curve.bend(box)
    bounds = [abs(error(box))]
    if bend >= 0 or bend <= 0:
        # Convex or concave: one extreme is an end; the other is too, or a tangent near it keeps it within reach.
        bounds.append(abs(points[0]).max(abs(points[1])))
        if not turn(low) * turn(high) >= 0:
            inner = _stationary(curve, low, high, tilt)
            points.append(error(inner))
            bounds[-1] = bounds[-1].max(abs(points[-1]) + abs(turn(inner)) * (high - low))
    else:
        points.append(error(center))
        bounds.append(abs(points[-1]) + abs(turn(box)) * reach)
        bounds.append(abs(points[-1]) + abs(turn(center)) * reach + abs(bend) * reach * reach / 2)
    least = max(intervals.lower(abs(point)) if point.is_finite() else 0.0 for point in points)
    return least, min(intervals.upper(bound) for bound in bounds)


def _stationary(curve: Curve, low: intervals.arb, high: intervals.arb, tilt: intervals.arb) -> intervals.arb:
    """About where a function has a slope, by a secant and a step of Newton's; anywhere between the ends would do."""
    start, end = curve.slope(low) - tilt, curve.slope(high) - tilt
    guess = (low + (high - low) * start / (start - end)).mid()
    guess = (guess - (curve.slope(guess) - tilt) / curve.bend(guess)).mid()
    return guess if low <= guess and guess <= high else ((low + high) / 2).mid()


def _layers_through(curve: Curve, knots: Sequence[Knot], dtype: torch.dtype) -> Layers:
    """The units whose kinks are some knots, moved to where the type can hold them: rising from the first on.

    One unit a line: the first gives the slope to begin with, every other a change of slope.
    """
    xs, rises = (np.array(column) for column in zip(*knots, strict=True))
    held = torch.from_numpy(xs).to(dtype)
    if not bool(held.isfinite().all()):
        raise RangeError("relu_piecewise: dtype", dtype, "cannot carry the interval", "use a wider type")
    places, indices = np.unique(held.double().numpy(), return_index=True)
    heights = curve.values(np.clip(places, xs[0], xs[-1])) + rises[indices]
    points = [(Fraction(x), Fraction(y)) for x, y in zip(places.tolist(), heights.tolist(), strict=True)]
    slopes = [(next_y - y) / (next_x - x) for (x, y), (next_x, next_y) in itertools.pairwise(points)]
    jumps = [after - before for before, after in itertools.pairwise([Fraction(0), *slopes])]
    units = [(x, jump) for (x, _), jump in zip(points[:-1], jumps, strict=True) if jump]
    units = units or [(points[0][0], Fraction(0))]  # one place, or one height: a constant
    hidden = Layer(((Fraction(1),),) * len(units), tuple(-x for x, _ in units))
    return hidden, Layer((tuple(jump for _, jump in units),), (points[0][1],))


def curve_of(f: sympy.Expr) -> Curve:
    """An expression of one symbol as floats and balls can follow it."""
    require("flint", "scipy", "sympy", purpose="to follow a formula")
    import sympy

    name = "relu_piecewise: f"
    if not isinstance(f, sympy.Expr):
        raise ParameterError(name, value_text(f), "must be a SymPy expression", 'try sympy.exp(sympy.Symbol("x"))')
    if len(f.free_symbols) > 1:
        raise ParameterError(name, f, f"must have one symbol, not {len(f.free_symbols)}", "give the others values")
    x = sympy.Dummy("x", real=True)
    plain = f.subs(dict.fromkeys(f.free_symbols, x))
    known = tuple(getattr(sympy, word) for word in (*FUNCTIONS, "Abs", "Add", "Mul", "Pow", "Symbol"))
    for part in sympy.preorder_traversal(plain):
        constant = part.is_Rational or part.is_Float or part in (sympy.pi, sympy.E)
        if not (constant or isinstance(part, known)):
            can = f"use + − × ÷, powers, Abs, {', '.join(FUNCTIONS)}"
            raise ParameterError(name, f, f"holds {part}, which is not known here", can)
    slope = sympy.diff(plain, x)
    evaluate = sympy.lambdify(x, plain, "scipy")

    def values(xs: Array) -> Array:
        try:
            with np.errstate(all="ignore"):
                return np.broadcast_to(np.asarray(evaluate(xs), dtype=np.float64), xs.shape)
        except OverflowError:  # a number of the formula itself is beyond float64
            return np.full(xs.shape, np.inf)

    return Curve(str(f), values, *(_enclosure(part, x) for part in (plain, slope, sympy.diff(slope, x))))


def _enclosure(expression: sympy.Expr, x: sympy.Symbol) -> Ball:
    """A function of one ball that holds an expression's values; not finite if it cannot tell."""
    try:
        at = compiled(expression, [x])
    except TypeError:  # a derivative that is not a function
        return lambda ball: ball * math.nan
    return lambda ball: at([ball])


# A line is tried against this many points of the function; what they miss, the balls find.
SAMPLES = 129


def knots_of(curve: Curve, low: float, high: float, band: float, most: int) -> list[Knot]:
    """Where lines meet, and how far above the function: each line reaches as far as `band` lets it."""
    starts = [(low, rise) for rise in (0.0, -band, band)]
    firsts = [(start, _farthest_end(curve, start, high, (high - low) / 1024, band)) for start in starts]
    knots = [*max(firsts, key=lambda line: line[1][0])]
    while knots[-1][0] < high:
        if len(knots) > most:
            rule = f"needs more than {most:,} units"
            raise ParameterError("relu_piecewise: eps", f"{band:.2g}", rule, "give a larger eps")
        knots.append(_farthest_end(curve, knots[-1], high, knots[-1][0] - knots[-2][0], band))
    return knots


def _farthest_end(curve: Curve, start: Knot, high: float, step: float, band: float) -> Knot:
    """The farthest end of a line from `start` that samples find within the band, and its height over the function."""
    left = start[0]
    far, shorter = min(left + 2 * step, high), False
    while True:
        xs = np.linspace(left, far, SAMPLES)[1:]
        count, rise = _in_reach(curve, start, xs, band)
        if count == len(xs):
            # A window that was cut at its first sample out of reach, and is in reach now, is as far as there is.
            if shorter or far == high:
                return far, rise
            far = min(left + 2 * (far - left), high)
        elif 2 * count >= len(xs):
            break
        else:
            far, shorter = float(xs[count]), True
            if left + (far - left) / SAMPLES == left:
                rule = f"is finer than float64 can follow {curve.text} at x={left:g}"
                raise ToleranceUnreachable("relu_piecewise: eps", f"{band:.2g}", rule, "give a larger eps")
    for _ in range(2):
        # Between the last sample in reach and the first that is not, as many more.
        xs = np.concatenate([xs[:count], np.linspace(xs[count - 1], xs[count], SAMPLES)[1:]])
        count, rise = _in_reach(curve, start, xs, band)
    return float(xs[count - 1]), rise


def _in_reach(curve: Curve, start: Knot, xs: Array, band: float) -> tuple[int, float]:
    """How many samples, one after the other, lines from `start` reach; and the last one's rise over the function.

    A line keeps to the band if its slope lies between the steepest of the slopes to the band's lower edge and the
    flattest of those to its upper edge. Of rises that fit, the one nearest to the start's is taken.
    """
    left, rise = start
    values = curve.values(np.insert(xs, 0, left))
    if not np.isfinite(values).all():
        where = f"nan or inf at x={float(np.insert(xs, 0, left)[~np.isfinite(values)][0]):g}"
        raise NonFiniteError(f"relu_piecewise: {curve.text}", where, "must be finite", "change the interval")
    base, values = values[0] + rise, values[1:]
    # Of values and lines as float64 has them: up to each sample, for a curve may be huge beyond.
    noise = 2.0**-49 * np.maximum(np.maximum.accumulate(np.abs(values)), abs(base))
    room = band * (1 + 1e-9) + noise
    rises = np.array(sorted((-band, 0.0, band), key=lambda one: abs(one - rise)))
    run, climb = xs - left, values - base
    # A climb may be steeper than float64 can tell: no line of numbers follows it.
    with np.errstate(over="ignore"):
        least = np.maximum.accumulate((climb - room) / run)
        most = np.minimum.accumulate((climb + room) / run)
        slopes = (climb + rises[:, None]) / run
    fits = (slopes >= least) & (slopes <= most) & np.isfinite(slopes)
    missed = ~fits.any(0)
    count = int(missed.argmax()) if missed.any() else len(xs)
    return count, float(rises[fits[:, count - 1].argmax()])
