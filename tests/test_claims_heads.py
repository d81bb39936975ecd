"""The claims about heads and layers: the numbers they show, and torch doing as they say."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from flint import arb

from avow.theory.claims.catalogue import heads, positions
from avow.theory.claims.catalogue.layers import Layer
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.stored import rounded
from tests.helpers.judging import number, step


@pytest.mark.parametrize("n", [1000, 10**6])
def test_a_key_half_as_long_loses_its_head(n: int) -> None:
    scores = torch.zeros(n, dtype=torch.float64)
    scores[0] = math.log(n / 0.01) / 2
    shown = number(step("heads-discrete", f"{n} keys").facts["weight"])
    assert shown == pytest.approx(float(torch.softmax(scores, 0)[0]), rel=1e-9)
    assert shown < 0.2405


def test_the_probability_of_both_heads_is_that_of_the_library() -> None:
    by_law = number(step("heads-gauss", "n = 1000, β = 50").facts["probability"])
    by_library = step("heads-gauss", "library's heads, as here").facts["probability"]
    assert by_library == pytest.approx(by_law, abs=1e-12)
    assert by_law < number(step("heads-gauss", "rises to").facts["probability"]) < 0.92136


def test_exact_weights_of_heads_are_those_of_a_softmax() -> None:
    t = math.log(100 / 0.01)
    for c, split in itertools.product((0.5, 1.5), ([(1, 1)], [(1, 0), (0, 1)])):
        rows = []
        for x, y in split:
            scores = torch.zeros(100, dtype=torch.float64)
            scores[0], scores[1] = c * x * t, y * t
            rows.append(torch.softmax(scores, 0))
        mean = torch.stack(rows).mean(0)
        exact = heads.weights_of(split, Fraction(c))
        assert [float(weight) for weight in exact] == pytest.approx(mean[:2].tolist(), rel=1e-12)


def test_errors_of_routing_are_those_of_the_layer_run() -> None:
    beta = 2.0
    a, b, c, d = beta * torch.eye(4, dtype=torch.float64)
    x = torch.stack((d + b, a, c + b))
    query = (torch.outer(c, d) + torch.outer(d, a)) / beta**2
    value = (torch.outer(b, b) - torch.outer(c, c)) / beta**2
    out = torch.softmax(x @ query.mT @ x.mT, -1) @ x @ value.mT
    facts = step("route-by-weights", "β = 2").facts
    assert number(facts["c_1 is off by"]) == pytest.approx(float((out[0] - (b - c)).norm()), rel=1e-7)
    assert number(facts["c_2 is off by"]) == pytest.approx(float((out[1] - b).norm()), rel=1e-7)


def test_only_a_plain_layer_is_unmoved_by_every_order() -> None:
    orders = list(itertools.permutations(range(4)))
    assert not any(Layer().moved_by(order) for order in orders)
    for broken in (Layer(causal=True), Layer(positions=True)):
        assert [order for order in orders if not broken.moved_by(order)] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize("dtype", positions.TYPES)
def test_the_nearest_encodings_are_the_nearest_of_all_pairs(d: int, dtype: torch.dtype) -> None:
    p = torch.arange(positions.LAST + 1, dtype=torch.float64)[:, None]
    angles = p * 10000 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    rows = torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(dtype).double()
    nearest = float(torch.nn.functional.pdist(rows).min())
    found = positions.nearest(d, dtype)
    assert found["distance"] == pytest.approx(nearest, abs=1e-11)
    pair = rows[found["position"] + found["step"]] - rows[found["position"]]
    assert float(pair.norm()) == pytest.approx(nearest, abs=1e-11)


def test_an_entry_too_near_a_tie_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tie = torch.tensor([[1 - 2.0**-9]], dtype=torch.float64)
    monkeypatch.setattr(positions, "encodings", lambda d: tie)
    with pytest.raises(Unproved, match="an entry of width 2 lies too near a tie of bfloat16"):
        positions.stored_encoding(2, torch.bfloat16)


@pytest.mark.parametrize("dtype", positions.TYPES[1:])
def test_entries_are_rounded_as_balls_round_them(dtype: torch.dtype) -> None:
    rows = positions.stored_encoding(2, dtype)
    for p in (1, 2, 355, 711, 4000):
        exact = [rounded(lambda p=p: arb(p).sin(), dtype), rounded(lambda p=p: arb(p).cos(), dtype)]
        assert [Fraction(entry) for entry in rows[p].tolist()] == exact


def test_the_first_pair_is_nearest_at_710() -> None:
    facts = step("sinusoid-distinct", "first pair comes within").facts
    assert number(facts["distance"]) == pytest.approx(2 * abs(math.sin(355)), rel=1e-9)
    widths = step("sinusoid-distinct", "width 2, positions").facts
    assert widths["bfloat16"]["distance"] == widths["float16"]["distance"] == 0.0
    assert widths["float32"]["distance"] > 6e-5
