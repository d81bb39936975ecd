r"""Other forms of attention: by a kernel of distances, as a kernel matrix, separable, and by random features.

Sums over n keys and d features are shown for every n and d: SymPy keeps them as sums, and moves out of them what does
not depend on their index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import sympy
import torch
from flint import arb, arb_mat
from sympy import Identity, IndexedBase, MatrixSymbol, Sum, Symbol, Trace, ZeroMatrix, oo

import avow
from avow.core.chart import Chart, Function, Table, curves
from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.claim import Evidence, Falsifier, Formula, Versions, claims_on, numbered, of_versions
from avow.theory.claims.elementary import exp, sqrt
from avow.theory.claims.toolbox import counterexample, enclosed, identity, positive, rational, same_product
from avow.theory.constructions.formulas import compiled

claim = claims_on("efficient")
n, d, m = sympy.symbols("n d m", integer=True, positive=True)
i, j, f, c = sympy.symbols("i j f c", integer=True, positive=True)
q_f, k_f = IndexedBase("q", real=True), IndexedBase("k", real=True)


def dot(a: IndexedBase, b: IndexedBase) -> Sum:
    """The inner product of two vectors in d dimensions."""
    return Sum(a[f] * b[f], (f, 1, d))


def _rbf_picture() -> Chart:
    # Beside a unit key in the query's own direction, query of length 2.
    def weight(length: float, shift: float, angle: float) -> float:
        return 1 / (1 + math.exp(-(2 * (length * math.cos(angle) - 1) - shift)))

    weights: dict[str, Function] = {}
    for length in (1.0, 2.0):
        weights[f"dot, key of length {length:g}"] = partial(weight, length, 0.0)
        weights[f"rbf, key of length {length:g}"] = partial(weight, length, (length**2 - 1) / 2)
    title = "Unit keys: the two kernels agree; longer keys: they part"
    return curves(title, "angle to the query", "weight", [math.pi * i / 40 for i in range(-40, 41)], weights)


def _rbf(logit: Formula, *case: arb) -> arb:
    query, keys, sigma = case[:2], [case[2:4], case[4:6]], case[6]
    by_kernel = intervals.softmax([-((query[0] - a) ** 2 + (query[1] - b) ** 2) / (2 * sigma) for a, b in keys])
    by_logits = intervals.softmax([logit(intervals.dot(query, key), intervals.dot(key, key), sigma) for key in keys])
    return abs(by_kernel[0] - by_logits[0])


@claim(
    "rbf-equals-dot",
    expected="proved",
    statement=r"\|k_i\| = 1,\ \sigma = 1:\quad \frac{e^{-\|q-k_i\|^2/2}}{\sum_j e^{-\|q-k_j\|^2/2}} ="
    r"\frac{e^{q \cdot k_i}}{\sum_j e^{q \cdot k_j}}",
    plain="With unit keys and σ = 1, attention by the RBF kernel has the weights of dot-product attention. In general"
    " it is softmax((q·k_i − ‖k_i‖²/2)/σ).",
    assumptions=("real arithmetic", "the kernel is exp(−‖q−k‖²/2σ)", "queries of any length"),
    subject=lambda inner, square, sigma: (inner - square / 2) / sigma,
    sabotage={
        "−‖k‖² in place of −‖k‖²/2": lambda inner, square, sigma: (inner - square) / sigma,
        "no shift by the key at all": lambda inner, square, sigma: inner / sigma,
    },
    picture=_rbf_picture,
    falsifier=Falsifier(numbered("q₁ q₂ k₁₁ k₁₂ k₂₁ k₂₂", -2, 2) | {"σ": (0.5, 2)}, _rbf),
)
def rbf_equals_dot(logit: Formula) -> Iterator[Evidence]:
    sigma = Symbol("sigma", positive=True)
    distance = Sum((q_f[f] - k_f[f]) ** 2, (f, 1, d))
    general = logit(dot(q_f, k_f), dot(k_f, k_f), sigma)
    own = dot(q_f, q_f) / (2 * sigma)
    yield identity(-distance / (2 * sigma), general - own, "−‖q−k‖²/2σ is the logit less ‖q‖²/2σ, which no key changes")
    x, shift = IndexedBase("x", real=True), Symbol("s", real=True)
    shifted, plain = (exp(x[i] - by) / Sum(exp(x[j] - by), (j, 1, n)) for by in (shift, 0))
    yield identity(shifted, plain, "what all keys share cancels between a weight and its normaliser")
    inner, one = Symbol("a", real=True), sympy.Integer(1)
    moved = sympy.diff(logit(inner, one, one) - inner, inner)
    yield identity(moved, 0, "for unit keys and σ = 1 the logit is q·k less a constant")
    apart = logit(inner, one, one) - logit(inner, 4 * one, one)
    says = "unit length matters: keys of lengths 1 and 2 shift apart"
    yield rational(apart.is_Rational and apart != 0, says, by=apart)


Q, K, V = (IndexedBase(name, real=True) for name in "QKV")


def kernel(row: Symbol, column: Symbol) -> Any:
    """A's entry: e to the inner product of a query and a key."""
    return exp(Sum(Q[row, f] * K[column, f], (f, 1, d)))


def _two_readings() -> tuple[list[Any], list[Any]]:
    """q = (0, 1), k = (0, ln 2), v = (0, 1): attention, and the answer of products entry by entry."""
    q, keys, v = sympy.Matrix([0, 1]), sympy.Matrix([0, sympy.log(2)]), sympy.Matrix([0, 1])
    matrix = (q * keys.T).applyfunc(exp)
    attention = sympy.diag(*(matrix * sympy.ones(2, 1))).inv() * matrix * v
    entries = q.multiply_elementwise(keys).applyfunc(exp)
    return list(attention), [entries[row] * v[row] / entries[row] for row in range(2)]


def _kernel_picture() -> Table:
    readings = zip(("A = exp(QKᵀ), 2 × 2: D⁻¹AV", "A = exp(Q∘K), 2 × 1, entry by entry"), _two_readings(), strict=True)
    rows = [[name, *map(str, answer)] for name, answer in readings]
    return Table("q = (0, 1), k = (0, ln 2), v = (0, 1)", ["reading", "row 1", "row 2"], rows)


Rows = list[Sequence[arb]]
Compiled = Callable[[Sequence[arb]], arb]


def _entries(base: Any, rows: int, columns: int) -> list[Any]:
    """The entries of an array of letters, row after row."""
    return [base[row + 1, column + 1] for row in range(rows) for column in range(columns)]


def _rows(entries: Sequence[arb], width: int) -> Rows:
    return [entries[at : at + width] for at in range(0, len(entries), width)]


@cache
def _forms(form: Any) -> list[Compiled]:
    letters = [entry for base in (Q, K, V) for entry in _entries(base, 2, 2)]
    return [compiled(form.subs({n: 2, d: 2, i: row, c: column}).doit(), letters) for row in (1, 2) for column in (1, 2)]


def _kernel_form(form: Any, *case: arb) -> arb:
    queries, keys, values = (_rows(case[at : at + 4], 2) for at in (0, 4, 8))
    weights = [intervals.softmax([intervals.dot(query, key) for key in keys]) for query in queries]
    attention = [intervals.dot(row, column) for row in weights for column in zip(*values, strict=True)]
    return most([abs(entry - form(case)) for entry, form in zip(attention, _forms(form), strict=True)])


@claim(
    "kernel-form",
    expected="proved",
    statement=r"\mathrm{softmax}(QK^\top)V = D^{-1}AV,\quad A_{ij} = e^{q_i \cdot k_j},"
    r"\ D = \mathrm{diag}(A\mathbf{1})",
    plain="Softmax attention is a positive n × n matrix A times the values, each row divided by its sum.",
    assumptions=("real arithmetic", "A is n × n; written as n × d with products entry by entry it is another thing"),
    subject=Sum(kernel(i, j) * V[j, c], (j, 1, n)) / Sum(kernel(i, j), (j, 1, n)),
    sabotage={
        "divided by the sums of columns": Sum(kernel(i, j) * V[j, c], (j, 1, n)) / Sum(kernel(j, i), (j, 1, n)),
        "entry by entry, n × d": exp(Q[i, c] * K[i, c]) * V[i, c] / Sum(exp(Q[i, f] * K[i, f]), (f, 1, d)),
    },
    picture=_kernel_picture,
    falsifier=Falsifier(
        numbered("q₁₁ q₁₂ q₂₁ q₂₂ k₁₁ k₁₂ k₂₁ k₂₂", -2, 2) | numbered("v₁₁ v₁₂ v₂₁ v₂₂", -1, 1), _kernel_form
    ),
)
def kernel_form(form: Any) -> Iterator[Evidence]:
    weight = kernel(i, j) / Sum(kernel(i, j), (j, 1, n))
    attention = Sum(weight * V[j, c], (j, 1, n))
    yield identity(attention, form, "softmax's weights are A's entries over their row's sum, for any n and d")
    yield positive(Sum(kernel(i, j), (j, 1, n)), "no row sum is zero")
    right, by_entry = _two_readings()
    says = (
        "the derivation that writes A = exp(Q∘K), n × d, with products entry by entry is refuted by q = (0, 1),"
        " k = (0, ln 2), v = (0, 1)"
    )
    yield rational(right != by_entry, says, attention=right, entry_by_entry=by_entry)


def _separable_rows_picture() -> Table:
    q, keys = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    matrix = (torch.softmax(q, -1) @ torch.softmax(keys, -2).T).tolist()
    rows = [[f"row {i}", *(f"{x:.3f}" for x in row), f"{sum(row):.3f}"] for i, row in enumerate(matrix, start=1)]
    return Table("Three queries and keys in the plane", ["", "key 1", "key 2", "key 3", "sum"], rows)


@cache
def _parts(column: Formula) -> list[list[Compiled]]:
    e = sympy.IndexedBase("e", positive=True)
    letters, part = _entries(e, 3, 2), column(e).subs({n: 3, d: 2})
    return [[compiled(part.subs({j: key, f: feature}).doit(), letters) for feature in (1, 2)] for key in (1, 2, 3)]


def _distributions(column: Formula, *case: arb) -> arb:
    share, exponentials = intervals.softmax(case[:2]), [score.exp() for score in case[2:]]
    row = [intervals.dot(share, [part(exponentials) for part in key]) for key in _parts(column)]
    return most([abs(total(row) - 1), *(-weight for weight in row)])


@claim(
    "separable-rows",
    expected="proved",
    statement=r"M = \mathrm{softmax}_{row}(Q)\,\mathrm{softmax}_{col}(K)^\top:\quad M_{ij} > 0,"
    r"\ \textstyle\sum_j M_{ij} = 1",
    plain="The rows of separable attention's weights are distributions over the keys.",
    assumptions=("real arithmetic", "n keys, d features, any of each", "every row sees all keys"),
    subject=lambda e: e[j, f] / Sum(e[j, f], (j, 1, n)),
    sabotage={
        "keys, too, normalised over their features": lambda e: e[j, f] / Sum(e[j, f], (f, 1, d)),
        "keys not normalised": lambda e: e[j, f],
    },
    picture=_separable_rows_picture,
    falsifier=Falsifier(numbered("q₁ q₂ k₁₁ k₁₂ k₂₁ k₂₂ k₃₁ k₃₂", -6, 6), _distributions),
)
def separable_rows(column: Formula) -> Iterator[Evidence]:
    a, e = IndexedBase("a", positive=True), IndexedBase("e", positive=True)
    rho = a[f] / Sum(a[f], (f, 1, d))
    kappa = column(e)
    yield positive(Sum(rho * kappa, (f, 1, d)), "every weight is a sum of products of positive numbers")
    rows_first, keys_first = Sum(rho * kappa, (f, 1, d), (j, 1, n)), Sum(rho * kappa, (j, 1, n), (f, 1, d))
    yield identity(rows_first.reorder((f, j)), keys_first, "a row's weights may be summed over the keys first")
    yield identity(Sum(rho * kappa, (j, 1, n)), rho, "over the keys, each feature's column sums to one")
    yield identity(Sum(rho, (f, 1, d)), 1, "over the features, so does the row of the query")


def _circle(keys: int, stretch: float) -> list[list[arb]]:
    """Softmax weights of keys on a circle, the queries being the keys, stretched."""
    points = [(((2 * arb.pi() * at) / keys).cos(), ((2 * arb.pi() * at) / keys).sin()) for at in range(keys)]
    return [intervals.softmax([stretch * intervals.dot(a, b) for b in points]) for a in points]


def from_identity(weights: Sequence[Sequence[arb]]) -> arb:
    """‖I − weights‖²."""
    # A ball's power of two is nan where it holds zero; its product with itself is not.
    off = [weight - (row == column) for row, line in enumerate(weights) for column, weight in enumerate(line)]
    return intervals.dot(off, off)


def _weaker_picture() -> Chart:
    missed: dict[str, Function] = {
        "softmax attention": lambda stretch: float(from_identity(_circle(8, stretch)).mid()),
        "no separable weights below": lambda stretch: 6.0,
    }
    title, stretches = "Copying 8 values in the plane", [2.0**step for step in range(9)]
    return curves(title, "length of the queries", "‖I − weights‖²", stretches, missed, log_x=True)


def _copies(bound: Formula, *case: arb) -> arb:
    """Three queries and keys in the plane."""
    # softmax_row(Q)·softmax_col(K)ᵀ.
    by_column = [intervals.softmax(column) for column in zip(*_rows(case[6:], 2), strict=True)]
    shares = [intervals.softmax(row) for row in _rows(case[:6], 2)]
    weights = [[intervals.dot(share, key) for key in zip(*by_column, strict=True)] for share in shares]
    return bound(len(weights), 2) - from_identity(weights)


@claim(
    "separable-weaker",
    expected="proved",
    statement=r"M = \mathrm{softmax}_{row}(Q)\,\mathrm{softmax}_{col}(K)^\top \in \mathbb{R}^{n \times n},\ n > d \ge 2"
    r":\quad \|I - M\|_F^2 \ge n - d,\quad \text{while } \inf_{Q,K} \|I - \mathrm{softmax}(QK^\top)\|_F = 0",
    plain="Separable attention is less expressive than softmax attention: its matrix has rank at most d, so it cannot"
    " copy n > d values, which softmax attention does as closely as wanted.",
    assumptions=(
        "real arithmetic; every row sees all keys: causal weights are triangular and may have full rank",
        "less expressive means what it cannot copy; neither family of matrices holds the other",
        "a linear map from n to d dimensions sends at least n − d orthonormal vectors to zero",
    ),
    subject=lambda n, d: n - d,
    sabotage={"a bound of n − d + 1": lambda n, d: n - d + 1, "a bound of n": lambda n, d: n},
    picture=_weaker_picture,
    falsifier=Falsifier(numbered("q₁₁ q₁₂ q₂₁ q₂₂ q₃₁ q₃₂ k₁₁ k₁₂ k₂₁ k₂₂ k₃₁ k₃₂", -12, 12), _copies),
)
def separable_weaker(bound: Formula) -> Iterator[Evidence]:
    more = Symbol("(n-d)", integer=True, positive=True)
    size = d + more
    R, C = MatrixSymbol("R", size, d), MatrixSymbol("C", size, d)
    X, Y = MatrixSymbol("X", size, more), MatrixSymbol("Y", size, d)
    kernel = (C.T * X, ZeroMatrix(d, more))
    missed = ((Identity(size) - R * C.T) * X).expand().doit()
    says = "n − d orthonormal columns X that softmax_col(K)ᵀ sends to zero are all missed: (I − M)X = X"
    yield same_product(missed.subs(*kernel), X, says)
    B = MatrixSymbol("B", size, size)
    whole = B * (X * X.T + Y * Y.T) * B.T
    says = "completed to a basis, XXᵀ + YYᵀ = I: ‖B‖² is ‖BX‖² + ‖BY‖², and no less than ‖BX‖²"
    yield same_product(whole, (B * X) * (B * X).T + (B * Y) * (B * Y).T, says)
    energy = Trace(X.T * X).subs(X.T * X, Identity(more)).doit()
    yield identity(bound(size, d), energy, "‖X‖² = tr(XᵀX) = tr(I) = n − d is what M is at least away from I")
    gap, stretch = Symbol("g", positive=True), Symbol("t", positive=True)
    behind = (n - 1) * exp(-stretch * gap)
    says = (
        "n keys on a circle, queries t times as long: every other key is at least t(1 − cos(2π/n)) behind, so a row's"
        " other weights sum to at most s = (n−1)e^{−tg}, and ‖I − P‖² ≤ 2ns² vanishes"
    )
    yield identity(sympy.limit(2 * n * behind**2, stretch, oo), 0, says)
    says = "eight keys in the plane: softmax attention copies all eight values, and separable attention misses by 6"
    facts = {"keys": 8, "dim": 2, "softmax_misses_at_most": "1e-20", "separable_misses_at_least": 6}
    yield enclosed(from_identity(_circle(8, 100.0)) < arb(10) ** -20, says, False, **facts)
    # Softmax's log-weights, less their row's first, are a product through d dimensions; separable's need not be.
    columns = [[arb(x) / 10 for x in column] for column in ((1, 2, 3, 4), (1, 5, 2, 2))]
    rows = []
    for share in (arb(1) / 5, arb(1) / 2, arb(4) / 5):
        logs = [(share * a + (1 - share) * b).log() for a, b in zip(*columns, strict=True)]
        rows.append([x - logs[0] for x in logs[1:]])
    says = (
        "nor does softmax reach all that separable does: for d = 2 these separable log-weights have rank 3, softmax's 2"
    )
    yield enclosed(arb_mat(rows).det() != 0, says)


def gauss(exponent: Any, w: Symbol) -> Any:
    """The mean of e^exponent over w ~ N(0, 1)."""
    return sympy.simplify(sympy.integrate(exp(sympy.expand(exponent - w**2 / 2)) / sqrt(2 * sympy.pi), (w, -oo, oo)))


def _unbiased_picture() -> Table:
    rows = [[count, 1.0, 1 / count, 1.0] for count in (1, 2, 16, 256)]
    return Table("E f(q)·f(k) / e^{q·k}", ["features m", "wanted", "factor 1/m a side", "factor 1/√m a side"], rows)


def _mean(factor: Formula, m: int, *case: arb) -> arb:
    query, key = case[:2], case[2:]
    both = [a + b for a, b in zip(query, key, strict=True)]
    # E e^(w·z) = e^(‖z‖²/2) for w ~ N(0, I).
    one = ((intervals.dot(both, both) - intervals.dot(query, query) - intervals.dot(key, key)) / 2).exp()
    return abs(m * factor(arb(m)) ** 2 * one / intervals.dot(query, key).exp() - 1)


@claim(
    "features-unbiased",
    expected="corrected",
    statement=r"f(x) = \frac1m e^{-\|x\|^2/2}(e^{w_1 \cdot x}, \dots, e^{w_m \cdot x}),\ w \sim N(0, I):\quad "
    r"E f(q) \cdot f(k) = e^{q \cdot k}",
    plain="Positive random features with a factor of 1/m have e^(q·k) for the mean of their inner product.",
    amended=r"f(x) = \frac{1}{\sqrt m} e^{-\|x\|^2/2}(e^{w_1 \cdot x}, \dots, e^{w_m \cdot x}):\quad "
    r"E f(q) \cdot f(k) = e^{q \cdot k}",
    amended_plain="The factor is 1/√m on each side. With 1/m the mean is too small by m, which attention does not"
    " notice: it cancels between a weight and its normaliser.",
    assumptions=("real arithmetic", "each w_f is N(0, I); they need not be independent of each other"),
    subject=Versions(lambda m: 1 / m, lambda m: 1 / sqrt(m)),
    sabotage={
        "1/√m taken for the mistake": Versions(lambda m: 1 / sqrt(m), lambda m: 1 / sqrt(m)),
        "1/m kept in the correction": Versions(lambda m: 1 / m, lambda m: 1 / m),
    },
    picture=_unbiased_picture,
    falsifier=Falsifier({"m": range(1, 513)} | numbered("q₁ q₂ k₁ k₂", -2, 2), *of_versions(_mean)),
)
def features_unbiased(factor: Versions) -> Iterator[Evidence]:
    half = factor.stated(sympy.Integer(2)) ** 2 * 2
    says = "two features, q = k = 0: every entry is the factor itself, so f(q)·f(k) is certain, and is not e^0 = 1"
    yield counterexample(half != 1, says, "exact fractions", product=str(half))
    w, z = sympy.symbols("w z", real=True)
    yield identity(gauss(w * z, w), exp(z**2 / 2), "E e^{wz} = e^{z²/2} for w ~ N(0, 1)", True)
    squares = dot(q_f, q_f) + dot(k_f, k_f)
    sum_square = Sum((q_f[f] + k_f[f]) ** 2, (f, 1, d))
    says = (
        "coordinates of w are independent, so E e^{w·(q+k)} = e^{‖q+k‖²/2}, and ‖q+k‖² − ‖q‖² − ‖k‖² = 2q·k, in any"
        " dimension"
    )
    yield identity(sum_square / 2 - squares / 2, dot(q_f, k_f), says, True)
    total = Sum(factor.amended(m) ** 2, (f, 1, m)).doit()
    yield identity(total, 1, "m features, each with the factor once from either side, add up to one", True)
    scale, a, b = sympy.symbols("s a b", positive=True)
    yield identity(scale * a / (scale * b), a / b, "after normalisation any factor cancels", True)


def _needed_picture() -> Chart:
    radii = [step / 4 for step in range(1, 41)]
    series = {f"relative error {e:g}": (radii, [math.expm1(r**2) / e**2 for r in radii]) for e in (1.0, 0.1, 0.01)}
    return Chart("Features an error takes", "‖q + k‖", "features", series, log_y=True)


def far_below(radius: int | arb, features: int | arb, cut: int | arb) -> arb:
    r"""No less than the chance that an estimate from so many features reaches half of what it estimates.

    Relative to its mean one feature is X = e^{rw − r²/2}, w ~ N(0, 1). Either one of them exceeds e^cut, or those that
    do not have a mean of ½ or more: P(X > e^cut)·m + 2·E[X; X ≤ e^cut], and X's own density turns w into w + r.
    """
    r, root = arb(radius), arb(2).sqrt()
    above = ((cut + r**2 / 2) / r / root).erfc() / 2
    below = ((r**2 / 2 - cut) / r / root).erfc() / 2
    return features * above + 2 * below


def _useful(variance: Formula, doublings: int, cut: arb, *both: arb) -> arb:
    """m is a power of two; the estimate is cut at e to the power of the cut to bound its law."""
    # To be useful, as the ledger reads it: at least half of the truth, at least every other time.
    return arb(1) / 2 - far_below(intervals.norm(both), arb(2) ** doublings, cut)


def _spread(variance: Formula, doublings: int, _: arb, *both: arb) -> arb:
    m, square = arb(2) ** doublings, intervals.dot(both, both)
    # One feature is e^(w·z − ‖z‖²/2) of the truth: of mean one, and of mean square E e^(2w·z)·e^(−‖z‖²).
    second = (2 * square - square).exp()
    return abs(variance(square, m) * m - (second - 1)) / second


@claim(
    "features-variance",
    expected="corrected",
    statement=r"\text{more random features always mean a useful approximation of } e^{q \cdot k}",
    plain="With enough random features the approximation is always useful.",
    amended=r"\frac{\mathrm{Var}\, f(q) \cdot f(k)}{e^{2 q \cdot k}} = \frac{e^{\|q+k\|^2} - 1}{m},"
    r"\quad \text{so a relative error of } \varepsilon \text{ takes } m = \frac{e^{\|q+k\|^2} - 1}{\varepsilon^2}",
    amended_plain="The variance falls as 1/m, from a height of e^(‖q+k‖²): q and k say how many features an error"
    " takes, and at the norms of trained language models it is more than anyone has.",
    assumptions=(
        "real arithmetic",
        "independent directions w ~ N(0, I)",
        "useful: likely to be at least half of the truth, with 2^24 features; an error is relative, root mean square",
    ),
    subject=lambda square, m: (exp(square) - 1) / m,
    sabotage={
        "as if the square of the mean were nothing": lambda square, m: exp(square) / m,
        "half the exponent": lambda square, m: (exp(square / 2) - 1) / m,
        "a variance that falls as 1/m²": lambda square, m: (exp(square) - 1) / m**2,
    },
    picture=_needed_picture,
    falsifier=Falsifier({"log₂m": range(25), "cut": (0, 30)} | numbered("q₁+k₁ q₂+k₂", -7, 7), _useful, _spread),
)
def features_variance(variance: Formula) -> Iterator[Evidence]:
    w, z = sympy.symbols("w z", real=True)
    density = exp(-(w**2) / 2)
    says = "weighed by a feature, w ~ N(0, 1) becomes N(z, 1)"
    yield identity(exp(w * z - z**2 / 2) * density, density.subs(w, w - z), says)
    features = 2**24
    with intervals.precision(128):
        chance = far_below(8, features, 16)
    says = (
        "‖q + k‖ = 8, as of a query and a key of length 4 and logit 16: with 2^24 features the estimate is below half"
        " of the truth with probability at least 0.93"
    )
    facts = {"features": features, "chance_of_half_at_most": intervals.upper(chance)}
    yield counterexample(bool(chance < arb("0.07")), says, "balls: the normal distribution's own law", **facts)
    coordinate = q_f[f] + k_f[f]
    says = "relative to e^{q·k} one feature is e^{w·z − ‖z‖²/2} with z = q + k, in any dimension"
    yield identity(Sum(coordinate**2, (f, 1, d)) / 2, dot(q_f, k_f) + dot(q_f, q_f) / 2 + dot(k_f, k_f) / 2, says, True)
    once, twice = (gauss(times * (w * z - z**2 / 2), w) for times in (1, 2))
    yield identity(once, 1, "its mean is one", True)
    yield identity(twice, exp(z**2), "its mean square is e^{z²} in each coordinate, so e^{‖z‖²} in all", True)
    square, error = sympy.symbols("r epsilon", positive=True)
    single = twice.subs(z, sqrt(square)) - once**2
    spread = sympy.simplify(Sum(single / m**2, (f, 1, m)).doit())
    yield identity(variance(square, m), spread, "the mean of m independent features has 1/m of its variance", True)
    enough = single / error**2
    yield identity(variance(square, enough), error**2, "so m = (e^{‖q+k‖²} − 1)/ε² gives ε", True)
    # The library's own count of features follows this law; what it adds is a confidence for every row at once.
    q, keys = torch.randn(2, 1, 1, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    # Norms about √64 times the factor, and a scale of 1/√64.
    quiet, loud = (avow.features_needed(factor * q, factor * keys, tol=0.1) for factor in (0.2, 2.0))
    law = (intervals.ball(quiet.radius) ** 2).exp() - 1
    follows = bool(abs(intervals.ball(quiet.variance) - law) < law / 10**9)
    says = (
        "avow.features_needed says from q and k what an error of 0.1 takes in every row: so many for small norms, and"
        " that no feasible number suffices for larger ones; its variance of one feature is this law's, to 1e-9"
    )
    holds = follows and math.isfinite(quiet.features) and math.isinf(loud.features)
    yield enclosed(holds, says, True, small=str(quiet), large=str(loud))
