"""Exact attention where queries, keys and values are all sharded along the sequence: blocks of keys go round a ring.

Each process keeps its queries. It computes on the block of keys and values that it holds while the next one is in
transit; the log-sum-exp of what it has seen merges one block after the other. The backward pass goes round once more,
from the saved logarithms, and the gradients of a block travel on with it until it is home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from avow.contract import Problem
from avow.distributed import blocks
from avow.distributed.agreement import agree
from avow.distributed.route import Route
from avow.distributed.traffic import Group, Pending, Transfer, group_of
from avow.errors import AvowError, ShapeError
from avow.maths import rounding


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
    """This process's rows of softmax attention over the sequence that all processes hold together, in order of ranks.

    Shards may differ in length; none may be empty. `causal` speaks of places in the whole sequence: row i of all rows
    sees key j of all keys when j ≤ i. Gradients flow to the shards of every process: those of the sum of all losses.
    """
    processes = group_of(group)
    route, factor = _agreed(q, k, v, processes, causal, scale, enable_gqa)

    def forward() -> tuple[Tensor, Tensor]:
        kind = rounding.accumulator(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=kind, device=q.device)
        lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
        for block, keys, values in visits(k.detach(), v.detach(), route, processes):
            shift = route.shift(dist.get_rank(processes), block)
            out, lse = blocks.merged(out, lse, *blocks.answer(q.detach(), keys, values, shift, factor))
        return out.to(q.dtype), lse

    return linked(q, k, v, forward, route, factor, processes)


def linked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Callable[[], tuple[Tensor, Tensor]],
    route: Route,
    scale: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """What `forward` answers, with the logarithms of its normalisers, as a function of q, k and v: gradients flow."""
    out: Tensor = _Ring.apply(q, k, v, forward, route, scale, group)
    return out


def visits(
    k: Float[Tensor, "b g s d"], v: Float[Tensor, "b g s e"], route: Route, group: dist.ProcessGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The blocks that this process needs, with their numbers, each while the next is in transit."""
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


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        answer: Callable[[], tuple[Tensor, Tensor]],
        route: Route,
        scale: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        out, lse = answer()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = route, scale, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_gradients(q, k, v, out, lse, grads[0], *ctx.rest), None, None, None, None


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    route: Route,
    scale: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round once more: at each tick the gradient of the block at hand arrives, as those before left it, and goes on."""
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
            to_q, to_k, to_v = blocks.gradients(q, keys, values, lse, grad, along, shift, scale)
            for_queries += to_q
            added = _packed(to_k, to_v)
        pending.wait()
        held = coming
        if tick == 0:
            home = added  # unless it travels, nobody else adds to it
        elif here in landed:
            home = landed.pop(here)
        done = added + landed[block] if block in landed else added
    for_keys, for_values = _unpacked(home, k, v, k.shape[-2])
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)


def _moves(held: Tensor, tick: int, k: Tensor, v: Tensor, route: Route, here: int) -> tuple[list[Transfer], Tensor]:
    """What this process sends and takes of blocks at a tick, and where the next one will lie."""
    coming = held.new_zeros(0)
    moves = []
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
        keys.view(*k.shape[:2], length, k.shape[-1]),  # (b, g, s, d)
        values.view(*v.shape[:2], length, v.shape[-1]),  # (b, g, s, e)
    )


def _size(k: Tensor, v: Tensor, length: int) -> int:
    return math.prod(k.shape[:2]) * length * (k.shape[-1] + v.shape[-1])


def _agreed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Route, float]:
    problem: AvowError | None = None
    factor = 1.0
    try:
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            raise ShapeError("shapes of q, k, v", shapes, "must have four axes", "add axes for batch and heads")
        factor = Problem.of(q, k, v, scale=scale, enable_gqa=enable_gqa).scale
        for name, x in (("q", q), ("k", k)):
            if not x.shape[-2]:
                rule = "must hold at least one token"
                raise ShapeError(
                    f"shape of {name}", tuple(x.shape), rule, "let every process hold some of the sequence"
                )
    except AvowError as found:
        problem = found
    same = {
        "call": "ring_attention",
        "causal": causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "type of q": q.dtype,
        "type of k": k.dtype,
        "type of v": v.dtype,
        "shape of q without its length": (*q.shape[:-2], *q.shape[-1:]),
        "shape of k without its length": (*k.shape[:-2], *k.shape[-1:]),
        "shape of v without its length": (*v.shape[:-2], *v.shape[-1:]),
        "gradients of q, k or v": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }
    lengths = agree(same, [q.shape[-2], k.shape[-2]], problem, group, q.device)
    return Route(tuple(n for n, _ in lengths), tuple(s for _, s in lengths), causal), factor
