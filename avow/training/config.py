"""Everything that decides a run, typed, checked, and saved beside its results.

A file (TOML or JSON) has one table per section; flags, `section.name=value`, override the file:

[data]
corpus = "people/"
[schedule]
epochs = 20
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from avow import file_io
from avow.errors import FileError, ParameterError
from avow.nn import ModelConfig
from avow.parameters import Rule, anything, at_least, between, check_parameters, declared, one_of, param, parameters_of
from avow.training import checkpoint
from avow.training.data import corpus_of, vocabulary_of
from avow.training.examples import Recipe, Spans, fraction

share = Rule("must be at least 0 and below 1", lambda value: 0 <= value < 1)
positive = between(0, math.inf)
# Two ways to say how long a run is.
LENGTHS = ("steps", "epochs")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which portions."""

    corpus: str = param("invented", anything(), "a folder with wiki.txt and train.tsv, or invented: made-up people")
    task: str = param(
        "pretrain", one_of("pretrain", "finetune", "mixed", "cloze"), "documents, questions, both, or mixture"
    )
    loss: str = param("answer", one_of("answer", "all"), "what counts in a question: its answer, or everything")
    batch: int = param(128, at_least(1), "examples in a step, over all ranks")
    accumulate: int = param(4, at_least(1), "micro-batches of similar length that a rank cuts its share into")
    shortest: int = param(4, at_least(4), "characters a cut document keeps at least")
    longest: float = param(7 / 8, between(0, 1), "share of the block a cut document fills at most")
    masked: float = param(0.25, between(0, 0.5), "share of a cut document that is masked, on average")

    @property
    def spans(self) -> Spans:
        return Spans(self.shortest, self.longest, self.masked)


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW, with decay on matrices alone."""

    rate: float = param(1e-3, positive, "the highest learning rate")
    beta1: float = param(0.9, share, "decay of the mean gradient")
    beta2: float = param(0.95, share, "decay of the mean square")
    decay: float = param(0.1, at_least(0), "weight decay")
    clip: float = param(1.0, positive, "the longest gradient; inf never clips")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and how the rate rises and falls: linearly up, then along a cosine."""

    steps: int = param(0, at_least(0), "steps of the run; or set epochs")
    epochs: int = param(0, at_least(0), "times that every example is read; or set steps")
    warmup: int = param(0, at_least(0), "steps in which the rate rises")
    floor: float = param(0.1, fraction, "the last rate, as a share of the highest")


@dataclass(frozen=True)
class RunConfig:
    """Where and how it is computed."""

    seed: int = param(0, at_least(0), "decides weights, data and dropout")
    device: str = param("auto", one_of("auto", "cpu", "cuda"), "auto: a GPU where there is one")
    precision: str = param("float32", one_of("float32", "bfloat16"), "arithmetic of the passes; weights stay float32")
    compile: bool = param(False, anything(), "compile the model first")
    parallel: str = param(
        "replicated", one_of("replicated", "sharded"), "under torchrun: whole weights in each process, or a share"
    )
    sequence: int = param(1, at_least(1), "under torchrun: processes that hold each sequence in parts between them")
    timeout: float = param(600.0, between(0, 86_400), "seconds that a process waits for the others before it gives up")
    graphs: bool = param(False, anything(), "record passes as CUDA graphs; for small models on one GPU")
    start: str = param("", anything(), "a checkpoint whose weights and vocabulary to begin with")
    save_every: int = param(1000, at_least(1), "steps between checkpoints")
    log_every: int = param(10, at_least(1), "steps between lines of the log")


@declared()
@dataclass(frozen=True)
class TrainConfig:
    """One run, completely."""

    model: ModelConfig
    data: DataConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    run: RunConfig
    mixture: Recipe

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            check_parameters(name, kind, dataclasses.asdict(getattr(self, name)))
        for name, value, rule, remedy in self._contradictions():
            raise ParameterError(name, value, rule, remedy)

    def _contradictions(self) -> Iterator[tuple[str, object, str, str]]:
        """Name, value, rule and remedy of values that do not go together."""
        steps, epochs, warmup = self.schedule.steps, self.schedule.epochs, self.schedule.warmup
        if (steps > 0) == (epochs > 0):
            rule = f"contradicts schedule.epochs={epochs}" if steps else "leaves the length open, as epochs=0 does"
            yield "schedule: steps", steps, rule, "set one of schedule.steps and schedule.epochs"
        if steps and warmup >= steps:
            yield "schedule: warmup", warmup, f"leaves nothing of {steps} steps", "use a shorter warmup"
        if self.data.accumulate > self.data.batch:
            rule = f"exceeds data.batch={self.data.batch}"
            yield "data: accumulate", self.data.accumulate, rule, "cut a step into fewer micro-batches"
        sequence, model = self.run.sequence, self.model
        if sequence > model.block:
            rule = f"is more processes than the {model.block} tokens of a sequence, model.block"
            yield "run: sequence", sequence, rule, f"use run.sequence<={model.block}"
        if sequence > 1 and model.attention != "exact":
            rule = f"needs exact attention to read from the parts of others, and here is {model.attention}"
            yield "run: sequence", sequence, rule, "use run.sequence=1 or model.attention=exact"
        if sequence > 1 and self.run.compile:
            rule = "waits for other processes within a pass, which run.compile=true cannot"
            yield "run: sequence", sequence, rule, "use run.sequence=1 or run.compile=false"
        if not any(self.mixture.weights.values()):
            rule = "leaves nothing to read, as lm, span and cloze do"
            yield "mixture: questions", 0, rule, "give one of them a weight of 1 or more"
        # Settings of a kind of example that is not read would have no effect, silently.
        needs = {"after_name": "span", "window": "cloze", "bare": "cloze"}
        for parameter in parameters_of(Recipe):
            name, value, kind = parameter.name, getattr(self.mixture, parameter.name), needs.get(parameter.name)
            if value == parameter.default:
                continue
            if self.data.task != "cloze":
                rule = f"has no effect with data.task={self.data.task}"
                yield f"mixture: {name}", value, rule, "use data.task=cloze or leave it out"
            if kind is not None and not self.mixture.weights[kind]:
                yield f"mixture: {name}", value, f"contradicts mixture.{kind}=0", f"leave it out or use {kind}>=1"

    @staticmethod
    @declared()
    def of(values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from nested values; the vocabulary comes from the corpus or from `run.start`."""
        for name, section in values.items():
            if name != "model" and name not in SECTIONS:
                rule, known = "is not a section of a configuration", ", ".join(["model", *SECTIONS])
                raise ParameterError(name or "''", repr(section), rule, f"known: {known}")
            if not isinstance(section, Mapping):
                raise ParameterError(name, repr(section), "must be a section", f"write [{name}] and its fields below")
        sections = {}
        for name, kind in SECTIONS.items():
            check_parameters(name, kind, given := dict(values.get(name, {})))
            # A whole number in a file may stand for a float; the saved configuration then says float.
            sections[name] = kind(**{p.name: p.type(given.get(p.name, p.default)) for p in parameters_of(kind)})
        return TrainConfig(_model(dict(values.get("model", {})), sections["data"], sections["run"]), **sections)

    @staticmethod
    @declared()
    def from_json(text: str) -> TrainConfig:
        """The configuration that `to_json` wrote."""
        return TrainConfig.of(_parsed(text, "configuration", json.loads))

    def to_json(self) -> str:
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        return json.dumps({"model": json.loads(self.model.to_json()), **sections}, indent=1)


SECTIONS: dict[str, type] = {name: kind for name, kind in get_type_hints(TrainConfig).items() if name != "model"}


@declared()
def read_config(path: str | Path | None = None, flags: Iterable[str] = (), defaults: Iterable[str] = ()) -> TrainConfig:
    """The configuration of a TOML or JSON file, with flags such as `schedule.epochs=20` on top.

    `defaults` are flags for fields that neither file nor flags set; a length in epochs is a length in steps too.
    """
    file = {} if path is None else _read_file(Path(path))
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in file.items()}
    for overrides, given in ((True, flags), (False, defaults)):
        for flag in given:
            name, equals, text = flag.partition("=")
            section, dot, field = name.partition(".")
            if not (equals and dot and field):
                raise ParameterError("flag", repr(flag), "must be section.name=value", "try schedule.epochs=20")
            fields = values.setdefault(section, {})
            same = LENGTHS if field in LENGTHS else (field,)
            if isinstance(fields, dict) and (overrides or not any(other in fields for other in same)):
                fields[field] = _read_flag(section, field, text)
    return TrainConfig.of(values)


def _read_flag(section: str, field: str, text: str) -> Any:
    for parameter in parameters_of(SECTIONS[section]) if section in SECTIONS else ():
        if parameter.name == field:
            return parameter.read(section, text)
    # The model knows its own fields, and refuses others.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = file_io.read_document(path)
    except (OSError, ValueError) as error:  # It is absent, too long, or not UTF-8.
        rule = f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        raise FileError("config", path, rule, "check the path, and that it holds a configuration alone") from error
    if path.suffix not in (".toml", ".json"):
        raise FileError("config", path, "is neither .toml nor .json", "rename it after what it holds")
    return _parsed(text, str(path), json.loads if path.suffix == ".json" else tomllib.loads)


def _parsed(text: str, source: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The sections in a text of JSON or TOML."""
    try:
        values = parse(text)
    except ValueError as error:
        kind = "TOML" if isinstance(error, tomllib.TOMLDecodeError) else "JSON"
        raise FileError("config", source, f"is not {kind} ({error})", "correct that line") from error
    if not isinstance(values, dict):
        raise FileError("config", source, "must be an object of sections", 'begin with {"data": {…}}')
    return values


def _model(given: dict[str, Any], data: DataConfig, run: RunConfig) -> ModelConfig:
    """The model's part; of a model that is trained further, only dropout may change."""
    complete = {field.name for field in dataclasses.fields(ModelConfig)} <= given.keys()
    if run.start and not complete:  # A saved configuration is complete, and what it began with may be gone.
        trained = checkpoint.described(Path(run.start))["facts"]["config"]["model"]
        for name, value in given.items():
            if name != "dropout" and value != trained.get(name, value):
                rule = f"contradicts {trained[name]!r} in run.start={run.start}"
                remedy = "leave it out: the checkpoint knows its model"
                raise ParameterError(f"model: {name}", repr(value), rule, remedy)
        given = trained | given
    elif "vocabulary" not in given:
        given = {"vocabulary": vocabulary_of(corpus_of(data.corpus)).size} | given
    return ModelConfig.of(given)
