"""Rules of means and probabilities over normal numbers: what they prove, what they refuse, and values in balls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
from sympy import And, Eq, Implies, Sum, erf, exp

from avow.theory.claims import Statement, Unproved, each, real, sequence, whole
from avow.theory.claims.formal import Chance, Exists, Mean, latex, text, value, variables
from avow.theory.claims.proof import Proof

x = real("x")
m, d, a, b, f = whole("m d a b f")
w, z = sequence("w z")
features, coordinates = (a, 1, m), (f, 1, d)
form = Sum(z[f] * w[a, f], coordinates)


def proof() -> Proof:
    return Proof(Statement({x: "a number"}, {"0": x >= 0}))


def refused(words: str, call: Any, *args: Any, **more: Any) -> None:
    with pytest.raises(Unproved, match=words):
        call(*args, **more)


def test_the_mean_of_an_exponential_is_that_of_half_its_variance() -> None:
    shown = proof()
    law = shown.mean_exp(w, {a: z[f]}, coordinates, x)
    shown.have(Eq(Mean(w, exp(form + x)), exp(x + Sum(z[f] ** 2, coordinates) / 2)), law)
    refused("it does not follow", shown.have, Eq(Mean(w, exp(form + x)), exp(x + Sum(z[f] ** 2, coordinates))), law)


def test_the_same_direction_twice_has_twice_the_slope_and_not_twice_the_variance() -> None:
    shown = proof()
    pair = shown.mean_exp(w, {a: z[f], b: z[f]}, coordinates)
    twice = shown.at(pair, {b: a})
    square = Sum(z[f] ** 2, coordinates)
    shown.have(Eq(Mean(w, exp(2 * form)), exp(2 * square)), twice)
    refused("it does not follow", shown.have, Eq(Mean(w, exp(2 * form)), exp(square)), twice)


def test_a_mean_is_linear_in_what_has_one_and_in_nothing_that_is_random_itself() -> None:
    shown = proof()
    linear = shown.mean_sum(w, z[a], form, features)
    shown.have(Eq(Mean(w, Sum(z[a] * exp(form), features)), Sum(z[a] * Mean(w, exp(form)), features)), linear)
    refused("is random itself", shown.mean_sum, w, w[a, 1], form, features)
    refused("is random itself", shown.mean_exp, w, {a: w[a, f]}, coordinates)
    refused("is not linear", shown.mean_sum, w, 1, form**2, features)
    refused("is not linear", shown.mean_sum, w, 1, w[a, 1] * w[a, 2], features)
    refused("stands outside of its own sum", shown.mean_exp, w, {f: z[f]}, coordinates)
    refused("x is not known to be whole", shown.mean_exp, w, {x: z[f]}, coordinates)


def test_what_a_mean_is_over_is_no_variable_and_is_not_caught() -> None:
    mean = Mean(w, exp(form))
    assert variables(Eq(mean, 1)) == {z, a, d}
    shown = proof()
    line = shown.have(Eq(Mean(w, exp(form)) * x, x * mean))
    refused("is not a variable of that step", shown.at, line, {w: lambda *_: sympy.Integer(0)})
    assert text(mean) == "E_w(e^(Σ_{f=1..d} (w_(a,f)·z_f)))" and r"\mathbb{E}_{w}" in latex(mean**2)


def test_a_mean_in_balls_is_its_closed_form_and_what_has_none_has_no_value() -> None:
    case = {m: 2, d: 2, z: [1.0, 0.5], a: 1}
    once, drawn = math.exp(1.25 / 2), Sum(exp(form), features) / m
    assert abs(float(value(Mean(w, drawn), case).mid()) - once) < 1e-12
    # Two directions: the squares of each, and their product twice.
    square = (2 * math.exp(2 * 1.25) + 2 * math.exp(1.25)) / 4
    assert abs(float(value(Mean(w, drawn**2), case).mid()) - square) < 1e-12
    for term in (exp(form**2), sympy.log(form), 1 / exp(form) ** x / form):
        with pytest.raises(TypeError, match=r"is not linear|no mean"):
            value(Mean(w, term), {**case, x: 1})


def test_a_normal_number_has_its_law_with_the_variance_that_steps_say_and_no_other() -> None:
    shown = proof()
    square = Sum(z[f] ** 2, coordinates)
    # It may be nothing, and it is not twice as large.
    refused("no step says that", shown.chance_normal, w, {a: z[f]}, coordinates, x, square)
    refused("no step says that", shown.chance_normal, w, {a: z[f]}, coordinates, x, 2 * square, when=square > 0)
    law = shown.chance_normal(w, {a: z[f]}, coordinates, x, square, when=square > 0)
    size = erf(x / sympy.sqrt(2 * square))
    below = Implies(square > 0, Eq(Chance(w, form <= x), (1 + size) / 2, evaluate=False))
    shown.have(below, law)
    within = Eq(Chance(w, sympy.Abs(form) <= x), size, evaluate=False)
    shown.have(Implies(And(square > 0, x >= 0), within), law)
    # Within less than nothing lies nothing, whatever erf says.
    refused("it does not follow", shown.have, Implies(square > 0, within), law)


def test_two_directions_have_the_variance_of_both_unless_they_are_one() -> None:
    shown = proof()
    square = Sum(z[f] ** 2, coordinates)
    slopes = {a: z[f], b: -z[f]}
    refused("it does not follow", shown.chance_normal, w, slopes, coordinates, x, 2 * square, when=square > 0)
    shown.chance_normal(w, slopes, coordinates, x, 2 * square, when=And(square > 0, sympy.Ne(a, b)))


def test_an_event_is_as_probable_as_one_that_it_is_implied_by_and_not_the_other_way() -> None:
    shown = proof()
    shown.chance_implied(w, w[1, 1] <= x, w[1, 1] <= x + 1)
    refused("no step says that", shown.chance_implied, w, w[1, 1] <= x + 1, w[1, 1] <= x)
    own = Proof(Statement({w: "numbers"}, {"0": w[1, 1] >= 0}, [w[1, 1] >= 0]))
    refused("is a variable of the statement", own.chance_implied, w, w[1, 1] <= 0, w[1, 1] >= 0)
    refused("not known to have a probability", shown.chance_implied, w, w[1, 1] <= x, Exists(x, x >= w[1, 1]))
    # Where the number is not below zero, being at most 5 implies that; yet that is half as probable.
    above = w[1, 1] >= 0
    refused("is random itself", shown.chance_implied, w, w[1, 1] <= 5, above, when=above)


def test_all_of_some_events_fail_no_more_often_than_each_of_them() -> None:
    shown = proof()
    others = each(a, 1, m, w[a, 1] <= x)
    union = shown.chance_all(w, w[1, 2] <= x, others)
    both = Chance(w, And(w[1, 2] <= x, others))
    failing = Sum(1 - Chance(w, w[a, 1] <= x), features)
    shown.have(both >= Chance(w, w[1, 2] <= x) - failing, union)
    refused("it does not follow", shown.have, both >= Chance(w, w[1, 2] <= x) - failing / 2, union)


def test_a_probability_in_balls_is_that_of_its_law_and_of_other_events_any() -> None:
    case = {d: 2, z: [3.0, 4.0], a: 1, x: 5}
    assert abs(float(value(Chance(w, form <= x), case).mid()) - 0.841344746) < 1e-9
    assert abs(float(value(Chance(w, form >= x), case).mid()) - 0.158655254) < 1e-9
    assert abs(float(value(Chance(w, sympy.Abs(form) <= x), case).mid()) - 0.682689492) < 1e-9
    assert abs(float(value(Chance(w, 2 * sympy.Abs(form + 5) <= 10), case).mid()) - 0.477249868) < 1e-9
    assert float(value(Chance(w, sympy.Abs(form) <= -x), case)) == 0
    unknown = value(Chance(w, form**2 <= x), case)
    assert unknown.contains(0) and unknown.contains(1)
    assert text(Chance(w, w[a, 1] <= x)) == "P_w(w_(a,1) ≤ x)" and r"\mathbb{P}_{w}" in latex(Chance(w, w[a, 1] <= x))


def test_a_case_says_nothing_of_what_has_no_law_in_balls() -> None:
    statement = Statement({x: "a number"}, {"known": x >= 0, "open": Chance(w, exp(w[1, 1]) <= x) >= x})
    assert statement.excess({x: 2}) < 0 < statement.excess({x: -2})
