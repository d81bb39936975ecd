"""Every way to spread attention over a sequence, as a script that shards can run side by side in one process.

They are what `comm_cost` says the price of: the same exchanges with the same numbers, on plain float64 arithmetic.
Hundreds of shards fit into one process, so what is sent can be counted there, and answers compared with those of one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from avow.attend import attend
from avow.core import Problem
from avow.core.compose import Partial
from avow.distributed.protocols import AllToAll, Protocol, RingShift, all_gather
from avow.distributed.sparse_script import Task, shard_script
from avow.methods.sparse import Sparse
from avow.numerics import rounding
from avow.numerics.heads import grouped, per_query_head, ungrouped
from avow.numerics.norms import lengths, slack


def partial_answers(p: Problem, ranks: int) -> Protocol[Tensor]:
    """Exact attention of all queries to this shard's keys, merged with what the others' answer."""
    mine = _partial(p)
    beside = torch.stack([mine.lse, mine.longest, mine.pairs, mine.unsure, mine.drift, *mine.means], -1)
    told = yield from all_gather(torch.cat([beside, mine.out], -1), ranks)
    # Only the answers are merged here; `avow.core.compose` merges all of it.
    return (torch.softmax(told[..., :1], 0) * told[..., beside.shape[-1] :]).sum(0)


def _partial(p: Problem) -> Partial:
    wide = dataclasses.replace(p, q=p.q.double(), k=p.k.double(), v=p.v.double())
    out, certificate = attend(wide.q, wide.k, wide.v, method="exact", scale=p.scale, enable_gqa=True)
    logits = p.scale * (wide.q @ per_query_head(wide.k, p.q.shape[1]).mT)
    norms, u = wide.norms, rounding.unit(torch.float64)
    reach = abs(p.scale) * norms.q * per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
    lse = logits.logsumexp(-1)
    off = (rounding.gamma(p.q.shape[-1] + 8, u) + 8 * u) * reach + rounding.gamma(p.k.shape[-2] + 6000, u)
    longest = per_query_head(lengths(wide.v).amax(-1, keepdim=True), p.q.shape[1]).expand(lse.shape)
    return Partial.of(out, lse, off + 4 * u * lse.abs(), longest, certificate, slack(p.v.shape[-1], torch.float64))


def ring(p: Problem, ranks: int) -> Protocol[Tensor]:
    """Exact attention of this shard's queries to the keys of all, which pass by in blocks."""
    q = p.q.double()
    block, split = torch.cat([p.k, p.v], -1), [p.k.shape[-1], p.v.shape[-1]]
    out = q.new_zeros(*q.shape[:-1], split[1])
    lse = q.new_full(q.shape[:-1], -math.inf)
    for step in range(ranks):
        if step:
            block = yield RingShift(block)
        k, v = (per_query_head(x.double(), q.shape[1]) for x in block.split(split, -1))
        logits = p.scale * (q @ k.mT)
        fresh = logits.logsumexp(-1)
        share = torch.sigmoid(fresh - lse).unsqueeze(-1)
        out, lse = out + share * (torch.softmax(logits, -1) @ v - out), torch.logaddexp(lse, fresh)
    return out


def sparse(p: Problem, ranks: int, keys: int, tol: float) -> Protocol[Tensor]:
    """Sparse attention of all queries to the keys of all shards, as `attend_sparse` runs it."""
    widest = -(-keys // ranks)
    attended, _ = yield from shard_script(p, Task(tol, Sparse(), keys, widest, ranks))
    return attended.out


def separable(p: Problem, ranks: int) -> Protocol[Tensor]:
    """Separable attention of this shard's queries: each channel's softmax over the keys of all, by its state."""
    kind = rounding.accumulator(p.q.dtype)
    sums, total, _ = yield from _states(p.k.to(kind).mT, p.v.to(kind), ranks)
    return ungrouped(torch.softmax(grouped(p.q.to(kind), p.k.shape[1]), -1) @ (sums / total).unsqueeze(2))


def random_features(p: Problem, ranks: int, features: int) -> Protocol[Tensor]:
    """Attention of this shard's queries by positive random features, the same ones in every shard."""
    kind = rounding.accumulator(p.q.dtype)
    ways = torch.randn(features, p.q.shape[-1], generator=torch.Generator().manual_seed(0)).to(kind)
    q, k = p.q.to(kind) * math.sqrt(p.scale), p.k.to(kind)
    # A causal row must not know of keys after it, not even by their mean.
    k = k * math.sqrt(p.scale) if p.causal else (yield from centred(k, ranks)) * math.sqrt(p.scale)
    half = 0.5 * k.square().sum(-1)
    if not p.causal:
        # Relative to the longest key of all, features neither vanish nor overflow.
        tops = yield from all_gather(half.amax(-1), ranks)  # (ranks, b, g)
        half = half - tops.amax(0).unsqueeze(-1)
    log_keys = (k @ ways.T - half.unsqueeze(-1)).mT  # (b, g, m, s)
    sums, total, top = yield from _states(log_keys, p.v.to(kind), ranks)
    logs = grouped(q @ ways.T, k.shape[1]) + top.mT.unsqueeze(2)  # (b, g, r, n, m)
    weights = (logs - logs.amax(-1, keepdim=True)).exp()
    return ungrouped((weights @ sums.unsqueeze(2)) / (weights @ total.unsqueeze(2)))


def _states(
    logs: Float[Tensor, "b g m s"], v: Float[Tensor, "b g s e"], ranks: int
) -> Protocol[tuple[Tensor, Tensor, Tensor]]:
    """Sums of values, totals and references of features, over the keys of all shards."""
    top = logs.amax(-1, keepdim=True)
    weights = (logs - top).exp()
    told = yield from combined(torch.cat([weights @ v, weights.sum(-1, keepdim=True), top], -1), ranks, joined)
    sums, total, top = told.split([v.shape[-1], 1, 1], -1)
    return sums, total, top


def centred(k: Float[Tensor, "b g s d"], ranks: int) -> Protocol[Tensor]:
    """Keys less the mean of all shards' keys, which is the same for all of them: it cancels in every row."""
    count = torch.full_like(k[:, :, 0], k.shape[-2])
    moments = torch.stack([count, k.sum(2), k.square().sum(2), k.abs().sum(2)], -1)  # (b, g, d, 4)
    frame = yield from combined(moments, ranks, _frame)
    return k - frame[..., 0].unsqueeze(-2)


def _frame(told: Float[Tensor, "ranks b g d 4"]) -> Float[Tensor, "b g d 3"]:
    """Means of the keys' numbers, of their squares and of their sizes."""
    count, *sums = told.sum(0).unbind(-1)
    return torch.stack([total / count.clamp(min=1) for total in sums], -1)


def joined(told: Float[Tensor, "ranks b g m c"]) -> Float[Tensor, "b g m c"]:
    """States relative to their own references, added up relative to the highest."""
    top = told[..., -1:].amax(0)
    return torch.cat([((told[..., -1:] - top).exp() * told[..., :-1]).sum(0), top], -1)


def combined(x: Float[Tensor, "b g m c"], ranks: int, combine: Callable[[Tensor], Tensor]) -> Protocol[Tensor]:
    """What is made of the numbers of all shards, each of which does its share of the rows m for all."""
    share = -(-x.shape[-2] // ranks)
    pieces = pad(x, (0, 0, 0, share * ranks - x.shape[-2])).unflatten(-2, (ranks, share)).movedim(-3, 0)
    received = yield AllToAll(pieces)  # (ranks, b, g, share, c)
    told = yield from all_gather(combine(received), ranks)
    return told.movedim(0, -3).flatten(-3, -2)[..., : x.shape[-2], :]


def dealt(p: Problem, ranks: int, queries: bool) -> list[Problem]:
    """The problem of each of so many shards of equal length, each with its share of the `queries` or with all."""
    parts = []
    for rank in range(ranks):
        shares = [slice(rank * x.shape[-2] // ranks, (rank + 1) * x.shape[-2] // ranks) for x in (p.q, p.k)]
        q = p.q[:, :, shares[0]] if queries else p.q
        parts.append(dataclasses.replace(p, q=q, k=p.k[:, :, shares[1]], v=p.v[:, :, shares[1]]))
    return parts
