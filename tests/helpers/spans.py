"""Where span corruption cuts its documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from avow.training import SpanExamples


class Cut(NamedTuple):
    """`length` characters of a document are kept, and `masked` of them, from `start` on, are to be written."""

    length: np.ndarray
    masked: np.ndarray
    start: np.ndarray


def cut_of(examples: SpanExamples, epochs: np.ndarray, indices: np.ndarray) -> Cut:
    pieces = examples.choose(epochs, indices)
    masked = pieces.stop - pieces.start
    assert np.array_equal(pieces.left, pieces.start), "everything before the span is kept"
    return Cut(pieces.left + masked + pieces.right, masked, pieces.start)
