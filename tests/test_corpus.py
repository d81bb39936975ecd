"""A corpus is read whole, or the line that is wrong is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from avow.errors import FileError
from avow.training import read_corpus, read_documents, read_questions


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
