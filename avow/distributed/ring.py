"""Exact attention if queries, keys and values are all sharded along the sequence: blocks of keys go round a ring.

Each process keeps its queries. It computes on the block of keys and values that it holds while the next one is in
transit; what it has seen merges by log-sum-exp. The backward pass goes round once more, from the saved logarithms, and
the gradients of a block travel one tick behind it; the last rank that adds to them sends them straight home.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.attend import Attended
from avow.core import Sizes
from avow.core.compose import Partial, merge
from avow.core.requirement import Requirement
from avow.distributed.consensus import Context, attempt, check_consistent, gather_numbers
from avow.distributed.exact import (
    Block,
    Mask,
    arithmetics,
    block_answer,
    block_gradients,
    merged_answers,
    partial_answer,
    unreachable,
    with_gradients,
)
from avow.distributed.point_to_point import Group, Transfer
from avow.distributed.protocols import Post, Protocol, Shard, Traffic, Wait, over_processes
from avow.errors import AvowError
from avow.methods.exact import Exact
from avow.numerics import rounding

Masks = Sequence[Bool[Tensor, "#b #h #n s"]] | None
"""Which keys of each block this process's rows may see; None: all."""
Work = Callable[[Block], None]
"""What a rank does with a block of keys and values."""


@dataclass(frozen=True)
class Route:
    """Which blocks come to a rank, and when: block c starts at rank c, and at tick t it is at rank c + t.

    It goes as far as some rank still needs it. Row i of all rows sees key j of all keys if j ≤ i, or always.
    """

    rank: int
    rows: tuple[int, ...]
    """The number of rows of each rank."""
    keys: tuple[int, ...]
    causal: bool

    @property
    def ranks(self) -> int:
        return len(self.keys)

    def shift(self, block: int, rank: int | None = None) -> int | None:
        """How many keys of a block its first row sees beyond the first one, negative for none; None: rows see all."""
        if not self.causal:
            return None
        row_starts, key_starts = self._starts
        ahead = row_starts[self.rank if rank is None else rank] - key_starts[block]
        return None if ahead >= self.keys[block] - 1 else ahead

    def needs(self, rank: int, block: int) -> bool:
        """Whether some row of a rank sees some key of a block."""
        if not self.rows[rank] or not self.keys[block]:
            return False
        shift = self.shift(block, rank)
        return shift is None or shift + self.rows[rank] > 0

    @functools.cached_property
    def reach(self) -> tuple[int, ...]:
        """How many ranks on from its own each block travels."""
        ranks = range(self.ranks)
        return tuple(max((t for t in ranks if self.needs((c + t) % self.ranks, c)), default=0) for c in ranks)

    @property
    def ticks(self) -> int:
        """How often ranks compute: at tick t, rank r on block r − t."""
        return 1 + max(self.reach)

    def at(self, tick: int) -> int | None:
        """The block that this rank computes on at a tick, if it needs one."""
        block = (self.rank - tick) % self.ranks
        return block if tick < self.ranks and self.needs(self.rank, block) else None

    def moves(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """The blocks that leave this rank or come to it at a tick, while it computes: block, source, target."""
        for block, reach in enumerate(self.reach):
            source, target = (block + tick) % self.ranks, (block + tick + 1) % self.ranks
            if tick < reach and self.rank in (source, target):
                yield block, source, target

    def gradient_moves(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """The gradients of blocks, as far as they got at the tick before, that leave this rank or come to it."""
        for block, reach in enumerate(self.reach):
            source = (block + tick - 1) % self.ranks
            target = (block + tick) % self.ranks if tick <= reach else block
            if reach and 0 < tick <= reach + 1 and self.rank in (source, target):
                yield block, source, target

    @functools.cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        return [0, *accumulate(self.rows)], [0, *accumulate(self.keys)]


def attend_ring(context: Context, requirement: Requirement, method: Exact, mask: Mask) -> Attended:
    """Softmax attention of this process's rows to the keys of all, in the first arithmetic that is precise enough.

    Shards may differ in length; an empty one asks nothing and answers nothing. If causal, row i of all rows sees key
    j of all keys when j ≤ i; of those, the keys that `mask` lets it see. Gradients are those of the sum of all
    processes' losses.
    """
    p = context.problem
    masks = None if mask is None else mask.expand(*mask.shape[:-1], context.total).split(list(context.keys), -1)
    for kind in arithmetics(method, p.q.dtype, requirement):
        with torch.no_grad():
            whole, error = over_processes(_certified(context, kind, masks), context.group)
            out, certificate = whole.answer(p.q.dtype)
        own = [certificate.bound, certificate.relative]
        bound, relative = gather_numbers(own, error, context).amax(0).tolist()
        everywhere = dataclasses.replace(certificate, bound=bound, relative=relative)
        if requirement.exact or everywhere.keeps(requirement.tol, requirement.rtol):
            gradients = functools.partial(_gradients, context=context, masks=masks)
            return Attended(with_gradients(p.q, p.k, p.v, (out, whole.lse), gradients), certificate)
    raise unreachable(requirement, bound, relative)


def ring_attention(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*keys s d"],
    v: Float[Tensor, "*keys s e"],
    *,
    group: Group = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*lead n e"]:
    """The same answer without a certificate, which is what training needs: the numbers are not even checked."""
    context = check_consistent(
        *(q, k, v),
        group=group,
        causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
        shared_queries=False,
        options={"method": "exact, unpromised"},
        measure=False,
    )
    # Under autocast products would be narrower than the shards are.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        answer = over_processes(ring_protocol(context), context.group)
    p, gradients = context.problem, functools.partial(_gradients, context=context, masks=None)
    return with_gradients(p.q, p.k, p.v, answer, gradients).reshape(*q.shape[:-1], v.shape[-1])


def ring_traffic(z: Sizes, ranks: int) -> Traffic:
    """What a rank sends whose blocks all go all the way round."""
    block = z.batch * z.key_heads * -(-z.keys // ranks) * (z.dim + z.value_dim) * z.item
    rounds = ranks - 1 if block else 0
    return Traffic(rounds * block, rounds, rounds)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, context: Context, masks: Masks
) -> tuple[Tensor, Tensor, Tensor]:
    shard = dataclasses.replace(context, problem=dataclasses.replace(context.problem, q=q, k=k, v=v))
    return over_processes(gradient_protocol(shard, out, lse, grad, masks), context.group)


def ring_protocol(shard: Shard) -> Protocol[tuple[Tensor, Tensor]]:
    """What all blocks answer to this shard's rows, and the logarithms of the normalisers."""
    p = shard.problem
    kind = rounding.accumulator(p.q.dtype)
    out = torch.zeros(*p.q.shape[:-1], p.v.shape[-1], dtype=kind, device=p.q.device)
    lse = torch.full(p.q.shape[:-1], -math.inf, dtype=kind, device=p.q.device)

    def work(block: Block) -> None:
        nonlocal out, lse
        out, lse = merged_answers(out, lse, *block_answer(p.q, block, p.scale))

    yield from travel(shard, work)
    return out.to(p.q.dtype), lse


def _certified(shard: Shard, kind: torch.dtype, masks: Masks) -> Protocol[tuple[Partial, AvowError | None]]:
    """What all blocks answer to this shard's rows; an error does not keep the blocks of others from passing."""
    p = shard.problem
    whole = Partial.nothing((*p.q.shape[:-1], p.v.shape[-1]), p.q.device)
    error: AvowError | None = None

    def work(block: Block) -> None:
        nonlocal whole, error
        part, failed = attempt(lambda: partial_answer(p.q.to(kind), block.to(kind), p.scale))
        whole, error = whole if part is None else merge(whole, part), error or failed

    yield from travel(shard, work, masks)
    return whole, error


def travel(shard: Shard, work: Work, masks: Masks = None) -> Protocol[None]:
    """Work on each block that this rank needs, while the next one is in transit."""
    route = Route(shard.rank, shard.rows, shard.keys, shard.problem.causal)
    held = torch.cat([shard.problem.k, shard.problem.v], -1)  # (b, g, s, d + e): a message
    for tick in range(route.ticks):
        transfers, coming = _transfers(held, tick, route)
        yield Post(route.rank, transfers)
        block = route.at(tick)
        if block is not None:
            work(_block(held, block, shard, route, masks))
        yield Wait()
        held = coming


def gradient_protocol(
    shard: Shard, out: Tensor, lse: Tensor, grad: Tensor, masks: Masks = None
) -> Protocol[tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]]:
    """The gradients of this shard's q, k and v: at each tick that of a block arrives, grows, and goes on."""
    p, here = shard.problem, shard.rank
    route = Route(here, shard.rows, shard.keys, p.causal)
    kind = rounding.accumulator(p.q.dtype)
    along = (grad.to(kind) * out.to(kind)).sum(-1)
    for_queries = torch.zeros_like(p.q, dtype=kind)
    held = torch.cat([p.k, p.v], -1)  # (b, g, s, d + e): a message
    home = done = held.new_zeros(0, dtype=kind)
    for tick in range(route.ticks + 1):
        transfers, coming = _transfers(held, tick, route)
        landed: dict[int, Tensor] = {}
        for block, source, target in route.gradient_moves(tick):
            if target == here:
                landed[block] = _room(held, route.keys[block], kind)
            transfers.append(Transfer(source, target, done if source == here else landed[block]))
        yield Post(here, transfers)
        block = (here - tick) % route.ranks
        added = _room(held, route.keys[block], kind).zero_()
        if route.at(tick) is not None:
            held_block = _block(held, block, shard, route, masks)
            to_q, *to_keys = block_gradients(p.q, held_block, lse, grad, along, p.scale)
            for_queries += to_q
            added = torch.cat(to_keys, -1)
        yield Wait()
        held = coming
        if tick == 0:
            home = added  # all there is if a block does not travel
        elif here in landed:
            home = landed.pop(here)
        done = added + landed[block] if block in landed else added
    for_keys, for_values = home.split([p.k.shape[-1], p.v.shape[-1]], -1)
    return for_queries.to(p.q.dtype), for_keys.to(p.k.dtype), for_values.to(p.v.dtype)


def _transfers(held: Tensor, tick: int, route: Route) -> tuple[list[Transfer], Tensor]:
    """What this rank sends and receives of blocks at a tick, and the tensor that will hold the next one."""
    coming, transfers = _room(held, 0), []
    for block, source, target in route.moves(tick):
        if target == route.rank:
            coming = _room(held, route.keys[block])
        transfers.append(Transfer(source, target, held if source == route.rank else coming))
    return transfers, coming


def _room(held: Tensor, keys: int, dtype: torch.dtype | None = None) -> Tensor:
    """A message for a block of so many keys, or its gradients, not filled yet."""
    return held.new_empty(*held.shape[:2], keys, held.shape[-1], dtype=dtype)


def _block(held: Tensor, block: int, shard: Shard, route: Route, masks: Masks) -> Block:
    """A block by its number, from the message that holds it."""
    k, v = held.split([shard.problem.k.shape[-1], shard.problem.v.shape[-1]], -1)
    return Block(k, v, route.shift(block), None if masks is None else masks[block])
