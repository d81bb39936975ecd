"""The answers that follow from what was recorded of a layer's attention."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.extract_heads import Recorded


def attended(one: Recorded, rows: Tensor) -> Tensor:
    """Causal attention in float64 of what was recorded."""
    k, v = (x.double().repeat_interleave(one.q.shape[0] // one.k.shape[0], 0) for x in (one.k, one.v))
    seen = torch.arange(k.shape[1]) <= rows[:, None]
    return torch.softmax((one.q.double() @ k.mT * one.scale).masked_fill(~seen, -torch.inf), -1) @ v
