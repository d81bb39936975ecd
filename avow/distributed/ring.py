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
from avow.core import Problem, Sizes
from avow.core.compose import Partial, merge
from avow.core.requirement import Requirement
from avow.distributed.consensus import Context, attempt, check_consistent, gather_numbers
from avow.distributed.exact import (
    Block,
    Gradients,
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
from avow.distributed.protocols import Post, Protocol, Shard, Traffic, Wait, over_processes, traffic
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
        ticks = range(self.ranks - 1, -1, -1)
        return tuple(
            next((t for t in ticks if self.needs((block + t) % self.ranks, block)), 0) for block in range(self.ranks)
        )

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
        for source in (self.rank, (self.rank - 1) % self.ranks):
            block = (source - tick) % self.ranks
            if tick < self.reach[block]:
                yield block, source, (source + 1) % self.ranks

    def gradient_moves(self, tick: int) -> Iterator[tuple[int, int, int]]:
        """The gradients of blocks, as far as they got at the tick before, that leave this rank or come to it."""
        here, ranks = self.rank, self.ranks
        for block in dict.fromkeys(((here - tick + 1) % ranks, (here - tick) % ranks, here)):
            reach, source = self.reach[block], (block + tick - 1) % ranks
            target = (block + tick) % ranks if tick <= reach else block
            if reach and 0 < tick <= reach + 1 and here in (source, target):
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
    p, route = context.problem, _route(context)
    masks = None if mask is None else mask.expand(*mask.shape[:-1], context.total).split(list(context.keys), -1)
    for kind in arithmetics(method, p.q.dtype, requirement):
        with torch.no_grad():
            whole, error = over_processes(_certified(context, route, kind, masks), context.group)
            out, certificate = whole.answer(p.q.dtype)
        own = [certificate.bound, certificate.relative]
        bound, relative = gather_numbers(own, error, context).amax(0).tolist()
        everywhere = dataclasses.replace(certificate, bound=bound, relative=relative)
        if requirement.exact or everywhere.keeps(requirement.tol, requirement.rtol):
            gradients = _gradients(context, route, masks)
            return Attended(with_gradients(p.q, p.k, p.v, (out, whole.lse), gradients), certificate)
    raise unreachable(requirement, bound, relative)


def ring_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    group: Group = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "b h n e"]:
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
    return with_gradients(q, k, v, answer, _gradients(context, _route(context)))


def ring_traffic(z: Sizes, ranks: int) -> Traffic:
    """What a rank sends whose blocks all go all the way round."""
    shard = Shard.on_meta(z, ranks)
    route = dataclasses.replace(_route(shard), causal=False)
    return traffic([travel(shard, route, lambda *_: None)], ranks)


def _route(shard: Shard) -> Route:
    return Route(shard.rank, shard.rows, shard.keys, shard.problem.causal)


def _gradients(context: Context, route: Route, masks: Masks = None) -> Gradients:
    def gradients(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = dataclasses.replace(context.problem, q=q, k=k, v=v)
        return over_processes(gradient_protocol(p, route, out, lse, grad, masks), context.group)

    return gradients


def ring_protocol(shard: Shard) -> Protocol[tuple[Tensor, Tensor]]:
    """What all blocks answer to this shard's rows, and the logarithms of the normalisers."""
    p, route = shard.problem, _route(shard)
    kind = rounding.accumulator(p.q.dtype)
    out = torch.zeros(*p.q.shape[:-1], p.v.shape[-1], dtype=kind, device=p.q.device)
    lse = torch.full(p.q.shape[:-1], -math.inf, dtype=kind, device=p.q.device)

    def work(block: Block) -> None:
        nonlocal out, lse
        out, lse = merged_answers(out, lse, *block_answer(p.q, block, p.scale))

    yield from travel(shard, route, work)
    return out.to(p.q.dtype), lse


def _certified(
    shard: Shard, route: Route, kind: torch.dtype, masks: Masks
) -> Protocol[tuple[Partial, AvowError | None]]:
    """What all blocks answer to this shard's rows; an error does not keep the blocks of others from passing."""
    p = shard.problem
    whole = Partial.nothing((*p.q.shape[:-1], p.v.shape[-1]), p.q.device)
    error: AvowError | None = None

    def work(block: Block) -> None:
        nonlocal whole, error
        part, failed = attempt(lambda: partial_answer(p.q.to(kind), block.to(kind), p.scale))
        whole, error = whole if part is None else merge(whole, part), error or failed

    yield from travel(shard, route, work, masks)
    return whole, error


def travel(shard: Shard, route: Route, work: Work, masks: Masks = None) -> Protocol[None]:
    """Work on each block that this rank needs, while the next one is in transit."""
    k, v = shard.problem.k, shard.problem.v
    held = _packed(k, v)
    for tick in range(route.ticks):
        transfers, coming = _transfers(held, tick, k, v, route)
        yield Post(route.rank, transfers)
        block = route.at(tick)
        if block is not None:
            work(_block(held, block, k, v, route, masks))
        yield Wait()
        held = coming


def gradient_protocol(
    p: Problem, route: Route, out: Tensor, lse: Tensor, grad: Tensor, masks: Masks = None
) -> Protocol[tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]]:
    """The gradients of this shard's q, k and v: at each tick that of a block arrives, grows, and goes on."""
    q, k, v, here = p.q, p.k, p.v, route.rank
    kind = rounding.accumulator(q.dtype)
    along = (grad.to(kind) * out.to(kind)).sum(-1)
    for_queries = torch.zeros_like(q, dtype=kind)
    held = _packed(k, v)
    home = done = torch.zeros(held.numel(), dtype=kind, device=q.device)
    for tick in range(route.ticks + 1):
        transfers, coming = _transfers(held, tick, k, v, route)
        landed: dict[int, Tensor] = {}
        for block, source, target in route.gradient_moves(tick):
            if target == here:
                landed[block] = torch.empty(_size(k, v, route.keys[block]), dtype=kind, device=q.device)
            transfers.append(Transfer(source, target, done if source == here else landed[block]))
        yield Post(here, transfers)
        block = (here - tick) % route.ranks
        added = torch.zeros(_size(k, v, route.keys[block]), dtype=kind, device=q.device)
        if route.at(tick) is not None:
            held_block = _block(held, block, k, v, route, masks)
            to_q, to_k, to_v = block_gradients(q, held_block, lse, grad, along, p.scale)
            for_queries += to_q
            added = _packed(to_k, to_v)
        yield Wait()
        held = coming
        if tick == 0:
            home = added  # all there is if a block does not travel
        elif here in landed:
            home = landed.pop(here)
        done = added + landed[block] if block in landed else added
    for_keys, for_values = _unpacked(home, k, v, k.shape[-2])
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)


def _transfers(held: Tensor, tick: int, k: Tensor, v: Tensor, route: Route) -> tuple[list[Transfer], Tensor]:
    """What this rank sends and receives of blocks at a tick, and the tensor that will hold the next one."""
    coming, transfers = held.new_zeros(0), []
    for block, source, target in route.moves(tick):
        if target == route.rank:
            coming = torch.empty(_size(k, v, route.keys[block]), dtype=k.dtype, device=k.device)
        transfers.append(Transfer(source, target, held if source == route.rank else coming))
    return transfers, coming


def _block(held: Tensor, block: int, k: Tensor, v: Tensor, route: Route, masks: Masks) -> Block:
    """A block by its number, from the message that holds it."""
    mask = None if masks is None else masks[block]
    return Block(*_unpacked(held, k, v, route.keys[block]), route.shift(block), mask)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message."""
    message = k.new_empty(k.numel() + v.numel())
    message[: k.numel()], message[k.numel() :] = k.reshape(-1), v.reshape(-1)
    return message


def _unpacked(x: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    keys, values = x.split([math.prod(one.shape[:2]) * length * one.shape[-1] for one in (k, v)])
    return (
        keys.view(*k.shape[:2], length, k.shape[-1]),  # (b, g, t, d)
        values.view(*v.shape[:2], length, v.shape[-1]),  # (b, g, t, e)
    )


def _size(k: Tensor, v: Tensor, length: int) -> int:
    return math.prod(k.shape[:2]) * length * (k.shape[-1] + v.shape[-1])
