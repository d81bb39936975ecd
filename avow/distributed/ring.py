"""Exact attention where queries, keys and values are all sharded along the sequence: blocks of keys go round a ring.

Each process keeps its queries. It computes on the block of keys and values that it holds while the next one is in
transit; what it has seen merges by log-sum-exp. The backward pass goes round once more, from the saved logarithms, and
the gradients of a block travel on with it until it is home.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.attend import Attended
from avow.core.compose import Partial, merge
from avow.core.requirement import Requirement
from avow.distributed import blocks, ring_travel
from avow.distributed.autograd import Gradients, linked
from avow.distributed.consensus import Context, agree, attempt, check_consistent
from avow.distributed.partials import answered, unreachable
from avow.distributed.point_to_point import Group
from avow.distributed.ring_route import Route
from avow.distributed.ring_travel import Masks
from avow.errors import AvowError
from avow.numerics import rounding


def attend_ring(
    met: Context, wish: Requirement, kinds: Sequence[torch.dtype], mask: Bool[Tensor, "#b #h #n s"] | None
) -> Attended:
    """Softmax attention of this process's rows to the keys of all, in the first arithmetic that keeps the wish of all.

    Shards may differ in length; an empty one asks nothing and answers nothing. Where causal, row i of all rows sees key
    j of all keys when j ≤ i; of those, the keys that `mask` lets it see. Gradients are those of the sum of all
    processes' losses.
    """
    p = met.problem
    route = Route(met.rows, met.keys, p.causal)
    masks = None if mask is None else mask.expand(*mask.shape[:-1], sum(met.keys)).split(list(met.keys), -1)
    for kind in kinds:
        with torch.no_grad():
            whole, problem = _promised(p.q, p.k, p.v, kind, route, met, masks)
            out, certificate = whole.answer(p.q.dtype)
        own = [certificate.bound, certificate.relative]
        bound, relative = map(max, zip(*agree({}, own, problem, met.group), strict=True))
        if wish.exact or dataclasses.replace(certificate, bound=bound, relative=relative).keeps(wish.tol, wish.rtol):
            return Attended(linked(p.q, p.k, p.v, (out, whole.lse), _gradients(route, met, masks)), certificate)
    raise unreachable(wish, bound, relative)


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
    """The same answer with nothing promised of it, which is what training needs: numbers are not even read."""
    asked = {"method": "exact, unpromised"}
    met = check_consistent(
        *(q, k, v),
        group=group,
        causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
        shared_queries=False,
        asked=asked,
        reading=False,
    )
    route = Route(met.rows, met.keys, causal)
    # Under autocast products would be narrower than the shards are.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        answer = _merged(q, k, v, route, met)
    return linked(q, k, v, answer, _gradients(route, met))


def _gradients(route: Route, met: Context, masks: Masks = None) -> Gradients:
    return functools.partial(ring_travel.gradients, route=route, scale=met.scale, group=met.group, masks=masks)


def _merged(q: Tensor, k: Tensor, v: Tensor, route: Route, met: Context) -> tuple[Tensor, Tensor]:
    """What all blocks answer to this process's rows, and the logarithms of the normalisers."""
    kind = rounding.accumulator(q.dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
    for block, keys, values in ring_travel.visits(k, v, route, met.group):
        shift = route.shift(met.here, block)
        out, lse = blocks.merged(out, lse, *blocks.answer(q, keys, values, shift, met.scale))
    return out.to(q.dtype), lse


def _promised(
    q: Tensor, k: Tensor, v: Tensor, kind: torch.dtype, route: Route, met: Context, masks: Masks
) -> tuple[Partial, AvowError | None]:
    """What all blocks answer to this process's rows; a problem does not keep the blocks of others from passing."""
    whole = Partial.nothing((*q.shape[:-1], v.shape[-1]), q.device)
    problem: AvowError | None = None
    for block, keys, values in ring_travel.visits(k, v, route, met.group):
        shift = route.shift(met.here, block)
        mask = None if masks is None else masks[block]
        given = q.to(kind), keys.to(kind), values.to(kind), shift, met.scale, mask
        found, failed = attempt(functools.partial(answered, *given))
        whole, problem = whole if found is None else merge(whole, found), problem or failed
    return whole, problem
