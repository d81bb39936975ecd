"""Tokens and queries for caches, the truth about their answers, and what certificates say they read."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from avow.core import Certificate
from avow.nn import KeyValueCache
from avow.numerics.heads import per_query_head

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tokens(cache: KeyValueCache, count: int, loud: float = 1.0) -> tuple[Tensor, Tensor]:
    lead = cache.batch, cache.key_heads, count
    return (
        (loud * torch.randn(*lead, cache.dim)).to(cache.dtype),
        torch.randn(*lead, cache.value_dim).to(cache.dtype),
    )


def queries(k: Tensor, heads: int, n: int = 1, sharp: float = 3.0) -> Tensor:
    """Queries near some of the keys: heads that look at few tokens, as trained ones do."""
    aims = k[:, :, torch.randint(k.shape[2], (n,))].repeat_interleave(heads // k.shape[1], 1)
    return (sharp * aims.double() + torch.randn(aims.shape)).to(k.dtype)


def errors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """How far each row of the last n is from the truth in float64, in units of the longest value that it sees."""
    n, s, heads = q.shape[2], k.shape[2], q.shape[1]
    own, at = torch.arange(s - n, s)[:, None], torch.arange(s)
    seen = (at <= own) & (at > own - (s if window is None else window))
    wide = [per_query_head(x.double(), heads) for x in (k, v)]
    logits = (q.double() @ wide[0].transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(*logits.shape[:3], 1)], -1)
    truth = torch.softmax(logits, -1)[..., :s] @ wide[1]
    lengths = torch.linalg.vector_norm(wide[1], dim=-1).unsqueeze(-2)
    unit = torch.where(seen, lengths, 0.0).amax(-1)
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / unit


def share(certificate: Certificate) -> float:
    """The part of the tokens that a certificate says were read."""
    found = re.match(r"read (\d+\.\d)% of the tokens in full", certificate.reason)
    assert found, certificate.reason
    return float(found[1]) / 100


def filled(**options: Any) -> KeyValueCache:
    cache = KeyValueCache(2, 16, value_dim=8, **options)
    for count in (100, 1, 200):
        cache.append(*tokens(cache, count))
    return cache
