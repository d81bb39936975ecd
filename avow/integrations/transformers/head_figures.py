r"""What the attention weights of each head look like, from a sample of its rows, in float64.

With :math:`\alpha_{ij}` the weight that row i gives key j, :math:`s_i` the keys it sees, :math:`H_i` its entropy, and
averages taken over the sampled rows that see two keys or more, a head is of the first kind whose inequality holds:

- *copying*: :math:`E[\max_j \alpha_{ij}] \ge 1/2`, one token has half of the mass;
- *local*: :math:`E[\sum_{|i-j| < 16} \alpha_{ij}] \ge 1/2` over rows that see more than 64 tokens, the nearest have it;
- *diffuse*: :math:`E[e^{H_i} / s_i] \ge 1/2`, it is spread over half of the tokens seen;
- *averaging*: none of these, it is spread over fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from avow.core import Problem
from avow.numerics.softmax import softmax_weights

HeadKind = Literal["copying", "local", "diffuse", "averaging"]
KINDS: tuple[HeadKind, ...] = ("copying", "local", "averaging", "diffuse")
NEAR = 16
"""Tokens nearer than this are local; rows that see no more than four times as many say nothing about it."""
SHARES = (0.9, 0.99, 0.999)


@dataclass(frozen=True)
class HeadFigures:
    """One head: averages over the sampled rows, unless a name says otherwise. `local` is None where nothing is far."""

    kind: HeadKind
    query_norm: float
    key_norm: float
    value_norm: float
    largest_logit: float
    """At least the size of any logit: scale · the longest query · the longest key."""
    spread: float
    """The largest logit of a row less its smallest."""
    entropy: float
    tokens: tuple[float, float, float]
    """How many tokens have 90%, 99% and 99.9% of the mass."""
    seen: float
    effective_rank: float
    """exp of the entropy of the normalised singular values of the sampled rows' weights; at most their number."""
    top: float
    """The mass of the heaviest token."""
    first: float
    """The mass of the text's first token."""
    local: float | None
    flatness: float
    """exp(entropy) relative to the tokens seen."""


def sampled_rows(n: int, many: int, start: int = 0) -> Int[Tensor, "r"]:
    """Rows evenly spaced from `start`, the last included."""
    return torch.linspace(start, n - 1, min(many, n - start), dtype=torch.float64).round().long()


def head_figures(problem: Problem, rows: int) -> list[HeadFigures]:
    """The figures of every head of one layer that reads one text."""
    p, norms = problem, problem.norms
    index = sampled_rows(p.q.shape[-2], rows)
    some = p.rows(index.to(p.q.device))
    seen = _visible(some)
    place = index if p.q.shape[-2] == p.k.shape[-2] else None
    shared = p.q.shape[1] // p.k.shape[1]
    found = []
    for head in range(p.q.shape[1]):
        one = some.head(0, head, head // shared)
        weights = softmax_weights(one)[0, 0]  # (r, s)
        own = seen[0, head if seen.shape[1] > 1 else 0].expand(weights.shape)
        key = head // shared
        lengths = tuple(float(x.mean()) for x in (norms.q[0, head], norms.k[0, key], norms.v[0, key]))
        reach = abs(p.scale) * float(norms.q[0, head].amax()) * float(norms.k[0, key].amax())
        found.append(_figures(weights, own, place, _spread(one, own), (lengths[0], lengths[1], lengths[2], reach)))
    return found


def keys_seen(p: Problem) -> Float[Tensor, "1 #h r"]:
    """How many keys each row sees."""
    if p.allowed is None:
        return torch.full((1, 1, p.q.shape[-2]), p.k.shape[-2], dtype=torch.float64, device=p.q.device)
    return p.allowed.expand(*p.allowed.shape[:2], p.q.shape[-2], -1).sum(-1).double()


def tokens_for(problem: Problem, share: float) -> list[float]:
    """Of the tokens that some rows see, the part that has this share of each row's mass, head by head."""
    p, seen = problem, keys_seen(problem)
    shared = p.q.shape[1] // p.k.shape[1]
    found = []
    for head in range(p.q.shape[1]):
        one = p.head(0, head, head // shared)
        weights = softmax_weights(one)[0, 0]  # (r, s)
        many = seen[0, head if seen.shape[1] > 1 else 0]
        found.append(float(_counted(weights, many, share).sum() / many.sum().clamp(min=1)))
    return found


def _counted(weights: Float[Tensor, "r s"], many: Float[Tensor, "r"], *shares: float) -> Float[Tensor, "p r"]:
    """How many tokens have each share of a row's mass, heaviest first."""
    # Sorted in float32, which keeps seven digits of each weight, and summed in float64: a millionth is no mass.
    mass = weights.float().sort(-1, descending=True).values.double().cumsum(-1)
    return torch.stack([((mass < share - 1e-6).sum(-1) + 1).double().minimum(many.double()) for share in shares])


def _visible(p: Problem) -> Bool[Tensor, "1 #h #r s"]:
    everything = torch.ones(1, 1, p.q.shape[-2], p.k.shape[-2], dtype=torch.bool, device=p.q.device)
    return everything if p.allowed is None else p.allowed & everything


def _spread(one: Problem, seen: Bool[Tensor, "r s"]) -> Float[Tensor, "r"]:
    logits = one.scale * (one.q[0, 0].double() @ one.k[0, 0].double().T)
    if one.bias is not None:
        logits = logits + one.bias[0, 0].double()
    ends = logits.masked_fill(~seen, -math.inf).amax(-1), logits.masked_fill(~seen, math.inf).amin(-1)
    return (ends[0] - ends[1]).clamp(min=0).nan_to_num(0.0, 0.0, 0.0)


def _figures(
    weights: Float[Tensor, "r s"],
    seen: Bool[Tensor, "r s"],
    place: Int[Tensor, "r"] | None,
    spread: Float[Tensor, "r"],
    lengths: tuple[float, float, float, float],
) -> HeadFigures:
    many = seen.sum(-1)
    rank = _effective_rank(weights)
    telling = many >= 2
    if bool(telling.any()):
        weights, seen, spread, many = weights[telling], seen[telling], spread[telling], many[telling]
        place = None if place is None else place.to(telling.device)[telling]
    entropy = torch.special.entr(weights).sum(-1)
    tokens = _counted(weights, many.double(), *SHARES).mean(-1).tolist()
    top, flatness = float(weights.amax(-1).mean()), float((entropy.exp() / many).mean())
    local = _local(weights, many, place)
    return HeadFigures(
        _kind(top, local, flatness),
        *lengths,
        float(spread.mean()),
        float(entropy.mean()),
        (tokens[0], tokens[1], tokens[2]),
        float(many.double().mean()),
        rank,
        top,
        float(weights[:, 0].mean()),
        local,
        flatness,
    )


def _kind(top: float, local: float | None, flatness: float) -> HeadKind:
    if top >= 0.5:
        return "copying"
    if local is not None and local >= 0.5:
        return "local"
    return "diffuse" if flatness >= 0.5 else "averaging"


def _local(weights: Tensor, many: Tensor, place: Tensor | None) -> float | None:
    far = many > 4 * NEAR
    if place is None or not bool(far.any()):
        return None
    distance = (torch.arange(weights.shape[-1], device=weights.device) - place.unsqueeze(-1)).abs()
    return float((weights * (distance < NEAR))[far].sum(-1).mean())


def _effective_rank(weights: Float[Tensor, "r s"]) -> float:
    gram = weights @ weights.T
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-300)
    return float(torch.special.entr(share).sum().exp())
