"""Kernels that follow each other closely: each is set up while the one before it still runs, and waits for its end."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Older processors set a kernel up when the one before is done.
_LEAST = (9, 0)


@triton.jit
def in_turn(CLOSE: tl.constexpr):
    """Nothing before this is read or written until all that came earlier is done; the next kernel may be set up."""
    if CLOSE >= 1:
        gdc_wait()
    if CLOSE == 2:
        gdc_launch_dependents()


def closely(device: torch.device) -> dict[str, Any]:
    """How to launch a kernel that begins with `in_turn`."""
    close = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST
    return {"CLOSE": 1, "launch_pdl": True} if close else {"CLOSE": 0}
