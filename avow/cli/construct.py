"""`avow construct`: queries, heads and ReLU networks in closed form, with their proofs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from avow.cli import parsing
from avow.cli.options import AsJson, Png, Seed, files, present
from avow.errors import ParameterError
from avow.extras import require
from avow.theory import constructions
from avow.theory.constructions import formulas
from avow.theory.constructions.construction import Construction

app = typer.Typer(no_args_is_help=True, help="Weights in closed form that do what they say, with proofs.")

Keys = Annotated[Path | None, typer.Option(help="A .safetensors file with a tensor named keys, one key a row.")]
Orthonormal = Annotated[int | None, typer.Option(help="This number of keys, the unit vectors.")]
Random = Annotated[int | None, typer.Option(help="This number of keys, of random direction and length 1.")]
Dim = Annotated[int | None, typer.Option(help="Dimension of the keys; as many as there are keys by default.")]
Eps = Annotated[float, typer.Option(help="The error that is promised.")]
Save = Annotated[Path | None, typer.Option(help="Write the weights here, as .safetensors with the promise.")]
Start = Annotated[str | None, typer.Option("--from", help="Where the interval begins.")]
End = Annotated[str | None, typer.Option("--to", help="Where the interval ends.")]

# Longer weights are left out of the JSON document; --save has them.
_MOST = 4096


def _given(
    keys: Keys = None, orthonormal: Orthonormal = None, random: Random = None, dim: Dim = None, seed: Seed = 0
) -> Tensor:
    return parsing.keys_from(keys, orthonormal, random, dim, seed)


def _type(
    dtype: Annotated[str, typer.Option(help="Type of the weights: float64, float32, float16 or bfloat16.")] = "float64",
) -> torch.dtype:
    return parsing.dtype_named(dtype)


def _deliver(make: Callable[[], Construction], save: Save = None, png: Png = None, as_json: AsJson = False) -> None:
    """Make the weights, prove them, show and write them; a proof that fails leaves no file."""
    from avow import file_io
    from avow.report import charts
    from avow.report.weights import plain, proof_lines, safetensors_bytes, weights_table

    if save is not None:
        require("safetensors", purpose="to save weights")
    written = files(save, png=png)
    construction = make()
    proof = construction.verify()
    if proof and save is not None:
        file_io.write(save, safetensors_bytes(construction, proof))
    if proof and png is not None:
        file_io.write(png, charts.png(construction.picture()))
    faults = [] if proof else ["the proof does not hold; nothing was written"]
    parts = (weights_table(construction), "", *proof_lines(proof))
    present(as_json, plain(construction, proof, _MOST), *parts, written=written if proof else (), faults=faults)


def _construction(make: Callable[..., Construction]) -> Callable[..., None]:
    """A command of a function that makes weights.

    `given` and `kind` are read for it, from the options of `_given` and `_type`; what it makes goes to `_deliver`.
    """
    own = dict(inspect.signature(make, eval_str=True).parameters)
    readers = {name: reader for name, reader in (("given", _given), ("kind", _type)) if own.pop(name, None)}
    options = {each: dict(inspect.signature(each, eval_str=True).parameters) for each in (*readers.values(), _deliver)}
    del options[_deliver]["make"]

    def command(**values: Any) -> None:
        parts = {each: {name: values[name] for name in names} for each, names in options.items()}
        arguments = {name: values[name] for name in own}
        arguments |= {name: reader(**parts[reader]) for name, reader in readers.items()}
        _deliver(lambda: make(**arguments), **parts[_deliver])

    shown: Any = command
    parameters = [option for some in (own, *options.values()) for option in some.values()]
    shown.__signature__ = inspect.Signature([option.replace(kind=option.KEYWORD_ONLY) for option in parameters])
    app.command(make.__name__.replace("_", "-"), help=inspect.getdoc(make))(shown)
    return command


@_construction
def copy(
    given: Tensor,
    kind: torch.dtype,
    target: Annotated[int, typer.Option(help="The key to copy from.")] = 0,
    eps: Eps = 0.01,
    shortest: Annotated[bool, typer.Option("--shortest", help="The shortest query there is, with a proof.")] = False,
) -> Construction:
    """A query that puts all but eps of the weight on one key."""
    return constructions.copy_query(given, target, eps, shortest, kind)


@_construction
def average(
    given: Tensor,
    kind: torch.dtype,
    subset: Annotated[str, typer.Option(help="The keys to average, separated by commas.")] = "0,1",
    eps: Eps = 0.01,
) -> Construction:
    """A query that shares the weight evenly among some keys."""
    return constructions.average_query(given, parsing.indices("subset", subset), eps, kind)


@_construction
def mixture(
    given: Tensor,
    kind: torch.dtype,
    weights: Annotated[str, typer.Option(help="The weights, separated by commas.")],
    subset: Annotated[str | None, typer.Option(help="The keys they are for; the first ones by default.")] = None,
    eps: Eps = 0.01,
) -> Construction:
    """A query that weighs some keys in given proportions."""
    shares = parsing.fractions("weights", weights)
    chosen = list(range(len(shares))) if subset is None else parsing.indices("subset", subset)
    if len(set(chosen)) != len(shares) or len(chosen) != len(shares) or not set(chosen) <= set(range(len(given))):
        rule = f"must name {len(shares)} different keys among {len(given)}, one for each weight"
        raise ParameterError("subset", chosen, rule, "try --subset 0,1 --weights 0.7,0.3")
    spread = torch.zeros(len(given), dtype=torch.float64)
    spread[chosen] = torch.tensor([float(share) for share in shares], dtype=torch.float64)
    return constructions.mixture_query(given, spread, eps, kind)


@_construction
def route(
    given: Tensor,
    kind: torch.dtype,
    route: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=SOURCES", help="Which token reads which, or averages which; may be repeated."),
    ] = None,
    eps: Eps = 0.01,
) -> Construction:
    """A head that delivers to each token what others carry.

    The keys are the tokens.
    """
    return constructions.router(given.to(kind), parsing.routes(route or []), eps)


@_construction
def robust_heads(
    kind: torch.dtype,
    at_least: Annotated[float, typer.Option(help="The key may be scaled by anything from here on.")] = 0.5,
    scales: Annotated[str | None, typer.Option(help="By one of these instead, each as likely: 1/2,3/2.")] = None,
    gauss: Annotated[str | None, typer.Option(help="By a Gaussian with this mean and variance instead: 1,1/2.")] = None,
    away: Annotated[bool, typer.Option("--away", help="Push all other keys down: survives zero and below.")] = False,
    noisy: Annotated[int, typer.Option(help="The key that is scaled.")] = 0,
    other: Annotated[int, typer.Option(help="The key it is averaged with.")] = 1,
    eps: Eps = 0.01,
    keys: Keys = None,
    orthonormal: Orthonormal = None,
) -> Construction:
    """Two heads that average two values while a key is scaled.

    Their mean keeps to the two values, whatever the scale, or with the law of it.
    """
    law: Any = constructions.AnyScale(at_least)
    if scales is not None:
        values = parsing.fractions("scales", scales)
        law = constructions.DiscreteLaw(values, [1 / parsing.fraction("scales", str(len(values)))] * len(values))
    if gauss is not None:
        moments = parsing.fractions("gauss", gauss)
        if len(moments) != 2 or scales is not None:
            raise ParameterError("gauss", repr(gauss), "must be a mean and a variance, without --scales", "try 1,1/2")
        law = constructions.GaussianLaw(*map(float, moments))
    if (keys is None) == (orthonormal is None):
        both = keys is not None
        value, rule = ("both", "must be given in one way") if both else ("(not given)", "must be given")
        raise ParameterError("keys", value, rule, "use one of --keys FILE, --orthonormal N")
    given = parsing.keys_from(keys, orthonormal, None, None, 0)
    own = None if keys is None else given
    return constructions.robust_heads(len(given), eps, law, away=away, keys=own, noisy=noisy, other=other, dtype=kind)


@_construction
def project_out(
    kind: torch.dtype,
    input: Annotated[Path | None, typer.Option(help="A .safetensors file: A has columns to keep, B to remove.")] = None,
    dim: Annotated[int, typer.Option(help="Without a file: dimension of random columns.")] = 8,
    kept: Annotated[int, typer.Option(help="Without a file: columns to keep.")] = 2,
    removed: Annotated[int, typer.Option(help="Without a file: columns to remove.")] = 3,
    seed: Seed = 0,
) -> Construction:
    """The projector that keeps one span and removes another."""
    if input is not None:
        a, b = (parsing.tensor_in(input, name, "input") for name in ("A", "B"))
    else:
        for name, size in (("dim", dim), ("kept", kept), ("removed", removed)):
            if size < 1:
                raise ParameterError(name, size, "must be at least 1", f"try --{name} 2")
        drawn = torch.randn(dim, kept + removed, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        a, b = drawn[:, :kept], drawn[:, kept:]
    return constructions.project_out(a.to(kind), b.to(kind))


@_construction
def relu_linear(
    kind: torch.dtype,
    slope: Annotated[str, typer.Option(help="The slope: 2, 0.25, or, between --from and --to, 0.1 or 1/3.")] = "1",
    intercept: Annotated[str, typer.Option(help="The value at 0.")] = "0",
    start: Start = None,
    end: End = None,
) -> Construction:
    """A straight line from two ReLUs, everywhere or in part."""
    if (start is None) != (end is None):
        raise ParameterError("interval", f"from {start} to {end}", "has one end", "give --from and --to, or neither")
    interval = None
    if start is not None and end is not None:
        interval = parsing.fraction("from", start), parsing.fraction("to", end)
    line = parsing.fraction("slope", slope), parsing.fraction("intercept", intercept)
    try:
        return constructions.relu_linear(*line, interval, kind)
    except ParameterError as error:
        if error.name != "relu_linear: m":
            raise
        remedy = "give --from and --to, or a slope that the type holds, such as 1/4"
        remedy = remedy if interval is None else "bring --from and --to nearer to each other"
        raise ParameterError("slope", error.value, error.rule, remedy) from error


@_construction
def relu_square(
    kind: torch.dtype,
    eps: Eps = 1e-3,
    deep: Annotated[bool, typer.Option("--deep", help="Many thin layers in place of one wide one.")] = False,
) -> Construction:
    """The square on [0, 1], within eps everywhere."""
    return constructions.relu_square(eps, deep, kind)


@_construction
def relu_piecewise(
    kind: torch.dtype,
    formula: Annotated[str, typer.Option(help="A formula in x, such as exp(-x**2); read, never run.")],
    start: Start = "0",
    end: End = "1",
    eps: Eps = 1e-3,
) -> Construction:
    """Any formula in x on an interval, within eps everywhere."""
    interval = parsing.fraction("from", str(start)), parsing.fraction("to", str(end))
    return constructions.relu_piecewise(formulas.parse(formula), interval, eps, kind)
