"""Texts are continued and questions answered, together as alone, with the probability of each answer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from avow.errors import InputError, NonFiniteError, ParameterError
from avow.nn import ModelConfig, build
from avow.nn.config import Positions
from avow.training import MASK, PAD, Answer, CharacterTokenizer, Question, answers, prompt, sample

TOKENIZER = CharacterTokenizer.of(["abcdefghijklmnopqrstuvwxyzLPROY ?"])


@dataclass
class Read:
    """Everything read so far, row by row."""

    rows: list[list[int]] = field(default_factory=list)


class Knowing(nn.Module):
    """Says the answers it was given: each character and the end with probability `sure` of that question."""

    def __init__(self, known: dict[str, tuple[str, float]], block: int = 64) -> None:
        super().__init__()
        self.config = ModelConfig(vocabulary=TOKENIZER.size, block=block)
        self.known, self.dropout = known, nn.Dropout(0.5)

    def start(self, batch: int) -> Read:
        return Read([[] for _ in range(batch)])

    def step(self, ids: Tensor, cache: Read) -> tuple[Tensor, Read]:
        assert not self.training and not self.dropout.training
        for row, new in zip(cache.rows, ids.tolist(), strict=True):
            row.extend(new)
            assert len(row) <= self.config.block
        return torch.stack([self.logits(row) for row in cache.rows])[:, None], cache  # (b, 1, vocabulary)

    def logits(self, row: list[int]) -> Tensor:
        at = row.index(MASK)
        answer, sure = self.known[TOKENIZER.decode(row[:at])]
        said = len(row) - at - 1
        following = int(TOKENIZER.encode(answer[said])[0]) if said < len(answer) else MASK
        chances = torch.full((TOKENIZER.size,), (1 - sure) / (TOKENIZER.size - 2), dtype=torch.float64)
        chances[following] = sure
        chances[PAD] = 9.0  # said by a decoder that forgets that padding is no character
        return chances.log()


def asked(*texts: str) -> list[Question]:
    return [Question(text, "", f"dev.tsv line {line}") for line, text in enumerate(texts, 1)]


def tiny(attention: str = "exact", positions: Positions = "learned") -> nn.Module:
    sizes: dict[str, int] = {"block": 32, "layers": 3, "heads": 2, "width": 16, "latents": 4, "latent_layers": 1}
    config = ModelConfig.of({"vocabulary": TOKENIZER.size, "attention": attention, "positions": positions, **sizes})
    model = build(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # first weights say nearly the same everywhere
                parameter.normal_(std=0.5)
    return model


KNOWN = {"who?": ("London", 0.9), "where?": ("Rome", 0.5), "when": ("York", 0.8), "why?": ("a", 0.99), "how": ("", 0.7)}


def test_answers_come_in_the_order_asked_with_the_product_of_their_probabilities() -> None:
    found = answers(Knowing(KNOWN), TOKENIZER, asked(*KNOWN))
    assert [answer.text for answer in found] == [text for text, _ in KNOWN.values()]
    assert all(answer.ended for answer in found)
    for answer, (text, sure) in zip(found, KNOWN.values(), strict=True):
        assert answer.confidence == pytest.approx(sure ** (len(text) + 1), rel=1e-12)


def test_an_answer_without_an_end_is_cut_and_says_so() -> None:
    known = {"who?": ("Londonderry", 0.9), "why": ("London", 0.9)}
    cut, whole = answers(Knowing(known), TOKENIZER, asked(*known), longest=6)
    assert (cut.text, cut.ended) == ("London", False)
    other = 0.1 / (TOKENIZER.size - 2)
    assert cut.confidence == pytest.approx(0.9**6 * other, rel=1e-12)
    assert (whole.text, whole.ended) == ("London", True)
    (at_block,) = answers(Knowing(known, block=9), TOKENIZER, asked("who?"))
    assert (at_block.text, at_block.ended) == ("Lond", False)
    (fits,) = answers(Knowing(known, block=10), TOKENIZER, asked("why"))
    assert (fits.text, fits.ended) == ("London", True)


def longhand(model: nn.Module, question: str, longest: int) -> Answer:
    """One question at a time, every character from a whole pass."""
    said: list[int] = []
    ids, total = prompt(question, TOKENIZER).tolist(), 0.0
    with torch.no_grad():
        while True:
            logits = model.eval()(torch.tensor([ids + said]))[0, -1]
            scores = logits[1:].log_softmax(-1)  # padding is left out
            best = int(scores.argmax()) + 1
            if best == MASK or len(said) == longest:
                total += float(scores[MASK - 1])
                return Answer(TOKENIZER.decode(said), math.exp(total), best == MASK)
            total += float(scores[best - 1])
            said.append(best)


MIXED = ["ab", "where is L?", "cd", "who", "where is P?", "fgh?", "zz", "xyz", "who", "q"]


@pytest.mark.parametrize("attention", ["exact", "separable", "random_features", "latent"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_answers_given_together_are_those_given_alone(attention: str, positions: Positions) -> None:
    model = tiny(attention, positions=positions)
    together = answers(model, TOKENIZER, asked(*MIXED), longest=8)
    assert len({answer.text for answer in together}) > 3
    for text, answer in zip(MIXED, together, strict=True):
        (alone,) = answers(model, TOKENIZER, asked(text), longest=8)
        for other in (alone, longhand(model, text, 8)):
            assert (answer.text, answer.ended) == (other.text, other.ended)
            assert answer.confidence == pytest.approx(other.confidence, rel=1e-6)


def test_more_questions_than_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.training.evaluation._TOGETHER", 2)
    known = {f"{letter}?": (letter * 2, 0.9) for letter in "abcdefg"}
    assert [a.text for a in answers(Knowing(known), TOKENIZER, asked(*known))] == [text for text, _ in known.values()]


def test_no_questions_have_no_answers() -> None:
    assert answers(Knowing({}), TOKENIZER, []) == []


def test_every_part_of_the_model_is_left_in_its_mode() -> None:
    model = Knowing(KNOWN).train()
    model.dropout.eval()
    answers(model, TOKENIZER, asked("who?"))
    assert model.training and not model.dropout.training
    model.dropout.train()
    with pytest.raises(KeyError):
        answers(model, TOKENIZER, asked("never heard"))
    assert model.training and model.dropout.training


def test_a_question_too_long_for_the_block_is_named_with_its_line() -> None:
    expected = (
        "dev.tsv line 2: question='where?' needs 7 positions and one for its answer, and the block has 7; "
        "use a model of a larger block or drop the line"
    )
    with pytest.raises(InputError, match=re.escape(expected)):
        answers(Knowing(KNOWN, block=7), TOKENIZER, asked("who?", "where?"))
    assert answers(Knowing(KNOWN, block=8), TOKENIZER, asked("where?"))[0].text == "R"


def test_a_stranger_in_a_question_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"dev\.tsv line 2='wh7' holds '7'"):
        answers(Knowing(KNOWN), TOKENIZER, asked("who?", "wh7"))


def test_a_model_that_has_diverged_answers_nothing() -> None:
    model = tiny()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError, match="logits=nan or inf is not a score; load an earlier checkpoint"):
        answers(model, TOKENIZER, asked("who"))


def test_greedy_sampling_takes_the_likeliest_character_of_a_whole_pass() -> None:
    model = tiny()
    text = sample(model, TOKENIZER, "ab⁇c", 6, temperature=0)
    assert len(text) == 6 and model.training
    ids = [*TOKENIZER.encode("ab").tolist(), MASK, *TOKENIZER.encode("c").tolist()]
    for sign in text:
        logits = model.eval()(torch.tensor([ids]))[0, -1]
        ids.append(int(logits[1:].argmax()) + 1)
        assert TOKENIZER.decode(ids[-1:]) == sign


def test_a_seed_gives_its_text_again_and_another_seed_another() -> None:
    model = tiny()
    first, again, other = (
        sample(model, TOKENIZER, "who", 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_characters_come_as_often_as_the_model_and_the_temperature_say() -> None:
    model = Knowing({"who": ("L", 0.6)})
    generator = torch.Generator().manual_seed(0)
    for temperature in (1.0, 0.5):
        others = TOKENIZER.size - 2
        likely, rest = 0.6 ** (1 / temperature), others * (0.4 / others) ** (1 / temperature)
        share = likely / (likely + rest)
        draws = [sample(model, TOKENIZER, "who⁇", 1, temperature, generator) for _ in range(400)]
        # Five standard deviations of a mean of 400.
        assert draws.count("L") / 400 == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 400) + 1e-9)
    assert sample(model, TOKENIZER, "who⁇", 1, temperature=1e-300) == "L"


def test_sampling_stops_at_the_block() -> None:
    assert len(sample(tiny(), TOKENIZER, "a" * 30, 9)) == 2
    assert len(sample(tiny(), TOKENIZER, "a" * 20, 9)) == 9


class Echo(nn.Module):
    """Wants to write the mask first of all, and else the letter after the last one it has read."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.config = ModelConfig(vocabulary=TOKENIZER.size, block=block)
        self.starts: list[int] = []

    def start(self, batch: int) -> Read:
        self.starts.append(0)
        return Read([[] for _ in range(batch)])

    def step(self, ids: Tensor, cache: Read) -> tuple[Tensor, Read]:
        cache.rows[0].extend(ids[0].tolist())
        assert len(cache.rows[0]) <= self.config.block
        self.starts[-1] = max(self.starts[-1], ids.shape[1])
        logits = torch.zeros(1, 1, TOKENIZER.size)
        logits[..., MASK] = 9.0
        following = (ord(TOKENIZER.decode(cache.rows[0][-1:])) - ord("a") + 1) % 26
        logits[..., int(TOKENIZER.encode(chr(ord("a") + following))[0])] = 5.0
        return logits, cache


def test_a_language_model_writes_no_mask_and_goes_on_beyond_its_block() -> None:
    model = Echo(block=8)
    assert sample(model, TOKENIZER, "ab", 30, 0.0, masks=False) == ("cdefghijklmnopqrstuvwxyz" + "abcdef")
    # It begins with two tokens; later, and whenever eight are read, with the last half of them.
    assert model.starts[0] == 2 and set(model.starts[1:]) == {4}
    assert sample(Echo(block=8), TOKENIZER, "abcdefghijkl", 3, 0.0, masks=False) == "mno", "a longer text is cut"
    assert sample(Echo(block=8), TOKENIZER, "ab", 3, 0.0) == "⁇" * 3, "a model that knows masks would write one"
    with pytest.raises(InputError, match="text='' has 0 tokens, and must have at least 1; give how it begins"):
        sample(model, TOKENIZER, "", 3, masks=False)


@pytest.mark.parametrize("text", ["", "a" * 32])
def test_a_text_that_leaves_no_room_is_refused(text: str) -> None:
    rule = f"text={text!r} has {len(text)} tokens, and must have at least 1 and leave room in the block of 32; "
    with pytest.raises(InputError, match=re.escape(rule + "give 1 to 31 tokens")):
        sample(tiny(), TOKENIZER, text, 3)


def test_a_temperature_a_length_or_a_generator_that_means_nothing_is_refused() -> None:
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(ParameterError, match=f"temperature={temperature} must be a finite number of at least 0; "):
            sample(tiny(), TOKENIZER, "a", 3, temperature)
    with pytest.raises(ParameterError, match="length=0 must be a whole number"):
        sample(tiny(), TOKENIZER, "a", 0)
    with pytest.raises(
        ParameterError, match=r"generator=7 must be a torch\.Generator; pass torch\.Generator\(\)\.manual"
    ):
        sample(tiny(), TOKENIZER, "a", 3, generator=7)  # type: ignore[arg-type]


def test_a_confidence_is_a_probability() -> None:
    with pytest.raises(ParameterError, match=r"confidence=1\.5 must be a probability; give a number from 0 to 1"):
        Answer("London", 1.5)
