"""The kernels of causal linear attention: as near to the truth as the plain formula, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from avow.bench.linear_checks import repeat_heads
from avow.errors import DtypeError, ShapeError
from avow.kernels.interpreted import interpret

interpret()

from avow.kernels import chunking
from avow.kernels import linear_attention as scans
from avow.kernels.feature_attention import feature_attention
from avow.kernels.linear_attention import linear_attention
from tests.helpers.linear_references import feature_attention_reference, linear_attention_reference

pytestmark = pytest.mark.kernels

Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
# Below this, relatively, an error in float32 is nobody's fault.
_FRESH = 2.0**-22


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts short enough for a few hundred rows to have several; and a GPU does not warn of inf."""
    monkeypatch.setattr(chunking, "_WHOLE", 64)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        yield


def drawn(b: int, h: int, g: int, n: int, d: int, e: int, kind: torch.dtype = torch.float32) -> Inputs:
    """Positive queries and keys, so that normalisers are away from zero."""
    q, k = torch.rand(b, h, n, d) + 0.1, torch.rand(b, g, n, d) + 0.1
    return q.to(kind), k.to(kind), torch.randn(b, g, n, e).to(kind)


def off(found: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(found.detach().double() - truth) / torch.linalg.vector_norm(truth))


def passes(call: Call, inputs: Inputs, seed: Tensor) -> list[Tensor]:
    """An answer and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def judged(call: Call, formula: Call, inputs: Inputs) -> None:
    """No further from float64 than twice the plain formula in the same type."""
    seed = torch.randn(inputs[0].shape[:3] + inputs[2].shape[3:])
    found, plain = passes(call, inputs, seed), passes(formula, inputs, seed)
    wide = inputs[0].double(), inputs[1].double(), inputs[2].double()
    truth = passes(formula, wide, seed.to(inputs[0].dtype).double())
    for name, x, p, t in zip(("out", "dq", "dk", "dv"), found, plain, truth, strict=True):
        assert off(x, t) <= 2 * off(p, t) + _FRESH, f"{name}: {off(x, t):.3g} off, the formula {off(p, t):.3g}"


def linear(normalise: bool) -> Call:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        pairs = (q @ k.mT).tril()
        return pairs @ v / pairs.sum(-1, keepdim=True) if normalise else pairs @ v

    return formula


def features(directions: Tensor, scale: float, causal: bool = True) -> Call:
    """Random features written out, each relative to the largest of its row or of all keys."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        w, root = directions.to(q.dtype), abs(scale) ** 0.5
        rows, keys = q * (root if scale > 0 else -root) @ w.mT, k * root @ w.mT
        keys = keys - 0.5 * abs(scale) * k.square().sum(-1, keepdim=True)
        rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))
        keys = torch.exp(keys - keys.detach().amax((-1, -2), keepdim=True))
        pairs = rows @ keys.mT
        pairs = pairs.tril() if causal else pairs
        return pairs @ v / pairs.sum(-1, keepdim=True)

    return formula


SHAPES = [
    ((1, 2, 1, 197, 24, 40), torch.bfloat16, True),
    ((2, 1, 1, 130, 16, 16), torch.float16, False),
    ((1, 2, 2, 131, 33, 17), torch.float32, True),
    ((1, 1, 1, 1, 16, 16), torch.float32, False),
]


@pytest.mark.parametrize(("shape", "kind", "normalise"), SHAPES, ids=str)
def test_linear_attention_is_as_near_to_the_truth_as_the_formula(
    shape: tuple[int, int, int, int, int, int], kind: torch.dtype, normalise: bool
) -> None:
    judged(lambda q, k, v: linear_attention(q, k, v, normalise), linear(normalise), drawn(*shape, kind))


@pytest.mark.parametrize(
    ("shape", "count", "kind", "scale"),
    [
        ((1, 2, 1, 135, 16, 24), 40, torch.bfloat16, 0.25),
        ((1, 1, 1, 70, 24, 16), 56, torch.float32, -0.2),
        ((1, 1, 1, 70, 24, 16), 144, torch.bfloat16, -0.2),
        ((1, 1, 1, 130, 16, 16), 32, torch.float16, 0.5),
    ],
    ids=str,
)
def test_features_inside_the_kernel_are_as_near_to_the_truth_as_the_formula(
    shape: tuple[int, int, int, int, int, int], count: int, kind: torch.dtype, scale: float
) -> None:
    directions = torch.randn(count, shape[4])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = feature_attention(q, k, v, directions, scale)
        assert bool(torch.isfinite(found.log_normaliser).all())
        return found.out

    judged(call, features(directions, scale), drawn(*shape, kind))


def test_the_judge_sees_a_kernel_that_forgets_the_earlier_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = scans.before

    def forgetful(*given: Any, **more: Any) -> chunking.Sums:
        sums = before(*given, **more)
        return chunking.Sums(torch.zeros_like(sums.sums), torch.zeros_like(sums.totals))

    monkeypatch.setattr(scans, "before", forgetful)
    with pytest.raises(AssertionError, match=r"out: .* off, the formula"):
        judged(lambda q, k, v: linear_attention(q, k, v), linear(False), drawn(1, 1, 1, 200, 16, 16))


def test_norms_that_leave_any_type_cancel() -> None:
    # Keys of length 60 have features around e^-1800.
    q, k, v = torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16)
    k[:, :, 40:] *= 15
    directions = torch.randn(32, 16)
    found, truth = (how(q, k, v, directions, 1.0) for how in (feature_attention, feature_attention_reference))
    torch.testing.assert_close(found.out, truth.out, rtol=1e-3, atol=1e-3)
    assert bool(torch.isfinite(found.log_normaliser).all())


def test_rows_that_float32_cannot_carry_are_told() -> None:
    # One direction, far along the query and against every key: its features have no common range.
    q, k = torch.full((1, 1, 20, 16), 9.0), torch.full((1, 1, 20, 16), -9.0)
    found = feature_attention(q, k, torch.randn(1, 1, 20, 16), torch.randn(16, 16).abs() * 4, 1.0)
    assert not bool(torch.isfinite(found.log_normaliser).any())


def test_reading_on_from_a_state_equals_reading_at_once() -> None:
    q, k, v = drawn(1, 2, 1, 150, 16, 24)
    directions = torch.randn(32, 16)
    all_rows = feature_attention(q, k, v, directions)
    some = feature_attention(q[:, :, :70], k[:, :, :70], v[:, :, :70], directions)
    rest = feature_attention(q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], directions, None, some.last)
    torch.testing.assert_close(torch.cat([some.out, rest.out], 2), all_rows.out)
    torch.testing.assert_close(rest.last, all_rows.last, rtol=1e-4, atol=1e-5)


def test_no_row_hears_of_the_future() -> None:
    q, k, v = drawn(1, 1, 1, 150, 16, 16)
    directions = torch.randn(16, 16)
    calls: list[Call] = [
        lambda q, k, v: linear_attention(q, k, v, True),
        lambda q, k, v: feature_attention(q, k, v, directions).out,
    ]
    for call in calls:
        before = call(q, k, v)
        later = k.clone(), v.clone()
        later[0][:, :, 100:], later[1][:, :, 100:] = 5.0, -7.0
        after = call(q, *later)
        assert torch.equal(before[:, :, :100], after[:, :, :100])
        assert not torch.equal(before[:, :, 100:], after[:, :, 100:])


def test_strided_inputs_are_read_where_they_lie() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn(2, 2, 2, 90, 16, 16))
    assert not q.is_contiguous()
    found, truth = (how(q, k, v) for how in (linear_attention, linear_attention_reference))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
    wide = torch.randn(1, 2, 20, 32)[..., ::2]
    torch.testing.assert_close(linear_attention(wide, wide, wide), linear_attention_reference(wide, wide, wide))


def test_compiled_graphs_hold_the_kernels() -> None:
    q, k, v = drawn(1, 1, 1, 80, 16, 16)
    directions = torch.randn(16, 16)

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, True) + feature_attention(q, k, v, directions).out

    seed = torch.randn(1, 1, 80, 16)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for own, plain in zip(passes(compiled, (q, k, v), seed), passes(both, (q, k, v), seed), strict=True):
        torch.testing.assert_close(own, plain)


def test_operators_keep_their_promises_to_torch() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(1, 1, 1, 20, 16, 16))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.avow.linear_attention, (q, k, v, True), test_utils=checks)
    more = (q, k, v, torch.randn(16, 16), 0.25, None, None, None)
    torch.library.opcheck(torch.ops.avow.feature_attention, more, test_utils=checks)


def test_what_no_kernel_can_do_is_said() -> None:
    q, k, v = drawn(1, 3, 2, 8, 16, 16)
    with pytest.raises(ShapeError, match="heads of q=3 must be a multiple of the 2 key heads; repeat keys"):
        linear_attention(q, k, v)
    q, k, v = drawn(1, 2, 2, 8, 16, 16)
    with pytest.raises(DtypeError, match="must be one of the 16-bit types, or float32; convert them to one"):
        linear_attention(q.double(), k, v)
    with pytest.raises(ShapeError, match="lengths of q, k, v=7, 8, 8 must be the same number"):
        linear_attention(q[:, :, 1:], k, v)


def test_a_state_is_what_the_scan_of_the_methods_remembers() -> None:
    q, k, v = drawn(1, 1, 1, 90, 16, 16)
    directions, scale = torch.randn(24, 16), 0.25
    last = feature_attention(q, k, v, directions, scale).last
    keys = k.double() * scale**0.5
    weights = torch.exp(keys @ directions.double().mT - 0.5 * keys.square().sum(-1, keepdim=True))
    truth = weights.mT @ v.double()
    assert last.tops is not None
    torch.testing.assert_close(
        last.sums.double() * last.tops.double().exp()[..., None, None], truth, rtol=1e-4, atol=1e-4
    )
