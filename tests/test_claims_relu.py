"""Claims on ReLU networks: the facts they must show."""

from __future__ import annotations

from fractions import Fraction

import sympy

from avow.theory.claims.catalogue import relu
from avow.theory.constructions import relu_square
from avow.theory.constructions.relu import hinges, sawtooth, square_error
from tests.helpers.judging import judged


def test_the_units_recorded_are_those_the_library_makes() -> None:
    for eps, units in relu.WIDE.items():
        assert relu_square(eps).units == units
    for eps, units in relu.DEEP.items():
        assert relu_square(eps, deep=True).units == units


def test_the_claim_s_family_is_the_library_s_network() -> None:
    assert relu.Hinges().layers(7) == hinges(7)
    assert square_error(relu.Hinges().layers(7)) == Fraction(1, 450)


def test_the_errors_of_the_four_widths_are_shown() -> None:
    shown = [
        found["error"] for found in (step.facts for step in judged(relu.relu_square_wide).evidence) if "units" in found
    ]
    assert shown == ["1/162", "1/1058", "1/10082", "1/1005362"]


def test_depth_pays_where_the_claim_says_and_not_before() -> None:
    wide, deep = ([units[eps] for eps in sorted(units, reverse=True)] for units in (relu.WIDE, relu.DEEP))
    assert [d < w for d, w in zip(deep, wide, strict=True)] == [False, False, True, True]


def test_fractions_and_symbols_agree_on_a_network() -> None:
    x, m, b = Fraction(5, 13), Fraction(-3), Fraction(2)
    assert relu.TWO_UNITS.at(m, b, x) == m * x + b
    symbols = relu.ONE_UNIT.at(relu.m, relu.b, relu.x)
    for where in (-2, 1):
        values = {relu.m: 3, relu.b: 1, relu.x: where}
        assert sympy.Rational(relu.ONE_UNIT.at(Fraction(3), Fraction(1), Fraction(where))) == symbols.subs(values)
    # 5/13 lies 7/13 of the way along the second quarter.
    assert relu.evaluated(sawtooth(2), x) - x * x == Fraction(7, 13) * Fraction(6, 13) / 16


def test_the_network_beyond_its_last_kink_is_a_line() -> None:
    """Four kinks a side, a quarter apart: 1 at 1, and from there on the slope 7/4."""
    (found,) = (step.plain()["facts"] for step in judged(relu.relu_square_line).evidence)
    assert (found["K"], found["h"], found["x"], found["fails"]) == ("4", "1/4", "2", "everywhere")
    network = relu.relu_square_line.as_stated().parts["everywhere"].lhs.args[0] + relu.x**2
    assert network.subs({relu.K: 4, relu.step: Fraction(1, 4), relu.x: 2}).doit() == 1 + Fraction(7, 4)


def test_a_deep_network_that_follows_a_line_is_no_proof_that_it_follows_a_square() -> None:
    found = relu.relu_square_far.judge_sabotage("something a network can follow: |x|")
    assert found.rejected and "it does not follow" in found.trouble
