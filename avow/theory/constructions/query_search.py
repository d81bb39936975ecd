r"""How a query with given weights is found: in closed form, else by a convex program; rounded, and proved once rounded.

Where none is found the error says why: the combination of keys that rules every query out, a dtype that is too coarse
and the one that is not, or how near the two come where neither can be proved.

The shortest query. Pushing scores down is one convex program, over the differences :math:`g_j` of keys and offsets
:math:`o_j`:

.. math:: \min \|z\| \quad\text{such that}\quad \log \sum_j e^{g_j \cdot z + o_j} \le \log \varepsilon

Its optimum is :math:`z = -\nu \sum_j \lambda_j g_j` with :math:`\lambda = softmax(g z + o)`. For *any* distribution
:math:`\lambda` Gibbs' inequality, :math:`\sum_j \lambda_j x_j + H(\lambda) \le \log \sum_j e^{x_j}`, bounds every
feasible z from below, so the solver need not be trusted: `least_length` evaluates that bound in balls
[claims copy-gap, copy-shortest].

The proof that no query gives some weights: a combination of the keys, in exact fractions [claim copy-possible].
Whatever the query, numbers c with :math:`\sum_i c_i = 0` and :math:`\sum_i c_i k_i = 0` have
:math:`\sum_i c_i \ln\alpha_i = 0`. A linear program guesses them in floating point, fractions make them exact, and
balls say whether the weights asked for keep to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from avow.core import DTYPES, named
from avow.errors import InsideHull, MissingPackage, OutOfReach, RangeError, ToleranceUnreachable
from avow.numerics import intervals
from avow.theory.constructions.construction import Construction

if TYPE_CHECKING:
    from flint import arb


class Goal(NamedTuple):
    """What is wanted: each key at least its weight over 1 + eps, the others a `crowd` to be pushed down.

    `name`, `wish` and `asked` are the caller's: the function, its parameter with the value given, and its eps.
    """

    name: str
    wish: tuple[str, object]
    asked: float
    keys: Tensor
    weights: Tensor
    eps: float
    crowd: int
    dtype: torch.dtype

    @property
    def kept(self) -> list[int]:
        return [i for i, weight in enumerate(self.weights.tolist()) if weight > 0]

    @property
    def rest(self) -> list[int]:
        return [i for i, weight in enumerate(self.weights.tolist()) if weight == 0]


class Ray(NamedTuple):
    """Queries that keep the ratios: `fixed` plus any length along `push`; the longer, the lower all others."""

    fixed: Array
    push: Array
    dual: Array | None = None


Q = TypeVar("Q", bound=Construction)


def built(goal: Goal, made: Callable[[Tensor, Array | None], Q], closed_form: bool = True) -> Q:
    """The first query that keeps its promise once rounded; else an error that says why there is none."""
    rays: list[Ray] = []
    best = math.inf
    for ray in _rays(goal, closed_form):
        rays.append(ray)
        query, least = _rounded(ray, goal, goal.dtype, made)
        if query is not None:
            return query
        best = min(best, least)
    for dtype in reversed(DTYPES[: DTYPES.index(goal.dtype)]):
        if any(_rounded(ray, goal, dtype, made)[0] is not None for ray in rays):
            raise _too_coarse(goal, rays, best, dtype)
    raise _refusal(goal, rays, best)


def _rays(goal: Goal, closed_form: bool) -> Iterator[Ray]:
    """Where to look, in the units of the keys: in closed form, then by the convex program."""
    rows = scaled(goal.keys)
    back = -exponent(goal.keys)
    tries = [_spanned, _programmed] if closed_form else [_programmed]
    for ray in (attempt(goal, rows) for attempt in tries):
        if ray is not None:
            with np.errstate(over="ignore", under="ignore"):
                yield Ray(np.ldexp(ray.fixed, back), np.ldexp(ray.push, back), ray.dual)


def _spanned(goal: Goal, rows: Array) -> Ray | None:
    """The query within the span of the kept keys; None where that span does not separate them from the others."""
    kept, rest = goal.kept, goal.rest
    if not rest:
        return None
    logs = np.log(goal.weights.numpy()[kept])
    sides = np.stack([logs, np.ones(len(kept))], 1)
    if len(kept) == 1:
        # One key is its own span, and the query stays exactly along it.
        square = rows[kept[0]] @ rows[kept[0]]
        if square == 0.0:
            return None
        solved = rows[kept[0]][:, None] / square * sides
    else:
        solved, _, rank, _ = np.linalg.lstsq(rows[kept], sides, rcond=None)
        if rank < len(kept):
            return None
    fixed, push = solved.T
    margins = 1 - rows[rest] @ push
    if not (margins > 0).all():
        return None
    # Each of the others ends at log(eps/crowd) below what the kept keys' weights are measured from.
    lengths = (rows[rest] @ fixed + math.log(goal.crowd) - math.log(goal.eps)) / margins
    return Ray(fixed, max(0.0, float(lengths.max())) * push)


def _programmed(goal: Goal, rows: Array) -> Ray | None:
    """The shortest query with the ratios wanted; None where none was found."""
    kept, rest = goal.kept, goal.rest
    logs = np.log(goal.weights.numpy()[kept])
    base = rows[kept[0]]
    alike = rows[kept[1:]] - base  # (m - 1, d)
    left, spread, right = np.linalg.svd(alike, full_matrices=True)
    rank = int((spread > 1e-12 * spread.max(initial=0.0)).sum())
    fixed = right[:rank].T @ ((left[:, :rank].T @ (logs[1:] - logs[0])) / spread[:rank])
    free = right[rank:]  # directions that leave the kept keys' ratios alone
    gaps = rows[rest] - base
    push = pushed(gaps @ free.T, gaps @ fixed + logs[0], math.log(goal.eps))
    return None if push is None else Ray(fixed, push.z @ free, push.dual)


def _rounded(
    ray: Ray, goal: Goal, dtype: torch.dtype, made: Callable[[Tensor, Array | None], Q]
) -> tuple[Q | None, float]:
    """The query in its dtype, enlarged by as little as its promise then needs; or the best that was reached."""
    best, margin = math.inf, 0.0
    while margin <= 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
            exact = ray.fixed + (1 + margin) * ray.push
        query = torch.from_numpy(exact).to(dtype)
        if bool(query.isfinite().all()):
            # Only what is kept is worth the proof that none is shorter.
            proof = made(query.to(goal.keys.device), None).verify()
            if proof:
                return made(query.to(goal.keys.device), ray.dual), proof.achieved
            best = min(best, proof.achieved)
        if not ray.push.any():
            break
        margin = 2 * margin or torch.finfo(dtype).eps
    return None, best


def _too_coarse(goal: Goal, rays: list[Ray], best: float, enough: torch.dtype) -> ToleranceUnreachable:
    name, remedy = named(goal.dtype), f"use dtype={enough}"
    largest = min(float(np.abs(ray.fixed + ray.push).max()) for ray in rays)
    if largest > torch.finfo(goal.dtype).max:
        rule = f"ends at {torch.finfo(goal.dtype).max:g}, and the query reaches {largest:.3g}"
    else:
        rule = f"is too coarse: rounded to it, the query keeps {_shown(goal, best)} where {_shown(goal)} was asked"
    return ToleranceUnreachable(f"{goal.name}: dtype", name, rule, remedy, best)


def _shown(goal: Goal, achieved: float | None = None) -> str:
    return f"eps={goal.asked if achieved is None else achieved:.3g}"


def _refusal(goal: Goal, rays: list[Ray], best: float) -> Exception:
    """Why no query is returned: a proof that there is none, or what stands in the way of either proof."""
    keys = goal.keys.cpu()
    refuted = impossible(keys, goal.weights, goal.eps)
    if refuted is not None:
        used = [i for i, c in enumerate(refuted.combination) if c != 0]
        word, wanted = goal.wish
        if word == "target":
            (target,) = goal.kept
            weights = tuple(max(-c, c * 0) for c in refuted.combination)
            rule = "has a key in the convex hull of the others, so no query scores it above them all"
            others = [i for i in used if i != target]
            remedy = f"move that key, or drop one of keys {others}: it is their mean by the weights on this error"
            return InsideHull(f"{goal.name}: {word}", wanted, rule, remedy, weights)
        rule = "is out of reach: no query gives these keys such weights"
        if not refuted.wholly:
            rule = "is out of reach: no query keeps these keys' ratios exactly and the others within eps"
        remedy = f"change the weights or one of keys {used}, whose combination on this error proves it"
        return OutOfReach(f"{goal.name}: {word}", wanted, rule, remedy, refuted.combination)
    if rays and not any(np.isfinite(ray.fixed + ray.push).all() for ray in rays):
        largest = float(keys.double().abs().amax())
        return RangeError(
            f"{goal.name}: keys", f"{largest:.3g} at most", "need a query beyond float64", "scale the keys up"
        )
    missed = hull_distance(keys, goal.weights) if goal.rest else math.inf
    reached = f"the best query found reaches {best:.3g}" if math.isfinite(best) else "no query was found"
    rule = (
        f"can be neither kept nor refuted: in {named(goal.dtype)} {reached}, and the nearest combination of the other "
        f"keys misses by {missed:.3g} of the largest entry"
    )
    remedy = "move the kept keys away from the hull of the others, or drop the keys nearest to them"
    return ToleranceUnreachable(f"{goal.name}: eps", goal.asked, rule, remedy, best)


Array = NDArray[np.float64]

# Scores move apart by about this much in one step: within it the log of a sum of exponentials is nearly its quadratic.
REACH = 1.0
STEPS = 400


class Pushed(NamedTuple):
    """A solution of the program, and the distribution that is its proof."""

    z: Array
    dual: Array


def pushed(gaps: Array, offsets: Array, log_eps: float) -> Pushed | None:
    """The shortest z with a log-sum of scores at `log_eps`, to about float64's precision; None where none was found.

    It follows the minimisers of ½‖z‖² + ν·logsumexp(gaps·z + offsets) from z = 0 as ν grows.
    """
    size = float(np.sqrt((gaps * gaps).sum(-1).max(initial=0.0)))
    scores = offsets
    if _log_sum(scores) <= log_eps:
        return Pushed(np.zeros(gaps.shape[1]), _softmax(scores))
    if size == 0.0:
        return None
    # Only the span of the differences matters: rotate into it.
    _, spread, basis = np.linalg.svd(gaps / size, full_matrices=False)
    basis = basis[spread > 1e-14 * spread[0]]
    rows = gaps / size @ basis.T  # (p, r)
    z, pull = np.zeros(len(basis)), 1.0
    close, least = False, math.inf
    low, high = -math.inf, math.inf  # what is known of the logarithm of the right pull
    for _ in range(STEPS):
        # Far from the end the path need not be followed closely.
        centred = _centred(rows, z, offsets, pull, 1e-15 if close else 0.1)
        if centred is None or pull > 1e40:
            return None
        z, weights, hessian = centred
        mean = rows.T @ weights
        along = pull * np.linalg.solve(hessian, mean)
        excess = _log_sum(rows @ z + offsets) - log_eps
        slope = float(mean @ along)
        if least < 1e-9 and abs(excess) >= least:
            break
        least = abs(excess) if close else math.inf
        close = close or abs(excess) < 0.1
        log_pull = math.log(pull)
        low, high = (log_pull, high) if excess > 0 else (low, log_pull)
        step = excess / slope if slope > 0 else 7.0
        toward = -math.copysign(1, step) * (rows @ along)
        step = math.copysign(min(abs(step), 7.0, 2 * _stride(toward, rows @ z + offsets)), step)
        if not close and not low < log_pull + step < high:
            step = (low + high) / 2 - log_pull
        z, pull = z - step * along, pull * math.exp(step)
    return Pushed(z @ basis / size, weights) if least < 1e-3 else None


def _centred(rows: Array, z: Array, offsets: Array, pull: float, tolerance: float) -> tuple[Array, Array, Array] | None:
    """The minimiser of ½‖z‖² + pull·logsumexp by damped Newton steps, with its weights and its Hessian."""
    least = math.inf
    for _ in range(60):
        weights = _softmax(rows @ z + offsets)
        mean = rows.T @ weights
        spread = rows - mean
        hessian = np.eye(len(z)) + pull * (spread.T * weights) @ spread
        try:
            step = np.linalg.solve(hessian, z + pull * mean)
        except np.linalg.LinAlgError:
            return None
        moved = float(np.abs(rows @ step).max())
        if not math.isfinite(moved):
            return None
        # Once rounding rather than convexity decides, a step is no shorter than the last.
        if moved <= tolerance or (moved < 1e-6 and moved >= least):
            break
        least = moved
        z = z - min(1.0, _stride(-(rows @ step), rows @ z + offsets)) * step
    return z, weights, hessian


def _stride(moves: Array, scores: Array) -> float:
    """How much of some moves the log-sum's quadratic can be trusted for.

    What moves all scores alike counts for nothing, nor does a score that has no weight and gets none.
    """
    logs = scores - _log_sum(scores)
    apart = moves - np.exp(logs) @ moves
    rises = np.where(apart > 0, apart / (REACH - logs / 2), 0.0)
    falls = np.where(apart < 0, -apart * np.exp(logs / 2) / REACH, 0.0)
    return 1 / max(float(rises.max()), float(falls.max()), 1e-30)


def _log_sum(x: Array) -> float:
    top = x.max(initial=-math.inf)
    return float(top + np.log(np.exp(x - top).sum())) if math.isfinite(top) else -math.inf


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(initial=-math.inf))
    return weights / weights.sum()


def least_length(keys: Float[Tensor, "n d"], target: int, eps: float, dual: Float[Tensor, " n"]) -> float:
    r"""A length that every query reaches which gives `target` a weight of 1/(1+eps): proved in balls, from any `dual`.

    .. math:: \|q\| \ge \frac{H(\lambda) - \ln\varepsilon}{\|\sum_j \lambda_j (k_t - k_j)\|}
    """
    rows = intervals.matrix(keys)
    chosen = [j for j, weight in enumerate(dual.tolist()) if j != target and weight > 0]
    if not chosen:
        return 0.0

    def bound() -> float | None:
        weights = [intervals.ball(dual[j]) for j in chosen]
        total = intervals.total(weights)
        weights = [weight / total for weight in weights]
        pulled = [
            rows[target][c] - intervals.dot(weights, [rows[j][c] for j in chosen]) for c in range(len(rows[target]))
        ]
        drop = entropy(weights) - intervals.ball(eps).log()
        length = intervals.norm(pulled)
        if not length > 0:
            return None
        ratio = drop / length
        return intervals.lower(ratio) if ratio.rel_accuracy_bits() > 50 else None

    # A target inside the hull has no shortest query, and its dual may cancel to nothing: then nothing is bounded.
    found = intervals.decided(bound, bits=128, most=2048)
    return max(0.0, found) if found is not None else 0.0


def entropy(weights: Sequence[arb]) -> arb:
    r""":math:`-\sum_j \lambda_j \ln \lambda_j`, in balls."""
    return -intervals.total(weight * weight.log() for weight in weights)


def scaled(keys: Tensor) -> Array:
    """The keys in float64, over the power of two that brings the largest entry to about 1."""
    rows: Array = keys.detach().double().cpu().numpy()
    return np.ldexp(rows, -exponent(keys))


def exponent(keys: Tensor) -> int:
    """The power of two of the largest entry."""
    return math.frexp(float(keys.detach().double().abs().amax()))[1] if keys.numel() else 0


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
        for guess in _guesses(keys, kept, rest, weights):
            exact = _exact(rows, kept, rest, guess)
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
    columns, sides, logs = _equations(keys, kept, rest, weights)
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
    columns, sides, _ = _equations(keys, kept, rest, weights)
    combination = _nearest(columns, sides, len(rest))
    total = combination[: len(rest)].sum()
    return float(np.linalg.norm(columns[:-2] @ combination) / total) if total > 0 else math.inf


def _equations(keys: Tensor, kept: list[int], rest: list[int], weights: Tensor) -> tuple[Array, Array, Array]:
    """Σ λ_j k_j = Σ μ_i k_i, Σ λ = 1, Σ μ = 1 around the first kept key, with their sides, and the log weights of μ."""
    rows = scaled(keys)
    centred = rows - rows[kept[0]]
    ones = np.concatenate([np.ones(len(rest)), np.zeros(len(kept))])
    columns = np.vstack([np.concatenate([centred[rest], -centred[kept]]).T, ones, 1 - ones])
    sides = np.concatenate([np.zeros(len(columns) - 2), np.ones(2)])
    return columns, sides, np.log(weights.double().numpy()[kept])


def _nearest(columns: Array, sides: Array, rest: int) -> Array:
    """The combination that comes nearest to the equations, nonnegative over the rest."""
    optimize = _scipy()
    free = columns[:, rest:]
    solution, _ = optimize.nnls(np.concatenate([columns, -free], 1), sides, maxiter=100 * columns.shape[1] + 1000)
    kept = columns.shape[1] - rest
    return np.concatenate([solution[:rest], solution[rest : rest + kept] - solution[rest + kept :]])


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
