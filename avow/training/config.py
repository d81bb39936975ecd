"""Everything that decides a run, typed, checked, and saved beside its results as `run.toml`.

A file (TOML or JSON) has one table per section; flags, `section.name=value`, override the file:

[data]
sources = ["texts/*.txt"]
[schedule]
epochs = 20
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from avow import file_io
from avow.errors import FileError, ParameterError, value_text
from avow.nn import ModelConfig
from avow.parameters import Rule, anything, at_least, between, check_parameters, declared, one_of, param, parameters_of
from avow.training import checkpoint
from avow.training.data import tokenizer_of
from avow.training.examples import HELD_OUT_STEPS, TASK_NAMES, Recipe, Spans, fraction
from avow.training.field_names import OTHER_MEANINGS, field_named, meant
from avow.training.sources import read_data

share = Rule("must be at least 0 and below 1", lambda value: 0 <= value < 1)
positive = Rule("must be above 0", lambda value: value > 0)


def _are_names(value: Any) -> bool:
    """Whether there is a text, and each can be written down: names of files may be bytes that are not UTF-8."""
    return bool(value) and all(isinstance(one, str) and one == one.encode(errors="ignore").decode() for one in value)


names = Rule("must be one text or more, in UTF-8", _are_names)
# Two ways to say how long a run is.
LENGTHS = ("steps", "epochs")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which portions."""

    sources: tuple[str, ...] = param(
        ("invented",),
        names,
        "text files, tokens.npy, x.parquet:column, x.jsonl:field, folders; or invented: made-up people",
    )
    tokenizer: str = param("characters", anything(), "characters, bytes, a tokenizer.json, or ids: those of tokens.npy")
    task: str = param("language", one_of(*TASK_NAMES), "what is learnt: the next token, masked spans, answers, or both")
    held_out: float = param(
        0.05, share, f"share of the examples kept for the held-out loss, {HELD_OUT_STEPS} batches at most; 0 for none"
    )
    loss: str = param("answer", one_of("answer", "all"), "what counts in a question: its answer, or everything")
    batch: int = param(128, at_least(1), "examples in a step, over all ranks")
    accumulate: int = param(4, at_least(1), "micro-batches of similar length that a rank cuts its share into")
    shortest: int = param(4, at_least(4), "tokens that a cut piece keeps at least; for spans")
    longest: float = param(7 / 8, between(0, 1), "share of the block that a piece fills at most; for spans")
    masked: float = param(0.25, between(0, 0.5), "share of a cut piece that is masked, on average; for spans")

    @property
    def spans(self) -> Spans:
        return Spans(self.shortest, self.longest, self.masked)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with weight decay on matrices alone."""

    lr: float = param(1e-3, positive, "the highest learning rate")
    beta1: float = param(0.9, share, "decay of the mean gradient")
    beta2: float = param(0.95, share, "decay of the mean square")
    weight_decay: float = param(0.1, at_least(0), "weight decay, of matrices alone")
    clip: float = param(1.0, positive, "the longest gradient; inf never clips")
    average: float = param(0.0, share, "decay of an average of the weights that the run ends with; 0 for none")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and how the learning rate rises and falls: linearly up, then along a cosine."""

    steps: int = param(0, at_least(0), "steps of the run; or set epochs")
    epochs: int = param(0, at_least(0), "times that every example is read; or set steps")
    warmup: int = param(0, at_least(0), "steps in which the learning rate rises")
    floor: float = param(0.1, fraction, "the last learning rate, as a share of the highest")


@dataclass(frozen=True)
class RunConfig:
    """Where and how it is computed."""

    seed: int = param(0, at_least(0), "decides weights, data and dropout")
    device: str = param("auto", one_of("auto", "cpu", "cuda"), "auto: a GPU if there is one")
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
    evaluate_every: int = param(100, at_least(1), "steps between held-out losses; the last step has one too")


@declared()
@dataclass(frozen=True)
class TrainConfig:
    """One run, completely.

    Attributes:
        model: sizes, attention and positions.
        data: what is read, and in which portions.
        optimizer: learning rate and decay.
        schedule: how long the run is.
        run: seed, device, precision, checkpoints.
        mixture: how often each task is learnt, if there are several.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
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
            rule = "leaves nothing to read, as language, spans and cloze do"
            yield "mixture: questions", 0, rule, "give one of them a weight of 1 or more"
        weights = self.mixture.weights
        # Settings of a kind of example that is not read would have no effect, silently.
        clozes = ("cloze", "facts", "reverse")
        needs = {"after_name": ("spans",), "window": clozes, "bare": clozes}
        needs |= dict.fromkeys(("phrasings", "odds"), clozes[1:])
        for parameter in parameters_of(Recipe):
            name, value, kinds = parameter.name, getattr(self.mixture, parameter.name), needs.get(parameter.name)
            if value == parameter.default:
                continue
            if self.data.task != "mixture":
                rule = f"has no effect with data.task={self.data.task}"
                yield f"mixture: {name}", value, rule, "use data.task=mixture or leave it out"
            if kinds is not None and not any(weights[kind] for kind in kinds):
                yield (
                    f"mixture: {name}",
                    value,
                    f"contradicts mixture.{kinds[0]}=0",
                    f"leave it out or use {kinds[0]}>=1",
                )
        # A fact, and a text in another order, would be read of texts that are held out.
        for name in ("facts", "reverse", "permuted"):
            if (value := getattr(self.mixture, name)) and self.data.held_out:
                rule = f"reads what is held out, with data.held_out={self.data.held_out}"
                yield f"mixture: {name}", value, rule, "use data.held_out=0"

    @staticmethod
    @declared()
    def of(values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from nested values; the vocabulary comes from the data or from `run.start`."""
        for name, section in values.items():
            if name not in FIELDS:
                field = next(iter(section), "") if isinstance(section, Mapping) else ""
                near = meant(name, field, FIELDS)
                known = f"sections: {', '.join(FIELDS)}"
                remedy = f"did you mean {near}? {known}" if near else known
                rule = "is not a section of a configuration"
                raise ParameterError(name or "''", value_text(section), rule, remedy)
            if not isinstance(section, Mapping):
                remedy = f"write [{name}] and its fields below"
                raise ParameterError(name, value_text(section), "must be a section", remedy)
            for field, value in section.items():
                if field not in FIELDS[name]:
                    near, known = meant(name, str(field), FIELDS), f"fields of {name}: {', '.join(FIELDS[name])}"
                    remedy = f"did you mean {near}? {known}" if near else known
                    raise ParameterError(f"{name}: {field}", value_text(value), "is not a field", remedy)
        sections = {}
        for name, kind in SECTIONS.items():
            # JSON and TOML have lists alone, and a frozen record holds none.
            given = {key: tuple(x) if isinstance(x, list) else x for key, x in values.get(name, {}).items()}
            check_parameters(name, kind, given)
            # A whole number in a file may stand for a float; the saved configuration then says float.
            sections[name] = kind(**{p.name: p.type(given.get(p.name, p.default)) for p in parameters_of(kind)})
        model, run = dict(values.get("model", {})), sections["run"]
        complete = {field.name for field in dataclasses.fields(ModelConfig)} - {"key_heads"} <= model.keys()
        if run.start and not complete:  # A saved configuration is complete, and what it began with may be gone.
            model, sections["data"] = _continued(model, sections["data"], values.get("data", {}), run.start)
        elif "vocabulary" not in model:
            data = sections["data"]
            model = {"vocabulary": tokenizer_of(data.tokenizer, read_data(data.sources)).size} | model
        return TrainConfig(ModelConfig.of(model), **sections)

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON has it; `of` takes it back."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        return json.loads(json.dumps({"model": dataclasses.asdict(self.model), **sections}))

    def to_toml(self) -> str:
        """The configuration as a file that `read_config` takes back; a field that is None is left out."""
        parts = []
        for section, fields in self.plain().items():
            lines = [f"{name} = {_toml(value)}" for name, value in fields.items() if value is not None]
            parts.append("\n".join([f"[{section}]", *lines]))
        return "\n\n".join(parts) + "\n"


SECTIONS: dict[str, type] = {name: kind for name, kind in get_type_hints(TrainConfig).items() if name != "model"}
FIELDS: dict[str, tuple[str, ...]] = {
    name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in get_type_hints(TrainConfig).items()
}


def _toml(value: Any) -> str:
    """A value as TOML writes it.

    >>> _toml({"a": [1, 2.0, True, float("inf"), "x\\n"]})
    '{"a" = [1, 2.0, true, inf, "x\\\\n"]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)


@declared()
def read_config(path: str | Path | None = None, flags: Iterable[str] = (), defaults: Iterable[str] = ()) -> TrainConfig:
    """The configuration of a TOML or JSON file, with flags such as `schedule.epochs=20` on top.

    `defaults` are flags for fields that neither file nor flags set; a length in epochs is a length in steps too.

    Args:
        path: a TOML or JSON file with a table for each section; None for none.
        flags: fields as `section.name=value`, which override the file.
        defaults: flags for fields that neither file nor flags set; a length in epochs is a length in steps too.

    Returns:
        The configuration, complete and checked.

    Raises:
        FileError: the file is missing or cannot be read.
        ParameterError: a name is not a field, or a value does not fit.

    >>> from avow.training import read_config
    >>> read_config(flags=["schedule.steps=10", "model.width=64"]).model.width
    64
    """
    file = {} if path is None else _read_file(Path(path))
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in file.items()}
    from_file = {name: set(section) for name, section in values.items() if isinstance(section, dict)}
    for overrides, given in ((True, flags), (False, defaults)):
        for flag in given:
            name, equals, text = flag.partition("=")
            usual = field_named(name, FIELDS) if equals and "." not in name else None
            section, dot, field = (usual or name).partition(".")
            if not (equals and dot and field):
                raise ParameterError("flag", repr(flag), "must be section.name=value", _remedy(name, equals, flag))
            fields = values.setdefault(section, {})
            same = LENGTHS if section == "schedule" and field in LENGTHS else (field,)
            if isinstance(fields, dict) and (overrides or not any(other in fields for other in same)):
                # A length of a file gives way to one on the command line, whichever of the two it is.
                for other in from_file.get(section, set()).intersection(same if overrides else ()):
                    from_file[section].remove(other)
                    del fields[other]
                fields[field] = _read_flag(section, field, text)
    return TrainConfig.of(values)


def _remedy(name: str, equals: str, flag: str) -> str:
    """What to write in place of a flag that names no field."""
    if name == "optimizer":
        return f"it is AdamW; set optimizer.{', optimizer.'.join(FIELDS['optimizer'])}"
    if not equals and Path(flag).exists():
        return f"to read it, use --data {flag} or data.sources={flag}"
    if name in OTHER_MEANINGS:
        return OTHER_MEANINGS[name]
    near = meant("", name, FIELDS)
    return f"did you mean {near}=VALUE?" if near else "such as schedule.steps=100; the command's --help lists all"


def _read_flag(section: str, field: str, text: str) -> Any:
    for parameter in parameters_of(SECTIONS[section]) if section in SECTIONS else ():
        if parameter.name == field and parameter.type is not tuple:
            try:
                return parameter.read(section, text)
            except ParameterError as error:
                if section != "schedule" or field not in LENGTHS:
                    raise
                # The default, 0, only says that the other one of the two is given.
                usual = {"steps": 1000, "epochs": 3}[field]
                raise ParameterError(error.name, error.value, error.rule, f"try schedule.{field}={usual}") from error
    # The model knows its own fields, and refuses others; several sources are a list.
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    return [text] if (section, field) == ("data", "sources") and not isinstance(value, list) else value


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


def _continued(
    model: dict[str, Any], data: DataConfig, given: Mapping[str, Any], start: str
) -> tuple[dict[str, Any], DataConfig]:
    """The model and the data of a run that begins with a checkpoint: of its model, only dropout may change."""
    trained = checkpoint.described(Path(start))["facts"]["config"]
    said = {("model", name): value for name, value in model.items() if name != "dropout"}
    said |= {("data", "tokenizer"): given["tokenizer"]} if "tokenizer" in given else {}
    for (section, name), value in said.items():
        if value != trained[section].get(name, value):
            rule = f"contradicts {trained[section][name]!r} in run.start={start}"
            raise ParameterError(f"{section}: {name}", repr(value), rule, "leave it out: the checkpoint knows it")
    return trained["model"] | model, dataclasses.replace(data, tokenizer=trained["data"]["tokenizer"])
