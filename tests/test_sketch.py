"""A sketch never lies about a product: the true one is inside the interval, whatever the rows and the query."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from avow.numerics.brackets import bracketed
from avow.numerics.sketch import GROUP, Sketch, packed, sketched, unpacked
from tests.helpers.sketches import restored

every_width = pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])


def intervals(q: Tensor, sketch: Sketch, factor: float) -> tuple[Tensor, Tensor]:
    """Products with the sketched rows and how far they may be off, by the definition: ‖Aq‖·radius, in float64."""
    middle = q @ restored(sketch).double().transpose(-1, -2)
    weighted = (q.square() @ sketch.metric.double().unsqueeze(-1)).sqrt()  # (b, g, r, 1)
    # `restored` rounds to float32.
    rounded = (
        2.0**-23 * torch.linalg.vector_norm(q, dim=-1, keepdim=True) * sketch.reach.double().amax(-1)[..., None, None]
    )
    half = weighted * sketch.radius.double().flatten(2).unsqueeze(-2) + rounded
    size = sketch.size[..., None, None] * factor
    return middle * size, half * size


def outside(q: Tensor, rows: Tensor, sketch: Sketch, factor: float = 0.7) -> int:
    """How many true products lie outside their intervals."""
    middle, half = intervals(q, sketch, factor)
    kept = rows[..., : sketch.rows, :]
    true = factor * (q @ kept.transpose(-1, -2))
    # Float64 rounds the truth, too.
    own = 1e-14 * rows.shape[-1] * factor * (q.abs() @ kept.abs().transpose(-1, -2))
    return int(((true - middle).abs() > half + own).sum())


def drawn(rows: int = 200, d: int = 24, size: float = 1.0) -> tuple[Tensor, Tensor]:
    keys = torch.randn(2, 3, rows, d, dtype=torch.float64) * torch.logspace(-2, 2, d, dtype=torch.float64) * size
    return torch.randn(2, 3, 5, d, dtype=torch.float64), keys


@every_width
def test_every_product_is_inside_its_interval(bits: int) -> None:
    q, keys = drawn()
    assert outside(q, keys, sketched(keys, bits)) == 0


@every_width
@pytest.mark.parametrize("size", [1e-150, 1e-30, 1e30, 1e120])
def test_rows_may_be_huge_or_tiny(bits: int, size: float) -> None:
    q, keys = drawn(size=size)
    assert outside(q, keys, sketched(keys, bits)) == 0
    assert outside(q * 1e-100, keys, sketched(keys, bits)) == 0


@every_width
def test_equal_rows_zero_rows_and_one_giant_are_inside(bits: int) -> None:
    q, keys = drawn()
    for number, some in enumerate((keys[:, :, :1].expand_as(keys), 0 * keys, keys.clone())):
        if number == 2:
            some[..., 7, :] *= 1e6
        assert outside(q, some, sketched(some, bits)) == 0


def test_a_query_along_the_residual_reaches_the_end_of_its_interval() -> None:
    _, keys = drawn(64, 8)
    sketch = sketched(keys, 2, metric=torch.ones(2, 3, 8))
    lost = keys / sketch.size[..., None, None] - restored(sketch).double()
    middle, half = intervals(lost[:, :, :5], sketch, 1.0)
    true = lost[:, :, :5] @ keys.transpose(-1, -2)
    apart = ((true - middle).abs() / half).diagonal(dim1=-2, dim2=-1)
    # Nothing but the rounding of the radius to eight bits lies between.
    assert float(apart.min()) > 0.98 and float(apart.max()) <= 1


def test_a_radius_that_is_too_short_is_noticed() -> None:
    _, keys = drawn(64, 8)
    sketch = sketched(keys, 2, metric=torch.ones(2, 3, 8))
    lost = keys / sketch.size[..., None, None] - restored(sketch).double()
    assert outside(lost, keys, sketch) == 0
    assert outside(lost, keys, dataclasses.replace(sketch, radius=sketch.radius / 2)) > 0


def test_more_bits_say_more() -> None:
    q, keys = drawn()
    halves = [float(intervals(q, sketched(keys, bits), 1.0)[1].mean()) for bits in (2, 4, 8)]
    assert halves[0] > 3 * halves[1] > 30 * halves[2]


def test_the_metric_pays_where_one_channel_is_large_and_hardly_varies() -> None:
    keys, q = torch.randn(1, 1, 256, 32, dtype=torch.float64), torch.randn(1, 1, 50, 32, dtype=torch.float64)
    keys[..., 0] += 100
    q[..., 0] += 100
    plain, weighted = (sketched(keys, 4, metric=metric) for metric in (torch.ones(1, 1, 32), None))
    assert float(intervals(q, weighted, 1.0)[1].mean()) < 0.5 * float(intervals(q, plain, 1.0)[1].mean())


def test_rows_are_sketched_in_whole_groups_and_can_be_continued() -> None:
    q, keys = drawn(3 * GROUP + 5)
    whole = sketched(keys)
    assert whole.rows == 3 * GROUP and sketched(keys[:, :, :63]).rows == 0
    first = sketched(keys[:, :, :GROUP])
    rest = sketched(keys[:, :, GROUP:], metric=first.metric, size=first.size)
    joined = first.followed_by(rest)
    assert joined.rows == whole.rows
    assert outside(q, keys, joined) == 0
    assert torch.equal(joined.codes[:, :, :1], first.codes)


@every_width
@pytest.mark.parametrize("d", [1, 3, 8, 13])
def test_codes_survive_packing(bits: int, d: int) -> None:
    codes = torch.randint(2**bits, (4, d), dtype=torch.uint8)
    assert torch.equal(unpacked(packed(codes, bits), bits)[..., :d], codes)


def strays(q: Tensor, rows: Tensor, sketch: Sketch) -> Tensor:
    """The summed squares of a query's products with what a sketch has lost of all rows, relative to what it admits."""
    step, origin = (x.double().unsqueeze(3) for x in (sketch.scale, sketch.zero))
    kept = (origin + step * unpacked(sketch.codes, sketch.bits)[..., : rows.shape[-1]]).flatten(2, 3)
    lost = rows[..., : sketch.rows, :] / sketch.size[..., None, None] - kept
    assert sketch.spread is not None
    admitted = q.square() @ sketch.spread.double().unsqueeze(-1)  # (b, g, r, 1)
    return (q @ lost.transpose(-1, -2)).square().sum(-1, keepdim=True) / admitted


@every_width
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_no_query_strays_further_than_the_spread(bits: int, size: float) -> None:
    q, keys = drawn(size=size)
    alike = keys[:, :, :1] + 1e-3 * size * torch.randn_like(keys[..., :1])
    for some in (keys, alike, keys[:, :, :1].expand_as(keys), 0 * keys):
        assert float(strays(q, some, sketched(some, bits)).max()) <= 1


def test_the_spread_is_not_far_above_the_worst_query_and_half_of_it_is_too_little() -> None:
    keys = torch.randn(1, 1, 4096, 16, dtype=torch.float64)
    sketch = sketched(keys, 4)
    step, origin = (x.double().unsqueeze(3) for x in (sketch.scale, sketch.zero))
    kept = (origin + step * unpacked(sketch.codes, 4)).flatten(2, 3)
    lost = keys / sketch.size[..., None, None] - kept
    worst = torch.linalg.eigh(lost.transpose(-1, -2) @ lost).eigenvectors.transpose(-1, -2)
    found = strays(worst, keys, sketch)
    assert 0.7 < float(found.max()) <= 1
    assert sketch.spread is not None
    assert float(strays(worst, keys, dataclasses.replace(sketch, spread=sketch.spread / 2)).max()) > 1


def test_spreads_of_parts_add_up() -> None:
    q, keys = drawn(4 * GROUP)
    first = sketched(keys[:, :, :GROUP])
    joined = first.followed_by(sketched(keys[:, :, GROUP:], metric=first.metric, size=first.size))
    assert float(strays(q, keys, joined).max()) <= 1
    assert joined.spread is not None and first.spread is not None and bool((joined.spread > first.spread).all())


def test_zeros_are_rounded_down_so_that_codes_reach_every_number() -> None:
    _, keys = drawn()
    sketch = sketched(keys, 4)
    lowest = (keys[:, :, : sketch.rows] / sketch.size[..., None, None]).unflatten(2, (-1, GROUP)).amin(3)
    assert sketch.zero.dtype == torch.bfloat16
    assert bool((sketch.zero.double() <= lowest * (1 + 1e-7 * lowest.sign().neg())).all())


def test_four_bits_take_a_seventh_of_a_half_precision_cache() -> None:
    sketch = sketched(torch.randn(1, 2, 1024, 128))
    assert sketch.bytes_per_row < (2 + 2) * 128 / 6.8
    assert sketch.codes.shape[-1] == 64


@every_width
@pytest.mark.parametrize("size", [1e-30, 1.0, 30.0])
def test_every_exponential_is_between_its_ends(bits: int, size: float) -> None:
    q, keys = drawn(size=size)
    sketch = sketched(keys, bits)
    low, high, log_high, origin = bracketed(q, sketch, 0.1)
    logits = 0.1 * q @ keys[..., : sketch.rows, :].transpose(-1, -2) - origin
    assert bool((low.double() <= logits.exp() * (1 + 1e-12)).all())
    assert bool((logits <= log_high.double() + 1e-12).all())
    assert bool((logits.exp() <= high.double() * (1 + 1e-12)).all())
    assert bool((low.isfinite() & ~high.isnan()).all())
    # Ends of a sketch that claims to lose nothing do not hold.
    boast = dataclasses.replace(sketch, radius=0 * sketch.radius)
    if bits < 8 and size > 1e-20:
        boasted = bracketed(q, boast, 0.1)
        shifted = 0.1 * q @ keys[..., : sketch.rows, :].transpose(-1, -2) - boasted.origin
        assert bool((shifted > boasted.log_high.double() + 1e-9).any())
