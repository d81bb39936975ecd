"""What can be drawn at random, claim by claim: the numbers of a case, and by how much it breaks the statement.

An equality is broken by the size of the difference of its sides, an inequality by what one side has over the other.
Claims that are not here speak of symbols, programs or laws rather than of numbers that could be drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flint import arb

from avow.claims.hunting import Excess, Hunt, balled

Numbers = Sequence[arb]


def _numbered(names: str, low: float, high: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(names.split(), (low, high))


def _most(found: Sequence[arb]) -> arb:
    return functools.reduce(lambda a, b: a.max(b), found)


def _total(found: Sequence[arb]) -> arb:
    return sum(found, arb(0))


def _softmax(scores: Numbers) -> list[arb]:
    terms = [score.exp() for score in scores]
    return [term / _total(terms) for term in terms]


def _categorical(weight: Callable[[Any, Any], Any]) -> Excess:
    share = balled(weight, 2)

    def excess(scores: Numbers) -> arb:
        terms = [score.exp() for score in scores]
        weights = [share(term, _total(terms)) for term in terms]
        return _most([abs(_total(weights) - 1), *(-one for one in weights)])

    return excess


def _gap(gap: Any) -> Excess:
    others, enough, needed = balled(gap.others, 1), balled(gap.enough, 2), balled(gap.needed, 1)

    def excess(case: Numbers) -> arb:
        eps, *gaps = case
        weight = 1 / (1 + _total([(-one).exp() for one in gaps]))
        near, least = 1 / (1 + eps), functools.reduce(lambda a, b: a.min(b), gaps)
        rest = _total([(-one).exp() for one in gaps])
        broken = []
        # α ≥ 1/(1+ε) exactly when the others sum to at most what is allowed: each side without the other breaks it.
        broken.append((weight - near).min(rest - others(eps)))
        broken.append((near - weight).min(others(eps) - rest))
        broken.append((least - enough(arb(len(gaps) + 1), eps)).min(near - weight))
        broken.append((weight - near).min(needed(eps) - least))
        return _most(broken)

    return excess


def _perturbation(bound: Callable[[Any], Any]) -> Excess:
    limit = balled(bound, 1)

    def excess(case: Numbers) -> arb:
        logits, moves = case[:3], case[3:]
        moved = _softmax([a + d for a, d in zip(logits, moves, strict=True)])
        distance = _total([abs(p - q) for p, q in zip(_softmax(logits), moved, strict=True)])
        return distance - limit(_most([abs(d) for d in moves]))

    return excess


def _tail(factor: Callable[[Any], Any]) -> Excess:
    moved = balled(factor, 1)

    def excess(case: Numbers) -> arb:
        scores, values = case[:3], case[3:]
        weights = _softmax(scores)
        tau = weights[2]
        head = (weights[0] * values[0] + weights[1] * values[1]) / (1 - tau)
        out = (1 - tau) * head + tau * values[2]
        return abs(abs(out - head) - moved(tau) * abs(values[2] - head))

    return excess


def _dropped(bound: Callable[[Any, Any], Any]) -> Excess:
    most = balled(bound, 2)

    def excess(case: Numbers) -> arb:
        head, tail, lower, higher = case
        return tail / (head + tail) - most(head / (1 + lower), tail + higher)

    return excess


def _ratio(bound: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(bound, 2)

    def excess(case: Numbers) -> arb:
        true, wrong, values = case[:3], case[3:6], case[6:]
        means = [
            _total([a * v for a, v in zip(weights, values, strict=True)]) / _total(weights) for weights in (true, wrong)
        ]
        miss = _total([abs(a - b) for a, b in zip(true, wrong, strict=True)])
        return abs(means[1] - means[0]) - limit(miss, _total(wrong)) * _most([abs(v) for v in values])

    return excess


def _residual(bound: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(bound, 2)

    def kernel(x: arb, y: arb) -> arb:
        return (-((x - y) ** 2) / 2).exp()

    def excess(case: Numbers) -> arb:
        x, y = case
        left = [1 - kernel(point, arb(0)) ** 2 for point in (x, y)]
        return abs(kernel(x, y) - kernel(x, arb(0)) * kernel(y, arb(0))) - limit(*left)

    return excess


def _merge(merge: Callable[[Any, Any], Any]) -> Excess:
    parts = [balled(lambda a, b, c, d, i=i: merge((a, b), (c, d))[i], 4) for i in (0, 1)]

    def excess(case: Numbers) -> arb:
        (one, two), values = case[:2], case[2:]
        whole = one.exp() + two.exp()
        output = (one.exp() * values[0] + two.exp() * values[1]) / whole
        merged = [part(one, values[0], two, values[1]) for part in parts]
        return abs(merged[0] - whole.log()).max(abs(merged[1] - output))

    return excess


def _rounding(gamma: Callable[[Any, Any], Any]) -> Excess:
    limit = balled(gamma, 2)

    def excess(case: Numbers) -> arb:
        unit, *parts = case
        product = arb(1)
        for i, part in enumerate(parts):
            product *= (1 + unit * part) if i % 2 == 0 else 1 / (1 + unit * part)
        return abs(product - 1) - limit(arb(len(parts)), unit)

    return excess


def _separated(lengths: Any) -> Excess:
    stated, general = balled(lengths.stated, 2), balled(lengths.general, 3)

    def excess(case: Numbers) -> arb:
        eps, *turns = case
        # Unit keys from 20° to 180° away from key 1; the first formula speaks of distances of at least 1.
        cosines = [(arb.pi() * (1 + 8 * turn) / 9).cos() for turn in turns]
        keys, apart = arb(len(turns) + 1), (2 - 2 * _most(cosines)).sqrt()

        def missing(length: arb) -> arb:
            return 1 / (1 + eps) - 1 / (1 + _total([(length * (cosine - 1)).exp() for cosine in cosines]))

        return missing(general(keys, eps, apart)).max(missing(stated(keys, eps)).min(apart - 1))

    return excess


def _average(query: Any) -> Excess:
    def excess(case: Numbers) -> arb:
        eps, count = case
        scores = query(count, eps, lambda x: x.log())
        total = scores[0].exp() + scores[1].exp() + (count - 2)
        return _most([1 / (2 + eps) - score.exp() / total for score in scores])

    return excess


def _rbf(logit: Callable[[Any, Any, Any], Any]) -> Excess:
    shifted = balled(logit, 3)

    def excess(case: Numbers) -> arb:
        query, keys, sigma = case[:2], [case[2:4], case[4:6]], case[6]
        dots = [query[0] * key[0] + query[1] * key[1] for key in keys]
        by_kernel = _softmax([-((query[0] - key[0]) ** 2 + (query[1] - key[1]) ** 2) / (2 * sigma) for key in keys])
        squares = [key[0] ** 2 + key[1] ** 2 for key in keys]
        by_logits = _softmax([shifted(inner, square, sigma) for inner, square in zip(dots, squares, strict=True)])
        return abs(by_kernel[0] - by_logits[0])

    return excess


def _line(units: Any) -> Excess:
    return lambda case: abs(units.at(*case) - (case[0] * case[2] + case[1]))


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
        return _most([abs(v - delta * u) for v, u in zip(momentum, average, strict=True)])

    return excess


def _unrolled(weight: Callable[[Any, Any, Any], Any]) -> Excess:
    def excess(case: Numbers) -> arb:
        beta, *gradients = case
        last = len(gradients)
        unrolled = _total([weight(beta, last, i + 1) * gradient for i, gradient in enumerate(gradients)])
        return abs(_steps(beta, 1 - beta, gradients)[-1] - unrolled)

    return excess


def _bias(total: Callable[[Any, Any], Any]) -> Excess:
    shares = [balled(lambda beta, t=t: total(beta, t), 1) for t in range(1, 6)]

    def excess(case: Numbers) -> arb:
        beta, mean = case
        averages = _steps(beta, 1 - beta, [mean] * len(shares))
        return _most([abs(found - share(beta) * mean) for found, share in zip(averages, shares, strict=True)])

    return excess


def _decay(rate: Callable[[Any, Any], Any]) -> Excess:
    def excess(case: Numbers) -> arb:
        theta, gradient, eta, gamma = case
        penalised = theta - eta * (gradient + 2 * gamma * theta)
        return abs(penalised - ((1 - rate(eta, gamma)) * theta - eta * gradient))

    return excess


_EPS = {"ε": (0.01, 0.99)}
_PLANE = _numbered("q₁ q₂ k₁₁ k₁₂ k₂₁ k₂₂", -2, 2)

HUNTS: Mapping[str, Hunt] = {
    "softmax-categorical": Hunt(_numbered("s₁ s₂ s₃ s₄", -8, 8), _categorical),
    "copy-gap": Hunt(_EPS | _numbered("s₁−s₂ s₁−s₃ s₁−s₄", -1, 12), _gap),
    "copy-separated": Hunt(_EPS | _numbered("turn₂ turn₃ turn₄ turn₅", 0, 1), _separated),
    "average-two": Hunt(_EPS | {"n": (2, 200)}, _average, whole=frozenset("n")),
    "rbf-equals-dot": Hunt(_PLANE | {"σ": (0.5, 2)}, _rbf),
    "relu-linear-a": Hunt(
        _numbered("m b x", -3, 3), lambda lines: _line(lines.stated), lambda lines: _line(lines.amended)
    ),
    "relu-linear-b": Hunt(_numbered("m b x", -3, 3), _line),
    "momentum-ema": Hunt(
        {"β": (0.01, 0.99), "δ": (0.01, 3)} | _numbered("g₁ g₂ g₃", -2, 2),
        lambda momenta: _momentum(momenta.stated),
        lambda momenta: _momentum(momenta.amended),
    ),
    "ema-unrolled": Hunt({"β": (0.01, 0.99)} | _numbered("g₁ g₂ g₃ g₄", -2, 2), _unrolled),
    "ema-bias": Hunt({"β": (0.01, 0.99), "E g": (-2, 2)}, _bias),
    "sgd-l2-decay": Hunt(_numbered("θ g", -2, 2) | _numbered("η γ", 0.01, 1), _decay),
    "softmax-perturbation": Hunt(_numbered("a₁ a₂ a₃", -4, 4) | _numbered("d₁ d₂ d₃", -3, 3), _perturbation),
    "tail-mass-output": Hunt(_numbered("s₁ s₂ s₃", -3, 3) | _numbered("v₁ v₂ v₃", -2, 2), _tail),
    "dropped-mass": Hunt(_numbered("H T", 0.01, 3) | _numbered("H/L−1 U−T", 0, 1), _dropped),
    "ratio-error": Hunt(_numbered("a₁ a₂ a₃ ã₁ ã₂ ã₃", 0.01, 1) | _numbered("v₁ v₂ v₃", -1, 1), _ratio),
    "residual-cauchy-schwarz": Hunt(_numbered("x y", -3, 3), _residual),
    "lse-merge": Hunt(_numbered("ℓ₁ ℓ₂", -4, 4) | _numbered("o₁ o₂", -2, 2), _merge),
    "rounding-gamma": Hunt({"u": (0.01, 0.18)} | _numbered("δ₁/u δ₂/u δ₃/u δ₄/u δ₅/u", -1, 1), _rounding),
}
