"""The characters a model reads and writes, each with its number; 0 is padding, 1 the mask."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from avow.errors import FileError, InputError
from avow.parameters import declared

PAD, MASK = 0, 1
# What a mask looks like in decoded text; padding is not shown.
MASK_SIGN = "⁇"


@declared()
@dataclass(frozen=True)
class Vocabulary:
    """Characters in order; the first has number 2."""

    characters: str

    def __post_init__(self) -> None:
        twice = {c for c in self.characters if self.characters.count(c) > 1}
        if twice:
            raise InputError("characters", repr(min(twice)), "occurs twice", "list every character once")

    @staticmethod
    @declared()
    def of(texts: Iterable[str]) -> Vocabulary:
        """The characters of some texts, in the order of their code points."""
        return Vocabulary("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        """How many numbers there are, padding and mask among them."""
        return len(self.characters) + 2

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters, 2)}

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        """The numbers of a text; `where` is what an error calls it."""
        try:
            return np.array([self._numbers[character] for character in text], dtype=np.int64)
        except KeyError as error:
            (stranger,) = error.args
            rule = f"holds {stranger!r} (U+{ord(stranger):04X}), a character outside the vocabulary of {self.size - 2}"
            remedy = "remove it, or train on a text that holds it"
            raise InputError(where, repr(text), rule, remedy) from error

    @declared()
    def decode(self, numbers: Iterable[int]) -> str:
        """The text of some numbers; a mask reads as ⁇, padding as nothing."""
        signs = ("", MASK_SIGN, *self.characters)
        return "".join(signs[int(number)] for number in numbers)

    def to_json(self) -> str:
        return json.dumps({"characters": self.characters}, ensure_ascii=False)

    @staticmethod
    @declared()
    def from_json(text: str) -> Vocabulary:
        """The vocabulary that `to_json` wrote."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise FileError("vocabulary", repr(text[:40]), "is not JSON", "write it with to_json") from error
        if not isinstance(fields, dict) or set(fields) != {"characters"} or not isinstance(fields["characters"], str):
            rule = "must be an object with `characters` alone, a string"
            raise FileError("vocabulary", repr(text[:40]), rule, "write it with to_json")
        return Vocabulary(fields["characters"])
