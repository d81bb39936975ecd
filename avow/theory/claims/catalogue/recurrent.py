"""Recurrent networks: two ways to write one, gradients that vanish, and what it takes for them to explode.

What holds for every step is shown by induction: the first step, and from any step to the next. A gradient through time
is a change of the first state that is carried on by the chain rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from flint import arb, arb_mat, fmpq
from sympy import Abs, And, Eq, Implies, KroneckerDelta, Max, Sum

from avow.core.chart import Chart, Table
from avow.numerics.intervals import frobenius, precision
from avow.theory.claims.claim import Formula, Versions, claims_on
from avow.theory.claims.formal import Measured, Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.kernel import Step
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import enclosed

claim = claims_on("dynamics")
delta, gamma, kappa = real("delta gamma kappa")
d, i, j, k, t, T = whole("d i j k t T")
W, U, b, h, g, x, s, z = sequence("W U b h g x s z")


class sigma(Measured):  # noqa: N801 - it is printed by its name
    """An activation, any function: cases try the ReLU."""

    nargs = (1,)

    def measured(self, values: Sequence[arb]) -> arb:
        return values[0].max(arb(0))

    def exact(self, values: Sequence[Any]) -> Any:
        return Max(0, values[0])


class Forms(NamedTuple):
    """A unit's next state in each form: from the product with W, the states, what its input gives, its bias and σ."""

    h: Formula = lambda W, h, u, b, sigma: W(lambda j: sigma(h(j))) + u + b
    g: Formula = lambda W, g, u, b, sigma: sigma(W(g) + u + b)


def _cut(number: Fraction) -> Fraction:
    return max(number, Fraction(0))


def _states(forms: Forms, weights: Any, inputs: Any, bias: Any, start: Any, steps: Any) -> list[list[list[Fraction]]]:
    """Both recurrences in fractions, states by step: of the one form and of the other."""
    found: list[list[list[Fraction]]] = [[list(start)], [list(map(_cut, start))]]
    for step in steps:
        for form, states in zip(forms, found, strict=True):
            now = states[-1]
            states.append(
                [
                    form(
                        lambda f, row=row: sum(w * f(j) for j, w in enumerate(row)),
                        now.__getitem__,
                        sum(w * part for w, part in zip(ins, step, strict=True)),
                        shift,
                        _cut,
                    )
                    for row, ins, shift in zip(weights, inputs, bias, strict=True)
                ]
            )
    return found


def _forms_picture() -> Table:
    weights, inputs, bias = [[0, 1], [0, 0]], [[1, -1], [2, 1]], [Fraction(1, 2), Fraction(-1)]
    steps = [[Fraction(t - 1), Fraction(1, t + 1)] for t in range(4)]
    states = zip(*_states(Forms(), weights, inputs, bias, [Fraction(1), Fraction(-2)], steps), strict=True)
    rows = [
        [t, *(str(tuple(map(str, state))) for state in (one, map(_cut, one), other))]
        for t, (one, other) in enumerate(states)
    ]
    return Table("Two recurrences, one network: σ(h) is g at every step", ("t", "h", "σ(h)", "g"), rows)


_SAME_START = each(i, 1, d, Eq(g[1, i], sigma(h[1, i])))


def _step(form: Formula, states: Any, at: Any) -> Any:
    fed = Sum(U[i, k] * x[at, k], (k, 1, d))
    return form(lambda f: Sum(W[i, j] * f(j), (j, 1, d)), lambda j: states[at - 1, j], fed, b[i], sigma)


def _recurrences(forms: Forms) -> list[Any]:
    return [
        each(t, 2, T, each(i, 1, d, Eq(states[t, i], _step(form, states, t))))
        for form, states in zip(forms, (h, g), strict=True)
    ]


def _two_forms(forms: Forms) -> Statement:
    def case(*numbers: Any) -> dict[Any, Any]:
        n = list(map(decimal, numbers))
        weights, inputs, bias, start, fed = ([n[0:2], n[2:4]], [n[4:6], n[6:8]], n[8:10], n[10:12], [n[12:14]])
        one, other = _states(forms, weights, inputs, bias, start, [fed[0], [-part for part in fed[0]]])
        return {d: 2, T: 3, W: weights, U: inputs, b: bias, x: [fed[0], fed[0], [-p for p in fed[0]]], h: one, g: other}

    names = ["w₁₁", "w₁₂", "w₂₁", "w₂₂", "u₁₁", "u₁₂", "u₂₁", "u₂₂", "b₁", "b₂", "h₁", "h₂", "x₁", "x₂"]
    return Statement(
        variables={
            T: "the number of states",
            d: "the number of units, and of inputs",
            W: "the recurrent weights",
            U: "the input's weights",
            b: "the biases",
            x: "the inputs, by step",
            h: "the states of the one network, by step",
            g: "the states of the other",
        },
        given=[T >= 1, _SAME_START, *_recurrences(forms)],
        then={"same": each(i, 1, d, Eq(g[T, i], sigma(h[T, i])))},
        terms={"same": Eq(g[T, i], sigma(h[T, i]))},
        notes=["σ is any function, entry by entry; W need have no inverse"],
        spans=Spans(dict.fromkeys(names, (-2, 2)), case),
    )


@claim(
    "rnn-two-forms",
    expected="proved",
    formal=_two_forms,
    plain="The recurrent network with the activation inside the sum and the one with it outside are the same network,"
    " read at two places, where they start so: {same}.",
    subject=Forms(),
    sabotage={
        "the bias outside": Forms(g=lambda W, g, u, b, sigma: sigma(W(g) + u) + b),
        "the activation twice": Forms(g=lambda W, g, u, b, sigma: sigma(W(lambda j: sigma(g(j)) + 1) + u + b)),
        "no activation on the state": Forms(h=lambda W, h, u, b, sigma: W(h) + u + b),
    },
    picture=_forms_picture,
)
def rnn_two_forms(proof: Proof, forms: Forms) -> None:
    some, start = proof.given(T >= 1), proof.given(_SAME_START)
    inner, outer = map(proof.given, _recurrences(forms))
    same = each(i, 1, d, Eq(g[t, i], sigma(h[t, i])))
    so_far = Implies(t <= T, same)
    row = And(t >= 1, t + 1 <= T, same)
    one, other = (
        (proof.member(step.formula, t + 1), proof.member(step.formula.args[3].subs(t, t + 1), i))
        for step in (inner, outer)
    )
    before = proof.member(same, j)
    within = And(row, i >= 1, i <= d)
    products = proof.sum_same(W[i, j] * g[t, j], W[i, j] * sigma(h[t, j]), (j, 1, d), before, when=within)
    read = proof.same_value(sigma, _step(forms.g, g, t + 1).args[0], h[t + 1, i])
    unit = proof.have(
        Implies(within, Eq(g[t + 1, i], sigma(h[t + 1, i]))),
        inner,
        outer,
        *one,
        *other,
        products,
        read,
        says="W meets σ(h) in both",
    )
    next_ = proof.every(each(i, 1, d, Eq(g[t + 1, i], sigma(h[t + 1, i]))), unit, when=row)
    onward = proof.have(Implies(And(t >= 1, so_far), so_far.subs(t, t + 1)), next_)
    base = proof.have(so_far.subs(t, 1), start)
    proof.conclude("same", proof.at(proof.induction(so_far, t, 1, base, onward), {t: T}), some)


class Gradient(NamedTuple):
    """The bound asked of WᵀW, and the rate it promises."""

    largest: Formula = lambda delta, gamma: delta**2 / gamma**2
    rate: Formula = lambda delta: delta


# A W to try, in tenths, with δ = 9/10 and γ = 1.
CONTRACTION = ((3, -5, 2), (4, 3, -1), (-2, 4, 5))


def _column(entries: Sequence[arb]) -> arb_mat:
    return arb_mat(len(entries), 1, entries)


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
    weights, steps = tenths(CONTRACTION), list(range(1, 25))
    with precision(128):
        jacobians = [jacobian(weights, [arb(0)] * 3, t) for t in steps]
        lengths = [float(frobenius(matrix).mid()) for matrix in jacobians]
    series = {"‖∂h_T/∂h_0‖ (Frobenius)": (steps, lengths), "√3 δ^T": (steps, [3**0.5 * 0.9**t for t in steps])}
    return Chart("A gradient through time and its bound", "T", "length", series, log_y=True)


_SLOPES = each(t, 1, T, each(j, 1, d, Abs(s[t, j]) <= gamma))
_CHAIN = each(t, 1, T, each(i, 1, d, Eq(z[t + 1, i], Sum(W[i, j] * s[t, j] * z[t, j], (j, 1, d)))))
_CHANGED = {
    T: "the number of steps",
    d: "the number of units",
    W: "the recurrent weights",
    gamma: "the most that a slope is",
    s: "the slopes of the activation, by step and unit",
    z: "a change of the first state, as it is carried on",
}
_NOTES = [
    "a change of h_0 is carried on by the chain rule, z_(t+1) = W diag(σ'(h_t)) z_t; the gradient is as long as the"
    " most that it lengthens one"
]


def squares(of: Any) -> Any:
    """The squared length of a vector."""
    return Sum(of(j) ** 2, (j, 1, d))


def length(at: Any) -> Any:
    """The squared length of the change after some steps."""
    return squares(lambda j: z[at, j])


def stretches(most: Any) -> Any:
    """That W lengthens none of the vectors it meets by more than a factor, as squares."""
    met = Sum(Sum(W[i, j] * s[t, j] * z[t, j], (j, 1, d)) ** 2, (i, 1, d))
    return each(t, 1, T, met <= most * squares(lambda j: s[t, j] * z[t, j]))


def carried(weights: Any, slopes: Any, start: Any, steps: int) -> dict[Any, Any]:
    """A change of two states and all that comes of it, in fractions."""
    changes = [start]
    for _ in range(steps):
        now = [slope * part for slope, part in zip(slopes, changes[-1], strict=True)]
        changes.append([sum((w * part for w, part in zip(row, now, strict=True)), Fraction(0)) for row in weights])
    return {T: steps, d: len(start), W: weights, s: [slopes] * steps, z: changes}


def _walk(*numbers: Any) -> dict[Any, Any]:
    """A multiple of a rotation, slopes of a part of γ, and a direction."""
    most, size, turn, *rest = map(decimal, numbers)
    cosine, sine = (1 - turn**2) / (1 + turn**2), 2 * turn / (1 + turn**2)
    weights = [[size * cosine, -size * sine], [size * sine, size * cosine]]
    return {gamma: most, delta: size * most, **carried(weights, [most * part for part in rest[:2]], rest[2:], 2)}


def _at_rate(rate: Any, *numbers: Any) -> dict[Any, Any]:
    """The same, and a δ that need not be that of W."""
    return _walk(*numbers) | {delta: decimal(rate)}


_WALK = {
    "δ": (0.05, 0.99),
    "γ": (0.1, 3),
    "size": (0.05, 3),
    "turn": (-1, 1),
    **dict.fromkeys(("s₁", "s₂", "v₁", "v₂"), (-1, 1)),
}


def _vanishing(gradient: Gradient) -> Statement:
    rate = gradient.rate(delta)
    return Statement(
        variables=_CHANGED | {delta: "how much a step may lengthen"},
        given=[T >= 0, gamma > 0, delta > 0, delta < 1, _SLOPES, _CHAIN, stretches(kappa)],
        where={kappa: gradient.largest(delta, gamma)},
        then={"short": length(T + 1) <= rate ** (2 * T) * length(1), "vanishes": delta**T <= 1 / (1 + T * (1 - delta))},
        terms={
            "rate": rate ** (2 * T),
            "largest": gradient.largest(delta, gamma),
            "gone": delta**T <= 1 / (1 + T * (1 - delta)),
        },
        notes=[*_NOTES, "λ_max(WᵀW) ≤ δ²/γ² says of every vector what is asked of those that W meets"],
        spans=Spans(_WALK, _at_rate),
    )


def _one_step(proof: Proof, most: Any, now: Any, *supposed: Step) -> Step:
    """A step lengthens no change by more than what W does times γ, as squares."""
    slopes, chain, wide = map(proof.given, (_SLOPES, _CHAIN, gamma > 0))
    at, unit = proof.member(_CHAIN, t), proof.member(_CHAIN.args[3], i)
    product = Sum(W[i, j] * s[t, j] * z[t, j], (j, 1, d))
    alike = proof.sum_same(z[t + 1, i] ** 2, product**2, (i, 1, d), chain, at, unit, when=now)
    slope, own = proof.member(_SLOPES, t), proof.member(_SLOPES.args[3], j)
    within = And(now, j >= 1, j <= d)
    part = s[t, j] * z[t, j]
    factor = proof.have(Implies(within, s[t, j] ** 2 <= gamma**2), slopes, slope, own, says="a slope is γ at most")
    small = proof.have(Implies(within, part**2 <= gamma**2 * z[t, j] ** 2), factor)
    shorter = proof.sum_most(part**2, gamma**2 * z[t, j] ** 2, (j, 1, d), small, when=now)
    met = proof.member(stretches(most), t)
    return proof.have(Implies(now, length(t + 1) <= most * gamma**2 * length(t)), alike, shorter, *supposed, met, wide)


@claim(
    "rnn-vanishing",
    expected="proved",
    formal=_vanishing,
    plain="Where the activation's slope is bounded, and W lengthens no squared vector by more than {largest}, a squared"
    " change is after so many steps at most {rate} of what it was: the gradient vanishes, as {gone}.",
    subject=Gradient(),
    sabotage={
        "the bound without its square": Gradient(largest=lambda delta, gamma: delta / gamma),
        "a rate of δ²": Gradient(rate=lambda delta: delta**2),
    },
    picture=_gradient_picture,
)
def rnn_vanishing(proof: Proof, gradient: Gradient) -> None:
    steps, positive, below = map(proof.given, (T >= 0, delta > 0, delta < 1))
    rate = gradient.rate(delta)
    most = gradient.largest(delta, gamma)
    lengthens = _one_step(proof, most, And(t >= 1, t <= T), proof.given(stretches(most)))
    now = Implies(And(t >= 1, t <= T), length(t + 1) <= rate**2 * length(t))
    step = proof.have(now, lengthens, says="a step lengthens by δ at most")
    bound = Implies(t <= T, length(t + 1) <= rate ** (2 * t) * length(1))
    onward = proof.have(Implies(And(t >= 0, bound), bound.subs(t, t + 1)), proof.at(step, {t: t + 1}), positive)
    proof.conclude("short", proof.at(proof.induction(bound, t, 0, onward), {t: T}), steps)
    gone = delta**t * (1 + t * (1 - delta)) <= 1
    proof.conclude("vanishes", proof.at(proof.induction(gone, t, 0, positive), {t: T}), steps, below)
    for steps_ in (1, 5, 20):
        says = f"an instance: ∂h_T/∂h_0 after T = {steps_} is shorter than 0.9^{steps_}, by Sylvester's minors"
        example = jacobian(tenths(CONTRACTION), [arb(0)] * 3, steps_)
        proof.shows(enclosed(_shorter(example, arb(fmpq(9, 10)) ** (2 * steps_)), says))


P = sequence("P")


class Chain(NamedTuple):
    """A step's factor on a change z, entry i; and how a step adds its own to the product: terms j of entry i, k."""

    factor: Formula
    product: Formula

    def longer(self, t: Any, i: Any, k: Any) -> Any:
        """The product of one more step."""
        entries = (lambda i, j: W[i, j]), (lambda j: s[t, j]), (lambda i, k: P[t, i, k])
        return Sum(self.product(*entries, i, j, k), (j, 1, d))


AS_WRITTEN = Chain(
    lambda t, i: s[t + 1, i] * Sum(W[i, j] * z[t, j], (j, 1, d)),
    lambda W, s, P, i, j, k: P(i, j) * W(j, k) * s(k),
)
IN_ORDER = Chain(
    lambda t, i: Sum(W[i, j] * s[t, j] * z[t, j], (j, 1, d)),
    lambda W, s, P, i, j, k: W(i, j) * s(j) * P(j, k),
)
_RUNS = [
    each(t, 1, T, each(i, 1, d, Eq(run[t + 1, i], Sum(W[i, j] * sigma(run[t, j]), (j, 1, d)) + x[t, i])))
    for run in (h, g)
]
_APART = each(t, 1, T + 1, each(i, 1, d, Eq(z[t, i], g[t, i] - h[t, i])))
_CHORDS = each(t, 1, T + 1, each(j, 1, d, Eq(sigma(g[t, j]) - sigma(h[t, j]), s[t, j] * z[t, j])))
_FIRST = each(i, 1, d, each(k, 1, d, Eq(P[1, i, k], KroneckerDelta(i, k))))
_CARRIED_ON = Sum(P[T + 1, i, k] * z[1, k], (k, 1, d))


def _runs(chain: Chain, weights: Any, inputs: Any, one: Any, other: Any) -> dict[Any, Any]:
    """Two runs of a network of ReLUs, and the product of what each step does to a change."""
    size, states = len(one), [[one], [other]]
    for step in inputs:
        for run in states:
            outs = list(map(_cut, run[-1]))
            run.append(
                [
                    sum(w * o for w, o in zip([*row, 1], [*outs, b], strict=True))
                    for row, b in zip(weights, step, strict=True)
                ]
            )
    pairs = [list(zip(*now, strict=True)) for now in zip(*states, strict=True)]
    case = {
        **{T: len(inputs), d: size, W: weights, x: inputs, h: states[0], g: states[1]},
        s: [[(_cut(b) - _cut(a)) / (b - a) if a != b else Fraction(0) for a, b in now] for now in pairs],
        z: [[b - a for a, b in now] for now in pairs],
    }
    places = range(size)
    products = [[[Fraction(int(row == column)) for column in places] for row in places]]
    for now in case[s][:-1]:
        entries = (lambda i, j: weights[i][j]), now.__getitem__, lambda i, k, last=products[-1]: last[i][k]
        products.append([[sum(chain.product(*entries, i, j, k) for j in places) for k in places] for i in places])
    return case | {P: products}


def _factors(chain: Chain) -> Any:
    """Every step adds its factor to the product."""
    return each(t, 1, T, each(i, 1, d, each(k, 1, d, Eq(P[t + 1, i, k], chain.longer(t, i, k)))))


def _chained(chain: Chain) -> Statement:
    def case(steps: int, *numbers: Any) -> dict[Any, Any]:
        n = list(map(decimal, numbers))
        return _runs(chain, [n[0:2], n[2:4]], [n[4:6], n[6:8]][:steps], n[8:10], n[10:12])

    names = ["w₁₁", "w₁₂", "w₂₁", "w₂₂", "x₁₁", "x₁₂", "x₂₁", "x₂₂", "h₁", "h₂", "g₁", "g₂"]
    return Statement(
        variables={
            T: "the number of steps",
            d: "the number of units",
            W: "the recurrent weights",
            x: "the inputs and biases, by step",
            h: "the states of a run",
            g: "the states of another run",
            z: "how far the one is from the other",
            s: "the slopes of the activation between the two, by step and unit",
            P: "the product of the factors so far",
        },
        given=[T >= 1, *_RUNS, _APART, _CHORDS, _FIRST, _factors(chain)],
        then={
            "factor": each(i, 1, d, Eq(z[T + 1, i], chain.factor(T, i))),
            "product": each(i, 1, d, Eq(z[T + 1, i], _CARRIED_ON)),
        },
        terms={"factor": chain.factor(T, i), "grows": chain.longer(t, i, k), "product": _CARRIED_ON},
        notes=[
            "σ is any function, entry by entry",
            "as one run nears the other, slopes become σ'(h_t), and the factors and their product ∂h_(t+1)/∂h_t and"
            " ∂h_(T+1)/∂h_1",
        ],
        spans=Spans({"steps": range(1, 3)} | dict.fromkeys(names, (-2, 2)), case),
    )


@claim(
    "rnn-chain",
    expected="corrected",
    formal=lambda chains: _chained(chains.stated),
    plain="A step of the recurrent network takes a change of its state to {factor}, the slopes at the new state times"
    " what the weights give; and all steps take it to {product}, where each step adds its factor on the right:"
    " {grows}.",
    amendment=lambda chains: _chained(chains.amended),
    amended_plain="A step takes it to {factor}: the slopes are those at the old state, and come before the weights. All"
    " steps take it to {product}, where each step adds its factor on the left: {grows}.",
    subject=Versions(AS_WRITTEN, IN_ORDER),
    sabotage={
        "the slopes of the next state": Versions(
            AS_WRITTEN, IN_ORDER._replace(factor=lambda t, i: Sum(W[i, j] * s[t + 1, j] * z[t, j], (j, 1, d)))
        ),
        "the slopes after the weights": Versions(
            AS_WRITTEN, IN_ORDER._replace(factor=lambda t, i: s[t, i] * Sum(W[i, j] * z[t, j], (j, 1, d)))
        ),
        "the product the other way round": Versions(AS_WRITTEN, IN_ORDER._replace(product=AS_WRITTEN.product)),
    },
    picture=_gradient_picture,
)
def rnn_chain(against: Refutation, proof: Proof, chains: Versions) -> None:
    one, nought, chain = Fraction(1), Fraction(0), chains.amended
    index = _runs(chains.stated, [[one]], [[-5 * one]], [one], [2 * one])
    against.case(
        index, "one unit that a step turns off: its slope is 1 before and 0 after, and the change stays 1", "factor"
    )
    turned = [[one, nought], [one, one]], [[-5 * one, nought], [nought, nought]]
    order = _runs(chains.stated, *turned, [one, one], [2 * one, one])
    against.case(order, "two steps whose factors do not commute", "product")
    some, *runs = map(proof.given, (T >= 1, *_RUNS))
    apart, chords, first, grows = map(proof.given, (_APART, _CHORDS, _FIRST, _factors(chain)))
    now, unit = And(t >= 1, t <= T), And(i >= 1, i <= d)
    states = [(proof.member(run.formula, t), proof.member(run.formula.args[3], i)) for run in runs]
    slope = proof.member(_CHORDS, t), proof.member(_CHORDS.args[3], j)
    outs = proof.sum_same(
        W[i, j] * (sigma(g[t, j]) - sigma(h[t, j])), W[i, j] * s[t, j] * z[t, j], (j, 1, d), chords, *slope, when=now
    )
    gap = proof.member(_APART, t + 1), proof.member(_APART.args[3].subs(t, t + 1), i)
    factor = Implies(And(now, unit), Eq(z[t + 1, i], chain.factor(t, i)))
    stepped = proof.have(factor, *runs, *states[0], *states[1], outs, apart, *gap, says="W meets σ(g) − σ(h)")
    proof.conclude("factor", proof.every(proof.statement.parts["factor"], proof.at(stepped, {t: T}), some))
    # What every step does, all do.
    carried_on = each(i, 1, d, Eq(z[t, i], Sum(P[t, i, k] * z[1, k], (k, 1, d))))
    so_far, before = Implies(t <= T + 1, carried_on), And(now, carried_on)
    entry = proof.member(_FIRST, i), proof.member(_FIRST.args[3], k)
    ones = proof.sum_same(P[1, i, k] * z[1, k], z[1, k] * KroneckerDelta(k, i), (k, 1, d), first, *entry, when=unit)
    base = proof.have(Implies(unit, carried_on.args[3].subs(t, 1)), ones, proof.sum_delta(z[1, k], (k, 1, d), i))
    base = proof.every(carried_on.subs(t, 1), base)
    inner = W[i, j] * s[t, j]
    known = proof.sum_same(
        inner * z[t, j],
        inner * Sum(P[t, j, k] * z[1, k], (k, 1, d)),
        (j, 1, d),
        proof.member(carried_on, j),
        when=before,
    )
    swapped = proof.sum_swap(inner * P[t, j, k] * z[1, k], (k, 1, d), (j, 1, d))
    step = grows.formula
    at = proof.member(step, t), proof.member(step.args[3], i), proof.member(step.args[3].args[3], k)
    entries = proof.sum_same(
        P[t + 1, i, k] * z[1, k], chain.longer(t, i, k) * z[1, k], (k, 1, d), grows, *at, when=And(now, unit)
    )
    further = Implies(And(before, unit), carried_on.args[3].subs(t, t + 1))
    further = proof.have(further, stepped, known, swapped, entries)
    after = proof.every(carried_on.subs(t, t + 1), further, when=before)
    onward = proof.have(Implies(And(t >= 1, so_far), so_far.subs(t, t + 1)), after)
    proof.conclude("product", proof.at(proof.induction(so_far, t, 1, base, onward), {t: T + 1}), some)


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


y = sequence("y")
_LONG = Sum(Sum(W[i, j] * y[j], (j, 1, d)) ** 2, (i, 1, d))


class Explosion(NamedTuple):
    """What is said to make a gradient explode; and beyond what W must stretch for it, as squares."""

    enough: Formula
    needed: Formula


def _explodes(explosion: Explosion) -> Statement:
    def case(_: Any, *numbers: Any) -> dict[Any, Any]:
        found = _walk(*numbers)
        return {**found, y: found[z][0]}

    enough = explosion.enough(delta, gamma)
    return Statement(
        variables=_CHANGED | {delta: "by how much W may lengthen, times γ", y: "a vector that W lengthens"},
        given=[T >= 1, gamma > 0, delta > 0, _SLOPES, _CHAIN, length(1) > 0, enough],
        then={"longer": length(T + 1) > length(1)},
        terms={"ratio": delta**2 / gamma**2 > 1} if enough.has(delta) else {},
        notes=[*_NOTES, "what explodes is longer in the end than at the start"],
        spans=Spans(_WALK, case),
    )


def _needs(explosion: Explosion) -> Statement:
    needed = explosion.needed(delta, gamma)
    bounded = [delta > 0, delta <= 1] if needed.has(delta) else []
    return Statement(
        variables=_CHANGED | ({delta: "by how much W may lengthen, times γ"} if bounded else {}),
        given=[T >= 0, gamma > 0, *bounded, _SLOPES, _CHAIN],
        then={"needed": Implies(stretches(kappa), length(T + 1) <= length(1))},
        where={kappa: needed},
        terms={"needed": needed, **({"small": delta <= 1} if bounded else {})},
        notes=_NOTES,
        spans=Spans(_WALK, _at_rate),
    )


def _never_longer(proof: Proof, explosion: Explosion) -> None:
    needed = explosion.needed(delta, gamma)
    steps, stretched = proof.given(T >= 0), stretches(needed)
    uses = [_one_step(proof, needed, And(t >= 1, t <= T, stretched))]
    if needed.has(delta):
        uses += [
            proof.given(delta > 0),
            proof.given(delta <= 1),
            proof.sum_most(0, z[t, j] ** 2, (j, 1, d)),
        ]
    step = proof.have(Implies(And(t >= 1, t <= T, stretched), length(t + 1) <= length(t)), *uses)
    bound = Implies(And(t <= T, stretched), length(t + 1) <= length(1))
    onward = proof.have(Implies(And(t >= 0, bound), bound.subs(t, t + 1)), proof.at(step, {t: t + 1}))
    always = proof.induction(bound, t, 0, onward, says="no step lengthens")
    proof.conclude("needed", proof.at(always, {t: T}), steps)


def _grows(_: Any, __: Any) -> Any:
    return each(t, 1, T, length(t + 1) > length(t))


EXPLOSION = Explosion(
    lambda delta, gamma: gamma**2 * _LONG > squares(lambda j: y[j]), lambda delta, gamma: 1 / gamma**2
)


@claim(
    "rnn-exploding",
    expected="corrected",
    formal=_explodes,
    plain="If W lengthens some vector by more than the slopes can shorten, the gradient explodes.",
    amendment=_needs,
    amended_plain="It is necessary for the gradient to grow that W lengthens some squared vector it meets by more than"
    " {needed}, and not sufficient: a nilpotent W or a saturated activation kills it.",
    subject=EXPLOSION,
    sabotage={
        "a change that grows at every step": EXPLOSION._replace(enough=_grows),
        "2/γ in place of 1/γ": EXPLOSION._replace(needed=lambda delta, gamma: 4 / gamma**2),
    },
    picture=_explosion_picture,
)
def rnn_exploding(against: Refutation, proof: Proof, explosion: Explosion) -> None:
    one, nought = Fraction(1), Fraction(0)
    nilpotent = carried([[nought, Fraction(2)], [nought, nought]], [one, one], [one, one], 2)
    against.case(
        nilpotent | {gamma: 1, delta: 1, y: [nought, one]}, "W = [[0, 2], [0, 0]]: after two steps nothing is left"
    )
    saturated = carried([[Fraction(3)]], [Fraction(1, 100)], [one], 2)
    against.case(saturated | {gamma: 1, delta: 1, y: [one]}, "W = 3, one unit near 3, where tanh hardly changes")
    _never_longer(proof, explosion)


RATIO = Explosion(
    lambda delta, gamma: And(delta**2 / gamma**2 > 1, Eq(_LONG, delta**2 / gamma**2 * squares(lambda j: y[j]))),
    lambda delta, gamma: delta**2 / gamma**2,
)


@claim(
    "rnn-exploding-ratio",
    expected="corrected",
    formal=_explodes,
    plain="Where W lengthens some vector by the ratio of two numbers, the second of which no slope exceeds, the"
    " gradient explodes if {ratio}.",
    amendment=_needs,
    amended_plain="The slopes shorten what W lengthens. Where W lengthens no squared vector by more than {needed}, and"
    " {small}, the gradient never grows, however large that ratio is; beyond it may grow, and need not.",
    subject=RATIO,
    sabotage={
        "a change that grows at every step": RATIO._replace(enough=_grows),
        "the ratio itself allowed": RATIO._replace(needed=lambda delta, gamma: 1 + delta**2 / gamma**2),
    },
    picture=_explosion_picture,
)
def rnn_exploding_ratio(against: Refutation, proof: Proof, explosion: Explosion) -> None:
    half = carried([[Fraction(2)]], [Fraction(1, 4)], [Fraction(1)], 2)
    says = "γ = ¼ and δ = ½: W doubles, the slopes quarter, and a step halves"
    against.case(half | {gamma: Fraction(1, 4), delta: Fraction(1, 2), y: [Fraction(1)]}, says)
    _never_longer(proof, explosion)
