"""Momentum and running averages: one as the other, unrolled, and corrected; and what a penalty on the weights does."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb, fmpq
from sympy import Abs, And, Derivative, Eq, Equivalent, Implies, Ne, Sum

from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball, precision
from avow.theory.claims.claim import Formula, Versions, claims_on
from avow.theory.claims.formal import Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.proof import Proof, Refutation

claim = claims_on("dynamics")
alpha, beta, gamma, delta, eta, mu, decay, small = real(r"alpha beta gamma delta eta mu lambda epsilon")
T, t, i, N, w = whole("T t i N omega")
g, u, v, p = sequence("g u v p")

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


def recurrence(v: Any, decay: Any, rate: Any) -> list[Any]:
    """The running sum v_t = decay·v_{t−1} + rate·g_t that starts from nothing, as two formulas."""
    return [Eq(v[1], rate * g[1]), each(t, 2, T, Eq(v[t], decay * v[t - 1] + rate * g[t]))]


def running(decay: Any, rate: Any, gradients: Sequence[Any]) -> list[Any]:
    """The numbers of such a running sum."""
    return [-step for step in _travelled(decay, rate, gradients)]


def _momentum_picture() -> Chart:
    ones, steps = [1.0] * 30, list(range(1, 31))
    drawn = {
        "average, β = 0.9, δ = 0.5": _averaged(0.9, 0.5, ones),
        "momentum (β, δ(1 − β))": _travelled(0.9, 0.5 * (1 - 0.9), ones),
        "momentum (δβ, δ(1 − β))": _travelled(0.5 * 0.9, 0.5 * (1 - 0.9), ones),
    }
    series = {name: (steps, path) for name, path in drawn.items()}
    return Chart("The same average as momentum, two conversions", "step", "Δθ for a gradient of 1", series)


_SAME = each(t, 1, T, Eq(v[t], delta * u[t]))
_ROLES = {
    alpha: "the decay of momentum",
    small: "the rate of momentum",
    beta: "the decay of the average",
    delta: "the step of the average",
    T: "the number of steps",
    g: "the gradients",
    v: "momentum, which is subtracted from the weight",
    u: "the average, of which a step is subtracted from the weight",
}


def _momentum_case(which: int, *numbers: Any) -> dict[Any, Any]:
    """Three steps; the pair is the one as stated, the right one, or a step away from it."""
    b, d, *gradients = list(map(decimal, numbers))
    a, rate = ((d * b, d * (1 - b)), (b, d * (1 - b)), (b, 1 - b), (b, d))[which]
    sums = {v: running(a, rate, gradients), u: running(b, 1 - b, gradients)}
    return {alpha: a, small: rate, beta: b, delta: d, T: 3, g: gradients, **sums}


_MOMENTUM = Spans(
    {"pair": range(4), "β": (0.01, 0.99), "δ": (0.01, 3), "g₁": (0.1, 2), "g₂": (-2, 2), "g₃": (-2, 2)}, _momentum_case
)


def _converted(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return Eq(alpha, pair[0]), Eq(small, pair[1])


def _one_way(versions: Versions) -> Statement:
    pair = versions.stated(beta, delta)
    return Statement(
        variables=_ROLES,
        given=[T >= 1, *recurrence(v, alpha, small), *recurrence(u, beta, 1 - beta), *_converted(pair)],
        then={"same": _SAME},
        terms={"decay": pair[0], "rate": pair[1]},
        spans=_MOMENTUM,
    )


def _both_ways(versions: Versions) -> Statement:
    pair = versions.amended(beta, delta)
    different = [Ne(g[1], 0), Ne(delta, 0), Ne(beta, 1)]
    return Statement(
        variables=_ROLES,
        given=[T >= 2, *recurrence(v, alpha, small), *recurrence(u, beta, 1 - beta), *different],
        then={"same": Equivalent(_SAME, And(*_converted(pair)))},
        terms={"decay": pair[0], "rate": pair[1]},
        spans=_MOMENTUM,
    )


@claim(
    "momentum-ema",
    expected="corrected",
    formal=_one_way,
    plain="Momentum and an exponential average of gradients are the same for the decay {decay} and the rate {rate}.",
    amendment=_both_ways,
    amended_plain="They are the same for the decay {decay} and the rate {rate}, and for no other pair once a first"
    " gradient is there: the step size does not belong in the decay.",
    subject=CONVERSION,
    sabotage={
        "the step left out": CONVERSION._replace(amended=lambda beta, delta: (beta, 1 - beta)),
        "the average's own weight left out": CONVERSION._replace(amended=lambda beta, delta: (beta, delta)),
        "a conversion that is right to begin with": CONVERSION._replace(stated=CONVERSION.amended),
    },
    picture=_momentum_picture,
)
def momentum_ema(against: Refutation, proof: Proof, versions: Versions) -> None:
    half, two, ones = Fraction(1, 2), Fraction(2), [Fraction(1), Fraction(1)]
    a, rate = (Fraction(part) for part in versions.stated(half, two))
    sums = {v: running(a, rate, ones), u: running(half, 1 - half, ones)}
    case = {alpha: a, small: rate, beta: half, delta: two, T: 2, g: ones, **sums}
    against.case(case, "two gradients of 1: a step of 2 makes the decay 1, and momentum forgets nothing")
    steps, differ = (
        proof.given(T >= 2),
        [proof.given(Ne(one, other)) for one, other in ((g[1], 0), (delta, 0), (beta, 1))],
    )
    (first, later), (start, average) = (
        [proof.given(one) for one in recurrence(*parts)] for parts in ((v, alpha, small), (u, beta, 1 - beta))
    )
    pair = And(*_converted(versions.amended(beta, delta)))
    # Forwards: if v = δu before a step, v = δu after it.
    follows = Implies(And(pair, t <= T), Eq(v[t], delta * u[t]))
    base = proof.have(follows.subs(t, 1), first, start)
    next_v, next_u = (proof.member(step.formula, t + 1) for step in (later, average))
    onward = proof.have(
        Implies(And(t >= 1, follows), follows.subs(t, t + 1)),
        later,
        average,
        next_v,
        next_u,
        says="if v is δu before a step, it is δu after it",
    )
    always = proof.induction(follows, t, 1, base, onward)
    forwards = proof.every(_SAME, always, when=pair)
    # Backwards: the first step tells the rate, the second the decay.
    one, two_ = (proof.member(_SAME, sympy.Integer(k)) for k in (1, 2))
    second_v, second_u = (proof.member(step.formula, sympy.Integer(2)) for step in (later, average))
    rate_ = proof.have(
        Implies(_SAME, Eq(small, delta * (1 - beta))),
        one,
        first,
        start,
        differ[0],
        steps,
        says="the first step tells ε",
    )
    backwards = proof.have(
        Implies(_SAME, Eq(alpha, beta)),
        two_,
        first,
        start,
        later,
        average,
        second_v,
        second_u,
        rate_,
        *differ,
        steps,
        says="and the second α, as ε is not 0",
    )
    proof.conclude("same", forwards, backwards, rate_)


def _ema_picture() -> Chart:
    weights = {f"β = {b}": lambda age, b=b: (1 - b) * b**age for b in (0.5, 0.8, 0.9, 0.95)}
    return curves("What an average remembers", "steps ago", "weight of the gradient", list(range(40)), weights)


def _average_case(*numbers: Any) -> dict[Any, Any]:
    b, *gradients = map(decimal, numbers)
    return {beta: b, T: len(gradients), g: gradients, v: running(b, 1 - b, gradients)}


def _unrolled(weight: Formula) -> Statement:
    return Statement(
        variables={
            T: "the number of steps",
            beta: "the decay",
            g: "the gradients",
            v: "the average, which starts from nothing",
        },
        given=[T >= 1, beta > 0, *recurrence(v, beta, 1 - beta)],
        then={"sum": Eq(v[T], Sum(weight(beta, T, i) * g[i], (i, 1, T)))},
        terms={"average": v[T], "weighted": weight(beta, T, i) * g[i]},
        spans=Spans({"β": (0.01, 0.99), **dict.fromkeys(("g₁", "g₂", "g₃", "g₄"), (-2, 2))}, _average_case),
    )


@claim(
    "ema-unrolled",
    expected="proved",
    formal=_unrolled,
    plain="An exponential average {average} is the sum of all gradients so far, each weighted by its age: {weighted}.",
    subject=lambda beta, t, i: (1 - beta) * beta ** (t - i),
    sabotage={
        "without 1 − β": lambda beta, t, i: beta ** (t - i),
        "one step older": lambda beta, t, i: (1 - beta) * beta ** (t - i + 1),
    },
    picture=_ema_picture,
)
def ema_unrolled(proof: Proof, weight: Formula) -> None:
    first, later = (proof.given(one) for one in recurrence(v, beta, 1 - beta))
    some, positive = proof.given(T >= 1), proof.given(beta > 0)

    def weighed(last: Any) -> Any:
        return weight(beta, last, i) * g[i]

    unrolled = Implies(t <= T, Eq(v[t], Sum(weighed(t), (i, 1, t))))
    base = proof.have(unrolled.subs(t, 1), first, says="the sum for one step")
    step, last = proof.member(later.formula, t + 1), proof.sum_last(weighed(t + 1), (i, 1, t))
    older = proof.sum_same(weighed(t + 1), weighed(t), (i, 1, t), positive, times=beta)
    onward = proof.have(
        Implies(And(t >= 1, unrolled), unrolled.subs(t, t + 1)),
        later,
        step,
        last,
        older,
        says="a step multiplies every old weight by β, and gives the new gradient the weight 1 − β",
    )
    proof.conclude("sum", proof.at(proof.induction(unrolled, t, 1, base, onward), {t: T}), some)


def _bias_picture() -> Chart:
    shares = {f"β = {b}": lambda t, b=b: 1 - b**t for b in (0.9, 0.95, 0.99)}
    return curves("The share of E g that an average from 0 has reached", "t", "1 − β^t", list(range(1, 61)), shares)


def _mean(of: Any) -> Any:
    return Sum(p[w] * of, (w, 1, N))


_STARTS = each(w, 1, N, Eq(v[1, w], (1 - beta) * g[1, w]))
_GOES_ON = each(t, 2, T, each(w, 1, N, Eq(v[t, w], beta * v[t - 1, w] + (1 - beta) * g[t, w])))
_STATIONARY = each(t, 1, T, Eq(_mean(g[t, w]), mu))


def _bias_case(*numbers: Any) -> dict[Any, Any]:
    """Two outcomes of four gradients: each is off the mean, the other way and as much as makes up for it."""
    b, likely, mean, *apart = map(decimal, numbers)
    gradients = [[mean + (1 - likely) * off, mean - likely * off] for off in apart]
    averages = list(zip(*(running(b, 1 - b, column) for column in zip(*gradients, strict=True)), strict=True))
    chances = [likely, 1 - likely]
    return {T: len(apart), N: 2, beta: b, mu: mean, p: chances, g: gradients, v: list(map(list, averages))}


def _unbiased(total: Formula) -> Statement:
    return Statement(
        variables={
            T: "the number of steps",
            N: "the number of outcomes",
            p: "the chance of each outcome",
            beta: "the decay",
            mu: "the mean of every gradient",
            g: "the gradients, by step and outcome",
            v: "the average, by step and outcome",
        },
        given=[T >= 1, beta > 0, beta < 1, _STARTS, _GOES_ON, _STATIONARY],
        then={"mean": Eq(_mean(v[T, w]), total(beta, T) * mu), "share": And(beta**T > 0, beta**T < 1)},
        terms={"share": total(beta, T)},
        notes=["the gradients have any joint law on finitely many outcomes, and each step's mean is the same"],
        spans=Spans(
            {"β": (0.01, 0.99), "p₁": (0.01, 0.99), "μ": (-2, 2), **dict.fromkeys(("a", "b", "c", "d"), (-2, 2))},
            _bias_case,
        ),
    )


@claim(
    "ema-bias",
    expected="proved",
    formal=_unbiased,
    plain="An average that starts from nothing is too small by the factor {share}, a positive number below one;"
    " divided by it, it is right on average, where the gradients' mean does not change.",
    subject=lambda beta, t: 1 - beta**t,
    sabotage={
        "a step too far": lambda beta, t: 1 - beta ** (t + 1),
        "the limit's": lambda beta, t: 1 - beta,
        "none": lambda beta, t: sympy.Integer(1),
    },
    picture=_bias_picture,
)
def ema_bias(proof: Proof, total: Formula) -> None:
    some, positive, below = proof.given(T >= 1), proof.given(beta > 0), proof.given(beta < 1)
    starts, goes_on, stationary = map(proof.given, (_STARTS, _GOES_ON, _STATIONARY))
    mean = Implies(t <= T, Eq(_mean(v[t, w]), total(beta, t) * mu))
    outcomes = (w, 1, N)
    # E is linear: each step's equation, for every outcome, is one of the means.
    at_first = proof.member(_STARTS, w)
    first = proof.sum_same(p[w] * v[1, w], p[w] * (1 - beta) * g[1, w], outcomes, starts, at_first)
    alike = proof.member(_STATIONARY, sympy.Integer(1))
    base = proof.have(mean.subs(t, 1), first, stationary, alike, says="E is linear: the mean of the first step")
    inner = _GOES_ON.args[3].subs(t, t + 1)
    at_step, at_outcome = proof.member(_GOES_ON, t + 1), proof.member(inner, w)
    stepped = proof.sum_same(
        p[w] * v[t + 1, w],
        p[w] * (beta * v[t, w] + (1 - beta) * g[t + 1, w]),
        outcomes,
        goes_on,
        at_step,
        at_outcome,
        when=And(t >= 1, t + 1 <= T),
    )
    still = proof.member(_STATIONARY, t + 1)
    onward = proof.have(
        Implies(And(t >= 1, mean), mean.subs(t, t + 1)),
        stepped,
        stationary,
        still,
        positive,
        says="E v_(t+1) = βE v_t + (1 − β)E g",
    )
    proof.conclude("mean", proof.at(proof.induction(mean, t, 1, base, onward), {t: T}), some)
    share = And(beta**t > 0, beta**t < 1)
    within = proof.induction(share, t, 1, positive, below, says="βx is between 0 and x")
    proof.conclude("share", proof.at(within, {t: T}), some)


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


theta, rest, slope, further = real("theta R g_1 g_2")
penalised, decayed = real("x y")
_PENALTY = gamma * (theta**2 + rest)


def _plain_decay(rate: Formula) -> Statement:
    shrunk, (twice, apart) = (
        rate(eta, gamma),
        (part for part in _decays(eta, gamma, rate(eta, gamma), alpha, theta, [slope, further])),
    )
    return Statement(
        variables={
            theta: "one coordinate of the weights",
            rest: "the sum of the squares of the others",
            slope: "the gradient of the loss in that coordinate",
            further: "the one a step later",
            eta: "the step size",
            gamma: "the strength of the penalty",
            alpha: "the momentum",
        },
        given=[eta > 0, gamma > 0],
        then={
            "step": Eq(theta - eta * (slope + Derivative(_PENALTY, theta)), (1 - decay) * theta - eta * slope),
            "momentum": Implies(And(alpha > 0, Ne(theta, 0)), Ne(penalised, decayed)),
        },
        where={decay: shrunk, penalised: twice, decayed: apart},
        terms={"penalty": _PENALTY, "rate": shrunk},
        notes=["any loss with a gradient", "after two steps of momentum a weight is x with the penalty, y with decay"],
        spans={
            theta: (-2, 2),
            rest: (0, 2),
            slope: (-2, 2),
            further: (-2, 2),
            eta: (0.01, 1),
            gamma: (0.01, 1),
            alpha: (0.01, 1),
        },
    )


@claim(
    "sgd-l2-decay",
    expected="proved",
    formal=_plain_decay,
    plain="For plain SGD, adding the penalty {penalty} to the loss is the same as shrinking the weights by {rate} each"
    " step. With momentum it is not, after two steps.",
    subject=lambda eta, gamma: 2 * eta * gamma,
    sabotage={
        "the 2 of the square forgotten": lambda eta, gamma: eta * gamma,
        "the step size forgotten": lambda eta, gamma: 2 * gamma,
    },
    picture=_decay_picture,
)
def sgd_l2_decay(proof: Proof, rate: Formula) -> None:
    positive = proof.given(eta > 0), proof.given(gamma > 0)
    derivative = proof.equal(Derivative(_PENALTY, theta), 2 * gamma * theta, says="the gradient of the penalty")
    proof.conclude("step", derivative, says="θ − η(g + 2γθ) = (1 − 2ηγ)θ − ηg")
    proof.conclude("momentum", *positive, says="two steps of momentum end 2αηγθ apart")


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


h = sequence("h")
first, second, average, share, rate = real("r r' m s_1 s_2")
_SHARE = 2 * eta * gamma / (first + small)
_LAWS = {
    theta: "a weight",
    N: "the number of outcomes",
    p: "the chance of each outcome",
    g: "a gradient, by outcome",
    h: "another, by outcome",
    first: "the root of the second moment of what Adam sees, of a weight with the gradient g",
    second: "the same with the gradient h",
    eta: "the step size",
    gamma: "the strength of the penalty",
    small: "what Adam adds to the root",
}


def _seen(root: Any, gradient: Any, weight: Any) -> list[Any]:
    """A gradient whose mean is nought, and the root of the second moment of it and the penalty's together."""
    return [root > 0, Eq(_mean(gradient[w]), 0), Eq(root**2, _mean((gradient[w] + 2 * gamma * weight) ** 2))]


def _adam_case(e: Any, step: Any, strength: Any, *numbers: Any) -> dict[Any, Any]:
    """Two outcomes alike, ±s; sizes and roots from k(1 − x²), 2kx and k(1 + x²), so that all are fractions."""
    e, step, strength, size, one, two, m, rate = map(decimal, (e, step, strength, *numbers))
    penalty = 2 * size * one
    roots, gradients = [], []
    for x in (one, two):
        k = penalty / (2 * x)
        roots.append(k * (1 + x * x))
        gradients.append([k * (1 - x * x), -k * (1 - x * x)])
    return {
        **{theta: penalty / (2 * strength), N: 2, p: [Fraction(1, 2)] * 2, g: gradients[0], h: gradients[1]},
        **{first: roots[0], second: roots[1], eta: step, gamma: strength, small: e, average: m, decay: rate},
    }


def _adam(rules: AdamRules) -> Statement:
    moved = average / (first + small)
    return Statement(
        variables=_LAWS | {average: "Adam's average of the gradients", decay: "the strength of decoupled decay"},
        given=[*(eta > 0, gamma > 0, small >= 0), *_seen(first, g, theta), *_seen(second, h, theta)],
        then={
            "penalty": Eq(rules.penalised(theta, average, eta, gamma, first, small), (1 - share) * theta - eta * moved),
            "less": Implies(_mean(g[w] ** 2) < _mean(h[w] ** 2), _SHARE.subs(first, second) < share),
            "decoupled": Eq(
                rules.decoupled(theta, average, eta, decay, first, small), (1 - rate) * theta - eta * moved
            ),
        },
        where={share: _SHARE, rate: eta * decay},
        terms={"share": _SHARE, "rate": eta * decay},
        notes=["steady state: θ and the averages change little over the averages' memory"],
        spans=Spans(
            {"ϵ": (0, 0.1), **dict.fromkeys(("η", "γ", "size"), (0.01, 1)), **dict.fromkeys(("x", "x'"), (0.01, 0.99))}
            | {"m": (-2, 2), "λ": (0.01, 1)},
            _adam_case,
        ),
    )


@claim(
    "adam-l2-vs-w",
    expected="proved",
    formal=_adam,
    plain="Under Adam, a squared penalty in the loss shrinks a weight by the share {share} a step, which is less the"
    " larger its gradients are; decoupled decay shrinks all weights at one rate, {rate}.",
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
)
def adam_l2_vs_w(proof: Proof, rules: AdamRules) -> None:
    nonnegative, positive, above = proof.given(small >= 0), proof.given(first > 0), proof.given(second > 0)
    proof.conclude("penalty")
    proof.conclude("decoupled")
    moments = [proof.given(fact) for one, law in ((first, g), (second, h)) for fact in _seen(one, law, theta)[1:]]
    rise = proof.have(
        Implies(_mean(g[w] ** 2) < _mean(h[w] ** 2), first < second),
        *moments,
        above,
        says="the second moment of g + 2γθ is that of g and (2γθ)², as the mean of g is 0",
    )
    proof.conclude("less", rise, positive, nonnegative, proof.given(eta > 0), proof.given(gamma > 0))


other = real("phi")


def _magnitudes(larger: Formula) -> Statement:
    return Statement(
        variables=_LAWS | {other: "another weight, with the gradient h"},
        given=[*(eta > 0, gamma > 0, small >= 0, Eq(_mean(1), 1)), *_seen(first, g, theta), *_seen(second, h, other)],
        then={"less": Implies(larger(), _SHARE.subs(first, second) < _SHARE)},
        notes=["steady state: weights and averages change little over the averages' memory"],
        spans=Spans(
            {**dict.fromkeys(("k", "k'"), (0.1, 2)), **dict.fromkeys(("x", "x'"), (0.01, 0.99))}, _magnitudes_case
        ),
    )


def _magnitudes_case(*numbers: Any) -> dict[Any, Any]:
    """Two weights, each with a gradient of two outcomes alike, ±s; all are fractions."""
    one, two, x, y = map(decimal, numbers)
    half = Fraction(1, 2)
    gradients = [[k * (1 - z * z), -k * (1 - z * z)] for k, z in ((one, x), (two, y))]
    return {
        **{theta: 2 * one * x, other: 2 * two * y, N: 2, p: [half] * 2, g: gradients[0], h: gradients[1]},
        **{first: one * (1 + x * x), second: two * (1 + y * y), eta: half, gamma: half, small: Fraction(0)},
    }


@claim(
    "adam-l2-magnitude",
    expected="refuted",
    formal=_magnitudes,
    plain="Under Adam, a squared penalty in the loss shrinks parameters of large magnitude by a smaller share.",
    subject=lambda: Abs(theta) < Abs(other),
    sabotage={
        "weights alike, and larger gradients": lambda: And(Eq(theta, other), _mean(g[w] ** 2) < _mean(h[w] ** 2))
    },
    picture=_adam_picture,
)
def adam_l2_magnitude(against: Refutation, _: Formula) -> None:
    against.case(
        _magnitudes_case(Fraction(10), Fraction(2), Fraction(1, 10), Fraction(9, 10)),
        "the larger weight has the smaller gradients, and loses the larger share",
    )


x, y, s, c = sequence("x y s c")


class PenaltyLine(NamedTuple):
    """What the penalty adds in the line of Adam's step, of the weights and their average: as stated, and as it is."""

    stated: Formula = lambda gamma, x, y: 2 * gamma * x
    amended: Formula = lambda gamma, x, y: 2 * gamma * y


def _averaged_as(mean: Any, of: Formula) -> list[Any]:
    """Adam's average of what comes at each step, without the bias of its start."""
    return [Eq(mean[1], of(1)), each(t, 2, T, Eq(mean[t], mean[t - 1] + c[t] * (of(t) - mean[t - 1])))]


_AVERAGES = (
    _averaged_as(v, lambda t: g[t] + 2 * gamma * x[t]),
    _averaged_as(u, lambda t: g[t]),
    _averaged_as(y, lambda t: x[t]),
)
_MOVES = each(t, 1, T, Eq(x[t + 1], x[t] - s[t] * v[t]))
_STILL = each(i, 1, T, Eq(x[i], x[T]))


def _adam_steps(*numbers: Any) -> dict[Any, Any]:
    """Three steps: the strength, the first weight, and by step the gradient, the step size and the average's share."""
    strength, start, *rest = map(decimal, numbers)
    gradients, sizes, shares = rest[:3], rest[3:6], [Fraction(1), *rest[6:]]
    weights = [start]
    means: list[list[Fraction]] = [[], [], []]
    for gradient, size, part in zip(gradients, sizes, shares, strict=True):
        for mean, one in zip(means, (gradient + 2 * strength * weights[-1], gradient, weights[-1]), strict=True):
            mean.append(mean[-1] + part * (one - mean[-1]) if mean else one)
        weights.append(weights[-1] - size * means[0][-1])
    known = {T: 3, gamma: strength, decay: size * strength, g: gradients, s: sizes, c: shares, x: weights}
    return known | dict(zip((v, u, y), means, strict=True))


_STEPS = Spans(
    {"γ": (0.01, 1), "x₁": (-2, 2), **dict.fromkeys(("g₁", "g₂", "g₃"), (-2, 2))}
    | dict.fromkeys(("s₁", "s₂", "s₃"), (0.01, 1))
    | dict.fromkeys(("c₂", "c₃"), (0.1, 0.9)),
    _adam_steps,
)


def _line_of_adam(add: Formula, averages: Sequence[list[Any]], **more: Any) -> Statement:
    line = x[T] - s[T] * (u[T] + add(gamma, x[T], y[T]))
    roles = {
        T: "the number of steps",
        x: "the weight, before each step and after the last",
        g: "the gradients of the loss",
        gamma: "the strength of the penalty",
        s: "the size of each step, over the root of the second moment",
        c: "the share of what is new in the average, by step",
        v: "Adam's average of the gradients, the penalty's among them",
        u: "the average of the loss's gradients",
    }
    return Statement(
        variables=roles | more.pop("roles", {}),
        given=[T >= 1, *(part for average in averages for part in average), _MOVES],
        then={"line": Eq(x[T + 1], line), **more.pop("then", {})},
        terms={"penalty": add(gamma, x[T], y[T]), **more.pop("terms", {})},
        notes=[
            "in Adam the share is c_t = (1 − β)/(1 − β^t), and the step s_t = η/(√v̂_t + ϵ), with the second moment of"
            " g + 2γθ; nothing rests on either",
        ],
        spans=_STEPS,
    )


def _line_as_stated(lines: PenaltyLine) -> Statement:
    return _line_of_adam(lines.stated, _AVERAGES[:2], terms={"average": u[T]})


def _line_as_it_is(lines: PenaltyLine) -> Statement:
    decoupled = Eq(x[T + 1], (1 - decay) * x[T] - s[T] * u[T])
    return _line_of_adam(
        lines.amended,
        _AVERAGES,
        roles={y: "the same average of the weights", decay: "the share that decoupled decay takes off"},
        then={
            "still": Implies(_STILL, Eq(x[T + 1], x[T] - s[T] * (u[T] + 2 * gamma * x[T]))),
            "decoupled": Equivalent(decoupled, Eq(decay * x[T], 2 * gamma * s[T] * y[T])),
        },
        terms={"mean": y[T], "as stated": 2 * gamma * x[T], "rate": decay, "same": 2 * gamma * s[T] * y[T]},
    )


@claim(
    "adam-l2-line",
    expected="corrected",
    formal=_line_as_stated,
    plain="With a squared penalty in the loss, Adam steps along {average}, the average of the loss's gradients, and"
    " {penalty}, the penalty's gradient at the weight as it is.",
    amendment=_line_as_it_is,
    amended_plain="The penalty's gradients are averaged like all others: what it adds is {penalty}, at the average"
    " {mean} of the weights so far, and {as stated} only while they stand still. Decoupled decay with the share {rate}"
    " takes the same step exactly when {rate} times the weight is {same}, which depends on the size of the step.",
    subject=PenaltyLine(),
    sabotage={
        "the line as stated": PenaltyLine(amended=PenaltyLine().stated),
        "the 2 of the square forgotten": PenaltyLine(amended=lambda gamma, x, y: gamma * y),
    },
    picture=_adam_picture,
)
def adam_l2_line(against: Refutation, proof: Proof, lines: PenaltyLine) -> None:
    half, quarter, one = Fraction(1, 2), Fraction(1, 4), Fraction(1)
    run = {T: 2, gamma: half, c: [one, Fraction(2, 3)], s: [quarter] * 2, g: [one, 3 * half], x: [one, half, 0]}
    says = "θ = 1, β = γ = η = ½, gradients 1 and 3/2: Adam's second step ends at 0, and the line at 1/24"
    against.case(run | {v: [2, 2], u: [one, Fraction(4, 3)]}, says)
    some, moves = proof.given(T >= 1), proof.given(_MOVES)
    starts, onwards = zip(*([proof.given(part) for part in average] for average in _AVERAGES), strict=True)
    following = [proof.member(onward.formula, t + 1) for onward in onwards]
    apart = Implies(t <= T, Eq(v[t], u[t] + 2 * gamma * y[t]))
    base = proof.have(apart.subs(t, 1), *starts)
    onward = proof.have(Implies(And(t >= 1, apart), apart.subs(t, t + 1)), *onwards, *following)
    always = proof.induction(apart, t, 1, base, onward, says="an average is linear")
    last = proof.member(_MOVES, T)
    line = proof.conclude("line", proof.at(always, {t: T}), some, moves, last)
    so_far = Implies(And(t <= T, _STILL), Eq(y[t], x[T]))
    first, later = proof.member(_STILL, sympy.Integer(1)), proof.member(_STILL, t + 1)
    base = proof.have(so_far.subs(t, 1), starts[2], first)
    onward = proof.have(Implies(And(t >= 1, so_far), so_far.subs(t, t + 1)), onwards[2], following[2], later)
    proof.conclude("still", line, proof.at(proof.induction(so_far, t, 1, base, onward), {t: T}), some)
    proof.conclude("decoupled", line)


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


def _heavy_ball(place: Any, velocity: Any, penalty: Any) -> list[Any]:
    """Heavy-ball steps on ½(θ − 1)² + penalty·θ², from nought."""
    pull = place[t] - 1 + 2 * penalty * place[t]
    return [
        *(Eq(place[1], 0), Eq(velocity[1], -1)),
        each(t, 2, T, Eq(place[t], place[t - 1] - eta * velocity[t - 1])),
        each(t, 2, T, Eq(velocity[t], alpha * velocity[t - 1] + pull)),
    ]


def _heavy_case(penalty: Formula) -> Any:
    def case(*numbers: Any) -> dict[Any, Any]:
        strength, momentum, step = map(decimal, numbers)
        ends: dict[Any, Any] = {gamma: strength, alpha: momentum, eta: step, T: 12}
        for place, velocity, weight in ((x, v, Fraction(penalty(strength))), (y, u, Fraction(0))):
            at, speed = [Fraction(0)], [Fraction(-1)]
            for _ in range(11):
                at.append(at[-1] - step * speed[-1])
                speed.append(momentum * speed[-1] + at[-1] - 1 + 2 * weight * at[-1])
            ends |= {place: at, velocity: speed}
        return ends

    return case


def _only_plain(penalty: Formula) -> Statement:
    return Statement(
        variables={
            alpha: "the momentum",
            eta: "the step size",
            gamma: "the strength of the penalty",
            T: "the number of steps",
            x: "the weight under the penalty",
            y: "the weight without it",
            v: "the momentum of the one",
            u: "the momentum of the other",
        },
        given=[alpha > 0, eta > 0, gamma > 0, *_heavy_ball(x, v, penalty(gamma)), *_heavy_ball(y, u, 0)],
        then={"no smaller": Abs(x[T]) >= Abs(y[T])},
        terms={"one": x[T], "other": y[T]},
        notes=["the loss is ½(θ − 1)²", "to regularise is to end at a smaller weight than without the penalty"],
        spans=Spans({"γ": (0.1, 2), "α": (0.1, 0.9), "η": (0.1, 0.5)}, _heavy_case(penalty)),
    )


@claim(
    "l2-only-sgd",
    expected="refuted",
    formal=_only_plain,
    plain="A squared penalty regularises with plain SGD only: with momentum, a weight ends no smaller under the penalty"
    " than without it, {one} against {other}.",
    subject=lambda gamma: gamma,
    sabotage={"no penalty at all": lambda gamma: 0 * gamma},
    picture=_l2_picture,
)
def l2_only_sgd(against: Refutation, penalty: Formula) -> None:
    quarter = Fraction(1, 4)
    case = _heavy_case(penalty)(Fraction(1, 2), quarter, quarter)
    against.case(case, "twelve steps: under the penalty the weight ends near ½, without near 1")
