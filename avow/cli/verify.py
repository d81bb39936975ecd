"""`avow verify`: what a plan does to a model's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from avow.cli.options import AsJson, Threads, use_threads
from avow.cli.output import document
from avow.cli.profile import Model, Text, Tokens


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
    """What a plan changes in a model's predictions.

    Perplexity, agreement, KL and generation under the plan beside exact attention, with certificates. Fails where a
    row that was recomputed in float64 is further off than its certificate says.
    """
    from avow.integrations.transformers.model_files import load_model, read_text, tokens_of
    from avow.integrations.transformers.model_plan import read_plan
    from avow.integrations.transformers.model_plan import verify as compare
    from avow.report.charts import columns
    from avow.report.profile import verdict_line, verdict_table
    from avow.report.terminal import bold, show

    made, words = read_plan(plan), read_text(text)
    with use_threads(threads):
        loaded = load_model(model)
        verdict = compare(loaded.model, made, tokens_of(loaded, words, tokens), places, generate)
    if as_json:
        document(verdict.plain())
    else:
        show(columns(verdict_table(verdict)), "", bold(verdict_line(verdict)))
    if not verdict.kept:
        raise typer.Exit(1)
