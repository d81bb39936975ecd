"""`avow train`: pretrain and fine-tune language models, ask them questions, let them write."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avow.cli import options
from avow.cli.options import AsJson, Device, Seed, command_with, configuration, document, option, place
from avow.errors import FileError, ParameterError

if TYPE_CHECKING:
    from avow.training import TrainConfig, Trained

app = typer.Typer(no_args_is_help=True, help="Pretrain and fine-tune models, ask them, let them write.")

# The number of steps by default, and what each command trains on.
STEPS = {"pretrain": 1000, "finetune": 200}
TASKS = {"pretrain": ("pretrain", "mixed", "cloze"), "finetune": ("finetune",)}
# In place of a pretrained run: the baseline that has read nothing.
NOTHING = "nothing"
_FROM = f"The pretrained model, of a run its newest good checkpoint; {NOTHING}: one that has read nothing."

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run: log, configuration, checkpoints.")]
Finished = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")]
Flags = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.NAME=VALUE", help="Fields of the configuration; see below.")
]
Config = Annotated[Path | None, option("A configuration in TOML or JSON; fields on the command line win.")]
Corpus = Annotated[str | None, option("The same as data.corpus.", metavar="DIR|invented")]
Origin = Annotated[str | None, option(_FROM, "--from", metavar="RUN|CHECKPOINT")]
Resume = Annotated[bool, option("Continue from the last checkpoint in RUN, if there is one.", "--resume")]
ResumeFrom = Annotated[Path | None, option("Continue from this checkpoint of RUN.")]
RunDevice = Annotated[str | None, option("The same as run.device.", "--device", metavar="auto|cpu|cuda")]
Questions = Annotated[Path | None, option("Questions and answers, separated by a tab.", metavar="FILE.tsv")]
DevCorpus = Annotated[str | None, option("Ask its dev.tsv; default: that of the run's corpus.", metavar="DIR|invented")]
Temperature = Annotated[float, option("How freely it draws: 0 is the likeliest character, 1 as the model says.")]


@app.command(cls=command_with(lambda: configuration(steps=STEPS["pretrain"])))
def pretrain(
    run: Run,
    flags: Flags = None,
    config: Config = None,
    corpus: Corpus = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: RunDevice = None,
    as_json: AsJson = False,
) -> None:
    """Train a model on documents.

    By default on those of invented people.
    """
    given = _with_options(flags, {"data.corpus": corpus, "run.device": device})
    _fit("pretrain", run, config, given, [], resume_from or resume, as_json)


@app.command(cls=command_with(lambda: configuration(steps=STEPS["finetune"])))
def finetune(
    run: Run,
    flags: Flags = None,
    origin: Origin = None,
    config: Config = None,
    corpus: Corpus = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: RunDevice = None,
    as_json: AsJson = False,
) -> None:
    """Teach a pretrained model to answer questions.

    By default those of the corpus it has read.
    """
    from avow.training import checkpoint

    given = _with_options(flags, {"data.corpus": corpus, "run.device": device})
    defaults = []
    resumed = bool(resume_from or resume) and (run / "config.json").exists()
    if origin is not None and origin != NOTHING:
        start = _start(Path(origin))
        given = _with_options(given, {"run.start": str(start)})
        defaults.append(f"data.corpus={checkpoint.described(start)['facts']['config']['data']['corpus']}")
    elif origin is None and not resumed and not any(flag.startswith("run.start=") for flag in given):
        remedy = f"name a pretrained run, or use --from {NOTHING} for one that has read nothing"
        raise ParameterError("from", None, "says what to begin with, and must be given", remedy)
    if not resumed:
        given = _with_options(given, {"data.task": "finetune"})
    _fit("finetune", run, config, given, defaults, resume_from or resume, as_json)


@app.command()
def evaluate(
    run: Finished,
    questions: Questions = None,
    corpus: DevCorpus = None,
    html: Annotated[Path | None, option("Write a report with the charts and every answer.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a model questions, and see what it makes up.

    Counts exact matches, and whether its confidence says which answers are made up.
    """
    from avow import file_io
    from avow.report.knowledge import ModelAnswers, evaluation_lines, evaluation_page
    from avow.training import checkpoint, corpus_of, load_model, majority, read_questions
    from avow.training import evaluate as evaluation_of

    if questions is not None and corpus is not None:
        raise ParameterError("questions", questions, f"contradicts --corpus {corpus}", "give one of them")
    written = options.files(html)
    path = checkpoint.last_of(run)
    model, vocabulary = load_model(path)
    name = corpus or checkpoint.described(path)["facts"]["config"]["data"]["corpus"]
    if questions is not None:
        given, where = read_questions(questions), str(questions)
        try:
            train = corpus_of(name).train
        except FileError:
            train = ()  # The corpus may have moved since; the questions are here.
    else:
        texts = corpus_of(name)
        given, train, where = texts.dev, texts.train, f"the dev questions of {name}"
        if not given:
            raise FileError("corpus", name, "has no dev questions", "add a dev.tsv, or give --questions FILE.tsv")
    evaluation = evaluation_of(model.to(place(device)), vocabulary, given)
    answers = ModelAnswers(path, where, evaluation, majority(train, given) if train else None)
    if html is not None:
        file_io.write(html, evaluation_page(answers, options.command()))
    options.present(as_json, answers.plain(), *evaluation_lines(answers), written=written)


@app.command()
def sample(
    run: Finished,
    text: Annotated[str, typer.Argument(help="How it begins; ⁇ stands for the mask.")],
    length: Annotated[int, option("Characters to write at most; the block ends it too.")] = 200,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text."""
    import torch

    from avow.training import load_model
    from avow.training import sample as continuation

    model, vocabulary = load_model(run)
    generator = torch.Generator().manual_seed(seed)
    written = continuation(model.to(place(device)), vocabulary, text, length, temperature, generator)
    if as_json:
        document({"text": text, "written": written, "temperature": temperature, "seed": seed})
    else:
        typer.echo(text + typer.style(written, bold=True))


def _with_options(flags: list[str] | None, options: dict[str, str | None]) -> list[str]:
    """Flags and what options say of the same fields; both may say the same, but not two things."""
    every = list(flags or [])
    for field, value in options.items():
        if value is None:
            continue
        others = [flag.partition("=")[2] for flag in every if flag.startswith(f"{field}=")]
        if others and others[-1] != value:
            rule = f"contradicts {value}, which the command or its options say"
            raise ParameterError(field, repr(others[-1]), rule, "say it once")
        every.append(f"{field}={value}")
    return every


def _start(path: Path) -> Path:
    """The newest good checkpoint of a run, or the checkpoint that was named."""
    from avow.training import checkpoint

    last = checkpoint.last_of(path)
    good = last if last == path else checkpoint.newest(last.parent)
    if good is None:
        raise FileError("run", path, "has no checkpoint that is whole", "train it again, or name another")
    if good != last:
        typer.echo(f"avow: {last} {checkpoint.fault(last)}; beginning with {good}", err=True)
    return good


def _fit(
    name: str, run: Path, file: Path | None, flags: list[str], defaults: list[str], resume: bool | Path, as_json: bool
) -> None:
    """Train, show how far it is, and say how it ended; `name` is the command's."""
    from avow.report.terminal import training_progress
    from avow.training import checkpoint, read_config, train

    if "=" in run.name:
        raise ParameterError("RUN", repr(str(run)), "reads like a field", "name the folder of the run first")
    if resume and file is None and (run / "config.json").exists():
        file = run / "config.json"  # A run remembers its configuration.
    config = read_config(file, flags, [f"schedule.steps={STEPS[name]}", *defaults])
    if config.data.task not in TASKS[name]:
        other = next(other for other, tasks in TASKS.items() if config.data.task in tasks)
        rule = f"contradicts avow train {name}"
        raise ParameterError("data: task", repr(config.data.task), rule, f"use avow train {other}")
    world = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["torchrun", f"--nproc-per-node={world}", "-m", "avow"] if world else ["avow"]
    again = f"go on with: {shlex.join([*launcher, 'train', name, str(run), '--resume'])}"
    first = os.environ.get("RANK", "0") == "0"
    try:
        with training_progress() if first else nullcontext() as tell:
            done = train(config, run, resume=resume, progress=tell)
    except KeyboardInterrupt as error:
        # The second interrupt, or one before the first step.
        if first:
            good = checkpoint.newest(run / "checkpoints")
            left = f"{good} is whole; {again}" if good else "no checkpoint was written yet"
            typer.echo(f"avow: stopped at once; {left}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from error
    if first:
        _print_result(run, config, done, as_json, again)
    if done.interrupted:
        raise typer.Exit(128 + (done.signal or signal.SIGINT))


def _print_result(run: Path, config: TrainConfig, done: Trained, as_json: bool, again: str) -> None:
    """A run's end, on stdout as JSON or in words; if it was interrupted, on stderr how to continue."""
    from avow.training.run_folder import COLUMNS, read_log

    if done.last is not None:
        last = asdict(done.last)
    else:  # Nothing was left to do, or it stopped before its first line.
        rows = read_log(run / "log.csv")
        last = {column: float(rows[-1][column]) if rows else None for column in COLUMNS}
    if last["step"] and done.step > last["step"]:
        last["epoch"] *= done.step / last["step"]  # It stopped between two lines.
    if as_json:
        result: dict[str, Any] = {"run": str(run), "step": done.step, "interrupted": done.interrupted}
        result |= {name: last[name] for name in ("epoch", "loss", "rate", "tokens_per_second", "mfu")}
        result |= {"checkpoint": str(done.checkpoint), "config": str(run / "config.json"), "log": str(run / "log.csv")}
        document(result)
    elif last["loss"] is not None:
        typer.echo(
            f"{done.step:,} steps, {last['epoch']:,.1f} epochs: loss {last['loss']:.3f} nats per character, "
            f"{last['tokens_per_second']:,.0f} tokens/s, MFU {last['mfu']:.1%}"
        )
    if done.interrupted:
        typer.echo(f"avow: interrupted at step {done.step:,} and saved in {done.checkpoint}\n{again}", err=True)
    elif not as_json:
        typer.echo(f"checkpoint {done.checkpoint}\nnext: {_next_command(run, config)}")


def _next_command(run: Path, config: TrainConfig) -> str:
    """The command that makes sense after a run."""
    from avow.training import corpus_of

    corpus, place = corpus_of(config.data.corpus), shlex.quote(str(run))
    if config.data.task == "pretrain" and corpus.train:
        return f"avow train finetune {shlex.quote(f'{run}-tuned')} --from {place}"
    if corpus.dev and config.data.task != "pretrain":
        return f"avow train evaluate {place}"
    begin = (corpus.documents[0].text if corpus.documents else corpus.train[0].question).split()[0]
    return f"avow train sample {place} {shlex.quote(begin)}"
