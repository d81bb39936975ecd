"""Averages of all keys behind each of many horizons, and rows that read them beside what is near.

Sums are kept relative to a running maximum of the logs per latent, as online softmax keeps its weights, so that one
pass over the segments gives every horizon its averages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

# Logits of a tile of segments, all heads: enough to keep a device busy, little enough to stay near it.
TILE = 2**22


class Past(NamedTuple):
    """What latents hold of the keys behind a horizon: sums of keys, values and ones, relative to exp(reference)."""

    reference: Float[Tensor, "*lead m"]
    sums: Float[Tensor, "*lead m c"]


class Shown(NamedTuple):
    """What the rows of a segment read: latents with the log of their mass, and near keys with what is added to them."""

    latent_keys: Float[Tensor, "b g t m d"]
    latent_values: Float[Tensor, "b g t m e"]
    mass: Float[Tensor, "b g t 1 1"]
    keys: Float[Tensor, "b g t l d"]
    values: Float[Tensor, "b g t l e"]
    added: Float[Tensor, "#b #g t #i l"]


def nothing(keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"], latents: int) -> Past:
    """What latents hold before any key."""
    lead, columns = values.shape[:2], keys.shape[-1] + values.shape[-1] + 1
    return Past(values.new_full((*lead, latents), -math.inf), values.new_zeros(*lead, latents, columns))


def horizons(
    log: Float[Tensor, "b g t l m"], k: Float[Tensor, "b g t l d"], v: Float[Tensor, "b g t l e"], past: Past
) -> tuple[Past, Past, Int[Tensor, "b g m"]]:
    """What latents hold before each of some segments, and after all; how often references rose. Overwrites `log`."""
    tops = log.detach().amax(-2).cummax(2).values
    after = torch.maximum(tops, past.reference.unsqueeze(2))  # (b, g, t, m)
    before = torch.cat([past.reference.unsqueeze(2), after[:, :, :-1]], 2)
    reference = after.masked_fill(after == -math.inf, 0.0)
    weights = log.sub_(reference.unsqueeze(-2)).exp_()
    own = weights.mT @ torch.cat([k, v, torch.ones_like(k[..., :1])], -1)  # (b, g, t, m, c)
    held = before > -math.inf
    shrink = torch.where(held, torch.exp(before - reference), 0.0).unsqueeze(-1)
    sums = [past.sums]
    for index in range(own.shape[2]):
        sums.append(torch.addcmul(own[:, :, index], sums[-1], shrink[:, :, index]))
    rises = (held & (after > before)).sum(2)
    return Past(before, torch.stack(sums[:-1], 2)), Past(after[:, :, -1], sums[-1]), rises


def averages(past: Past, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and the log of the mass of every latent: its share of all it stands for."""
    keys, values, total = past.sums.split((dim, past.sums.shape[-1] - dim - 1, 1), -1)
    # A visible key contributes one; latents that hold nothing have no mass, and any keys and values will do.
    some = total.clamp(min=1.0 / 4)
    mean = total[..., :1, :]
    log = torch.where(mean > 0, some[..., :1, :].log(), -math.inf)  # (…, 1, 1)
    reference = past.reference[..., :1, None].masked_fill(past.reference[..., :1, None] == -math.inf, 0.0)
    return keys / some, values / some, reference + log - math.log(past.sums.shape[-2])


def cut(x: Tensor, span: slice, size: int, fill: float) -> Tensor:
    """A span of positions in segments; what lies beyond the last position is `fill`."""
    piece = x[..., span, :]
    short = span.stop - span.start - piece.shape[-2]
    piece = pad(piece, (0, 0, 0, short), value=fill) if short else piece
    return piece.unflatten(-2, (-1, size))


def softmax_and_log(log: Float[Tensor, "*lead c"]) -> tuple[Tensor, Tensor]:
    """The softmax, zero where there is nothing; and the log of its normaliser."""
    top = log.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(log - top)
    total = weights.sum(-1, keepdim=True)
    some = total.clamp(min=1.0 / 4)  # the largest weight is one, where there is any
    return weights / some, torch.where(total > 0, top + some.log(), -math.inf)


def read(q: Float[Tensor, "b g t r l d"], shown: Shown, scale: float) -> Float[Tensor, "b g t r l e"]:
    """What rows collect from the latents and the near keys of their segment."""
    rows = q.flatten(3, 4)  # (b, g, t, r·l, d)
    far = (rows @ shown.latent_keys.mT).mul_(scale).add_(shown.mass).unflatten(3, q.shape[3:5])
    near = (rows @ shown.keys.mT).mul_(scale).unflatten(3, q.shape[3:5]).add_(shown.added.unsqueeze(3))
    top = torch.maximum(far.detach().amax(-1, keepdim=True), near.detach().amax(-1, keepdim=True))
    top = top.masked_fill(top == -math.inf, 0.0)
    far, near = far.sub_(top).exp_(), near.sub_(top).exp_()
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    out = far.flatten(3, 4) @ shown.latent_values + near.flatten(3, 4) @ shown.values
    return out.unflatten(3, q.shape[3:5]) / total.clamp(min=1.0 / 4)


def last_to_show(last: Shown | None, shown: Shown) -> tuple[Shown, Shown]:
    """For each segment the last one before it with a visible key, whole; and the last of all, for the next tile."""
    b, g, t = shown.keys.shape[:3]
    shown = shown._replace(added=shown.added.expand(b, g, -1, -1, -1))
    if last is None:
        silent = (torch.zeros_like(x[:, :, :1]) for x in shown)
        last = Shown(*silent)._replace(
            mass=torch.full_like(shown.mass[:, :, :1], -math.inf),
            added=torch.full_like(shown.added[:, :, :1], -math.inf),
        )
    joined = [torch.cat(pair, 2) for pair in zip(last, shown, strict=True)]
    some = (shown.added > -math.inf).flatten(3).any(-1)  # (b, g, t)
    index = torch.where(some, torch.arange(1, t + 1, device=some.device), 0).cummax(2).values
    index = pad(index, (1, 0))[..., None, None]  # (b, g, t + 1, 1, 1)
    chosen = [torch.take_along_dim(x, index, 2) for x in joined]
    return Shown(*(x[:, :, :-1] for x in chosen)), Shown(*(x[:, :, -1:] for x in chosen))
