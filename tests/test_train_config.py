"""A configuration comes from a file and flags, survives its own JSON, and refuses what makes no sense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from avow.errors import FileError, ParameterError
from avow.training import TrainConfig, corpus_of, read_config, train, vocabulary_of
from tests.helpers.runs import small


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nwidth = 32\n[schedule]\nepochs = 3\n[optimiser]\nrate = 1\n[data]\ntask = "mixed"\n')
    config = read_config(file, ["schedule.epochs=5", "model.positions=rotary", "run.compile=true"])
    assert (config.schedule.epochs, config.model.width, config.model.positions) == (5, 32, "rotary")
    assert (config.data.task, config.run.compile, config.data.batch) == ("mixed", True, 128)
    assert repr(config.optimiser.rate) == "1.0"


def test_json_files_and_round_trip(tmp_path: Path) -> None:
    settings = ["model.attention=separable", 'model.settings={"temperature": 2.0}']
    config = read_config(None, ["schedule.steps=7", "optimiser.clip=inf", *settings])
    assert TrainConfig.from_json(config.to_json()) == config
    (tmp_path / "run.json").write_text(config.to_json())
    assert read_config(tmp_path / "run.json") == config
    assert read_config(tmp_path / "run.json", ["run.seed=1"]) != config


def test_the_vocabulary_comes_from_the_corpus() -> None:
    assert read_config(None, ["schedule.steps=7"]).model.vocabulary == vocabulary_of(corpus_of("invented")).size


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["schedule.epoch=3"], "schedule: epoch=3 is not a parameter"),
        (["speed.steps=3"], "speed={'steps': 3} is not a section of a configuration; known: model, data, optimiser"),
        ([".steps=3"], "''={'steps': 3} is not a section of a configuration; known: model, data, optimiser"),
        (["model.depth=3"], "depth=3 is not a field"),
        (["epochs=3"], "flag='epochs=3' must be section.name=value; try schedule.epochs=20"),
        (["schedule.epochs=three"], "schedule: epochs=three must be a whole number"),
        (["optimiser.rate=-1"], "optimiser: rate=-1.0 must be above 0"),
        (["optimiser.beta1=1"], "optimiser: beta1=1.0 must be at least 0 and below 1"),
        (["data.task=guess"], "data: task='guess' must be one of pretrain, finetune, mixed"),
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
    base = ["data.task=finetune", "schedule.steps=5", f"data.corpus={tmp_path / 'corpus'}", "data.batch=4"]
    config = read_config(None, [*base, start, "model.dropout=0.0", "run.device=cpu"])
    assert (config.model.width, config.model.dropout) == (16, 0.0)
    tuned = train(config, tmp_path / "second")
    assert tuned.vocabulary == first.vocabulary
    saved = json.loads((tmp_path / "second" / "config.json").read_text())
    assert TrainConfig.of(saved) == config
    with pytest.raises(ParameterError, match=re.escape("model: width=64 contradicts 16 in run.start")):
        read_config(None, [*base, start, "model.width=64"])
