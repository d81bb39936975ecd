"""What a penalty on the weights becomes under plain SGD, momentum and Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb, fmpq
from sympy import Rational, Symbol

from avow.core.chart import Chart, Table
from avow.numerics import intervals
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Evidence, claim

gamma, eta = (Symbol(name, positive=True) for name in ("gamma", "eta"))


def _decays(eta: Any, gamma: Any, rate: Any, alpha: Any, start: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """θ after some steps with momentum α: with the penalty γθ² in the loss, and with decay by `rate`."""
    penalised = decayed = start
    v = u = 0 * start
    for g in gradients:
        v = alpha * v + g + 2 * gamma * penalised
        u = alpha * u + g
        penalised, decayed = penalised - eta * v, (1 - rate) * decayed - eta * u
    return penalised, decayed


def _decay_picture() -> Chart:
    steps = list(range(41))
    paths = {alpha: [_decays(0.1, 0.25, 0.05, alpha, 1.0, [0.0] * t) for t in steps] for alpha in (0.0, 0.8)}
    series = {
        "plain SGD: penalty and decay alike": (steps, [pair[0] for pair in paths[0.0]]),
        "momentum 0.8: penalty": (steps, [pair[0] for pair in paths[0.8]]),
        "momentum 0.8: decay": (steps, [pair[1] for pair in paths[0.8]]),
    }
    return Chart("A weight without a gradient of its own, η = 0.1, γ = 0.25", "step", "θ", series)


@claim(
    "sgd-l2-decay",
    topic="dynamics",
    expected="proved",
    statement=r"\theta - \eta\nabla\big(L + \gamma\|\theta\|^2\big) = (1-\lambda)\theta - \eta\nabla L,"
    r"\quad \lambda = 2\eta\gamma",
    plain="For plain SGD, adding γ‖θ‖² to the loss is the same as shrinking the weights by λ = 2ηγ each step. With"
    " momentum it is not.",
    assumptions=("plain SGD: no momentum, no preconditioner", "any loss with a gradient"),
    subject=lambda eta, gamma: 2 * eta * gamma,
    sabotage={
        "the 2 of the square forgotten": lambda eta, gamma: eta * gamma,
        "the step size forgotten": lambda eta, gamma: 2 * gamma,
    },
    picture=_decay_picture,
)
def sgd_l2_decay(rate: Callable[[Any, Any], Any]) -> Iterator[Evidence]:
    theta, rest, g = (Symbol(name, real=True) for name in ("theta", "R", "g"))
    slope = sympy.diff(gamma * (theta**2 + rest), theta)
    yield toolbox.identity(slope, 2 * gamma * theta, "the gradient of γ‖θ‖² in any one coordinate is 2γθ")
    yield toolbox.identity(
        theta - eta * (g + slope), (1 - rate(eta, gamma)) * theta - eta * g, "θ − η(g + 2γθ) = (1 − 2ηγ)θ − ηg"
    )
    alpha, start = Symbol("alpha", positive=True), Symbol("theta_0", positive=True)
    gradients = list(sympy.symbols("g_1 g_2", real=True))
    penalised, decayed = _decays(eta, gamma, rate(eta, gamma), alpha, start, gradients)
    apart = 2 * alpha * eta * gamma * start
    yield toolbox.identity(
        decayed - penalised, apart, "with momentum α the two are 2αηγθ_0 apart after two steps, whatever the gradients"
    )
    yield toolbox.positive(apart, "which is not 0 for any α > 0 and θ_0 > 0: momentum also carries the penalty on")


class AdamRules(NamedTuple):
    """One step from θ with gradient average g and root r = √v̂: the penalty in the loss, and decoupled decay."""

    penalised: Callable[..., Any] = lambda theta, g, eta, gamma, r, e: theta - eta * (g + 2 * gamma * theta) / (r + e)
    decoupled: Callable[..., Any] = lambda theta, g, eta, decay, r, e: theta - eta * g / (r + e) - eta * decay * theta


def _adam_picture() -> Chart:
    roots = [10 ** (k / 10) for k in range(-30, 11)]
    eta, decay, e = 1e-3, 1e-2, 1e-8
    series = {
        "penalty in the loss (Adam)": (roots, [eta * decay / (r + e) for r in roots]),
        "decoupled (AdamW)": (roots, [eta * decay for _ in roots]),
    }
    title = "What a step takes off a weight, η = 1e-3, λ = 2γ = 1e-2"
    return Chart(title, "√v̂, the size of its gradients", "share of the weight", series, log_x=True, log_y=True)


@claim(
    "adam-l2-vs-w",
    topic="dynamics",
    expected="proved",
    statement=r"\text{Adam with } \gamma\|\theta\|^2 \text{ shrinks } \theta \text{ by }"
    r"\frac{2\eta\gamma}{\sqrt{\hat v}+\epsilon} \text{ a step, decoupled decay by } \eta\lambda",
    plain="Under Adam, L2 in the loss shrinks weights with large gradients less, in proportion to 1/√v̂; decoupled decay"
    " shrinks all weights at one rate.",
    assumptions=(
        "steady state: θ and v̂ change little over the memory of the averages",
        "v̂ is the second moment of what Adam sees, the penalty's gradient included; g has mean 0 for its part",
        "any η, γ, λ > 0 and ϵ ≥ 0",
    ),
    subject=AdamRules(),
    sabotage={
        "no preconditioner": AdamRules(
            penalised=lambda theta, g, eta, gamma, r, e: theta - eta * (g + 2 * gamma * theta)
        ),
        "decay inside the preconditioner": AdamRules(
            decoupled=lambda theta, g, eta, decay, r, e: theta - eta * (g + decay * theta) / (r + e)
        ),
        "the squared moment, not its root": AdamRules(
            penalised=lambda theta, g, eta, gamma, r, e: theta - eta * (g + 2 * gamma * theta) / (r**2 + e)
        ),
    },
    picture=_adam_picture,
    needs=("ema-bias",),
)
def adam_l2_vs_w(rules: AdamRules) -> Iterator[Evidence]:
    theta, g, r, e = (
        Symbol("theta", real=True),
        Symbol("g", real=True),
        Symbol("r", positive=True),
        Symbol("e", nonnegative=True),
    )
    more, b = Symbol("d", positive=True), Symbol("beta", positive=True)
    t, m = Symbol("t", integer=True, positive=True), Symbol("m", real=True)
    added = Symbol("c", real=True)
    yield toolbox.identity(
        b * (m + (1 - b**t) * added) + (1 - b) * (g + added),
        (b * m + (1 - b) * g) + (1 - b ** (t + 1)) * added,
        "Adam's average is linear: a steady 2γθ = c added to the gradients adds (1 − β^t)c to it, and c once corrected",
    )
    shrink = 1 - sympy.diff(rules.penalised(theta, g, eta, gamma, r, e), theta)
    yield toolbox.identity(shrink, 2 * eta * gamma / (r + e), "so the penalty takes 2ηγ/(√v̂ + ϵ) of a weight each step")
    yield toolbox.identity((shrink * r).subs(e, 0), 2 * eta * gamma, "which is in proportion to 1/√v̂ where ϵ is 0")
    yield toolbox.positive(
        sympy.factor(shrink - shrink.subs(r, r + more)), "and strictly less the larger √v̂ is, for any ϵ ≥ 0"
    )
    spread, wider = Symbol("s", positive=True), Symbol("w", positive=True)
    seen = sympy.Poly(sympy.expand((g + added) ** 2), g)
    # E g = 0 and E g² = s².
    second = seen.coeff_monomial(g**2) * spread**2 + seen.coeff_monomial(1)
    yield toolbox.identity(second, spread**2 + added**2, "v̂ of gradients with mean 0 and variance s² is s² + (2γθ)²")
    yield toolbox.positive(
        sympy.expand(second.subs(spread, spread + wider) - second), "so larger gradients have the larger v̂"
    )
    decay = Symbol("lambda", positive=True)
    kept = 1 - sympy.diff(rules.decoupled(theta, g, eta, decay, r, e), theta)
    yield toolbox.identity(kept, eta * decay, "decoupled decay takes ηλ, whatever the gradients are")
    shares = [shrink.subs({eta: Rational(1, 1000), gamma: Rational(1, 200), r: root, e: 0}) for root in (1, 100)]
    yield toolbox.rational(
        shares[0] == 100 * shares[1], "√v̂ of 1 and of 100: one weight shrinks a hundred times faster", shares=shares
    )


def _with_momentum(penalty: Fraction, steps: int) -> Fraction:
    """θ after heavy-ball steps on ½(θ − 1)² + penalty·θ², from 0."""
    theta, v = Fraction(0), Fraction(0)
    for _ in range(steps):
        v = v / 4 + (theta - 1) + 2 * penalty * theta
        theta -= v / 4
    return theta


def _with_adam(penalty: Fraction, steps: int) -> arb:
    """θ after Adam's steps on ½(θ − 1)² + penalty·θ², from 0, in balls: η = 1/20, β = (9/10, 99/100), ϵ = 10^-8."""
    first, second = arb(fmpq(9, 10)), arb(fmpq(99, 100))
    weight = intervals.ball(penalty)
    theta, m, v = arb(0), arb(0), arb(0)
    for t in range(1, steps + 1):
        g = theta - 1 + 2 * weight * theta
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
        corrected = m / (1 - first**t), v / (1 - second**t)
        theta = theta - corrected[0] / (corrected[1].sqrt() + arb(10) ** -8) / 20
    return theta


def _l2_picture() -> Table:
    rows = []
    for penalty in (Fraction(0), Fraction(1, 2)):
        with intervals.precision(512):
            adam = float(_with_adam(penalty, 150).mid())
        rows.append(
            [
                str(penalty),
                f"{float(1 / (1 + 2 * penalty)):.4f}",
                f"{float(_with_momentum(penalty, 60)):.4f}",
                f"{adam:.4f}",
            ]
        )
    headings = ("γ", "where loss and penalty balance", "momentum, 60 steps", "Adam, 150 steps")
    return Table("Where ½(θ − 1)² + γθ² ends", headings, rows)


@claim(
    "l2-only-sgd",
    topic="dynamics",
    expected="refuted",
    statement=r"\text{adding } \gamma\|\theta\|^2 \text{ to the loss regularises under plain SGD only}",
    plain="L2 regularisation works only with plain SGD.",
    assumptions=("to regularise: to end at smaller weights than without the penalty",),
    subject=Fraction(1, 2),
    sabotage={"no penalty at all": Fraction(0)},
    picture=_l2_picture,
    needs=("adam-l2-vs-w",),
)
def l2_only_sgd(penalty: Fraction) -> Iterator[Evidence]:
    theta = Symbol("theta", real=True)
    balance = 1 / (1 + 2 * gamma)
    slope = sympy.diff((theta - 1) ** 2 / 2 + gamma * theta**2, theta)
    yield toolbox.identity(
        slope.subs(theta, balance),
        0,
        "½(θ − 1)² + γθ² is flat at 1/(1 + 2γ) only: an optimiser that rests where it is flat rests there",
    )
    yield toolbox.positive(1 - balance, "which is below 1, where the loss alone would end")
    small = Fraction(1, 1000)
    ends = _with_momentum(penalty, 60), _with_momentum(Fraction(0), 60)
    yield toolbox.counterexample(
        abs(ends[0] - Fraction(1, 2)) < small and abs(ends[1] - 1) < small,
        "heavy-ball momentum, 60 steps: with γ = ½ it ends at ½, without at 1",
        "fractions",
        with_penalty=float(ends[0]),
        without=float(ends[1]),
    )
    with intervals.precision(512):
        adam = _with_adam(penalty, 150), _with_adam(Fraction(0), 150)
        apart = bool(adam[0] < arb(fmpq(11, 20)) and adam[1] > arb(fmpq(19, 20)))
    yield toolbox.counterexample(
        apart,
        "Adam, 150 steps: with γ = ½ it ends near ½, without near 1",
        "balls",
        with_penalty=adam[0].str(8),
        without=adam[1].str(8),
    )
