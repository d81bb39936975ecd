"""`avow bench`: ratios against exact attention and installed peers, measured on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avow.cli.options import AsJson, Device, Png, files, option, place, present
from avow.errors import MissingPackage, ParameterError

if TYPE_CHECKING:
    from avow.bench.results import Result

app = typer.Typer(no_args_is_help=True, help="Ratios against exact attention, measured on this machine.")


@app.command()
def decode(
    device: Device = "auto",
    heads: Annotated[Path | None, option("Your own heads: a folder of .safetensors files.", metavar="DIR")] = None,
    length: Annotated[list[int] | None, option("Tokens in the cache; may be repeated.", min=1)] = None,
    quick: Annotated[bool, option("A short cache, a few rounds.", "--quick")] = False,
    as_json: AsJson = False,
) -> None:
    """A certified decoding step, as it is called, beside exact ones.

    On a GPU also captured in a CUDA graph. Fails if an answer breaks its certificate.
    """
    from avow.bench import decode as decoding
    from avow.bench.cases import count, stored
    from avow.bench.clock import machine
    from avow.report.terminal import progress

    where = _where(device)
    sizes = (decoding.QUICK if quick else decoding.FULL)[where]
    if length:
        sizes = sizes._replace(lengths=tuple(length), shapes=(), steady=())
    if heads is not None:
        stored(heads)  # a folder that cannot be used is named before anything runs
    with progress(count(sizes, heads)) as tell:
        results = decoding.run(where, sizes, heads, tell)
    _present(machine(where), results, as_json)


@app.command()
def generate(
    device: Device = "auto",
    heads: Annotated[Path | None, option("Real heads: a folder of .safetensors files.", metavar="DIR")] = None,
    length: Annotated[list[int] | None, option("Tokens in the cache; may be repeated.", min=256)] = None,
    layers: Annotated[int | None, option("Layers of the model.", min=1)] = None,
    quick: Annotated[bool, option("A small model, a short cache, a few rounds.", "--quick")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens of a whole model whose queries and keys are real heads'.

    Enabled and verified, beside transformers' caches and an ideal loop. Fails if a draft exceeds its tolerance.
    """
    from avow.bench import generate as generation
    from avow.bench.cases import stored
    from avow.bench.clock import machine
    from avow.report.terminal import progress

    where = _where(device)
    sizes = (generation.QUICK if quick else generation.FULL)[where]
    sizes = sizes._replace(lengths=tuple(length) if length else sizes.lengths, layers=layers or sizes.layers)
    texts = 1 if heads is None else len(stored(heads))
    with progress(texts * len(sizes.lengths)) as tell:
        results = generation.run(where, sizes, heads, tell)
    _present(machine(where), results, as_json)


@app.command()
def linear(
    device: Device = "auto",
    only: Annotated[str | None, option("Only linear, random, separable or step; on a GPU.", metavar="FAMILY")] = None,
    fuzz: Annotated[int, option("Check the kernels at N random shapes instead.", metavar="N", min=0)] = 0,
    tune: Annotated[bool, option("Time other layouts of the plain scan instead.", "--tune")] = False,
    rehearse: Annotated[bool, option("The GPU's tables on a CPU: interpreted, at tiny sizes.", "--rehearse")] = False,
    quick: Annotated[bool, option("Shorter sequences, a few rounds.", "--quick")] = False,
    as_json: AsJson = False,
) -> None:
    """Linear attention against exact attention and installed peers.

    Whole passes, gradients, single tokens; on a GPU the kernels. What fails its check in this run is not timed, and the
    command fails.
    """
    from avow.bench import linear as kernels
    from avow.bench.cases import interpret_kernels
    from avow.bench.clock import machine
    from avow.report.terminal import progress

    if only is not None and only not in kernels.FAMILIES:
        raise ParameterError("only", only, f"must be one of {', '.join(kernels.FAMILIES)}", "leave --only out")
    where = "cpu" if rehearse else _where(device)
    sizes = kernels.REHEARSAL if rehearse else kernels.QUICK if quick else kernels.FULL
    if rehearse:
        _need_triton("is needed to interpret kernels", "pip install triton")
        interpret_kernels()
    elif where == "cpu" and (only is not None or fuzz or tune):
        rule = "is for kernels, which need a GPU"
        raise ParameterError("device", where, rule, "use a GPU, or --rehearse to interpret kernels at tiny sizes")
    if fuzz:
        results = kernels.shapes(where, fuzz, rehearse)
    elif tune:
        results = kernels.layouts(where, sizes)
    elif where == "cpu" and not rehearse:
        plain_sizes = kernels.PLAIN_QUICK if quick else kernels.PLAIN_FULL
        with progress(len(plain_sizes.crossover) * len(kernels.METHODS)) as tell:
            results = kernels.run_plain(plain_sizes, tell)
    else:
        with progress(5) as tell:
            results = kernels.run(where, sizes, only, tell, rehearse)
    _present(machine(where), results, as_json)


@app.command()
def shards(
    ranks: Annotated[int, option("The most shards; powers of two up to it are run.", min=1, max=1024)] = 256,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Attention over shards, simulated in one process.

    The bytes that each strategy sends are counted and compared with the planner's model, and answers with those of one
    shard; --png draws what a shard sends.
    """
    from avow import file_io
    from avow.bench import shards as simulation
    from avow.report.charts import png as picture
    from avow.report.terminal import progress

    written = files(png=png)
    counts = [2**i for i in range(ranks.bit_length())]
    with progress(6 * len(counts)) as tell:
        result, chart = simulation.run(counts, tell)
    if png is not None:
        file_io.write(png, picture(chart))
    _present("simulated shards", [result], as_json, written)


def _present(where: str, results: list[Result], as_json: bool, written: Iterable[Path] = ()) -> None:
    """Print the tables; fail if an answer failed its check."""
    from avow.bench.results import shown
    from avow.report.terminal import Columns

    parts: list[Any] = [where]
    for result in results:
        headings = list(result.rows[0]) if result.rows else []
        rows = [[shown(value) for value in row.values()] for row in result.rows]
        form = ["r" if any(isinstance(row[name], int | float) for row in result.rows) else "l" for name in headings]
        parts += ["", Columns("".join(form), headings, rows, result.title, result.notes)]
    plain = {"machine": where, "results": [result.plain() for result in results]}
    present(as_json, plain, *parts, written=written)
    if any(result.failures for result in results):
        raise typer.Exit(1)


def _where(device: str) -> str:
    """Where to measure; a GPU needs its kernels."""
    where = place(device)
    if where == "cuda":
        _need_triton("is needed by the kernels on a GPU", "pip install triton, or use --device cpu")
    return where


def _need_triton(rule: str, remedy: str) -> None:
    if find_spec("triton") is None:
        raise MissingPackage("triton", "missing", rule, remedy)
