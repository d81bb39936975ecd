"""Whether certificates hold on the heads of a real model: every row, every method, several settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import avow
from avow.bench import workloads
from avow.bench.results import Goal, Result, Row
from avow.bench.workloads import Workload
from avow.core import Problem
from avow.methods.exact import Exact
from benchmarks.options import Options
from benchmarks.truth import errors

_TOL = 1e-2
_MASKED_ROWS = 64
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "exact": [{}, {"precision": "float32"}, {"precision": "float64"}],
    "separable": [{"temperature": t} for t in (0.5, 1.0, 2.0)],
    "random_features": [{"features": m} for m in (64, 256, 1024)],
    "low_rank": [{"rank": r} for r in (16, 64, 256)],
}


class _Case(NamedTuple):
    """An answer to some rows, the bound of each, and the truth."""

    method: str
    setting: str
    rows_seen: str
    out: Tensor
    bounds: Float[Tensor, "b h n"]
    truth: Float[Tensor, "b h n e"]
    problem: Problem


def run(options: Options) -> list[Result]:
    """The largest bound and error of each layer, method and setting, and how many rows break their bound: none."""
    title = "heads: certificates on the heads of a trained model, measured against float64"
    assert options.heads is not None
    files = sorted(options.heads.glob("*.safetensors"))
    rows: list[Row] = []
    for file in files[:1] if options.quick else files:
        for case in _cases(workloads.read(file, causal=True), options.quick):
            rows.append(_row(file.stem, case))
    failures = [f"{row['layer']} {row['method']} {row['setting']}: broken bounds" for row in rows if row["violations"]]
    remarks = [
        f"`mask, {_MASKED_ROWS} rows`: that many rows of one query head per key head, on the quadratic path that masks "
        "differing by row take. random_features promises each row with probability 0.99; the rest promise always.",
    ]
    return [
        Result(title, by_method(rows), goals(rows), remarks, failures),
        Result("heads: every layer and setting", rows),
    ]


def by_method(rows: list[Row]) -> list[Row]:
    """Over all layers and settings: rows checked and broken, the range of bounds, and the largest error."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["method"]), str(row["rows by"])), []).append(row)
    return [
        {
            "method": method,
            "rows by": places,
            "rows checked": sum(int(row["checked"] or 0) for row in some),
            "broken": sum(int(row["violations"] or 0) for row in some),
            "least bound": min(float(row["median bound"] or 0) for row in some),
            "worst bound": max(float(row["largest bound"] or 0) for row in some),
            "worst error": max(float(row["largest error"] or 0) for row in some),
        }
        for (method, places), some in groups.items()
    ]


def goals(rows: list[Row]) -> list[Goal]:
    """Whether every bound held, how many of them said anything, and whether a tolerance was kept."""
    broken = sum(int(row["violations"] or 0) for row in rows)
    checked = sum(int(row["checked"] or 0) for row in rows)
    # No answer can be further than 2 from the truth, so such a bound cannot be broken.
    empty = sum(int(row["checked"] or 0) for row in rows if float(row["median bound"] or 0.0) >= 2)
    wishes = [row for row in rows if str(row["setting"]).startswith("tol=")]
    kept = sum(float(row["largest bound"] or 0.0) <= _TOL and not row["violations"] for row in wishes)
    told = f"{broken} of {checked} rows, {empty} of them in cases whose median bound is 2, which nothing can break"
    return [
        Goal("no row breaks its bound", told, broken == 0),
        Goal(f"attend(tol={_TOL:g}) keeps its word", f"{kept} of {len(wishes)} layers", kept == len(wishes)),
    ]


def _row(layer: str, case: _Case) -> Row:
    off = errors(case.out.double() - case.truth, case.problem)
    return {
        "layer": layer,
        "method": case.method,
        "setting": case.setting,
        "rows by": case.rows_seen,
        "largest bound": float(case.bounds.amax()),
        "median bound": float(case.bounds.median()),
        "largest error": float(off.amax()),
        "median error": float(off.median()),
        "checked": off.numel(),
        "violations": int((~(off <= case.bounds)).sum()),
    }


def _cases(work: Workload, quick: bool) -> Iterator[_Case]:
    problem = work.problem
    truth = Exact().reference(problem)
    for settings in _SETTINGS["exact"]:
        yield _masked(work, "exact", settings, truth)
    yield _wished(work, truth)
    for name in ("separable", "random_features", "low_rank"):
        for settings in _SETTINGS[name][: 1 if quick else None]:
            yield _causal(work, name, settings, truth)
    few = _some(work)
    truth = Exact().reference(few.problem)
    for name in ("separable", "random_features", "low_rank"):
        settings = _SETTINGS[name][0]
        target = truth if name != "separable" else _separable_truth(few, **settings)
        yield _masked(few, name, settings, target, f"mask, {few.q.shape[-2]} rows")


def _masked(work: Workload, name: str, settings: dict[str, Any], truth: Tensor, rows: str = "mask") -> _Case:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        out, certificate = avow.attend(
            work.q, work.k, work.v, **work.call, method=name, generator=generator, **settings
        )
    return _Case(name, _told(settings), rows, out, certificate.rows, truth, work.problem)


def _wished(work: Workload, truth: Tensor) -> _Case:
    with torch.no_grad():
        out, certificate = avow.attend(work.q, work.k, work.v, **work.call, tol=_TOL)
    told = f"tol={_TOL:g}: {_told(dict(certificate.parameters))}"
    return _Case(certificate.method, told, "mask", out, certificate.rows, truth, work.problem)


def _causal(work: Workload, name: str, settings: dict[str, Any], truth: Tensor) -> _Case:
    places = work.positions if work.positions is not None else torch.arange(work.q.shape[-2])
    order = torch.argsort(places)
    # At every place the last row at or before it; at places before the first row, that row.
    nearest = torch.searchsorted(places[order], torch.arange(work.k.shape[-2]), right=True).sub(1).clamp(min=0)
    filled = work.q[..., order[nearest], :]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        out, certificate = avow.attend(
            filled, work.k, work.v, causal=True, enable_gqa=True, method=name, generator=generator, **settings
        )
    target = truth if name != "separable" else _separable_truth(work, **settings)
    return _Case(
        name, _told(settings), "causal", out[..., places, :], certificate.rows[..., places], target, work.problem
    )


def _some(work: Workload) -> Workload:
    """Evenly spread rows of the first query head of each key head."""
    every = work.q.shape[1] // work.k.shape[1]
    rows = torch.linspace(0, work.q.shape[-2] - 1, _MASKED_ROWS).long().unique()
    places = work.positions if work.positions is not None else torch.arange(work.q.shape[-2])
    return Workload(work.kind, work.summary, work.q[:, ::every, rows], work.k, work.v, True, places[rows])


def _separable_truth(work: Workload, temperature: float) -> Float[Tensor, "b h n e"]:
    """Separable attention of causal rows in float64, by prefix sums over the keys, one key head at a time."""
    places = work.positions if work.positions is not None else torch.arange(work.q.shape[-2])
    mixture = torch.softmax(work.q.double() / temperature, -1)
    log = work.k.double() / temperature
    weight, values = torch.exp(log - log.amax(-2, keepdim=True)), work.v.double()
    heads, groups = work.q.shape[1], work.k.shape[1]
    truth = values.new_zeros(*work.q.shape[:-1], values.shape[-1])
    for batch in range(work.q.shape[0]):
        for head in range(heads):
            group = head * groups // heads
            x, v = weight[batch, group], values[batch, group]
            sums = torch.zeros(x.shape[-1], v.shape[-1], dtype=torch.float64)
            total = x.cumsum(-2)
            for start in range(0, len(x), 256):
                span = slice(start, start + 256)
                running = sums + (x[span, :, None] * v[span, None, :]).cumsum(0)  # (l, d, e)
                here = (places >= start) & (places < start + 256)
                columns = running[places[here] - start] / total[places[here], :, None]
                truth[batch, head, here] = torch.einsum("nd,nde->ne", mixture[batch, head, here], columns)
                sums = running[-1]
    return truth


def _told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "native"
