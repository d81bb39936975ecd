"""Heads whose one key is scaled at random: the exact law of their weights, and the queries that survive."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from avow.errors import (
    AvowError,
    DtypeError,
    NonFiniteError,
    ParameterError,
    RangeError,
    ShapeError,
    ToleranceUnreachable,
)
from avow.numerics import intervals
from avow.theory.constructions import AnyScale, DiscreteLaw, GaussianLaw, noise_analysis, robust_heads

HALF = Fraction(1, 2)
COIN = DiscreteLaw((HALF, Fraction(3, 2)), (HALF, HALF))
NORMAL = GaussianLaw(1.0, 0.5)
N, EPS = 1000, 0.01
T = math.log(N / EPS)
BELOW_ZERO = 0.5 * math.erfc(1.0)  # Φ(−√2)


def cumulative(x: float) -> float:
    """P(N(1, ½) ≤ x)."""
    return 0.5 * math.erfc(1.0 - x)


def by_definition(n: int, heads: list[dict[int, float]], scale: float) -> torch.Tensor:
    """Averaged softmax weights over all n keys, in float64."""
    scores = torch.zeros(len(heads), n, dtype=torch.float64)
    for row, head in zip(scores, heads, strict=True):
        for key, coordinate in head.items():
            row[key] = coordinate * (scale if key == 0 else 1.0)
    return torch.softmax(scores, -1).mean(0)


def distance(n: int, heads: list[dict[int, float]], scale: float) -> float:
    target = torch.zeros(n, dtype=torch.float64)
    target[:2] = 0.5
    return float((by_definition(n, heads, scale) - target).abs().sum())


def test_one_head_swings_from_one_value_to_the_other_as_the_coin_falls() -> None:
    found = noise_analysis(N, [{0: T, 1: T}], COIN, eta=0.9)
    low, high = found.outcomes
    assert (low.scale, low.probability, high.scale) == (HALF, HALF, Fraction(3, 2))
    assert [round(low.weights[k][0], 4) for k in (0, 1)] == [0.0031, 0.987]
    assert [round(high.weights[k][0], 4) for k in (0, 1)] == [0.9968, 0.0032]
    assert found.success == (0.0, 0.0)
    for outcome in found.outcomes:
        weights = by_definition(N, [{0: T, 1: T}], float(outcome.scale))
        for key in (0, 1):
            below, above = outcome.weights[key]
            assert above - below < 1e-15
            assert math.isclose(float(weights[key]), below, rel_tol=1e-12)
        assert math.isclose(outcome.error[0], distance(N, [{0: T, 1: T}], float(outcome.scale)), rel_tol=1e-12)


def test_the_ratio_of_the_two_weights_is_the_exponential_of_the_scale_less_one() -> None:
    for outcome in noise_analysis(N, [{0: T, 1: T}], COIN, eta=0.1).outcomes:
        ratio = outcome.weights[0][0] / outcome.weights[1][0]
        assert math.isclose(ratio, (N / EPS) ** float(outcome.scale - 1), rel_tol=1e-12)


def test_laws_of_fractions_print_as_those_of_floats_do() -> None:
    assert str(AnyScale(Fraction(1, 2), 3)) == str(AnyScale(0.5, 3.0)) == "any X from 0.5 to 3"
    assert str(GaussianLaw(Fraction(1, 2), Fraction(1, 4))) == "X ~ N(0.5, 0.25)"
    heads = robust_heads(3, EPS, AnyScale(Fraction(1, 2), 3))
    assert "scaled by X from 0.5 to 3, so" in heads.promise and "at X = 0.5: " in str(heads.verify())


@pytest.mark.parametrize(("n", "weight"), [(1000, 0.24043574), (10**6, 0.0099)])
def test_a_head_of_its_own_is_not_enough_at_half_scale(n: int, weight: float) -> None:
    t = math.log(n / EPS)
    found = noise_analysis(n, [{0: t}], COIN, eta=0.1, target={0: 1})
    assert abs(found.outcomes[0].weights[0][0] - weight) < (1e-8 if n == 1000 else 1e-4)
    longer = noise_analysis(n, [{0: 2 * t}], COIN, eta=0.1, target={0: 1})
    assert min(outcome.weights[0][0] for outcome in longer.outcomes) >= 1 / (1 + EPS)
    assert longer.success == (1.0, 1.0)


def test_a_gaussian_scale_is_negative_with_probability_phi_of_minus_root_two() -> None:
    with intervals.precision(128):
        probability = NORMAL.probability(-math.inf, 0)
        assert intervals.upper(probability) - intervals.lower(probability) <= 1e-12
    assert abs(float(probability.mid()) - BELOW_ZERO) < 1e-15
    assert f"{BELOW_ZERO:.7f}" == "0.0786496"


@pytest.mark.parametrize("beta", [1.0, 7.5, 40.0])
@pytest.mark.parametrize("eta", [0.01, 0.5, 0.99])
def test_two_keys_follow_the_logistic_law(beta: float, eta: float) -> None:
    found = noise_analysis(2, [{0: beta, 1: beta}], NORMAL, eta)
    low, high = found.success
    assert high - low <= 1e-12
    # |σ(β(X−1)) − ½|·2 ≤ η means |X − 1| ≤ ln((1+η)/(1−η))/β.
    reach = math.log((1 + eta) / (1 - eta)) / beta
    assert abs((low + high) / 2 - math.erf(reach)) < 1e-12
    for x in (-1.0, 0.3, 2.0):
        below, above = found.weights_at(x)[0]
        assert below <= above <= below + 1e-15
        assert math.isclose(below, 1 / (1 + math.exp(-beta * (x - 1))), rel_tol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 10.0])
def test_separate_heads_succeed_above_one_threshold(factor: float) -> None:
    eta, heads = 0.1, [{0: factor * T}, {1: factor * T}]
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if distance(N, heads, middle) <= eta else (middle, high)
    found = noise_analysis(N, heads, NORMAL, eta)
    assert found.success[1] - found.success[0] <= 1e-12
    assert abs(found.success[0] - (1 - cumulative(high))) < 1e-10
    assert found.success[1] < 1 - BELOW_ZERO


def test_longer_separate_heads_approach_the_limit_and_never_pass_it() -> None:
    reached = [noise_analysis(N, [{0: t}, {1: t}], NORMAL, 0.1).success for t in (20.0, 200.0, 20000.0)]
    assert reached[0][1] < reached[1][0] < reached[2][0] <= reached[2][1] < 1 - BELOW_ZERO
    assert abs(reached[2][0] - 0.921350) < 2e-4


@pytest.mark.parametrize("law", [COIN, NORMAL], ids=["discrete", "gaussian"])
def test_identical_heads_are_no_better_than_one(law: DiscreteLaw | GaussianLaw) -> None:
    one = noise_analysis(N, [{0: T, 1: T}], law, 0.5)
    for copies in (2, 5):
        many = noise_analysis(N, [{0: T, 1: T}] * copies, law, 0.5)
        for name in ("success", "mean", "variance"):
            low, high = getattr(many, name)
            assert high - low <= 1e-12
            assert low <= getattr(one, name)[1] and getattr(one, name)[0] <= high
    apart = noise_analysis(N, [{0: 2 * T}, {1: 2 * T}], law, 0.5)
    assert apart.variance[1] < one.variance[0] / 3


def test_moments_agree_with_a_fine_sum() -> None:
    found = noise_analysis(50, [{0: 9.0, 1: 9.0}, {0: 3.0}], NORMAL, 0.5)
    z = torch.linspace(-9, 9, 200001, dtype=torch.float64)
    x = 1 + z * math.sqrt(0.5)
    weight = torch.sigmoid(9 * x - math.log(math.exp(9) + 48)) / 2 + torch.sigmoid(3 * x - math.log(49)) / 2
    density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    mean = float((weight * density).sum())
    assert found.mean[0] - 1e-9 < mean < found.mean[1] + 1e-9
    variance = float((weight**2 * density).sum()) - mean**2
    assert found.variance[0] - 1e-9 < variance < found.variance[1] + 1e-9


def test_an_error_that_sits_on_eta_is_counted_as_both() -> None:
    # No head looks at the noisy key: every scale gives the same weights, ½ and ½, at distance exactly 1 from key 0.
    tie = DiscreteLaw((1, 2), (HALF, HALF))
    found = noise_analysis(2, [{}], tie, 1.0, target={0: 1})
    assert found.outcomes[0].error[0] <= 1.0 <= found.outcomes[0].error[1]
    assert found.success in ((0.0, 1.0), (1.0, 1.0))


def test_the_picture_crosses_where_the_scale_is_one() -> None:
    chart = noise_analysis(2, [{0: 5.0, 1: 5.0}], NORMAL, 0.1).picture()
    scales, weights = chart.series["key 0"]
    assert weights[list(scales).index(1.0)] == pytest.approx(0.5)
    assert weights[0] < 0.01 < 0.99 < weights[-1]


@settings(max_examples=30)
@given(
    st.integers(2, 60), st.floats(1e-6, 0.9), st.floats(0.05, 3), st.sampled_from(["float64", "float32", "bfloat16"])
)
def test_robust_heads_keep_their_weight_from_the_least_scale_on(n: int, eps: float, least: float, kind: str) -> None:
    heads = robust_heads(n, eps, AnyScale(least), dtype=getattr(torch, kind))
    assert heads.verify()
    for x in (least, 1.3 * least, 5.0 + least):
        scores = heads.queries.double() * torch.tensor([x] + [1.0] * (n - 1), dtype=torch.float64)
        weights = torch.softmax(scores, -1)
        assert float(weights.diagonal().amin()) >= 1 / (1 + eps) - 1e-12
    assert float(heads.queries[0, 0]) <= math.log((n - 1) / eps) / least * (1 + 2.0**-6)


def test_half_scale_needs_twice_the_usual_query() -> None:
    heads = robust_heads(N, EPS, COIN)
    assert float(heads.queries[0, 0]) == pytest.approx(2 * math.log((N - 1) / EPS))
    assert heads.success == 1.0
    short = replace(heads, queries=heads.queries / 2)
    assert not short.verify()
    assert short.verify().achieved > 1.5  # .24 of the weight at c = ½


def test_many_keys_need_no_matrix() -> None:
    heads = robust_heads(10**5, EPS, COIN)
    assert heads.verify()
    assert not replace(heads, queries=heads.queries * 0.999).verify()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("away", [False, True])
def test_rounded_directions_are_paid_for_by_the_query(dtype: torch.dtype, away: bool) -> None:
    keys = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))[0]
    heads = robust_heads(24, EPS, NORMAL, keys=keys, dtype=dtype, away=away)
    proof = heads.verify()
    assert proof and heads.queries.dtype == dtype
    module = heads.as_module().double()
    for x in (heads.least, heads.most):
        noisy = heads.keys.double().clone()
        noisy[0] *= x
        weights = module(noisy, torch.eye(24, dtype=torch.float64))
        assert float((weights - torch.eye(24)[:2].mean(0)).abs().sum()) <= proof.bound + 1e-12


def test_a_gaussian_scale_is_survived_with_the_certified_probability() -> None:
    heads = robust_heads(N, EPS, NORMAL)
    assert heads.least == 0.5
    assert 1 - cumulative(0.5) - 1e-12 < heads.success < 1 - cumulative(0.5) + 1e-15
    exact = noise_analysis(N, [{0: float(heads.queries[0, 0])}, {1: float(heads.queries[1, 1])}], NORMAL, heads.bound)
    assert heads.success <= exact.success[1]
    bolder = robust_heads(N, EPS, NORMAL, least=0.01)
    assert bolder.verify() and heads.success < bolder.success < 1 - BELOW_ZERO


def test_a_query_away_from_the_other_keys_survives_every_scale() -> None:
    heads = robust_heads(50, EPS, AnyScale(-math.inf), away=True)
    assert heads.verify() and heads.success == 1.0
    for x in (-1e6, -1.0, 0.0, 1.0, 1e6):
        scores = heads.queries * torch.tensor([x] + [1.0] * 49, dtype=torch.float64)
        assert float(torch.softmax(scores, -1).diagonal().amin()) >= 1 / (1 + EPS) - 1e-12
    assert float(heads.queries[0].norm()) == pytest.approx(7 * math.log(49 / EPS))
    gaussian = robust_heads(50, EPS, NORMAL, away=True)
    assert gaussian.verify() and gaussian.success > 1 - 1e-15
    assert not replace(gaussian, queries=gaussian.queries / 2).verify()


def test_unbounded_scales_need_directions_that_do_not_meet_at_all() -> None:
    met = torch.eye(5, dtype=torch.float64)
    met[1, 0] = 1e-9
    with pytest.raises(
        ToleranceUnreachable, match=r"robust_heads: eps=0.01 cannot be kept .* from 0.5 to inf; use a wider"
    ):
        robust_heads(5, EPS, AnyScale(0.5), keys=met, tolerance=1e-8)
    assert robust_heads(5, EPS, AnyScale(0.5, 1e6), keys=met, tolerance=1e-8).verify()


def test_a_proof_sees_one_wrong_entry() -> None:
    keys = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    heads = robust_heads(8, EPS, COIN, keys=keys)
    assert heads.verify()
    queries = heads.queries.clone()
    queries[0] += 1e-6 * keys[5]
    assert not replace(heads, queries=queries).verify()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: robust_heads(9, EPS, DiscreteLaw((-1, Fraction(1, 3)), (Fraction(1, 4), Fraction(3, 4)))),
            ParameterError,
            "robust_heads: least=-1.0 must be above 0: a key scaled by 0 or less scores no more than keys that score "
            "0, so no query along it, however long, survives such a scale; that has probability 1/4; "
            "give least=Fraction(1, 3) to survive the rest, or away=True, whose query survives every scale",
        ),
        (
            lambda: robust_heads(9, EPS, NORMAL, least=0),
            ParameterError,
            "that has probability 0.0786496035251; give least above 0, or away=True, whose query survives every scale",
        ),
        (
            lambda: robust_heads(9, EPS, AnyScale(-1.0)),
            ParameterError,
            "the range holds such scales; give least above 0",
        ),
        (lambda: robust_heads(9, 1.0, COIN), ParameterError, "robust_heads: eps=1.0 must lie in (0, 1); try eps=0.01"),
        (lambda: robust_heads(9, math.nan, COIN), ParameterError, "robust_heads: eps=nan must lie in (0, 1)"),
        (
            lambda: robust_heads(1, EPS, COIN),
            ParameterError,
            "robust_heads: n=1 must be at least 2; give two keys or more",
        ),
        (
            lambda: robust_heads(9, EPS, COIN, other=0),
            ParameterError,
            "noisy, other=(0, 0) must be two of the keys 0..8",
        ),
        (lambda: robust_heads(9, EPS, COIN, least=2.0), ParameterError, "least=2.0 must be at most the law's largest"),
        (
            lambda: robust_heads(9, EPS, COIN, dtype=torch.int64),
            DtypeError,
            "dtype=torch.int64 must be one of float64, float32, bfloat16, float16; use dtype=torch.float64",
        ),
        (lambda: robust_heads(3, EPS, COIN, keys=torch.eye(2)), ShapeError, "keys=(2, 2) must be (3, d); give one row"),
        (
            lambda: robust_heads(2, EPS, COIN, keys=torch.tensor([[1.0, math.nan], [0, 1]])),
            NonFiniteError,
            "robust_heads: keys[0]=[1.0, nan] holds a number that is nan or infinite; drop that row or replace it",
        ),
        (
            lambda: robust_heads(2, EPS, COIN, keys=torch.tensor([[1.0, 0.001], [0, 1]])),
            ParameterError,
            "robust_heads: keys=inner products off by 0.001 must be orthonormal to within tolerance=",
        ),
        (lambda: noise_analysis(1, [{0: 1.0}], COIN, 0.1), ParameterError, "noise_analysis: n=1 must be at least 2"),
        (lambda: noise_analysis(5, [{0: 1.0}], COIN, 0.0), ParameterError, "eta=0.0 must lie in (0, 2)"),
        (lambda: noise_analysis(5, [], COIN, 0.1), ParameterError, "heads=[] must hold a head"),
        (lambda: noise_analysis(5, [{7: 1.0}], COIN, 0.1), ParameterError, "heads=key 7 must be one of the keys 0..4"),
        (lambda: noise_analysis(5, [{0: math.inf}], COIN, 0.1), NonFiniteError, "heads=inf must be finite, at key 0"),
        (lambda: noise_analysis(5, [{0: 10**400}], COIN, 0.1), AvowError, "noise_analysis: heads"),
        (lambda: noise_analysis(5, [{}], COIN, 0.1, noisy=5), ParameterError, "noisy=5 must be one of the keys 0..4"),
        (
            lambda: noise_analysis(5, [{}], AnyScale(1.0), 0.1),
            ParameterError,
            "law=AnyScale(least=1.0, most=inf) must be a DiscreteLaw or a GaussianLaw",
        ),
        (lambda: noise_analysis(5, [{}], COIN, 0.1, target={0: math.nan}), ParameterError, "must be a distribution"),
        (
            lambda: noise_analysis(5, [{}], COIN, 0.1, target={0: 0.5}),
            ParameterError,
            "target={0: 0.5} must be a distribution over keys 0..4; leave it out for",
        ),
        (lambda: DiscreteLaw((1, 2), (HALF, HALF / 2)), ParameterError, "(1/2, 1/4) must sum to 1, and sum to 3/4"),
        (lambda: DiscreteLaw((1, 2), (0.1, 0.9)), ParameterError, "give fractions.Fraction where a float is not exact"),
        (lambda: DiscreteLaw((1, 2), (-1, 2)), ParameterError, "probabilities=(-1, 2) must not be negative"),
        (lambda: DiscreteLaw((1, 1), (HALF, HALF)), ParameterError, "values=(1, 1) must differ"),
        (lambda: DiscreteLaw((1,), (HALF, HALF)), ParameterError, "2 numbers must be one for each of the 1 values"),
        (lambda: DiscreteLaw((math.nan,), (1,)), ParameterError, "DiscreteLaw: values=nan must be a finite number"),
        (lambda: GaussianLaw(1.0, 0.0), ParameterError, "GaussianLaw: variance=0.0 must be above 0 and finite"),
        (lambda: GaussianLaw(math.inf), ParameterError, "GaussianLaw: mean=inf must be finite; try mean=1"),
        (lambda: GaussianLaw(10**400), ParameterError, "must be finite; try mean=1"),
        (
            lambda: robust_heads(3, 0.1, 0.5),
            ParameterError,
            "law=0.5 must be a DiscreteLaw or a GaussianLaw or an AnyScale",
        ),
        (
            lambda: robust_heads(3, 0.1, AnyScale(0.5), noisy=0.5),
            ParameterError,
            "robust_heads: noisy=0.5 must be a whole number; the default is 0",
        ),
        (lambda: robust_heads(3, 0.1, DiscreteLaw((10**400,), (1,))), RangeError, "is beyond float64"),
        (lambda: AnyScale(2.0, 1.0), ParameterError, "AnyScale: least=2.0 must be at most most=1.0; try AnyScale(0.5)"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make, error: type[AvowError], text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=re.escape(text)):
        make()
