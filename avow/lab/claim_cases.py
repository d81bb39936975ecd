"""A claim's own figure, drawn again for one case of a search, with the case marked on it.

A figure of the catalogue is of numbers that its author chose; a counterexample has others. For claims in this file the
same figure can be drawn with the numbers of the case. Everything is float arithmetic: balls have judged the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from avow.core.chart import Chart
from avow.theory.claims import Claim
from avow.theory.claims.random_search import STATED

# The series that has one point: the case.
CASE = "this case"

Case = Mapping[str, float]


def case_chart(claim: Claim, variant: str, case: Case) -> Chart | None:
    """The figure of a claim as stated for one case, or None where there is none."""
    draw = _FIGURES.get(claim.id)
    return draw(claim, case) if draw is not None and variant == STATED else None


def _spread(low: float, high: float, points: int = 121) -> list[float]:
    return [low + (high - low) * i / (points - 1) for i in range(points)]


def _line(claim: Claim, case: Case) -> Chart:
    """The line mx + b and the network that is said to be it."""
    units: Any = claim.subject.stated if claim.amended else claim.subject
    m, b, x = case["m"], case["b"], case["x"]
    xs = _spread(-3, 3)
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "mx + b": (xs, [m * at + b for at in xs]),
        "the network": (xs, [units.at(m, b, at) for at in xs]),
        CASE: ([x], [units.at(m, b, x)]),
    }
    return Chart(
        f"The line {m:g}·x {'−' if b < 0 else '+'} {abs(b):g}, and the network said to be it", "x", "f(x)", series
    )


def _shortest(claim: Claim, case: Case) -> Chart:
    """The length that is said to be needed, and a query that is shorter and copies."""
    eps, n = case["ε"], case["n"]

    def length(keys: float) -> float:
        return math.sqrt((keys - 1) / keys) * math.log((keys - 1) / (0.999 * eps))

    counts = [2 * 100 ** (i / 60) for i in range(61)]
    series = {
        "half of 2·ln(n/ε), said to be needed": (counts, [math.log(keys / eps) for keys in counts]),
        "a query that copies": (counts, [length(keys) for keys in counts]),
        CASE: ([n], [length(n)]),
    }
    return Chart(f"How long a query must be to copy, ε = {eps:g}", "keys", "length", series, log_x=True)


def _copied(claim: Claim, case: Case) -> Chart:
    """The weight of key 1 over all queries on the line of three keys."""
    eps, keys = case["ε"], [case["k₁"], case["k₂"], case["k₃"]]

    def weight(query: float) -> float:
        return 1 / sum(math.exp(min(query * (key - keys[0]), 700)) for key in keys)

    queries = _spread(-20, 20, 401)
    best = max(queries, key=weight)
    series = {
        "weight on key 1": (queries, [weight(query) for query in queries]),
        "asked for, 1/(1 + ε)": ([-20.0, 20.0], [1 / (1 + eps)] * 2),
        CASE: ([best], [weight(best)]),
    }
    places = ", ".join(f"{key:g}" for key in keys)
    return Chart(f"Keys at {places}: the weight on the first", "query", "weight on key 1", series)


def _even(claim: Claim, case: Case) -> Chart:
    """How often two noisy keys share the weight, at the noise and the length of the case."""
    product = 10 ** (2 * case["log₁₀β"] - case["−log₁₀α"])

    def chance(noise: float) -> float:
        return math.erf(math.log(3) / math.sqrt(8 * noise))

    noises = [10 ** (i / 10) for i in range(-80, 81)]
    series = {
        "probability": (noises, [chance(noise) for noise in noises]),
        "every other time": ([noises[0], noises[-1]], [0.5, 0.5]),
        CASE: ([product], [chance(product)]),
    }
    title = "Two noisy keys: how often both weights are within ¼ of ½"
    return Chart(title, "αβ²", "probability", series, log_x=True)


def _half_as_long(claim: Claim, case: Case) -> Chart:
    """The weight of head 1 where its key comes half as long."""
    eps, n = case["ε"], case["n"]

    def weight(keys: float) -> float:
        return 1 / (1 + (keys - 1) * math.sqrt(eps / keys))

    counts = [2 * 500 ** (i / 60) for i in range(61)]
    series = {
        "head 1, t = ln(n/ε)": (counts, [weight(keys) for keys in counts]),
        "asked for, 1/(1 + ε)": ([counts[0], counts[-1]], [1 / (1 + eps)] * 2),
        CASE: ([n], [weight(n)]),
    }
    title = f"Head 1 when its key comes half as long, ε = {eps:g}"
    return Chart(title, "keys", "weight on value 1", series, log_x=True)


def _beyond(claim: Claim, case: Case) -> Chart:
    """x² and the network through it, beyond the last kink."""
    kinks, reach, x = round(case["kinks a side"]), case["reach"], case["x"]
    step = reach / kinks

    def network(at: float) -> float:
        # Between two kinks the chord of x², beyond the last one the last chord.
        place = min(int(abs(at) / step), kinks - 1)
        return (place * step) ** 2 + (2 * place + 1) * step * (abs(at) - place * step)

    far = 1.1 * max(abs(x), reach)
    xs = _spread(-far, far)
    series = {"x²": (xs, [at * at for at in xs]), "the network": (xs, [network(at) for at in xs])}
    return Chart(
        f"A network through x² up to {reach:g} on either side", "x", "f(x)", series | {CASE: ([x], [network(x)])}
    )


def _momentum(claim: Claim, case: Case) -> Chart:
    """Three steps of the average, and of momentum as it is said to be the same."""
    beta, delta = case["β"], case["δ"]
    gradients = [case[name] for name in ("g₁", "g₂", "g₃")]

    def steps(keep: float, rate: float, factor: float) -> list[float]:
        path, v = [], 0.0
        for gradient in gradients:
            v = keep * v + rate * gradient
            path.append(-factor * v)
        return path

    average, momentum = steps(beta, 1 - beta, delta), steps(delta * beta, delta * (1 - beta), 1.0)
    worst = max(range(3), key=lambda i: abs(average[i] - momentum[i]))
    series = {
        "average": ([1, 2, 3], average),
        "momentum (δβ, δ(1 − β))": ([1, 2, 3], momentum),
        CASE: ([worst + 1], [momentum[worst]]),
    }
    return Chart(f"β = {beta:g}, δ = {delta:g}: the same average as momentum?", "step", "Δθ", series)


_FIGURES: dict[str, Callable[[Claim, Case], Chart]] = {
    "relu-linear-a": _line,
    "relu-linear-b": _line,
    "copy-shortest": _shortest,
    "copy-possible": _copied,
    "noise-isotropic": _even,
    "heads-discrete": _half_as_long,
    "relu-square-line": _beyond,
    "momentum-ema": _momentum,
}
