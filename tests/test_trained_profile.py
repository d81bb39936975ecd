"""`avow profile` and `avow verify` on a trained model, SmolLM2-135M; `make test-model` runs this."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from avow.integrations.transformers import profile, verify
from avow.integrations.transformers.model_files import load_model
from tests.helpers.layer_audit import ask_sketches
from tests.test_trained_model import FOLDER, loaded, manual  # noqa: F401  # a fixture

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def test_a_plan_made_on_one_part_of_the_manual_is_safe_on_another(
    loaded: tuple[Any, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = loaded
    ids = manual(tokens, 1536)
    found = profile(model, ids[:, :1024], tol=1e-2, budget=0.5)
    assert len(found.layers) == 30 and len(found.heads) == 270
    assert {head.figures.kind for head in found.heads} == {"copying", "local", "averaging", "diffuse"}
    for head in found.heads:
        # Trained heads have logits beyond what features or landmarks can promise anything about.
        assert head.within_tolerance("random_features", 1e-2) is None
        assert head.within_tolerance("low_rank", 1e-2) is None
        assert head.within_tolerance("sparse", 1e-2) is not None
    assert 0 < found.plan.changed < 270, "so short a text saves reading for some heads only"
    assert 0 < found.share <= 1
    assert model.config._attn_implementation == "sdpa"

    here = verify(model, found.plan, ids, places=8, generate=4)
    assert here.kept and here.within and here.partial == 0, "so short a cache is read in full on a CPU"
    # Elsewhere sketches pay: every head that can is sparse, and every cache asks.
    ask_sketches(monkeypatch)
    verdict = verify(model, dataclasses.replace(found, budget=1.0).plan, ids, places=64, generate=8)
    assert verdict.kept and verdict.within and verdict.partial > 0
    assert verdict.agreement >= 0.99 and abs(verdict.change) <= 2e-3
    assert verdict.largest_error > 1e-5, "tokens were left out"


def test_the_model_is_found_in_its_folder_and_in_its_file(loaded: tuple[Any, Any]) -> None:  # noqa: F811
    (file,) = FOLDER.glob("*.gguf")
    found = load_model(str(file))
    assert found.name == file.stem == load_model(str(FOLDER)).name
    assert torch.equal(found.model.model.norm.weight, loaded[0].model.norm.weight)
