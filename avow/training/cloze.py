r"""Cloze examples: a name, hardly any context, and a capitalised span to be remembered.

A document `Name. text` becomes `Name. left M right M span M`: the span is a run of capitalised words of the text, left
and right are the few characters beside it, and all else is dropped. A question asks in the same way: by name, with
little said. The law, exactly, for a document with C candidates:

.. math:: span \sim \mathcal{U}\{1, …, C\}, \quad left, right \sim \mathcal{U}\{0, …, window\},
          \quad left = right = 0 \text{ with probability } bare

Windows end where the text does, and are cut to fit the block: the right one first, then the left one, never the span
or the name. A document in which no candidate fits is an example of span corruption instead. Targets are the next
characters, all of them. An example depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from avow.errors import ParameterError
from avow.parameters import declared
from avow.training.corpus import Line
from avow.training.draws import uniform
from avow.training.names import name_end
from avow.training.spans import SpanExamples, Spans
from avow.training.vocabulary import MASK, PAD, Vocabulary

# A word takes its apostrophes and hyphens along (O'Connell, Saint-Denis), but no possessive.
WORD = re.compile(r"[^\W\d_]\w*(?:['’-](?!s\b)\w+)*")
JOINT = re.compile(r",? (?:(?:of|de|the) )*")


def candidates(text: str) -> list[tuple[int, int]]:
    """Where the spans worth asking for begin and end, all of them after the name.

    >>> text = "Ada Holm. Holm was born in Columbus, Ohio and read at the University of Lorne."
    >>> [text[begin:end] for begin, end in candidates(text)]
    ['Columbus, Ohio', 'Columbus', 'Ohio', 'University of Lorne']
    """
    first = name_end(text)
    own = set(WORD.findall(text[:first]))
    found = []
    for run in _runs(text, first):
        # Columbus, Ohio is asked for as a whole and in its parts.
        parts: list[list[re.Match[str]]] = [[run[0]]]
        for before, word in itertools.pairwise(run):
            if text[before.end()] == ",":
                parts.append([])
            parts[-1].append(word)
        asked = [run, *parts] if len(parts) > 1 else [run]
        # Whoever has read the name need not remember it.
        found += [(words[0].start(), words[-1].end()) for words in asked if words[0][0] not in own]
    return found


def _runs(text: str, first: int) -> Iterator[list[re.Match[str]]]:
    """Capitalised words from `first` on, those that belong together in one list."""
    run: list[re.Match[str]] = []
    for word in WORD.finditer(text, first):
        if not word[0][0].isupper():
            continue
        if run and not JOINT.fullmatch(text, run[-1].end(), word.start()):
            yield run
            run = []
        run.append(word)
    if run:
        yield run


@dataclass(frozen=True)
class Cloze:
    """What examples keep of their documents: `name` characters from the start, then text[start:stop], which is asked
    for, with `left` and `right` characters beside it; `closed` says whether a last mask ends the span."""

    name: Int[np.ndarray, "b"]
    left: Int[np.ndarray, "b"]
    start: Int[np.ndarray, "b"]
    stop: Int[np.ndarray, "b"]
    right: Int[np.ndarray, "b"]
    closed: Bool[np.ndarray, "b"]


class ClozeExamples(SpanExamples):
    """Cloze examples over documents that are tokenised once; where nothing can be asked for, span corruption."""

    @declared()
    def __init__(
        self,
        documents: Sequence[Line],
        vocabulary: Vocabulary,
        block: int,
        seed: int,
        window: int = 24,
        bare: float = 0.3,
        spans: Spans | None = None,
    ) -> None:
        if window < 0:
            raise ParameterError("window", window, "must be at least 0", "24 is the default")
        if not 0 <= bare <= 1:
            raise ParameterError("bare", bare, "must be from 0 to 1", "0.3 is the default")
        super().__init__(documents, vocabulary, block, seed, spans)
        self.window, self.bare = window, bare
        self._names = np.array([name_end(document.text) for document in documents], dtype=np.int64)
        # The name, two masks and the span must fit; the last mask is a target, never an input.
        fitting = [
            [(begin, end) for begin, end in candidates(document.text) if name + 2 + end - begin <= block]
            if name
            else []
            for document, name in zip(documents, self._names.tolist(), strict=True)
        ]
        self._counts = np.array([len(pairs) for pairs in fitting], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        # A last row that no cloze uses, so that documents without candidates have something to point at.
        self._candidates = np.array([*(pair for pairs in fitting for pair in pairs), (0, 1)], dtype=np.int64)

    def choose(self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]) -> Cloze:
        """What is kept and what is asked for in some examples."""
        which, bare, before, after = uniform(self.seed, epochs, indices, 6, 7, 8, 9)
        count, name = self._counts[indices], self._names[indices]
        start, stop = self._candidates[self._firsts[indices] + (which * count).astype(np.int64)].T
        beside = np.where(bare < self.bare, 0, self.window + 1)
        room = self.block - 2 - name - (stop - start)
        left = np.minimum((before * beside).astype(np.int64), np.minimum(start - name, room))
        right = np.minimum((after * beside).astype(np.int64), np.minimum(self._sizes[indices] - stop, room - left))
        # Span corruption is the same picture without a name: all before the span is left, all after it right.
        cut, closed = self.cut(epochs, indices), count > 0
        end = cut.start + cut.masked
        return Cloze(
            np.where(closed, name, 0),
            np.where(closed, left, cut.start),
            np.where(closed, start, cut.start),
            np.where(closed, stop, end),
            np.where(closed, right, cut.length - end),
            closed,
        )

    def rows(
        self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"]]:
        """Inputs and targets, padded to the longest of them."""
        kept = self.choose(epochs, indices)
        one, none = np.ones_like(kept.start), np.zeros_like(kept.start)
        # Seven pieces: name, left, M, right, M, span, M.
        sizes = np.stack([kept.name, kept.left, one, kept.right, one, kept.stop - kept.start, kept.closed], 1)  # (b, 7)
        begins = np.stack([none, kept.start - kept.left, none, kept.stop, none, kept.start, none], 1)  # (b, 7)
        # All examples one after the other, without padding: where each piece begins there, and in the text.
        flat = sizes.ravel()
        firsts = np.cumsum(flat) - flat
        shift = (begins + self._starts[indices][:, None]).ravel() - firsts
        read = np.arange(int(flat.sum())) + np.repeat(shift, flat)
        # The place of a mask reads whatever stands there, perhaps past the end, and is overwritten.
        letters = self._text[np.minimum(read, len(self._text) - 1)]
        masks = firsts.reshape(sizes.shape)[:, 2::2]  # (b, 3)
        letters[masks[sizes[:, 2::2] > 0]] = MASK
        size = sizes.sum(1, keepdims=True)
        place = np.arange(int(size.max()))[None, :]  # (1, n + 1)
        whole = np.full((len(indices), place.shape[1]), PAD, dtype=np.int64)
        whole[place < size] = letters
        # The last character is a target, never an input.
        return np.where(place < size - 1, whole, PAD)[:, :-1], whole[:, 1:]
