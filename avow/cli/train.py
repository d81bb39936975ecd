"""`avow train`: pretrain and fine-tune language models, ask them questions, let them write."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from avow.cli.options import AsJson, command
from avow.errors import FileError, ParameterError

if TYPE_CHECKING:
    from avow.report.evaluation import Asked
    from avow.training import TrainConfig, Trained

app = typer.Typer(no_args_is_help=True, help="Pretrain and fine-tune models, ask them questions, let them write.")

# How long a run is where nobody says.
LENGTHS = {"pretrain": "schedule.steps=1000", "finetune": "schedule.steps=200"}
# What each command trains on; the first unless told.
TASKS = {"pretrain": ("pretrain", "mixed", "cloze"), "finetune": ("finetune",)}
# In place of a pretrained run: the baseline that has read nothing.
NOTHING = "nothing"


class Configured(TyperCommand):
    """A command whose help ends in all fields of a configuration, as the configuration declares them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from avow.nn import ModelConfig
        from avow.params import parameters_of
        from avow.training.config import SECTIONS

        # What the command says where the configuration leaves it open.
        own = dict([LENGTHS[str(self.name)].split("=")])
        formatter.write_paragraph()
        formatter.write_text("Fields of a configuration, in a file or as section.name=value:")
        for section, kind in SECTIONS.items():
            told = []
            for p in parameters_of(kind):
                name = f"{section}.{p.name}"
                choices = f" ({', '.join(p.rule.choices)})" if p.rule.choices else ""
                told.append((f"{name}={own.get(name, p.default)}", f"{p.help}{choices}"))
            with formatter.section(section):
                formatter.write_dl(told)
        usual = ModelConfig(vocabulary=1)
        with formatter.section("model"):
            names = [field.name for field in fields(usual) if field.name != "vocabulary"]
            formatter.write_text(", ".join(f"model.{name}={getattr(usual, name)}" for name in names))


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run: log, configuration, checkpoints.")]
Trained_ = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")]
Flags = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.NAME=VALUE]...", help="Fields of the configuration; see below.")
]
Config = Annotated[Path | None, typer.Option(help="A configuration in TOML or JSON; fields on the command line win.")]
Corpus = Annotated[str | None, typer.Option(metavar="DIR|invented", help="The same as data.corpus.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in RUN, if there is one.")]
ResumeFrom = Annotated[Path | None, typer.Option(help="Go on from this checkpoint of RUN.")]
Device = Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="The same as run.device.")]


@app.command(cls=Configured)
def pretrain(
    run: Run,
    flags: Flags = None,
    config: Config = None,
    corpus: Corpus = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on documents: 1,000 steps on invented people, unless told."""
    given = _with(flags, {"data.corpus": corpus, "run.device": device})
    _train("pretrain", run, config, given, [LENGTHS["pretrain"]], resume_from or resume, as_json)


@app.command(cls=Configured)
def finetune(
    run: Run,
    flags: Flags = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN|CHECKPOINT",
            help=f"The pretrained model, of a run its newest whole checkpoint; {NOTHING}: one that has read nothing.",
        ),
    ] = None,
    config: Config = None,
    corpus: Corpus = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Teach a pretrained model to answer: 200 steps on its own corpus's questions, unless told."""
    given = _with(flags, {"data.corpus": corpus, "run.device": device})
    defaults = [LENGTHS["finetune"]]
    resumed = bool(resume_from or resume) and (run / "config.json").exists()
    if origin is not None and origin != NOTHING:
        start = _start(Path(origin))
        given = _with(given, {"run.start": str(start)})
        defaults.append(f"data.corpus={_facts(start)['data']['corpus']}")
    elif origin is None and not resumed and not any(flag.startswith("run.start=") for flag in given):
        remedy = f"name a pretrained run, or use --from {NOTHING} for one that has read nothing"
        raise ParameterError("--from", None, "says what to begin with, and must be given", remedy)
    if not resumed:
        given = _with(given, {"data.task": "finetune"})
    _train("finetune", run, config, given, defaults, resume_from or resume, as_json)


@app.command()
def evaluate(
    run: Trained_,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE.tsv", help="Questions and answers, parted by a tab.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(metavar="DIR|invented", help="Ask its dev.tsv; the run's own corpus unless told.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the charts and every answer.")] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a model questions: exact matches, and whether its confidence says which answers are made up."""
    from avow.report import atomic
    from avow.report.evaluation import page, told

    if questions is not None and corpus is not None:
        raise ParameterError("--questions", questions, f"contradicts --corpus {corpus}", "give one of them")
    if html is not None:
        atomic.ready(html)
    asked = _asked(run, questions, corpus, device)
    if html is not None:
        atomic.write(html, page(asked, command()))
    if as_json:
        _print(asked.plain())
    else:
        console = Console(highlight=False)
        for part in told(asked):
            console.print(part)
    if html is not None:
        typer.echo(f"wrote {html}", err=True)


@app.command()
def sample(
    run: Trained_,
    text: Annotated[str, typer.Argument(help="How it begins; ⁇ stands for the mask.")],
    length: Annotated[int, typer.Option(help="Characters to write at most; the block ends it too.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the likeliest character; 1: as the model draws.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of what is drawn.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text."""
    import torch

    from avow.training import load_model
    from avow.training import sample as continued
    from avow.training.parallel import ranks

    model, vocabulary = load_model(run)
    with ranks(_device(device)) as here:
        generator = torch.Generator().manual_seed(seed)
        written = continued(model.to(here.device), vocabulary, text, length, temperature, generator)
    if as_json:
        _print({"text": text, "written": written, "temperature": temperature, "seed": seed})
    else:
        typer.echo(text + typer.style(written, bold=True))


def _train(
    name: str,
    run: Path,
    file: Path | None,
    flags: list[str],
    defaults: list[str],
    resume: bool | Path,
    as_json: bool,
) -> None:
    """Train, tell how far it is, and say what came of it."""
    from avow.report.training_progress import training_progress
    from avow.training import read_config, train

    if "=" in run.name:
        raise ParameterError("RUN", repr(str(run)), "reads like a field", "name the folder of the run first")
    if resume and file is None and (run / "config.json").exists():
        file = run / "config.json"  # A run remembers what it was told.
    config = read_config(file, flags, defaults)
    if config.data.task not in TASKS[name]:
        other = next(other for other, tasks in TASKS.items() if config.data.task in tasks)
        rule = f"contradicts avow train {name}"
        raise ParameterError("data: task", repr(config.data.task), rule, f"use avow train {other}")
    first = os.environ.get("RANK", "0") == "0"
    try:
        with training_progress() if first else nullcontext() as tell:
            done = train(config, run, resume=resume, progress=tell)
    except KeyboardInterrupt as problem:
        # The second interrupt, or one before the first step.
        if first:
            typer.echo(f"avow: stopped at once; {_standing(name, run)}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from problem
    if first:
        _told(name, run, config, done, as_json)
    if done.interrupted:
        raise typer.Exit(128 + (done.signal or signal.SIGINT))


def _told(name: str, run: Path, config: TrainConfig, done: Trained, as_json: bool) -> None:
    """A run's end, on stdout as JSON or in words; where it was interrupted, on stderr how to go on."""
    from avow.training.log import COLUMNS, read_log

    if done.last is not None:
        last = asdict(done.last)
    else:  # Nothing was left to do, or it stopped before its first line.
        rows = read_log(run / "log.csv")
        last = {column: float(rows[-1][column]) if rows else None for column in COLUMNS}
    if as_json:
        shown = {key: last[key] for key in ("steps", "epoch", "loss", "rate", "norm", "tokens_per_second", "mfu")}
        resumable = {"interrupted": done.interrupted, "checkpoint": str(done.checkpoint)}
        document = {"run": str(run), "step": done.step, **shown, **resumable}
        _print(document | {"config": json.loads(config.to_json())})
    elif last["loss"] is not None:
        typer.echo(
            f"{done.step:,} steps, {last['epoch']:,.1f} epochs: loss {last['loss']:.3f} nats per character, "
            f"{last['tokens_per_second']:,.0f} tokens/s, MFU {last['mfu']:.1%}"
        )
    if done.interrupted:
        typer.echo(f"avow: interrupted at step {done.step:,} and saved in {done.checkpoint}", err=True)
        typer.echo(f"go on with: {_again(name, run)}", err=True)
    elif not as_json:
        typer.echo(f"checkpoint {done.checkpoint}")
        typer.echo(f"next: {_next(run, config)}")


def _next(run: Path, config: TrainConfig) -> str:
    """The command that makes sense after a run."""
    from avow.training import corpus_of

    corpus, place = corpus_of(config.data.corpus), shlex.quote(str(run))
    if config.data.task == "pretrain" and corpus.train:
        return f"avow train finetune {shlex.quote(f'{run}-tuned')} --from {place}"
    if corpus.dev and config.data.task != "pretrain":
        return f"avow train evaluate {place}"
    begin = (corpus.documents[0].text if corpus.documents else corpus.train[0].question).split()[0]
    return f"avow train sample {place} {shlex.quote(begin)}"


def _again(name: str, run: Path) -> str:
    """The command that resumes a run, as it was started."""
    words = ["train", name, str(run), "--resume"]
    world = os.environ.get("LOCAL_WORLD_SIZE")
    begin = ["torchrun", f"--nproc-per-node={world}", "-m", "avow"] if world else ["avow"]
    return shlex.join(begin + words)


def _standing(name: str, run: Path) -> str:
    """What is left of a run that was stopped at once."""
    from avow.training import checkpoint

    kept = checkpoint.newest(run / "checkpoints")
    return f"{kept} is whole; go on with: {_again(name, run)}" if kept else "no checkpoint was written yet"


def _with(flags: list[str] | None, options: dict[str, str | None]) -> list[str]:
    """Flags and what options say of the same fields; they may say it twice, but not two things."""
    found = list(flags or [])
    for field, value in options.items():
        said = [flag.partition("=")[2] for flag in found if flag.startswith(f"{field}=")]
        if value is not None and said and said[-1] != value:
            rule = f"contradicts {value}, which the command or its options say"
            raise ParameterError(field, repr(said[-1]), rule, "say it once")
        if value is not None:
            found.append(f"{field}={value}")
    return found


def _start(path: Path) -> Path:
    """The newest whole checkpoint of a run, or the checkpoint that was named."""
    from avow.training import checkpoint
    from avow.training.load import last_of

    last = last_of(path)
    kept = last if last == path else checkpoint.newest(last.parent)
    if kept is None:
        raise FileError("run", path, "has no checkpoint that is whole", "train it again, or name another")
    if kept != last:
        typer.echo(f"avow: {last} {checkpoint.fault(last)}; beginning with {kept}", err=True)
    return kept


def _facts(path: Path) -> dict[str, Any]:
    from avow.training import checkpoint

    return dict(checkpoint.facts(path)["config"])


def _asked(run: Path, questions: Path | None, corpus: str | None, device: str) -> Asked:
    """A model's answers, to a file's questions or a corpus's; by default to those of the corpus it was trained on."""
    from avow.report.evaluation import Asked
    from avow.training import corpus_of, evaluate, load_model, majority, read_questions
    from avow.training.load import last_of
    from avow.training.parallel import ranks

    path = last_of(run)
    model, vocabulary = load_model(path)
    name = corpus or _facts(path)["data"]["corpus"]
    if questions is not None:
        given, where = read_questions(questions), str(questions)
        try:
            train = corpus_of(name).train
        except FileError:
            train = ()  # The corpus may have moved since; the questions are here.
    else:
        read = corpus_of(name)
        given, train, where = read.dev, read.train, f"the dev questions of {name}"
        if not given:
            raise FileError("corpus", name, "has no dev questions", "add a dev.tsv, or give --questions FILE.tsv")
    with ranks(_device(device)) as here:
        found = evaluate(model.to(here.device), vocabulary, given)
    return Asked(path, where, found, majority(train, given) if train else None)


def _device(name: str) -> str:
    from avow.params import parameters_of
    from avow.training.config import RunConfig

    (declared,) = (p for p in parameters_of(RunConfig) if p.name == "device")
    return str(declared.read("--device", name))


def _print(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
