"""Problems nobody would send, and everybody will: huge and tiny norms, ties, odd masks, odd strides."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.core import DTYPES, Method, Problem
from avow.methods import all_methods

# The range a generated number may have in each type, so that it is finite and, mostly, not zero.
_RANGE = {torch.float64: 30.0, torch.float32: 30.0, torch.bfloat16: 30.0, torch.float16: 4.0}


class Call(NamedTuple):
    """The arguments of a call, and a method for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    method: Method


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: many heads of one size, each drawn its own way."""

    problem: Problem
    method: Method
    mask: Tensor | None
    seed: int


def draw_case(seed: int, heads: int = 64, only: str | None = None) -> Case:
    """A call of `heads` independent heads, in canonical form."""
    q, k, v, options, method = draw_call(seed, heads, only)
    return Case(Problem.of(q, k, v, **options), method, options["mask"], seed)


def draw_call(seed: int, heads: int = 64, only: str | None = None) -> Call:
    """A call of `heads` independent heads: the method, sizes, mask, type and layout vary by call, numbers by head."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice(DTYPES)
    n, s = (rng.choice((1, 2, 3, 5, 8, 13, 31)) if rng.random() < 0.97 else rng.choice((65, 130)) for _ in range(2))
    name = rng.choice(list(all_methods())) if only is None else only
    if name == "sparse" and rng.random() < 0.9:
        n, s = rng.choice((1, 2, 3, 8)), rng.choice((64, 65, 130, 200))  # whole groups of keys have sketches
    d, e = rng.choice((1, 2, 3, 4, 7, 16)), rng.choice((1, 2, 3, 5, 16))
    share = rng.choice((1, 1, 1, 2, 4))
    groups = max(1, heads // share)
    q, k, v = _numbers(rng, generator, groups * share, groups, n, s, d, e, dtype)
    mask = _mask(rng, generator, n, s, dtype)
    options: dict[str, Any] = {"causal": rng.random() < 0.4, "mask": mask, "enable_gqa": share > 1}
    if name != "separable":
        if name != "latent" and rng.random() < 0.2:
            options |= {"kernel": "rbf", "sigma": rng.choice((0.1, 1.0, 30.0))}
        elif rng.random() < 0.3:
            options["scale"] = rng.choice((1.0, -0.5, 0.0, 1e-20, 1e6, 0.125))
    q, k, v = (layout(rng, x) for x in (q, k, v))
    return Call(q, k, v, options, _settings(rng, name, s))


def _settings(rng: random.Random, name: str, s: int) -> Method:
    kind = all_methods()[name]
    chosen: dict[str, object] = {}
    if name == "low_rank":
        chosen["rank"] = rng.randint(1, min(s, 12))
    elif name == "random_features":
        chosen |= {"features": rng.choice((1, 3, 16, 40)), "orthogonal": rng.random() < 0.7}
    elif name == "latent":
        chosen |= {"latents": rng.choice((1, 2, 5, 16)), "segment": rng.choice((1, 2, 5, 16, 64))}
    elif name == "sparse":
        chosen |= {"drop": 10 ** rng.uniform(-5, 0.3), "bits": rng.choice((1, 2, 3, 4, 8))}
        chosen["chance"] = rng.choice((0.0, 0.0, 1e-3))
    elif name == "polynomial":
        chosen["degree"] = rng.choice((1, 2))
    elif name == "separable":
        chosen["temperature"] = rng.choice((1.0, 1.0, 0.3, 8.0))
    return kind(**chosen)


def _numbers(
    rng: random.Random, g: torch.Generator, heads: int, groups: int, n: int, s: int, d: int, e: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, heads, n, d, generator=g, dtype=torch.float64)
    k = torch.randn(1, groups, s, d, generator=g, dtype=torch.float64)
    v = torch.randn(1, groups, s, e, generator=g, dtype=torch.float64)
    style = rng.choice(("plain", "plain", "loud", "extreme", "ties", "near-ties", "giant", "aligned", "opposed"))
    if style == "loud":
        q, k = q * sizes(g, heads, 1.5), k * sizes(g, groups, 1.5)
    elif style == "extreme":
        reach = _RANGE[dtype]
        q, k, v = q * sizes(g, heads, reach), k * sizes(g, groups, reach), v * sizes(g, groups, reach)
    elif style == "ties":
        k = k[..., torch.randint(max(1, s // 3), (s,), generator=g), :]
    elif style == "near-ties":
        k = k[..., :1, :] * (1 + 1e-7 * torch.randn(1, groups, s, 1, generator=g, dtype=torch.float64))
        q = q * sizes(g, heads, 3.0)
    elif style == "giant":
        k[..., rng.randrange(s), :] *= 10 ** rng.uniform(0, 3)
        v[..., rng.randrange(s), :] *= 10 ** rng.uniform(-3, 3)
    elif style == "aligned":
        # Values of one sign and keys along one direction: nothing cancels, every rounding adds up.
        v, k = v.abs(), k.abs()
        q = q.abs() * sizes(g, heads, 1.0)
    elif style == "opposed":
        # Values of the keys that a query likes point one way, all others the other: dropping does the most damage.
        liked = (k * q[:, :: heads // groups, :1]).sum(-1, keepdim=True)  # (1, groups, s, 1)
        q = q * sizes(g, heads, 1.0)
        v = torch.where(liked >= liked.quantile(rng.random(), -2, keepdim=True), v.new_ones(e), -v.new_ones(e))
    if rng.random() < 0.1:
        v[..., torch.rand(s, generator=g) < 0.5, :] = 0.0
    if rng.random() < 0.05:
        v = v * torch.finfo(dtype).tiny * 3
    if rng.random() < 0.05:
        q[..., 0, :] = 0.0
    limit = torch.finfo(dtype).max / 4
    q, k, v = (x.clamp(-limit, limit).to(dtype) for x in (q, k, v))
    return q, k, v


def sizes(g: torch.Generator, heads: int, reach: float) -> Tensor:
    """One power of ten per head, up to 10^±reach."""
    return 10 ** ((2 * torch.rand(1, heads, 1, 1, generator=g, dtype=torch.float64) - 1) * reach)


def _mask(rng: random.Random, g: torch.Generator, n: int, s: int, dtype: torch.dtype) -> Tensor | None:
    kind = rng.choice(("none", "none", "none", "padding", "left", "rows", "additive", "large", "lowest", "blind"))
    if kind == "none":
        return None
    if kind == "padding":
        return torch.rand(1, 1, 1, s, generator=g) < 0.7
    if kind == "left":
        return torch.arange(s).expand(1, 1, 1, s) >= rng.randint(0, s)
    if kind == "rows":
        return torch.rand(n, s, generator=g) < rng.choice((0.1, 0.5, 0.9))
    if kind == "blind":
        return torch.zeros(n, s, dtype=torch.bool)
    numbers = torch.randn(n, s, generator=g) * 3
    hidden = torch.rand(n, s, generator=g) < 0.4
    if kind == "additive":
        return numbers.masked_fill(hidden, -math.inf)
    if kind == "large":
        return numbers.masked_fill(hidden, rng.choice((-1e5, -1e9)))
    return torch.zeros(n, s, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def layout(rng: random.Random, x: Tensor) -> Tensor:
    """The same numbers behind other strides."""
    choice = rng.random()
    if choice < 0.15:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if choice < 0.3:
        return torch.stack([x, x], -1)[..., 0]
    if choice < 0.35:
        return x[:, :1].expand(x.shape)
    return x
