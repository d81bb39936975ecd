r"""How a query with given weights is found: in closed form, else by a convex program; rounded, and proved once rounded.

If none is found the error says why: the combination of keys that rules every query out, a dtype that is too coarse and
the one that is not, or how near the two come if neither can be proved.

The shortest query. Pushing scores down is one convex program, over the differences :math:`g_j` of keys and offsets
:math:`o_j`:

.. math:: \min \|z\| \quad\text{such that}\quad \log \sum_j e^{g_j \cdot z + o_j} \le \log \varepsilon

Its optimum is :math:`z = -\nu \sum_j \lambda_j g_j` with :math:`\lambda = softmax(g z + o)`. For *any* distribution
:math:`\lambda` Gibbs' inequality, :math:`\sum_j \lambda_j x_j + H(\lambda) \le \log \sum_j e^{x_j}`, bounds every
feasible z from below, so the solver need not be trusted: `least_length` evaluates that bound in balls
[claims copy-gap, copy-shortest].

The proof that no query gives some weights: a combination of the keys, in exact fractions [claim copy-possible].
Whatever the query, numbers c with :math:`\sum_i c_i = 0` and :math:`\sum_i c_i k_i = 0` have
:math:`\sum_i c_i \ln\alpha_i = 0`. Floating point guesses them, fractions make them exact, and balls say whether the
weights asked for keep to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from avow.core import DTYPES, check_dtype, dtype_name
from avow.errors import InsideHull, OutOfReach, RangeError, ToleranceUnreachable
from avow.extras import require
from avow.numerics import intervals
from avow.theory.constructions.construction import first_proved, scipy_optimize

if TYPE_CHECKING:
    from avow.theory.constructions.queries import Query

Array = NDArray[np.float64]
STEPS = 400
_PURPOSE = "to find the combination that proves a query impossible"


class Goal(NamedTuple):
    """A promise that still lacks its query, in a dtype; `crowd` is how many keys it is to push down, at most.

    `name`, `parameter` and `value` are the caller's: the function, and what was asked of it.
    """

    name: str
    parameter: str
    value: object
    promise: Query
    crowd: int
    dtype: torch.dtype

    @property
    def eps(self) -> float:
        """What the others may get, over what the kept keys get together."""
        return self.promise.eps / self.promise.whole


class Ray(NamedTuple):
    """Queries that keep the ratios: `fixed` plus any length along `push`; the longer, the lower all others."""

    fixed: Array
    push: Array
    dual: Array | None = None


def find_query(goal: Goal, closed_form: bool = True) -> tuple[Tensor, Array | None]:
    """The first query that keeps its promise once rounded, with the dual of a shortest one; else an error says why."""
    check_dtype(f"{goal.name}: dtype", goal.dtype, "use dtype=torch.float64")
    rays: list[Ray] = []
    best = math.inf
    for ray in _rays(goal, closed_form):
        rays.append(ray)
        promise, least = _round_query(ray, goal, goal.dtype)
        if promise is not None:
            return promise.query, ray.dual
        best = min(best, least)
    for dtype in reversed(DTYPES[: DTYPES.index(goal.dtype)]):
        if any(_round_query(ray, goal, dtype)[0] is not None for ray in rays):
            largest, reach = min(float(np.abs(ray.fixed + ray.push).max()) for ray in rays), torch.finfo(goal.dtype).max
            rule = f"ends at {reach:g}, and the query reaches {largest:.3g}"
            if largest <= reach:
                missed = f"eps={best:.3g} where eps={goal.promise.eps:.3g} was asked"
                rule = f"is too coarse: rounded to it, the query keeps {missed}"
            raise ToleranceUnreachable(f"{goal.name}: dtype", dtype_name(goal.dtype), rule, f"use dtype={dtype}", best)
    raise _refusal(goal, rays, best)


def _rays(goal: Goal, closed_form: bool) -> Iterator[Ray]:
    """Where to look, in the units of the keys: in closed form, then by the convex program."""
    rows, exponent = _scaled(goal.promise.keys)
    weights = goal.promise.wanted.numpy()
    support = weights > 0
    for attempt in (_closed_form, _by_program) if closed_form else (_by_program,):
        ray = attempt(goal, rows[support], rows[~support], np.log(weights[support]))
        if ray is not None:
            with np.errstate(over="ignore", under="ignore"):
                yield Ray(np.ldexp(ray.fixed, -exponent), np.ldexp(ray.push, -exponent), ray.dual)


def _closed_form(goal: Goal, support: Array, others: Array, logs: Array) -> Ray | None:
    """The query within the span of the kept keys; None if that span does not separate them from the others."""
    if not len(others) or not (support * support).any():
        return None
    sides = np.stack([logs, np.ones(len(support))], 1)
    solved, _, rank, _ = np.linalg.lstsq(support, sides, rcond=None)
    if rank < len(support):
        return None
    if len(support) == 1:  # one key is its own span, and the query stays exactly along it
        solved = support.T / (support @ support.T) * sides
    fixed, push = solved.T
    margins = 1 - others @ push
    if not (margins > 0).all():
        return None
    # Each of the others ends at log(eps/crowd) below what the kept keys' weights are measured from.
    lengths = (others @ fixed + math.log(goal.crowd) - math.log(goal.eps)) / margins
    return Ray(fixed, max(0.0, float(lengths.max())) * push)


def _by_program(goal: Goal, support: Array, others: Array, logs: Array) -> Ray | None:
    """The shortest query with the ratios wanted; None if none was found."""
    left, spread, right = np.linalg.svd(support[1:] - support[0], full_matrices=True)
    rank = int((spread > 1e-12 * spread.max(initial=0.0)).sum())
    fixed = right[:rank].T @ ((left[:, :rank].T @ (logs[1:] - logs[0])) / spread[:rank])
    free = right[rank:]  # directions that leave the kept keys' ratios alone
    gaps = others - support[0]
    solution = shortest_push(gaps @ free.T, gaps @ fixed + logs[0], math.log(goal.eps))
    return None if solution is None else Ray(fixed, solution[0] @ free, solution[1])


def _round_query(ray: Ray, goal: Goal, dtype: torch.dtype) -> tuple[Query | None, float]:
    """The promise with a query in its dtype, enlarged by as little as it then needs; and the best that was reached."""
    # Without a push nothing is enlarged; otherwise by one rounding of the dtype, two, four, up to twice the length.
    doublings = range(round(-math.log2(torch.finfo(dtype).eps)) + 1) if ray.push.any() else ()
    margins = (0.0, *(torch.finfo(dtype).eps * 2**k for k in doublings))
    with np.errstate(over="ignore", invalid="ignore"):
        exact = [torch.from_numpy(ray.fixed + (1 + margin) * ray.push) for margin in margins]
    queries = (query.to(goal.promise.keys.device, dtype) for query in exact)
    return first_proved(replace(goal.promise, query=query) for query in queries if query.isfinite().all())


def _refusal(goal: Goal, rays: list[Ray], best: float) -> Exception:
    """Why no query is returned: a proof that there is none, or what stands in the way of either proof."""
    keys, weights = goal.promise.keys.cpu(), goal.promise.wanted
    refuted = impossible(keys, weights, goal.eps)
    if refuted is not None:
        name, (combination, wholly) = f"{goal.name}: {goal.parameter}", refuted
        used = [i for i, c in enumerate(combination) if c != 0]
        if goal.parameter == "target":
            rule = "has a key in the convex hull of the others, so no query scores it above them all"
            others = [i for i in used if i != goal.value]
            remedy = f"move that key, or drop one of keys {others}: it is their mean by the weights on this error"
            return InsideHull(name, goal.value, rule, remedy, tuple(max(-c, Fraction(0)) for c in combination))
        rule = "is out of reach: no query gives these keys such weights"
        if not wholly:
            rule = "is out of reach: no query keeps these keys' ratios exactly and the others within eps"
        remedy = f"change the weights or one of keys {used}, whose combination on this error proves it"
        return OutOfReach(name, goal.value, rule, remedy, combination)
    if rays and not any(np.isfinite(ray.fixed + ray.push).all() for ray in rays):
        largest = f"{float(keys.double().abs().amax()):.3g} at most"
        return RangeError(f"{goal.name}: keys", largest, "need a query beyond float64", "scale the keys up")
    missed = math.inf
    if bool((weights == 0).any()):
        equations, sides = _equations(keys, weights)
        nearest = _nearest(equations, sides)
        total = float(-nearest[weights.numpy() == 0].sum())
        missed = float(np.linalg.norm(equations[:-2] @ nearest)) / total if total > 0 else math.inf
    reached = f"the best query found reaches {best:.3g}" if math.isfinite(best) else "no query was found"
    rule = (
        f"can be neither kept nor refuted: in {dtype_name(goal.dtype)} {reached}, and the nearest combination of the "
        f"other keys misses by {missed:.3g} of the largest entry"
    )
    remedy = "move the kept keys away from the hull of the others, or drop the keys nearest to them"
    return ToleranceUnreachable(f"{goal.name}: eps", goal.promise.eps, rule, remedy, best)


def shortest_push(gaps: Array, offsets: Array, log_eps: float) -> tuple[Array, Array] | None:
    """The shortest z with a log-sum of scores at `log_eps`, to about float64's precision, and its dual distribution.

    Newton's steps on the conditions of the optimum, z + ν Σ λ_j g_j = 0 and that log-sum. None: none was found.
    """
    start = np.logaddexp.reduce(offsets)
    if start <= log_eps:
        return np.zeros(gaps.shape[1]), np.exp(offsets - start)
    size = float(np.sqrt((gaps * gaps).sum(-1).max()))
    if size == 0.0:
        return None
    # Only the span of the differences matters: rotate into it.
    _, spread, basis = np.linalg.svd(gaps / size, full_matrices=False)
    basis = basis[spread > 1e-14 * spread[0]]
    rows = gaps / size @ basis.T  # (p, r)
    z, pull, last = np.zeros(len(basis)), 1.0, math.inf
    for _ in range(STEPS):
        scores = rows @ z + offsets
        total = np.logaddexp.reduce(scores)
        logs = scores - total
        weights = np.exp(logs)
        mean = weights @ rows
        # The Hessian is I + ν·covariance; by its axes it is inverted without being squared.
        _, lengths, axes = np.linalg.svd(np.sqrt(pull * weights)[:, None] * (rows - mean), full_matrices=False)
        along, back = (axes.T @ (axes @ x / (1 + lengths * lengths)) for x in (mean, z))
        slope = float(mean @ along)
        if not slope > 0 or pull > 1e40:
            return None  # no direction lowers the log-sum, or none lowers it enough
        # The multiplier for which the step ends where the linearised log-sum is log_eps.
        aim = min(max(float(total - log_eps - mean @ back) / slope, pull / 1e3), pull * 1e3)
        step = -(back + aim * along)
        moves = rows @ step
        # The log of a sum of exponentials is nearly its quadratic while scores move apart by about 1. What moves all
        # alike counts for nothing, nor does a score that has no weight and gets none.
        apart = moves - weights @ moves
        moved = float(np.where(apart > 0, apart / (1 - logs / 2), -apart * np.exp(logs / 2)).max())
        off = max(moved, abs(float(total - log_eps)))
        if not math.isfinite(off):
            return None
        # Once rounding rather than convexity decides, what is off is no less than before.
        if off < 1e-16 or (last < 1e-6 and off >= last):
            return z @ basis / size, weights
        stride = 1 / max(1.0, moved)
        z, pull, last = z + stride * step, pull * (aim / pull) ** stride**0.25, off
    return None


def least_length(keys: Float[Tensor, "n d"], target: int, eps: float, dual: Float[Tensor, " n"]) -> float:
    r"""A length that every query reaches which gives `target` a weight of 1/(1+eps): proved in balls, from any `dual`.

    .. math:: \|q\| \ge \frac{H(\lambda) - \ln\varepsilon}{\|\sum_j \lambda_j (k_t - k_j)\|}
    """
    chosen = [j for j, weight in enumerate(dual.tolist()) if j != target and weight > 0]
    if not chosen:
        return 0.0

    def bound() -> float | None:
        row = intervals.grid(dual[None, chosen])
        weights = row / intervals.total(row.entries())
        length = intervals.frobenius(intervals.grid(keys[None, target]) - weights * intervals.grid(keys[chosen]))
        if not length > 0:
            return None
        ratio = (entropy(weights.entries()) - intervals.ball(eps).log()) / length
        return intervals.lower(ratio) if ratio.rel_accuracy_bits() > 50 else None

    # A target inside the hull has no shortest query, and its dual may cancel to nothing: then nothing is bounded.
    length = intervals.decided(bound, bits=128, most=2048)
    return 0.0 if length is None else max(0.0, length)


def entropy(weights: Sequence[intervals.arb]) -> intervals.arb:
    r""":math:`-\sum_j \lambda_j \ln \lambda_j`, in balls."""
    return -intervals.total(weight * weight.log() for weight in weights)


def _scaled(keys: Tensor) -> tuple[Array, int]:
    """The keys in float64 over 2^e, the power that brings the largest entry to about 1; and e."""
    rows = keys.detach().double().cpu()
    exponent = math.frexp(float(rows.abs().amax()))[1]
    return np.ldexp(rows.numpy(), -exponent), exponent


def impossible(
    keys: Float[Tensor, "n d"], weights: Float[Tensor, " n"], eps: float
) -> tuple[tuple[Fraction, ...], bool] | None:
    """The proof that no query gives every key at least its weight over 1 + eps, if one is found.

    It is numbers c, one a key, with Σc = 0 and Σ c_i k_i = 0, exactly; and whether they exclude the promise as such.
    Otherwise they exclude the exact ratios of the kept keys, which is all that is tried.
    """
    weaker = None
    for combination in _combinations(keys, weights):
        wholly, exactly = _refutes(combination, weights, eps)
        if wholly:
            return combination, True
        if exactly and weaker is None:
            weaker = combination, False
    return weaker


def _refutes(combination: Sequence[Fraction], weights: Tensor, eps: float) -> tuple[bool, bool]:
    r"""Whether a combination excludes the promise, and whether it excludes the exact ratios.

    Whatever the query, :math:`\sum_i c_i \ln\alpha_i = 0`. The promise holds each kept :math:`\alpha_i` between
    :math:`w_i/(1+\varepsilon)` and :math:`(w_i+\varepsilon)/(1+\varepsilon)`, and the others, by Gibbs' inequality, to
    :math:`\sum_j \lambda_j \ln\alpha_j \le \ln\frac{\varepsilon}{1+\varepsilon} - H(\lambda)`. Is the sum above 0?
    """
    one, slack = intervals.ball(1), intervals.ball(eps)

    def answer() -> tuple[bool, bool] | None:
        wholly, exactly = intervals.ball(0), intervals.ball(0)
        rest = []
        for c, w in zip(combination, weights.tolist(), strict=True):
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
    """Exact combinations that may refute, of -1 together over the keys that are to get nothing, if any takes part."""
    vectors = [[*map(Fraction, row), Fraction(1)] for row in keys.double().tolist()]
    rest = [j for j, w in enumerate(weights.tolist()) if w == 0]
    for guess in _guesses(keys, weights):
        for least in (0.0, 1e-9 * np.abs(guess).max()):
            used = [i for i, x in enumerate(guess.tolist()) if abs(x) > least]
            combination = [Fraction(0)] * len(vectors)
            for free, relation in _relations([vectors[i] for i in used]):
                for i, x in zip(used, relation, strict=True):
                    combination[i] += Fraction(guess[used[free]]) * x
            if any(combination) and all(combination[j] <= 0 for j in rest):
                total = -sum(combination[j] for j in rest) or abs(next(filter(None, reversed(combination))))
                yield tuple(c / total for c in combination)
                break


def _guesses(keys: Tensor, weights: Tensor) -> Iterator[Array]:
    """Combinations in floating point: of the kept keys alone, then of all, by a linear program and the nearest one."""
    equations, sides = _equations(keys, weights)
    kept = weights.numpy() > 0
    logs = np.log(np.where(kept, weights.numpy(), 1.0))
    # What a fit leaves of the log weights is orthogonal to the keys and to 1, and refutes these weights best.
    model = np.concatenate([equations[:-2].T, np.ones((len(kept), 1))], 1) * kept[:, None]
    yield logs - model @ np.linalg.lstsq(model, logs, rcond=None)[0]
    if kept.all():
        return
    ranges = [(None, None) if one else (None, 0) for one in kept]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = scipy_optimize(_PURPOSE).linprog(
        -logs, A_eq=equations, b_eq=sides, bounds=ranges, method="highs", options=tight
    )
    if answer.status == 0:
        yield answer.x
    yield _nearest(equations, sides)


def _equations(keys: Tensor, weights: Tensor) -> tuple[Array, Array]:
    """Σ c_i k_i = 0 around the first kept key, Σ c = -1 over the rest, Σ c = 1 over the kept; and their right sides."""
    kept = weights.numpy() > 0
    rows, _ = _scaled(keys)
    equations = np.vstack([(rows - rows[kept][0]).T, ~kept, kept])
    return equations, np.concatenate([np.zeros(rows.shape[1]), [-1.0, 1.0]])


def _nearest(equations: Array, sides: Array) -> Array:
    """The combination that comes nearest to the equations, at most 0 over the rest."""
    kept = equations[-1] > 0
    # Numbers of either sign are differences of two that are not negative.
    signed = np.concatenate([np.where(kept, equations, -equations), -equations[:, kept]], 1)
    solution, _ = scipy_optimize(_PURPOSE).nnls(signed, sides, maxiter=100 * signed.shape[1] + 1000)
    combination = np.where(kept, solution[: len(kept)], -solution[: len(kept)])
    combination[kept] -= solution[len(kept) :]
    return combination


def _relations(vectors: Sequence[Sequence[Fraction]]) -> Iterator[tuple[int, list[Fraction]]]:
    """A basis of the combinations that vanish, exactly; each with the place at which it alone is 1 and all others 0."""
    require("flint", purpose="to solve equations exactly")
    from flint import fmpq, fmpq_mat

    if not vectors:
        return
    n = len(vectors)
    entries = [fmpq(x.numerator, x.denominator) for equation in zip(*vectors, strict=True) for x in equation]
    reduced, rank = fmpq_mat(len(vectors[0]), n, entries).rref()
    pivots = [next(c for c in range(n) if reduced[r, c] != 0) for r in range(rank)]
    for free in (c for c in range(n) if c not in pivots):
        relation = [Fraction(c == free) for c in range(n)]
        for r, c in enumerate(pivots):
            relation[c] = -Fraction(int(reduced[r, free].p), int(reduced[r, free].q))
        yield free, relation
