"""Span corruption keeps its law, loses no character, and never asks for padding."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from avow.errors import InputError, ParameterError
from avow.training import MASK, PAD, CharacterTokenizer, Question, QuestionExamples, SpanExamples, Spans
from avow.training.batches import shuffled
from avow.training.data import Document
from avow.training.examples import uniform
from tests.helpers.spans import cut_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# No letter twice in a row of 26, so that every cut can be recognised.
TEXTS = [(LETTERS * 6)[:size] for size in (1, 2, 3, 4, 5, 17, 26, 150)]
TOKENIZER = CharacterTokenizer(LETTERS)


def examples(block: int = 32, seed: int = 0, texts: list[str] = TEXTS, **spans: float) -> SpanExamples:
    lines = [Document(text, f"line {number}") for number, text in enumerate(texts, 1)]
    return SpanExamples(lines, TOKENIZER, block, seed, Spans(**spans), from_start=True)  # type: ignore[arg-type]


def many(count: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The same document in so many epochs."""
    return np.arange(count), np.full(count, index)


def faults(inputs: np.ndarray, targets: np.ndarray, texts: list[str], block: int) -> list[str]:
    """What is wrong with examples of some texts, in words."""
    found = []
    for row, target, text in zip(inputs, targets, texts, strict=True):
        whole = [*row[row != PAD], target[(row != PAD).sum() - 1]]
        size = (row != PAD).sum()
        if not np.array_equal(target[: size - 1], row[1:size]) or (target[size:] != PAD).any():
            found.append("a target is not the next character")
        if size > block:
            found.append("longer than the block")
        first, second, *more = (place for place, number in enumerate(whole) if number == MASK)
        if more:
            found.append("more than two masks")
        prefix, suffix, masked = whole[:first], whole[first + 1 : second], whole[second + 1 :]
        if not masked:
            found.append("nothing is masked")
        if TOKENIZER.decode([*prefix, *masked, *suffix]) != text[: len(whole) - 2]:
            found.append("the parts are not a beginning of the document")
    return found


def test_every_example_is_a_document_with_a_span_moved_to_its_end() -> None:
    for index, text in enumerate(TEXTS):
        inputs, targets = examples().rows(*many(300, index))
        assert faults(inputs, targets, [text] * 300, 32) == []


def test_a_shifted_target_would_be_noticed() -> None:
    inputs, targets = examples().rows(*many(5, 6))
    assert "a target is not the next character" in faults(inputs, np.roll(targets, 1, 1), [TEXTS[6]] * 5, 32)
    assert "the parts are not a beginning of the document" in faults(inputs, targets, [TEXTS[6][::-1]] * 5, 32)


def test_documents_of_many_kinds_stand_side_by_side() -> None:
    epochs, indices = np.arange(400) // 8, np.arange(400) % 8
    inputs, targets = examples().rows(epochs, indices)
    assert faults(inputs, targets, [TEXTS[i] for i in indices], 32) == []


def test_lengths_are_uniform_from_four_to_seven_eighths_of_the_block() -> None:
    count = 25_000
    length = cut_of(examples(), *many(count, 7)).length
    assert set(length) == set(range(4, 29))  # 7/8 of 32 is 28
    # Hoeffding: each of 25 shares is within this of 1/25, all with probability 1 − 1e-9.
    slack = math.sqrt(math.log(2 * 25 / 1e-9) / (2 * count))
    assert max(abs((length == k).mean() - 1 / 25) for k in range(4, 29)) < slack


def test_a_quarter_is_masked_on_average_whatever_the_length() -> None:
    count = 40_000
    cut = cut_of(examples(shortest=4), *many(count, 7))
    assert ((cut.masked >= 1) & (cut.masked < cut.length)).all()
    # m lies in [1, L/2], so m/L lies in [0, 1/2]: Hoeffding over independent epochs.
    slack = 0.5 * math.sqrt(math.log(2 / 1e-9) / (2 * count))
    share = cut.masked / cut.length
    assert float(share.max()) <= 0.5
    assert abs(share.mean() - 0.25) < slack
    for length in (5, 27):  # Odd lengths, where a quarter is no whole number.
        mine = share[cut.length == length]
        assert abs(mine.mean() - 0.25) < 0.5 * math.sqrt(math.log(2 / 1e-9) / (2 * len(mine)))
    assert not abs(share.mean() - 0.23) < slack, "the bound is tight enough to tell a quarter from 0.23"


def test_a_span_may_fall_anywhere() -> None:
    cut = cut_of(examples(texts=["abcdefgh"]), *many(4000, 0))
    last = cut.start + cut.masked == cut.length
    assert {int(s) for s in cut.start[cut.length == 8]} >= set(range(6))
    assert 0 < last.mean() < 1 and 0 < (cut.start == 0).mean() < 1


def test_an_example_depends_on_seed_epoch_and_index_alone() -> None:
    epochs, indices = np.array([3, 0, 3]), np.array([7, 6, 5])
    together = examples().rows(epochs, indices)[0]
    for row in range(3):
        alone = examples().rows(epochs[row : row + 1], indices[row : row + 1])[0]
        assert np.array_equal(alone[0], together[row, : alone.shape[1]])
    assert not np.array_equal(*(cut_of(examples(seed=s), *many(50, 7)).length for s in (0, 1)))
    assert len(set(cut_of(examples(), *many(50, 7)).length)) > 5


def test_options_move_the_law() -> None:
    whole = cut_of(examples(shortest=28), *many(200, 7))
    assert set(whole.length) == {28}
    wide = cut_of(examples(masked=0.5), *many(4000, 7))
    assert abs((wide.masked / wide.length).mean() - 0.5) < 0.03
    assert (wide.masked < wide.length).all()


@pytest.mark.parametrize(("field", "value"), [("shortest", 3), ("longest", 1.5), ("masked", 0.6), ("masked", 0.0)])
def test_an_impossible_law_is_refused(field: str, value: float) -> None:
    with pytest.raises(ParameterError, match=f"spans: {field}={value} must be"):
        examples(**{field: value})


def pieces_of(texts: list[str], block: int, from_start: bool) -> list[str]:
    """What each example can read of its document: the longest cut of many."""
    lines = [Document(text, f"line {number}") for number, text in enumerate(texts, 1)]
    made = SpanExamples(lines, TOKENIZER, block, 0, from_start=from_start)
    read = []
    for index in range(len(made)):
        cuts = made.rows(*many(400, index))
        whole = max(zip(*cuts, strict=True), key=lambda pair: (pair[0] != PAD).sum())
        tokens = [*whole[0][whole[0] != PAD], whole[1][(whole[0] != PAD).sum() - 1]]
        first, second = (place for place, number in enumerate(tokens) if number == MASK)
        prefix, suffix, span = tokens[:first], tokens[first + 1 : second], tokens[second + 1 :]
        read.append(TOKENIZER.decode([*prefix, *span, *suffix]))
    return read


def test_long_documents_are_read_to_their_end() -> None:
    assert pieces_of(TEXTS, 32, from_start=False) == [
        text[first : first + 28] for text in TEXTS for first in range(0, len(text), 28)
    ]
    # From their start alone, as the mixture reads them, the rest of a document is never seen.
    assert pieces_of(TEXTS, 32, from_start=True) == [text[:28] for text in TEXTS]


def test_a_block_too_small_is_refused() -> None:
    with pytest.raises(ParameterError, match="block=4 leaves 3 tokens of a document, fewer than 4"):
        examples(block=4)


def test_draws_are_uniform_and_shuffles_are_permutations() -> None:
    count = 100_000
    (x,) = uniform(7, np.zeros(count, dtype=np.int64), np.arange(count), 0)
    slack = math.sqrt(math.log(2 * 16 / 1e-9) / (2 * count))
    assert max(abs((np.floor(16 * x) == k).mean() - 1 / 16) for k in range(16)) < slack
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.02
    assert sorted(shuffled(7, 3, 100)) == list(range(100))
    assert list(shuffled(7, 3, 100)) != list(shuffled(7, 4, 100))


def asked(loss: str = "answer", block: int = 12) -> QuestionExamples:
    questions = [Question("who", "me", "train.tsv line 1"), Question("where", "here", "train.tsv line 2")]
    return QuestionExamples(questions, TOKENIZER, block, loss)  # type: ignore[arg-type]


def test_a_question_is_read_and_its_answer_is_the_target() -> None:
    inputs, targets = asked().rows(np.array([0, 0]), np.array([0, 1]))
    assert [TOKENIZER.decode(row) for row in inputs] == ["who⁇me", "where⁇here"]
    assert [TOKENIZER.decode(row) for row in targets] == ["me⁇", "here⁇"]
    # The first letter of the answer is what the mask predicts.
    assert (targets[1] != PAD).tolist() == [False] * 5 + [True] * 5
    assert (targets[0] != PAD).tolist() == [False] * 3 + [True] * 3 + [False] * 4


def test_the_loss_may_count_everything() -> None:
    _, targets = asked("all").rows(np.array([0]), np.array([0]))
    assert TOKENIZER.decode(targets[0]) == "ho⁇me⁇"


def test_an_answer_longer_than_the_block_is_named() -> None:
    asked(block=10)
    words = "train.tsv line 2: answer='here' needs 10 positions with its question, and the block has 9"
    with pytest.raises(InputError, match=re.escape(words)):
        asked(block=9)
