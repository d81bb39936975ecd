"""Linear methods as a CPU runs them, beside exact attention; certified answers, checked against their certificates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import audit
from avow.bench.clock import Clock
from avow.bench.results import Result, Row
from avow.core import Method, Problem
from avow.methods import method_named

_FEATURES = 64


class Sizes(NamedTuple):
    """What is measured: lengths, heads, width, rounds."""

    lengths: tuple[int, ...]
    heads: int
    width: int
    rounds: int


FULL = Sizes((2048, 8192), 4, 64, 3)
QUICK = Sizes((512, 2048), 2, 32, 2)
METHODS: dict[str, dict[str, Any]] = {"separable": {}, "random_features": {"features": _FEATURES}}


def run(sizes: Sizes, tell: Callable[[str], None]) -> list[Result]:
    """Causal attention of every linear method, with gradients and without, over exact attention."""
    clock, rows, failures = Clock("cpu", sizes.rounds, 1), list[Row](), list[str]()
    for n in sizes.lengths:
        q, k, v = (torch.randn(1, sizes.heads, n, sizes.width) * size for size in (0.5, 0.5, 1.0))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        seed = torch.randn(v.shape)
        for name, settings in METHODS.items():
            tell(f"{name}, n = {n}")
            fault = check(name, settings, q, k, v)
            if fault:
                # No speed for what may be wrong.
                failures.append(f"{name}, n = {n}: {fault}")
                continue
            method = method_named(name)(**settings)

            calls: dict[str, Callable[[], Any]] = {
                "linear": partial(linear, method, q, k, v),
                "exact": partial(exact, q, k, v),
                "linear training": partial(trained, partial(linear, method), leaves, seed),
                "exact training": partial(trained, exact, leaves, seed),
            }
            for call in calls.values():
                call()  # the first of a kind takes longer
            taken = clock.in_turns(calls)
            rows.append(
                {
                    "method": name,
                    "n": n,
                    "ms": 1e3 * taken["linear"],
                    "exact ms": 1e3 * taken["exact"],
                    "faster": taken["exact"] / taken["linear"],
                    "training ms": 1e3 * taken["linear training"],
                    "exact training ms": 1e3 * taken["exact training"],
                    "training faster": taken["exact training"] / taken["linear training"],
                }
            )
    told = f"{sizes.heads} heads of {sizes.width}, float32, {_FEATURES} features, cpu"
    remarks = ["The plain path, without kernels, which run on GPUs. Medians of turns; answers are checked first."]
    return [Result(f"linear attention beside exact attention, causal ({told})", rows, [], remarks, failures)]


def linear(method: Method, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return method.compute(Problem.of(q, k, v, causal=True)).out


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def trained(call: Callable[[Tensor, Tensor, Tensor], Tensor], leaves: list[Tensor], seed: Tensor) -> Any:
    """A pass and its gradients."""
    q, k, v = leaves
    return torch.autograd.grad(call(q, k, v), leaves, seed)


def check(name: str, settings: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> str:
    """What is wrong with a certified answer beside sampled rows in float64; nothing where it is right."""
    out, certificate = avow.attend(q, k, v, method=name, causal=True, **settings)
    found = audit(out, q, k, v, causal=True, method="exact" if name == "random_features" else name)
    worst = float(found.certificate.bound)
    return "" if worst <= certificate.bound else f"an error of {worst:.3g} where {certificate.bound:.3g} was certified"
