"""Claims on efficient attention: the library and random draws doing as they say."""

from __future__ import annotations

import math

import torch
from flint import arb

import avow
from avow.numerics import intervals
from avow.theory.claims.catalogue import efficient, singular


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
    bound = efficient.far_below(radius, count, cut)
    assert bound >= arb(reached)
    assert intervals.upper(bound) < 0.5


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
