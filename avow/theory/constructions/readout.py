"""What heads read of given keys and values: quickly in float64, and enclosed in balls for whoever must be sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from avow.numerics import intervals
from avow.numerics.intervals import Enclosure

if TYPE_CHECKING:
    from flint import arb


@dataclass(frozen=True, eq=False)
class Readout:
    """What each head scores, weighs and reads, to float64's precision."""

    scores: Float[Tensor, "h n"]
    weights: Float[Tensor, "h n"]
    outputs: Float[Tensor, "h e"]

    def gap(self, kept: Sequence[int]) -> float:
        """How far the first head scores the keys it is to keep above all others; infinite where there are none."""
        scores = self.scores[0].tolist()
        others = [score for i, score in enumerate(scores) if i not in kept]
        return min(scores[i] for i in kept) - max(others, default=-math.inf)


@dataclass(frozen=True)
class Enclosed:
    """The heads' average, each number between two floats: proved, whatever the rounding."""

    weights: tuple[Enclosure, ...]
    output: tuple[Enclosure, ...]
    gap: Enclosure
    # The largest error of the answers that were given, in units of the largest value norm: at most this.
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
    bits: int = 128,
) -> Enclosed:
    """Real arithmetic on the numbers as they are, and how far some computed answers are from it.

    `kept` are the keys that the first head is to read; the gap is theirs.

    >>> found = enclosed(torch.zeros(1, 2), torch.eye(2), torch.eye(2), torch.tensor([[0.5, 0.5]]), kept=(0,))
    >>> found.weights, found.error < 1e-30
    (((0.5, 0.5), (0.5, 0.5)), True)
    """
    with intervals.precision(bits):
        heads = len(queries)
        rows, columns = intervals.matrix(keys), intervals.matrix(values.mT)
        unit = intervals.most(intervals.norm(value) for value in intervals.matrix(values))
        averaged = [intervals.ball(0)] * len(rows)
        error, gap = 0.0, (0.0, 0.0)
        for head, (query, answer) in enumerate(zip(intervals.matrix(queries), intervals.matrix(answers), strict=True)):
            scores = [intervals.dot(row, query) for row in rows]
            weights = intervals.softmax(scores)
            if head == 0:
                gap = _gap(scores, kept)
            averaged = [total + weight / heads for total, weight in zip(averaged, weights, strict=True)]
            off = intervals.norm(
                [intervals.dot(weights, column) - x for column, x in zip(columns, answer, strict=True)]
            )
            # Values that are all zero are read as zero, and so is the unit: what is off then has no bound.
            error = max(error, intervals.upper(off / unit) if unit > 0 else 0.0 if off == 0 else math.inf)
        output = tuple(intervals.ends(intervals.dot(averaged, column)) for column in columns)
        return Enclosed(tuple(map(intervals.ends, averaged)), output, gap, error)


def _gap(scores: list[arb], kept: Sequence[int]) -> Enclosure:
    others = [score for i, score in enumerate(scores) if i not in kept]
    if not others:
        return math.inf, math.inf
    return intervals.ends(intervals.least(scores[i] for i in kept) - intervals.most(others))
