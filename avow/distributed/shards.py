"""What a process knows of the whole sequence before it works on its own shard of it.

Processes that agreed on what is asked (`agreement`) tell each other how long their longest queries, keys and values
are: all that a bound must know of what lies elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from avow.attend import Attended
from avow.core import Computed, Method, Norms, Problem
from avow.core.certify import certify
from avow.distributed.consensus import Context, agree, digest
from avow.distributed.exchange import gathered
from avow.errors import ShapeError
from avow.numerics.heads import scaled_values

# Of each key head: the longest query, key and value, and the largest entry of a value.
LONGEST = 4


@dataclass(frozen=True)
class Shards:
    """One process's shard, the lengths of all, and the longest vectors of each (ranks, b, g, 4)."""

    problem: Problem
    norms: Norms
    rank: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    longest: Float64[Tensor, "ranks b g 4"]
    generator: torch.Generator | None
    group: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @property
    def total(self) -> int:
        """How many keys there are in all shards."""
        return sum(self.keys)

    @property
    def before(self) -> int:
        """How many keys lie in shards before this one."""
        return sum(self.keys[: self.rank])

    @functools.cached_property
    def agreed(self) -> Norms:
        """The longest query, key and value of all shards, for each key head."""
        q, k, v = self.longest[..., :3].amax(0).unsqueeze(-1).unbind(-2)  # (b, g, 1) each
        return Norms(q, k, v, self.norms.slack)

    @functools.cached_property
    def whole(self) -> Problem:
        """What a promise is asked of: this process's rows, the keys of all, and norms that hold for what rows see.

        Keys and values are only counted there, so they take no memory.
        """
        p, most = self.problem, self.agreed
        k, v = (x.new_zeros(()).expand(*x.shape[:2], self.total, x.shape[-1]) for x in (p.k, p.v))
        values = most.v
        if p.causal and p.k.shape[-2]:
            seen = self.norms.v.clone()
            if self.rank:
                # What the first row sees before this shard, every row sees.
                seen[..., 0] = torch.maximum(seen[..., 0], self.longest[: self.rank, ..., 2].amax(0))
            values = torch.cat([seen, most.v], -1)  # the last entry lies after every row
        norms = Norms(self.norms.q, most.k, values, self.norms.slack)
        return dataclasses.replace(p, k=k, v=v).with_norms(norms)

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """This shard's values, and the power of two that every process divided them by, if any was needed."""
        largest = self.longest[..., 3].amax(0)[..., None, None].to(dtype)  # (b, g, 1, 1)
        _, size = scaled_values(dataclasses.replace(self.problem, v=largest).with_norms(self.agreed), dtype)
        values = self.problem.v.to(dtype)
        return (values, None) if size is None else (values / size, size)

    def attended(self, method: Method, out: Tensor, trace: Any, confidence: float) -> Attended:
        """The answer with its certificate."""
        certificate = certify(method, self.whole, Computed(out, trace), confidence)
        return Attended(out, dataclasses.replace(certificate, cost=method.cost(self.problem.sizes)))


def shards_of(met: Context, generator: torch.Generator | None) -> Shards:
    """What processes that agreed know of each other once they told how long their longest vectors are."""
    norms = met.problem.norms
    longest = gathered(_longest(met.problem, norms), met.group)
    return Shards(met.problem, norms, met.here, met.rows, met.keys, longest, generator, met.group)


def paired(p: Problem) -> None:
    """Raise where causal rows are not those of the keys beside them."""
    queries, keys = p.q.shape[-2], p.k.shape[-2]
    if p.causal and queries != keys:
        rule = f"must equal k.shape[-2]={keys} where causal"
        raise ShapeError("q.shape[-2]", queries, rule, "give each process the queries of its own keys")


def alike(name: str, x: Tensor, group: dist.ProcessGroup) -> None:
    """Raise, in every process alike, where one of them holds other numbers than the rest."""
    agree({f"digest of {name}": digest(x)}, None, None, group)


def _longest(p: Problem, norms: Norms) -> Float64[Tensor, "b g 4"]:
    b, g = p.k.shape[:2]
    rows = [norms.q.unflatten(1, (g, -1)).flatten(2), norms.k, norms.v, p.v.detach().double().abs().flatten(2)]
    return torch.stack([x.amax(-1) if x.shape[-1] else x.new_zeros(b, g) for x in rows], -1)
