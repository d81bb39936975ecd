"""The linear attentions that are measured: the kernel, and the formula it must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Batch, query heads, key heads, length, width of keys, width of values.
Shape = tuple[int, int, int, int, int, int]
Inputs = tuple[Tensor, Tensor, Tensor]


class Variant(NamedTuple):
    """A kernel, the plain formula it stands for (in the type it is given), and the shapes it is checked at."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    formula: Callable[[Tensor, Tensor, Tensor], Tensor]
    prepare: Callable[[Tensor, Tensor, Tensor], Inputs]
    shapes: tuple[Shape, ...]
    quick_shapes: tuple[Shape, ...]


def error(found: Tensor, truth: Tensor) -> float:
    """How far an answer is from the truth, relative to its size; inf where it is no number."""
    apart = float(torch.linalg.vector_norm(found.double() - truth) / torch.linalg.vector_norm(truth))
    return apart if apart == apart else float("inf")


_SHAPES: tuple[Shape, ...] = (
    (1, 2, 2, 4096, 64, 64),
    (2, 4, 2, 1000, 128, 128),
    (1, 2, 1, 1537, 96, 40),
    (1, 1, 1, 777, 256, 256),
    (1, 2, 2, 300, 32, 32),
    (1, 1, 1, 513, 512, 64),
)
_QUICK_SHAPES: tuple[Shape, ...] = ((1, 2, 1, 300, 24, 40),)


def weighted(normalise: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal linear attention by its definition, all pairs written out."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        pairs = (q @ k.mT).tril()
        return pairs @ v / pairs.sum(-1, keepdim=True) if normalise else pairs @ v

    return formula


def scanned(normalise: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from avow.kernels.linear_attention import linear_attention

        return linear_attention(q, k, v, normalise)[0]

    return call


def as_given(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    # Sums over thousands of keys stay within float16.
    return q * q.shape[-1] ** -0.5, k, v


def positive(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Normalisers are away from zero where queries and keys are positive."""
    return q.abs() * q.shape[-1] ** -0.5 + 0.01, k.abs() * 0.1 + 0.01, v


def plain_variants() -> tuple[Variant, ...]:
    return (
        Variant("linear", scanned(False), weighted(False), as_given, _SHAPES, _QUICK_SHAPES),
        Variant("linear, normalised", scanned(True), weighted(True), positive, _SHAPES, _QUICK_SHAPES),
    )
