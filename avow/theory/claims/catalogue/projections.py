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
from avow.theory.claims.formal import Spans, Statement, decimal, each, sequence, whole
from avow.theory.claims.kernel import Step
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import kept
from avow.theory.constructions.projections import project_out as projector

claim = claims_on("heads")
a, b, d, e, f, g, i, j, m = whole("a b d e f g i j m")
A, B, C, K, L, R, x, y = sequence("A B C K L R x y")
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


def _inner(entry: Any, of: Any, by: Any) -> Any:
    """A row, which is a map's or the transpose of a column, times a column."""
    return Sum(entry * of[f, by], rows)


ORTHONORMAL = each(i, 1, a, each(j, 1, a, Eq(_inner(A[f, i], A, j), KroneckerDelta(i, j))))
ACROSS = each(i, 1, a, each(j, 1, b, Eq(_inner(A[f, i], B, j), 0)))
COORDINATE = Sum(A[f, i] * value(f), rows)
# R takes away what lies in the span of B, by a left inverse of B, and L is a left inverse of what is left of A.
LEFT_OF_B = each(i, 1, b, each(j, 1, b, Eq(_inner(K[i, f], B, j), KroneckerDelta(i, j))))
AWAY = each(e, 1, d, each(f, 1, d, Eq(R[e, f], KroneckerDelta(e, f) - Sum(B[e, m] * K[m, f], of_b))))
DUAL = each(i, 1, a, each(f, 1, d, Eq(C[i, f], Sum(L[i, e] * R[e, f], (e, 1, d)))))
LEFT_OF_A = each(i, 1, a, each(j, 1, a, Eq(_inner(C[i, f], A, j), KroneckerDelta(i, j))))
NOTHING_OF_B = each(i, 1, a, each(j, 1, b, Eq(_inner(C[i, f], B, j), 0)))


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
    bases = (ORTHONORMAL, proof.given(ORTHONORMAL)), (ACROSS, proof.given(ACROSS))
    here = _reads(proof, A[f, i], *bases)
    proof.conclude("coordinates", proof.every(each(i, 1, a, Eq(COORDINATE, x[i])), here))
    _returns(proof, times(A[g, i]), COORDINATE, here)


def _reads(proof: Proof, entry: Any, own: tuple[Any, Step], other: tuple[Any, Step]) -> Step:
    """A map's row makes of both values the coordinate of the first, by its products with the columns of both."""
    inside, read = And(i >= 1, i <= a), []
    for (every, step), of, by, limits in ((own, A, x, of_a), (other, B, y, of_b)):
        product = every.args[3].args[3].rhs.subs(j, m)
        swapped = proof.sum_swap(entry * of[f, m] * by[m], limits, rows)
        members = proof.member(every, i), proof.member(every.args[3], m)
        same = proof.sum_same(by[m] * _inner(entry, of, m), by[m] * product, limits, step, *members, when=inside)
        read += [swapped, same]
    only = proof.sum_delta(x[m], of_a, i)
    return proof.have(Implies(inside, Eq(Sum(entry * value(f), rows), x[i])), *read, only)


def _returns(proof: Proof, entry: Any, coordinate: Any, here: Step) -> None:
    """The basis times the coordinates is the value."""
    back = proof.sum_same(entry * coordinate, A[g, i] * x[i], (i, 1, a), here)
    proof.conclude("returned", proof.every(proof.statement.then["returned"], back))


def _apart(turn: Any, angle: Any, one: Any, two: Any) -> dict[Any, Any]:
    """Two unit columns of the plane, the second turned from the first, with the inverses that part them."""
    (cos, sin), (c, t) = (((1 - z * z) / (1 + z * z), 2 * z / (1 + z * z)) for z in map(decimal, (turn, angle)))
    first, second = [cos, sin], [cos * c - sin * t, sin * c + cos * t]
    away = [[int(row == column) - second[row] * second[column] for column in range(2)] for row in range(2)]
    # What is left of the first column is t long.
    left = [(first[row] - c * second[row]) / t**2 for row in range(2)]
    dual = [sum(left[row] * away[row][column] for row in range(2)) for column in range(2)]
    columns = {A: [[part] for part in first], B: [[part] for part in second], K: [second], L: [left]}
    return {d: 2, a: 1, b: 1, **columns, R: away, C: [dual], x: [decimal(one)], y: [decimal(two)]}


def _oblique(entry: Formula, **more: Any) -> Statement:
    coordinate = Sum(entry(C[i, f], A[f, i]) * value(f), rows)
    back = Sum(A[g, i] * coordinate, (i, 1, a))
    return Statement(
        variables=SIZES
        | {K: "a left inverse of B", R: "what takes away the span of B", L: "a left inverse of R times A"}
        | {C: "L times R"},
        given=[LEFT_OF_B, AWAY, DUAL, LEFT_OF_A, *more.pop("given", ())],
        then={"returned": each(g, 1, d, Eq(back, value_a(g)))} | more,
        terms={"got": back, "value": value_a(g)},
        notes=["real arithmetic", "the inverses exist exactly when the columns of A and B together are independent"],
        spans=Spans({"turn": (-1, 1), "angle": (0.1, 1), "x": (-2, 2), "y": (-2, 2)}, _apart),
    )


@claim(
    "project-out-oblique",
    expected="corrected",
    formal=lambda entry: _oblique(lambda dual, own: own, given=[ORTHONORMAL]),
    plain="Where two values live in spans that are independent, an orthonormal basis of the first span times its"
    " transpose returns the first value from the sum: {got} is {value}.",
    amendment=lambda entry: _oblique(entry, removed=NOTHING_OF_B),
    amended_plain="That takes spans at a right angle. For independent ones, orthonormal or not, the projector along the"
    " second span does it: {got} is {value}, as the rows of its map have no product with the columns of the second"
    " basis.",
    subject=lambda dual, own: dual,
    sabotage={
        "the transpose all the same": lambda dual, own: own,
        "half of the dual basis": lambda dual, own: dual / 2,
    },
    picture=_project_picture,
)
def project_out_oblique(against: Refutation, proof: Proof, entry: Formula) -> None:
    says = "A = (1, 0)ᵀ, B = (3/5, 4/5)ᵀ, v_a = 0, v_b = (3, 4): AAᵀ lets the 3 through"
    against.case(_apart(Fraction(0), Fraction(1, 2), 0, 5), says)
    left, away, dual = map(proof.given, (LEFT_OF_B, AWAY, DUAL))
    at, column = And(e >= 1, e <= d), And(j >= 1, j <= b)
    # R times B is B less B.
    members = proof.member(AWAY, e), proof.member(AWAY.args[3], f)
    parts = KroneckerDelta(e, f) * B[f, j] - B[f, j] * Sum(B[e, m] * K[m, f], of_b)
    apart = proof.sum_same(R[e, f] * B[f, j], parts, rows, away, *members, when=at)
    swapped = proof.sum_swap(B[e, m] * K[m, f] * B[f, j], of_b, rows)
    members = proof.member(LEFT_OF_B, m), proof.member(LEFT_OF_B.args[3].subs(i, m), j)
    products = proof.sum_same(
        B[e, m] * _inner(K[m, f], B, j), B[e, m] * KroneckerDelta(m, j), of_b, left, *members, when=column
    )
    only = proof.sum_delta(B[f, j], rows, e), proof.sum_delta(B[e, m], of_b, j)
    none = Implies(And(at, column), Eq(_inner(R[e, f], B, j), 0))
    none = proof.have(none, apart, swapped, products, *only, says="R takes away the columns of B")
    # So does what is made of its rows.
    inside = And(i >= 1, i <= a)
    members = proof.member(DUAL, i), proof.member(DUAL.args[3], f)
    rows_of = proof.sum_same(
        C[i, f] * B[f, j], B[f, j] * Sum(L[i, e] * R[e, f], (e, 1, d)), rows, dual, *members, when=inside
    )
    swapped = proof.sum_swap(L[i, e] * R[e, f] * B[f, j], (e, 1, d), rows)
    nothing = proof.sum_same(L[i, e] * _inner(R[e, f], B, j), 0, (e, 1, d), none, when=column)
    gone = proof.have(Implies(And(inside, column), Eq(_inner(C[i, f], B, j), 0)), rows_of, swapped, nothing)
    gone = proof.every(NOTHING_OF_B, proof.every(NOTHING_OF_B.args[3], gone, when=inside))
    proof.conclude("removed", gone)
    here = _reads(proof, C[i, f], (LEFT_OF_A, proof.given(LEFT_OF_A)), (NOTHING_OF_B, gone))
    _returns(proof, A[g, i], Sum(entry(C[i, f], A[f, i]) * value(f), rows), here)
    projection = projector(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.6], [0.8]]))
    proof.shows(kept(projection, "the library's projector along an oblique span, rounded to float32"))
