r"""What one query can mix: the mean of two values, or any distribution over some of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from flint import arb
from sympy import Symbol, exp, log, sqrt

from avow.core.chart import Chart, Table
from avow.errors import OutOfReach
from avow.numerics.intervals import most, total
from avow.theory.claims import toolbox
from avow.theory.claims.catalogue.queries import below_one, eps
from avow.theory.claims.claim import Evidence, Unproved, claim
from avow.theory.claims.random_search import Falsifier, Numbers, interval_function, numbered
from avow.theory.constructions.queries import average_query, mixture_query


def _average_picture() -> Chart:
    ts = [10 ** (i / 10) for i in range(71)]
    series = {f"{n} keys": (ts, [t / (2 * t + n - 2) for t in ts]) for n in (3, 100, 10000)}
    return Chart(
        "Averaging two of n orthonormal keys", "t, for q = ln(t)(k_a + k_b)", "each weight", series, log_x=True
    )


@claim(
    "average-two",
    topic="queries",
    expected="proved",
    statement=r"k_i \text{ orthonormal}:\ q = \ln(n/\varepsilon)(k_1+k_2) \text{ gives } \alpha_1 = \alpha_2 \ge"
    r"\frac{1}{2+\varepsilon},\ \|q\| \le 2\sqrt2\ln(n/\varepsilon)",
    plain="Among orthonormal keys, ln(n/ε) times the sum of two of them shares the weight evenly between the two.",
    assumptions=("real arithmetic", "n ≥ 2, 0 < ε < 1"),
    subject=lambda n, eps, log: (log(n / eps), log(n / eps)),
    sabotage={
        "blind to how many keys there are": lambda n, eps, log: (log(1 / eps), log(1 / eps)),
        "more of one key": lambda n, eps, log: (log(n / eps), 2 * log(n / eps)),
    },
    picture=_average_picture,
)
def average_two(query: Any) -> Iterator[Evidence]:
    others = Symbol("j", integer=True, nonnegative=True)
    count = others + 2
    on = query(count, eps, log)
    total = exp(on[0]) + exp(on[1]) + others
    weights = [exp(score) / total for score in on]
    t = count / eps
    for name, weight in zip("ab", weights, strict=True):
        yield toolbox.identity(weight, t / (2 * t + others), f"α_{name} = t/(2t + n − 2) exactly, t = n/ε")
    yield toolbox.nonnegative(weights[0] - 1 / (2 + eps), "which is at least 1/(2+ε)")
    yield toolbox.identity(on[0] ** 2 + on[1] ** 2, 2 * log(t) ** 2, "its norm is √2·ln(n/ε)")
    spare = 2 * sqrt(2) * log(t) - sqrt(2) * log(t)
    yield toolbox.nonnegative(spare.subs(eps, below_one), "half of the norm allowed")
    scores = query(arb(1000), arb(1) / 100, lambda x: x.log())
    weight = scores[0].exp() / (scores[0].exp() + scores[1].exp() + 998)
    yield toolbox.enclosed(
        lambda: bool(weight > 1 / (2 + arb(1) / 100)),
        "a thousand keys, ε = 0.01",
        n=1000,
        eps=0.01,
        weight=weight.str(12),
        norm=(scores[0] ** 2 + scores[1] ** 2).sqrt().str(12),
    )
    found = average_query(torch.eye(50), subset=(0, 1), eps=0.01)
    yield toolbox.kept(found, "the library's query for two of fifty keys", norm=found.norm)


def _mixture_picture() -> Table:
    target, keys = (0.5, 0.3, 0.2), 1000
    rows = [
        (
            t,
            *(round(w * math.exp(t) / (math.exp(t) + keys - 3), 6) for w in target),
            (keys - 3) / (math.exp(t) + keys - 3),
        )
        for t in (5, 10, 15, 20)
    ]
    return Table(
        "Weights reached on three of 1000 orthonormal keys, asked for ½, 0.3, 0.2",
        ("t", "first", "second", "third", "distance from the target"),
        rows,
    )


@claim(
    "mixture-any",
    topic="queries",
    expected="proved",
    statement=r"k_i \text{ orthonormal},\ w > 0 \text{ on } S,\ \textstyle\sum_S w_i = 1:\ q = \sum_{i\in S}(t+\ln"
    r" w_i)k_i\text{ gives } \alpha_i = \frac{w_i e^t}{e^t + n - |S|} \to w_i",
    plain="Any target distribution over a subset of orthonormal keys is reachable, as closely as wanted; exactly where"
    " the subset is all of them. For general keys exactly when the log-targets lie in range(K) + span(1).",
    assumptions=("real arithmetic", "targets are positive on the subset and sum to 1"),
    subject=lambda t, w: t + log(w),
    sabotage={
        "targets in place of their logarithms": lambda t, w: t + w,
        "a product in place of the sum": lambda t, w: t * log(w),
    },
    picture=_mixture_picture,
)
def mixture_any(score: Any) -> Iterator[Evidence]:
    w, rest, t = Symbol("w", positive=True), Symbol("rho", positive=True), Symbol("t", real=True)
    outside = Symbol("j", integer=True, positive=True)
    yield toolbox.identity(exp(score(t, w)), w * exp(t), "orthonormal keys: each key of S has e^s_i = w_i·e^t")
    total = exp(score(t, w)) + rest * exp(t) + outside
    weight = (exp(score(t, w)) / total).subs(rest, 1 - w)
    yield toolbox.identity(weight, w * exp(t) / (exp(t) + outside), "Σw = 1: α_i = w_i·e^t/(e^t + n − |S|)")
    missing = 1 - exp(t) / (exp(t) + outside)
    yield toolbox.identity(
        missing.subs(t, log(outside * (1 - eps) / eps)),
        eps,
        "the weight outside S is exactly ε at t = ln((n−|S|)(1−ε)/ε): any distance is reached",
    )
    yield toolbox.identity(weight.subs(outside, 0), w, "where S is every key the target is met exactly, for every t")
    shift, partition = Symbol("c", real=True), Symbol("Z", positive=True)
    s = Symbol("s", real=True)
    yield toolbox.identity(
        exp(log(w) + shift) / (w * exp(shift) + (1 - w) * exp(shift)),
        w,
        "any keys: Kq = ln w + c·1 gives softmax(Kq) = w",
    )
    yield toolbox.identity(log(exp(s) / partition), s - log(partition), "and softmax(Kq) = w gives Kq = ln w + ln(Z)·1")
    yield from _out_of_reach()
    made = mixture_query(torch.eye(50), [0.5, 0.3, 0.2] + [0.0] * 47, eps=0.01)
    yield toolbox.kept(made, "the library's query for ½, 0.3, 0.2 on three of fifty keys", norm=made.norm)


def _out_of_reach() -> Iterator[Evidence]:
    """Weights that keys 0, 1, 2 on a line cannot have, whatever the query."""
    y, wanted = Symbol("y", real=True), [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]
    terms = [exp(key * y) for key in (0, 1, 2)]
    first, second, third = (term / sum(terms) for term in terms)
    yield toolbox.identity(second**2, first * third, "keys 0, 1, 2 on a line: α_2² = α_1·α_3 for every query")
    yield toolbox.rational(
        wanted[1] ** 2 != wanted[0] * wanted[2],
        "so (¼, ½, ¼) is out of reach",
        wanted=wanted[1] ** 2,
        forced=wanted[0] * wanted[2],
    )
    try:
        mixture_query(torch.tensor([[0.0], [1.0], [2.0]]), [float(weight) for weight in wanted], eps=0.01)
    except OutOfReach as refusal:
        combination = refusal.combination
    else:
        raise Unproved("the library made a query for weights that no query gives")
    yield toolbox.rational(
        sum(combination) == 0 and sum(c * key for key, c in enumerate(combination)) == 0 and any(combination),
        "the library refuses them, with a combination of the keys that vanishes: Σ c_i·ln α_i = 0, and not for these",
        combination=[str(c) for c in combination],
    )


# Searches for counterexamples: the excess of a case over each statement.


def _average(query: Any, case: Numbers) -> arb:
    eps, count = case
    scores = query(count, eps, lambda x: x.log())
    whole = scores[0].exp() + scores[1].exp() + (count - 2)
    return most([1 / (2 + eps) - score.exp() / whole for score in scores])


def _mixture(score: Any, case: Numbers) -> arb:
    reached = interval_function(score, 2)
    t, outside, *parts = case
    targets = [part / total(parts) for part in parts]
    terms = [reached(t, target).exp() for target in targets]
    scale = t.exp() / (t.exp() + outside)
    return most([abs(term / (total(terms) + outside) - w * scale) for term, w in zip(terms, targets, strict=True)])


FALSIFIERS: Mapping[str, Falsifier] = {
    "average-two": Falsifier({"ε": (0.01, 0.99), "n": (2, 200)}, _average, whole=frozenset("n")),
    "mixture-any": Falsifier(
        {"t": (-5, 10), "n−|S|": (0, 200)} | numbered("w₁ w₂ w₃", 0.01, 1),
        _mixture,
        whole=frozenset({"n−|S|"}),
        reads="Three targets in proportion to w₁, w₂, w₃, among so many other orthonormal keys.",
    ),
}
