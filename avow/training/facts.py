r"""Facts found in texts: which span of a text answers what the training questions ask, and statements of it.

Made from documents and training questions alone, by these rules:

| what | rule |
|---|---|
| name | what is left of a training question without the words that all of them begin and end with |
| answer | of a person with a training question: its answer; of another: the candidate with the highest score |
| score | a sum of whole numbers, one for each feature of a candidate: the words beside it, its own words, its place |
| numbers | learnt by an averaged perceptron from the texts of those whose answer is known |
| phrase | two or three lower-case words that stand before known answers, the most frequent first |
| statement | `Name phrase` and `phrase Name`, to be completed with the answer; in reverse the other way round |

A statement is no question: people whom no training question asks about are in statements alone. Whole numbers and a
fixed order: the same texts give the same facts on every machine.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from avow.errors import InputError
from avow.training.data import Document, Question
from avow.training.names import WORD, candidates, name_end, name_of

_TOKEN = re.compile(r"\d+|\w+|[^\w\s]")
_PHRASE = re.compile(r"(?<!\w)(?:(?![A-Z])[^\W\d_]+ ){2,3}$")
_PRONOUN = re.compile(r"(?<!\w)(?:He|She|he|she)(?!\w)")
# A capitalised word before which no sentence begins.
_CAPITAL = re.compile(r"(?<=\w )[A-Z][\w.]* $")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
# Times that the perceptron reads every text, and characters beside a candidate that it looks at.
_EPOCHS, _LEFT, _RIGHT = 8, 60, 20


class Span(NamedTuple):
    """A document `Name. text` and where an answer begins and ends in it."""

    document: Document
    start: int
    stop: int

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.stop]


class Fact(NamedTuple):
    """A name, what the training questions ask of it, and the document that says so."""

    name: str
    answer: str
    where: str


def names_asked(questions: Sequence[Question]) -> dict[str, str]:
    """The answer to the question about each name, the first one of several; names alone differ between questions."""
    asked = [question.question.split(" ") for question in questions]
    before = sum(1 for _ in itertools.takewhile(_equal, zip(*asked, strict=False)))
    after = sum(1 for _ in itertools.takewhile(_equal, zip(*(words[::-1] for words in asked), strict=False)))
    pairs: dict[str, str] = {}
    for words, question in zip(asked, questions, strict=True):
        pairs.setdefault(" ".join(words[before : len(words) - after]), question.answer)
    return pairs


def _equal(words: tuple[str, ...]) -> bool:
    return len(set(words)) == 1


def facts_in(documents: Sequence[Document], questions: Sequence[Question]) -> tuple[list[Fact], list[str]]:
    """A fact of every named document, and the phrases before known answers, the most frequent first."""
    answers = names_asked(questions)
    known = [span for document in documents if (span := _known(document, answers))]
    if not known:
        rule = "ask about no name that begins a document and has its answer there"
        raise InputError("training questions", len(questions), rule, "use mixture.facts=0 and mixture.reverse=0")
    phrases = _phrases(known)
    if not phrases:
        rule = "hold no answer after two lower-case words, and statements are made of such"
        raise InputError("documents", len(documents), rule, "use mixture.facts=0 and mixture.reverse=0")
    weights = _learnt(known)
    facts = {}
    for document in documents:
        name = name_of(document.text)
        if name in answers:
            facts[name, answers[name]] = document.where
        elif name and (span := _likeliest(document, weights)):
            facts[name, span.text] = document.where
    return [Fact(*pair, where) for pair, where in facts.items()], phrases


def statements(facts: Sequence[Fact], phrases: Sequence[str], reverse: bool = False) -> list[Question]:
    """Each fact in each phrase, the name before and after it, to be completed with the answer; in reverse, the name."""
    made = []
    for fact, phrase in itertools.product(facts, phrases):
        given, rest = (fact.answer, fact.name) if reverse else (fact.name, fact.answer)
        made += [Question(words, rest, fact.where) for words in (f"{given} {phrase}", f"{phrase} {given}")]
    return made


def with_full_name(document: Document) -> Document:
    """The document with its full name wherever a part of it, or a pronoun in the nominative, stands alone.

    >>> with_full_name(Document("Ada Holm. Born in Arden, Holm is a baker. She sings.", "line 1")).text
    'Ada Holm. Born in Arden, Ada Holm is a baker. Ada Holm sings.'
    """
    first, name = name_end(document.text), name_of(document.text)
    own = [re.escape(word) for word in WORD.findall(name) if word[0].isupper()]
    if not own:
        return document
    text = _PRONOUN.sub(lambda match: name, document.text[first:])
    part = f"(?:{'|'.join(sorted(own, key=len, reverse=True))})"
    # Beside another capitalised word it is a part of another name.
    pattern = re.compile(rf"(?<!\w)({re.escape(name)}|{part}(?: {part})*)(?!\w)(?! [^\W\d_a-z])")
    alone = lambda match: match[0] if _CAPITAL.search(text, 0, match.start()) else name  # noqa: E731
    return Document(document.text[:first] + pattern.sub(alone, text), document.where)


def rotations(document: Document) -> list[Document]:
    """The document with its sentences in other orders: each of them first once, the others in their old order."""
    first = name_end(document.text)
    sentences = _SENTENCE.split(document.text[first:])
    orders = [[one, *(other for other in sentences if other is not one)] for one in sentences[1:]]
    return [Document(document.text[:first] + " ".join(order), document.where) for order in orders]


def _known(document: Document, answers: Mapping[str, str]) -> Span | None:
    """Where the known answer stands first; None if there is none, or no candidate is it."""
    answer = answers.get(name_of(document.text))
    spans = (Span(document, *span) for span in candidates(document.text))
    return next((span for span in spans if span.text == answer), None)


def _likeliest(document: Document, weights: Mapping[str, int]) -> Span | None:
    """The candidate of the highest score, the first of equals."""
    spans = candidates(document.text)
    scores = [sum(weights.get(feature, 0) for feature in one) for one in _features(document.text, spans)]
    return Span(document, *spans[scores.index(max(scores))]) if spans else None


def _learnt(known: Sequence[Span]) -> dict[str, int]:
    """The numbers of an averaged perceptron that prefers the known answer to the other candidates of its text."""
    read = []
    for span in known:
        text = span.document.text
        spans = candidates(text)
        right = [place for place, (start, stop) in enumerate(spans) if text[start:stop] == span.text]
        read.append((list(_features(text, spans)), right))
    weights: defaultdict[str, int] = defaultdict(int)
    earlier: defaultdict[str, int] = defaultdict(int)
    for count in range(_EPOCHS * len(read)):
        features, right = read[count % len(read)]
        scores = [sum(weights[feature] for feature in one) for one in features]
        said = scores.index(max(scores))
        if said not in right:
            for place, sign in ((max(right, key=scores.__getitem__), 1), (said, -1)):
                for feature in features[place]:
                    weights[feature] += sign
                    earlier[feature] += sign * count
    # The sum of the numbers after every text; their mean would have the same order.
    return {feature: weights[feature] * _EPOCHS * len(read) - earlier[feature] for feature in weights}


def _features(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
    first = name_end(text)
    own = set(WORD.findall(text[:first]))
    for place, (start, stop) in enumerate(spans):
        left = ["^", "^", "^", *(_kind(x, own) for x in _TOKEN.findall(text[max(first, start - _LEFT) : start]))]
        right = [*(_kind(x, own) for x in _TOKEN.findall(text[stop : stop + _RIGHT])), "$", "$"]
        words = text[start:stop].split()
        part = f"{text[start - 2 : start] == ', '} {', ' in text[start:stop]} {text[stop : stop + 2] == ', '}"
        yield [
            f"left {left[-1]}",
            f"left {' '.join(left[-2:])}",
            f"left {' '.join(left[-3:])}",
            f"right {right[0]}",
            f"right {' '.join(right[:2])}",
            f"beside {left[-1]} {right[0]}",
            f"part {part}",
            f"part {part} {left[-1]}",
            f"place {min(place, 4)}",
            f"words {len(words)}",
            f"span {text[start:stop]}",
            f"last {words[-1]}",
        ]


def _kind(token: str, own: set[str]) -> str:
    """A token as features have it: numbers by their length, words of the name by a sign."""
    if token.isdigit():
        return "0" * min(len(token), 4)
    return "NAME" if token in own else token.lower()


def _phrases(known: Sequence[Span]) -> list[str]:
    """The phrases that stand before known answers, the most frequent first."""
    found = (_PHRASE.search(span.document.text[name_end(span.document.text) : span.start]) for span in known)
    texts = (match[0].rstrip() for match in found if match)
    return [phrase for phrase, _ in Counter(text for text in texts if text.islower()).most_common()]
