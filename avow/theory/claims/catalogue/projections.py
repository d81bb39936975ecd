r"""Taking one of two values out of their sum: by a projector onto the span that it lies in, along the other's.

The values are :math:`v_a = Ax` and :math:`v_b = By`; matrices are sequences of two indices, row and column.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import sympy
import torch
from sympy import And, Eq, Implies, KroneckerDelta, Matrix, Sum

from avow.core.chart import Table
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Spans, Statement, each, sequence, whole
from avow.theory.claims.kernel import Step
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import kept
from avow.theory.constructions.projections import project_out as projector

claim = claims_on("heads")
a, b, d, f, g, i, j, m = whole("a b d f g i j m")
A, B, x, y = sequence("A B x y")
rows, of_a, of_b = (f, 1, d), (m, 1, a), (m, 1, b)
SIZES = {
    d: "the dimension of the values",
    a: "the dimension of the span of A",
    b: "the dimension of the span of B",
    A: "a matrix whose columns span the first value's space",
    B: "a matrix whose columns span the second's",
    x: "the coordinates of the first value",
    y: "the coordinates of the second",
}


def value_a(row: Any) -> Any:
    return Sum(A[row, m] * x[m], of_a)


def value(row: Any) -> Any:
    """Both values together."""
    return value_a(row) + Sum(B[row, m] * y[m], of_b)


def _inner(one: Any, other: Any, at: Any, by: Any) -> Any:
    return Sum(one[f, at] * other[f, by], rows)


ORTHONORMAL = each(i, 1, a, each(j, 1, a, Eq(_inner(A, A, i, j), KroneckerDelta(i, j))))
ACROSS = each(i, 1, a, each(j, 1, b, Eq(_inner(A, B, i, j), 0)))
COORDINATE = Sum(A[f, i] * value(f), rows)


def _project_picture() -> Table:
    one = Matrix([1, 0])
    others = Matrix([0, 1]), Matrix([3, 4]) / 5
    maps = (("Aᵀ", [one.T] * 2), ("AAᵀ", [one * one.T] * 2), ("the oblique projector", [_plane(o) for o in others]))
    shown = [
        (name, *(str(list(matrix * (2 * one + other))) for matrix, other in zip(matrices, others, strict=True)))
        for name, matrices in maps
    ]
    headings = "multiplied by", "v_b = (0, 1)", "v_b = (3/5, 4/5)"
    return Table("v_a = (2, 0), and what comes back from v_a + v_b", headings, shown)


def _plane(other: Matrix) -> Matrix:
    """The projector of the plane onto (1, 0), along another direction."""
    one, away = Matrix([1, 0]), sympy.eye(2) - other * other.T / other.dot(other)
    return one * (one.T * away * one).inv() * one.T * away


def _case(turn: int, one: Any, two: Any) -> dict[Any, Any]:
    """Two spans at a right angle in the plane, after some quarter turns."""
    cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[turn]
    return {d: 2, a: 1, b: 1, A: [[cos], [sin]], B: [[-sin], [cos]], x: [one], y: [two]}


_PLANE = {"quarter turns": range(4), "x": (-2, 2), "y": (-2, 2)}


def _coordinates(_: Formula) -> Statement:
    return Statement(
        variables=SIZES,
        given=[ORTHONORMAL, ACROSS, a <= d],
        then={"returned": each(i, 1, a, Eq(COORDINATE, value_a(i)))},
        terms={"got": COORDINATE, "value": value_a(i)},
        notes=["real arithmetic"],
        spans=Spans(_PLANE, _case),
    )


def _returned(times: Formula) -> Statement:
    return Statement(
        variables=SIZES,
        given=[ORTHONORMAL, ACROSS],
        then={
            "coordinates": each(i, 1, a, Eq(COORDINATE, x[i])),
            "returned": each(g, 1, d, Eq(Sum(times(A[g, i]) * COORDINATE, (i, 1, a)), value_a(g))),
        },
        terms={"got": COORDINATE, "again": Sum(times(A[g, i]) * COORDINATE, (i, 1, a)), "value": value_a(g)},
        notes=["real arithmetic"],
        spans=Spans(_PLANE, _case),
    )


@claim(
    "project-out",
    expected="corrected",
    formal=_coordinates,
    plain="Where two values live in orthogonal spans, the transpose of an orthonormal basis of the first span recovers"
    " the first value from the sum: {got} is {value}.",
    amendment=_returned,
    amended_plain="The transpose returns the value's coordinates. The basis times its transpose returns the value:"
    " {again} is {value}.",
    subject=lambda entry: entry,
    sabotage={
        "squares of the basis": lambda entry: entry**2,
        "twice the basis": lambda entry: 2 * entry,
    },
    picture=_project_picture,
)
def project_out(against: Refutation, proof: Proof, times: Formula) -> None:
    three, four = Fraction(3, 5), Fraction(4, 5)
    turned = {d: 2, a: 1, b: 1, A: [[three], [four]], B: [[-four], [three]], x: [5], y: [5]}
    against.case(turned, "A = (3/5, 4/5)ᵀ, v_a = (3, 4), v_b = (−4, 3): Aᵀ gives the one number 5")
    unit, across, inside = proof.given(ORTHONORMAL), proof.given(ACROSS), And(i >= 1, i <= a)
    own = _read(proof, A, x, of_a, (ORTHONORMAL, unit), KroneckerDelta(i, m), inside)
    other = _read(proof, B, y, of_b, (ACROSS, across), sympy.Integer(0), inside)
    only = proof.sum_delta(x[m], of_a, i)
    here = proof.have(Implies(inside, Eq(COORDINATE, x[i])), *own, *other, only)
    proof.conclude("coordinates", proof.every(each(i, 1, a, Eq(COORDINATE, x[i])), here))
    back = proof.sum_same(times(A[g, i]) * COORDINATE, A[g, i] * x[i], (i, 1, a), here)
    proof.conclude("returned", proof.every(proof.statement.then["returned"], back))
    projection = projector(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.6], [0.8]]))
    proof.shows(kept(projection, "the library's projector along an oblique span, rounded to float32"))


def _read(
    proof: Proof, of: Any, by: Any, limits: Any, known: tuple[Any, Step], product: Any, inside: Any
) -> tuple[Step, ...]:
    """What the transpose of A makes of a value: its products with the columns, times the value's coordinates."""
    every, step = known
    swapped = proof.sum_swap(A[f, i] * of[f, m] * by[m], limits, rows)
    members = proof.member(every, i), proof.member(every.args[3], m)
    same = proof.sum_same(by[m] * _inner(A, of, i, m), by[m] * product, limits, step, *members, when=inside)
    return swapped, same
