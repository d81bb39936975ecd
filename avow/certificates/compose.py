"""Certificates of parts make the certificate of the whole: over heads, over a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from avow.contract import Certificate, Kind
from avow.errors import InputError

_STRENGTH: dict[Kind, int] = {"deterministic": 3, "statistical": 2, "sampled": 1, "none": 0}


def compose(parts: Sequence[Certificate], dim: int) -> Certificate:
    """The certificate of answers concatenated along an axis of their rows: as strong as the weakest part.

    Statistical promises are made row by row, so the smallest confidence holds for each. Sampled promises speak of
    all rows at once: their failures add up, and coverage is averaged by rows.
    """
    if not parts:
        raise InputError("parts", "[]", "must hold at least one certificate", "pass the certificates of the parts")
    targets = {part.target for part in parts}
    if len(targets) > 1:
        named = ", ".join(sorted(targets))
        raise InputError("parts", named, "must approximate one target", "compose certificates of one mechanism")
    kinds = {part.kind for part in parts}
    if {"statistical", "sampled"} <= kinds:
        rule = "speak of single rows and of shares of rows, which do not add up"
        raise InputError("parts", "statistical and sampled", rule, "audit the whole answer instead")
    weakest = min(parts, key=lambda part: _STRENGTH[part.kind])
    rows = torch.cat([part.rows for part in parts], dim)
    sizes = [part.rows.numel() for part in parts]
    coverage = sum(part.coverage * size for part, size in zip(parts, sizes, strict=True)) / max(sum(sizes), 1)
    confidence = min(part.confidence for part in parts)
    if weakest.kind == "sampled":
        confidence = max(0.0, 1 - sum(1 - part.confidence for part in parts))
    costs = [part.cost for part in parts if part.cost is not None]
    return dataclasses.replace(
        weakest,
        method=" + ".join(dict.fromkeys(part.method for part in parts)),
        parameters=weakest.parameters if len({part.method for part in parts}) == 1 else {},
        bound=max(part.bound for part in parts),
        rows=rows,
        confidence=confidence,
        coverage=coverage if sum(sizes) else 1.0,
        rounding=all(part.rounding for part in parts),
        assumptions=tuple(dict.fromkeys(sentence for part in parts for sentence in part.assumptions)),
        cost=sum(costs[1:], costs[0]) if len(costs) == len(parts) else None,
    )
