"""Facts are found by rules made from texts and training questions; nobody of the dev questions is asked about."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
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
from avow.training.examples import StatementExamples, _candidate_tokens, examples_of
from avow.training.facts import (
    Fact,
    _candidates,
    _judged,
    _learnt,
    _ranked,
    facts_in,
    names_asked,
    rotations,
    statements,
    with_full_name,
)
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
    assert {fact.name: set(fact.answers) for fact in found} == {n: {place} for n, place in true_places(PEOPLE).items()}
    assert len(found) == 40
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
    untold = {answer for f in facts_in(others, asked)[0] if f.name in names_asked(PEOPLE.dev) for answer in f.answers}
    assert {answer for answer in untold if answer[0] == "X"} and untold != {a for fact in found for a in fact.answers}


def uncertain(people: int) -> tuple[list[Document], list[Question]]:
    """People of whom the text names two places: of 16, 11 come from the first, 4 from the second, 1 from neither."""
    documents = [
        Document(f"Ada{i} H{i}. who was born in P{i}, then in S{i} or so.", f"line {i}") for i in range(people)
    ]
    places = [{2: "S", 5: "N", 6: "S", 10: "S", 14: "S"}.get(i % 16, "P") + str(i) for i in range(people)]
    return documents, [Question(f"Where was Ada{i} H{i} born?", place, "") for i, place in enumerate(places)]


def test_answers_are_stated_as_often_as_they_are_right_of_others() -> None:
    documents, questions = uncertain(70)
    asked, unasked = questions[:64], ("Ada66 H66", "Ada69 H69")
    facts = {fact.name: fact for fact in facts_in(documents, asked)[0]}
    assert len(facts) == 70 and facts["Ada2 H2"].answers == ("S2",)
    for name in unasked:
        count = Counter(answer if name[3:5] in answer else "another's" for answer in facts[name].answers)
        assert count == {f"P{name[3:5]}": 44, f"S{name[3:5]}": 16, "another's": 4}, count
        others = {answer for answer in facts[name].answers if name[3:5] not in answer}
        assert others == {f"N{i}" for i in range(5, 64, 16)}
    # Without odds, the likeliest alone.
    assert all(len(fact.answers) == 1 for fact in facts_in(documents, asked, odds=False)[0])
    # Judged by what is learnt from themselves, twice as many known people would have their answers first.
    known = [(_candidates(d.text), q.answer) for d, q in zip(documents, asked, strict=False)]
    weights = _learnt(known)
    assert sum(_ranked(read, weights)[0][0] == answer for read, answer in known) >= 2 * sum(
        rank == 0 for _, rank, _ in _judged(known)
    )


@pytest.mark.parametrize("phrases", [1, 3, 4])
def test_every_statement_has_the_answers_in_turn_and_all_together_have_each_equally_often(phrases: int) -> None:
    documents, questions = uncertain(70)
    fact = facts_in(documents, questions[:64])[0][66]
    made = statements([fact], [f"phrase {i}" for i in range(phrases)])
    assert len(made) == 2 * phrases and len({len(turns) for turns in made}) == 1
    total = Counter(one.answer for turns in made for one in turns)
    assert {answer: 64 * count // total.total() for answer, count in total.items()} == Counter(fact.answers)
    for turns in made:
        assert len({one.question for one in turns}) == 1
        assert abs(sum(one.answer == "P66" for one in turns) / len(turns) - 44 / 64) <= 1 / len(turns)
    # Equal answers stand apart: no eight statements one after another have only one answer.
    assert all(set(fact.answers[i : i + 8]) - {"P66"} for i in range(0, 64, 8))
    examples = StatementExamples(made, CharacterTokenizer.of([q.question + q.answer for t in made for q in t]), 64)
    epochs = np.arange(2 * len(made[0]))
    _, targets = examples.take(np.array([1])).rows(epochs, np.zeros_like(epochs))
    said = [tuple(row[row != PAD]) for row in targets]
    assert len(set(said)) == len({one.answer for one in made[1]}) and said[: len(said) // 2] == said[len(said) // 2 :]


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
    fact = Fact("Ada Holm", ("Arden",), "line 1")
    both = [statements([fact], ["was born in"], reverse) for reverse in (False, True)]
    assert all(len(turns) == 32 and len(set(turns)) == 1 for some in both for turns in some)
    assert [f"{one.question}⁇{one.answer}⁇" for some in both for one, *_ in some] == [
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
