"""`avow plan`: what would run, what it would cost, and why."""

from __future__ import annotations

from typing import Annotated, Any

import avow
from avow.bench.workloads import Workload, read, workload
from avow.calibration import rates
from avow.cli import options
from avow.cli.options import (
    AsJson,
    Batch,
    Causal,
    Device,
    Dtype,
    Input,
    KeyHeads,
    Length,
    Recalibrate,
    Seed,
    option,
    present,
)
from avow.cli.parsing import dtype_named
from avow.errors import ParameterError
from avow.planner import Plan

# Tensors are drawn up to this length and up to so many numbers, but no shorter than that; of a longer workload only the
# prices are for its own length.
_DRAWN, _NUMBERS, _LEAST = 4096, 2**23, 256

Planned = options.command_with(options.kinds)


def plan(
    length: Length = None,
    heads: Annotated[int | None, option("Query heads to draw; default: 4.", min=1)] = None,
    dim: Annotated[int | None, option("Dimension of each head; default: 64.", min=1)] = None,
    kind: Annotated[str, option("Kind of heads to draw; see below.")] = "diffuse",
    tol: Annotated[
        float | None, option("Largest error of a row, relative to the longest value it sees; default: exact.")
    ] = None,
    rtol: Annotated[float | None, option("Largest error of a row, relative to the length of its answer.")] = None,
    confidence: Annotated[float | None, option("Accept bounds that hold with this probability, such as 0.99.")] = None,
    input: Input = None,
    causal: Causal = False,
    queries: Annotated[int | None, option("Only so many of the last queries; default: all.", min=1)] = None,
    key_heads: KeyHeads = None,
    batch: Batch = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    device: Device = "cpu",
    recalibrate: Recalibrate = False,
    as_json: AsJson = False,
) -> None:
    """What would run within a tolerance, at what cost, and why.

    Each other method comes with the reason it was not chosen. Costs are seconds on this machine, which is measured at
    the first call, and bytes at the peak. `avow plan-decode` plans steps that read a cache, `avow plan-ranks` attention
    over many ranks.
    """
    from avow.report.compare import plan_table
    from avow.report.terminal import bold

    device = options.place(device)
    if input is not None:
        options.refuse_with_input(heads=heads, dim=dim, key_heads=key_heads, batch=batch)
        own = read(input, causal)
        load = (own if length is None else own.first(length)).to(device, None if dtype is None else dtype_named(dtype))
        wanted = load.k.shape[-2]
    else:
        wanted = 2048 if length is None else length
        load = _drawn(kind, wanted, heads or 4, key_heads, dim or 64, batch or 1, dtype, queries, seed, causal)
        load = load.to(device)
    load = load if queries is None else load.last(queries)
    known = rates(device, tell=options.tell, again=options.again(recalibrate))
    priced_keys = wanted if load.k.shape[-2] < wanted else None
    limits: dict[str, Any] = {"tol": tol, "rtol": rtol, "confidence": confidence}
    result = avow.plan(load.q, load.k, load.v, **limits, keys=priced_keys, **load.call)
    notes = []
    if known.measured and load.q.dtype.itemsize != 4:
        notes.append(f"times are those of float32: this machine was not measured in {str(load.q.dtype)[6:]}")
    if load.q.shape[-2] < load.k.shape[-2]:
        notes.append("times are those of a call that is given all keys; for steps that read a cache: avow plan-decode")
    return present(as_json, result.plain(), plan_table(result), *notes, bold(_verdict(result)))


def _drawn(
    kind: str,
    length: int,
    heads: int,
    key_heads: int | None,
    dim: int,
    batch: int,
    dtype: str | None,
    queries: int | None,
    seed: int,
    causal: bool,
) -> Workload:
    """Heads of one kind, as many tokens of them as are needed to know their bounds."""
    names = options.split(kind)
    if len(names) != 1:
        remedy = f"try --kind {names[0] if names else 'diffuse'}"
        raise ParameterError("kind", repr(kind), "must be one kind", remedy)
    room = max(_LEAST, min(_DRAWN, _NUMBERS // (batch * heads * dim)))
    # One key more than queries where there are more: as many of them would grow with the keys.
    drawn = min(length, max(room, (queries or 0) + 1))
    number = dtype_named("float32" if dtype is None else dtype)
    return workload(names[0], heads, drawn, dim, seed, number, causal, key_heads, batch)


def _verdict(plan: Plan) -> str:
    from avow.report import formatting

    chosen = plan.chosen
    if chosen is None:
        return f"nothing available proves {plan.goal}; the best bound is {plan.best_bound:.1e}"
    faster = plan.exact_seconds / chosen.seconds if chosen.seconds else 1.0
    comparison = "" if chosen.method.is_exact else f", {faster:.1f} times as fast as exact"
    price = f"{formatting.seconds(chosen.seconds)} and {formatting.memory(chosen.cost.peak_bytes)}"
    return f"{chosen.method.label} would run: {price} predicted{comparison}"
