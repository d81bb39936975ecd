"""How other forms of attention could differ from softmax's, or do what their rank forbids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.catalogue import efficient
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered
from avow.theory.constructions.formulas import compiled

Rows = list[Numbers]


def _rbf(logit: efficient.Formula) -> Excess:
    shifted = balled(logit, 3)

    def excess(case: Numbers) -> arb:
        query, keys, sigma = case[:2], [case[2:4], case[4:6]], case[6]
        by_kernel = intervals.softmax([-((query[0] - a) ** 2 + (query[1] - b) ** 2) / (2 * sigma) for a, b in keys])
        by_logits = intervals.softmax(
            [shifted(intervals.dot(query, key), intervals.dot(key, key), sigma) for key in keys]
        )
        return abs(by_kernel[0] - by_logits[0])

    return excess


def _entries(base: Any, rows: int, columns: int) -> list[Any]:
    """The entries of an array of letters, row after row."""
    return [base[row + 1, column + 1] for row in range(rows) for column in range(columns)]


def _at(expression: Any, sizes: Mapping[Any, int], letters: Sequence[Any]) -> Callable[[Numbers], arb]:
    """A formula for every n and d at some of them, its sums written out, as a function of its letters."""
    return compiled(sympy.sympify(expression).subs(sizes).doit(), letters)


def _rows(entries: Numbers, width: int) -> Rows:
    return [entries[at : at + width] for at in range(0, len(entries), width)]


def _kernel_form(form: Any) -> Excess:
    letters = [entry for base in (efficient.Q, efficient.K, efficient.V) for entry in _entries(base, 2, 2)]
    sizes = {efficient.n: 2, efficient.d: 2}
    places = [(row, column) for row in (1, 2) for column in (1, 2)]
    forms = [_at(form, sizes | {efficient.i: row, efficient.c: column}, letters) for row, column in places]

    def excess(case: Numbers) -> arb:
        queries, keys, values = (_rows(case[at : at + 4], 2) for at in (0, 4, 8))
        weights = [intervals.softmax([intervals.dot(query, key) for key in keys]) for query in queries]
        attention = [intervals.dot(row, column) for row in weights for column in zip(*values, strict=True)]
        return most([abs(found - form(case)) for found, form in zip(attention, forms, strict=True)])

    return excess


def _separable(rows: Rows, columns: Rows) -> Rows:
    """softmax_row(Q)·softmax_col(K)ᵀ."""
    shares = [intervals.softmax(row) for row in rows]
    by_column = [intervals.softmax(column) for column in zip(*columns, strict=True)]
    return [[intervals.dot(share, key) for key in zip(*by_column, strict=True)] for share in shares]


def _distributions(column: efficient.Formula) -> Excess:
    e = sympy.IndexedBase("e", positive=True)
    letters, sizes = _entries(e, 3, 2), {efficient.n: 3, efficient.d: 2}
    parts = [
        [_at(column(e), sizes | {efficient.j: key, efficient.f: feature}, letters) for feature in (1, 2)]
        for key in (1, 2, 3)
    ]

    def excess(case: Numbers) -> arb:
        share, exponentials = intervals.softmax(case[:2]), [score.exp() for score in case[2:]]
        row = [intervals.dot(share, [part(exponentials) for part in key]) for key in parts]
        return most([abs(total(row) - 1), *(-weight for weight in row)])

    return excess


def _copies(bound: efficient.Formula) -> Excess:
    def excess(case: Numbers) -> arb:
        queries, keys = _rows(case[:6], 2), _rows(case[6:], 2)
        weights = _separable(queries, keys)
        return bound(len(weights), 2) - efficient.from_identity(weights)

    return excess


HUNTS: Mapping[str, Hunt] = {
    "rbf-equals-dot": Hunt(numbered("q₁ q₂ k₁₁ k₁₂ k₂₁ k₂₂", -2, 2) | {"σ": (0.5, 2)}, _rbf),
    "kernel-form": Hunt(
        numbered("q₁₁ q₁₂ q₂₁ q₂₂ k₁₁ k₁₂ k₂₁ k₂₂", -2, 2) | numbered("v₁₁ v₁₂ v₂₁ v₂₂", -1, 1), _kernel_form
    ),
    "separable-rows": Hunt(numbered("q₁ q₂ k₁₁ k₁₂ k₂₁ k₂₂ k₃₁ k₃₂", -6, 6), _distributions),
    "separable-weaker": Hunt(
        numbered("q₁₁ q₁₂ q₂₁ q₂₂ q₃₁ q₃₂ k₁₁ k₁₂ k₂₁ k₂₂ k₃₁ k₃₂", -12, 12),
        _copies,
        reads="Three queries and keys in the plane.",
    ),
}
