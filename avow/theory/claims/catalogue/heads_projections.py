r"""How one value is taken out of a sum of two: from :math:`v_a + v_b` back to :math:`v_a`."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
from sympy import Matrix

from avow.core.chart import Table
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions.projections import project_out as projector


class Projectors(NamedTuple):
    """What to multiply v_a + v_b by: for orthonormal A and B with AᵀB = 0, and for independent spans."""

    orthogonal: Any
    oblique: Any


# Words in matrices of any size. H and G stand for (BᵀB)⁻¹ and (AᵀRA)⁻¹, R for I − BHBᵀ.
A, At, B, Bt, H, G, R = sympy.symbols("A A^T B B^T H G R", commutative=False)
x, y = sympy.symbols("x y", commutative=False)
away_from_b = 1 - B * H * Bt


def _oblique(a: Matrix, b: Matrix) -> Matrix:
    away = sympy.eye(a.rows) - b * (b.T * b).inv() * b.T
    return a * (a.T * away * a).inv() * a.T * away


def _project_picture() -> Table:
    a = Matrix([1, 0])
    others = Matrix([0, 1]), Matrix([3, 4]) / 5
    made = (("Aᵀ", [a.T] * 2), ("AAᵀ", [a * a.T] * 2), ("the oblique projector", [_oblique(a, b) for b in others]))
    rows = [
        (name, *(str(list(matrix * (2 * a + b))) for matrix, b in zip(matrices, others, strict=True)))
        for name, matrices in made
    ]
    headings = "multiplied by", "v_b = (0, 1)", "v_b = (3/5, 4/5)"
    return Table("v_a = (2, 0), and what comes back from v_a + v_b", headings, rows)


@claim(
    "project-out",
    topic="heads",
    expected="corrected",
    statement=r"A^\top A = I,\ B^\top B = I,\ A^\top B = 0,\ v_a \in \operatorname{span}A,\ v_b \in"
    r" \operatorname{span}B:\quad A^\top(v_a+v_b) = v_a",
    plain="Where the values of two kinds live in orthogonal spans, Aᵀ recovers v_a from v_a + v_b.",
    amended=r"AA^\top(v_a+v_b) = v_a;\quad \text{for independent spans } A\,(A^\top R A)^{-1}A^\top R\,(v_a+v_b) ="
    r" v_a,\ R = I - B(B^\top B)^{-1}B^\top",
    amended_plain="Aᵀ returns the coordinates of v_a; AAᵀ returns v_a. For spans that are independent but not"
    " orthogonal the oblique projector does it.",
    assumptions=("real arithmetic", "any sizes", "oblique: the columns of [A B] are independent"),
    subject=Projectors(A * At, A * G * At * R),
    sabotage={
        "the transpose alone": Projectors(At, A * G * At * R),
        "the orthogonal projector for spans at an angle": Projectors(A * At, A * At),
        "the projector of the other span": Projectors(1 - A * At, A * G * At * R),
    },
    picture=_project_picture,
)
def project_out(projectors: Projectors) -> Iterator[Evidence]:
    a, b = [Fraction(3, 5), Fraction(4, 5)], [Fraction(-4, 5), Fraction(3, 5)]
    value = [5 * ours + 5 * theirs for ours, theirs in zip(a, b, strict=True)]
    got = [sum(ours * entry for ours, entry in zip(a, value, strict=True))]
    yield toolbox.counterexample(
        got != [5 * ours for ours in a],
        "A = (3/5, 4/5)ᵀ, v_a = (3, 4), v_b = (−4, 3): Aᵀ gives one number, not a vector of the plane",
        "exact rationals",
        **{"A^T (v_a + v_b)": [str(entry) for entry in got], "v_a": ["3", "4"]},
    )
    coordinates = sympy.expand(At * (A * x + B * y)).subs({At * A: 1, At * B: 0})
    yield toolbox.identity(coordinates, x, "AᵀA = I, AᵀB = 0: Aᵀ(Ax + By) = x, the coordinates", True)
    kept = sympy.expand(projectors.orthogonal * (A * x + B * y)).subs({At * A: 1, At * B: 0})
    yield toolbox.identity(kept, A * x, "AAᵀ(Ax + By) = Ax = v_a", True)

    kept = sympy.expand(projectors.oblique * A * x).subs(G * At * R * A, 1)
    yield toolbox.identity(kept, A * x, "independent spans, P = A(AᵀRA)⁻¹AᵀR: P·Ax = Ax", True)
    gone = sympy.expand((projectors.oblique * B * y).subs(R, away_from_b)).subs(H * Bt * B, 1)
    yield toolbox.identity(sympy.expand(gone), 0, "RB = B − B(BᵀB)⁻¹BᵀB = 0, so P·By = 0", True)
    square = sympy.expand(away_from_b**2).subs(H * Bt * B, 1)
    yield toolbox.identity(
        square,
        sympy.expand(away_from_b),
        "R² = R = Rᵀ: xᵀAᵀRAx = ‖RAx‖² is 0 only where Ax lies in B's span, that is at x = 0, so the inverse exists",
        True,
    )
    yield _at_an_angle()
    made = projector(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.6], [0.8]]))
    yield toolbox.kept(made, "the library's projector for these two, rounded to float32", True)


def _at_an_angle() -> Evidence:
    a, b = Matrix([1, 0]), Matrix([3, 4]) / 5
    oblique = _oblique(a, b)
    return toolbox.rational(
        oblique * a == a and oblique * b == sympy.zeros(2, 1) and a * a.T * b != sympy.zeros(2, 1),
        "A = (1, 0)ᵀ, B = (3/5, 4/5)ᵀ: the oblique projector keeps A and drops B; AAᵀ lets 3/5 of B through",
        True,
        P=oblique.tolist(),
        leak=(a.T * b)[0],
    )
