"""What is held out is never trained on, is the same whenever it is chosen, and its loss is what a plain loop finds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from avow.errors import NonFiniteError
from avow.training import (
    PAD,
    CharacterTokenizer,
    Document,
    LanguageExamples,
    Recipe,
    Spans,
    TextLoss,
    invent,
    text_loss,
    tokenizer_of,
    train,
)
from avow.training.distributed import Ranks
from avow.training.examples import HELD_OUT_STEPS, Examples, TaskExamples, examples_of
from avow.training.loop import Trainer
from avow.training.run_folder import read_log
from tests.helpers.runs import small

ALONE = Ranks(0, 1, torch.device("cpu"))
# One document about each person: nothing of it stands in another.
PEOPLE = invent(people=40, documents=1)
TOKENIZER = tokenizer_of("characters", PEOPLE)
TASKS = ("language", "spans", "questions", "spans+questions", "mixture")


def divided(task: str, share: float = 0.2, seed: int = 0, most: int = 10**9) -> TaskExamples:
    return examples_of(task, PEOPLE, TOKENIZER, 96, seed, Spans(), "answer", Recipe(), share, most)


def texts_in(examples: Examples | None, epochs: int = 3) -> set[str]:
    """What examples read over some epochs."""
    found: set[str] = set()
    for epoch in range(epochs if examples is not None else 0):
        assert examples is not None
        inputs, _ = examples.rows(np.full(len(examples), epoch), np.arange(len(examples)))
        found |= {TOKENIZER.decode(row) for row in inputs}
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_share_is_held_out_and_every_example_is_on_one_side(task: str) -> None:
    whole, some = divided(task, 0.0), divided(task)
    assert whole.held_out is None and some.held_out is not None
    if task != "mixture":  # whose epochs read its kinds in shares
        assert len(some.training) + len(some.held_out) == len(whole.training)
        assert len(some.held_out) / len(whole.training) == pytest.approx(0.2, abs=0.04)
    assert texts_in(some.training) & texts_in(some.held_out) == set()


def test_a_document_that_is_held_out_is_in_no_part_of_a_mixture() -> None:
    def names(examples: Examples | None) -> set[str]:
        return {text.partition(". ")[0] for text in texts_in(examples, 9) if ". " in text and "⁇" not in text}

    some = divided("mixture")
    held, read = names(some.held_out), names(some.training)
    assert len(held) == 8 and len(read) == 32 and held & read == set()
    # Of these names, no cloze and no span is trained on either; questions are held out by themselves.
    others = {text for text in texts_in(some.training, 9) if not text.startswith("Where")}
    assert not any(name in text for name in held for text in others)


def test_the_seed_alone_decides_what_is_held_out() -> None:
    first, again, other = (texts_in(divided("language", seed=seed).held_out) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("windows", "share", "most", "held"),
    [(1, 0.05, 99, 0), (2, 0.05, 99, 1), (3, 0.05, 99, 1), (100, 0.05, 99, 5), (100, 0.9, 99, 50), (100, 0.5, 8, 8)],
)
def test_something_is_held_out_of_any_text_and_never_most_of_it(
    windows: int, share: float, most: int, held: int
) -> None:
    documents = [Document("ab" * (4 * windows) + "a", "book")]
    corpus = type(PEOPLE)(tuple(documents), (), ())
    found = examples_of("language", corpus, CharacterTokenizer("ab"), 8, 0, Spans(), "answer", Recipe(), share, most)
    assert (0 if found.held_out is None else len(found.held_out)) == held
    assert len(found.training) == windows - held


def test_a_measure_costs_a_few_steps_at_most(tmp_path: Path) -> None:
    trainer = Trainer(
        small(tmp_path, "data.held_out=0.5", "data.batch=1", "data.accumulate=1"), tmp_path / "run", ALONE
    )
    assert trainer.reading.held_out == HELD_OUT_STEPS and trainer.reading.examples == 20 - HELD_OUT_STEPS


def plain_loss(trainer: Trainer) -> float:
    """The mean loss over what is held out, one example at a time."""
    assert trainer.held_out is not None
    nats, count = 0.0, 0
    for index in range(len(trainer.held_out.examples)):
        ids, targets = trainer.held_out.examples.rows(np.array([0]), np.array([index]))
        with torch.no_grad():
            scores = trainer.model.eval()(torch.from_numpy(ids)).double().log_softmax(-1)[0]
        for place, target in enumerate(targets[0]):
            if target != PAD:
                nats -= float(scores[place, target])
                count += 1
    return nats / count


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_the_mean_over_all_targets_held_out(tmp_path: Path, task: str) -> None:
    trainer = Trainer(small(tmp_path, f"data.task={task}", "data.batch=2"), tmp_path / "run", ALONE)
    found = trainer.measure_held_out()
    assert found.loss == pytest.approx(plain_loss(trainer), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    # A mask is no character, and only plain text has bits per character.
    assert (found.bits_per_character is not None) == (task == "language")


def test_measuring_changes_nothing_of_the_run(tmp_path: Path) -> None:
    often = train(small(tmp_path, "run.evaluate_every=1", "run.log_every=1"), tmp_path / "often")
    never = train(small(tmp_path, "run.evaluate_every=1000", "run.log_every=1"), tmp_path / "never")
    pairs = zip(often.model.state_dict().values(), never.model.state_dict().values(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    both = [read_log(tmp_path / name / "log.csv") for name in ("often", "never")]
    assert [line.loss for line in both[0]] == [line.loss for line in both[1]]
    # At the end it is always measured.
    assert [line.step for line in both[1] if line.held_out_loss is not None] == [14]
    assert all(line.held_out_loss is not None for line in both[0])
    assert both[0][-1].held_out_loss == both[1][-1].held_out_loss


def test_nothing_is_held_out_where_that_is_asked_for(tmp_path: Path) -> None:
    told: list[str] = []
    done = train(small(tmp_path, "data.held_out=0"), tmp_path / "run", tell=told.append)
    assert done.reading.held_out == 0 and "20 windows of 64 tokens, none held out" in told[0]
    assert all(line.held_out_loss is None for line in read_log(tmp_path / "run" / "log.csv"))


def test_bits_are_counted_for_characters_and_not_for_tokens() -> None:
    loss = TextLoss(nats=math.log(2) * 30, tokens=20, characters=10)
    assert (loss.loss, loss.bits_per_character) == (pytest.approx(1.5 * math.log(2)), pytest.approx(3.0))
    assert str(loss) == "1.040 nats per token, perplexity 2.83, 3.000 bits per character"
    assert TextLoss(1.0, 2, None).bits_per_character is None
    assert loss.plain()["perplexity"] == loss.perplexity


def test_a_model_that_predicts_well_has_a_small_loss_and_one_that_gives_no_numbers_is_refused() -> None:
    class Sure(torch.nn.Module):
        """Knows that b follows a and a follows b, with these odds."""

        def __init__(self, odds: float) -> None:
            super().__init__()
            self.odds, self.config = odds, type("Config", (), {"block": 8})()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*ids.shape, 4), -math.inf)
            logits[..., 2:] = 0.0
            logits.scatter_(-1, (5 - ids).clamp(2, 3)[..., None], math.log(self.odds) if self.odds > 0 else math.nan)
            return logits

    tokenizer = CharacterTokenizer("ab")
    examples = LanguageExamples([Document("ab" * 30, "text")], tokenizer, 8)
    for odds in (1.0, 9.0):
        found = text_loss(Sure(odds), tokenizer, examples, size=3)
        assert found.loss == pytest.approx(math.log((1 + odds) / odds), rel=1e-5) and found.tokens == 59
        assert found.characters == 59
    with pytest.raises(NonFiniteError, match="loss=nan is not finite; load an earlier checkpoint"):
        text_loss(Sure(-1.0), tokenizer, examples)
