"""`avow profile`: what each head of a model does with a text, and what a tolerance would save."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avow.cli.options import AsJson, Threads, command, files, use_threads
from avow.cli.output import document, wrote

if TYPE_CHECKING:
    from avow.integrations.transformers.profiling import Profile

Model = Annotated[str, typer.Argument(help="A folder, a .gguf file, or an installed package that carries one.")]
Text = Annotated[Path, typer.Option("--text", help="A text in UTF-8.")]
Tokens = Annotated[
    int | None, typer.Option(help="Read so many tokens; unless told, all that the model has positions for.")
]


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
    """What each head of a model does with a text, and a plan.

    The plan says what each method could save within a tolerance; avow.apply and avow verify take it.
    """
    from avow import file_io
    from avow.bench.clock import machine
    from avow.integrations.transformers.enabling import replaceable
    from avow.integrations.transformers.model_files import load_model, read_text, tokens_of
    from avow.integrations.transformers.model_plan import decoding_speed
    from avow.integrations.transformers.profiling import profile as measure
    from avow.report.charts import columns
    from avow.report.profile import headline, kinds_table, methods_table, profile_page, speed_table
    from avow.report.terminal import bold, progress, show

    written, words = files(html, plan), read_text(text)
    with use_threads(threads):
        loaded = load_model(model)
        ids = tokens_of(loaded, words, tokens)
        with progress(len(replaceable(loaded.model))) as tell:
            made = measure(loaded.model, ids, tol, budget, loaded.name, tell)
        if loaded.model.can_generate() and not loaded.model.config.is_encoder_decoder:
            made = dataclasses.replace(made, speed=decoding_speed(loaded.model, made.plan, ids))
        file_io.write(html, profile_page(made, command(), machine()))
    file_io.write(plan, made.plan.to_json())
    if as_json:
        document(plain(made))
    else:
        show(columns(kinds_table(made)), "", columns(methods_table(made)), "")
        if made.speed is not None:
            show(columns(speed_table(made.speed)), "")
        show(bold(headline(made)))
    wrote(written)


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
    speed = None if made.speed is None else dataclasses.asdict(made.speed) | {"verdict": made.speed.verdict}
    return facts | {"speed": speed, "layers": layers}


def _offer(offer: Any) -> dict[str, Any] | None:
    return None if offer is None else dataclasses.asdict(offer)
