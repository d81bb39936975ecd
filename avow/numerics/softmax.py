"""Softmax averages by their definition, in float64: the truth the methods are held to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Problem
from avow.numerics.heads import per_query_head
from avow.numerics.masks import masked, row_tiles


def softmax_average(p: Problem) -> Float[Tensor, "b h n e"]:
    """softmax(scale·q·kᵀ + bias) v over what each row sees, zero where it sees nothing."""
    values = per_query_head(p.v.double(), p.q.shape[1])
    return torch.cat([weights @ values for weights in softmax_tiles(p)], -2)


def softmax_weights(p: Problem) -> Float[Tensor, "b h n s"]:
    """The whole matrix of weights."""
    return torch.cat(list(softmax_tiles(p)), -2)


def softmax_tiles(p: Problem) -> Iterator[Tensor]:
    """The weights, some rows at a time."""
    keys = per_query_head(p.k.double(), p.q.shape[1])
    n, s = p.q.shape[-2], p.k.shape[-2]
    for rows in row_tiles(n, p.q.shape[0] * p.q.shape[1] * s):
        logits = masked(p, p.scale * (p.q[..., rows, :].double() @ keys.transpose(-1, -2)), rows)
        top = logits.detach().amax(-1, keepdim=True) if s else logits.new_zeros(*logits.shape[:-1], 1)
        weights = torch.exp(logits - torch.where(top > -math.inf, top, 0.0))
        yield weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
