"""The layers of a cache for transformers' models, through what generation does to them, beside plain tokens."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from avow.errors import AvowError
from avow.integrations.transformers.cache import CertifiedLayer, cache_of
from tests.helpers.caches import DTYPES, errors
from tests.soak.turns import Case, Found, Wrong, tried


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Layers drawn from seeds alone."""
    yield lambda seed: Layer(seed).lived()


class Layer:
    """A layer, and the tokens it was given."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.window = self.rng.choice((None, None, 2, 5, 70))
        self.layer = CertifiedLayer(self.rng.choice((4, 4, None, 8)), self.window)
        self.groups, self.dim, self.dtype = self.rng.choice((1, 2)), self.rng.choice((2, 8)), self.rng.choice(DTYPES)
        self.k = self.v = torch.zeros(self.rng.choice((1, 2, 3)), self.groups, 0, self.dim, dtype=self.dtype)
        self.worst = 0.0

    def lived(self) -> Found:
        acts = [*[self.update] * 4, self.select, self.repeat, self.crop, self.fork, self.forget]
        for _ in range(self.rng.choice((5, 20))):
            self.rng.choice(acts)()
            if self.layer.get_seq_length() != self.k.shape[2]:
                raise Wrong(f"{self.layer.get_seq_length()} tokens where {self.k.shape[2]} were given")
        return Found("window" if self.window else "whole", self.worst)

    def update(self) -> None:
        n = self.rng.choice((1, 1, 1, 3, 64, 100))
        k, v = (torch.randn(self.k.shape[0], self.groups, n, self.dim).to(self.dtype) for _ in range(2))
        seen, first = self.layer.get_mask_sizes(n)
        keys, values = self.layer.update(k, v)
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        if keys.shape[2] != seen or not torch.equal(keys, self.k[:, :, first:]):
            raise Wrong(f"other keys are shown: {tuple(keys.shape)} of {self.k.shape[2]}, from {first}")
        if not torch.equal(values, self.v[:, :, first:]):
            raise Wrong("other values are shown")
        self._ask(keys, values)

    def _ask(self, keys: Tensor, values: Tensor) -> None:
        """What the cache behind the tokens shown answers to the last of them."""
        cache = cache_of(keys, values)
        if cache is None:
            return
        q = 2 * torch.randn(self.k.shape[0], self.groups * 2, 1, self.dim).to(self.dtype)
        tol = self.rng.choice((0.3, 0.05))
        method = self.rng.choice(("auto", "sparse")) if cache.bits else "auto"
        found = tried(lambda: cache.attend(q, tol, method=method))
        if isinstance(found, AvowError):
            raise Wrong(f"an answer was refused: {found}")
        ratio = errors(q, self.k, self.v, found.out, self.window) / found.certificate.rows
        self.worst = max(self.worst, float(ratio.max()) if self.dtype != torch.float64 else 0.0)
        # Float64's own truth is not known so well as its bounds say.
        if float(ratio.max()) > (1 + 1e-9 if self.dtype != torch.float64 else 10) or not found.certificate.keeps(tol):
            raise Wrong(f"an error of {float(ratio.max()):.3g} times its bound")

    def select(self) -> None:
        rows = torch.randint(self.k.shape[0], (self.rng.choice((1, 2, 4)),))
        if self.rng.random() < 0.5:
            rows = torch.randperm(self.k.shape[0])
        self.layer.reorder_cache(rows) if self.rng.random() < 0.5 else self.layer.batch_select_indices(rows)
        self._chose(rows)

    def repeat(self) -> None:
        if self.k.shape[0] > 4:
            return
        self.layer.batch_repeat_interleave(2)
        self._chose(torch.arange(self.k.shape[0]).repeat_interleave(2))

    def _chose(self, rows: Tensor) -> None:
        if self.k.shape[2]:
            self.k, self.v = self.k[rows], self.v[rows]

    def crop(self) -> None:
        many = self.rng.choice((0, 1, 2, 60, 1000, -1))
        refused = tried(lambda: self.layer.crop(-many))
        if isinstance(refused, AvowError):
            if self.window is None and many >= 0:
                raise Wrong(f"forgetting {many} tokens was refused: {refused}")
            return
        left = max(0, self.k.shape[2] - max(many, 0))
        self.k, self.v = self.k[:, :, :left], self.v[:, :, :left]

    def fork(self) -> None:
        other = copy.deepcopy(self.layer)
        one = torch.zeros(self.k.shape[0], self.groups, 1, self.dim, dtype=self.dtype)
        other.update(one, one)
        if other.get_seq_length() != self.layer.get_seq_length() + 1:
            raise Wrong("a copy shares its length")

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.layer.reset()
            self.k, self.v = self.k[:, :, :0], self.v[:, :, :0]
