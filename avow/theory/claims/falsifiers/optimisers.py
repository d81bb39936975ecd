"""How momentum, running averages and penalties on the weights could do something else than is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from flint import arb

from avow.numerics import intervals
from avow.numerics.intervals import most, total
from avow.theory.claims.catalogue.optimisers_decay import AdamRules
from avow.theory.claims.interval_checks import Numbers, balled
from avow.theory.claims.random_search import Excess, Hunt, numbered


def _steps(alpha: arb, rate: arb, gradients: Numbers) -> list[arb]:
    """What v ← αv + εg is after each gradient, from 0."""
    found = [arb(0)]
    for gradient in gradients:
        found.append(alpha * found[-1] + rate * gradient)
    return found[1:]


def _momentum(conversion: Callable[[Any, Any], tuple[Any, Any]]) -> Excess:
    def excess(case: Numbers) -> arb:
        beta, delta, *gradients = case
        momentum = _steps(*conversion(beta, delta), gradients)
        average = _steps(beta, 1 - beta, gradients)
        return most([abs(v - delta * u) for v, u in zip(momentum, average, strict=True)])

    return excess


def _unrolled(weight: Callable[[Any, Any, Any], Any]) -> Excess:
    def excess(case: Numbers) -> arb:
        beta, *gradients = case
        last = len(gradients)
        unrolled = total([weight(beta, last, i + 1) * gradient for i, gradient in enumerate(gradients)])
        return abs(_steps(beta, 1 - beta, gradients)[-1] - unrolled)

    return excess


def _bias(total: Callable[[Any, Any], Any]) -> Excess:
    shares = [balled(lambda beta, t=t: total(beta, t), 1) for t in range(1, 6)]

    def excess(case: Numbers) -> arb:
        beta, mean = case
        averages = _steps(beta, 1 - beta, [mean] * len(shares))
        return most([abs(found - share(beta) * mean) for found, share in zip(averages, shares, strict=True)])

    return excess


def _decay(rate: Callable[[Any, Any], Any]) -> Excess:
    def excess(case: Numbers) -> arb:
        theta, gradient, eta, gamma = case
        penalised = theta - eta * (gradient + 2 * gamma * theta)
        return abs(penalised - ((1 - rate(eta, gamma)) * theta - eta * gradient))

    return excess


def _adam(rules: AdamRules) -> Excess:
    def excess(case: Numbers) -> arb:
        theta, g, eta, gamma, decay, root, more, e = case

        def taken(rule: Callable[..., Any], strength: arb, r: arb) -> arb:
            """What a step takes of a weight: each rule is a line in θ."""
            return 1 - (rule(theta + 1, g, eta, strength, r, e) - rule(theta, g, eta, strength, r, e))

        shrunk, less = (taken(rules.penalised, gamma, r) for r in (root, root + more))
        kept = taken(rules.decoupled, decay, root)
        return most([abs(shrunk - 2 * eta * gamma / (root + e)), less - shrunk, abs(kept - eta * decay)])

    return excess


def _only_plain(penalty: Fraction) -> Excess:
    def excess(case: Numbers) -> arb:
        times, momentum, eta = case

        def ends(strength: arb) -> arb:
            """θ after 40 heavy-ball steps on ½(θ − 1)² + strength·θ², from 0."""
            theta = v = arb(0)
            for _ in range(40):
                v = momentum * v + (theta - 1) + 2 * strength * theta
                theta = theta - eta * v
            return theta

        # To regularise is to end at a smaller weight, which the statement denies to all but plain SGD.
        return abs(ends(arb(0))) - abs(ends(times * intervals.ball(penalty)))

    return excess


HUNTS: Mapping[str, Hunt] = {
    "momentum-ema": Hunt(
        {"β": (0.01, 0.99), "δ": (0.01, 3)} | numbered("g₁ g₂ g₃", -2, 2),
        lambda momenta: _momentum(momenta.stated),
        lambda momenta: _momentum(momenta.amended),
    ),
    "ema-unrolled": Hunt({"β": (0.01, 0.99)} | numbered("g₁ g₂ g₃ g₄", -2, 2), _unrolled),
    "ema-bias": Hunt({"β": (0.01, 0.99), "E g": (-2, 2)}, _bias),
    "sgd-l2-decay": Hunt(numbered("θ g", -2, 2) | numbered("η γ", 0.01, 1), _decay),
    "adam-l2-vs-w": Hunt(
        numbered("θ g", -2, 2) | numbered("η γ λ", 0.01, 1) | numbered("√v̂ more", 0.01, 5) | {"ϵ": (0, 0.1)},
        _adam,
        reads="Two weights, one with a √v̂ that is larger by `more`.",
    ),
    "l2-only-sgd": Hunt(
        {"γ/½": (0.1, 2), "α": (0.1, 0.9), "η": (0.1, 0.5)},
        _only_plain,
        reads="Forty steps of momentum α on ½(θ − 1)² + γθ², from 0, with the penalty and without.",
    ),
}
