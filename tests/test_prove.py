"""A slice of `python -m tests.prove`, and proof that it would notice."""

from __future__ import annotations

import pytest

from tests.prove import DRAWS, WEAKENED, prove


@pytest.mark.parametrize("kind", DRAWS)
def test_constructions_keep_their_promises(kind: str) -> None:
    tally = prove(kind, 25, seed=3)
    assert tally.sound and tally.proved == 25, str(tally)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_broken_construction_is_counted(kind: str) -> None:
    broken = {kind: lambda generator: WEAKENED[kind](DRAWS[kind](generator))}
    assert prove(kind, 1, seed=4, draws=broken).broken == 1
