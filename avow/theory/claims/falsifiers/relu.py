"""How a network of ReLUs could miss the line or the square that it is said to be, or come closer than it can."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction

from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.catalogue.relu import Units, relu
from avow.theory.claims.catalogue.relu_square import Hinges
from avow.theory.claims.catalogue.relu_square_deep import Sawtooth
from avow.theory.claims.catalogue.relu_square_line import Growth
from avow.theory.claims.interval_checks import Numbers, whole
from avow.theory.claims.random_search import Excess, Hunt, numbered
from avow.theory.constructions.relu import sawtooth


def _line(units: Units) -> Excess:
    return lambda case: abs(units.at(*case) - (case[0] * case[2] + case[1]))


def _hinges(network: Hinges) -> Excess:
    promised = list(network.units.items())

    def off(units: int, x: arb) -> arb:
        n = arb(2 * units + 1)
        awake = total(relu(network.weight(n) * x + network.offset(i)) for i in range(1, units + 1))
        return abs(network.out(n) * awake + network.bias(n) - x * x)

    def excess(case: Numbers) -> arb:
        units, which, x, *one = case
        eps, enough = promised[whole(which)]
        return most(
            [
                off(whole(units), x) - 1 / (2 * (2 * units + 1) ** 2),
                off(enough, x) - intervals.ball(eps),
                arb(1) / 18 - _farthest(*one),
            ]
        )

    return excess


def _farthest(weight: arb, bias: arb, out: arb, shift: arb) -> arb:
    """The largest distance of one unit to x² on [0, 1]: at an end, at its kink, or where the slopes agree."""

    def inside(x: arb) -> arb:
        return x.max(arb(0)).min(arb(1))

    kink, level = -bias / weight, out * weight / 2
    return most(
        [abs(out * relu(weight * x + bias) + shift - x * x) for x in (arb(0), arb(1), *map(inside, (kink, level)))]
    )


def _sawtooth(network: Sawtooth) -> Excess:
    def excess(case: Numbers) -> arb:
        depth, x = whole(case[0]), case[1]
        tooth = found = x
        for k in range(1, depth + 1):
            tooth = network.tooth(relu(tooth), relu(tooth - arb(1) / 2))
            share = network.share(k)
            found = found - intervals.ball(Fraction(int(share.p), int(share.q))) * tooth
        units = sum(len(layer.bias) for layer in sawtooth(depth)[:-1])
        return (abs(found - x * x) - arb(4) ** -(depth + 1)).max(arb(units - network.units(depth)))

    return excess


def _everywhere(target: Growth) -> Excess:
    def excess(case: Numbers) -> arb:
        kinks, reach, eps, x = case
        # A network through the target at 0 and at some points to either side, beyond which it is straight.
        step, here = reach / kinks, target.function(arb(0))
        network = here
        for side in (1, -1):
            heights = [target.function(side * i * step) for i in range(whole(kinks) + 1)]
            slopes = [arb(0), *((b - a) / step for a, b in itertools.pairwise(heights))]
            network += total((slopes[i + 1] - slopes[i]) * relu(side * x - i * step) for i in range(whole(kinks)))
        return abs(network - target.function(x)) - eps

    return excess


HUNTS: Mapping[str, Hunt] = {
    "relu-linear-a": Hunt(
        numbered("m b x", -3, 3), lambda lines: _line(lines.stated), lambda lines: _line(lines.amended)
    ),
    "relu-linear-b": Hunt(numbered("m b x", -3, 3), _line),
    "relu-square": Hunt(
        {"K": (1, 40), "ε, of four": (0, 3), "x": (0, 1), "w₀": (0.01, 3)} | numbered("b₀ w₁ b₁", -2, 2),
        _hinges,
        whole=frozenset({"K", "ε, of four"}),
        reads="K units at x; the units of one of the four ε, from 1e-2 on; and any one unit of weights w₀, b₀, w₁, b₁.",
    ),
    "relu-square-deep": Hunt({"m": (1, 8), "x": (0, 1)}, _sawtooth, whole=frozenset("m")),
    "relu-square-line": Hunt(
        {"kinks a side": (1, 8), "reach": (0.1, 50), "ε": (0.001, 1), "x": (-200, 200)},
        _everywhere,
        whole=frozenset({"kinks a side"}),
        reads="A network through the target at 0 and at points up to the reach on either side.",
    ),
}
