"""What only `latent` promises: the whole past and none of the future, softmax attention in its limits, linear work."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Problem, Sizes
from avow.errors import ParameterError
from avow.methods.latent import Latent, directions
from tests.helpers.truth import ball_error, judge, wide_reference

either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def tensors(n: int, s: int | None = None, d: int = 5, e: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    s = n if s is None else s
    return tuple(torch.randn(2, 3, a, c, dtype=torch.float64) for a, c in ((n, d), (s, d), (s, e)))  # type: ignore[return-value]


def one_row(q: Tensor, k: Tensor, v: Tensor, latents: int, segment: int) -> Tensor:
    """A single row of one head by the definition, over the keys it sees, which are given."""
    scale, z = 1 / math.sqrt(q.shape[-1]), directions(latents, k)
    horizon = (len(k) - 1) // segment * segment
    keys, values, logs = [], [], []
    for r in range(latents if horizon else 0):
        beta = torch.softmax(scale * (k[:horizon] @ z[r]), 0)
        keys.append(beta @ k[:horizon])
        values.append(beta @ v[:horizon])
        logs.append(math.log(horizon / latents))
    near = len(k) - horizon
    keys, values, logs = [*keys, *k[horizon:]], [*values, *v[horizon:]], [*logs, *[0.0] * near]
    weights = torch.softmax(scale * (torch.stack(keys) @ q) + torch.tensor(logs, dtype=q.dtype), 0)
    return weights @ torch.stack(values)


@either_way
@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_every_row_is_the_definition(causal: bool, n: int) -> None:
    q, k, v = tensors(n)
    out = avow.attend(q, k, v, method="latent", latents=6, segment=16, causal=causal).out
    for i in {0, n // 2, n - 1}:
        end = i + 1 if causal else n
        expected = one_row(q[0, 1, i], k[0, 1, :end], v[0, 1, :end], 6, 16)
        torch.testing.assert_close(out[0, 1, i], expected)
    if n > 16:
        # Another segment length is another mechanism.
        assert not torch.allclose(out, avow.attend(q, k, v, method="latent", latents=6, segment=7, causal=causal).out)


@either_way
@pytest.mark.parametrize("sizes", [(40, 40), (40, 23), (23, 40), (33, 1)], ids=str)
def test_linear_time_equals_the_definition_under_any_mask(causal: bool, sizes: tuple[int, int]) -> None:
    n, s = sizes
    q, k, v = tensors(n, s)
    masks = [
        None,
        torch.rand(2, 1, 1, s) < 0.2,
        torch.rand(2, 3, 1, s) < 0.7,
        torch.randn(1, 1, 1, s),
        torch.randn(n, s),
    ]
    masks.append(torch.arange(s).expand(1, 1, 1, s) >= s // 2)
    for mask in masks:
        for method in (Latent(4, 8), Latent(1, 1), Latent(7, 100)):
            problem = Problem.of(q, k, v, mask=mask, causal=causal)
            torch.testing.assert_close(method.compute(problem).out, method.reference(problem))


def test_tiles_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(70)
    seen = torch.rand(2, 1, 1, 70) < 0.1
    for mask in (None, seen):
        for causal in (False, True):
            problem = Problem.of(q, k, v, mask=mask, causal=causal)
            whole = Latent(4, 8).compute(problem).out
            with monkeypatch.context() as patch:
                patch.setattr("avow.numerics.horizons.TILE", 1)
                torch.testing.assert_close(Latent(4, 8).compute(problem).out, whole)


@either_way
def test_one_segment_is_softmax_attention(causal: bool) -> None:
    q, k, v = tensors(40)
    exact = avow.attend(q, k, v, causal=causal).out
    torch.testing.assert_close(avow.attend(q, k, v, method="latent", segment=40, causal=causal).out, exact)
    assert not torch.allclose(avow.attend(q, k, v, method="latent", segment=39, causal=causal).out, exact)


@either_way
def test_equal_keys_give_softmax_attention_whatever_the_segments(causal: bool) -> None:
    q, k, v = tensors(50)
    k = k[..., :1, :].expand_as(k)
    exact = avow.attend(q, k, v, causal=causal).out
    for segment in (1, 7, 64):
        out = avow.attend(q, k, v, method="latent", latents=5, segment=segment, causal=causal).out
        torch.testing.assert_close(out, exact)


def test_a_causal_row_is_the_whole_answer_on_its_prefix() -> None:
    q, k, v = tensors(80)
    out = avow.attend(q, k, v, method="latent", latents=4, segment=16, causal=True).out
    for i in (0, 1, 15, 16, 40, 79):
        shorter = (q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :])
        prefix = avow.attend(*shorter, method="latent", latents=4, segment=16).out
        torch.testing.assert_close(out[..., i : i + 1, :], prefix)


def test_every_past_value_is_seen_and_no_future_one() -> None:
    n = 40
    q, k, _ = tensors(n)
    eye = torch.eye(n, dtype=torch.float64).expand(2, 3, n, n)
    weights = avow.attend(q, k, eye, method="latent", latents=3, segment=8, causal=True).out
    assert float(weights.triu(1).abs().max()) == 0.0
    assert bool((weights[..., torch.ones(n, n).tril().bool()] > 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, n, dtype=torch.float64))


def test_a_hidden_key_leaves_no_trace_even_as_the_last_of_its_segment() -> None:
    q, k, v = tensors(40)
    seen = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    seen[..., 17:] = False
    out = avow.attend(q, k, v, method="latent", latents=3, segment=8, mask=seen, causal=True).out
    shorter = avow.attend(q[..., 17:, :], k[..., :17, :], v[..., :17, :], method="latent", latents=3, segment=8).out
    torch.testing.assert_close(out[..., 17:, :], shorter)


def test_an_audit_finds_the_answer_right_and_another_wrong() -> None:
    q, k, v = tensors(90)
    out = avow.attend(q, k, v, method="latent", causal=True).out
    assert avow.audit(out, q, k, v, method="latent", causal=True).certificate.bound < 1e-10
    other = avow.attend(q, k, v, method="latent", latents=8, causal=True).out
    assert avow.audit(other, q, k, v, method="latent", causal=True).certificate.bound > 1e-4


@either_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_row_keeps_its_bound_and_one_latent_less_breaks_it(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors(200, d=16))
    problem = Problem.of(q, k, v, causal=causal)
    method = Latent(16, 16)
    out, certificate = avow.attend(q, k, v, method="latent", latents=16, segment=16, causal=causal)
    assert certificate.kind == "deterministic"
    assert certificate.bound < {torch.float64: 1e-11, torch.float32: 1e-2}.get(dtype, 2e-2)
    assert judge(method, problem, out, certificate.rows, None).broken == 0
    wrong = dataclasses.replace(method, latents=15).compute(problem).out
    assert judge(method, problem, wrong, certificate.rows, None).broken > 0


@either_way
def test_balls_and_wide_arithmetic_know_the_definition(causal: bool) -> None:
    q, k, v = tensors(20)
    mask = torch.randn(20, 20, dtype=torch.float64)
    mask[:, 3::4] = -math.inf
    problem, method = Problem.of(q, k, v, mask=mask, causal=causal), Latent(6, 8)
    wide = wide_reference(method, problem, mask)
    torch.testing.assert_close(wide, method.reference(problem), rtol=0, atol=1e-14)
    for row in (0, 9, 19):
        assert ball_error(method, problem, wide, 1, 2, row, mask) < 1e-15
        if row > 8:  # a row behind whose horizon something lies
            assert ball_error(dataclasses.replace(method, latents=5), problem, wide, 1, 2, row, mask) > 1e-6


@either_way
@pytest.mark.parametrize("loud", [1e10, 1e25])
def test_huge_queries_and_keys_stay_finite_with_an_honest_bound(causal: bool, loud: float) -> None:
    q, k, v = (x.float() for x in tensors(50))
    q, k = q * loud, k * loud
    out, certificate = avow.attend(q, k, v, method="latent", latents=4, segment=8, causal=causal)
    assert bool(torch.isfinite(out).all()) and certificate.bound >= 2
    problem = Problem.of(q, k, v, causal=causal)
    assert judge(Latent(4, 8), problem, out, certificate.rows, None).broken == 0


def test_work_grows_with_the_length_and_not_its_square() -> None:
    sizes = Sizes(1, 4, 4, 4096, 4096, 64, 64, causal=True)
    once, twice = (Latent().cost(sizes.with_keys(n)) for n in (4096, 8192))
    assert twice.flops == 2 * once.flops and twice.peak_bytes < 2.1 * once.peak_bytes


def test_directions_are_exact_signs_of_no_common_direction() -> None:
    z = directions(64, torch.zeros(1, 64, dtype=torch.bfloat16)).double()
    assert float(z[0].abs().max()) == 0.0 and set(z[1:].unique().tolist()) == {-1.0, 1.0}
    gram = z[1:] @ z[1:].T / 64
    # Independent signs have products of about 1/8 here; equal ones would have products of 1.
    assert float((gram - torch.eye(63)).abs().max()) < 0.6 and float((gram - torch.eye(63)).square().mean()) < 2 / 64


def test_another_kernel_is_refused() -> None:
    q, k, v = tensors(8)
    text = 'latent: kernel=rbf is not defined for latent attention; leave it out: kernel="dot"'
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        avow.attend(q, k, v, method="latent", kernel="rbf", sigma=1.0)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("latents", 0, "from 1 to 1048576"), ("latents", 10**12, "from 1 to 1048576"), ("segment", 0, "at least 1")],
)
def test_no_latents_no_segment_and_more_latents_than_memory_are_refused(name: str, value: int, rule: str) -> None:
    q, k, v = tensors(8)
    with pytest.raises(ParameterError, match=f"latent: {name}={value} must be {rule}"):
        avow.attend(q, k, v, method="latent", **{name: value})


def test_it_is_never_chosen_for_softmax_attention() -> None:
    q, k, v = tensors(8)
    offers = [candidate for candidate in avow.plan(q, k, v, tol=1.0).ranked if candidate.method.name == "latent"]
    assert offers and all(candidate.lost == "its target is latent attention" for candidate in offers)
