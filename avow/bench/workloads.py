"""Heads to compare methods on: seeded ones whose behaviour is known, or a user's own from a file.

Lengths below are in the frame where a logit is a plain product, so that a kind behaves alike at every `dim`: queries
and keys are multiplied by dim^¼ at the end, which the usual scale 1/√dim undoes. What a row attends to is always at
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
from avow.errors import FileError, ParameterError, value_text
from avow.parameters import check_key_heads

# Products of length² = 64 leave every other key of a random code at least ~10 nats behind.
_LOUD = 8.0
_QUIET = 0.2
_PER_GROUP = 16
_CLUSTERS = 8
_CENTRE = 2.5
_SPREAD = 0.01


Shape = tuple[int, int, int]


class Kind(NamedTuple):
    """A kind of head in a line, and how to draw its queries and keys: from (heads, length, dim) of the keys, how many
    query heads share a key head, and a generator.
    """

    summary: str
    draw: Callable[[Shape, int, torch.Generator], tuple[Tensor, Tensor]]


def _copying(shape: Shape, siblings: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = _directions(shape, generator) * _LOUD
    return _rows(keys, _earlier(shape, siblings, generator)), keys


def _averaging(shape: Shape, siblings: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    heads, length, dim = shape
    groups = -(-length // _PER_GROUP)
    codes = _directions((heads, groups, dim), generator) * _LOUD
    keys = _rows(codes, torch.randint(groups, (heads, length), generator=generator))
    return _rows(keys, _earlier(shape, siblings, generator)), keys


def _diffuse(shape: Shape, siblings: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    queries = _directions(_of_queries(shape, siblings), generator) * _QUIET
    return queries, _directions(shape, generator) * _QUIET


def _clustered(shape: Shape, siblings: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    heads, length, dim = shape
    centres = _directions((heads, _CLUSTERS, dim), generator) * _CENTRE
    # Clusters in turn: queries and keys then have the same mean, as landmarks chosen among keys need.
    near = _rows(centres, (torch.arange(length) % _CLUSTERS).expand(heads, length))
    noise = _directions(_of_queries(shape, siblings), generator) * _SPREAD
    return near.repeat_interleave(siblings, 0) + noise, near + _directions(shape, generator) * _SPREAD


KINDS: dict[str, Kind] = {
    "copying": Kind("each row copies one key's value: its logit is far above all others", _copying),
    "averaging": Kind("each row averages a group of about 16 keys evenly and ignores the rest", _averaging),
    "diffuse": Kind("small norms: every row averages nearly all keys nearly evenly", _diffuse),
    "clustered": Kind("keys in 8 tight clusters, each query near one of them", _clustered),
}


def _directions(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def _of_queries(shape: Shape, siblings: int) -> Shape:
    heads, length, dim = shape
    return heads * siblings, length, dim


def _earlier(shape: Shape, siblings: int, generator: torch.Generator) -> Tensor:
    """For every row of every query head, a uniformly drawn position at or before it."""
    heads, length, _ = _of_queries(shape, siblings)
    return (torch.rand(heads, length, generator=generator) * torch.arange(1, length + 1)).long()


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows that an index names, of each head of `x` for as many heads of the index."""
    x = x.repeat_interleave(index.shape[0] // x.shape[0], 0)
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
        """The same heads as they were when the sequence had only `length` keys."""
        if length >= self.k.shape[-2]:
            return self
        k, v = self.k[..., :length, :], self.v[..., :length, :]
        if self.positions is None:
            return dataclasses.replace(self, q=self.q[..., :length, :], k=k, v=v)
        there = self.positions < length
        return dataclasses.replace(self, q=self.q[..., there, :], k=k, v=v, positions=self.positions[there])

    def last(self, queries: int) -> Workload:
        """The same keys with only the last `queries` queries: one of them is a step of decoding."""
        held, keys = self.q.shape[-2], self.k.shape[-2]
        if not 1 <= queries <= held:
            raise ParameterError("queries", queries, f"must be from 1 to the {held} there are", "try queries=1")
        places = torch.arange(held, device=self.q.device) if self.positions is None else self.positions
        last, q = places[-queries:], self.q[..., -queries:, :]
        # Rows that see every key need no mask.
        if not self.causal or int(last.min()) >= keys - 1:
            return dataclasses.replace(self, q=q, causal=False, positions=None)
        return dataclasses.replace(self, q=q, positions=last if queries < held else self.positions)

    def some(self, queries: int) -> Workload:
        """The same keys with `queries` of the queries, evenly spaced."""
        held = self.q.shape[-2]
        if queries >= held:
            return self
        places = torch.arange(queries, device=self.q.device) * held // queries
        positions = places if self.positions is None else self.positions[places]
        return dataclasses.replace(self, q=self.q[..., places, :], positions=positions)

    def head(self, number: int) -> Workload:
        """One query head and the keys it sees, counted over the batch; copies, that do not keep all heads in memory."""
        batch, heads = self.q.shape[:2]
        b, h = number // heads % batch, number % heads
        group = h // (heads // self.k.shape[1])
        q, k, v = (x[b : b + 1, i : i + 1].clone() for x, i in ((self.q, h), (self.k, group), (self.v, group)))
        return dataclasses.replace(self, q=q, k=k, v=v)

    def to(self, device: str, dtype: torch.dtype | None = None) -> Workload:
        """The same heads on a device, and in another type if one is given."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved |= {name: moved[name].to(dtype) for name in "qkv" if dtype is not None}
        return dataclasses.replace(self, **moved)


def workload(
    kind: str,
    heads: int = 4,
    length: int = 2048,
    dim: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    key_heads: int | None = None,
    batch: int = 1,
) -> Workload:
    """Heads of a known kind, the same for the same seed; `heads` query heads share `key_heads`, by default as many.

    >>> workload("copying", heads=2, length=32, dim=16).q.shape
    torch.Size([1, 2, 32, 16])
    """
    if kind not in KINDS:
        raise ParameterError("kind", value_text(kind), "is not a kind of workload", f"known kinds: {', '.join(KINDS)}")
    key_heads = heads if key_heads is None else key_heads
    counts = {"heads": heads, "length": length, "dim": dim, "key_heads": key_heads, "batch": batch}
    for name, value in counts.items():
        if value < 1:
            raise ParameterError(name, value, "must be at least 1", f"try {name}=64")
    check_key_heads(heads, key_heads)
    summary, draw = KINDS[kind]
    shape, generator = (batch * key_heads, length, dim), torch.Generator().manual_seed(seed)
    q, k = (x * dim**0.25 for x in draw(shape, heads // key_heads, generator))
    q, k, v = (x.to(dtype).unflatten(0, (batch, -1)) for x in (q, k, torch.randn(*shape, generator=generator)))
    return Workload(kind, summary, q, k, v, causal)


def read(path: str | Path, causal: bool = False, option: str = "input") -> Workload:
    """The q, k and v of a safetensors file: (heads, length, dim), with or without a batch axis.

    A tensor `q_positions` says where in the sequence each query stands; a causal row then sees the keys up to there.
    Errors name `option`, by which the caller got the path.
    """
    tensors, _ = file_io.load_tensors(Path(path), option)
    return from_tensors(tensors, path, causal, option)


def from_tensors(
    tensors: Mapping[str, Tensor], path: str | Path, causal: bool = False, option: str = "input"
) -> Workload:
    """What `read` returns, for tensors that are already loaded from `path`."""
    names = ("q", "k", "v")
    if missing := [name for name in names if name not in tensors]:
        rule = f"lacks {' and '.join(missing)} (it holds {', '.join(sorted(tensors))[:80] or 'nothing'})"
        raise FileError(option, path, rule, "save tensors named q, k and v")
    for name in names:
        if not 2 <= tensors[name].ndim <= 4:
            rule = f"holds {name} of shape {tuple(tensors[name].shape)}, not (heads, length, dim)"
            raise FileError(option, path, rule, "save (heads, length, dim) or (batch, heads, length, dim)")
    q, k, v = (tensors[name][(None,) * (4 - tensors[name].ndim)] for name in names)
    positions, queries, keys = tensors.get("q_positions"), q.shape[-2], k.shape[-2]
    if positions is not None:
        whole = not positions.dtype.is_floating_point and not positions.dtype.is_complex
        fits = whole and positions.shape == (queries,)
        if not fits or (queries and not 0 <= int(positions.min()) <= int(positions.max()) < keys):
            rule = f"holds q_positions that are not {queries} whole numbers from 0 to {keys - 1}"
            raise FileError(option, path, rule, "save the place of each query among the keys, or leave q_positions out")
        # Rows at 0, 1, 2, … are what `causal` means by itself, and most methods are faster without a mask.
        positions = None if torch.equal(positions.cpu(), torch.arange(queries)) else positions.long()
    load = Workload(Path(path).stem, f"heads read from {Path(path).name}", q, k, v, causal, positions)
    _ = load.problem  # shapes and types that do not fit are named before anything runs
    return load
