"""The knowledge experiment: models read about people, are asked where these were born, and what came of it.

Every arm (`knowledge_arms`) is an ordinary run in a folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.training.corpus import Corpus
from avow.training.evaluation import Evaluation, Outcome, majority
from avow.training.knowledge_arms import NOT_READ, Arm
from avow.training.log import read_log
from avow.training.tasks import corpus_of


@dataclass(frozen=True)
class Result:
    """What came of an arm: its answers, or in words why there are none."""

    arm: Arm
    evaluation: Evaluation | None = None
    parameters: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table: the same arm with every seed. Where a figure is of one run, it is of the middle one."""

    label: str
    results: tuple[Result, ...]

    @property
    def finished(self) -> list[Result]:
        """The results that have answers, the least accurate first."""
        return sorted((r for r in self.results if r.evaluation), key=lambda r: _evaluation(r).right)

    @property
    def middle(self) -> Result | None:
        """The run of middling accuracy, the lower one of two."""
        found = self.finished
        return found[(len(found) - 1) // 2] if found else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest accuracy, where there are several."""
        found = [_evaluation(result).accuracy for result in self.finished]
        return (found[0], found[-1]) if len(found) > 1 else None

    def plain(self) -> dict[str, Any]:
        """The row as JSON has it."""
        runs = []
        for result in self.results:
            said = {} if result.evaluation is None else result.evaluation.plain()
            runs.append({"folder": result.arm.name, "seed": result.arm.seed, "why": result.why, **said})
            runs[-1] |= {name: getattr(result, name) for name in ("parameters", "seconds", "cpu_seconds")}
        middle = self.middle
        figures: dict[str, Any] = {"seed": None}
        if middle is not None and middle.evaluation is not None:
            found = middle.evaluation
            figures = {"seed": middle.arm.seed, "right": found.right, "asked": found.asked, "accuracy": found.accuracy}
            figures |= {"interval": list(found.interval), "accuracy_at_half": found.accuracy_at(0.5)}
            figures |= {"parameters": middle.parameters, "seconds": middle.seconds, "cpu_seconds": middle.cpu_seconds}
        return {
            "arm": self.label,
            **figures,
            "spread": None if self.spread is None else list(self.spread),
            "runs": runs,
        }


@dataclass(frozen=True)
class Experiment:
    """Everything that came of it; `folder` holds one run for each arm."""

    corpus: str
    folder: Path
    majority: Evaluation
    rows: tuple[Row, ...]

    @staticmethod
    def of(corpus: str, folder: str | Path, results: Sequence[Result]) -> Experiment:
        """Results in the rows of a table, beside the majority's."""
        read = corpus_of(corpus)
        labels = dict.fromkeys(result.arm.label for result in results)
        rows = (Row(label, tuple(r for r in results if r.arm.label == label)) for label in labels)
        return Experiment(corpus, Path(folder), majority(read.train, read.dev), tuple(rows))

    @property
    def failures(self) -> list[Result]:
        return [result for row in self.rows for result in row.results if result.evaluation is None]

    @property
    def read(self) -> list[Row]:
        """The pretrained rows that came to an end."""
        return [row for row in self.rows if row.label != NOT_READ and row.middle is not None]

    @property
    def best(self) -> Row | None:
        """The pretrained row whose middle run is right most often."""
        return max(self.read, key=lambda row: _evaluation(row.middle).right, default=None)

    @property
    def not_read(self) -> Row | None:
        """The row of the arm without pretraining, where it came to an end."""
        return next((row for row in self.rows if row.label == NOT_READ and row.middle is not None), None)

    @property
    def headline(self) -> str:
        """What came of it, in a sentence."""
        guess = self.majority.outcomes[0].answer.text
        said = f"always saying {guess} in {self.majority.accuracy:.0%}"
        if self.not_read is not None:
            said = f"without reading in {_evaluation(self.not_read.middle).accuracy:.0%}, " + said
        if self.best is None:
            return f"No pretrained model came to an end; {said}."
        found = _evaluation(self.best.middle)
        return f"After reading, {self.best.label} is right in {found.accuracy:.0%} of {found.asked} questions; {said}."

    def losses(self, result: Result) -> tuple[list[float], list[float]]:
        """The steps and losses in the log of a run."""
        path = self.folder / result.arm.name / "log.csv"
        rows = read_log(path) if path.exists() else []
        return [float(row["step"]) for row in rows], [float(row["loss"]) for row in rows]

    def plain(self) -> dict[str, Any]:
        """The experiment as JSON has it."""
        return {
            "headline": self.headline,
            "corpus": self.corpus,
            "folder": str(self.folder),
            "majority": {**self.majority.plain(), "answer": self.majority.outcomes[0].answer.text},
            "rows": [row.plain() for row in self.rows],
            "failures": [{"folder": result.arm.name, "why": result.why} for result in self.failures],
        }


def told_apart(evaluation: Evaluation, corpus: Corpus) -> dict[str, list[Outcome]]:
    """Answers that are right, those that stand in the text and are wrong, and those made up, the surest first."""
    text = "\n".join(line.text for line in corpus.documents)
    found: dict[str, list[Outcome]] = {"right": [], "wrong": [], "made up": []}
    for outcome in sorted(evaluation.outcomes, key=lambda outcome: -outcome.answer.confidence):
        said = outcome.answer.text
        stands = bool(said) and re.search(rf"(?<!\w){re.escape(said)}(?!\w)", text) is not None
        found["right" if outcome.right else "wrong" if stands else "made up"].append(outcome)
    return found


def _evaluation(result: Result | None) -> Evaluation:
    assert result is not None and result.evaluation is not None
    return result.evaluation
