r"""Span corruption: a document loses one span and the model writes it back.

A document is cut to a random length L, one contiguous span of m characters is taken out, and the example reads
`prefix M suffix M masked`. The law, exactly:

.. math:: L \sim \mathcal{U}\{4, …, \min(D, \lfloor 7/8 · block \rfloor)\}, \quad E[m \mid L] = \max(1, L/4), \quad
          start \sim \mathcal{U}\{0, …, L − m\}

Targets are the next characters, all of them; padding is none. An example depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from avow.errors import ParameterError
from avow.parameters import at_least, between, check_parameters, declared, param
from avow.training.corpus import Line, check_some
from avow.training.draws import uniform
from avow.training.vocabulary import MASK, PAD, Vocabulary


@dataclass(frozen=True)
class Spans:
    """How documents are cut and masked."""

    shortest: int = param(4, at_least(4), "characters a cut document keeps at least")
    longest: float = param(7 / 8, between(0, 1), "share of the block a cut document fills at most")
    masked: float = param(0.25, between(0, 0.5), "share of a cut document that is masked, on average")

    def __post_init__(self) -> None:
        check_parameters("spans", Spans, {"shortest": self.shortest, "longest": self.longest, "masked": self.masked})

    def limit(self, block: int) -> int:
        """The longest cut: its two masks and the shift by one must still fit the block."""
        return min(int(self.longest * block), block - 1)


@dataclass(frozen=True)
class Cut:
    """Where documents are cut: `length` characters are kept, `masked` of them from `start` on are taken out."""

    length: Int[np.ndarray, "b"]
    masked: Int[np.ndarray, "b"]
    start: Int[np.ndarray, "b"]


class SpanExamples:
    """Examples of span corruption over documents that are tokenised once."""

    @declared()
    def __init__(
        self, documents: Sequence[Line], vocabulary: Vocabulary, block: int, seed: int, spans: Spans | None = None
    ) -> None:
        self.spans = spans or Spans()
        if self.spans.limit(block) < 4:
            rule = f"leaves {self.spans.limit(block)} characters of a document, fewer than 4"
            raise ParameterError("block", block, rule, "use a larger block or a larger spans.longest")
        check_some("documents", documents)
        self.seed, self.block = seed, block
        numbers = [vocabulary.encode(document.text, document.where) for document in documents]
        self._sizes = np.array([len(x) for x in numbers], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._text = np.concatenate(numbers)

    def __len__(self) -> int:
        return len(self._sizes)

    def cut(self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]) -> Cut:
        """What is kept and what is masked in some examples."""
        where, how_long, round_up, how_many = uniform(self.seed, epochs, indices, 4, 1, 2, 3)
        # A document shorter than the shortest cut is kept whole.
        most = np.minimum(self._sizes[indices], self.spans.limit(self.block))
        least = np.minimum(self.spans.shortest, most)
        length = least + (how_long * (most - least + 1)).astype(np.int64)
        # The width is uniform on [1, 2·share·L − 1], of mean share·L, and rounded to a neighbour at random, which
        # keeps the mean. It is at most L − 1, since share ≤ 1/2, and never below 1.
        width = 1 + how_many * np.maximum(2 * self.spans.masked * length - 2, 0)
        masked = np.floor(width + round_up).astype(np.int64)
        return Cut(length, masked, (where * (length - masked + 1)).astype(np.int64))

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them."""
        cut = self.cut(epochs, indices)
        length, masked, start = (x[:, None] for x in (cut.length, cut.masked, cut.start))  # (b, 1) each
        place = np.arange(int(cut.length.max()) + 2)[None, :]  # (1, n + 1)
        tail = length - masked + 2
        # Where each place of `prefix M suffix M masked` comes from in the document.
        source = np.where(place < start, place, np.where(place < tail, place - 1 + masked, place - tail + start))
        inside = place < length + 2
        reach = self._starts[indices][:, None] + np.where(inside, source, 0)
        whole = np.where(inside, self._text[np.clip(reach, 0, len(self._text) - 1)], PAD)
        whole[(place == start) | (place == tail - 1)] = MASK
        # The last character is a target, never an input.
        return np.where(place <= length, whole, PAD)[:, :-1], whole[:, 1:]
