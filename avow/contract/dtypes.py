"""The number types that can be computed in."""

from __future__ import annotations

import torch

from avow.errors import DtypeError

# From fine to coarse.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def named(dtype: torch.dtype) -> str:
    """The name of a type as a sentence has it."""
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, dtype: torch.dtype, remedy: str) -> None:
    """Raise where nothing can be computed in a type."""
    if dtype not in DTYPES:
        raise DtypeError(name, dtype, f"must be one of {', '.join(map(named, DTYPES))}", remedy)
