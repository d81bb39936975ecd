"""Batch and heads as one axis, which is how kernels of decoding find a head."""

from __future__ import annotations

from torch import Tensor

from avow.errors import ShapeError


def by_head(x: Tensor, name: str) -> Tensor:
    """A view with batch and heads as one axis; what belongs to a head must lie in one piece."""
    b, g = x.shape[:2]
    joined = x.stride(0) == g * x.stride(1) or b == 1 or g == 1
    if not joined or not x[0, 0].is_contiguous():
        remedy = "pass a slice x[:, :, :s] of one contiguous tensor, or x.contiguous()"
        raise ShapeError(f"{name}.stride()", x.stride(), "must be that of heads in one piece each", remedy)
    return x.view(b * g, *x.shape[2:])
