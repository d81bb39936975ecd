"""`avow audit`: sampled rows of every attention call of a model, whoever computes it, recomputed in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from avow.cli.options import AsJson, Threads, command, files, option, present, report_file, report_option, use_threads
from avow.cli.profile import Model, Text, Tokens


def audit(
    model: Model,
    text: Text,
    tokens: Tokens = None,
    generate: Annotated[int, option("Write this many tokens after the text, and watch them, too.", min=0)] = 100,
    rate: Annotated[float, option("The least probability with which a row is recomputed.")] = 1e-3,
    tol: Annotated[float | None, option("The error that raises no alarm; default: what rounding can do.")] = None,
    attention: Annotated[
        str | None, option("The attention of transformers that is watched: sdpa, eager, ...; default: the model's own.")
    ] = None,
    threads: Threads = 2,
    html: Annotated[Path | None, report_option("out/audit.html")] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a model's attention while it reads a text and writes on.

    Sampled rows of every attention call are recomputed in float64, and errors reported by layer, whoever computed the
    answers. Fails if an error is provably larger than what is allowed, or if nothing could be judged.
    """
    import torch

    import avow
    from avow import file_io
    from avow.bench.clock import machine
    from avow.errors import ParameterError
    from avow.integrations.transformers.model_files import load_model, read_text, tokens_of
    from avow.report.audit import audit_page, audit_table
    from avow.report.charts import columns
    from avow.report.terminal import bold

    html = report_file(html, Path("out/audit.html"))
    written, words = files(html), read_text(text)
    with use_threads(threads), torch.no_grad():
        loaded = load_model(model)
        if attention is not None:
            try:
                loaded.model.set_attn_implementation(attention)
            except (ValueError, KeyError, ImportError) as error:
                rule = f"is not available ({str(error).splitlines()[0]})"
                raise ParameterError("attention", attention, rule, "try sdpa or eager") from error
        ids = tokens_of(loaded, words, tokens)
        with avow.auditing(loaded.model, rate=rate, tol=tol) as report:
            if generate and loaded.model.can_generate():
                options = {"max_new_tokens": generate, "min_new_tokens": generate, "do_sample": False}
                loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            else:
                loaded.model(ids)
    if html:
        file_io.write(html, audit_page(report, loaded.name, ids.shape[1], command(), machine()))
    parts = [columns(audit_table(report, short=True)), "", *report.remarks, "", bold(report.verdict)]
    faults = [] if report.healthy else [report.verdict]
    present(as_json, report.plain(), *parts, written=written, reported=html is not None, faults=faults)
