"""A long decoding loop from a `KeyValueCache`, every answer judged.

Heads are made up to look like those of a text: neighbours are alike, a few channels are loud, the first token draws
everyone, and a query looks for one earlier token and for what is near. Each step appends a token, attends with a
tolerance, and is compared with softmax attention in float64. Memory is measured after the room for tokens was last
enlarged: by then only the tokens themselves may add to it.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from avow.bench.results import Result, Row
from avow.nn import KeyValueCache
from benchmarks.options import Options

_GROUPS, _HEADS, _DIM = 2, 8, 64
_TOL = 1e-2
# The room grows in these steps, and memory is measured from the last of them on.
_SETTLING = 32


def run(options: Options) -> Result:
    """A thousand steps behind a long text."""
    return loop(40, 200, 1.0) if options.quick else loop(1000, 8000, 1.0)


def loop(steps: int, tokens: int, confidence: float, dtype: torch.dtype = torch.bfloat16) -> Result:
    """So many steps after a text of so many tokens."""
    q, k, v = _text(tokens + steps, dtype)
    cache = KeyValueCache(_GROUPS, _DIM, dtype=dtype)
    cache.append(k[:, :, :tokens], v[:, :, :tokens])
    draws = torch.Generator().manual_seed(0)
    sparse = broken = far = 0
    worst, bounds, seconds = 0.0, [], []
    resident = live = held = 0
    for step in range(steps):
        end = tokens + step + 1
        cache.append(k[:, :, end - 1 : end], v[:, :, end - 1 : end])
        query = q[:, :, end - 1 : end]
        before = time.perf_counter()
        out, certificate = cache.attend(query, _TOL, confidence, generator=draws, method="sparse")
        seconds.append(time.perf_counter() - before)
        errors = _errors(out, query, k[:, :, :end], v[:, :, :end])
        rows = certificate.rows.reshape(errors.shape)
        sparse += certificate.method == "sparse"
        broken += int((~(errors <= rows)).sum())
        far += not certificate.bound <= _TOL
        worst = max(worst, float((errors / rows).max()))
        bounds.append(certificate.bound)
        if step == min(_SETTLING, steps) - 1:
            del out, errors, rows
            resident, live, held = _resident(), _live(), cache.nbytes
    del query
    out = errors = rows = torch.empty(0)
    counted = steps - min(_SETTLING, steps)
    per_token = (1 + cache.overhead) * 2 * _GROUPS * _DIM * dtype.itemsize
    grown, own = _resident() - resident, _live() - live
    row: Row = {
        "steps": steps,
        "answered by sparse": sparse,
        "rows": steps * _HEADS,
        "violations": broken,
        "worst error/bound": worst,
        "largest bound": max(bounds),
        "step ms": 1e3 * statistics.median(seconds),
        "bytes the tokens need": round(per_token * (tokens + steps)),
        "bytes held, with room": cache.nbytes,
        "overhead": cache.overhead,
    }
    # A bound that holds with some probability may fail as often as that.
    allowed = (1 - confidence) * steps * _HEADS
    failures = [f"{broken} rows outside their bounds"] if broken > allowed else []
    failures += [f"{far} answers did not keep the tolerance"] if far else []
    failures += [f"live tensors grew by {own:,} bytes"] if own > cache.nbytes - held else []
    remarks = [
        f"From {tokens} to {tokens + steps} tokens of {_GROUPS} key heads, {_HEADS} query heads, d = {_DIM}, "
        f"{str(dtype).removeprefix('torch.')}; tol = {_TOL:g}, confidence {confidence:g}.",
        f"In the last {counted} steps live tensors grew by {own:,} bytes and the process by {grown:,}; the tokens "
        f"appended in them need {round(per_token * counted):,}.",
    ]
    return Result("decode loop: certified steps with appends", [row], remarks=remarks, failures=failures)


def _text(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of n tokens: (1, h, n, d) and twice (1, g, n, d)."""
    g = torch.Generator().manual_seed(0)
    loud = torch.exp(0.7 * torch.randn(1, _GROUPS, 1, _DIM, generator=g))
    k = torch.randn(1, _GROUPS, n, _DIM, generator=g)
    for t in range(1, n):
        k[:, :, t] = 0.8 * k[:, :, t - 1] + 0.6 * k[:, :, t]
    v = torch.randn(1, _GROUPS, n, _DIM, generator=g)
    siblings = _HEADS // _GROUPS
    place = (torch.rand(_HEADS, n, generator=g) * torch.arange(1, n + 1)).long()
    keys = k.repeat_interleave(siblings, 1)
    sought = keys.gather(2, place[None, ..., None].expand(1, _HEADS, n, _DIM))
    q = 0.8 * sought + 0.5 * keys + keys[:, :, :1] + 0.3 * torch.randn(1, _HEADS, n, _DIM, generator=g)
    # Loud channels of keys are quiet ones of queries: products stay as they are, sketches become harder.
    q = 2.8 * q / loud.repeat_interleave(siblings, 1)
    return q.to(dtype), (k * loud).to(dtype), v.to(dtype)


def _errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """How far an answer is from the truth, in units of the longest value."""
    siblings = _HEADS // _GROUPS
    keys, values = (x.double().repeat_interleave(siblings, 1) for x in (k, v))
    truth = torch.softmax(q.double() @ keys.transpose(-1, -2) * _DIM**-0.5, -1) @ values
    unit = torch.linalg.vector_norm(values, dim=-1).amax(-1, keepdim=True)
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / unit


def _resident() -> int:
    """The bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _live() -> int:
    """The bytes of all tensors that anything still holds."""
    gc.collect()
    strided = (x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided)
    # A tensor on the meta device names a size and holds nothing; its address is that of every empty tensor, 0.
    found = [x.untyped_storage() for x in strided if not x.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())
