"""No square on the whole line: beyond its last kink a network of ReLUs is straight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from sympy import Symbol

from avow.core.chart import Chart
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.relu import evaluated, relu
from avow.theory.claims.claim import Evidence, claim
from avow.theory.constructions import relu_square
from avow.theory.constructions.relu import hinges

eps = Symbol("varepsilon", positive=True)


class Growth(NamedTuple):
    """What a network is to follow on the whole line."""

    function: Callable[[Any], Any]
    name: str


def _line_picture() -> Chart:
    made = hinges(11)
    xs = [Fraction(i, 20) for i in range(-40, 61)]
    drawn = {
        "x²": [float(x * x) for x in xs],
        "11 units, within 1e-3 on [0, 1]": [float(evaluated(made, x)) for x in xs],
    }
    series = {name: ([float(x) for x in xs], ys) for name, ys in drawn.items()}
    return Chart("Beyond its last kink a network is a straight line", "x", "f(x)", series)


@claim(
    "relu-square-line",
    topic="relu",
    expected="refuted",
    statement=r"\forall \varepsilon > 0 \text{ some finite ReLU network has } |f(x) - x^2| \le \varepsilon"
    r"\text{ for all } x \in \mathbb{R}",
    plain="What works on [0, 1] works everywhere: some finite network is within ε of x² on the whole line.",
    assumptions=("real arithmetic", "finitely many units, in any number of layers"),
    subject=Growth(lambda x: x**2, "x²"),
    sabotage={
        "something a network can follow: |x|": Growth(lambda x: abs(x), "|x|"),
        "a line": Growth(lambda x: 3 * x + 1, "3x + 1"),
    },
    picture=_line_picture,
)
def relu_square_line(target: Growth) -> Iterator[Evidence]:
    p, q = Symbol("p", positive=True), Symbol("q", nonnegative=True)
    d, last = Symbol("d", nonnegative=True), Symbol("T", nonnegative=True)
    beyond = q / p + d
    for c, words in ((q, "q"), (-q, "−q")):
        rising, falling = p * beyond + c, -p * beyond + c
        yield toolbox.identity(
            relu(sympy.expand(rising)),
            rising,
            f"from x = q/p on, σ(px + {words}) is that line: so it goes layer after layer",
        )
        yield toolbox.identity(relu(sympy.expand(falling)), 0, f"and σ(−px + {words}) is 0: each unit ends as a line")
    slope, height = Symbol("|s|", nonnegative=True), Symbol("|c|", nonnegative=True)
    where = last + 1 + slope + height + eps
    yield toolbox.positive(
        sympy.expand(target.function(where) - slope * where - height - eps),
        f"whatever line sx + c a network ends as after its last kink T, at x = T + 1 + |s| + |c| + ε it is more than ε"
        f" below {target.name}",
    )
    for deep in (False, True):
        made = relu_square(Fraction(1, 1000), deep=deep)
        for at in (Fraction(2), Fraction(10)):
            network, true = evaluated(made.exact, at), Fraction(target.function(at))
            yield toolbox.counterexample(
                abs(network - true) > Fraction(1, 1000),
                f"the library's {made.units} units in {made.depth} layers, within 1e-3 on [0, 1], at x = {at}",
                "fractions",
                network=str(network),
                true=str(true),
            )
