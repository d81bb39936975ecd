"""A cache whose tokens lie in shards, one a process: all attend to all of them, and get one answer and one certificate.

Every process is given every token, as every process that decodes computes it; the shortest shard keeps it. In which
shard a token is does not matter to the answer: a query sees them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.core import Norms, Problem
from avow.core.requirement import check_generator, checked_requirement
from avow.decode.key_value_cache import KeyValueCache
from avow.distributed.consensus import (
    Context,
    agree,
    attempt,
    check_consistent,
    check_dense,
    digest,
    outside_autocast,
)
from avow.distributed.exact import attend_keys
from avow.distributed.point_to_point import Group, group_of
from avow.distributed.sparse import attend_within
from avow.errors import DtypeError, ParameterError, ShapeError, ToleranceUnreachable
from avow.methods.exact import Exact
from avow.methods.sparse import Sparse
from avow.numerics.norms import check_range, row_norms

# What caches must have in common.
_SETTINGS = ("key_heads", "dim", "value_dim", "batch", "dtype", "bits", "window")


class ShardedCache:
    """The tokens of the `KeyValueCache` of every process of a group, each of which may hold some already.

    Processes append the same tokens, the same number at a time, and ask the same queries, all in the same order. If one
    of them does not, all raise an error that names it when they next attend; nothing is sent before that. Answers carry
    no gradient.

    Args:
        cache: this process's part, alike in all processes but for its tokens.
        group: the processes; None is all of them.

    Raises:
        InputError: the caches of the processes differ.

    >>> import torch, torch.distributed as dist
    >>> import avow.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cache = avow.distributed.ShardedCache(avow.nn.KeyValueCache(key_heads=2, dim=16))
    >>> cache.append(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16))
    >>> cache.attend(torch.randn(1, 8, 1, 16), tol=1e-2).certificate.keeps(1e-2), cache.length
    (True, 100)
    >>> dist.destroy_process_group()
    """

    def __init__(self, cache: KeyValueCache, group: Group = None) -> None:
        self.cache, self._group = cache, group_of(group)
        self._rank = dist.get_rank(self._group)
        _, error = attempt(lambda: _check_cache(cache))
        settings = {f"cache: {name}": getattr(cache, name, "nothing") for name in _SETTINGS}
        self.lengths: tuple[int, ...] = tuple(agree(settings, 0 if error else cache.length, error, self._group))
        """How many tokens each process holds, by rank."""
        self._appends, self._appended = 0, hashlib.sha256()
        """How often tokens were appended, and what they were, call by call."""

    def __repr__(self) -> str:
        return f"ShardedCache(rank={self._rank}, lengths={self.lengths}, cache={self.cache!r})"

    @property
    def length(self) -> int:
        """How many tokens the next query sees."""
        return sum(self.lengths)

    def append(self, k: Float[Tensor, "b g l d"], v: Float[Tensor, "b g l e"]) -> None:
        """Remember tokens, the same in all processes: the shortest shards take them, in order of ranks.

        If anything is wrong with them, no shard keeps any.

        Args:
            k: keys, (batch, key_heads, l, dim).
            v: values, (batch, key_heads, l, value_dim).

        Raises:
            InputError: something is wrong with them.
        """
        for name, x in (("k", k), ("v", v)):
            check_dense(name, x)
        self.cache.checked_norms(k, v)
        shares = dealt(self.lengths, k.shape[-2])
        start = sum(shares[: self._rank])
        mine = slice(start, start + shares[self._rank])
        # Which shard takes which token depends on how many come at once, so that shapes count, too.
        tokens = f"{tuple(k.shape)} {digest(k)} {digest(v)}".encode()
        self.cache.append(k[:, :, mine], v[:, :, mine])
        self.lengths = tuple(length + share for length, share in zip(self.lengths, shares, strict=True))
        self._appends += 1
        self._appended.update(tokens)

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

        Without a tolerance the answer is exact.

        Args:
            q: the query, (batch, heads, 1, dim), the same in all processes.
            tol: the largest error of a row that is accepted, relative to the longest value that the row sees.
            confidence: accept bounds that hold with this probability for each row, over the draws of all processes.
            scale: what q·k is multiplied by; None is 1/sqrt(dim).
            generator: what samples are drawn from.
            rtol: the largest error relative to the length of the row's true answer.

        Returns:
            The answer, (batch, heads, 1, value_dim), and its certificate, the same in all processes.

        Raises:
            InputError: processes disagree, or a cache is empty.
            ToleranceUnreachable: no available arithmetic proves the tolerance.
            LostRank: a process has ended, or is silent.
        """
        options = {"tol": tol, "rtol": rtol, "confidence": confidence}
        context = self._agreed(q, scale, generator, options)
        requirement = checked_requirement(tol, confidence, rtol=rtol)
        with outside_autocast():
            if not requirement.exact:
                method = Sparse(bits=self.cache.bits or 4)
                try:
                    attended = attend_within(context, method, requirement, generator, self.cache.holding.sketch)
                    if attended.certificate.keeps(tol, rtol):
                        return attended
                except ToleranceUnreachable:
                    # All processes raise it alike. With `rtol` the aim was a guess: exact attention may still prove it.
                    if rtol is None:
                        raise
            return attend_keys(context, requirement, Exact())

    def _agreed(
        self, q: Tensor, scale: float | None, generator: torch.Generator | None, options: dict[str, float | None]
    ) -> Context:
        """This process's shard, with norms of its tokens, if all processes ask the same and can answer."""
        held = self.cache.holding

        def check(problem: Problem) -> None:
            checked_requirement(**options)
            check_generator(generator)
            if self.cache.length != self.lengths[self._rank]:
                rule = f"must be the {self.lengths[self._rank]} tokens that it was given"
                raise ShapeError("cache.length", self.cache.length, rule, "append to the sharded cache alone")
            if not self.length:
                raise ShapeError("cache.length", 0, "must be at least 1", "append keys and values first")
            if q.shape[-2] != 1:
                rule = "must be (batch, heads, 1, dim): a query sees every token"
                raise ShapeError("q.shape", tuple(q.shape), rule, "attend after each token")

        def norms() -> Norms:
            keys = held.longest.unsqueeze(-1).expand(held.lengths.shape)
            return Norms(row_norms(q, "q"), keys, held.lengths, held.slack)

        filled = {"lengths of shards": self.lengths, "calls of append": self._appends}
        filled |= {"digest of appended tokens": self._appended.hexdigest()}
        context = check_consistent(
            *(q, held.keys, held.values),
            group=self._group,
            scale=scale,
            enable_gqa=True,
            shared_queries=True,
            options={"call": "ShardedCache.attend", **options, **filled},
            measure=False,
            check=check,
            payload=lambda: norms().most,
        )
        query, key, value = (max(column) for column in zip(*context.payloads, strict=True))
        check_range(query, key, value, context.problem.scale)
        return dataclasses.replace(context, problem=context.problem.with_norms(norms()))


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


def _check_cache(cache: KeyValueCache) -> None:
    """Raise if a cache cannot be one of several shards."""
    if not isinstance(cache, KeyValueCache):
        remedy = "make one with avow.nn.KeyValueCache"
        raise DtypeError("cache", type(cache).__name__, "must be a KeyValueCache", remedy)
    if len(set(cache.lengths)) > 1:
        rule = "differ, and every token of a shard is one of each sequence"
        raise ShapeError("cache: lengths", list(cache.lengths), rule, "use sequences of one length")
    if cache.window is not None:
        remedy = "leave window out; a window fits on one device"
        raise ParameterError("cache: window", cache.window, "has no form over shards", remedy)
    if cache.bits is None:
        remedy = "make the cache with bits=4"
        raise ParameterError("cache: bits", None, "must be from 1 to 8: a sketch says what to read", remedy)
