"""Sparse attention on real heads, decoding: tokens and bytes read, bounds and errors.

Every row is one decoding step at its place in the text: its cache holds the keys up to its own and a sketch of their
whole groups, and tokens of the group that is still open are always read. Bytes are those of a half precision cache:
the sketch and the lengths of values for all keys, and the keys and values that are read, once for all query heads that
share them; exact attention reads all keys and values once. Shares are of all steps together, which long ones dominate;
beside them stands the mean over the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from avow.bench.results import Goal, Result, Row
from avow.bench.workloads import read
from avow.core import Problem
from avow.core.certify import certify
from avow.methods.sparse import Sparse
from avow.numerics.heads import per_query_head
from avow.numerics.masks import seen_by
from avow.numerics.sketch import Sketch, sketched
from benchmarks.options import Options

_TOLERANCES = (1e-1, 1e-2, 1e-3)
_CHANCES = (0.0, 1e-3)
# Decoding steps of each layer.
_ROWS = 128
# Layers of the goals: the first layer of the model looks everywhere, and is shown beside them.
_GOALS = ("layer09", "layer18", "layer27")


def run(options: Options) -> Result:
    """All layers in a folder, at every tolerance, deterministic and statistical."""
    assert options.heads is not None
    rows = 2 if options.quick else _ROWS
    table: list[Row] = []
    failures: list[str] = []
    for path in sorted(options.heads.glob("*.safetensors")):
        layer = read(path, causal=True).problem
        methods = [Sparse(drop=drop, chance=chance) for chance in _CHANCES for drop in _TOLERANCES]
        steps = [[_step(p, sketch, method) for method in methods] for p, sketch in _decoding(layer, rows)]
        for method, found in zip(methods, zip(*steps, strict=True), strict=True):
            row, broken = _summed(method, found)
            table.append({"layer": path.stem, **row})
            if broken > method.chance * layer.q.shape[1] * rows:
                failures.append(f"{path.stem}, {method.drop:g}, chance {method.chance:g}: {broken} rows outside bounds")
    title = f"sparse: {rows} decoding steps of every head, 4-bit sketches"
    return Result(title, table if not failures else [], _goals(table), failures=failures)


class _Step(NamedTuple):
    """What one step of decoding came to."""

    keys: int
    read: float
    """Tokens, mean of query heads."""
    bytes_read: float
    bytes_whole: float
    bound: float
    error: float
    broken: int


def _decoding(layer: Problem, rows: int) -> Iterator[tuple[Problem, Sketch]]:
    """Some rows of a layer, each with the keys up to its own and their sketch."""
    n = layer.q.shape[-2]
    some = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:rows].sort().values
    seen = seen_by(layer)
    for row in some.tolist():
        keys = int(seen[0, 0, row].sum())
        q, k, v = layer.q[:, :, row : row + 1].float(), layer.k[:, :, :keys].float(), layer.v[:, :, :keys].float()
        yield Problem.of(q, k, v, scale=layer.scale, enable_gqa=True), sketched(k, 4)


def _step(p: Problem, sketch: Sketch, method: Sparse) -> _Step:
    computed = method.compute(p.measure_norms(), torch.Generator().manual_seed(0), sketch)
    certificate = certify(method, p, computed, 1 - method.chance)
    unit = per_query_head(p.norms.v.amax(-1, keepdim=True), p.q.shape[1])
    errors = torch.linalg.vector_norm(computed.out.double() - method.reference(p), dim=-1) / unit
    keys, full = p.k.shape[-2], 2 * (p.k.shape[-1] + p.v.shape[-1])
    # The sketch, and the lengths of values in half precision.
    sketch_bytes = (sketch.bytes_per_row * sketch.rows + 2 * keys) * p.k.shape[1]
    return _Step(
        keys,
        float(computed.trace.read.mean()),
        sketch_bytes + full * float(computed.trace.distinct.sum()),
        full * keys * p.k.shape[1],
        certificate.bound,
        float(errors.max()),
        int((errors > certificate.rows.reshape(errors.shape) * (1 + 1e-9)).sum()),
    )


def _summed(method: Sparse, steps: Sequence[_Step]) -> tuple[Row, int]:
    row: Row = {
        "tol": method.drop,
        "confidence": 1 - method.chance,
        "tokens": sum(x.read for x in steps) / sum(x.keys for x in steps),
        "tokens, mean of rows": sum(x.read / x.keys for x in steps) / len(steps),
        "bytes": sum(x.bytes_read for x in steps) / sum(x.bytes_whole for x in steps),
        "bytes, mean of rows": sum(x.bytes_read / x.bytes_whole for x in steps) / len(steps),
        "bound": max(x.bound for x in steps),
        "error": max(x.error for x in steps),
    }
    return row, sum(x.broken for x in steps)


def _goals(table: list[Row]) -> list[Goal]:
    def mean(column: str, confidence: float) -> float:
        found = [
            float(row[column] or 0)
            for row in table
            if row["layer"] in _GOALS and row["tol"] == 1e-2 and row["confidence"] == confidence
        ]
        return sum(found) / max(len(found), 1)

    tokens, read, sampled = mean("tokens", 1.0), mean("bytes", 1.0), mean("tokens", 1 - _CHANCES[1])
    return [
        Goal("at most 20% of the tokens at 1e-2, always", f"{tokens:.1%}", tokens <= 0.20),
        Goal("at most 35% of the bytes at 1e-2, always", f"{read:.1%}", read <= 0.35),
        Goal("at most 8% of the tokens at 1e-2, with confidence 0.999", f"{sampled:.1%}", sampled <= 0.08),
    ]
