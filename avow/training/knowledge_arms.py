"""The runs of the knowledge experiment, each with everything that decides it.

What differs between arms is one thing at a time: whether the text was read at all, which attention reads it, which
positions it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from avow.errors import FileError, ParameterError
from avow.nn.config import Positions
from avow.training.config import TrainConfig, read_config
from avow.training.resuming import FREE
from avow.training.tasks import corpus_of

NOT_READ = "no pretraining"
# The Perceiver compiles for one width alone. Separable attention and random features look at their numbers to choose
# how to sum, which can be neither recorded nor compiled quickly.
ON_A_GPU = {
    "exact": ("data.accumulate=2", "run.compile=true", "run.graphs=true"),
    "latent": ("data.accumulate=1", "run.compile=true", "run.graphs=true"),
}
# What decides which arms there are is said of the experiment, not of an arm.
OF_THE_EXPERIMENT = {
    "data.corpus": "corpus",
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

    `not_read` is what the arm without pretraining says otherwise: it reads the training questions alone, many times.
    """

    shared: tuple[str, ...]
    not_read: tuple[str, ...]
    attentions: Mapping[str, tuple[str, ...]]


# For real corpora: one run over text and training questions together, as long as it takes.
CLASSIC = Size(
    shared=(
        *("data.task=cloze", "data.batch=256", "optimiser.rate=0.002"),
        *("mixture.cloze=8", "mixture.questions=2", "mixture.window=12", "mixture.bare=0.5"),
        *("model.layers=4", "model.heads=8", "model.width=256", "model.block=128", "model.dropout=0.05"),
        *("schedule.steps=7000", "schedule.warmup=300", "schedule.floor=0.02"),
    ),
    not_read=("data.task=finetune", "data.batch=128", "schedule.steps=1000", "schedule.warmup=50"),
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
        *("data.task=cloze", "data.batch=64", "data.accumulate=2", "optimiser.rate=0.01", "optimiser.decay=0.05"),
        *("mixture.cloze=12", "mixture.questions=3", "mixture.window=8", "mixture.bare=0.5"),
        *("model.layers=2", "model.heads=4", "model.width=64", "model.block=64", "model.dropout=0.0"),
        *("schedule.steps=1000", "schedule.warmup=50", "schedule.floor=0.02", "run.log_every=20"),
    ),
    not_read=("data.task=finetune", "schedule.steps=200"),
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

    `steps` is how long the pretrained arms run; the other one never runs longer. `flags` hold for every arm that heeds
    them.
    """
    size = SMALL if corpus == "invented" else CLASSIC
    _check_names("attentions", attentions, tuple(size.attentions))
    _check_names("positions", positions, get_args(Positions))
    if seeds < 1:
        raise ParameterError("seeds", seeds, "must be at least 1", "1 is the default")
    if steps is not None and steps < 1:
        raise ParameterError("steps", steps, "must be at least 1", "leave it out for the default")
    _check_flags(given := list(flags))
    _check_corpus(corpus)
    given += [f"data.corpus={corpus}", f"run.device={device}"]
    found = []
    for seed in range(seeds):
        every = [*given, f"run.seed={seed}"]
        first = _read_nothing(size, attentions[0], positions[0], steps, device, every)
        found.append(Arm(NOT_READ, seed, first))
        for attention in attentions:
            for kind in positions:
                length = [] if steps is None else _long(steps)
                own = [*every, *length, f"model.attention={attention}", f"model.positions={kind}"]
                defaults = [*size.attentions[attention], *size.shared, *_fast(device, attention)]
                label = attention if len(positions) == 1 else f"{attention}, {kind}"
                found.append(Arm(label, seed, read_config(None, own, defaults)))
    return found


def _read_nothing(
    size: Size, attention: str, positions: str, steps: int | None, device: str, given: Sequence[str]
) -> TrainConfig:
    """The arm that reads training questions alone; the first attention and the first positions stand for all."""
    own = [f"model.attention={attention}", f"model.positions={positions}"]
    # Nothing of a mixture is left to heed, and the length of the others is not its own.
    heeded = [flag for flag in given if flag.partition(".")[0] not in ("mixture", "schedule")]
    shared = [flag for flag in size.shared if not flag.startswith("mixture.")]
    defaults = [*size.not_read, *size.attentions[attention], *shared, *_fast(device, attention)]
    (usual,) = (int(flag.partition("=")[2]) for flag in size.not_read if flag.startswith("schedule.steps="))
    if steps is not None and steps < usual:
        own += _long(steps)
    return read_config(None, [*heeded, *own], defaults)


def _long(steps: int) -> list[str]:
    """A run of so many steps; the usual warm-up may be longer than the whole of a short one."""
    return [f"schedule.steps={steps}", *([f"schedule.warmup={steps // 10}"] if steps < 1000 else [])]


def _fast(device: str, attention: str) -> tuple[str, ...]:
    """How the same is computed quickest: a CPU saves padding, a GPU is given large pieces in few commands."""
    if device == "cpu" or not torch.cuda.is_available():
        return ("data.accumulate=4",)
    return ("run.precision=bfloat16", *ON_A_GPU.get(attention, ("data.accumulate=1",)))


def _check_names(what: str, given: Sequence[str], known: tuple[str, ...]) -> None:
    if not given:
        raise ParameterError(what, "(none)", "names none of them", f"choose from {', '.join(known)}")
    for name in given:
        if name not in known:
            raise ParameterError(what, repr(name), f"is none of {', '.join(known)}", "choose from these")
        if list(given).count(name) > 1:
            raise ParameterError(what, repr(name), "is named twice", "name it once")


def _check_flags(flags: Iterable[str]) -> None:
    for flag in flags:
        option = OF_THE_EXPERIMENT.get(flag.partition("=")[0])
        if option is not None:
            rule = "is decided for every arm by the experiment"
            raise ParameterError("flag", repr(flag), rule, f"use --{option}, or leave it out")


def _check_corpus(name: str) -> None:
    corpus = corpus_of(name)
    for file, part in (("wiki.txt", corpus.documents), ("train.tsv", corpus.train), ("dev.tsv", corpus.dev)):
        if not part:
            rule = f"holds no {file}, and the experiment needs text, training questions and dev questions"
            raise FileError("corpus", name, rule, f"add a {file}")


def same_run(config: TrainConfig, other: TrainConfig) -> bool:
    """Whether two configurations learn the same: where and how often they save may differ."""
    return _learnt(config) == _learnt(other)


def _learnt(config: TrainConfig) -> TrainConfig:
    usual = dataclasses.asdict(type(config.run)())
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **{name: usual[name] for name in FREE}))
