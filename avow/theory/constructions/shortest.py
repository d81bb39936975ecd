r"""The shortest query, and the proof that none is shorter.

Pushing scores down is one convex program, over the differences :math:`g_j` of keys and offsets :math:`o_j`:

.. math:: \min \|z\| \quad\text{such that}\quad \log \sum_j e^{g_j \cdot z + o_j} \le \log \varepsilon

Its optimum is :math:`z = -\nu \sum_j \lambda_j g_j` with :math:`\lambda = softmax(g z + o)`. For *any* distribution
:math:`\lambda` Gibbs' inequality, :math:`\sum_j \lambda_j x_j + H(\lambda) \le \log \sum_j e^{x_j}`, bounds every
feasible z from below, so the solver need not be trusted: `least_length` evaluates that bound in balls
[claims copy-gap, copy-shortest].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from avow.numerics import intervals

if TYPE_CHECKING:
    from flint import arb

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
