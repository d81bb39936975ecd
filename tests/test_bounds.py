"""Bounds on what others leave out or round: kept by hostile rows, equal to the identity, refused if meaningless."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow import bounds
from avow.bounds import Blocks, Quantised, SkipThreshold, Window
from avow.errors import DtypeError, InputError, NonFiniteError, ParameterError, ShapeError
from tests import fuzz_bounds


def drawn(
    n: int = 40, d: int = 16, heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, heads, n, d, dtype=torch.float64).unbind()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_hostile_rows_keep_their_bounds() -> None:
    counts, stories = fuzz_bounds.run(600, seed=11)
    assert stories == []
    assert counts["selection"] >= 600 and counts["quantised"] >= 600


@pytest.mark.parametrize("size", [2.0**-990, 2.0**-1005, 2.0**-1015])
def test_faint_values_have_bounds_no_smaller_than_usual_ones(size: float) -> None:
    """A power of two changes no error relative to the longest value; only what underflows is added."""
    q, k, v = drawn(dtype=torch.float64)
    kept = torch.rand(40, 40) < 0.5
    usual, faint = (avow.bound_selection(q, k, x, read=kept) for x in (v, size * v))
    assert bool((faint.certificate.rows >= 0.999 * usual.certificate.rows).all())
    assert bool((faint.certificate.relative_rows >= 0.999 * usual.certificate.relative_rows).all())
    coarse = v.to(torch.bfloat16).double()
    usual, faint = (avow.bound_quantised(q, k, x * v, k, x * coarse) for x in (1.0, size))  # type: ignore[assignment]
    assert bool((faint.certificate.rows >= 0.999 * usual.certificate.rows).all()) and usual.certificate.bound > 1e-4


@pytest.mark.parametrize("field", ["loss", "mass"])
def test_a_bound_of_selections_that_is_a_tenth_too_small_is_caught(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    own = avow.bound_selection

    def smaller(*arguments: Any, **options: Any) -> bounds.SelectionBound:
        bound = own(*arguments, **options)
        return dataclasses.replace(bound, **{field: 0.9 * getattr(bound, field)})

    monkeypatch.setattr(avow, "bound_selection", smaller, raising=False)
    _, stories = fuzz_bounds.run(300, seed=11)
    assert any(story.startswith("mass above" if field == "mass" else "loss") for story in stories)


@pytest.mark.parametrize("field", ["loss", "keys", "values"])
def test_a_bound_of_caches_that_is_a_tenth_too_small_is_caught(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    own = avow.bound_quantised

    def smaller(*arguments: Any, **options: Any) -> bounds.QuantisedBound:
        bound = own(*arguments, **options)
        return dataclasses.replace(bound, **{field: 0.9 * getattr(bound, field)})

    monkeypatch.setattr(avow, "bound_quantised", smaller, raising=False)
    _, stories = fuzz_bounds.run(300, seed=11)
    assert any(story.startswith(field) for story in stories)


def test_the_loss_is_the_mass_times_the_distance_of_two_means() -> None:
    q, k, v = (x[:, :1] for x in drawn(dtype=torch.float64))
    weights = torch.softmax(q @ k.mT / 4, -1)
    read = torch.arange(40) % 3 == 0
    bound = avow.bound_selection(q, k, v, read=read)
    mass = weights[..., ~read].sum(-1)
    means = [(weights[..., x] @ v[..., x, :]) / weights[..., x].sum(-1, keepdim=True) for x in (read, ~read)]
    wanted = mass * (means[0] - means[1]).norm(dim=-1) / v.norm(dim=-1).max()
    assert torch.allclose(bound.loss, wanted, rtol=1e-6) and bool((bound.loss >= wanted * (1 - 1e-12)).all())
    assert torch.allclose(bound.mass, mass, rtol=1e-9)


def test_keys_that_weigh_nothing_lose_nothing_and_those_that_are_alike_neither() -> None:
    q, k, v = drawn()
    assert float(avow.bound_selection(q, k, v, read=torch.ones(40, dtype=torch.bool)).loss.max()) == 0
    same = v[:, :, :1].expand_as(v)
    bound = avow.bound_selection(q, k, same, read=Window(4))
    assert float(bound.mass.min()) > 0.1 and float(bound.loss.max()) < 1e-11  # of float64 itself


def test_a_row_that_reads_nothing_loses_its_whole_answer() -> None:
    q, k, v = drawn(dtype=torch.float64)
    bound = avow.bound_selection(q, k, v, read=torch.full((40, 3), -1))
    whole = (torch.softmax(q @ k.mT / 4, -1) @ v).norm(dim=-1) / v.norm(dim=-1).amax(-1, keepdim=True)
    assert torch.allclose(bound.loss, whole, rtol=1e-6)
    assert bool((bound.mass == 1).all()) and bool((bound.kept == 0).all())
    assert "a row that reads nothing is answered with zeros" in bound.certificate.assumptions


def test_ways_to_say_the_same_selection_agree() -> None:
    q, k, v = drawn()
    mask = (torch.arange(40) // 8 % 2 == 0).expand(40, 40)
    listed = torch.nn.functional.pad(torch.nonzero(mask[0]).flatten(), (0, 5), value=-1)
    ways = (mask, listed[None], Blocks(torch.tensor([[True, False, True, False, True]]), 40, 8), mask[0])
    losses = [avow.bound_selection(q, k, v, read=way, causal=True).loss for way in ways]
    assert all(torch.equal(losses[0], other) for other in losses[1:])


def test_a_window_counts_the_keys_that_a_row_sees() -> None:
    q, k, v = drawn()
    hidden = torch.arange(40) % 2 == 0
    bound = avow.bound_selection(q, k, v, read=Window(3, sinks=2), mask=hidden)
    assert torch.allclose(bound.kept, torch.full_like(bound.kept, 5 / 20))


def test_tiles_of_a_block_are_skipped_together() -> None:
    q, k, v = drawn(n=64)
    alone, together = (avow.bound_selection(q, k, v, read=SkipThreshold(20, 8, rows)).kept for rows in (1, 64))
    assumes = avow.bound_selection(q, k, v, read=SkipThreshold(20, 8)).certificate.assumptions
    assert "the kernel skips the tiles that float64 finds below the threshold" in assumes
    assert bool((together >= alone).all()) and float(together.mean()) > float(alone.mean())
    assert bool((avow.bound_selection(q, k, v, read=SkipThreshold(0.0)).kept == 1).all())


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(n=50)
    whole = [avow.bound_selection(q, k, v, read=read, causal=True) for read in (Window(5), SkipThreshold(9, 8, 4))]
    monkeypatch.setattr(bounds, "_PAIRS", 300)
    parts = [avow.bound_selection(q, k, v, read=read, causal=True) for read in (Window(5), SkipThreshold(9, 8, 4))]
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one.loss, other.loss, rtol=1e-9, atol=1e-14) and torch.equal(one.kept, other.kept)


def test_norms_alone_bound_no_less_than_the_originals() -> None:
    q, k, v = drawn()
    codes = Quantised(
        (k / k.abs().amax(-1, keepdim=True) * 127).round().to(torch.int8), k.abs().amax(-1, keepdim=True) / 127
    )
    known = avow.bound_quantised(q, k, v, codes, v, causal=True)
    lost = (codes.values() - k).norm(dim=-1)
    norms = avow.bound_quantised(
        q, None, None, codes, v, key_residuals=lost, value_residuals=torch.zeros(40), causal=True
    )
    assert bool((norms.loss >= known.loss * (1 - 1e-9)).all())
    assert float(known.values.max()) < 1e-9 < float(known.keys.max())


@pytest.mark.parametrize("signed", [True, False])
def test_two_numbers_of_a_byte_are_those_that_were_packed(signed: bool) -> None:
    numbers = torch.arange(16).reshape(1, 1, 2, 8) - (8 if signed else 0)
    low = numbers & 15
    packed = (low[..., ::2] | low[..., 1::2] << 4).to(torch.uint8)
    assert torch.equal(Quantised(packed, torch.tensor(0.5), bits=4, signed=signed).values(), numbers * 0.5)


def test_scales_of_groups_are_those_of_their_neighbours() -> None:
    codes = torch.ones(1, 1, 4, 6, dtype=torch.int8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    wanted = torch.tensor([[1.0, 1, 1, 2, 2, 2]] * 2 + [[3.0, 3, 3, 4, 4, 4]] * 2)
    assert torch.equal(Quantised(codes, scale).values()[0, 0], wanted.double())


def test_a_kernel_that_may_overflow_is_promised_nothing() -> None:
    q, k, v = (x.to(torch.float64) * 1e120 for x in drawn())
    certificate = avow.bound_selection(q, k, v, read=Window(4)).certificate
    assert certificate.kind == "deterministic"
    small = (x * 1e17 for x in drawn())
    certificate = avow.bound_selection(*small, read=Window(4)).certificate
    assert certificate.kind == "none" and certificate.bound == math.inf and "may overflow" in certificate.reason


def test_nothing_to_attend_to_loses_nothing() -> None:
    q, k, v = drawn()
    for bound in (
        avow.bound_selection(q, k[:, :, :0], v[:, :, :0], read=Window(4)),
        avow.bound_quantised(q, k[:, :, :0], v[:, :, :0], k[:, :, :0], v[:, :, :0]),
    ):
        assert bound.certificate.bound == 0 and bool((bound.loss == 0).all())


@pytest.mark.parametrize(
    ("read", "kind", "words"),
    [
        (torch.tensor([[0, 40]]), ParameterError, "must lie between -1 and 39"),
        (torch.tensor([[-2, 4]]), ParameterError, "must lie between -1 and 39"),
        (torch.tensor([[3, 5, 3]]), ParameterError, "names a key twice"),
        (torch.ones(40), DtypeError, "must hold booleans, or whole numbers"),
        (torch.ones(7, dtype=torch.bool), ShapeError, "must broadcast to"),
        (Blocks(torch.ones(3, 3, dtype=torch.bool), 8, 8), ShapeError, "must broadcast to"),
        ("window", ParameterError, "is no selection of keys"),
    ],
)
def test_a_selection_that_means_nothing_is_refused(read: Any, kind: type[InputError], words: str) -> None:
    with pytest.raises(kind, match=words):
        avow.bound_selection(*drawn(), read=read)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window(0), "must be a whole number of at least 1"),
        (lambda: Window(4, sinks=-1), "must be a whole number of at least 0"),
        (lambda: SkipThreshold(-1.0), "must be a number of at least 0"),
        (lambda: SkipThreshold(math.nan), "must be a number of at least 0"),
        (lambda: Blocks(torch.ones(2, 2), 8, 8), "must be booleans"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_numbers_that_are_not_finite_are_refused() -> None:
    q, k, v = drawn()
    bad = k.clone()
    bad[0, 0, 3, 2] = math.nan
    with pytest.raises(NonFiniteError, match=r"k\[0, 0, 3, 2\]"):
        avow.bound_selection(q, bad, v, read=Window(4))
    with pytest.raises(NonFiniteError, match="k_hat"):
        avow.bound_quantised(q, k, v, bad, v)
    with pytest.raises(NonFiniteError, match="key_residuals"):
        avow.bound_quantised(q, None, None, k, v, key_residuals=torch.tensor(math.inf), value_residuals=torch.zeros(40))


def test_half_of_what_is_needed_is_refused() -> None:
    q, k, v = drawn()
    with pytest.raises(ParameterError, match="the other way round"):
        avow.bound_quantised(q, k, None, k, v)
    with pytest.raises(ParameterError, match="the other way round"):
        avow.bound_quantised(q, None, None, k, v, key_residuals=torch.zeros(40))
    with pytest.raises(DtypeError, match="pass codes with their scales"):
        avow.bound_quantised(q, k, v, k.to(torch.int8), v)
    with pytest.raises(ShapeError, match="must be that of k_hat"):
        avow.bound_quantised(q, k[:, :1], v, k, v)


def test_the_reference_of_the_fuzz_agrees_with_a_plain_softmax() -> None:
    head = fuzz_bounds.draw(random.Random(5))
    truth = fuzz_bounds.Truth.of(head, fuzz_bounds.numbers(head.k), fuzz_bounds.numbers(head.v))
    _, average = truth.mean(head.seen)
    plain = fuzz_bounds.answered(head._replace(q=head.q.double()), head.k.double(), head.v.double())
    unit = fuzz_bounds.longest(truth.values, head.seen)
    assert (fuzz_bounds.length(average - fuzz_bounds.numbers(plain)) <= 1e-6 * unit).all()
