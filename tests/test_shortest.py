"""The shortest query is the shortest, by a bound that rests on no solver; and where there is none, fractions say so."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from avow.errors import InsideHull, OutOfReach, ToleranceUnreachable
from avow.theory.constructions.queries import average_query, copy_query, mixture_query
from avow.theory.constructions.query_search import impossible, least_length, shortest_push


def one_hot(n: int, target: int) -> Tensor:
    weights = torch.zeros(n, dtype=torch.float64)
    weights[target] = 1.0
    return weights


def combined(weights: tuple[Fraction, ...], keys: Tensor) -> list[Fraction]:
    """The combination of the keys, in fractions."""
    rows = [[Fraction(x) for x in row] for row in keys.double().tolist()]
    return [sum((w * row[c] for w, row in zip(weights, rows, strict=True)), Fraction(0)) for c in range(keys.shape[1])]


@pytest.mark.parametrize(("n", "eps"), [(3, 0.3), (3, 1e-6), (8, 0.3), (8, 1e-6), (20, 0.3), (20, 1e-6), (200, 1e-3)])
def test_orthonormal_keys_have_the_shortest_query_of_the_formula(n: int, eps: float) -> None:
    found = copy_query(torch.eye(n), n // 2, eps, shortest=True)
    formula = math.sqrt((n - 1) / n) * math.log((n - 1) / eps)
    assert found.norm == pytest.approx(formula, rel=1e-9)
    assert found.lower_bound <= formula * (1 + 1e-15)
    assert 0 <= found.gap < 1e-12


def test_the_shortest_query_of_unit_keys_is_less_than_half_as_long_as_the_closed_form() -> None:
    n, eps = 8, 0.01
    keys = torch.eye(n, dtype=torch.float64)
    assert 2 * copy_query(keys, 0, eps, shortest=True).norm < 2 * math.log(n / eps)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (5, 3), (12, 12), (40, 7), (7, 30)])
def test_any_keys_have_a_shortest_query_with_a_proof_of_it(n: int, d: int) -> None:
    keys = torch.randn(n, d, dtype=torch.float64)
    target = int(keys.norm(dim=-1).argmax())
    found = copy_query(keys, target, 1e-3, shortest=True)
    assert found.verify()
    assert found.lower_bound <= found.norm * (1 + 1e-15)
    assert found.gap < 1e-12
    assert found.norm <= copy_query(keys, target, 1e-3).norm


@pytest.mark.parametrize("small", [1e-2, 1e-5, 1e-8, 1e-11])
def test_a_target_just_outside_the_hull_has_a_query_as_long_as_that_takes(small: float) -> None:
    keys = torch.randn(9, 6, dtype=torch.float64)
    keys[1:, 0] = 0.0
    keys[0] = keys[1:].mean(0)
    keys[0, 0] = small
    found = copy_query(keys, 0, 0.01, shortest=True)
    assert found.verify()
    assert found.norm > 4 / small
    # The relative size of what float64 loses in the difference of keys.
    assert found.gap < 1e-15 + 1e-15 / small


@pytest.mark.parametrize("small", [1e-3, 1e-6, 1e-9])
def test_a_target_with_an_almost_equal_key_is_told_from_it(small: float) -> None:
    keys = torch.randn(6, 8, dtype=torch.float64)
    keys[3] = keys[2] + small * torch.nn.functional.normalize(torch.randn(8, dtype=torch.float64), dim=-1)
    found = copy_query(keys, 2, 0.01, shortest=True)
    assert found.verify()
    assert found.norm > math.log(100) / small * 0.99


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 8), d=st.integers(1, 6))
def test_any_distribution_bounds_the_length_from_below(seed: int, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, d, generator=generator, dtype=torch.float64)
    target = int(keys.norm(dim=-1).argmax())
    found = copy_query(keys, target, 0.05, shortest=True)
    anyhow = torch.rand(n, generator=generator, dtype=torch.float64)
    assert least_length(keys, target, 0.05, anyhow) <= found.norm * (1 + 1e-15)
    assert found.dual is not None
    assert least_length(keys, target, 0.05, 7 * found.dual) == pytest.approx(found.lower_bound, rel=1e-12)


def test_a_length_that_the_dual_does_not_prove_is_not_believed() -> None:
    found = copy_query(torch.randn(5, 5, dtype=torch.float64), 0, 0.1, shortest=True)
    boast = replace(found, lower_bound=found.lower_bound * (1 + 1e-12)).verify()
    assert not boast
    assert "the dual proves a length of" in str(boast)
    assert not replace(found, dual=None).verify()


def test_the_program_is_solved_where_offsets_already_push_down() -> None:
    gaps, offsets = np.eye(2), np.array([-5.0, -6.0])
    easy = shortest_push(gaps, offsets, math.log(0.5))
    assert easy is not None
    assert not easy[0].any()
    harder = shortest_push(gaps, offsets, -9.0)
    assert harder is not None
    assert np.log(np.exp(gaps @ harder[0] + offsets).sum()) == pytest.approx(-9.0, abs=1e-12)


def test_a_program_without_a_solution_has_none() -> None:
    assert shortest_push(np.array([[1.0], [-2.0]]), np.zeros(2), math.log(0.1)) is None
    assert shortest_push(np.zeros((2, 3)), np.zeros(2), math.log(0.1)) is None


def test_a_target_inside_the_hull_is_refused_with_its_combination() -> None:
    keys = torch.tensor([[0.1, 0.0], [1, 1], [-1, 1], [0, -3], [9, 9]])
    text = (
        "copy_query: target=0 has a key in the convex hull of the others, so no query scores it above them all; "
        "move that key, or drop one of keys "
    )
    with pytest.raises(InsideHull) as caught:
        copy_query(keys, 0, 0.1)
    assert str(caught.value).startswith(text)
    weights = caught.value.weights
    assert sum(weights) == 1
    assert min(weights) >= 0
    assert weights[0] == 0
    assert combined(weights, keys) == [Fraction(x) for x in keys[0].double().tolist()]


@pytest.mark.parametrize("shortest", [False, True])
def test_an_exact_duplicate_is_refused_by_itself_alone(shortest: bool) -> None:
    keys = torch.randn(6, 4)
    keys[4] = keys[1]
    with pytest.raises(InsideHull) as caught:
        copy_query(keys, 1, 0.1, shortest)
    assert caught.value.weights == (0, 0, 0, 0, 1, 0)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 10), d=st.integers(1, 5))
def test_every_target_is_copied_or_proved_inside_the_hull(seed: int, n: int, d: int) -> None:
    # Small whole numbers: many keys lie exactly on faces and edges of the hull.
    keys = torch.randint(-2, 3, (n, d), generator=torch.Generator().manual_seed(seed)).double()
    try:
        assert copy_query(keys, 0, 0.1).verify()
    except InsideHull as inside:
        assert sum(inside.weights) == 1
        assert min(inside.weights) >= 0
        assert inside.weights[0] == 0
        assert combined(inside.weights, keys) == combined((Fraction(1), *[Fraction(0)] * (n - 1)), keys)


def test_a_target_that_no_arithmetic_here_tells_from_the_hull_is_left_open_and_says_so() -> None:
    # Rounding puts the middle 1e-17 beside the line through the other two: outside, but by no float's measure.
    keys = torch.tensor([[0.1, 0.7, 0.3, 0.4], [0.1, 0.2, 0.3, 0.5], [0.1, 1.2, 0.3, 0.3]], dtype=torch.float64)
    assert impossible(keys, one_hot(3, 0), 0.1) is None
    with pytest.raises(ToleranceUnreachable) as caught:
        copy_query(keys, 0, 0.1)
    assert "copy_query: eps=0.1 can be neither kept nor refuted: in float64 no query was found" in str(caught.value)
    # How near the nearest combination comes is a matter of the machine's last bits.
    missed = re.search(r"misses by (\S+) of the largest entry; move the kept keys away", str(caught.value))
    assert missed is not None and 0 < float(missed[1]) < 1e-15


def test_a_key_outside_the_hull_is_not_refuted() -> None:
    assert impossible(torch.eye(4), one_hot(4, 2), 0.1) is None


def test_an_average_over_keys_whose_line_meets_the_others_is_refused_with_its_combination() -> None:
    keys = torch.tensor([[0.0, 0], [1, 0], [2, 0]])
    with pytest.raises(OutOfReach) as caught:
        average_query(keys, (0, 1), 0.01)
    text = (
        "average_query: subset=[0, 1] is out of reach: no query gives these keys such weights; change the weights or "
        "one of keys [0, 1, 2], whose combination on this error proves it"
    )
    assert str(caught.value) == text
    assert caught.value.combination == (-1, 2, -1)


def test_ratios_that_only_exactness_forbids_are_said_to_be_such() -> None:
    # A query of -0.05 keeps the third key at e^-5: weights nearly alike exist, but none exactly.
    keys = torch.tensor([[0.0], [1.0], [100.0]])
    assert float(torch.softmax(keys @ torch.tensor([-0.05]), 0)[:2].min()) > 1 / 2.3
    with pytest.raises(OutOfReach, match="no query keeps these keys' ratios exactly and the others within eps"):
        average_query(keys, (0, 1), 0.3)


def test_a_mixture_against_the_grain_of_dependent_keys_is_refused_with_its_dependency() -> None:
    keys = torch.tensor([[0.0], [1.0], [2.0]])
    with pytest.raises(OutOfReach, match="no query gives these keys such weights") as caught:
        mixture_query(keys, (0.1, 0.2, 0.7), 0.01)
    combination = caught.value.combination
    assert sum(combination) == 0
    assert combined(combination, keys) == [0]
    assert sum(float(c) * math.log(w) for c, w in zip(combination, (0.1, 0.2, 0.7), strict=True)) > 0.5


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 8), d=st.integers(1, 4))
def test_every_average_is_built_or_refused_by_an_exact_combination(seed: int, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-2, 3, (n, d), generator=generator).double()
    subset = torch.randperm(n, generator=generator)[: n // 2].tolist()
    try:
        assert average_query(keys, subset, 0.1).verify()
    except OutOfReach as refused:
        assert any(refused.combination)
        assert sum(refused.combination) == 0
        assert combined(refused.combination, keys) == [0] * d
        assert all(c <= 0 for i, c in enumerate(refused.combination) if i not in subset)
