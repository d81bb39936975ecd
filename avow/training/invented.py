"""People who never were, with birthplaces that can be learnt and not guessed: a corpus without files.

Every person has a few documents of one sentence each, and one question; all questions ask of people in the documents.
A place is drawn for every person by itself, so that nothing but reading tells it.
"""

from __future__ import annotations

import random
from pathlib import Path

from avow import file_io
from avow.errors import ParameterError
from avow.parameters import declared
from avow.training.corpus import Corpus, Line, Question

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
    """Some hundred people, so many documents each; three fifths of the questions train, the rest judge."""
    if not 4 <= people <= len(FIRST) * len(LAST):
        rule = f"must be from 4 to {len(FIRST) * len(LAST)}"
        raise ParameterError("people", people, rule, "160 is the default")
    if not 1 <= documents <= len(SENTENCES):
        raise ParameterError("documents", documents, f"must be from 1 to {len(SENTENCES)}", "4 is the default")
    draw = random.Random(seed)
    names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], people)
    lines: list[str] = []
    questions = []
    for name in names:
        # Unequal chances, as places have: the commonest answer is worth a few points and no more.
        place = draw.choices(PLACES, weights=range(2 * len(PLACES), len(PLACES), -1))[0]
        trade = draw.choice(TRADES)
        for sentence in draw.sample(SENTENCES, documents):
            # The name comes first in every document, so that a cut at the end never hides who it is about; and again
            # in the sentence, as what is known of a name in one place only is not found when another asks for it.
            lines.append(f"{name}. " + sentence.format(name=name, place=place, trade=trade))
        questions.append((f"Where was {name} born?", place))
    draw.shuffle(lines)
    cut = people - people * 2 // 5
    train, dev = (
        tuple(Question(*pair, f"invented {kind} {number}") for number, pair in enumerate(part, 1))
        for kind, part in (("train", questions[:cut]), ("dev", questions[cut:]))
    )
    read = tuple(Line(text, f"invented document {number}") for number, text in enumerate(lines, 1))
    return Corpus(read, train, dev)


@declared()
def write_corpus(corpus: Corpus, folder: str | Path) -> None:
    """The corpus as wiki.txt, train.tsv and dev.tsv, as `read_corpus` reads them."""
    texts = {"wiki.txt": [line.text for line in corpus.documents]}
    for name, questions in (("train.tsv", corpus.train), ("dev.tsv", corpus.dev)):
        texts[name] = [f"{asked.question}\t{asked.answer}" for asked in questions]
    for name, lines in texts.items():
        file_io.write(Path(folder) / name, "".join(f"{line}\n" for line in lines))
