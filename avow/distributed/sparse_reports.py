"""What shards have read of their tokens: added up over all of them on the way to an answer, and told in the end."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from avow.distributed.protocols import Protocol, all_max, all_reduce
from avow.distributed.sparse_budget import Extent
from avow.numerics.gather import Gathered


class State(NamedTuple):
    """What all shards know of the answer so far, in the unit of weights and in the size of values."""

    out: Float64[Tensor, "b g r e"]
    length: Float64[Tensor, "b g r 1"]
    top: Float64[Tensor, "b g r 1"]
    total: Float64[Tensor, "b g r 1"]
    """What the tokens that were read weigh, relative to exp(top)."""
    grown: Float64[Tensor, "b g r 1"]
    """exp(top − origin)"""
    shrunk: Float64[Tensor, "b g r 1"]
    more: tuple[Tensor, ...]
    """What else shards told, added up."""


def reported(
    read: Gathered, odds: Float64[Tensor, "b g r s"] | None, whole: Extent, ranks: int, *more: Tensor
) -> Protocol[State]:
    """What all shards have read, each token counted once or by its odds, and the sums of what else they tell."""
    own = torch.where(read.total > 0, read.top, -math.inf)
    top = yield from all_max(own, ranks)
    top = top.masked_fill(top == -math.inf, 0.0)
    share = (own - top).exp()
    weights = read.weights if odds is None else read.weights / read.at(odds).clamp(min=1e-300)
    values = read.average(weights) * share
    sums = yield from all_reduce(torch.cat([read.sum(weights) * share, values, *more], -1), ranks)
    total, average, *others = sums.split([1, values.shape[-1], *(x.shape[-1] for x in more)], -1)
    out = average / total.clamp(min=1e-300)
    length = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
    grown = (top - whole.origin).clamp(max=700.0).exp()
    return State(out, length, top, total, grown, (whole.origin - top).exp(), tuple(others))


class Kept(NamedTuple):
    """Tokens of one shard that some rows count, and by how much."""

    rows: slice
    head: Int[Tensor, " m"]
    place: Int[Tensor, " m"]
    logs: Float64[Tensor, "m r"]
    """Logits, less the logarithms of odds; −inf where a row does not count a token."""


class Reading(NamedTuple):
    """How many tokens each row read in full: in all shards, and in this one; and the answer before it was rounded, the
    logarithm of its normaliser, and what this shard has in both.
    """

    everywhere: Float64[Tensor, "b h n"]
    here: Float64[Tensor, "b h n"]
    out: Float64[Tensor, "b h n e"]
    lse: Float64[Tensor, "b h n"]
    kept: tuple[Kept, ...]
    """Empty where no gradient will be asked for."""
