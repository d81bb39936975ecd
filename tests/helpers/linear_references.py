"""Linear attentions in plain torch, chunk by chunk: what their kernels must compute, on any device and in any type."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK = 64


class Reference(NamedTuple):
    """The rows, and the sums over all keys relative to e^top."""

    out: Float[Tensor, "b h n e"]
    sums: Float[Tensor, "b g m e"]
    total: Float[Tensor, "b g m"]
    top: Float[Tensor, "..."]


def linear_attention_reference(
    q: Float[Tensor, "b h n m"], k: Float[Tensor, "b g n m"], v: Float[Tensor, "b g n e"], normalise: bool = False
) -> Float[Tensor, "b h n e"]:
    """Causal attention without a feature map."""
    wide = torch.promote_types(q.dtype, torch.float32)
    b, g, n, m = k.shape
    rows, keys, values = (x.to(wide) for x in (q, k, v))
    rows = rows.unflatten(1, (g, -1))  # (b, g, r, n, m)
    sums, total = keys.new_zeros(b, g, m, v.shape[3]), keys.new_zeros(b, g, m)
    parts = []
    for start in range(0, n, _CHUNK):
        x, y, z = (t[..., start : start + _CHUNK, :] for t in (rows, keys, values))
        pairs = (x @ y.unsqueeze(2).mT).tril()
        out = pairs @ z.unsqueeze(2) + x @ sums.unsqueeze(2)
        if normalise:
            divisor = pairs.sum(-1) + (x @ total[:, :, None, :, None])[..., 0]
            out = out / torch.where(divisor.abs() < torch.finfo(wide).tiny, 1.0, divisor).unsqueeze(-1)
        parts.append(out)
        sums, total = sums + y.mT @ z, total + y.sum(-2)
    return torch.cat(parts, -2).flatten(1, 2).to(q.dtype)


def feature_attention_reference(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    directions: Float[Tensor, "m d"],
    scale: float,
) -> Reference:
    """Causal attention by positive random features."""
    wide = torch.promote_types(q.dtype, torch.float32)
    b, g, n, _ = k.shape
    m, e = directions.shape[0], v.shape[3]
    root, across, values = math.sqrt(abs(scale)), directions.to(wide).mT, v.to(wide)
    keys = k.to(wide) * root
    key_logs = keys @ across - 0.5 * keys.square().sum(-1, keepdim=True)  # (b, g, n, m)
    row_logs = (q.to(wide) * math.copysign(root, scale) @ across).unflatten(1, (g, -1))
    sums, total, top = keys.new_zeros(b, g, m, e), keys.new_zeros(b, g, m), keys.new_full((b, g), -math.inf)
    parts = []
    for start in range(0, n, _CHUNK):
        span = slice(start, start + _CHUNK)
        log, ahead = key_logs[..., span, :], row_logs[..., span, :]
        # Each row has its own reference, so that no future key moves it.
        own = log.detach().amax(-1)
        highest = torch.maximum(own.cummax(-1).values, top.unsqueeze(-1))  # (b, g, l)
        rows = torch.exp(ahead - ahead.detach().amax(-1, keepdim=True))  # (b, g, r, l, m)
        pairs = rows @ torch.exp(log - own.unsqueeze(-1)).unsqueeze(2).mT
        rise = (own.unsqueeze(-2) - highest.unsqueeze(-1)).tril().unsqueeze(2)  # (b, g, 1, l, l)
        pairs = pairs.tril() * torch.exp(rise)
        earlier = torch.exp(top.unsqueeze(-1) - highest)[:, :, None, :, None]
        out = pairs @ values[..., span, :].unsqueeze(2) + rows @ sums.unsqueeze(2) * earlier
        parts.append(out / (pairs.sum(-1, keepdim=True) + rows @ total[:, :, None, :, None] * earlier))
        higher = highest[..., -1]
        features, shrink = torch.exp(log - higher[..., None, None]), torch.exp(top - higher)[..., None]
        sums = sums * shrink.unsqueeze(-1) + features.mT @ values[..., span, :]
        total, top = total * shrink + features.sum(-2), higher
    return Reference(torch.cat(parts, -2).flatten(1, 2).to(q.dtype), sums, total, top)


def separable_attention_reference(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    causal: bool,
    temperature: float = 1.0,
) -> Reference:
    """Softmax over the features of Q times softmax over the positions of K."""
    wide = torch.promote_types(q.dtype, torch.float32)
    b, g, s, d = k.shape
    log, values = k.to(wide) / temperature, v.to(wide)
    rows = torch.softmax(q.to(wide) / temperature, -1).unflatten(1, (g, -1))  # (b, g, r, n, d)
    sums, total = log.new_zeros(b, g, d, v.shape[3]), log.new_zeros(b, g, d)
    top = log.new_full((b, g, d), -math.inf)
    parts = []
    step = _CHUNK if causal else s
    for start in range(0, s, step):
        keys, some = log[..., start : start + step, :], values[..., start : start + step, :]
        higher = torch.maximum(top, keys.detach().amax(-2))
        weight, shrink = torch.exp(keys - higher.unsqueeze(-2)), torch.exp(top - higher)
        sums, total, top = sums * shrink.unsqueeze(-1), total * shrink, higher
        if causal:
            prefix = weight.cumsum(-2) + total.unsqueeze(-2)  # (b, g, l, d)
            share = rows[..., start : start + step, :] / prefix.unsqueeze(2)
            pairs = (share @ weight.unsqueeze(2).mT).tril()
            parts.append(pairs @ some.unsqueeze(2) + share @ sums.unsqueeze(2))
        sums, total = sums + weight.mT @ some, total + weight.sum(-2)
    if not causal:
        parts.append(rows @ (sums / total.unsqueeze(-1)).unsqueeze(2))
    return Reference(torch.cat(parts, -2).flatten(1, 2).to(q.dtype), sums, total, top)
