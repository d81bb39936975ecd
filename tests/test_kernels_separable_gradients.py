"""Gradients of separable attention by kernels: as near to the truth as the plain formula, however keys are placed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from avow.bench.linear_checks import repeat_heads
from avow.kernels.interpreted import interpret

interpret()

import triton.language as tl

from avow.kernels import separable_attention as launches
from avow.kernels import separable_kernels
from avow.kernels.chunking import Sums, before_parts
from avow.kernels.separable_attention import separable_attention
from avow.kernels.separable_kernels import KEYS
from tests.test_kernels_linear import Call, judged, passes, short_parts
from tests.test_kernels_separable import drawn

pytestmark = pytest.mark.kernels

__all__ = ["short_parts"]

Shape = tuple[int, int, int, int, int, int]


def definition(causal: bool, temperature: float = 1.0) -> Call:
    """Every row's share of every key and feature."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        log = (k / temperature).unsqueeze(2)  # (b, h, 1, s, d)
        if causal:
            unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
            log = log.masked_fill(unseen[:, :, None], -math.inf)
        columns = torch.softmax(log, 3)  # (b, h, n, s, d)
        rows = torch.softmax(q / temperature, -1).unsqueeze(3)  # (b, h, n, 1, d)
        return (columns * rows).sum(-1) @ v

    return call


def kernel(causal: bool, temperature: float = 1.0) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = separable_attention(q, k, v, causal, temperature)
        assert not found.lost
        return found.out

    return call


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "kind", "temperature"),
    [
        ((1, 2, 1, 19, 72, 130), torch.bfloat16, 1.0),
        ((1, 1, 1, 35, 72, 40), torch.float16, 0.5),
        ((1, 1, 1, 35, 33, 50), torch.float32, 2.0),
        ((2, 2, 2, 67, 16, 24), torch.bfloat16, 0.25),
    ],
    ids=str,
)
def test_gradients_of_any_width_are_as_near_to_the_truth_as_the_formula(
    shape: Shape, kind: torch.dtype, temperature: float, causal: bool
) -> None:
    q, k, v = drawn(*shape, kind)
    judged(kernel(causal, temperature), definition(causal, temperature), (q, k, v))


def test_widths_are_cut_where_a_program_does_not_hold_them() -> None:
    blocks = launches._blocks(72, 130, torch.bfloat16, True)
    assert [(x.features, x.columns, x.finds == KEYS) for x in blocks] == [(32, 256, True), (128, 64, False)]
    assert [block.features for block in launches._blocks(33, 50, torch.float32, True)] == [32, 64]
    assert len(launches._blocks(64, 64, torch.bfloat16, True)) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["rising", "falling", "anyhow"])
def test_steep_keys_have_the_gradients_of_the_formula(kind: torch.dtype, way: str) -> None:
    # From e^-60 to e^60: no two ends of a sequence fit into one float32.
    q, k, v = drawn(1, 1, 1, 160, 16, 16)
    k = k + torch.linspace(-60, 60, 160)[:, None]
    k = k.flip(2) if way == "falling" else k[:, :, torch.randperm(160)] if way == "anyhow" else k
    causal = way != "anyhow"
    judged(kernel(causal), definition(causal), (q.to(kind), k.to(kind), v.to(kind)))


@pytest.mark.parametrize("causal", [True, False])
def test_a_key_alone_gets_no_gradient(causal: bool) -> None:
    q, k, v = drawn(2, 2, 1, 1, 16, 16)
    seed = torch.randn(2, 2, 1, 16)
    _, dq, dk, dv = passes(kernel(causal), (q, k, v), seed)
    assert float(torch.stack([dq.abs().amax(), dk.abs().amax()]).amax()) < 1e-6
    torch.testing.assert_close(dv, seed.sum(1, keepdim=True))


@pytest.mark.parametrize("causal", [True, False])
def test_sums_that_leave_float32_are_taken_again(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 1, 1, 230, 16, 40, torch.bfloat16)
    # Larger than what is read first, in some features alone: as far as float32 goes, and times these values further.
    k[:, :, 0, 3:9] += 80
    k[:, :, 190, 7:] -= 80
    v = v * 1e8
    judged(kernel(causal), definition(causal), (q, k, v))
    monkeypatch.setattr(separable_kernels, "_LARGE", tl.constexpr(math.inf))
    with pytest.raises(AssertionError, match=r"out: (inf|nan) off, the formula"):
        judged(kernel(causal), definition(causal), (q, k, v))


def test_fewer_rows_than_keys_and_expanded_gradients_are_read_where_they_lie() -> None:
    q, k, v = drawn(1, 2, 1, 100, 24, 16)
    leaves = [x.requires_grad_() for x in (q[:, :, :33], k.transpose(1, 2).contiguous().transpose(1, 2), v)]
    found, truth = (
        torch.autograd.grad(how(*leaves).sum(2).square().sum(), leaves) for how in (kernel(False), definition(False))
    )
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


def test_the_judge_sees_gradients_that_forget_later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*given: Any, **options: Any) -> Sums:
        sums = before_parts(*given, **options)
        if not options.get("reverse"):
            return sums
        return Sums(torch.zeros_like(sums.sums), torch.zeros_like(sums.totals), sums.tops)

    monkeypatch.setattr(launches, "before_parts", forgetful)
    q, k, v = drawn(1, 1, 1, 140, 16, 16)
    with pytest.raises(AssertionError, match=r"dk: .* off, the formula"):
        judged(kernel(True), definition(True), (q, k, v))


@pytest.mark.parametrize("causal", [True, False])
def test_operators_keep_their_promises_to_torch(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in drawn(1, 2, 1, 20, 16, 24))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = (q, k, v, causal, 0.5)
    torch.library.opcheck(torch.ops.avow.separable_attention, more, test_utils=checks)
    out, _, *sums = torch.ops.avow.separable_attention(*more)
    given = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), [out.detach(), *sums], causal, 0.5)
    torch.library.opcheck(
        torch.ops.avow.separable_attention_backward, given, test_utils=("test_schema", "test_faketensor")
    )


def test_compiled_graphs_hold_the_kernels() -> None:
    q, k, v = drawn(1, 2, 1, 40, 16, 16)

    def all_kinds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return separable_attention(q, k, v, True).out + separable_attention(q, k, v, False).out

    seed = torch.randn(1, 2, 40, 16)
    compiled = torch.compile(all_kinds, fullgraph=True, backend="aot_eager")
    for own, plain in zip(passes(compiled, (q, k, v), seed), passes(all_kinds, (q, k, v), seed), strict=True):
        torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("causal", [True, False])
def test_checkpoints_compute_the_same_again(causal: bool) -> None:
    (q, k, v), seed = drawn(1, 1, 1, 35, 16, 16), torch.randn(1, 1, 35, 16)

    def saving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = checkpoint(kernel(causal), q, k, v, use_reentrant=False)
        return found

    for own, plain in zip(passes(saving, (q, k, v), seed), passes(kernel(causal), (q, k, v), seed), strict=True):
        assert torch.equal(own, plain)
