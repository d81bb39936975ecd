"""Softmax averages by their definition, in float64: the truth the methods are held to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.maths.masks import at_rows, past, row_tiles


def softmax_average(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    allowed: Bool[Tensor, "#b #h #n s"] | None,
    bias: Float[Tensor, "#b #h #n s"] | None,
    causal: bool,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """softmax(scale·q·kᵀ + bias) v over what each row sees, zero where it sees nothing."""
    weights = [tile @ _heads(v.double(), q.shape[1]) for tile in softmax_tiles(q, k, allowed, bias, causal, scale)]
    return torch.cat(weights, -2)


def softmax_weights(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    allowed: Bool[Tensor, "#b #h #n s"] | None,
    bias: Float[Tensor, "#b #h #n s"] | None,
    causal: bool,
    scale: float,
) -> Float[Tensor, "b h n s"]:
    """The whole matrix of weights."""
    return torch.cat(list(softmax_tiles(q, k, allowed, bias, causal, scale)), -2)


def softmax_tiles(
    q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None, causal: bool, scale: float
) -> Iterator[Tensor]:
    """The weights, some rows at a time."""
    keys = _heads(k.double(), q.shape[1])
    n, s = q.shape[-2], k.shape[-2]
    for rows in row_tiles(n, q.shape[0] * q.shape[1] * s):
        logits = scale * (q[..., rows, :].double() @ keys.transpose(-1, -2))
        if bias is not None:
            logits = logits + at_rows(bias, rows).double()
        if allowed is not None:
            logits = torch.where(at_rows(allowed, rows), logits, -math.inf)
        if causal:
            logits = torch.where(past(n, s, q.device)[rows], logits, -math.inf)
        top = logits.detach().amax(-1, keepdim=True) if s else logits.new_zeros(*logits.shape[:-1], 1)
        weights = torch.exp(logits - torch.where(top > -math.inf, top, 0.0))
        yield weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
