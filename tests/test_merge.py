"""What shards of the keys promise merges into what the whole promises, in any order, and never less than the truth.

Shards here report errors that are exactly as large as the ones they make, so that a bound has nothing to hide behind.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import avow
from avow.core import Problem, compose
from avow.core.compose import Partial, merge
from avow.numerics import rounding
from avow.numerics.norms import lengths, norm_floor, row_norms, slack
from avow.numerics.softmax import softmax_average
from tests.helpers.merge_cases import (
    Case,
    attention,
    broken,
    draw,
    errors,
    fold,
    hidden,
    keyed,
    liars,
    lifted,
    norms,
    report,
    spread,
    tied,
    whole,
    wide,
    words,
)

ROWS = 10_000


def cases() -> dict[str, tuple[Case, float, float, torch.dtype]]:
    double, half, brain = torch.float64, torch.float16, torch.bfloat16
    return {
        "plain": (draw(ROWS), 1e-2, 1e-2, double),
        "rounding alone": (draw(ROWS), 0.0, 0.0, double),
        "large errors": (draw(ROWS, temper=1.0), 0.5, 2.0, double),
        "normalisers hardly known": (spread(draw(ROWS), 30, -3, 3), 1e-3, 40.0, double),
        "one shard has all": (spread(draw(ROWS), 900, -2, 2), 1e-4, 1.0, double),
        "ties": (tied(draw(ROWS)), 1e-3, 1e-3, double),
        "one key each": (draw(ROWS, keys=1, shards=6), 0.0, 1e-6, double),
        "hidden": (hidden(draw(ROWS), 0.4), 1e-2, 1e-1, double),
        "huge values": (spread(draw(ROWS), 5, 150, 299), 1e-6, 1e-3, double),
        "tiny values": (spread(draw(ROWS), 5, -320, -200), 1e-6, 1e-3, double),
        "all sizes at once": (hidden(spread(draw(ROWS), 50, -300, 299), 0.2), 1e-3, 1e-2, double),
        "huge logits": (spread(draw(ROWS), 1e17, 0, 1), 0.0, 0.0, double),
        "large logits": (lifted(draw(ROWS), 1e9), 0.0, 0.0, double),
        "half": (hidden(draw(ROWS), 0.1), 0.0, 1e-3, half),
        "brain": (hidden(draw(ROWS), 0.1), 0.0, 1e-2, brain),
        "nothing at all": (hidden(draw(ROWS), 1.0), 0.0, 0.0, double),
    }


def test_merged_certificates_hold_in_160000_hostile_rows() -> None:
    judged = 0
    for name, (case, error, stray, dtype) in cases().items():
        merged = fold(liars(case, error, stray, dtype))
        for kind in {torch.float64, dtype}:
            out, certificate = merged.answer(kind)
            assert not bool(certificate.rows.isnan().any()), name
            assert broken(out, certificate.rows, case) == 0, name
        judged += len(certificate.rows)
    assert judged >= 100_000


PER_ROW = ("out", "lse", "longest", "pairs", "unsure", "drift")


def stacked(parts: list[Partial]) -> Partial:
    means = torch.stack([part.means for part in parts], 1)  # (5, shards, rows)
    fields: dict[str, Any] = {name: torch.stack([getattr(part, name) for part in parts]) for name in PER_ROW}
    return dataclasses.replace(parts[0], means=means, **fields)


def chosen(forest: Partial, which: Tensor, every: Tensor) -> Partial:
    fields: dict[str, Any] = {name: getattr(forest, name)[which, every] for name in PER_ROW}
    return dataclasses.replace(forest, means=forest.means[:, which, every], **fields)


def grown(parts: list[Partial]) -> Partial:
    """The shards of every row merged by a tree of its own, drawn at random; all rows take a step together."""
    every = torch.arange(parts[0].lse.shape[0])
    while len(parts) > 1:
        forest, order = stacked(parts), torch.rand(len(parts), len(every)).argsort(0)
        first, second, *rest = (chosen(forest, which, every) for which in order)
        parts = [merge(first, second), *rest]
    return parts[0]


@pytest.mark.parametrize("stray", [0.0, 1e-3, 30.0])
def test_any_of_15000_trees_gives_the_same_answer_and_bound(stray: float) -> None:
    case = hidden(spread(draw(5000, shards=7, keys=2), 20, -3, 3), 0.2)
    parts = liars(case, 1e-12 if stray == 0 else 1e-3, stray)
    (one, line), (other, tree) = fold(parts).answer(), grown(parts).answer()
    unit = torch.from_numpy(whole(case).longest.astype(np.float64)).unsqueeze(-1)
    assert bool(((one - other).abs() <= 1e-13 * unit).all())
    assert bool(((line.rows - tree.rows).abs() <= 1e-9 * line.rows + 3e-12).all())
    assert broken(other, tree.rows, case) == 0
    assert not torch.equal(line.rows, tree.rows)  # the trees were not all lines


def test_merging_commutes_to_the_last_bit() -> None:
    a, b = liars(hidden(draw(1000, shards=2), 0.3), 1e-2, 1e-2)
    (one, first), (other, second) = merge(a, b).answer(), merge(b, a).answer()
    assert torch.equal(one, other)
    assert first == second


def test_what_sees_nothing_changes_nothing() -> None:
    a, b = liars(hidden(draw(1000, shards=2), 0.3), 1e-2, 1e-2)
    a = merge(a, b)
    void = Partial.nothing(a.out.shape)
    for with_it in (merge(a, void), merge(void, a), merge(merge(void, void), a)):
        assert torch.equal(with_it.out, a.out)
        assert with_it.answer()[1] == a.answer()[1]


def test_a_shard_alone_keeps_its_bound_however_little_it_knows_of_its_normaliser() -> None:
    out, said = torch.ones(3, 2), words(torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64))
    alone = Partial.of(out, torch.zeros(3), math.inf, torch.full((3,), 2.0), said)
    assert alone.answer()[1].rows == pytest.approx(said.rows)
    # Beside another its weight may be anything, so the answer may be at either end.
    assert merge(alone, alone).answer()[1].rows == pytest.approx(torch.full((3,), (2 + 2**0.5) / 2).double())


def test_a_shard_of_no_weight_may_know_its_normaliser_badly() -> None:
    said = words(torch.zeros(1, dtype=torch.float64))
    sure = Partial.of(torch.ones(1, 1), torch.zeros(1), 0.0, torch.ones(1), said)
    vague = Partial.of(-torch.ones(1, 1), torch.full((1,), -40.0), 3.0, torch.ones(1), said)
    assert merge(sure, vague).answer()[1].bound < 1e-12


def test_the_bound_is_attained() -> None:
    case = keyed((-0.01, 1.0), (0.01, -1.0))
    level = torch.zeros(1, dtype=torch.float64)
    parts = [report(attention(*case), i, torch.tensor([[1.0 - 2 * i]]), level) for i in range(2)]
    out, certificate = fold(parts).answer()
    assert 0.999 * certificate.bound < float(errors(out, case)[0]) <= certificate.bound


def test_a_merge_that_forgets_the_normalisers_errors_is_caught() -> None:
    case = draw(2000)
    merged = fold(liars(case, 1e-4, 1e-2))
    out, certificate = dataclasses.replace(merged, pairs=torch.zeros_like(merged.pairs)).answer()
    assert broken(out, merged.answer()[1].rows, case) == 0
    assert broken(out, certificate.rows, case) > 1000


def test_a_merge_that_averages_bounds_without_weights_is_caught() -> None:
    case = spread(draw(2000), 5, 0, 0)
    parts = liars(case, 1e-2, 0.0)
    out, certificate = fold(parts).answer()
    careless = torch.stack([part.answer()[1].rows for part in parts]).mean(0)
    assert broken(out, certificate.rows, case) == 0
    assert broken(out, careless, case) > 200


def test_a_merge_that_forgets_its_own_rounding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one key each, shards make no error at all: what is left is the merging.
    for case in (draw(2000, keys=1), lifted(draw(2000, keys=1), 1e9)):
        merged = fold(liars(case, 0.0, 0.0))
        out, certificate = merged.answer()
        assert broken(out, certificate.rows, case) == 0
    undrifted = dataclasses.replace(merged, drift=torch.zeros_like(merged.drift)).answer()[1]
    assert broken(out, undrifted.rows, case) > 1000
    monkeypatch.setattr(compose, "_U", 0.0)
    case = draw(2000, keys=1)
    out, certificate = fold(liars(case, 0.0, 0.0)).answer()
    assert broken(out, certificate.rows, case) > 1000


def test_a_type_that_cannot_hold_the_answer_is_part_of_the_bound() -> None:
    case = keyed((0.0, 1e6), (0.0, 3e6))
    merged = fold(liars(case, 0.0, 0.0))
    out, certificate = merged.answer(torch.float16)
    assert float(out) == 65504.0
    assert float(errors(out, case)[0]) == pytest.approx(certificate.bound, rel=1e-6)
    assert broken(out, certificate.rows, case) == 0


def logarithms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the normalisers of a shard in float64, and how far they may be off."""
    scale, u = q.shape[-1] ** -0.5, rounding.unit(torch.float64)
    lse = torch.logsumexp(scale * (q.double() @ k.double().mT), -1)
    reach = scale * q.double().norm(dim=-1) * k.double().norm(dim=-1).amax()
    return lse, 4 * (rounding.gamma(q.shape[-1] + 8, u) * reach + rounding.gamma(k.shape[-2] + 64, u) + u * lse.abs())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["exact", "sparse", "random_features"])
def test_shards_that_really_attended_merge_into_a_promise_that_holds(method: str, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 2, 96, 16).to(dtype).unbind()
    parts = []
    for some in (slice(0, 50), slice(50, 51), slice(51, 96)):
        asked = {"confidence": 0.99} if method != "exact" else {}
        out, certificate = avow.attend(0.5 * q, k[..., some, :], v[..., some, :], method=method, **asked)  # type: ignore[arg-type]
        longest = row_norms(v[..., some, :], "v", faithful=True).amax(-1, keepdim=True).expand(2, 2, 96)
        lse, off = logarithms(0.5 * q, k[..., some, :])
        parts.append(Partial.of(out, lse, off, longest, certificate, slack(16, dtype)))
    out, certificate = fold(parts).answer(dtype)
    truth = softmax_average(Problem.of(0.5 * q, k, v, scale=0.25))
    error = (out.double() - truth).norm(dim=-1) / v.double().norm(dim=-1).amax(-1, keepdim=True)
    assert out.dtype == dtype and certificate.rows.shape == (2, 2, 96)
    assert bool((error <= certificate.rows).all())
    assert certificate.method == method
    if method == "exact":
        assert certificate.bound < 4 * rounding.unit(dtype) + 1e-4


def test_lengths_of_rows_are_right_however_far_apart_their_sizes() -> None:
    x = torch.tensor([[3e299, 4e299], [3e-300, 4e-300], [0.0, 0.0], [5e-324, 0.0]], dtype=torch.float64)
    found, true = wide(lengths(x)), norms(wide(x))
    assert (found >= true).all()
    assert (wide(norm_floor(lengths(x), slack(2, torch.float64), 2)) <= true).all()
    assert (found <= true * (1 + slack(2, torch.float64)) + 2.0**-1020).all()
    assert found[2] == 0


def test_gradients_flow_through_a_merge() -> None:
    logits = torch.tensor([[0.3, -1.0, 0.3], [-math.inf, 0.2, 1.0]], dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    said, ones = words(torch.zeros(2, dtype=torch.float64)), torch.full((2,), 9.0)
    parts = [Partial.of(values[i].expand(2, 2), logits[:, i], 0.0, ones, said) for i in range(3)]
    out, _ = fold(parts).answer(torch.float32)
    goal = torch.randn(2, 2)
    got = torch.autograd.grad((out * goal).sum(), (logits, values))
    want = torch.autograd.grad(((torch.softmax(logits, -1) @ values) * goal).sum(), (logits, values))
    for mine, right in zip(got, want, strict=True):
        assert torch.allclose(mine, right, atol=1e-6)
