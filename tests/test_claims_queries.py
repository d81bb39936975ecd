"""The claims about one query: the numbers they show, and the library doing as they say."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb

from avow.errors import InsideHull
from avow.numerics import intervals
from avow.theory.claims import catalogue, toolbox
from avow.theory.claims.catalogue import noise, queries
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import value
from avow.theory.constructions.construction import Construction, Proof
from avow.theory.constructions.queries import copy_query
from tests.helpers.judging import finding, step


def test_the_library_finds_the_optimum_that_is_proved() -> None:
    one = catalogue()["copy-least"].as_stated()
    values = {queries.n: 10, queries.eps: Fraction(1, 100)}
    least = float(value(one.terms["least"], values))
    found = copy_query(torch.eye(10), target=0, eps=0.01, shortest=True)
    assert found.norm == pytest.approx(least, rel=1e-9)
    assert least == pytest.approx(math.sqrt(9 / 10) * math.log(9 / 0.01), rel=1e-12)


def test_the_stated_query_is_more_than_twice_as_long() -> None:
    shown = [one.facts for one in finding("copy-shortest").evidence if one.kind == "counterexample"]
    assert [facts["n"] for facts in shown] == ["2", "10"]
    for facts in shown:
        length = math.sqrt(
            sum(float(Fraction(x)) ** 2 for x in re.findall(r"-?\d+/\d+", facts["q"].replace(", ", "/")))
        )
        assert 2 * length < 2 * math.log(int(facts["n"]) / 0.01)


def test_a_direction_that_parts_and_a_combination_exclude_each_other() -> None:
    """The rule says that one of the two is there; `copy_query` finds which for keys of the plane."""
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    outside = torch.cat([torch.tensor([[3.0, 3.0]], dtype=torch.float64), corners])
    assert copy_query(outside, target=0, eps=0.01).verify()
    with pytest.raises(InsideHull):
        copy_query(torch.cat([torch.tensor([[1.0, 1.0]], dtype=torch.float64), corners]), target=0, eps=0.01)


@pytest.mark.parametrize("c", [0.5, 1.5])
def test_a_key_of_another_length_takes_what_the_claim_says_from_a_softmax(c: float) -> None:
    t, part = math.log(1000 / 0.01), {0.5: "short", 1.5: "long"}[c]
    scores = torch.zeros(1000, dtype=torch.float64)
    scores[0], scores[1] = c * t, t
    weights = torch.softmax(scores, 0)
    assert [round(float(x), 4) for x in weights[:2]] == ([0.0031, 0.987] if c < 1 else [0.9968, 0.0032])
    statement = catalogue()["noise-one-key-discrete"].as_stated()
    case = {noise.n: 1000, noise.eps: Fraction(1, 100), noise.c: Fraction(c)}
    assert float(value(statement.parts["ratio"].rhs, case)) == pytest.approx(float(weights[0] / weights[1]), rel=1e-9)
    least = float(value(statement.parts[part].args[1].rhs, case))
    assert least <= float(weights[int(c < 1)]) < least + 1e-4


def test_the_negative_key_has_its_exact_probability() -> None:
    parts = noise.noise_one_key_gauss.as_amended().parts
    negative = value(parts["negative"].args[1].lhs, {noise.d: 2, noise.mu: [[0, 1], [1, 0]], noise.alpha: 0})
    assert float(negative) == pytest.approx(math.erfc(1) / 2, abs=1e-14) == pytest.approx(0.0786, abs=1e-4)


def test_two_noisy_keys_share_the_weight_as_often_as_the_law_says() -> None:
    statement = noise.noise_isotropic.as_amended()
    case = {noise.alpha: Fraction(1, 100), noise.beta: 3, noise.delta: 1}
    by_law = float(value(statement.parts["law"].rhs, case))
    keys = torch.eye(2, dtype=torch.float64) + 0.1 * torch.randn(
        200_000, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scores = 3 * keys.sum(-1)
    assert float(((scores[:, 0] - scores[:, 1]).abs() <= 1).double().mean()) == pytest.approx(by_law, abs=0.005)


def test_the_normal_law_in_balls_encloses_it() -> None:
    assert intervals.normal_cdf(arb(0)).overlaps(arb(1) / 2)
    for x in (-3.0, -0.5, 1.25):
        assert float(intervals.normal_cdf(arb(x))) == pytest.approx(0.5 * math.erfc(-x / math.sqrt(2)), rel=1e-14)
    assert not intervals.normal_cdf(arb(1)).overlaps(intervals.normal_cdf(arb(-1)))


def test_weights_out_of_reach_come_with_the_combination_that_forbids_them() -> None:
    shown = step("mixture-range", "the library refuses").facts["combination"]
    combination = [Fraction(c) for c in re.findall(r"-?[\d/]+", shown)]
    logs = [math.log(weight) for weight in (0.25, 0.5, 0.25)]
    assert abs(sum(float(c) * log for c, log in zip(combination, logs, strict=True))) > 1
    assert sum(combination) == 0 and combination[1] + 2 * combination[2] == 0


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
