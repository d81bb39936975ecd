r"""Singular values: how much of a matrix a few of them hold.

.. math:: A_{ij} = \sum_{r=1}^m u_{ir} \sigma_r w_{jr},\quad
          \sum_i u_{ir} u_{is} = \sum_j w_{jr} w_{js} = \delta_{rs},\quad \sigma_1 \ge \dots \ge \sigma_m \ge 0

Everything is shown for matrices of every size: the sums run to symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from flint import arb
from sympy import And, Eq, Implies, KroneckerDelta, Rational, Sum

from avow.core.chart import Chart, Table
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.formal import Exists, Spans, Statement, each, real, sequence, whole
from avow.theory.claims.kernel import Step, put
from avow.theory.claims.proof import Proof
from avow.theory.claims.toolbox import rational

claim = claims_on("efficient")
n, d, m, k, i, j, r, s = whole("n d m k i j r s")
u, w, x, sigma = sequence("u w x sigma")
entry = real("A_ij")
rows, columns, values = (i, 1, n), (j, 1, d), (r, 1, m)
DECOMPOSED = {
    n: "the number of rows",
    d: "the number of columns",
    m: "the number of singular values",
    u: "the left singular vectors, as columns",
    sigma: "the singular values",
    w: "the right singular vectors, as columns",
}
NOTES = ("real arithmetic", "every real matrix has a singular value decomposition")
ENTRY = {entry: Sum(u[i, r] * sigma[r] * w[j, r], values)}
energy_of_entries = Sum(Sum(entry**2, columns), rows)


def orthonormal(vectors: Any, place: Any) -> Formula:
    products = Sum(vectors[place[0], r] * vectors[place[0], s], place)
    return each(r, 1, m, each(s, 1, m, Eq(products, KroneckerDelta(r, s))))


LEFT, RIGHT = orthonormal(u, rows), orthonormal(w, columns)
NOT_NEGATIVE = each(r, 1, m, sigma[r] >= 0)
FALLING: Any = each(r, 1, m, each(s, r, m, sigma[s] <= sigma[r]))


def _between(index: Any, limits: Any) -> Formula:
    return And(limits[1] <= index, index <= limits[2])


def inner_products(proof: Proof, hypothesis: Any, one: Any, two: Any) -> Step:
    """Two of the vectors that a hypothesis calls orthonormal have a product of one or nothing."""
    outer, inner = proof.member(hypothesis, one), put(hypothesis.args[3], hypothesis.args[0], one)
    both = And(_between(one, hypothesis.args), _between(two, hypothesis.args))
    product = put(inner.args[3], inner.args[0], two)
    return proof.have(Implies(both, product), outer, proof.member(inner, two), proof.given(hypothesis))


def lengths_kept(
    proof: Proof, share: Callable[[Any], Any], vectors: Any, hypothesis: Any, place: Any, limits: Any, *inside: Step
) -> Step:
    """The square of a sum of orthonormal vectors is the sum of the squares of their shares in it.

    `inside` says that the limits lie within those of all vectors, where it is not plain.
    """
    at, within = place[0], _between(r, limits)
    others = (s, *limits[1:])
    whole_sum = Sum(share(s) * vectors[at, s], others)
    products = inner_products(proof, hypothesis, r, s)
    product = Sum(vectors[at, r] * vectors[at, s], place)
    if inside:
        both = And(within, _between(s, limits))
        products = proof.have(Implies(both, Eq(product, KroneckerDelta(r, s))), products, *inside)
    swapped = proof.sum_swap(vectors[at, r] * share(s) * vectors[at, s], others, place)
    summed = proof.sum_same(share(s) * product, share(s) * KroneckerDelta(s, r), others, products, when=within)
    only = proof.sum_delta(share(s), others, r)
    says = "a vector's product with the sum is its share"
    own = proof.have(
        Implies(within, Eq(Sum(vectors[at, r] * whole_sum, place), share(r))), swapped, summed, only, says=says
    )
    squares = proof.sum_same(share(r) * Sum(vectors[at, r] * whole_sum, place), share(r) ** 2, limits, own)
    across = proof.sum_swap(share(r) * vectors[at, r] * whole_sum, limits, place)
    says = "orthonormal vectors: the square of a sum is the sum of squares"
    return proof.have(Eq(Sum(whole_sum**2, place), Sum(share(r) ** 2, limits)), squares, across, says=says)


def part_is_shorter(
    proof: Proof, number: Any, vectors: Any, hypothesis: Any, place: Any, limits: Any, *inside: Step
) -> Step:
    """Bessel: the squares of a vector's products with orthonormal ones sum to no more than its own."""

    def share(index: Any) -> Any:
        return Sum(vectors[place[0], index] * number, place)

    along = lengths_kept(proof, share, vectors, hypothesis, place, limits, *inside)
    part = Sum(share(r) * vectors[place[0], r], limits)
    missed = proof.sum_most(0, (number - part) ** 2, place)
    across = proof.sum_swap(share(r) * vectors[place[0], r] * number, limits, place)
    whole_square = Sum(number**2, place)
    says = "a part along orthonormal vectors is no longer than the whole"
    return proof.have(Sum(share(r) ** 2, limits) <= whole_square, along, missed, across, says=says)


def _turned(left: arb, right: arb, least: arb, more: arb) -> dict[Any, Any]:
    """A matrix of two rows and two columns: two singular values between two rotations."""
    first, second = ([[a.cos(), -a.sin()], [a.sin(), a.cos()]] for a in (left, right))
    return {n: 2, d: 2, m: 2, u: first, w: second, sigma: [least + more, least]}


_RANGES = {"turn of u": (-3, 3), "turn of w": (-3, 3), "σ₂": (0.1, 2), "σ₁ − σ₂": (0, 2)}
_SPANS = Spans(_RANGES, _turned, (LEFT, RIGHT))
_RANKED = Spans(
    {"k": range(1, 3)} | _RANGES | {"x₁": (-1, 1), "x₂": (-1, 1)},
    lambda place, *case: {k: place, **_turned(*case[:4]), x: list(case[4:])},
    (LEFT, RIGHT, NOT_NEGATIVE, FALLING),
)


def _spectrum() -> list[float]:
    """Singular values of a softmax matrix of 64 Gaussian queries and keys in 8 dimensions."""
    q, keys = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    values: list[float] = torch.linalg.svdvals(torch.softmax(q @ keys.T / 8**0.5, -1)).tolist()
    return values


def _whole_values() -> tuple[sympy.Matrix, tuple[int, int]]:
    """A matrix of fractions whose singular values are whole: diag(3, 2) between two Pythagorean rotations."""
    left, right = (
        sympy.Matrix([[Rational(a, c), -Rational(b, c)], [Rational(b, c), Rational(a, c)]])
        for a, b, c in ((3, 4, 5), (5, 12, 13))
    )
    return left * sympy.diag(3, 2) * right, (3, 2)


def _energy_picture() -> Table:
    matrix, values = _whole_values()
    rows = [[str(entry) for entry in matrix.row(i)] for i in (0, 1)]
    rows.append(["sum of squares of entries", str(sum(entry**2 for entry in matrix))])
    rows.append(["sum of squares of σ", str(sum(x**2 for x in values))])
    return Table("diag(3, 2) between two rotations", ["", ""], rows)


def _energy(energy: Formula) -> Statement:
    return Statement(
        variables=DECOMPOSED,
        given=[LEFT, RIGHT],
        then={"sum": Eq(Sum(energy(sigma[r]), values), energy_of_entries)},
        where=ENTRY,
        notes=NOTES,
        spans=_SPANS,
    )


@claim(
    "svd-energy",
    expected="proved",
    formal=_energy,
    plain="The squares of a matrix's singular values sum to the squares of its entries.",
    subject=lambda sigma: sigma * sigma,
    sabotage={"singular values, not their squares": lambda sigma: sigma, "half of it": lambda sigma: sigma * sigma / 2},
    picture=_energy_picture,
)
def svd_energy(proof: Proof, energy: Formula) -> None:
    row = lengths_kept(proof, lambda r: u[i, r] * sigma[r], w, RIGHT, columns, values)
    summed = proof.sum_same(Sum(entry**2, columns), Sum(u[i, r] ** 2 * sigma[r] ** 2, values), rows, row)
    swapped = proof.sum_swap(u[i, r] ** 2 * sigma[r] ** 2, values, rows)
    unit = inner_products(proof, LEFT, r, r)
    ones = proof.sum_same(sigma[r] ** 2 * Sum(u[i, r] ** 2, rows), sigma[r] ** 2, values, unit)
    proof.conclude("sum", summed, swapped, ones)
    matrix, whole_values = _whole_values()
    total = sum(number**2 for number in matrix)
    says = "on a matrix of fractions whose singular values are 3 and 2"
    facts = {"matrix": [str(number) for number in matrix], "squares": total}
    proof.shows(rational(sum(energy(sympy.Integer(x)) for x in whole_values) == total, says, **facts))


def _held_picture(title: str, axis: str, height: str, names: tuple[str, str], first: int) -> Chart:
    """Singular values, and the matrix's length over √k, by a number that is `first` at k = 1."""
    values = _spectrum()
    places, norm = [first + i for i in range(len(values))], sum(x**2 for x in values) ** 0.5
    bounds = [norm / (i + 1) ** 0.5 for i in range(len(values))]
    return Chart(title, axis, height, {names[0]: (places, values), names[1]: (places, bounds)}, log_y=True)


RANKED = DECOMPOSED | {k: "the place of a singular value"}
ORDERED = (LEFT, RIGHT, NOT_NEGATIVE, FALLING, k >= 1, k <= m)
AS_IT_IS = {name: name for name in (n, d, m)} | {
    u: lambda i, r: u[i, r],
    w: lambda j, r: w[j, r],
    sigma: lambda r: sigma[r],
}


def no_larger(proof: Proof, one: Any, two: Any) -> Step:
    """The hypothesis of falling order, for two singular values that may stand in it in this order."""
    outer = proof.member(FALLING, one)
    last = proof.member(put(FALLING.args[3], FALLING.args[0], one), two)
    later = And(_between(one, values), one <= two, two <= m)
    return proof.have(Implies(later, sigma[two] <= sigma[one]), outer, last, proof.given(FALLING))


def _kth(bound: Formula) -> Statement:
    return Statement(
        variables=RANKED,
        given=ORDERED,
        then={"most": sigma[k] ** 2 <= bound(energy_of_entries, k)},
        where=ENTRY,
        terms={"k": k},
        notes=NOTES,
        spans=_RANKED._replace(
            ranges={"k": range(1, 3)} | _RANGES, case=lambda place, *case: {k: place, **_turned(*case)}
        ),
    )


@claim(
    "svd-kth",
    expected="proved",
    formal=_kth,
    plain="The {k}-th singular value is at most the matrix's length over the square root of {k}.",
    subject=lambda energy, k: energy / k,
    sabotage={
        "k + 1 in place of k": lambda energy, k: energy / (k + 1),
        "k² in place of k": lambda energy, k: energy / k**2,
    },
    picture=lambda: _held_picture(
        "Softmax weights of 64 Gaussian queries and keys", "k", "singular value", ("σ_k", "‖A‖_F / √k"), 1
    ),
    needs=("svd-energy",),
)
def svd_kth(proof: Proof, bound: Formula) -> None:
    some, more = proof.given(k >= 1), proof.given(k <= m)
    energy = proof.known(svd_energy, "sum", AS_IT_IS)
    parts = proof.sum_split(sigma[r] ** 2, values, k)
    larger, sign = no_larger(proof, r, k), proof.member(NOT_NEGATIVE, k)
    square = proof.have(
        Implies(_between(r, (r, 1, k)), sigma[k] ** 2 <= sigma[r] ** 2),
        larger,
        sign,
        proof.given(NOT_NEGATIVE),
        more,
    )
    first = proof.sum_most(sigma[k] ** 2, sigma[r] ** 2, (r, 1, k), square)
    rest = proof.sum_most(0, sigma[r] ** 2, (r, k + 1, m))
    held = proof.have(
        k * sigma[k] ** 2 <= energy_of_entries,
        energy,
        proof.given(LEFT),
        proof.given(RIGHT),
        parts,
        first,
        rest,
        some,
        more,
        says="each of the first k squares is at least the k-th, and none of the others is negative",
    )
    proof.conclude("most", held, some)
    size = sympy.Integer(5)
    proof.shows(rational(bound(size, size) == 1, "and it is met: the identity of 5 rows has σ_5 = 1", k=size))


kept_entry = real("B_ij")
p, q = sequence("p q")


def _spectral(kept: Formula) -> Statement:
    left = Sum((entry - kept_entry) * x[j], columns)
    product = Eq(kept_entry, Sum(p[i, r] * q[j, r], (r, 1, k - 1)))
    return Statement(
        variables=RANKED | {x: "any vector"},
        given=ORDERED,
        then={
            "rank": Exists(p, Exists(q, each(i, 1, n, each(j, 1, d, product)))),
            "near": Sum(left**2, rows) <= energy_of_entries / k * Sum(x[j] ** 2, columns),
        },
        where=ENTRY | {kept_entry: Sum(u[i, r] * sigma[r] * w[j, r], (r, 1, kept(k)))},
        terms={"k": k, "fewer": k - 1},
        notes=[
            *NOTES,
            "a matrix has rank k − 1 at most if it is a product through k − 1 dimensions",
            "lengths squared",
        ],
        spans=_RANKED,
    )


@claim(
    "svd-spectral",
    expected="proved",
    formal=_spectral,
    plain="Some matrix of rank {fewer} at most is within the matrix's length over the root of {k} of it, in the"
    " spectral norm: the one that keeps its {fewer} largest singular values.",
    subject=lambda k: k - 1,
    sabotage={"one singular value fewer kept": lambda k: k - 2, "one more kept": lambda k: k},
    picture=lambda: _held_picture(
        "How far softmax weights of 64 Gaussian queries and keys are from low rank",
        "rank kept",
        "spectral distance",
        ("the best of that rank", "promised, ‖A‖_F / √(rank + 1)"),
        0,
    ),
    needs=("svd-kth",),
)
def svd_spectral(proof: Proof, kept: Formula) -> None:
    some, more = proof.given(k >= 1), proof.given(k <= m)
    rank = proof.statement.parts["rank"]
    _is_product(proof, rank)
    rest = (r, kept(k) + 1, m)
    dropped = Sum(u[i, r] * sigma[r] * w[j, r], rest)
    parts = proof.sum_split(u[i, r] * sigma[r] * w[j, r], values, kept(k))
    left = proof.have(Eq((entry - kept_entry) * x[j], dropped * x[j]), parts, some, more)
    summed = proof.sum_same((entry - kept_entry) * x[j], dropped * x[j], columns, left)
    swapped = proof.sum_swap(u[i, r] * sigma[r] * w[j, r] * x[j], rest, columns)

    def share(place: Any) -> Any:
        return Sum(w[j, place] * x[j], columns)

    reached = Sum(sigma[r] * share(r) * u[i, r], rest)
    moved = Sum((entry - kept_entry) * x[j], columns)
    square = proof.have(Eq(moved**2, reached**2), summed, swapped)
    squares = proof.sum_same(moved**2, reached**2, rows, square)
    length = lengths_kept(proof, lambda r: sigma[r] * share(r), u, LEFT, rows, rest, some)
    later, sign = no_larger(proof, k, r), proof.member(NOT_NEGATIVE, r)
    largest = proof.have(
        Implies(_between(r, rest), sigma[r] ** 2 * share(r) ** 2 <= sigma[k] ** 2 * share(r) ** 2),
        later,
        sign,
        proof.given(NOT_NEGATIVE),
        some,
        says="σ_k is the largest that is left",
    )
    most = proof.sum_most(sigma[r] ** 2 * share(r) ** 2, sigma[k] ** 2 * share(r) ** 2, rest, largest)
    shorter = part_is_shorter(proof, x[j], w, RIGHT, columns, rest, some)
    bound = proof.known(svd_kth, "most", AS_IT_IS | {k: k})
    first = proof.have(sigma[k] ** 2 <= energy_of_entries / k, bound, *map(proof.given, ORDERED))
    none = proof.sum_most(0, share(r) ** 2, rest)
    proof.conclude("near", squares, length, most, shorter, first, none)


def _is_product(proof: Proof, rank: Any) -> None:
    """Columns of u, times their singular values, and columns of w make the matrix that is kept."""
    left, right = (lambda i, r: u[i, r] * sigma[r]), (lambda j, r: w[j, r])
    inner = put(rank.args[1], p, left)
    body = put(inner.args[1], inner.args[0], right)
    shown = proof.every(body, proof.every(body.args[3]))
    proof.conclude("rank", proof.some(rank, left, proof.some(inner, right, shown)))
