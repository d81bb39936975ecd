"""Queries keep their promise on the numbers returned: in every dtype, over any keys, or they say why there is none."""

from __future__ import annotations

import decimal
import math
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.core import DTYPES
from avow.errors import (
    AvowError,
    DtypeError,
    NonFiniteError,
    ParameterError,
    RangeError,
    ShapeError,
    ToleranceUnreachable,
)
from avow.theory.constructions import average_query, copy_query, mixture_query
from avow.theory.constructions.queries import Query
from tests.helpers.draws_queries import DRAWS, WEAKENED


def decimals(made: Query) -> list[Decimal]:
    """The weights of a query by sixty digits of `decimal`, which shares nothing with balls."""
    query = [Fraction(x) for x in made.query.double().tolist()]
    rows = [[Fraction(x) for x in row] for row in made.keys.double().tolist()]
    scores = [sum((a * b for a, b in zip(row, query, strict=True)), Fraction(0)) for row in rows]
    with decimal.localcontext() as context:
        context.prec = 60
        context.Emin, context.Emax = decimal.MIN_EMIN, decimal.MAX_EMAX
        gaps = [score - max(scores) for score in scores]
        powers = [(Decimal(gap.numerator) / Decimal(gap.denominator)).exp() for gap in gaps]
        return [power / sum(powers) for power in powers]


def unit_keys(n: int, d: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(n, d, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("kind", DRAWS)
def test_every_draw_keeps_its_promise_and_half_its_query_does_not(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        made = DRAWS[kind](generator)
        proof = made.verify()
        assert proof, f"{proof}\n{made}"
        assert not WEAKENED[kind](made).verify(), made


@pytest.mark.parametrize("kind", DRAWS)
def test_another_arithmetic_finds_the_same_weights(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        made = DRAWS[kind](generator)
        assert isinstance(made, Query)
        weights = decimals(made)
        worst = max(Decimal(share) / weights[i] for i, share in made.shares.items()) - Decimal(made.whole)
        assert worst <= Decimal(made.bound)
        assert float(worst) == pytest.approx(made.verify().achieved, rel=1e-9, abs=1e-15)
        distance = sum(abs(w - Decimal(made.shares.get(i, 0)) / Decimal(made.whole)) for i, w in enumerate(weights)) / 2
        assert distance <= Decimal(made.total_variation) + Decimal("1e-15")


@pytest.mark.parametrize("r", [0.5, 1.0, 1.3])
def test_unit_keys_at_a_distance_have_the_query_of_the_formula(r: float) -> None:
    # k_1 and the others at the angle whose chord is r.
    cosine = 1 - r * r / 2
    keys = torch.zeros(5, 5, dtype=torch.float64)
    keys[:, 0], keys[0, 0] = cosine, 1.0
    keys[1:, 1:] = math.sqrt(1 - cosine**2) * torch.eye(4)
    made = copy_query(keys, 0, 0.01)
    assert made.norm == pytest.approx(2 / r**2 * math.log(4 / 0.01), rel=1e-12)
    assert made.query[1:].abs().max() == 0
    assert made.verify()
    assert made.gap == math.inf


def test_keys_of_any_length_are_copied_along_the_target_where_none_reaches_as_far() -> None:
    keys = torch.tensor([[3.0, 0.0], [1.0, 5.0], [-20.0, 1.0]])
    made = copy_query(keys, 0, 0.01)
    assert made.query[1] == 0
    assert made.query[0] == pytest.approx(math.log(200) / 2)
    assert made.verify()


def test_a_key_that_reaches_further_along_the_target_turns_the_query_away() -> None:
    keys = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    made = copy_query(keys, 0, 0.01)
    assert made.verify()
    torch.testing.assert_close(made.query, -math.log(100) / 2 * torch.ones(2, dtype=torch.float64))
    assert made.gap < 1e-12


def test_the_only_key_is_copied_by_no_query_at_all() -> None:
    for shortest in (False, True):
        made = copy_query(torch.randn(1, 3), 0, 0.5, shortest)
        assert not made.query.any()
        assert made.verify().achieved == 0
        assert made.gap == 0
        assert not made.picture().log_y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shortest", [False, True])
def test_rounding_to_a_dtype_keeps_the_promise(dtype: torch.dtype, shortest: bool) -> None:
    made = copy_query(unit_keys(9, 5), 3, 1e-3, shortest, dtype)
    assert made.query.dtype == dtype
    proof = made.verify()
    assert proof
    if shortest:
        # What is returned is enlarged by no more than a few roundings.
        assert made.gap < 16 * torch.finfo(dtype).eps
        assert proof.achieved > 1e-3 / 2


def test_a_shortest_query_that_is_merely_rounded_breaks_its_promise() -> None:
    keys = unit_keys(9, 5)
    broken = 0
    for target in range(9):
        shortest = copy_query(keys, target, 1e-3, shortest=True)
        rounded = replace(shortest, query=shortest.query.to(torch.bfloat16))
        broken += not rounded.verify()
    assert broken >= 3


def test_a_query_beyond_float16_is_refused_and_names_what_holds_it() -> None:
    keys = 1e-5 * torch.eye(3, dtype=torch.float64)
    text = re.escape(
        "copy_query: dtype=float16 ends at 65504, and the query reaches 3.53e+05; use dtype=torch.bfloat16"
    )
    with pytest.raises(ToleranceUnreachable, match=text):
        copy_query(keys, 0, 0.01, dtype=torch.float16)
    assert copy_query(keys, 0, 0.01, dtype=torch.bfloat16).verify()


def test_a_dtype_too_coarse_is_refused_and_names_what_holds_it() -> None:
    keys = unit_keys(12, 12)
    weights = torch.full((12,), 0.0)
    weights[:3] = torch.tensor([0.2, 0.3, 0.5])
    with pytest.raises(ToleranceUnreachable) as caught:
        mixture_query(keys, weights, 1e-5, dtype=torch.bfloat16)
    assert "mixture_query: dtype=bfloat16 is too coarse: rounded to it, the query keeps eps=" in str(caught.value)
    assert str(caught.value).endswith("where eps=1e-05 was asked; use dtype=torch.float32")
    assert 1e-5 < caught.value.best < 1
    assert mixture_query(keys, weights, 1e-5, dtype=torch.float32).verify()


def test_keys_too_small_for_any_query_are_refused() -> None:
    text = re.escape("copy_query: keys=1e-320 at most need a query beyond float64; scale the keys up")
    with pytest.raises(RangeError, match=text):
        copy_query(torch.tensor([[1e-320, 0], [0, 0]], dtype=torch.float64), 0, 0.1)


@pytest.mark.parametrize("size", [1e-290, 1e-100, 1e100, 1e290])
def test_keys_of_any_size_are_copied(size: float) -> None:
    keys = size * unit_keys(6, 4)
    for shortest in (False, True):
        made = copy_query(keys, 2, 0.01, shortest)
        assert made.verify()
        assert made.norm * size < 100


def test_two_orthonormal_keys_are_averaged_by_the_query_of_the_formula() -> None:
    n, eps = 7, 0.01
    keys = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0][:n]
    made = average_query(keys, (1, 4), eps)
    torch.testing.assert_close(made.query, math.log(n / eps) * (keys[1] + keys[4]))
    assert made.norm == pytest.approx(math.sqrt(2) * math.log(n / eps))
    t = n / eps
    torch.testing.assert_close(made.attention[[1, 4]], torch.full((2,), t / (2 * t + n - 2), dtype=torch.float64))
    assert made.verify().achieved == pytest.approx((n - 2) * eps / n)


def test_averaging_every_key_takes_no_query() -> None:
    made = average_query(torch.randn(4, 3), range(4), 0.1)
    assert not made.query.any()
    assert made.verify().achieved == 0


def test_averaging_one_key_is_copying_it() -> None:
    keys = unit_keys(5, 3)
    made = average_query(keys, [2], 0.1)
    assert made.verify()
    assert float(made.attention[2]) >= 1 / 1.1


def test_any_mixture_of_orthonormal_keys_has_the_query_of_the_formula() -> None:
    n, eps = 6, 0.01
    weights = torch.tensor([0.05, 0.0, 0.65, 0.3, 0.0, 0.0], dtype=torch.float64)
    made = mixture_query(torch.eye(n), weights, eps)
    expected = torch.where(weights > 0, math.log(n / eps) + weights.log(), 0.0)
    torch.testing.assert_close(made.query, expected)
    torch.testing.assert_close(made.attention, weights, atol=made.total_variation, rtol=0)
    assert made.verify()


def test_dependent_keys_are_mixed_where_their_log_weights_depend_alike() -> None:
    keys = torch.tensor([[0.0], [1.0], [2.0], [-40.0]])
    weights = torch.softmax(torch.tensor([0.0, 1.1, 2.2, -math.inf], dtype=torch.float64), -1)
    made = mixture_query(keys, weights, 1e-9)
    assert made.query.item() == pytest.approx(1.1)
    assert made.verify()


def test_a_mixture_that_already_pushes_the_rest_down_needs_no_more() -> None:
    # No direction pushes the third key down alone, and none is needed.
    made = mixture_query(torch.tensor([[0.0], [1.0], [-10.0]]), (0.1, 0.9, 0.0), 0.01)
    assert made.query.item() == pytest.approx(math.log(9))
    assert made.verify()


def test_weights_that_nearly_sum_to_one_are_divided_by_their_sum() -> None:
    made = mixture_query(torch.eye(3), torch.tensor([0.1, 0.2, 0.7]), 1e-9)
    assert float(made.weights.sum()) == pytest.approx(1, abs=1e-15)
    assert made.verify()


def test_a_query_for_another_key_is_caught() -> None:
    made = copy_query(unit_keys(5, 4), 0, 0.1)
    assert not replace(made, target=1).verify()
    assert not replace(made, query=made.query * math.nan).verify()
    assert not replace(made, query=-1e300 * made.query).verify()
    assert not replace(made, eps=made.verify().achieved * (1 - 1e-12)).verify()


@pytest.mark.parametrize("kind", DRAWS)
def test_a_module_gives_the_mean_of_the_values_by_the_promised_weights(kind: str) -> None:
    made = DRAWS[kind](torch.Generator().manual_seed(3))
    assert isinstance(made, Query)
    n = len(made.keys)
    values = torch.randn(2, 3, n, 4, dtype=torch.float64)
    out = made.as_module()(values)
    wanted = torch.tensor([made.shares.get(i, 0.0) / made.whole for i in range(n)], dtype=torch.float64)
    reach = 2 * made.total_variation * float(values.abs().max()) + 1e-12
    assert out.shape == (2, 3, 4)
    assert float((out - torch.einsum("n,abne->abe", wanted, values)).abs().max()) <= reach
    assert set(made.as_module().state_dict()) == set(made.tensors()) == {"query", "keys"}


def test_a_copy_is_drawn_as_what_it_leaves_and_a_mixture_as_its_weights() -> None:
    made = copy_query(torch.eye(4), 0, 0.01)
    chart = made.picture()
    lengths, left = chart.series["the others' weights over the target's"]
    assert chart.log_y
    assert lengths[20] == pytest.approx(made.norm)
    assert left[0] == 3
    assert left[20] == pytest.approx(made.verify().achieved)
    bars = average_query(torch.eye(4), (0, 2), 0.01).picture()
    assert bars.marks == "bars"
    assert bars.series["asked"][1] == [0.5, 0, 0.5, 0]
    assert sum(bars.series["given"][1]) == pytest.approx(1)


def test_keys_are_the_callers_no_longer() -> None:
    keys = unit_keys(4, 3).requires_grad_()
    made = copy_query(keys, 0, 0.1)
    with torch.no_grad():
        keys.zero_()
    assert made.verify()
    assert not made.query.requires_grad


GOOD = torch.eye(3)
BAD: list[tuple[Any, tuple[Any, ...], type[AvowError], str]] = [
    (copy_query, (torch.ones(3), 0, 0.1), ShapeError, "copy_query: keys=(3,) must be a matrix of at least one row"),
    (copy_query, (torch.ones(0, 3), 0, 0.1), ShapeError, "copy_query: keys=(0, 3) must be a matrix of at least"),
    (copy_query, (torch.ones(3, 3).int(), 0, 0.1), DtypeError, "copy_query: keys=torch.int32 must be of a floating"),
    (
        average_query,
        (torch.tensor([[1.0, 2], [math.nan, 0]]), [0], 0.1),
        NonFiniteError,
        "average_query: keys[1]=[nan, 0.0] holds a number that is nan or infinite; drop that row or replace it",
    ),
    (mixture_query, (math.inf * GOOD.clamp(min=1), [1, 0, 0], 0.1), NonFiniteError, "mixture_query: keys[0]=[inf,"),
    (copy_query, (GOOD, 3, 0.1), ParameterError, "copy_query: target=3 must lie in 0..2, the rows of keys; count keys"),
    (copy_query, (GOOD, -1, 0.1), ParameterError, "copy_query: target=-1 must lie in 0..2, the rows of keys"),
    (copy_query, (GOOD, 0, 0.0), ParameterError, "copy_query: eps=0.0 must lie in (0, 1); try eps=0.01"),
    (copy_query, (GOOD, 0, 1), ParameterError, "copy_query: eps=1 must lie in (0, 1); try eps=0.01"),
    (copy_query, (GOOD, 0, math.nan), ParameterError, "copy_query: eps=nan must lie in (0, 1); try eps=0.01"),
    (
        copy_query,
        (GOOD, 0, 0.1, False, torch.int8),
        DtypeError,
        "copy_query: dtype=torch.int8 must be one of float64, float32, bfloat16, float16; use dtype=torch.float64",
    ),
    (
        average_query,
        (GOOD, [], 0.1),
        ParameterError,
        "average_query: subset=[] must name at least one key, and each once; try subset=(0, 1)",
    ),
    (average_query, (GOOD, [1, 1], 0.1), ParameterError, "average_query: subset=[1, 1] must name at least one key"),
    (average_query, (GOOD, [0, 5], 0.1), ParameterError, "average_query: subset=[0, 5] must lie in 0..2"),
    (
        mixture_query,
        (GOOD, [0.5, 0.5], 0.1),
        ShapeError,
        "mixture_query: weights=(2,) must be one weight for each of 3 keys; pass shape (3,)",
    ),
    (
        mixture_query,
        (GOOD, [0.5, 0.5, 0.5], 0.1),
        ParameterError,
        "mixture_query: weights=[0.5, 0.5, 0.5] must sum to 1 within 1e-06, and sum to 1.5; divide them by their sum",
    ),
    (
        mixture_query,
        (GOOD, [1.5, -0.5, 0.0], 0.1),
        ParameterError,
        "mixture_query: weights=[1.5, -0.5, 0.0] must not be negative; a key left out has weight 0",
    ),
    (mixture_query, (GOOD, [math.nan, 0, 1], 0.1), NonFiniteError, "mixture_query: weights=[nan, 0.0, 1.0] hold a"),
    (mixture_query, (GOOD, [Fraction(1, 2), 10**400, 0], 0.1), NonFiniteError, "weights=[0.5, nan, 0.0] hold a number"),
    (copy_query, (GOOD, 1e308, 0.1), ParameterError, "copy_query: target=1e+308 must be a whole number"),
    (copy_query, (GOOD, 0, 10**400), ParameterError, "must lie in (0, 1); try eps=0.01"),
]


@pytest.mark.parametrize(("build", "arguments", "kind", "text"), BAD, ids=[text[:40] for *_, text in BAD])
def test_bad_input_is_refused_in_words(
    build: Any, arguments: tuple[Any, ...], kind: type[AvowError], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        build(*arguments)


def test_a_query_says_what_it_promises_when_printed() -> None:
    found = copy_query(torch.eye(3), target=1, eps=0.1)
    assert str(found) == f"CopyQuery: {found.promise}" and "key 1 gets a weight of at least" in str(found)
