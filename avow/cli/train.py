"""`avow train`: pretrain and fine-tune language models, ask them questions, let them write."""

from __future__ import annotations

import json
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
from avow.errors import FileError, MissingPackage, ParameterError

if TYPE_CHECKING:
    from avow.training import Progress, TrainConfig, Trained

app = typer.Typer(no_args_is_help=True, help="Pretrain and fine-tune models, ask them, let them write.")

# The number of steps by default, and what each command trains on.
STEPS = {"pretrain": 1000, "finetune": 200}
TASKS = {"pretrain": ("language", "spans", "spans+questions", "mixture"), "finetune": ("questions",)}
# In place of a pretrained run: the baseline that has read nothing.
NOTHING = "nothing"
_FROM = f"The pretrained model, of a run its newest good checkpoint; {NOTHING}: one that has read nothing."
_DATA = "What to read: text files, tokens.npy, x.parquet:column, x.jsonl:field, a folder; may be repeated."

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run: log, configuration, checkpoints.")]
Finished = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")]
Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.NAME=VALUE", help="Fields of the configuration, such as optimizer.lr=0.001."),
]
Config = Annotated[Path | None, option("A configuration in TOML or JSON; fields on the command line win.")]
Data = Annotated[list[str] | None, option(_DATA, "--data", metavar="SOURCE", show_default="invented: made-up people")]
Tokenizer = Annotated[
    str | None, option("What tokens are.", metavar="characters|bytes|FILE|ids", show_default="characters")
]
Task = Annotated[
    str | None, option("What is learnt.", metavar="|".join(TASKS["pretrain"]), show_default="language: the next token")
]
Origin = Annotated[str | None, option(_FROM, "--from", metavar="RUN|CHECKPOINT")]
Resume = Annotated[
    bool, option("Continue from the last checkpoint in RUN; with more steps, if schedule.steps is given.", "--resume")
]
ResumeFrom = Annotated[Path | None, option("Continue from this checkpoint of RUN.")]
RunDevice = Annotated[
    str | None, option("Where to compute.", "--device", metavar="auto|cpu|cuda", show_default="auto: a GPU if any")
]
Questions = Annotated[Path | None, option("Questions and answers, separated by a tab.", metavar="FILE.tsv")]
EvaluationData = Annotated[
    list[str] | None,
    option("Its dev questions are asked, or its text predicted.", "--data", metavar="SOURCE", show_default="the run's"),
]
Temperature = Annotated[float, option("How freely it draws: 0 is the likeliest token, 1 as the model says.")]


@app.command(cls=command_with(lambda: configuration(steps=STEPS["pretrain"])))
def pretrain(
    run: Run,
    flags: Flags = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    task: Task = None,
    config: Config = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: RunDevice = None,
    as_json: AsJson = False,
) -> None:
    """Train a language model on your text.

    All of the text is read, but for a small part that the held-out loss is measured on.
    """
    _check_folder("pretrain", run, resume)
    given = _with_options(flags, data, {"data.tokenizer": tokenizer, "data.task": task, "run.device": device})
    _fit("pretrain", run, config, given, [], resume_from or resume, as_json)


@app.command(cls=command_with(lambda: configuration(steps=STEPS["finetune"])))
def finetune(
    run: Run,
    flags: Flags = None,
    origin: Origin = None,
    data: Data = None,
    config: Config = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    device: RunDevice = None,
    as_json: AsJson = False,
) -> None:
    """Teach a pretrained model to answer questions.

    By default those of the data it has read: a folder with a train.tsv.
    """
    from avow.training import checkpoint
    from avow.training.run_folder import CONFIG

    _check_folder("finetune", run, resume)
    given = _with_options(flags, data, {"run.device": device})
    defaults = []
    resumed = bool(resume_from or resume) and (run / CONFIG).exists()
    if origin is not None and origin != NOTHING:
        start = _start(Path(origin))
        given = _with_options(given, None, {"run.start": str(start)})
        read = checkpoint.described(start)["facts"]["config"]["data"]["sources"]
        defaults.append(f"data.sources={json.dumps(read)}")
    elif origin is None and not resumed and not any(flag.startswith("run.start=") for flag in given):
        remedy = f"name a pretrained run, or use --from {NOTHING} for one that has read nothing"
        raise ParameterError("from", None, "says what to begin with, and must be given", remedy)
    if not resumed:
        given = _with_options(given, None, {"data.task": "questions"})
    _fit("finetune", run, config, given, defaults, resume_from or resume, as_json)


@app.command()
def evaluate(
    run: Finished,
    questions: Questions = None,
    data: EvaluationData = None,
    html: Annotated[Path | None, option("Write a report with the charts and every answer.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a model questions, or measure how well it predicts a text.

    Counts exact matches, and whether its confidence says which answers are made up. If there are no dev questions, the
    loss over the held-out text of the run, or over the text of --data.
    """
    from avow import file_io
    from avow.report.knowledge import ModelAnswers, evaluation_lines, evaluation_page
    from avow.training import Corpus, TrainConfig, checkpoint, load_model, majority, read_data, read_questions
    from avow.training import evaluate as evaluation_of
    from avow.training.examples import rewritten

    if questions is not None and data:
        raise ParameterError("questions", questions, f"contradicts --data {' '.join(data)}", "give one of them")
    written = options.files(html := options.report_file(html))
    path = checkpoint.last_of(run)
    model, tokenizer = load_model(path)
    config = TrainConfig.of(checkpoint.described(path)["facts"]["config"])
    sources = data or list(config.data.sources)
    try:
        texts = read_data(sources)
    except FileError:
        if questions is None:
            raise
        texts = Corpus((), (), ())  # The data may have moved since; the questions are here.
    if questions is not None:
        given, where = read_questions(questions), str(questions)
    else:
        given, where = texts.dev, f"the dev questions of {', '.join(sources)}"
    if not given:
        if html is not None:
            raise ParameterError(
                "html", html, "is for answers, and there are no questions", "give --questions FILE.tsv"
            )
        _evaluate_text(path, model.to(place(device)), tokenizer, sources, whole=bool(data), as_json=as_json)
        return
    evaluation = evaluation_of(model.to(place(device)), tokenizer, given, rewritten(texts, config.mixture))
    answers = ModelAnswers(path, where, evaluation, majority(texts.train, given) if texts.train else None)
    if html is not None:
        file_io.write(html, evaluation_page(answers, options.command()))
    options.present(as_json, answers.plain(), *evaluation_lines(answers), written=written)


def _evaluate_text(path: Path, model: Any, tokenizer: Any, sources: list[str], *, whole: bool, as_json: bool) -> None:
    """Print the loss over the held-out examples of a run, or over a whole text as a language model reads it."""
    from avow.training import TrainConfig, checkpoint, read_data, text_loss
    from avow.training.examples import LanguageExamples
    from avow.training.loop import task_examples

    corpus = read_data(sources)
    if whole:
        examples: Any = LanguageExamples(corpus.documents, tokenizer, model.config.block)
        words = f"the text of {', '.join(sources)}"
    else:
        config = TrainConfig.of(checkpoint.described(path)["facts"]["config"])
        examples = task_examples(config, corpus, tokenizer).held_out
        words = f"the {0 if examples is None else len(examples):,} held-out examples of the run"
        if examples is None:
            rule = "has no dev questions, and the run held nothing out"
            raise FileError("data", ", ".join(sources), rule, "give --questions FILE.tsv, or --data with another text")
    loss = text_loss(model, tokenizer, examples)
    if as_json:
        document({"checkpoint": str(path), "data": sources, "held_out": not whole, **loss.plain()})
    else:
        typer.echo(f"{loss}\nover {loss.tokens:,} tokens of {words}")


# What a model that knows masks expects to be given.
_MASKS = {
    "spans": "restores spans: write ⁇ where text is missing and ⁇ again at the end, such as 'Ada ⁇ born.⁇'",
    "questions": "answers questions: end the question with ⁇, such as 'Where was Ada born?⁇'",
}
_MASKS |= {task: f"{_MASKS['spans']}; it also {_MASKS['questions']}" for task in ("spans+questions", "mixture")}


@app.command()
def sample(
    run: Finished,
    text: Annotated[str, typer.Argument(help="How it begins; for models that know masks, ⁇ is one.")],
    length: Annotated[int, option("Tokens to write at most; if the model knows masks, its block ends it too.")] = 200,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text."""
    import torch

    from avow.training import checkpoint, load_model
    from avow.training import sample as continuation
    from avow.training.tokenizer import MASK_SIGN

    path = checkpoint.last_of(run)
    task = checkpoint.described(path)["facts"]["config"]["data"]["task"]
    model, tokenizer = load_model(path)
    generator, masks = torch.Generator().manual_seed(seed), task in _MASKS
    if masks and MASK_SIGN not in text:
        typer.echo(f"avow: this model {_MASKS[task]}", err=True)
    written = continuation(model.to(place(device)), tokenizer, text, length, temperature, generator, masks)
    if as_json:
        document({"text": text, "written": written, "temperature": temperature, "seed": seed, "task": task})
    else:
        typer.echo(text + typer.style(written, bold=True))


def _with_options(flags: list[str] | None, data: list[str] | None, options: dict[str, str | None]) -> list[str]:
    """Flags and what options say of the same fields; both may say the same, but not two things.

    Words that are not fields are data if an option says so: the shell makes several words of texts/*.txt.
    """
    every = [flag for flag in flags or [] if "=" in flag or not data]
    if data:
        sources = [*data, *(word for word in flags or [] if "=" not in word)]
        options = {**options, "data.sources": json.dumps(sources, ensure_ascii=False)}
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


def _check_folder(name: str, run: Path, resume: bool) -> None:
    """Raise if what is named as the folder of a run is not one, or holds no run to resume; `name` is the command's."""
    from avow.training.run_folder import CONFIG

    if "=" in run.name:
        raise ParameterError("RUN", repr(str(run)), "reads like a field", "name the folder of the run first")
    if run.is_file():
        rule = "is a file, and RUN is the folder that the run is written to"
        raise FileError("RUN", run, rule, f"to read it, use avow train {name} RUN --data {shlex.quote(str(run))}")
    # torchrun starts the same command again when a process is lost: the first time there is no run yet.
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if resume and not restarts and not (run / CONFIG).exists() and not (run / "checkpoints").exists():
        raise FileError("RUN", run, "holds no run to resume", "check the path, or begin a run without --resume")


def _fit(
    name: str, run: Path, file: Path | None, flags: list[str], defaults: list[str], resume: bool | Path, as_json: bool
) -> None:
    """Train, show how far it is, and say how it ended; `name` is the command's."""
    from avow.report.terminal import training_progress
    from avow.training import checkpoint, read_config, train
    from avow.training.run_folder import CONFIG

    if resume and file is None and (run / CONFIG).exists():
        file = run / CONFIG  # A run remembers its configuration.
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
        with training_progress() if first else nullcontext() as shown:
            done = train(config, run, resume=resume, progress=shown, tell=shown.note if shown else None)
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
    from avow.training.run_folder import CONFIG, OPTIONAL, read_log

    lines = read_log(run / "log.csv")
    # Nothing was left to do, or it stopped before its first line.
    last = done.last or (lines[-1] if lines else None)
    measured = next((line for line in reversed(lines) if line.held_out_loss is not None), None)
    picture = _draw_losses(run, lines) if lines else None
    files = {"config": run / CONFIG, "log": run / "log.csv", "picture": picture, "checkpoint": done.checkpoint}
    if as_json:
        names = ("epoch", "loss", "lr", "tokens_per_second", "mfu")
        held = {"step": measured.step, **{name: getattr(measured, name) for name in OPTIONAL}} if measured else None
        figures = {name: None if last is None else getattr(last, name) for name in names}
        paths = {name: None if path is None else str(path) for name, path in files.items()}
        state = {"run": str(run), "step": done.step, "interrupted": done.interrupted}
        document({**state, **figures, "held_out": held, "reading": asdict(done.reading), **paths})
    elif last is not None:
        epoch = last.epoch * done.step / last.step  # It may have stopped between two lines.
        epochs = f"{epoch:,.1f}" if epoch >= 0.1 else f"{epoch:.2g}"
        typer.echo(
            f"{done.step:,} steps, {epochs} epochs: loss {last.loss:.3f} nats per token, "
            f"{last.tokens_per_second:,.0f} tokens/s, MFU {last.mfu:.1%}"
        )
        typer.echo(_held_out_line(measured, config.data.held_out, done.interrupted))
    if done.interrupted:
        typer.echo(f"avow: interrupted at step {done.step:,} and saved in {done.checkpoint}\n{again}", err=True)
    elif not as_json:
        for name, path in files.items():
            typer.echo(f"{name} {path}") if path is not None else None
        typer.echo(f"next: {_next_command(run, config, done)}")


def _held_out_line(measured: Progress | None, share: float, interrupted: bool) -> str:
    if measured is None:
        why = "there is too little to hold any out"
        if not share:
            why = "data.held_out=0"
        elif interrupted:
            why = "the run was interrupted before"
        return f"no held-out loss was measured ({why})"
    words = f"held out: loss {measured.held_out_loss:.3f} nats per token, perplexity {measured.perplexity:.2f}"
    bits = measured.bits_per_character
    return words if bits is None else f"{words}, {bits:.3f} bits per character"


def _draw_losses(run: Path, lines: list[Progress]) -> Path | None:
    """Draw the losses of a log; None, and a line on stderr, if what draws is not installed."""
    from avow import file_io
    from avow.report import charts
    from avow.training.run_folder import loss_chart

    path = run / "loss.png"
    try:
        content = charts.png(loss_chart(lines, f"Loss of {run.name}"))
    except MissingPackage as error:
        typer.echo(f"avow: {path} was not drawn: {error}", err=True)
        return None
    file_io.write(path, content)
    return path


def _next_command(run: Path, config: TrainConfig, done: Trained) -> str:
    """The command that makes sense after a run."""
    from avow.training.data import encoded

    corpus, task, place = done.corpus, config.data.task, shlex.quote(str(run))
    if task in ("language", "spans") and corpus.train:
        return f"avow train finetune {shlex.quote(f'{run}-tuned')} --from {place}"
    if corpus.dev and task not in ("language", "spans"):
        return f"avow train evaluate {place}"
    if corpus.documents:
        text = done.tokenizer.decode(encoded(corpus.documents[0], done.tokenizer)[:40])
    else:
        text = corpus.train[0].question
    return f"avow train sample {place} {shlex.quote(next(iter(text.split()), ' '))}"
