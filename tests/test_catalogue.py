"""What every claim owes: the recorded verdict without sampling, sabotages rejected, words and a picture to show."""

from __future__ import annotations

import json

import pytest

from avow.report.mathml import formula
from avow.theory.claims import catalogue
from tests.helpers.judging import finding

CLAIMS = catalogue()
every_claim = pytest.mark.parametrize("id", CLAIMS)


@pytest.mark.claims
@every_claim
def test_the_verdict_is_the_recorded_one_and_rests_on_no_sample(id: str) -> None:
    found = finding(id)
    assert found.as_recorded, found.trouble
    assert "search" not in found.kinds
    assert found.evidence or found.verdict == "not applicable"
    json.dumps(found.plain(), allow_nan=False)


@pytest.mark.claims
@pytest.mark.parametrize(("id", "name"), [(id, name) for id, one in CLAIMS.items() for name in one.sabotage])
def test_each_sabotage_is_rejected_by_the_check_itself(id: str, name: str) -> None:
    broken = CLAIMS[id].judge_sabotage(name)
    assert broken.rejected or broken.verdict == "not applicable", broken.trouble


@every_claim
def test_a_claim_can_be_told_and_drawn(id: str) -> None:
    one = CLAIMS[id]
    assert one.statement and one.sabotage and one.assumptions and one.plain.endswith(".")
    for latex in filter(None, (one.statement, one.amended)):
        assert "<math" in formula(latex), latex
    assert bool(one.amended) == bool(one.amended_plain) == (one.expected == "corrected")
    assert one.picture is not None
    drawn = json.loads(json.dumps(one.picture().plain(), allow_nan=False))
    assert drawn["title"] and (drawn.get("series") or drawn.get("rows"))
