"""The benchmarks of the knowledge experiment train the arms that their tables name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from avow.nn import build
from avow.training import always, corpus_of, invent, write_corpus
from avow.training.knowledge import NOT_READ, Arm, Result
from benchmarks import gpu
from benchmarks.figures import text
from benchmarks.options import Options


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Options, list[Arm]]:
    """Options of a small corpus, and the arms that are asked for; each answers as its seed says."""
    write_corpus(invent(people=10), tmp_path)
    asked: list[Arm] = []
    places = [question.answer for question in corpus_of(str(tmp_path)).dev]

    def answered(arms: Sequence[Arm], folder: Path, **options: Any) -> list[Result]:
        asked.extend(arms)
        dev = corpus_of(str(tmp_path)).dev
        return [Result(arm, always(places[arm.seed % len(places)], dev, 0.5), 7, 1.0, 1.0) for arm in arms]

    monkeypatch.setattr("avow.training.run_many.side_by_side", answered)
    return Options(corpus=tmp_path, runs=tmp_path / "runs"), asked


def test_every_attention_is_trained_with_the_same_recipe_over_three_seeds(trained: tuple[Options, list[Arm]]) -> None:
    options, asked = trained
    results = gpu.knowledge(options)
    table, recited, sure, calibration = results
    labels = ["majority answer", NOT_READ, "random_features", "separable", "latent", "exact"]
    assert [row["arm"] for row in table.rows] == labels
    assert [row["seeds"] for row in table.rows[1:]] == [3] * 5 and len(asked) == 15
    read = [arm.config for arm in asked if arm.label != NOT_READ]
    assert all(config.mixture == read[0].mixture and config.schedule == read[0].schedule for config in read)
    assert read[0].mixture.facts > 0
    assert all(row["lowest"] <= row["mean accuracy"] <= row["highest"] for row in table.rows)
    assert next(row["kind"] for row in recited.rows if row["arm"] == "exact") == "recited and extracted"
    assert {row["answered"] for row in sure.rows} == {0.25, 0.5, 0.75, 1.0}
    assert {row["confidence"] for row in calibration.rows} == {0.5}
    assert all(result.title in text(result) for result in results)


def test_every_step_of_the_recipe_is_taken_alone_and_within_the_same_weights(
    trained: tuple[Options, list[Arm]],
) -> None:
    options, asked = trained
    gpu.recipe(options)
    configs = {arm.label: arm.config for arm in asked if arm.seed == 0}
    assert list(configs) == [*gpu._RECIPE, "byte pairs"] and len(asked) == 3 * len(configs)
    earlier = configs["earlier recipe"].plain()
    differing = {
        label: {
            f"{section}.{name}"
            for section, fields in config.plain().items()
            for name, value in fields.items()
            if value != earlier[section][name]
        }
        for label, config in configs.items()
    }
    assert {
        label: fields for label, fields in differing.items() if label.startswith(("full", "other", "rev", "more", "av"))
    } == {
        "full names": {"mixture.full_name"},
        "other orders": {"mixture.permuted"},
        "reverse": {"mixture.reverse"},
        "more questions": {"mixture.questions"},
        "averaged weights": {"optimizer.average"},
    }
    assert differing["facts in four phrases"] == {
        f"mixture.{kind}" for kind in ("facts", "questions", "spans", "cloze")
    }
    assert differing["facts, the likeliest alone"] == differing["facts in four phrases"] | {"mixture.odds"}
    assert all(sum(p.numel() for p in build(config.model).parameters()) <= 3_400_000 for config in configs.values())


def test_without_the_library_the_arm_of_byte_pairs_is_left_out(
    trained: tuple[Options, list[Arm]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, asked = trained
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    gpu.recipe(options)
    assert {arm.label for arm in asked} == set(gpu._RECIPE)
    assert "byte pairs: left out, the library tokenizers is not installed" in capsys.readouterr().err
