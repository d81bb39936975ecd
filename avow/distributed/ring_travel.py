"""Blocks of keys and values on their way round a ring, and their gradients behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from avow.distributed import blocks
from avow.distributed.point_to_point import Pending, Transfer
from avow.distributed.ring_route import Route
from avow.numerics import rounding

Masks = Sequence[Bool[Tensor, "#b #h #n s"]] | None
"""Which keys of each block this process's rows may see; None: all."""


def visits(
    k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s e"], route: Route, group: dist.ProcessGroup
) -> Iterator[tuple[int, Float[Tensor, "b g t d"], Float[Tensor, "b g t e"]]]:
    """The blocks that this process needs, with their numbers: each while the next is in transit."""
    here = dist.get_rank(group)
    held = _packed(k, v)
    for tick in range(route.ticks):
        moves, coming = _moves(held, tick, k, v, route, here)
        pending = Pending(moves, group)
        block = route.at(here, tick)
        if block is not None:
            yield block, *_unpacked(held, k, v, route.keys[block])
        pending.wait()
        held = coming


def gradients(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    out: Float[Tensor, "b h n e"],
    lse: Float[Tensor, "b h n"],
    grad: Float[Tensor, "b h n e"],
    route: Route,
    scale: float,
    group: dist.ProcessGroup,
    masks: Masks = None,
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
    """The gradients of this process's shards: at each tick that of the block at hand arrives, grows, and goes on."""
    here, kind = dist.get_rank(group), rounding.accumulator(q.dtype)
    along = (grad.to(kind) * out.to(kind)).sum(-1)
    for_queries = torch.zeros_like(q, dtype=kind)
    held = _packed(k, v)
    home = done = torch.zeros(held.numel(), dtype=kind, device=q.device)
    for tick in range(route.ticks + 1):
        moves, coming = _moves(held, tick, k, v, route, here)
        landed: dict[int, Tensor] = {}
        for block, source, target in route.gradients(tick):
            if target == here:
                landed[block] = torch.empty(_size(k, v, route.keys[block]), dtype=kind, device=q.device)
            if here in (source, target):
                moves.append(Transfer(source, target, done if source == here else landed[block]))
        pending = Pending(moves, group)
        block = (here - tick) % route.ranks
        added = torch.zeros(_size(k, v, route.keys[block]), dtype=kind, device=q.device)
        if route.at(here, tick) is not None:
            keys, values = _unpacked(held, k, v, route.keys[block])
            shift = route.shift(here, block)
            mask = None if masks is None else masks[block]
            to_q, to_k, to_v = blocks.gradients(q, keys, values, lse, grad, along, shift, scale, mask)
            for_queries += to_q
            added = _packed(to_k, to_v)
        pending.wait()
        held = coming
        if tick == 0:
            home = added  # all there is where a block does not travel
        elif here in landed:
            home = landed.pop(here)
        done = added + landed[block] if block in landed else added
    for_keys, for_values = _unpacked(home, k, v, k.shape[-2])
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)


def _moves(held: Tensor, tick: int, k: Tensor, v: Tensor, route: Route, here: int) -> tuple[list[Transfer], Tensor]:
    """What this process sends and takes of blocks at a tick, and where the next one will lie."""
    coming, moves = held.new_zeros(0), []
    for block, source, target in route.blocks(tick):
        if target == here:
            coming = torch.empty(_size(k, v, route.keys[block]), dtype=k.dtype, device=k.device)
        if here in (source, target):
            moves.append(Transfer(source, target, held if source == here else coming))
    return moves, coming


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(x: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    keys, values = x.split([math.prod(one.shape[:2]) * length * one.shape[-1] for one in (k, v)])
    return (
        keys.view(*k.shape[:2], length, k.shape[-1]),  # (b, g, t, d)
        values.view(*v.shape[:2], length, v.shape[-1]),  # (b, g, t, e)
    )


def _size(k: Tensor, v: Tensor, length: int) -> int:
    return math.prod(k.shape[:2]) * length * (k.shape[-1] + v.shape[-1])
