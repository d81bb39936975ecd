"""Fine-tuning examples, `question M answer M`: the second mask is how a model says that its answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from avow.errors import InputError
from avow.parameters import declared
from avow.training.corpus import Question, check_some
from avow.training.vocabulary import MASK, PAD, Vocabulary

Loss = Literal["answer", "all"]


@declared()
def prompt(question: str, vocabulary: Vocabulary, where: str = "question") -> Int[np.ndarray, "n"]:
    """What a model reads before it answers: `question M`."""
    return np.append(vocabulary.encode(question, where), MASK)


class QuestionExamples:
    """Questions with their answers, tokenised once; the loss counts the answer and its end alone, or everything."""

    @declared()
    def __init__(
        self, questions: Sequence[Question], vocabulary: Vocabulary, block: int, loss: Loss = "answer"
    ) -> None:
        check_some("questions", questions)
        rows = [_example(question, vocabulary, block) for question in questions]
        width = max(len(row) for row in rows)
        self._rows = np.full((len(rows), width), PAD, dtype=np.int64)
        self._targets = np.full((len(rows), width - 1), PAD, dtype=np.int64)
        self._sizes = np.array([len(row) for row in rows])
        for place, row in enumerate(rows):
            self._rows[place, : len(row)] = row
            # The first mask is read at this position, and what it predicts is the answer's first character.
            first = int(np.argmax(row == MASK)) if loss == "answer" else 0
            self._targets[place, first : len(row) - 1] = row[first + 1 :]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them; the same in every epoch."""
        width = int(self._sizes[indices].max()) - 1
        inputs = self._rows[indices, :width].copy()
        # The last mask is a target, never an input.
        inputs[np.arange(width)[None, :] >= self._sizes[indices][:, None] - 1] = PAD
        return inputs, self._targets[indices, :width].copy()


def _example(question: Question, vocabulary: Vocabulary, block: int) -> Int[np.ndarray, "n"]:
    asked = prompt(question.question, vocabulary, question.where)
    answer = vocabulary.encode(question.answer, question.where)
    if len(asked) + len(answer) > block:
        rule = f"needs {len(asked) + len(answer)} positions with its question, and the block has {block}"
        raise InputError(
            f"{question.where}: answer", repr(question.answer), rule, "use a larger block or drop the line"
        )
    return np.concatenate([asked, answer, [MASK]])
