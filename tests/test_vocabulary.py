"""Characters have numbers, numbers have characters, and strangers are named with their line."""

from __future__ import annotations

import re

import pytest

from avow.errors import FileError, InputError
from avow.training import MASK, PAD, Vocabulary


def test_text_comes_back() -> None:
    vocabulary = Vocabulary.of(["Zürich", "Łódź 7"])
    assert vocabulary.decode(vocabulary.encode("Łódź")) == "Łódź"
    assert vocabulary.characters == "".join(sorted(set("ZürichŁódź 7")))
    assert int(vocabulary.encode("Zürich").min()) > max(PAD, MASK)
    assert vocabulary.encode("").shape == (0,)


def test_padding_is_not_shown_and_a_mask_is() -> None:
    assert (PAD, MASK) == (0, 1)
    assert Vocabulary("ab").decode([2, MASK, 3, PAD, PAD]) == "a⁇b"


def test_size_counts_padding_and_mask() -> None:
    vocabulary = Vocabulary("abc")
    assert vocabulary.size == 5
    assert int(vocabulary.encode("c")[0]) == vocabulary.size - 1


def test_a_stranger_is_named_with_its_line() -> None:
    words = "wiki.txt line 7='añb' holds 'ñ' (U+00F1), a character outside the vocabulary of 2; remove it"
    with pytest.raises(InputError, match=re.escape(words)):
        Vocabulary("ab").encode("añb", "wiki.txt line 7")


def test_json_round_trip() -> None:
    vocabulary = Vocabulary.of(["Zürich", '"\\\n⁇'])
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert Vocabulary.from_json(vocabulary.to_json()) != Vocabulary.of(["Zürich"])


@pytest.mark.parametrize("text", ["{", "[]", '{"characters": 3}', '{"characters": "ab", "pad": 0}'])
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(FileError, match="write it with to_json"):
        Vocabulary.from_json(text)


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' occurs twice"):
        Vocabulary("aba")
