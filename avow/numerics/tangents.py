"""Derivatives that are carried forward, as `torch.func.jvp` does: fused kernels have none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether derivatives of some tensors are carried forward; never inside a compiled graph."""
    if torch.compiler.is_compiling():
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
