"""The attention explorer: its presets make their point, its verdicts are proofs, and its numbers are attention's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from avow.lab.pages import explorer
from avow.lab.pages.explorer import PAGE, ExplorerInputs, bearings, pointed, sphere
from avow.theory.constructions.queries import enclosed, read


def facts(answer: dict[str, Any]) -> dict[str, str]:
    return {fact["label"]: fact["value"] for fact in answer["facts"]}


def word(**inputs: Any) -> str:
    return str(PAGE.verdict(ExplorerInputs(**inputs))["verdict"]["word"]) if PAGE.verdict else ""


@pytest.mark.parametrize("preset", PAGE.presets)
def test_every_preset_makes_its_point(preset: str) -> None:
    assert word(**PAGE.presets[preset]) in ("kept", "proved")


@pytest.mark.parametrize("space", ["plane", "sphere"])
@pytest.mark.parametrize("n", [3, 8, 12])
def test_every_key_can_be_copied_and_a_query_that_looks_away_is_refuted(space: str, n: int) -> None:
    for target in range(n):
        assert word(space=space, n=n, target=target) == "kept"
        own = PAGE.preview(ExplorerInputs.of({"space": space, "n": n, "target": target}))["shown"]
        away = {"angle": math.remainder(own["angle"] + 180, 360), "rise": -own["rise"]}
        assert word(space=space, n=n, target=target, **away) == "not kept"
        assert word(space=space, n=n, target=target, length=0.0) == "not kept"


def test_an_average_that_no_query_gives_is_impossible_and_the_keys_that_rule_it_out_are_named() -> None:
    found = explorer.verdict(ExplorerInputs(show="average", target=0, other=4))["verdict"]
    assert found["tone"] == "refuted" and found["word"] == "impossible"
    assert "No query reads just keys 0 and 4 alike" in found["says"]


def test_one_head_fails_where_two_survive() -> None:
    found = facts(explorer.verdict(ExplorerInputs(show="noise", c=0.5)))
    assert found["Chance with one head"] == "0" and found["Chance with two heads"] == "1"
    quiet = facts(explorer.verdict(ExplorerInputs(show="noise", c=0.05)))
    assert quiet["Chance with two heads"] == "1"
    gaussian = facts(explorer.verdict(ExplorerInputs(show="noise", law="Gaussian", variance=0.5)))
    assert gaussian["Chance with one head"].startswith("0.0390837") and gaussian["Chance with two heads"].startswith(
        "0.848"
    )


def test_a_preview_says_what_the_verdict_proves() -> None:
    for inputs in ({}, {"angle": 20.0}, {"show": "average"}, {"show": "route", "angle": 30.0}, {"space": "sphere"}):
        preview, verdict = (f(ExplorerInputs(**inputs)) for f in (explorer.preview, explorer.verdict))
        assert float(facts(preview)["Logit gap"]) == pytest.approx(float(facts(verdict)["Logit gap"]), rel=1e-3)
        read_ = sum(float(preview["stage"]["weights"][i]) for i in preview["stage"]["wanted"])
        assert read_ == pytest.approx(float(facts(verdict)["Weight of what is read"]), abs=1e-9)


def test_a_certificate_that_is_broken_is_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = explorer._attended

    def wrong(scene: Any) -> Any:
        out, certificate = attended(scene)
        return out + 1e-3, certificate

    monkeypatch.setattr(explorer, "_attended", wrong)
    found = explorer.verdict(ExplorerInputs())["verdict"]
    assert found["word"] == "broken" and "BROKE its promise" in found["says"]


def test_bearings_lead_back_to_the_vector() -> None:
    for point in sphere(7):
        assert torch.allclose(pointed(3, **bearings(point * 5)), point * 5, atol=1e-5)


def test_an_enclosure_holds_attention_and_sees_an_answer_that_is_off() -> None:
    queries, keys, values = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 3)
    found = read(queries, keys, values)
    true = enclosed(queries, keys, values, found.outputs, kept=(0, 2))
    for weight, (low, high) in zip(found.weights.mean(0).tolist(), true.weights, strict=True):
        assert low - 1e-15 <= weight <= high + 1e-15 and high - low < 1e-15
    assert true.gap[0] - 1e-12 <= found.gap((0, 2)) <= true.gap[1] + 1e-12
    assert true.error < 1e-14
    off = enclosed(queries, keys, values, found.outputs + 0.01, kept=(0,))
    assert off.error == pytest.approx(0.01 * math.sqrt(3) / float(values.norm(dim=1).max()), rel=1e-6)


def test_one_key_has_no_gap_to_bound_and_values_of_zero_are_read_as_zero() -> None:
    query, key, nothing = torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2)
    alone = enclosed(query, key, nothing, nothing, kept=(0,))
    assert alone.gap == (math.inf, math.inf) and alone.error == 0.0 and alone.weights == ((1.0, 1.0),)
    assert enclosed(query, key, nothing, nothing + 1, kept=(0,)).error == math.inf
    assert read(query, key, nothing).gap((0,)) == math.inf


def test_an_estimate_is_what_verify_proves() -> None:
    from avow.theory.constructions import average_query, copy_query

    for made in (copy_query(torch.eye(5), 2, 0.01), average_query(torch.eye(5), (0, 3), 0.05)):
        assert made.estimate == pytest.approx(made.verify().achieved, rel=1e-9)
