"""Momentum and running averages: one as the other, unrolled, and corrected; and what a penalty on the weights does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb, fmpq
from sympy import Rational, Symbol

from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball, most, precision, total
from avow.theory.claims.claim import Evidence, Falsifier, Formula, Ranges, Versions, claims_on, numbered, of_versions
from avow.theory.claims.toolbox import counterexample, identity, induction, positive, rational, symbols

claim = claims_on("dynamics")
beta = 1 / (1 + Symbol("s", positive=True))  # any number strictly between 0 and 1

# (α, ε) of v = αv + εg for (β, δ) of v = βv + (1 − β)g with step δ.
CONVERSION = Versions(
    lambda beta, delta: (delta * beta, delta * (1 - beta)), lambda beta, delta: (beta, delta * (1 - beta))
)


def _travelled(alpha: Any, rate: Any, gradients: Sequence[Any]) -> list[Any]:
    """The steps of v = αv + εg, Δθ = −v, from v = 0."""
    v, steps = 0 * rate, []
    for g in gradients:
        v = alpha * v + rate * g
        steps.append(-v)
    return steps


def _averaged(beta: Any, delta: Any, gradients: Sequence[Any]) -> list[Any]:
    """The steps of v = βv + (1 − β)g, Δθ = −δv, from v = 0."""
    return [delta * step for step in _travelled(beta, 1 - beta, gradients)]


def _momentum_picture() -> Chart:
    ones, steps = [1.0] * 30, list(range(1, 31))
    drawn = {
        "average, β = 0.9, δ = 0.5": _averaged(0.9, 0.5, ones),
        "momentum (β, δ(1 − β))": _travelled(0.9, 0.5 * (1 - 0.9), ones),
        "momentum (δβ, δ(1 − β))": _travelled(0.5 * 0.9, 0.5 * (1 - 0.9), ones),
    }
    series = {name: (steps, path) for name, path in drawn.items()}
    return Chart("The same average as momentum, two conversions", "step", "Δθ for a gradient of 1", series)


def _momentum(conversion: Formula, beta: arb, delta: arb, *gradients: arb) -> arb:
    alpha, rate = conversion(beta, delta)
    steps = zip(_travelled(alpha, rate, gradients), _averaged(beta, delta, gradients), strict=True)
    return most([abs(one - other) for one, other in steps])


_BETA: Ranges = {"β": (0.01, 0.99)}


@claim(
    "momentum-ema",
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
    falsifier=Falsifier(_BETA | {"δ": (0.01, 3)} | numbered("g₁ g₂ g₃", -2, 2), *of_versions(_momentum)),
)
def momentum_ema(momenta: Versions) -> Iterator[Evidence]:
    half, two, ones = Fraction(1, 2), Fraction(2), [Fraction(1), Fraction(1)]
    alpha, rate = momenta.stated(half, two)
    travelled, wanted = _travelled(alpha, rate, ones), _averaged(half, two, ones)
    facts = {"momentum": [str(step) for step in travelled], "average": [str(step) for step in wanted]}
    yield counterexample(travelled != wanted, "β = ½, δ = 2, two gradients of 1", "fractions", **facts)
    b, u, g, first, step, free_alpha, free_rate = symbols(real="beta u g g_1 delta alpha epsilon")
    alpha, rate = momenta.amended(b, step)
    says = "if v = δu before a step, v = δu after it"
    yield identity(alpha * (step * u) + rate * g, step * (b * u + (1 - b) * g), says, amended=True)
    yield identity(step * 0, 0, "and v = δu = 0 at the start: so Δθ = −v = −δu at every step", amended=True)
    other = _travelled(free_alpha, free_rate, [first, 0])
    same = _averaged(b, step, [first, 0])
    says = "only ε = δ(1 − β) gives the first step"
    yield identity(same[0] - other[0], first * (free_rate - rate), says, amended=True)
    says = "and then, as ε is not 0, only α = β the second"
    yield identity((same[1] - other[1]).subs(free_rate, rate), first * rate * (free_alpha - alpha), says, amended=True)


def _ema_picture() -> Chart:
    weights = {f"β = {b}": lambda age, b=b: (1 - b) * b**age for b in (0.5, 0.8, 0.9, 0.95)}
    return curves("What an average remembers", "steps ago", "weight of the gradient", list(range(40)), weights)


def _unrolled(weight: Formula, beta: arb, *gradients: arb) -> arb:
    last = len(gradients)
    unrolled = total([weight(beta, last, i + 1) * gradient for i, gradient in enumerate(gradients)])
    return abs(_travelled(beta, 1 - beta, gradients)[-1] + unrolled)


@claim(
    "ema-unrolled",
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
    falsifier=Falsifier(_BETA | numbered("g₁ g₂ g₃ g₄", -2, 2), _unrolled),
)
def ema_unrolled(weight: Formula) -> Iterator[Evidence]:
    b, t, i = symbols(positive="beta", integer_positive="t i")
    yield identity(weight(b, 1, 1), 1 - b, "v_1 = (1 − β)g_1: the sum for t = 1")
    says = "a step multiplies every old weight by β, as the sum for t + 1 has it"
    yield identity(b * weight(b, t, i), weight(b, t + 1, i), says)
    yield identity(weight(b, t + 1, t + 1), 1 - b, "and gives the new gradient the weight 1 − β: so for all t")
    gradients = sympy.symbols("g1:6", real=True)
    unrolled = sum(weight(b, 5, k + 1) * g for k, g in enumerate(gradients))
    recurred = -_travelled(b, 1 - b, list(gradients))[-1]
    yield identity(recurred, unrolled, "five steps written out")


def _bias_picture() -> Chart:
    shares = {f"β = {b}": lambda t, b=b: 1 - b**t for b in (0.9, 0.95, 0.99)}
    return curves("The share of E g that an average from 0 has reached", "t", "1 − β^t", list(range(1, 61)), shares)


def _bias(total: Formula, beta: arb, mean: arb) -> arb:
    steps = enumerate(_travelled(beta, 1 - beta, [mean] * 5), start=1)
    return most([abs(step + total(beta, t) * mean) for t, step in steps])


@claim(
    "ema-bias",
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
        "none": lambda beta, t: beta / beta,
    },
    picture=_bias_picture,
    needs=("ema-unrolled",),
    falsifier=Falsifier(_BETA | {"E g": (-2, 2)}, _bias),
)
def ema_bias(total: Formula) -> Iterator[Evidence]:
    b, mean, t = symbols(positive="beta", real="mu", integer_positive="t")
    says = "the weights of v_t sum to 1 − β^t: 0 at t = 0, and a step turns a sum s into βs + 1 − β"
    yield induction(lambda n: total(b, n), 0, 0, lambda weight, n: b * weight + (1 - b), says)
    says = "E is linear: E v_(t+1) = βE v_t + (1 − β)E g, so E v_t = (1 − β^t)E g for all t"
    yield identity(b * (total(b, t) * mean) + (1 - b) * mean, total(b, t + 1) * mean, says)
    yield positive(total(beta, 1), "1 − β^t is above 0 at t = 1")
    says = "and rises with t: it may be divided by"
    yield positive(sympy.powsimp(sympy.factor(total(b, t + 1) - total(b, t))).subs(b, beta), says)
    yield identity(total(b, t) * mean / total(b, t), mean, "E[v_t/(1 − β^t)] = E g")
    half = Fraction(1, 2)
    drifting = -_travelled(half, 1 - half, [Fraction(1), Fraction(2)])[-1] / (1 - half**2)
    says = "stationary it must be: for gradients 1, 2 the corrected average is not 2"
    yield rational(drifting == Fraction(5, 3) != 2, says, found=drifting)


gamma, eta = symbols(positive="gamma eta")


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
    plain, loud = ([_decays(0.1, 0.25, 0.05, alpha, 1.0, [0.0] * t) for t in steps] for alpha in (0.0, 0.8))
    series = {
        "plain SGD: penalty and decay alike": (steps, [pair[0] for pair in plain]),
        "momentum 0.8: penalty": (steps, [pair[0] for pair in loud]),
        "momentum 0.8: decay": (steps, [pair[1] for pair in loud]),
    }
    return Chart("A weight without a gradient of its own, η = 0.1, γ = 0.25", "step", "θ", series)


def _decay(rate: Formula, theta: arb, gradient: arb, eta: arb, gamma: arb) -> arb:
    penalised = theta - eta * (gradient + 2 * gamma * theta)
    return abs(penalised - ((1 - rate(eta, gamma)) * theta - eta * gradient))


@claim(
    "sgd-l2-decay",
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
    falsifier=Falsifier(numbered("θ g", -2, 2) | numbered("η γ", 0.01, 1), _decay),
)
def sgd_l2_decay(rate: Formula) -> Iterator[Evidence]:
    theta, rest, g, alpha, start = symbols(real="theta R g", positive="alpha theta_0")
    slope = sympy.diff(gamma * (theta**2 + rest), theta)
    yield identity(slope, 2 * gamma * theta, "the gradient of γ‖θ‖² in any one coordinate is 2γθ")
    says = "θ − η(g + 2γθ) = (1 − 2ηγ)θ − ηg"
    yield identity(theta - eta * (g + slope), (1 - rate(eta, gamma)) * theta - eta * g, says)
    gradients = list(sympy.symbols("g_1 g_2", real=True))
    penalised, decayed = _decays(eta, gamma, rate(eta, gamma), alpha, start, gradients)
    apart = 2 * alpha * eta * gamma * start
    says = "with momentum α the two are 2αηγθ_0 apart after two steps, whatever the gradients"
    yield identity(decayed - penalised, apart, says)
    yield positive(apart, "which is not 0 for any α > 0 and θ_0 > 0: momentum also carries the penalty on")


class AdamRules(NamedTuple):
    """One step from θ with gradient average g and root r = √v̂: the penalty in the loss, and decoupled decay."""

    penalised: Formula = lambda theta, g, eta, gamma, r, e: theta - eta * (g + 2 * gamma * theta) / (r + e)
    decoupled: Formula = lambda theta, g, eta, decay, r, e: theta - eta * g / (r + e) - eta * decay * theta


def _adam_picture() -> Chart:
    roots = [10 ** (k / 10) for k in range(-30, 11)]
    eta, decay, e = 1e-3, 1e-2, 1e-8
    series = {
        "penalty in the loss (Adam)": (roots, [eta * decay / (r + e) for r in roots]),
        "decoupled (AdamW)": (roots, [eta * decay for _ in roots]),
    }
    title = "What a step takes off a weight, η = 1e-3, λ = 2γ = 1e-2"
    return Chart(title, "√v̂, the size of its gradients", "share of the weight", series, log_x=True, log_y=True)


def _adam(rules: AdamRules, theta: arb, g: arb, eta: arb, gamma: arb, decay: arb, root: arb, more: arb, e: arb) -> arb:
    """Two weights, one with a √v̂ that is larger by `more`."""

    def taken(rule: Formula, strength: arb, r: arb) -> arb:
        """What a step takes of a weight: each rule is a line in θ."""
        return 1 - (rule(theta + 1, g, eta, strength, r, e) - rule(theta, g, eta, strength, r, e))

    shrunk, less = (taken(rules.penalised, gamma, r) for r in (root, root + more))
    decoupled = taken(rules.decoupled, decay, root)
    return most([abs(shrunk - 2 * eta * gamma / (root + e)), less - shrunk, abs(decoupled - eta * decay)])


@claim(
    "adam-l2-vs-w",
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
    falsifier=Falsifier(
        numbered("θ g", -2, 2) | numbered("η γ λ", 0.01, 1) | numbered("√v̂ more", 0.01, 5) | {"ϵ": (0, 0.1)}, _adam
    ),
)
def adam_l2_vs_w(rules: AdamRules) -> Iterator[Evidence]:
    theta, g, m, added, t, e = symbols(real="theta g m c", integer_positive="t", nonnegative="e")
    r, more, b, spread, wider, decay = symbols(positive="r d beta s w lambda")
    yield identity(
        b * (m + (1 - b**t) * added) + (1 - b) * (g + added),
        (b * m + (1 - b) * g) + (1 - b ** (t + 1)) * added,
        "Adam's average is linear: a steady 2γθ = c added to the gradients adds (1 − β^t)c to it, and c once corrected",
    )
    shrink = 1 - sympy.diff(rules.penalised(theta, g, eta, gamma, r, e), theta)
    yield identity(shrink, 2 * eta * gamma / (r + e), "so the penalty takes 2ηγ/(√v̂ + ϵ) of a weight each step")
    yield identity((shrink * r).subs(e, 0), 2 * eta * gamma, "which is in proportion to 1/√v̂ where ϵ is 0")
    yield positive(sympy.factor(shrink - shrink.subs(r, r + more)), "and strictly less the larger √v̂ is, for any ϵ ≥ 0")
    seen = sympy.Poly(sympy.expand((g + added) ** 2), g)
    # E g = 0 and E g² = s².
    second = seen.coeff_monomial(g**2) * spread**2 + seen.coeff_monomial(1)
    yield identity(second, spread**2 + added**2, "v̂ of gradients with mean 0 and variance s² is s² + (2γθ)²")
    yield positive(sympy.expand(second.subs(spread, spread + wider) - second), "so larger gradients have the larger v̂")
    decoupled = 1 - sympy.diff(rules.decoupled(theta, g, eta, decay, r, e), theta)
    yield identity(decoupled, eta * decay, "decoupled decay takes ηλ, whatever the gradients are")
    shares = [shrink.subs({eta: Rational(1, 1000), gamma: Rational(1, 200), r: root, e: 0}) for root in (1, 100)]
    says = "√v̂ of 1 and of 100: one weight shrinks a hundred times faster"
    yield rational(shares[0] == 100 * shares[1], says, shares=shares)


def _with_momentum(penalty: Any, steps: int, alpha: Any = Fraction(1, 4), eta: Any = Fraction(1, 4)) -> Any:
    """θ after heavy-ball steps on ½(θ − 1)² + penalty·θ², from 0."""
    theta = v = 0 * penalty
    for _ in range(steps):
        v = alpha * v + (theta - 1) + 2 * penalty * theta
        theta = theta - eta * v
    return theta


def _with_adam(penalty: Fraction, steps: int) -> arb:
    """θ after Adam's steps on ½(θ − 1)² + penalty·θ², from 0, in balls: η = 1/20, β = (9/10, 99/100), ϵ = 10^-8."""
    first, second = arb(fmpq(9, 10)), arb(fmpq(99, 100))
    weight = ball(penalty)
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
        with precision(512):
            ends = [1 / (1 + 2 * penalty), _with_momentum(penalty, 60), _with_adam(penalty, 150).mid()]
        rows.append([str(penalty), *(f"{float(end):.4f}" for end in ends)])
    headings = ("γ", "where loss and penalty balance", "momentum, 60 steps", "Adam, 150 steps")
    return Table("Where ½(θ − 1)² + γθ² ends", headings, rows)


def _only_plain(penalty: Fraction, times: arb, momentum: arb, eta: arb) -> arb:
    """Forty steps of momentum α on ½(θ − 1)² + γθ², from 0, with the penalty and without."""
    # To regularise is to end at a smaller weight, which the statement denies to all but plain SGD.
    bare, penalised = (_with_momentum(times * ball(strength), 40, momentum, eta) for strength in (Fraction(0), penalty))
    return abs(bare) - abs(penalised)


@claim(
    "l2-only-sgd",
    expected="refuted",
    statement=r"\text{adding } \gamma\|\theta\|^2 \text{ to the loss regularises under plain SGD only}",
    plain="L2 regularisation works only with plain SGD.",
    assumptions=("to regularise: to end at smaller weights than without the penalty",),
    subject=Fraction(1, 2),
    sabotage={"no penalty at all": Fraction(0)},
    picture=_l2_picture,
    needs=("adam-l2-vs-w",),
    falsifier=Falsifier({"γ/½": (0.1, 2), "α": (0.1, 0.9), "η": (0.1, 0.5)}, _only_plain),
)
def l2_only_sgd(penalty: Fraction) -> Iterator[Evidence]:
    theta = Symbol("theta", real=True)
    balance = 1 / (1 + 2 * gamma)
    slope = sympy.diff((theta - 1) ** 2 / 2 + gamma * theta**2, theta)
    says = "½(θ − 1)² + γθ² is flat at 1/(1 + 2γ) only: an optimiser that rests where it is flat rests there"
    yield identity(slope.subs(theta, balance), 0, says)
    yield positive(1 - balance, "which is below 1, where the loss alone would end")
    small = Fraction(1, 1000)
    ends = _with_momentum(penalty, 60), _with_momentum(Fraction(0), 60)
    says = "heavy-ball momentum, 60 steps: with γ = ½ it ends at ½, without at 1"
    facts = {"with_penalty": float(ends[0]), "without": float(ends[1])}
    yield counterexample(abs(ends[0] - Fraction(1, 2)) < small and abs(ends[1] - 1) < small, says, "fractions", **facts)
    with precision(512):
        adam = _with_adam(penalty, 150), _with_adam(Fraction(0), 150)
        apart = bool(adam[0] < arb(fmpq(11, 20)) and adam[1] > arb(fmpq(19, 20)))
    says = "Adam, 150 steps: with γ = ½ it ends near ½, without near 1"
    yield counterexample(apart, says, "balls", with_penalty=adam[0].str(8), without=adam[1].str(8))
