"""A cache of sequences of different lengths beside the tokens that it should hold, and the truth about its answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from avow.core import Certificate
from avow.nn import KeyValueCache
from tests.helpers.caches import errors, queries, tokens


class Ragged:
    """A cache, and the keys and values of each sequence in it."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        lead = cache.key_heads, 0
        self.sequences = [
            tuple(torch.zeros(*lead, width, dtype=cache.dtype) for width in (cache.dim, cache.value_dim))
            for _ in range(cache.batch)
        ]

    def append(self, counts: Sequence[int], loud: float = 1.0, on_device: bool = False) -> None:
        """Append new tokens to each sequence, with nan behind them."""
        k, v = tokens(self.cache, max(counts), loud)
        for i, count in enumerate(counts):
            own = zip(self.sequences[i], (k[i, :, :count], v[i, :, :count]), strict=True)
            self.sequences[i] = tuple(torch.cat(pair, 1) for pair in own)
            k[i, :, count:], v[i, :, count:] = math.nan, math.nan
        self.cache.append(k, v, lengths=torch.tensor(counts) if on_device else counts)

    def crop(self, lengths: Sequence[int], on_device: bool = False) -> None:
        """Crop each sequence."""
        self.sequences = [tuple(x[:, :n] for x in own) for own, n in zip(self.sequences, lengths, strict=True)]
        self.cache.crop(torch.tensor(lengths) if on_device else lengths)

    @property
    def lengths(self) -> list[int]:
        return [own[0].shape[1] for own in self.sequences]

    def check(self, q: Tensor, tol: float | None) -> Certificate:
        """Attend, and hold each row against the truth in float64 of its own sequence."""
        out, certificate = self.cache.attend(q.to(self.cache.dtype), tol)
        assert certificate.rows.shape == q.shape[:3]
        for i, (k, v) in enumerate(self.sequences):
            row = slice(i, i + 1)
            found = errors(q[row].to(k.dtype), k.unsqueeze(0), v.unsqueeze(0), out[row])
            assert bool((found <= certificate.rows[row]).all()), f"a row is beyond its bound: {found}"
        assert tol is None or certificate.keeps(tol)
        return certificate

    def queries(self, n: int, sharp: float) -> Tensor:
        """Queries near some keys of each sequence."""
        heads = 2 * self.cache.key_heads
        return torch.cat([queries(k.unsqueeze(0), heads, n, sharp) for k, _ in self.sequences])

    def play(
        self, chance: random.Random, moves: int, on_device: bool = False, most: int = 1024, loudest: float = 30.0
    ) -> None:
        """Random appends, crops and new beginnings, each row held to its bound whenever all sequences have tokens."""
        for _ in range(moves):
            room, unknown = [most - n for n in self.lengths], on_device and chance.random() < 0.5
            move = chance.choice(["some", "one", "many", "crop", "begin"])
            if move == "crop":
                self.crop([chance.randint(0, n) if chance.random() < 0.5 else n for n in self.lengths], unknown)
            elif move == "begin":
                self.crop([n * (chance.random() < 0.6) for n in self.lengths], unknown)
            else:
                up_to = {"some": 70, "one": 1, "many": 200}[move]
                counts = [chance.randint(0, min(up_to, x)) for x in room]
                self.append(counts, chance.choice([0.1, 1.0, loudest]), unknown)
            if all(self.lengths):
                n = chance.choice([1, 1, 1, min(2, *self.lengths)])
                self.check(self.queries(n, chance.choice([0.0, 1.0, 4.0])), chance.choice([None, 0.05, 0.3]))
        assert list(self.cache.lengths) == self.lengths
