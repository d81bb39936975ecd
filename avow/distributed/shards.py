"""What a process knows of the whole sequence before it works on its own shard of it.

Processes first agree on what is asked, in 64 bytes each; only where they do not, or one of them cannot go on, do they
tell each other everything, so that all can raise one error that names the rank. Then they tell each other how long
their longest queries, keys and values are: all that a bound must know of rows that lie elsewhere.
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
from avow.distributed.exchange import gathered, gathered_numbers
from avow.errors import AvowError, InputError, ParameterError, ShapeError
from avow.maths.heads import scaled_values
from avow.maths.norms import check_range

# Of the first message: how many queries and keys, a seed, whether all is well, and the digest of what is asked.
_FIRST = 8
# Of the second, for each key head: the longest query, key and value, and the largest entry of a value.
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
    group: dist.ProcessGroup | None

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
    group: dist.ProcessGroup | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    confidence: float,
    generator: torch.Generator | None,
) -> Shards:
    """The shards of all processes; raises, in every process alike, where they disagree or one of them cannot go on."""
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group first, or use avow.attend"
        raise ParameterError("group", group, "needs processes that know each other", remedy)
    # Every process draws, so that their generators stay alike; the first one's seed counts.
    seed = int(torch.randint(2**62, ())) if generator is None and method.random else 0
    options = {"causal": causal, "scale": scale, "enable_gqa": enable_gqa, "confidence": confidence}
    facts: dict[str, object] = {}
    trouble: AvowError | None = None
    try:
        p = _problem(q, k, v, causal, scale, enable_gqa)
        norms = measure_norms(p)
        facts = {"method": method.name, **method.parameters, **options, **_facts(q, k, v, generator)}
    except AvowError as problem:
        trouble = problem
    digest = [
        int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[i : i + 8], "big", signed=True)
        for i in range(0, 32, 8)
    ]
    lengths = (0, 0) if trouble is not None else (p.q.shape[-2], p.k.shape[-2])
    said = gathered(torch.tensor([*lengths, seed, trouble is not None, *digest], device=q.device), group).tolist()
    if any(words[3] or words[4:] != said[0][4:] for words in said):
        raise _dispute(facts, trouble, group)
    longest = gathered(_longest(p, norms), group)
    if generator is None and method.random:
        generator = torch.Generator().manual_seed(said[0][2])
    queries, keys = (tuple(words[i] for words in said) for i in range(2))
    rank = dist.get_rank(group)
    shards = Shards(dataclasses.replace(p, norms=norms), norms, rank, queries, keys, longest, generator, group)
    check_range(*shards.agreed.most, p.scale)
    method.check(shards.whole[0].sizes)
    return shards


def meeting_bytes(heads: int, ranks: int) -> int:
    """What a process sends until all know of each other, with so many key heads in the batch."""
    return 8 * gathered_numbers(_FIRST + _LONGEST * heads, ranks)


def alike(name: str, x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise, in every process alike, where one of them holds other numbers than the first."""
    digest = hashlib.sha256(x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).digest()
    first, *others = gathered(torch.tensor(list(digest), dtype=torch.uint8, device=x.device), group).tolist()
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            rule = f"must be as at rank 0, {bytes(first).hex()[:16]}"
            raise InputError(f"{name} at rank {rank}", bytes(theirs).hex()[:16], rule, "give all processes the same")


ALIKE_BYTES = 32
"""What a process tells every other in `alike`."""


def _problem(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, enable_gqa: bool) -> Problem:
    p = Problem.of(q, k, v, causal=causal, scale=scale, enable_gqa=enable_gqa)
    if causal and q.shape[-2] != k.shape[-2]:
        rule = f"must equal k.shape[-2]={k.shape[-2]} where causal"
        raise ShapeError("q.shape[-2]", q.shape[-2], rule, "give each process the queries of its own keys")
    return p


def _facts(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator | None) -> dict[str, object]:
    state = None if generator is None else hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
    return {
        "type of q": str(q.dtype),
        "shape of q without its length": (*q.shape[:-2], *q.shape[-1:]),
        "shape of k without its length": (*k.shape[:-2], *k.shape[-1:]),
        "shape of v without its length": (*v.shape[:-2], *v.shape[-1:]),
        # Processes answer each other's gradients: either all of them or none.
        "gradients of q, k, v": tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)),
        "digest of generator": state,
    }


def _dispute(facts: dict[str, object], trouble: AvowError | None, group: dist.ProcessGroup | None) -> InputError:
    """The first error of any process, or the first thing they disagree on."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (facts, trouble), group=group)
    for rank, (_, problem) in enumerate(said):
        if problem is not None:
            return InputError(f"rank {rank}: {problem.name}", problem.value, problem.rule, problem.remedy)
    first = said[0][0]
    for rank, (theirs, _) in enumerate(said):
        for name in dict.fromkeys([*first, *theirs]):
            if repr(theirs.get(name)) != repr(first.get(name)):
                rule = f"must be as at rank 0, {first.get(name)}"
                return InputError(f"{name} at rank {rank}", theirs.get(name), rule, "give all processes the same")
    raise AssertionError("digests differ only where facts do")


def _longest(p: Problem, norms: Norms) -> Float64[Tensor, "b g 4"]:
    b, g = p.k.shape[:2]
    rows = [norms.q.unflatten(1, (g, -1)).flatten(2), norms.k, norms.v, p.v.detach().double().abs().flatten(2)]
    return torch.stack([x.amax(-1) if x.shape[-1] else x.new_zeros(b, g) for x in rows], -1)
