"""`avow train`: pretrain and fine-tune language models, ask them questions, let them write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from avow.cli.lists import command_with, configuration
from avow.cli.options import AsJson, Device, Seed, command, files, place
from avow.cli.output import document, wrote
from avow.cli.training import fit
from avow.errors import FileError, ParameterError

if TYPE_CHECKING:
    from avow.report.knowledge import ModelAnswers

app = typer.Typer(no_args_is_help=True, help="Pretrain and fine-tune models, ask them, let them write.")

# How many steps a run has where nobody says.
STEPS = {"pretrain": 1000, "finetune": 200}
# In place of a pretrained run: the baseline that has read nothing.
NOTHING = "nothing"


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run: log, configuration, checkpoints.")]
Finished = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")]
Flags = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.NAME=VALUE", help="Fields of the configuration; see below.")
]
Config = Annotated[Path | None, typer.Option(help="A configuration in TOML or JSON; fields on the command line win.")]
Corpus = Annotated[str | None, typer.Option(metavar="DIR|invented", help="The same as data.corpus.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in RUN, if there is one.")]
ResumeFrom = Annotated[Path | None, typer.Option(help="Go on from this checkpoint of RUN.")]
RunDevice = Annotated[str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="The same as run.device.")]


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

    Those of invented people, unless told.
    """
    given = _with(flags, {"data.corpus": corpus, "run.device": device})
    fit("pretrain", run, config, given, [f"schedule.steps={STEPS['pretrain']}"], resume_from or resume, as_json)


@app.command(cls=command_with(lambda: configuration(steps=STEPS["finetune"])))
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
    device: RunDevice = None,
    as_json: AsJson = False,
) -> None:
    """Teach a pretrained model to answer questions.

    Those of the corpus it has read, unless told.
    """
    given = _with(flags, {"data.corpus": corpus, "run.device": device})
    defaults = [f"schedule.steps={STEPS['finetune']}"]
    resumed = bool(resume_from or resume) and (run / "config.json").exists()
    if origin is not None and origin != NOTHING:
        start = _start(Path(origin))
        given = _with(given, {"run.start": str(start)})
        defaults.append(f"data.corpus={_facts(start)['data']['corpus']}")
    elif origin is None and not resumed and not any(flag.startswith("run.start=") for flag in given):
        remedy = f"name a pretrained run, or use --from {NOTHING} for one that has read nothing"
        raise ParameterError("from", None, "says what to begin with, and must be given", remedy)
    if not resumed:
        given = _with(given, {"data.task": "finetune"})
    fit("finetune", run, config, given, defaults, resume_from or resume, as_json)


@app.command()
def evaluate(
    run: Finished,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE.tsv", help="Questions and answers, parted by a tab.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(metavar="DIR|invented", help="Ask its dev.tsv; the run's own corpus unless told.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with the charts and every answer.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a model questions, and see what it makes up.

    Counts exact matches, and whether its confidence says which answers are made up.
    """
    from avow import file_io
    from avow.report.knowledge import evaluation_lines, evaluation_page
    from avow.report.terminal import show

    if questions is not None and corpus is not None:
        raise ParameterError("questions", questions, f"contradicts --corpus {corpus}", "give one of them")
    written = files(html)
    answers = _answers(run, questions, corpus, device)
    if html is not None:
        file_io.write(html, evaluation_page(answers, command()))
    if as_json:
        document(answers.plain())
    else:
        show(*evaluation_lines(answers))
    wrote(written)


@app.command()
def sample(
    run: Finished,
    text: Annotated[str, typer.Argument(help="How it begins; ⁇ stands for the mask.")],
    length: Annotated[int, typer.Option(help="Characters to write at most; the block ends it too.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="How freely it draws: 0 is the likeliest character, 1 as the model says.")
    ] = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text."""
    import torch

    from avow.training import load_model
    from avow.training import sample as continued
    from avow.training.distributed import ranks

    model, vocabulary = load_model(run)
    with ranks(place(device)) as here:
        generator = torch.Generator().manual_seed(seed)
        written = continued(model.to(here.device), vocabulary, text, length, temperature, generator)
    if as_json:
        document({"text": text, "written": written, "temperature": temperature, "seed": seed})
    else:
        typer.echo(text + typer.style(written, bold=True))


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
    from avow.training.checkpoint import last_of

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


def _answers(run: Path, questions: Path | None, corpus: str | None, device: str) -> ModelAnswers:
    """A model's answers, to a file's questions or a corpus's; by default to those of the corpus it was trained on."""
    from avow.report.knowledge import ModelAnswers
    from avow.training import corpus_of, evaluate, load_model, majority, read_questions
    from avow.training.checkpoint import last_of
    from avow.training.distributed import ranks

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
    with ranks(place(device)) as here:
        found = evaluate(model.to(here.device), vocabulary, given)
    return ModelAnswers(path, where, found, majority(train, given) if train else None)
