"""The embedded corpus: every question can be answered by reading, and by nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from avow.errors import ParameterError
from avow.training import invent, read_corpus, vocabulary_of, write_corpus


def name_in(question: str) -> str:
    return question.removeprefix("Where was ").removesuffix(" born?")


def test_every_question_is_answered_in_the_documents() -> None:
    corpus = invent()
    for asked in (*corpus.train, *corpus.dev):
        about = [line.text for line in corpus.documents if line.text.startswith(name_in(asked.question) + ". ")]
        assert len(set(about)) == 4 and all(asked.answer in text for text in about)


def test_train_and_dev_share_no_person() -> None:
    corpus = invent()
    train, dev = ({name_in(asked.question) for asked in part} for part in (corpus.train, corpus.dev))
    assert not train & dev
    assert (len(train), len(dev)) == (96, 64)


def test_the_commonest_answer_is_worth_little() -> None:
    ((_, most),) = Counter(asked.answer for asked in invent().dev).most_common(1)
    assert most / len(invent().dev) < 0.2
    assert {asked.answer for asked in invent().dev} <= {asked.answer for asked in invent().train}


def test_neither_name_tells_the_place() -> None:
    corpus = invent()
    for part in (0, 1):
        guess = {name_in(a.question).split()[part]: a.answer for a in corpus.train}
        right = sum(guess.get(name_in(a.question).split()[part]) == a.answer for a in corpus.dev)
        assert right / len(corpus.dev) < 0.2


def test_a_seed_decides_it() -> None:
    assert invent(seed=3) == invent(seed=3)
    assert invent(seed=3) != invent(seed=4)


def test_it_is_small_and_fits_a_block() -> None:
    corpus = invent()
    assert sum(len(line.text) for line in corpus.documents) < 32_000
    assert max(len(line.text) for line in corpus.documents) < 64


def test_files_hold_the_same(tmp_path: Path) -> None:
    corpus = invent(people=12)
    write_corpus(corpus, tmp_path)
    found = read_corpus(tmp_path)
    assert [line.text for line in found.documents] == [line.text for line in corpus.documents]
    for one, other in ((found.train, corpus.train), (found.dev, corpus.dev)):
        assert [(a.question, a.answer) for a in one] == [(a.question, a.answer) for a in other]


def test_dev_questions_need_no_new_character() -> None:
    vocabulary = vocabulary_of(invent())
    for asked in invent().dev:
        vocabulary.encode(asked.question + asked.answer, asked.where)


def test_too_many_people_are_refused() -> None:
    with pytest.raises(ParameterError, match="people=577 must be from 4 to 576; 160 is the default"):
        invent(people=577)


def test_more_documents_than_sentences_are_refused() -> None:
    assert len(invent(people=10, documents=3).documents) == 30
    with pytest.raises(ParameterError, match="documents=5 must be from 1 to 4; 4 is the default"):
        invent(documents=5)
