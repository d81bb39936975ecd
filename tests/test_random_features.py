"""What only random features promise: unbiased estimates, a variance that is bounded, and one draw told three ways."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Problem
from avow.core.certify import certify
from avow.errors import ParameterError, ToleranceUnreachable
from avow.methods import random_features
from avow.methods.random_features import RandomFeatures, Trace
from avow.numerics import features as feature_maps
from avow.numerics.features import Frame, framed_keys, framed_queries
from avow.numerics.softmax import softmax_average, softmax_weights

# The chance that a band of Chebyshev's inequality is left.
MISS = 0.01

both_draws = pytest.mark.parametrize("orthogonal", [False, True], ids=["iid", "orthogonal"])
either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny decompositions: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_problem(n: int = 20, d: int = 6, size: float = 0.5, **options: object) -> Problem:
    q, k, v = (size * torch.randn(1, 2, n, d, dtype=torch.float64) for _ in range(3))
    return Problem.of(q, k, v, **options)  # type: ignore[arg-type]


def run(p: Problem, features: int = 16, seed: int = 0, **options: object) -> tuple[Tensor, Trace]:
    computed = RandomFeatures(features).compute(p, seeded(seed), **options)  # type: ignore[arg-type]
    return computed.out, computed.trace


def estimates(p: Problem, frame: Frame, directions: Tensor) -> Tensor:
    """exp(q·k) of every pair by every feature, in a frame and as the method builds it: (b, h, n, s, m)."""
    frame = Frame(*(x.double() for x in frame))
    q = framed_queries(p, frame, slice(None), torch.float64)
    k, _, shift = framed_keys(p, frame, slice(None), torch.float64)
    rows = q @ directions.T - 0.5 * q.square().sum(-1, keepdim=True)
    return torch.exp(rows.unsqueeze(-2) + (k @ directions.T + shift).unsqueeze(-3))


def quadratic(p: Problem, trace: Trace) -> Tensor:
    """The answer for one draw with every weight written out."""
    weights = estimates(p, trace.frame, trace.directions).mean(-1)
    if p.causal:
        weights = weights.tril()
    return (weights / weights.sum(-1, keepdim=True)) @ p.v


@pytest.fixture(scope="module")
def blocks() -> Tensor:
    """Many orthogonal blocks of eight directions."""
    return feature_maps.draw(8 * 8000, 8, True, seeded(1), torch.device("cpu")).reshape(8000, 8, 8)


def frames(p: Problem) -> list[Frame]:
    return [
        feature_maps.plain_frame(p.k, torch.float64),
        feature_maps.centred_frame(p, torch.float64),
    ]


def wanted(p: Problem, frame: Frame) -> Tensor:
    """What the estimates of a frame should be on average: exp(scale·q·(k − c)), c the shift of the keys."""
    return torch.exp(p.scale * (p.q @ (p.k - frame.key_shift).transpose(-1, -2)))


@pytest.mark.parametrize("place", [0, 1], ids=["plain", "centred"])
@both_draws
def test_the_unnormalised_estimate_is_unbiased(orthogonal: bool, place: int, blocks: Tensor) -> None:
    p = small_problem(n=2, d=8, size=0.6)
    frame = frames(p)[place]
    draws = len(blocks)
    directions = blocks.flatten(0, 1)
    if not orthogonal:
        directions = feature_maps.draw(8 * draws, 8, False, seeded(), torch.device("cpu"))
    q = framed_queries(p, frame, slice(None), torch.float64)
    k = framed_keys(p, frame, slice(None), torch.float64)[0]
    radius = torch.linalg.vector_norm(q.unsqueeze(-2) + k.unsqueeze(-3), dim=-1)
    each = feature_maps.relative_variance(radius, 8, 8, orthogonal)
    # Chebyshev for each pair, all pairs at once: P(|mean − truth| > band) ≤ MISS.
    band = torch.sqrt(each / draws * radius.numel() / MISS)
    mean = estimates(p, frame, directions).mean(-1)
    off = (mean / wanted(p, frame) - 1).abs()
    assert bool((off <= band).all())
    assert float(band.max()) < 1
    lacking = mean * torch.exp(0.5 * k.square().sum(-1)).unsqueeze(-2)
    assert not bool(((lacking / wanted(p, frame) - 1).abs() <= band).all()), "without −‖k‖²/2 it would be biased"


def test_orthogonal_blocks_are_orthogonal_and_rows_have_chi_norms(blocks: Tensor) -> None:
    grams = blocks @ blocks.transpose(-1, -2)
    off = grams - torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))
    assert float(off.abs().max()) < 1e-12
    squares = blocks.square().sum(-1).flatten()
    # χ²_d has mean d, variance 2d and fourth central moment 12d² + 48d.
    d, count = 8, squares.numel()
    assert abs(float(squares.mean()) - d) <= math.sqrt(2 * d / (count * MISS))
    spread = (squares - d).square().mean()
    assert abs(float(spread) - 2 * d) <= math.sqrt((12 * d**2 + 48 * d) / (count * MISS))
    equal = feature_maps.draw(1024, 8, True, seeded(), torch.device("cpu"))
    assert float(equal.norm(dim=-1).std()) > 0.1, "rows of equal norm are no Gaussians"
    iid = feature_maps.draw(8, 8, False, seeded(), torch.device("cpu"))
    assert float((iid @ iid.T - torch.diag(iid.square().sum(-1))).abs().max()) > 0.1


def test_a_last_block_may_be_short() -> None:
    rows = feature_maps.draw(11, 8, True, seeded(), torch.device("cpu"))
    assert rows.shape == (11, 8)
    tail = rows[8:] @ rows[8:].T
    assert float((tail - torch.diag(tail.diagonal())).abs().max()) < 1e-12


def fourth(square: float) -> float:
    """E (X−1)⁴ of one feature relative to its mean, X = exp(N(−R²/2, R²)); convexity keeps it a bound for averages."""
    return math.exp(6 * square) - 4 * math.exp(3 * square) + 6 * math.exp(square) - 3


@pytest.mark.parametrize("features", [1, 4])
def test_the_variance_of_independent_features_is_the_bound(features: int) -> None:
    square, draws, d = 0.25, 200_000, 8
    z = torch.zeros(d, dtype=torch.float64)
    z[0] = math.sqrt(square)
    directions = feature_maps.draw(draws * features, d, False, seeded(), torch.device("cpu"))
    means = torch.exp(directions @ z - square / 2).reshape(draws, features).mean(-1)
    measured = float((means - 1).square().mean())
    bound = float(feature_maps.relative_variance(z.norm(), features, d, False))
    band = math.sqrt(fourth(square) / (draws * MISS)) / features
    assert abs(measured - bound) <= band
    assert abs(measured - bound / 2) > band


@pytest.mark.parametrize("mixture", ["one key", "opposite keys", "orthogonal keys"])
def test_the_variance_of_orthogonal_features_is_below_the_bound(mixture: str, blocks: Tensor) -> None:
    square, d = 0.09, 8
    eye = math.sqrt(square) * torch.eye(d, dtype=torch.float64)
    sums = {"one key": eye[:1], "opposite keys": torch.stack([eye[0], -eye[0]]), "orthogonal keys": eye}[mixture]
    means = torch.exp(blocks @ sums.T - square / 2).mean((-1, -2))
    measured = float((means - 1).square().mean())
    radius = torch.tensor(math.sqrt(square), dtype=torch.float64)
    bound = float(feature_maps.relative_variance(radius, d, d, True))
    band = math.sqrt(fourth(square) / (len(blocks) * MISS))
    assert measured <= bound + band
    assert band < 2 * bound
    assert measured > 0


def test_orthogonal_draws_are_no_worse_bounded_than_one_block_of_copies() -> None:
    radius = torch.linspace(0.1, 3, 9, dtype=torch.float64)
    iid, blocked = (feature_maps.relative_variance(radius, 64, 16, word) for word in (False, True))
    copies = feature_maps.relative_variance(radius, 4, 16, False)
    assert bool((iid <= blocked).all()) and bool((blocked <= copies * (1 + 1e-12)).all())


@either_way
@pytest.mark.parametrize("n", [1, 20, 65])
def test_an_answer_is_the_formula_for_its_draw(causal: bool, n: int) -> None:
    p = small_problem(n, causal=causal)
    out, trace = run(p)
    torch.testing.assert_close(out, quadratic(p, trace))
    if n > 1:
        _, other = run(p, seed=1)
        assert not torch.allclose(out, quadratic(p, other), rtol=1e-4)


def test_a_causal_pass_uses_the_formula_of_the_docstring() -> None:
    p = small_problem(causal=True, scale=1.0)
    out, trace = run(p)
    keys = torch.exp(p.k @ trace.directions.T - 0.5 * p.k.square().sum(-1, keepdim=True))
    weights = (torch.exp(p.q @ trace.directions.T) @ keys.transpose(-1, -2)).tril()
    torch.testing.assert_close(out, (weights @ p.v) / weights.sum(-1, keepdim=True))


def halves(p: Problem, at: int) -> tuple[Problem, Problem]:
    first, second = (slice(0, at), slice(at, None))
    return tuple(  # type: ignore[return-value]
        Problem.of(p.q[..., part, :], p.k[..., part, :], p.v[..., part, :], causal=True) for part in (first, second)
    )


@pytest.mark.parametrize("at", [1, 20, 64, 89])
def test_a_state_carried_between_calls_equals_one_call(at: int) -> None:
    p = small_problem(90, causal=True)
    whole, _ = run(p)
    first, second = halves(p, at)
    start, trace = run(first)
    end, _ = run(second, seed=7, initial_state=trace.final_state)
    torch.testing.assert_close(torch.cat([start, end], -2), whole)
    forgetful, _ = run(second)
    assert not torch.allclose(forgetful, whole[..., at:, :])


@pytest.mark.parametrize("sizes", [(1e20, 1.0), (1.0, 1e20), (1e20, 1e17)], ids=str)
def test_a_state_carried_between_values_of_other_sizes_equals_one_call(sizes: tuple[float, float]) -> None:
    p = small_problem(40, causal=True)
    p.v[..., :20, :] *= sizes[0]
    p.v[..., 20:, :] *= sizes[1]
    whole, _ = run(p)
    first, second = halves(p, 20)
    start, trace = run(first)
    end, _ = run(second, initial_state=trace.final_state)
    torch.testing.assert_close(torch.cat([start, end], -2), whole, rtol=1e-9, atol=0)


def wide(p: Problem) -> Problem:
    return Problem.of(p.q.double(), p.k.double(), p.v.double(), causal=p.causal)


def loud_from(place: int, causal: bool, loud_rows: bool = False) -> Problem:
    """Keys of small norms in float32 up to a place, of norms too large to share one reference from there on."""
    q, k, v = (0.5 * torch.randn(1, 2, 700, 6) for _ in range(3))
    k[..., place:, :] *= 40
    if loud_rows:
        q[..., 300:, :] *= 12
    return Problem.of(q, k, v, causal=causal)


def references(trace: Trace) -> int:
    assert trace.final_state is not None
    return trace.final_state.sums.top.shape[-1]


@either_way
@pytest.mark.parametrize("place", [0, 1, 600, 700], ids=str)
def test_features_share_a_reference_as_long_as_keys_are_quiet(place: int, causal: bool) -> None:
    p = loud_from(place, causal)
    out, trace = run(p)
    torch.testing.assert_close(out.double(), quadratic(wide(p), trace), atol=2e-4, rtol=1e-4)
    assert references(trace) == (1 if place == 700 else 16)


@either_way
def test_gradients_pass_from_quiet_keys_to_loud_ones(causal: bool) -> None:
    p = loud_from(600, causal)
    p.v.requires_grad_()
    slope = torch.randn(700, 6)
    out, trace = run(p)
    found, expected = (torch.autograd.grad((x * slope).sum(), p.v)[0] for x in (out, quadratic(wide(p), trace)))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_loud_rows_may_meet_quiet_keys() -> None:
    p = loud_from(700, causal=True, loud_rows=True)
    out, trace = run(p)
    torch.testing.assert_close(out.double(), quadratic(wide(p), trace), atol=2e-4, rtol=1e-4)
    assert references(trace) == 1


@pytest.mark.parametrize(("first", "then"), [(1, 40), (40, 1), (1, 1), (40, 40)], ids=str)
def test_a_state_carried_from_quiet_keys_to_loud_ones_equals_one_call(first: float, then: float) -> None:
    p = loud_from(700, causal=True)
    p.k[..., :350, :] *= first
    p.k[..., 350:, :] *= then
    whole, trace = run(p)
    before, after = halves(p, 350)
    start, carried = run(before)
    end, _ = run(after, initial_state=carried.final_state)
    torch.testing.assert_close(torch.cat([start, end], -2), whole, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(whole.double(), quadratic(wide(p), trace), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_a_pass_that_goes_on_promises_nothing_of_keys_it_does_not_hold(kind: torch.dtype) -> None:
    method = RandomFeatures(16)
    q, k, v = (torch.randn(1, 2, 700, 6) for _ in range(3))
    k[..., 350:, :] *= 1e-3
    p = Problem.of(1e-3 * q, k, v, causal=True)
    before, after = halves(p, 350)
    carried = method.compute(before, seeded()).trace.final_state
    # A later part of other numbers may be summed in a wider type than the sums it begins with.
    after = Problem.of(after.q.to(kind), after.k.to(kind), after.v.to(kind), causal=True)
    computed = method.compute(after, initial_state=carried)
    certificate = certify(method, after, computed, 0.9)
    assert certificate.kind == "none" and certificate.bound == math.inf and not certificate.keeps(1e300)
    assert certificate.reason == "it went on from a state, whose keys are not in the problem"

    # What it would promise of its own keys, which are short, is broken by the longer ones before them.
    unaware = dataclasses.replace(computed, trace=computed.trace._replace(carried=False))
    bounds = certify(method, after, unaware, 0.9).rows
    truth = softmax_average(wide(p))[..., 350:, :]
    longest = torch.linalg.vector_norm(v.double(), dim=-1).amax(-1, keepdim=True)
    errors = torch.linalg.vector_norm(computed.out.double() - truth, dim=-1) / longest
    assert int((errors > bounds).sum()) > errors.numel() / 2, "with probability 0.9 none is"


def test_sums_over_keys_are_not_forgotten_where_masks_differ_by_row() -> None:
    p = small_problem(20, causal=True)
    carried = run(p)[1].final_state
    masked = Problem.of(p.q, p.k, p.v, mask=torch.rand(20, 20) < 0.7)
    text = "random_features: mask=full cannot include keys that are known only by their sums; let all rows see the same"
    with pytest.raises(ParameterError, match=f"^{re.escape(text)} keys$"):
        run(masked, initial_state=carried)


def test_frames_change_no_weight_of_the_target() -> None:
    p = small_problem(scale=0.7)
    plain, centred = frames(p)
    truth = softmax_weights(p)
    for frame in (plain, centred):
        q = framed_queries(p, frame, slice(None), torch.float64)
        k, _, shift = framed_keys(p, frame, slice(None), torch.float64)
        logs = q @ k.transpose(-1, -2) + (shift + 0.5 * k.square().sum(-1, keepdim=True)).transpose(-1, -2)
        torch.testing.assert_close(torch.softmax(logs, -1), truth)
        assert not torch.allclose(torch.softmax(q @ k.transpose(-1, -2), -1), truth) or frame is plain
    assert float(centred.key_shift.abs().max()) > 0


def test_a_centred_frame_makes_norms_shrink() -> None:
    p = small_problem()
    away = Problem.of(p.q + 3, p.k - 3, p.v)
    with_frame = RandomFeatures(64).estimate_bound(away, 0.9)
    plain, centred = frames(away)
    assert float(framed_keys(away, centred, slice(None), torch.float64)[0].norm(dim=-1).max()) < float(
        framed_keys(away, plain, slice(None), torch.float64)[0].norm(dim=-1).max()
    )
    assert with_frame.bound == pytest.approx(RandomFeatures(64).estimate_bound(p, 0.9).bound, rel=1e-6)


@either_way
@pytest.mark.parametrize("size", [1e14, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_huge_norms_are_never_nan(size: float, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 4, dtype=dtype) for _ in range(3))
    for scaled in ((size * q, k, v), (q, size * k, v), (size * q, size * k, v), (q, k, size * v)):
        out, certificate = avow.attend(*scaled, method="random_features", features=16, causal=causal)
        assert bool(torch.isfinite(out).all()) and not bool(certificate.rows.isnan().any())
        # A mixture of values stays among them, however wrong its weights.
        assert float(out.abs().max()) <= float(scaled[2].abs().max()) * (1 + 1e-5)


def test_small_norms_need_a_count_that_then_keeps_its_word() -> None:
    q, k, v = (0.05 * torch.randn(1, 1, 24, 8, dtype=torch.float64) for _ in range(3))
    needed = avow.features_needed(q, k, tol=0.3, confidence=0.9)
    assert str(needed) == f"{needed.features} features (|q+k| up to {needed.radius:.3g}, {random_features._SCALED})"
    assert 1 < needed.features < 2000
    p = Problem.of(q, k, v)
    bounds = []
    for count in (int(needed.features), int(needed.features / 1.1)):
        method = RandomFeatures(count)
        computed = method.compute(p, seeded())
        bounds.append(certify(method, p, computed, 0.9).bound)
    assert bounds[0] <= 0.3 < bounds[1]


def test_no_feasible_number_of_features_serves_the_norms_of_trained_models() -> None:
    q, k = (torch.randn(1, 1, 32, 64) for _ in range(2))
    needed = avow.features_needed(4 * q, 4 * k, tol=1e-2)
    assert math.isinf(needed.features)
    assert str(needed).startswith("more than 16,777,216 features: one feature has relative variance")
    assert str(needed).endswith("(q and k scaled such that their product is the logit)")


@pytest.mark.parametrize(
    ("tol", "confidence", "words"),
    [
        (0.0, 0.9, "tol=0.0 must be a number above 0"),
        (0.1, 1.0, "must allow some error; try tol=1e-2, confidence=0.99"),
    ],
)
def test_no_number_of_features_is_certain_or_without_error(tol: float, confidence: float, words: str) -> None:
    q = torch.randn(1, 1, 4, 4)
    with pytest.raises(ParameterError, match=words):
        avow.features_needed(q, q, tol=tol, confidence=confidence)


@pytest.mark.parametrize("tol", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("confidence", [0.5, 0.99, 0.999999])
def test_variance_for_undoes_the_ratio_bound(tol: float, confidence: float) -> None:
    variance = torch.tensor(feature_maps.variance_for(tol, confidence), dtype=torch.float64)
    assert float(feature_maps.ratio_bound(variance, confidence)) == pytest.approx(tol, rel=1e-9)
    assert float(feature_maps.ratio_bound(2 * variance, confidence)) > tol


def test_more_features_shrink_the_error_on_average() -> None:
    p = small_problem()
    truth = RandomFeatures().reference(p)
    errors = [
        sum(float((run(p, features, seed)[0] - truth).norm()) for seed in range(20)) for features in (16, 64, 256)
    ]
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]


@either_way
def test_a_generator_reproduces_the_answer(causal: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 4).unbind()

    def answer(seed: int) -> Tensor:
        return avow.attend(q, k, v, method="random_features", features=8, causal=causal, generator=seeded(seed)).out

    first = answer(5)
    torch.rand(1000)
    assert torch.equal(first, answer(5))
    assert not torch.equal(first, answer(6))


def test_the_promise_is_statistical_and_names_its_confidence() -> None:
    q, k, v = (0.02 * torch.randn(1, 2, 16, 8) for _ in range(3))
    certificate = avow.attend(q, k, v, method="random_features", confidence=0.95).certificate
    assert (certificate.kind, certificate.confidence) == ("statistical", 0.95)
    surer = avow.attend(q, k, v, method="random_features", confidence=0.999).certificate
    assert certificate.bound < surer.bound < 2


def test_a_tolerance_that_features_do_not_prove_names_the_ways_on() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
    with pytest.raises(
        ToleranceUnreachable, match=r"a wider tol, more features, or coverage=0\.99 to have a sample of its"
    ):
        avow.attend(q, k, v, tol=1e-3, method="random_features", confidence=0.9)
    certificate = avow.attend(q, k, v, tol=0.9, method="random_features", coverage=0.9).certificate
    assert certificate.kind == "sampled"


def test_a_plan_says_why_coverage_does_not_help_it_choose() -> None:
    q, k, v = torch.randn(3, 1, 2, 2048, 8).unbind()
    with_it, without = (
        {c.method.label: c.lost for c in avow.plan(q, k, v, tol=0.1, coverage=x).ranked} for x in (0.99, None)
    )
    words = "what recomputed rows would show is not known before it runs: name it with method="
    assert with_it["random_features(features=64)"] == words
    assert without["random_features(features=64)"] == "promises only with a confidence below 1: pass confidence="
