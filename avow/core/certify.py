"""What is promised of an answer: made, audited, composed."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from avow.core import SOFTMAX, Certificate, Computed, Method, Problem, Promise
from avow.core.relative import relative_rows
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.norms import at_least, lengths

# Less than SAFETY adds to any bound.
_NOTHING = 1e-22


def certify(method: Method, p: Problem, computed: Computed, confidence: float) -> Certificate:
    """The certificate of an answer just computed."""
    if p.empty:
        rows = p.q.new_zeros(p.q.shape[:-1], dtype=torch.float64)
        promise, own = Promise("deterministic", rows, assumptions=("there was nothing to attend to",)), rows
    else:
        with torch.no_grad():
            p = p.measured().detached()
            promise = method.promise(p, computed, confidence)
            promise = dataclasses.replace(promise, rows=promise.rows + _subnormal_charge(method, p))
            own = relative_rows(p, computed.out, promise.rows)
    bound, relative = _largest(promise.rows, own)
    if bound > 1 and method.averages and promise.kind != "none":
        with torch.no_grad():
            promise = dataclasses.replace(promise, rows=torch.minimum(promise.rows, _trivial(p, computed.out)))
            own = relative_rows(p, computed.out, promise.rows)
        bound, relative = _largest(promise.rows, own)
    shaped, own = (x.reshape(*p.leading, p.q.shape[-2]) for x in (promise.rows, own))
    return Certificate(
        method=method.name,
        parameters=method.parameters,
        target=method.target,
        kind=promise.kind,
        bound=bound,
        rows=shaped,
        confidence=promise.confidence,
        coverage=promise.coverage,
        assumptions=promise.assumptions,
        reason=promise.reason,
        cost=method.cost(p.sizes),
        relative=relative,
        relative_rows=own,
    )


def _largest(*rows: Tensor) -> list[float]:
    """The largest entries of some tensors, brought from a device in one transfer."""
    return torch.stack([x.amax() for x in rows]).tolist() if rows[0].numel() else [0.0] * len(rows)


def _subnormal_charge(method: Method, p: Problem) -> Tensor | float:
    """What it costs each row that subnormal numbers among the inputs may have been read as zeros.

    Methods promise what they owe to the numbers they read. Logits move little, and values by less than they are long.
    """
    norms = p.norms
    rows: Tensor | float = 0.0
    if method.target == SOFTMAX:
        query, key, _ = norms.most
        if rounding.misread_logits(query, key, p.scale, p.q.shape[-1], p.q.dtype) > _NOTHING:
            keys = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
            moved = rounding.misread_logits(norms.q, keys, p.scale, p.q.shape[-1], p.q.dtype)
            rows = rounding.softmax_l1_bound(moved) * rounding.SAFETY
    unread = math.sqrt(p.v.shape[-1]) * rounding.largest_subnormal(p.q.dtype)
    if unread > _NOTHING * norms.least_value:
        longest, unit = _longest_value_range(p)
        rows = rows + torch.where(longest > 0, (torch.full_like(unit, unread) / unit).clamp(max=1.0), 0.0)
    return rows


def _trivial(p: Problem, out: Tensor) -> Tensor:
    """No answer is further from an average of the values that its row sees than both are long."""
    longest, unit = _longest_value_range(p)
    return torch.where(longest > 0, (lengths(out) + longest) * rounding.SAFETY / unit, math.inf)


def _longest_value_range(p: Problem) -> tuple[Tensor, Tensor]:
    """At least and at most the length of the longest value that each row sees."""
    norms = p.norms
    if p.allowed is None or norms.v.shape[-1] == p.v.shape[-2]:
        most = least = longest_seen(p, norms.v)
    else:  # a cache knows the shortest and the longest of its values, and not which of them a mask shows
        least, most = (per_query_head(x.unsqueeze(-1), p.q.shape[1]) for x in (norms.v.amin(-1), norms.v.amax(-1)))
    return most, at_least(least, norms.slack, p.v.shape[-1])
