"""What only `separable` promises: distributions for rows, a prefix for each causal row, and no more than rank d."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Problem
from avow.errors import ParameterError
from avow.methods.separable import Separable
from tests.helpers.truth import judge

either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def weights(n: int, d: int, causal: bool = False, loud: float = 1.0, **options: object) -> Tensor:
    """The matrix a separable answer multiplies the values by."""
    q, k = (loud * torch.randn(1, 1, n, d, dtype=torch.float64) for _ in range(2))
    eye = torch.eye(n, dtype=torch.float64)[None, None]
    return avow.attend(q, k, eye, method="separable", causal=causal, **options).out[0, 0]


def by_definition(q: Tensor, k: Tensor, v: Tensor, causal: bool, temperature: float = 1.0) -> Tensor:
    """Every row by itself over the keys it sees."""
    rows = []
    for i in range(q.shape[-2]):
        end = i + 1 if causal else k.shape[-2]
        rho = torch.softmax(q[..., i, :] / temperature, -1)
        columns = torch.softmax(k[..., :end, :] / temperature, -2)
        rows.append(((columns * rho.unsqueeze(-2)).sum(-1).unsqueeze(-2) @ v[..., :end, :])[..., 0, :])
    return torch.stack(rows, -2)


@either_way
@pytest.mark.parametrize("loud", [1.0, 30.0])
def test_rows_are_distributions(causal: bool, loud: float) -> None:
    matrix = weights(70, 4, causal, loud)
    assert bool((matrix >= 0).all())
    torch.testing.assert_close(matrix.sum(-1), torch.ones(70, dtype=torch.float64))
    if causal:
        assert float(matrix.triu(1).abs().max()) == 0.0


@either_way
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_the_scan_equals_the_definition(causal: bool, n: int) -> None:
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for _ in range(3))
    out = avow.attend(q, k, v, method="separable", causal=causal).out
    torch.testing.assert_close(out, by_definition(q, k, v, causal))
    if n > 1:
        assert not torch.allclose(out, by_definition(q, k, v, not causal))


def test_a_causal_row_is_the_whole_answer_on_its_prefix() -> None:
    q, k, v = (torch.randn(1, 2, 80, 3, dtype=torch.float64) for _ in range(3))
    out = avow.attend(q, k, v, method="separable", causal=True).out
    for i in (0, 1, 40, 63, 64, 79):
        prefix = avow.attend(q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :], method="separable").out
        torch.testing.assert_close(out[..., i : i + 1, :], prefix)


def test_the_matrix_has_rank_at_most_d_and_copies_at_most_d_values() -> None:
    n, d = 40, 5
    for loud in (1.0, 10.0, 100.0):
        matrix = weights(n, d, loud=loud)
        assert int(torch.linalg.matrix_rank(matrix, rtol=1e-10)) <= d
        # ‖I − M‖² ≥ n − d for every M of rank at most d  [claim separable-weaker]
        assert float((torch.eye(n) - matrix).square().sum()) >= n - d - 1e-9


def test_softmax_attention_of_the_same_size_copies_them_all() -> None:
    n, d = 40, 5
    k = torch.nn.functional.normalize(torch.randn(1, 1, n, d, dtype=torch.float64), dim=-1)
    eye = torch.eye(n, dtype=torch.float64)
    matrix = avow.attend(1e4 * k, k, eye[None, None]).out[0, 0]
    assert float((eye - matrix).square().sum()) < 1e-3


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_an_explicit_scale_is_refused(scale: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    text = (
        f"separable: scale={scale} has no meaning for separable attention, which has no logits q·k; "
        "leave it out and set temperature instead"
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        avow.attend(q, k, v, method="separable", scale=scale)


@either_way
@pytest.mark.parametrize("temperature", [0.3, 8.0])
def test_the_temperature_divides_queries_and_keys(causal: bool, temperature: float) -> None:
    q, k, v = (torch.randn(1, 2, 70, 4, dtype=torch.float64) for _ in range(3))
    out = avow.attend(q, k, v, method="separable", temperature=temperature, causal=causal).out
    torch.testing.assert_close(out, by_definition(q, k, v, causal, temperature))
    assert not torch.allclose(out, by_definition(q, k, v, causal))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    with pytest.raises(ParameterError, match=r"separable: temperature=.* must be above 0; the default is 1.0 "):
        avow.attend(q, k, v, method="separable", temperature=temperature)


@either_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_that_jump_to_1e30_stay_finite_and_right(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 100, 4, dtype=dtype) for _ in range(3))
    k[..., 10, 0], k[..., 30, 1], k[..., 66, :], k[..., 70, 2] = 1e30, -1e30, 1e15, 1e30
    problem = Problem.of(q, k, v, causal=causal)
    out, certificate = avow.attend(q, k, v, method="separable", causal=causal)
    assert bool(torch.isfinite(out).all())
    assert judge(Separable(), problem, out, certificate.rows, None).broken == 0
    assert certificate.bound < 1e-2
    ordinary = avow.attend(q, torch.randn_like(k), v, method="separable", causal=causal).out
    assert judge(Separable(), problem, ordinary, certificate.rows, None).broken > 0


def test_it_is_never_chosen_for_softmax_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    plan = avow.plan(q, k, v, tol=1.0)
    (own,) = (candidate for candidate in plan.ranked if candidate.method.name == "separable")
    assert own.lost == "its target is separable attention"
    assert avow.attend(q, k, v, method="separable").certificate.target == "separable attention"


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_keys_far_from_zero_keep_their_bound_at_any_temperature(temperature: float) -> None:
    # Dividing rounds 1e5 by more than the differences between keys matter.
    q, k, v = torch.randn(1, 2, 64, 8), 1e5 + torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    problem = Problem.of(q, k, v)
    out, certificate = avow.attend(q, k, v, method="separable", temperature=temperature)
    assert judge(Separable(temperature), problem, out, certificate.rows, None).broken == 0
    assert judge(Separable(temperature), problem, out, certificate.rows * 1e-3, None).broken > 0


@either_way
def test_a_temperature_that_sends_keys_out_of_range_gives_numbers_and_an_honest_bound(causal: bool) -> None:
    q, k, v = torch.randn(1, 2, 20, 8) * 1e30, torch.randn(1, 2, 20, 8) * 1e30, torch.randn(1, 2, 20, 8)
    out, certificate = avow.attend(q, k, v, method="separable", temperature=1e-30, causal=causal)
    assert bool(torch.isfinite(out).all()) and 1 < certificate.bound <= 2.01
