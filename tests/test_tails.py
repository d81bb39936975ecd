"""What is left out stays within its budget, and inequalities fail no oftener than they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.numerics import tails


def exponent(t: Tensor, variance: Tensor, largest: Tensor) -> Tensor:
    x = t * largest / variance
    return variance / largest.square() * ((1 + x) * torch.log1p(x) - x)


def test_a_deviation_solves_its_inequality_from_above() -> None:
    variance = torch.logspace(-6, 4, 60, dtype=torch.float64)
    for largest in (1e-3, 1.0, 50.0):
        most = torch.full_like(variance, largest)
        found = exponent(tails.deviation(variance, most, 7.0), variance, most)
        reached = variance / largest**2 > 1e-11
        assert bool((found[reached] >= 7.0).all()) and bool((found[reached] < 7.0 * 1.0001).all())
    assert float(tails.deviation(torch.zeros(1), torch.ones(1), 7.0)) >= 0


def test_an_upper_bound_on_an_expectation_solves_its_inequality_from_above() -> None:
    found = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-6, 4, 60, dtype=torch.float64)])
    above = tails.at_most(found, torch.ones_like(found), 7.0)
    exponents = above - found + torch.xlogy(found, found / above)
    assert bool((exponents >= 7.0 * (1 - 1e-9)).all()) and bool((exponents < 7.0 * 1.001).all())


@pytest.mark.parametrize("odds", [0.02, 0.3])
def test_inequalities_fail_no_oftener_than_they_say(odds: float) -> None:
    trials, terms = 4000, 60
    vectors = torch.randn(terms, 3, dtype=torch.float64)
    vectors = vectors / vectors.norm(dim=-1, keepdim=True) * torch.rand(terms, 1, dtype=torch.float64)
    drawn = (torch.rand(trials, terms, dtype=torch.float64) < odds).double()
    lengths = vectors.norm(dim=-1)
    sums = (drawn / odds - 1) @ vectors
    variance = (lengths.square() * (1 - odds) / odds).sum()
    largest = (lengths / odds).max()
    log = math.log(2 / 0.05)
    missed = (sums.norm(dim=-1) > tails.deviation(variance, largest, log)).double().mean()
    squares = drawn @ (lengths.square() * (1 - odds) / odds**2)
    under = (tails.at_most(squares, largest.square(), math.log(1 / 0.05)) < variance).double().mean()
    assert float(missed) <= 0.05 and float(under) <= 0.05
    # Inequalities that never fail would say nothing of a third of the length.
    assert float((sums.norm(dim=-1) > tails.deviation(variance, largest, log) / 3).double().mean()) > 0.05
