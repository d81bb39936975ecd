"""A configuration comes from a file and flags, survives its own JSON, and refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from avow.errors import FileError, ParameterError
from avow.training import TrainConfig, corpus_of, read_config, tokenizer_of, train
from avow.training.config import FIELDS, DataConfig
from avow.training.field_names import OTHER_MEANINGS, USUAL_NAMES, field_named, meant
from tests.helpers.runs import small


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nwidth = 32\n[schedule]\nepochs = 3\n[optimizer]\nlr = 1\n[data]\ntask = "spans"\n')
    config = read_config(file, ["schedule.epochs=5", "model.positions=rotary", "run.compile=true"])
    assert (config.schedule.epochs, config.model.width, config.model.positions) == (5, 32, "rotary")
    assert (config.data.task, config.run.compile, config.data.batch) == ("spans", True, 128)
    assert repr(config.optimizer.lr) == "1.0"


def test_a_configuration_comes_back_from_toml_and_from_json(tmp_path: Path) -> None:
    settings = ["model.attention=separable", 'model.settings={"temperature": 2.0}']
    config = read_config(None, ["schedule.steps=7", "optimizer.clip=inf", *settings])
    assert TrainConfig.of(config.plain()) == config
    (tmp_path / "run.json").write_text(json.dumps(config.plain()))
    (tmp_path / "run.toml").write_text(config.to_toml())
    for name in ("run.json", "run.toml"):
        assert read_config(tmp_path / name) == config
        assert read_config(tmp_path / name, ["run.seed=1"]) != config


def test_the_vocabulary_comes_from_the_corpus() -> None:
    assert (
        read_config(None, ["schedule.steps=7"]).model.vocabulary
        == tokenizer_of("characters", corpus_of("invented")).size
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["schedule.epoch=3"],
            "schedule: epoch=3 is not a field; did you mean schedule.epochs? fields of schedule: st",
        ),
        (
            ["speed.steps=3"],
            "speed={'steps': 3} is not a section of a configuration; did you mean schedule.steps? sect",
        ),
        (
            [".steps=3"],
            "''={'steps': 3} is not a section of a configuration; did you mean schedule.steps? sections: mo",
        ),
        (["speed.x=3"], "speed={'x': 3} is not a section of a configuration; sections: model, data, optimizer"),
        (["model.depth=3"], "model: depth=3 is not a field; did you mean model.layers? fields of model: vocabulary"),
        (["foo=1"], "flag='foo=1' must be section.name=value; such as schedule.steps=100; the command's --help lists"),
        (["epocs=3"], "flag='epocs=3' must be section.name=value; did you mean schedule.epochs=VALUE?"),
        (["vocab_size=10"], "flag='vocab_size=10' must be section.name=value; leave it out: the vocabulary follows"),
        (["bf16=true"], "flag='bf16=true' must be section.name=value; use run.precision=bfloat16 or"),
        (["min_lr=1e-5"], "flag='min_lr=1e-5' must be section.name=value; use schedule.floor, a share of optimizer.lr"),
        (["precision=bf16"], "run: precision='bf16' must be one of float32, bfloat16"),
        (["schedule.steps=1.5"], "schedule: steps=1.5 must be a whole number; try schedule.steps=1000"),
        (["steps=-1"], "schedule: steps=-1 must be at least 0; try schedule.steps=1000"),
        (["schedule.epochs=three"], "schedule: epochs=three must be a whole number"),
        (["optimizer.lr=-1"], "optimizer: lr=-1.0 must be above 0; the default is"),
        (["optimizer.beta1=1"], "optimizer: beta1=1.0 must be at least 0 and below 1"),
        (["data.task=guess"], "data: task='guess' must be one of language, spans, questions, spans+questions, mixture"),
        ([], "schedule: steps=0 leaves the length open, as epochs=0 does; set one of"),
        (["schedule.steps=5", "schedule.epochs=5"], "schedule: steps=5 contradicts schedule.epochs=5; set one of"),
        (["schedule.steps=5", "schedule.warmup=5"], "schedule: warmup=5 leaves nothing of 5 steps"),
        (["schedule.steps=5", "data.batch=2"], "data: accumulate=4 exceeds data.batch=2"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(words)):
        read_config(None, flags)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "[data\n", "is not TOML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[]", "must be an object of sections"),
        ("a.yaml", "", "is neither .toml nor .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(FileError, match=re.escape(words)):
        read_config(tmp_path / name)
    with pytest.raises(FileError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_a_section_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("data = 3\n")
    with pytest.raises(ParameterError, match=re.escape("data=3 must be a section; write [data] and its fields below")):
        read_config(tmp_path / "a.toml", ["data.batch=4"])


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="model: vocabulary=7 contradicts the"):
        train(small(tmp_path, "model.vocabulary=7"), tmp_path / "run")


def test_what_is_trained_further_keeps_its_model_and_vocabulary(tmp_path: Path) -> None:
    first = train(small(tmp_path, "schedule.steps=4"), tmp_path / "first")
    start = f"run.start={first.checkpoint}"
    base = ["data.task=questions", "schedule.steps=5", f"data.sources={tmp_path / 'corpus'}", "data.batch=4"]
    config = read_config(None, [*base, start, "model.dropout=0.0", "run.device=cpu"])
    assert (config.model.width, config.model.dropout) == (16, 0.0)
    tuned = train(config, tmp_path / "second")
    assert tuned.tokenizer == first.tokenizer
    assert read_config(tmp_path / "second" / "run.toml") == config
    with pytest.raises(ParameterError, match=re.escape("model: width=64 contradicts 16 in run.start")):
        read_config(None, [*base, start, "model.width=64"])


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("lr=0.1", "optimizer.lr=0.1"),
        ("learning_rate=0.1", "optimizer.lr=0.1"),
        ("weight_decay=0", "optimizer.weight_decay=0"),
        ("batch_size=8", "data.batch=8"),
        ("n_layer=2", "model.layers=2"),
        ("n_head=2", "model.heads=2"),
        ("n_embd=64", "model.width=64"),
        ("block_size=64", "model.block=64"),
        ("max_steps=9", "schedule.steps=9"),
        ("dropout=0", "model.dropout=0"),
        ("seed=1", "run.seed=1"),
        ("tokenizer=bytes", "data.tokenizer=bytes"),
    ],
)
def test_a_usual_name_is_the_field_that_it_means(flag: str, field: str) -> None:
    short = ["schedule.steps=7", "data.accumulate=1"] if "steps" not in flag else ["data.accumulate=1"]
    assert read_config(None, [*short, flag]) == read_config(None, [*short, field])


def test_the_optimizer_is_not_a_choice() -> None:
    words = "flag='optimizer=sgd' must be section.name=value; it is AdamW; set optimizer.lr, optimizer.beta1"
    with pytest.raises(ParameterError, match=re.escape(words)):
        read_config(None, ["schedule.steps=7", "optimizer=sgd"])


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("optimiser.rate=0.1", "optimizer.lr"),
        ("optimizer.rate=0.1", "optimizer.lr"),
        ("optimizer.decay=0.1", "optimizer.weight_decay"),
        ("training.lr=0.1", "optimizer.lr"),
        ("data.corpus=x", "data.sources"),
        ("data.batch_size=4", "data.batch"),
        ("model.d_model=64", "model.width"),
        ("model.lr=0.1", "optimizer.lr"),
        ("schedule.warm_up=3", "schedule.warmup"),
        ("run.log_evry=3", "run.log_every"),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest_known_one(flag: str, field: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"; did you mean {field}? ")):
        read_config(None, ["schedule.steps=7", flag])


def test_every_usual_name_leads_to_a_field() -> None:
    for name, field in USUAL_NAMES.items():
        section, _, own = field.partition(".")
        assert own in FIELDS[section], f"{name} leads nowhere"
        assert meant("", name, FIELDS) == field or any(name in names for names in FIELDS.values())
        assert name in OTHER_MEANINGS or field_named(name, FIELDS) == field
    assert set(OTHER_MEANINGS) <= set(USUAL_NAMES)


def test_a_name_that_two_sections_have_means_neither() -> None:
    assert field_named("seed", {"run": ("seed",), "data": ("seed",)}) is None


def test_a_length_on_the_command_line_takes_the_place_of_that_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(read_config(None, ["schedule.steps=7"]).to_toml())
    longer = read_config(file, ["schedule.epochs=5"])
    assert (longer.schedule.steps, longer.schedule.epochs) == (0, 5)
    with pytest.raises(ParameterError, match=r"schedule: steps=9 contradicts schedule\.epochs=5"):
        read_config(file, ["schedule.epochs=5", "schedule.steps=9"])


@pytest.mark.parametrize(
    "name", ['a "quoted" name', "back\\slash", "new\nline", "tab\t", "\x7f\x01", "🙂 é", "a = [b]"]
)
def test_any_name_survives_the_file(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(
        read_config(None, ["schedule.steps=7", "optimizer.clip=inf"]),
        data=DataConfig(sources=(name, "invented"), tokenizer=name),
    )
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    assert read_config(tmp_path / "run.toml") == config


def test_a_file_without_its_option_is_answered_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ParameterError, match=re.escape(f" or data.sources={tmp_path}/a.txt")):
        read_config(None, ["schedule.steps=3", f"{tmp_path}/a.txt"])


def test_a_name_that_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"data: sources=.* must be one text or more, in UTF-8"):
        read_config(None, ["schedule.steps=3", "model.vocabulary=9", "data.sources=\udcff.txt"])


@pytest.mark.parametrize(
    ("value", "rule"), [("[]", "must be one text or more"), ("[1]", "must be one text or more"), ('"x"', None)]
)
def test_sources_are_a_list_of_texts(tmp_path: Path, value: str, rule: str | None) -> None:
    (tmp_path / "a.toml").write_text(f"[data]\nsources = {value}\n[schedule]\nsteps = 3\n")
    with pytest.raises(ParameterError, match=rule or "data: sources='x' must be a list"):
        read_config(tmp_path / "a.toml")
