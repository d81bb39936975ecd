r"""What the library itself rests on: how weights move, what a dropped tail costs, and how rounding grows.

Vectors enter through their lengths and inner products alone, so nothing depends on the dimension; sums over any number
of keys are built one key at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import sympy
from flint import arb
from sympy import Integer, Symbol

from avow.core.chart import Chart, Function, Table, curves
from avow.numerics.intervals import dot, most, softmax, total
from avow.theory.claims.claim import Evidence, Falsifier, Formula, claims_on, numbered
from avow.theory.claims.elementary import exp, log, sqrt, tanh
from avow.theory.claims.toolbox import identity, nonnegative, rising, symbols

claim = claims_on("lemmas")
# Masses and sums of exponentials; what two quantities fall short of a bound; the number of keys.
head, tail, more, short, shorter, keys = symbols(positive="H T e", nonnegative="d d_2", integer_positive="n")


def cauchy_schwarz() -> Iterator[Evidence]:
    r""":math:`\langle a,b\rangle \le \|a\|\|b\|` in any dimension, from a square that is not negative."""
    a, b, inner = symbols(positive="a b", real="c")
    square = b**2 * a**2 - 2 * a * b * inner + a**2 * b**2
    says = "Cauchy–Schwarz: 0 ≤ ‖ ‖b‖a − ‖a‖b ‖² = 2‖a‖‖b‖(‖a‖‖b‖ − ⟨a,b⟩), so ⟨a,b⟩ ≤ ‖a‖‖b‖"
    yield identity(square, 2 * a * b * (a * b - inner), says)


def triangle() -> Iterator[Evidence]:
    """A sum is no longer than its parts together, in any dimension; nor is a mean longer than the longest."""
    yield from cauchy_schwarz()
    a, b, reach = symbols(nonnegative="a b M")
    inner = a * b - short
    says = "triangle: (‖a‖ + ‖b‖)² − ‖a + b‖² = 2(‖a‖‖b‖ − ⟨a,b⟩) ≥ 0"
    yield nonnegative((a + b) ** 2 - (a**2 + 2 * inner + b**2), says)
    share = 1 / (1 + Symbol("x", positive=True))
    says = "a mean of vectors of length ≤ M, with one more mixed in, has length ≤ (1−λ)M + λM = M"
    yield nonnegative(reach - ((1 - share) * (reach - short) + share * (reach - shorter)), says)


def _moved(p: float, delta: float) -> float:
    """The most that a set of weight p can gain or lose, twice, when logits move by delta."""
    odds = math.exp(2 * delta)
    return 2 * (p * odds / (p * odds + 1 - p) - p)


def _perturbation_picture() -> Chart:
    moved: dict[str, Function] = {
        "the bound 2·tanh(δ/2)": lambda d: 2 * math.tanh(d / 2),
        "a set of weight 1/2": lambda d: _moved(0.5, d),
        "a set of weight 1/(1+e^δ)": lambda d: _moved(1 / (1 + math.exp(d)), d),
        "a set of weight 0.01": lambda d: _moved(0.01, d),
    }
    title, height = "How far weights move when logits do", "‖softmax(a) − softmax(b)‖₁"
    return curves(title, "δ, the most any logit moves", height, [0.05 * i for i in range(81)], moved)


def _perturbation(bound: Formula, *case: arb) -> arb:
    logits, moves = case[:3], case[3:]
    moved = softmax([a + d for a, d in zip(logits, moves, strict=True)])
    distance = total([abs(p - q) for p, q in zip(softmax(logits), moved, strict=True)])
    return distance - bound(most([abs(d) for d in moves]))


@claim(
    "softmax-perturbation",
    expected="proved",
    statement=r"\|\mathrm{softmax}(a) - \mathrm{softmax}(b)\|_1 \le 2\tanh\!\left(\tfrac12\|a-b\|_\infty\right)",
    plain="When no logit moves by more than δ, the weights move by at most 2·tanh(δ/2) in sum of absolute values; no"
    " smaller bound holds for all logits.",
    assumptions=("real arithmetic", "n ≥ 1 finite logits"),
    subject=lambda delta: 2 * tanh(delta / 2),
    sabotage={
        "the factor two forgotten": lambda delta: tanh(delta / 2),
        "half the slope": lambda delta: 2 * tanh(delta / 4),
        "true, but not the least": lambda delta: delta,
    },
    picture=_perturbation_picture,
    needs=("softmax-categorical",),
    falsifier=Falsifier(numbered("a₁ a₂ a₃", -4, 4) | numbered("d₁ d₂ d₃", -3, 3), _perturbation),
)
def softmax_perturbation(bound: Formula) -> Iterator[Evidence]:
    gained, size, inside = symbols(nonnegative="g delta", positive="P")
    says = "A = the keys that gain, if any: what A gains the others lose, so ‖p − q‖₁ = 2(q(A) − p(A))"
    yield identity(gained - ((1 - (inside + gained)) - (1 - inside)), 2 * gained, says)
    # q_i = p_i e^{d_i}/Z: U and L are what A and the others have before the division.
    says = "q(A) = U/(U + L) grows with U = Σ_A p_i e^(d_i)"
    yield nonnegative((tail + short) / (tail + short + head) - tail / (tail + head), says)
    yield nonnegative(tail / (tail + head) - tail / (tail + head + short), "and falls with L = Σ_others p_i e^(d_i)")
    says = "every d_i ≤ δ gives e^(d_i) ≤ e^δ, and every d_i ≥ −δ gives ≥ e^(−δ)"
    yield rising(exp(size) - exp(size - short), short, 0, says)
    says = "term by term: U ≤ P·e^δ and L ≥ (1−P)·e^(−δ)"
    yield identity(inside * exp(size) + more * exp(size), (inside + more) * exp(size), says)
    # t = e^δ ≥ 1, written so that SymPy sees it; P in (0, 1), likewise.
    t, p = 1 + Symbol("tau", nonnegative=True), 1 / (1 + Symbol("o", positive=True))
    most = p * t / (p * t + (1 - p) / t)
    claimed = bound(log(t)).rewrite(sympy.exp)
    says = "2·tanh(δ/2) − 2(q(A) − P) = 2(t−1)(P(t+1) − 1)²/((t+1)(1 + P(t²−1))) ≥ 0 with t = e^δ"
    yield nonnegative(claimed - 2 * (most - p), says)
    says = "and it is reached: two keys of weights 1/(1+e^δ) and e^δ/(1+e^δ)"
    yield identity(claimed, 2 * (most - p).subs(p, 1 / (1 + t)), says)


def _tail_picture() -> Chart:
    taus = [10 ** (-4 + 0.05 * i) for i in range(81)]
    factors = {
        "bound 2τ": 2.0,
        "tail mean opposite to the head's": 2.0,
        "tail mean orthogonal to it": math.sqrt(2),
        "tail mean at half its length, same side": 0.5,
    }
    series = {name: (taus, [factor * tau for tau in taus]) for name, factor in factors.items()}
    return Chart("What dropping a tail costs", "τ, the tail's share", "error / max‖v‖", series, log_x=True, log_y=True)


def _tail(factor: Formula, *case: arb) -> arb:
    weights, values = softmax(case[:3]), case[3:]
    tau = weights[2]
    head = (weights[0] * values[0] + weights[1] * values[1]) / (1 - tau)
    out = (1 - tau) * head + tau * values[2]
    return abs(abs(out - head) - factor(tau) * abs(values[2] - head))


@claim(
    "tail-mass-output",
    expected="proved",
    statement=r"o = (1-\tau)\,m_H + \tau\,m_T \;\Rightarrow\; \|o - m_H\| = \tau\|m_T - m_H\| \le 2\tau \max_j\|v_j\|",
    plain="Dropping keys of total weight τ and renormalising moves the output by exactly τ times the distance between"
    " the dropped values' mean and the kept values' mean: at most 2τ times the longest value.",
    assumptions=("real arithmetic", "at least one key is kept", "means are weighted by the softmax weights"),
    subject=lambda tau: tau,
    sabotage={"τ²": lambda tau: tau**2, "τ/(1−τ)": lambda tau: tau / (1 - tau), "half of it": lambda tau: tau / 2},
    picture=_tail_picture,
    needs=("softmax-categorical",),
    falsifier=Falsifier(numbered("s₁ s₂ s₃", -3, 3) | numbered("v₁ v₂ v₃", -2, 2), _tail),
)
def tail_mass_output(factor: Formula) -> Iterator[Evidence]:
    kept, dropped, share, reach = symbols(real="m_H m_T", positive="tau", nonnegative="M")
    tau = tail / (head + tail)
    says = "with exponentials summing to H and T: the output is (1−τ)m_H + τm_T, τ = T/(H+T), in every coordinate"
    yield identity((head * kept + tail * dropped) / (head + tail), (1 - tau) * kept + tau * dropped, says)
    says = "so it moves by τ(m_T − m_H)"
    yield identity((1 - share) * kept + share * dropped - kept, factor(share) * (dropped - kept), says)
    yield from triangle()
    yield nonnegative(2 * reach - ((reach - short) + (reach - shorter)), "hence ‖m_T − m_H‖ ≤ ‖m_T‖ + ‖m_H‖ ≤ 2·max‖v‖")


def _dropped_picture() -> Chart:
    shares = {f"{n:,} keys below the gap": lambda gap, n=n: n / (math.exp(gap) + n) for n in (10, 1000, 100_000)}
    title, gaps = "The most a tail can weigh", [0.5 * i for i in range(61)]
    return curves(title, "gap below the kept score", "share of the weight", gaps, shares, log_y=True)


def _dropped(bound: Formula, head: arb, tail: arb, lower: arb, higher: arb) -> arb:
    """Head and tail, and by how much their bounds are off."""
    return tail / (head + tail) - bound(head / (1 + lower), tail + higher)


@claim(
    "dropped-mass",
    expected="proved",
    statement=r"\sum_{\text{tail}} e^{s_j} \le U,\ \sum_{\text{head}} e^{s_i} \ge L \Rightarrow \tau \le \frac{U}{L+U};"
    r"\quad s_j \le u_j,\ s_i \ge \ell_i \text{ give } U = \textstyle\sum e^{u_j},\ L = \sum e^{\ell_i}",
    plain="Intervals for the scores bound the weight of a dropped tail: its highest sum, over that and the head's"
    " lowest.",
    assumptions=("real arithmetic", "at least one key is kept"),
    subject=lambda low, high: high / (low + high),
    sabotage={
        "the head's highest sum instead": lambda low, high: high / (low + high + 1),
        "both at their lowest": lambda low, high: (high - 1) / (low + high - 1),
    },
    picture=_dropped_picture,
    needs=("softmax-categorical",),
    falsifier=Falsifier(numbered("H T", 0.01, 3) | numbered("H/L−1 U−T", 0, 1), _dropped),
)
def dropped_mass(bound: Formula) -> Iterator[Evidence]:
    yield rising(exp(short) - 1, short, 0, "a higher score has a higher exponential")
    says = "key by key, sums of bounds bound the sums, from either side"
    yield nonnegative((tail + short) + (more + shorter) - (tail + more), says)
    says = "τ = T/(H + T) with T ≤ U and H ≥ L is at most U/(L + U)"
    yield nonnegative(bound(head, tail + short) - tail / (head + shorter + tail), says)
    yield identity(bound(head, tail), tail / (head + tail), "and it is reached when both bounds are")


def _ratio_picture() -> Table:
    rows = [(f"{miss:g}", f"{2 * miss:g}", f"{2 * miss / (1 - miss):.4g}") for miss in (1e-3, 1e-2, 0.1, 0.5)]
    headings = ("E / Z", "bound where Z̃ = Z", "bound where Z̃ = Z − E")
    return Table("Weights missed by E in all, out of Z", headings, rows)


def _ratio(bound: Formula, *case: arb) -> arb:
    true, wrong, values = case[:3], case[3:6], case[6:]
    means = [dot(weights, values) / total(weights) for weights in (true, wrong)]
    miss = total([abs(a - b) for a, b in zip(true, wrong, strict=True)])
    return abs(means[1] - means[0]) - bound(miss, total(wrong)) * most([abs(v) for v in values])


@claim(
    "ratio-error",
    expected="proved",
    statement=r"\Bigl\|\frac{\sum_j \tilde a_j v_j}{\tilde Z} - \frac{\sum_j a_j v_j}{Z}\Bigr\|\le \frac{2\sum_j|\tilde"
    r" a_j - a_j|}{\tilde Z}\,\max_j\|v_j\|,\quad Z = \textstyle\sum_j a_j,\ \tilde Z = \sum_j \tilde a_j > 0",
    plain="A normalised average whose unnormalised weights are off by E in all is off by at most 2E over its own"
    " normaliser.",
    assumptions=("real arithmetic", "a_j ≥ 0, not all zero", "Z̃ > 0; single ã_j may be negative"),
    subject=lambda miss, normaliser: 2 * miss / normaliser,
    sabotage={
        "once E": lambda miss, normaliser: miss / normaliser,
        "over twice the normaliser": lambda miss, normaliser: 2 * miss / (2 * normaliser),
    },
    picture=_ratio_picture,
    falsifier=Falsifier(numbered("a₁ a₂ a₃ ã₁ ã₂ ã₃", 0.01, 1) | numbered("v₁ v₂ v₃", -1, 1), _ratio),
)
def ratio_error(bound: Formula) -> Iterator[Evidence]:
    wrong, right, value, *sums = symbols(real="a_t a v S_t S")
    total, normaliser, reach, miss = symbols(positive="Z Z_t", nonnegative="M E")
    mean = sums[1] / total
    says = "with S = Σ a_j v_j and o = S/Z: õ − o = ((S̃ − S) − (Z̃ − Z)o)/Z̃"
    yield identity(sums[0] / normaliser - mean, ((sums[0] - sums[1]) - (normaliser - total) * mean) / normaliser, says)
    says = "one key more adds (ã_j − a_j)(v_j − o): so õ − o = Σ(ã_j − a_j)(v_j − o)/Z̃"
    yield identity((wrong * value - right * value) - (wrong - right) * mean, (wrong - right) * (value - mean), says)
    yield from triangle()
    far = (reach - short) + (reach - shorter)
    yield nonnegative(2 * reach - far, "‖v_j − o‖ ≤ ‖v_j‖ + ‖o‖ ≤ 2·max‖v‖, for o is a mean of the values")
    yield nonnegative(bound(miss, normaliser) * reach - miss * far / normaliser, "together: at most (2E/Z̃)·max‖v‖")


def _residual_picture() -> Chart:
    # One landmark at the origin of a line: φ(x) = e^{-x²/2}, and y stands at 1.
    def phi(x: float) -> float:
        return math.exp(-(x**2) / 2)

    residuals: dict[str, Function] = {
        "|G(x,1) − φ(x)φ(1)|": lambda x: abs(phi(x - 1) - phi(x) * phi(1)),
        "the bound": lambda x: math.sqrt((1 - phi(x) ** 2) * (1 - phi(1) ** 2)),
    }
    xs = [-3 + 0.05 * i for i in range(121)]
    return curves("One landmark at 0: what it leaves over", "x", "residual", xs, residuals)


def _residual(bound: Formula, x: arb, y: arb) -> arb:
    """The Gaussian kernel on a line, and one landmark at 0."""

    def kernel(x: arb, y: arb) -> arb:
        return (-((x - y) ** 2) / 2).exp()

    left = [1 - kernel(point, arb(0)) ** 2 for point in (x, y)]
    residual = kernel(x, y) - kernel(x, arb(0)) * kernel(y, arb(0))
    return abs(residual) - bound(*left)


@claim(
    "residual-cauchy-schwarz",
    expected="proved",
    statement=r"G \succeq 0,\ G(x,x) = 1,\ B\,G(Z,Z)\,B^T \preceq I,\ \varphi(x) = B\,G(Z,x) \;\Rightarrow\;"
    r"|G(x,y) - \varphi(x)\cdot\varphi(y)| \le \sqrt{(1-\|\varphi(x)\|^2)(1-\|\varphi(y)\|^2)}",
    plain="What landmarks leave of a positive semidefinite kernel is itself one, so each residual is at most the"
    " geometric mean of the two on the diagonal.",
    assumptions=(
        "real arithmetic",
        "G(x,y) = ⟨ψ(x), ψ(y)⟩ in some inner product space (Moore–Aronszajn), any number of landmarks",
    ),
    subject=lambda x, y: sqrt(x * y),
    sabotage={
        "the product without its root": lambda x, y: x * y,
        "half of it": lambda x, y: sqrt(x * y) / 2,
        "the smaller factor forgotten": lambda x, y: x,
    },
    picture=_residual_picture,
    falsifier=Falsifier(numbered("x y", -3, 3), _residual),
)
def residual_cauchy_schwarz(bound: Formula) -> Iterator[Evidence]:
    yield from cauchy_schwarz()
    # C = BΨ(Z)ᵀ maps ψ(x) to φ(x), and CCᵀ = B G(Z,Z) Bᵀ ≼ I.
    length, kept, x, y, cross, mix = symbols(positive="N a r_x r_y", real="r_xy lambda")
    says = "a = ‖Cψ‖²: a² = ⟨ψ, CᵀCψ⟩² ≤ ‖ψ‖²⟨Cψ, CCᵀCψ⟩ ≤ ‖ψ‖²·a, so a ≤ ‖ψ‖²: the residual ⟨ψ, (I − CᵀC)ψ⟩ is ≥ 0"
    yield identity((length * kept - kept**2) / kept, length - kept, says)
    form = x + 2 * mix * cross + mix**2 * y
    says = "at ψ(x) + λψ(y), λ = −r_xy/r_yy: r_xx·r_yy − r_xy² ≥ 0"
    yield identity(form.subs(mix, -cross / y) * y, x * y - cross**2, says)
    says = "where r_yy = 0 it is linear in λ, so never negative only if r_xy = 0"
    yield identity(form.subs(y, 0), x + 2 * mix * cross, says)
    yield identity(bound(x, y) ** 2, x * y, "so |r_xy| ≤ √(r_xx·r_yy), with r_xx = 1 − ‖φ(x)‖²; reached where y = x")
    yield nonnegative(bound(x, y), "the root being the one that is not negative")


Shard = tuple[Any, Any]


def _merged(one: Shard, two: Shard) -> Shard:
    """Two shards as one: the logarithm of their summed exponentials, and the output, each with its share."""
    both = log(exp(one[0]) + exp(two[0]))
    return both, exp(one[0] - both) * one[1] + exp(two[0] - both) * two[1]


def _merge_picture() -> Chart:
    shares: dict[str, Function] = {
        "first shard": lambda g: 1 / (1 + math.exp(-g)),
        "second shard": lambda g: 1 / (1 + math.exp(g)),
    }
    gaps = [-8 + 0.2 * i for i in range(81)]
    return curves("Each shard's share of the merged output", "ℓ₁ − ℓ₂", "share", gaps, shares)


def _merge(merge: Formula, one: arb, two: arb, first: arb, second: arb) -> arb:
    whole = one.exp() + two.exp()
    output = (one.exp() * first + two.exp() * second) / whole
    merged = merge((one, first), (two, second))
    return abs(merged[0] - whole.log()).max(abs(merged[1] - output))


@claim(
    "lse-merge",
    expected="proved",
    statement=r"(\ell_1, o_1) \oplus (\ell_2, o_2) = \bigl(\ell,\ e^{\ell_1-\ell}o_1 + e^{\ell_2-\ell}o_2\bigr),\ "
    r"\ell = \ln(e^{\ell_1}+e^{\ell_2}): \text{ exact, commutative, associative}",
    plain="Attention over shards of the keys merges exactly from each shard's log-sum-exp and output, in any order and"
    " grouping.",
    assumptions=("real arithmetic", "every shard holds at least one key"),
    subject=_merged,
    sabotage={
        "outputs averaged": lambda one, two: (_merged(one, two)[0], (one[1] + two[1]) / 2),
        "weighted by the logarithms": lambda one, two: (
            _merged(one, two)[0],
            (one[0] * one[1] + two[0] * two[1]) / (one[0] + two[0]),
        ),
        "the last sum kept": lambda one, two: (two[0], _merged(one, two)[1]),
    },
    picture=_merge_picture,
    needs=("softmax-categorical",),
    falsifier=Falsifier(numbered("ℓ₁ ℓ₂", -4, 4) | numbered("o₁ o₂", -2, 2), _merge),
)
def lse_merge(merge: Formula) -> Iterator[Evidence]:
    # A shard: exponentials that sum to z, and values weighted by them that sum to w.
    z, w = symbols(positive="z_1 z_2 z_3"), symbols(real="w_1 w_2 w_3")
    one, two, three = ((log(total), values / total) for total, values in zip(z, w, strict=True))
    both = merge(one, two)
    yield identity(both[0], log(z[0] + z[1]), "the merged logarithm is that of all exponentials together")
    yield identity(both[1], (w[0] + w[1]) / (z[0] + z[1]), "the merged output is that of all keys together")
    for i, word in enumerate(("logarithm", "output")):
        yield identity(both[i], merge(two, one)[i], f"commutative: the {word} in either order")
        left, right = merge(both, three)[i], merge(one, merge(two, three))[i]
        yield identity(left, right, f"associative: the {word} in either grouping")


def _gamma_picture() -> Chart:
    series = {}
    for name, u in (("float32", 2.0**-24), ("float64", 2.0**-53), ("bfloat16", 2.0**-8)):
        counts = [2**i for i in range(24) if 2**i * u < 0.5]
        series[name] = (counts, [n * u / (1 - n * u) for n in counts])
    return Chart("How rounding adds up", "roundings", "γ", series, log_x=True, log_y=True)


def _rounding(gamma: Formula, unit: arb, *parts: arb) -> arb:
    product = arb(1)
    for i, part in enumerate(parts):
        product *= (1 + unit * part) if i % 2 == 0 else 1 / (1 + unit * part)
    return abs(product - 1) - gamma(arb(len(parts)), unit)


@claim(
    "rounding-gamma",
    expected="proved",
    statement=r"|\delta_i| \le u,\ nu < 1 \;\Rightarrow\; \Bigl|\prod_{i=1}^n (1+\delta_i)^{\pm1} - 1\Bigr|"
    r" \le \gamma_n = \frac{nu}{1-nu}",
    plain="n roundings, each multiplying or dividing by 1 + δ with |δ| ≤ u, move a result by at most nu/(1 − nu).",
    assumptions=("no overflow or underflow", "n·u < 1"),
    subject=lambda n, u: n * u / (1 - n * u),
    sabotage={
        "to first order alone": lambda n, u: n * u,
        "one rounding too few": lambda n, u: (n - 1) * u / (1 - n * u),
    },
    picture=_gamma_picture,
    falsifier=Falsifier({"u": (0.01, 0.18)} | numbered("δ₁/u δ₂/u δ₃/u δ₄/u δ₅/u", -1, 1), _rounding),
)
def rounding_gamma(gamma: Formula) -> Iterator[Evidence]:
    # (n+1)u < 1 leaves room: u = 1/(n + 1 + room).
    room = Symbol("r", positive=True)
    u = 1 / (keys + 1 + room)
    yield nonnegative(gamma(Integer(1), u) - u, "one factor 1 + δ: |δ| ≤ u ≤ γ_1")
    yield nonnegative(gamma(Integer(1), u) - u / (1 - u), "one division: |1/(1+δ) − 1| ≤ u/(1−u) ≤ γ_1")
    grown = gamma(keys, u)
    says = "one more factor: |(1+θ)(1+δ) − 1| ≤ γ_n + u + γ_n·u ≤ γ_(n+1)"
    yield nonnegative(gamma(keys + 1, u) - (grown + u + grown * u), says)
    says = "one more division: |(1+θ)/(1+δ) − 1| ≤ (γ_n + u)/(1−u) ≤ γ_(n+1)"
    yield nonnegative(gamma(keys + 1, u) - (grown + u) / (1 - u), says)
