"""How much of the device is used: the model's arithmetic against the fastest matrix product measured here."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def flops(model: nn.Module, *given: Any) -> int:
    """Operations that training spends where the model, once, is given this: backward takes twice the forward."""
    was_training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter:
            model(*given)
    finally:
        model.train(was_training)
    return 3 * int(counter.get_total_flops())


@functools.cache
def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product: the best of several, measured for a fifth of a second."""
    n = 8192 if device.type == "cuda" else 1024
    # Not torch's global generator: measuring must not move the draws of a run.
    a, b = (torch.full((n, n), 0.5, device=device, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + 0.2
    while best == float("inf") or time.perf_counter() < end:
        _settle(device)
        begin = time.perf_counter()
        a @ b
        _settle(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
