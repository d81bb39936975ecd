"""A seeded slice of the fuzz: one case in a hundred of `make fuzz`, and proof that it would notice."""

from __future__ import annotations

import dataclasses

import pytest

from avow.core import Promise
from avow.methods.exact import Exact
from avow.methods.latent import Latent
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from tests.fuzz import run


@pytest.mark.parametrize("seed", [11, 12])
def test_no_certificate_breaks_in_a_slice_of_the_fuzz(seed: int) -> None:
    tally = run(5_000, seed)
    assert tally.sound, tally.stories
    assert tally.rows > 20_000


@pytest.mark.parametrize("kind", [Exact, Latent, LowRank, RandomFeatures, Separable])
def test_a_broken_certificate_is_caught_by_the_same_suite(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    honest = kind.promise

    def boastful(*arguments: object) -> Promise:
        promise = honest(*arguments)
        return dataclasses.replace(promise, kind="deterministic", rows=promise.rows * 1e-3)

    monkeypatch.setattr(kind, "promise", boastful)
    tally = run(3_000, 11)
    assert not tally.sound and tally.broken > 0
    assert any(kind.name in story for story in tally.stories)
