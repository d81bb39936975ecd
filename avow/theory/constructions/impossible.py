r"""The proof that no query gives some weights: a combination of the keys, in exact fractions [claim copy-possible].

Whatever the query, numbers c with :math:`\sum_i c_i = 0` and :math:`\sum_i c_i k_i = 0` have
:math:`\sum_i c_i \ln\alpha_i = 0`. A linear program guesses them in floating point, fractions make them exact, and
balls say whether the weights asked for keep to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from avow.errors import MissingPackage
from avow.numerics import intervals
from avow.theory.constructions.shortest import Array, entropy, scaled


class Impossible(NamedTuple):
    """Why no query gives some weights: numbers c, one a key, with Σc = 0 and Σ c_i k_i = 0, exactly.

    `wholly`: no query keeps the promise. Otherwise none keeps the subset's ratios exactly, which is all that is tried.
    """

    combination: tuple[Fraction, ...]
    wholly: bool


def impossible(keys: Float[Tensor, "n d"], weights: Float[Tensor, " n"], eps: float) -> Impossible | None:
    """The proof that no query gives every key at least its weight over 1 + eps, where one is found."""
    weaker = None
    for combination in _combinations(keys, weights):
        wholly, exactly = _refutes(combination, weights, eps)
        if wholly:
            return Impossible(combination, True)
        if exactly and weaker is None:
            weaker = Impossible(combination, False)
    return weaker


def _refutes(combination: Sequence[Fraction], weights: Tensor, eps: float) -> tuple[bool, bool]:
    r"""Whether a combination excludes the promise, and whether it excludes the exact ratios.

    Whatever the query, :math:`\sum_i c_i \ln\alpha_i = 0`. The promise holds each kept :math:`\alpha_i` between
    :math:`w_i/(1+\varepsilon)` and :math:`(w_i+\varepsilon)/(1+\varepsilon)`, and the others, by Gibbs' inequality, to
    :math:`\sum_j \lambda_j \ln\alpha_j \le \ln\frac{\varepsilon}{1+\varepsilon} - H(\lambda)`. Is the sum above 0?
    """
    wanted = weights.tolist()
    one, slack = intervals.ball(1), intervals.ball(eps)

    def answer() -> tuple[bool, bool] | None:
        wholly, exactly = intervals.ball(0), intervals.ball(0)
        rest = []
        for c, w in zip(combination, wanted, strict=True):
            share = intervals.ball(c)
            if w > 0:
                exactly += share * intervals.ball(w).log()
                wholly += share * ((intervals.ball(w) if c > 0 else intervals.ball(w) + slack) / (one + slack)).log()
            elif c < 0:
                rest.append(-share)
        if rest:
            total = intervals.total(rest)
            held = entropy([share / total for share in rest])
            exactly -= total * (slack.log() - held)
            wholly -= total * ((slack / (one + slack)).log() - held)
        if not ((wholly > 0 or wholly <= 0) and (exactly > 0 or exactly <= 0)):
            return None
        return bool(wholly > 0), bool(exactly > 0)

    return intervals.decided(answer, bits=128, most=2048) or (False, False)


def _combinations(keys: Tensor, weights: Tensor) -> Iterator[tuple[Fraction, ...]]:
    """Exact combinations that may refute: among the kept keys alone, then of the kept keys with the others."""
    kept = [i for i, w in enumerate(weights.tolist()) if w > 0]
    rest = [j for j, w in enumerate(weights.tolist()) if w <= 0]
    rows = [[Fraction(entry) for entry in row] for row in keys.double().tolist()]
    if len(kept) > 1:
        yield from _among(rows, kept, weights)
    if rest:
        for found in _guesses(keys, kept, rest, weights):
            exact = _exact(rows, kept, rest, found)
            if exact is not None:
                yield exact


def _among(rows: list[list[Fraction]], kept: list[int], weights: Tensor) -> Iterator[tuple[Fraction, ...]]:
    """Dependencies of the kept keys themselves: their log weights must obey the same."""
    null = _null_space([[*column] for column in zip(*([*rows[i], Fraction(1)] for i in kept), strict=True)])
    if not null:
        return
    logs = [math.log(weights[i]) for i in kept]
    leaning = [sum(float(x) * log for x, log in zip(vector, logs, strict=True)) for vector in null]
    # A single dependency is easier to read; the projection of the log weights refutes best.
    projected = [
        sum((Fraction(a) * v[i] for a, v in zip(leaning, null, strict=True)), Fraction(0)) for i in range(len(kept))
    ]
    for vector in [*null, projected]:
        sign = 1 if sum(float(x) * log for x, log in zip(vector, logs, strict=True)) >= 0 else -1
        whole = [Fraction(0)] * len(rows)
        for i, x in zip(kept, vector, strict=True):
            whole[i] = sign * x
        if any(whole):
            yield tuple(whole)


def _guesses(keys: Tensor, kept: list[int], rest: list[int], weights: Tensor) -> Iterator[Array]:
    """Floating-point combinations, over the rest and then the kept keys: a linear program's, then the nearest one."""
    optimize = _scipy()
    columns, logs = _columns(keys, kept, rest, weights)
    sides = np.zeros(len(columns))
    sides[-2:] = 1.0
    cost = np.concatenate([np.zeros(len(rest)), -logs])
    ranges = [(0, None)] * len(rest) + [(None, None)] * len(kept)
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = optimize.linprog(cost, A_eq=columns, b_eq=sides, bounds=ranges, method="highs", options=tight)
    if answer.status == 0:
        yield answer.x
    yield _nearest(columns, sides, len(rest))


def hull_distance(keys: Float[Tensor, "n d"], weights: Float[Tensor, " n"]) -> float:
    """How far the nearest combination found leaves the kept keys from the others, of the largest entry: an estimate."""
    kept = [i for i, w in enumerate(weights.tolist()) if w > 0]
    rest = [j for j, w in enumerate(weights.tolist()) if w <= 0]
    columns, _ = _columns(keys, kept, rest, weights)
    sides = np.zeros(len(columns))
    sides[-2:] = 1.0
    found = _nearest(columns, sides, len(rest))
    total = found[: len(rest)].sum()
    return float(np.linalg.norm(columns[:-2] @ found) / total) if total > 0 else math.inf


def _columns(keys: Tensor, kept: list[int], rest: list[int], weights: Tensor) -> tuple[Array, Array]:
    """The equations Σ λ_j k_j = Σ μ_i k_i, Σ λ = 1, Σ μ = 1 around the first kept key, and the log weights of μ."""
    rows = scaled(keys)
    centred = rows - rows[kept[0]]
    ones = np.concatenate([np.ones(len(rest)), np.zeros(len(kept))])
    columns = np.vstack([np.concatenate([centred[rest], -centred[kept]]).T, ones, 1 - ones])
    return columns, np.log(weights.double().numpy()[kept])


def _nearest(columns: Array, sides: Array, rest: int) -> Array:
    """The combination that comes nearest to the equations, nonnegative over the rest."""
    optimize = _scipy()
    free = columns[:, rest:]
    found, _ = optimize.nnls(np.concatenate([columns, -free], 1), sides, maxiter=100 * columns.shape[1] + 1000)
    kept = columns.shape[1] - rest
    return np.concatenate([found[:rest], found[rest : rest + kept] - found[rest + kept :]])


def _exact(rows: list[list[Fraction]], kept: list[int], rest: list[int], found: Array) -> tuple[Fraction, ...] | None:
    """The combination on the same keys in fractions, where there is one and its signs are right."""
    largest = float(np.abs(found).max())
    for least in (0.0, 1e-9 * largest):
        used = [a for a, x in enumerate(found.tolist()) if abs(x) > least]
        signs = [(rest[a], 1) if a < len(rest) else (kept[a - len(rest)], -1) for a in used]
        columns = [[sign * x for x in rows[i]] + [Fraction(sign > 0), Fraction(sign < 0)] for i, sign in signs]
        sides = [Fraction(0)] * len(rows[0]) + [Fraction(1)] * 2
        solved = _solution([list(row) for row in zip(*columns, sides, strict=True)])
        if solved is None:
            continue
        whole = [Fraction(0)] * len(rows)
        for (i, sign), x in zip(signs, solved, strict=True):
            whole[i] = -sign * x
        if all(whole[j] <= 0 for j in rest):
            return tuple(whole)
    return None


def _solution(augmented: list[list[Fraction]]) -> list[Fraction] | None:
    """A solution of equations given with their right-hand sides, free unknowns 0; None where they contradict."""
    reduced, pivots = _reduced(augmented)
    unknowns = len(augmented[0]) - 1
    if unknowns in pivots:
        return None
    solved = [Fraction(0)] * unknowns
    for row, column in enumerate(pivots):
        solved[column] = reduced[row][unknowns]
    return solved


def _null_space(equations: list[list[Fraction]]) -> list[list[Fraction]]:
    """A basis of what the equations send to 0."""
    reduced, pivots = _reduced(equations)
    basis = []
    for free in (c for c in range(len(equations[0])) if c not in pivots):
        vector = [Fraction(0)] * len(equations[0])
        vector[free] = Fraction(1)
        for row, column in enumerate(pivots):
            vector[column] = -reduced[row][free]
        basis.append(vector)
    return basis


def _reduced(rows: list[list[Fraction]]) -> tuple[list[list[Fraction]], list[int]]:
    """The reduced row echelon form, exactly, and its pivot columns."""
    from flint import fmpq, fmpq_mat

    wide = len(rows[0])
    entries = [fmpq(x.numerator, x.denominator) for row in rows for x in row]
    reduced, rank = fmpq_mat(len(rows), wide, entries).rref()
    plain = [[Fraction(int(x.p), int(x.q)) for x in (reduced[r, c] for c in range(wide))] for r in range(rank)]
    return plain, [next(c for c in range(wide) if row[c]) for row in plain]


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        rule = "is needed to find the combination that proves a query impossible"
        raise MissingPackage("scipy", "missing", rule, "pip install 'avow[rigor]'") from error
    return optimize
