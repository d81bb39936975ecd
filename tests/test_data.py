"""A corpus is read whole or its wrong line is named; invented people are known by reading alone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from avow.errors import FileError, InputError, ParameterError
from avow.training import (
    Corpus,
    Document,
    TokenDocument,
    invent,
    read_corpus,
    read_documents,
    read_questions,
    tokenizer_of,
    write_corpus,
)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_documents_are_lines_with_their_places(tmp_path: Path) -> None:
    lines = read_documents(written(tmp_path, "wiki.txt", "One.\nTwo\u2028still two.\n"))
    assert [line.text for line in lines] == ["One.", "Two\u2028still two."]
    assert [line.where for line in lines] == ["wiki.txt line 1", "wiki.txt line 2"]


def test_questions_have_two_columns(tmp_path: Path) -> None:
    (asked,) = read_questions(written(tmp_path, "train.tsv", "Where was Ada born?\tArden\n"))
    assert (asked.question, asked.answer, asked.where) == ("Where was Ada born?", "Arden", "train.tsv line 1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("One.\n\nThree.\n", "wiki.txt line 2=(empty) holds no document; delete the empty line"),
        ("One.\n  \n", "wiki.txt line 2=(empty) holds no document; delete the empty line"),
        ("", "is empty; give at least one line"),
        (b"One.\nTw\xff\n", "wiki.txt line 2=byte 7 is not UTF-8; convert the file"),
    ],
)
def test_a_bad_document_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(FileError, match=re.escape(words)):
        read_documents(written(tmp_path, "wiki.txt", content))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Where?", "train.tsv line 2='Where?' has 1 columns, not 2; write question, one tab, answer"),
        ("Where?\tHere\tThere", "has 3 columns, not 2"),
        ("Where?\t ", "lacks an answer"),
        ("\tHere", "lacks a question"),
        ("", "train.tsv line 2='' has 1 columns, not 2"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(FileError, match=re.escape(words)):
        read_questions(written(tmp_path, "train.tsv", f"Who?\tAda\n{line}\nWho?\tAda\n"))


def test_a_corpus_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is not a folder"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(FileError, match=re.escape("holds neither wiki.txt nor train.tsv")):
        read_corpus(tmp_path)
    written(tmp_path, "wiki.txt", "One.\n")
    assert (len(read_corpus(tmp_path).documents), read_corpus(tmp_path).train) == (1, ())


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=re.escape("cannot be read (No such file or directory); check the path")):
        read_documents(tmp_path / "none.txt")


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
    assert found.digest == corpus.digest and found.dev_digest == corpus.dev_digest
    for one, other in ((found.train, corpus.train), (found.dev, corpus.dev)):
        assert [(a.question, a.answer) for a in one] == [(a.question, a.answer) for a in other]


def test_dev_questions_need_no_new_character() -> None:
    tokenizer = tokenizer_of("characters", invent())
    for asked in invent().dev:
        tokenizer.encode(asked.question + asked.answer, asked.where)


def test_a_digest_tells_texts_their_order_and_their_parts_apart() -> None:
    def digest(*texts: str) -> str:
        return Corpus(tuple(Document(text, "") for text in texts), (), ()).digest

    assert digest("ab", "c") == digest("ab", "c")
    assert len({digest("ab", "c"), digest("c", "ab"), digest("abc"), digest("a", "bc"), digest("ab", "c", "")}) == 5
    ids = [np.array(row, dtype=kind) for row, kind in (([1, 2], "u2"), ([1, 2], "i8"), ([2, 1], "u2"))]
    first, same, other = (Corpus((TokenDocument(one, ""),), (), ()).digest for one in ids)
    assert first == same != other


def test_token_ids_are_not_written_as_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="corpus=token ids cannot be written as text"):
        write_corpus(Corpus((TokenDocument(np.arange(3), "tokens.npy"),), (), ()), tmp_path)


def test_too_many_people_are_refused() -> None:
    with pytest.raises(ParameterError, match="people=577 must be from 4 to 576; 160 is the default"):
        invent(people=577)


def test_more_documents_than_sentences_are_refused() -> None:
    assert len(invent(people=10, documents=3).documents) == 30
    with pytest.raises(ParameterError, match="documents=5 must be from 1 to 4; 4 is the default"):
        invent(documents=5)
