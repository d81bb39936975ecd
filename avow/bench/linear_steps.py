"""Single tokens of every linear attention, and what the state's way through the processor takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.bench.clock import Clock
from avow.bench.linear_variants import FEATURES, directions
from avow.bench.results import Row

HEADS, WIDTH = 16, 64


class Step(NamedTuple):
    """The whole sequence's variant, the state before any token, and the call that takes one more in."""

    variant: str
    empty: Callable[[str, int, int, int, int], Any]
    call: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def _zeros(device: str, b: int, g: int, m: int, e: int, *tops: int) -> list[Tensor]:
    low = torch.full((b, g, *tops), -torch.inf, device=device)
    return [torch.zeros(b, g, m, e, device=device), torch.zeros(b, g, m, device=device), low]


def _plain(device: str, b: int, g: int, d: int, e: int) -> Any:
    from avow.kernels.linear_attention import LinearState

    return LinearState(*_zeros(device, b, g, d, e)[:2])


def _random(device: str, b: int, g: int, d: int, e: int) -> Any:
    from avow.kernels.feature_attention import FeatureSums

    return FeatureSums(*_zeros(device, b, g, FEATURES, e))


def _columns(device: str, b: int, g: int, d: int, e: int) -> Any:
    from avow.kernels.separable_attention import ColumnSums

    return ColumnSums(*_zeros(device, b, g, d, e, d))


def _linear_step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
    from avow.kernels.linear_step import linear_step

    return linear_step(q, k, v, state, True)


def _feature_step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
    from avow.kernels.linear_step import feature_step

    return feature_step(q, k, v, directions(q.shape[-1], q.device), state)


def _separable_step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
    from avow.kernels.linear_step import separable_step

    return separable_step(q, k, v, state)


STEPS = {
    "linear, normalised": Step("linear, normalised", _plain, _linear_step),
    "random features": Step("random features", _random, _feature_step),
    "separable": Step("separable, causal", _columns, _separable_step),
}


def steps(device: str, clock: Clock, limit: float, names: list[str], batches: tuple[int, ...]) -> Iterator[Row]:
    """Single tokens: what the state's way through the processor takes, and what a step does."""
    for b in batches:
        for name in names:
            step = STEPS[name]
            q, k, v = (torch.randn(b, HEADS, WIDTH, device=device).bfloat16() for _ in range(3))
            if name == "linear, normalised":
                q, k = q.abs(), k.abs()
            state = step.empty(device, b, HEADS, WIDTH, WIDTH)
            seconds = clock.seconds(partial(step.call, q, k, v, state))
            moved = 2 * state.sums.numel() * 4
            yield {
                "step": name,
                "batch": b,
                "us": 1e6 * seconds,
                "MB": moved / 1e6,
                "over the state's way": seconds / (moved / limit),
            }
