"""Shards whose errors are known exactly: each reports errors as large as those it makes, and no larger."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from avow.core import Certificate, Kind
from avow.core.compose import Partial, merge

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


def lifted(case: Case, by: float) -> Case:
    return Case(rounded(case.logits + by), case.values)


def tied(case: Case) -> Case:
    return Case(np.zeros_like(case.logits), np.sign(case.values))


def keyed(*pairs: tuple[float, float]) -> Case:
    """One row, one key a shard: its logit and its value."""
    logits, values = zip(*pairs, strict=True)
    return Case(wide(torch.tensor(logits)).reshape(1, -1, 1), wide(torch.tensor(values)).reshape(1, -1, 1, 1))
