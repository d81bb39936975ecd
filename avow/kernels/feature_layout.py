"""How kernels of random features are laid out, and the numbers and directions they are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from avow.errors import ShapeError
from avow.kernels.cuts import padded

_LOG2E = math.log2(math.e)
# Bytes of shared memory that a program may take.
_SHARED = 227 * 1024


class Layout(NamedTuple):
    """Features taken together, rows of a chunk, columns of values per program, warps, loads under way."""

    features: int
    chunk: int
    columns: int
    warps: int
    stages: int


def layout(m: int, d: int, e: int, kind: torch.dtype) -> Layout:
    """The largest tiles that nearly stay in registers, where a processor has room for all directions beside them."""
    found = next((one for one in _layouts(m, d, e, kind) if _room(one, m, d, kind) <= _SHARED), None)
    if found is None:
        told, rule = f"{m}, {d}, {str(kind)[6:]}", "have no room in a processor's shared memory"
        raise ShapeError("features, dim of q, type", told, rule, "use fewer features, or a type of 16 bits")
    return found


def fits(m: int, d: int, e: int, kind: torch.dtype) -> bool:
    """Whether there is a layout."""
    return any(_room(one, m, d, kind) <= _SHARED for one in _layouts(m, d, e, kind))


def _layouts(m: int, d: int, e: int, kind: torch.dtype) -> Iterator[Layout]:
    """From the fastest on. Eight warps share 128 rows: on fewer, Triton lets them repeat each other's work, since
    products feed products.
    """
    features = min(padded(m), 64)
    held = triton.cdiv(m, features) * features
    if kind == torch.bfloat16:
        columns = min(padded(e), 128, max(16, 16384 // held))
        if held <= 256 and max(d, columns) <= 64:
            yield Layout(features, 128, columns, 8, 2)
        for chunk, stages in ((64, 2), (64, 1), (32, 1)):
            yield Layout(features, chunk, columns, 8, stages)
    elif kind == torch.float16:
        yield Layout(features, 32, min(padded(e), max(16, 8192 // held)), 8, 1)
    elif held <= 64:
        # In three products each, more features keep thousands of a thread's numbers outside its registers.
        yield Layout(min(features, 32), 16, 16, 4, 1)


def _room(one: Layout, m: int, d: int, kind: torch.dtype) -> int:
    """Bytes that a layout takes at most: directions, tiles of rows, keys, values and gradients, and what products need
    besides, as compilers for an H200 reported it. Float32's products need directions four times over.
    """
    width = padded(d)
    directions = triton.cdiv(m, one.features) * one.features * width * (16 if kind == torch.float32 else 4)
    tiles = one.stages * one.chunk * 2 * (width + one.columns) * kind.itemsize
    return directions + tiles + (2**15 if kind == torch.bfloat16 else 15 * 2**13)


def in_pieces(directions: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    high = directions.to(kind)
    return high.contiguous(), (directions - high.float()).to(kind).contiguous()


def numbers_of(scale: float, m: int) -> dict[str, float]:
    """What logarithms are multiplied by, to base 2: those of queries, of keys; guesses; halves of squares."""
    root = math.sqrt(abs(scale)) * _LOG2E
    lift = math.sqrt(2 * math.log(m + 1)) * root
    return {
        "factor": math.copysign(root, scale),
        "key_factor": root,
        "lift": lift,
        "half": 0.5 * abs(scale) * _LOG2E,
    }


def constants_of(m: int, d: int, e: int, chosen: Layout, kind: torch.dtype) -> dict[str, Any]:
    return {
        "D": d,
        "DP": padded(d),
        "M": m,
        "MB": chosen.features,
        "NB": triton.cdiv(m, chosen.features),
        "E": e,
        "EB": chosen.columns,
        "C": chosen.chunk,
        "KIND": tl.bfloat16 if kind == torch.bfloat16 else tl.float32,
        # TF32 has the digits of float16; three products of it have nearly those of float32.
        "PRECISION": "tf32x3" if kind == torch.float32 else "tf32",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
