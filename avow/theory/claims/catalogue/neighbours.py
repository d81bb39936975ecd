"""Neighbours that promise an enclosure and do not keep it, which is why nothing here is built on them.

Each claim is about one version of a package; where that cannot be loaded, the claim does not apply. A sabotage is a
stand-in that keeps the promise: the check must find nothing wrong with it.
"""

from __future__ import annotations

import importlib
import math
import types
from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
from flint import arb

from avow.core.chart import Table
from avow.numerics.intervals import ball, lower, most, precision, softmax, upper
from avow.theory.claims.claim import Falsifier, claims_on, numbered
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.toolbox import counterexample

claim = claims_on("neighbours")
Ends = tuple[Fraction, Fraction]

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


def _exponential(enclosure: Callable[[float], Ends], exponent: arb) -> arb:
    """x is the float nearest to ln(1 + 10^−a), a as drawn: eˣ is all but a float itself."""
    # An exponential is enclosed wrongly where it is all but a float itself: numbers are drawn so that theirs are.
    x = math.log(1 + 10.0 ** -float(exponent))
    low, high = map(ball, enclosure(x))
    return (low - arb(x).exp()).max(arb(x).exp() - high)


@claim(
    "mpmath-iv-exp",
    expected="refuted",
    statement=r"e^x \in \texttt{mpmath.iv.exp}(x)",
    plain="The interval exponential of mpmath 1.3.0 encloses the exponential.",
    assumptions=("mpmath 1.3.0, at its default precision of 53 bits",),
    requires=("mpmath==1.3.0",),
    subject=_exp_by_mpmath,
    sabotage={"balls of python-flint": _exp_by_balls},
    picture=_exp_picture,
    falsifier=Falsifier({"a": (0, 6)}, _exponential),
)
def mpmath_iv_exp(enclosure: Callable[[float], Ends]) -> Iterator[Evidence]:
    point = next((x for x in _POINTS if _outside(x, *enclosure(x))), _POINTS[0])
    low, high = enclosure(point)
    with precision(128):
        truth = arb(point).exp().str(30, radius=False)
    says = f"e^{point} lies outside the interval given for it"
    facts = {"x": repr(point), "low": str(low), "high": str(high), "truth": truth, "version": "mpmath 1.3.0"}
    yield counterexample(_outside(point, low, high), says, "balls of python-flint at up to 4,096 bits", **facts)


def _outside(x: float, low: Fraction, high: Fraction) -> bool:
    """Whether e^x certainly lies outside an interval."""
    with precision(4096):
        truth = arb(x).exp()
        return bool(truth < ball(low) or truth > ball(high))


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


def _softmax(bounds: Bounds, *case: arb) -> arb:
    """A box for two logits, and its corners."""
    box = torch.tensor([sorted(map(float, case[at : at + 2])) for at in (0, 2)], dtype=torch.float64)
    least, top = (x.tolist() for x in bounds(*box.T))
    missed = []
    for corner in ([box[0, 0], box[1, 1]], [box[0, 1], box[1, 0]]):
        weights = softmax([ball(x) for x in corner])
        missed += [arb(bound) - weight for bound, weight in zip(least, weights, strict=True)]
        missed += [weight - arb(bound) for bound, weight in zip(top, weights, strict=True)]
    return most(missed)


@claim(
    "auto-lirpa-softmax",
    expected="refuted",
    statement=r"x \in [\ell, u] \;\Rightarrow\; \mathrm{softmax}(x)_i \le \overline{\mathrm{softmax}}_i(\ell, u)"
    r" \text{ as auto\_LiRPA computes it}",
    plain="The bounds that auto_LiRPA 0.3 gives for softmax over a box of logits, by intervals, hold.",
    assumptions=("auto_LiRPA 0.3, its softmax operator by intervals, which is not its default",),
    requires=("auto_LiRPA==0.3",),
    subject=_softmax_by_auto_lirpa,
    sabotage={"bounds from the corners": _softmax_by_corners},
    picture=_softmax_picture,
    falsifier=Falsifier(numbered("x₁ x₁′ x₂ x₂′", -120, 0), _softmax),
)
def auto_lirpa_softmax(bounds: Bounds) -> Iterator[Evidence]:
    _, most = bounds(*(torch.tensor(ends, dtype=torch.float64) for ends in (_LOW, _HIGH)))
    weight = softmax([arb(x) for x in _CORNER])[1]
    says = "at (−100, −60) the second weight exceeds its upper bound: 1e-12 was added to a far smaller denominator"
    facts = {"bound": float(most[1]), "weight": weight.str(15, radius=False), "version": "auto_LiRPA 0.3"}
    yield counterexample(bool(weight > arb(float(most[1]))), says, "balls of python-flint", **facts)
