"""Tokenizers: what turns a text into numbers and back, kept with every checkpoint.

| name | tokens | what a text may hold |
|---|---|---|
| characters | the characters of the training data | those characters; another is an error |
| bytes | 256 bytes of UTF-8 | anything |
| a file | those of a `tokenizers` JSON | what that tokenizer knows; its own unknown token stands for the rest |
| ids | the numbers of a tokens.npy, up to the largest | numbers with spaces between them |

In a model, 0 is padding and 1 the mask; the first token has number 2.
"""

from __future__ import annotations

import functools
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from avow.errors import FileError, InputError
from avow.extras import require
from avow.parameters import declared

PAD, MASK = 0, 1
# The number of a tokenizer's first token.
FIRST_TOKEN = 2
# What a mask looks like in decoded text; padding is not shown.
MASK_SIGN = "⁇"
# Characters of a text that an error shows on each side of the one it is about.
_AROUND = 20
# The longest file of a tokenizer, in bytes.
FILE_BYTES = 1 << 26


class Tokenizer(ABC):
    """A text as numbers, and numbers as a text."""

    kind: str

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of its own tokens."""

    @property
    def size(self) -> int:
        """The number of tokens of a model, padding and mask included."""
        return self.count + FIRST_TOKEN

    @abstractmethod
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        """The numbers of a text; `where` is its name in an error."""

    def length(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.encode(text))

    def edges(self, text: str) -> Int[np.ndarray, "n+1"]:
        """The characters at which each token begins, and where the last one ends."""
        rule = "does not say at which character of a text a token begins"
        raise InputError("tokenizer", self.kind, rule, "use characters, or a tokenizer.json")

    @abstractmethod
    def _text(self, ids: list[int]) -> str:
        """The text of some of its own tokens, counted from 0."""

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON has it; a file keeps its own beside that."""

    @declared()
    def decode(self, numbers: Iterable[int]) -> str:
        """The text of some numbers; a mask reads as ⁇, padding as nothing."""
        parts = []
        for mask, run in itertools.groupby(map(int, numbers), key=lambda number: number == MASK):
            if mask:
                parts.append(MASK_SIGN * sum(1 for _ in run))
                continue
            tokens = [number for number in run if number != PAD]
            for number in tokens:
                if not FIRST_TOKEN <= number < self.size:
                    rule = f"is not a number of this vocabulary, from 0 to {self.size - 1}"
                    raise InputError("numbers", number, rule, "decode with the model's own")
            parts.append(self._text([number - FIRST_TOKEN for number in tokens]))
        return "".join(parts)

    def characters(self, numbers: Int[np.ndarray, "n"]) -> int | None:
        """How many characters some numbers stand for; None if they stand for no text."""
        return len(self.decode(numbers))

    def numbers_of(self, ids: Int[np.ndarray, "n"], where: str) -> Int[np.ndarray, "n"]:
        """The model's numbers of token ids that a file holds; raises if one is outside the vocabulary."""
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.count:
            rule = f"is outside the vocabulary, ids from 0 to {self.count - 1} (tokenizer {self.kind})"
            raise InputError(f"{where}: token id", low if low < 0 else high, rule, "name the tokenizer that made them")
        return ids.astype(np.int64) + FIRST_TOKEN


@declared()
@dataclass(frozen=True)
class CharacterTokenizer(Tokenizer):
    """One token for each of some characters."""

    known: str
    kind = "characters"

    def __post_init__(self) -> None:
        for character, count in Counter(self.known).items():
            if count > 1:
                raise InputError("known", repr(character), "occurs twice", "list every character once")

    @staticmethod
    @declared()
    def of(texts: Iterable[str]) -> CharacterTokenizer:
        """That of the characters of some texts, in the order of their code points."""
        return CharacterTokenizer("".join(sorted(set().union(*texts))))

    @property
    def count(self) -> int:
        return len(self.known)

    @functools.cached_property
    def _codes(self) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """The code points in order, and the number of each."""
        codes = _code_points(self.known)
        order = np.argsort(codes)
        return codes[order], order + FIRST_TOKEN

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        codes, numbers = self._codes
        given = _code_points(text)
        places = np.searchsorted(codes, given)
        known = np.zeros(len(given), dtype=bool)
        if len(codes):
            places = np.minimum(places, len(codes) - 1)
            known = codes[places] == given
        if not known.all():
            first = int(np.argmin(known))
            shown = excerpt(text, first)
            rule = f"holds {text[first]!r} (U+{ord(text[first]):04X}), a character outside the vocabulary of "
            remedy = 'remove it, or train on a text that holds it, or with the tokenizer "bytes"'
            raise InputError(where, shown, f"{rule}{self.count}", remedy)
        return numbers[places] if len(given) else np.zeros(0, dtype=np.int64)

    def length(self, text: str) -> int:
        return len(text)  # also of a text with characters outside the vocabulary

    def edges(self, text: str) -> Int[np.ndarray, "n+1"]:
        return np.arange(len(text) + 1)

    def _text(self, ids: list[int]) -> str:
        return "".join(self.known[one] for one in ids)

    def characters(self, numbers: Int[np.ndarray, "n"]) -> int:
        return len(numbers)

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "known": self.known}


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8: no text is outside its vocabulary."""

    kind = "bytes"

    @property
    def count(self) -> int:
        return 256

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        # What a terminal could not read as UTF-8 comes back as the bytes that it was.
        content = text.encode("utf-8", errors="surrogateescape")
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64) + FIRST_TOKEN

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def characters(self, numbers: Int[np.ndarray, "n"]) -> int:
        # Every character has one byte that does not go on with another.
        return int(((np.asarray(numbers) - FIRST_TOKEN) & 0xC0 != 0x80).sum())

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class FileTokenizer(Tokenizer):
    """The tokenizer of a JSON file of the library `tokenizers`, without special tokens, truncation or padding."""

    content: str
    kind = "file"

    @staticmethod
    def read(path: Path) -> FileTokenizer:
        """That of a file."""
        try:
            size = path.stat().st_size
            if size > FILE_BYTES:
                rule = f"has {size:,} bytes, and at most {FILE_BYTES:,} are read"
                raise FileError("tokenizer", path, rule, "give a tokenizer.json")
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            remedy = "use characters, bytes, ids, or the path of a tokenizer.json"
            raise FileError("tokenizer", path, f"cannot be read ({why})", remedy) from error
        made = FileTokenizer(content)
        try:
            _ = made.count
        except ValueError as error:
            raise FileError("tokenizer", path, str(error), "give a tokenizer.json of the library tokenizers") from error
        return made

    @functools.cached_property
    def _library(self) -> Any:
        require("tokenizers", purpose="to read a tokenizer's file")
        import tokenizers

        try:
            made = tokenizers.Tokenizer.from_str(self.content)
        except Exception as error:  # The library raises nothing more special.
            raise ValueError(f"is not a file of the library tokenizers ({str(error)[:80]})") from error
        # Either may be part of the file, and would leave text unread or read what is not there.
        made.no_truncation()
        made.no_padding()
        return made

    @functools.cached_property
    def _count(self) -> int:
        # Numbers may have gaps.
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def count(self) -> int:
        return self._count

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        encoding = self._encode(text)
        self._check_complete(text, encoding.offsets, where)
        return np.array(encoding.ids, dtype=np.int64) + FIRST_TOKEN

    def edges(self, text: str) -> Int[np.ndarray, "n+1"]:
        return np.array([*(start for start, _ in self._encode(text).offsets), len(text)])

    def _encode(self, text: str) -> Any:
        return self._library.encode(text, add_special_tokens=False)

    def _check_complete(self, text: str, offsets: list[tuple[int, int]], where: str) -> None:
        """Raise if a character went into no token: a tokenizer without an unknown token drops what it does not know."""
        edges = np.zeros(len(text) + 1, dtype=np.int64)
        ends = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        np.add.at(edges, ends[:, 0], 1)
        np.add.at(edges, ends[:, 1], -1)
        outside = np.nonzero(np.cumsum(edges)[:-1] == 0)[0].tolist()
        if all(text[place].isspace() for place in outside):
            return
        # The library counts on as if a dropped character had not been there: only asking tells which one it is.
        dropped = (one for one in dict.fromkeys(text) if not one.isspace() and not self._encode(one).ids)
        character = next(dropped, text[next(place for place in outside if not text[place].isspace())])
        rule = f"holds {character!r} (U+{ord(character):04X}), which the tokenizer drops"
        remedy = "remove it, or use a tokenizer with an unknown token or one of bytes"
        raise InputError(where, excerpt(text, text.index(character)), rule, remedy)

    def _text(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class IdTokenizer(Tokenizer):
    """Token ids whose tokenizer is not known: a text is numbers with spaces between them."""

    ids: int
    kind = "ids"

    @property
    def count(self) -> int:
        return self.ids

    @declared()
    def encode(self, text: str, where: str = "text") -> Int[np.ndarray, "n"]:
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except (ValueError, OverflowError) as error:
            rule = "must be token ids, whole numbers with spaces between them (tokenizer ids)"
            raise InputError(
                where, excerpt(text, 0), rule, "name the tokenizer that made the ids, to use text"
            ) from error
        return self.numbers_of(ids, where) if len(ids) else ids

    def _text(self, ids: list[int]) -> str:
        return "".join(f" {one}" for one in ids)

    def characters(self, numbers: Int[np.ndarray, "n"]) -> None:
        return None

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "ids": self.ids}


def tokenizer_from(plain: Mapping[str, Any], content: str | None = None) -> Tokenizer:
    """The tokenizer that a checkpoint kept: what `plain` gave, and the content of its file if it has one."""
    match plain:
        case {"kind": "characters", "known": str(known)}:
            return CharacterTokenizer(known)
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "ids", "ids": int(ids)}:
            return IdTokenizer(ids)
        case {"kind": "file"} if content is not None:
            return FileTokenizer(content)
    raise FileError("tokenizer", json.dumps(plain)[:60], "is not one that this version knows", "train again")


def excerpt(text: str, place: int) -> str:
    """A text around one of its characters, as an error shows it."""
    first, last = max(0, place - _AROUND), place + _AROUND
    return f"{'…' if first else ''}{text[first:last]!r}{'…' if last < len(text) else ''}"


def _code_points(text: str) -> Int[np.ndarray, "n"]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4").astype(np.int64)
