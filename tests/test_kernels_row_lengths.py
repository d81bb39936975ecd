"""The lengths of all rows of q, k, v and an answer, which one launch measures: bounds on every row, in every layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.kernels import row_lengths as kernel
from avow.numerics import norms
from avow.numerics.norms import norm_floor, slack, widened

pytestmark = pytest.mark.kernels

NARROW = [torch.bfloat16, torch.float16, torch.float32]


def bounded(found: Tensor, *tensors: Tensor) -> bool:
    """Whether lengths are at least the true ones, and no longer than their slack allows."""
    true = torch.cat([widened(x).square().sum(-1).sqrt().flatten() for x in tensors])
    margin, width = 1e-15, max(x.shape[-1] for x in tensors)
    low = norm_floor(found, slack(width, torch.float64), width)
    return bool(((found >= true * (1 - margin)) & (low <= true * (1 + margin))).all())


def drawn(dtype: torch.dtype, size: float = 1.0, d: int = 24, e: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(d)
    shapes = (2, 4, 35, d), (2, 2, 67, d), (2, 2, 67, e), (2, 4, 35, e)
    q, k, v, out = ((size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes)
    return q, k, v, out


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [1.0, 1e-7, 1e4, 1e-30, 1e30, 3e-39])
def test_lengths_bound_every_row_however_large_or_small(dtype: torch.dtype, size: float) -> None:
    tensors = drawn(dtype, min(size, torch.finfo(dtype).max / 8))
    found = kernel.row_lengths(*tensors)
    assert bounded(found, *tensors) and bounded(norms.row_lengths(*tensors), *tensors)
    assert not bounded(found * (1 - 1e-9), *tensors) or not bool(found.any())
    assert not bounded(found * (1 + 1e-9), *tensors) or not bool(found.any())


def test_rows_lie_anywhere() -> None:
    wide = torch.randn(2, 35, 4, 48)
    q = wide.transpose(1, 2)[..., ::2]  # neither rows nor numbers beside each other
    k = torch.randn(2, 1, 1, 24).expand(2, 2, 67, 24)
    v = torch.randn(40, 67, 2, 2).permute(3, 2, 1, 0)
    for tensors in ((q, k, v), (q, k, v, torch.randn(2, 4, 35, 40))):
        assert bounded(kernel.row_lengths(*tensors), *tensors)
        assert len(kernel.row_lengths(*tensors)) == sum(x.numel() // x.shape[-1] for x in tensors)


def test_single_rows_and_many_heads_are_measured_in_the_usual_layout() -> None:
    """Counts of one row, and of more rows than a program measures, without an end that fits."""
    for n, s in ((1, 1), (1, 300), (131, 1)):
        shapes = (1, 3, n, 24), (1, 1, s, 24), (1, 1, s, 40), (1, 3, n, 40)
        tensors = [torch.randn(shape) for shape in shapes]
        for some in (tensors[:3], tensors):
            assert bounded(kernel.row_lengths(*some), *some)
            assert len(kernel.row_lengths(*some)) == sum(x.numel() // x.shape[-1] for x in some)


def test_axes_may_be_empty() -> None:
    q, k, v, _ = drawn(torch.float32)
    assert len(kernel.row_lengths(q[:, :, :0], k[:, :, :0], v[:, :, :0])) == 0
    assert bounded(kernel.row_lengths(q, k[:, :, :0], v[:, :, :0]), q)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
def test_a_length_is_not_finite_exactly_if_a_number_of_its_row_is_not(which: int, bad: float) -> None:
    tensors = drawn(torch.bfloat16)
    tensors[which][1, 1, 5, 3] = bad
    finite = torch.cat([torch.isfinite(x).all(-1).flatten() for x in tensors])
    assert int((~finite).sum()) == 1
    for found in (kernel.row_lengths(*tensors), norms.row_lengths(*tensors)):
        assert torch.equal(torch.isfinite(found), finite)


def test_squares_in_float32_would_be_seen() -> None:
    """What the kernel would say if it did not widen: nothing for small rows, and infinity for large ones."""
    for size in (1e-30, 1e30):
        tensors = drawn(torch.float32, size)
        narrow = torch.cat([x.square().sum(-1).sqrt().flatten() for x in tensors]).double()
        assert not bounded(narrow, *tensors)


def test_it_says_what_it_does_not_take() -> None:
    q, _, v, _ = drawn(torch.float32)
    assert kernel.takes(q, v) and not kernel.takes(q.double(), v.double())
    wide = torch.randn(1, 1, 1, kernel.WIDEST + 1)
    assert not kernel.takes(wide, wide)
