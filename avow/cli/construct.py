"""`avow construct`: queries, heads and ReLU networks in closed form, with their proofs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from avow.cli import numbers
from avow.cli.options import AsJson
from avow.errors import ParameterError

if TYPE_CHECKING:
    from avow.constructions.construction import Construction

app = typer.Typer(no_args_is_help=True, help="Weights in closed form that do what they say, with their proofs.")

Keys = Annotated[Path | None, typer.Option(help="A .safetensors file with a tensor named keys, one key a row.")]
Orthonormal = Annotated[int | None, typer.Option(help="So many unit vectors as keys.")]
Random = Annotated[int | None, typer.Option(help="So many keys of random direction and length 1.")]
Dim = Annotated[int | None, typer.Option(help="Dimension of the keys; as many as there are keys, unless told.")]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.")]
Eps = Annotated[float, typer.Option(help="The error that is promised.")]
Dtype = Annotated[str, typer.Option(help="Type of the weights: float64, float32, float16 or bfloat16.")]
Save = Annotated[
    Path | None, typer.Option(help="Write the weights here, as .safetensors with the promise beside them.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the point of it here, as .png.")]
Start = Annotated[str | None, typer.Option("--from", help="Where the interval begins.")]
End = Annotated[str | None, typer.Option("--to", help="Where the interval ends.")]

# Longer weights are left out of the JSON document; --save has them.
_MOST = 4096


@app.command()
def copy(
    target: Annotated[int, typer.Option(help="The key to copy from.")] = 0,
    eps: Eps = 0.01,
    shortest: Annotated[
        bool, typer.Option("--shortest", help="The shortest query there is, with a proof of it.")
    ] = False,
    keys: Keys = None,
    orthonormal: Orthonormal = None,
    random: Random = None,
    dim: Dim = None,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """A query that puts all but eps of the weight on one key."""
    from avow.constructions import copy_query

    given, kind = numbers.keys_from(keys, orthonormal, random, dim, seed), numbers.dtype_named(dtype)
    _deliver(lambda: copy_query(given, target, eps, shortest, kind), save, plot, as_json)


@app.command()
def average(
    subset: Annotated[str, typer.Option(help="The keys to average, separated by commas.")] = "0,1",
    eps: Eps = 0.01,
    keys: Keys = None,
    orthonormal: Orthonormal = None,
    random: Random = None,
    dim: Dim = None,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """A query that shares the weight evenly among some keys."""
    from avow.constructions import average_query

    given, kind = numbers.keys_from(keys, orthonormal, random, dim, seed), numbers.dtype_named(dtype)
    chosen = numbers.indices("subset", subset)
    _deliver(lambda: average_query(given, chosen, eps, kind), save, plot, as_json)


@app.command()
def mixture(
    weights: Annotated[str, typer.Option(help="The weights, separated by commas.")],
    subset: Annotated[str | None, typer.Option(help="The keys they are for; the first ones unless told.")] = None,
    eps: Eps = 0.01,
    keys: Keys = None,
    orthonormal: Orthonormal = None,
    random: Random = None,
    dim: Dim = None,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """A query that spreads the weight over some keys as told."""
    from avow.constructions import mixture_query

    given, kind = numbers.keys_from(keys, orthonormal, random, dim, seed), numbers.dtype_named(dtype)
    shares = numbers.fractions("weights", weights)
    chosen = list(range(len(shares))) if subset is None else numbers.indices("subset", subset)
    if len(set(chosen)) != len(shares) or len(chosen) != len(shares) or not set(chosen) <= set(range(len(given))):
        rule = f"must name {len(shares)} different keys among {len(given)}, one for each weight"
        raise ParameterError("subset", chosen, rule, "try --subset 0,1 --weights 0.7,0.3")
    spread = torch.zeros(len(given), dtype=torch.float64)
    spread[chosen] = torch.tensor([float(share) for share in shares], dtype=torch.float64)
    _deliver(lambda: mixture_query(given, spread, eps, kind), save, plot, as_json)


@app.command()
def route(
    route: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=SOURCES", help="Which token reads which, or averages which; may be repeated."),
    ] = None,
    eps: Eps = 0.01,
    keys: Annotated[Path | None, typer.Option(help="A .safetensors file with a tensor named keys: the tokens.")] = None,
    orthonormal: Annotated[int | None, typer.Option(help="So many unit vectors as tokens.")] = None,
    random: Annotated[int | None, typer.Option(help="So many tokens of random direction and length 1.")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the tokens.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """One attention head that delivers to each token what others carry."""
    from avow.constructions import router

    tokens = numbers.keys_from(keys, orthonormal, random, dim, seed).to(numbers.dtype_named(dtype))
    table = numbers.routes(route or [])
    _deliver(lambda: router(tokens, table, eps), save, plot, as_json)


@app.command("robust-heads")
def robust_heads(
    at_least: Annotated[float, typer.Option(help="Key a may be scaled by anything from here on.")] = 0.5,
    scales: Annotated[
        str | None, typer.Option(help="It is scaled by one of these instead, each as likely: 1/2,3/2.")
    ] = None,
    gauss: Annotated[str | None, typer.Option(help="By a Gaussian with this mean and variance instead: 1,1/2.")] = None,
    away: Annotated[bool, typer.Option("--away", help="Push all other keys down: survives zero and below.")] = False,
    noisy: Annotated[int, typer.Option(help="The key that is scaled.")] = 0,
    other: Annotated[int, typer.Option(help="The key it is averaged with.")] = 1,
    eps: Eps = 0.01,
    keys: Keys = None,
    orthonormal: Orthonormal = None,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Two heads whose mean keeps to two values while one of their keys is scaled at random."""
    from avow.constructions import AnyScale, DiscreteLaw, GaussianLaw
    from avow.constructions import robust_heads as made

    law: Any = AnyScale(at_least)
    if scales is not None:
        values = numbers.fractions("scales", scales)
        law = DiscreteLaw(values, [1 / numbers.fraction("scales", str(len(values)))] * len(values))
    if gauss is not None:
        moments = numbers.fractions("gauss", gauss)
        if len(moments) != 2 or scales is not None:
            raise ParameterError("gauss", repr(gauss), "must be a mean and a variance, without --scales", "try 1,1/2")
        law = GaussianLaw(*map(float, moments))
    given, kind = numbers.keys_from(keys, orthonormal, None, None, 0), numbers.dtype_named(dtype)
    own = None if keys is None else given
    _deliver(
        lambda: made(len(given), eps, law, away=away, keys=own, noisy=noisy, other=other, dtype=kind),
        save,
        plot,
        as_json,
    )


@app.command("project-out")
def project_out(
    input: Annotated[
        Path | None, typer.Option(help="A .safetensors file with A and B: columns to keep and to remove.")
    ] = None,
    dim: Annotated[int, typer.Option(help="Without a file: dimension of random columns.")] = 8,
    kept: Annotated[int, typer.Option(help="Without a file: columns to keep.")] = 2,
    removed: Annotated[int, typer.Option(help="Without a file: columns to remove.")] = 3,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """The projector that keeps one span and removes another."""
    from avow.constructions import project_out as made

    kind = numbers.dtype_named(dtype)
    if input is not None:
        a, b = numbers.tensor_in(input, "A"), numbers.tensor_in(input, "B")
    else:
        for name, size in (("dim", dim), ("kept", kept), ("removed", removed)):
            if size < 1:
                raise ParameterError(name, size, "must be at least 1", f"try --{name} 2")
        drawn = torch.randn(dim, kept + removed, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        a, b = drawn[:, :kept], drawn[:, kept:]
    _deliver(lambda: made(a.to(kind), b.to(kind)), save, plot, as_json)


@app.command("relu-linear")
def relu_linear(
    slope: Annotated[str, typer.Option(help="The slope, exactly as written: 2, 0.1 or 1/3.")] = "1",
    intercept: Annotated[str, typer.Option(help="The value at 0.")] = "0",
    start: Start = None,
    end: End = None,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """A straight line from two ReLUs, everywhere or on an interval."""
    from avow.constructions import relu_linear as made

    if (start is None) != (end is None):
        raise ParameterError("interval", f"from {start} to {end}", "has one end", "give --from and --to, or neither")
    interval = None
    if start is not None and end is not None:
        interval = numbers.fraction("from", start), numbers.fraction("to", end)
    m, b = numbers.fraction("slope", slope), numbers.fraction("intercept", intercept)
    _deliver(lambda: made(m, b, interval, numbers.dtype_named(dtype)), save, plot, as_json)


@app.command("relu-square")
def relu_square(
    eps: Eps = 1e-3,
    deep: Annotated[bool, typer.Option("--deep", help="Many thin layers in place of one wide one.")] = False,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """The square on [0, 1], within eps everywhere."""
    from avow.constructions import relu_square as made

    _deliver(lambda: made(eps, deep, numbers.dtype_named(dtype)), save, plot, as_json)


@app.command("relu-piecewise")
def relu_piecewise(
    formula: Annotated[str, typer.Option(help="A formula in x, such as exp(-x**2); read, never run.")],
    start: Annotated[str, typer.Option("--from", help="Where the interval begins.")] = "0",
    end: Annotated[str, typer.Option("--to", help="Where the interval ends.")] = "1",
    eps: Eps = 1e-3,
    dtype: Dtype = "float64",
    save: Save = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Any formula in x on an interval, within eps everywhere."""
    from avow.cli.formula import parse
    from avow.constructions import relu_piecewise as made

    curve, kind = parse(formula), numbers.dtype_named(dtype)
    interval = numbers.fraction("from", start), numbers.fraction("to", end)
    _deliver(lambda: made(curve, interval, eps, kind), save, plot, as_json)


def _deliver(make: Callable[[], Construction], save: Path | None, plot: Path | None, as_json: bool) -> None:
    """Make the weights, prove them, show and write them; a proof that fails leaves no file."""
    from avow import atomic
    from avow.report import charts
    from avow.report.weights import plain, saved, told, weights_table

    if plot is not None and plot.suffix != ".png":
        raise ParameterError("plot", plot, "must be a .png file", f"try --plot {plot.with_suffix('.png')}")
    for path in (save, plot):
        if path is not None:
            atomic.ready(path)
    made = make()
    proof = made.verify()
    files = []
    if proof and save is not None:
        files.append((save, saved(made, proof)))
    if proof and plot is not None:
        files.append((plot, charts.png(made.picture())))
    for path, content in files:
        atomic.write(path, content)
    if as_json:
        typer.echo(json.dumps(plain(made, proof, _MOST), indent=1, allow_nan=False))
    else:
        console = Console(highlight=False)
        console.print(weights_table(made), "", sep="\n")
        for part in told(proof):
            console.print(part)
    if not proof:
        typer.echo("avow: the proof does not hold; nothing was written", err=True)
        raise typer.Exit(1)
    for path, _ in files:
        typer.echo(f"wrote {path}", err=True)
