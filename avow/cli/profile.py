"""`avow profile`: what each head of a model does with a text, and what a tolerance would save. `avow verify`: what the
plan that follows does to the model's predictions.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avow.cli.options import AsJson, Threads, command, files, option, present, report_file, report_option, use_threads

if TYPE_CHECKING:
    from avow.integrations.transformers.profiling import Profile

Model = Annotated[
    str,
    typer.Argument(
        help="A folder, a .gguf file, an installed package that carries one, or a name such as "
        "meta-llama/Llama-3.2-1B (perhaps with @revision) that is in the local Hugging Face cache."
    ),
]
Text = Annotated[Path, option("A text in UTF-8.", "--text")]
Tokens = Annotated[int | None, option("Read this many tokens; default: all that the model has positions for.")]


def profile(
    model: Model,
    text: Text,
    tol: Annotated[float, option("The error that every row of every head may have.")] = 1e-2,
    budget: Annotated[float, option("The share of exact attention's cost that a plan may take.")] = 0.5,
    tokens: Tokens = None,
    threads: Threads = 2,
    html: Annotated[Path | None, report_option("out/profile.html")] = None,
    plan: Annotated[Path, option("Where the plan goes.")] = Path("out/plan.json"),
    as_json: AsJson = False,
) -> None:
    """What each head of a model does with a text, and a plan.

    The plan says what each method could save within a tolerance; avow.apply and avow verify take it. Ctrl-C ends the
    run early: what was measured until then is reported and written.
    """
    from avow import file_io
    from avow.bench.clock import machine
    from avow.integrations.transformers.enabling import replaceable
    from avow.integrations.transformers.model_files import load_model, read_text, tokens_of, words_of
    from avow.integrations.transformers.model_plan import decoding_speed
    from avow.integrations.transformers.profiling import ProfileInterrupted
    from avow.integrations.transformers.profiling import profile as measure
    from avow.report.charts import columns
    from avow.report.profile import kinds_table, methods_table, profile_page, speed_table
    from avow.report.terminal import bold, progress

    html = report_file(html, Path("out/profile.html"))
    written, words = files(html, plan), read_text(text)
    with use_threads(threads):
        loaded = load_model(model)
        ids = tokens_of(loaded, words, tokens)
        decoder = loaded.model.can_generate() and not loaded.model.config.is_encoder_decoder
        stopped = ""
        with progress(len(replaceable(loaded.model)) + decoder, alike=0) as tell:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ProfileInterrupted)  # said below
                result = measure(loaded.model, ids, tol, budget, loaded.name, tell)
            if result.unmeasured:
                measured = len(result.layers)
                stopped = f"{measured} of {measured + len(result.unmeasured)} layers; the others are exact in the plan"
            elif decoder:
                tell("the cost of a new token")
                try:
                    result = dataclasses.replace(result, speed=decoding_speed(loaded.model, result.plan, ids))
                except KeyboardInterrupt:
                    stopped = "all layers, before the cost of a new token was measured"
        if html:
            file_io.write(html, profile_page(result, command(), machine(), words_of(loaded, ids)))
    file_io.write(plan, result.plan.to_json())
    tables = [kinds_table(result), methods_table(result)]
    if result.speed is not None:
        tables.append(speed_table(result.speed))
    parts = [part for table in tables for part in (columns(table), "")]
    present(as_json, plain(result), *parts, bold(result.headline), written=written, reported=html is not None)
    if stopped:
        typer.echo(f"avow: interrupted after {stopped}", err=True)
        raise typer.Exit(130)


def verify(
    model: Model,
    plan: Annotated[Path, option("The plan that avow profile wrote.")],
    text: Text,
    tokens: Tokens = None,
    places: Annotated[int, option("Compare the predictions of this many of the last tokens.")] = 128,
    generate: Annotated[int, option("Write this many tokens after the text, and compare them.")] = 32,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """What a plan changes in a model's predictions.

    Perplexity, agreement, KL and generation under the plan beside exact attention, with certificates. Fails if a row
    that was recomputed in float64 has a larger error than its certificate says.
    """
    from avow.integrations.transformers.model_files import load_model, read_text, tokens_of
    from avow.integrations.transformers.model_plan import check_places, read_plan, verify_steps
    from avow.integrations.transformers.model_plan import verify as compare
    from avow.report.charts import columns
    from avow.report.profile import verdict_line, verdict_table
    from avow.report.terminal import bold, progress

    planned, words = read_plan(plan), read_text(text)
    if tokens is not None:
        check_places(tokens, places)  # before the model is loaded
    with use_threads(threads):
        loaded = load_model(model)
        ids = tokens_of(loaded, words, tokens)
        with progress(verify_steps(places, generate), alike=2) as tell:
            verdict = compare(loaded.model, planned, ids, places, generate, tell)
    present(as_json, verdict.plain(), columns(verdict_table(verdict)), "", bold(verdict_line(verdict)))
    if not verdict.kept:
        raise typer.Exit(1)


def plain(profile: Profile) -> dict[str, Any]:
    """A profile as JSON has it; `null` where nothing is promised."""

    def as_dict(offer: Any) -> dict[str, Any] | None:
        return None if offer is None else dataclasses.asdict(offer)

    layers = {
        name: [
            {
                **dataclasses.asdict(head.figures),
                "exact_bound": head.exact_bound,
                "offers": [as_dict(offer) for offer in head.offers],
                "within_budget": {x: as_dict(head.within_budget(x, profile.budget)) for x in head.methods},
                "within_tolerance": {x: as_dict(head.within_tolerance(x, profile.tol)) for x in head.methods},
                "chosen": as_dict(head.chosen(profile.tol, profile.budget)),
                "readings": [dataclasses.asdict(reading) for reading in head.readings],
            }
            for head in heads
        ]
        for name, heads in profile.layers.items()
    }
    names = ("model", "fingerprint", "tokens", "tol", "budget", "seconds", "share", "unmeasured")
    speed = None if profile.speed is None else dataclasses.asdict(profile.speed) | {"verdict": profile.speed.verdict}
    return {name: getattr(profile, name) for name in names} | {"speed": speed, "layers": layers}
