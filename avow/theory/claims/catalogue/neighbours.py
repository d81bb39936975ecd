"""Neighbours that promise an enclosure and do not keep it, which is why nothing here is built on them.

Each claim is about one version of a package; where that cannot be loaded, the claim does not apply. A sabotage is a
stand-in that keeps the promise: the check must find nothing wrong with it.
"""

from __future__ import annotations

import importlib
import math
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from flint import arb
from sympy import And, Eq, Sum, exp

from avow.core.chart import Table
from avow.numerics.intervals import ball, lower, precision, upper
from avow.theory.claims.claim import claims_on
from avow.theory.claims.formal import Measured, Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.proof import Refutation
from avow.theory.claims.stored import float64

claim = claims_on("neighbours")
(i, j), number = whole("i j"), real("x")
least, most, x = sequence("ell u x")
Ends = tuple[Fraction, Fraction]


def measured(name: str, count: int, of: Callable[..., Fraction | float]) -> Any:
    """A term by this name that a package computes from so many floats."""

    def value(_: Any, values: Sequence[arb]) -> arb:
        return ball(of(*map(float, values)))

    return type(name, (Measured,), {"nargs": (count,), "measured": value})


# Floats whose exponential mpmath 1.3.0 does not enclose at its default precision; found by trying many.
_POINTS = (75.49186049723357, 81.69777653902975, 264.7099494513692, 694.6006513839093, -219.26001185527815)


def _exp_by_mpmath(x: float) -> Ends:
    """The ends of mpmath's interval for e^x, exactly."""
    mpmath = importlib.import_module("mpmath")
    ends = mpmath.iv.exp(mpmath.iv.mpf(x))._mpi_
    low, high = ((-1) ** sign * int(mantissa) * Fraction(2) ** exponent for sign, mantissa, exponent, _ in ends)
    return low, high


def _exp_by_balls(x: float) -> Ends:
    """The ends of a ball for e^x, as floats outside it."""
    with precision(53):
        truth = arb(x).exp()
        return Fraction(lower(truth)), Fraction(upper(truth))


def _exp_picture() -> Table:
    rows = [(repr(x), *(repr(float(end)) for end in _exp_by_balls(x))) for x in _POINTS]
    return Table("Intervals that do hold e^x at these points", ("x", "low", "high"), rows)


def _enclosed(enclosure: Callable[[float], Ends]) -> Statement:
    def case(exponent: Any) -> dict[Any, Any]:
        # An exponential is enclosed wrongly where it is all but a float itself: numbers are drawn so that theirs are.
        return {number: Fraction(math.log(1 + 10.0 ** -float(exponent)))}

    low, high = (
        measured(name, 1, lambda x, at=at: enclosure(x)[at])(number) for at, name in enumerate(("low", "high"))
    )
    return Statement(
        variables={number: "a float"},
        given=[Eq(float64(number), number)],
        then={"enclosed": And(low <= exp(number), exp(number) <= high)},
        terms={"exponential": exp(number), "low": low, "high": high},
        notes=["mpmath 1.3.0: low and high are the ends of its interval, at its default precision of 53 bits"],
        spans=Spans({"a": (0, 6)}, case),
    )


@claim(
    "mpmath-iv-exp",
    expected="refuted",
    formal=_enclosed,
    plain="The interval exponential of mpmath encloses the exponential {exponential} of a float: between {low} and"
    " {high}.",
    requires=("mpmath==1.3.0",),
    subject=_exp_by_mpmath,
    sabotage={"balls of python-flint": _exp_by_balls},
    picture=_exp_picture,
)
def mpmath_iv_exp(against: Refutation, enclosure: Callable[[float], Ends]) -> None:
    point = _POINTS[0]
    low, high = enclosure(point)
    with precision(128):
        truth = arb(point).exp().str(30, radius=False)
    facts = {"low": str(low), "high": str(high), "truth": truth, "version": "mpmath 1.3.0"}
    against.case({number: Fraction(point)}, f"e^{point} lies outside the interval given for it", **facts)


# The box of two logits, and a corner of it: the first logit as low as it goes, the second as high.
_LOW, _HIGH = (-100.0, -100.0), (0.0, -60.0)
_CORNER = (-100.0, -60.0)

Bounds = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _softmax_by_auto_lirpa(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of auto_LiRPA's own softmax operator, by intervals."""
    operator = importlib.import_module("auto_LiRPA.operators.softmax").BoundSoftmax
    # Of its node in a network, the operator reads these three alone.
    node = types.SimpleNamespace(option="interval", perturbed=True, axis=-1)
    return operator.interval_propagate(node, (low, high))


def _softmax_by_corners(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and most each weight can be: its own logit at one end, all others at the other."""
    own = torch.eye(low.shape[-1], dtype=torch.bool)
    weights = [torch.softmax(torch.where(own, a, b), -1).diagonal() for a, b in ((low, high), (high, low))]
    return weights[0] * (1 - 1e-12), weights[1] * (1 + 1e-12)


def _softmax_picture() -> Table:
    low, high = _softmax_by_corners(*(torch.tensor(ends, dtype=torch.float64) for ends in (_LOW, _HIGH)))
    truth = torch.softmax(torch.tensor(_CORNER, dtype=torch.float64), -1)
    rows = [(f"weight {i + 1}", float(low[i]), float(high[i]), float(truth[i])) for i in range(2)]
    title = "Softmax over [−100, 0] × [−100, −60]: bounds that hold, and the weights at (−100, −60)"
    return Table(title, ("", "least", "most", "at the corner"), rows)


def _within(bounds: Bounds) -> Statement:
    def end(which: int) -> Callable[..., float]:
        def of(place: float, *box: float) -> float:
            low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (box[:2], box[2:]))
            return float(bounds(low, high)[which][round(place) - 1])

        return of

    def case(*numbers: Any) -> dict[Any, Any]:
        box = [sorted(map(decimal, numbers[at : at + 2])) for at in (0, 2)]
        corner = [box[0][0], box[1][1]]
        return {least: [low for low, _ in box], most: [high for _, high in box], x: corner}

    box = (least[1], least[2], most[1], most[2])
    low, high = (measured(name, 5, end(at))(i, *box) for at, name in enumerate(("low", "high")))
    weight = exp(x[i]) / Sum(exp(x[j]), (j, 1, 2))
    return Statement(
        variables={least: "how low each of two logits may be", most: "how high", x: "the logits"},
        given=[each(i, 1, 2, And(least[i] <= x[i], x[i] <= most[i]))],
        then={"above": each(i, 1, 2, low <= weight), "below": each(i, 1, 2, weight <= high)},
        terms={"weight": weight, "low": low, "high": high},
        notes=["auto_LiRPA 0.3: low and high are from its softmax operator by intervals, which is not its default"],
        spans=Spans(dict.fromkeys(("x₁", "x₁′", "x₂", "x₂′"), (-120, 0)), case),
    )


@claim(
    "auto-lirpa-softmax",
    expected="refuted",
    formal=_within,
    plain="The bounds {low} and {high} that auto_LiRPA gives for softmax over a box of logits, by intervals, hold for"
    " the weights {weight}.",
    requires=("auto_LiRPA==0.3",),
    subject=_softmax_by_auto_lirpa,
    sabotage={"bounds from the corners": _softmax_by_corners},
    picture=_softmax_picture,
)
def auto_lirpa_softmax(against: Refutation, bounds: Bounds) -> None:
    _, top = bounds(*(torch.tensor(ends, dtype=torch.float64) for ends in (_LOW, _HIGH)))
    box = {name: list(map(Fraction, ends)) for name, ends in ((least, _LOW), (most, _HIGH), (x, _CORNER))}
    says = "at (−100, −60) the second weight exceeds its upper bound: 1e-12 was added to a far smaller denominator"
    against.case(box, says, bound=float(top[1]), version="auto_LiRPA 0.3")
