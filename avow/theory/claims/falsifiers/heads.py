"""How two heads could fall short of copying, swing as much as one, or a projector return something else."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import sympy
from flint import arb, arb_mat
from sympy import log

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue import heads
from avow.theory.claims.catalogue import heads_projections as projections
from avow.theory.claims.interval_checks import Numbers, balled, whole
from avow.theory.claims.random_search import Excess, Hunt


def _short_of(strength: Any, lengths: tuple[Fraction, ...] = ()) -> Excess:
    """What the weights of both heads lack, where key 1 comes in some lengths, or in the one that is drawn."""
    length = balled(strength, 2)

    def excess(case: Numbers) -> arb:
        eps, n, drawn = case
        t = length(n, eps)
        scales = [*map(intervals.ball, lengths)] if lengths else [drawn]
        return most([1 / (1 + eps) - 1 / (1 + (n - 1) * (-scale * t).exp()) for scale in (*scales, arb(1))])

    return excess


def _gauss_copies(rule: heads.Law) -> Excess:
    def excess(case: Numbers) -> arb:
        eps, n, x, times = case
        beta = times * ((n - 1) / eps).log()
        # A head that gives v_a less than half of its weight gives something else.
        return arb(1) / 2 - 1 / (1 + (n - 1) * (-beta * x).exp())

    return excess


def _gauss_law(rule: heads.Law) -> Excess:
    sigma = intervals.ball(Fraction(rule.variance)).sqrt()

    def excess(case: Numbers) -> arb:
        eps, n, _, times = case
        beta = times * ((n - 1) / eps).log()
        least = rule.least(n, eps, beta, lambda z: z.log())
        at_least = 1 / (1 + (n - 1) * (-beta * least).exp())
        stated, true = (1 - least) / sigma, arb(2).sqrt() * (1 - 1 / times)
        return abs(at_least - 1 / (1 + eps)).max(abs(intervals.normal_cdf(stated) - intervals.normal_cdf(true)))

    return excess


def _swings_less(pair: heads.Heads) -> Excess:
    def excess(case: Numbers) -> arb:
        n, root = map(whole, case)
        return intervals.ball(heads.swing(pair, n, root) - heads.swing(pair[:1], n, root))

    return excess


def _word(word: Any, letters: Mapping[Any, arb_mat]) -> arb_mat:
    """A word in matrices, multiplied out; a number in it is so many times the identity of the plane."""
    if word in letters:
        return letters[word]
    if word.is_Integer:
        return arb_mat([[int(word), 0], [0, int(word)]])
    parts = [_word(part, letters) for part in word.args]
    made = parts[0]
    for part in parts[1:]:
        made = made + part if isinstance(word, sympy.Add) else made * part
    return made


def _missed(word: Any, a: arb_mat, b: arb_mat, x: arb, y: arb) -> arb:
    """How far a word takes Ax + By from Ax; coordinates that it returns instead are the first ones of the plane."""
    turned = b.transpose()
    h = (turned * b).inv()
    away = arb_mat([[1, 0], [0, 1]]) - b * h * turned
    g = (a.transpose() * away * a).inv()
    given = (
        projections.A,
        projections.At,
        projections.B,
        projections.Bt,
        projections.H,
        projections.G,
        projections.R,
    )
    letters = dict(zip(given, (a, a.transpose(), b, turned, h, g, away), strict=True))
    made = (_word(word, letters) * (a * x + b * y)).entries()
    padded = [*made, *[arb(0)] * (2 - len(made))]
    return most([abs(found - wanted) for found, wanted in zip(padded, (a * x).entries(), strict=True)])


def _spans(case: Numbers) -> tuple[arb_mat, arb_mat, arb_mat]:
    """A unit vector of the plane, the one at a right angle to it, and one at another angle."""
    turn, angle = 2 * arb.pi() * case[0], arb.pi() * case[1]
    a, across, oblique = (arb_mat([[at.cos()], [at.sin()]]) for at in (turn, turn + arb.pi() / 2, turn + angle))
    return a, across, oblique


def _coordinates(projectors: projections.Projectors) -> Excess:
    def excess(case: Numbers) -> arb:
        a, across, _ = _spans(case)
        return _missed(projections.At, a, across, *case[2:])

    return excess


def _projected(projectors: projections.Projectors) -> Excess:
    def excess(case: Numbers) -> arb:
        a, across, oblique = _spans(case)
        words = ((projectors.orthogonal, across), (projectors.oblique, oblique))
        return most([_missed(word, a, b, *case[2:]) for word, b in words])

    return excess


_EPS = {"ε": (0.01, 0.99)}

HUNTS: Mapping[str, Hunt] = {
    "heads-discrete": Hunt(
        _EPS | {"n": (2, 1000), "c": (0.5, 2)},
        lambda _: _short_of(lambda n, eps: log(n / eps), (Fraction(1, 2), Fraction(3, 2))),
        _short_of,
        whole=frozenset("n"),
        reads="Key 1 is c times as long; as stated c is ½ and 3/2.",
    ),
    "heads-gauss": Hunt(
        _EPS | {"n": (2, 1000), "X": (-2, 4), "β/ln((n−1)/ε)": (1, 20)},
        _gauss_copies,
        _gauss_law,
        whole=frozenset("n"),
        reads="Key a is X times its mean; what is true instead speaks of all X at once.",
    ),
    # √(n/ε) is a whole number, so that weights are fractions, and equal ones are known to be.
    "heads-identical": Hunt(
        {"n": (2, 100), "√(n/ε)": (11, 200)}, _swings_less, whole=frozenset({"n", "√(n/ε)"}), strict=True
    ),
    "project-out": Hunt(
        {"turn": (0, 1), "angle/π": (0.1, 0.9), "x": (-2, 2), "y": (-2, 2)},
        _coordinates,
        _projected,
        reads="In the plane: A at a part of a full turn, B at that angle to it, v_a = Ax and v_b = By.",
    ),
}
