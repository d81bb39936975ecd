"""Exact attention where queries, keys and values are all sharded along the sequence: blocks of keys go round a ring.

Each process keeps its queries. It computes on the block of keys and values that it holds while the next one is in
transit; what it has seen merges by log-sum-exp. The backward pass goes round once more, from the saved logarithms, and
the gradients of a block travel on with it until it is home.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from avow.attend import Attended
from avow.certificates.compose import Partial, merge
from avow.distributed import blocks, circuit
from avow.distributed.agreement import Meeting, agree, meet
from avow.distributed.linked import Gradients, linked
from avow.distributed.partials import answered, kinds, unreachable
from avow.distributed.route import Route
from avow.distributed.traffic import Group
from avow.errors import AvowError
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

    Shards may differ in length; an empty one asks nothing and answers nothing. `causal` speaks of places in the whole
    sequence: row i of all rows sees key j of all keys when j ≤ i. Gradients are those of the sum of all processes'
    losses. Nothing is promised of the answer: `ring_attend` is for that.
    """
    asked = {"call": "ring_attention", "causal": causal}
    met = meet(
        q, k, v, group=group, scale=scale, enable_gqa=enable_gqa, shared_queries=False, asked=asked, reading=False
    )
    route = Route(met.rows, met.keys, causal)

    # Under autocast products would be narrower than the shards are.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        answer = _merged(q, k, v, route, met)
    return linked(q, k, v, answer, _gradients(route, met))


def ring_attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    group: Group = None,
    tol: float | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """`ring_attention` with a certificate for this process's rows; where a tolerance needs it, in float64.

    All processes keep `tol`, or all of them raise the same error.
    """
    asked = {"call": "ring_attend", "causal": causal, "tol": tol}
    met = meet(
        q, k, v, group=group, scale=scale, enable_gqa=enable_gqa, shared_queries=False, asked=asked, reading=True
    )
    route = Route(met.rows, met.keys, causal)
    for kind in kinds(q.dtype, tol):
        with torch.no_grad():
            whole, problem = _promised(q, k, v, kind, route, met)
            out, certificate = whole.answer(q.dtype)
        bound = max(agree({}, certificate.bound, problem, met.group, q.device))
        if tol is None or bound <= tol:
            return Attended(linked(q, k, v, (out, whole.lse), _gradients(route, met)), certificate)
    raise unreachable(tol, bound)


def _gradients(route: Route, met: Meeting) -> Gradients:
    return functools.partial(circuit.gradients, route=route, scale=met.scale, group=met.group)


def _merged(q: Tensor, k: Tensor, v: Tensor, route: Route, met: Meeting) -> tuple[Tensor, Tensor]:
    """What all blocks answer to this process's rows, and the logarithms of the normalisers."""
    kind = rounding.accumulator(q.dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
    for block, keys, values in circuit.visits(k, v, route, met.group):
        shift = route.shift(met.here, block)
        out, lse = blocks.merged(out, lse, *blocks.answer(q, keys, values, shift, met.scale))
    return out.to(q.dtype), lse


def _promised(
    q: Tensor, k: Tensor, v: Tensor, kind: torch.dtype, route: Route, met: Meeting
) -> tuple[Partial, AvowError | None]:
    """What all blocks answer to this process's rows; a problem does not keep the blocks of others from passing."""
    whole = Partial.nothing((*q.shape[:-1], v.shape[-1]), q.device)
    problem: AvowError | None = None
    for block, keys, values in circuit.visits(k, v, route, met.group):
        shift = route.shift(met.here, block)
        try:
            whole = merge(whole, answered(q.to(kind), keys.to(kind), values.to(kind), shift, met.scale))
        except AvowError as found:
            problem = problem or found
    return whole, problem
