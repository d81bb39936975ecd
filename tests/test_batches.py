"""Batches read every example once an epoch, in an order that one integer knows, and compute little padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from avow.errors import ParameterError
from avow.training import PAD, Batches, CharacterTokenizer, Mixture, Question, QuestionExamples, SpanExamples
from avow.training.batches import Step
from avow.training.data import Document

TOKENIZER = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz0123456789")
BLOCK = 64


def spans(count: int = 50) -> SpanExamples:
    texts = [f"{number:03d}" + "abcdefghijklmnopqrstuvwxyz" * (1 + number % 3) for number in range(count)]
    return SpanExamples([Document(text, "") for text in texts], TOKENIZER, BLOCK, seed=0, from_start=True)


def batches(size: int = 16, count: int = 50, **options: int) -> Batches:
    return Batches(spans(count), size, 0, block=BLOCK, **options)


def rows(step: Step) -> list[tuple[int, ...]]:
    """Every pair of inputs and targets without padding, in order of content."""
    found = []
    for ids, targets in step.micros:
        for one, other in zip(ids.tolist(), targets.tolist(), strict=True):
            size = sum(number != PAD for number in one)
            assert not any(one[size:]) and not any(other[size:])
            found.append((*one[:size], -1, *other[:size]))
    return sorted(found)


def test_an_epoch_reads_every_example_once() -> None:
    made = batches(size=15)
    pairs = np.concatenate([np.stack(made.read(step), 1) for step in range(10)])  # 150 places are 3 epochs of 50
    assert len({tuple(pair) for pair in pairs.tolist()}) == 150
    assert all(sorted(pairs[pairs[:, 0] == epoch, 1]) == list(range(50)) for epoch in range(3))
    first, second = (pairs[pairs[:, 0] == epoch, 1].tolist() for epoch in (0, 1))
    assert first != second and first != sorted(first)
    assert made.steps_in(3) == 10 and made.steps_in(1) == 4


def test_a_corpus_smaller_than_a_batch_is_read_several_times_a_step() -> None:
    epochs, indices = batches(size=16, count=3).read(0)
    assert epochs.tolist() == [i // 3 for i in range(16)]
    assert sorted(indices[:3]) == [0, 1, 2]


def test_the_position_is_all_that_a_resumed_run_needs() -> None:
    going = batches(accumulate=3)
    for _ in range(7):
        next(going)
    resumed = batches(accumulate=3, position=going.position)
    for _ in range(5):
        for one, other in zip(next(going).micros, next(resumed).micros, strict=True):
            assert torch.equal(one.ids, other.ids) and torch.equal(one.targets, other.targets)
    assert rows(batches(position=1)[1]) != rows(batches()[2])


@pytest.mark.parametrize(("accumulate", "world"), [(1, 2), (4, 1), (3, 2), (1, 5)])
def test_micro_batches_and_ranks_hold_the_same_examples(accumulate: int, world: int) -> None:
    whole = batches()[4]
    shares = [batches(accumulate=accumulate, world=world, rank=rank)[4] for rank in range(world)]
    assert sorted(row for share in shares for row in rows(share)) == rows(whole)
    assert {(share.targets, share.positions) for share in shares} == {(whole.targets, whole.positions)}
    assert all(len(share.micros) == accumulate for share in shares)


def test_targets_count_no_padding() -> None:
    step = batches(accumulate=4)[0]
    assert step.targets == sum(int((micro.targets != PAD).sum()) for micro in step.micros)
    assert step.positions == sum(int((micro.ids != PAD).sum()) for micro in step.micros)


def test_cutting_by_length_leaves_little_padding() -> None:
    def computed(accumulate: int) -> float:
        made = Batches(spans(500), 128, 0, block=BLOCK, accumulate=accumulate)
        steps = [made[number] for number in range(5)]
        return sum(m.ids.numel() for s in steps for m in s.micros) / sum(s.positions for s in steps)

    assert computed(1) > 1.6
    assert computed(8) < 1.25


def test_widths_are_multiples_of_eight_within_the_block() -> None:
    widths = {m.ids.shape[1] for number in range(20) for m in batches(accumulate=4)[number].micros}
    assert widths <= set(range(8, BLOCK + 1, 8)) and len(widths) > 3
    odd = Batches(SpanExamples([Document("a" * 50, "")], TOKENIZER, 21, 0), 4, 0, block=21)
    assert max(m.ids.shape[1] for number in range(20) for m in odd[number].micros) <= 21


def test_a_mixture_reads_both_kinds() -> None:
    questions = QuestionExamples([Question("who", "me", "")], TOKENIZER, BLOCK)
    mixture = Mixture([spans(4), questions])
    assert len(mixture) == 5
    ids, targets = mixture.rows(np.zeros(5, dtype=np.int64), np.array([4, 0, 1, 2, 3]))
    assert TOKENIZER.decode(ids[0]) == "who⁇me" and TOKENIZER.decode(targets[0]) == "me⁇"
    alone = spans(4).rows(np.zeros(4, dtype=np.int64), np.arange(4))
    for part, whole in zip(alone, (ids, targets), strict=True):
        assert np.array_equal(whole[1:, : part.shape[1]], part)


def test_more_shares_than_examples_are_refused() -> None:
    with pytest.raises(ParameterError, match="batch=5 is fewer examples than 3 micro-batches on each of 2 ranks"):
        batches(size=5, accumulate=3, world=2)


@pytest.mark.parametrize("name", ["accumulate", "world", "block"])
def test_nothing_is_not_cut_into(name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name}=0 must be a whole number of at least 1"):
        Batches(spans(), 16, 0, **{"block": BLOCK} | {name: 0})
