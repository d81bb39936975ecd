r"""What a block of keys adds to an answer and to its gradients, and how answers of two blocks become one.

A block answers with :math:`o = \sum_j e^{l_j - \ell} v_j` and :math:`\ell = \ln \sum_j e^{l_j}` over the keys that a
row sees, −inf where it sees none. Given the :math:`\ell` of all blocks, the weights of each are known again without the
others, and with :math:`D = \langle do, o \rangle` so are the gradients: :math:`dv = p^T do`,
:math:`dl = p (do\,v^T - D)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from avow.numerics import rounding
from avow.numerics.masks import at_rows, row_tiles

# Rows that look only back are taken so many at a time: few enough to leave out most of what they do not see.
_TALL = 256


def answer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    shift: int | None,
    scale: float,
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]]:
    """The answer of a block and the logarithm of its normaliser; row i sees keys up to i + `shift`, or all."""
    keys, values = _wide(k).mT, _wide(v)
    outs, logs = [], []
    for rows, upto in _tiles(q, k, shift):
        logits = _logits(q[..., rows, :], keys[..., :upto], shift, rows, scale)
        lse = torch.logsumexp(logits, -1, keepdim=True)
        weights = logits.sub_(torch.where(lse > -math.inf, lse, 0.0)).exp_()
        outs.append(_unfolded(weights @ values[..., :upto, :], q.shape[1]))
        logs.append(_unfolded(lse, q.shape[1])[..., 0])
    return torch.cat(outs, -2), torch.cat(logs, -1)


def merged(
    out: Float[Tensor, "b h n e"],
    lse: Float[Tensor, "b h n"],
    other: Float[Tensor, "b h n e"],
    other_lse: Float[Tensor, "b h n"],
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n"]]:
    """The answer to the keys of both, and the logarithm of its normaliser."""
    both = torch.logaddexp(lse, other_lse)
    floor = torch.where(both > -math.inf, both, 0.0)
    mine, theirs = (torch.exp(x - floor).unsqueeze(-1) for x in (lse, other_lse))
    return mine * out + theirs * other, both


def gradients(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    lse: Float[Tensor, "b h n"],
    grad: Float[Tensor, "b h n e"],
    along: Float[Tensor, "b h n"],
    shift: int | None,
    scale: float,
    mask: Bool[Tensor, "#b #h #n s"] | None = None,
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
    """The gradients that flow through a block, from the logarithms of whole normalisers and `along`, D above."""
    keys, values = _wide(k), _wide(v)
    for_keys, for_values, for_queries = torch.zeros_like(keys), torch.zeros_like(values), []
    floor = torch.where(lse > -math.inf, lse, 0.0).to(keys.dtype)
    for rows, upto in _tiles(q, k, shift):
        some, near, worth = q[..., rows, :], keys[..., :upto, :], values[..., :upto, :]
        weights = _logits(some, near.mT, shift, rows, scale)
        if mask is not None:
            seen = at_rows(mask, rows)[..., :upto].expand(*some.shape[:-1], upto)
            weights = weights.masked_fill_(~_folded(seen, keys.shape[1]), -math.inf)
        weights = weights.sub_(_folded(floor[..., rows, None], keys.shape[1])).exp_()
        above = _folded(_wide(grad[..., rows, :]), keys.shape[1])  # (b, g, r·n, e)
        for_values[..., :upto, :] += weights.mT @ above
        slope = (above @ worth.mT).sub_(_folded(along[..., rows, None].to(keys.dtype), keys.shape[1]))
        slope = slope.mul_(weights).mul_(scale)  # by the products q·k
        for_queries.append(_unfolded(slope @ near, q.shape[1]))
        for_keys[..., :upto, :] += slope.mT @ _folded(_wide(some), keys.shape[1])
    return torch.cat(for_queries, -2), for_keys, for_values


def _tiles(q: Tensor, k: Tensor, shift: int | None) -> Iterator[tuple[slice, int]]:
    """Rows to work on at once, and the first key that none of them sees."""
    n, s = q.shape[-2], k.shape[-2]
    for many in row_tiles(n, q.shape[0] * q.shape[1] * s):
        if shift is None:
            yield many, s
            continue
        for start in range(many.start, many.stop, _TALL):
            rows = slice(start, min(start + _TALL, many.stop))
            yield rows, min(max(rows.stop + shift, 0), s)


def _logits(
    q: Float[Tensor, "b h m d"], keys: Float[Tensor, "b g d s"], shift: int | None, rows: slice, scale: float
) -> Float[Tensor, "b g rm s"]:
    logits = (_folded(_wide(q), keys.shape[1]) @ keys).mul_(scale)
    if shift is not None:
        seen = _seen(rows, keys.shape[-1], shift, q.device)
        apart = logits.view(*keys.shape[:2], q.shape[1] // keys.shape[1], *seen.shape)  # (b, g, r, m, s)
        apart.masked_fill_(~seen, -math.inf)
    return logits


def _seen(rows: slice, s: int, shift: int, device: torch.device) -> Bool[Tensor, "m s"]:
    return torch.arange(s, device=device) <= torch.arange(rows.start, rows.stop, device=device)[:, None] + shift


def _wide(x: Tensor) -> Tensor:
    return x.to(rounding.accumulator(x.dtype))


def _folded(x: Float[Tensor, "b h m c"], groups: int) -> Float[Tensor, "b g rm c"]:
    """Rows of the query heads that share a key head, one under the other."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def _unfolded(x: Float[Tensor, "b g rm c"], heads: int) -> Float[Tensor, "b h m c"]:
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads, x.shape[3])
