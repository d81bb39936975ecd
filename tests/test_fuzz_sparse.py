"""A slice of the attack on sparse attention, and proof that it would notice."""

from __future__ import annotations

import dataclasses

import pytest

from avow.core import Promise
from avow.methods.sparse import Sparse
from tests import fuzz_sparse
from tests.fuzz import CONFIDENCE, Tally
from tests.fuzz_sparse import Found, Interval
from tests.helpers.sparse_cases import FAMILIES, draw_sparse_case


@pytest.mark.parametrize("chance", [0.0, 1 - CONFIDENCE])
def test_no_bound_breaks_in_a_slice(chance: float) -> None:
    found = fuzz_sparse.run(2_500, chance, 8, heads=16)
    assert found.sound, found.tally.stories
    assert found.tally.rows >= 2_500 and (found.tally.chancy_rows > 0) == (chance > 0)
    assert (found.sampled > 300) == (chance > 0)


def test_a_promise_that_takes_a_tenth_of_the_damage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Sparse.promise

    def boastful(*arguments: object) -> Promise:
        promise = honest(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(promise, rows=promise.rows * 0.1)

    monkeypatch.setattr(Sparse, "promise", boastful)
    found = fuzz_sparse.run(2_500, 0.0, 7, heads=16)
    assert not found.sound and found.tally.broken > 0 and found.tally.stories


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_drops_and_samples_so_that_there_is_something_to_judge(family: str) -> None:
    for chance in (0.0, 1 - CONFIDENCE):
        shares = []
        for seed in range(8):
            case = draw_sparse_case(family, seed, 16, chance)
            read = case.method.compute(case.problem).trace.read
            shares.append(float(read.min()) / case.problem.k.shape[-2])
        assert min(shares) < 0.9


def test_misses_are_too_many_only_beyond_their_chance() -> None:
    few, many = (
        Found(Tally(rows=10_000, chancy_rows=10_000, chancy_misses=misses), sampled=10_000) for misses in (12, 60)
    )
    assert few.sound and not many.sound
    assert not Found(Tally(rows=10, broken=1)).sound
    assert "0 broken: a rate between 0 and 0.0053 (99%)" in str(Found(Tally(rows=1_000)))


def test_the_interval_is_that_of_clopper_and_pearson() -> None:
    # With no miss in n rows its upper end p solves (1 - p)^n = 0.005.
    low, high = Interval.of(0, 1000)
    assert low == 0 and (1 - high) ** 1000 == pytest.approx(0.005)
    assert Interval.of(1000, 1000).high == 1
    assert Interval.of(0, 0) == (0, 1)
