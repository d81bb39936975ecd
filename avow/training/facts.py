r"""Facts found in texts: which span of a text answers the question that the training questions ask.

Made from documents and training questions alone, by these rules:

| what | rule |
|---|---|
| name | what is left of a training question without the words that all of them begin and end with |
| answer | of a person with a training question: its answer; of another: the candidate with the highest score |
| score | a sum of whole numbers, one for each feature of a candidate: the words beside it, its own words, its place |
| numbers | learnt by an averaged perceptron from the texts of those whose answer is known |
| phrase | two or three lower-case words that stand before known answers, the most frequent first |
| statement | `Name. Name phrase answer.` |

Whole numbers and a fixed order: the same texts give the same facts on every machine.
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
_PHRASE = re.compile(r"(?:[^\W\d_]+ ){2,3}$")
_PRONOUN = re.compile(r"(?<!\w)(?:He|She|he|she)(?!\w)")
# A capitalised word before which no sentence begins.
_CAPITAL = re.compile(r"(?<=\w )[A-Z][\w.]* $")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
# Times that the perceptron reads every text, and characters beside a candidate that it looks at.
_EPOCHS, _LEFT, _RIGHT = 8, 60, 20


class Fact(NamedTuple):
    """A document `Name. text` and where the span to remember begins and ends in it."""

    document: Document
    start: int
    stop: int


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


def facts_in(documents: Sequence[Document], questions: Sequence[Question], phrasings: int) -> list[Fact]:
    """Every document with the answer found in it, and so many statements of the same."""
    answers = names_asked(questions)
    known = [fact for document in documents if (fact := _known(document, answers))]
    if not known:
        rule = "ask about no name that begins a document and has its answer there"
        raise InputError("training questions", len(questions), rule, "use mixture.facts=0 and mixture.reverse=0")
    weights = _learnt(known)
    phrases = [phrase for phrase, _ in _phrases(known).most_common(phrasings)]
    made = []
    for document in documents:
        name = name_of(document.text)
        fact = _known(document, answers) or _likeliest(document, weights)
        if not name or fact is None:
            continue
        answer = answers.get(name, document.text[fact.start : fact.stop])
        if document.text[fact.start : fact.stop] == answer:
            made.append(fact)
        for phrase in phrases:
            text = f"{name}. {name} {phrase}{answer}."
            made.append(Fact(Document(text, document.where), len(text) - 1 - len(answer), len(text) - 1))
    return made


def reversed_facts(found: Sequence[Fact]) -> list[Fact]:
    """`Answer. Name` for each fact that a text holds: the name is to be remembered."""
    made = {}
    for document, start, stop in found:
        name, answer = name_of(document.text), document.text[start:stop]
        made[name, answer] = Fact(
            Document(f"{answer}. {name}", document.where), len(answer) + 2, len(answer) + 2 + len(name)
        )
    return list(made.values())


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


def _known(document: Document, answers: Mapping[str, str]) -> Fact | None:
    """Where the known answer stands first; None where there is none, or no candidate is it."""
    answer = answers.get(name_of(document.text))
    spans = ((start, stop) for start, stop in candidates(document.text) if document.text[start:stop] == answer)
    found = next(spans, None)
    return Fact(document, *found) if found else None


def _likeliest(document: Document, weights: Mapping[str, int]) -> Fact | None:
    """The candidate of the highest score, the first of equals."""
    spans = candidates(document.text)
    scores = [sum(weights.get(feature, 0) for feature in one) for one in _features(document.text, spans)]
    return Fact(document, *spans[scores.index(max(scores))]) if spans else None


def _learnt(known: Sequence[Fact]) -> dict[str, int]:
    """The numbers of an averaged perceptron that prefers the known answer to the other candidates of its text."""
    read = []
    for document, start, stop in known:
        spans = candidates(document.text)
        answer = document.text[start:stop]
        right = [place for place, (first, last) in enumerate(spans) if document.text[first:last] == answer]
        read.append((list(_features(document.text, spans)), right))
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


def _phrases(known: Sequence[Fact]) -> Counter[str]:
    """How often each phrase stands before a known answer, the most frequent first."""
    found = (_PHRASE.search(document.text[name_end(document.text) : start]) for document, start, _ in known)
    texts = (match[0][0].lower() + match[0][1:] for match in found if match)
    return Counter(text for text in texts if text.islower())
