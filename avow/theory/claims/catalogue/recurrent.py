"""Recurrent networks: two ways to write one, gradients that vanish, and what it takes for them to explode.

What holds for every step is shown by induction: the first step, and from any step to the next, both in symbols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
from flint import arb, arb_mat, fmpq
from sympy import Function, Matrix, Rational, Symbol, diag, sqrt

from avow.core.chart import Chart, Table
from avow.numerics.intervals import frobenius, most, norm, precision
from avow.theory.claims.claim import Evidence, Falsifier, Formula, Ranges, claims_on, numbered
from avow.theory.claims.toolbox import counterexample, cover, enclosed, identity, induction, nonnegative, rational

claim = claims_on("dynamics")
delta, gamma = sympy.symbols("delta gamma", positive=True)


class Forms(NamedTuple):
    """One step of each recurrence: from the state, the input x, W, U, b and the activation."""

    h: Formula = lambda h, x, W, U, b, sigma: W * sigma(h) + U * x + b
    g: Formula = lambda g, x, W, U, b, sigma: sigma(W * g + U * x + b)


def _relu(v: Matrix) -> Matrix:
    return v.applyfunc(lambda z: sympy.Max(z, 0))


def _states(forms: Forms, steps: int) -> list[tuple[Matrix, Matrix]]:
    """Both recurrences side by side in fractions, with a W that has no inverse."""
    W, U, b = Matrix([[0, 1], [0, 0]]), Matrix([[1, -1], [2, 1]]), Matrix([Rational(1, 2), -1])
    states = [(Matrix([1, -2]), _relu(Matrix([1, -2])))]
    for t in range(steps):
        (h, g), x = states[-1], Matrix([t - 1, Rational(1, t + 1)])
        states.append((forms.h(h, x, W, U, b, _relu), forms.g(g, x, W, U, b, _relu)))
    return states


def _forms_picture() -> Table:
    states = enumerate(_states(Forms(), 4))
    rows = [[t, *(str(tuple(map(str, state))) for state in (h, _relu(h), g))] for t, (h, g) in states]
    return Table("Two recurrences, one network: σ(h) is g at every step", ("t", "h", "σ(h)", "g"), rows)


def _column(entries: Sequence[arb]) -> arb_mat:
    return arb_mat(len(entries), 1, entries)


def _tanh(v: arb_mat) -> arb_mat:
    return _column([entry.tanh() for entry in v.entries()])


def _forms(forms: Forms, *case: arb) -> arb:
    """Three steps with tanh, the input turning its sign."""
    W, U = (arb_mat(2, 2, case[at : at + 4]) for at in (0, 4))
    b, h, x = (_column(case[at : at + 2]) for at in (8, 10, 12))
    g, apart = _tanh(h), []
    for _ in range(3):
        h, g = forms.h(h, x, W, U, b, _tanh), forms.g(g, x, W, U, b, _tanh)
        apart += [abs(entry) for entry in (_tanh(h) - g).entries()]
        x = -x
    return most(apart)


@claim(
    "rnn-two-forms",
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
    falsifier=Falsifier(numbered("w₁₁ w₁₂ w₂₁ w₂₂ u₁₁ u₁₂ u₂₁ u₂₂ b₁ b₂ h₁ h₂ x₁ x₂", -2, 2), _forms),
)
def rnn_two_forms(forms: Forms) -> Iterator[Evidence]:
    W, U, b, h, g, x = sympy.symbols("W U b h_{t-1} g_{t-1} x_t", commutative=False)
    sigma = Function("sigma", commutative=False)
    stepped = forms.h(h, x, W, U, b, sigma), forms.g(g, x, W, U, b, sigma)
    says = "if g_(t−1) = σ(h_(t−1)), then g_t = σ(h_t), as products of matrices that do not commute; so for all t"
    yield identity(stepped[1].subs(g, sigma(h)), sigma(stepped[0]), says)
    inside = W * g + U * x + b
    says = (
        "and back: h_t = Wg_(t−1) + Ux_t + b has σ(h_t) = g_t and keeps the first recurrence; nothing is divided by W"
    )
    yield identity(inside.subs(g, sigma(h)), stepped[0], says)
    states = _states(forms, 5)
    says = "five steps with ReLUs and a W without inverse, in fractions"
    yield rational(all(_relu(h) == g for h, g in states), says, steps=5)
    W = Matrix([[0, 1], [0, 0]])
    one, other = Matrix([1, 0]), Matrix([5, 0])
    says = "dividing by W is no proof: here Wσ(h) = Wg for σ(h) = (1, 0) and g = (5, 0)"
    yield rational(W.det() == 0 and W * one == W * other, says, determinant=W.det())


class Gradient(NamedTuple):
    """The bound asked of WᵀW, the rate it promises, and a W to try it on, in tenths, with δ = 9/10 and γ = 1."""

    largest: Formula = lambda delta, gamma: delta**2 / gamma**2
    rate: Formula = lambda delta: delta
    weights: tuple[tuple[int, ...], ...] = ((3, -5, 2), (4, 3, -1), (-2, 4, 5))


CONTRACTION = Gradient()


def jacobian(weights: arb_mat, start: Sequence[arb], steps: int) -> arb_mat:
    """:math:`\\partial h_T / \\partial h_0` of h_t = W tanh(h_{t-1}) + (½, …, ½), in balls."""
    h, product = start, arb_mat(len(start), len(start), 1)
    for _ in range(steps):
        outs = [z.tanh() for z in h]
        sloped = [[(1 - out**2) * x for x in row] for out, row in zip(outs, product.tolist(), strict=True)]
        product = weights * arb_mat(sloped)
        h = [x + arb(0.5) for x in (weights * _column(outs)).entries()]
    return product


def tenths(weights: tuple[tuple[int, ...], ...]) -> arb_mat:
    return arb_mat([[arb(fmpq(entry, 10)) for entry in row] for row in weights])


def _shorter(matrix: arb_mat, square: arb) -> bool:
    """Whether λ_max(MᵀM) is below a number: its multiple of I minus MᵀM has positive leading minors (Sylvester)."""
    gap = (square - matrix.transpose() * matrix).tolist()
    return all(arb_mat([row[:k] for row in gap[:k]]).det() > 0 for k in range(1, len(gap) + 1))


def _gradient_picture() -> Chart:
    weights, steps = tenths(CONTRACTION.weights), list(range(1, 25))
    with precision(128):
        jacobians = [jacobian(weights, [arb(0)] * 3, t) for t in steps]
        lengths = [float(frobenius(matrix).mid()) for matrix in jacobians]
    series = {"‖∂h_T/∂h_0‖ (Frobenius)": (steps, lengths), "√3 δ^T": (steps, [3**0.5 * 0.9**t for t in steps])}
    return Chart("A gradient through time and its bound", "T", "length", series, log_y=True)


def _scaled(entries: Sequence[arb], largest: arb) -> arb_mat:
    """The matrix of these entries, its largest singular value as asked for."""
    a, b, c, d = entries
    # Every such matrix is a multiple of a rotation and one of a reflection: here are half their lengths, twice.
    longest = (norm([a + d, b - c]) + norm([a - d, b + c])) / 2
    return arb_mat(2, 2, [entry * largest / longest for entry in entries])


def _grown(product: arb_mat, direction: Sequence[arb]) -> arb:
    """How much longer a direction becomes: no more than the matrix's own length."""
    return norm((product * _column(direction)).entries()) / norm(direction)


def _vanishing(gradient: Gradient, delta: arb, gamma: arb, share: arb, *rest: arb) -> arb:
    """σ = γ·tanh, W as long as that part of what is allowed, from h, and a direction v."""
    example, tenth = tenths(gradient.weights), arb(9) / 10
    entries, start, direction = rest[:4], rest[4:6], rest[6:]
    # σ = γ·tanh has slopes of at most γ; its γ goes into the product with W.
    weights = _scaled(entries, share * gradient.largest(delta, gamma).sqrt() * gamma)
    broken = []
    for steps in (1, 2, 4):
        broken.append(_grown(jacobian(weights, start, steps), direction) - gradient.rate(delta) ** steps)
        own = jacobian(example, [*start, *start][: example.nrows()], steps)
        broken.append(_grown(own, [*direction, *direction][: example.nrows()]) - tenth**steps)
    return most(broken)


# Numbers that are not zero, so that a matrix and a direction can be made as long as asked for.
_WALK = {"w₁₁": (0.1, 2.0)} | numbered("w₁₂ w₂₁ w₂₂ h₁ h₂", -2, 2) | {"v₁": (0.1, 1.0), "v₂": (-1.0, 1.0)}
_GAMMA: Ranges = {"γ": (0.1, 3.0), "part": (0.0, 1.0)}


@claim(
    "rnn-vanishing",
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
    falsifier=Falsifier({"δ": (0.05, 0.99)} | _GAMMA | _WALK, _vanishing),
)
def rnn_vanishing(gradient: Gradient) -> Iterator[Evidence]:
    yield from _one_step_contracts(gradient.largest(delta, gamma), gradient.rate(delta))
    says = "∂h_0/∂h_0 = I has norm 1 and every step multiplies it by at most δ: at most δ^T after T"
    yield induction(lambda n: gradient.rate(delta) ** n, 0, 1, lambda length, n: gradient.rate(delta) * length, says)
    weights, start = tenths(gradient.weights), [arb(0)] * len(gradient.weights)
    says = "an instance: λ_max(WᵀW) < 0.81 = δ²/γ² with δ = 0.9, γ = 1 (tanh)"
    yield enclosed(_shorter(weights, arb(fmpq(81, 100))), says)
    for steps in (1, 5, 20):
        says = f"its ∂h_T/∂h_0 after T = {steps} is shorter than 0.9^{steps}, by Sylvester's minors"
        yield enclosed(_shorter(jacobian(weights, start, steps), arb(fmpq(9, 10)) ** (2 * steps)), says)


def _one_step_contracts(largest: Any, rate: Any, amended: bool = False) -> Iterator[Evidence]:
    """‖W diag(σ') v‖ ≤ rate·‖v‖, from the bounds on WᵀW and σ'."""
    z, y, w, v, theta = sympy.symbols("z y w v theta", real=True)
    short = Symbol("r", nonnegative=True)
    sigma, h = Function("sigma"), Function("h")
    chained = w * sigma(y).diff(y).subs(y, h(z)) * h(z).diff(z)
    says = "∂h_t = W diag(σ'(h_(t−1))) ∂h_(t−1), term by term"
    yield identity(sympy.diff(w * sigma(h(z)), z).doit(), chained.doit(), says, amended)
    slope = gamma * sympy.cos(theta)
    says = "|σ'| ≤ γ, that is σ' = γ cos θ: ‖diag(σ')v‖ ≤ γ‖v‖, entry by entry"
    yield nonnegative(gamma**2 * v**2 - (slope * v) ** 2, says, amended)
    says = "in an eigenbasis of WᵀW, ‖Wv‖² = Σλ_i v_i² ≤ λ_max‖v‖², entry by entry with λ_i = λ_max − r_i"
    yield nonnegative(sympy.expand(largest * v**2 - (largest - short) * v**2), says, amended)
    yield identity(sqrt(largest) * gamma, rate, "so one step lengthens no vector by more than √λ_max·γ", amended)


class Explosion(NamedTuple):
    """W that is long and yet kills the gradient, where a unit w starts, and the size the amendment says is needed."""

    nilpotent: Matrix = Matrix([[0, 2], [0, 0]])
    start: int = 3
    needed: Formula = lambda gamma: 1 / gamma


def _unit_gradient(start: int, steps: int) -> arb:
    """∂h_T/∂h_0 of one unit h_t = 3 tanh(h_{t−1})."""
    h, product = arb(start), arb(1)
    for _ in range(steps):
        out = h.tanh()
        product, h = product * 3 * (1 - out * out), 3 * out
    return product


def _explosion_picture() -> Chart:
    steps = list(range(13))
    with precision(256):
        saturated = [float(_unit_gradient(3, t).mid()) for t in steps]
    series = {
        "3·tanh from h = 0: explodes": (steps, [3.0**t for t in steps]),
        "3·tanh from h = 3: saturated": (steps, saturated),
        "nilpotent W, drawn as 1e-30 once it is 0": (steps, [1.0, 2.0, *([1e-30] * 11)]),
    }
    return Chart("Three gradients; the largest singular value is above 1/γ in all", "T", "length", series, log_y=True)


def _explodes(explosion: Explosion, _: arb, share: arb, *rest: arb) -> arb:
    """As stated σ = tanh and W is 1 + 3·part long; else σ = γ·tanh, and W that part of 1/γ."""
    # σ = tanh, γ = 1, and a W of a largest singular value from 1 to 4.
    product = jacobian(_scaled(rest[:4], 1 + 3 * share), rest[4:6], 20)
    # A gradient that explodes is longer after twenty steps than before the first.
    return 1 - norm(product.entries())


def _needs(explosion: Explosion, gamma: arb, share: arb, *rest: arb) -> arb:
    weights = _scaled(rest[:4], share * explosion.needed(gamma) * gamma)
    return most([_grown(jacobian(weights, rest[4:6], steps), rest[6:]) - 1 for steps in (1, 2, 4)])


@claim(
    "rnn-exploding",
    expected="corrected",
    statement=r"|\sigma'| \le \gamma,\ \sigma_{\max}(W) > 1/\gamma \;\Rightarrow\;"
    r"\Big\|\frac{\partial h_T}{\partial h_0}\Big\| \to \infty",
    plain="If the largest singular value of W exceeds 1/γ, the gradient explodes.",
    amended=r"\sup_T \Big\|\frac{\partial h_T}{\partial h_0}\Big\|_2 > 1 \;\Rightarrow\; \sigma_{\max}(W) > 1/\gamma;"
    r"\quad\text{the converse is false}",
    amended_plain="A largest singular value above 1/γ is necessary for the gradient to explode, and not sufficient: a"
    " nilpotent W or a saturated activation kills it.",
    assumptions=("h_t = Wσ(h_{t−1}) + Ux_t + b", "σ is differentiable and works entry by entry", "any dimension"),
    subject=Explosion(),
    sabotage={
        "a W that does explode": Explosion(nilpotent=Matrix([[2, 0], [0, 2]])),
        "a unit that is not saturated": Explosion(start=0),
        "2/γ in place of 1/γ": Explosion(needed=lambda gamma: 2 / gamma),
    },
    picture=_explosion_picture,
    needs=("rnn-vanishing",),
    falsifier=Falsifier(_GAMMA | _WALK, _explodes, _needs),
)
def rnn_exploding(explosion: Explosion) -> Iterator[Evidence]:
    W = explosion.nilpotent
    a, b, c, d, z = sympy.symbols("a b c d z", real=True)
    product = W * diag(a, b) * W * diag(c, d)
    largest = max((W.T * W).eigenvals())
    says = "W = [[0, 2], [0, 0]], σ_max = 2 > 1 = 1/γ: after two steps the gradient is 0, whatever slopes σ has"
    facts = {"largest_eigenvalue": str(largest), "gradient": str(product.tolist())}
    yield counterexample(largest > 1 and product == sympy.zeros(2, 2), says, "SymPy", **facts)
    with precision(256):
        length = abs(_unit_gradient(explosion.start, 20))
    says = (
        f"one tanh unit with W = 3 > 1/γ, started at h = {explosion.start}: after 20 steps the gradient is below 1e-20"
    )
    yield counterexample(bool(length < arb(10) ** -20), says, "balls", gradient=length.str(5))
    yield from _one_step_contracts(explosion.needed(gamma) ** 2, 1, amended=True)
    before, step = (1 / (1 + Symbol(name, nonnegative=True)) for name in ("x", "y"))
    says = "‖I‖ = 1, and what is at most 1 stays so under such a step: with σ_max(W) ≤ 1/γ the gradient is never longer"
    yield nonnegative(1 - step * before, says, True)
    # One tanh unit with W = 3, above 1/γ: its gradient explodes from h = 0, and never grows from h near 3.
    unit = 3 * sympy.tanh(z)
    yield identity(unit.subs(z, 0), 0, "one unit h_t = 3·tanh(h_(t−1)) that starts at 0 stays there", True)
    says = "where its slope is 3: the gradient is 3^T, and explodes"
    yield induction(lambda n: 3**n, 0, 1, lambda length, n: sympy.diff(unit, z).subs(z, 0) * length, says, amended=True)

    def stays(h: arb) -> bool:
        out = h.tanh()
        return bool(3 * out > arb("2.9")) and bool(3 * out < 3) and bool(3 * (1 - out * out) < arb("0.1"))

    says = "started anywhere in [2.9, 3] it stays there, and every slope is below 0.1: the gradient is never above 1"
    yield cover(stays, [(2.9, 3.0)], says, amended=True)
