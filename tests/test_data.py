"""A corpus is read whole or its wrong line is named; characters have numbers; invented people are known by reading."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from avow.errors import FileError, InputError, ParameterError
from avow.training import (
    MASK,
    PAD,
    Vocabulary,
    invent,
    read_corpus,
    read_documents,
    read_questions,
    vocabulary_of,
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


def test_text_comes_back() -> None:
    vocabulary = Vocabulary.of(["Zürich", "Łódź 7"])
    assert vocabulary.decode(vocabulary.encode("Łódź")) == "Łódź"
    assert vocabulary.characters == "".join(sorted(set("ZürichŁódź 7")))
    assert int(vocabulary.encode("Zürich").min()) > max(PAD, MASK)
    assert vocabulary.encode("").shape == (0,)


def test_padding_is_not_shown_and_a_mask_is() -> None:
    assert (PAD, MASK) == (0, 1)
    assert Vocabulary("ab").decode([2, MASK, 3, PAD, PAD]) == "a⁇b"


@pytest.mark.parametrize("number", [-1, 4])
def test_a_number_outside_the_vocabulary_is_not_decoded(number: int) -> None:
    with pytest.raises(InputError, match=f"numbers={number} is not a number of this vocabulary, from 0 to 3; decode"):
        Vocabulary("ab").decode([2, number])


def test_size_counts_padding_and_mask() -> None:
    vocabulary = Vocabulary("abc")
    assert vocabulary.size == 5
    assert int(vocabulary.encode("c")[0]) == vocabulary.size - 1


def test_a_stranger_is_named_with_its_line() -> None:
    words = "wiki.txt line 7='añb' holds 'ñ' (U+00F1), a character outside the vocabulary of 2; remove it"
    with pytest.raises(InputError, match=re.escape(words)):
        Vocabulary("ab").encode("añb", "wiki.txt line 7")


def test_json_round_trip() -> None:
    vocabulary = Vocabulary.of(["Zürich", '"\\\n⁇'])
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert Vocabulary.from_json(vocabulary.to_json()) != Vocabulary.of(["Zürich"])


@pytest.mark.parametrize("text", ["{", "[]", '{"characters": 3}', '{"characters": "ab", "pad": 0}'])
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(FileError, match="write it with to_json"):
        Vocabulary.from_json(text)


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' occurs twice"):
        Vocabulary("aba")


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
