"""The linear attentions that are measured: the kernel, and the formula it must agree with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Batch, query heads, key heads, length, width of keys, width of values.
Shape = tuple[int, int, int, int, int, int]
Case = tuple[torch.dtype, Shape]
Inputs = tuple[Tensor, Tensor, Tensor]


def error(found: Tensor, truth: Tensor) -> float:
    """How far an answer is from the truth, relative to its size; inf where it is no number."""
    apart = float(torch.linalg.vector_norm(found.double() - truth) / torch.linalg.vector_norm(truth))
    return apart if apart == apart else float("inf")


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Shapes to check, with the type that each is checked in: compiling is what takes time.
_CASES: tuple[Case, ...] = (
    (_BF16, (1, 2, 2, 4096, 64, 64)),
    (_BF16, (2, 4, 2, 1000, 128, 128)),
    (_BF16, (1, 2, 1, 1537, 96, 40)),
    (_BF16, (1, 1, 1, 777, 256, 256)),
    (_FP16, (1, 2, 1, 1537, 64, 64)),
    (_FP32, (1, 2, 1, 1537, 64, 64)),
    (_FP32, (1, 2, 2, 300, 48, 64)),
)
_QUICK_CASES: tuple[Case, ...] = ((_BF16, (1, 2, 1, 300, 24, 40)), (_FP32, (1, 1, 1, 90, 16, 16)))
FEATURES = 256


class Variant(NamedTuple):
    """A kernel, the plain formula it stands for (in the type it is given), and what it is checked at."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    formula: Callable[[Tensor, Tensor, Tensor], Tensor]
    prepare: Callable[[Tensor, Tensor, Tensor], Inputs]
    cases: tuple[Case, ...]
    quick_cases: tuple[Case, ...] = _QUICK_CASES


def siblings(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Keys and values as often as query heads share them."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in others]


def weighted(normalise: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal linear attention by its definition, all pairs written out."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = siblings(q, k, v)
        pairs = (q @ k.mT).tril()
        return pairs @ v / pairs.sum(-1, keepdim=True) if normalise else pairs @ v

    return formula


def collected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from avow.kernels.linear_whole import linear_attention_whole

    return linear_attention_whole(q, k, v, True)


def collected_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = siblings(q, k, v)
    pairs = q @ k.mT
    return pairs @ v / pairs.sum(-1, keepdim=True)


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


@functools.cache
def directions(d: int, device: torch.device, features: int = FEATURES) -> Tensor:
    """The same directions for the same width, whoever asks."""
    return torch.randn(features, d, generator=torch.Generator().manual_seed(d)).to(device)


def quiet(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Queries and keys as short as those that random features are good for."""
    return 0.7 * q, 0.7 * k, v


def featured(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from avow.kernels.feature_attention import feature_attention

    return feature_attention(q, k, v, directions(q.shape[-1], q.device)).out


def feature_logs(q: Tensor, k: Tensor) -> Inputs:
    """Features of rows and keys in the type they come in, each over the largest of its kind."""
    w, root = directions(q.shape[-1], q.device).to(q.dtype), q.shape[-1] ** -0.25
    rows, keys = q * root @ w.mT, k * root @ w.mT
    keys = keys - 0.5 * root**2 * k.square().sum(-1, keepdim=True)
    rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))
    return rows, torch.exp(keys - keys.detach().amax()), w


def feature_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = siblings(q, k, v)
    rows, keys, _ = feature_logs(q, k)
    pairs = (rows @ keys.mT).tril()
    return pairs @ v / pairs.sum(-1, keepdim=True)


def featured_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from avow.kernels.feature_whole import feature_attention_whole

    return feature_attention_whole(q, k, v, directions(q.shape[-1], q.device)).out


def whole_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = siblings(q, k, v)
    rows, keys, _ = feature_logs(q, k)
    pairs = rows @ keys.mT
    return pairs @ v / pairs.sum(-1, keepdim=True)


def separated(causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from avow.kernels.separable_attention import separable_attention

        return separable_attention(q, k, v, causal).out

    return call


def separable_formula(causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = siblings(q, k, v)
        rows, columns = torch.softmax(q, -1), torch.exp(k - k.detach().amax(-2, keepdim=True))
        if not causal:
            return rows @ ((columns / columns.sum(-2, keepdim=True)).mT @ v)
        return ((rows / columns.cumsum(-2)) @ columns.mT).tril() @ v

    return formula


def unchanged(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return q, k, v


def answerable(case: Case) -> bool:
    """Whether methods would ask kernels for so wide a shape of this type."""
    kind, (*_, d, e) = case
    return kind != _FP32 or max(d, e) <= 64


def variants() -> dict[str, Variant]:
    """All of them by name."""
    few = (_CASES[0], _CASES[2], (_BF16, (1, 2, 2, 700, 128, 128)), _CASES[4], (_FP32, (1, 1, 1, 500, 64, 64)))
    found = (
        Variant("linear", scanned(False), weighted(False), as_given, _CASES),
        Variant("linear, normalised", scanned(True), weighted(True), positive, _CASES),
        Variant("all keys, normalised", collected, collected_formula, positive, few),
        Variant("random features", featured, feature_formula, quiet, few),
        Variant("random features, all keys", featured_whole, whole_formula, quiet, few[:2]),
        Variant("separable", separated(False), separable_formula(False), unchanged, few),
        Variant("separable, causal", separated(True), separable_formula(True), unchanged, few),
    )
    return {variant.name: variant for variant in found}
