"""What shards of the keys promise merges into what the whole promises, whatever the order, and never less than the truth.

Shards here report errors that are exactly as large as the ones they make, so that a bound has nothing to hide behind.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import avow
from avow.certificates import compose
from avow.certificates.compose import Partial, merge
from avow.contract import Certificate, Kind
from avow.errors import AvowError
from avow.maths import rounding
from avow.maths.norms import row_norms, slack
from avow.maths.softmax import softmax_average

Wide = np.ndarray[Any, np.dtype[np.longdouble]]


class Case(NamedTuple):
    """Rows over shards: logits (rows, shards, keys), −inf where hidden, and values (rows, shards, keys, e)."""

    logits: Wide
    values: Wide


class Truth(NamedTuple):
    """Every shard's own answer, logarithm and longest value, in extended precision."""

    out: Wide
    lse: Wide
    longest: Wide


def wide(x: Tensor) -> Wide:
    return x.double().numpy().astype(np.longdouble)


def norms(x: Wide) -> Wide:
    top = np.abs(x).max(-1, keepdims=True)
    safe = np.where(top > 0, top, 1)
    return np.asarray(safe[..., 0] * np.sqrt(((x / safe) ** 2).sum(-1)), dtype=np.longdouble)


def attention(logits: Wide, values: Wide) -> Truth:
    """Softmax averages over the last axis of the logits."""
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(logits - top)
    total = weights.sum(-1)
    some = np.where(total > 0, total, 1)
    out = (weights[..., None] * values).sum(-2) / some[..., None]
    lse = np.where(total > 0, top[..., 0] + np.log(some), -np.inf)
    return Truth(out, lse, np.where(logits > -np.inf, norms(values), 0).max(-1))


def whole(case: Case) -> Truth:
    rows, width = len(case.logits), case.values.shape[-1]
    return attention(case.logits.reshape(rows, -1), case.values.reshape(rows, -1, width))


def upward(x: Wide) -> Tensor:
    """The float64 just above."""
    return torch.from_numpy(np.nextafter(x.astype(np.float64), np.inf))


def words(rows: Tensor, kind: Kind = "deterministic", confidence: float = 1.0) -> Certificate:
    bound = float(rows.amax()) if rows.numel() else 0.0
    return Certificate("exact", {}, "softmax attention", kind, bound, rows, confidence)


def report(truth: Truth, i: int, out: Tensor, lse: Tensor, confidence: float = 1.0) -> Partial:
    """The report of shard i that answers `out` and `lse`: its errors as large as they are, and no larger."""
    longest = truth.longest[:, i]
    seen = np.isfinite(truth.lse[:, i])
    off = np.abs(wide(lse) - np.where(seen, truth.lse[:, i], 0))
    far = norms(wide(out) - truth.out[:, i]) / np.where(longest > 0, longest, 1)
    said = words(upward(np.where(seen, far, 0)), "deterministic" if confidence == 1 else "statistical", confidence)
    return Partial.of(out, lse, upward(np.where(seen, off, 0)), upward(longest), said, slack=1e-15)


def liars(case: Case, error: float, stray: float, dtype: torch.dtype = torch.float64) -> list[Partial]:
    """Shards that err by up to so much in their answers and logarithms, mostly to one side."""
    truth = attention(*case)
    rows, shards = truth.lse.shape
    parts = []
    for i in range(shards):
        away = torch.from_numpy((truth.out[:, i] + truth.longest[:, i, None] / 2).astype(np.float64))
        size = torch.rand(rows, 1, dtype=torch.float64) * error
        out = (torch.from_numpy(truth.out[:, i].astype(np.float64)) + size * away).to(dtype)
        side = (torch.randint(2, (rows,)) * 2 - 1) * torch.rand(rows, dtype=torch.float64).sqrt()
        lse = torch.from_numpy(truth.lse[:, i].astype(np.float64)) + side * stray
        parts.append(report(truth, i, out, lse))
    return parts


def errors(out: Tensor, case: Case) -> Wide:
    """How far every row really is from the truth, in the unit of certificates."""
    truth = whole(case)
    distance = norms(wide(out) - truth.out)
    return np.asarray(distance / np.where(truth.longest > 0, truth.longest, 1), dtype=np.longdouble)


def broken(out: Tensor, bounds: Tensor, case: Case) -> int:
    return int((errors(out, case) > wide(bounds)).sum())


def fold(parts: Iterable[Partial]) -> Partial:
    return functools.reduce(merge, parts)


def draw(rows: int, shards: int = 4, keys: int = 3, width: int = 3, temper: float = 3.0) -> Case:
    logits = temper * torch.randn(rows, shards, keys)
    # Values of a shard point one way and those of the next another: what moves a weight moves the answer.
    values = torch.randn(rows, shards, keys, width) + 4 * torch.randn(rows, shards, 1, width).sign()
    return Case(wide(logits), wide(values))


def spread(case: Case, logits: float, low: float, high: float) -> Case:
    """Shards moved apart in their logits, and values anywhere between 10^low and 10^high."""
    rows, shards, _ = case.logits.shape
    apart = wide(logits * (2 * torch.rand(rows, shards, 1) - 1))
    sizes = 10.0 ** wide(low + (high - low) * torch.rand(rows, shards, 1, 1))
    return Case(rounded(case.logits + apart), rounded(case.values * sizes))


def rounded(x: Wide) -> Wide:
    return x.astype(np.float64).astype(np.longdouble)


def hidden(case: Case, share: float) -> Case:
    """Keys hidden at random, whole shards of some rows, and everything from the first rows."""
    rows, shards, keys = case.logits.shape
    seen = (torch.rand(rows, shards, keys) > share) & (torch.rand(rows, shards, 1) > share)
    seen[: rows // 100] = False
    return Case(np.where(seen.numpy(), case.logits, -np.inf), case.values)


def tied(case: Case) -> Case:
    return Case(np.zeros_like(case.logits), np.sign(case.values))


ROWS = 10_000
HOSTILE: dict[str, Callable[[], tuple[Case, list[Partial]]]] = {}


def hostile(make: Callable[[], tuple[Case, float, float]]) -> None:
    def made(dtype: torch.dtype = torch.float64) -> tuple[Case, list[Partial]]:
        case, error, stray = make()
        return case, liars(case, error, stray, dtype)

    HOSTILE[make.__name__] = made


def cases() -> dict[str, tuple[Case, float, float, torch.dtype]]:
    double, half, brain = torch.float64, torch.float16, torch.bfloat16
    return {
        "plain": (draw(ROWS), 1e-2, 1e-2, double),
        "rounding alone": (draw(ROWS), 0.0, 0.0, double),
        "large errors": (draw(ROWS, temper=1.0), 0.5, 2.0, double),
        "normalisers hardly known": (spread(draw(ROWS), 30, -3, 3), 1e-3, 40.0, double),
        "one shard has all": (spread(draw(ROWS), 900, -2, 2), 1e-4, 1.0, double),
        "ties": (tied(draw(ROWS)), 1e-3, 1e-3, double),
        "one key each": (draw(ROWS, keys=1, shards=6), 0.0, 1e-6, double),
        "hidden": (hidden(draw(ROWS), 0.4), 1e-2, 1e-1, double),
        "huge values": (spread(draw(ROWS), 5, 150, 299), 1e-6, 1e-3, double),
        "tiny values": (spread(draw(ROWS), 5, -320, -200), 1e-6, 1e-3, double),
        "all sizes at once": (hidden(spread(draw(ROWS), 50, -300, 299), 0.2), 1e-3, 1e-2, double),
        "huge logits": (spread(draw(ROWS), 1e17, 0, 1), 0.0, 0.0, double),
        "large logits": (spread(draw(ROWS, temper=1.0), 1e-3, 0, 1), 0.0, 0.0, double),
        "half": (hidden(draw(ROWS), 0.1), 0.0, 1e-3, half),
        "brain": (hidden(draw(ROWS), 0.1), 0.0, 1e-2, brain),
        "nothing at all": (hidden(draw(ROWS), 1.0), 0.0, 0.0, double),
    }


def test_merged_certificates_hold_in_160000_hostile_rows() -> None:
    judged = 0
    for name, (case, error, stray, dtype) in cases().items():
        merged = fold(liars(case, error, stray, dtype))
        for kind in {torch.float64, dtype}:
            out, certificate = merged.answer(kind)
            assert not bool(certificate.rows.isnan().any()), name
            assert broken(out, certificate.rows, case) == 0, name
        judged += len(certificate.rows)
    assert judged >= 100_000
