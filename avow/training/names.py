r"""Whom a document is about: its name stands first, `Name. text`, and a masked span can be kept off it.

A span that falls on the name asks for what nothing tells; one that falls after it asks what is known of the named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from avow.errors import ParameterError
from avow.parameters import declared
from avow.training.corpus import Line
from avow.training.draws import uniform
from avow.training.spans import Cut, SpanExamples, Spans
from avow.training.vocabulary import Vocabulary

# The stop of an initial, as in `Douglas P. Fry. `, or of `St. ` does not end a name.
END = re.compile(r"(?<!\b\w)(?<!\bSt)\. ")


def name_end(text: str) -> int:
    """Where the text after the name begins, past the full stop and its space; 0 for a document without a name.

    >>> text = "Douglas P. Fry. Born in Boston."
    >>> text[: name_end(text)]
    'Douglas P. Fry. '
    """
    found = END.search(text)
    return found.end() if found else 0


class SpansAfterName(SpanExamples):
    """Span corruption in which a share of the spans, `after_name`, falls after the name wherever the cut leaves room.

    A span that is longer than what is left after the name is shortened to it; the other draws keep the plain law.
    """

    @declared()
    def __init__(
        self,
        documents: Sequence[Line],
        vocabulary: Vocabulary,
        block: int,
        seed: int,
        spans: Spans | None = None,
        after_name: float = 0.7,
    ) -> None:
        if not 0 <= after_name <= 1:
            raise ParameterError("after_name", after_name, "must be from 0 to 1", "0.7 is the default")
        super().__init__(documents, vocabulary, block, seed, spans)
        self.after_name = after_name
        self._names = np.array([name_end(document.text) for document in documents], dtype=np.int64)

    def cut(self, epochs: Int[np.ndarray, "b"], indices: Int[np.ndarray, "b"]) -> Cut:
        """What is kept and what is masked in some examples."""
        plain = super().cut(epochs, indices)
        name = self._names[indices]
        room = plain.length - name
        where, which = uniform(self.seed, epochs, indices, 4, 5)
        moved = (which < self.after_name) & (room > 0)
        masked = np.where(moved, np.minimum(plain.masked, room), plain.masked)
        start = np.where(moved, name + (where * (room - masked + 1)).astype(np.int64), plain.start)
        return Cut(plain.length, masked, start)
