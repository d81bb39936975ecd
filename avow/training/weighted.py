"""Kinds of examples in fixed shares: an epoch holds exactly as many of each as its weight says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from avow.errors import ParameterError
from avow.parameters import Rule, at_least, declared, param
from avow.training.batches import Examples, Mixture
from avow.training.corpus import check_some

fraction = Rule("must be from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class Recipe:
    """How many parts of each kind the task `cloze` reads, and how it cuts them."""

    lm: int = param(1, at_least(0), "parts of documents from their start")
    span: int = param(1, at_least(0), "parts of documents with a span to restore")
    cloze: int = param(2, at_least(0), "parts of names with a capitalised span to remember")
    questions: int = param(1, at_least(0), "parts of training questions")
    after_name: float = param(0.7, fraction, "share of spans that are kept off the name")
    window: int = param(24, at_least(0), "characters that a cloze keeps on each side at most")
    bare: float = param(0.3, fraction, "share of clozes that keep no characters beside")


class Repeated:
    """A kind of example read round and round, `count` of them an epoch: none a second time before all a first."""

    def __init__(self, part: Examples, count: int) -> None:
        self._part, self._count = part, count

    def __len__(self) -> int:
        return self._count

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them; every round is an epoch of the part, with draws anew."""
        return self._part.rows(*np.divmod(epochs * self._count + indices, len(self._part)))


@declared()
def weighted(parts: Sequence[Examples], weights: Sequence[int]) -> Mixture:
    """Several kinds as one, in shares proportional to whole weights; one weight is as many as the largest kind has."""
    check_some("parts", parts)
    if len(weights) != len(parts) or min(weights) < 1:
        rule = f"must be a whole number of at least 1 for each of the {len(parts)} parts"
        raise ParameterError("weights", list(weights), rule, "leave out a part that is not to be read")
    largest = max(len(part) for part in parts)
    return Mixture([Repeated(part, weight * largest) for part, weight in zip(parts, weights, strict=True)])
