"""`avow plan`: what would run, what it would cost, and why."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

import avow
from avow.cli.lists import command_with, kinds
from avow.cli.options import AsJson, Causal, Device, Dim, Heads, Input, Length, Png, Seed, place, workloads
from avow.cli.output import document
from avow.cli.plan_ranks import Asked, plan_ranks
from avow.errors import ParameterError
from avow.planner import Plan

# Longer than this, tensors are drawn at this length and only the prices are for the length asked for.
_DRAWN = 4096

Planned = command_with(kinds)


def plan(
    length: Length = None,
    heads: Heads = 4,
    dim: Dim = 64,
    kind: Annotated[str, typer.Option(help="Kind of heads to draw; see below.")] = "diffuse",
    tol: Annotated[
        float | None,
        typer.Option(help="The error every row may have, of the longest value; exact by default."),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="The error every row may have, of the answer's own length.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Accept promises that hold with this probability, such as 0.99.")
    ] = None,
    input: Input = None,
    causal: Causal = False,
    seed: Seed = 0,
    device: Device = "cpu",
    ranks: Annotated[
        int | None, typer.Option(help="Spread it over so many ranks: time by strategy and sharding; needs --link.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="With --ranks: bandwidth of a rank, such as 400GB/s.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --ranks: latency of a message; 5us by default.")
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="With --ranks: arithmetic of a rank, such as 400TFLOP/s; else as here."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SPEED", help="With --compute: memory bandwidth, such as 4.8TB/s.")
    ] = None,
    kept: Annotated[
        float | None, typer.Option(help="With --compute: the share of tokens that sparse reads; 0.1 by default.")
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(help="Only the last so many queries: 1 is a step of decoding. As many as keys."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="With --ranks: sequences at once; 1 by default.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="With --ranks: key heads that heads share.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --ranks: float64, float32, bfloat16 or float16; float32 by default.")
    ] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """What would run for a tolerance, at what cost, and why.

    Each other method comes with the reason it lost. With --ranks: how long each strategy takes over many ranks, in
    which sharding, and where links are the limit; --png draws weak scaling up to so many ranks.
    """
    from avow.report.compare import plan_table
    from avow.report.terminal import bold, show

    more = {"latency": latency, "kept": kept, "batch": batch, "dtype": dtype}
    rank_options = {"link": link, "compute": compute, "memory": memory, "key_heads": key_heads, **more}
    device = place(device)
    if ranks is not None:
        _only_sizes({"tol": tol, "rtol": rtol, "confidence": confidence, "input": input})
        rank_options |= {"queries": queries}
        given: dict[str, Any] = {name: value for name, value in rank_options.items() if value is not None}
        sizes: dict[str, Any] = {"length": 131072 if length is None else length, "heads": heads, "dim": dim}
        return plan_ranks(Asked(ranks, **sizes, **given, causal=causal, device=device, png=png, as_json=as_json))
    for name, value in {**rank_options, "png": png}.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ParameterError(option, value, "needs --ranks", f"add --ranks 8, or leave --{option} out")

    wanted = 2048 if length is None else length
    # One key more than queries where there are more: as many of them would grow with the keys.
    drawn = wanted if input else min(wanted, max(_DRAWN, (queries or 0) + 1))
    load, *others = workloads(kind, input, length if input else drawn, heads, dim, seed, causal, device)
    if others:
        raise ParameterError("kind", repr(kind), "must be one kind", f"try --kind {load.kind}")
    load = load if queries is None else load.last(queries)
    keys = wanted if drawn < wanted else None
    result = avow.plan(load.q, load.k, load.v, tol=tol, rtol=rtol, confidence=confidence, keys=keys, **load.call)
    if as_json:
        return document(plain_plan(result))
    return show(plan_table(result), bold(_verdict(result)))


def _only_sizes(given: dict[str, object]) -> None:
    """Raise if an option is given that needs tensors: a plan for many ranks does not look at them."""
    for name, value in given.items():
        if value is not None:
            rule = "needs tensors, and a plan for many ranks looks at sizes alone"
            raise ParameterError(name, value, rule, f"leave --{name} out, or leave --ranks out to see what keeps it")


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
    beside = f", {faster:.1f} times as fast as exact" if not chosen.method.is_exact else ""
    price = f"{formatting.seconds(chosen.seconds)} and {formatting.memory(chosen.cost.peak_bytes)}"
    return f"{chosen.method.label} would run: {price} predicted{beside}"
