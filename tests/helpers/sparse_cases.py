"""Heads drawn to break sparse attention: ties at the cut, keys a sketch does worst on, values that make drops hurt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from avow.core import Problem
from avow.methods.sparse import Sparse
from tests.helpers.generators import Case, layout, sizes

# Bounds of float64 rows that read everything are so small that only balls can judge them, and balls are slow.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Shape(NamedTuple):
    """Query heads, key heads, queries, keys and dimensions of a call."""

    h: int
    g: int
    n: int
    s: int
    d: int
    e: int

    @property
    def siblings(self) -> int:
        return self.h // self.g


class Drawn(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def draw_sparse_case(family: str, seed: int, heads: int, chance: float) -> Case:
    """A call of one family, deterministic where `chance` is 0; the same for the same arguments."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    siblings = rng.choice((1, 1, 2, 4))
    groups = max(1, heads // siblings // 4)
    d, e = rng.choice((2, 8, 16, 33, 64)), rng.choice((1, 3, 8, 16))
    # Samples pay where much may be dropped from many tokens; a proof may be asked for any share of any number.
    s = rng.choice((512, 700, 1024) if chance else (64, 65, 127, 128, 200, 320, 512, 1024))
    drop = 10 ** (rng.uniform(-0.8, 0.0) if chance else rng.uniform(-4, 0.2))
    shape = Shape(groups * siblings, groups, rng.choice((1, 4, 16, 48)), s, d, e)
    method = Sparse(drop=drop, bits=rng.choice((4, 4, 8) if chance else (1, 2, 3, 4, 4, 4, 8)), chance=chance)
    q, k, v = FAMILIES[family](rng, generator, shape, method)
    if rng.random() < 0.3:
        v = _against(method, shape, q, k, generator)
    dtype = torch.float64 if chance == 0 and rng.random() < 0.1 else rng.choice(_DTYPES)
    limit = torch.finfo(dtype).max / 8
    q, k, v = (layout(rng, x.clamp(-limit, limit).to(dtype)) for x in (q, k, v))
    # What families say about logits they say of plain products.
    problem = Problem.of(q, k, v, scale=1.0, causal=rng.random() < 0.2, enable_gqa=siblings > 1)
    return Case(problem, method, None, seed)


def _gaussian(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _plain(g: torch.Generator, z: Shape) -> Drawn:
    q, k, v = (_gaussian(g, 1, *x) for x in ((z.h, z.n, z.d), (z.g, z.s, z.d), (z.g, z.s, z.e)))
    return Drawn(q, k, v)


def _sharp(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Gaussian heads from flat to a copying one."""
    q, k, v = _plain(g, z)
    return Drawn(q * 10 ** rng.uniform(-1, 1) / z.d**0.5, k, v)


def _clustered(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Keys close around a few centres, queries near one of them."""
    q, k, v = _plain(g, z)
    centres = _gaussian(g, 1, z.g, 5, z.d) * 3 / z.d**0.5
    spread = 10 ** rng.uniform(-3, 0) / z.d**0.5
    k = centres[:, :, torch.randint(5, (z.s,), generator=g)] + spread * k
    near = centres.repeat_interleave(z.siblings, 1)[:, :, torch.randint(5, (z.n,), generator=g)]
    return Drawn(near * rng.uniform(0.1, 3) + 0.1 * q, k, v)


def _ties(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Many tokens whose mass is all but exactly what may be dropped: the cut runs through near-ties."""
    q, k, v = _plain(g, z)
    axis = torch.nn.functional.normalize(_gaussian(g, 1, z.g, 1, z.d), dim=-1)
    few = rng.randint(1, max(1, z.s // 16))
    level = torch.log(torch.tensor(method.drop / max(z.s - few, 1) * rng.choice((0.25, 0.5, 1.0, 2.0))))
    jitter = 10 ** rng.uniform(-9, -1)
    heights = level.double() + jitter * _gaussian(g, 1, z.g, z.s, 1)
    heights[:, :, torch.randperm(z.s, generator=g)[:few]] = 0.0
    loud = 10 ** rng.uniform(0, 1.5)
    # Across the axis keys differ, which queries hardly see and sketches do.
    across = k - (k * axis).sum(-1, keepdim=True) * axis
    q = loud * axis.repeat_interleave(z.siblings, 1) + rng.choice((0.0, 1e-6, 1e-2)) * q
    return Drawn(q, heights / loud * axis + rng.choice((0.0, 0.1, 3.0)) * across, v)


def _huge(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Norms of queries and keys that are far from one and undo each other; values of any size."""
    q, k, v = _plain(g, z)
    # Longer keys than these only balls can judge: `tests.fuzz` has some, of fewer tokens.
    far = 10 ** rng.uniform(-9, 3)
    return Drawn(q / far * sizes(g, z.h, 1.0), k * far, v * sizes(g, z.g, 9.0))


def _equal(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """All keys the same, to the last bit or to the last but one."""
    q, k, v = _plain(g, z)
    k = k[:, :, :1] * (1 + rng.choice((0.0, 1e-7, 1e-3)) * torch.rand(1, z.g, z.s, 1, generator=g, dtype=torch.float64))
    return Drawn(q * 10 ** rng.uniform(-2, 1), k, v)


def _giant(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """One key so large that its whole group is sketched coarsely; one value so large that it is the unit."""
    q, k, v = _plain(g, z)
    k[:, :, rng.randrange(z.s)] *= 10 ** rng.uniform(0, 4)
    v[:, :, rng.randrange(z.s)] *= 10 ** rng.choice((-1, 0, 1, 4))
    return Drawn(q * 10 ** rng.uniform(-3, 0.5), k, v)


def _astride(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Keys half-way between the steps of their sketch, all off the way that the query points: no bound is tighter."""
    q, k, v = _plain(g, z)
    levels = 2**method.bits - 1
    signs = torch.where(_gaussian(g, 1, z.g, 1, z.d) > 0, 1.0, -1.0).double()
    codes = torch.randint(0, max(levels, 1), k.shape, generator=g).double()
    k = (codes + 0.5 + 0.499 * signs * rng.choice((-1.0, 1.0))).clamp(0, levels)
    k[:, :, ::64], k[:, :, 1::64] = 0.0, float(levels)  # every group spans all steps
    q = signs.repeat_interleave(z.siblings, 1) * 10 ** rng.uniform(-2, 0.5) / z.d + 0.001 * q
    return Drawn(q, k, v)


def _rare(rng: random.Random, g: torch.Generator, z: Shape, method: Sparse) -> Drawn:
    """Flat heads whose values are nearly all alike but for a few: what samples see least and miss most."""
    q, k, _ = _plain(g, z)
    v = torch.full((1, z.g, z.s, z.e), rng.choice((0.0, 1e-3, 0.5)), dtype=torch.float64)
    v[:, :, torch.rand(z.s, generator=g) < rng.choice((0.003, 0.02, 0.1))] = rng.choice((1.0, -1.0))
    return Drawn(q * rng.choice((0.0, 0.01, 0.3)) / z.d**0.5, k, v)


FAMILIES: dict[str, Callable[[random.Random, torch.Generator, Shape, Sparse], Drawn]] = {
    "sharp": _sharp,
    "clustered": _clustered,
    "ties": _ties,
    "huge": _huge,
    "equal": _equal,
    "giant": _giant,
    "astride": _astride,
    "rare": _rare,
}


def _against(method: Sparse, z: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Tensor:
    """Values that do the most damage: what the first query of a key head would read points one way, all else the other.

    How many it reads is asked of the method itself; which, follows from logits, but for what a sketch cannot tell.
    """
    first = Problem.of(q[:, :: z.siblings, :1], k, torch.ones(1, z.g, z.s, 1, dtype=torch.float64), scale=1.0)
    read = Sparse(drop=method.drop, bits=method.bits).compute(first).trace.read  # (1, g, 1)
    logits = (k @ q[:, :: z.siblings, 0, :, None]).squeeze(-1)  # (1, g, s)
    ranks = logits.argsort(-1, descending=True).argsort(-1)
    way = torch.nn.functional.normalize(_gaussian(g, 1, z.g, 1, z.e), dim=-1)
    return torch.where((ranks < read).unsqueeze(-1), way, -way)
