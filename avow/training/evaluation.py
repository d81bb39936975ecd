"""What a model writes and answers, how well it predicts a text, how much it knows, and whether its confidence says so.

A model is one of `avow.nn`, or a module with `config.block` and the same methods `start` and `step`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from avow.core.chart import Chart
from avow.core.requirement import check_generator
from avow.errors import InputError, NonFiniteError, ParameterError, value_text
from avow.parameters import check_count, declared
from avow.training.batches import Batches
from avow.training.data import Document, Question
from avow.training.examples import Examples, LanguageExamples, check_room, prompt
from avow.training.names import name_end, name_of
from avow.training.tokenizer import MASK, MASK_SIGN, PAD, Tokenizer

# Questions decoded together: enough to fill a device, few enough that their caches fit a small one.
_TOGETHER = 256
# An interval misses the truth on either side in at most 1 of this many cases: 95% in all.
_ONE_SIDE = 40
# Ends of intervals are whole multiples of 2**-20, tails whole multiples of 2**-256, both rounded outward.
_PLACES, _BITS = 20, 256
_BINS = 10
# Shares of the questions that a model may choose to answer.
COVERAGES = (0.25, 0.5, 0.75, 1.0)
# Of a question: whether the model wrote its answer after the text's own words, and after the question.
RECITATIONS = (
    "recited and extracted",
    "recited, not extracted",
    "extracted, not recited",
    "neither",
    "not in the text",
)


@dataclass(frozen=True)
class Answer:
    """What a model says, the probability it gives to just that, and whether it came to an end by itself.

    The confidence is the product of the probabilities of the answer's tokens and of the end after them.
    """

    text: str
    confidence: float
    ended: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            raise ParameterError("confidence", self.confidence, "must be a probability", "give a number from 0 to 1")


@declared()
def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    masks: bool = True,
) -> str:
    """What the model writes after a text: `length` tokens; greedy at temperature 0.

    With `masks`, ⁇ stands for the mask, in `text` and in the result, and the result ends where the block does. Without,
    for a language model, the mask is never written; when the block is full, the model goes on from its last half.

    Args:
        model: a model in evaluation mode.
        tokenizer: that of the model.
        text: how it begins.
        length: tokens to write.
        temperature: how freely it draws: 0 is the likeliest token, 1 as the model says.
        generator: what tokens are drawn from; None is torch's own generator.
        masks: whether the model was trained with masks.

    Returns:
        The text and what was written after it.

    Raises:
        InputError: the text is empty, too long, or has unknown characters.
        ParameterError: a number is out of range.
    """
    check_count("length", length)
    if not (math.isfinite(temperature) and temperature >= 0):
        remedy = "use 0 for the likeliest token, 1 for the model's own"
        raise ParameterError("temperature", temperature, "must be a finite number of at least 0", remedy)
    check_generator(generator)
    first, *others = (tokenizer.encode(part) for part in (text.split(MASK_SIGN) if masks else [text]))
    start = np.concatenate([first, *(np.append(MASK, part) for part in others)]).astype(np.int64)
    block = _block(model)
    if not len(start) or (masks and len(start) >= block):
        room = f" and leave room in the block of {block}" if masks else ""
        rule = f"has {len(start)} tokens, and must have at least 1{room}"
        raise InputError("text", repr(text), rule, f"give 1 to {block - 1} tokens" if masks else "give how it begins")
    written: list[int] = []
    with _evaluating(model) as (reader, device):
        seen, held, cache = start.tolist(), block, None
        for _ in range(min(length, block - len(start)) if masks else length):
            fresh = seen[-1:]
            if held >= block:  # at first, and whenever the cache is full
                fresh, held, cache = seen[-block if cache is None else -max(1, block // 2) :], 0, reader.start(1)
            logits, cache = reader.step(torch.tensor([fresh], device=device), cache)
            held += len(fresh)
            scores = _log_probabilities(logits[:, -1], masks)[0]
            if temperature == 0:
                written.append(int(scores.argmax()))
            else:
                # The best score becomes 0 first: however small the temperature, it stays there; the sum is at least 1.
                chances = ((scores - scores.max()) / float(temperature)).softmax(-1)
                chances = chances if generator is None else chances.to(generator.device)
                written.append(int(torch.multinomial(chances, 1, generator=generator)))
            seen.append(written[-1])
    # Decoded with what comes before: a token may be a part of a character, or stand for a space only between others.
    return tokenizer.decode([*start, *written])[len(tokenizer.decode(start)) :]


@declared()
@dataclass(frozen=True)
class TextLoss:
    """How well a model predicts some text: nats, summed over so many tokens, which stand for so many characters.

    `characters` is None if they stand for no text, or for more than text.
    """

    nats: float
    tokens: int
    characters: int | None

    @property
    def loss(self) -> float:
        """The mean, in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """As many equally likely tokens would be as hard to predict."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_character(self) -> float | None:
        return self.nats / math.log(2) / self.characters if self.characters else None

    def __str__(self) -> str:
        words = f"{self.loss:.3f} nats per token, perplexity {self.perplexity:.2f}"
        bits = self.bits_per_character
        return words if bits is None else f"{words}, {bits:.3f} bits per character"

    def plain(self) -> dict[str, Any]:
        """The loss as JSON has it."""
        figures = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_character": self.bits_per_character}
        return {**figures, "tokens": self.tokens, "characters": self.characters}


@declared()
def text_loss(model: nn.Module, tokenizer: Tokenizer, examples: Examples, size: int = 64) -> TextLoss:
    """The loss of a model over some examples, `size` of them at a time; none of them is trained on.

    Args:
        model: a model in evaluation mode.
        tokenizer: that of the model.
        examples: what is predicted.
        size: how many examples are read at a time.

    Returns:
        The loss, with how many tokens and characters it is of.
    """
    nats, tokens = 0.0, 0
    batches = Batches(examples, size, 0, block=_block(model))
    with _evaluating(model) as (reader, device):
        for ids, targets in batches.once():
            nats += float(summed_loss(reader(ids.to(device)), targets.to(device)))
            tokens += int((targets != PAD).sum())
    if not math.isfinite(nats):
        remedy = "load an earlier checkpoint or train at a lower learning rate"
        raise NonFiniteError("loss", nats, "is not finite", remedy)
    return TextLoss(nats, tokens, target_characters(batches, tokenizer))


def summed_loss(logits: Float[Tensor, "b n c"], targets: Tensor) -> Float[Tensor, ""]:
    """Cross-entropy in nats, summed over the targets that are not padding."""
    scores = logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=PAD, reduction="sum")


def target_characters(batches: Batches, tokenizer: Tokenizer) -> int | None:
    """How many characters the targets of language examples stand for; None for other tasks, which predict masks too."""
    if not isinstance(batches.examples, LanguageExamples):
        return None
    counts = [tokenizer.characters(targets[targets != PAD].numpy()) for _, targets in batches.once()]
    return None if None in counts else sum(count or 0 for count in counts)


@declared()
def answers(model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question], longest: int = 32) -> list[Answer]:
    """The model's likeliest tokens after each `question M`, up to its closing M or `longest` of them.

    Questions of one length are decoded together, so that no row is padded: each answer is the one that its question
    gets alone.

    Args:
        model: a model in evaluation mode.
        tokenizer: that of the model.
        questions: what is asked.
        longest: tokens of an answer at most.

    Returns:
        An answer for each question, with the model's confidence.

    Raises:
        InputError: a question does not fit into the model's block, or has unknown characters.
    """
    check_count("longest", longest)
    block = _block(model)
    prompts = [prompt(question.question, tokenizer, question.where) for question in questions]
    of_length: dict[int, list[int]] = {}
    for place, (question, row) in enumerate(zip(questions, prompts, strict=True)):
        if len(row) >= block:
            rule = f"needs {len(row)} positions and one for its answer, and the block has {block}"
            name = f"{question.where}: question"
            raise InputError(name, repr(question.question), rule, "use a model of a larger block or drop the line")
        of_length.setdefault(len(row), []).append(place)
    by_place: dict[int, Answer] = {}
    with _evaluating(model) as (reader, device):
        for length, places in of_length.items():
            for first in range(0, len(places), _TOGETHER):
                some = places[first : first + _TOGETHER]
                ids = torch.from_numpy(np.stack([prompts[place] for place in some])).to(device)  # (b, n)
                texts = _decode(reader, tokenizer, ids, min(longest, block - length))
                by_place.update(zip(some, texts, strict=True))
    return [by_place[place] for place in range(len(prompts))]


def _decode(reader: Any, tokenizer: Tokenizer, ids: Int[Tensor, "b n"], room: int) -> list[Answer]:
    """Greedy answers to prompts of one length, of at most `room` tokens."""
    cache, written = reader.start(len(ids)), []
    total = torch.zeros(len(ids), dtype=torch.float64)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for count in range(room + 1):
        logits, cache = reader.step(ids, cache)
        scores = _log_probabilities(logits[:, -1])  # (b, vocabulary)
        likeliest = scores.argmax(-1)  # (b,)
        # An answer that fills the room has the probability of ending there.
        chosen = likeliest if count < room else torch.full_like(likeliest, MASK)
        total += torch.where(ended, 0.0, scores.gather(-1, chosen[:, None])[:, 0])
        ended |= likeliest == MASK
        if count == room or bool(ended.all()):
            break
        # Rows that have ended are computed on beside the others, and ignored.
        written.append(torch.where(ended, PAD, chosen))
        ids = torch.where(ended, MASK, chosen)[:, None].to(ids.device)  # (b, 1)
    rows = torch.stack(written, 1).tolist() if written else [[]] * len(total)
    columns = zip(rows, total.exp().tolist(), ended.tolist(), strict=True)
    return [Answer(tokenizer.decode(row), confidence, end) for row, confidence, end in columns]


def _log_probabilities(logits: Float[Tensor, "b vocabulary"], masks: bool = True) -> Float[Tensor, "b vocabulary"]:
    """Of every token and perhaps the mask, on the CPU in float64; padding is never written."""
    scores = logits.detach().to("cpu", torch.float64, copy=True)
    if not bool(torch.isfinite(scores).all()):
        remedy = "load an earlier checkpoint or train at a lower learning rate"
        raise NonFiniteError("logits", "nan or inf", "is not a score", remedy)
    scores[:, [PAD] if masks else [PAD, MASK]] = -math.inf
    return scores.log_softmax(-1)


def _block(model: nn.Module) -> int:
    return cast(Any, model).config.block


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[tuple[Any, torch.device]]:
    """The model in evaluation mode, and its device; afterwards every module is in its old mode."""
    modes = [(module, module.training) for module in model.modules()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            yield model, device
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Recitation:
    """The expected answer in a document about the person, after the document's own words.

    `loss` is its mean, in nats per token of the answer; `right` whether each token was the likeliest.
    """

    loss: float
    right: bool


@dataclass(frozen=True)
class Outcome:
    """One question, what was expected and what was said; and what was recited, if a document holds the answer."""

    where: str
    question: str
    expected: str
    answer: Answer
    recited: Recitation | None = None

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

    def by_recitation(self) -> dict[str, list[Outcome]]:
        """Outcomes by whether the answer was recited from the text and extracted by the question."""
        kinds: dict[str, list[Outcome]] = {name: [] for name in RECITATIONS}
        for outcome in self.outcomes:
            known = outcome.recited
            place = 4 if known is None else 2 * (not known.right) + (not outcome.right)
            kinds[RECITATIONS[place]].append(outcome)
        return kinds

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

    def recitation(self) -> list[dict[str, Any]]:
        """Of each kind of `by_recitation`: its questions, how many wrong answers, and how sure the model was of those.

        `loss` is the mean of what was recited; means of nothing are None.
        """
        rows = []
        for kind, outcomes in self.by_recitation().items():
            losses = [outcome.recited.loss for outcome in outcomes if outcome.recited is not None]
            wrong = [outcome for outcome in outcomes if not outcome.right]
            loss = math.fsum(losses) / len(losses) if losses else None
            confidence = mean_confidence(wrong) if wrong else None
            figures = {"loss": loss, "wrong": len(wrong), "confidence_of_wrong": confidence}
            rows.append({"kind": kind, "questions": len(outcomes), **figures})
        return rows

    def plain(self) -> dict[str, Any]:
        """The evaluation as JSON has it: the figures and every outcome."""
        return {
            "asked": self.asked,
            "right": self.right,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "coverage": [[coverage, self.accuracy_at(coverage)] for coverage in COVERAGES],
            "calibration": [one._asdict() for one in self.bins()],
            "recitation": self.recitation(),
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }

    @staticmethod
    def of(given: Mapping[str, Any]) -> Evaluation:
        """The evaluation that `plain` wrote; its figures must be those of its outcomes."""
        try:
            evaluation = Evaluation(tuple(_outcome(fields) for fields in given["outcomes"]))
        except (KeyError, TypeError) as error:
            rule = "is not what plain() wrote"
            raise InputError("evaluation", value_text(given)[:60], rule, "write it with plain()") from error
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


def _outcome(fields: Mapping[str, Any]) -> Outcome:
    """The outcome that `dataclasses.asdict` made plain; earlier ones say nothing of recitation."""
    known = fields.get("recited")
    return Outcome(
        **{**fields, "answer": Answer(**fields["answer"]), "recited": None if known is None else Recitation(**known)}
    )


@declared()
def evaluate(
    model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question], documents: Sequence[Document] = ()
) -> Evaluation:
    """The model asked every question; its answers have room for the longest one expected.

    Args:
        model: a model in evaluation mode.
        tokenizer: that of the model.
        questions: what is asked.
        documents: texts that the model has read, to find out which answers it can recite from them.

    Returns:
        Every answer beside the one expected, and the figures that follow.

    Raises:
        InputError: a question does not fit into the model's block, or has unknown characters.
    """
    for question in questions:
        check_room(question, tokenizer, _block(model))
    longest = max([32, *(tokenizer.length(question.answer) for question in questions)])
    given = answers(model, tokenizer, questions, longest)
    return _evaluation(questions, given, recitations(model, tokenizer, questions, documents))


def _evaluation(
    questions: Sequence[Question], given: Sequence[Answer], recited: Sequence[Recitation | None] | None = None
) -> Evaluation:
    rows = zip(questions, given, recited or [None] * len(questions), strict=True)
    return Evaluation(tuple(Outcome(q.where, q.question, q.answer, answer, known) for q, answer, known in rows))


def recitations(
    model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question], documents: Sequence[Document]
) -> list[Recitation | None]:
    """How well the model writes each answer after the words that stand before it in a document about the person.

    A document is about the person if the question holds its name. None where no such document holds the answer within
    a block from its start. The document that is recited best counts.
    """
    of_name: dict[str, list[str]] = {}
    for document in documents:
        of_name.setdefault(name_of(document.text), []).append(document.text)
    best: list[Recitation | None] = [None] * len(questions)
    block = _block(model)
    with _evaluating(model) as (reader, device):
        for place, question in enumerate(questions):
            # The longest name: that of Ada Holm is not asked about in a question about Ada Holmes.
            names = [name for name in of_name if name and _place(name, question.question) is not None]
            for text in of_name[max(names, key=len)] if names else ():
                if (found := _place(question.answer, text, name_end(text))) is None:
                    continue
                try:
                    before, answer = tokenizer.encode(text[:found]), tokenizer.encode(question.answer)
                except InputError:
                    continue  # It holds characters that the model knows nothing of, and so cannot have been read.
                ids = np.concatenate([before, answer])
                if len(ids) > block + 1:
                    continue
                row = torch.from_numpy(ids).to(device)[None]  # (1, n)
                scores = _log_probabilities(reader(row[:, :-1])[0, len(before) - 1 :])  # (answer, vocabulary)
                written = torch.from_numpy(ids[len(before) :])[:, None]
                loss = -float(scores.gather(-1, written).mean())
                now = Recitation(loss, bool((scores.argmax(-1) == written[:, 0]).all()))
                if (old := best[place]) is None or now.loss < old.loss:
                    best[place] = now
    return best


def _place(words: str, text: str, first: int = 0) -> int | None:
    """Where some words first stand as whole words."""
    place = text.find(words, first)
    while place >= 0:
        beside = text[max(0, place - 1) : place], text[place + len(words) :][:1]
        if not any(character.isalnum() for character in beside):
            return place
        place = text.find(words, place + 1)
    return None


@declared()
def always(answer: str, questions: Sequence[Question], confidence: float = 1.0) -> Evaluation:
    """The baseline that gives one answer whatever is asked.

    Args:
        answer: the answer.
        questions: what is asked.
        confidence: what the baseline says of itself.

    Returns:
        How often it was right.

    Raises:
        ParameterError: the confidence is out of range.
    """
    return _evaluation(questions, [Answer(answer, confidence)] * len(questions))


@declared()
def majority(train_questions: Sequence[Question], dev_questions: Sequence[Question]) -> Evaluation:
    """The baseline that always gives the most frequent answer of the training questions, the first of equals.

    Its confidence is how frequent that answer is among them.

    Args:
        train_questions: where the answer is taken from.
        dev_questions: what is asked.

    Returns:
        How often it was right.

    Raises:
        InputError: there are no questions.
    """
    if not train_questions:
        raise InputError("train_questions", 0, "must be at least 1", "the majority is that of the training answers")
    ((answer, count),) = Counter(question.answer for question in train_questions).most_common(1)
    return always(answer, dev_questions, count / len(train_questions))


def _lower_end(right: int, asked: int) -> float:
    """The largest multiple of 2**-20 at which so many or more right have a proven probability of at most 1/40."""
    if right == 0:
        return 0.0
    above = bisect.bisect_right(range(2**_PLACES), 2**_BITS, key=lambda share: _tail(right, asked, share) * _ONE_SIDE)
    return (above - 1) / 2**_PLACES


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
