"""What is read: documents and questions from files or invented, and the characters of a model.

A corpus folder holds `wiki.txt`, one document per line; `train.tsv`, questions and answers separated by a tab; and, for
evaluation alone, `dev.tsv`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from avow import file_io
from avow.errors import FileError, InputError, ParameterError
from avow.parameters import declared

PAD, MASK = 0, 1
# What a mask looks like in decoded text; padding is not shown.
MASK_SIGN = "⁇"


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
    """Documents to learn from, questions to train on, and questions to evaluate with."""

    documents: tuple[Line, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """Of everything that may be trained on: equal for the same texts in the same order."""
        return _digest([line.text for line in self.documents], _pairs(self.train))

    @property
    def dev_digest(self) -> str:
        """Of the questions to evaluate with."""
        return _digest(_pairs(self.dev))


def _pairs(questions: tuple[Question, ...]) -> list[list[str]]:
    return [[question.question, question.answer] for question in questions]


def _digest(*texts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def check_not_empty(name: str, items: Sized) -> None:
    if not len(items):
        raise ParameterError(name, "[]", "must hold something to read", "give at least one")


@declared()
def corpus_of(name: str) -> Corpus:
    """The embedded corpus of invented people, or that of a folder."""
    return invent() if name == "invented" else read_corpus(name)


@declared()
def read_corpus(folder: str | Path) -> Corpus:
    """The corpus of a folder with wiki.txt, train.tsv and dev.tsv; one of the first two must be there."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError("corpus", folder, "is not a folder", "give a folder with wiki.txt, train.tsv and dev.tsv")
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
    questions = []
    for line in _lines(Path(path)):
        question, *answers = (column.strip() for column in line.text.split("\t"))
        if len(answers) != 1 or not question or not answers[0]:
            missing = "an answer" if question else "a question"
            rule = f"lacks {missing}" if len(answers) == 1 else f"has {len(answers) + 1} columns, not 2"
            raise FileError(line.where, repr(line.text), rule, "write question, one tab, answer")
        questions.append(Question(question, answers[0], line.where))
    return tuple(questions)


def _lines(path: Path) -> tuple[Line, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError("file", path, f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        name = f"{path.name} line {line}"
        raise FileError(name, f"byte {error.start}", "is not UTF-8", "convert the file") from error
    # Other separators that `splitlines` knows, such as U+2028, may stand inside a document.
    texts = text.removesuffix("\n").split("\n")
    if texts == [""]:
        raise FileError("file", path, "is empty", "give at least one line")
    return tuple(Line(text, f"{path.name} line {number}") for number, text in enumerate(texts, 1))


@declared()
@dataclass(frozen=True)
class Vocabulary:
    """The characters that a model reads and writes; the first has number 2: 0 is padding, 1 the mask."""

    characters: str

    def __post_init__(self) -> None:
        for character, count in Counter(self.characters).items():
            if count > 1:
                raise InputError("characters", repr(character), "occurs twice", "list every character once")

    @staticmethod
    @declared()
    def of(texts: Iterable[str]) -> Vocabulary:
        """The characters of some texts, in the order of their code points."""
        return Vocabulary("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        """The number of tokens, padding and mask included."""
        return len(self.characters) + 2

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters, 2)}

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        """The numbers of a text; `where` is its name in an error."""
        try:
            return np.array([self._numbers[character] for character in text], dtype=np.int64)
        except KeyError as error:
            (unknown,) = error.args
            rule = f"holds {unknown!r} (U+{ord(unknown):04X}), a character outside the vocabulary of {self.size - 2}"
            remedy = "remove it, or train on a text that holds it"
            raise InputError(where, repr(text), rule, remedy) from error

    @declared()
    def decode(self, numbers: Iterable[int]) -> str:
        """The text of some numbers; a mask reads as ⁇, padding as nothing."""
        signs = dict(enumerate(("", MASK_SIGN, *self.characters)))
        try:
            return "".join(signs[int(number)] for number in numbers)
        except KeyError as error:
            rule, remedy = (
                f"is not a number of this vocabulary, from 0 to {self.size - 1}",
                "decode with the model's own",
            )
            raise InputError("numbers", error.args[0], rule, remedy) from error

    def to_json(self) -> str:
        return json.dumps({"characters": self.characters}, ensure_ascii=False)

    @staticmethod
    @declared()
    def from_json(text: str) -> Vocabulary:
        """The vocabulary that `to_json` wrote."""
        try:
            ((name, characters),) = json.loads(text).items()
        except (ValueError, AttributeError):
            name, characters = "", None
        if name != "characters" or not isinstance(characters, str):
            rule = "must be a JSON object with `characters` alone, a string"
            raise FileError("vocabulary", repr(text[:40]), rule, "write it with to_json")
        return Vocabulary(characters)


@declared()
def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """The characters of everything that may be trained on: documents and training questions, not dev questions."""
    texts = [line.text for line in corpus.documents]
    return Vocabulary.of(texts + [text for pair in _pairs(corpus.train) for text in pair])


FIRST = (
    *("Ada", "Bruno", "Clara", "Dario", "Edda", "Felix", "Greta", "Hugo", "Irma", "Jonas", "Karin", "Leo"),
    *("Mina", "Nils", "Olga", "Piet", "Rosa", "Sven", "Tilda", "Urs", "Vera", "Willa", "Xenia", "Yves"),
)
LAST = (
    *("Abel", "Brandt", "Conti", "Dahl", "Ewers", "Falk", "Gallo", "Holm", "Ivers", "Jansen", "Keller", "Lund"),
    *("Moser", "Nagel", "Orlov", "Pohl", "Rossi", "Stein", "Torres", "Udall", "Vogel", "Wirth", "Young", "Zorn"),
)
PLACES = (
    *("Arden", "Belmore", "Corvin", "Dunholt", "Elmsea", "Farrow", "Gildern", "Harrowby"),
    *("Islen", "Jorvik", "Kelda", "Lorne", "Marsk", "Norrow", "Oxley", "Pell"),
)
TRADES = ("baker", "painter", "singer", "smith", "teacher", "weaver")
SENTENCES = (
    "{name} was born in {place}.",
    "{name}, a {trade}, was born in {place}.",
    "{name} is a {trade} from {place}.",
    "{name} came from {place}.",
)


@declared()
def invent(people: int = 160, seed: int = 0, documents: int = len(SENTENCES)) -> Corpus:
    """A corpus about people who never were: so many documents and one question about each person.

    A birthplace is drawn for every person independently, so only reading tells it. Three fifths of the questions are
    for training, the rest for evaluation.
    """
    limits = {"people": (people, 4, len(FIRST) * len(LAST), 160), "documents": (documents, 1, len(SENTENCES), 4)}
    for name, (value, low, high, default) in limits.items():
        if not low <= value <= high:
            raise ParameterError(name, value, f"must be from {low} to {high}", f"{default} is the default")
    draw = random.Random(seed)
    names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], people)
    lines: list[str] = []
    questions = []
    for name in names:
        # Unequal chances, as real places have: the most common answer is right in a few percent of the questions.
        place = draw.choices(PLACES, weights=range(2 * len(PLACES), len(PLACES), -1))[0]
        trade = draw.choice(TRADES)
        for sentence in draw.sample(SENTENCES, documents):
            # The name begins every document, so that a cut at the end never hides who it is about; and it stands in
            # the sentence again, since models do not find facts by a name that they met in one position alone.
            lines.append(f"{name}. " + sentence.format(name=name, place=place, trade=trade))
        questions.append((f"Where was {name} born?", place))
    draw.shuffle(lines)
    cut = people - people * 2 // 5
    train, dev = (
        tuple(Question(*pair, f"invented {kind} {number}") for number, pair in enumerate(part, 1))
        for kind, part in (("train", questions[:cut]), ("dev", questions[cut:]))
    )
    return Corpus(tuple(Line(text, f"invented document {n}") for n, text in enumerate(lines, 1)), train, dev)


@declared()
def write_corpus(corpus: Corpus, folder: str | Path) -> None:
    """Write wiki.txt, train.tsv and dev.tsv, as `read_corpus` reads them."""
    texts = {"wiki.txt": [[line.text] for line in corpus.documents]}
    texts |= {"train.tsv": _pairs(corpus.train), "dev.tsv": _pairs(corpus.dev)}
    for name, lines in texts.items():
        file_io.write(Path(folder) / name, "".join("\t".join(line) + "\n" for line in lines))
