"""Claims of one's own, one for each verdict: what the tests of the commands and the page run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch

from avow.core.chart import Chart, Table
from avow.theory.claims import toolbox
from avow.theory.claims.claim import Evidence, claim

a, b = sympy.symbols("a b", real=True)
x = sympy.Symbol("x", real=True)
excess = sympy.Symbol("u", nonnegative=True)


def _squares() -> Chart:
    xs = [0.1 * i for i in range(21)]
    return Chart("Squares & lines", "x", "y", {"x²": (xs, [x * x for x in xs]), "x < 2": (xs, xs)})


@claim(
    "binomial",
    topic="algebra",
    expected="proved",
    statement=r"(a+b)^2 = a^2 + 2ab + b^2 \iff \text{squares are } \ge 0",
    plain="The square of a sum has three terms.",
    assumptions=("a and b are real", "x < y means less"),
    subject=lambda a, b: a**2 + 2 * a * b + b**2,
    sabotage={"no mixed term": lambda a, b: a**2 + b**2, "half of it": lambda a, b: a**2 + a * b + b**2},
    picture=_squares,
)
def binomial(expanded: Callable[[Any, Any], Any]) -> Iterator[Evidence]:
    yield toolbox.identity((a + b) ** 2, expanded(a, b), "both sides expand to the same")


@claim(
    "square-grows",
    topic="algebra",
    expected="corrected",
    statement=r"x^2 \ge x \text{ for every } x",
    plain="A number's square is never below it.",
    amended=r"x^2 \ge x \text{ for every } x \ge 1",
    amended_plain="It is not from 1 on.",
    subject=sympy.Rational(1, 2),
    sabotage={"a number above 1": sympy.Rational(3, 2)},
    picture=lambda: Table("Squares", ("x", "x²", "larger"), [(0.5, 0.25, False), (2.0, 4.0, True)]),
    needs=("binomial",),
)
def square_grows(point: Any) -> Iterator[Evidence]:
    yield toolbox.counterexample(bool(point**2 < point), "half of a half", "fractions", x=str(point))
    yield toolbox.nonnegative((x**2 - x).subs(x, 1 + excess), "x = 1 + u: x² − x = u² + u", amended=True)


@claim(
    "primes-odd",
    topic="numbers",
    expected="refuted",
    statement=r"p \text{ prime} \Rightarrow p \bmod 2 = 1",
    plain="Every prime is odd.",
    subject=2,
    sabotage={"an odd prime": 3},
)
def primes_odd(prime: int) -> Iterator[Evidence]:
    yield toolbox.counterexample(sympy.isprime(prime) and prime % 2 == 0, "an even prime", "integers", p=prime)


@claim(
    "cosine-small",
    topic="numbers",
    expected="supported",
    statement=r"\cos x \le 1",
    plain="A cosine is at most 1.",
    subject=1.0,
    sabotage={"at most one half": 0.5},
)
def cosine_small(most: float) -> Iterator[Evidence]:
    yield toolbox.search(lambda x: x.cos() - most - 1e-9, lambda g: torch.rand((), generator=g), "climbing", 4, 20)
