r"""One query that copies a key's value, averages some, or mixes them in any proportion, over the keys as they are.

All three ask for weights :math:`w` over the keys, zero on the rest, and keep one promise in real arithmetic on the
numbers returned, for every kept key:

.. math:: \alpha_i \ge \frac{w_i}{1+\varepsilon}, \quad \alpha = softmax(K q)

What the kept keys lack the others have, so the total variation distance of :math:`\alpha` from :math:`w` is at most
:math:`\varepsilon/(1+\varepsilon)`. Copying is :math:`w_t = 1` [claims copy-gap, copy-separated]; averaging m keys is
:math:`w_i = 1/m`, promised with :math:`\varepsilon/m` so that :math:`\alpha_i \ge 1/(m+\varepsilon)`
[claim average-two]; the rest is [claim mixture-any].

The query is :math:`K_S^+(t \mathbf 1 + \ln w)`, with the least t that pushes every other key down in closed form. Where
those keys' span does not separate them from the others, a convex program does (see `shortest`); where nothing does, the
error carries the combination of keys that proves it.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.chart import Chart
from avow.constructions.construction import Construction, Proof
from avow.constructions.shortest import Array, exponent, hull_distance, impossible, least_length, pushed, scaled
from avow.errors import (
    DtypeError,
    InsideHull,
    NonFiniteError,
    OutOfReach,
    ParameterError,
    RangeError,
    ShapeError,
    ToleranceUnreachable,
)
from avow.maths import balls

if TYPE_CHECKING:
    from flint import arb

# From coarse to fine: a dtype that cannot hold a query names the next one that can.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Weights that miss a sum of 1 by less are divided by it.
SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Query(Construction):
    """A query over some keys, with the weights it promises them."""

    query: Float[Tensor, " d"]
    keys: Float[Tensor, "n d"]
    eps: float

    @property
    @abstractmethod
    def shares(self) -> Mapping[int, float]:
        """What the kept keys are to get, in parts of `whole`."""

    @property
    def whole(self) -> float:
        """What the shares sum to."""
        return 1.0

    @property
    def bound(self) -> float:
        return self.eps

    @property
    def total_variation(self) -> float:
        """What the promise makes of the distance ½ Σ|α_i − w_i|, at most."""
        return math.nextafter(self.eps / (self.whole + self.eps), 1.0)

    @property
    def norm(self) -> float:
        """The length of the query."""
        return math.hypot(*self.query.tolist())

    @property
    def attention(self) -> Float[Tensor, " n"]:
        """The weights this query gives, to float64's precision."""
        return torch.softmax(self.keys.double() @ self.query.double(), -1)

    def tensors(self) -> dict[str, Tensor]:
        return {"query": self.query, "keys": self.keys}

    def verify(self) -> Proof:
        if not bool(self.query.isfinite().all()):
            return Proof(self.promise, self.bound, math.inf, ("the query is not finite",))
        rows, query = balls.matrix(self.keys), balls.vector(self.query)

        def excess() -> float | None:
            found = self._excess([balls.dot(row, query) for row in rows])
            settled = found <= self.eps or found > self.eps
            return balls.upper(found) if settled else None

        achieved = balls.decided(excess, bits=128)
        steps = (f"the scores of {len(rows)} keys, as given, with the query as returned: balls around exact floats",)
        return Proof(self.promise, self.bound, math.inf if achieved is None else achieved, steps)

    def _excess(self, scores: Sequence[arb]) -> arb:
        r"""The largest :math:`w_i/\alpha_i`, less what it would be were nothing lost."""
        top = max(scores, key=lambda score: score.mid())
        total = sum(((score - top).exp() for score in scores), balls.ball(0))
        losses = []
        for i, share in self.shares.items():
            fall = top - scores[i]
            # Beyond this exp leaves what balls can hold; the promise is broken long before.
            losses.append(balls.ball(math.inf) if fall > 1e6 else balls.ball(share) * total * fall.exp())
        return functools.reduce(lambda a, b: a.max(b), losses) - balls.ball(self.whole)

    def picture(self) -> Chart:
        places = range(len(self.keys))
        wanted = [self.shares.get(i, 0.0) / self.whole for i in places]
        series = {"asked": (places, wanted), "given": (places, self.attention.tolist())}
        return Chart("Weights asked of one query, and given by it", "key", "weight", series, marks="bars")

    def as_module(self) -> Mean:
        return Mean(self.query, self.keys)


class Mean(nn.Module):
    """Values averaged by the weights that a fixed query gives fixed keys."""

    query: Tensor
    keys: Tensor

    def __init__(self, query: Float[Tensor, " d"], keys: Float[Tensor, "n d"]) -> None:
        super().__init__()
        self.register_buffer("query", query.clone())
        self.register_buffer("keys", keys.clone())

    def forward(self, values: Float[Tensor, "*batch n e"]) -> Float[Tensor, "*batch e"]:
        weights = torch.softmax(self.keys.double() @ self.query.double(), -1)
        return weights.to(values.dtype) @ values


@dataclass(frozen=True, eq=False)
class CopyQuery(Query):
    """A query that looks at one key. A shortest one holds the proof that none is shorter than `lower_bound`."""

    target: int
    lower_bound: float = 0.0
    dual: Float[Tensor, " n"] | None = None

    @property
    def shares(self) -> Mapping[int, float]:
        return {self.target: 1.0}

    @property
    def promise(self) -> str:
        return (
            f"key {self.target} gets a weight of at least 1/(1 + {self.eps:g}): "
            f"the other weights are at most {self.eps:g} of its own"
        )

    @property
    def gap(self) -> float:
        """How much longer the query may be than the shortest, relatively: proved. Infinite where none was asked for."""
        if self.norm == 0.0:
            return 0.0
        if self.lower_bound == 0.0:
            return math.inf
        with balls.precision(128):
            return balls.upper(balls.norm(balls.vector(self.query)) / balls.ball(self.lower_bound) - 1)

    def verify(self) -> Proof:
        proof = super().verify()
        if self.lower_bound == 0.0:
            return proof
        proved = 0.0 if self.dual is None else least_length(self.keys, self.target, self.eps, self.dual)
        step = f"by weak duality every such query is at least {proved:.17g} long, and this one {self.norm:.17g}"
        if proved < self.lower_bound:
            step = f"the dual proves a length of {proved:.17g} only, not {self.lower_bound:.17g}"
        achieved = proof.achieved if proved >= self.lower_bound else math.inf
        return Proof(proof.promise, proof.bound, achieved, (*proof.steps, step))

    def picture(self) -> Chart:
        """What the other keys get, over what the target gets, as the query grows: it falls as fast as exp."""
        scores = self.keys.double() @ self.query.double()
        others = (scores - scores[self.target])[torch.arange(len(scores)) != self.target]
        parts = [i / 20 for i in range(26)]
        lengths = [part * self.norm for part in parts]
        left = [float((part * others).exp().sum()) for part in parts]
        series = {"the others' weights over the target's": (lengths, left), "promised": (lengths, [self.eps] * 26)}
        title = "A longer query leaves the others less"
        return Chart(title, "length of the query", "ratio of weights", series, log_y=min(left) > 0)


@dataclass(frozen=True, eq=False)
class AverageQuery(Query):
    """A query that looks at some keys equally."""

    subset: tuple[int, ...]

    @property
    def shares(self) -> Mapping[int, float]:
        return dict.fromkeys(self.subset, 1.0)

    @property
    def whole(self) -> float:
        return float(len(self.subset))

    @property
    def promise(self) -> str:
        kept = ", ".join(map(str, self.subset))
        return f"each of keys {kept} gets a weight of at least 1/({len(self.subset)} + {self.eps:g})"


@dataclass(frozen=True, eq=False)
class MixtureQuery(Query):
    """A query that looks at keys in given proportions."""

    weights: Float[Tensor, " n"]

    @property
    def shares(self) -> Mapping[int, float]:
        return {i: weight for i, weight in enumerate(self.weights.tolist()) if weight > 0}

    @property
    def promise(self) -> str:
        return f"each of {len(self.shares)} keys gets at least its weight over 1 + {self.eps:g}"


def copy_query(
    keys: Float[Tensor, "n d"],
    target: int,
    eps: float,
    shortest: bool = False,
    dtype: torch.dtype = torch.float64,
) -> CopyQuery:
    r"""A query that gives one key a weight of at least 1/(1+eps).

    It lies along the target's key, :math:`t = \ln((n-1)/\varepsilon) / \min_j k_t \cdot (k_t - k_j)` times as long: for
    unit keys at a distance r or more, :math:`t = (2/r^2) \ln((n-1)/\varepsilon)`. Where some key reaches as far in that
    direction, and with `shortest=True`, it is the shortest query there is, with a proof of it.

    >>> found = copy_query(torch.eye(3), target=0, eps=0.01, shortest=True)
    >>> round(found.norm, 9), found.gap < 1e-9, bool(found.verify())
    (4.326058014, True, True)
    """
    keys = _checked_keys("copy_query", keys)
    eps = _checked_eps("copy_query", eps)
    target = _checked_index("copy_query: target", target, len(keys))
    weights = torch.zeros(len(keys), dtype=torch.float64)
    weights[target] = 1.0
    goal = _Goal("copy_query", keys, weights, eps, len(keys) - 1, _checked_dtype("copy_query", dtype))

    def made(query: Tensor, dual: Array | None) -> CopyQuery:
        if dual is None:
            return CopyQuery(query, keys, eps, target)
        proof = torch.from_numpy(np.insert(dual, target, 0.0))
        return CopyQuery(query, keys, eps, target, least_length(keys, target, eps, proof), proof)

    return _built(goal, made, closed_form=not shortest)


def average_query(
    keys: Float[Tensor, "n d"], subset: Sequence[int], eps: float, dtype: torch.dtype = torch.float64
) -> AverageQuery:
    r"""A query that gives each of m keys a weight of at least 1/(m+eps), hence within eps/(m+eps) in total variation.

    Before it is rounded to `dtype` it scores them all alike. For orthonormal keys it is
    :math:`\ln(n/\varepsilon) \sum_{i \in S} k_i`. Such a query exists exactly when the affine hull of the subset does
    not meet the convex hull of the other keys.

    >>> average_query(torch.eye(4), subset=(0, 2), eps=0.01).query.tolist()
    [5.991464547107982, 0.0, 5.991464547107982, 0.0]
    """
    keys = _checked_keys("average_query", keys)
    eps = _checked_eps("average_query", eps)
    subset = tuple(_checked_index("average_query: subset", i, len(keys), subset) for i in subset)
    if not subset or len(set(subset)) < len(subset):
        rule = "must name at least one key, and each once"
        raise ParameterError("average_query: subset", list(subset), rule, "try subset=(0, 1)")
    weights = torch.zeros(len(keys), dtype=torch.float64)
    weights[list(subset)] = 1 / len(subset)
    dtype = _checked_dtype("average_query", dtype)
    goal = _Goal("average_query", keys, weights, eps / len(subset), len(keys), dtype)
    return _built(goal, lambda query, _: AverageQuery(query, keys, eps, subset))


def mixture_query(
    keys: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | Sequence[float],
    eps: float,
    dtype: torch.dtype = torch.float64,
) -> MixtureQuery:
    r"""A query that gives each key at least its weight over 1 + eps, hence within eps/(1+eps) in total variation.

    Before it is rounded to `dtype` it keeps the ratios of the weights exactly. For orthonormal keys it is
    :math:`\sum_{i \in S} (t + \ln w_i) k_i` with :math:`t = \ln(n/\varepsilon)`. Weights that miss a sum of 1 by at
    most 1e-6 are divided by it.
    """
    keys = _checked_keys("mixture_query", keys)
    eps = _checked_eps("mixture_query", eps)
    weights = _checked_weights(torch.as_tensor(weights).detach().double().cpu(), len(keys))
    goal = _Goal("mixture_query", keys, weights, eps, len(keys), _checked_dtype("mixture_query", dtype))
    return _built(goal, lambda query, _: MixtureQuery(query, keys, eps, weights))


class _Goal(NamedTuple):
    """What is asked: each key at least its weight over 1 + eps, the others a `crowd` to be pushed down."""

    name: str
    keys: Tensor
    weights: Tensor
    eps: float
    crowd: int
    dtype: torch.dtype

    @property
    def asked(self) -> float:
        """The eps of the caller."""
        return self.eps * len(self.kept) if self.name == "average_query" else self.eps

    @property
    def kept(self) -> list[int]:
        return [i for i, weight in enumerate(self.weights.tolist()) if weight > 0]

    @property
    def rest(self) -> list[int]:
        return [i for i, weight in enumerate(self.weights.tolist()) if weight == 0]


class _Ray(NamedTuple):
    """Queries that keep the ratios: `fixed` plus any length along `push`; the longer, the lower all others."""

    fixed: Array
    push: Array
    dual: Array | None = None


Q = TypeVar("Q", bound=Query)


def _built(goal: _Goal, made: Callable[[Tensor, Array | None], Q], closed_form: bool = True) -> Q:
    """The first query that keeps its promise once rounded; else an error that says why there is none."""
    rays: list[_Ray] = []
    best = math.inf
    for ray in _rays(goal, closed_form):
        rays.append(ray)
        found, least = _rounded(ray, goal, goal.dtype, made)
        if found is not None:
            return found
        best = min(best, least)
    for dtype in DTYPES[DTYPES.index(goal.dtype) + 1 :]:
        if any(_rounded(ray, goal, dtype, made)[0] is not None for ray in rays):
            raise _too_coarse(goal, rays, best, dtype)
    raise _refusal(goal, rays, best)


def _rays(goal: _Goal, closed_form: bool) -> Iterator[_Ray]:
    """Where to look, in the units of the keys: in closed form, then by the convex program."""
    rows = scaled(goal.keys)
    back = -exponent(goal.keys)
    tries = [_spanned, _programmed] if closed_form else [_programmed]
    for ray in (attempt(goal, rows) for attempt in tries):
        if ray is not None:
            with np.errstate(over="ignore", under="ignore"):
                yield _Ray(np.ldexp(ray.fixed, back), np.ldexp(ray.push, back), ray.dual)


def _spanned(goal: _Goal, rows: Array) -> _Ray | None:
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
    return _Ray(fixed, max(0.0, float(lengths.max())) * push)


def _programmed(goal: _Goal, rows: Array) -> _Ray | None:
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
    return None if found is None else _Ray(fixed, found.z @ free, found.dual)


def _rounded(
    ray: _Ray, goal: _Goal, dtype: torch.dtype, made: Callable[[Tensor, Array | None], Q]
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


def _too_coarse(goal: _Goal, rays: list[_Ray], best: float, enough: torch.dtype) -> ToleranceUnreachable:
    name, remedy = _plain(goal.dtype), f"use dtype={enough}"
    largest = min(float(np.abs(ray.fixed + ray.push).max()) for ray in rays)
    if largest > torch.finfo(goal.dtype).max:
        rule = f"ends at {torch.finfo(goal.dtype).max:g}, and the query reaches {largest:.3g}"
    else:
        rule = f"is too coarse: rounded to it, the query keeps {_shown(goal, best)} where {_shown(goal)} was asked"
    return ToleranceUnreachable(f"{goal.name}: dtype", name, rule, remedy, best)


def _shown(goal: _Goal, achieved: float | None = None) -> str:
    return f"eps={goal.asked if achieved is None else achieved:.3g}"


def _refusal(goal: _Goal, rays: list[_Ray], best: float) -> Exception:
    """Why no query is returned: a proof that there is none, or what stands in the way of either proof."""
    keys = goal.keys.cpu()
    refuted = impossible(keys, goal.weights, goal.eps)
    if refuted is not None:
        used = [i for i, c in enumerate(refuted.combination) if c != 0]
        if goal.name == "copy_query":
            (target,) = goal.kept
            weights = tuple(max(-c, c * 0) for c in refuted.combination)
            rule = "has a key in the convex hull of the others, so no query scores it above them all"
            others = [i for i in used if i != target]
            remedy = f"move that key, or drop one of keys {others}: it is their mean by the weights on this error"
            return InsideHull("copy_query: target", target, rule, remedy, weights)
        rule = "is out of reach: no query gives these keys such weights"
        if not refuted.wholly:
            rule = "is out of reach: no query keeps these keys' ratios exactly and the others within eps"
        remedy = f"change the weights or one of keys {used}, whose combination on this error proves it"
        asked = goal.kept if goal.name == "average_query" else goal.weights.tolist()
        word = "subset" if goal.name == "average_query" else "weights"
        return OutOfReach(f"{goal.name}: {word}", asked, rule, remedy, refuted.combination)
    if rays and not any(np.isfinite(ray.fixed + ray.push).all() for ray in rays):
        largest = float(keys.double().abs().amax())
        return RangeError(
            f"{goal.name}: keys", f"{largest:.3g} at most", "need a query beyond float64", "scale the keys up"
        )
    missed = hull_distance(keys, goal.weights) if goal.rest else math.inf
    found = f"the best query found reaches {best:.3g}" if math.isfinite(best) else "no query was found"
    rule = (
        f"can be neither kept nor refuted: in {_plain(goal.dtype)} {found}, and the nearest combination of the other "
        f"keys misses by {missed:.3g} of the largest entry"
    )
    remedy = "move the kept keys away from the hull of the others, or drop the keys nearest to them"
    return ToleranceUnreachable(f"{goal.name}: eps", goal.asked, rule, remedy, best)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked_keys(name: str, keys: Tensor) -> Tensor:
    if keys.dim() != 2 or 0 in keys.shape:
        rule = "must be n keys of d numbers, (n, d), at least one of each"
        raise ShapeError(f"{name}: keys", tuple(keys.shape), rule, "pass one head's keys, such as k[0, 0]")
    if keys.dtype not in DTYPES:
        raise DtypeError(f"{name}: keys", keys.dtype, "must be floating point", "pass keys.double()")
    finite = keys.isfinite().all(-1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        rule = "holds a number that is nan or infinite"
        raise NonFiniteError(f"{name}: keys[{row}]", keys[row].tolist(), rule, "drop that key or mend it")
    return keys.detach().clone()


def _checked_eps(name: str, eps: float) -> float:
    eps = float(eps)
    if not 0 < eps < 1:
        raise ParameterError(f"{name}: eps", eps, "must lie in (0, 1)", "try eps=0.01")
    return eps


def _checked_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        choices = ", ".join(map(_plain, DTYPES))
        raise DtypeError(f"{name}: dtype", dtype, f"must be one of {choices}", "use dtype=torch.float64")
    return dtype


def _checked_index(name: str, index: int, n: int, within: Sequence[int] | None = None) -> int:
    index = operator.index(index)
    if not 0 <= index < n:
        value = index if within is None else list(within)
        raise ParameterError(name, value, f"must lie in 0..{n - 1}, the rows of keys", "count keys from 0")
    return index


def _checked_weights(weights: Tensor, n: int) -> Tensor:
    name = "mixture_query: weights"
    if weights.shape != (n,):
        raise ShapeError(name, tuple(weights.shape), f"must be one weight for each of {n} keys", f"pass shape ({n},)")
    if not bool(weights.isfinite().all()):
        raise NonFiniteError(name, weights.tolist(), "hold a number that is nan or infinite", "mend it")
    if bool((weights < 0).any()):
        raise ParameterError(name, weights.tolist(), "must not be negative", "a key left out has weight 0")
    total = float(weights.sum())
    if abs(total - 1) > SUM_TOLERANCE:
        rule = f"must sum to 1 within {SUM_TOLERANCE:g}, and sum to {total:.9g}"
        raise ParameterError(name, weights.tolist(), rule, "divide them by their sum")
    return weights / total
