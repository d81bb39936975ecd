"""`avow knowledge`: the whole knowledge experiment in one command."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from avow.cli.options import AsJson, Device, command, files, option, place, present, report_file, split
from avow.extras import require

if TYPE_CHECKING:
    from avow.training.run_many import News

ATTENTIONS = ("exact", "separable", "random_features", "latent")


def knowledge(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.NAME=VALUE", help="Fields of every arm; see avow train pretrain --help."),
    ] = None,
    corpus: Annotated[str, option("A folder: wiki.txt, train.tsv, dev.tsv.", metavar="DIR|invented")] = "invented",
    attentions: Annotated[str, option("Attentions to compare, separated by commas.")] = ",".join(ATTENTIONS),
    positions: Annotated[str, option("Positions, separated by commas: rotary, learned, sinusoidal.")] = "rotary",
    seeds: Annotated[int, option("Runs of every arm; with several, the table shows their spread.")] = 1,
    steps: Annotated[int | None, option("Steps of the pretrained arms.")] = None,
    out: Annotated[Path, option("Where runs, report, picture and figures go.")] = Path("out/knowledge"),
    device: Device = "auto",
    jobs: Annotated[int | None, option("Arms at once; default: one per core, on a GPU one.", min=1)] = None,
    resume: Annotated[bool, option("Continue what an interrupted experiment left.", "--resume")] = False,
    as_json: AsJson = False,
) -> None:
    """What each attention can learn: models read, and are asked.

    Trains models with and without reading, asks them questions and compares, in under five minutes on two cores.
    """
    from avow import file_io
    from avow.bench.clock import machine
    from avow.report import charts
    from avow.report.knowledge import accuracy_plot, knowledge_page, knowledge_table
    from avow.report.terminal import bold
    from avow.training.knowledge import Experiment, arms
    from avow.training.run_many import Interrupted, side_by_side

    require("safetensors", purpose="to save checkpoints", extra="train")
    where = machine(place(device))
    chosen = arms(corpus, split(attentions), split(positions), seeds, steps, device, flags or [])
    html, picture, figures = report_file(None, out / "knowledge.html"), out / "knowledge.png", out / "knowledge.json"
    written = files(*([html, picture] if html else []), figures)
    try:
        with _progress() as tell:
            results = side_by_side(chosen, out, resume=resume, jobs=jobs, tell=tell)
    except (Interrupted, KeyboardInterrupt) as error:
        # The second interrupt does not wait for checkpoints.
        state = "every arm is saved" if isinstance(error, Interrupted) else "arms are at their last checkpoints"
        again = shlex.join(["avow", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
        typer.echo(f"avow: interrupted; {state}\ngo on with: {again}", err=True)
        raise typer.Exit(128 + (error.signal if isinstance(error, Interrupted) else signal.SIGINT)) from error
    experiment = Experiment.of(corpus, out, results)
    plain = {"command": command(), "machine": where, **experiment.plain()}
    file_io.write(figures, json.dumps(plain, indent=1, ensure_ascii=False))
    if html:
        file_io.write(picture, charts.png(accuracy_plot(experiment)))
        file_io.write(html, knowledge_page(experiment, command(), where))
    faults = [f"{failure.arm.name} did not finish: {failure.why}" for failure in experiment.failures]
    parts = knowledge_table(experiment), "", bold(experiment.headline)
    present(as_json, plain, *parts, written=written, reported=html is not None, faults=faults)


@contextmanager
def _progress() -> Iterator[Callable[[News], None]]:
    """A function that shows the progress of every arm: bars on a terminal, plain lines elsewhere, always on stderr."""
    if not sys.stderr.isatty():
        quarters: dict[str, int] = {}

        def line(news: News) -> None:
            quarter = 4 * news.step // max(news.steps, 1)
            if news.kind != "progress" or quarter != quarters.get(news.arm.name, 0):
                quarters[news.arm.name] = quarter
                typer.echo(f"{news.arm.name}: {_status(news)}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(news: News) -> None:
            name = news.arm.name
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None, status="")
            bars.update(tasks[name], status=_status(news))
            if news.kind == "progress":
                bars.update(tasks[name], total=news.steps, completed=news.step)
            elif news.kind != "began":
                bars.update(tasks[name], total=1, completed=1)
                bars.stop_task(tasks[name])

        yield bar


def _status(news: News) -> str:
    """
    >>> from avow.training.run_many import News
    >>> _status(News(None, "progress", 200, 1000, 1.2345))
    'step 200/1,000, loss 1.234'
    """
    if news.kind == "progress":
        return f"step {news.step:,}/{news.steps:,}, loss {news.loss:.3f}"
    return {"found": "was already finished", "failed": f"failed: {news.why}"}.get(news.kind, news.kind)
