"""`avow …`: every command is a thin reading of arguments around one call of the library."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

import avow
from avow.contract import Method, Sizes
from avow.errors import AvowError, ParameterError
from avow.methods import method_named
from avow.planner import Plan
from avow.workloads import KINDS, Workload, read, workload

# Longer than this, tensors are drawn at this length and only the prices are for the length asked for.
_DRAWN = 4096


class Polite(TyperGroup):
    """Mistakes end in one line, not in a traceback; an interrupt ends at once."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AvowError as problem:
            typer.echo(f"avow: {problem}", err=True)
            raise typer.Exit(2) from problem
        except KeyboardInterrupt as problem:
            typer.echo("avow: interrupted; nothing was written", err=True)
            raise typer.Exit(130) from problem


app = typer.Typer(
    cls=Polite,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Attention that keeps its word.",
)


def main() -> None:
    """The entry point."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"avow {avow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def methods_help() -> str:
    """Every method with its parameters, as the methods themselves declare them."""
    lines = ["Methods to compare, separated by commas; all unless told.", "", "\b"]
    for name, kind in avow.all_methods().items():
        lines.append(f"{name}: {kind.summary}")
        lines += [f"  {name}.{p.name}={p.default}: {p.help}" for p in kind.declared()]
    return "\n".join(lines)


def kinds_help() -> str:
    """Every kind of workload in a line."""
    lines = ["Kinds of heads to draw, separated by commas.", "", "\b"]
    return "\n".join(lines + [f"{name}: {kind.summary}" for name, kind in KINDS.items()])


Length = Annotated[int | None, typer.Option(help="Keys and queries; with --input, keep only the first so many keys.")]
Heads = Annotated[int, typer.Option(help="Heads to draw.")]
Dim = Annotated[int, typer.Option(help="Dimension of each head.")]
Input = Annotated[
    Path | None, typer.Option(help="Your own heads: a .safetensors file with q, k, v and, if you like, q_positions.")
]
Causal = Annotated[bool, typer.Option(help="Whether a row sees only keys up to its own place.")]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn and of random methods.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


@app.command()
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
    from avow.report import atomic
    from avow.report.compare import Bench, Comparison
    from avow.report.page import page
    from avow.report.picture import png as picture
    from avow.report.progress import progress
    from avow.report.table import board_table

    if threads < 1:
        raise ParameterError("threads", threads, "must be at least 1", "try --threads 1")
    loads = _workloads(kinds, input, length, heads, dim, seed, causal, device)
    names = _split(methods) or list(avow.all_methods())
    fixed = _fixed(settings or [], names, [load.sizes for load in loads])
    for name in names:
        method_named(name)
    for path in (html, *([png] if png else [])):
        atomic.ready(path)
    bench = Bench(names, fixed, seed, 1 if quick else 5, patience)
    lengths = [] if quick else _lengths(loads[0], drawn=input is None)
    steps = sum(len(list(bench.settings(name, load.sizes))) for load in loads for name in names) + len(lengths) * len(
        names
    )
    with _threads(threads), progress(steps) as tell:
        boards = tuple(bench.board(load, tell) for load in loads)
        longer = (
            loads[-1]
            if input
            else workload(loads[-1].kind, heads, max(lengths, default=1), dim, seed, causal=causal).to(device)
        )
        scaling = tuple(bench.scaling((longer.first(n) for n in lengths), tell))
    made = Comparison(boards, scaling, _machine(device, threads))
    atomic.write(html, page(made, _command()))
    if png:
        atomic.write(png, picture(made))
    if as_json:
        typer.echo(json.dumps(made.plain(), indent=1, allow_nan=False))
    else:
        console = Console(soft_wrap=False)
        for board in boards:
            console.print(board_table(board), "", sep="\n")
        console.print(made.headline, style="bold", highlight=False)
    for path in (html, *([png] if png else [])):
        typer.echo(f"wrote {path}", err=True)


@app.command()
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
    (load,) = _workloads(kind, input, length if input else drawn, heads, dim, seed, causal, device)
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


def _split(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _workloads(
    kinds: str, input: Path | None, length: int | None, heads: int, dim: int, seed: int, causal: bool, device: str
) -> list[Workload]:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ParameterError("device", device, "is not at hand", "use --device cpu")
    if length is not None and length < 1:
        raise ParameterError("length", length, "must be at least 1", "try --length 8192")
    if input is not None:
        own = read(input, causal)
        return [(own if length is None else own.first(length)).to(device)]
    names = _split(kinds)
    if not names:
        raise ParameterError("kinds", repr(kinds), "names no kind of workload", f"known kinds: {', '.join(KINDS)}")
    return [workload(name, heads, length or 8192, dim, seed, causal=causal).to(device) for name in names]


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


def _command() -> str:
    return " ".join(["avow", *sys.argv[1:]])


if __name__ == "__main__":
    main()
