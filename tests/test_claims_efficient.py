"""Claims on other forms of attention: each verdict as recorded, each sabotage seen through."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from flint import arb

import avow
from avow.chart import Chart, Table
from avow.claims.catalogue import efficient, features, singular
from avow.claims.claim import Claim
from avow.maths import balls

CLAIMS = {
    one.id: one for module in (efficient, features, singular) for one in vars(module).values() if isinstance(one, Claim)
}
VERDICTS = {
    "rbf-equals-dot": "proved",
    "kernel-form": "proved",
    "separable-rows": "proved",
    "separable-weaker": "proved",
    "features-unbiased": "corrected",
    "features-variance": "corrected",
    "svd-energy": "proved",
    "svd-kth": "proved",
    "svd-spectral": "proved",
}
every_claim = pytest.mark.parametrize("name", VERDICTS)


def test_these_are_the_claims() -> None:
    assert set(CLAIMS) == set(VERDICTS)


@every_claim
def test_the_verdict_is_the_one_recorded_and_its_evidence_can_be_written_down(name: str) -> None:
    found = CLAIMS[name].judge()
    assert (found.verdict, found.trouble) == (VERDICTS[name], "")
    assert CLAIMS[name].expected == VERDICTS[name]
    assert not {"search"} & set(found.kinds)
    for step in found.evidence:
        json.dumps(dict(step.facts))


@pytest.mark.parametrize(
    ("name", "broken"), [(name, broken) for name, one in CLAIMS.items() for broken in one.sabotage]
)
def test_each_sabotage_is_seen_through_by_the_check_itself(name: str, broken: str) -> None:
    found = CLAIMS[name].judge_sabotage(broken)
    assert found.rejected and found.trouble


@every_claim
def test_each_claim_has_a_picture_words_and_a_sabotage(name: str) -> None:
    one = CLAIMS[name]
    drawn = one.picture() if one.picture else None
    assert isinstance(drawn, Chart | Table)
    assert json.loads(json.dumps(drawn.plain()))["title"] == drawn.title
    assert one.sabotage and one.statement and one.plain and one.assumptions
    for module in one.used_by:
        assert (Path(avow.__file__).parent / f"{module}.py").is_file()


def test_the_library_attends_by_distance_as_the_claim_says() -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 4, dtype=torch.float64).unbind()
    unit = torch.nn.functional.normalize(k, dim=-1)
    by_distance = avow.attend(q, unit, v, kernel="rbf", sigma=1.0).out
    torch.testing.assert_close(by_distance, avow.attend(q, unit, v, scale=1.0).out)
    assert not torch.allclose(avow.attend(q, k, v, kernel="rbf", sigma=1.0).out, avow.attend(q, k, v, scale=1.0).out)


def test_the_chance_that_random_features_fail_is_no_less_than_what_is_drawn() -> None:
    # A radius and a number of features at which failing can be drawn: the bound must not lie below the frequency.
    generator = torch.Generator().manual_seed(0)
    radius, count, cut = 5, 64, 6
    draws = torch.exp(radius * torch.randn(20_000, count, generator=generator, dtype=torch.float64) - radius**2 / 2)
    reached = float((draws.mean(-1) >= 0.5).double().mean())
    bound = features._far_below(radius, count, cut)
    assert bound >= arb(reached)
    assert balls.upper(bound) < 0.5


def test_the_picture_of_copying_falls_below_what_separable_weights_can_reach() -> None:
    drawn = efficient.separable_weaker.picture
    assert drawn is not None
    series = drawn().plain()["series"]
    floor = series["no separable weights below"][1][-1]
    assert floor == 6 and series["softmax attention"][1][0] > 1 and series["softmax attention"][1][-1] < 1e-6


def test_singular_values_of_a_softmax_matrix_keep_their_bounds() -> None:
    drawn = singular.svd_kth.picture
    assert drawn is not None
    series = drawn().plain()["series"]
    values, bounds = series["σ_k"][1], series["‖A‖_F / √k"][1]
    assert all(value <= bound for value, bound in zip(values, bounds, strict=True))
    assert math.isclose(bounds[0] ** 2, sum(value**2 for value in values))
