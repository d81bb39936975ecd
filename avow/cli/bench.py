"""`avow bench`: ratios against exact attention and installed peers, measured on this machine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from avow.cli.options import AsJson
from avow.errors import MissingPackage, ParameterError

app = typer.Typer(no_args_is_help=True, help="Ratios against exact attention, measured on this machine.")


@app.callback()
def _bench() -> None:
    """Ratios against exact attention, measured on this machine; answers are checked before anything is timed."""


@app.command()
def decode(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    heads: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of .safetensors files with q, k and v of real heads.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short cache, a few rounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """One certified step of decoding against the fastest exact attention; on a GPU also each kernel's share of what
    memory allows. Fails where an answer is not what its certificate says.
    """
    from avow.bench import cached
    from avow.bench import decode as kernels
    from avow.bench.cases import count, stored
    from avow.bench.machine import machine
    from avow.report.progress import progress

    place = _device(device)
    path = kernels if place == "cuda" else cached
    sizes = path.QUICK if quick else path.FULL
    for n in length or []:
        if n < 1:
            raise ParameterError("length", n, "must be at least 1", "try --length 65536")
    if length:
        sizes = sizes._replace(lengths=tuple(length))
    if heads is not None:
        stored(heads)  # a folder that cannot be used is named before anything runs
    with progress(count(sizes, heads)) as tell:
        results = kernels.run(place, sizes, heads, tell) if place == "cuda" else cached.run(sizes, heads, tell)
    _say(machine(place), results, as_json)


@app.command()
def linear(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="linear, all keys, random, separable or step; on a GPU.")
    ] = None,
    fuzz: Annotated[int, typer.Option(metavar="N", help="Check the kernels at N random shapes instead.")] = 0,
    tune: Annotated[bool, typer.Option("--tune", help="Time other layouts of the plain scan instead.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="The GPU's tables on a CPU: kernels interpreted, tiny sizes.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter sequences, a few rounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Linear attention against exact attention and, on a GPU, installed peers: whole passes, gradients, single tokens.

    On a GPU these are the kernels; what fails its check in this run gets no speed, and the command fails.
    """
    from avow.bench import linear as kernels
    from avow.bench import linear_plain as plain
    from avow.bench.machine import machine
    from avow.report.progress import progress

    if only is not None and only not in kernels.FAMILIES:
        raise ParameterError("only", only, f"must be one of {', '.join(kernels.FAMILIES)}", "leave --only out")
    if fuzz < 0:
        raise ParameterError("fuzz", fuzz, "must be at least 0", "try --fuzz 200")
    place = "cpu" if rehearse else _device(device)
    if rehearse:
        _rehearse()
    if place == "cpu" and not rehearse:
        if only is not None or fuzz or tune:
            rule = "is for kernels, which need a GPU"
            raise ParameterError("device", place, rule, "use a GPU, or --rehearse to interpret kernels at tiny sizes")
        sizes = plain.QUICK if quick else plain.FULL
        with progress(len(sizes.lengths) * len(plain.METHODS)) as tell:
            return _say(machine(place), plain.run(sizes, tell), as_json)
    chosen = kernels.REHEARSAL if rehearse else kernels.QUICK if quick else kernels.FULL
    if fuzz:
        return _say(machine(place), kernels.shapes(place, fuzz, rehearse), as_json)
    if tune:
        return _say(machine(place), kernels.layouts(place, chosen), as_json)
    with progress(5) as tell:
        results = kernels.run(place, chosen, only, tell, rehearse)
    return _say(machine(place), results, as_json)


@app.command()
def shards(
    ranks: Annotated[int, typer.Option(help="The most shards; powers of two up to it are run.")] = 256,
    png: Annotated[Path | None, typer.Option(help="Write what a shard sends as a picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attention over shards, simulated in one process: what each way sends is counted and held to the planner's model,
    and answers to those of one shard.
    """
    from avow import atomic
    from avow.bench import shards as simulation
    from avow.report.charts import png as picture
    from avow.report.progress import progress

    if not 1 <= ranks <= 1024:
        raise ParameterError("ranks", ranks, "must be from 1 to 1024", "try --ranks 256")
    if png is not None:
        atomic.ready(png)
    counts = [2**i for i in range(ranks.bit_length())]
    with progress(6 * len(counts)) as tell:
        result, chart = simulation.run(counts, tell)
    if png is not None:
        atomic.write(png, picture(chart))
        typer.echo(f"wrote {png}", err=True)
    _say("simulated shards", [result], as_json)


def _rehearse() -> None:
    if find_spec("triton") is None:
        raise MissingPackage("triton", "missing", "is needed to interpret kernels", "pip install triton")
    from avow.bench.rehearsal import interpreted

    interpreted()


def _say(where: str, results: list[Any], as_json: bool) -> None:
    """The tables, and failure where an answer failed its check."""
    if as_json:
        plain = {"machine": where, "results": [result.plain() for result in results]}
        typer.echo(json.dumps(plain, indent=1, allow_nan=False))
    else:
        typer.echo("\n\n".join([where, *(result.text() for result in results)]))
    if any(result.failures for result in results):
        raise typer.Exit(1)


def _device(asked: str) -> str:
    """Where to measure."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ParameterError("device", asked, "must be auto, cpu or cuda", "leave --device out")
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ParameterError("device", "cuda", "is not at hand", "use --device cpu")
    place = "cuda" if asked != "cpu" and there else "cpu"
    if place == "cuda" and find_spec("triton") is None:
        rule = "is needed by the kernels on a GPU"
        raise MissingPackage("triton", "missing", rule, "pip install triton, or use --device cpu")
    return place
