"""Random features in plain torch, as their kernels compute them: on any device and for any type, float64 too."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from avow.kernels.feature_attention import FeatureMean, FeatureSums

# Rows of a chunk.
_CHUNK = 64


def feature_attention_twin(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g n d"],
    v: Float[Tensor, "b g n e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
    initial: FeatureSums | None = None,
) -> FeatureMean:
    """The same in plain torch, for one sequence, on any device and for any type, float64 too."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    b, g, n, _ = k.shape
    root, across, values = math.sqrt(abs(scale)), directions.to(wide).mT, v.to(wide)
    keys = k.to(wide) * root
    key_logs = keys @ across - 0.5 * keys.square().sum(-1, keepdim=True)  # (b, g, n, m)
    row_logs = (q.to(wide) * math.copysign(root, scale) @ across).unflatten(1, (g, -1))
    if initial is None:
        m, e = directions.shape[0], v.shape[3]
        last = FeatureSums(keys.new_zeros(b, g, m, e), keys.new_zeros(b, g, m), keys.new_full((b, g), -math.inf))
    else:
        last = FeatureSums(*(x.to(wide) for x in initial))
    parts, logs = [], []
    for start in range(0, n, _CHUNK):
        span = slice(start, start + _CHUNK)
        log = key_logs[..., span, :]
        # Each row's own reference, and one for what the next chunk inherits; none of them moves the answer.
        own = log.detach().amax(-1).cummax(-1).values
        highest = torch.maximum(own, last.top.unsqueeze(-1))  # (b, g, l)
        ahead = row_logs[..., span, :]
        guess = ahead.detach().amax(-1, keepdim=True)
        rows = torch.exp(ahead - guess)  # (b, g, r, l, m)
        top = log.detach().amax(-1)
        pairs = (rows @ torch.exp(log - top.unsqueeze(-1)).unsqueeze(2).mT).tril()
        rise = (top.unsqueeze(-2) - highest.unsqueeze(-1)).tril().unsqueeze(2)  # (b, g, 1, l, l)
        pairs = pairs * torch.exp(rise)
        earlier = torch.exp(last.top.unsqueeze(-1) - highest)[:, :, None, :, None]
        found = pairs @ values[..., span, :].unsqueeze(2) + rows @ last.sums.unsqueeze(2) * earlier
        divisor = pairs.sum(-1, keepdim=True) + rows @ last.total[:, :, None, :, None] * earlier
        parts.append(found / divisor)
        logs.append((torch.log(divisor) + guess).squeeze(-1) + highest.unsqueeze(2))
        higher = highest[..., -1]
        features = torch.exp(log - higher[..., None, None])
        shrink = torch.exp(last.top - higher)[..., None]
        last = FeatureSums(
            last.sums * shrink.unsqueeze(-1) + features.mT @ values[..., span, :],
            last.total * shrink + features.sum(-2),
            higher,
        )
    return FeatureMean(torch.cat(parts, -2).flatten(1, 2).to(q.dtype), torch.cat(logs, -1).flatten(1, 2), last)


def feature_attention_whole_twin(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    directions: Float[Tensor, "m d"],
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """The same means in plain torch, on any device and for any type, float64 too."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    root, across = math.sqrt(abs(scale)), directions.to(wide).mT
    keys = k.to(wide) * root
    log = keys @ across - 0.5 * keys.square().sum(-1, keepdim=True)
    weight = torch.exp(log - log.detach().amax((-1, -2), keepdim=True))  # (b, g, s, m)
    rows = (q.to(wide) * math.copysign(root, scale) @ across).unflatten(1, (k.shape[1], -1))
    rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))  # (b, g, r, n, m)
    found = rows @ (weight.mT @ v.to(wide)).unsqueeze(2)
    return (found / (rows @ weight.sum(-2)[:, :, None, :, None])).flatten(1, 2).to(q.dtype)
