r"""Singular values: how much of a matrix a few of them hold.

.. math:: A = U \Sigma W^\top,\quad U^\top U = W^\top W = I_r,\quad
          \Sigma = \mathrm{diag}(\sigma_1 \ge \dots \ge \sigma_r \ge 0)

Everything is shown for matrices of every size: products of symbols whose sizes are symbols, sums of symbolic length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy
import torch
from flint import arb
from sympy import Identity, IndexedBase, MatrixSymbol, Rational, Sum, sqrt

from avow.core.chart import Chart, Table
from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.claim import Evidence, Falsifier, Formula, claims_on, numbered
from avow.theory.claims.toolbox import identity, nonnegative, rational, same_product, symbols

claim = claims_on("efficient")
n, d, r, k = sympy.symbols("n d r k", integer=True, positive=True)
i, j = sympy.symbols("i j", integer=True, positive=True)
U, S, W = MatrixSymbol("U", n, r), MatrixSymbol("Sigma", r, r), MatrixSymbol("W", d, r)
EXISTS = "every real matrix has a singular value decomposition"


def _spectrum() -> list[float]:
    """Singular values of a softmax matrix of 64 Gaussian queries and keys in 8 dimensions."""
    q, keys = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    values: list[float] = torch.linalg.svdvals(torch.softmax(q @ keys.T / 8**0.5, -1)).tolist()
    return values


def _turned() -> tuple[sympy.Matrix, tuple[int, int]]:
    """A matrix of fractions whose singular values are whole: diag(3, 2) between two Pythagorean rotations."""
    left, right = (
        sympy.Matrix([[Rational(a, c), -Rational(b, c)], [Rational(b, c), Rational(a, c)]])
        for a, b, c in ((3, 4, 5), (5, 12, 13))
    )
    return left * sympy.diag(3, 2) * right, (3, 2)


def _energy_picture() -> Table:
    matrix, values = _turned()
    rows = [[str(entry) for entry in matrix.row(i)] for i in (0, 1)]
    rows.append(["sum of squares of entries", str(sum(entry**2 for entry in matrix))])
    rows.append(["sum of squares of σ", str(sum(x**2 for x in values))])
    return Table("diag(3, 2) between two rotations", ["", ""], rows)


def _values(entries: Sequence[arb]) -> list[arb]:
    """The singular values of a matrix of three rows and two columns: roots of AᵀA's eigenvalues, in closed form."""
    one, two = entries[0::2], entries[1::2]
    a, b, c = intervals.dot(one, one), intervals.dot(one, two), intervals.dot(two, two)
    # The smaller eigenvalue is the determinant over the larger: nothing cancels, and none is below zero.
    larger = (a + c + intervals.norm([a - c, 2 * b])) / 2
    crossed = [one[i] * two[j] - one[j] * two[i] for i, j in ((0, 1), (0, 2), (1, 2))]
    return [larger.sqrt(), intervals.norm(crossed) / larger.sqrt()]


def _energy(energy: Formula, *entries: arb) -> arb:
    """A matrix of three rows and two columns."""
    return abs(total(energy(sigma) for sigma in _values(entries)) - intervals.dot(entries, entries))


# Entries that are never all zero: a matrix of zeros has nothing to say here.
_ENTRIES = {"a₁₁": (0.1, 2.0)} | numbered("a₁₂ a₂₁ a₂₂ a₃₁ a₃₂", -2, 2)


@claim(
    "svd-energy",
    expected="proved",
    statement=r"\textstyle\sum_i \sigma_i(A)^2 = \|A\|_F^2",
    plain="The squares of a matrix's singular values sum to the squares of its entries.",
    assumptions=("real arithmetic", EXISTS),
    subject=lambda sigma: sigma * sigma,
    sabotage={"singular values, not their squares": lambda sigma: sigma, "half of it": lambda sigma: sigma * sigma / 2},
    picture=_energy_picture,
    falsifier=Falsifier(_ENTRIES, _energy),
)
def svd_energy(energy: Formula) -> Iterator[Evidence]:
    a, b, sigma = IndexedBase("a", real=True), IndexedBase("b", real=True), IndexedBase("sigma", nonnegative=True)
    A = U * S * W.T
    inside = (A.T * A).doit().subs(U.T * U, Identity(r))
    yield same_product(inside, W * S.T * S * W.T, "‖A‖² is the trace of AᵀA, which UᵀU = I makes WΣᵀΣWᵀ")
    across = Sum(a[i, j] * b[j, i], (i, 1, n), (j, 1, d)), Sum(b[j, i] * a[i, j], (j, 1, d), (i, 1, n))
    yield identity(across[0], across[1].reorder((j, i)), "tr(XY) = tr(YX): the same products, summed by columns")
    turned = (S.T * S * (W.T * W)).subs(W.T * W, Identity(r))
    yield same_product(turned, S.T * S, "so tr(WΣᵀΣWᵀ) = tr(ΣᵀΣWᵀW) = tr(ΣᵀΣ), as WᵀW = I")
    diagonal = Sum(sigma[i] * sigma[i], (i, 1, r))
    yield identity(Sum(energy(sigma[i]), (i, 1, r)), diagonal, "Σ is diagonal: tr(ΣᵀΣ) is the sum of σ_i·σ_i")
    matrix, values = _turned()
    total = sum(entry**2 for entry in matrix)
    says = "on a matrix of fractions whose singular values are 3 and 2"
    facts = {"matrix": [str(entry) for entry in matrix], "squares": total}
    yield rational(sum(energy(sympy.Integer(x)) for x in values) == total, says, False, **facts)


def _held_picture(title: str, axis: str, height: str, names: tuple[str, str], first: int) -> Chart:
    """Singular values, and the matrix's length over √k, by a number that is `first` at k = 1."""
    values = _spectrum()
    places, norm = [first + i for i in range(len(values))], sum(x**2 for x in values) ** 0.5
    bounds = [norm / (i + 1) ** 0.5 for i in range(len(values))]
    return Chart(title, axis, height, {names[0]: (places, values), names[1]: (places, bounds)}, log_y=True)


def _kth(bound: Formula, *entries: arb) -> arb:
    """A matrix of three rows and two columns."""
    square = intervals.dot(entries, entries)
    return most([sigma * sigma - bound(square, k + 1) for k, sigma in enumerate(_values(entries))])


@claim(
    "svd-kth",
    expected="proved",
    statement=r"\sigma_k(A)^2 \le \|A\|_F^2 / k",
    plain="The k-th singular value is at most the matrix's length over the square root of k.",
    assumptions=("real arithmetic", "singular values in falling order", "1 ≤ k ≤ rank; beyond it σ_k = 0"),
    subject=lambda energy, k: energy / k,
    sabotage={
        "k + 1 in place of k": lambda energy, k: energy / (k + 1),
        "k² in place of k": lambda energy, k: energy / k**2,
    },
    picture=lambda: _held_picture(
        "Softmax weights of 64 Gaussian queries and keys", "k", "singular value", ("σ_k", "‖A‖_F / √k"), 1
    ),
    needs=("svd-energy",),
    falsifier=Falsifier(_ENTRIES, _kth),
)
def svd_kth(bound: Formula) -> Iterator[Evidence]:
    square, tail, over = symbols(nonnegative="s T R")
    gap = IndexedBase("g", nonnegative=True)
    energy = Sum(square + gap[i], (i, 1, k)) + tail
    rest = Sum(gap[i], (i, 1, k)) + tail
    says = "σ_i² = σ_k² + g_i for i ≤ k, and T for the squares beyond k: ‖A‖² is kσ_k² and a rest"
    yield identity(energy, k * square + rest, says)
    yield nonnegative(rest, "no g_i is negative, as σ_i ≥ σ_k, and no square is: the rest is at least 0")
    yield nonnegative(bound(k * square + over, k) - square, "so σ_k² is at most the bound, for every k")
    size = 5
    says = "and it is met: the identity of 5 rows has σ_5 = 1"
    yield rational(bound(sympy.Integer(size), sympy.Integer(size)) == 1, says, k=size)


def _spectral(kept: Formula, *entries: arb) -> arb:
    """A matrix of three rows and two columns."""
    values, length = _values(entries), intervals.norm(entries)
    broken = []
    for k in (1, 2):
        count = max(kept(k), 0)
        # What B keeps beyond k − 1 must be nothing, and what it leaves short enough.
        broken += values[k - 1 : count]
        broken += [left - length / arb(k).sqrt() for left in values[count:][:1]]
    return most(broken)


@claim(
    "svd-spectral",
    expected="proved",
    statement=r"\exists B,\ \mathrm{rank}\,B \le k-1:\quad \|A - B\|_2 \le \|A\|_F/\sqrt{k}",
    plain="Some matrix of rank k − 1 is within the matrix's length over √k of it, in the spectral norm: the one that"
    " keeps its k − 1 largest singular values.",
    assumptions=("real arithmetic", EXISTS, "1 ≤ k ≤ rank; beyond it B = A"),
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
    falsifier=Falsifier(_ENTRIES, _spectral),
)
def svd_spectral(kept: Formula) -> Iterator[Evidence]:
    yield nonnegative(k - 1 - kept(k), "B, a sum of so many products of a column and a row, has rank at most k − 1")
    z, x = MatrixSymbol("z", r, 1), MatrixSymbol("x", d, 1)
    turned = ((U * z).T * (U * z)).doit().subs(U.T * U, Identity(r))
    yield same_product(turned, z.T * z, "U keeps lengths: ‖(A − B)x‖ is the length of σ_i·y_i over what is left")
    missed = x - W * W.T * x
    square = (missed.T * missed).expand().doit().subs(W.T * W, Identity(r))
    shorter = x.T * x - x.T * W * W.T * x
    yield same_product(square, shorter, "y = Wᵀx is no longer than x: ‖x‖² − ‖y‖² = ‖x − WWᵀx‖²")
    most, energy, count = symbols(nonnegative="s E", integer_positive="t")
    y, gap = IndexedBase("y", real=True), IndexedBase("g", nonnegative=True)
    reached, allowed = Sum((most - gap[i]) * y[i] ** 2, (i, 1, count)), most * Sum(y[i] ** 2, (i, 1, count))
    spare = Sum(gap[i] * y[i] ** 2, (i, 1, count))
    yield identity(allowed - reached, spare, "σ_i² = s − g_i for what is left, s the largest: what ‖y‖²s has spare")
    yield nonnegative(spare, "is not negative: ‖(A − B)x‖² ≤ s‖x‖², so ‖A − B‖² is at most s, the first σ² left")
    left = kept(k) + 1
    says = "the first σ left is number (kept + 1), whose square is at most ‖A‖²/k [svd-kth]"
    yield nonnegative(energy / k - energy / left, says)
    yield identity(sqrt(energy / k), sqrt(energy) / sqrt(k), "and roots keep the order: ‖A − B‖ ≤ ‖A‖/√k")
