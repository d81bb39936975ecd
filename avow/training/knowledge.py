"""The knowledge experiment: models read about people and are asked where these were born.

Every arm is an ordinary run in a folder of its own. Between arms one thing differs at a time: whether the text was read
at all, which attention reads it, which positions it has.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from avow.errors import FileError, ParameterError
from avow.nn.config import Positions
from avow.training.config import TrainConfig, read_config
from avow.training.data import Corpus, Document, corpus_of
from avow.training.evaluation import Evaluation, Outcome, majority
from avow.training.run_folder import read_log

NOT_READ = "no pretraining"
# The Perceiver compiles for one width alone. Separable attention and random features choose by their numbers how to
# sum, which can be neither recorded nor compiled quickly.
ON_A_GPU = {
    "exact": ("data.accumulate=2", "run.compile=true", "run.graphs=true"),
    "latent": ("data.accumulate=1", "run.compile=true", "run.graphs=true"),
}
# Options of the experiment decide these, not flags of an arm.
OF_THE_EXPERIMENT = {
    "data.sources": "corpus",
    "data.task": "attentions",
    "model.attention": "attentions",
    "model.positions": "positions",
    "run.seed": "seeds",
    "run.device": "device",
    "schedule.steps": "steps",
    "schedule.epochs": "steps",
}


@dataclass(frozen=True)
class Size:
    """How large an experiment is, as flags of a configuration: what its arms share, what each attention has besides.

    `not_read` is for the arm without pretraining: it reads the training questions alone, many times.
    """

    shared: tuple[str, ...]
    not_read: tuple[str, ...]
    attentions: Mapping[str, tuple[str, ...]]


# For real corpora: one run over text and training questions together, as long as it takes.
CLASSIC = Size(
    shared=(
        *("data.task=mixture", "data.held_out=0", "data.batch=256", "optimizer.lr=0.002"),
        # Windows of text have many times the targets of a statement: one part of them is more than half of the loss.
        *("mixture.facts=12", "mixture.questions=4", "mixture.language=1", "mixture.spans=0", "mixture.cloze=1"),
        *("mixture.window=12", "mixture.bare=0.5"),
        *("model.layers=4", "model.heads=8", "model.width=256", "model.block=128", "model.dropout=0.05"),
        *("schedule.steps=7000", "schedule.warmup=300", "schedule.floor=0.02"),
    ),
    not_read=("data.task=questions", "data.batch=128", "schedule.steps=1000", "schedule.warmup=50"),
    attentions={
        "exact": (),
        "separable": (),
        "random_features": (),
        # As many weights in more and narrower layers: two before the latents, one down, one of latents, two up.
        "latent": (
            *("model.layers=6", "model.width=208", "model.latents=16", "model.latent_layers=1"),
            'model.settings={"segment": 32}',
        ),
    },
)
# For the embedded corpus: minutes on two cores. Little is computed, so little is spent on what cannot be learnt: most
# examples are a name and the place that belongs to it.
SMALL = Size(
    shared=(
        *("data.task=mixture", "data.held_out=0", "data.batch=64", "data.accumulate=2"),
        *("optimizer.lr=0.01", "optimizer.weight_decay=0.05"),
        *("mixture.cloze=12", "mixture.questions=3", "mixture.window=8", "mixture.bare=0.5"),
        *("model.layers=2", "model.heads=4", "model.width=64", "model.block=64", "model.dropout=0.0"),
        *("schedule.steps=1000", "schedule.warmup=50", "schedule.floor=0.02", "run.log_every=20"),
    ),
    not_read=("data.task=questions", "schedule.steps=200"),
    attentions={
        "exact": (),
        "separable": (),
        "random_features": ('model.settings={"features": 32}',),
        "latent": ("model.layers=3", "model.latents=4", "model.latent_layers=1", 'model.settings={"segment": 16}'),
    },
)


@dataclass(frozen=True)
class Arm:
    """One run of the experiment: its row in the table, its seed, and everything that decides it."""

    label: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join([*self.label.replace(",", "").split(), "seed", str(self.seed)])


def arms(
    corpus: str = "invented",
    attentions: Sequence[str] = ("exact", "separable", "random_features", "latent"),
    positions: Sequence[str] = ("rotary",),
    seeds: int = 1,
    steps: int | None = None,
    device: str = "auto",
    flags: Iterable[str] = (),
) -> list[Arm]:
    """The runs of an experiment: the arm without pretraining first, then each attention with each kind of positions.

    `steps` is how long the pretrained arms run; the other one never runs longer. `flags` hold for every arm on which
    they have an effect.
    """
    size = SMALL if corpus == "invented" else CLASSIC
    _check_names("attentions", attentions, tuple(size.attentions))
    _check_names("positions", positions, get_args(Positions))
    for name, value in (("seeds", seeds), ("steps", steps)):
        if value is not None and value < 1:
            raise ParameterError(name, value, "must be at least 1", "leave it out for the default")
    given = list(flags)
    for flag in given:
        if (option := OF_THE_EXPERIMENT.get(flag.partition("=")[0])) is not None:
            rule = "is decided for every arm by the experiment"
            raise ParameterError("flag", repr(flag), rule, f"use --{option}, or leave it out")
    texts = corpus_of(corpus)
    for file, part in (("wiki.txt", texts.documents), ("train.tsv", texts.train), ("dev.tsv", texts.dev)):
        if not part:
            rule = f"holds no {file}, and the experiment needs text, training questions and dev questions"
            raise FileError("corpus", corpus, rule, f"add a {file}")
    given += [f"data.sources={json.dumps([corpus])}", f"run.device={device}"]
    length = [] if steps is None else [f"schedule.steps={steps}"]
    if steps is not None and steps < 1000:
        length.append(f"schedule.warmup={steps // 10}")  # The usual one may be longer than a short run.
    # The arm without reading has no mixture, and a length of its own; the first attention and positions stand for all.
    unread = [flag for flag in given if not flag.startswith(("mixture.", "schedule."))]
    (usual,) = (int(flag.partition("=")[2]) for flag in size.not_read if flag.startswith("schedule.steps="))
    if steps is not None and steps < usual:
        unread += length
    shared = [flag for flag in size.shared if not flag.startswith("mixture.")]
    rows = [(NOT_READ, attentions[0], positions[0], unread, [*size.not_read, *size.attentions[attentions[0]], *shared])]
    for attention, kind in itertools.product(attentions, positions):
        label = attention if len(positions) == 1 else f"{attention}, {kind}"
        rows.append((label, attention, kind, [*given, *length], [*size.attentions[attention], *size.shared]))
    chosen = []
    for seed, (label, attention, kind, own, defaults) in itertools.product(range(seeds), rows):
        own = [*own, f"run.seed={seed}", f"model.attention={attention}", f"model.positions={kind}"]
        chosen.append(Arm(label, seed, read_config(None, own, [*defaults, *_fast(device, attention)])))
    return chosen


def _fast(device: str, attention: str) -> tuple[str, ...]:
    """How the same is computed fastest: a CPU saves padding, a GPU is given large pieces in few commands."""
    if device == "cpu" or not torch.cuda.is_available():
        return ("data.accumulate=4",)
    return ("run.precision=bfloat16", *ON_A_GPU.get(attention, ("data.accumulate=1",)))


def _check_names(option: str, given: Sequence[str], known: tuple[str, ...]) -> None:
    if not given:
        raise ParameterError(option, "(none)", "names none of them", f"choose from {', '.join(known)}")
    for name in given:
        if name not in known:
            raise ParameterError(option, repr(name), f"is none of {', '.join(known)}", "choose from these")
        if list(given).count(name) > 1:
            raise ParameterError(option, repr(name), "is named twice", "name it once")


@dataclass(frozen=True)
class Result:
    """An arm's answers, or in words why there are none."""

    arm: Arm
    evaluation: Evaluation | None = None
    parameters: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    why: str = ""

    @property
    def costs(self) -> dict[str, float]:
        return {"parameters": self.parameters, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}


@dataclass(frozen=True)
class Row:
    """A row of the table: the same arm with every seed. A figure of one run is that of the middle one."""

    label: str
    results: tuple[Result, ...]

    @property
    def finished(self) -> list[tuple[Result, Evaluation]]:
        """The results that have answers, the least accurate first."""
        pairs = [(result, result.evaluation) for result in self.results if result.evaluation is not None]
        return sorted(pairs, key=lambda pair: pair[1].right)

    @property
    def middle(self) -> tuple[Result, Evaluation] | None:
        """The run of median accuracy, the lower one of two."""
        return self.finished[(len(self.finished) - 1) // 2] if self.finished else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest accuracy, if there are several."""
        accuracies = [evaluation.accuracy for _, evaluation in self.finished]
        return (accuracies[0], accuracies[-1]) if len(accuracies) > 1 else None

    def plain(self) -> dict[str, Any]:
        """The row as JSON has it."""
        runs = [
            {"folder": result.arm.name, "seed": result.arm.seed, "why": result.why}
            | (result.evaluation.plain() if result.evaluation else {})
            | result.costs
            for result in self.results
        ]
        figures: dict[str, Any] = {"seed": None}
        if self.middle is not None:
            result, evaluation = self.middle
            names = ("right", "asked", "accuracy", "interval")
            figures = {"seed": result.arm.seed} | {name: evaluation.plain()[name] for name in names}
            figures |= {"accuracy_at_half": evaluation.accuracy_at(0.5), **result.costs}
        return {"arm": self.label, **figures, "spread": self.spread and list(self.spread), "runs": runs}


@dataclass(frozen=True)
class Experiment:
    """The results of all arms; `folder` holds one run for each."""

    corpus: str
    folder: Path
    majority: Evaluation
    rows: tuple[Row, ...]

    @staticmethod
    def of(corpus: str, folder: str | Path, results: Sequence[Result]) -> Experiment:
        """Results in the rows of a table, beside the majority's."""
        read = corpus_of(corpus)
        labels = dict.fromkeys(result.arm.label for result in results)
        rows = (Row(label, tuple(r for r in results if r.arm.label == label)) for label in labels)
        return Experiment(corpus, Path(folder), majority(read.train, read.dev), tuple(rows))

    @property
    def failures(self) -> list[Result]:
        return [result for row in self.rows for result in row.results if result.evaluation is None]

    @property
    def best(self) -> Row | None:
        """The pretrained row whose middle run is right most often, of those that finished."""
        read = [row for row in self.rows if row.label != NOT_READ and row.middle]
        return max(read, key=lambda row: row.middle[1].right if row.middle else 0, default=None)

    @property
    def not_read(self) -> Row | None:
        """The row of the arm without pretraining, if it finished."""
        return next((row for row in self.rows if row.label == NOT_READ and row.middle), None)

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        guess = self.majority.outcomes[0].answer.text
        baselines = f"always saying {guess} in {self.majority.accuracy:.0%}"
        if self.not_read and self.not_read.middle:
            baselines = f"without reading in {self.not_read.middle[1].accuracy:.0%}, " + baselines
        if self.best is None or self.best.middle is None:
            return f"No pretrained model finished; {baselines}."
        label, best = self.best.label, self.best.middle[1]
        return f"After reading, {label} is right in {best.accuracy:.0%} of {best.asked} questions; {baselines}."

    def losses(self, result: Result) -> tuple[list[float], list[float]]:
        """The steps and losses in the log of a run."""
        path = self.folder / result.arm.name / "log.csv"
        lines = read_log(path) if path.exists() else []
        return [float(line.step) for line in lines], [line.loss for line in lines]

    def plain(self) -> dict[str, Any]:
        """The experiment as JSON has it."""
        return {
            "headline": self.headline,
            "corpus": self.corpus,
            "folder": str(self.folder),
            "majority": {**self.majority.plain(), "answer": self.majority.outcomes[0].answer.text},
            "rows": [row.plain() for row in self.rows],
            "failures": [{"folder": result.arm.name, "why": result.why} for result in self.failures],
        }


def outcomes_by_kind(evaluation: Evaluation, corpus: Corpus) -> dict[str, list[Outcome]]:
    """Answers that are right, those that stand in the text and are wrong, and those made up, the surest first."""
    text = "\n".join(document.text for document in corpus.documents if isinstance(document, Document))
    kinds: dict[str, list[Outcome]] = {"right": [], "wrong": [], "made up": []}
    for outcome in sorted(evaluation.outcomes, key=lambda outcome: -outcome.answer.confidence):
        answer = outcome.answer.text
        stands = bool(answer) and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None
        kinds["right" if outcome.right else "wrong" if stands else "made up"].append(outcome)
    return kinds
