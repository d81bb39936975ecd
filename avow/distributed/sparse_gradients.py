r"""Gradients of an answer that shards gave from a part of their tokens: those of the part that was kept.

Which tokens count, and by what odds, is taken as given. With :math:`\ell` the logarithm of the normaliser of what all
shards kept, :math:`p_j = e^{l_j - \log odds_j - \ell}` and :math:`D = \langle do, o \rangle`, each shard knows the
gradients of its own tokens, :math:`dv_j = p_j\,do` and :math:`dl_j = p_j (\langle do, v_j \rangle - D)`; tokens that
were not kept have none. Those of the queries add up over shards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.distributed.protocols import Protocol, all_reduce
from avow.distributed.sparse_reports import Reading


class Gradients(NamedTuple):
    """Those of all queries, and of this shard's keys and values."""

    q: Float64[Tensor, "b h n d"]
    k: Float64[Tensor, "b g s d"]
    v: Float64[Tensor, "b g s e"]


def gradient_script(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    grad: Float[Tensor, "b h n e"],
    reading: Reading,
    scale: float,
    ranks: int,
) -> Protocol[Gradients]:
    """The gradients that a shard gets from that of the answer, which is the same in all shards."""
    groups, d, e = k.shape[1], k.shape[-1], v.shape[-1]
    for_queries, for_keys, for_values = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    flat_keys, flat_values = (x.flatten(0, 1) for x in (k, v))  # (bg, s, c)
    to_keys, to_values = (x.flatten(0, 1) for x in (for_keys, for_values))
    for kept in reading.kept:
        asked, above, out = (_rows(x, kept.rows, groups) for x in (q, grad, reading.out))  # (bg, r, c)
        lse = _rows(reading.lse.unsqueeze(-1), kept.rows, groups).squeeze(-1)  # (bg, r)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # where nothing is kept, nothing has a weight
        along = (above * out).sum(-1)
        found = torch.zeros_like(asked)
        for head in kept.head.unique().tolist():
            these = kept.head == head
            place = kept.place[these]
            weights = (kept.logs[these] - lse[head]).exp()  # (m, r)
            keys, values = flat_keys[head, place].double(), flat_values[head, place].double()
            slope = weights * (values @ above[head].T - along[head]) * scale  # by the products q·k
            to_values[head, place] += weights @ above[head]
            to_keys[head, place] += slope @ asked[head]
            found[head] = slope.T @ keys
        some = for_queries[:, :, kept.rows]
        some += found.reshape(some.shape)
    for_queries = yield from all_reduce(for_queries, ranks)
    return Gradients(for_queries, to_keys.reshape(*k.shape[:3], d), to_values.reshape(*v.shape[:3], e))


def _rows(x: Float[Tensor, "b h n c"], rows: slice, groups: int) -> Float64[Tensor, "bg r c"]:
    """Some rows of query heads, as rows of the key head they share."""
    part = x[:, :, rows].double()
    return part.reshape(part.shape[0] * groups, -1, part.shape[-1])
