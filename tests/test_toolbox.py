"""Every step of a proof holds where it should, and says no where it should."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import sympy
import torch
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from avow.numerics import intervals
from avow.theory.claims import Evidence, Unproved, toolbox
from avow.theory.claims.stored import rounded

x = sympy.Symbol("x", real=True)
p = sympy.Symbol("p", positive=True)


def plain(evidence: Evidence) -> dict[str, Any]:
    """Evidence that survives JSON."""
    return json.loads(json.dumps(evidence.plain(), allow_nan=False))


def test_an_identity_is_symbolic_evidence() -> None:
    found = toolbox.identity((x + 1) ** 2, x**2 + 2 * x + 1, "a square", amended=True)
    assert (found.kind, found.says, found.amended) == ("symbolic", "a square", True)
    assert plain(found)["facts"]["right"] == "x^{2} + 2 x + 1"


def test_sides_that_differ_are_shown_by_how_much() -> None:
    with pytest.raises(Unproved, match=re.escape("a square: the two sides differ by x")):
        toolbox.identity((x + 1) ** 2, x**2 + x + 1, "a square")


def test_an_identity_with_exceptions_is_none() -> None:
    with pytest.raises(Unproved):
        toolbox.identity(sympy.sqrt(x**2), x, "true for x ≥ 0 alone")
    toolbox.identity(sympy.sqrt(p**2), p, "true for p > 0")


def test_floats_have_no_place_among_symbols() -> None:
    with pytest.raises(TypeError, match="holds a float; symbolic evidence holds exact numbers"):
        toolbox.identity(0.1 * x, x / 10, "a tenth")


def test_rational_evidence_holds_no_floats() -> None:
    found = toolbox.rational(Fraction(1, 3) < Fraction(1, 2), "a third", third=Fraction(1, 3), all=[1, 2])
    assert plain(found)["facts"] == {"third": "1/3", "all": "[1, 2]"}
    with pytest.raises(TypeError, match=re.escape("third=0.5 is a float; exact evidence holds fractions")):
        toolbox.rational(True, "a half", third=0.5)
    with pytest.raises(TypeError, match=re.escape("all=0.5 is a float")):
        toolbox.rational(True, "a half", all=[1, 0.5])
    with pytest.raises(Unproved, match=re.escape("too much: does not hold for x = 3")):
        toolbox.rational(3 < 2, "too much", x=3)


@pytest.mark.parametrize("found", [[False], "no", None, 1, arb(1), x > 0])
def test_what_merely_looks_true_is_no_truth(found: Any) -> None:
    with pytest.raises(TypeError, match="is not a truth value"):
        toolbox.rational(found, "looks true")
    with pytest.raises(TypeError, match="is not a truth value"):
        toolbox.counterexample(found, "looks true", by="nobody")
    with pytest.raises(TypeError, match="is not a truth value"):
        toolbox.enclosed(lambda: found, "looks true")


@pytest.mark.parametrize("found", [True, sympy.true, torch.tensor(True), torch.tensor([1.0]).gt(0).all()])
def test_truth_values_of_other_libraries_are_taken(found: Any) -> None:
    assert toolbox.rational(found, "true").kind == "rational"


def test_an_enclosure_is_asked_with_more_bits_until_it_holds() -> None:
    bits = []

    def close() -> bool:
        bits.append((arb(1) / 3).rel_accuracy_bits())
        return bool(abs(arb(2).sqrt() ** 2 - 2) < arb(2) ** -300)

    assert toolbox.enclosed(close, "a root squared").kind == "balls"
    assert len(bits) > 1 and bits[-1] > 300 >= bits[0]


def test_an_enclosure_that_is_false_or_a_tie_is_not_shown() -> None:
    with pytest.raises(Unproved, match=re.escape("too small: balls cannot show it for e = 2.7")):
        toolbox.enclosed(lambda: bool(arb(1).exp() < arb("2.7")), "too small", e=2.7)
    with pytest.raises(Unproved):
        toolbox.enclosed(lambda: bool(arb(2).sqrt() ** 2 > 2), "equal, not greater")


def test_an_enclosure_may_be_given_as_its_outcome() -> None:
    assert toolbox.enclosed(arb(1).exp() > arb("2.7"), "e").kind == "balls"
    with pytest.raises(Unproved, match="too small: balls cannot show it"):
        toolbox.enclosed(arb(1).exp() < arb("2.7"), "too small")
    with pytest.raises(TypeError, match="is not a truth value"):
        toolbox.enclosed(arb(1), "a ball")  # type: ignore[arg-type]


@given(st.fractions(-100, 100), st.fractions(0, 100))
def test_a_piece_holds_both_its_ends(low: Fraction, width: Fraction) -> None:
    piece = intervals.interval(low, low + width)
    for part in (Fraction(0), Fraction(1, 3), Fraction(1)):
        inside = low + part * width
        assert piece.overlaps(arb(inside.numerator) / arb(inside.denominator))
    low_end, high_end = (arb(end.numerator) / arb(end.denominator) for end in (low, low + width))
    assert bool(piece.lower() <= low_end.upper()) and bool(piece.upper() >= high_end.lower())


def test_a_counterexample_must_be_one() -> None:
    found = toolbox.counterexample(True, "two is even", by="counting", prime=2)
    assert plain(found)["facts"] == {"evaluated by": "counting", "prime": 2}
    with pytest.raises(Unproved, match=re.escape("two is odd: this is not a counterexample (prime = 2)")):
        toolbox.counterexample(False, "two is odd", by="counting", prime=2)


def start(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, generator=generator, dtype=torch.float64)


def test_a_search_that_finds_nothing_is_only_a_search() -> None:
    found = toolbox.search(lambda y: -(y**2).sum() - 0.1, start, "below", restarts=3, steps=5)
    assert found.kind == "search" and found.facts["trials"] == 15 and found.facts["closest"] < -0.1 + 1e-9


def test_a_search_climbs_to_a_violation() -> None:
    with pytest.raises(Unproved, match="hidden: violated by"):
        toolbox.search(lambda y: 1e-3 - ((y - 1) ** 2).sum(), start, "hidden", restarts=4, steps=200)


def test_a_search_is_not_deaf_to_nan_and_tries_something() -> None:
    with pytest.raises(Unproved, match="violated by nan"):
        toolbox.search(lambda y: (y * math.nan).sum(), start, "no number")
    with pytest.raises(ValueError, match="0 restarts of 5 steps try nothing"):
        toolbox.search(lambda y: -(y**2).sum(), start, "nothing", restarts=0, steps=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rounding_by_balls_is_rounding_by_the_machine(dtype: torch.dtype) -> None:
    form = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    span = math.log(form.tiny) + math.log(form.eps) - 2, math.log(form.max) + (0.5 if dtype != torch.float64 else 0)
    exponents = torch.rand(300, generator=generator, dtype=torch.float64) * (span[1] - span[0]) + span[0]
    signs = torch.rand(300, generator=generator).lt(0.5) * 2 - 1
    near_top = torch.tensor([form.max, -form.max, form.tiny, form.tiny * form.eps, 0.0, 1.0], dtype=torch.float64)
    numbers = torch.cat([signs * exponents.exp(), near_top, 1 + torch.tensor([3, -3]).double() * form.eps / 8])
    for number, machine in zip(numbers.tolist(), numbers.to(dtype).double().tolist(), strict=True):
        assert float(rounded(partial(arb, number), dtype)) == machine, number


def test_overflow_begins_halfway_to_the_number_that_is_not_there() -> None:
    top = Fraction(torch.finfo(torch.float32).max)
    edge = arb(2) ** 128 - arb(2) ** 103
    assert rounded(lambda: edge - 1, torch.float32) == top
    assert rounded(lambda: 1 - edge, torch.float32) == -top
    assert rounded(lambda: edge * 1 + 1, torch.float32) == math.inf
    with pytest.raises(Unproved, match=re.escape("balls cannot tell which torch.float32 is nearest")):
        rounded(lambda: edge, torch.float32)


def test_a_tie_is_not_decided_by_balls_however_many_bits() -> None:
    with pytest.raises(Unproved, match="balls cannot tell"):
        rounded(lambda: 1 + (arb(2).sqrt() ** 2 - 2) + arb(2) ** -24, torch.float32)


def test_rounding_asks_for_the_bits_it_needs() -> None:
    needed = 1 + arb(2) ** -24
    assert rounded(lambda: needed + (arb(1) / 3) ** 200, torch.float32) == 1 + Fraction(1, 2**23)
    assert rounded(lambda: needed - (arb(1) / 3) ** 200, torch.float32) == 1


def test_precision_is_given_back() -> None:
    before = (arb(1) / 3).rel_accuracy_bits()
    with pytest.raises(Unproved):
        toolbox.enclosed(lambda: False, "no")
    assert (arb(1) / 3).rel_accuracy_bits() == before
    assert intervals.decided(lambda: None, most=128) is None
