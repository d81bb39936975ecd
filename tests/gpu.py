"""The same promises on a GPU: `python -m tests.gpu`. Correctness first, then the cost of exact attention's certificate.

Needs only torch and numpy: what float64 cannot decide is counted, not judged (the CPU fuzz has balls for that).
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import attend_exact, run_certified
from avow.core import Problem
from avow.core.audit import reference_error
from avow.core.requirement import Requirement
from avow.errors import RangeError
from avow.numerics.heads import longest_seen
from tests.helpers.generators import draw_case
from tests.helpers.late import stated_later


def moved(p: Problem, device: str) -> Problem:
    """The problem on another device."""
    parts = {name: getattr(p, name) for name in ("q", "k", "v", "allowed", "bias")}
    return dataclasses.replace(p, **{name: x.to(device) for name, x in parts.items() if x is not None})


def fuzz(seconds: float) -> dict[str, int]:
    """Random problems until time is up: rows kept, rows proved broken, rows float64 could not decide, nans."""
    rng, start = random.Random(0), time.monotonic()
    tally = {"cases": 0, "rows": 0, "broken": 0, "undecided": 0, "nan": 0}
    while time.monotonic() - start < seconds:
        case = draw_case(rng.getrandbits(48))
        p, gpu = case.problem, moved(case.problem, "cuda")
        try:
            gpu.measure_norms()
        except RangeError:
            continue
        wish = Requirement(None, 0.999999, None)
        exact = case.method.name == "exact"
        late = stated_later(case.method, gpu) if case.seed % 2 else None
        run = late or (attend_exact(gpu, wish) if exact else run_certified(case.method, gpu, wish, None))
        out, bounds = run.out.cpu().double(), run.certificate.rows.cpu().reshape(p.q.shape[:-1])
        tally["cases"] += p.q.shape[1]
        tally["rows"] += bounds.numel()
        if not bool(torch.isfinite(out).all()):
            tally["nan"] += 1
            print("nan", case.method, case.seed, p.sizes)
            continue
        truth = case.method.reference(p)
        lengths = torch.linalg.vector_norm(p.v.double(), dim=-1)
        tight = longest_seen(p, lengths).expand(p.q.shape[:-1])
        distance = torch.linalg.vector_norm(out.reshape(truth.shape) - truth, dim=-1)
        error = torch.where(tight > 0, distance / tight.clamp(min=1e-320), torch.where(distance > 0, math.inf, 0.0))
        own = reference_error(p)
        length = torch.linalg.vector_norm(out.reshape(truth.shape), dim=-1)
        sure = ((error + own) * (1 + 1e-9) <= bounds) | (length * (1 + 1e-9) <= (bounds - 1) * tight)
        broken = (error - own) * (1 - 1e-9) > bounds
        tally["broken"] += int(broken.sum())
        tally["undecided"] += int((~sure & ~broken).sum())
        if bool(broken.any()):
            b, h, i = broken.nonzero()[0].tolist()
            print(
                "BROKEN",
                case.method,
                case.seed,
                float(error[b, h, i]),
                float(bounds[b, h, i]),
                p.sizes,
                p.scale,
                p.kernel,
            )
    return tally


def large() -> None:
    """Exact attention at real sizes: bound, measured error on sampled rows, time against bare SDPA."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n in (2048, 8192, 32768):
            for causal in (False, True):
                q, k, v = (torch.randn(1, 16, n, 64, device="cuda", dtype=dtype) for _ in range(3))
                out, certificate = avow.attend(q, k, v, causal=causal)
                error = float(avow.audit(out, q, k, v, causal=causal).errors.max())
                times = [
                    median(partial(scaled_dot_product_attention, q, k, v, is_causal=causal)),
                    median(partial(avow.attend, q, k, v, causal=causal)),
                ]
                print(
                    f"{dtype!s:15} n={n:6} causal={causal!s:5} bound {certificate.bound:.2e} error {error:.2e} "
                    f"kept={error <= certificate.bound} bare {times[0] * 1e3:.3f} ms, "
                    f"ratio attend/bare {times[1] / times[0]:.2f}"
                )


def median(once: Callable[[], Any]) -> float:
    """Seconds that a call takes, by the clock on the wall."""
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    times = []
    for _ in range(15):
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[7]


if __name__ == "__main__":
    tally = fuzz(float(sys.argv[1]) if len(sys.argv) > 1 else 120.0)
    print(tally)
    large()
    sys.exit(1 if tally["broken"] or tally["nan"] else 0)
