"""Rules of means over normal numbers: what they prove, what they refuse, and the values that means have in balls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
from sympy import Eq, Sum, exp

from avow.theory.claims import Statement, Unproved, real, sequence, whole
from avow.theory.claims.formal import Mean, latex, text, value, variables
from avow.theory.claims.proof import Proof

x = real("x")
m, d, a, b, f = whole("m d a b f")
w, z = sequence("w z")
features, coordinates = (a, 1, m), (f, 1, d)
form = Sum(z[f] * w[a, f], coordinates)


def proof() -> Proof:
    return Proof(Statement({x: "a number"}, {"0": x >= 0}))


def refused(words: str, call: Any, *args: Any) -> None:
    with pytest.raises(Unproved, match=words):
        call(*args)


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
