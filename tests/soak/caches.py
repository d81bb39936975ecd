"""Key-value caches through long lives: appended to, asked, saved, damaged and copied, beside a plain list of tokens."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from avow.attend import Attended
from avow.core import Problem
from avow.decode import key_value_cache
from avow.errors import AvowError
from avow.methods.exact import Exact
from avow.nn import KeyValueCache
from tests.helpers.caches import DTYPES
from tests.helpers.truth import judge
from tests.soak.calls import ODD, SCALES, weighed
from tests.soak.damage import bytes_of
from tests.soak.turns import Case, Found, Wrong, tried

# Powers of ten that keys and values of each type may have.
REACH = {torch.float64: 14.0, torch.float32: 14.0, torch.bfloat16: 14.0, torch.float16: 3.0}


# Rows of one answer that balls judge: they take a second each where tokens are many.
BALLS = 2


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Lives of caches, their files in a folder."""
    with mock.patch.object(key_value_cache, "SHORTEST", 1):

        def case(seed: int) -> Found:
            return Life(seed, folder).lived()

        yield case


@dataclass
class Life:
    """A cache, and the tokens it was given."""

    seed: int
    folder: Path
    worst: float = 0.0
    chances: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.draw = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        rng = self.rng
        self.groups, self.siblings = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
        self.batch = rng.choice((1, 1, 2))
        self.dim, self.value_dim = rng.choice((1, 2, 5, 8, 16, 33)), rng.choice((1, 3, 8, 16))
        self.dtype = rng.choice((*DTYPES, torch.float32))
        self.window = rng.choice((None, None, None, 1, 50, 64, 200))
        bits = rng.choice((4, 4, 4, 1, 2, 3, 8, None))
        self.cache = KeyValueCache(
            self.groups, self.dim, self.value_dim, self.batch, self.dtype, bits=bits, window=self.window
        )
        self.k = torch.zeros(self.batch, self.groups, 0, self.dim, dtype=self.dtype)
        self.v = torch.zeros(self.batch, self.groups, 0, self.value_dim, dtype=self.dtype)
        self.key_size, self.value_size = (10 ** (rng.uniform(-1, 1) * REACH[self.dtype]) for _ in range(2))
        if rng.random() < 0.7:
            self.key_size = 10 ** rng.uniform(-1, 1)
        self.style = rng.choice(("plain", "plain", "channels", "ties", "giants", "drift", "zeros"))

    def lived(self) -> Found:
        """Operations until the life is over; every answer judged."""
        acts = [*[self.append] * 3, *[self.ask] * 3, self.mislead, self.store, self.fork]
        self.append()
        for _ in range(self.rng.choice((4, 10, 25))):
            self.rng.choice(acts)()
        if self.rng.random() < 0.2:
            for _ in range(70):  # token by token over the edge of a group
                self.append(1)
                self.ask()
        what = f"{self.style}, {'window' if self.window else 'whole'}"
        chance = self.chances[0].chance if self.chances else 0.0
        return Found(what, self.worst, chance, len(self.chances), sum(found.misses for found in self.chances))

    def append(self, count: int | None = None) -> None:
        """More tokens, unless they are refused: then nothing has changed."""
        if count is None:
            count = self.rng.choice((0, 1, 1, 2, 63, 64, 65, self.rng.randrange(200), 500))
        k, v = self._tokens(count)
        refused = tried(lambda: self.cache.append(k, v))
        if refused is None:
            self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self._check_length()

    def _tokens(self, count: int) -> tuple[Tensor, Tensor]:
        rng, lead = self.rng, (self.batch, self.groups, count)
        k = torch.randn(*lead, self.dim, generator=self.draw, dtype=torch.float64)
        v = torch.randn(*lead, self.value_dim, generator=self.draw, dtype=torch.float64)
        if self.style == "channels":
            # Keys along single channels, values of any length.
            k = rng.choice((4, 8, 12)) * torch.eye(self.dim, dtype=torch.float64)[
                torch.randint(self.dim, lead, generator=self.draw)
            ] + torch.rand(*lead, self.dim, generator=self.draw, dtype=torch.float64)
            v = v * torch.rand(*lead, 1, generator=self.draw, dtype=torch.float64) ** 4
        elif self.style == "ties" and count:
            k = k[:, :, torch.randint(max(1, count // 8), (count,), generator=self.draw)]
        elif self.style == "giants" and count:
            k[:, :, rng.randrange(count)] *= 10 ** rng.uniform(0, 4)
            v[:, :, rng.randrange(count)] *= 10 ** rng.uniform(-8, 8)
        elif self.style == "drift":
            self.key_size, self.value_size = self.key_size * 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-14, 14)
        elif self.style == "zeros" and rng.random() < 0.5:
            k, v = k * rng.choice((0, 1)), v * rng.choice((0, 1))
        limit = torch.finfo(self.dtype).max / 8
        k, v = (
            (x * size).clamp(-limit, limit).to(self.dtype) for x, size in ((k, self.key_size), (v, self.value_size))
        )
        # As a projection leaves them: heads behind tokens in memory.
        return (k.transpose(1, 2).contiguous().transpose(1, 2), v) if rng.random() < 0.3 else (k, v)

    def ask(self) -> None:
        """A question, answered within its certificate or refused."""
        rng = self.rng
        n = rng.choice((1, 1, 1, 1, 2, 5, 65, 0))
        heads = self.groups * self.siblings
        q = torch.randn(self.batch, heads, n, self.dim, generator=self.draw, dtype=torch.float64)
        if rng.random() < 0.5 and self.k.shape[2] and n:
            aims = self.k[:, :, torch.randint(self.k.shape[2], (n,), generator=self.draw)].double()
            q = q + rng.uniform(0, 4) * aims.repeat_interleave(self.siblings, 1)
        q = (q * rng.choice((0.2, 1, 1, 4, 10 ** rng.uniform(-3, 3)))).clamp(-6e4, 6e4).to(self.dtype)
        wishes: dict[str, Any] = {"tol": rng.choice((None, 10 ** rng.uniform(-12, 0.3), 0.3, 0.1, 0.01))}
        wishes |= {"confidence": 0.9} if rng.random() < 0.25 else {}
        wishes |= {"method": "sparse"} if rng.random() < 0.5 and self.cache.bits is not None else {}
        wishes |= {"scale": rng.choice((*SCALES, 1 / max(self.key_size, 1e-30)))} if rng.random() < 0.2 else {}
        before, drawn = q.clone(), torch.Generator().manual_seed(self.seed + 2)
        found = tried(lambda: self.cache.attend(q, **wishes, generator=drawn))
        if not torch.equal(q, before):
            raise Wrong("a query was changed")
        self._check_length()
        if not isinstance(found, AvowError):
            self._judge(q, wishes, found)
        elif n == 1 and self.k.shape[2] and type(found).__name__ == "ShapeError":
            raise Wrong(f"one query was refused: {found}")

    def _judge(self, q: Tensor, wishes: dict[str, Any], found: Attended) -> None:
        out, certificate = found
        n, s = q.shape[2], self.k.shape[2]
        if n == 0:
            return
        tol = wishes["tol"]
        if tol is not None and not certificate.keeps(tol):
            raise Wrong(f"tol={tol} is not kept by {certificate.bound}")
        if out.dtype != self.dtype or not bool(torch.isfinite(out).all()):
            raise Wrong(f"an answer of {out.dtype}, or nan in it")
        own, at = torch.arange(s - n, s)[:, None], torch.arange(s)
        mask = (at <= own) & (at > own - (s if self.window is None else self.window))
        # What no query sees is left out: a window's truth needs no more.
        first = 0 if self.window is None else max(0, s - n - self.window + 1)
        mask = mask[:, first:]
        p = Problem.of(
            q, self.k[:, :, first:], self.v[:, :, first:], mask=mask, scale=wishes.get("scale"), enable_gqa=True
        )
        verdict = judge(Exact(), p, out, certificate.rows.reshape(q.shape[:-1]), mask, BALLS)
        weight = weighed(certificate, verdict)
        self.worst = max(self.worst, weight.worst)
        if weight.rows:
            self.chances.append(weight)

    def mislead(self) -> None:
        """Tokens and questions of the wrong kind: refused, and nothing has changed."""
        rng = self.rng
        k, v = self._tokens(rng.choice((1, 3, 70)))
        wrong: tuple[Any, ...] = (None, 3, "v", v[0], v.unsqueeze(0))
        bad = rng.choice((math.nan, math.inf, -math.inf))
        kind = rng.randrange(6)
        if kind == 0:
            (k if rng.random() < 0.5 else v)[..., -1, 0] = bad
        elif kind == 1:
            k = k[:, :, 1:]
        elif kind == 2:
            k = k.to(rng.choice([x for x in (*DTYPES, torch.int64) if x != self.dtype]))
        elif kind == 3:
            k = k[..., :-1] if self.dim > 1 else k[0]
        elif kind == 4:
            v = rng.choice(wrong)
        if kind < 5:
            if tried(lambda: self.cache.append(k, v)) is None:
                raise Wrong(f"wrong tokens were taken ({kind})")
        else:
            q = torch.zeros(self.batch, self.groups, 1, self.dim, dtype=self.dtype)
            name = rng.choice(("q", "tol", "confidence", "scale", "method", "generator"))
            given: dict[str, Any] = {"q": q, name: rng.choice((*ODD, q[0], q.long(), q.unsqueeze(0)))}
            tried(lambda: self.cache.attend(**given))
            q[..., 0] = bad
            if not isinstance(tried(lambda: self.cache.attend(q)), AvowError):
                raise Wrong("a query of nan or inf was answered")
        self._check_length()

    def store(self) -> None:
        """Saved and loaded it answers as before; damaged it is refused."""
        path = self.folder / "cache.safetensors"
        self.cache.save(path)
        loaded = KeyValueCache.load(path)
        data = path.read_bytes()
        spoilt = bytes_of(self.rng, data)
        path.write_bytes(spoilt)
        damaged = tried(lambda: KeyValueCache.load(path))
        if isinstance(damaged, AvowError):
            if str(path) not in str(damaged):
                raise Wrong(f"a refusal that does not name the file: {damaged}")
        else:
            _alike(self.cache, damaged, self.batch, self.groups * self.siblings)
        _alike(self.cache, loaded, self.batch, self.groups * self.siblings)
        if self.rng.random() < 0.7:
            self.cache = loaded
        if [file.name for file in self.folder.iterdir()] != [path.name]:
            raise Wrong("a save left something behind")

    def fork(self) -> None:
        """A copy goes its own way, and the original does not notice."""
        other = copy.deepcopy(self.cache)
        length = other.length
        k, v = self._tokens(self.rng.choice((1, 64, 100)))
        refused = tried(lambda: other.append(k, v))
        if self.cache.length != length:
            raise Wrong("a copy shares its length")
        if self.rng.random() < 0.5 and refused is None:
            self.cache = other
            self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    def _check_length(self) -> None:
        count = self.k.shape[2]
        if self.cache.length != (count if self.window is None else min(count, self.window)):
            raise Wrong(f"{self.cache.length} tokens where {count} were given")


def _alike(one: KeyValueCache, other: KeyValueCache, batch: int, heads: int) -> None:
    """Raise where two caches hold, or answer, anything else."""
    for name in ("key_heads", "dim", "value_dim", "batch", "bits", "window", "dtype", "length"):
        if getattr(one, name) != getattr(other, name):
            raise Wrong(f"another {name} came back")
    if not one.length:
        return
    if not all(torch.equal(x, y) for x, y in zip(one.holding[:4], other.holding[:4], strict=True)):
        raise Wrong("other tokens came back")
    q = torch.ones(batch, heads, 1, one.dim, dtype=one.dtype)
    first, second = (tried(lambda cache=cache: copy.deepcopy(cache).attend(q, 0.1)) for cache in (one, other))  # type: ignore[misc]
    if isinstance(first, AvowError) or isinstance(second, AvowError):
        if str(first) != str(second):
            raise Wrong("what came back refuses otherwise")
    elif not torch.equal(first.out, second.out) or first.certificate != second.certificate:
        raise Wrong("what came back answers otherwise")
