"""Every answer of every layer of a model, recomputed in float64 from what transformers passed to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from avow.core import Certificate
from avow.core.record import record
from avow.decode import key_value_cache


def ask_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have caches ask their sketch wherever there is a tolerance, also where reading everything would be faster."""
    monkeypatch.setattr(key_value_cache, "SHORTEST", 0)


class Audited(NamedTuple):
    """One answer: its certificate, and the true error of each of its rows."""

    certificate: Certificate
    errors: Tensor

    @property
    def kept(self) -> bool:
        return bool((self.errors <= self.certificate.rows).all())


def truth(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Softmax attention by its definition, and the longest value that each row sees."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    scale = more.get("scaling")
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)  # (b, h, n, s)
    own = more.get("is_causal")
    if mask is None and (getattr(module, "is_causal", True) if own is None else own) and q.shape[2] > 1:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    if more.get("position_bias") is not None:
        logits = logits + more["position_bias"].double()
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
    seen = logits > -1e30
    weights = torch.where(seen.any(-1, keepdim=True), torch.softmax(logits, -1), 0.0).nan_to_num(0.0)
    longest = torch.where(seen, torch.linalg.vector_norm(v, dim=-1).unsqueeze(-2), 0.0).amax(-1)
    return weights @ v, longest


@contextlib.contextmanager
def audited(name: str = "avow") -> Iterator[list[Audited]]:
    """The audits of all answers given under an implementation's name, as long as the block runs."""
    found: list[Audited] = []
    forward = AttentionInterface._global_mapping[name]

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
        with record() as certificates:
            out, weights = forward(module, query, key, value, mask, **more)
        (entry,) = certificates
        wanted, longest = truth(module, query, key, value, mask, **more)
        off = torch.linalg.vector_norm(out.transpose(1, 2).double() - wanted, dim=-1)  # (b, h, n)
        errors = torch.where(longest > 0, off / longest.clamp(min=1e-300), off)
        found.append(Audited(entry.certificate, errors.detach()))
        return out, weights

    AttentionInterface.register(name, watched)
    try:
        yield found
    finally:
        AttentionInterface.register(name, forward)
