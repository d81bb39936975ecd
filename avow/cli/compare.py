"""`avow compare`: the error-cost frontier of every method on a workload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import avow
from avow.cli.options import (
    AsJson,
    Causal,
    Device,
    Dim,
    Heads,
    Input,
    Length,
    Seed,
    command,
    kinds_help,
    split,
    workloads,
)
from avow.contract import Method, Sizes
from avow.errors import ParameterError
from avow.methods import method_named
from avow.workloads import KINDS, Workload, workload


def methods_help() -> str:
    """Every method with its parameters, as the methods themselves declare them."""
    lines = ["Methods to compare, separated by commas; all unless told.", "", "\b"]
    for name, kind in avow.all_methods().items():
        lines.append(f"{name}: {kind.summary}")
        lines += [f"  {name}.{p.name}={p.default}: {p.help}" for p in kind.declared()]
    return "\n".join(lines)


def compare(
    length: Length = None,
    heads: Heads = 1,
    dim: Dim = 64,
    kinds: Annotated[str, typer.Option(help=kinds_help())] = ",".join(KINDS),
    methods: Annotated[str | None, typer.Option(help=methods_help())] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="METHOD.NAME=VALUE", help="Compare a method at this setting only; may be repeated."
        ),
    ] = None,
    input: Input = None,
    causal: Causal = False,
    seed: Seed = 0,
    device: Device = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="Time each call once, and leave out the growth with length.")
    ] = False,
    patience: Annotated[float, typer.Option(help="Leave out what is expected to take more seconds a call.")] = 20.0,
    threads: Annotated[int, typer.Option(help="CPU threads; more than 1 is unsteady on a busy machine.")] = 2,
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("out/compare.html"),
    png: Annotated[Path | None, typer.Option(help="Write the frontier as a picture too.")] = None,
    as_json: AsJson = False,
) -> None:
    """The error-cost frontier of every method, as a table and an HTML report."""
    from avow import atomic
    from avow.report.compare import Bench, Comparison
    from avow.report.page import page
    from avow.report.picture import png as picture
    from avow.report.progress import progress
    from avow.report.table import board_table, decoding_table

    if threads < 1:
        raise ParameterError("threads", threads, "must be at least 1", "try --threads 1")
    loads = workloads(kinds, input, length, heads, dim, seed, causal, device)
    names = split(methods) or list(avow.all_methods())
    fixed = _fixed(settings or [], names, [load.sizes for load in loads])
    for name in names:
        method_named(name)
    for path in (html, *([png] if png else [])):
        atomic.ready(path)
    bench = Bench(names, fixed, seed, 1 if quick else 5, patience)
    lengths = [] if quick else _lengths(loads[0], drawn=input is None)
    steps = sum(len(list(bench.settings(name, load.sizes))) for load in loads for name in names)
    steps += len(loads) * ("sparse" in names) + len(lengths) * len(names)

    def longest(load: Workload) -> Workload:
        """The same heads at the longest length of the sweep."""
        if input or not lengths:
            return load
        return workload(load.kind, heads, max(lengths), dim, seed, causal=causal).to(device)

    with _threads(threads), progress(steps) as tell:
        boards = tuple(bench.board(load, tell, longest(load)) for load in loads)
        longer = longest(loads[-1])
        scaling = tuple(bench.scaling((longer.first(n) for n in lengths), tell))
    made = Comparison(boards, scaling, _machine(device, threads))
    atomic.write(html, page(made, command()))
    if png:
        atomic.write(png, picture(made))
    if as_json:
        typer.echo(json.dumps(made.plain(), indent=1, allow_nan=False))
    else:
        console = Console(soft_wrap=False)
        for board in boards:
            console.print(board_table(board), "", sep="\n")
            if board.decoding is not None and board.decoding.steps:
                console.print(decoding_table(board.decoding), "", sep="\n")
        console.print(made.headline, style="bold", highlight=False)
    for path in (html, *([png] if png else [])):
        typer.echo(f"wrote {path}", err=True)


def _fixed(settings: list[str], names: list[str], sizes: list[Sizes]) -> dict[str, Method]:
    """The methods that `--set` pins to one setting."""
    given: dict[str, dict[str, Any]] = {}
    for text in settings:
        left, equals, value = text.partition("=")
        owner, dot, name = left.partition(".")
        if not (equals and dot and owner and name):
            raise ParameterError("--set", repr(text), "must read METHOD.NAME=VALUE", "try --set low_rank.rank=32")
        declared = {p.name: p for p in method_named(owner).declared()}
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise ParameterError(f"{owner}: {name}", repr(value), "is not a parameter", f"known parameters: {known}")
        if owner not in names:
            raise ParameterError("--set", repr(text), "sets a method that is not compared", f"add {owner} to --methods")
        given.setdefault(owner, {})[name] = declared[name].read(owner, value)
    fixed = {owner: method_named(owner)(**parameters) for owner, parameters in given.items()}
    for method, size in ((method, size) for method in fixed.values() for size in sizes):
        method.check(size)
    return fixed


def _lengths(load: Workload, drawn: bool) -> list[int]:
    """The lengths of the sweep: around a drawn workload's own, up to that of a file."""
    own = load.k.shape[-2]
    shares = (0.25, 0.5, 1, 2, 4) if drawn else (0.0625, 0.125, 0.25, 0.5, 1)
    return sorted({max(1, int(own * share)) for share in shares})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine(device: str, threads: int) -> str:
    place = torch.cuda.get_device_name() if device == "cuda" else f"{threads} CPU thread{'s' if threads > 1 else ''}"
    return f"{place}, torch {torch.__version__}"
