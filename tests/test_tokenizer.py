"""A text comes back from its numbers, with every tokenizer; what one does not know is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from avow.errors import FileError, InputError, MissingPackage
from avow.training import (
    MASK,
    PAD,
    ByteTokenizer,
    CharacterTokenizer,
    Corpus,
    Document,
    FileTokenizer,
    IdTokenizer,
    TokenDocument,
    Tokenizer,
    tokenizer_of,
)
from avow.training.tokenizer import FILE_BYTES, tokenizer_from

TEXTS = ["Łódź and Zürich, 7 o'clock.", "naïve – 日本語 🙂\n\ttabs", " leading and  double spaces "]


def byte_level() -> LibraryTokenizer:
    """A tokenizer of bytes with a few merged pairs, as GPT-2's is made."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("an", "d"), ("Ġ", "and")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    made = LibraryTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def spaced(model: models.Model) -> LibraryTokenizer:
    made = LibraryTokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


EVERY: list[Tokenizer] = [CharacterTokenizer.of(TEXTS), ByteTokenizer(), FileTokenizer(byte_level().to_str())]


@pytest.mark.parametrize("tokenizer", EVERY, ids=lambda one: one.kind)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_numbers_of_the_model(tokenizer: Tokenizer, text: str) -> None:
    numbers = tokenizer.encode(text)
    assert tokenizer.decode(numbers) == text
    assert int(numbers.min()) > max(PAD, MASK) and int(numbers.max()) < tokenizer.size == tokenizer.count + 2
    assert tokenizer.characters(numbers) == len(text) and tokenizer.length(text) == len(numbers)
    assert tokenizer.encode("").shape == (0,)


@pytest.mark.parametrize("tokenizer", [*EVERY, IdTokenizer(9)], ids=lambda one: one.kind)
def test_what_a_checkpoint_keeps_makes_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    content = tokenizer.content if isinstance(tokenizer, FileTokenizer) else None
    assert tokenizer_from(json.loads(json.dumps(tokenizer.plain())), content) == tokenizer
    assert tokenizer_from({"kind": "characters", "known": "ab"}) != tokenizer


def test_what_another_version_kept_is_refused() -> None:
    for plain in ({"kind": "words"}, {"kind": "characters"}, {"kind": "file"}, {}):
        with pytest.raises(FileError, match="is not one that this version knows; train again"):
            tokenizer_from(plain)


def test_characters_are_in_order_and_their_numbers_are_exact() -> None:
    tokenizer = CharacterTokenizer.of(["Zürich", "Łódź 7"])
    assert tokenizer.known == "".join(sorted(set("ZürichŁódź 7")))
    assert CharacterTokenizer("ba").encode("ab").tolist() == [3, 2], "numbers go by place, not by code point"
    assert ByteTokenizer().encode("Aé").tolist() == [2 + 0x41, 2 + 0xC3, 2 + 0xA9]
    merged = FileTokenizer(byte_level().to_str()).encode("x and")
    assert len(merged) == 2, "one for the letter, one for the word and its space"


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer("ab"), ByteTokenizer()], ids=lambda one: one.kind)
def test_padding_is_not_shown_and_a_mask_is(tokenizer: Tokenizer) -> None:
    a, b = (int(tokenizer.encode(letter)[0]) for letter in "ab")
    assert (PAD, MASK) == (0, 1)
    assert tokenizer.decode([a, MASK, MASK, b, PAD, PAD]) == "a⁇⁇b"


@pytest.mark.parametrize("number", [-1, 4])
def test_a_number_outside_the_vocabulary_is_not_decoded(number: int) -> None:
    with pytest.raises(InputError, match=f"numbers={number} is not a number of this vocabulary, from 0 to 3; decode"):
        CharacterTokenizer("ab").decode([2, number])


def test_a_character_that_was_not_in_the_training_data_is_named_with_its_line() -> None:
    rule = "wiki.txt line 7='añb' holds 'ñ' (U+00F1), a character outside the vocabulary of 2; remove it"
    with pytest.raises(InputError, match=re.escape(rule)):
        CharacterTokenizer("ab").encode("añb", "wiki.txt line 7")
    # Of a long text, an error shows what stands around it.
    with pytest.raises(InputError) as found:
        CharacterTokenizer("ab").encode("a" * 1000 + "ñ" + "b" * 1000)
    assert len(str(found.value)) < 200 and "…'aaaa" in str(found.value)


def test_bytes_know_every_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.size == 258 and tokenizer.decode(tokenizer.encode("anything 🙂")) == "anything 🙂"
    cut = tokenizer.encode("é")[:1]
    assert tokenizer.decode(cut) == "\ufffd", "half a character is seen to be one"


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' occurs twice"):
        CharacterTokenizer("aba")


def saved(folder: Path, made: LibraryTokenizer) -> Path:
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_file_that_would_cut_texts_short_does_not(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(5)
    made.enable_padding(length=50)
    assert len(made.encode("a long text").ids) == 50, "as the file says"
    tokenizer = FileTokenizer.read(saved(tmp_path, made))
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_an_unknown_word_is_the_files_unknown_token_or_an_error(tmp_path: Path) -> None:
    words = {"one": 0, "two": 1, "<unk>": 5}
    known = FileTokenizer.read(saved(tmp_path, spaced(models.WordLevel(words, unk_token="<unk>"))))
    assert known.count == 6, "numbers may have gaps"
    assert known.decode(known.encode("one three two")) == "one <unk> two"
    letters = {letter: number for number, letter in enumerate("onetw")}
    dropping = FileTokenizer.read(saved(tmp_path, spaced(models.BPE(letters, []))))
    rule = "here='one three two' holds 'h' (U+0068), which the tokenizer drops; remove it, or use a tokenizer with an"
    with pytest.raises(InputError, match=re.escape(rule)):
        dropping.encode("one three two", "here")


def test_what_a_file_normalises_away_is_said(tmp_path: Path) -> None:
    made = byte_level()
    made.normalizer = normalizers.Replace(Regex("x"), "")
    with pytest.raises(InputError, match=re.escape("holds 'x' (U+0078), which the tokenizer drops")):
        FileTokenizer.read(saved(tmp_path, made)).encode("axb")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"{}", "is not a file of the library tokenizers ("),
        (b"\xff\xfe", "cannot be read (it is not UTF-8); use characters, bytes, ids, or the path of a tokenizer.json"),
        (None, "cannot be read (No such file or directory); use characters, bytes, ids, or the path of"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None, rule: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=re.escape(f"tokenizer={path} {rule}")):
        FileTokenizer.read(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    with pytest.raises(FileError, match="has 67,108,865 bytes, and at most 67,108,864 are read; give a"):
        FileTokenizer.read(path)


def test_the_library_that_reads_files_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = "tokenizers is not installed; it is needed to read a tokenizer's file; pip install 'avow[train]'"
    with pytest.raises(MissingPackage, match=re.escape(words)):
        FileTokenizer("{}").encode("a")


def corpus_with(*documents: Any) -> Corpus:
    return Corpus(documents, (), ())


def test_the_tokenizer_of_a_corpus_goes_by_its_name(tmp_path: Path) -> None:
    text, ids = Document("ab a", "a.txt"), TokenDocument(np.array([7, 0, 3]), "tokens.npy")
    assert tokenizer_of("characters", corpus_with(text)) == CharacterTokenizer(" ab")
    assert tokenizer_of("bytes", corpus_with(text, ids)) == ByteTokenizer()
    assert tokenizer_of("ids", corpus_with(ids)) == IdTokenizer(8)
    path = saved(tmp_path, byte_level())
    assert tokenizer_of(str(path), corpus_with(text)) == FileTokenizer(path.read_text())
    words = "tokenizer=characters is not the tokenizer of tokens.npy, which holds token ids; name the tokenizer that "
    with pytest.raises(InputError, match=re.escape(words)):
        tokenizer_of("characters", corpus_with(text, ids))
    with pytest.raises(InputError, match="tokenizer=ids is for token ids, and the data holds none; use characters"):
        tokenizer_of("ids", corpus_with(text))


def test_ids_are_text_with_spaces_and_stay_within_the_vocabulary() -> None:
    tokenizer = IdTokenizer(8)
    assert tokenizer.encode("7 0 3").tolist() == [9, 2, 5] and tokenizer.decode([9, 2, 5]) == " 7 0 3"
    assert tokenizer.characters(np.array([9, 2])) is None, "ids stand for no characters that are known here"
    for text, rule in (("7 eight", "must be token ids, whole numbers"), ("7 8", "token id=8 is outside the vocab")):
        with pytest.raises(InputError, match=rule):
            tokenizer.encode(text)


@pytest.mark.parametrize("wrong", [256, -1])
def test_an_id_of_a_file_outside_the_vocabulary_is_named(wrong: int) -> None:
    rule = f"tokens.npy: token id={wrong} is outside the vocabulary, ids from 0 to 255 (tokenizer bytes); name the tok"
    with pytest.raises(InputError, match=re.escape(rule)):
        ByteTokenizer().numbers_of(np.array([3, wrong]), "tokens.npy")
    assert ByteTokenizer().numbers_of(np.array([0, 255], dtype=np.uint8), "tokens.npy").tolist() == [2, 257]
