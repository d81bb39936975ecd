"""Kernels in Python, for machines without a GPU: slow, and number by number what they say.

Triton's interpreter is corrected where a GPU does something else: it cuts numbers off where a GPU rounds them to
bfloat16, multiplies bfloat16 matrices by the bits of their entries, rounds twice where a GPU multiplies and adds at
once, takes loop bounds in a way that numpy 2.4 refuses, and a constant's sum with a block for another constant.
"""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

import numpy as np
import torch


def interpret() -> None:
    """Have kernels run in Python; must be called before the first of them is loaded."""
    assert os.environ.get("TRITON_INTERPRET") == "1" or "avow.kernels.tile_ops" not in sys.modules, "too late"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "corrected", False):
        return
    builder.corrected = True
    cast, dot, patch = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor

    def widened(x: Any) -> Any:
        """The same block, in float32 where it was bfloat16."""
        if x.dtype.scalar != interpreter.tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    def mended_cast(self: Any, block: Any, kind: Any) -> Any:
        short, wide = interpreter.tl.bfloat16, interpreter.tl.float32
        if block.dtype.scalar == short and kind.scalar == wide:
            return widened(block)
        if block.dtype.scalar == wide and kind.scalar == short:
            rounded = torch.from_numpy(np.ascontiguousarray(block.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), short)
        return cast(self, block, kind)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def mended_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return self.ternary_op(x, y, z, lambda a, b, c: (a.astype(np.float64) * b + c).astype(c.dtype))

    def mended_patch(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def mended_constant(name: str) -> Any:
        plain, does = getattr(interpreter.tl.constexpr, f"__{name}__"), getattr(operator, name)
        block = interpreter.tl.tensor
        return lambda self, other: does(self.value, other) if isinstance(other, block) else plain(self, other)

    for name in ("add", "sub", "mul"):
        setattr(interpreter.tl.constexpr, f"__{name}__", mended_constant(name))
    builder.cast_impl, builder.create_dot, builder.create_fma = mended_cast, mended_dot, mended_fma
    interpreter._patch_lang_tensor = mended_patch
