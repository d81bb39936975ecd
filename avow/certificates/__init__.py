"""What is promised of an answer: made, audited, composed."""

from __future__ import annotations

import torch
from torch import Tensor

from avow.contract import Certificate, Computed, Method, Norms, Problem
from avow.maths.norms import check_range, row_norms, slack


def measure_norms(p: Problem) -> Norms:
    """Norms of every row, after the checks that need to read the numbers: finite, and within float64's reach."""
    with torch.no_grad():
        norms = Norms(
            row_norms(p.q, "q"), row_norms(p.k, "k"), row_norms(p.v, "v"), slack(max(p.q.shape[-1], p.v.shape[-1]), p.q.dtype)
        )
        largest = [float(x.amax()) if x.numel() else 0.0 for x in (norms.q, norms.k, norms.v)]
        check_range(*largest, p.scale)
    return norms


def certify(
    method: Method, p: Problem, norms: Norms, computed: Computed, confidence: float, reason: str = ""
) -> Certificate:
    """The certificate of an answer just computed."""
    if p.empty:
        rows = p.q.new_zeros(p.q.shape[:-1], dtype=torch.float64)
        return _signed(method, p, rows, "deterministic", 1.0, ("there was nothing to attend to",), reason)
    with torch.no_grad():
        promise = method.promise(p.detached(), norms, computed, confidence)
    reason = reason or promise.reason
    return _signed(method, p, promise.rows, promise.kind, promise.confidence, promise.assumptions, reason)


def _signed(method, p, rows, kind, confidence, assumptions, reason):  # type: ignore[no-untyped-def]
    shaped: Tensor = rows.reshape(*p.leading, p.q.shape[-2])
    bound = float(shaped.amax()) if shaped.numel() else 0.0
    return Certificate(
        method=method.name,
        parameters=method.parameters,
        target=method.target,
        kind=kind,
        bound=bound,
        rows=shaped,
        confidence=confidence,
        assumptions=assumptions,
        reason=reason,
        cost=method.cost(p.sizes),
    )
