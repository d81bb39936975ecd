"""Facts are found by rules made from texts and training questions; nobody of the dev questions is asked about."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as TokenizersLibrary
from tokenizers import models, pre_tokenizers

from avow.errors import InputError, ParameterError
from avow.training import (
    PAD,
    ByteTokenizer,
    CharacterTokenizer,
    ClozeExamples,
    Corpus,
    Document,
    FileTokenizer,
    Question,
    Recipe,
    Spans,
    invent,
    read_config,
    read_corpus,
    read_data,
    tokenizer_of,
    write_corpus,
)
from avow.training.examples import _candidate_tokens, examples_of
from avow.training.facts import Fact, facts_in, names_asked, rotations, statements, with_full_name
from avow.training.names import candidates, name_of
from benchmarks.gpu import _byte_pairs

PEOPLE = invent(people=40)
# Every kind of example, and every way to rewrite a text.
EVERYTHING = Recipe(phrasings=3, facts=2, reverse=1, full_name=True, permuted=True)


def true_places(corpus: Corpus) -> dict[str, str]:
    return {**names_asked(corpus.train), **names_asked(corpus.dev)}


def read_examples(corpus: Corpus, recipe: Recipe, epochs: int = 1) -> list[str]:
    """Every example of some epochs as it reads with its last target."""
    tokenizer = CharacterTokenizer.of([*corpus.texts, *(name for name in true_places(corpus))])
    made = examples_of("mixture", corpus, tokenizer, 64, 0, Spans(), "answer", recipe).training
    places = np.arange(epochs * len(made))
    inputs, targets = made.rows(*np.divmod(places, len(made)))
    pairs = zip(inputs, targets, strict=True)
    return [tokenizer.decode([*row, target[(row != PAD).sum() - 1]]) for row, target in pairs]


def asked_about(examples: list[str], names: list[str]) -> set[str]:
    """The names in examples of the form of a question, `question ⁇ answer ⁇`."""
    questions = [example for example in examples if re.fullmatch(r"[^⁇]*\?⁇[^⁇]+⁇", example)]
    assert questions
    return {name for name in names if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for text in questions)}


def texts(corpus: Corpus) -> list[Document]:
    return [document for document in corpus.documents if isinstance(document, Document)]


def test_an_answer_is_found_for_people_whom_no_training_question_asks_about() -> None:
    found, phrases = facts_in(texts(PEOPLE), PEOPLE.train)
    assert {fact.name: fact.answer for fact in found} == true_places(PEOPLE) and len(found) == 40
    assert phrases[:2] == ["was born in", "came from"], phrases
    # It is learnt what the questions ask for: with trades for answers, trades are found.
    trades = {
        name: f"X{trade}"
        for name, trade in re.findall(r"(\w+ \w+) is a (\w+) from", "\n".join(d.text for d in texts(PEOPLE)))
    }
    others = [Document(re.sub(r"(, | is )a (\w+)", r"\1a X\2", d.text), d.where) for d in texts(PEOPLE)]
    asked = [
        dataclasses.replace(q, answer=trades[name])
        for q, name in zip(PEOPLE.train, names_asked(PEOPLE.train), strict=True)
    ]
    untold = {fact.answer for fact in facts_in(others, asked)[0] if fact.name in names_asked(PEOPLE.dev)}
    assert {answer for answer in untold if answer[0] == "X"} and untold != {fact.answer for fact in found}


def test_no_person_of_the_dev_questions_is_asked_about_in_training(tmp_path: Path) -> None:
    names = list(names_asked(PEOPLE.dev))
    assert asked_about(read_examples(PEOPLE, EVERYTHING), names) == set()
    # The planted violation: a training file that asks about a person of the dev questions.
    planted = dataclasses.replace(PEOPLE, train=(*PEOPLE.train, PEOPLE.dev[3]))
    assert asked_about(read_examples(planted, EVERYTHING), names) == {names[3]}
    # Read from files, such a question is left out and counted.
    write_corpus(planted, tmp_path)
    for corpus in (read_corpus(tmp_path), read_data([str(tmp_path)])):
        assert corpus.asked == 1 and len(corpus.train) == len(PEOPLE.train)
        assert asked_about(read_examples(corpus, EVERYTHING), names) == set()


def test_statements_are_completed_with_the_answer_or_the_name_and_hold_no_question() -> None:
    fact = Fact("Ada Holm", "Arden", "line 1")
    both = [statements([fact], ["was born in"], reverse) for reverse in (False, True)]
    assert [f"{one.question}⁇{one.answer}⁇" for some in both for one in some] == [
        "Ada Holm was born in⁇Arden⁇",
        "was born in Ada Holm⁇Arden⁇",
        "Arden was born in⁇Ada Holm⁇",
        "was born in Arden⁇Ada Holm⁇",
    ]
    made = read_examples(PEOPLE, Recipe(language=0, spans=0, cloze=0, questions=0, facts=1, phrasings=2))
    assert len(made) == len(set(made)) == 40 * 2 * 2
    assert all(re.fullmatch(r"[^⁇?]+⁇[^⁇?]+⁇", example) and "Where" not in example for example in made)
    # One that does not fit the block is left out.
    long = (Document(f"Ada {'van ' * 20}Holm. Born in Arden.", ""), *PEOPLE.documents)
    assert (
        read_examples(
            dataclasses.replace(PEOPLE, documents=long),
            Recipe(language=0, spans=0, cloze=0, questions=0, facts=1, phrasings=2),
        )
        == made
    )


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("Ada Holm. Born in Arden, Holm is a baker.", "Born in Arden, Ada Holm is a baker."),
        ("Ada Holm. She sings. Then he, Holm, left.", "Ada Holm sings. Then Ada Holm, Ada Holm, left."),
        ("Ada Holm. Ada Holm met Bo Holm and Holm Hall.", "Ada Holm met Bo Holm and Holm Hall."),
        ("no name, and she sings", "no name, and she sings"),
    ],
)
def test_a_full_name_takes_the_place_of_its_parts_and_of_pronouns(text: str, full: str) -> None:
    assert with_full_name(Document(text, "")).text.removeprefix("Ada Holm. ") == full


def test_sentences_come_in_other_orders_and_none_is_lost() -> None:
    made = [document.text for document in rotations(Document("Ada Holm. One is. Two is. Three is.", ""))]
    assert made == ["Ada Holm. Two is. One is. Three is.", "Ada Holm. Three is. One is. Two is."]
    assert rotations(Document("Ada Holm. One is.", "")) == []


def test_questions_that_fit_no_text_are_refused() -> None:
    strange = [Question("How tall is the tower?", "Tall", "line 1"), Question("How old is the tower?", "Old", "line 2")]
    words = (
        "training questions=2 ask about no name that begins a document and has its answer there; use mixture.facts=0"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        facts_in(texts(PEOPLE), strange)
    short = [Document(f"{name}. {place} baker", "") for name, place in true_places(PEOPLE).items()]
    with pytest.raises(InputError, match="documents=40 hold no answer after two lower-case words"):
        facts_in(short, PEOPLE.train)


@pytest.mark.parametrize("name", ["facts", "reverse", "permuted"])
def test_what_is_held_out_is_not_read_in_statements(name: str) -> None:
    flags = ["schedule.steps=5", "data.task=mixture", f"mixture.{name}={'true' if name == 'permuted' else 1}"]
    with pytest.raises(ParameterError, match=r"reads what is held out, with data.held_out=0.05; use data.held_out=0"):
        read_config(None, flags)
    assert read_config(None, [*flags, "data.held_out=0"]).data.held_out == 0


def test_a_mixture_reads_tokens_of_several_characters_and_cuts_no_span_within_one(tmp_path: Path) -> None:
    _byte_pairs("invented", tmp_path / "pairs.json")
    corpus = invent()
    tokenizer = tokenizer_of(str(tmp_path / "pairs.json"), corpus)
    text = texts(corpus)[0].text
    assert tokenizer.length(text) < len(text) / 2 and tokenizer.edges(text)[-1] == len(text)
    clozes = ClozeExamples(texts(corpus)[:50], tokenizer, 64, 0, window=3)
    inputs, targets = clozes.rows(np.zeros(50, dtype=np.int64), np.arange(50))
    for document, row, target in zip(texts(corpus), inputs, targets, strict=False):
        name, read = name_of(document.text), tokenizer.decode([*row, target[(row != PAD).sum() - 1]])
        before, right, span, _ = read.split("⁇")
        spans = [document.text[start:stop] for start, stop in candidates(document.text)]
        assert before.startswith(f"{name}. ") and span in spans
        assert before.removeprefix(f"{name}. ") + span + right in document.text
    # Tokens that hold the space before a word leave no span to ask for, and the document loses a span instead.
    whole = TokenizersLibrary(
        models.WordLevel({word: i for i, word in enumerate(text.split())}, unk_token=text.split()[0])
    )
    whole.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    assert not list(_candidate_tokens(FileTokenizer(whole.to_str()), text)) and candidates(text)


def test_tokens_without_places_are_refused_in_a_mixture() -> None:
    words = (
        "tokenizer=bytes does not say at which character of a text a token begins; use characters, or a tokenizer.json"
    )
    with pytest.raises(InputError, match=re.escape(words)):
        examples_of("mixture", PEOPLE, ByteTokenizer(), 64, 0, Spans(), "answer", Recipe())
