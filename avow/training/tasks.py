"""From a corpus to the examples of a task: one kind, or several kinds in fixed shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from avow.errors import InputError, ParameterError
from avow.parameters import Rule, at_least, declared, param
from avow.training.data import PAD, Corpus, Vocabulary, check_not_empty
from avow.training.examples import (
    ClozeExamples,
    Examples,
    LanguageExamples,
    Loss,
    Numbers,
    QuestionExamples,
    Rows,
    Spans,
    SpansAfterName,
)

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

    @property
    def weights(self) -> dict[str, int]:
        return {"lm": self.lm, "span": self.span, "cloze": self.cloze, "questions": self.questions}


class Mixture:
    """Several kinds of examples as one; an epoch reads each of them once."""

    @declared()
    def __init__(self, parts: Sequence[Examples]) -> None:
        check_not_empty("parts", parts)
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them."""
        kind = np.searchsorted(self._ends, indices, side="right")
        pieces = []
        for number, part in enumerate(self._parts):
            (mine,) = np.nonzero(kind == number)
            if len(mine):
                begin = int(self._ends[number]) - len(part)
                pieces.append((mine, *part.rows(epochs[mine], indices[mine] - begin)))
        width = max(inputs.shape[1] for _, inputs, _ in pieces)
        whole = np.full((2, len(indices), width), PAD, dtype=np.int64)
        for mine, *both in pieces:
            for side, rows in enumerate(both):
                whole[side, mine, : rows.shape[1]] = rows
        return whole[0], whole[1]


class Repeated:
    """A kind of example read in a cycle, `count` of them an epoch: none a second time before all a first."""

    def __init__(self, part: Examples, count: int) -> None:
        self._part, self._count = part, count

    def __len__(self) -> int:
        return self._count

    def rows(self, epochs: Numbers, indices: Numbers) -> tuple[Rows, Rows]:
        """Inputs and targets, padded to the longest of them; every cycle is an epoch of the part, with new draws."""
        return self._part.rows(*np.divmod(epochs * self._count + indices, len(self._part)))


@declared()
def weighted(parts: Sequence[Examples], weights: Sequence[int]) -> Mixture:
    """Several kinds as one, in shares proportional to whole weights; one weight is as many as the largest kind has."""
    check_not_empty("parts", parts)
    if len(weights) != len(parts) or min(weights) < 1:
        rule = f"must be a whole number of at least 1 for each of the {len(parts)} parts"
        raise ParameterError("weights", list(weights), rule, "leave out a part that is not to be read")
    largest = max(len(part) for part in parts)
    return Mixture([Repeated(part, weight * largest) for part, weight in zip(parts, weights, strict=True)])


def examples_of(
    task: str, corpus: Corpus, vocabulary: Vocabulary, block: int, seed: int, spans: Spans, loss: Loss, recipe: Recipe
) -> Examples:
    """Documents with a span to restore (pretrain), questions to answer (finetune), both (mixed), a recipe (cloze)."""
    simple = {"pretrain": ("span",), "finetune": ("questions",), "mixed": ("span", "questions")}
    weights = {kind: weight for kind, weight in recipe.weights.items() if weight}
    kinds = simple.get(task, tuple(weights))
    if not corpus.documents and kinds != ("questions",):
        raise InputError("task", task, "needs documents, and the corpus has none", "add a wiki.txt")
    if not corpus.train and "questions" in kinds:
        raise InputError("task", task, "needs questions, and the corpus has none", "add a train.tsv")

    def part(kind: str) -> Examples:
        text = corpus.documents, vocabulary, block
        if kind == "questions":
            return QuestionExamples(corpus.train, vocabulary, block, loss)
        if kind == "lm":
            return LanguageExamples(*text)
        if kind == "cloze":
            return ClozeExamples(*text, seed, recipe.window, recipe.bare, spans)
        return SpansAfterName(*text, seed, spans, recipe.after_name if task == "cloze" else 0.0)

    parts = [part(kind) for kind in kinds]
    if task == "cloze":
        return weighted(parts, list(weights.values()))
    return parts[0] if len(parts) == 1 else Mixture(parts)
