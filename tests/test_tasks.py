"""A mixture holds its kinds in exact shares, refuses what contradicts itself, and is saved with its run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from avow.errors import InputError, ParameterError
from avow.training import (
    Batches,
    CharacterTokenizer,
    ClozeExamples,
    Corpus,
    LanguageExamples,
    Mixture,
    Question,
    QuestionExamples,
    Recipe,
    Spans,
    invent,
    read_config,
    tokenizer_of,
    train,
)
from avow.training.data import Document
from avow.training.examples import Examples, examples_of
from tests.helpers.runs import small

TEXTS = [f"Ada. she was born in {place} by the sea" for place in ("Rome", "Paris", "Oslo", "Bern", "Kiel", "Bath")]
TOKENIZER = CharacterTokenizer.of([*TEXTS, "abcdxyAd"])


def lines(texts: list[str]) -> list[Document]:
    return [Document(text, "") for text in texts]


def clozes(texts: list[str]) -> ClozeExamples:
    return ClozeExamples(lines(texts), TOKENIZER, 64, 0)


def test_text_needs_a_block_to_be_read_in() -> None:
    with pytest.raises(ParameterError, match="block=0 must be a whole number of at least 1"):
        LanguageExamples(lines(TEXTS), TOKENIZER, 0)


def test_an_epoch_holds_each_kind_in_exact_shares() -> None:
    asked = QuestionExamples([Question("x", "y", ""), Question("y", "x", "")], TOKENIZER, 64)
    read = LanguageExamples(lines(["AdaAda"] * 5), TOKENIZER, 64)
    parts: list[Examples] = [read, clozes(TEXTS[:1] * 5), asked]
    mixture = Mixture(parts, [1, 2, 1])
    assert len(mixture) == 20
    kinds: list[tuple[int, int, int]] = []
    batches = Batches(mixture, 20, 0, block=64)
    for step in range(4):
        inputs, _ = mixture.rows(*batches.read(step))
        texts = [TOKENIZER.decode(row) for row in inputs]
        kinds.append((texts.count("AdaAd"), sum(t.startswith("Ada. ") for t in texts), sum(len(t) == 3 for t in texts)))
    assert kinds == [(5, 10, 5)] * 4


def test_a_kind_is_read_round_and_round_with_draws_anew() -> None:
    mixture = Mixture([clozes(TEXTS), LanguageExamples(lines(["AA"] * 6), TOKENIZER, 64)], [3, 1])
    epochs, indices = np.full(18, 2), np.arange(18)
    # Epoch 2 of the mixture is rounds 6, 7 and 8 of the clozes.
    expected = clozes(TEXTS).rows(6 + indices // 6, indices % 6)
    assert all(np.array_equal(one, other) for one, other in zip(mixture.rows(epochs, indices), expected, strict=True))
    few = Mixture([QuestionExamples([Question(c, "x", "") for c in "abcd"], TOKENIZER, 64), clozes(TEXTS)], [1, 1])
    first = [TOKENIZER.decode(row)[0] for e in range(4) for row in few.rows(np.full(6, e), np.arange(6))[0]]
    assert "".join(first) == "abcd" * 6, "none a second time before all a first"


def invented(recipe: Recipe, corpus: Corpus | None = None) -> int:
    people = invent(people=12, documents=2)
    tokenizer = tokenizer_of("characters", people)
    made = examples_of("mixture", corpus or people, tokenizer, 96, 0, Spans(), "answer", recipe).training
    made.rows(np.zeros(len(made), dtype=np.int64), np.arange(len(made)))
    return len(made)


def test_a_recipe_reads_the_kinds_that_have_a_weight() -> None:
    assert invented(Recipe()) == 5 * 24
    assert invented(Recipe(language=0, spans=0, cloze=3, questions=0)) == 3 * 24
    assert invented(Recipe(language=0, spans=0, cloze=0, questions=1)) == 8, (
        "an epoch of eight questions, not of 24 documents"
    )
    people = invent(people=12, documents=2)
    assert invented(Recipe(questions=0), Corpus(people.documents, (), ())) == 4 * 24
    with pytest.raises(InputError, match="task=mixture needs questions, and the data holds none"):
        invented(Recipe(), Corpus(people.documents, (), ()))
    with pytest.raises(InputError, match="task=mixture needs documents, and the data holds none"):
        invented(Recipe(), Corpus((), people.train, ()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["mixture.cloze=3"], "mixture: cloze=3 has no effect with data.task=language; use data.task=mixture"),
        (
            ["data.task=spans+questions", "mixture.window=5"],
            "mixture: window=5 has no effect with data.task=spans+questions",
        ),
        (["data.task=mixture", "mixture.cloze=0", "mixture.bare=0.5"], "mixture: bare=0.5 contradicts mixture.cloze=0"),
        (["data.task=mixture", "mixture.odds=false"], "mixture: odds=False contradicts mixture.facts=0"),
        (
            ["data.task=mixture", "mixture.spans=0", "mixture.after_name=1"],
            "after_name=1.0 contradicts mixture.spans=0",
        ),
        (
            ["data.task=mixture", *(f"mixture.{kind}=0" for kind in ("language", "spans", "cloze", "questions"))],
            "nothing to read",
        ),
        (["data.task=mixture", "mixture.language=-1"], "mixture: language=-1 must be at least 0"),
        (["data.task=mixture", "mixture.bare=2"], "mixture: bare=2.0 must be from 0 to 1"),
    ],
)
def test_a_contradictory_mixture_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(words)):
        read_config(None, ["schedule.steps=5", *flags])


def test_a_mixture_is_saved_with_its_run_and_trained_with(tmp_path: Path) -> None:
    config = small(tmp_path, "data.task=mixture", "mixture.cloze=3", "mixture.window=9")
    assert type(config).of(config.plain()) == config
    assert (config.mixture.cloze, config.mixture.window, config.mixture.language) == (3, 9, 1)
    assert train(config, tmp_path / "run").step == 14
    # Another mixture is another run.
    with pytest.raises(ParameterError, match="mixture: cloze=2 contradicts 3 of the checkpoint"):
        train(small(tmp_path, "data.task=mixture", "mixture.window=9"), tmp_path / "run", resume=True)
