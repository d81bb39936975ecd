"""Sequences in pieces, what their attention and its gradients are in one piece, and how far an answer is from that."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

HEADS = 4


class Whole(NamedTuple):
    """An answer in one piece, and the gradients of its product with the case's weights."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence, and how many rows and keys of it each process holds."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    causal: bool = False
    groups: int = 2
    scale: float | None = None
    tol: float | None = None
    masked: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same in every process: q, k, v with one head of another size, and weights for a loss."""
        draw = torch.Generator().manual_seed(len(self.rows) + sum(self.rows))

        def some(heads: int, length: int, dim: int) -> Tensor:
            return torch.randn(2, heads, length, dim, generator=draw, dtype=torch.float64)

        n, s = sum(self.rows), sum(self.keys)
        q, k, v, weight = some(HEADS, n, 8), 2 * some(self.groups, s, 8), some(self.groups, s, 5), some(HEADS, n, 5)
        v[:, -1] *= 1e-3
        q, k, v, weight = (x.to(self.dtype) for x in (q, k, v, weight))
        return q, k, v, weight

    @property
    def options(self) -> dict[str, object]:
        return {"causal": self.causal, "scale": self.scale, "enable_gqa": True}

    def whole(self) -> Whole:
        """What this is in one piece and in float64."""
        q, k, v, weight = (x.double().requires_grad_() for x in self.inputs())
        out = self.weights(q, k) @ v.repeat_interleave(HEADS // self.groups, 1)
        (out * weight).sum().backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return Whole(out.detach(), q.grad, k.grad, v.grad)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
        return torch.softmax(logits.masked_fill(~self.seen(), -torch.inf), -1)

    def seen(self) -> Tensor:
        everything = torch.ones(sum(self.rows), sum(self.keys), dtype=torch.bool)
        if self.masked:
            everything = torch.rand(everything.shape, generator=torch.Generator().manual_seed(6)) < 0.3
            everything[:, 0] = True
        return everything.tril() if self.causal else everything

    def mask(self) -> Tensor | None:
        """What rows may see beside causality."""
        return dataclasses.replace(self, causal=False).seen() if self.masked else None

    def errors(self, out: Tensor) -> Tensor:
        """How far rows are from the truth, each relative to the longest value it sees."""
        v = self.inputs()[2].double().norm(dim=-1).repeat_interleave(HEADS // self.groups, 1)
        longest = torch.where(self.seen(), v[:, :, None], 0.0).amax(-1)
        return (out.double() - self.whole().out).norm(dim=-1) / longest


def piece(x: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    """What a rank holds of a sequence."""
    return x.split(list(sizes), -2)[rank]


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((one.detach().double() - other).abs().max() / other.abs().max())
