"""What is read: documents, one per line, and questions with answers, two columns parted by a tab.

A corpus folder holds `wiki.txt`, `train.tsv` and, for evaluation alone, `dev.tsv`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.errors import FileError, ParameterError
from avow.parameters import declared


@dataclass(frozen=True)
class Line:
    """One line of a corpus, and where it stands."""

    text: str
    where: str


@dataclass(frozen=True)
class Question:
    """A question, its answer, and where it stands."""

    question: str
    answer: str
    where: str


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from, questions to learn answering with, and questions to be judged by."""

    documents: tuple[Line, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """Of all that may be trained on: the same for the same texts in the same order, wherever they stand."""
        return digest_of([line.text for line in self.documents], questions_of(self.train))

    @property
    def dev_digest(self) -> str:
        """Of the questions to be judged by."""
        return digest_of(questions_of(self.dev))


def questions_of(asked: tuple[Question, ...]) -> list[list[str]]:
    return [[one.question, one.answer] for one in asked]


def digest_of(*texts: list[Any]) -> str:
    """Equal for equal texts, and for no others that anybody finds."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def check_some(name: str, given: Sized) -> None:
    """Raise where there is nothing to read."""
    if not len(given):
        raise ParameterError(name, "[]", "must hold something to read", "give at least one")


@declared()
def read_corpus(folder: str | Path) -> Corpus:
    """The corpus of a folder with wiki.txt, train.tsv and dev.tsv; what is not there is empty, but not all of it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError("corpus", folder, "is no folder", "give a folder with wiki.txt, train.tsv and dev.tsv")
    documents, train, dev = (folder / name for name in ("wiki.txt", "train.tsv", "dev.tsv"))
    if not documents.exists() and not train.exists():
        raise FileError("corpus", folder, "holds neither wiki.txt nor train.tsv", "put at least one of them there")
    return Corpus(
        read_documents(documents) if documents.exists() else (),
        read_questions(train) if train.exists() else (),
        read_questions(dev) if dev.exists() else (),
    )


@declared()
def read_documents(path: str | Path) -> tuple[Line, ...]:
    """The documents of a text file, one per line."""
    lines = _lines(Path(path))
    for line in lines:
        if not line.text.strip():
            raise FileError(line.where, "(empty)", "holds no document", "delete the empty line")
    return lines


@declared()
def read_questions(path: str | Path) -> tuple[Question, ...]:
    """The questions and answers of a two-column TSV without a header."""
    found = []
    for line in _lines(Path(path)):
        columns = line.text.split("\t")
        if len(columns) != 2:
            rule = f"has {len(columns)} columns, not 2"
            raise FileError(line.where, repr(line.text), rule, "write question, one tab, answer")
        question, answer = (column.strip() for column in columns)
        if not question or not answer:
            what = "an answer" if question else "a question"
            raise FileError(line.where, repr(line.text), f"lacks {what}", "write question, one tab, answer")
        found.append(Question(question, answer, line.where))
    return tuple(found)


def _lines(path: Path) -> tuple[Line, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError("file", path, f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        rule = "is not UTF-8"
        raise FileError(f"{path.name} line {line}", f"byte {error.start}", rule, "convert the file") from error
    # Other separators that `splitlines` knows, such as U+2028, may stand inside a document.
    texts = text.removesuffix("\n").split("\n")
    if texts == [""]:
        raise FileError("file", path, "is empty", "give at least one line")
    return tuple(Line(text, f"{path.name} line {number}") for number, text in enumerate(texts, 1))
