"""What tells one model from another: its shape and a sample of its numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

# Evenly spaced numbers of each parameter that are looked at: training or quantising again moves nearly all of them.
_SAMPLE = 64


def fingerprint(model: nn.Module) -> str:
    """Twelve hexadecimal digits that change with any parameter's name, shape, type or sampled numbers."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLE, flat.numel()), dtype=torch.float64).long()
        numbers = flat[places.to(flat.device)].double().cpu().tolist()
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype), numbers)).encode())
    return digest.hexdigest()[:12]
