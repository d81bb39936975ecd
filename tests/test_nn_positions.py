"""Positions: a vector for each place, sines and cosines, or a turn that leaves only distances in the scores."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from avow.errors import ParameterError, ShapeError
from avow.nn import Learned, Rotary, Sinusoidal


@pytest.fixture
def doubles() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def scores(rotary: Rotary, q: Tensor, k: Tensor, at: int, other: int) -> Tensor:
    """The product of one query at one place with one key at another."""
    return (rotary(q, at) * rotary(k, other)).sum(-1)


def test_turned_scores_depend_on_the_distance_alone(doubles: None) -> None:
    rotary = Rotary(8, block=3000)
    q, k = torch.randn(2, 1, 3, 1, 8)
    for distance in (0, 1, 7, 500):
        here = scores(rotary, q, k, distance, 0)
        for shift in (1, 100, 2400):
            torch.testing.assert_close(scores(rotary, q, k, distance + shift, shift), here, rtol=0, atol=1e-11)
    assert not torch.allclose(scores(rotary, q, k, 7, 0), scores(rotary, q, k, 8, 0), atol=1e-3)


def test_a_table_of_float32_is_right_to_its_last_digit_at_far_places() -> None:
    rotary = Rotary(6, block=100_001)
    rate = 10_000.0 ** (-2 / 6)
    assert abs(float(rotary.cosine[100_000, 1]) - math.cos(100_000 * rate)) < 1e-7
    rounded = float(torch.tensor(rate, dtype=torch.float32))
    assert abs(math.cos(100_000 * rounded) - math.cos(100_000 * rate)) > 1e-5  # what a rate of float32 would give


def test_turning_keeps_norms_and_turns_pairs(doubles: None) -> None:
    rotary = Rotary(6, block=50)
    x = torch.randn(2, 3, 50, 6)
    turned = rotary(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    pairs = torch.complex(x[..., :3], x[..., 3:])
    rates = 10_000.0 ** (-torch.arange(3) / 3)
    expected = pairs * torch.exp(1j * torch.arange(50)[:, None] * rates)
    torch.testing.assert_close(torch.complex(turned[..., :3], turned[..., 3:]), expected)


def test_a_turn_from_a_start_is_a_part_of_the_whole_turn() -> None:
    rotary, x = Rotary(4, block=20), torch.randn(1, 2, 20, 4)
    assert torch.equal(rotary(x[..., 7:13, :], 7), rotary(x)[..., 7:13, :])
    assert not torch.equal(rotary(x[..., 7:13, :]), rotary(x)[..., 7:13, :])


def test_half_precision_is_turned_in_the_table_s_type() -> None:
    rotary, x = Rotary(4, block=20), torch.randn(1, 2, 20, 4).bfloat16()
    assert rotary(x).dtype == torch.bfloat16
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())


def test_sines_and_cosines_are_those_of_the_formula() -> None:
    table = Sinusoidal(40, 6, amplitude=3.0)(10, start=5)
    assert table.shape == (10, 6)
    for i, f in ((5, 0), (9, 1), (14, 2)):
        angle = i * 10_000.0 ** (-2 * f / 6)
        assert float(table[i - 5, 2 * f]) == pytest.approx(3 * math.sin(angle), abs=1e-6)
        assert float(table[i - 5, 2 * f + 1]) == pytest.approx(3 * math.cos(angle), abs=1e-6)


def test_learned_places_are_parameters_and_tables_are_not_saved() -> None:
    places = Learned(9, 4)
    assert torch.equal(places(3, start=2), places.places.weight[2:5])
    places(3, start=2).sum().backward()
    assert places.places.weight.grad is not None and float(places.places.weight.grad.sum()) == 3 * 4
    assert list(Sinusoidal(9, 4).state_dict()) == list(Rotary(4, 9).state_dict()) == []


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: Rotary(5, 8), ParameterError, "dim=5 must be even: features are turned in pairs; use dim=6"),
        (
            lambda: Sinusoidal(8, 5),
            ParameterError,
            "width=5 must be even: sines and cosines come in pairs; use width=6",
        ),
        (
            lambda: Rotary(4, 8)(torch.zeros(1, 1, 9, 4)),
            ShapeError,
            "length=9 exceeds block=8; shorten the sequence or make a longer block",
        ),
        (
            lambda: Rotary(4, 8)(torch.zeros(1, 1, 3, 6)),
            ShapeError,
            "head dimension=6 must be 4, the dimension this was made for; make Rotary(6, …)",
        ),
        (lambda: Learned(8, 4)(3, 6), ShapeError, "length=9 exceeds block=8"),
        # Python would count such places from the end of the block.
        (lambda: Learned(8, 4)(3, -4), ParameterError, "start=-4 must be at least 0; count places from 0"),
        (lambda: Sinusoidal(8, 4)(-3, 0), ParameterError, "length=-3 must be at least 0; count places from 0"),
        (lambda: Rotary(4, 8)(torch.zeros(1, 1, 2, 4), -3), ParameterError, "start=-3 must be at least 0"),
        (lambda: Learned(0, 4), ParameterError, "block=0 must be a whole number of at least 1; try block=8"),
    ],
)
def test_what_does_not_fit_is_said(call: object, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()  # type: ignore[operator]
