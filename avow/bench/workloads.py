"""Heads to compare methods on: seeded ones whose behaviour is known, or a user's own from a file.

Lengths below are in the frame where a logit is a plain product, so that a kind behaves alike at every `dim`: queries
and keys are multiplied by dim^¼ at the end, which the usual scale 1/√dim undoes. What a row looks for always stands at
or before it, so every kind means the same under a causal mask, and a prefix of a workload is one too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow import file_io
from avow.core import Problem, Sizes
from avow.errors import FileError, ParameterError

# Products of length² = 64 leave every other key of a random code at least ~10 nats behind.
_LOUD = 8.0
_QUIET = 0.2
_PER_GROUP = 16
_CLUSTERS = 8
_CENTRE = 2.5
_SPREAD = 0.01


class Drawn(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


class Kind(NamedTuple):
    """A kind of head in a line, and how to draw it from (heads, length, dim) and a generator."""

    summary: str
    draw: Callable[[tuple[int, int, int], torch.Generator], Drawn]


def _copying(shape: tuple[int, int, int], generator: torch.Generator) -> Drawn:
    keys = _directions(shape, generator) * _LOUD
    return Drawn(_rows(keys, _earlier(shape, generator)), keys, _gaussian(shape, generator))


def _averaging(shape: tuple[int, int, int], generator: torch.Generator) -> Drawn:
    heads, length, dim = shape
    groups = -(-length // _PER_GROUP)
    codes = _directions((heads, groups, dim), generator) * _LOUD
    group = torch.randint(groups, (heads, length), generator=generator)
    keys = _rows(codes, group)
    return Drawn(_rows(keys, _earlier(shape, generator)), keys, _gaussian(shape, generator))


def _diffuse(shape: tuple[int, int, int], generator: torch.Generator) -> Drawn:
    q, k = (_directions(shape, generator) * _QUIET for _ in range(2))
    return Drawn(q, k, _gaussian(shape, generator))


def _clustered(shape: tuple[int, int, int], generator: torch.Generator) -> Drawn:
    heads, length, dim = shape
    centres = _directions((heads, _CLUSTERS, dim), generator) * _CENTRE
    # Clusters in turn: queries and keys then have the same mean, as landmarks chosen among keys need.
    cluster = (torch.arange(length) % _CLUSTERS).expand(heads, length)
    q, k = (_rows(centres, cluster) + _directions(shape, generator) * _SPREAD for _ in range(2))
    return Drawn(q, k, _gaussian(shape, generator))


KINDS: dict[str, Kind] = {
    "copying": Kind("each row copies one key's value: its logit stands far above all others", _copying),
    "averaging": Kind("each row averages a group of about 16 keys evenly and ignores the rest", _averaging),
    "diffuse": Kind("small norms: every row averages nearly all keys nearly evenly", _diffuse),
    "clustered": Kind("keys in 8 tight clusters, each query near one of them", _clustered),
}


def _gaussian(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _directions(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(_gaussian(shape, generator), dim=-1)


def _earlier(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """For every row of every head, a uniformly drawn position at or before it."""
    heads, length, _ = shape
    return (torch.rand(heads, length, generator=generator) * torch.arange(1, length + 1)).long()


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


@dataclass(frozen=True)
class Workload:
    """Tensors to attend with, the name of what they are, and what each row may see."""

    kind: str
    summary: str
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    positions: Tensor | None = None

    @property
    def call(self) -> dict[str, Any]:
        """What `attend`, `plan` and `audit` take beside the tensors."""
        mask, causal = None, self.causal
        if causal and self.positions is not None:
            mask = torch.arange(self.k.shape[-2], device=self.k.device) <= self.positions[:, None]  # (n, s)
            causal = False
        return {"mask": mask, "causal": causal, "enable_gqa": self.q.shape[1] != self.k.shape[1]}

    @property
    def problem(self) -> Problem:
        return Problem.of(self.q, self.k, self.v, **self.call)

    @property
    def sizes(self) -> Sizes:
        return self.problem.sizes

    def first(self, length: int) -> Workload:
        """The same heads as they were when the sequence had only so many keys."""
        if length >= self.k.shape[-2]:
            return self
        k, v = self.k[..., :length, :], self.v[..., :length, :]
        if self.positions is None:
            return dataclasses.replace(self, q=self.q[..., :length, :], k=k, v=v)
        there = self.positions < length
        return dataclasses.replace(self, q=self.q[..., there, :], k=k, v=v, positions=self.positions[there])

    def last(self, queries: int) -> Workload:
        """The same keys with the last so many queries only: one of them is a step of decoding."""
        held, keys = self.q.shape[-2], self.k.shape[-2]
        if not 1 <= queries <= held:
            raise ParameterError("queries", queries, f"must be from 1 to the {held} there are", "try queries=1")
        places = torch.arange(held, device=self.q.device) if self.positions is None else self.positions
        kept, q = places[-queries:], self.q[..., -queries:, :]
        # Rows that see every key need no mask.
        if not self.causal or int(kept.min()) >= keys - 1:
            return dataclasses.replace(self, q=q, causal=False, positions=None)
        return dataclasses.replace(self, q=q, positions=kept if queries < held else self.positions)

    def some(self, queries: int) -> Workload:
        """The same keys with so many of the queries, evenly taken."""
        held = self.q.shape[-2]
        if queries >= held:
            return self
        places = torch.arange(queries, device=self.q.device) * held // queries
        positions = places if self.positions is None else self.positions[places]
        return dataclasses.replace(self, q=self.q[..., places, :], positions=positions)

    def head(self, number: int) -> Workload:
        """One query head and the keys it sees, counted over the batch; one beyond the last is counted on.

        Tensors are copies, so that whoever remembers one head does not hold them all.
        """
        batch, heads = self.q.shape[:2]
        b, h = number // heads % batch, number % heads
        group = h // (heads // self.k.shape[1])
        q, k, v = (x[b : b + 1, i : i + 1].clone() for x, i in ((self.q, h), (self.k, group), (self.v, group)))
        return dataclasses.replace(self, q=q, k=k, v=v)

    def to(self, device: str) -> Workload:
        positions = None if self.positions is None else self.positions.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("q", "k", "v")}
        return dataclasses.replace(self, positions=positions, **moved)


def workload(
    kind: str,
    heads: int = 4,
    length: int = 2048,
    dim: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
) -> Workload:
    """Heads of a known kind, the same for the same seed.

    >>> workload("copying", heads=2, length=32, dim=16).q.shape
    torch.Size([1, 2, 32, 16])
    """
    if kind not in KINDS:
        raise ParameterError("kind", repr(kind), "is not a kind of workload", f"known kinds: {', '.join(KINDS)}")
    for name, value in (("heads", heads), ("length", length), ("dim", dim)):
        if value < 1:
            raise ParameterError(name, value, "must be at least 1", f"try {name}=64")
    summary, draw = KINDS[kind]
    drawn = draw((heads, length, dim), torch.Generator().manual_seed(seed))
    q, k = (x * dim**0.25 for x in (drawn.q, drawn.k))
    q, k, v = (x.to(dtype).unsqueeze(0) for x in (q, k, drawn.v))
    return Workload(kind, summary, q, k, v, causal)


def read(path: str | Path, causal: bool = False, option: str = "input") -> Workload:
    """The q, k and v of a safetensors file: (heads, length, dim), with or without a batch axis.

    A tensor `q_positions` says where in the sequence each query stands; a causal row then sees the keys up to there.
    What is wrong with the file is told of `option`, where the caller had it from.
    """
    tensors, _ = file_io.load_tensors(Path(path), option)
    return from_tensors(tensors, path, causal, option)


def from_tensors(
    tensors: Mapping[str, Tensor], path: str | Path, causal: bool = False, option: str = "input"
) -> Workload:
    """What `read` gives, of tensors that were read from there already."""
    missing = [name for name in ("q", "k", "v") if name not in tensors]
    if missing:
        held = ", ".join(sorted(tensors))[:80] or "nothing"
        raise FileError(
            option, path, f"lacks {' and '.join(missing)} (it holds {held})", "save tensors named q, k and v"
        )
    q, k, v = (_four(option, path, name, tensors[name]) for name in ("q", "k", "v"))
    positions = _positions(option, path, tensors.get("q_positions"), q.shape[-2], k.shape[-2])
    made = Workload(Path(path).stem, f"heads read from {Path(path).name}", q, k, v, causal, positions)
    _ = made.problem  # shapes and types that do not fit are named before anything runs
    return made


def _four(option: str, path: str | Path, name: str, x: Tensor) -> Tensor:
    if not 2 <= x.ndim <= 4:
        rule = f"holds {name} of shape {tuple(x.shape)}, not (heads, length, dim)"
        raise FileError(option, path, rule, "save (heads, length, dim) or (batch, heads, length, dim)")
    return x[(None,) * (4 - x.ndim)]


def _positions(option: str, path: str | Path, positions: Tensor | None, queries: int, keys: int) -> Tensor | None:
    if positions is None:
        return None
    whole = not positions.dtype.is_floating_point and not positions.dtype.is_complex
    if (
        positions.shape != (queries,)
        or not whole
        or (queries and not 0 <= int(positions.min()) <= int(positions.max()) < keys)
    ):
        rule = f"holds q_positions that are not {queries} whole numbers from 0 to {keys - 1}"
        raise FileError(option, path, rule, "save the place of each query among the keys, or leave q_positions out")
    # Rows at 0, 1, 2, … are what `causal` means by itself, and most methods are faster without a mask.
    return None if torch.equal(positions.cpu(), torch.arange(queries)) else positions.long()
