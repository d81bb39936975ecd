"""Separable attention in plain torch, as its kernels compute it: on any device and for any type, float64 too."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from avow.kernels.separable_attention import ColumnSums, SeparableMean

# Rows of a chunk.
_CHUNK = 64


def separable_attention_twin(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    temperature: float = 1.0,
    initial: ColumnSums | None = None,
    starts: Int[Tensor, "sequences+1"] | None = None,
) -> SeparableMean:
    """The same in plain torch, on any device and for any type, float64 too."""
    if starts is not None:
        edges, pieces = starts.tolist(), []
        for i, start in enumerate(edges[:-1]):
            begin = None if initial is None else ColumnSums(*(x[i : i + 1] for x in initial))
            own = slice(start, edges[i + 1])
            pieces.append(
                separable_attention_twin(q[:, :, own], k[:, :, own], v[:, :, own], causal, temperature, begin)
            )
        last = ColumnSums(*(torch.cat(column) for column in zip(*(piece.last for piece in pieces), strict=True)))
        return SeparableMean(torch.cat([piece.out for piece in pieces], 2), pieces[0].lost, last)
    wide = torch.promote_types(q.dtype, torch.float32)
    b, g, s, d = k.shape
    log, values = k.to(wide) / temperature, v.to(wide)
    rows = torch.softmax(q.to(wide) / temperature, -1).unflatten(1, (g, -1))  # (b, g, r, n, d)
    if initial is None:
        last = ColumnSums(
            log.new_zeros(b, g, d, v.shape[3]), log.new_zeros(b, g, d), log.new_full((b, g, d), -math.inf)
        )
    else:
        last = ColumnSums(*(x.to(wide) for x in initial))
    never = torch.zeros((), dtype=torch.bool, device=q.device)
    parts = []
    step = _CHUNK if causal else max(s, 1)
    for start in range(0, s, step):
        keys, some = log[..., start : start + step, :], values[..., start : start + step, :]
        top = torch.maximum(last.top, keys.detach().amax(-2))
        weight, shrink = torch.exp(keys - top.unsqueeze(-2)), torch.exp(last.top - top)
        sums, total = last.sums * shrink.unsqueeze(-1), last.total * shrink
        if causal:
            prefix = weight.cumsum(-2) + total.unsqueeze(-2)  # (b, g, l, d)
            share = rows[..., start : start + step, :] / prefix.unsqueeze(2)
            pairs = (share @ weight.unsqueeze(2).mT).tril()
            parts.append(pairs @ some.unsqueeze(2) + share @ sums.unsqueeze(2))
        last = ColumnSums(sums + weight.mT @ some, total + weight.sum(-2), top)
    if not causal:
        parts.append(rows @ (last.sums / last.total.unsqueeze(-1)).unsqueeze(2))
    out = torch.cat(parts, -2) if parts else rows.new_zeros(*rows.shape[:-1], v.shape[3])
    return SeparableMean(out.flatten(1, 2).to(q.dtype), never, last)
