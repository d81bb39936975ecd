"""The search for a counterexample: every claim has one, it breaks what is false, and nothing that is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import sympy
import torch
from flint import arb
from torch import Tensor

from avow.errors import ParameterError
from avow.theory.claims import Claim, catalogue, elementary
from avow.theory.claims.claim import Falsifier
from avow.theory.claims.random_search import AMENDED, STATED, search, variants
from avow.theory.claims.stored import float32, rounded
from avow.theory.constructions.formulas import compiled

# Variants that no case can break, and that the ledger's check rejects all the same.
UNBREAKABLE = {
    # Said too little.
    ("softmax-perturbation", "true, but not the least"),
    # It breaks what says that something exists, which no case can deny.
    ("svd-spectral", "one more kept"),
    # The claim is false as stated, and what is broken is the case that shows it: what stays is true.
    ("finite-mask", "infinite masks"),
    ("copy-shortest", "as long, but along key 1 alone"),
    ("copy-shortest", "half of it"),
    ("copy-shortest", "the stated query itself"),
    ("heads-identical", "a query for each value"),
    ("sinusoid-stored", "double precision"),
    ("average-bisector", "nothing along the others"),
    ("share-of-the-rest", "one half"),
    ("copy-possible", "a target outside the hull"),
    ("features-unbiased", "1/√m taken for the mistake"),
    ("relu-linear-a", "a network that is right to begin with"),
    ("relu-linear-b", "the two units that do it"),
    ("relu-square-line", "something a network can follow: |x|"),
    ("relu-square-line", "a line"),
    ("momentum-ema", "a conversion that is right to begin with"),
    ("l2-only-sgd", "no penalty at all"),
    ("adam-l2-magnitude", "weights alike, and larger gradients"),
    ("multi-head-cost", "the products counted, and no space"),
    ("rnn-exploding", "a change that grows at every step"),
    ("rnn-exploding-ratio", "a change that grows at every step"),
    ("mpmath-iv-exp", "balls of python-flint"),
    ("auto-lirpa-softmax", "bounds from the corners"),
}


def stands(claim: Claim, variant: str) -> bool:
    """Whether nothing may break a variant: what is proved, and what only looks broken."""
    proved = variant == (AMENDED if claim.amended else STATED) and claim.expected in ("proved", "corrected")
    return proved or (claim.id, variant) in UNBREAKABLE


def with_search(ranges: dict[str, Any], excess: Callable[..., arb], strict: bool = False) -> Claim:
    """Some claim, with a search of its own."""
    words = {"topic": "t", "statement": "x", "plain": "x", "expected": "supported"}
    return Claim("searched", check=lambda _: iter(()), falsifier=Falsifier(ranges, excess, strict=strict), **words)


def attackable(claim: Claim) -> list[str]:
    """Variants that can be attacked here; a claim on a package that is absent cannot be attacked as stated."""
    return [variant for variant in variants(claim) if variant != STATED or not claim.not_applicable()]


def test_every_claim_can_be_attacked_and_every_variant_by_a_name_of_its_own() -> None:
    for claim in catalogue().values():
        assert len(set(variants(claim))) == len(variants(claim)), claim.id
        assert claim.falsifier, f"{claim.id}: a claim without a search has nothing to press on its page"
        assert bool(claim.amended) == (claim.falsifier.amended is not None), claim.id
    assert {id for id, _ in UNBREAKABLE} <= set(catalogue())


def test_a_search_that_looks_away_finds_nothing_to_break() -> None:
    assert search(with_search({"x": (0, 1)}, lambda subject, x: x - arb("0.5")), cases=20).broken
    assert not search(with_search({"x": (0, 1)}, lambda subject, x: arb(-1)), cases=20).broken


@pytest.mark.parametrize("id", catalogue())
def test_the_search_breaks_what_is_false_and_nothing_that_is_proved(id: str) -> None:
    claim = catalogue()[id]
    # A count runs a program.
    few = 60 if claim.topic == "costs" else 300
    for variant in attackable(claim):
        whole = stands(claim, variant)
        found = search(claim, variant, cases=few if whole else 4000, seconds=120)
        assert found.broken != whole, f"{variant}: {found}"
        assert found.tried == found.budget or found.broken


@pytest.mark.parametrize("id", [id for id in catalogue() if id != "auto-lirpa-softmax"])
def test_of_every_claim_something_can_be_broken(id: str) -> None:
    claim = catalogue()[id]
    assert any(not stands(claim, variant) for variant in attackable(claim)), "a search that never succeeds says nothing"


def test_bounds_that_forget_a_small_denominator_are_broken() -> None:
    """The fault of the operator that the claim is about, which need not be installed."""

    def loose(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        top = high.max()
        ours, theirs = (torch.exp(x - top) for x in (low, high))
        upper = theirs / (ours.sum() - ours + theirs + 1e-12)
        return torch.zeros_like(low), upper

    claim = dataclasses.replace(catalogue()["auto-lirpa-softmax"], subject=loose)
    found = search(claim, cases=4000)
    assert found.broken and max(found.case.values()) <= 0


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("id", ["copy-possible", "sinusoid-stored", "mpmath-iv-exp", "rnn-exploding", "heads-gauss"])
def test_what_is_false_as_stated_falls_whatever_the_seed(id: str, seed: int) -> None:
    assert search(catalogue()[id], cases=2000, seed=seed).broken


def test_a_case_is_the_same_for_the_same_seed_and_lies_in_its_ranges() -> None:
    claim = catalogue()["rounding-gamma"]
    one, same, other = (search(claim, cases=200, seed=seed) for seed in (3, 3, 4))
    assert one.case == same.case and one.excess == same.excess and one.case != other.case
    for name, (low, high) in claim.falsifier.ranges.items():
        assert Fraction(str(low)) <= one.case[name] <= Fraction(str(high))


def test_ends_ties_and_whole_numbers_are_drawn_as_well() -> None:
    seen: list[tuple[float, ...]] = []

    def noted(subject: object, *case: arb | int) -> arb:
        seen.append(tuple(float(x) for x in case))
        return arb(-1)

    ranges = {"x": (-3, 3), "y": (-3, 3), "n": range(1, 6)}
    search(with_search(ranges, noted), cases=500)
    assert any(x == y for x, y, _ in seen) and {-3, 3} <= {x for x, _, _ in seen}
    assert {n for _, _, n in seen} == {1, 2, 3, 4, 5}


def test_more_cases_come_nearer() -> None:
    claim = catalogue()["ratio-error"]
    few, many = (search(claim, cases=cases) for cases in (50, 3000))
    assert few.excess < many.excess < 0


def test_what_was_found_breaks_it_in_fractions_too() -> None:
    claim = catalogue()["relu-linear-a"]
    found = search(claim)
    m, b, x = found.case.values()
    assert claim.subject.stated.at(m, b, x) != m * x + b and all(isinstance(part, Fraction) for part in (m, b, x))


def test_two_positions_that_were_found_are_one_in_bfloat16() -> None:
    found = search(catalogue()["sinusoid-stored"])
    first, turns = (int(x) for x in found.case.values())
    second = first + round(44 * turns / 7)
    pairs = torch.tensor([[at] for at in (first, second)], dtype=torch.float64)
    stored = torch.cat([pairs.sin(), pairs.cos(), pairs], -1).to(torch.bfloat16)
    assert second != first and (torch.equal(*stored[:, :2]) or stored[0, 2] == stored[1, 2])


def test_an_equality_that_balls_cannot_tell_from_zero_is_no_counterexample() -> None:
    for strict in (False, True):
        always = with_search({"x": (0, 1)}, lambda subject, x: abs(x.sqrt() ** 2 - x), strict)
        # Nor where equality would break it.
        assert not search(always, cases=1 if strict else 100, seed=int(strict)).broken, (
            "nor where equality would break it"
        )
    never = with_search({"x": (0, 1)}, lambda subject, x: arb("nan"))
    assert search(never, cases=20).excess == -float("inf")


def test_equality_that_is_certain_breaks_what_forbids_it_and_nothing_else() -> None:
    for strict in (False, True):
        assert search(with_search({"x": (0, 1)}, lambda subject, x: arb(0), strict), cases=20).broken == strict


def test_a_search_refuses_what_it_does_not_know() -> None:
    claim = catalogue()["lse-merge"]
    with pytest.raises(ParameterError, match=r"^variant='upside down' is not a variant of lse-merge; one of "):
        search(claim, "upside down")
    with pytest.raises(ParameterError, match=r"^cases=0 must lie between 1 and 100,000; try 2000$"):
        search(claim, cases=0)
    with pytest.raises(ParameterError, match=r"^claim searched: falsifier=None is needed to search; say where"):
        search(dataclasses.replace(with_search({}, lambda subject: arb(0)), falsifier=None))


def test_formulas_become_functions_of_balls() -> None:
    x, y = sympy.symbols("x y", real=True)
    halved = compiled(sympy.sqrt(x) * sympy.exp(-y) / 2 + abs(x - 3) ** sympy.Rational(1, 3), [x, y])
    assert abs(float(halved([arb(4), arb(0)])) - 2) < 1e-15
    a = sympy.IndexedBase("a")
    assert (
        compiled(sympy.Sum(a[sympy.Symbol("i")], (sympy.Symbol("i"), 1, 2)).doit(), [a[1], a[2]])([arb(5), arb(6)])
        == 11
    )
    with pytest.raises(TypeError, match="nothing that balls are known for here"):
        compiled(sympy.gamma(x), [x])


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "tanh"])
def test_elementary_functions_take_symbols_balls_and_floats_alike(name: str) -> None:
    function = getattr(elementary, name)
    assert function(sympy.Symbol("x")) == getattr(sympy, name)(sympy.Symbol("x"))
    assert isinstance(function(arb(2)), arb) and isinstance(function(2.0), float)
    assert abs(float(function(arb(2))) - function(2.0)) < 1e-15


def test_a_number_far_outside_a_type_is_stored_at_once() -> None:
    huge, largest = arb(10) ** 9, torch.finfo(torch.float32).max
    assert rounded((-huge).exp, torch.float32) == 0
    x = sympy.Symbol("x", real=True)
    assert float32(x).measured([huge.exp()]) == 2 * largest and float32(x).measured([-huge.exp()]) == -2 * largest
    assert not float32(x).measured([arb(0, 1)]).is_finite(), "a ball that holds several of the type's numbers"
