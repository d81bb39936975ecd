"""The claims about one query: each verdict as recorded, each sabotage rejected, and the numbers the ledger shows."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flint import arb

from avow.claims import toolbox
from avow.claims.catalogue import mixtures, noise, queries
from avow.claims.claim import Claim, Evidence, Finding, Unproved
from avow.constructions.construction import Construction, Proof
from avow.constructions.queries import copy_query
from avow.maths import balls
from avow.report.mathml import formula

CLAIMS = {
    found.id: found
    for module in (queries, mixtures, noise)
    for found in vars(module).values()
    if isinstance(found, Claim)
}
EXPECTED = {
    "copy-separated": "proved",
    "copy-shortest": "refuted",
    "copy-possible": "corrected",
    "average-two": "proved",
    "mixture-any": "proved",
    "noise-isotropic": "corrected",
    "noise-one-key-discrete": "proved",
    "noise-one-key-gauss": "corrected",
}
SABOTAGES = [(id, name) for id, found in CLAIMS.items() for name in found.sabotage]


@functools.cache
def judged(id: str) -> Finding:
    return CLAIMS[id].judge()


def step(id: str, words: str) -> Evidence:
    """The one step of evidence that says these words."""
    (found,) = [one for one in judged(id).evidence if words in one.says]
    return found


def number(fact: Any) -> float:
    """The middle of a ball as it is printed."""
    return float(str(fact).strip("[]").split(" ")[0])


def test_every_claim_of_the_table_is_here() -> None:
    assert {id: found.expected for id, found in CLAIMS.items()} == EXPECTED
    assert {found.topic for found in CLAIMS.values()} == {"queries"}


@pytest.mark.parametrize("id", EXPECTED)
def test_the_verdict_is_the_recorded_one(id: str) -> None:
    finding = judged(id)
    assert finding.verdict == EXPECTED[id], finding.trouble
    assert "search" not in finding.kinds


@pytest.mark.parametrize(("id", "name"), SABOTAGES)
def test_each_sabotage_is_rejected_by_the_same_check(id: str, name: str) -> None:
    assert CLAIMS[id].judge_sabotage(name).rejected


@pytest.mark.parametrize("id", EXPECTED)
def test_a_claim_is_told_in_full_and_as_json(id: str) -> None:
    found = CLAIMS[id]
    assert found.sabotage and found.assumptions and found.plain and found.statement and found.used_by
    for latex in filter(None, (found.statement, found.amended)):
        assert "<math" in formula(latex), latex
    assert bool(found.amended) == bool(found.amended_plain) == (found.expected == "corrected")
    assert found.picture is not None
    json.dumps(found.picture().plain(), allow_nan=False)
    for one in judged(id).evidence:
        json.dumps(dict(one.facts), allow_nan=False)


def test_the_library_finds_the_optimum_that_is_proved() -> None:
    shown = step("copy-shortest", "shortest query, ten orthonormal keys").facts["length"]
    assert shown == pytest.approx(math.sqrt(9 / 10) * math.log(9 / 0.01), rel=1e-9)
    surrounded = step("copy-shortest", "shortest query, keys around").facts["length"]
    assert surrounded == pytest.approx(2 * math.log(2 / 0.01), rel=1e-9)


def test_the_stated_query_is_more_than_twice_as_long() -> None:
    shown = [one.facts for one in judged("copy-shortest").evidence if one.kind == "counterexample"]
    assert [facts["n"] for facts in shown] == [10, 1000]
    assert all(number(facts["times"]) > 2 for facts in shown)


def test_weights_shown_are_those_of_a_softmax() -> None:
    t = math.log(1000 / 0.01)
    for c in (0.5, 1.5):
        scores = torch.zeros(1000, dtype=torch.float64)
        scores[0], scores[1] = c * t, t
        weights = torch.softmax(scores, 0)
        facts = step("noise-one-key-discrete", f"c = {int(2 * c)}/2: the weights are").facts
        assert number(facts["first"]) == pytest.approx(float(weights[0]), rel=1e-10)
        assert number(facts["second"]) == pytest.approx(float(weights[1]), rel=1e-10)


def test_the_negative_key_has_its_exact_probability() -> None:
    facts = step("noise-one-key-gauss", "P(X < 0)").facts
    assert number(facts["probability"]) == pytest.approx(math.erfc(1) / 2, abs=1e-14)
    assert number(step("noise-one-key-gauss", "X leaves").facts["probability"]) == pytest.approx(0.4795, abs=1e-4)


def test_the_normal_law_in_balls_encloses_it() -> None:
    assert balls.normal_cdf(arb(0)).overlaps(arb(1) / 2)
    for x in (-3.0, -0.5, 1.25):
        assert float(balls.normal_cdf(arb(x))) == pytest.approx(0.5 * math.erfc(-x / math.sqrt(2)), rel=1e-14)
    assert not balls.normal_cdf(arb(1)).overlaps(balls.normal_cdf(arb(-1)))


@dataclass(frozen=True)
class Braggart(Construction):
    """A construction whose proof finds more error than it promised."""

    promise = "nothing is ever off"
    bound = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def verify(self) -> Proof:
        return Proof(self.promise, self.bound, 0.5)

    def picture(self) -> Any:
        raise AssertionError("not drawn")


def test_a_construction_that_breaks_its_promise_is_no_evidence() -> None:
    kept = toolbox.kept(copy_query(torch.eye(3), 0, 0.1), "a query")
    assert kept.kind == "balls" and kept.facts["proved"] <= kept.facts["promised"]
    with pytest.raises(Unproved, match="a boast: BROKEN: nothing is ever off"):
        toolbox.kept(Braggart(), "a boast")
