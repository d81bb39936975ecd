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
    (found,) = (step for step in judged(softmax.softmax_bounds).evidence if step.says.startswith(f"{name}: ln(1/h)"))
    assert gap in found.says and found.kind == "balls"
    form = torch.finfo(getattr(torch, name))
    # finfo's product underflows in float64, its logarithms do not.
    log_half = (math.log2(form.tiny) + math.log2(form.eps) - 1) * math.log(2)
    assert float(found.facts["gap"]) == pytest.approx(-log_half, abs=1e-9)
    weights = torch.softmax(
        torch.tensor([[0.0, 0.02 - float(gap)], [0.0, -0.02 - float(gap)]], dtype=getattr(torch, name)), -1
    )
    assert float(weights[0, 1]) > 0 and float(weights[1, 1]) == 0


def test_the_library_s_own_thresholds_lie_beyond_the_gaps() -> None:
    from avow.numerics.rounding import underflow_log

    assert underflow_log(torch.float32) > 103.98 and underflow_log(torch.float64) > 745.14
    assert underflow_log(torch.float32) < 104.1 and underflow_log(torch.float64) < 745.3


def test_denominators_of_zero_and_of_infinity_are_executed() -> None:
    found = [step.plain() for step in judged(softmax.softmax_bounds).evidence if step.kind == "counterexample"]
    assert [step["facts"]["scores"] for step in found] == [[0, -104], [-200, -201], [100, 99]]
    assert found[1]["facts"]["terms"] == [0.0, 0.0] and found[1]["facts"]["weights"] == ["nan", "nan"]
    assert found[2]["facts"]["terms"] == ["inf", "inf"] and found[2]["facts"]["weights"] == ["nan", "nan"]
    assert found[2]["facts"]["softmax"] == pytest.approx([0.7311, 0.2689], abs=1e-4)


def test_a_finite_mask_fails_in_three_ways_for_each_number() -> None:
    says = [step.says for step in judged(softmax.finite_mask).evidence]
    for mask in ("-100000", "-1e+09"):
        assert sum(word.startswith(f"mask {mask}") for word in says) == 3
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
