"""What a model knows is counted exactly, with an interval that holds, and its confidence is judged."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from avow.errors import InputError, ParameterError
from avow.nn import ModelConfig
from avow.training import (
    MASK,
    Answer,
    CharacterTokenizer,
    Document,
    Evaluation,
    Outcome,
    Question,
    always,
    evaluate,
    majority,
)
from avow.training.evaluation import _tail
from tests.test_sampling import TOKENIZER, Knowing, Read

TRUTH = {"who?": "London", "where?": "Rome", "when": "York", "why?": "Oslo"}
QUESTIONS = [Question(text, answer, f"dev.tsv line {line}") for line, (text, answer) in enumerate(TRUTH.items(), 1)]


def judged(*pairs: tuple[bool, float]) -> Evaluation:
    """An evaluation of answers that are right or not, each with its confidence."""
    return Evaluation(
        tuple(Outcome(f"line {i}", "who?", "a", Answer("a" if right else "b", c)) for i, (right, c) in enumerate(pairs))
    )


def test_a_model_that_knows_is_right_everywhere() -> None:
    model = Knowing({text: (answer, 0.9) for text, answer in TRUTH.items()}).train()
    found = evaluate(model, TOKENIZER, QUESTIONS)
    assert (found.asked, found.right, found.accuracy) == (4, 4, 1.0)
    assert [o.answer.confidence for o in found.outcomes] == pytest.approx([0.9**7, 0.9**5, 0.9**5, 0.9**5], rel=1e-12)
    assert [o.where for o in found.outcomes] == [q.where for q in QUESTIONS]
    assert model.training


def test_a_model_whose_answers_are_shuffled_is_caught() -> None:
    texts = list(TRUTH)
    shuffled = {text: (TRUTH[texts[place - 1]], 0.99) for place, text in enumerate(texts)}
    found = evaluate(Knowing(shuffled), TOKENIZER, QUESTIONS)
    assert found.right == 0
    (only,) = found.bins()
    assert only.size == 4 and only.right == 0 and only.confidence > 0.9
    half = {text: (TRUTH[text] if place < 2 else "Paris", 0.9) for place, text in enumerate(texts)}
    assert [o.right for o in evaluate(Knowing(half), TOKENIZER, QUESTIONS).outcomes] == [True, True, False, False]


def test_a_match_is_exact() -> None:
    for said in ("london", "London ", "Londo", "Londonderry", ""):
        assert evaluate(Knowing({"who?": (said, 0.9)}), TOKENIZER, QUESTIONS[:1]).right == 0


def test_an_answer_cut_where_the_expected_one_ends_is_wrong() -> None:
    long = "a" * 40
    question = [Question("who?", long, "dev.tsv line 1")]
    assert evaluate(Knowing({"who?": (long, 0.9)}), TOKENIZER, question).right == 1
    assert evaluate(Knowing({"who?": (long + "b", 0.9)}), TOKENIZER, question).right == 0


def test_a_question_that_does_not_fit_the_block_with_its_answer_is_named_with_its_line() -> None:
    model = Knowing({text: (answer, 0.9) for text, answer in TRUTH.items()}, block=10)
    expected = (
        "dev.tsv line 1: answer='London' needs 11 positions with its question, and the block has 10; "
        "use a larger block or drop the line"
    )
    with pytest.raises(InputError, match=re.escape(expected)):
        evaluate(model, TOKENIZER, QUESTIONS[:1])
    assert evaluate(model, TOKENIZER, QUESTIONS[2:]).right == 2


def test_no_questions_are_no_evaluation() -> None:
    with pytest.raises(InputError, match="questions=0 must be at least 1; give a file of questions"):
        evaluate(Knowing({}), TOKENIZER, [])


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (1, 1), (0, 250), (11, 250), (125, 250), (250, 250), (700, 2000)])
def test_the_interval_is_clopper_and_pearsons_rounded_outward(right: int, asked: int) -> None:
    low, high = judged(*[(place < right, 0.5) for place in range(asked)]).interval
    exact_low = stats.beta.ppf(0.025, right, asked - right + 1) if right else 0.0
    exact_high = stats.beta.ppf(0.975, right + 1, asked - right) if right < asked else 1.0
    assert exact_low - 2**-20 <= low <= exact_low + 1e-12
    assert exact_high - 1e-12 <= high <= exact_high + 2**-20


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    asked = 12
    ends = [judged(*[(place < right, 0.5) for place in range(asked)]).interval for right in range(asked + 1)]

    def holds(slack: Fraction, p: Fraction) -> Fraction:
        """The exact probability that an interval, narrowed by so much on either side, holds p."""
        kept = (r for r, (low, high) in enumerate(ends) if Fraction(low) + slack <= p <= Fraction(high) - slack)
        return sum((math.comb(asked, r) * p**r * (1 - p) ** (asked - r) for r in kept), Fraction(0))

    shares = [Fraction(k, 200) for k in range(201)] + [Fraction(end) for pair in ends for end in pair]
    assert min(holds(Fraction(0), p) for p in shares) >= Fraction(95, 100)
    assert min(holds(Fraction(1, 20), p) for p in shares) < Fraction(95, 100)


def test_a_tail_is_never_found_smaller_than_it_is() -> None:
    for right, share in ((1, 3), (4, 12345), (7, 700_001), (9, 2**20 - 1)):
        p = Fraction(share, 2**20)
        exact = sum(math.comb(9, r) * p**r * (1 - p) ** (9 - r) for r in range(right, 10)) * 2**256
        assert exact <= _tail(right, 9, share) <= exact + 2**200


def test_the_most_confident_answers_are_taken_first() -> None:
    found = judged((False, 0.1), (True, 0.9), (True, 0.3), (False, 0.5))
    assert [found.accuracy_at(c) for c in (0.25, 0.5, 0.75, 1)] == [1, 1 / 2, 2 / 3, 1 / 2]
    assert found.accuracy_at(0.26) == found.accuracy_at(0.5)
    assert found.accuracy_at(1e-30) == 1


def test_a_share_means_the_number_it_is_written_as() -> None:
    found = judged(*[(place < 7, 1 - place / 100) for place in range(100)])
    assert 0.07 * 100 > 7
    assert found.accuracy_at(0.07) == 1


def test_equal_confidences_are_parted_fairly_whatever_their_order() -> None:
    pairs = [(True, 0.5), (False, 0.5), (False, 0.5), (True, 0.5), (True, 0.9)]
    for found in (judged(*pairs), judged(*reversed(pairs))):
        assert [found.accuracy_at(k / 5) for k in range(1, 6)] == pytest.approx([1, 1.5 / 2, 2 / 3, 2.5 / 4, 3 / 5])


def test_an_abstention_curve_falls_where_confidence_is_wise_and_counts_never_fall() -> None:
    numbers = np.random.default_rng(0)
    confidences = numbers.random(50)
    wise = judged(*[(bool(c > 0.6), float(c)) for c in confidences])
    foolish = judged(*[(bool(c < 0.6), float(c)) for c in confidences])
    blind = judged(*[(bool(numbers.random() < 0.5), float(c)) for c in confidences])
    for found in (wise, foolish, blind):
        coverage, accuracy = found.abstention().series["most confident first"]
        best = found.abstention().series["best possible order"][1]
        assert list(coverage) == [k / 50 for k in range(1, 51)]
        assert (np.diff(np.multiply(coverage, accuracy)) >= -1e-12).all()
        assert (np.array(accuracy) <= np.array(best) + 1e-12).all()
        assert accuracy[-1] == found.accuracy == found.accuracy_at(1)
        assert list(accuracy) == [found.accuracy_at(c) for c in coverage]
    assert (np.diff(wise.abstention().series["most confident first"][1]) <= 0).all()
    assert (np.diff(foolish.abstention().series["most confident first"][1]) >= 0).all()
    assert wise.abstention().series["most confident first"] == wise.abstention().series["best possible order"]


@pytest.mark.parametrize("coverage", [0, -0.5, 1.01, math.nan])
def test_a_coverage_that_means_nothing_is_refused(coverage: float) -> None:
    with pytest.raises(ParameterError, match=f"coverage={coverage} must be above 0 and at most 1; 1 answers every"):
        judged((True, 0.5)).accuracy_at(coverage)


def test_bins_hold_every_answer_once_with_its_mean_confidence() -> None:
    found = judged((True, 1.0), (False, 0.95), (True, 0.0), (False, 0.11), (False, 0.19), (True, 0.15))
    assert [(b.right, b.size) for b in found.bins()] == [(1, 1), (1 / 3, 3), (1 / 2, 2)]
    assert [b.confidence for b in found.bins()] == pytest.approx([0, 0.15, 0.975])
    chart = found.calibration()
    right, share, diagonal = chart.series.values()
    assert list(right[1]) == [1, 1 / 3, 1 / 2]
    assert list(share[1]) == [1 / 6, 3 / 6, 2 / 6]
    assert list(diagonal[0]) == list(diagonal[1])
    assert "answers in the bin, of all 6" in chart.series
    json.dumps([chart.plain(), found.abstention().plain()])


def test_an_evaluation_goes_to_json_and_back() -> None:
    found = judged((True, 0.1), (False, 1 / 3), (True, 0.7))
    assert Evaluation.of(json.loads(json.dumps(found.plain()))) == found


def test_figures_that_are_not_those_of_the_outcomes_are_refused() -> None:
    plain = judged((True, 0.1), (False, 0.2)).plain()
    with pytest.raises(InputError, match="evaluation: right=2 is not 1, which its outcomes give; evaluate again"):
        Evaluation.of({**plain, "right": 2})
    for broken in ({}, {**plain, "outcomes": [{"question": "who?"}]}, {**plain, "outcomes": None}):
        with pytest.raises(InputError, match="is not what plain\\(\\) wrote; write it with plain\\(\\)"):
            Evaluation.of(broken)


def test_a_fixed_answer_is_right_where_it_is_expected() -> None:
    found = always("London", QUESTIONS)
    assert (found.right, found.asked) == (1, 4)
    assert {o.answer for o in found.outcomes} == {Answer("London", 1.0)}
    assert always("london", QUESTIONS).right == 0


def test_the_majority_is_that_of_the_training_answers_alone() -> None:
    train = [Question("x", answer, "train.tsv line 1") for answer in ("Rome", "London", "London", "Paris")]
    dev = [Question("y", answer, "dev.tsv line 1") for answer in ("Rome", "Rome", "London")]
    found = majority(train, dev)
    assert (found.right, found.asked) == (1, 3)
    assert found.outcomes[0].answer == Answer("London", 0.5)
    # Of equals, the first; the development answers have no say.
    assert majority(train[:2], dev).outcomes[0].answer.text == "Rome"
    with pytest.raises(InputError, match="train_questions=0 must be at least 1; the majority is that of the training"):
        majority([], dev)


def test_a_model_that_confuses_the_rows_of_a_batch_is_caught() -> None:
    class Confusing(Knowing):
        def step(self, ids: Tensor, cache: Read) -> tuple[Tensor, Read]:
            logits, cache = super().step(ids, cache)
            return logits.roll(1, 0), cache

    same_length = [question for question in QUESTIONS if len(question.question) == 4]
    model = Confusing({text: (answer, 0.9) for text, answer in TRUTH.items()})
    assert evaluate(model, TOKENIZER, same_length).right == 0
    assert [evaluate(model, TOKENIZER, [question]).right for question in same_length] == [1, 1, 1]


PEOPLE = {"Ada Holm": "Arden", "Ada Holmes": "Kelda", "Bo Lund": "Pell", "Cy Dahl": "Lorne", "Di Ewers": "Oxley"}
TEXTS = [Document(f"{name}. Once, {name} was born in {place}.", name) for name, place in list(PEOPLE.items())[:-1]]
LETTERS = CharacterTokenizer.of(
    [*PEOPLE, *PEOPLE.values(), *(text.text for text in TEXTS), "Where was born? Rome or twice"]
)
ASKED = [Question(f"Where was {name} born?", place, name) for name, place in PEOPLE.items()]


class Reciting(nn.Module):
    """Goes on with the texts that it knows by heart, each character with probability 0.9, and answers what it knows."""

    def __init__(self, texts: list[str], known: dict[str, str], block: int = 64) -> None:
        super().__init__()
        self.config = ModelConfig(vocabulary=LETTERS.size, block=block)
        self.texts = [*texts, *(f"Where was {name} born?⁇{place}⁇" for name, place in known.items())]

    def start(self, batch: int) -> list[list[int]]:
        return [[] for _ in range(batch)]

    def step(self, ids: Tensor, cache: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
        rows = [[*old, *new] for old, new in zip(cache, ids.tolist(), strict=True)]
        return torch.stack([self.following(row) for row in rows])[:, None], rows

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack(
            [torch.stack([self.following(row[: n + 1]) for n in range(len(row))]) for row in ids.tolist()]
        )

    def following(self, row: list[int]) -> Tensor:
        text = LETTERS.decode(row)
        after = next((one[len(text)] for one in self.texts if one.startswith(text) and one != text), "⁇")
        chances = torch.full((LETTERS.size,), 0.1 / (LETTERS.size - 2), dtype=torch.float64)
        chances[MASK if after == "⁇" else int(LETTERS.encode(after)[0])] = 0.9
        return chances.log()


def test_what_is_recited_from_the_text_is_told_from_what_the_question_extracts() -> None:
    recited = [TEXTS[0].text, TEXTS[1].text, TEXTS[2].text.replace("Pell", "Rome")]
    model = Reciting(recited, {"Ada Holm": "Arden", "Bo Lund": "Pell", "Di Ewers": "Rome"})
    found = evaluate(model, LETTERS, ASKED, TEXTS)
    kinds = {kind: [o.where for o in outcomes] for kind, outcomes in found.by_recitation().items()}
    assert kinds == {
        "recited and extracted": ["Ada Holm"],
        # Not the text about Ada Holm, whose name is a part of hers.
        "recited, not extracted": ["Ada Holmes"],
        "extracted, not recited": ["Bo Lund"],
        "neither": ["Cy Dahl"],
        "not in the text": ["Di Ewers"],
    }
    first, *_, neither, absent = found.recitation()
    # Padding, which is never written, has no chance among the others.
    assert first["loss"] == pytest.approx(-math.log(0.9), rel=1e-12)
    assert neither["loss"] > 1 and neither["wrong"] == 1 and absent["loss"] is None
    wrong = found.outcomes[-1].answer
    assert wrong.text == "Rome" and absent["confidence_of_wrong"] == wrong.confidence
    assert Evaluation.of(json.loads(json.dumps(found.plain()))) == found
    # Without texts, nothing is said of recitation; what does not fit the block is not recited.
    assert {o.recited for o in evaluate(model, LETTERS, ASKED).outcomes} == {None}
    longer = [Document(text.text.replace("Once", "Once or twice"), "") for text in TEXTS]
    assert {o.recited for o in evaluate(Reciting([], {}, block=40), LETTERS, ASKED, longer).outcomes} == {None}
    strange = [Document(text.text.replace("Once", "Øh"), "") for text in TEXTS]
    assert {o.recited for o in evaluate(model, LETTERS, ASKED, strange).outcomes} == {None}
    earlier = {
        **found.plain(),
        "outcomes": [{k: v for k, v in o.items() if k != "recited"} for o in found.plain()["outcomes"]],
    }
    assert Evaluation.of(earlier).right == found.right


def test_an_evaluation_says_in_json_what_its_charts_show() -> None:
    plain = judged((True, 0.95), (True, 0.9), (False, 0.4), (False, 0.1)).plain()
    assert plain["coverage"] == [[0.25, 1.0], [0.5, 1.0], [0.75, pytest.approx(2 / 3)], [1.0, 0.5]]
    assert [(one["right"], one["size"]) for one in plain["calibration"]] == [(0.0, 1), (0.0, 1), (1.0, 2)]
