"""Other people's linear attention, where it is installed."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from avow.bench.linear_variants import FEATURES, feature_logs


def fla() -> Any:
    """flash-linear-attention's kernel, or None."""
    try:
        return importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except Exception as error:  # a peer that cannot be imported is no peer, whatever stopped it
        print(f"  flash-linear-attention is not here ({type(error).__name__}: {str(error)[:80]})", file=sys.stderr)
        return None


def performer() -> Callable[[Tensor], Any] | None:
    """What makes performer-pytorch's causal attention for queries like these, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):
            attention = importlib.import_module("performer_pytorch").FastAttention
    except Exception as error:
        print(f"  performer-pytorch is not here ({type(error).__name__}: {str(error)[:80]})", file=sys.stderr)
        return None

    def make(q: Tensor) -> Any:
        return attention(q.shape[-1], FEATURES, causal=True).to(q.device)

    return make


def peer_of(name: str, rival: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """flash-linear-attention's way to the same answer, for rows before heads."""
    if rival is None or name.startswith("separable") or "all keys" in name:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "random features":
            q, k, _ = feature_logs(q, k)
        return rival(q, k, v, scale=1.0, normalize=name != "linear")[0]

    return call
