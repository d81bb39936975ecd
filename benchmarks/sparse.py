"""Sparse attention on real heads, decoding: tokens and bytes read, bounds and errors: `python -m benchmarks.sparse`.

Every row is one decoding step at its place in the text: it sees all keys up to its own. Bytes are those of a half
precision cache: the sketch and the lengths of values for all keys, and the keys and values that are read, once for all
query heads that share them; exact attention reads all keys and values once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from avow.bench.machine import machine
from avow.bench.results import Goal, Result, Row
from avow.certificates import certify, measure_norms
from avow.contract import Problem
from avow.maths.masks import visible, visible_max
from avow.maths.sketch import sketched
from avow.methods.sparse import Sparse
from avow.workloads import read

_TOLERANCES = (1e-1, 1e-2, 1e-3)
_CHANCES = (0.0, 1e-3)
# Layers of the goals: the first layer of the model looks everywhere, and is shown beside them.
_GOALS = ("layer09", "layer18", "layer27")


def run(folder: Path, rows: int) -> Result:
    """All layers in a folder, at every tolerance, deterministic and statistical."""
    table, failures = [], []
    for path in sorted(folder.glob("*.safetensors")):
        p, keys = _decoding(read(path, causal=True).problem, rows)
        for chance in _CHANCES:
            for drop in _TOLERANCES:
                row, broken = _point(p, keys, Sparse(drop=drop, chance=chance))
                table.append({"layer": path.stem} | row)
                if broken > chance * p.q.shape[1] * p.q.shape[2]:
                    failures.append(f"{path.stem}, {drop:g}, chance {chance:g}: {broken} rows outside their bounds")
    title = f"sparse: {rows} decoding steps of every head, 4-bit sketches"
    return Result(title, table if not failures else [], _goals(table), failures=failures)


def _decoding(layer: Problem, rows: int) -> tuple[Problem, Tensor]:
    """Some rows of a layer, and how many keys each sees."""
    n, s = layer.q.shape[-2], layer.k.shape[-2]
    some = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:rows].sort().values
    seen = visible(layer.allowed, layer.causal, n, s, layer.q.device)
    assert seen is not None
    q, k, v = layer.q[:, :, some].float(), layer.k.float(), layer.v.float()
    mask = seen[0, 0, some]
    return Problem.of(q, k, v, mask=mask, scale=layer.scale, enable_gqa=True), mask.sum(-1)


def _point(p: Problem, keys: Tensor, method: Sparse) -> tuple[Row, int]:
    norms = measure_norms(p)
    computed = method.compute(p, torch.Generator().manual_seed(0))
    certificate = certify(method, p, norms, computed, 1 - method.chance)
    lengths = norms.v.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    unit = visible_max(lengths, p.allowed, p.causal, p.q.shape[-2], 0.0)
    errors = torch.linalg.vector_norm(computed.out.double() - method.reference(p), dim=-1) / unit
    trace, d, e = computed.trace, p.k.shape[-1], p.v.shape[-1]
    pairs = float(keys.sum())
    share = float(trace.read.sum()) / (pairs * p.q.shape[1])
    full = 2 * (d + e)
    sketch = sketched(p.k, method.bits).bytes_per_row + 2
    bytes_read = sketch / full + float(trace.distinct.sum()) / (pairs * p.k.shape[1])
    row: Row = {
        "tol": method.drop,
        "confidence": 1 - method.chance,
        "tokens": share,
        "tokens, mean of rows": float((trace.read / keys).mean()),
        "bytes": bytes_read,
        "bound": certificate.bound,
        "error": float(errors.max()),
    }
    return row, int((errors > certificate.rows.reshape(errors.shape) * (1 + 1e-9)).sum())


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


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a bound was broken."""
    parser = argparse.ArgumentParser("python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--heads", type=Path, required=True, help="a folder of .safetensors with q, k, v, q_positions")
    parser.add_argument("--rows", type=int, default=64, help="decoding steps of each layer")
    parsed = parser.parse_args(arguments)
    print(machine())
    result = run(parsed.heads, parsed.rows)
    print(result.text())
    return int(bool(result.failures))


if __name__ == "__main__":
    raise SystemExit(main())
