"""A cache whose tokens lie in shards, one a process: all attend to all of them, and get one answer and one certificate.

Every process is given every token, as every process that decodes computes it; the shortest shard keeps it. In which
shard a token is does not matter to the answer: a query sees them all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.certificates.relative import aimed_bound, proved_ratio
from avow.contract import Norms, Problem
from avow.declared import declared
from avow.distributed.agreement import agree, digest
from avow.distributed.scripts import over_processes
from avow.distributed.sparse import own_generator, sampling
from avow.distributed.sparse_script import Task, shard_script
from avow.distributed.traffic import Group, group_of
from avow.errors import AvowError, ParameterError, ShapeError, ToleranceUnreachable
from avow.maths.norms import check_range, row_norms
from avow.methods.sparse import Sparse
from avow.nn.key_value_cache import KeyValueCache
from avow.wishes import check_generator, checked_wish

# What caches must have in common.
_MADE = ("key_heads", "dim", "value_dim", "batch", "dtype", "bits", "window")


class ShardedCache:
    """The tokens of the `KeyValueCache` of every process of a group, each of which may hold some already.

    Processes append the same tokens and ask the same queries in the same order. Where one of them does not, all raise
    an error that names it when they next attend; nothing is sent before that. Answers carry no gradient.
    """

    @declared()
    def __init__(self, cache: KeyValueCache, group: Group = None) -> None:
        self.cache, self._group = cache, group_of(group)
        self._here = dist.get_rank(self._group)
        problem: AvowError | None = None
        if cache.window is not None:
            remedy = "leave window out; a window fits on one device"
            problem = ParameterError("cache: window", cache.window, "has no form over shards", remedy)
        elif cache.bits is None:
            remedy = "make the cache with bits=4"
            problem = ParameterError("cache: bits", None, "must be from 1 to 8: a sketch says what to read", remedy)
        made = {f"cache: {name}": getattr(cache, name) for name in _MADE}
        self.lengths: tuple[int, ...] = tuple(agree(made, cache.length, problem, self._group, cache.device))
        """How many tokens each process holds, by rank."""

    @property
    def length(self) -> int:
        """How many tokens the next query sees."""
        return sum(self.lengths)

    def append(self, k: Float[Tensor, "b g l d"], v: Float[Tensor, "b g l e"]) -> None:
        """Remember tokens, the same in all processes: the shortest shards take them, in order of ranks.

        Where anything is wrong with them, no shard keeps any.
        """
        self.cache.measured(k, v)
        shares = dealt(self.lengths, k.shape[-2])
        start = sum(shares[: self._here])
        mine = slice(start, start + shares[self._here])
        self.cache.append(k[:, :, mine], v[:, :, mine])
        self.lengths = tuple(length + share for length, share in zip(self.lengths, shares, strict=True))

    @torch.no_grad()
    def attend(
        self,
        q: Float[Tensor, "b h 1 d"],
        tol: float | None = None,
        confidence: float | None = None,
        scale: float | None = None,
        generator: torch.Generator | None = None,
        rtol: float | None = None,
    ) -> Attended:
        """The answers of all heads to the query of the last token, and the certificate of the error they made.

        The bound never exceeds `tol`, nor the bound relative to the answer `rtol`; without either, the answer is exact.
        `confidence < 1` accepts bounds that hold with that probability for each row, over the draws of all processes.
        """
        from avow.distributed import attend  # which is above: it knows all methods

        problem = self._agreed(q, tol, confidence, scale, generator, rtol)
        limit, ratio = math.inf if tol is None else tol, 1 / math.sqrt(self.length)
        for _ in range(0 if tol is None and rtol is None else 1 if rtol is None else 2):
            aim = limit if rtol is None else min(limit, aimed_bound(ratio, rtol))
            try:
                attended = self._sparse(problem, aim, confidence, generator)
            except ToleranceUnreachable:
                # All processes raise it alike. With `rtol` the aim was a guess: exact attention may still prove it.
                if rtol is None:
                    raise
                break
            if rtol is None or attended.certificate.keeps(tol, rtol):
                return attended
            ratio = proved_ratio(attended.certificate)
        return attend(
            *(q, problem.k, problem.v),
            group=self._group,
            tol=tol,
            rtol=rtol,
            method="exact",
            scale=scale,
            enable_gqa=True,
        )

    def _sparse(
        self, problem: Problem, tol: float, confidence: float | None, generator: torch.Generator | None
    ) -> Attended:
        """The answer from a part of the tokens of all shards."""
        q, method = problem.q, sampling(Sparse(bits=self.cache.bits or 4), confidence)
        task = Task(tol, method, self.length, max(self.lengths), len(self.lengths))
        draws = own_generator(method, self._here, q.device, generator)
        # Under autocast products would be narrower than the bounds allow for.
        with torch.autocast(q.device.type, enabled=False):
            (attended, _), _ = over_processes(
                shard_script(problem, task, self.cache.holding.sketch, draws), self._group
            )
        return attended

    def _agreed(
        self,
        q: Tensor,
        tol: float | None,
        confidence: float | None,
        scale: float | None,
        generator: torch.Generator | None,
        rtol: float | None,
    ) -> Problem:
        """What is asked of this shard, with norms of its tokens, where all processes ask the same and can answer."""
        found: Problem | None = None
        problem: AvowError | None = None
        most, factor = [0.0, 0.0, 0.0], 1.0
        try:
            checked_wish(tol, confidence, rtol=rtol)
            check_generator(generator)
            found = self._problem(q, scale)
            assert found.norms is not None
            most, factor = list(found.norms.most), found.scale
        except AvowError as raised:
            problem = raised
        asked = {"call": "ShardedCache.attend", "tol": tol, "rtol": rtol, "confidence": confidence, "scale": scale}
        same = {**asked, "lengths of shards": self.lengths, **_facts(q)}
        known = agree(same, most, problem, self._group, self.cache.device)
        query, key, value = (max(column) for column in zip(*known, strict=True))
        check_range(query, key, value, factor)
        assert found is not None
        return found

    def _problem(self, q: Tensor, scale: float | None) -> Problem:
        held = self.cache.holding
        if self.cache.length != self.lengths[self._here]:
            rule = f"must be the {self.lengths[self._here]} tokens that it was given"
            raise ShapeError("cache.length", self.cache.length, rule, "append to the sharded cache alone")
        if not self.length:
            raise ShapeError("cache.length", 0, "must be at least 1", "append keys and values first")
        found = Problem.of(q, held.keys, held.values, scale=scale, enable_gqa=True)
        if q.ndim != 4 or q.shape[-2] != 1:
            rule = "must be (batch, heads, 1, dim): a query sees every token"
            raise ShapeError("q.shape", tuple(q.shape), rule, "attend after each token")
        keys = held.longest.unsqueeze(-1).expand(held.lengths.shape)
        return dataclasses.replace(found, norms=Norms(row_norms(q, "q"), keys, held.lengths, held.slack))


def dealt(lengths: Sequence[int], count: int) -> list[int]:
    """How many of so many tokens each shard takes, so that the longest ends up as short as can be.

    >>> dealt([5, 2, 2], 2), dealt([5, 2, 2], 9)
    ([0, 1, 1], [1, 4, 4])
    """
    order = sorted(range(len(lengths)), key=lambda rank: lengths[rank])
    shares = [0] * len(lengths)
    for taking in range(len(order), 0, -1):
        some = order[:taking]
        level, more = divmod(sum(lengths[rank] for rank in some) + count, taking)
        if level >= lengths[some[-1]]:
            for place, rank in enumerate(some):
                shares[rank] = level + (place < more) - lengths[rank]
            break
    return shares


def _facts(q: Tensor) -> dict[str, object]:
    if not isinstance(q, Tensor):
        return {"q": type(q).__name__}
    return {"type of q": q.dtype, "shape of q": tuple(q.shape), "digest of q": digest(q)}
