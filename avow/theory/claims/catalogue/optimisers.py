"""Momentum and running averages: one as the other, unrolled, and set right at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from sympy import Symbol

from avow.core.chart import Chart
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Evidence, claim

beta = 1 / (1 + Symbol("s", positive=True))  # any number strictly between 0 and 1


class Momenta(NamedTuple):
    """(α, ε) of v = αv + εg for (β, δ) of v = βv + (1 − β)g with step δ: as stated and as amended."""

    stated: Callable[[Any, Any], tuple[Any, Any]]
    amended: Callable[[Any, Any], tuple[Any, Any]]


CONVERSION = Momenta(
    lambda beta, delta: (delta * beta, delta * (1 - beta)), lambda beta, delta: (beta, delta * (1 - beta))
)


def _travelled(alpha: Any, rate: Any, gradients: list[Any]) -> list[Any]:
    """The steps of v = αv + εg, Δθ = −v, from v = 0."""
    v, steps = 0 * rate, []
    for g in gradients:
        v = alpha * v + rate * g
        steps.append(-v)
    return steps


def _averaged(beta: Any, delta: Any, gradients: list[Any]) -> list[Any]:
    """The steps of v = βv + (1 − β)g, Δθ = −δv, from v = 0."""
    return [delta * step for step in _travelled(beta, 1 - beta, gradients)]


def _momentum_picture() -> Chart:
    b, d, ones = 0.9, 0.5, [1.0] * 30
    steps = list(range(1, 31))
    series = {
        "average, β = 0.9, δ = 0.5": (steps, _averaged(b, d, ones)),
        "momentum (β, δ(1 − β))": (steps, _travelled(b, d * (1 - b), ones)),
        "momentum (δβ, δ(1 − β))": (steps, _travelled(d * b, d * (1 - b), ones)),
    }
    return Chart("The same average as momentum, two conversions", "step", "Δθ for a gradient of 1", series)


@claim(
    "momentum-ema",
    topic="dynamics",
    expected="corrected",
    statement=r"v \leftarrow \alpha v + \epsilon g,\ \Delta\theta = -v \;\equiv\; v \leftarrow \beta v + (1-\beta)g,\ "
    r"\Delta\theta = -\delta v \quad\text{for } (\alpha, \epsilon) = (\delta\beta, \delta(1-\beta))",
    plain="Momentum and an exponential average of gradients with step δ are the same for α = δβ, ε = δ(1 − β).",
    amended=r"(\alpha, \epsilon) = (\beta, \delta(1-\beta)),\ \text{and for } \delta \ne 0, \beta \ne 1"
    r"\text{ no other}",
    amended_plain="They are the same for α = β, ε = δ(1 − β), and for no other pair: the step size does not belong in"
    " the decay.",
    assumptions=("both start from v = 0", "any gradients"),
    subject=CONVERSION,
    sabotage={
        "the step left out": CONVERSION._replace(amended=lambda beta, delta: (beta, 1 - beta)),
        "the average's own weight left out": CONVERSION._replace(amended=lambda beta, delta: (beta, delta)),
        "a conversion that is right to begin with": CONVERSION._replace(stated=CONVERSION.amended),
    },
    picture=_momentum_picture,
)
def momentum_ema(momenta: Momenta) -> Iterator[Evidence]:
    half, two, ones = Fraction(1, 2), Fraction(2), [Fraction(1), Fraction(1)]
    found, wanted = _travelled(*momenta.stated(half, two), ones), _averaged(half, two, ones)
    yield toolbox.counterexample(
        found != wanted,
        "β = ½, δ = 2, two gradients of 1",
        "fractions",
        momentum=[str(step) for step in found],
        average=[str(step) for step in wanted],
    )
    b, u, g, first = (Symbol(name, real=True) for name in ("beta", "u", "g", "g_1"))
    step = Symbol("delta", real=True)
    alpha, rate = momenta.amended(b, step)
    yield toolbox.identity(
        alpha * (step * u) + rate * g,
        step * (b * u + (1 - b) * g),
        "if v = δu before a step, v = δu after it",
        amended=True,
    )
    yield toolbox.identity(step * 0, 0, "and v = δu = 0 at the start: so Δθ = −v = −δu at every step", amended=True)
    free_alpha, free_rate = Symbol("alpha", real=True), Symbol("epsilon", real=True)
    other = _travelled(free_alpha, free_rate, [first, 0])
    same = _averaged(b, step, [first, 0])
    yield toolbox.identity(
        same[0] - other[0], first * (free_rate - rate), "only ε = δ(1 − β) gives the first step", amended=True
    )
    yield toolbox.identity(
        (same[1] - other[1]).subs(free_rate, rate),
        first * rate * (free_alpha - alpha),
        "and then, as ε is not 0, only α = β the second",
        amended=True,
    )


def _ema_picture() -> Chart:
    ages = list(range(40))
    series = {f"β = {b}": (ages, [(1 - b) * b**age for age in ages]) for b in (0.5, 0.8, 0.9, 0.95)}
    return Chart("What an average remembers", "steps ago", "weight of the gradient", series)


@claim(
    "ema-unrolled",
    topic="dynamics",
    expected="proved",
    statement=r"v_t = \beta v_{t-1} + (1-\beta)g_t,\ v_0 = 0 \;\Rightarrow\;"
    r"v_t = (1-\beta)\sum_{i=1}^{t}\beta^{t-i}g_i",
    plain="An exponential average is the sum of all gradients so far, each weighted by (1 − β) times β to its age.",
    assumptions=("v_0 = 0", "0 < β < 1, any gradients"),
    subject=lambda beta, t, i: (1 - beta) * beta ** (t - i),
    sabotage={
        "without 1 − β": lambda beta, t, i: beta ** (t - i),
        "one step older": lambda beta, t, i: (1 - beta) * beta ** (t - i + 1),
    },
    picture=_ema_picture,
)
def ema_unrolled(weight: Callable[[Any, Any, Any], Any]) -> Iterator[Evidence]:
    b = Symbol("beta", positive=True)
    t, i = Symbol("t", integer=True, positive=True), Symbol("i", integer=True, positive=True)
    yield toolbox.identity(weight(b, 1, 1), 1 - b, "v_1 = (1 − β)g_1: the sum for t = 1")
    yield toolbox.identity(
        b * weight(b, t, i), weight(b, t + 1, i), "a step multiplies every old weight by β, as the sum for t + 1 has it"
    )
    yield toolbox.identity(weight(b, t + 1, t + 1), 1 - b, "and gives the new gradient the weight 1 − β: so for all t")
    gradients = sympy.symbols("g1:6", real=True)
    unrolled = sum(weight(b, 5, k + 1) * g for k, g in enumerate(gradients))
    recurred = -_travelled(b, 1 - b, list(gradients))[-1]
    yield toolbox.identity(recurred, unrolled, "five steps written out")


def _bias_picture() -> Chart:
    steps = list(range(1, 61))
    series = {f"β = {b}": (steps, [1 - b**t for t in steps]) for b in (0.9, 0.95, 0.99)}
    return Chart("The share of E g that an average from 0 has reached", "t", "1 − β^t", series)


@claim(
    "ema-bias",
    topic="dynamics",
    expected="proved",
    statement=r"E g_i = E g \;\Rightarrow\; E v_t = (1-\beta^t)\,E g,\ \text{so}\ "
    r"E\Big[\frac{v_t}{1-\beta^t}\Big] = E g",
    plain="An average that starts from 0 is too small by the factor 1 − β^t; divided by it, it is right on average,"
    " where the gradients' mean does not change.",
    assumptions=("v_0 = 0", "0 < β < 1, t ≥ 1", "stationary: every g_i has the mean E g"),
    subject=lambda beta, t: 1 - beta**t,
    sabotage={
        "a step too far": lambda beta, t: 1 - beta ** (t + 1),
        "the limit's": lambda beta, t: 1 - beta,
        "none": lambda beta, t: sympy.Integer(1),
    },
    picture=_bias_picture,
    needs=("ema-unrolled",),
)
def ema_bias(total: Callable[[Any, Any], Any]) -> Iterator[Evidence]:
    b, mean = Symbol("beta", positive=True), Symbol("mu", real=True)
    t = Symbol("t", integer=True, positive=True)
    yield toolbox.induction(
        lambda n: total(b, n),
        0,
        0,
        lambda weight, n: b * weight + (1 - b),
        "the weights of v_t sum to 1 − β^t: 0 at t = 0, and a step turns a sum s into βs + 1 − β",
    )
    yield toolbox.identity(
        b * (total(b, t) * mean) + (1 - b) * mean,
        total(b, t + 1) * mean,
        "E is linear: E v_(t+1) = βE v_t + (1 − β)E g, so E v_t = (1 − β^t)E g for all t",
    )
    yield toolbox.positive(total(beta, 1), "1 − β^t is above 0 at t = 1")
    yield toolbox.positive(
        sympy.powsimp(sympy.factor(total(b, t + 1) - total(b, t))).subs(b, beta),
        "and rises with t: it may be divided by",
    )
    yield toolbox.identity(total(b, t) * mean / total(b, t), mean, "E[v_t/(1 − β^t)] = E g")
    half = Fraction(1, 2)
    drifting = -_travelled(half, 1 - half, [Fraction(1), Fraction(2)])[-1] / (1 - half**2)
    yield toolbox.rational(
        drifting == Fraction(5, 3) != 2,
        "stationary it must be: for gradients 1, 2 the corrected average is not 2",
        found=drifting,
    )
