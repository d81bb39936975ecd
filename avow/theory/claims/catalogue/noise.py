r"""What one query does when the keys it was made for are noisy.

The query of an average, :math:`q = \beta(\mu_a + \mu_b)` with orthonormal means, holds while the noise of its scores is
small, and picks one key at random when it is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Matrix, Rational, Symbol, erf, sqrt

from avow.core.chart import Chart, Function, Table, curves
from avow.numerics.intervals import ball, dot, most, normal_cdf, softmax
from avow.theory.claims.claim import Falsifier, Formula, claims_on
from avow.theory.claims.elementary import exp
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.toolbox import counterexample, enclosed, identity, law, nonnegative, symbols
from avow.theory.constructions.noise import DiscreteLaw, GaussianLaw, noise_analysis

claim = claims_on("queries")
alpha, beta, delta = symbols(positive="alpha beta delta")
# Coordinates in an orthonormal basis of the means' span: a score only sees the keys there.
mean_a, mean_b, mean_j = (Matrix([int(i == axis) for i in range(3)]) for axis in range(3))
query = beta * (mean_a + mean_b)


def _variance(covariance: Matrix) -> Any:
    """The variance of a key's score."""
    return (query.T * covariance * query)[0]


def _even_picture() -> Chart:
    chance: dict[str, Function] = {"erf(ln 3/√(8αβ²))": lambda product: math.erf(math.log(3) / math.sqrt(8 * product))}
    title = "Two noisy keys: how often both weights are within ¼ of ½"
    return curves(title, "αβ²", "probability", [10 ** (i / 10) for i in range(-40, 41)], chance, log_x=True)


def _turned(turn: arb) -> tuple[tuple[arb, arb], tuple[arb, arb]]:
    """Two orthonormal means, turned in their plane."""
    sine, cosine = (2 * arb.pi() * turn).sin_cos()
    return (cosine, sine), (-sine, cosine)


def _still_averages(variance: Formula, quiet: arb, loud: arb, _: arb) -> arb:
    """Two keys with orthonormal means, turned by a part of a full turn."""
    # To average is to have both weights within ¼ of ½, which is |gap| ≤ ln 3, at least every other time.
    return arb(1) / 2 - (arb(3).log() / (8 * 10**-quiet * (10**loud) ** 2).sqrt()).erf()


def _variance_excess(variance: Formula, quiet: arb, loud: arb, turn: arb) -> arb:
    alpha, beta = 10**-quiet, 10**loud
    query = [beta * (a + b) for a, b in zip(*_turned(turn), strict=True)]
    # Each of the two keys moves by itself, each coordinate with variance α.
    return abs(variance(alpha, beta) / (2 * alpha * dot(query, query)) - 1)


_QUIET_AND_LOUD = {"−log₁₀α": (2, 8), "log₁₀β": (0, 5), "turn": (0, 1)}


@claim(
    "noise-isotropic",
    expected="corrected",
    statement=r"k_i \sim N(\mu_i, \alpha I),\ \mu_i \text{ orthonormal},\ q = \beta(\mu_a+\mu_b):\quad"
    r"\alpha \to 0,\ \beta \to \infty \;\Rightarrow\; \alpha_a, \alpha_b \to \tfrac12",
    plain="Keys with isotropic noise of vanishing variance α: β(μ_a + μ_b) with β large still averages.",
    amended=r"(k_a-k_b)\cdot q \sim N(0, 4\alpha\beta^2), \text{ so } \alpha_a,\alpha_b \to \tfrac12 \text{ in"
    r" probability as }\beta\to\infty,\ \alpha\beta^2 \to 0; \text{ not where } \alpha\beta^2 \not\to 0",
    amended_plain="The gap between the two scores has variance 4αβ². The query averages when αβ² → 0, not"
    " merely α → 0.",
    assumptions=("real arithmetic", "keys are independent", "n ≥ 2 keys, their number fixed"),
    subject=lambda alpha, beta: 4 * alpha * beta**2,
    sabotage={
        "only one of the two keys moves": lambda alpha, beta: 2 * alpha * beta**2,
        "a query that does not amplify noise": lambda alpha, beta: 4 * alpha,
    },
    picture=_even_picture,
    falsifier=Falsifier(_QUIET_AND_LOUD, _still_averages, _variance_excess),
)
def noise_isotropic(variance: Formula) -> Iterator[Evidence]:
    spread = alpha * sympy.eye(3)
    claimed = variance(alpha, beta)
    gap = 2 * _variance(spread)
    yield identity(gap, claimed, "independent keys: the gap (k_a − k_b)·q has variance 2α‖q‖² = 4αβ²", True)
    mean = (mean_a - mean_b).dot(query)
    yield identity(mean, 0, "and mean 0", True)

    v = Symbol("v", positive=True)
    within = erf(delta / sqrt(2 * v))
    one_over = erf(delta / sqrt(2 * claimed.subs(alpha, 1 / beta)))
    yield identity(sympy.limit(one_over, beta, sympy.oo), 0, "α = 1/β vanishes, yet P(|gap| ≤ δ) → 0 for every δ")
    noise, strength = arb(1) / 10**6, arb(10**4)
    even = ((arb(3).log()) / (2 * variance(noise, strength)).sqrt()).erf()
    says = "two keys, α = 10⁻⁶, β = 10⁴: the weights are within ¼ of ½ (|gap| ≤ ln 3) less than once in twenty"
    facts = {"alpha": 1e-6, "beta": 1e4, "variance": variance(noise, strength).str(8), "probability": even.str(12)}
    yield counterexample(bool(even < 0.05), says, "exact law in balls", **facts)

    yield identity(sympy.limit(within, v, 0, "+"), 1, "P(|gap| ≤ δ) = erf(δ/√(2v)) → 1 as v = 4αβ² → 0", True)
    yield identity(sympy.limit(within, v, sympy.oo), 0, "it depends on αβ² alone, and → 0 as αβ² → ∞", True)
    yield nonnegative(-sympy.diff(within, v), "it falls as αβ² grows: where αβ² ≥ c, it is at most that of c", True)
    says = "which → 0 with δ: αβ² that does not vanish leaves no average"
    yield identity(sympy.limit(within, delta, 0, "+"), 0, says, True)
    to_other = (mean_a - mean_j).dot(query)
    yield identity(to_other, beta, "a gap from a or b to any other key has mean β and the same variance", True)
    behind = (1 - erf(to_other / 2 / sqrt(2 * claimed))) / 2
    says = "P(a gap to key j < β/2) = Φ(−1/(4√α)) → 0, whatever β; there are 2(n − 2) of them"
    yield identity(sympy.limit(behind, alpha, 0, "+"), 0, says, True)
    rival, others, x, y = symbols(nonnegative="A B x y")
    says = (
        "e^(s_b − s_a) = A ≤ e^δ and the others' sum B ≤ (n−2)e^(−β/2): α_a ≥ 1/(1 + e^δ + (n−2)e^(−β/2)), so α_b too"
    )
    yield nonnegative(1 / (1 + rival + others) - 1 / (1 + (rival + x) + (others + y)), says, True)
    least = 1 / (1 + exp(delta) + others * exp(-beta / 2))
    says = "which → ½ as β → ∞, then δ → 0; and two weights of at least ½ − o(1) are at most ½ + o(1)"
    yield identity(sympy.limit(sympy.limit(least, beta, sympy.oo), delta, 0), Rational(1, 2), says, True)
    quiet, strong = arb(1) / 10**6, arb(30)
    sigma = variance(quiet, strong).sqrt()
    fails = 1 - (arb(3) / 10 / sigma / arb(2).sqrt()).erf() + 2 * 998 * normal_cdf(-strong / 2 / sigma)
    least = 1 / (1 + (arb(3) / 10).exp() + 998 * (-strong / 2).exp())
    says = "a thousand keys, α = 10⁻⁶, β = 30: probability at least this that both weights are as large as `weights`"
    yield law(1 - fails, 0.999999, 1, says, True, alpha=1e-6, beta=30, weights=least.str(10))


def _stretch_picture() -> Table:
    rows = []
    for n, eps, c in itertools.product((10, 1000, 100000), (0.1, 0.01), (0.5, 1.0, 1.5)):
        t = n / eps
        whole = t**c + t + n - 2
        rows.append((n, eps, c, t**c / whole, t / whole))
    return Table("Weights when key 1 comes c times as long", ("keys", "ε", "c", "on value 1", "on value 2"), rows)


def _one_or_other(stretch: tuple[Rational, Rational], eps: arb, n: int) -> arb:
    ratio = n / eps
    broken = []
    for length, root in zip(stretch, (1 / ratio.sqrt(), ratio.sqrt()), strict=True):
        first = (ball(Fraction(length)) * ratio.log()).exp()
        weights = [term / (first + ratio + n - 2) for term in (first, ratio)]
        broken.append(abs(weights[0] / weights[1] / root - 1))
    return most(broken)


@claim(
    "noise-one-key-discrete",
    expected="proved",
    statement=r"k_1 = c\,u,\ c\in\{\tfrac12,\tfrac32\},\ q = \ln(n/\varepsilon)(u+k_2):\quad"
    r"\alpha_1/\alpha_2 = e^{(c-1)\ln(n/\varepsilon)} = (n/\varepsilon)^{\pm1/2}",
    plain="If key 1 comes half or one and a half times as long, the query of an average gives one value or the other,"
    " never their mean.",
    assumptions=("real arithmetic", "u, k_2, …, k_n orthonormal", "n ≥ 2, 0 < ε ≤ 1"),
    subject=(Rational(1, 2), Rational(3, 2)),
    sabotage={
        "a key of the right length": (Rational(1), Rational(1)),
        "a key that is only ever too long": (Rational(5, 4), Rational(3, 2)),
    },
    picture=_stretch_picture,
    falsifier=Falsifier({"ε": (0.01, 0.99), "n": range(2, 1001)}, _one_or_other),
)
def noise_one_key_discrete(stretch: tuple[Rational, Rational]) -> Iterator[Evidence]:
    # n/ε = z², so both powers are visible; n − 2 others.
    z, free, others = symbols(positive="z varepsilon", integer_nonnegative="j")
    eps = (others + 2) / z**2
    first = [z ** (2 * c) for c in stretch]
    second = z**2
    for name, term, power in (("short", first[0], -1), ("long", first[1], 1)):
        yield identity(term / second, z**power, f"the {name} key: e^(s_1)/e^(s_2) = (n/ε)^(c−1) = (n/ε)^({power}/2)")
    to_second = second / (first[0] + second + others)
    yield nonnegative(to_second - 1 / (1 + eps + 1 / z), "c = ½: α_2 ≥ 1/(1 + ε + (n/ε)^(−1/2))")
    to_first = first[1] / (first[1] + second + others)
    yield nonnegative(to_first - 1 / (1 + (1 + eps) / z), "c = 3/2: α_1 ≥ 1/(1 + (1 + ε)·(n/ε)^(−1/2))")
    yield identity(sympy.limit(1 / (1 + (1 + free) / z), z, sympy.oo), 1, "so as n/ε → ∞ it is all v_1")
    says = "or v_2, to ε; with equal chances the mean is never seen"
    yield identity(sympy.limit(1 / (1 + free + 1 / z), z, sympy.oo), 1 / (1 + free), says)
    for c, near in zip(stretch, ((0.0031, 0.987), (0.9968, 0.0032)), strict=True):
        ratio = arb(1000) * 100
        raised = (ratio.log() * int(c.p) / int(c.q)).exp()
        weights = [term / (raised + ratio + 998) for term in (raised, ratio)]
        close = all(bool(abs(weight - value) < 5e-5) for weight, value in zip(weights, near, strict=True))
        says = f"a thousand keys, ε = 0.01, c = {c}: the weights are {near} to four places"
        facts = {"n": 1000, "eps": 0.01, "first": weights[0].str(12), "second": weights[1].str(12)}
        yield enclosed(close, says, False, **facts)
    t = math.log(1000 / 0.01)
    law = DiscreteLaw((Fraction(1, 2), Fraction(3, 2)), (Fraction(1, 2), Fraction(1, 2)))
    analysis = noise_analysis(1000, [{0: t, 1: t}], law, eta=0.9)
    says = "the library's analysis: neither outcome comes within 0.9·max‖v‖ of the mean"
    facts = {"errors": [outcome.error[0] for outcome in analysis.outcomes]}
    yield enclosed(analysis.success == (0.0, 0.0), says, False, **facts)


class Scaled(NamedTuple):
    """The weights of two keys when key a is X times its mean, and the variance of X."""

    weight_a: Formula = lambda beta, x: 1 / (1 + exp(-beta * (x - 1)))
    weight_b: Formula = lambda beta, x: 1 / (1 + exp(-beta * (1 - x)))
    variance: Rational = Rational(1, 2)


def _scaled_picture() -> Chart:
    series = {
        f"β = {strength}": lambda w, strength=strength: 0.5 * (1 + math.erf(math.log(w / (1 - w)) / strength))
        for strength in (1, 5, 25, 500)
    }
    title = "Key a is X ~ N(1, ½) times its mean: how its weight is distributed"
    return curves(title, "w", "P(α_a ≤ w)", [i / 200 for i in range(1, 200)], series)


def _within_reach(scaled: Scaled, beta: arb, x: arb, _: arb) -> arb:
    """Key a is X times its mean, which is turned by a part of a full turn."""
    stated = 1 / (1 + (beta * (1 - x)).exp())
    return (abs(x - 1) - arb(1) / 2).max(abs(softmax([beta * x, beta])[1] - stated))


def _logistic_excess(scaled: Scaled, beta: arb, x: arb, turn: arb) -> arb:
    weights = [weight(beta, x) for weight in (scaled.weight_a, scaled.weight_b)]
    # Along its own mean, a covariance of ½μμᵀ has this variance.
    mean, _ = _turned(turn)
    along = dot(mean, mean) ** 2 / 2
    variances = ball(Fraction(scaled.variance)), along
    chances = [normal_cdf((x - 1) / variance.sqrt()) for variance in variances]
    pairs = zip([*weights, chances[0]], [*softmax([beta * x, beta]), chances[1]], strict=True)
    return most([abs(claimed - true) for claimed, true in pairs])


@claim(
    "noise-one-key-gauss",
    expected="corrected",
    statement=r"\Sigma_a = \alpha I + \tfrac12\mu_a\mu_a^\top,\ \alpha \to 0:\quad k_a \approx X\mu_a,\ X \in"
    r" [\tfrac12,\tfrac32],\quad \alpha_a = \alpha_b = \frac{1}{1+e^{\beta(1-X)}}",
    plain="With noise ½ along its own mean, key a is X times its mean with X between ½ and 3/2, and both weights are"
    " 1/(1 + e^(β(1−X))).",
    amended=r"X \sim N(1,\tfrac12),\ P(X<0) = \Phi(-\sqrt2);\quad \alpha_a = \sigma(\beta(X-1)),\ \alpha_b ="
    r" \sigma(\beta(1-X));\quad \alpha_a \to \mathrm{Bernoulli}(\tfrac12) \text{ as } \beta\to\infty",
    amended_plain="X is normal with mean 1 and variance ½: unbounded, and negative with probability 0.0786. The weights"
    " are σ(β(X−1)) and σ(β(1−X)); as β grows, one key takes all, each half of the time.",
    assumptions=("real arithmetic", "two keys, q = β(μ_a + μ_b), orthonormal means", "α → 0 where X is spoken of"),
    subject=Scaled(),
    sabotage={
        "the same weight for both": Scaled(weight_b=Scaled().weight_a),
        "½ taken for the standard deviation": Scaled(variance=Rational(1, 4)),
    },
    picture=_scaled_picture,
    falsifier=Falsifier({"β": (0.1, 20), "X": (-2, 4), "turn": (0, 1)}, _within_reach, _logistic_excess),
)
def noise_one_key_gauss(scaled: Scaled) -> Iterator[Evidence]:
    outside = (arb(1) / 2).erfc()
    says = "X leaves [½, 3/2] nearly half of the time: 2Φ(−1/√2)"
    yield counterexample(bool(outside > 0.479), says, "exact law in balls", probability=outside.str(15))
    true_b, stated_b = 1 / (1 + arb(5).exp()), 1 / (1 + arb(-5).exp())
    says = "β = 10, X = 3/2: key b has weight 0.0067, not the 0.9933 stated for both, which would sum to 1.99"
    yield counterexample(bool(stated_b - true_b > 0.98), says, "balls", stated=stated_b.str(10), true=true_b.str(10))

    spread = alpha * sympy.eye(3)
    stretched = spread + mean_a * mean_a.T / 2
    along = (mean_a.T * stretched * mean_a)[0]
    yield identity(sympy.limit(along, alpha, 0), scaled.variance, "X = ⟨k_a, μ_a⟩ has variance α + ½ → ½", True)
    x, logit, weakness = symbols(real="X y", positive="z")
    scores = beta * x, beta
    for name, score, weight in zip("ab", scores, scaled[:2], strict=True):
        share = exp(score) / (exp(scores[0]) + exp(scores[1]))
        yield identity(weight(beta, x), share, f"k_a = X·μ_a, scores βX and β: the weight of key {name}", True)
    sigma = ball(Fraction(scaled.variance)).sqrt()
    says = "P(X < 0) = Φ(−√2): the key points the other way"
    yield law(normal_cdf(-1 / sigma), 0.0786496035251, 0.0786496035252, says, True)
    gap = _variance(stretched) + _variance(spread)
    yield identity(gap, beta**2 * (scaled.variance + 4 * alpha), "the gap has mean 0 and variance β²(½ + 4α)", True)
    below = (1 + erf(sympy.simplify(logit / sqrt(2 * gap).subs(beta, 1 / weakness)))) / 2
    says = "P(α_a ≤ w) = Φ(logit(w)/√variance), continuous in 1/β, is ½ at 1/β = 0 for every w in (0, 1): Bernoulli(½)"
    yield identity(below.subs(weakness, 0), Rational(1, 2), says, True)
    torn = 2 * normal_cdf(-(arb(99).log()) / (1000 * sigma))
    yield law(torn, 0.99, 1, "β = 1000, α = 0: one key has over 99% of the weight, with this probability", True)
    analysis = noise_analysis(2, [{0: 1000.0, 1: 1000.0}], GaussianLaw(1.0, float(scaled.variance)), eta=0.01)
    says = "the library's analysis at β = 1000: the weight's variance is nearly that of a fair coin, ¼"
    facts = {"mean": list(analysis.mean), "variance": list(analysis.variance)}
    yield enclosed(analysis.variance[0] > 0.249, says, True, **facts)
