"""Claims on ReLU networks: the verdicts recorded, the sabotages rejected, and the facts they must show."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import sympy

from avow.claims import Claim
from avow.claims.catalogue import relu
from avow.constructions import relu_square
from avow.constructions.relu import hinges, sawtooth, square_error
from tests.judging import claims_of, judged

CLAIMS = claims_of(relu)


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: one.id)
def test_each_claim_is_as_recorded_and_can_be_told_and_drawn(one: Claim) -> None:
    found = judged(one)
    assert found.verdict == one.expected, found.trouble
    assert json.loads(json.dumps(found.plain(), allow_nan=False))["evidence"]
    assert one.picture is not None
    drawn = json.loads(json.dumps(one.picture().plain(), allow_nan=False))
    assert drawn.get("series") or drawn.get("rows")
    assert one.topic == "relu" and one.plain.endswith(".") and one.assumptions


@pytest.mark.parametrize(
    ("one", "name"),
    [(one, name) for one in CLAIMS for name in one.sabotage],
    ids=lambda part: getattr(part, "id", part),
)
def test_each_sabotage_is_rejected_by_the_check_itself(one: Claim, name: str) -> None:
    broken = one.judge_sabotage(name)
    assert broken.rejected, broken.trouble


def test_the_topic_is_complete_and_each_claim_has_a_sabotage() -> None:
    recorded = {
        "relu-linear-a": "corrected",
        "relu-linear-b": "refuted",
        "relu-square": "proved",
        "relu-square-deep": "proved",
        "relu-square-line": "refuted",
    }
    assert {one.id: one.expected for one in CLAIMS} == recorded
    assert all(one.sabotage for one in CLAIMS)


def test_the_units_recorded_are_those_the_library_makes() -> None:
    for eps, units in relu.WIDE.items():
        assert relu_square(eps).units == units
    for eps, units in relu.DEEP.items():
        assert relu_square(eps, deep=True).units == units


def test_the_claim_s_family_is_the_library_s_network() -> None:
    assert relu.Hinges().layers(7) == hinges(7)
    assert square_error(relu.Hinges().layers(7)) == Fraction(1, 450)


def test_the_errors_of_the_four_widths_are_shown() -> None:
    shown = [
        found["error"] for found in (step.facts for step in judged(relu.relu_square_wide).evidence) if "units" in found
    ]
    assert shown == ["1/162", "1/1058", "1/10082", "1/1005362"]


def test_depth_pays_where_the_claim_says_and_not_before() -> None:
    wide, deep = ([units[eps] for eps in sorted(units, reverse=True)] for units in (relu.WIDE, relu.DEEP))
    assert [d < w for d, w in zip(deep, wide, strict=True)] == [False, False, True, True]


def test_fractions_and_symbols_agree_on_a_network() -> None:
    x, m, b = Fraction(5, 13), Fraction(-3), Fraction(2)
    assert relu.TWO_UNITS.at(m, b, x) == m * x + b
    symbols = relu.ONE_UNIT.at(relu.m, relu.b, relu.x)
    for where in (-2, 1):
        values = {relu.m: 3, relu.b: 1, relu.x: where}
        assert sympy.Rational(relu.ONE_UNIT.at(Fraction(3), Fraction(1), Fraction(where))) == symbols.subs(values)
    # 5/13 lies 7/13 of the way along the second quarter.
    assert relu.evaluated(sawtooth(2), x) - x * x == Fraction(7, 13) * Fraction(6, 13) / 16


def test_counterexamples_are_concrete() -> None:
    found = [step.plain()["facts"] for step in judged(relu.relu_square_line).evidence if step.kind == "counterexample"]
    assert [step["true"] for step in found] == ["4", "100", "4", "100"]
    assert all(abs(Fraction(step["network"]) - Fraction(step["true"])) > Fraction(1, 1000) for step in found)
