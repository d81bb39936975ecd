"""How the sinusoidal encodings of two positions could come too near to each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most
from avow.theory.claims.catalogue.positions import LAST, TYPES, Encoding, frequencies
from avow.theory.claims.interval_checks import Numbers, stored, whole
from avow.theory.claims.random_search import Excess, Hunt


def _later(position: int, turns: int, wave: arb) -> int:
    """The position that so many turns of the first wave lead to, or all but: the others are far apart anyway."""
    return position + round(float(2 * arb.pi() * turns / wave))


def _stored(encoding: Encoding) -> Excess:
    """Of width 2 in bfloat16, the coarsest that the statement speaks of."""

    def pair(position: int) -> list[arb]:
        angle = position * encoding.ball()
        return [stored(part, torch.bfloat16) for part in (angle.sin, angle.cos)]

    def excess(case: Numbers) -> arb:
        first, turns = map(whole, case)
        pairs = zip(pair(first), pair(_later(first, turns, encoding.ball())), strict=True)
        return -most([abs(a - b) for a, b in pairs])

    return excess


def _real(encoding: Encoding) -> Excess:
    nearest = arb("6.028e-5")
    # Stored, no entry of an encoding of width 64 moves by more than eps/2.
    moved = 8 * max(torch.finfo(dtype).eps for dtype in TYPES)

    def excess(case: Numbers) -> arb:
        first, turns = map(whole, case)
        step = _later(first, turns, encoding.ball()) - first
        waves = [encoding.ball(), *frequencies(64)[1:]]
        apart = [2 * (step * wave / 2).sin() for wave in waves]
        return (nearest - abs(apart[0])).max(arb("1.4") - intervals.norm(apart) + moved)

    return excess


# A turn of the first wave is 44/7 positions, or all but: so many turns lead no further than LAST.
HUNTS: Mapping[str, Hunt] = {
    "sinusoid-distinct": Hunt(
        {"p": (0, LAST), "turns to p′": (1, LAST * 7 // 44)},
        _stored,
        _real,
        whole=frozenset({"p", "turns to p′"}),
        strict=True,
        reads="p′ is p and so many turns of the first wave, rounded to a whole position.",
    ),
}
