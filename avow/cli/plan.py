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
        typer.Option(help="The error every row may have, of the longest value; exact unless told."),
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
        int | None, typer.Option(help="Spread it over so many ranks: time by way and sharding; needs --link.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="With --ranks: what a rank can send, such as 400GB/s.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --ranks: until a message is there; 5us unless told.")
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="With --ranks: a rank's products, such as 400TFLOP/s; else as here."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SPEED", help="With --compute: a rank's memory, such as 4.8TB/s.")
    ] = None,
    kept: Annotated[
        float | None, typer.Option(help="With --compute: the share of tokens that sparse reads; 0.1 unless told.")
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(help="Only the last so many queries: 1 is a step of decoding. As many as keys."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="With --ranks: sequences at once; 1 unless told.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="With --ranks: key heads that heads share.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --ranks: float64, float32, bfloat16 or float16; float32 unless told.")
    ] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """What would run for a tolerance, at what cost, and why.

    Each other method comes with the reason it lost. With --ranks: how long each way takes over many ranks, in which
    sharding, and where links are the limit; --png draws weak scaling up to so many ranks.
    """
    from avow.report.compare import plan_table
    from avow.report.terminal import bold, show

    more = {"latency": latency, "kept": kept, "batch": batch, "dtype": dtype}
    told = {"link": link, "compute": compute, "memory": memory, "key_heads": key_heads, **more}
    device = place(device)
    if ranks is not None:
        _only_sizes({"tol": tol, "rtol": rtol, "confidence": confidence, "input": input})
        told |= {"queries": queries}
        given: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        sizes: dict[str, Any] = {"length": 131072 if length is None else length, "heads": heads, "dim": dim}
        return plan_ranks(Asked(ranks, **sizes, **given, causal=causal, device=device, png=png, as_json=as_json))
    for name, value in {**told, "png": png}.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ParameterError(option, value, "is for many ranks", f"add --ranks 8, or leave --{option} out")

    wanted = 2048 if length is None else length
    # One key more than queries where there are more: as many of them would grow with the keys.
    drawn = wanted if input else min(wanted, max(_DRAWN, (queries or 0) + 1))
    load, *others = workloads(kind, input, length if input else drawn, heads, dim, seed, causal, device)
    if others:
        raise ParameterError("kind", repr(kind), "must be one kind", f"try --kind {load.kind}")
    load = load if queries is None else load.last(queries)
    keys = wanted if drawn < wanted else None
    made = avow.plan(load.q, load.k, load.v, tol=tol, rtol=rtol, confidence=confidence, keys=keys, **load.call)
    if as_json:
        return document(plain_plan(made))
    return show(plan_table(made), bold(_verdict(made)))


def _only_sizes(given: dict[str, object]) -> None:
    """Raise where something is asked of tensors, which a plan for many ranks does not look at."""
    for name, value in given.items():
        if value is not None:
            rule, remedy = "is asked of tensors, of which many ranks are told nothing but sizes", "leave --ranks out"
            raise ParameterError(name, value, rule, f"leave --{name} out, or {remedy} to see what keeps it")


def plain_plan(made: Plan) -> dict[str, Any]:
    """A plan as JSON has it; `null` where nothing finite is known."""
    candidates = []
    for candidate in made.ranked:
        prospect = candidate.prospect
        bound = None if prospect is None or not math.isfinite(prospect.bound) else prospect.bound
        candidates.append(
            {
                "method": candidate.method.name,
                "parameters": candidate.method.parameters,
                "seconds": candidate.seconds,
                "peak_bytes": candidate.cost.peak_bytes,
                "bound": bound,
                "kind": None if prospect is None else prospect.kind,
                "certain": None if prospect is None else prospect.certain,
                "lost": candidate.lost,
            }
        )
    chosen = 0 if made.chosen is not None else None
    return {
        "tol": made.tol,
        "rtol": made.rtol,
        "aim": made.aim,
        "rates": made.source,
        "exact_seconds": made.exact_seconds,
        "chosen": chosen,
        "candidates": candidates,
    }


def _verdict(made: Plan) -> str:
    from avow.report import formatting

    chosen = made.chosen
    if chosen is None:
        return f"nothing available proves {made.asked}; the best bound is {made.best_bound:.1e}"
    faster = made.exact_seconds / chosen.seconds if chosen.seconds else 1.0
    beside = f", {faster:.1f} times as fast as exact" if chosen.method.name != "exact" else ""
    price = f"{formatting.seconds(chosen.seconds)} and {formatting.memory(chosen.cost.peak_bytes)}"
    return f"{chosen.method.label} would run: {price} predicted{beside}"
