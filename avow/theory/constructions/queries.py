r"""One query that copies a key's value, averages some, or mixes them in any proportion, over the keys as they are.

All three ask for weights :math:`w` over the keys, zero on the rest, and keep one promise in real arithmetic on the
numbers returned, for every kept key:

.. math:: \alpha_i \ge \frac{w_i}{1+\varepsilon}, \quad \alpha = softmax(K q)

What the kept keys lack the others have, so the total variation distance of :math:`\alpha` from :math:`w` is at most
:math:`\varepsilon/(1+\varepsilon)`. Copying is :math:`w_t = 1` [claims copy-gap, copy-separated]; averaging m keys is
:math:`w_i = 1/m`, promised with :math:`\varepsilon/m` so that :math:`\alpha_i \ge 1/(m+\varepsilon)`
[claim average-two]; the rest is [claim mixture-any].

The query is :math:`K_S^+(t \mathbf 1 + \ln w)`, with the least t that pushes every other key down in closed form. If
those keys' span does not separate them from the others, a convex program does (`query_search`); if nothing does, the
error carries the combination of keys that proves it.

`read` and `enclosed` say what heads read of given keys and values: quickly in float64, and in balls.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from avow.core.chart import Chart
from avow.errors import NonFiniteError, ParameterError, ShapeError
from avow.numerics import intervals
from avow.numerics.intervals import Enclosure, frobenius, longest, stacked
from avow.parameters import as_float, declared
from avow.theory.constructions.construction import Construction, Proof, checked_eps, checked_index, checked_matrix
from avow.theory.constructions.query_search import Goal, find_query, least_length

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
    def wanted(self) -> Float[Tensor, " n"]:
        """The weights of all keys that are wanted."""
        shares = self.shares
        return torch.tensor([shares.get(i, 0.0) / self.whole for i in range(len(self.keys))], dtype=torch.float64)

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

    @property
    def estimate(self) -> float:
        """The least eps that this query keeps, to float64's precision; `verify` proves it."""
        scores = self.keys.double() @ self.query.double()
        lost = torch.logsumexp(scores, -1) - scores
        return max(share * float(lost[i].exp()) for i, share in self.shares.items()) - self.whole

    def tensors(self) -> dict[str, Tensor]:
        return {"query": self.query, "keys": self.keys}

    def verify(self) -> Proof:
        if not bool(self.query.isfinite().all()):
            return Proof(self.promise, self.bound, math.inf, ("the query is not finite",))
        keys, query = intervals.grid(self.keys), intervals.grid(self.query[:, None])

        def excess() -> float | None:
            """The largest w_i/α_i, less what it would be were nothing lost."""
            scores = (keys * query).entries()
            top = max(scores, key=lambda score: score.mid())
            total = intervals.total((score - top).exp() for score in scores)
            losses = []
            for i, share in self.shares.items():
                fall = top - scores[i]
                # Beyond this exp leaves what balls can hold; the promise is broken long before.
                losses.append(intervals.ball(math.inf) if fall > 1e6 else intervals.ball(share) * total * fall.exp())
            ball = intervals.most(losses) - intervals.ball(self.whole)
            return intervals.upper(ball) if ball <= self.eps or ball > self.eps else None

        achieved = intervals.decided(excess, bits=128)
        steps = (
            f"the scores of {len(self.keys)} keys, as given, with the query as returned: balls around exact floats",
        )
        return Proof(self.promise, self.bound, math.inf if achieved is None else achieved, steps)

    def picture(self) -> Chart:
        places = range(len(self.keys))
        series = {"asked": (places, self.wanted.tolist()), "given": (places, self.attention.tolist())}
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
        """How much longer the query may be than the shortest, relatively: proved. Infinite if none was asked for."""
        if self.norm == 0.0:
            return 0.0
        if self.lower_bound == 0.0:
            return math.inf
        with intervals.precision(128):
            return intervals.upper(frobenius(intervals.grid(self.query[None])) / intervals.ball(self.lower_bound) - 1)

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
        keys = ", ".join(map(str, self.subset))
        return f"each of keys {keys} gets a weight of at least 1/({len(self.subset)} + {self.eps:g})"


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


@declared("copy_query")
def copy_query(
    keys: Float[Tensor, "n d"], target: int, eps: float, shortest: bool = False, dtype: torch.dtype = torch.float64
) -> CopyQuery:
    r"""A query that gives one key a weight of at least 1/(1+eps).

    It lies along the target's key, :math:`t = \ln((n-1)/\varepsilon) / \min_j k_t \cdot (k_t - k_j)` times as long: for
    unit keys at a distance r or more, :math:`t = (2/r^2) \ln((n-1)/\varepsilon)`. Where some key reaches as far in that
    direction, and with `shortest=True`, it is the shortest query there is, with a proof of it.

    Args:
        keys: the keys, (n, d).
        target: which key gets the weight.
        eps: ε, between 0 and 1.
        shortest: whether to find the shortest query, with a proof that it is.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The query, with its bound and a proof.

    Raises:
        InsideHull: the key is a mean of the others; the error has the proof.
        ParameterError: eps or the index is out of range.

    >>> import torch
    >>> from avow.theory.constructions import copy_query
    >>> answer = copy_query(torch.eye(3), target=0, eps=0.01, shortest=True)
    >>> round(answer.norm, 9), answer.gap < 1e-9, bool(answer.verify())
    (4.326058014, True, True)
    """
    keys, eps = checked_matrix("copy_query: keys", keys), checked_eps("copy_query", eps)
    target = checked_index("copy_query: target", target, len(keys))
    promise = CopyQuery(torch.empty(0), keys, eps, target)
    goal = Goal("copy_query", "target", target, promise, len(keys) - 1, dtype)
    query, weights = find_query(goal, closed_form=not shortest)
    if weights is None:
        return replace(promise, query=query)
    dual = torch.from_numpy(np.insert(weights, target, 0.0))
    return CopyQuery(query, keys, eps, target, least_length(keys, target, eps, dual), dual)


@declared("average_query")
def average_query(
    keys: Float[Tensor, "n d"], subset: Sequence[int], eps: float, dtype: torch.dtype = torch.float64
) -> AverageQuery:
    r"""A query that gives each of m keys a weight of at least 1/(m+eps), hence within eps/(m+eps) in total variation.

    Before it is rounded to `dtype` it scores them all alike. For orthonormal keys it is
    :math:`\ln(n/\varepsilon) \sum_{i \in S} k_i`. Such a query exists exactly when the affine hull of the subset does
    not meet the convex hull of the other keys.

    Args:
        keys: the keys, (n, d).
        subset: which keys share the weight.
        eps: ε, between 0 and 1.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The query, with its bound and a proof.

    Raises:
        InsideHull: no such query exists; the error has the proof.
        ParameterError: eps or an index is out of range.

    >>> import torch
    >>> from avow.theory.constructions import average_query
    >>> average_query(torch.eye(4), subset=(0, 2), eps=0.01).query.tolist()
    [5.991464547107982, 0.0, 5.991464547107982, 0.0]
    """
    keys, eps = checked_matrix("average_query: keys", keys), checked_eps("average_query", eps)
    subset = tuple(checked_index("average_query: subset", i, len(keys), subset) for i in subset)
    if not subset or len(set(subset)) < len(subset):
        rule = "must name at least one key, and each once"
        raise ParameterError("average_query: subset", list(subset), rule, "try subset=(0, 1)")
    promise = AverageQuery(torch.empty(0), keys, eps, subset)
    query, _ = find_query(Goal("average_query", "subset", sorted(subset), promise, len(keys), dtype))
    return replace(promise, query=query)


@declared("mixture_query")
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

    Args:
        keys: the keys, (n, d).
        weights: the weight of each key, summing to 1 to within 1e-6.
        eps: ε, between 0 and 1.
        dtype: the type that the result is rounded to; its rounding is in the bound.

    Returns:
        The query, with its bound and a proof.

    Raises:
        OutOfReach: no query gives such weights; the error has the proof.
        ParameterError: eps or a weight is out of range.

    >>> import torch
    >>> from avow.theory.constructions import mixture_query
    >>> bool(mixture_query(torch.eye(3), [0.5, 0.3, 0.2], eps=0.01).verify())
    True
    """
    keys, eps = checked_matrix("mixture_query: keys", keys), checked_eps("mixture_query", eps)
    numbers = weights.double().tolist() if isinstance(weights, Tensor) else [as_float(x) for x in weights]
    shape = tuple(weights.shape) if isinstance(weights, Tensor) else (len(numbers),)
    if shape != (len(keys),):
        rule, remedy = f"must be one weight for each of {len(keys)} keys", f"pass shape ({len(keys)},)"
        raise ShapeError("mixture_query: weights", shape, rule, remedy)
    if not all(map(math.isfinite, numbers)):
        rule = "hold a number that is nan or infinite"
        raise NonFiniteError("mixture_query: weights", numbers, rule, "give finite weights")
    if min(numbers) < 0:
        raise ParameterError("mixture_query: weights", numbers, "must not be negative", "a key left out has weight 0")
    total = math.fsum(numbers)
    if abs(total - 1) > SUM_TOLERANCE:
        rule = f"must sum to 1 within {SUM_TOLERANCE:g}, and sum to {total:.9g}"
        raise ParameterError("mixture_query: weights", numbers, rule, "divide them by their sum")
    promise = MixtureQuery(torch.empty(0), keys, eps, torch.tensor(numbers, dtype=torch.float64) / total)
    query, _ = find_query(Goal("mixture_query", "weights", promise.weights.tolist(), promise, len(keys), dtype))
    return replace(promise, query=query)


class Readout(NamedTuple):
    """What each head scores, weighs and reads, to float64's precision."""

    scores: Float[Tensor, "h n"]
    weights: Float[Tensor, "h n"]
    outputs: Float[Tensor, "h e"]

    def gap(self, kept: Sequence[int]) -> float:
        """How far the first head scores the keys it is to keep above all others; infinite if there are none."""
        scores = self.scores[0].tolist()
        others = [score for i, score in enumerate(scores) if i not in kept]
        return min(scores[i] for i in kept) - max(others, default=-math.inf)


class Enclosed(NamedTuple):
    """The heads' average, each number between two floats: proved, whatever the rounding.

    `error` bounds the largest error of the answers that were given, in units of the largest value norm.
    """

    weights: tuple[Enclosure, ...]
    output: tuple[Enclosure, ...]
    gap: Enclosure
    error: float


def read(queries: Float[Tensor, "h d"], keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"]) -> Readout:
    """Attention of some queries over the keys, unscaled.

    >>> read(torch.tensor([[9.0, 0.0]]), torch.eye(2), torch.eye(2)).gap(kept=(0,))
    9.0
    """
    scores = queries.double() @ keys.double().mT
    weights = torch.softmax(scores, -1)
    return Readout(scores, weights, weights @ values.double())


def enclosed(
    queries: Float[Tensor, "h d"],
    keys: Float[Tensor, "n d"],
    values: Float[Tensor, "n e"],
    answers: Float[Tensor, "h e"],
    kept: Sequence[int],
) -> Enclosed:
    """Real arithmetic on the numbers as they are, and how far some computed answers are from it.

    `kept` are the keys that the first head is to read; the gap is theirs.

    >>> answer = enclosed(torch.zeros(1, 2), torch.eye(2), torch.eye(2), torch.tensor([[0.5, 0.5]]), kept=(0,))
    >>> answer.weights, answer.error < 1e-30
    (((0.5, 0.5), (0.5, 0.5)), True)
    """
    with intervals.precision(128):
        scores = (intervals.grid(queries) * intervals.grid(keys).transpose()).tolist()
        weights, read_from = stacked(map(intervals.softmax, scores)), intervals.grid(values)
        off, unit = longest(weights * read_from - intervals.grid(answers)), longest(read_from)
        averaged = intervals.grid(torch.full((1, len(queries)), 1.0)) * weights / len(queries)
        # Values that are all zero are read as zero, and so is the unit: what is off then has no bound.
        error = intervals.upper(off / unit) if unit > 0 else 0.0 if off == 0 else math.inf
        gap, others = (math.inf, math.inf), [score for i, score in enumerate(scores[0]) if i not in kept]
        if others:
            gap = intervals.ends(intervals.least(scores[0][i] for i in kept) - intervals.most(others))
        averages, output = (tuple(map(intervals.ends, row.entries())) for row in (averaged, averaged * read_from))
        return Enclosed(averages, output, gap, error)
