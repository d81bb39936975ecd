"""What is learnt from: documents and questions, of a corpus folder or invented.

A corpus folder holds `wiki.txt`, one document per line; `train.tsv`, questions and answers separated by a tab; and, for
evaluation alone, `dev.tsv`. A training question that `dev.tsv` asks too is left out. Other sources are read by
`avow.training.sources`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from avow import file_io
from avow.errors import FileError, InputError, ParameterError
from avow.parameters import declared
from avow.training.tokenizer import ByteTokenizer, CharacterTokenizer, FileTokenizer, IdTokenizer, Tokenizer

# The source that is read if none is given: made-up people.
INVENTED = "invented"


@dataclass(frozen=True)
class Document:
    """A text to learn from, and where it stands."""

    text: str = field(repr=False)
    where: str


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """Token ids to learn from, and where they stand."""

    ids: Int[np.ndarray, "n"] = field(repr=False)
    where: str


@dataclass(frozen=True)
class Question:
    """A question, its answer, and where it stands."""

    question: str
    answer: str
    where: str


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from, questions to train on, and questions to evaluate with.

    `empty` counts documents that held nothing and were left out, `asked` training questions that were left out because
    the questions to evaluate with hold them too.
    """

    documents: tuple[Document | TokenDocument, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    empty: int = 0
    asked: int = 0

    @property
    def texts(self) -> Iterator[str]:
        """Everything written that may be trained on: documents and training questions, not dev questions."""
        yield from (document.text for document in self.documents if isinstance(document, Document))
        for question in self.train:
            yield from (question.question, question.answer)

    @property
    def digest(self) -> str:
        """Of everything that may be trained on: equal for the same texts in the same order."""
        return _digest(*(d.text if isinstance(d, Document) else d.ids for d in self.documents), *_pairs(self.train))

    @property
    def dev_digest(self) -> str:
        """Of the questions to evaluate with."""
        return _digest(*_pairs(self.dev))


def _pairs(questions: tuple[Question, ...]) -> list[tuple[str, str]]:
    return [(question.question, question.answer) for question in questions]


def _digest(*parts: str | np.ndarray | tuple[str, str]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            content = part.astype("<i8").tobytes()
        else:
            content = ("\t".join(part) if isinstance(part, tuple) else part).encode(errors="surrogatepass")
        # What kind of part it is and its length, so that no other parts have the same bytes.
        whole.update(f"{type(part).__name__} {len(content)} ".encode())
        whole.update(content)
    return whole.hexdigest()


def check_not_empty(name: str, items: Sized) -> None:
    if not len(items):
        raise ParameterError(name, "[]", "must hold something to read", "give at least one")


@declared()
def corpus_of(name: str) -> Corpus:
    """The embedded corpus of invented people, or that of a folder.

    Args:
        name: "invented", or a folder that `read_corpus` reads.

    Returns:
        The corpus.

    Raises:
        FileError: there is no such folder, or a file in it cannot be read.
    """
    return invent() if name == INVENTED else read_corpus(name)


@declared()
def read_corpus(folder: str | Path) -> Corpus:
    """The corpus of a folder with wiki.txt, train.tsv and dev.tsv; one of the first two must be there.

    Args:
        folder: where the files are.

    Returns:
        The corpus.

    Raises:
        FileError: a file is missing or cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError("corpus", folder, "is not a folder", "give a folder with wiki.txt, train.tsv and dev.tsv")
    documents, train, dev = (folder / name for name in ("wiki.txt", "train.tsv", "dev.tsv"))
    if not documents.exists() and not train.exists():
        raise FileError("corpus", folder, "holds neither wiki.txt nor train.tsv", "put at least one of them there")
    to_train = read_questions(train) if train.exists() else ()
    to_ask = read_questions(dev) if dev.exists() else ()
    kept = not_asked(to_train, to_ask)
    texts = read_documents(documents) if documents.exists() else ()
    return Corpus(texts, kept, to_ask, asked=len(to_train) - len(kept))


def not_asked(train: Sequence[Question], dev: Sequence[Question]) -> tuple[Question, ...]:
    """The training questions that evaluation does not ask too: it would measure what was trained on."""
    asked = {question.question for question in dev}
    return tuple(question for question in train if question.question not in asked)


@declared()
def read_documents(path: str | Path) -> tuple[Document, ...]:
    """The documents of a text file, one per line.

    Args:
        path: the file.

    Returns:
        The documents.

    Raises:
        FileError: the file is missing or cannot be read.
    """
    lines = _lines(Path(path))
    for line in lines:
        if not line.text.strip():
            raise FileError(line.where, "(empty)", "holds no document", "delete the empty line")
    return lines


@declared()
def read_questions(path: str | Path) -> tuple[Question, ...]:
    """The questions and answers of a two-column TSV without a header.

    Args:
        path: the file.

    Returns:
        The questions.

    Raises:
        FileError: the file is missing, or a line is not two columns.
    """
    questions = []
    for line in _lines(Path(path)):
        question, *answers = (column.strip() for column in line.text.split("\t"))
        if len(answers) != 1 or not question or not answers[0]:
            missing = "an answer" if question else "a question"
            rule = f"lacks {missing}" if len(answers) == 1 else f"has {len(answers) + 1} columns, not 2"
            raise FileError(line.where, repr(line.text), rule, "write question, one tab, answer")
        questions.append(Question(question, answers[0], line.where))
    return tuple(questions)


def _lines(path: Path) -> tuple[Document, ...]:
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    # Other separators that `splitlines` knows, such as U+2028, may stand inside a document.
    texts = text.removesuffix("\n").split("\n")
    if texts == [""]:
        raise FileError("file", path, "is empty", "give at least one line")
    return tuple(Document(text, f"{path.name} line {number}") for number, text in enumerate(texts, 1))


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, its ends of lines as they are."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError("file", path, f"cannot be read ({error.strerror})", "check the path") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        name = f"{path.name} line {line}"
        raise FileError(name, f"byte {error.start}", "is not UTF-8", "convert the file") from error


@declared()
def tokenizer_of(name: str, corpus: Corpus) -> Tokenizer:
    """The tokenizer of that name for a corpus: characters, bytes, ids, or the path of a `tokenizers` JSON.

    Args:
        name: "characters", "bytes", "ids", or a path.
        corpus: what it must be able to encode.

    Returns:
        The tokenizer.

    Raises:
        FileError: the file is missing or is not a tokenizer.
        ParameterError: the corpus does not fit.

    >>> from avow.training import invent, tokenizer_of
    >>> tokenizer = tokenizer_of("characters", invent(people=10))
    >>> tokenizer.decode(tokenizer.encode("born", "here"))
    'born'
    """
    ids = [document for document in corpus.documents if isinstance(document, TokenDocument)]
    if name == "characters":
        if ids:
            rule = f"is not the tokenizer of {ids[0].where}, which holds token ids"
            remedy = "name the tokenizer that made them: a tokenizer.json, bytes, or ids if it is not available"
            raise InputError("tokenizer", name, rule, remedy)
        return CharacterTokenizer.of(corpus.texts)
    if name == "bytes":
        return ByteTokenizer()
    if name == "ids":
        if not ids:
            rule = "is for token ids, and the data holds none"
            raise InputError("tokenizer", name, rule, "use characters, bytes, or a tokenizer.json")
        return IdTokenizer(1 + max(int(document.ids.max()) for document in ids))
    return FileTokenizer.read(Path(name))


def encoded(document: Document | TokenDocument, tokenizer: Tokenizer) -> Int[np.ndarray, "n"]:
    """A document in the numbers of a model."""
    if isinstance(document, Document):
        return tokenizer.encode(document.text, document.where)
    return tokenizer.numbers_of(document.ids, document.where)


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

    Args:
        people: how many.
        seed: decides what is drawn.
        documents: texts about each person.

    Returns:
        The corpus.

    Raises:
        ParameterError: a number is out of range.

    >>> from avow.training import invent
    >>> len(invent(people=10, documents=2).documents)
    20
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
    return Corpus(tuple(Document(text, f"invented document {n}") for n, text in enumerate(lines, 1)), train, dev)


@declared()
def write_corpus(corpus: Corpus, folder: str | Path) -> None:
    """Write wiki.txt, train.tsv and dev.tsv, as `read_corpus` reads them.

    Args:
        corpus: what is written.
        folder: where; it is made if it is missing.

    Raises:
        FileError: a file cannot be written.
    """
    if any(isinstance(document, TokenDocument) for document in corpus.documents):
        raise InputError("corpus", "token ids", "cannot be written as text", "give documents that hold text")
    documents = [(document.text,) for document in corpus.documents if isinstance(document, Document)]
    texts: dict[str, list[Any]] = {"wiki.txt": documents}
    texts |= {"train.tsv": _pairs(corpus.train), "dev.tsv": _pairs(corpus.dev)}
    for name, lines in texts.items():
        file_io.write(Path(folder) / name, "".join("\t".join(line) + "\n" for line in lines))
