"""What is promised of an answer: made, audited, composed."""

from __future__ import annotations

import torch

from avow.contract import Certificate, Computed, Method, Norms, Problem, Promise, check_numbers
from avow.maths.norms import check_range, row_norms, slack


def measure_norms(p: Problem) -> Norms:
    """Norms of every row, after the checks that need to read the numbers: finite, and within float64's reach."""
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v)):
        check_numbers(name, x)
    with torch.no_grad():
        values = row_norms(p.v, "v", faithful=True)
        widest = max(p.q.shape[-1], p.v.shape[-1])
        norms = Norms(row_norms(p.q, "q"), row_norms(p.k, "k"), values, slack(widest, p.q.dtype))
        check_range(*norms.most, p.scale)
    return norms


def certify(method: Method, p: Problem, norms: Norms, computed: Computed, confidence: float) -> Certificate:
    """The certificate of an answer just computed."""
    if p.empty:
        rows = p.q.new_zeros(p.q.shape[:-1], dtype=torch.float64)
        promise = Promise("deterministic", rows, assumptions=("there was nothing to attend to",))
    else:
        with torch.no_grad():
            promise = method.promise(p.detached(), norms, computed, confidence)
    shaped = promise.rows.reshape(*p.leading, p.q.shape[-2])
    return Certificate(
        method=method.name,
        parameters=method.parameters,
        target=method.target,
        kind=promise.kind,
        bound=float(shaped.amax()) if shaped.numel() else 0.0,
        rows=shaped,
        confidence=promise.confidence,
        coverage=promise.coverage,
        assumptions=promise.assumptions,
        reason=promise.reason,
        cost=method.cost(p.sizes),
    )
