"""The planner: every candidate is named, every loser knows why, and finding out never costs much."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import avow
from avow.calibration import Rate, Rates
from avow.core import BoundEstimate, Computed, Cost, Kind, Method, Problem, Promise, Sizes
from avow.methods.polynomial import Polynomial
from avow.parameters import at_least, param
from avow.planner import WASTE, Candidate, Plan, Trials, candidates, screened

SIZES = Sizes(1, 2, 2, 64, 64, 8, 8)
SURE: frozenset[Kind] = frozenset({"deterministic"})
PRICE = Rates({}, "made up")


@dataclass(frozen=True)
class Pretend(Method):
    """A method that costs what it says."""

    name: ClassVar[str] = "pretend"
    summary: ClassVar[str] = "nothing at all"

    price: int = param(1, at_least(0), "what it costs")

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        raise AssertionError("a plan computes nothing")

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        raise AssertionError("a plan promises nothing")

    def cost(self, sizes: Sizes) -> Cost:
        return Cost(self.price, 0, 0, 0)

    def reference(self, problem: Problem) -> Tensor:
        raise AssertionError("a plan needs no truth")

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Method]:
        yield from (cls(price) for price in (900, 20, 60))


@dataclass(frozen=True)
class Standard(Pretend):
    """Stands in for exact attention at a price of 1000."""

    name: ClassVar[str] = "standard"
    is_exact: ClassVar[bool] = True

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Method]:
        yield cls(1000)


@dataclass(frozen=True)
class Stranger(Pretend):
    """Cheap, and another mechanism."""

    name: ClassVar[str] = "stranger"
    target: ClassVar[str] = "strange attention"

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Method]:
        yield cls(1)


def offers(*kinds: type[Method]) -> list[Candidate]:
    rate = Rate(0.0, 0.0, 1.0)
    return candidates(SIZES, Rates({kind.name: rate for kind in kinds}, "made up"), kinds)


class Oracle:
    """Answers every question and remembers who was asked."""

    def __init__(self, bound: float = 1e-3, kind: Kind = "deterministic", certain: bool = True, reason: str = ""):
        self.prospect = BoundEstimate(bound, kind, certain, reason)
        self.asked: list[int] = []

    def __call__(self, method: Method) -> BoundEstimate:
        self.asked.append(method.parameters["price"])
        return BoundEstimate(1e-6, "deterministic", True) if method.is_exact else self.prospect


def winner(found: list[Candidate]) -> int:
    first = found[0]
    assert not first.lost
    return int(first.method.parameters["price"])


def test_candidates_come_priced_and_cheapest_first() -> None:
    assert [c.seconds for c in offers(Standard, Pretend)] == [20.0, 60.0, 900.0, 1000.0]


def test_the_cheapest_that_keeps_the_tolerance_wins() -> None:
    assert winner(screened(offers(Standard, Pretend), 1e-2, SURE, Oracle(), thrifty=False)) == 20
    assert winner(screened(offers(Standard, Pretend), 1e-4, SURE, Oracle(), thrifty=False)) == 1000


def test_a_guess_must_clear_the_tolerance_by_a_margin() -> None:
    for bound, price in ((0.6e-2, 20), (0.8e-2, 1000)):
        guess = Oracle(bound, certain=False)
        assert winner(screened(offers(Standard, Pretend), 1e-2, SURE, guess, thrifty=False)) == price
        assert winner(screened(offers(Standard, Pretend), 1e-2, SURE, Oracle(bound), thrifty=False)) == 20


def test_a_thrifty_judge_never_asks_what_might_waste_a_tenth_of_exact() -> None:
    oracle = Oracle()
    found = screened(offers(Standard, Pretend), 1e-2, SURE, oracle, thrifty=True)
    assert WASTE == 0.1 and 900 not in oracle.asked
    assert sum(price for price in oracle.asked if price != 1000) <= WASTE * 1000
    (dear,) = (c for c in found if c.seconds == 900)
    assert dear.lost == "estimated trial cost exceeds 10% of exact" and dear.estimate is None
    generous = Oracle()
    screened(offers(Standard, Pretend), 1e-2, SURE, generous, thrifty=False)
    assert 900 in generous.asked


@dataclass(frozen=True)
class Many(Pretend):
    """Seven settings that together cost more than a tenth of exact."""

    name: ClassVar[str] = "many"

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Method]:
        yield from (cls(price) for price in (22, 24, 26, 28, 30, 32, 34))


@pytest.mark.parametrize("bound", [1e-3, 2.0], ids=["all promise", "none promises"])
def test_a_thrifty_judge_tries_no_more_than_a_tenth_of_exact_in_all(bound: float) -> None:
    oracle = Oracle(bound)
    found = screened(offers(Standard, Many), 1e-2, SURE, oracle, thrifty=True)
    tried = sum(c.seconds for c in found if not c.lost and c.method.name == "many")
    assert tried <= WASTE * 1000
    if bound < 1:
        assert tried > 0 and [c for c in found if c.lost.startswith("estimated trial cost")]


def test_nothing_dearer_than_exact_is_asked() -> None:
    rate = {"standard": Rate(0.0, 0.0, 1.0), "pretend": Rate(0.0, 0.0, 100.0)}
    oracle = Oracle()
    found = screened(candidates(SIZES, Rates(rate, "made up"), (Standard, Pretend)), 1e-2, SURE, oracle, thrifty=False)
    assert oracle.asked == [1000]
    assert [c.lost for c in found if c.method.name == "pretend"] == ["costs more than exact"] * 3


@pytest.mark.parametrize(
    ("tol", "oracle", "lost"),
    [
        (1e-4, Oracle(1e-3), "cannot prove 0.0001"),
        (1e-2, Oracle(8.3e-3, certain=False), "expected 8.3e-03, too near to 0.01 to try"),
        (1e-4, Oracle(1e-3, reason="keys too far apart"), "keys too far apart"),
        (1e-2, Oracle(math.inf, "none"), "makes no promise here"),
        (1e-2, Oracle(math.inf, "none", reason="a mask"), "a mask"),
        (
            1e-2,
            Oracle(1e-3, "statistical"),
            "its promise is statistical; pass confidence= or coverage= to accept it",
        ),
        (None, Oracle(), "no tolerance was given"),
    ],
)
def test_every_loser_knows_why(tol: float | None, oracle: Oracle, lost: str) -> None:
    found = screened(offers(Standard, Pretend, Stranger), tol, SURE, oracle, thrifty=False)
    assert {c.lost for c in found if c.method.name == "pretend"} == {lost}
    assert [c.lost for c in found if c.method.name == "stranger"] == ["its target is strange attention"]
    assert winner(found) == 1000


def test_a_statistical_promise_wins_where_it_is_accepted() -> None:
    both: frozenset[Kind] = frozenset({"deterministic", "statistical"})
    assert winner(screened(offers(Standard, Pretend), 1e-2, both, Oracle(1e-3, "statistical"), thrifty=False)) == 20


def test_a_plan_names_every_candidate_and_one_winner() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
    made = avow.plan(q, k, v, tol=1e-2)
    sizes = Problem.of(q, k, v).sizes
    every = [method for kind in avow.all_methods().values() for method in kind.grid(sizes)]
    assert sorted(c.method.label for c in made.ranked) == sorted(method.label for method in every)
    assert made.chosen is made.ranked[0] and not made.ranked[0].lost
    # Wider arithmetic could win too, at a higher price; everything else has a reason.
    assert all(c.lost or c.method.is_exact for c in made.ranked[1:])


def test_the_printed_plan_has_a_line_and_a_reason_for_each() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
    made = avow.plan(q, k, v, tol=1e-2)
    first, header, *lines = str(made).splitlines()
    unit = "bounds are relative to the longest value that a row sees"
    assert first == f"plan for tolerance 0.01 ({made.source}); {unit}"
    assert header.split() == ["method", "seconds", "memory", "bound", "why"]
    assert len(lines) == len(made.ranked)
    for line, candidate in zip(lines, made.ranked, strict=True):
        assert candidate.method.label in line
        assert candidate.lost == "" or line.endswith(candidate.lost)
    assert [line.startswith("→") for line in lines] == [candidate is made.chosen for candidate in made.ranked]
    assert [line.endswith("cheapest that meets it") for line in lines].count(True) == 1
    assert str(avow.plan(q, k, v)).startswith("plan for no tolerance")


def test_a_plan_without_a_winner_has_none_and_knows_the_best_bound() -> None:
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    made = avow.plan(q, k, v, tol=1e-12)
    assert made.chosen is None and 1e-12 < made.best_bound < 1e-6
    assert Plan((), None, "nothing").chosen is None and math.isinf(Plan((), None, "nothing").best_bound)


def test_a_plan_for_a_longer_sequence_costs_more() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
    near, far = avow.plan(q, k, v, tol=1e-2), avow.plan(q, k, v, tol=1e-2, keys=4096)
    assert far.exact_seconds > 10 * near.exact_seconds
    assert {c.method.label for c in near.ranked} < {c.method.label for c in far.ranked}


def test_one_query_is_priced_as_one_however_many_keys_are_asked_for() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 64, 64))
    step = avow.plan(q, k, v, keys=4096)
    pass_over_all = avow.plan(k, k, v, keys=4096)
    (one,) = [c for c in step.ranked if c.method.label == "exact(precision=native)"]
    (all_of_them,) = [c for c in pass_over_all.ranked if c.method.label == "exact(precision=native)"]
    assert all_of_them.cost.flops == 4096 * one.cost.flops


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Oracle):
    """Takes its time to answer."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(1.0)
        self.clock, self.seconds = clock, seconds

    def __call__(self, method: Method) -> BoundEstimate:
        self.clock.now += self.seconds
        return super().__call__(method)


def asked(calls: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls in which a method that never proves enough, after so many seconds, is asked again."""
    monkeypatch.setattr(Pretend, "grid", classmethod(lambda kind, sizes: iter([kind(20)])))
    clock = Clock()
    trials, when = Trials(clock), []
    for call in range(calls):
        trials.begin("layer")
        oracle = Slow(clock, seconds)
        found = screened(offers(Standard, Pretend), 1e-2, SURE, oracle, True, trials=trials, kind="layer")
        assert winner(found) == 1000 and [c.lost for c in found if c.lost] == ["cannot prove 0.01"]
        when += [call] if 20 in oracle.asked else []
    return when


def test_a_method_that_fails_is_asked_after_pauses_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(400, 0.0, monkeypatch) == [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]


def test_a_method_that_took_long_to_fail_rests_until_that_is_a_tenth_of_exacts_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Exact attention takes 1000 seconds: an answer after 500 seconds is paid for by five calls.
    when = asked(60, 500.0, monkeypatch)
    assert when[:4] == [0, 5, 10, 15]
    assert all(500.0 * (i + 1) <= WASTE * 1000 * later for i, later in enumerate(when[1:]))
    assert asked(4, 1e9, monkeypatch) == [0]


def test_a_method_rests_for_its_own_kind_of_problem_and_until_it_succeeds() -> None:
    trials, method = Trials(Clock()), Pretend(20)
    trials.begin("layer")
    trials.failed("layer", method, "too little", 0.0, 1.0)
    trials.begin("layer")
    trials.begin("other")
    assert trials.resting("layer", method) == "too little" and not trials.resting("other", method)
    assert not trials.resting("layer", Pretend(60))
    trials.kept("layer", method, 1e-3, "deterministic")
    assert not trials.resting("layer", method)


def test_a_method_that_proved_enough_is_run_without_being_asked_until_it_fails() -> None:
    trials, oracle = Trials(Clock()), Oracle(1.0)
    method = Pretend(20)
    trials.begin("layer")
    trials.kept("layer", method, 1e-3, "deterministic")
    for tol, price in ((1e-2, 20), (1e-4, 1000)):
        found = screened(offers(Standard, Pretend), tol, SURE, oracle, True, trials=trials, kind="layer")
        assert winner(found) == price and 20 not in oracle.asked
    assert trials.proved("other", method) is None
    trials.failed("layer", method, "too little", 0.0, 1.0)
    assert trials.proved("layer", method) is None


def test_kinds_that_were_not_seen_for_long_are_forgotten() -> None:
    trials, method = Trials(Clock()), Pretend(20)
    trials.begin("first")
    trials.failed("first", method, "too little", 0.0, 1.0)
    for kind in range(2000):
        trials.begin(kind)
    assert len(trials._calls) <= 1024 and not trials._pauses


def test_the_same_call_is_answered_alike_whether_a_method_rests_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_module = sys.modules["avow.attend"]
    monkeypatch.setattr(attend_module, "_trials", Trials(Clock()))
    free = Rates({"polynomial": Rate(0.0, 0.0, 1e-15)}, "made up")
    monkeypatch.setattr(attend_module, "rates", lambda *_, **__: free)
    asked: list[int] = []
    estimate = Polynomial.estimate_bound
    monkeypatch.setattr(Polynomial, "estimate_bound", lambda *given: asked.append(1) or estimate(*given))
    q, k, v = torch.randn(3, 1, 4, 256, 16).unbind()
    plans: list[int] = []
    make = attend_module._make_plan
    monkeypatch.setattr(attend_module, "_make_plan", lambda *given, **more: plans.append(1) or make(*given, **more))
    found = [avow.attend(3 * q, k, v, tol=1e-2) for _ in range(6)]
    assert len(plans) == 3, "while all methods rest no plan is made"
    assert all(torch.equal(one.out, found[0].out) and one.certificate == found[0].certificate for one in found)
    assert found[0].certificate.method == "exact" and 0 < len(asked) < 6 * 2
    asked.clear()
    monkeypatch.setattr(attend_module, "_trials", Trials(Clock()))
    flat = [avow.attend(1e-3 * q, k, v, tol=1e-2).certificate for _ in range(3)]
    assert [one.method for one in flat] == ["polynomial"] * 3 and len(asked) == 2
