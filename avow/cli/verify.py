"""`avow verify`: what a plan does to a model's predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from avow.cli.options import AsJson
from avow.cli.profile import Model, Text, Threads, Tokens, use_threads


def verify(
    model: Model,
    plan: Annotated[Path, typer.Option(help="The plan that avow profile wrote.")],
    text: Text,
    tokens: Tokens = None,
    places: Annotated[int, typer.Option(help="Compare the predictions of so many of the last tokens.")] = 128,
    generate: Annotated[int, typer.Option(help="Write so many tokens behind the text, and compare them.")] = 32,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Perplexity, agreement, KL and generation under a plan beside exact attention, with certificates.

    Fails where a row that was recomputed in float64 is further off than its certificate says.
    """
    from avow.integrations.transformers.model_files import load_model, read_text
    from avow.integrations.transformers.model_plan import read_plan
    from avow.integrations.transformers.verification import verify as compare
    from avow.report.charts import columns
    from avow.report.profile_table import verdict_line, verdict_table

    use_threads(threads)
    made = read_plan(plan)
    loaded = load_model(model)
    verdict = compare(loaded.model, made, read_text(loaded, text, tokens), places, generate)
    if as_json:
        typer.echo(json.dumps(verdict.plain(), indent=1, allow_nan=False))
    else:
        console = Console()
        console.print(columns(verdict_table(verdict)), "", sep="\n")
        console.print(verdict_line(verdict), style="bold", highlight=False)
    if not verdict.kept:
        raise typer.Exit(1)
