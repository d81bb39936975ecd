"""Stores of tokens as a cache on a GPU has them, whose room for tokens to come is poisoned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from avow.kernels.append_tokens import TokenStore
from avow.numerics.sketch import GROUP

CAPACITY = 4 * GROUP


def blank(b: int = 1, g: int = 2, d: int = 32, e: int = 48, dtype: torch.dtype = torch.bfloat16) -> TokenStore:
    """A store whose room is poisoned."""
    heads, groups = b * g, CAPACITY // GROUP
    half = torch.bfloat16
    return TokenStore(
        torch.full((heads, CAPACITY, d), math.nan, dtype=dtype),
        torch.full((heads, CAPACITY, e), math.nan, dtype=dtype),
        torch.full((heads, CAPACITY), math.nan),
        torch.full((heads, groups, GROUP, d // 2), 255, dtype=torch.uint8),
        *(torch.full((heads, groups, d), math.nan, dtype=half) for _ in range(2)),
        torch.full((heads, groups, GROUP), math.nan, dtype=half),
        torch.full((heads, groups), math.nan),
        torch.ones(heads, d),
        torch.zeros(heads, dtype=torch.float64),
        torch.zeros(heads, dtype=torch.float64),
        torch.tensor([math.inf, 0.0], dtype=torch.float64).repeat(heads, 1),
        torch.zeros(heads),
        torch.zeros(heads, dtype=torch.int32),
        torch.zeros(heads, dtype=torch.int32),
    )


def drawn(
    l: int, b: int = 1, g: int = 2, d: int = 32, e: int = 48, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    return [torch.randn(b, g, l, width).to(dtype) for width in (d, e)]
