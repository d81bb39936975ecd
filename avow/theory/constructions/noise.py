r"""Heads under noise: one key is scaled by a random number X, the others are exact. What do the weights do?

Keys lie along orthonormal directions, :math:`k_a = X u_a` and :math:`k_j = u_j`, so a query
:math:`q = \sum_j t_j u_j` scores :math:`X t_a` on the noisy key and :math:`t_j` on the others, and its weight on the
noisy key is a logistic function of X:

.. math:: \alpha_a = \sigma(t_a X - \ln R), \qquad R = \sum_{j \ne a} e^{t_j}, \qquad
          \alpha_j = (1 - \alpha_a)\, e^{t_j} / R

The output's error is measured in weights: whatever the values, it is at most
:math:`\|\bar\alpha - target\|_1 \max_j \|v_j\|`, and some values attain it [claims noise-one-key-discrete,
noise-one-key-gauss, heads-discrete, heads-gauss, heads-identical].

A law says how the key is scaled: by one of a few numbers, by a Gaussian, or by any number of a range. It gives the
probability of a range of scales exactly: a fraction where it is discrete, a ball where it is Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from avow.core.chart import Chart
from avow.errors import NonFiniteError, ParameterError, value_text
from avow.extras import require
from avow.numerics import intervals
from avow.numerics.intervals import Enclosure
from avow.parameters import as_float, declared

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
        name, count = "DiscreteLaw: probabilities", len(self.values)
        listed, odds = (f"({', '.join(map(str, numbers))})" for numbers in (self.values, self.probabilities))
        if not count or count != len(self.probabilities):
            rule = f"must be one for each of the {count} values, of which there is at least one"
            remedy = "try DiscreteLaw((Fraction(1, 2), Fraction(3, 2)), (Fraction(1, 2), Fraction(1, 2)))"
            raise ParameterError(name, f"{len(self.probabilities)} numbers", rule, remedy)
        if len(set(self.values)) != count:
            raise ParameterError("DiscreteLaw: values", listed, "must differ", "add up the odds of each")
        if min(self.probabilities) < 0:
            raise ParameterError(name, odds, "must not be negative", "leave out what never comes")
        if sum(self.probabilities) != 1:
            rule = f"must sum to 1, and sum to {sum(self.probabilities)}"
            raise ParameterError(name, odds, rule, "give fractions.Fraction where a float is not exact")

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> intervals.arb:
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
            rule = "must be above 0 and finite"
            raise ParameterError("GaussianLaw: variance", self.variance, rule, "try variance=0.5")
        for name in ("mean", "variance"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> intervals.arb:
        """P(least ≤ X ≤ most), enclosed to some 110 bits."""
        with intervals.precision(128):
            return self._above(least) - self._above(most) if least < most else intervals.ball(0)

    def _above(self, x: float | Fraction) -> intervals.arb:
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
            rule = f"must be at most most={value_text(self.most)}"
            raise ParameterError("AnyScale: least", self.least, rule, "try AnyScale(0.5)")

    @declared("probability")
    def probability(self, least: float | Fraction, most: float | Fraction) -> intervals.arb:
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


Head = Mapping[int, float]

_BITS = 128
# The search for the scales that succeed stops when those still open have no more mass than this, or are so many pieces.
_OPEN = 1e-13
_PIECES = 1 << 14


@dataclass(frozen=True)
class Outcome:
    """One scale of a discrete law: its odds, the weights it gives, and their distance to the target."""

    scale: Fraction
    probability: Fraction
    weights: Mapping[int, Enclosure]
    rest: Enclosure
    error: Enclosure
    succeeds: bool | None


@dataclass(frozen=True)
class NoiseAnalysis:
    """What scaling one key does to the average of some heads: the exact law of its weights.

    `success` encloses the probability that the error is at most `eta`; `mean` and `variance` are those of the noisy
    key's weight. A discrete law lists its `outcomes`.
    """

    n: int
    heads: tuple[Head, ...]
    law: DiscreteLaw | GaussianLaw
    eta: float
    noisy: int
    target: Mapping[int, Fraction]
    success: Enclosure
    mean: Enclosure
    variance: Enclosure
    outcomes: tuple[Outcome, ...] = ()

    def weights_at(self, scale: float | Fraction) -> dict[int, Enclosure]:
        """The averaged weight of every key that a head or the target names, when X is this."""
        with intervals.precision(_BITS):
            weights = _Scene(self.n, self.heads, self.noisy, self.target).weights(intervals.ball(scale))
            return {key: intervals.ends(weight) for key, weight in weights.items() if key is not None}

    def picture(self) -> Chart:
        """Weights of the named keys as the scale goes from −1 to 3."""
        scales = [i / 20 for i in range(-20, 61)]
        at = [self.weights_at(scale) for scale in scales]
        series = {f"key {key}": (scales, [sum(weights[key]) / 2 for weights in at]) for key in at[0]}
        return Chart(f"{len(self.heads)} head(s), n = {self.n}: weights as one key is scaled", "X", "weight", series)


@declared("noise_analysis")
def noise_analysis(
    n: int,
    heads: Sequence[Head],
    law: DiscreteLaw | GaussianLaw,
    eta: float,
    *,
    noisy: int = 0,
    target: Mapping[int, Fraction | float] | None = None,
) -> NoiseAnalysis:
    """The exact law of the averaged weights of some heads when one key is scaled by a random X.

    Args:
        n: how many keys, orthonormal.
        heads: the query of each head by its coordinates along the keys' directions: {0: t, 1: t} is t(u_0 + u_1).
        law: that of X.
        eta: how far from the target, in total variation, counts as success.
        noisy: which key is scaled.
        target: a distribution over keys; None is the average of keys 0 and 1.

    Returns:
        The probability of success, mean and variance, and every outcome of a discrete law.

    Raises:
        ParameterError: a number is out of range.
        RangeError: a number is beyond float64.

    >>> from avow.theory.constructions import DiscreteLaw, noise_analysis
    >>> t = 11.512925464970229  # ln(n/ε) for n = 1000, ε = 0.01
    >>> analysis = noise_analysis(1000, [{0: t, 1: t}], DiscreteLaw((0.5, 1.5), (0.5, 0.5)), eta=0.1)
    >>> [round(low, 4) for low, high in analysis.outcomes[1].weights.values()], analysis.success
    ([0.9968, 0.0032], (0.0, 0.0))
    """
    _check_problem(n, heads, eta, noisy)
    target = {0: Fraction(1, 2), 1: Fraction(1, 2)} if target is None else target
    shares = target.values()
    if not all(0 <= key < n for key in target) or not all(0 <= share <= 1 for share in shares) or sum(shares) != 1:
        rule = f"must be a distribution over keys 0..{n - 1}"
        raise ParameterError("noise_analysis: target", target, rule, "leave it out for the average of keys 0 and 1")
    exact = {key: Fraction(share) for key, share in target.items()}
    coordinates = tuple(dict(head) for head in heads)
    with intervals.precision(_BITS):
        scene = _Scene(n, coordinates, noisy, exact)
        outcomes: tuple[Outcome, ...] = ()
        if isinstance(law, DiscreteLaw):
            outcomes = tuple(_outcome(scene, eta, *odds) for odds in zip(law.values, law.probabilities, strict=True))
            sure = sum((o.probability for o in outcomes if o.succeeds), Fraction(0))
            maybe = sum((o.probability for o in outcomes if o.succeeds is None), Fraction(0))
            mass = intervals.interval(sure, sure + maybe)
        else:
            mass = _gaussian_success(scene, law, eta)
        first, second = (_moment(scene, law, power) for power in (1, 2))
        # All three lie in [0, 1].
        ends = (intervals.ends(x) for x in (mass, first, second - first**2))
        success, mean, variance = ((max(0.0, low), min(1.0, high)) for low, high in ends)
        return NoiseAnalysis(n, coordinates, law, eta, noisy, exact, success, mean, variance, outcomes)


class _Scene:
    """Some heads over n keys, ready to be asked for their averaged weights at a scale or over a range of scales."""

    def __init__(self, n: int, heads: Sequence[Head], noisy: int, target: Mapping[int, Fraction]) -> None:
        self.noisy, self.target = noisy, target
        self.named = sorted({noisy, *target, *(key for head in heads for key in head)})
        # Of each head: its score on the noisy key, a shift, what each exact key weighs once shifted (those that nobody
        # names together, under None), and their sum.
        self.heads: list[tuple[intervals.arb, intervals.arb, dict[int | None, intervals.arb], intervals.arb]] = []
        for head in heads:
            scores = {key: intervals.ball(head.get(key, 0.0)) for key in self.named}
            pull = scores.pop(noisy)
            # Shifting a head's scores by the largest of the exact keys' changes no weight and overflows nothing.
            top = max([*scores.values(), intervals.ball(0)], key=lambda x: x.mid())
            shares: dict[int | None, intervals.arb] = {key: (score - top).exp() for key, score in scores.items()}
            shares[None] = (n - len(self.named)) * (-top).exp()
            self.heads.append((pull, top, shares, intervals.total(shares.values())))

    def noisy_weights(self, scale: Any) -> list[Any]:
        """σ(t_a X − ln R) of each head, of a ball that is real or complex."""
        return [1 / (1 + total * (top - pull * scale).exp()) for pull, top, _, total in self.heads]

    def weights(self, *ends: intervals.arb) -> dict[int | None, intervals.arb]:
        """Averaged weights of the named keys, and of the others together under None; at a scale or between two."""
        averaged: dict[int | None, intervals.arb] = dict.fromkeys([*self.named, None], intervals.ball(0))
        at_ends = zip(*map(self.noisy_weights, ends), strict=True)
        for (_, _, shares, total), at in zip(self.heads, at_ends, strict=True):
            # Each head's weight is monotone in X, so the ends of a range enclose it.
            weight = at[0] if len(at) == 1 else at[0].union(at[1])
            averaged[self.noisy] += weight / len(self.heads)
            left = (1 - weight) / total / len(self.heads)
            for key, share in shares.items():
                averaged[key] += left * share
        return averaged

    def error(self, *ends: intervals.arb) -> intervals.arb:
        """‖averaged weights − target‖₁."""
        weights = self.weights(*ends)
        rest = weights.pop(None)
        return sum((abs(weights[key] - intervals.ball(self.target.get(key, 0))) for key in self.named), rest)


def _outcome(scene: _Scene, eta: float, scale: Fraction, probability: Fraction) -> Outcome:
    weights = scene.weights(intervals.ball(scale))
    error, rest = scene.error(intervals.ball(scale)), intervals.ends(weights.pop(None))
    succeeds = True if error <= eta else False if error > eta else None
    enclosures = {key: intervals.ends(weight) for key, weight in weights.items() if key is not None}
    return Outcome(scale, probability, enclosures, rest, intervals.ends(error), succeeds)


def _gaussian_success(scene: _Scene, law: GaussianLaw, eta: float) -> intervals.arb:
    """P(error ≤ η): the line is halved where the answer changes, and what stays open is counted as both."""
    spread = math.sqrt(law.variance)
    low, high = law.mean - REACH * spread, law.mean + REACH * spread
    beyond = law.probability(-math.inf, low) + law.probability(high, math.inf)
    sure, left_open, pieces = intervals.ball(0), intervals.ball(1), [(low, high)]
    while left_open > _OPEN and len(pieces) < _PIECES:
        halves = []
        for low, high in pieces:
            error = scene.error(intervals.ball(low), intervals.ball(high))
            if error <= eta:
                sure += law.probability(low, high)
            elif not error > eta:
                middle = (low + high) / 2
                halves += [(low, middle), (middle, high)]
        pieces = halves
        left_open = intervals.total(law.probability(*piece) for piece in pieces)
    return sure.union(sure + left_open + beyond)


def _moment(scene: _Scene, law: DiscreteLaw | GaussianLaw, power: int) -> intervals.arb:
    """E ᾱ_a^power: a sum, or an integral enclosed by flint's quadrature."""

    def weight(scale: Any) -> Any:
        return (sum(scene.noisy_weights(scale)) / len(scene.heads)) ** power

    if isinstance(law, DiscreteLaw):
        odds = zip(law.values, law.probabilities, strict=True)
        return intervals.total(intervals.ball(p) * weight(intervals.ball(value)) for value, p in odds)
    require("flint", purpose="for rigorous integrals")
    from flint import acb, arb

    spread = intervals.ball(law.variance).sqrt()
    root = (2 * arb.pi()).sqrt()

    def density(z: Any, _: bool) -> Any:
        return weight(law.mean + spread * z) * (-z * z / 2).exp() / root

    inside = acb.integral(density, -REACH, REACH, abs_tol=arb(2) ** -60, eval_limit=10**6).real
    # The weight lies in (0, 1), so what is left out lies between 0 and the mass beyond.
    beyond = (intervals.ball(REACH) / intervals.ball(2).sqrt()).erfc()
    return inside + beyond.union(intervals.ball(0))


def _check_problem(n: int, heads: Sequence[Head], eta: float, noisy: int) -> None:
    if n < 2:
        raise ParameterError("noise_analysis: n", n, "must be at least 2", "one key alone always has weight 1")
    if not 0 < eta < 2:
        rule = "must lie in (0, 2)"
        raise ParameterError("noise_analysis: eta", eta, rule, "two distributions differ by at most 2; try eta=0.1")
    if not 0 <= noisy < n:
        raise ParameterError("noise_analysis: noisy", noisy, f"must be one of the keys 0..{n - 1}", "try noisy=0")
    if not len(heads):
        raise ParameterError("noise_analysis: heads", "[]", "must hold a head", "try heads=[{0: 10.0, 1: 10.0}]")
    for head in heads:
        for key, coordinate in head.items():
            if not 0 <= key < n:
                rule = f"must be one of the keys 0..{n - 1}"
                raise ParameterError("noise_analysis: heads", f"key {key}", rule, "count from 0")
            if not math.isfinite(as_float(coordinate)):
                rule = f"must be finite, at key {key}"
                raise NonFiniteError("noise_analysis: heads", coordinate, rule, "use a finite query")
