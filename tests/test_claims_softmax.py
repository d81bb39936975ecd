"""Claims on softmax: the facts they must show."""

from __future__ import annotations

import math

import pytest
import torch

from avow.theory.claims import Claim, Evidence
from avow.theory.claims.catalogue import softmax
from tests.helpers.judging import judged


@pytest.mark.parametrize(("name", "gap"), [("float32", "103.97"), ("float64", "745.13"), ("float16", "17.33")])
def test_the_gaps_are_those_of_the_formats(name: str, gap: str) -> None:
    power, shown = softmax.GAPS[name]
    form = torch.finfo(getattr(torch, name))
    # finfo's product underflows in float64, its logarithms do not.
    assert power == 1 - math.log2(form.tiny) - math.log2(form.eps)
    assert f"{gap} in " in softmax.softmax_vanishing.plain and float(shown) == float(gap)
    assert power * math.log(2) == pytest.approx(float(gap), abs=0.005)
    weights = torch.softmax(
        torch.tensor([[0.0, 0.02 - float(gap)], [0.0, -0.02 - float(gap)]], dtype=getattr(torch, name)), -1
    )
    assert float(weights[0, 1]) > 0 and float(weights[1, 1]) == 0


def test_the_library_s_own_thresholds_lie_beyond_the_gaps() -> None:
    from avow.numerics.rounding import underflow_log

    assert underflow_log(torch.float32) > 103.98 and underflow_log(torch.float64) > 745.14
    assert underflow_log(torch.float32) < 104.1 and underflow_log(torch.float64) < 745.3


def test_denominators_of_zero_and_of_infinity_are_executed() -> None:
    found = [step.plain()["facts"] for step in judged(softmax.softmax_stored).evidence]
    assert [facts["fails"] for facts in found] == ["positive", "denominator", "finite"]
    weights, terms = "weights without the shift", "terms in PyTorch"
    assert found[1][terms] == [0.0, 0.0] and found[1][weights] == ["nan", "nan"]
    assert found[2][terms] == ["inf", "inf"] and found[2][weights] == ["nan", "nan"]
    assert float(torch.softmax(torch.tensor([0.0, -104.0]), -1)[1]) == 0


def test_a_finite_mask_fails_in_three_ways_for_each_number() -> None:
    says = [step.says for step in judged(softmax.finite_mask).evidence]
    for mask in ("-100000", "-1000000000"):
        assert sum(word.startswith((f"mask {mask}:", f"mask {mask} ")) for word in says) == 3
    assert {step.kind for step in judged(softmax.finite_mask).evidence} == {"counterexample"}


def test_every_proof_is_for_any_number_of_keys() -> None:
    """Steps of the two proofs are symbolic: a number of keys appears in none but as a letter."""
    for one in (softmax.softmax_categorical, softmax.copy_gap):
        assert judged(one).kinds == ("symbolic",)


@pytest.mark.parametrize("n", [2, 3, 50])
def test_the_gap_that_is_enough_is_exactly_enough(n: int) -> None:
    eps = 0.01
    gap = math.log((n - 1) / eps)
    weight = torch.softmax(torch.tensor([gap] + [0.0] * (n - 1), dtype=torch.float64), -1)[0]
    assert float(weight) == pytest.approx(1 / (1 + eps), rel=1e-12)


def test_a_weaker_proof_would_be_noticed() -> None:
    weak = Claim(
        "weak",
        topic="t",
        statement="x",
        plain="x.",
        expected="proved",
        check=lambda _: [Evidence("search", "tried")],
        sabotage={"same": None},
        assumptions=("none",),
        picture=softmax.copy_gap.picture,
    )
    assert not weak.judge().as_recorded
    assert softmax.copy_gap.judge().as_recorded
