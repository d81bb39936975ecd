"""How kernels of random features are laid out, and the numbers and directions they are given."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from avow.kernels.chunking import divided, padded
from avow.kernels.tile_ops import interpreted
from avow.numerics.kernel_rounding import NEAR

_LOG2E = math.log2(math.e)


class Layout(NamedTuple):
    """Features of a program, rows of a chunk, columns of values per program, warps, and loads under way: for answers,
    and for gradients, which have less room for them.
    """

    features: int
    chunk: int
    columns: int
    warps: int
    stages: int
    gradient_stages: int


# Rows of a chunk, loads under way, and programs that a processor holds, where sums of narrow rows are made.
SUMS = 128, 3, 2


def layout(m: int, d: int, e: int, kind: torch.dtype) -> Layout:
    """Tiles that stay in registers: a program takes one block of features and some columns of values."""
    if kind == torch.bfloat16:
        stages = (3, 2) if d <= 64 else (2, 2) if d <= 128 else (1, 1)
        return Layout(min(padded(m), 64), 64, min(padded(e), 64), 4 if d <= 128 else 8, *stages)
    return Layout(min(padded(m), 32), 32, min(padded(e), 32), 4, 1, 1)


def layout_of_sums(m: int, d: int, e: int, kind: torch.dtype) -> tuple[Layout, int]:
    """The same for sums of parts, which hold less in registers; and how many of their programs a processor holds."""
    chosen = layout(m, d, e, kind)
    if kind != torch.bfloat16 or d > 64:
        return chosen, 2
    chunk, stages, resident = SUMS
    return chosen._replace(chunk=chunk, stages=stages), resident


def shortened(directions: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Directions as features are made with them, and as gradients go back along them: these may be of any size."""
    along = directions.to(torch.float32 if kind == torch.float32 else torch.float16).contiguous()
    return along, along if kind != torch.bfloat16 else directions.to(kind).contiguous()


@lru_cache
def numbers_of(scale: float, m: int) -> dict[str, float]:
    """What logarithms are multiplied by, to base 2: those of queries, of keys; guesses; halves of squares. The last is
    a power of two: one where the first is near it.
    """
    root = math.sqrt(abs(scale)) * _LOG2E
    lift = math.sqrt(2 * math.log(m + 1)) * root
    return {
        "factor": math.copysign(root, scale),
        "key_factor": root,
        "lift": lift,
        "half": 0.5 * abs(scale) * _LOG2E,
        "power": 1.0 if 1 / NEAR <= root <= NEAR or root == 0 else 2.0 ** math.floor(math.log2(root)),
    }


@lru_cache
def constants_of(m: int, d: int, e: int, chosen: Layout, kind: torch.dtype, scale: float) -> dict[str, Any]:
    """What all kernels of random features are compiled for."""
    return {
        "D": d,
        "DP": padded(d),
        "M": m,
        "MB": chosen.features,
        "NB": divided(m, chosen.features),
        "E": e,
        "EB": chosen.columns,
        "C": chosen.chunk,
        "KIND": tl.bfloat16 if kind == torch.bfloat16 else tl.float32,
        # TF32 has the digits of float16; three products of it have nearly those of float32.
        "PRECISION": "tf32x3" if kind == torch.float32 else "tf32",
        "SCALED": numbers_of(scale, m)["power"] != 1,
        "FAST": not interpreted(),
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
