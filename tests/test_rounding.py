"""The rounding model against floating point itself, and against exact fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch import Tensor

from avow.core import Computed, Problem
from avow.core.certify import certify
from avow.methods.exact import Exact
from avow.numerics import rounding
from avow.numerics.norms import row_norms, slack

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@contextmanager
def switched(owner: object, word: str) -> Iterator[None]:
    owner.fp32_precision = word  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Not what was read before: a switch that was never set shows what it inherits.
        owner.fp32_precision = "none"  # type: ignore[attr-defined]


@each_type
def test_the_unit_is_half_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    u = rounding.unit(dtype)
    assert u == torch.finfo(dtype).eps / 2
    one = torch.tensor(1.0, dtype=torch.float64)
    if dtype != torch.float64:
        assert float((one + u).to(dtype)) == 1.0 and float((one + 1.01 * u).to(dtype)) > 1.0


@each_type
def test_whatever_rounds_to_zero_is_below_tiny(dtype: torch.dtype) -> None:
    assert rounding.tiny(dtype) >= torch.finfo(dtype).smallest_normal / 2**11
    if dtype != torch.float64:
        assert float(torch.tensor(2 * rounding.tiny(dtype), dtype=torch.float64).to(dtype)) > 0.0
        # float16 conversions keep subnormals, so half the smallest of them is the most that can vanish.
        lost = torch.tensor(0.99 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2)
        assert float(lost.double().to(dtype)) == 0.0 and float(lost) <= rounding.tiny(dtype)


@each_type
def test_sums_are_carried_in_float32_or_float64(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert rounding.accumulator(dtype) == expected
    assert rounding.safe(dtype) * 2**20 < torch.finfo(expected).max


def test_gamma_is_the_textbook_constant() -> None:
    u = rounding.unit(torch.float32)
    assert rounding.gamma(10, u) == pytest.approx(float(Fraction(10, 2**24) / (1 - Fraction(10, 2**24))), rel=1e-15)
    assert rounding.gamma(0, u) == 0.0
    assert math.isinf(rounding.gamma(2**23, u)) and math.isfinite(rounding.gamma(2**22, u))


@pytest.mark.parametrize("terms", [3, 64, 1000])
def test_sums_of_products_err_by_no_more_than_gamma(terms: int) -> None:
    x, y = torch.randn(2, 300, terms).abs().unbind()
    computed = (x.unsqueeze(-2) @ y.unsqueeze(-1)).flatten().double()
    exact = (x.double() * y.double()).sum(-1)
    relative = float(((computed - exact).abs() / exact).max())
    u = rounding.unit(torch.float32)
    assert 0 < relative <= rounding.gamma(terms, u)
    assert relative > rounding.gamma(0.2, u), "float32 does round: a bound of a fifth of a unit would be broken"


def total_variation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(a, -1) - torch.softmax(b, -1)).abs().sum(-1)


@pytest.mark.parametrize("delta", [1e-6, 1e-2, 0.5, 2.0, 30.0])
def test_weights_move_no_more_than_logits_allow(delta: float) -> None:
    logits = 3 * torch.randn(5000, 6, dtype=torch.float64)
    bound = float(rounding.softmax_l1_bound(torch.tensor(delta, dtype=torch.float64)))
    for step in (2 * torch.rand_like(logits) - 1, torch.sign(torch.randn_like(logits))):
        assert float(total_variation(logits, logits + delta * step).max()) <= bound * (1 + 1e-9) + 1e-14


@pytest.mark.parametrize("delta", [1e-3, 0.5, 2.0])
def test_two_keys_reach_the_bound(delta: float) -> None:
    # Attained at logits ∓δ moved to ±δ: 2·tanh(δ/2) with each logit moved by δ from the middle.
    middle = torch.zeros(2, dtype=torch.float64)
    apart = torch.tensor([delta, -delta], dtype=torch.float64)
    reached = float(total_variation(middle - apart / 2, middle + apart / 2))
    bound = float(rounding.softmax_l1_bound(torch.tensor(delta, dtype=torch.float64)))
    assert reached == pytest.approx(bound, rel=1e-9)


def test_the_bound_never_exceeds_two_and_vanishes_with_the_step() -> None:
    deltas = torch.tensor([0.0, 1e-300, 1e-8, 1.0, 1e3, math.inf], dtype=torch.float64)
    bounds = rounding.softmax_l1_bound(deltas)
    assert bounds.tolist() == sorted(bounds.tolist()) and float(bounds[0]) == 0.0 and float(bounds[-1]) == 2.0


@pytest.mark.parametrize("word", ["tf32", "bf16"])
def test_a_lowered_switch_counts_for_float32_alone(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_narrows_on_cpu", lambda *_: True)
    ordinary = rounding.products(torch.float32, "cpu")
    assert ordinary.entry == 0.0
    entry = {"tf32": 2.0**-10, "bf16": 2.0**-8}[word]
    for owner in (torch.backends.mkldnn.matmul, torch.backends):
        with switched(owner, word):
            lowered = rounding.products(torch.float32, "cpu")
            assert lowered.entry == entry and lowered.dot(8) > 2 * entry > ordinary.dot(8)
            for dtype in (torch.float64, torch.bfloat16, torch.float16):
                assert rounding.products(dtype, "cpu").entry == 0.0
    assert rounding.products(torch.float32, "cpu") == ordinary


def test_a_switch_of_its_own_outranks_the_general_one() -> None:
    with switched(torch.backends, "bf16"), switched(torch.backends.mkldnn.matmul, "ieee"):
        assert rounding.products(torch.float32, "cpu").entry == 0.0
    with switched(torch.backends.mkldnn.matmul, "bf16"):
        assert rounding.products(torch.float32, "cuda").entry == 0.0


def test_products_round_more_on_a_gpu() -> None:
    assert rounding.products(torch.float32, "cuda").u == 8 * rounding.products(torch.float32, "cpu").u
    assert rounding.products(torch.float64, "cuda").u == rounding.products(torch.float64, "cpu").u


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_depth_of_a_tiled_sum_grows_with_the_keys_and_stays_far_below_them(device: str) -> None:
    depths = [rounding.tiled_depths(n, torch.float32, device, many=True) for n in range(1, 5000)]
    for some in zip(*depths, strict=True):
        assert list(some) == sorted(some)
    tile = 512 if device == "cpu" else rounding.LARGEST_TILE
    assert all(values >= min(n, tile) for n, (values, _) in enumerate(depths, 1))
    assert max(rounding.tiled_depths(10**6, torch.float32, device, many=True)) < 10**5


@pytest.mark.parametrize(("dtype", "many"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, False)])
def test_where_no_order_is_known_every_term_may_be_rounded_as_often_as_there_are_terms(
    dtype: torch.dtype, many: bool
) -> None:
    assert min(rounding.tiled_depths(10**6, dtype, "cpu", many)) >= 10**6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_below_the_underflow_log_nothing_is_left(dtype: torch.dtype) -> None:
    edge = rounding.underflow_log(dtype)
    assert float(torch.exp(torch.tensor(-edge, dtype=dtype))) == 0.0
    assert float(torch.exp(torch.tensor(-edge + 2, dtype=torch.float64))) > 0.0


@each_type
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("d", [1, 7, 300])
def test_row_norms_are_never_too_small(dtype: torch.dtype, size: float, d: int) -> None:
    x = (size * torch.randn(40, d, dtype=torch.float64)).to(dtype)
    if not bool(torch.isfinite(x).all()):
        x = x.clamp(-6e4, 6e4)
    norms = row_norms(x, "x", faithful=True)
    for row, norm in zip(x[:8].double().tolist(), norms[:8].tolist(), strict=True):
        square = sum(Fraction(value) ** 2 for value in row)
        assert Fraction(norm) ** 2 >= square
        assert Fraction(norm) ** 2 * (1 - Fraction(slack(d, dtype))) ** 2 <= square


def merged_by_logarithms(logits: Tensor, values: Tensor, parts: int) -> Tensor:
    """The averages of float32 logits' weights, as kernels merge parts: by log-sum-exps in float32."""
    pieces = list(zip(logits.chunk(parts, -1), values.chunk(parts), strict=True))
    lse = torch.stack([piece.logsumexp(-1) for piece, _ in pieces])
    answers = torch.stack([piece.softmax(-1) @ value for piece, value in pieces])
    return ((lse - lse.logsumexp(0)).exp() * answers).sum(0)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e9])
def test_parts_that_are_merged_by_rounded_logarithms_stay_within_the_charge(size: float) -> None:
    draws = torch.Generator().manual_seed(0)
    values = torch.ones(3000, dtype=torch.float32)  # any average of them is one
    far = 0.0
    for _ in range(20):
        logits = (size * (1 + torch.rand(8, 3000, generator=draws) / size)).float()
        far = max(far, float((merged_by_logarithms(logits, values, 12).double() - 1).abs().max()))
    slope, floor = rounding.merging(3000, torch.bfloat16, "cuda")
    # Sums of 250 and of 12 terms round as well.
    assert far <= math.expm1(min(700.0, slope * size + floor)) + 600 * rounding.unit(torch.float32)
    if size == 1e9:
        assert far > 10  # twelve equal parts add up to twelve: no average, and further off than both are long


def test_on_a_gpu_an_exact_answer_is_not_taken_for_an_average_where_logits_are_huge() -> None:
    """The bound of huge logits on a GPU is the answer's own length and one, not the two of any two averages."""
    q, k, v = torch.tensor([[[[3e4]]]]).bfloat16(), torch.full((1, 1, 64, 1), 3e4).bfloat16(), torch.ones(1, 1, 64, 1)
    p = Problem.of(q, k, v.bfloat16(), scale=1.0)
    model = Exact().model(p, *p.norms.most[:2])
    assert model.merge_slope == model.merge_floor == 0  # CPUs' kernel divides by its own sum
    u = rounding.unit(torch.float32)
    away = model._replace(merge_slope=8 * u, merge_floor=8 * u * (math.log(64) + 1))
    with mock.patch.object(Exact, "model", return_value=away):
        for times, bound in ((1.0, 2.0), (12.0, 13.0)):
            answer = Computed(torch.full((1, 1, 1, 1), times, dtype=torch.bfloat16), 1.0)
            certificate = certify(Exact(), p, answer, 0.99)
            assert bound <= certificate.bound < 1.05 * bound
    with mock.patch.object(Exact, "model", return_value=model):  # sabotage: as if weights always summed to one
        assert certify(Exact(), p, answer, 0.99).bound < 3
