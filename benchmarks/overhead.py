"""What a certificate costs: exact attention with one, against PyTorch's attention alone."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import Attended
from avow.bench.results import Goal, Result, Row
from avow.core import Problem
from benchmarks.options import Options
from benchmarks.race import Contender, race
from benchmarks.truth import broken, too_far

_AIM = 1.03


def run(options: Options) -> Result:
    """`attend(method="exact")`, certificate included, over bare SDPA."""
    rows: list[Row] = []
    failures: list[str] = []
    worst = 0.0
    for n in (2048,) if options.quick else (2048, 4096, 8192):
        for causal in (False, True):
            row, failed = _point(n, causal, seconds=5.0 if options.quick else 12.0)
            rows.append(row)
            failures += failed
            ratio = row["ratio of minima"]
            worst = max(worst, float(ratio) if isinstance(ratio, int | float) else float("inf"))
    aim = f"at most {_AIM:.2f} times SDPA at n >= 2048, the best of interleaved rounds"
    goal = Goal(aim, f"{worst:.3f} at worst", worst <= _AIM)
    title = "overhead: exact attention with its certificate, over SDPA (8 heads, d = 64, float32)"
    return Result(title, rows, [goal], failures=failures)


def _point(n: int, causal: bool, seconds: float) -> tuple[Row, list[str]]:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 8, n, 64, generator=generator) for _ in range(3))
    problem = Problem.of(q, k, v, causal=causal)

    def bare() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def certified() -> Attended:
        return avow.attend(q, k, v, method="exact", causal=causal)

    found = race(
        [
            Contender("SDPA", bare, lambda: too_far(bare(), problem, 1e-3)),
            Contender("attend", certified, lambda: broken(*certified(), problem)),
        ],
        seconds,
    )
    ratio = found.ratio("attend", "SDPA")
    row: Row = {
        "n": n,
        "causal": "yes" if causal else "no",
        "rounds": len(found.times.get("SDPA", [])),
        "SDPA seconds": found.median("SDPA") if "SDPA" in found.times else None,
        "median ratio": ratio and round(ratio.median, 4),
        "ratio of minima": ratio and round(ratio.minimum, 4),
        "on top": ratio and round(ratio.median - 1, 4),
    }
    return row, [f"n={n}: {name} {why}" for name, why in found.failed.items()]
