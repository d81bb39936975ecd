"""Random numbers by address: what (seed, epoch, index, draw) gives, it always gives, in any order and any process.

Data that depends on an address alone needs no stored generator: a run resumes at any step, and every rank of a
data-parallel run can tell what the others read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

STEP = 0x9E3779B97F4A7C15
TOP = (1 << 64) - 1


def uniform(
    seed: int, epoch: Int[np.ndarray, "*shape"], index: Int[np.ndarray, "*shape"], *draws: int
) -> Iterator[Float[np.ndarray, "*shape"]]:
    """For every draw numbers in [0, 1), 53 bits each: one for every pair of epoch and index."""
    first = np.full(np.broadcast_shapes(np.shape(epoch), np.shape(index)), seed & TOP, dtype=np.uint64)
    # Unsigned arithmetic wraps by definition here; numpy warns of it for scalars, and these are arrays.
    state = _mixed(first + np.uint64(STEP))
    for word in (np.asarray(epoch), np.asarray(index)):
        # Each word is mixed in before the next comes, so that (1, 2) and (2, 1) have nothing in common.
        state = _mixed((state ^ word.astype(np.uint64)) + np.uint64(STEP))
    for draw in draws:
        last = _mixed((state ^ np.uint64(draw)) + np.uint64(STEP))
        yield (last >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(seed: int, epoch: int, count: int) -> Int[np.ndarray, "count"]:
    """The order in which an epoch reads its examples: a permutation of 0 … count − 1."""
    places = np.arange(count)
    (keys,) = uniform(seed, np.full(count, epoch), places, 0)
    return np.argsort(keys, kind="stable")


def _mixed(state: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64 bits in which every input bit moves every output bit."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
