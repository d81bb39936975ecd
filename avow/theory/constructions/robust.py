r"""Heads that survive a scaled key: two queries whose average stays at ½(v_a + v_b) while :math:`k_a = X u_a`.

A query t·u_a scores tX on the noisy key and 0 on the others, and keeps the weight 1/(1+ε) while
:math:`tX \ge \ln((n-1)/\varepsilon)`: so t is :math:`\ln((n-1)/\varepsilon)/X_{min}`, twice the usual if X may be ½
[claims heads-discrete, heads-gauss].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from avow.core import check_dtype, dtype_name
from avow.core.chart import Chart
from avow.errors import ParameterError, RangeError, ShapeError, ToleranceUnreachable
from avow.numerics import intervals, rounding
from avow.parameters import as_float, declared
from avow.theory.constructions.construction import Construction, Proof, checked_eps, checked_matrix, first_proved
from avow.theory.constructions.noise import REACH, AnyScale, DiscreteLaw, GaussianLaw, Law

_BITS = 128


@dataclass(frozen=True)
class RobustHeads(Construction):
    """Two heads whose average is ½(v_a + v_b) however key a is scaled, from `least` to `most`.

    `queries` has one row per head, along `keys` (the standard basis if there are none).
    """

    queries: Tensor
    keys: Tensor | None
    n: int
    eps: float
    law: Law
    noisy: int
    other: int
    least: float
    most: float

    @property
    def promise(self) -> str:
        return (
            f"of {self.n} keys, head 1 gives key {self.noisy} and head 2 gives key {self.other} at least the weight "
            f"1/(1 + {self.eps:g}) whenever key {self.noisy} is scaled by X from {float(self.least):g} to "
            f"{float(self.most):g}, so their average is within {self.bound:.3g} max‖v‖ of "
            f"½(v_{self.noisy} + v_{self.other}); {self.law} does so with probability at least "
            f"{math.floor(self.success * 1e12) / 1e12:.12g}"
        )

    @property
    def bound(self) -> float:
        with intervals.precision(_BITS):
            eps = intervals.ball(self.eps)
            return intervals.upper(2 * eps / (1 + eps))

    @property
    def success(self) -> float:
        """A lower bound, from the exact law, on the probability of a scale that the heads survive."""
        return max(0.0, intervals.lower(self.law.probability(self.least, self.most)))

    def tensors(self) -> dict[str, Tensor]:
        return {"queries": self.queries} | ({} if self.keys is None else {"keys": self.keys})

    def verify(self) -> Proof:
        """Every scale from `least` to `most`, by its two ends: each head's weight on its key is monotone in X."""
        with intervals.precision(_BITS):
            worst, steps, ends = 0.0, [], (self.least, self.most)
            for head, own in enumerate((self.noisy, self.other)):
                for end, weight in zip(ends, self._lost(head, ends), strict=True):
                    lost = intervals.upper(2 * weight)
                    worst = max(worst, lost)
                    steps.append(f"head {head + 1} at X = {float(end):g}: 2(1 − weight of key {own}) ≤ {lost:.6g}")
        steps.append("between the ends each weight is a monotone function of X, a logistic function of one score")
        return Proof(self.promise, self.bound, worst, tuple(steps))

    def _lost(self, head: int, scales: Sequence[float]) -> Iterator[intervals.arb]:
        """1 − the weight of a head's own key, at each scale of the noisy one; the limit if that is infinite."""
        query, own = self.queries[head].double(), (self.noisy, self.other)[head]
        if self.keys is None:
            named = {*query.nonzero().flatten().tolist(), self.noisy, self.other}
            scores = {key: intervals.ball(query[key]) for key in named}
        else:
            scores = dict(enumerate((intervals.grid(self.keys) * intervals.grid(query[:, None])).entries()))
        noisy = scores[self.noisy]
        for scale in scales:
            # An exact 0 stays 0 at every scale. Balls know the limits of products and of exp; the rest is not finite.
            scaled = {**scores, self.noisy: noisy if noisy == 0 else noisy * intervals.ball(scale)}
            mine = scaled.pop(own)
            zeros = (self.n - len(scores)) * (-mine).exp()
            against = sum(((other - mine).exp() for other in scaled.values()), zeros)
            yield against / (1 + against) if against.is_finite() else intervals.ball(1)

    def picture(self) -> Chart:
        """The weight each head gives its own key, as the scale goes from 0 (or below) to 2."""
        scales = [i / 50 for i in range(0 if self.least > 0 else -100, 101)]
        with intervals.precision(64):
            series = {
                f"head {head + 1}: key {own}": (scales, [1 - float(lost.mid()) for lost in self._lost(head, scales)])
                for head, own in enumerate((self.noisy, self.other))
            }
        return Chart(f"What survives a scaled key (n = {self.n}, ε = {self.eps:g})", "X", "weight", series)

    def as_module(self) -> nn.Module:
        """Keys (n, d) and values (n, e) to the average of the two heads' outputs (e,)."""
        return _AveragedHeads(self.queries)


class _AveragedHeads(nn.Module):
    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = nn.Parameter(queries.clone(), requires_grad=False)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return (torch.softmax(self.queries @ keys.mT, -1) @ values).mean(-2)


@declared("robust_heads")
def robust_heads(
    n: int,
    eps: float,
    law: Law,
    *,
    least: float | Fraction | None = None,
    away: bool = False,
    keys: Tensor | None = None,
    tolerance: float | None = None,
    noisy: int = 0,
    other: int = 1,
    dtype: torch.dtype = torch.float64,
) -> RobustHeads:
    r"""Two heads whose average keeps to ½(v_a + v_b) while key a is scaled by a random X.

    Along their keys: head 1 is t·u_a and head 2 is t'·u_b, where a scale of `least` or more leaves head 1 a score of
    :math:`t \cdot least \ge \ln((n-1)/\varepsilon)`.

    With `away`, head 1 is instead :math:`-t \sum_{j \ne a} u_j`: it scores nothing on the noisy key and pushes every
    other down, so it survives every scale, zero and negative ones too, for a query √(n−1) times as long.

    Args:
        n: how many keys.
        eps: ε, between 0 and 1.
        law: that of X.
        least: the smallest scale to survive; None is a discrete law's smallest value, half a Gaussian's mean, or the
            range's own end.
        away: whether head 1 pushes the other keys down instead.
        keys: orthonormal keys, (n, d); None is the standard basis.
        tolerance: how far inner products may be from 0 or 1; None is some roundings of `dtype`.
        noisy: a, the key that is scaled.
        other: b.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The queries, with their bound and a proof.

    Raises:
        ParameterError: a number is out of range, or no scale is survived.
        ShapeError: the keys do not fit.

    >>> from avow.theory.constructions import AnyScale, robust_heads
    >>> heads = robust_heads(1000, 0.01, AnyScale(0.5))
    >>> round(float(heads.queries[0, 0]), 3), bool(heads.verify())
    (23.024, True)
    """
    n, noisy, other = (operator.index(number) for number in (n, noisy, other))
    if n < 2:
        raise ParameterError("robust_heads: n", n, "must be at least 2", "give two keys or more")
    if not (0 <= noisy < n and 0 <= other < n and noisy != other):
        rule = f"must be two of the keys 0..{n - 1}"
        raise ParameterError("robust_heads: noisy, other", (noisy, other), rule, "try 0 and 1")
    eps = checked_eps("robust_heads", eps)
    check_dtype("robust_heads: dtype", dtype, "use dtype=torch.float64")
    least, most = _ends(law, least, away)
    directions = None if keys is None else _orthonormal(keys.to(dtype), n, tolerance)
    needed = math.log((n - 1) / eps)
    own = torch.zeros(2, n, dtype=torch.float64)
    if away:
        own[0] = -needed
    own[0, noisy] = 0.0 if away else needed / least
    own[1, other] = needed if away else needed / min(1.0, least)
    queries = own if directions is None else own @ directions.double()
    # A little longer until the rounded numbers keep the promise: one rounding is enough along the standard basis, and
    # keys that are not quite orthonormal cost about what they are off.
    margins = (0.0, *(2.0**-k for k in range(math.frexp(1 / rounding.unit(dtype))[1] + 1, 0, -2)))
    rounded = ((queries * (1 + margin)).to(dtype) for margin in margins)
    heads, best = first_proved(RobustHeads(q, directions, n, eps, law, noisy, other, least, most) for q in rounded)
    if heads is not None:
        return heads
    where = f"for every scale from {float(least):g} to {float(most):g}"
    rule = f"cannot be kept with queries and keys rounded to {dtype_name(dtype)} {where}"
    raise ToleranceUnreachable("robust_heads: eps", eps, rule, "use a wider dtype, or bound the scale", best)


def _ends(law: Law, least: float | Fraction | None, away: bool) -> tuple[float, float]:
    """The range of scales to survive."""
    remedy = "give least above 0"
    match law:
        case DiscreteLaw():
            # Floats at or beyond the ends: what is proved between them holds for the fractions.
            start, most = _down(min(law.values)), -_down(-max(law.values))
            scales = f"that has probability {law.share(-math.inf, 0)}"
            if positive := [value for value in law.values if value > 0]:
                remedy = f"give least={min(positive)!r} to survive the rest"
        case GaussianLaw():
            spread = math.sqrt(law.variance) * REACH
            start, most = (law.mean - spread if away else law.mean / 2), law.mean + spread
            scales = f"that has probability {float(law.probability(-math.inf, 0.0).mid()):.12g}"
        case AnyScale():
            start, most = law.least, law.most
            scales = "the range holds such scales"
    chosen = start if least is None else _down(least) if isinstance(least, Fraction) else as_float(least)
    if math.isnan(chosen) or chosen > most:
        rule = f"must be at most the law's largest scale {float(most):g}"
        raise ParameterError("robust_heads: least", least, rule, "leave it out")
    if not away and not chosen > 0:
        rule = (
            "must be above 0: a key scaled by 0 or less scores no more than keys that score 0, so no query along it, "
            f"however long, survives such a scale; {scales}"
        )
        remedy += ", or away=True, whose query survives every scale"
        raise ParameterError("robust_heads: least", chosen, rule, remedy)
    return chosen, most


def _down(x: Fraction) -> float:
    number = as_float(x)
    if math.isnan(number):
        raise RangeError("robust_heads: scale", x, "is beyond float64", "try scales up to 1e300")
    return number if Fraction(number) <= x else math.nextafter(number, -math.inf)


def _orthonormal(given: Tensor, n: int, tolerance: float | None) -> Tensor:
    """The keys, if every inner product is within the tolerance of 0 or 1, the rounding of the check included."""
    keys = checked_matrix("robust_heads: keys", given)
    if len(keys) != n:
        raise ShapeError("robust_heads: keys", tuple(keys.shape), f"must be ({n}, d)", "give one row for each key")
    d = keys.shape[1]
    # Rounding unit rows moves an inner product by little more than 2u; making them in float64 costs some d roundings.
    usual = 4 * (1 + math.sqrt(d)) * rounding.unit(keys.dtype) + 16 * d * rounding.unit(torch.float64)
    allowed = usual if tolerance is None else tolerance
    wide = keys.double()
    gram = wide @ wide.mT
    # Each product errs by at most γ_d ‖k_i‖‖k_j‖, and the norms come from the diagonal itself.
    slack = rounding.gamma(d + 2, rounding.unit(torch.float64)) * float(gram.diagonal().amax()) * rounding.SAFETY * 2
    off = float((gram - torch.eye(n, dtype=torch.float64)).abs().amax()) + slack
    if not off <= allowed:
        rule = f"must be orthonormal to within tolerance={allowed:.3g}"
        remedy = "orthonormalise them (torch.linalg.qr), or give a larger tolerance"
        raise ParameterError("robust_heads: keys", f"inner products off by {off:.3g}", rule, remedy)
    return keys
