"""How two recurrences could part, a gradient grow where it must vanish, or vanish where it is said to explode."""

from __future__ import annotations

from collections.abc import Mapping

from flint import arb, arb_mat

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue.recurrent import Explosion, Forms, Gradient, jacobian, tenths
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _column(entries: Numbers) -> arb_mat:
    return arb_mat([[entry] for entry in entries])


def _square(entries: Numbers) -> arb_mat:
    return arb_mat([[*entries[:2]], [*entries[2:]]])


def _tanh(v: arb_mat) -> arb_mat:
    return _column([entry.tanh() for entry in v.entries()])


def _forms(forms: Forms) -> Excess:
    def excess(case: Numbers) -> arb:
        W, U = _square(case[:4]), _square(case[4:8])
        b, h, x = (_column(case[at : at + 2]) for at in (8, 10, 12))
        g, apart = _tanh(h), []
        for _ in range(3):
            h, g = forms.h(h, x, W, U, b, _tanh), forms.g(g, x, W, U, b, _tanh)
            apart += [abs(entry) for entry in (_tanh(h) - g).entries()]
            x = -x
        return most(apart)

    return excess


def _longest(entries: Numbers) -> arb:
    """The largest singular value of a matrix of two rows and columns."""
    a, b, c, d = entries
    # Every such matrix is a multiple of a rotation and one of a reflection: here are half their lengths, twice.
    return (intervals.norm([a + d, b - c]) + intervals.norm([a - d, b + c])) / 2


def _scaled(entries: Numbers, largest: arb) -> arb_mat:
    """The matrix of these entries, as long as asked for."""
    return _square([entry * largest / _longest(entries) for entry in entries])


def _grown(product: arb_mat, direction: Numbers) -> arb:
    """How much longer a direction becomes: no more than the matrix's own length."""
    return intervals.norm((product * _column(direction)).entries()) / intervals.norm(direction)


def _vanishing(gradient: Gradient) -> Excess:
    largest, rate = balled(gradient.largest, 2), balled(gradient.rate, 1)
    example, tenth = tenths(gradient.weights), arb(9) / 10

    def excess(case: Numbers) -> arb:
        delta, gamma, share, *rest = case
        entries, start, direction = rest[:4], rest[4:6], rest[6:]
        # σ = γ·tanh has slopes of at most γ; its γ goes into the product with W.
        weights = _scaled(entries, share * largest(delta, gamma).sqrt() * gamma)
        broken = []
        for steps in (1, 2, 4):
            broken.append(_grown(jacobian(weights, start, steps), direction) - rate(delta) ** steps)
            own = jacobian(example, [*start, *start][: example.nrows()], steps)
            broken.append(_grown(own, [*direction, *direction][: example.nrows()]) - tenth**steps)
        return most(broken)

    return excess


def _explodes(explosion: Explosion) -> Excess:
    def excess(case: Numbers) -> arb:
        _, share, *rest = case
        # σ = tanh, γ = 1, and a W of a largest singular value from 1 to 4.
        product = jacobian(_scaled(rest[:4], 1 + 3 * share), rest[4:6], 20)
        # A gradient that explodes is longer after twenty steps than before the first.
        return 1 - intervals.norm(product.entries())

    return excess


def _needs(explosion: Explosion) -> Excess:
    needed = balled(explosion.needed, 1)

    def excess(case: Numbers) -> arb:
        gamma, share, *rest = case
        weights = _scaled(rest[:4], share * needed(gamma) * gamma)
        return most([_grown(jacobian(weights, rest[4:6], steps), rest[6:]) - 1 for steps in (1, 2, 4)])

    return excess


# Numbers that are not zero, so that a matrix and a direction can be made as long as asked for.
_WALK = {"w₁₁": (0.1, 2.0)} | numbered("w₁₂ w₂₁ w₂₂ h₁ h₂", -2, 2) | {"v₁": (0.1, 1.0), "v₂": (-1.0, 1.0)}
_GAMMA = {"γ": (0.1, 3.0), "part": (0.0, 1.0)}

HUNTS: Mapping[str, Hunt] = {
    "rnn-two-forms": Hunt(
        numbered("w₁₁ w₁₂ w₂₁ w₂₂ u₁₁ u₁₂ u₂₁ u₂₂ b₁ b₂ h₁ h₂ x₁ x₂", -2, 2),
        _forms,
        reads="Three steps with tanh, the input turning its sign.",
    ),
    "rnn-vanishing": Hunt(
        {"δ": (0.05, 0.99)} | _GAMMA | _WALK,
        _vanishing,
        reads="σ = γ·tanh, W as long as that part of what is allowed, from h, and a direction v.",
    ),
    "rnn-exploding": Hunt(
        _GAMMA | _WALK,
        _explodes,
        _needs,
        reads="As stated σ = tanh and W is 1 + 3·part long; else σ = γ·tanh, and W that part of 1/γ.",
    ),
}
