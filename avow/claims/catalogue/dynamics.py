r"""How things move step by step: recurrent states and their gradients, momentum, averages, and the two weight decays.

What holds for every step is shown by induction: the first step, and from any step to the next, both in symbols.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb, arb_mat, fmpq
from sympy import Function, Matrix, Rational, Symbol, diag, sqrt

from avow.chart import Chart, Table
from avow.claims import toolbox
from avow.claims.claim import Evidence, claim
from avow.maths import balls

beta = 1 / (1 + Symbol("s", positive=True))  # any number strictly between 0 and 1
delta, gamma, eta = (Symbol(name, positive=True) for name in ("delta", "gamma", "eta"))


class Forms(NamedTuple):
    """One step of each recurrence: from the state, the input x, W, U, b and the activation."""

    h: Callable[..., Any] = lambda h, x, W, U, b, sigma: W * sigma(h) + U * x + b
    g: Callable[..., Any] = lambda g, x, W, U, b, sigma: sigma(W * g + U * x + b)


def _relu(v: Matrix) -> Matrix:
    return v.applyfunc(lambda z: sympy.Max(z, 0))


def _states(forms: Forms, steps: int) -> list[tuple[Matrix, Matrix]]:
    """Both recurrences side by side in fractions, with a W that has no inverse."""
    W, U, b = Matrix([[0, 1], [0, 0]]), Matrix([[1, -1], [2, 1]]), Matrix([Rational(1, 2), -1])
    h = Matrix([1, -2])
    g = _relu(h)
    found = [(h, g)]
    for t in range(steps):
        x = Matrix([t - 1, Rational(1, t + 1)])
        h, g = forms.h(h, x, W, U, b, _relu), forms.g(g, x, W, U, b, _relu)
        found.append((h, g))
    return found


def _forms_picture() -> Table:
    rows = [
        [t, *(str(tuple(map(str, state))) for state in (h, _relu(h), g))]
        for t, (h, g) in enumerate(_states(Forms(), 4))
    ]
    return Table("Two recurrences, one network: σ(h) is g at every step", ("t", "h", "σ(h)", "g"), rows)


@claim(
    "rnn-two-forms",
    topic="dynamics",
    expected="proved",
    statement=r"h_t = W\sigma(h_{t-1}) + Ux_t + b,\ g_t = \sigma(Wg_{t-1} + Ux_t + b),\ g_0 = \sigma(h_0)"
    r"\;\Rightarrow\; g_t = \sigma(h_t)\ \forall t",
    plain="The recurrent network with the activation inside the sum and the one with it outside are the same network,"
    " read at two places: g_t = σ(h_t).",
    assumptions=("g_0 = σ(h_0)", "any W, U, b and σ, in any dimension: W need have no inverse"),
    subject=Forms(),
    sabotage={
        "the bias outside": Forms(g=lambda g, x, W, U, b, sigma: sigma(W * g + U * x) + b),
        "W outside": Forms(g=lambda g, x, W, U, b, sigma: W * sigma(g + U * x + b)),
        "no activation on the state": Forms(h=lambda h, x, W, U, b, sigma: W * h + U * x + b),
    },
    picture=_forms_picture,
)
def rnn_two_forms(forms: Forms) -> Iterator[Evidence]:
    W, U, b, h, g, x = sympy.symbols("W U b h_{t-1} g_{t-1} x_t", commutative=False)
    sigma = Function("sigma", commutative=False)
    stepped = forms.h(h, x, W, U, b, sigma), forms.g(g, x, W, U, b, sigma)
    yield toolbox.identity(
        stepped[1].subs(g, sigma(h)),
        sigma(stepped[0]),
        "if g_(t−1) = σ(h_(t−1)), then g_t = σ(h_t), as products of matrices that do not commute; so for all t",
    )
    inside = W * g + U * x + b
    yield toolbox.identity(
        inside.subs(g, sigma(h)),
        stepped[0],
        "and back: h_t = Wg_(t−1) + Ux_t + b has σ(h_t) = g_t and keeps the first recurrence; nothing is divided by W",
    )
    found = _states(forms, 5)
    yield toolbox.rational(
        all(_relu(h) == g for h, g in found), "five steps with ReLUs and a W without inverse, in fractions", steps=5
    )
    W = Matrix([[0, 1], [0, 0]])
    one, other = Matrix([1, 0]), Matrix([5, 0])
    yield toolbox.rational(
        W.det() == 0 and W * one == W * other,
        "dividing by W is no proof: here Wσ(h) = Wg for σ(h) = (1, 0) and g = (5, 0)",
        determinant=W.det(),
    )


class Gradient(NamedTuple):
    """The bound asked of WᵀW, the rate it promises, and a W to try it on, with δ = 9/10 and γ = 1."""

    largest: Callable[[Any, Any], Any]
    rate: Callable[[Any], Any]
    weights: tuple[tuple[int, ...], ...]  # tenths


CONTRACTION = Gradient(
    lambda delta, gamma: delta**2 / gamma**2, lambda delta: delta, ((3, -5, 2), (4, 3, -1), (-2, 4, 5))
)


def _jacobian(weights: arb_mat, start: list[arb], steps: int) -> arb_mat:
    """:math:`\\partial h_T / \\partial h_0` of h_t = W tanh(h_{t-1}) + (½, …, ½), in balls."""
    h = start
    size = len(start)
    product = arb_mat(size, size, [arb(int(i == j)) for i in range(size) for j in range(size)])
    for _ in range(steps):
        outs = [z.tanh() for z in h]
        slopes = arb_mat(size, size, [1 - outs[i] ** 2 if i == j else arb(0) for i in range(size) for j in range(size)])
        product = weights * slopes * product
        h = [sum((weights[i, j] * outs[j] for j in range(size)), arb(0.5)) for i in range(size)]
    return product


def _tenths(weights: tuple[tuple[int, ...], ...]) -> arb_mat:
    return arb_mat([[arb(fmpq(entry, 10)) for entry in row] for row in weights])


def _shorter(matrix: arb_mat, square: arb) -> bool:
    """Whether λ_max(MᵀM) is below a number: its multiple of I minus MᵀM has positive leading minors (Sylvester)."""
    size = matrix.ncols()
    gram = matrix.transpose() * matrix
    gap = [[(square if i == j else arb(0)) - gram[i, j] for j in range(size)] for i in range(size)]
    return all(arb_mat([row[:k] for row in gap[:k]]).det() > 0 for k in range(1, size + 1))


def _length(matrix: arb_mat) -> float:
    """The Frobenius norm, to draw."""
    return float(sum((entry * entry for entry in matrix.entries()), arb(0)).sqrt().mid())


def _gradient_picture() -> Chart:
    weights = _tenths(CONTRACTION.weights)
    steps = list(range(1, 25))
    with balls.precision(128):
        lengths = [_length(_jacobian(weights, [arb(0), arb(0), arb(0)], t)) for t in steps]
    series = {"‖∂h_T/∂h_0‖ (Frobenius)": (steps, lengths), "√3 δ^T": (steps, [3**0.5 * 0.9**t for t in steps])}
    return Chart("A gradient through time and its bound", "T", "length", series, log_y=True)


@claim(
    "rnn-vanishing",
    topic="dynamics",
    expected="proved",
    statement=r"|\sigma'| \le \gamma,\ \lambda_{\max}(W^\top W) \le \delta^2/\gamma^2,\ \delta < 1 \;\Rightarrow\;"
    r"\Big\|\frac{\partial h_T}{\partial h_0}\Big\|_2 \le \delta^T",
    plain="Where the activation's slope is at most γ and W's largest singular value at most δ/γ, with δ below 1, the"
    " gradient through T steps is at most δ^T long: it vanishes.",
    assumptions=("h_t = Wσ(h_{t−1}) + Ux_t + b", "σ is differentiable and works entry by entry", "any dimension"),
    subject=CONTRACTION,
    sabotage={
        "the bound without its square": CONTRACTION._replace(largest=lambda delta, gamma: delta / gamma),
        "a rate of δ²": CONTRACTION._replace(rate=lambda delta: delta**2),
        "small eigenvalues in place of small singular values": CONTRACTION._replace(weights=((0, 40), (0, 0))),
    },
    picture=_gradient_picture,
)
def rnn_vanishing(gradient: Gradient) -> Iterator[Evidence]:
    yield from _one_step_contracts(gradient.largest(delta, gamma), gradient.rate(delta))
    yield toolbox.induction(
        lambda n: gradient.rate(delta) ** n,
        0,
        1,
        lambda length, n: gradient.rate(delta) * length,
        "∂h_0/∂h_0 = I has norm 1 and every step multiplies it by at most δ: at most δ^T after T",
    )
    weights = _tenths(gradient.weights)
    yield toolbox.enclosed(
        lambda: _shorter(weights, arb(fmpq(81, 100))),
        "an instance: λ_max(WᵀW) < 0.81 = δ²/γ² with δ = 0.9, γ = 1 (tanh)",
    )
    for steps in (1, 5, 20):
        short = functools.partial(_keeps_rate, weights, steps)
        yield toolbox.enclosed(
            short, f"its ∂h_T/∂h_0 after T = {steps} is shorter than 0.9^{steps}, by Sylvester's minors"
        )


def _keeps_rate(weights: arb_mat, steps: int) -> bool:
    start = [arb(0)] * weights.nrows()
    return _shorter(_jacobian(weights, start, steps), arb(fmpq(9, 10)) ** (2 * steps))


def _one_step_contracts(largest: Any, rate: Any, amended: bool = False) -> Iterator[Evidence]:
    """‖W diag(σ') v‖ ≤ rate·‖v‖, from the bounds on WᵀW and σ'."""
    z, y, w, v = (Symbol(name, real=True) for name in ("z", "y", "w", "v"))
    sigma, h = Function("sigma"), Function("h")
    chained = w * sigma(y).diff(y).subs(y, h(z)) * h(z).diff(z)
    yield toolbox.identity(
        sympy.diff(w * sigma(h(z)), z).doit(),
        chained.doit(),
        "∂h_t = W diag(σ'(h_(t−1))) ∂h_(t−1), term by term",
        amended,
    )
    theta, short = Symbol("theta", real=True), Symbol("r", nonnegative=True)
    slope = gamma * sympy.cos(theta)
    yield toolbox.nonnegative(
        gamma**2 * v**2 - (slope * v) ** 2,
        "|σ'| ≤ γ, that is σ' = γ cos θ: ‖diag(σ')v‖ ≤ γ‖v‖, entry by entry",
        amended,
    )
    yield toolbox.nonnegative(
        sympy.expand(largest * v**2 - (largest - short) * v**2),
        "in an eigenbasis of WᵀW, ‖Wv‖² = Σλ_i v_i² ≤ λ_max‖v‖², entry by entry with λ_i = λ_max − r_i",
        amended,
    )
    yield toolbox.identity(
        sqrt(largest) * gamma, rate, "so one step lengthens no vector by more than √λ_max·γ", amended
    )


class Explosion(NamedTuple):
    """W that is long and yet kills the gradient, where a unit w starts, and the size the amendment says is needed."""

    nilpotent: Matrix
    start: int
    needed: Callable[[Any], Any]


NO_EXPLOSION = Explosion(Matrix([[0, 2], [0, 0]]), 3, lambda gamma: 1 / gamma)


def _unit_gradient(start: int, steps: int) -> arb:
    """∂h_T/∂h_0 of one unit h_t = 3 tanh(h_{t−1})."""
    h, product = arb(start), arb(1)
    for _ in range(steps):
        out = h.tanh()
        product, h = product * 3 * (1 - out * out), 3 * out
    return product


def _explosion_picture() -> Chart:
    steps = list(range(13))
    with balls.precision(256):
        saturated = [float(_unit_gradient(3, t).mid()) for t in steps]
    series = {
        "3·tanh from h = 0: explodes": (steps, [3.0**t for t in steps]),
        "3·tanh from h = 3: saturated": (steps, saturated),
        "nilpotent W, drawn as 1e-30 once it is 0": (steps, [1.0, 2.0, *([1e-30] * 11)]),
    }
    return Chart("Three gradients; the largest singular value is above 1/γ in all", "T", "length", series, log_y=True)


@claim(
    "rnn-exploding",
    topic="dynamics",
    expected="corrected",
    statement=r"|\sigma'| \le \gamma,\ \sigma_{\max}(W) > 1/\gamma \;\Rightarrow\;"
    r"\Big\|\frac{\partial h_T}{\partial h_0}\Big\| \to \infty",
    plain="If the largest singular value of W exceeds 1/γ, the gradient explodes.",
    amended=r"\sup_T \Big\|\frac{\partial h_T}{\partial h_0}\Big\|_2 > 1 \;\Rightarrow\; \sigma_{\max}(W) > 1/\gamma;"
    r"\quad\text{the converse is false}",
    amended_plain="A largest singular value above 1/γ is necessary for the gradient to explode, and not sufficient: a"
    " nilpotent W or a saturated activation kills it.",
    assumptions=("h_t = Wσ(h_{t−1}) + Ux_t + b", "σ is differentiable and works entry by entry", "any dimension"),
    subject=NO_EXPLOSION,
    sabotage={
        "a W that does explode": NO_EXPLOSION._replace(nilpotent=Matrix([[2, 0], [0, 2]])),
        "a unit that is not saturated": NO_EXPLOSION._replace(start=0),
        "2/γ in place of 1/γ": NO_EXPLOSION._replace(needed=lambda gamma: 2 / gamma),
    },
    picture=_explosion_picture,
    needs=("rnn-vanishing",),
)
def rnn_exploding(explosion: Explosion) -> Iterator[Evidence]:
    W = explosion.nilpotent
    a, b, c, d = (Symbol(name, real=True) for name in "abcd")
    product = W * diag(a, b) * W * diag(c, d)
    largest = max((W.T * W).eigenvals())
    yield toolbox.counterexample(
        largest > 1 and product == sympy.zeros(2, 2),
        "W = [[0, 2], [0, 0]], σ_max = 2 > 1 = 1/γ: after two steps the gradient is 0, whatever slopes σ has",
        "SymPy",
        largest_eigenvalue=str(largest),
        gradient=str(product.tolist()),
    )
    with balls.precision(256):
        length = abs(_unit_gradient(explosion.start, 20))
    yield toolbox.counterexample(
        bool(length < arb(10) ** -20),
        f"one tanh unit with W = 3 > 1/γ, started at h = {explosion.start}: after 20 steps the gradient is below 1e-20",
        "balls",
        gradient=length.str(5),
    )
    yield from _one_step_contracts(explosion.needed(gamma) ** 2, 1, amended=True)
    yield toolbox.induction(
        lambda n: sympy.Integer(1) ** n,
        0,
        1,
        lambda length, n: 1 * length,
        "so with σ_max(W) ≤ 1/γ the gradient is never longer than 1: to explode it needs more",
        amended=True,
    )
    yield toolbox.induction(
        lambda n: 3**n,
        0,
        1,
        lambda length, n: 3 * length,
        "and it may explode: one unit W = 3 at h = 0 gives 3^T",
        amended=True,
    )


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
    weight = arb(fmpq(penalty.numerator, penalty.denominator))
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
        with balls.precision(512):
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
    with balls.precision(512):
        adam = _with_adam(penalty, 150), _with_adam(Fraction(0), 150)
        apart = bool(adam[0] < arb(fmpq(11, 20)) and adam[1] > arb(fmpq(19, 20)))
    yield toolbox.counterexample(
        apart,
        "Adam, 150 steps: with γ = ½ it ends near ½, without near 1",
        "balls",
        with_penalty=adam[0].str(8),
        without=adam[1].str(8),
    )
