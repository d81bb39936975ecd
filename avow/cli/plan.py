"""`avow plan`: what would run, what it would cost, and why; with `--ranks`, the same over many ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import avow
from avow.calibration import rates
from avow.cli import options
from avow.cli.options import AsJson, Causal, Device, Dim, Heads, Input, Length, Png, Seed, option, present
from avow.cli.parsing import dtype_named, duration, operations, speed
from avow.core import Sizes
from avow.distributed.parallel_plan import Interconnect, Machine, Offer, Roofline, Time, check, offers, weak_scaling
from avow.errors import ParameterError
from avow.planner import Plan

# Tensors are drawn up to this length; of a longer workload only the prices are for its own length.
_DRAWN = 4096

Planned = options.command_with(options.kinds)


def plan(
    length: Length = None,
    heads: Heads = 4,
    dim: Dim = 64,
    kind: Annotated[str, option("Kind of heads to draw; see below.")] = "diffuse",
    tol: Annotated[float | None, option("The error every row may have, of the longest value; default: exact.")] = None,
    rtol: Annotated[float | None, option("The error every row may have, of the answer's own length.")] = None,
    confidence: Annotated[float | None, option("Accept bounds that hold with this probability, such as 0.99.")] = None,
    input: Input = None,
    causal: Causal = False,
    seed: Seed = 0,
    device: Device = "cpu",
    ranks: Annotated[int | None, option("Spread over this many ranks: time by strategy; needs --link.", min=1)] = None,
    link: Annotated[str | None, option("With --ranks: a rank's bandwidth, such as 400GB/s.", metavar="SPEED")] = None,
    latency: Annotated[str | None, option("With --ranks: latency of a message; default: 5us.", metavar="TIME")] = None,
    compute: Annotated[
        str | None,
        option("With --ranks: arithmetic of a rank, such as 400TFLOP/s; default: this machine's.", metavar="SPEED"),
    ] = None,
    memory: Annotated[str | None, option("With --compute: memory bandwidth, as 4.8TB/s.", metavar="SPEED")] = None,
    kept: Annotated[float | None, option("With --compute: share of tokens that sparse reads; default: 0.1.")] = None,
    queries: Annotated[int | None, option("Only the last queries; 1 is a decoding step; default: all.", min=1)] = None,
    batch: Annotated[int | None, option("With --ranks: sequences at once; default: 1.", min=1)] = None,
    key_heads: Annotated[int | None, option("With --ranks: key heads, shared by the heads.", min=1)] = None,
    dtype: Annotated[str | None, option("With --ranks: float64, float32 (default), bfloat16 or float16.")] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """What would run for a tolerance, at what cost, and why.

    Each other method comes with the reason it lost. With --ranks: how long each strategy takes over many ranks, in
    which sharding, and where links are the limit; --png draws weak scaling up to this number of ranks.
    """
    from avow.report.compare import plan_table
    from avow.report.terminal import bold

    device = options.place(device)
    if ranks is not None:
        rule = "needs tensors, and a plan for many ranks looks at sizes alone"
        remedy = "leave --{} out, or leave --ranks out to see which methods meet it"
        _refuse({"tol": tol, "rtol": rtol, "confidence": confidence, "input": input}, rule, remedy)
        keys, groups = 131072 if length is None else length, heads if key_heads is None else key_heads
        if heads % groups:
            rule = f"must divide the {heads} heads that share them"
            raise ParameterError("key-heads", groups, rule, f"try --key-heads {heads}")
        shape = 1 if batch is None else batch, heads, groups, keys if queries is None else queries, keys, dim, dim
        sizes = Sizes(*shape, dtype_named("float32" if dtype is None else dtype), device, causal)
        check(sizes, ranks)
        if link is None:
            rule = "needs to know how fast ranks are connected"
            raise ParameterError("ranks", ranks, rule, "add --link, such as --link 400GB/s")
        interconnect = Interconnect(speed("link", link), duration("latency", "5us" if latency is None else latency))
        return _plan_ranks(sizes, ranks, interconnect, *_machine(compute, memory, kept, device), png, as_json)
    of_machines = {"link": link, "compute": compute, "memory": memory, "latency": latency, "kept": kept}
    of_sizes = {"key-heads": key_heads, "batch": batch, "dtype": dtype, "png": png}
    _refuse({**of_machines, **of_sizes}, "needs --ranks", "add --ranks 8, or leave --{} out")
    wanted = 2048 if length is None else length
    # One key more than queries where there are more: as many of them would grow with the keys.
    drawn = wanted if input else min(wanted, max(_DRAWN, (queries or 0) + 1))
    load, *others = options.workloads(kind, input, length if input else drawn, heads, dim, seed, causal, device)
    if others:
        raise ParameterError("kind", repr(kind), "must be one kind", f"try --kind {load.kind}")
    load = load if queries is None else load.last(queries)
    priced_keys = wanted if drawn < wanted else None
    limits: dict[str, Any] = {"tol": tol, "rtol": rtol, "confidence": confidence}
    result = avow.plan(load.q, load.k, load.v, **limits, keys=priced_keys, **load.call)
    return present(as_json, plain_plan(result), plan_table(result), bold(_verdict(result)))


def _refuse(given: dict[str, object], rule: str, remedy: str) -> None:
    """Raise if one of these options is given; the remedy has a place for its name."""
    for name, value in given.items():
        if value is not None:
            raise ParameterError(name, value, rule, remedy.format(name))


def plain_plan(plan: Plan) -> dict[str, Any]:
    """A plan as JSON has it; `null` where nothing finite is known."""
    candidates = []
    for candidate in plan.ranked:
        estimate = candidate.estimate
        about = {"method": candidate.method.name, "parameters": candidate.method.parameters}
        price = {"seconds": candidate.seconds, "peak_bytes": candidate.cost.peak_bytes}
        promise: dict[str, Any] = {"bound": None, "kind": None, "certain": None}
        if estimate is not None:
            bound = estimate.bound if math.isfinite(estimate.bound) else None
            promise = {"bound": bound, "kind": estimate.kind, "certain": estimate.certain}
        candidates.append({**about, **price, **promise, "lost": candidate.lost})
    requirement = {"tol": plan.tol, "rtol": plan.rtol, "aim": plan.aim}
    times = {"rates": plan.source, "exact_seconds": plan.exact_seconds}
    return {**requirement, **times, "chosen": None if plan.chosen is None else 0, "candidates": candidates}


def _verdict(plan: Plan) -> str:
    from avow.report import formatting

    chosen = plan.chosen
    if chosen is None:
        return f"nothing available proves {plan.goal}; the best bound is {plan.best_bound:.1e}"
    faster = plan.exact_seconds / chosen.seconds if chosen.seconds else 1.0
    comparison = "" if chosen.method.is_exact else f", {faster:.1f} times as fast as exact"
    price = f"{formatting.seconds(chosen.seconds)} and {formatting.memory(chosen.cost.peak_bytes)}"
    return f"{chosen.method.label} would run: {price} predicted{comparison}"


def _machine(compute: str | None, memory: str | None, kept: float | None, device: str) -> tuple[Machine, str]:
    """What a rank computes with: a device by its figures, or one like this machine."""
    share = 0.1 if kept is None else kept
    if not 0 <= share <= 1:
        raise ParameterError("kept", share, "must be from 0 to 1", "try --kept 0.1")
    if compute is None and memory is None:
        known = rates(device)
        return known, f"ranks like this machine, {known.source}"
    if compute is None or memory is None:
        missing = "compute" if compute is None else "memory"
        rule, remedy = "is needed beside the other figure of a device", "give --compute 400TFLOP/s and --memory 3TB/s"
        raise ParameterError(missing, None, rule, remedy)
    roofline = Roofline(operations("compute", compute), speed("memory", memory), share)
    return roofline, f"ranks of {compute} and {memory}"


def _plan_ranks(
    sizes: Sizes, ranks: int, link: Interconnect, machine: Machine, source: str, png: Path | None, as_json: bool
) -> None:
    from avow import file_io
    from avow.report import charts
    from avow.report.ranks import ranks_table, shardings_table, verdict, weak_chart
    from avow.report.terminal import bold

    written = options.files(png=png)
    priced = offers(sizes, ranks, link, machine)
    if png is not None:
        chart = weak_chart(weak_scaling(sizes, ranks, link, machine), sizes, ranks, link)
        file_io.write(png, charts.png(chart))
    about = {"ranks": ranks, "bandwidth": link.bandwidth, "latency": link.latency, "machine": source}
    counts = {"keys": sizes.keys, "queries": sizes.queries}
    plain = {**about, **counts, "ways": [_plain_offer(offer) for offer in priced]}
    tables = ranks_table(priced, sizes, ranks, link, source), "", shardings_table(priced), ""
    present(as_json, plain, *tables, *map(bold, verdict(priced, ranks)), written=written)


def _plain_offer(offer: Offer) -> dict[str, Any]:
    method, time = offer.strategy.method, offer.time
    return {
        "way": offer.strategy.name,
        "target": method.target,
        "parameters": method.parameters,
        **_plain_sharding(time),
        "computing_seconds": time.computing,
        "sending_seconds": time.sending,
        "bytes_sent": offer.traffic.sent,
        "messages": offer.traffic.messages,
        "dominated_by": offer.dominated,
        "communication_dominates_from": offer.from_ranks,
        "shardings": [_plain_sharding(one) for one in offer.shardings],
    }


def _plain_sharding(time: Time) -> dict[str, Any]:
    return {"over_heads": time.sharding.heads, "over_sequence": time.sharding.sequence, "seconds": time.whole}
