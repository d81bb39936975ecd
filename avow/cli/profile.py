"""`avow profile`: what each head of a model does with a text, and what a tolerance would save."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from avow.cli.options import AsJson, command
from avow.errors import ParameterError

if TYPE_CHECKING:
    from avow.integrations.transformers.profiling import Profile

Model = Annotated[str, typer.Argument(help="A folder, a .gguf file, or an installed package that carries one.")]
Text = Annotated[Path, typer.Option("--text", help="A text in UTF-8.")]
Tokens = Annotated[
    int | None, typer.Option(help="Read so many tokens; unless told, all that the model has positions for.")
]
Threads = Annotated[int, typer.Option(help="CPU threads.")]


def profile(
    model: Model,
    text: Text,
    tol: Annotated[float, typer.Option(help="The error that every row of every head may have.")] = 1e-2,
    budget: Annotated[float, typer.Option(help="The share of exact attention's cost that a plan may take.")] = 0.5,
    tokens: Tokens = None,
    threads: Threads = 2,
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("out/profile.html"),
    plan: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("out/plan.json"),
    as_json: AsJson = False,
) -> None:
    """What each head of a model does with a text, what each method could save, and a plan for avow.apply."""
    from avow import atomic
    from avow.integrations.transformers.layers import replaceable
    from avow.integrations.transformers.model_files import load_model, read_text
    from avow.integrations.transformers.profiling import profile as measure
    from avow.report.charts import columns
    from avow.report.profile_page import profile_page
    from avow.report.profile_table import headline, kinds_table, methods_table
    from avow.report.progress import progress

    for path in (html, plan):
        atomic.ready(path)
    use_threads(threads)
    loaded = load_model(model)
    ids = read_text(loaded, text, tokens)
    with progress(len(replaceable(loaded.model))) as tell:
        made = measure(loaded.model, ids, tol, budget, loaded.name, tell)
    atomic.write(html, profile_page(made, command(), machine(threads)))
    atomic.write(plan, made.plan.to_json())
    if as_json:
        typer.echo(json.dumps(plain(made), indent=1, allow_nan=False))
    else:
        console = Console()
        for table in (kinds_table(made), methods_table(made)):
            console.print(columns(table), "", sep="\n")
        console.print(headline(made), style="bold", highlight=False)
    for path in (html, plan):
        typer.echo(f"wrote {path}", err=True)


def use_threads(threads: int) -> None:
    """Have torch use so many; the command ends with the process."""
    if threads < 1:
        raise ParameterError("threads", threads, "must be at least 1", "try --threads 1")
    torch.set_num_threads(threads)


def machine(threads: int) -> str:
    return f"{threads} CPU thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


def plain(made: Profile) -> dict[str, Any]:
    """A profile as JSON has it; `null` where nothing is promised."""
    layers = {}
    for name, heads in made.layers.items():
        layers[name] = [
            {
                **dataclasses.asdict(head.figures),
                "exact_bound": head.exact_bound,
                "offers": [dataclasses.asdict(offer) for offer in head.offers],
                "within_budget": {x: _offer(head.within_budget(x, made.budget)) for x in head.methods},
                "within_tolerance": {x: _offer(head.within_tolerance(x, made.tol)) for x in head.methods},
                "chosen": _offer(head.chosen(made.tol, made.budget)),
            }
            for head in heads
        ]
    facts = {
        name: getattr(made, name) for name in ("model", "fingerprint", "tokens", "tol", "budget", "seconds", "share")
    }
    return facts | {"layers": layers}


def _offer(offer: Any) -> dict[str, Any] | None:
    return None if offer is None else dataclasses.asdict(offer)
