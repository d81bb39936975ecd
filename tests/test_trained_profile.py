"""`avow profile` and `avow verify` on a trained model, SmolLM2-135M; `make test-model` runs this."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from avow.integrations.transformers import profile, verify
from avow.integrations.transformers.head_kinds import KINDS
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
    counted = Counter(head.figures.kind for head in found.heads)
    assert set(counted) == set(KINDS) and counted["resting"] >= 30 and counted["wide"] >= 60
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


STORY = """Anna and Peter lived in a small house by the sea. On the kitchen shelf stood a blue teapot, and Anna kept the
key of the garden gate in the blue teapot, because Peter always lost it. In spring the neighbours came for
tea. Mrs. Halloway brought a cake, Mr. Okonkwo brought his dog, and Peter told everybody about the boat that
he wanted to build. Anna laughed, because Peter had told the same story last year. When the guests had gone
home, Peter went to the garden and found that the gate was locked. "Anna," he called, "where is the key?" Anna
did not answer. She was upstairs, reading a letter from Mrs. Halloway. So Peter walked back to the kitchen,
looked at the shelf, and remembered what Anna always did. He smiled, lifted the lid, and took the key out of
the blue""".replace("\n", " ")


def test_heads_called_induction_read_what_followed_the_same_word(loaded: tuple[Any, Any]) -> None:  # noqa: F811
    model, tokens = loaded
    ids = tokens(STORY, return_tensors="pt").input_ids
    found = profile(model, ids, tol=0.1)
    kinds = {(i, j): x for i, heads in enumerate(found.layers.values()) for j, x in enumerate(heads)}

    def of(kind: str) -> set[tuple[int, int]]:
        return {place for place, head in kinds.items() if head.figures.kind == kind}

    assert {(17, 3), (17, 5), (18, 6), (20, 6)} <= of("induction") and len(of("induction")) <= 15
    assert {(8, 0), (14, 3)} <= of("same") and (16, 0) in of("previous")
    # A row in which an induction head reads anything reads what followed the same word; other heads' rows do not.

    def hits(place: tuple[int, int]) -> list[bool]:
        rows = [(row.position, row.tokens[0][0]) for row in kinds[place].readings]
        return [bool(ids[0, j - 1] == ids[0, i]) for i, j in rows if j > 0]

    found_out = [hit for place in ((17, 3), (17, 5), (18, 6)) for hit in hits(place)]
    assert len(found_out) >= 12 and sum(found_out) >= 0.7 * len(found_out)
    assert sum(hits((16, 0))) <= 1, "the word before is another"


def test_the_model_is_found_in_its_folder_and_in_its_file(loaded: tuple[Any, Any]) -> None:  # noqa: F811
    (file,) = FOLDER.glob("*.gguf")
    found = load_model(str(file))
    assert found.name == file.stem == load_model(str(FOLDER)).name
    assert torch.equal(found.model.model.norm.weight, loaded[0].model.norm.weight)
