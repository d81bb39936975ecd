"""The number types and the kinds of tensors that can be computed in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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


def check_tensor(name: str, x: object) -> None:
    """Raise where something is not a plain tensor: dense, of one shape, and not mapped over."""
    if not isinstance(x, Tensor):
        raise DtypeError(name, type(x).__name__, "must be a torch.Tensor", "wrap it with torch.as_tensor")
    if x.is_nested:
        remedy = f"use {name}.to_padded_tensor(0.0) with a mask, or call once for each sequence"
        raise DtypeError(name, "a nested tensor", "must have one length", remedy)
    if x.layout is not torch.strided:
        raise DtypeError(f"{name}.layout", x.layout, "must be torch.strided", f"use {name}.to_dense()")
    if x.is_quantized:
        raise DtypeError(f"{name}.dtype", x.dtype, "must not be quantised", f"use {name}.dequantize()")
    if not torch.compiler.is_compiling() and _is_mapped(x):
        rule = "cannot be mapped by vmap: which arithmetic proves the bound depends on the numbers"
        raise DtypeError(name, "a tensor inside vmap", rule, "pass the mapped axis as a batch axis, in one call")


def check_numbers(name: str, x: Tensor) -> None:
    """Raise where a tensor has sizes and no numbers, of which alone no bound can be told."""
    if x.is_meta or (not torch.compiler.is_compiling() and isinstance(x, FakeTensor)):
        kind = "on the meta device" if x.is_meta else "a FakeTensor"
        remedy = "pass a tensor with numbers; for prices alone use Problem.of(q, k, v).sizes and a method's cost"
        raise DtypeError(name, kind, "has no numbers, which a certificate is about", remedy)


def _is_mapped(x: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over a tensor, perhaps inside a derivative."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
