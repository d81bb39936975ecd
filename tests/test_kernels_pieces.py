"""What scans are made of: sums of parts in pieces, wide keys, weighted gradients, shares that are added."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from avow.kernels.interpreted import interpret

interpret()

from avow.kernels import chunking, feature_attention
from avow.kernels import linear_attention as scans
from avow.kernels.linear_attention import linear_attention
from tests.test_kernels_linear import drawn, features, judged, linear

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device that a few long parts fill."""
    monkeypatch.setattr(chunking, "processors", lambda device: 1)
    monkeypatch.setattr(chunking, "_WHOLE", 64)
    yield


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many pieces of every part, of which some may be empty."""
    monkeypatch.setattr(chunking, "pieces_of", lambda cut, programs, resident: 3)
    return 3


def test_sums_in_pieces_are_as_near_to_the_truth_as_the_formula(many: int) -> None:
    q, k, v = drawn(1, 1, 1, 333, 24, 16, torch.bfloat16)
    assert scans.cut(q, 16, True).parts > 1
    judged(lambda q, k, v: linear_attention(q, k, v, True), linear(True), (q, k, v))


def test_features_in_pieces_are_as_near_to_the_truth_as_the_formula(many: int) -> None:
    directions, inputs = torch.randn(40, 16), drawn(1, 1, 1, 333, 16, 24, torch.bfloat16)
    judged(
        lambda q, k, v: feature_attention.feature_attention(q, k, v, directions).out, features(directions, 0.25), inputs
    )


def test_a_scan_that_forgets_pieces_is_seen(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before_parts = chunking.before_parts

    def forgetful(added: chunking.Sums, *others: Any, **options: Any) -> chunking.Sums:
        added.sums[:, 1::many] = 0
        return before_parts(added, *others, **options)

    monkeypatch.setattr(chunking, "before_parts", forgetful)
    with pytest.raises(AssertionError, match=r"out: .* off, the formula"):
        judged(lambda q, k, v: linear_attention(q, k, v), linear(False), drawn(1, 1, 1, 333, 16, 16))


@pytest.mark.parametrize(
    ("parts", "programs", "resident"), [(4, 64, 3), (4, 16, 2), (16, 16, 2), (2, 1, 1), (7, 300, 2)]
)
def test_pieces_leave_little_of_a_device_idle(parts: int, programs: int, resident: int) -> None:
    cut = chunking.Cut(parts, 1024, 132)

    def idle(pieces: int) -> float:
        busy = (parts - 1) * programs * pieces / (132 * resident)
        return math.ceil(busy) / busy

    chosen = chunking.pieces_of(cut, programs, resident)
    assert 1 <= chosen <= chunking.MOST_PIECES
    assert all(idle(chosen) <= 1.05 * idle(other) for other in range(1, chunking.MOST_PIECES + 1))
    assert all(idle(fewer) > idle(chosen) for fewer in range(1, chosen))
    # A part alone has nothing before it.
    assert chunking.pieces_of(chunking.Cut(1, 1024, 132), programs, resident) == 1


def test_a_key_is_counted_on_all_its_way() -> None:
    q = torch.empty(1, 1, 600, 16, dtype=torch.bfloat16)
    parts = feature_attention._parts(q, 64, 16)
    # Through the sums of its part in chunks of 64, the parts, and the rows of another part.
    assert parts.parts > 1
    assert feature_attention.steps(q, 64, 16) >= parts.length // 64 + parts.parts + 1


@pytest.mark.parametrize("normalise", [True, False])
def test_wide_keys_are_as_near_to_the_truth_as_the_formula(normalise: bool) -> None:
    inputs = drawn(1, 2, 1, 139, 128, 128, torch.bfloat16)
    judged(lambda q, k, v: linear_attention(q, k, v, normalise), linear(normalise), inputs)


def test_layouts_leave_no_column_out() -> None:
    for m, e, size, plain in ((128, 128, 2, True), (128, 128, 2, False), (100, 24, 2, True), (24, 100, 4, True)):
        for chosen in (scans.config(m, e, size, plain), scans.config_of_sums(m, e, size)):
            assert chunking.divided(e, chosen.columns) * chosen.columns >= e
            assert chosen.columns <= chunking.padded(e)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_gradients_are_weighted_by_normalisers(kind: torch.dtype) -> None:
    gradient, out = torch.randn(2, 3, 71, 48).to(kind)[..., :24], torch.randn(2, 3, 71, 24).to(kind)
    norm = torch.rand(2, 3, 71) + 0.1
    norm[0, 0, 5] = 0  # a row that saw nothing was divided by one
    found = scans.slopes(gradient, out, norm)
    weight = torch.where(norm == 0, 1.0, 1 / norm.double())
    slope = -(gradient.double() * out.double()).sum(-1)
    slope[0, 0, 5] = 0
    for ours, truth in (
        (found.weight, weight),
        (found.slope, slope),
        (found.weighted_slope, weight * slope),
        (found.gradient, gradient.double() * weight[..., None]),
    ):
        plain = truth.to(ours.dtype).double()
        assert float((ours.double() - truth).abs().max()) <= 2 * float((plain - truth).abs().max()) + 1e-5
    torch.testing.assert_close(scans.slopes(gradient, out).slope[1].double(), slope[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 1, 2, 71, 24), (4, 1, 1, 300, 64), (1, 1, 1, 1, 1)], ids=str)
def test_shares_add_up_and_are_rounded_once(shape: tuple[int, ...]) -> None:
    shares = torch.randn(shape).bfloat16()
    found = feature_attention.added(shares, torch.bfloat16)
    assert found.shape == shape[1:]
    assert torch.equal(found, shares.float().sum(0).bfloat16())
