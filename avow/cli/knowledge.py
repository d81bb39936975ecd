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

from avow.cli.options import AsJson, Device, command, files, place, split
from avow.cli.output import document, wrote

if TYPE_CHECKING:
    from avow.training.run_many import News


def knowledge(
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.NAME=VALUE",
            help="Fields of every arm's configuration; avow train pretrain --help lists them.",
        ),
    ] = None,
    corpus: Annotated[
        str, typer.Option(metavar="DIR|invented", help="A folder with wiki.txt, train.tsv and dev.tsv.")
    ] = "invented",
    attentions: Annotated[
        str, typer.Option(help="Attentions to compare, separated by commas.")
    ] = "exact,separable,random_features,latent",
    positions: Annotated[
        str, typer.Option(help="Kinds of positions, separated by commas: rotary, learned, sinusoidal.")
    ] = "rotary",
    seeds: Annotated[int, typer.Option(help="Runs of every arm; with several, the table tells their spread.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of the pretrained arms.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs, report, picture and figures go.")] = Path("out/knowledge"),
    device: Device = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Arms at once; one for each core unless told, on a GPU one.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted experiment left.")] = False,
    as_json: AsJson = False,
) -> None:
    """What each attention can learn: models read, and are asked.

    Trains models with and without reading, asks them and compares, in under five minutes on two cores.
    """
    from avow import file_io
    from avow.bench.clock import machine
    from avow.report import charts
    from avow.report.knowledge import accuracy_plot, knowledge_page, knowledge_table
    from avow.report.terminal import bold, show
    from avow.training.knowledge import Experiment, arms
    from avow.training.run_many import Interrupted, side_by_side

    where = machine(place(device))
    chosen = arms(corpus, split(attentions), split(positions), seeds, steps, device, flags or [])
    html, picture, figures = (out / f"knowledge.{kind}" for kind in ("html", "png", "json"))
    written = files(html, picture, figures)
    try:
        with _progress() as tell:
            results = side_by_side(chosen, out, resume=resume, jobs=jobs, tell=tell)
    except (Interrupted, KeyboardInterrupt) as error:
        # The second interrupt does not wait for checkpoints.
        state = "every arm is saved" if isinstance(error, Interrupted) else "arms stand at their last checkpoints"
        again = shlex.join(["avow", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
        typer.echo(f"avow: interrupted; {state}\ngo on with: {again}", err=True)
        raise typer.Exit(128 + (error.signal if isinstance(error, Interrupted) else signal.SIGINT)) from error
    experiment = Experiment.of(corpus, out, results)
    plain = {"command": command(), "machine": where, **experiment.plain()}
    file_io.write(figures, json.dumps(plain, indent=1, ensure_ascii=False))
    file_io.write(picture, charts.png(accuracy_plot(experiment)))
    file_io.write(html, knowledge_page(experiment, command(), where))
    if as_json:
        document(plain)
    else:
        show(knowledge_table(experiment), "", bold(experiment.headline))
    for failed in experiment.failures:
        typer.echo(f"avow: {failed.arm.name} came to no end: {failed.why}", err=True)
    wrote(written)
    if experiment.failures:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[News], None]]:
    """How far every arm is: bars on a terminal, plain lines elsewhere, always on stderr."""
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
    return {"found": "had finished before", "failed": f"failed: {news.why}"}.get(news.kind, news.kind)
