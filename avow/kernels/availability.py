"""Whether kernels can run where some tensors are, and why not."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import Any

import torch

# Older processors lack bfloat16's products.
_LEAST = (8, 0)


def why_not(device: torch.device) -> str:
    """Why no kernel runs on a device; nothing where they do, interpreted ones among them. Loads nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        able = torch.cuda.get_device_capability(device)
        return "" if able >= _LEAST else f"compute capability {able[0]}.{able[1]} is below {_LEAST[0]}.{_LEAST[1]}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return f"kernels run on CUDA devices, and these tensors are on {device.type}"


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether methods should use kernels on a device; on a GPU without them, the reason is said once."""
    if device.type != "cuda":
        return False
    reason = why_not(device)
    if reason:
        warnings.warn(f"linear attention runs without its kernels: {reason}", RuntimeWarning, stacklevel=2)
    return not reason


def linear_kernels(device: torch.device) -> Any:
    """The module `problems`, which answers linear attentions by kernels; None where methods should not use it."""
    if torch.compiler.is_compiling() or not is_available(device):
        return None
    from avow.kernels import problems

    return problems
