"""Plain language modelling: a document from its start, as far as the block reaches, every character a target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from avow.parameters import declared
from avow.training.corpus import Line, check_some
from avow.training.vocabulary import PAD, Vocabulary


class LanguageExamples:
    """Documents read from their start; the loss counts every character but the first."""

    @declared()
    def __init__(self, documents: Sequence[Line], vocabulary: Vocabulary, block: int) -> None:
        check_some("documents", documents)
        # The last character is a target and no input, so one more than the block is used.
        rows = [vocabulary.encode(document.text, document.where)[: block + 1] for document in documents]
        self._sizes = np.array([len(row) for row in rows], dtype=np.int64)
        # One place of padding more than the longest: what would follow a document of one character.
        self._rows = np.full((len(rows), int(self._sizes.max()) + 1), PAD, dtype=np.int64)
        for place, row in enumerate(rows):
            self._rows[place, : len(row)] = row

    def __len__(self) -> int:
        return len(self._rows)

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them; the same in every epoch."""
        # A document of one character is read, and has no target.
        read = np.maximum(self._sizes[indices] - 1, 1)
        width = int(read.max())
        inputs = np.where(np.arange(width)[None, :] < read[:, None], self._rows[indices, :width], PAD)
        return inputs, self._rows[indices, 1 : width + 1]
