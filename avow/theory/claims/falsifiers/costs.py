"""How attention could take more operations, or hold more numbers, than is said: counted at drawn sizes, exactly.

An order leaves its constants open. Those of an order that is proved are the ones its evidence finds; of an order that
is only stated, a generous one is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from flint import arb

from avow.numerics.intervals import most
from avow.theory.claims import counting
from avow.theory.claims.catalogue.costs import Heads, Program, Tiling
from avow.theory.claims.interval_checks import Numbers, balled, whole
from avow.theory.claims.random_search import Excess, Hunt, numbered

# How many times an order of which no constant is known may be passed, either way.
GENEROUS = 16


def between(count: int, order: int, low: float, high: float) -> arb:
    """By how much a count, over its order, is outside of two numbers."""
    ratio = arb(count) / order
    return (ratio - high).max(low - ratio)


@cache
def _held(heads: Heads, length: int, width: int, count: int) -> int:
    """The most numbers that heads in sequence hold beyond their inputs."""
    return max(counting.held(lambda *x: heads.sequence(heads.head, *x), *heads.of(length, width, count, width)))


def _as_sloppy(heads: Heads) -> Excess:
    def excess(case: Numbers) -> arb:
        length, width, count = map(whole, case)
        order = length**2 + length * width + width**2
        return most([between(_held(heads, length, width, h), order, 1 / GENEROUS, GENEROUS) for h in (1, count)])

    return excess


def _one_and_many(heads: Heads) -> Excess:
    def excess(case: Numbers) -> arb:
        length, width, count = map(whole, case)
        order = length * width**2 + length**2 * width
        time = counting.flops(lambda: heads.head(*heads.of(length, width, 1, width)))
        # At most a head's 2n² + 4nd with (h − 1)nd before it, or 2hnd side by side; and at least 2n², and 2hnd.
        space = between(_held(heads, length, width, count), length**2 + count * length * width, 1, 4)
        return between(time, order, 4, 6).max(space)

    return excess


@cache
def _held_by_tiles(program: Program, length: int, tile: int, width: int) -> int:
    """The most numbers that attention by tiles holds beyond its inputs; sizes are few, and come up again."""
    return max(counting.held(lambda *x: program(*x, tile), *counting.ones(*[(length, width)] * 3)))


def _dominates(tiling: Tiling) -> Excess:
    def excess(case: Numbers) -> arb:
        tiles, tile, width = map(whole, case[:3])
        return arb((tiles * tile) ** 2 - _held_by_tiles(tiling.program, tiles * tile, tile, width))

    return excess


def _by_tiles(tiling: Tiling) -> Excess:
    merge = balled(tiling.merge, 5)

    def excess(case: Numbers) -> arb:
        tiles, tile, width = map(whole, case[:3])
        beyond = _held_by_tiles(tiling.program, tiles * tile, tile, width) - tiles * tile * width
        first, second, top, other = case[3:]
        larger = top.max(other)
        merged = merge((first - top).exp(), (second - other).exp(), top, other, larger)
        apart = abs(merged - (first.exp() + second.exp()) * (-larger).exp())
        # Beyond the answer at most 4b² + bd + 4b, 2b² + bd + 7b or 2b² + 4bd + 4b, step by step.
        return apart.max(arb(beyond - 6 * (tile**2 + tile * width)))

    return excess


HUNTS: Mapping[str, Hunt] = {
    "cost-exact": Hunt(
        {"n": (1, 24), "d": (1, 128), "h": (1, 12)},
        _as_sloppy,
        _one_and_many,
        whole=frozenset({"n", "d", "h"}),
        reads=f"h heads of width d on n tokens, run and counted; as stated, {GENEROUS} times its order is allowed.",
    ),
    "cost-bottleneck": Hunt(
        {"n/b": (1, 4), "b": (1, 8), "d": (1, 8)} | numbered("x y t u", -3, 3),
        _dominates,
        _by_tiles,
        whole=frozenset({"n/b", "b", "d"}),
        reads="Tiles of b keys, run and counted; sums x and y relative to t and u, merged.",
    ),
}
