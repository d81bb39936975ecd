"""One colour and one mark for each method, the same in every figure; all legible on white and on black.

Series that are no methods take the same looks in order.
"""

from __future__ import annotations

from typing import NamedTuple

from avow.methods import all_methods, method_named


class Look(NamedTuple):
    """A colour, and a mark as chart.js and as matplotlib name it."""

    colour: str
    symbol: str
    marker: str


# Picture files are white.
INK, SOFT, LINE = "#1c2128", "#6b7580", "#e3e7eb"
# Seen on bars of any colour, on white and on black.
WHISKER = "#7d8590"

EXACT = FRONTIER = Look(WHISKER, "circle", "o")
LOOKS = (
    Look("#3a86d8", "circle", "o"),
    Look("#e0752d", "square", "s"),
    Look("#2a9d6f", "diamond", "D"),
    Look("#9b5de5", "triangle-up", "^"),
    Look("#d1495b", "triangle-down", "v"),
    Look("#b8901c", "pentagon", "p"),
    Look("#1b9aaa", "hexagon", "h"),
)


def look(name: str) -> Look:
    """How a method is drawn."""
    if method_named(name).is_exact:
        return EXACT
    others = [other for other, method in all_methods().items() if not method.is_exact]
    return LOOKS[others.index(name) % len(LOOKS)]
