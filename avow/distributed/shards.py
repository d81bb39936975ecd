"""What a process knows of the whole sequence before it works on its own shard of it.

Processes first agree on what is asked, or raise one error that names the rank (`agreement`). Then they tell each other
how long their longest queries, keys and values are: all that a bound must know of what lies elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from avow.attend import Attended
from avow.certificates import certify, measure_norms
from avow.contract import Computed, Method, Norms, Problem
from avow.distributed.agreement import agree
from avow.distributed.exchange import gathered, gathered_numbers
from avow.distributed.traffic import PAGE, Group, group_of
from avow.errors import AvowError, ShapeError
from avow.maths.heads import scaled_values
from avow.maths.norms import check_range

# Of each key head: the longest query, key and value, and the largest entry of a value.
_LONGEST = 4


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
    def whole(self) -> tuple[Problem, Norms]:
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
        return dataclasses.replace(p, k=k, v=v), Norms(self.norms.q, most.k, values, self.norms.slack)

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """This shard's values, and the power of two that every process divided them by, if any was needed."""
        largest = self.longest[..., 3].amax(0)[..., None, None].to(dtype)  # (b, g, 1, 1)
        _, size = scaled_values(dataclasses.replace(self.problem, v=largest, norms=self.agreed), dtype)
        values = self.problem.v.to(dtype)
        return (values, None) if size is None else (values / size, size)

    def attended(self, method: Method, out: Tensor, trace: Any, confidence: float) -> Attended:
        """The answer with its certificate, in the shape of the queries as they were given."""
        p, norms = self.whole
        certificate = certify(method, p, norms, Computed(out, trace), confidence)
        certificate = dataclasses.replace(certificate, cost=method.cost(self.problem.sizes))
        return Attended(out.reshape(*p.leading, *out.shape[-2:]), certificate)


def meet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Method,
    group: Group,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    confidence: float,
    generator: torch.Generator | None,
) -> Shards:
    """The shards of all processes; raises, in every process alike, where they disagree or one of them cannot go on."""
    processes = group_of(group)
    # Every process draws, so that their generators stay alike; the first one's seed counts.
    seed = int(torch.randint(2**62, ())) if generator is None and method.random else 0
    same = {"method": method.name, **method.parameters, "causal": causal, "scale": scale, "enable_gqa": enable_gqa}
    same |= {"confidence": confidence, **_facts(q, k, v, generator)}
    problem: AvowError | None = None
    lengths = [0, 0]
    try:
        p = _problem(q, k, v, causal, scale, enable_gqa)
        norms = measure_norms(p)
        lengths = [p.q.shape[-2], p.k.shape[-2]]
    except AvowError as found:
        problem = found
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    queries, keys, seeds = zip(*agree(same, [*lengths, seed], problem, processes, device), strict=True)
    longest = gathered(_longest(p, norms), processes)
    if generator is None and method.random:
        generator = torch.Generator().manual_seed(seeds[0])
    here = dist.get_rank(processes)
    shards = Shards(dataclasses.replace(p, norms=norms), norms, here, queries, keys, longest, generator, processes)
    check_range(*shards.agreed.most, p.scale)
    method.check(shards.whole[0].sizes)
    return shards


def meeting_bytes(heads: int, ranks: int) -> int:
    """What a process sends until all know of each other, with so many key heads in the batch."""
    return gathered_numbers(PAGE + 8 * _LONGEST * heads, ranks)


def alike(name: str, x: Tensor, group: dist.ProcessGroup) -> None:
    """Raise, in every process alike, where one of them holds other numbers than the rest."""
    digest = hashlib.sha256(x.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    agree({f"digest of {name}": digest}, None, None, group, x.device)


def _problem(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, enable_gqa: bool) -> Problem:
    p = Problem.of(q, k, v, causal=causal, scale=scale, enable_gqa=enable_gqa)
    if causal and q.shape[-2] != k.shape[-2]:
        rule = f"must equal k.shape[-2]={k.shape[-2]} where causal"
        raise ShapeError("q.shape[-2]", q.shape[-2], rule, "give each process the queries of its own keys")
    return p


def _facts(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator | None) -> dict[str, object]:
    tensors = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if isinstance(x, Tensor)}
    facts: dict[str, object] = {f"type of {name}": x.dtype for name, x in tensors.items()}
    for name, x in tensors.items():
        facts[f"shape of {name} without its length"] = (*x.shape[:-2], *x.shape[-1:])
        # Processes answer each other's gradients: either all of them or none.
        facts[f"gradient of {name}"] = torch.is_grad_enabled() and x.requires_grad
    if generator is not None:
        facts["digest of generator"] = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
    return facts


def _longest(p: Problem, norms: Norms) -> Float64[Tensor, "b g 4"]:
    b, g = p.k.shape[:2]
    rows = [norms.q.unflatten(1, (g, -1)).flatten(2), norms.k, norms.v, p.v.detach().double().abs().flatten(2)]
    return torch.stack([x.amax(-1) if x.shape[-1] else x.new_zeros(b, g) for x in rows], -1)
