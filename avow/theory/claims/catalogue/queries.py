r"""What one query can copy, how short it may be, and what it can mix: two values, or any distribution over some.

Keys :math:`k_1 \dots k_n`, scores :math:`s_i = \langle k_i, q \rangle`, weights :math:`\alpha = softmax(s)`. Everything
is shown for every number of keys, dimension and :math:`\varepsilon`: a few vectors span a small space whatever the
dimension, so coordinates in an orthonormal basis of that span lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from sympy import Matrix, Rational, Symbol

from avow.core.chart import Chart, Function, Table, curves
from avow.errors import InsideHull, OutOfReach
from avow.numerics.intervals import ball, most, softmax, total
from avow.theory.claims.claim import Falsifier, Formula, Ranges, claims_on, numbered
from avow.theory.claims.elementary import exp, log, sqrt
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.toolbox import counterexample, enclosed, identity, kept, nonnegative, rational, symbols
from avow.theory.constructions.queries import average_query, copy_query, mixture_query

claim = claims_on("queries")
# n keys, m of them others; an excess that is not negative; an ε below 1.
m, eps, slack = symbols(integer_positive="m", positive="varepsilon", nonnegative="delta")
n, below_one = m + 1, 1 / (1 + Symbol("x", positive=True))


def tangent(amended: bool = False) -> Iterator[Evidence]:
    """:math:`e^u \\ge 1 + u` for every real u: a convex function stays above its tangent."""
    u = Symbol("u", real=True)
    above = exp(u) - 1 - u
    yield identity(above.subs(u, 0), 0, "e^u − 1 − u is 0 at u = 0", amended)
    yield identity(sympy.diff(above, u).subs(u, 0), 0, "so is its slope", amended)
    bend = sympy.diff(above, u, 2)
    yield nonnegative(bend, "and it bends upwards everywhere, so e^u ≥ 1 + u for every u", amended)


class Lengths(NamedTuple):
    """How far along k_1 the query goes: as stated for separation 1, and for separation r."""

    stated: Formula = lambda n, eps: 2 * log(n / eps)
    general: Formula = lambda n, eps, r: 2 / r**2 * log((n - 1) / eps)


def _copy_separated_picture() -> Chart:
    # The other unit keys have a cosine of ½ with key 1.
    weights = {f"{n} keys": lambda t, n=n: 1 / (1 + (n - 1) * math.exp(-t / 2)) for n in (10, 100, 1000, 100000)}
    title, lengths = "Other keys at distance 1: the weight copied", [0.5 * i for i in range(61)]
    return curves(title, "length of the query", "weight on key 1", lengths, weights)


def _separated(lengths: Lengths, eps: arb, *turns: arb) -> arb:
    """Key i lies 20° + 160°·turn away from key 1, all of them of length 1."""
    # Unit keys from 20° to 180° away from key 1; the first formula speaks of distances of at least 1.
    cosines = [(arb.pi() * (1 + 8 * turn) / 9).cos() for turn in turns]
    keys, apart = arb(len(turns) + 1), (2 - 2 * most(cosines)).sqrt()

    def missing(length: arb) -> arb:
        return 1 / (1 + eps) - 1 / (1 + total((length * (cosine - 1)).exp() for cosine in cosines))

    return missing(lengths.general(keys, eps, apart)).max(missing(lengths.stated(keys, eps)).min(apart - 1))


EPSILON: Ranges = {"ε": (0.01, 0.99)}


@claim(
    "copy-separated",
    expected="proved",
    statement=r"\|k_i\| = 1,\ \|k_1 - k_i\| \ge 1 \;\Rightarrow\; q = 2\ln(n/\varepsilon)\,k_1 \text{ has norm }"
    r"2\ln(n/\varepsilon) \text{ and } \alpha_1 \ge \frac{1}{1+\varepsilon}",
    plain="Among unit keys that keep a distance of at least 1 from key 1, a query of length 2·ln(n/ε) along key 1 puts"
    " all but ε/(1+ε) of the weight on it.",
    assumptions=("real arithmetic", "n ≥ 2, 0 < ε < 1, any dimension", "for separation r: t = (2/r²)·ln((n−1)/ε)"),
    subject=Lengths(),
    sabotage={
        "half as long": Lengths(stated=lambda n, eps: log(n / eps)),
        "blind to how many keys there are": Lengths(stated=lambda n, eps: 2 * log(1 / eps)),
        "1/r in place of 1/r²": Lengths(general=lambda n, eps, r: 2 / r * log((n - 1) / eps)),
    },
    picture=_copy_separated_picture,
    needs=("copy-gap",),
    falsifier=Falsifier(EPSILON | numbered("turn₂ turn₃ turn₄ turn₅", 0, 1), _separated),
)
def copy_separated(lengths: Lengths) -> Iterator[Evidence]:
    cosine, r, t = symbols(real="c", positive="r", nonnegative="t")
    first, other = Matrix([1, 0]), Matrix([cosine, sqrt(1 - cosine**2)])
    apart = (first - other).dot(first - other)
    yield identity(apart, 2 - 2 * cosine, "two unit keys lie in a plane: ‖k_1 − k_i‖² = 2 − 2⟨k_1, k_i⟩")
    inner = 1 - (r**2 + slack) / 2
    says = "so ‖k_1 − k_i‖² = r² + δ means ⟨k_1, k_i⟩ = 1 − (r² + δ)/2"
    yield identity(apart.subs(cosine, inner), r**2 + slack, says)
    yield nonnegative(Rational(1, 2) - inner.subs(r, 1), "at distance 1 or more, ⟨k_1, k_i⟩ ≤ ½")
    yield nonnegative(t * (1 - inner) - t * r**2 / 2, "q = t·k_1 with t ≥ 0: every gap s_1 − s_i is at least t·r²/2")
    stretches = {"2·ln(n/ε)": (lengths.stated(n, eps), 1), "(2/r²)·ln((n−1)/ε)": (lengths.general(n, eps, r), r)}
    for name, (length, far) in stretches.items():
        yield nonnegative(length.subs(eps, below_one), f"t = {name} is not negative for ε < 1")
        others = (n - 1) * exp(-length * far**2 / 2)
        yield nonnegative(eps - others, f"t = {name}: n − 1 terms of at most e^(−t·r²/2) sum to at most ε")
    yield enough()
    along = lengths.stated(n, eps) * first
    yield identity(along.dot(along), (2 * log(n / eps)) ** 2, "the query's norm is 2·ln(n/ε)")
    # Of a thousand keys with ε = 1/100, the others all at 60° to k_1.
    weight = 1 / (1 + 999 * (-arb(10**5).log()).exp())
    facts = {"n": 1000, "eps": 0.01, "length": (2 * arb(10**5).log()).str(12), "weight": weight.str(12)}
    says, promised = "the nearest keys allowed, all at 60° to k_1", Fraction(100, 101)
    yield enclosed(weight > ball(promised), says, False, **facts, promised=str(promised))
    yield kept(copy_query(torch.eye(20), target=3, eps=0.01), "the library's query for twenty orthonormal keys")


def enough(amended: bool = False) -> Evidence:
    """A sum of the other exponentials of at most ε is a weight of at least 1/(1+ε)."""
    total = Symbol("S", nonnegative=True)
    short = 1 / (1 + total) - 1 / (1 + total + slack)
    return nonnegative(short, "Σ_{i≠1} e^(s_i − s_1) = S ≤ ε gives α_1 = 1/(1+S) ≥ 1/(1+ε)", amended)


def _copy_shortest_picture() -> Chart:
    lengths: dict[str, Function] = {
        "2·ln(n/ε)": lambda n: 2 * math.log(n / 0.01),
        "the shortest, orthonormal keys": lambda n: math.sqrt((n - 1) / n) * math.log((n - 1) / 0.01),
    }
    counts = [2**i for i in range(1, 21)]
    return curves("How long a query must be to copy, ε = 0.01", "keys", "length", counts, lengths, log_x=True)


def _shorter(query: Formula, eps: arb, n: int) -> arb:
    """n orthonormal keys, and the shorter query made for 0.999·ε."""
    # The shortest copies with equality, which no ball can show: it is asked for a thousandth more.
    along, against = query(arb(n), eps * 999 / 1000)
    weight = 1 / (1 + (n - 1) * (against - along).exp())
    length = (along * along + (n - 1) * against * against).sqrt()
    return (weight - 1 / (1 + eps)).min((n / eps).log() - length)


@claim(
    "copy-shortest",
    expected="refuted",
    statement=r"\|k_i\| = 1,\ \|k_1-k_i\| \ge 1,\ \alpha_1 \ge \tfrac{1}{1+\varepsilon} \;\Rightarrow\;"
    r"\|q\| \ge \tfrac12\cdot 2\ln(n/\varepsilon)",
    plain="The query 2·ln(n/ε)·k_1 is about as short as a query that copies can be: none is half as long.",
    assumptions=("real arithmetic", "n ≥ 2, 0 < ε < 1", "the counterexample has orthonormal keys"),
    # q = a·k_1 + b·Σ k_i: what a shorter query has along the key it copies, and along every other.
    subject=lambda n, eps: ((n - 1) / n * log((n - 1) / eps), -log((n - 1) / eps) / n),
    sabotage={
        "as long, but along key 1 alone": lambda n, eps: (sqrt((n - 1) / n) * log((n - 1) / eps), 0 * eps),
        "half of it": lambda n, eps: ((n - 1) / n * log((n - 1) / eps) / 2, -log((n - 1) / eps) / n / 2),
        "the stated query itself": lambda n, eps: (2 * log(n / eps), 0 * eps),
    },
    picture=_copy_shortest_picture,
    needs=("copy-gap",),
    falsifier=Falsifier(EPSILON | {"n": range(2, 201)}, _shorter),
)
def copy_shortest(query: Formula) -> Iterator[Evidence]:
    on_first, on_others = query(n, eps)
    gap = log((n - 1) / eps)
    square = on_first**2 + (n - 1) * on_others**2
    least = (n - 1) / n * gap**2
    yield identity(square, least, "orthonormal keys, q = a·k_1 + b·Σ k_i: its length is √((n−1)/n)·ln((n−1)/ε)")
    others = (n - 1) * exp(on_others - on_first)
    yield nonnegative(eps - others, "and it copies: the other terms sum to at most ε")

    yield from tangent()
    yield identity((n - 1) * exp(-gap), eps, "with L = ln((n−1)/ε), n − 1 terms of e^−L sum to ε")
    mean, qq, qc, cc = symbols(real="g qq qc", positive="cc")
    touched = (n - 1) * exp(-gap) * (1 + gap - mean)
    says = "tangents at −L: terms that sum to at most ε have a mean gap of at least L (Jensen)"
    yield identity(eps - touched, eps * (mean - gap), says)
    left_over = qq - 2 * (qc / cc) * qc + (qc / cc) ** 2 * cc
    yield identity(left_over, qq - qc**2 / cc, "‖q − c·⟨q,c⟩/‖c‖²‖² = ‖q‖² − ⟨q,c⟩²/‖c‖², so ‖q‖ ≥ ⟨q,c⟩/‖c‖")
    says = "c = k_1 − mean of the others has ⟨q,c⟩ ≥ L: nothing is shorter than √((n−1)/n)·L, the optimum"
    yield identity(gap**2 / (1 + (n - 1) * (1 / (n - 1)) ** 2), least, says)
    yield nonnegative(gap.subs(eps, below_one), "L is not negative for ε < 1, and √((n−1)/n) < 1")
    yield identity(log(n / eps) - gap, log(1 + 1 / m), "ln(n/ε) − L = ln(1 + 1/(n−1))")
    yield nonnegative(log(1 + 1 / m), "which is positive: for every n and ε the stated query is over twice as long")

    around = [Matrix([1, sign * sqrt(3)]) / 2 for sign in (1, -1)]
    middle = Matrix([1, 0]) - (around[0] + around[1]) / 2
    says = (
        "where the others surround k_1 at 60°, ‖c‖ = ½ and nothing is shorter than 2·L: in the worst case it is right"
    )
    yield identity(gap**2 / middle.dot(middle), (2 * gap) ** 2, says)
    for count in (10, 1000):
        # The optimum copies with equality, which no ball can show: it is asked for a thousandth more.
        along, against = query(arb(count), arb(999) / 100000)
        length = (along**2 + (count - 1) * against**2).sqrt()
        weight = 1 / (1 + (count - 1) * (against - along).exp())
        stated, promised = 2 * (arb(count) / (arb(1) / 100)).log(), 1 / (1 + arb(1) / 100)
        says = f"{count} orthonormal keys: a query less than half as long copies as well"
        facts = {"n": count, "eps": 0.01, "stated": stated.str(12), "shorter": length.str(12)}
        facts |= {"times": (stated / length).str(8), "weight": weight.str(12)}
        yield counterexample(bool(weight > promised) and bool(2 * length < stated), says, "balls", **facts)
    around_first = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5], [0.5, -(0.75**0.5)]], dtype=torch.float64)
    for name, keys in (("ten orthonormal keys", torch.eye(10)), ("keys around k_1 at 60°", around_first)):
        shortest = copy_query(keys, target=0, eps=0.01, shortest=True)
        says = f"the library's shortest query, {name}: proved to be so by weak duality"
        yield kept(shortest, says, length=shortest.norm, gap=shortest.gap)


class Hull(NamedTuple):
    """A target between two other keys at −1 and 1, and the weights of a combination."""

    target: int
    share: Symbol


def _copy_possible_picture() -> Chart:
    targets = {"outside": 1.5, "a corner taken twice": 1.0, "inside": 0.5, "the middle": 0.0}
    weights = {
        f"k_1 = {k:g} ({where})": lambda t, k=k: 1 / (1 + math.exp(t * (1 - k)) + math.exp(-t * (1 + k)))
        for where, k in targets.items()
    }
    title, lengths = "Other keys at −1 and 1: what a longer query copies", [0.25 * i for i in range(81)]
    return curves(title, "length of the query", "weight on key 1", lengths, weights)


def _uncopied(hull: Hull, eps: arb, target: arb, one: arb, two: arb, *_: arb) -> arb:
    """Keys on a line. As stated, the best of all queries; else q, and a target λ of k₂ and the rest of k₃."""
    before, after = target - one.min(two), one.max(two) - target
    if not (before > 0 and after > 0):
        # Outside the others, or level with one: a longer query always gains.
        return before.min(after)
    # The weight 1/(1 + e^(after·y) + e^(−before·y)) is largest where its slope is zero.
    y = (before / after).log() / (before + after)
    return 1 / (1 + eps) - 1 / (1 + (after * y).exp() + (-before * y).exp())


def _by_its_hull(hull: Hull, eps: arb, target: arb, one: arb, two: arb, share: arb, query: arb) -> arb:
    own = 1 / (1 + (query * (1 - hull.target)).exp() + (-query * (1 + hull.target)).exp())
    # Shares of a convex combination are not negative.
    part = abs(share) if hull.share.is_nonnegative else share
    inside = part * one + (1 - part) * two
    mixed = softmax([query * inside, query * one, query * two])[0]
    # Outside, the query from the nearest end to the key copies once it is long enough.
    away = 1 + abs(target)
    length = (2 / eps).log() / (away * away)
    copied = softmax([length * away * x for x in (one.max(two) + away, one, two)])[0]
    return most([own - arb(1) / 2, mixed - arb(1) / 2, 1 / (1 + eps) - copied])


@claim(
    "copy-possible",
    expected="corrected",
    statement=r"\forall \varepsilon > 0\ \exists q:\ \alpha_1 \ge \frac{1}{1+\varepsilon}",
    plain="Any value can be copied, given a long enough query.",
    amended=r"\Bigl(\forall \varepsilon > 0\ \exists q:\ \alpha_1 \ge \tfrac{1}{1+\varepsilon}\Bigr)\iff k_1 \notin"
    r" \operatorname{conv}\{k_2,\dots,k_n\}; \text{ otherwise } \alpha_1 \le \tfrac12 \text{ for every } q",
    amended_plain="A value can be copied exactly when its key is outside the convex hull of the other keys; the"
    " separating query or the convex combination is the certificate. Inside, its weight never exceeds ½.",
    assumptions=("real arithmetic", "n ≥ 2, any keys in any dimension"),
    subject=Hull(0, Symbol("lambda", nonnegative=True)),
    sabotage={
        "a target outside the hull": Hull(2, Symbol("lambda", nonnegative=True)),
        "the affine hull in place of the convex": Hull(0, Symbol("lambda", real=True)),
    },
    picture=_copy_possible_picture,
    needs=("copy-gap",),
    falsifier=Falsifier(EPSILON | numbered("k₁ k₂ k₃", -3, 3) | {"λ": (-1, 1), "q": (-9, 9)}, _uncopied, _by_its_hull),
)
def copy_possible(hull: Hull) -> Iterator[Evidence]:
    y = Symbol("y", real=True)
    weight = 1 / (1 + exp(y * (1 - hull.target)) + exp(-y * (1 + hull.target)))
    yield nonnegative(Rational(1, 3) - weight, "k_1 halfway between k_2 and k_3: α_1 ≤ ⅓ for every query")
    tried = [0, 1, 10, 1000]
    weights = [1 / (1 + arb(y * (1 - hull.target)).exp() + arb(-y * (1 + hull.target)).exp()) for y in tried]
    says = "k_2 = −1, k_3 = 1, k_1 = 0: no query copies"
    facts = {"queries": tried, "weights": [weight.str(8) for weight in weights], "most": "1/3"}
    yield counterexample(all(bool(weight < 0.34) for weight in weights), says, "balls", **facts)
    yield from _inside(hull.share)
    yield from _outside()
    keys = [(0, 0), (1, 0), (-2, 0), (0, 1)]
    try:
        copy_query(torch.tensor(keys, dtype=torch.float64), target=0, eps=0.01)
    except InsideHull as refusal:
        shares = refusal.weights
    else:
        raise Unproved("the library made a query for a key inside the hull of the others")
    point = tuple(sum(share * key[axis] for share, key in zip(shares, keys, strict=True)) for axis in (0, 1))
    holds = point == keys[0] and shares[0] == 0 and sum(shares) == 1 and min(shares) >= 0
    says = "the library refuses a key inside the hull, with the combination: exact fractions"
    yield rational(holds, says, True, combination=[str(share) for share in shares])


def _inside(share: Symbol) -> Iterator[Evidence]:
    rest = Symbol("rho", **{key: value for key, value in share.assumptions0.items() if key in ("nonnegative", "real")})
    u, score, above = symbols(real="u s", nonnegative="f")
    yield from tangent(amended=True)
    yield nonnegative(share * above, "k_1 = Σλ_j k_j: each λ_j·(e^u_j − 1 − u_j) ≥ 0, u_j = s_j − s_1", True)
    says = "Σλ_j(1 + u_j) = Σλ_j = 1, for Σλ_j u_j = s_1 − s_1 = 0"
    yield identity(share * (1 + u) + rest * (1 + score) - (share * u + rest * score), share + rest, says, True)
    yield nonnegative(rest * exp(u), "1 − λ_j, the sum of the others, is ≥ 0: Σe^u_j ≥ Σλ_j e^u_j ≥ 1", True)
    yield nonnegative(Rational(1, 2) - 1 / (2 + slack), "so inside the hull α_1 = 1/(1 + Σe^u_j) ≤ ½", True)
    corners = [(0, 0), (4, 0), (0, 4)]
    shares = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    point = tuple(sum(share * corner[axis] for share, corner in zip(shares, corners, strict=True)) for axis in (0, 1))
    says = "for example: (1, 1) among (0, 0), (4, 0), (0, 4)"
    yield rational(point == (1, 1) and sum(shares) == 1 and min(shares) >= 0, says, True, combination="1/2, 1/4, 1/4")


def _outside() -> Iterator[Evidence]:
    qq, a, b = symbols(positive="qq a b")

    def moved(step: Any) -> Any:
        return qq - 2 * step * a + step**2 * b

    says = (
        "p nearest to k_1 in the hull, q = k_1 − p ≠ 0: were a = ⟨q, k_j − p⟩ > 0, a step a/b ≤ 1 to k_j would"
        " be nearer"
    )
    yield nonnegative(qq - moved(a / b) - a**2 / b, says, True)
    yield nonnegative((qq - moved(1) - a).subs(a, b + slack), "and where a ≥ b = ‖k_j − p‖², k_j itself would be", True)
    yield nonnegative(qq - (-slack) - qq, "hence ⟨q, k_1 − k_j⟩ = ‖q‖² − a ≥ ‖q‖² for every j", True)
    gap = log((n - 1) / below_one)
    yield nonnegative(gap / qq * (qq + slack) - gap, "t·q with t = ln((n−1)/ε)/‖q‖² has gaps of ln((n−1)/ε)", True)
    yield identity((n - 1) * exp(-log((n - 1) / eps)), eps, "whose n − 1 terms sum to at most ε", True)
    yield enough(amended=True)
    says = "for example: (3, 3) among (0, 0), (4, 0), (0, 4)"
    yield rational(min(6 - sum(corner) for corner in [(0, 0), (4, 0), (0, 4)]) == 2, says, True, query="(1, 1)", gap=2)


def _average_picture() -> Chart:
    weights = {f"{n} keys": lambda t, n=n: t / (2 * t + n - 2) for n in (3, 100, 10000)}
    title, ts = "Averaging two of n orthonormal keys", [10 ** (i / 10) for i in range(71)]
    return curves(title, "t, for q = ln(t)(k_a + k_b)", "each weight", ts, weights, log_x=True)


def _average(query: Formula, eps: arb, count: int) -> arb:
    scores = query(count, eps)
    whole = scores[0].exp() + scores[1].exp() + (count - 2)
    return most([1 / (2 + eps) - score.exp() / whole for score in scores])


@claim(
    "average-two",
    expected="proved",
    statement=r"k_i \text{ orthonormal}:\ q = \ln(n/\varepsilon)(k_1+k_2) \text{ gives } \alpha_1 = \alpha_2 \ge"
    r"\frac{1}{2+\varepsilon},\ \|q\| \le 2\sqrt2\ln(n/\varepsilon)",
    plain="Among orthonormal keys, ln(n/ε) times the sum of two of them shares the weight evenly between the two.",
    assumptions=("real arithmetic", "n ≥ 2, 0 < ε < 1"),
    subject=lambda n, eps: (log(n / eps), log(n / eps)),
    sabotage={
        "blind to how many keys there are": lambda n, eps: (log(1 / eps), log(1 / eps)),
        "more of one key": lambda n, eps: (log(n / eps), 2 * log(n / eps)),
    },
    picture=_average_picture,
    falsifier=Falsifier(EPSILON | {"n": range(2, 201)}, _average),
)
def average_two(query: Formula) -> Iterator[Evidence]:
    others = Symbol("j", integer=True, nonnegative=True)
    count = others + 2
    on = query(count, eps)
    total = exp(on[0]) + exp(on[1]) + others
    weights = [exp(score) / total for score in on]
    t = count / eps
    for name, weight in zip("ab", weights, strict=True):
        yield identity(weight, t / (2 * t + others), f"α_{name} = t/(2t + n − 2) exactly, t = n/ε")
    yield nonnegative(weights[0] - 1 / (2 + eps), "which is at least 1/(2+ε)")
    yield identity(on[0] ** 2 + on[1] ** 2, 2 * log(t) ** 2, "its norm is √2·ln(n/ε)")
    spare = 2 * sqrt(2) * log(t) - sqrt(2) * log(t)
    yield nonnegative(spare.subs(eps, below_one), "half of the norm allowed")
    scores = query(arb(1000), arb(1) / 100)
    weight = scores[0].exp() / (scores[0].exp() + scores[1].exp() + 998)
    facts = {"n": 1000, "eps": 0.01, "weight": weight.str(12), "norm": (scores[0] ** 2 + scores[1] ** 2).sqrt().str(12)}
    yield enclosed(weight > 1 / (2 + arb(1) / 100), "a thousand keys, ε = 0.01", False, **facts)
    average = average_query(torch.eye(50), subset=(0, 1), eps=0.01)
    yield kept(average, "the library's query for two of fifty keys", norm=average.norm)


def _mixture_picture() -> Table:
    rows = []
    for t in (5, 10, 15, 20):
        whole = math.exp(t) + 1000 - 3
        rows.append((t, *(round(w * math.exp(t) / whole, 6) for w in (0.5, 0.3, 0.2)), (1000 - 3) / whole))
    title = "Weights reached on three of 1000 orthonormal keys, asked for ½, 0.3, 0.2"
    return Table(title, ("t", "first", "second", "third", "distance from the target"), rows)


def _mixture(score: Formula, t: arb, outside: int, *parts: arb) -> arb:
    """Three targets in proportion to w₁, w₂, w₃, among so many other orthonormal keys."""
    targets = [part / total(parts) for part in parts]
    terms = [score(t, target).exp() for target in targets]
    scale = t.exp() / (t.exp() + outside)
    return most([abs(term / (total(terms) + outside) - w * scale) for term, w in zip(terms, targets, strict=True)])


@claim(
    "mixture-any",
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
    falsifier=Falsifier({"t": (-5, 10), "n−|S|": range(201)} | numbered("w₁ w₂ w₃", 0.01, 1), _mixture),
)
def mixture_any(score: Formula) -> Iterator[Evidence]:
    w, rest, partition, outside = symbols(positive="w rho Z", integer_positive="j")
    t, shift, s = symbols(real="t c s")
    yield identity(exp(score(t, w)), w * exp(t), "orthonormal keys: each key of S has e^s_i = w_i·e^t")
    total = exp(score(t, w)) + rest * exp(t) + outside
    weight = (exp(score(t, w)) / total).subs(rest, 1 - w)
    yield identity(weight, w * exp(t) / (exp(t) + outside), "Σw = 1: α_i = w_i·e^t/(e^t + n − |S|)")
    missing = 1 - exp(t) / (exp(t) + outside)
    says = "the weight outside S is exactly ε at t = ln((n−|S|)(1−ε)/ε): any distance is reached"
    yield identity(missing.subs(t, log(outside * (1 - eps) / eps)), eps, says)
    yield identity(weight.subs(outside, 0), w, "where S is every key the target is met exactly, for every t")
    says = "any keys: Kq = ln w + c·1 gives softmax(Kq) = w"
    yield identity(exp(log(w) + shift) / (w * exp(shift) + (1 - w) * exp(shift)), w, says)
    yield identity(log(exp(s) / partition), s - log(partition), "and softmax(Kq) = w gives Kq = ln w + ln(Z)·1")
    yield from _out_of_reach()
    query = mixture_query(torch.eye(50), [0.5, 0.3, 0.2] + [0.0] * 47, eps=0.01)
    yield kept(query, "the library's query for ½, 0.3, 0.2 on three of fifty keys", norm=query.norm)


def _out_of_reach() -> Iterator[Evidence]:
    """Weights that keys 0, 1, 2 on a line cannot have, whatever the query."""
    y, wanted = Symbol("y", real=True), [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]
    terms = [exp(key * y) for key in (0, 1, 2)]
    first, second, third = (term / sum(terms) for term in terms)
    yield identity(second**2, first * third, "keys 0, 1, 2 on a line: α_2² = α_1·α_3 for every query")
    says = "so (¼, ½, ¼) is out of reach"
    yield rational(wanted[1] ** 2 != wanted[0] * wanted[2], says, wanted=wanted[1] ** 2, forced=wanted[0] * wanted[2])
    try:
        mixture_query(torch.tensor([[0.0], [1.0], [2.0]]), [float(weight) for weight in wanted], eps=0.01)
    except OutOfReach as refusal:
        combination = refusal.combination
    else:
        raise Unproved("the library made a query for weights that no query gives")
    yield rational(
        sum(combination) == 0 and sum(c * key for key, c in enumerate(combination)) == 0 and any(combination),
        "the library refuses them, with a combination of the keys that vanishes: Σ c_i·ln α_i = 0, and not for these",
        combination=[str(c) for c in combination],
    )
