"""Kernels compiled for a GPU that need not be there: `python -m tests.helpers.compiled decode` prints their names.

Run in an interpreter of its own, since whether kernels are compiled or interpreted is settled when they are loaded.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

if TYPE_CHECKING:
    from avow.kernels.hot_rows import HotRows

_TARGET = GPUTarget("cuda", 90, 32)
# What a processor of it can share among the threads of a program.
_SHARED = 227 * 1024


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch: the kernel for these arguments, and its name."""
    backend = make_backend(_TARGET)
    bound, kinds, options = create_function_from_signature(self.signature, self.params, backend)(*args, **kwargs)
    options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, kinds, options)
    made = triton.compile(ASTSource(self, signature, constants, attributes), _TARGET, options.__dict__)
    # Triton 3.6 reorders what is counted and its mask each in a way of its own.
    assert not re.search("tt.histogram %[^:]*,", made.asm["ttgir"]), self.__name__
    assert made.metadata.shared <= _SHARED, (self.__name__, made.metadata.shared)
    print(self.__name__)


def decode(
    confidence: float = 1.0, queries: int | None = None, window: int | None = None, hot: HotRows | None = None
) -> None:
    """One certified step, its last resort included; several queries have sinks, too."""
    from avow.kernels.pausing import Used, blank_state
    from avow.kernels.sparse_decode import decode
    from avow.numerics.sketch import sketched
    from tests.helpers.decode_references import value_lengths

    shapes = ((1, 8 * (queries or 1), 128), (1, 2, 200, 128), (1, 2, 200, 128))
    q, k, v = (torch.randn(shape).bfloat16() for shape in shapes)
    seed = torch.tensor([1]) if confidence < 1 else None
    tokens = torch.full((2,), 200, dtype=torch.int32)
    used, sinks = Used(tokens, blank_state(tokens.device), queries, window), torch.zeros(8) if queries else None
    lengths = value_lengths(v)
    known = sketched(k), lengths._replace(each=lengths.each.float())
    decode(q, k, v, *known, 1e-2, limit=1e-2, confidence=confidence, seed=seed, used=used, sinks=sinks, hot=hot)


def offloaded() -> None:
    """Steps with rows on the device, and tokens that come in the place of others."""
    from avow.kernels.append_tokens import append
    from avow.kernels.hot_rows import HotRows
    from tests.helpers.stores import blank, drawn

    hot = HotRows.blank(*torch.zeros(2, 2, 200, 128).bfloat16(), places=50, spans=1)
    for confidence in (1.0, 0.999):
        decode(confidence, hot=hot)
    for many in (1, 200):
        append(blank(d=128, e=128)._replace(owner=hot.owner), *drawn(many, d=128, e=128))


def whole() -> None:
    """A step that reads all tokens, of one query and of many, with and without a window and sinks."""
    from avow.kernels.finalize import blank_report
    from avow.kernels.operators import exact_step
    from tests.helpers.stores import blank

    for kind, queries, window in ((torch.bfloat16, 1, None), (torch.bfloat16, 16, 100), (torch.float32, 8, None)):
        store = blank(d=128, e=128, dtype=kind)
        q, sinks = torch.randn(1, 8, queries, 128).to(kind), None if window is None else torch.zeros(8)
        exact_step(q, [x for x in store if x is not None], blank_report(1, 8 * queries, q.device), sinks, 0.1, window)


def appended() -> None:
    """One token more in a cache, and many, of all sequences or of each its own number; and some fewer."""
    from avow.kernels.append_tokens import append, crop
    from tests.helpers.stores import blank, drawn

    for many in (1, 5, 200):
        for counts in (None, torch.tensor([1], dtype=torch.int32), torch.tensor([1])):
            append(blank(d=128, e=128), *drawn(many, d=128, e=128), counts=counts)
    crop(blank(d=128, e=128), torch.tensor([1], dtype=torch.int32))


def scans() -> None:
    """Answers and gradients of every linear attention, of enough rows for several parts."""
    from avow.kernels.feature_attention import feature_attention
    from avow.kernels.linear_attention import linear_attention
    from avow.kernels.separable_attention import separable_attention

    directions = torch.randn(64, 64)
    q, k, v = (torch.randn(1, heads, 1500, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
    linear_attention(q, k, v, True).sum().backward()
    feature_attention(q, k, v, directions).out.sum().backward()
    for causal in (False, True):
        separable_attention(q, k, v, causal).out.sum().backward()


def tokens() -> None:
    """One token more for every linear attention."""
    from avow.kernels import linear_step as step
    from avow.kernels.chunking import Sums

    q, k, v = (torch.randn(1, heads, 64).bfloat16() for heads in (4, 2, 2))
    sums, total = torch.zeros(1, 2, 64, 64), torch.zeros(1, 2, 64)
    step.feature_step(q, k, v, torch.randn(64, 64), Sums(sums, total, torch.zeros(1, 2)))
    step.separable_step(q, k, v, Sums(sums, total, total))


def lengths() -> None:
    """The lengths of all rows of a call, with its answer and without."""
    from avow.kernels.row_lengths import row_lengths

    for kind in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = (torch.randn(2, heads, 200, 128).to(kind) for heads in (4, 2, 2))
        row_lengths(q, k, v)
        row_lengths(q.transpose(1, 2).contiguous().transpose(1, 2), k, v[..., :48], q[..., :48])


FAMILIES: dict[str, Callable[[], object]] = {
    "append": appended,
    "decode": decode,
    "draws": lambda: decode(0.999),
    "lengths": lengths,
    "offload": offloaded,
    "queries": lambda: [decode(sure, *seen) for seen in ((3, None), (16, 100), (None, 100)) for sure in (1.0, 0.999)],
    "scans": scans,
    "tokens": tokens,
    "whole": whole,
}

if __name__ == "__main__":
    from avow.kernels import tile_ops

    tile_ops.early = functools.cache(lambda device: True)  # as on the GPU that they are compiled for
    triton.JITFunction.run = compile_only
    FAMILIES[sys.argv[1]]()
