"""Exact attention over shards of the keys, one shard a process: all processes get one answer and its certificate.

Each process attends to its own keys, reports its answer with the logarithm of its normaliser, and merges what all
reported in the order of ranks (`avow.core.compose`): every process computes the same bits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from avow.attend import Attended
from avow.core import Certificate
from avow.core.compose import Partial, merge
from avow.core.requirement import Requirement
from avow.distributed import blocks
from avow.distributed.autograd import linked
from avow.distributed.consensus import Context, agree, attempt, one_loss
from avow.distributed.partials import answered, packed, unpacked, unreachable
from avow.distributed.point_to_point import gathered
from avow.numerics import rounding


def attend_keys(met: Context, wish: Requirement, kinds: Sequence[torch.dtype]) -> Attended:
    """Softmax attention of the same queries to the keys of all processes, in the first arithmetic that keeps the wish.

    Where causal, row i sees the first i + 1 of all keys, in order of ranks. Gradients are those of one loss, which
    every process computes from the answer that all share.
    """
    p = met.problem
    shift = -sum(met.keys[: met.here]) if p.causal else None
    for kind in kinds:
        with torch.no_grad():
            whole = _merged(p.q.to(kind), p.k.to(kind), p.v.to(kind), shift, met)
            out, certificate = whole.answer(p.q.dtype)
        if wish.met_by(certificate):
            gradients = functools.partial(_gradients, shift=shift, met=met)
            return Attended(linked(p.q, p.k, p.v, (out, whole.lse), gradients), certificate)
    raise unreachable(wish, certificate.bound, certificate.relative)


def _merged(q: Tensor, k: Tensor, v: Tensor, shift: int | None, met: Context) -> Partial:
    found, problem = attempt(lambda: answered(q, k, v, shift, met.scale, met.problem.allowed))
    mine = Partial.nothing((*q.shape[:-1], v.shape[-1]), q.device) if found is None else found
    words = None if mine.words is None else json.loads(mine.words.to_json(rows=False))
    said = agree({}, [words, mine.slack], problem, met.group)
    parts = []
    for numbers, (theirs, loose) in zip(gathered(packed(mine), met.group), said, strict=True):
        parts.append(unpacked(numbers, None if theirs is None else Certificate.from_json(json.dumps(theirs)), loose))
    return functools.reduce(merge, parts)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, shift: int | None, met: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """Each process has its keys' gradients at hand; those of the queries add up over all."""
    kind = rounding.accumulator(q.dtype)
    one_loss(grad, met)
    along = (grad.to(kind) * out.to(kind)).sum(-1)
    for_queries, for_keys, for_values = (torch.zeros_like(x, dtype=kind) for x in (q, k, v))
    if q.numel() and k.shape[-2]:
        for_queries, for_keys, for_values = blocks.gradients(
            q, k, v, lse, grad, along, shift, met.scale, met.problem.allowed
        )
    for_queries = functools.reduce(torch.add, gathered(for_queries, met.group))
    return for_queries.to(q.dtype), for_keys.to(k.dtype), for_values.to(v.dtype)
