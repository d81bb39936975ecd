"""What a model writes: a text continued, or questions answered, with the probability it gives to each answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from avow.core.requirement import check_generator
from avow.errors import InputError, NonFiniteError, ParameterError
from avow.nn import ModelConfig
from avow.nn.config import check_count
from avow.parameters import declared
from avow.training.data import MASK, MASK_SIGN, PAD, Question, Vocabulary
from avow.training.examples import prompt

# Questions decoded together: enough to fill a device, few enough that their caches fit a small one.
_TOGETHER = 256


class Decoder(Protocol):
    """What is needed of a language model here: one of `avow.nn`, or one with the same methods."""

    config: ModelConfig

    def start(self, batch: int) -> Any: ...

    def step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]: ...


@dataclass(frozen=True)
class Answer:
    """What a model says, the probability it gives to just that, and whether it came to an end by itself.

    The confidence is the product of the probabilities of the answer's characters and of the end after them.
    """

    text: str
    confidence: float
    ended: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            raise ParameterError("confidence", self.confidence, "must be a probability", "give a number from 0 to 1")


@declared()
def sample(
    model: nn.Module,
    vocabulary: Vocabulary,
    text: str,
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> str:
    """What the model writes after a text: `length` characters, fewer if its block ends; greedy at temperature 0.

    ⁇ stands for the mask, in `text` and in the result.
    """
    check_count("length", length)
    if not (math.isfinite(temperature) and temperature >= 0):
        remedy = "use 0 for the likeliest character, 1 for the model's own"
        raise ParameterError("temperature", temperature, "must be a finite number of at least 0", remedy)
    check_generator(generator)
    first, *others = (vocabulary.encode(part) for part in text.split(MASK_SIGN))
    start = np.concatenate([first, *(np.append(MASK, part) for part in others)]).astype(np.int64)
    block = cast(Decoder, model).config.block
    if not 0 < len(start) < block:
        rule = f"has {len(start)} characters, and must have at least 1 and leave room in the block of {block}"
        raise InputError("text", repr(text), rule, f"give 1 to {block - 1} characters")
    written: list[int] = []
    with _evaluating(model) as (reader, device):
        ids, cache = torch.from_numpy(start)[None].to(device), reader.start(1)  # (1, n)
        for _ in range(min(length, block - len(start))):
            logits, cache = reader.step(ids, cache)
            scores = _log_probabilities(logits[:, -1])[0]
            if temperature == 0:
                written.append(int(scores.argmax()))
            else:
                # The best score becomes 0 first: however small the temperature, it stays there; the sum is at least 1.
                chances = ((scores - scores.max()) / float(temperature)).softmax(-1)
                chances = chances if generator is None else chances.to(generator.device)
                written.append(int(torch.multinomial(chances, 1, generator=generator)))
            ids = torch.tensor([[written[-1]]], device=device)
    return vocabulary.decode(written)


@declared()
def answers(model: nn.Module, vocabulary: Vocabulary, questions: Sequence[Question], longest: int = 32) -> list[Answer]:
    """The model's likeliest characters after each `question M`, up to its closing M or `longest` of them.

    Questions of one length are decoded together, so that no row is padded: each answer is the one that its question
    gets alone.
    """
    check_count("longest", longest)
    block = cast(Decoder, model).config.block
    prompts = [prompt(question.question, vocabulary, question.where) for question in questions]
    of_length: dict[int, list[int]] = {}
    for place, (question, row) in enumerate(zip(questions, prompts, strict=True)):
        if len(row) >= block:
            rule = f"needs {len(row)} positions and one for its answer, and the block has {block}"
            name = f"{question.where}: question"
            raise InputError(name, repr(question.question), rule, "use a model of a larger block or drop the line")
        of_length.setdefault(len(row), []).append(place)
    by_place: dict[int, Answer] = {}
    with _evaluating(model) as (reader, device):
        for length, places in of_length.items():
            for first in range(0, len(places), _TOGETHER):
                some = places[first : first + _TOGETHER]
                ids = torch.from_numpy(np.stack([prompts[place] for place in some])).to(device)  # (b, n)
                texts = _decode(reader, vocabulary, ids, min(longest, block - length))
                by_place.update(zip(some, texts, strict=True))
    return [by_place[place] for place in range(len(prompts))]


def _decode(reader: Decoder, vocabulary: Vocabulary, ids: Int[Tensor, "b n"], room: int) -> list[Answer]:
    """Greedy answers to prompts of one length, of at most `room` characters."""
    cache, written = reader.start(len(ids)), []
    total = torch.zeros(len(ids), dtype=torch.float64)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for count in range(room + 1):
        logits, cache = reader.step(ids, cache)
        scores = _log_probabilities(logits[:, -1])  # (b, vocabulary)
        likeliest = scores.argmax(-1)  # (b,)
        # An answer that fills the room has the probability of ending there.
        chosen = likeliest if count < room else torch.full_like(likeliest, MASK)
        total += torch.where(ended, 0.0, scores.gather(-1, chosen[:, None])[:, 0])
        ended |= likeliest == MASK
        if count == room or bool(ended.all()):
            break
        # Rows that have ended are computed on beside the others, and ignored.
        written.append(torch.where(ended, PAD, chosen))
        ids = torch.where(ended, MASK, chosen)[:, None].to(ids.device)  # (b, 1)
    rows = torch.stack(written, 1).tolist() if written else [[]] * len(total)
    columns = zip(rows, total.exp().tolist(), ended.tolist(), strict=True)
    return [Answer(vocabulary.decode(row), confidence, end) for row, confidence, end in columns]


def _log_probabilities(logits: Float[Tensor, "b vocabulary"]) -> Float[Tensor, "b vocabulary"]:
    """Of every character and the mask, on the CPU in float64; padding is never written."""
    scores = logits.detach().to("cpu", torch.float64, copy=True)
    if not bool(torch.isfinite(scores).all()):
        remedy = "load an earlier checkpoint or train at a lower rate"
        raise NonFiniteError("logits", "nan or inf", "is not a score", remedy)
    scores[:, PAD] = -math.inf
    return scores.log_softmax(-1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[tuple[Decoder, torch.device]]:
    """The model in evaluation mode, and its device; afterwards every module is in its old mode."""
    modes = [(module, module.training) for module in model.modules()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            yield cast(Decoder, model), device
    finally:
        for module, mode in modes:
            module.training = mode
