"""`avow plan-decode`: what a step of a decode loop costs on this machine, and from which length sparse steps pay."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import torch

import avow
from avow.bench.workloads import Workload, read, workload
from avow.cli import options
from avow.cli.options import AsJson, Batch, Device, Dtype, Input, KeyHeads, Recalibrate, Seed, option, present
from avow.cli.parsing import dtype_named
from avow.decode.cpu import not_installed
from avow.decode.plan import USUAL_SHARE, share_of_heads
from avow.errors import ParameterError

# Queries whose steps say which share of the tokens is read, and the most tokens that are drawn for them.
_QUERIES, _DRAWN = 4, 4096

Planned = options.command_with(options.kinds)


class _Share(NamedTuple):
    """The share of the tokens that is read, and how that is known."""

    kept: float
    source: str


def plan_decode(
    tokens: Annotated[int, option("Tokens in the cache.", min=1)] = 131_072,
    heads: Annotated[int | None, option("Query heads of the layer; default: 32.", min=1)] = None,
    key_heads: KeyHeads = None,
    dim: Annotated[int | None, option("Dimension of each head; default: 128.", min=1)] = None,
    dtype: Dtype = None,
    batch: Batch = None,
    queries: Annotated[int, option("Queries of each head in a step.", min=1)] = 1,
    kept: Annotated[
        float | None, option(f"Share of the tokens that sparse steps read, from 0 to 1; default: {USUAL_SHARE}.")
    ] = None,
    input: Input = None,
    kind: Annotated[str | None, option("Find the share with drawn heads of this kind; see below.")] = None,
    tol: Annotated[
        float | None, option("With --input or --kind: error of a row, relative to the longest value; default: 0.01.")
    ] = None,
    window: Annotated[int | None, option("Tokens that a query sees at most; default: all.", min=1)] = None,
    layers: Annotated[int, option("Such layers, all of which are to fit.", min=1)] = 1,
    memory: Annotated[
        float | None, option("Gigabytes of the device that caches may take; default: what is free on a GPU.")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    recalibrate: Recalibrate = False,
    as_json: AsJson = False,
) -> None:
    """What a decode loop costs: time of a step, and memory.

    A step is `append` and `attend` of an `avow.nn.KeyValueCache`, for one layer. Its time is predicted from steps of
    such heads on this machine, which are measured once, in about two seconds. The first time of all, compiling CPU
    steps takes half a minute more. How many tokens sparse steps read depends on the heads: give the share with --kept,
    or find it with --input on your own heads, with --kind on drawn ones.
    """
    from avow.report.decode_plan import plan_table
    from avow.report.terminal import bold

    device, number = options.place(device), None if dtype is None else dtype_named(dtype)
    if kept is not None and kind is not None:
        raise ParameterError("kind", kind, "would find the share that --kept gives", "leave one of them out")
    load = None
    if input is not None:
        options.refuse_with_input(heads=heads, key_heads=key_heads, dim=dim, batch=batch, kept=kept, kind=kind)
        load = read(input).first(tokens).to(device, number)
    elif kind is not None:
        drawn = workload(kind, heads or 32, min(tokens, _DRAWN), dim or 128, seed, key_heads=key_heads)
        load = drawn.to(device, number)
    if load is None and tol is not None:
        rule = "needs heads: which share of the tokens it lets a step read depends on them"
        raise ParameterError("tol", tol, rule, "add --input FILE or --kind averaging, or give the share with --kept")
    # What no step would use is not looked for.
    useless = not_installed() if device == "cpu" else ""
    share = None if load is None or useless else _share(load, 1e-2 if tol is None else tol)
    number = number or torch.float32
    shape: dict[str, Any] = {"heads": heads or 32, "key_heads": key_heads, "dim": dim or 128, "dtype": number}
    if load is not None:
        (_, count, _, _), (_, groups, _, width), value_dim = load.q.shape, load.k.shape, load.v.shape[3]
        shape = {"heads": count, "key_heads": groups, "dim": width, "value_dim": value_dim, "dtype": load.k.dtype}
    plan = avow.plan_decode(
        tokens,
        **shape,
        batch=batch or (1 if load is None else load.k.shape[0]),
        queries=queries,
        device=device,
        kept=kept if share is None else share.kept,
        window=window,
        layers=layers,
        memory=None if memory is None else round(1e9 * memory),
        tell=options.tell,
        again=options.again(recalibrate),
    )
    if share is not None or (load is not None and useless):
        plan = dataclasses.replace(plan, kept_source="not looked for" if share is None else share.source)
    return present(as_json, plan.plain(), plan_table(plan), *map(bold, plan.verdict))


def _share(load: Workload, tol: float) -> _Share:
    """The share that the last queries of some heads need."""
    q, seen = load.q[:, :, -_QUERIES:], load.k.shape[2]
    if load.positions is not None and load.positions.numel():
        seen = int(load.positions.max()) + 1
    found = share_of_heads(q, load.k[:, :, :seen], load.v[:, :, :seen], tol)
    return _Share(found, f"found on {seen:,} tokens of {load.kind} at tolerance {tol:g}")
