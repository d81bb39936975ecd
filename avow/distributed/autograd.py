"""An answer found together with other processes, as a function that autograd knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Those of q, k and v, from q, k, v, an answer, the logarithms of its normalisers, and the gradient above."""


def linked(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    answer: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]],
    gradients: Gradients,
) -> Float[Tensor, "b h n e"]:
    """An answer that came with the logarithms of its normalisers, as a function of q, k and v."""
    out: Tensor = _Linked.apply(q, k, v, answer, gradients)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        answer: tuple[Tensor, Tensor],
        gradients: Gradients,
    ) -> Tensor:
        out, lse = answer
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gradients = gradients
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        with torch.autocast(grad.device.type, enabled=False):
            found = ctx.gradients(*ctx.saved_tensors, grad)
        return *found, None, None
