"""The claims about heads and layers: the numbers they show, and torch doing as they say."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb

from avow.theory.claims import catalogue
from avow.theory.claims.catalogue import heads, positions
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import value
from avow.theory.claims.stored import rounded
from tests.helpers.judging import number, step


def by_claim(id: str, part: str, **case: Any) -> float:
    """The right side of a part of what a claim says is true, for numbers by the names of its variables."""
    claim = catalogue()[id]
    statement = claim.as_amended() or claim.as_stated()
    numbers = {variable: case[str(variable)] for variable in statement.variables if str(variable) in case}
    return float(value(statement.parts[part].rhs, numbers).mid())


@pytest.mark.parametrize("n", [1000, 10**6])
def test_a_key_half_as_long_loses_its_head(n: int) -> None:
    scores = torch.zeros(n, dtype=torch.float64)
    scores[0] = math.log(n / 0.01) / 2
    weight = by_claim("heads-discrete", "half", n=n, varepsilon=Fraction(1, 100))
    assert weight == pytest.approx(float(torch.softmax(scores, 0)[0]), rel=1e-9)
    assert weight < 0.2405 and weight < by_claim("heads-discrete", "lost", n=n, varepsilon=Fraction(1, 100))


def test_the_probability_of_both_heads_is_that_of_the_library() -> None:
    by_law = by_claim("heads-gauss", "law", n=1000, beta=50, varepsilon=Fraction(1, 100))
    by_library = step("heads-gauss", "library's heads, as here").facts["probability"]
    assert by_library == pytest.approx(by_law, abs=1e-12)
    assert by_law < number(step("heads-gauss", "the limit, in numbers").facts["probability"]) < 0.92136


@pytest.mark.parametrize(("part", "own"), [("isotropic", 0.0), ("own", 0.5**0.5)])
def test_the_first_head_s_gap_has_the_law_of_the_claim(part: str, own: float) -> None:
    alpha, beta, eps = 0.05, 10.0, 0.01
    w = torch.randn(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gap = beta * (1 + alpha**0.5 * (w[:, 0] - w[:, 1]) + own * w[:, 2])
    case = {"alpha": Fraction(1, 20), "beta": 10, "varepsilon": Fraction(1, 100)}
    claimed = by_claim("heads-both-noises", part, **case)
    assert float((gap >= math.log(1 / eps)).double().mean()) == pytest.approx(claimed, abs=0.005)


def test_weights_of_heads_are_those_of_a_softmax() -> None:
    t = math.log(100 / 0.01)
    for split in ([(1, 1)] * 2, [(1, 0), (0, 1)]):
        weights = []
        for c, (x, y) in itertools.product((0.5, 1.5), split):
            scores = torch.zeros(100, dtype=torch.float64)
            scores[0], scores[1] = c * x * t, y * t
            weights.append(float(torch.softmax(scores, 0)[0]))
        statement = catalogue()["heads-identical"].as_stated(split)
        claimed = [value(term, {heads.n: 100, heads.root: 100}) for term in statement.where.values()]
        assert [float(weight.mid()) for weight in claimed] == pytest.approx(weights, rel=1e-12)


def test_errors_of_routing_are_those_of_the_layer_run() -> None:
    beta = 2.0
    a, b, c, d = beta * torch.eye(4, dtype=torch.float64)
    x = torch.stack((d + b, a, c + b))
    query = (torch.outer(c, d) + torch.outer(d, a)) / beta**2
    values = (torch.outer(b, b) - torch.outer(c, c)) / beta**2
    out = torch.softmax(x @ query.mT @ x.mT, -1) @ x @ values.mT
    for part, row, target in (("first", 0, b - c), ("second", 1, b)):
        assert by_claim("route-by-weights", part, beta=2) == pytest.approx(float((out[row] - target).square().sum()))


def test_only_a_plain_layer_swaps_its_outputs_with_its_tokens() -> None:
    picture = catalogue()["permutation"].picture
    assert picture is not None
    swapped = {name: outputs[:2] == outputs[:1:-1] for name, *outputs in picture().rows}
    assert swapped == {"plain": True, "causal mask": False, "positions": False}


def test_a_layer_of_torch_is_one_that_the_claim_speaks_of() -> None:
    """Heads, feed-forward network, norms and residuals are functions of tokens and of what their heads read."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, order = torch.randn(1, 5, 8, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    assert torch.allclose(layer(x[:, order]), layer(x)[:, order])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    assert not torch.allclose(layer(x[:, order], causal), layer(x, causal)[:, order])


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
