"""Claims of one's own, one for each verdict: what the tests of the commands and the page run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from sympy import Eq, Implies, Ne

from avow.core.chart import Chart, Table
from avow.theory.claims import Statement, claim, real, toolbox, whole
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.formal import Prime
from avow.theory.claims.proof import Proof, Refutation

a, b, x = real("a b x")
p = whole("p")


def _squares() -> Chart:
    xs = [0.1 * i for i in range(21)]
    return Chart("Squares & lines", "x", "y", {"x²": (xs, [x * x for x in xs]), "x < 2": (xs, xs)})


def _expanded(expanded: Callable[[Any, Any], Any]) -> Statement:
    return Statement(
        variables={a: "a number", b: "another"},
        then={"square": Eq((a + b) ** 2, expanded(a, b), evaluate=False)},
        notes=["x < y means less"],
        spans={a: (-2, 2), b: (-2, 2)},
    )


@claim(
    "binomial",
    topic="algebra",
    expected="proved",
    formal=_expanded,
    plain="The square of a sum has three terms.",
    subject=lambda a, b: a**2 + 2 * a * b + b**2,
    sabotage={"no mixed term": lambda a, b: a**2 + b**2, "half of it": lambda a, b: a**2 + a * b + b**2},
    picture=_squares,
)
def binomial(proof: Proof, _: Any) -> None:
    proof.conclude("square", says="both sides expand to the same")


@claim(
    "square-grows",
    topic="algebra",
    expected="corrected",
    formal=Statement({x: "a number"}, {"grows": x**2 >= x}, spans={x: (-2, 2)}),
    plain="A number's square is never below it.",
    amendment=Statement({x: "a number"}, {"grows": x**2 >= x}, [x >= 1], terms={"start": x >= 1}, spans={x: (1, 2)}),
    amended_plain="It is not where {start}.",
    subject=sympy.Rational(1, 2),
    sabotage={"a number above 1": sympy.Rational(3, 2)},
    picture=lambda: Table("Squares", ("x", "x²", "larger"), [(0.5, 0.25, False), (2.0, 4.0, True)]),
    needs=("binomial",),
)
def square_grows(against: Refutation, proof: Proof, point: Any) -> None:
    against.case({x: point}, "half of a half")
    proof.conclude("grows", proof.given(x >= 1), says="a product with what is at least 1")


@claim(
    "primes-odd",
    topic="numbers",
    expected="refuted",
    formal=Statement({p: "a whole number"}, {"odd": Implies(Prime(p), Ne(2 * sympy.floor(p / 2), p))}),
    plain="Every prime is odd.",
    subject=2,
    sabotage={"an odd prime": 3},
)
def primes_odd(against: Refutation, prime: int) -> None:
    against.case({p: prime}, "an even prime")


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
