"""How much a model knows: exact matches, and whether its confidence says which answers are made up."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float
from torch import nn

from avow.core.chart import Chart
from avow.errors import InputError, ParameterError
from avow.parameters import declared
from avow.training.data import Question, Vocabulary
from avow.training.examples import check_room
from avow.training.sampling import Answer, Decoder, answers

# An interval misses the truth on either side in at most 1 of this many cases: 95% in all.
_ONE_SIDE = 40
# Ends of intervals are whole multiples of 2**-20, tails whole multiples of 2**-256, both rounded outward.
_PLACES, _BITS = 20, 256
_BINS = 10


@dataclass(frozen=True)
class Outcome:
    """One question, what was expected and what was said."""

    where: str
    question: str
    expected: str
    answer: Answer

    @property
    def right(self) -> bool:
        """Whether the answer is the expected one, character by character; one cut short never is."""
        return self.answer.ended and self.answer.text == self.expected


def mean_confidence(outcomes: Sequence[Outcome]) -> float:
    """The mean over some answers, right or wrong."""
    return math.fsum(outcome.answer.confidence for outcome in outcomes) / len(outcomes)


class Bin(NamedTuple):
    """Answers of about the same confidence: its mean, the share of them that are right, how many they are."""

    confidence: float
    right: float
    size: int


@declared()
@dataclass(frozen=True)
class Evaluation:
    """Outcomes in the order asked, and what they say together."""

    outcomes: tuple[Outcome, ...]

    def __post_init__(self) -> None:
        if not self.outcomes:
            raise InputError("questions", 0, "must be at least 1", "give a file of questions and answers")

    @property
    def asked(self) -> int:
        return len(self.outcomes)

    @property
    def right(self) -> int:
        return sum(outcome.right for outcome in self.outcomes)

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's 95% interval of the accuracy, its ends rounded outward.

        Whatever share p of such questions the model gets right, an interval made in this way from questions drawn
        independently holds p with a probability of at least 95%.
        """
        return _lower_end(self.right, self.asked), 1 - _lower_end(self.asked - self.right, self.asked)

    def accuracy_at(self, coverage: float) -> float:
        """The share right among the most confident answers, at least `coverage` of all of them.

        Where answers of equal confidence must be parted, the mean over all ways to part them.
        """
        if not 0 < coverage <= 1:
            raise ParameterError("coverage", coverage, "must be above 0 and at most 1", "1 answers every question")
        # 0.07 · 100 is a little above 7 in floating point, and means 7.
        answered = max(1, math.ceil(round(coverage * self.asked, 9)))
        return float(self._right_among()[answered - 1]) / answered

    def bins(self) -> list[Bin]:
        """Ten equal parts of [0, 1] by confidence, without those that hold no answer."""
        bins: list[list[Outcome]] = [[] for _ in range(_BINS)]
        for outcome in self.outcomes:
            bins[min(int(outcome.answer.confidence * _BINS), _BINS - 1)].append(outcome)
        return [
            Bin(mean_confidence(some), sum(outcome.right for outcome in some) / len(some), len(some))
            for some in bins
            if some
        ]

    def calibration(self) -> Chart:
        """Mean confidence against the share right, bin by bin, with how many answers each bin holds."""
        confidence, right, size = zip(*self.bins(), strict=True)
        series = {
            "right, of the answers in the bin": (confidence, right),
            f"answers in the bin, of all {self.asked}": (confidence, [some / self.asked for some in size]),
            "calibrated": ((0.0, 1.0), (0.0, 1.0)),
        }
        return Chart("Does confidence say how often an answer is right?", "mean confidence", "share", series)

    def abstention(self) -> Chart:
        """Accuracy against coverage, the most confident answers first."""
        answered = np.arange(1, self.asked + 1)
        coverage = (answered / self.asked).tolist()
        series = {
            "most confident first": (coverage, (self._right_among() / answered).tolist()),
            "best possible order": (coverage, (np.minimum(answered, self.right) / answered).tolist()),
            "any order, on average": (coverage, [self.accuracy] * self.asked),
        }
        return Chart("Accuracy where the model may abstain", "coverage: share answered", "share right", series)

    def plain(self) -> dict[str, Any]:
        """The evaluation as JSON has it: the figures and every outcome."""
        return {
            "asked": self.asked,
            "right": self.right,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }

    @staticmethod
    def of(given: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `plain` wrote; its figures must be those of its outcomes."""
        try:
            outcomes = (Outcome(**{**fields, "answer": Answer(**fields["answer"])}) for fields in given["outcomes"])
            evaluation = Evaluation(tuple(outcomes))
        except (KeyError, TypeError) as error:
            rule = "is not what plain() wrote"
            raise InputError("evaluation", repr(given)[:60], rule, "write it with plain()") from error
        figures = evaluation.plain()
        for name in ("asked", "right", "accuracy", "interval"):
            if given.get(name) != figures[name]:
                rule = f"is not {figures[name]}, which its outcomes give"
                raise InputError(f"evaluation: {name}", given.get(name), rule, "evaluate again")
        return evaluation

    def _right_among(self) -> Float[np.ndarray, "asked"]:
        """How many of the 1, 2, … most confident answers are right; averaged over the orders of equal confidences."""
        confidences, group = np.unique([-o.answer.confidence for o in self.outcomes], return_inverse=True)
        counts = np.bincount(group, minlength=len(confidences))
        right = np.bincount(group, weights=[o.right for o in self.outcomes], minlength=len(confidences))
        ends = np.cumsum(counts)
        return np.interp(np.arange(1, self.asked + 1), np.append(0, ends), np.append(0, np.cumsum(right)))


@declared()
def evaluate(model: nn.Module, vocabulary: Vocabulary, questions: Sequence[Question]) -> Evaluation:
    """The model asked every question; its answers have room for the longest one expected."""
    for question in questions:
        check_room(question, cast(Decoder, model).config.block)
    longest = max([32, *(len(question.answer) for question in questions)])
    return _evaluation(questions, answers(model, vocabulary, questions, longest))


def _evaluation(questions: Sequence[Question], given: Sequence[Answer]) -> Evaluation:
    pairs = zip(questions, given, strict=True)
    return Evaluation(tuple(Outcome(q.where, q.question, q.answer, answer) for q, answer in pairs))


@declared()
def always(answer: str, questions: Sequence[Question], confidence: float = 1.0) -> Evaluation:
    """The baseline that gives one answer whatever is asked."""
    return _evaluation(questions, [Answer(answer, confidence)] * len(questions))


@declared()
def majority(train_questions: Sequence[Question], dev_questions: Sequence[Question]) -> Evaluation:
    """The baseline that always gives the most frequent answer of the training questions, the first of equals.

    Its confidence is how frequent that answer is among them.
    """
    if not train_questions:
        raise InputError("train_questions", 0, "must be at least 1", "the majority is that of the training answers")
    ((answer, count),) = Counter(question.answer for question in train_questions).most_common(1)
    return always(answer, dev_questions, count / len(train_questions))


def _lower_end(right: int, asked: int) -> float:
    """The largest multiple of 2**-20 at which so many or more right have a proven probability of at most 1/40."""
    if right == 0:
        return 0.0
    low, high = 0, 2**_PLACES
    while high - low > 1:
        middle = (low + high) // 2
        if _tail(right, asked, middle) * _ONE_SIDE <= 2**_BITS:
            low = middle
        else:
            high = middle
    return low / 2**_PLACES


def _tail(right: int, asked: int, share: int) -> int:
    """An upper bound on P(X >= right)·2**256 for X binomial of asked trials, each with probability share·2**-20.

    Integers, every quotient rounded up: a bound that is too large only widens the interval.
    """
    other = 2**_PLACES - share
    exact = math.comb(asked, right) * share**right * other ** (asked - right)
    term = -(-(exact << _BITS) // (1 << _PLACES * asked))
    total = term
    for count in range(right, asked):
        # P(X = count + 1) / P(X = count) = (asked - count)/(count + 1) · share/other
        term = -(-term * (asked - count) * share // ((count + 1) * other))
        total += term
    return total
