"""One token at a time: each step answers as the scan does, and leaves the state that the scan leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.core import Problem
from avow.kernels import linear_step as steps
from avow.kernels.chunking import Sums
from avow.methods.separable import Separable
from tests.helpers.linear_references import feature_attention_reference, separable_attention_reference

pytestmark = pytest.mark.kernels

TOKENS = 5


def drawn(kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, TOKENS, 24), (2, 2, TOKENS, 24), (2, 2, TOKENS, 40))
    q, k, v = (torch.rand(shape).to(kind) for shape in shapes)
    return q, k, v


def empty(m: int, e: int, *tops: int) -> list[Tensor]:
    state = [torch.zeros(2, 2, m, e), torch.zeros(2, 2, m)]
    return [*state, torch.full((2, 2, *tops), -torch.inf)]


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_feature_steps_add_up_to_the_scan(scale: float) -> None:
    q, k, v = drawn(torch.float32)
    directions, state = torch.randn(33, 24), Sums(*empty(33, 40))
    rows = [steps.feature_step(q[:, :, i], k[:, :, i], v[:, :, i], directions, state, scale) for i in range(TOKENS)]
    truth = feature_attention_reference(q, k, v, directions, scale)
    torch.testing.assert_close(torch.stack(rows, 2), truth.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tuple(state), tuple(truth[1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_features_of_many_heads_are_as_near_to_the_truth_as_the_formula(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More heads than a program takes, and more entries than it takes of a direction at a time.
    monkeypatch.setattr(steps, "_HELD", 2**11)
    (b, h, g, d, m, e), scale = (3, 12, 6, 40, 100, 24), 0.2
    q, k, v = (torch.randn(b, heads, TOKENS, width).to(kind) for heads, width in ((h, d), (g, d), (g, e)))
    directions = torch.randn(m, d)
    state = Sums(torch.zeros(b, g, m, e), torch.zeros(b, g, m), torch.full((b, g), -torch.inf))
    rows = [steps.feature_step(q[:, :, i], k[:, :, i], v[:, :, i], directions, state, scale) for i in range(2)]
    q, k, v = (x[:, :, :2] for x in (q, k, v))
    plain = feature_attention_reference(q, k, v, directions, scale)
    truth = feature_attention_reference(q.double(), k.double(), v.double(), directions.double(), scale)
    found = torch.stack(rows, 2)

    def off(x: Tensor) -> float:
        return float((x.double() - truth.out).abs().max())

    assert off(found) <= 2 * off(plain.out) + 1e-6
    torch.testing.assert_close(state.totals.double(), truth.total, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state.tops.double(), truth.top, rtol=1e-5, atol=1e-5)


def test_separable_steps_add_up_to_the_scan() -> None:
    q, k, v = drawn(torch.float32)
    # Keys that rise by hundreds leave nothing of what came before.
    k = k + 200 * torch.arange(TOKENS)[:, None] * (torch.rand(24) < 0.5)
    state = Sums(*empty(24, 40, 24))
    rows = [steps.separable_step(q[:, :, i], k[:, :, i], v[:, :, i], state, 2.0) for i in range(TOKENS)]
    truth = [
        separable_attention_reference(
            q.double()[:, :, : i + 1], k.double()[:, :, : i + 1], v.double()[:, :, : i + 1], False, 2.0
        )
        for i in range(TOKENS)
    ]
    wanted = torch.stack([found.out[:, :, -1] for found in truth], 2)
    torch.testing.assert_close(torch.stack(rows, 2).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.tops.double(), truth[-1].top)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e36])
def test_separable_steps_stay_finite_where_cooling_leaves_the_type(size: float) -> None:
    q, k, v = drawn(torch.float32)
    q, k = size * q, size * k
    q[:, :, 1], k[:, :, 2] = 0, 0
    q[:, :, 3] = -3e38  # all of a row stops at the same end
    state = Sums(*empty(24, 40, 24))
    rows = [steps.separable_step(q[:, :, i], k[:, :, i], v[:, :, i], state, 1e-6) for i in range(TOKENS)]
    p, method = Problem.of(q, k, v, causal=True, enable_gqa=True), Separable(1e-6)
    wanted, _ = method.read_on(p, method.initial_state(p))
    torch.testing.assert_close(torch.stack(rows, 2), wanted, rtol=1e-4, atol=1e-5)


def test_a_step_that_forgets_its_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(torch.float32)
    state, step = Sums(*empty(24, 40, 24)), steps._step
    monkeypatch.setattr(
        steps, "_step", lambda q, v, sums, token: step(q, v, sums, token._replace(key=torch.zeros_like(token.key)))
    )
    out = steps.separable_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
    truth = separable_attention_reference(q[:, :, :1], k[:, :, :1], v[:, :, :1], True).out[:, :, 0]
    assert not torch.allclose(out, truth)
