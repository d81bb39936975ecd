r"""What a block of keys answers to rows, all it takes to merge that with what other blocks answer, and its proof.

The logarithm :math:`\ell` is taken in float64, with :math:`S_i = |scale| \|q_i\| \max_j \|k_j\|` and u the unit of
float64 within

.. math:: \lambda_i = (\gamma_{d+8} + 8u) S_i + \gamma_{s+8} + 8 \cdot 746\,u + 4u |\ell_i|

of the real one: each logit is off by the first term; the terms that matter lie within 746 of the top, so that their
exponentials are right to the third in their logarithms; their sum is by the second, what is stored by the last.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avow.attend import attend
from avow.core import Certificate, Problem
from avow.core.compose import Partial
from avow.core.requirement import Requirement
from avow.distributed.comm_cost import PARTIAL
from avow.errors import ToleranceUnreachable
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.masks import at_rows, row_tiles
from avow.numerics.norms import lengths, row_norms, slack


def answered(
    q: Tensor, k: Tensor, v: Tensor, shift: int | None, scale: float, mask: Bool[Tensor, "#b #h #n s"] | None = None
) -> Partial:
    """What keys answer to rows of which the i-th sees those up to i + `shift`, or all, that the mask lets it see."""
    if shift is not None and shift != 0:
        back = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(shift)
        mask = back if mask is None else mask & back
    p = Problem.of(q, k, v, mask=mask, causal=shift == 0, scale=scale, enable_gqa=True)
    out, certificate = attend(q, k, v, method="exact", mask=mask, causal=p.causal, scale=scale, enable_gqa=True)
    if p.empty:
        return Partial.nothing(out.shape, out.device)
    longest = longest_seen(p, lengths(v)).expand(out.shape[:-1])
    lse = _logarithms(p)
    u, (d, s) = rounding.unit(torch.float64), (q.shape[-1], k.shape[-2])
    keys = per_query_head(row_norms(k, "k").amax(-1, keepdim=True), q.shape[1])
    queries = row_norms(q, "q")
    reach = abs(p.scale) * queries * keys
    off = (rounding.gamma(d + 8, u) + 8 * u) * reach + rounding.gamma(s + 8, u) + 8 * 746 * u + 4 * u * lse.abs()
    off = off + rounding.misread_logits(queries, keys, p.scale, d, q.dtype)
    off = off * rounding.SAFETY + 4 * d * rounding.tiny(torch.float64) * max(1.0, abs(p.scale))
    return Partial.of(out, lse, off, longest, certificate, slack(v.shape[-1], torch.float64))


def unreachable(wish: Requirement, bound: float, relative: float) -> ToleranceUnreachable:
    """The error for a tolerance that no available arithmetic proves: at best it proves these."""
    own = wish.tol is None or bound <= wish.tol
    name, limit, best = ("rtol", wish.rtol, relative) if own else ("tol", wish.tol, bound)
    rule = f"is less than can be proved, {best:.3g}"
    return ToleranceUnreachable(name, limit, rule, "ask for less, or convert q, k and v to a wider type", best)


def packed(part: Partial) -> Float64[Tensor, "b h n c"]:
    """All the numbers of a row side by side."""
    one_each = (part.lse, part.longest, part.pairs, part.unsure, part.drift, *part.means)
    return torch.cat([torch.stack(one_each, -1), part.out], -1)


def unpacked(x: Float64[Tensor, "b h n c"], words: Certificate | None, loose: float) -> Partial:
    """The part whose numbers were packed; what it says and how loose its norms are travel apart."""
    lse, longest, pairs, unsure, drift, *means = x[..., :PARTIAL].unbind(-1)
    return Partial(x[..., PARTIAL:], lse, longest, torch.stack(means), pairs, unsure, drift, loose, words)


def _logarithms(p: Problem) -> Float64[Tensor, "b h n"]:
    keys = per_query_head(p.k.double(), p.q.shape[1]).mT
    n, s = p.q.shape[-2], p.k.shape[-2]
    found = []
    for rows in row_tiles(n, p.q.shape[0] * p.q.shape[1] * s):
        logits = p.scale * (p.q[..., rows, :].double() @ keys)
        if p.allowed is not None:
            logits = torch.where(at_rows(p.allowed, rows), logits, -math.inf)
        if p.causal:
            place = torch.arange(n, device=logits.device)[rows, None]
            logits = torch.where(torch.arange(s, device=logits.device) <= place, logits, -math.inf)
        found.append(torch.logsumexp(logits, -1))
    return torch.cat(found, -1)
