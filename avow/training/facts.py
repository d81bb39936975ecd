r"""Facts found in texts: which span of a text answers what the training questions ask, and statements of it.

Made from documents and training questions alone, by these rules:

| what | rule |
|---|---|
| name | what is left of a training question without the words that all of them begin and end with |
| answer | of a person with a training question: its answer alone; of another: 64 answers, by the odds |
| score | a sum of whole numbers, one for each feature of a candidate: the words beside it, its own words, its place; \
that no candidate is the answer has the score 0 |
| numbers | learnt by an averaged perceptron from the texts of those whose answer is known |
| odds | those of the 64 known people whose highest scores are as far ahead of the next: each gives the candidate of \
the rank that its own answer has, or this answer where it is no candidate; judged by what is learnt from others |
| phrase | two or three lower-case words that stand before known answers, the most frequent first |
| statement | `Name phrase` and `phrase Name`, to be completed with the answer; in reverse the other way round |

Of several documents of a name the first one counts.

A statement is no question: people whom no training question asks about are in statements alone. Whole numbers and a
fixed order: the same texts give the same facts on every machine.
"""

from __future__ import annotations

import itertools
import math
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
# Groups of known people, each judged by what is learnt from the others; answers of a person by the odds, and how far
# apart neighbours are put: without a common factor and near the golden section, so that equal ones are spread evenly.
_GROUPS, _PARTS, _STRIDE = 5, 64, 39


class Candidates(NamedTuple):
    """The candidates of a text and the features of each; the last one, an empty text without any, is none of them."""

    texts: list[str]
    features: list[list[str]]


class Fact(NamedTuple):
    """A name, answers to what the training questions ask of it, as often as their odds are, and the document."""

    name: str
    answers: tuple[str, ...]
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


def facts_in(
    documents: Sequence[Document], questions: Sequence[Question], odds: bool = True
) -> tuple[list[Fact], list[str]]:
    """A fact of every named document, and the phrases before known answers, the most frequent first.

    Without odds, a person whose answer is not known has the likeliest one alone.
    """
    answers = names_asked(questions)
    named: dict[str, Document] = {}
    for document in documents:
        named.setdefault(name_of(document.text), document)
    named.pop("", None)
    read = {name: made for name, one in named.items() if len((made := _candidates(one.text)).texts) > 1}
    known = [(made, answers[name]) for name, made in read.items() if name in answers]
    if not any(answer in made.texts for made, answer in known):
        rule = "ask about no name that begins a document and has its answer there"
        raise InputError("training questions", len(questions), rule, "use mixture.facts=0 and mixture.reverse=0")
    phrases = _phrases(documents, answers)
    if not phrases:
        rule = "hold no answer after two lower-case words, and statements are made of such"
        raise InputError("documents", len(documents), rule, "use mixture.facts=0 and mixture.reverse=0")
    weights, judged = _learnt(known), _judged(known) if odds else []
    given: dict[str, tuple[str, ...]] = {name: (answer,) for name, answer in answers.items()}
    for name in read.keys() - given.keys():
        ranking, margin = _ranked(read[name], weights)
        given[name] = _by_odds(ranking, margin, judged) if odds else (ranking[0],)
    return [Fact(name, given[name], one.where) for name, one in named.items() if name in given], phrases


def statements(facts: Sequence[Fact], phrases: Sequence[str], reverse: bool = False) -> list[list[Question]]:
    """Each fact in each phrase, the name before and after it, to be completed with the answer; in reverse, the name.

    Every statement is a list, with each answer that it has in turn; all lists are equally long.
    """
    made, orders = [], list(itertools.product(phrases, (True, False)))
    # So many turns that all statements of a fact together have each of its answers equally often.
    last = math.lcm(_PARTS, len(orders))
    for fact, (place, (phrase, first)) in itertools.product(facts, enumerate(orders)):
        turns = [fact.answers[turn % len(fact.answers)] for turn in range(place, last, len(orders))]
        said = {}
        for answer in set(turns):
            given, rest = (answer, fact.name) if reverse else (fact.name, answer)
            said[answer] = Question(f"{given} {phrase}" if first else f"{phrase} {given}", rest, fact.where)
        made.append([said[answer] for answer in turns])
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


def _candidates(text: str) -> Candidates:
    spans = candidates(text)
    return Candidates([*(text[start:stop] for start, stop in spans), ""], [*_features(text, spans), []])


def _ranked(read: Candidates, weights: Mapping[str, int]) -> tuple[list[str], int]:
    """Candidates by their scores, the highest first, and how far it is ahead of the next, or of none of them."""
    scores: dict[str, int] = {}
    for text, features in zip(*read, strict=True):
        score = sum(weights.get(feature, 0) for feature in features)
        scores[text] = max(score, scores.get(text, score))
    ranking = sorted(filter(None, scores), key=scores.__getitem__, reverse=True)
    return ranking, scores[ranking[0]] - max(scores[text] for text in ("", *ranking[1:2]))


def _judged(known: Sequence[tuple[Candidates, str]]) -> list[tuple[int, int, str]]:
    """How far the first is ahead for each known person, the rank of the answer and itself, by what others teach."""
    judged = []
    for group in range(_GROUPS):
        weights = _learnt([one for place, one in enumerate(known) if place % _GROUPS != group])
        for read, answer in known[group::_GROUPS]:
            ranking, margin = _ranked(read, weights)
            judged.append((margin, ranking.index(answer) if answer in ranking else _PARTS, answer))
    return judged


def _by_odds(ranking: Sequence[str], margin: int, judged: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    """The answers that known people give whose first candidate is as far ahead, equal ones spread evenly."""
    near = sorted(judged, key=lambda one: abs(one[0] - margin))[:_PARTS]
    ranked = sorted(near, key=lambda one: one[1])
    given = [ranking[rank] if rank < len(ranking) else answer for _, rank, answer in ranked]
    return tuple(given[place * _STRIDE % _PARTS * len(given) // _PARTS] for place in range(_PARTS))


def _learnt(known: Sequence[tuple[Candidates, str]]) -> dict[str, int]:
    """The numbers of an averaged perceptron that prefers the known answer, or none, to the other candidates."""
    places = [[place for place, text in enumerate(read.texts) if text == answer] for read, answer in known]
    weights: defaultdict[str, int] = defaultdict(int)
    earlier: defaultdict[str, int] = defaultdict(int)
    for count in range(_EPOCHS * len(known)):
        features = known[count % len(known)][0].features
        right = places[count % len(known)] or [len(features) - 1]
        scores = [sum(weights[feature] for feature in one) for one in features]
        said = scores.index(max(scores))
        if said not in right:
            for place, sign in ((max(right, key=scores.__getitem__), 1), (said, -1)):
                for feature in features[place]:
                    weights[feature] += sign
                    earlier[feature] += sign * count
    # The mean of the numbers after every text, in thousandths, so that numbers learnt from fewer people compare.
    return {feature: 1000 * weights[feature] - 1000 * earlier[feature] // (_EPOCHS * len(known)) for feature in weights}


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


def _phrases(documents: Sequence[Document], answers: Mapping[str, str]) -> list[str]:
    """The phrases that stand before known answers, the most frequent first."""
    found = []
    for text in (document.text for document in documents):
        starts = [start for start, stop in candidates(text) if text[start:stop] == answers.get(name_of(text))]
        found += [one.rstrip() for start in starts[:1] for one in _PHRASE.findall(text[name_end(text) : start])]
    return [phrase for phrase, _ in Counter(phrase for phrase in found if phrase.islower()).most_common()]
