"""A reading as the browser gets it: JSON, and in it one deflated block of bytes; `static/reading_data.js` reads both.

Weights are coded by a code book, coarse where they are small. Bounds and errors are powers of ten in steps of 1/32;
bounds are rounded up, so that no page promises more than a certificate does.
"""

from __future__ import annotations

import base64
import bisect
import functools
import itertools
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from avow.integrations.transformers.reading import METHODS, STOPS, Next, Reading, Row, whole_words

FORMAT = "avow reading 1"
# Codes of weights: below about 1% all are zero, and from 5% on steps are of 1%.
WEIGHTS = (0.0, 2**-6, 2**-5, *(i / 100 for i in range(5, 101)))
# Codes of bounds and errors: 255 is 1, and a step is a 32nd of a decade; 0 is below all of them.
_STEPS, _ONE = 32, 255
# Next words that are kept of a text without one of its words.
_WITHOUT = 5
_SAYS = {
    "exact": "up to rounding in float32",
    "low_rank": "from 64 landmarks among the keys",
    "random_features": "from 256 random features, with probability 0.99",
    "polynomial": "from a Taylor polynomial of exp",
}


def plain_reading(reading: Reading, **more: str) -> dict[str, Any]:
    """A reading as JSON holds it; `more` are a story's title and what it is about."""
    block = b"".join([*(_row_bytes(row) for row in reading.rows), codes_up(reading.promises)])
    names = [method.name for method in METHODS]
    return {
        "format": FORMAT,
        "model": reading.model,
        **more,
        "words": list(reading.words),
        "prompt": reading.prompt,
        "layers": reading.layers,
        "heads": reading.heads,
        "stops": list(STOPS),
        "rows": [row.position for row in reading.rows],
        "kinds": list(reading.kinds),
        "next": [
            {"exact": next_words(row.exact), "stops": [next_words(one) for one in row.approximate]}
            for row in reading.rows
        ],
        "read": [[round(share, 4) for share in row.read] for row in reading.rows],
        "starts": [word.start for word in whole_words(reading.words)],
        "without": [[next_words(one)[:_WITHOUT] for one in row.without] for row in reading.rows],
        "methods": names,
        "says": {name: _SAYS[name] for name in names},
        "weights": [round(weight, 5) for weight in WEIGHTS],
        "data": base64.b64encode(zlib.compress(block, 9)).decode("ascii"),
    }


def next_words(words: Next) -> list[list[Any]]:
    """Next words with their probabilities in four digits."""
    return [[word, float(f"{p:.4g}")] for word, p in words]


def _row_bytes(row: Row) -> bytes:
    levels = bytes(row.levels.to(torch.uint8).flatten().tolist())
    return weight_codes(row.weights) + levels + codes_up(row.bounds) + codes_up(row.errors)


def weight_codes(weights: Tensor) -> bytes:
    """The nearest entry of the code book for each weight."""
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(WEIGHTS)], dtype=torch.float64)
    return bytes(torch.bucketize(weights.double().contiguous(), middles).flatten().tolist())


def codes_up(numbers: Tensor) -> bytes:
    """The least code whose number is not below each number; 0 for what is below all codes, and for infinity."""
    return bytes(_code_up(x) for x in numbers.double().flatten().tolist())


def code_number(code: int) -> float:
    """The number that a code of a bound or an error stands for."""
    return _numbers()[code]


@functools.cache
def _numbers() -> list[float]:
    return [10.0 ** ((code - _ONE) / _STEPS) for code in range(_ONE + 1)]


def _code_up(x: float) -> int:
    # What is above 1 is coded as no bound: it is longer than any value.
    if not math.isfinite(x) or x > 1:
        return 0
    return bisect.bisect_left(_numbers(), x) if x > code_number(0) else 0
