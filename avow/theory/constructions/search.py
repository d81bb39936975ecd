r"""How a query with given weights is found: in closed form, else by a convex program; rounded, and proved once rounded.

Where none is found the error says why: the combination of keys that rules every query out, a dtype that is too coarse
and the one that is not, or how near the two come where neither can be proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from avow.core import DTYPES, named
from avow.errors import InsideHull, OutOfReach, RangeError, ToleranceUnreachable
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.impossible import hull_distance, impossible
from avow.theory.constructions.shortest import Array, exponent, pushed, scaled


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
        found, least = _rounded(ray, goal, goal.dtype, made)
        if found is not None:
            return found
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
    found = pushed(gaps @ free.T, gaps @ fixed + logs[0], math.log(goal.eps))
    return None if found is None else Ray(fixed, found.z @ free, found.dual)


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
    found = f"the best query found reaches {best:.3g}" if math.isfinite(best) else "no query was found"
    rule = (
        f"can be neither kept nor refuted: in {named(goal.dtype)} {found}, and the nearest combination of the other "
        f"keys misses by {missed:.3g} of the largest entry"
    )
    remedy = "move the kept keys away from the hull of the others, or drop the keys nearest to them"
    return ToleranceUnreachable(f"{goal.name}: eps", goal.asked, rule, remedy, best)
