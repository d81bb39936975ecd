"""`avow plan`: what would run, what it would cost, and why."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console

import avow
from avow.cli.options import AsJson, Causal, Device, Dim, Heads, Input, Length, Seed, kinds_help, workloads
from avow.planner import Plan

# Longer than this, tensors are drawn at this length and only the prices are for the length asked for.
_DRAWN = 4096


def plan(
    length: Length = None,
    heads: Heads = 4,
    dim: Dim = 64,
    kind: Annotated[
        str,
        typer.Option(help=kinds_help().replace("Kinds of heads to draw, separated by commas", "Kind of heads to draw")),
    ] = "diffuse",
    tol: Annotated[float | None, typer.Option(help="The error every row may have; exact unless told.")] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Accept promises that hold with this probability, such as 0.99.")
    ] = None,
    input: Input = None,
    causal: Causal = False,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """What would run for a tolerance, what it would cost, and why each other method lost."""
    from avow.report.table import plan_table

    wanted = length or 2048
    drawn = wanted if input else min(wanted, _DRAWN)
    (load,) = workloads(kind, input, length if input else drawn, heads, dim, seed, causal, device)
    keys = wanted if drawn < wanted else None
    made = avow.plan(load.q, load.k, load.v, tol=tol, confidence=confidence, keys=keys, **load.call)
    if as_json:
        typer.echo(json.dumps(plain_plan(made), indent=1, allow_nan=False))
        return
    console = Console()
    console.print(plan_table(made))
    console.print(_verdict(made), style="bold", highlight=False)


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
        "rates": made.source,
        "exact_seconds": made.exact_seconds,
        "chosen": chosen,
        "candidates": candidates,
    }


def _verdict(made: Plan) -> str:
    from avow.report import words

    chosen = made.chosen
    if chosen is None:
        return f"nothing at hand proves {made.tol:g}; the best bound is {made.best_bound:.1e}"
    faster = made.exact_seconds / chosen.seconds if chosen.seconds else 1.0
    beside = f", {faster:.1f} times as fast as exact" if chosen.method.name != "exact" else ""
    price = f"{words.seconds(chosen.seconds)} and {words.memory(chosen.cost.peak_bytes)}"
    return f"{words.label(chosen.method)} would run: {price} predicted{beside}"
