r"""What whole attention layers do: tokens that attend to themselves, tokens routed by weights, and tokens permuted.

The first two are about :math:`x_1 = u_d + u_b,\ x_2 = u_a,\ x_3 = u_c + u_b` with orthogonal :math:`u` of length
:math:`\beta`, in any dimension. In coordinates of the u's an inner product is :math:`\beta^2` times the plain one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Matrix, Rational, Symbol, exp

from avow.core.chart import Chart, Function, Table, curves
from avow.numerics.intervals import dot, most, norm, softmax
from avow.theory.claims.claim import Falsifier, claims_on, numbered
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.toolbox import enclosed, identity, kept, nonnegative, positive, symbols
from avow.theory.constructions.routers import route_by_weights as library_router

claim = claims_on("heads")
beta = Symbol("beta", positive=True)
u_a, u_b, u_c, u_d = (Matrix([int(i == axis) for i in range(4)]) for axis in range(4))
tokens = (u_d + u_b, u_a, u_c + u_b)
# Scores are whole multiples of β², so weights are powers of this letter until numbers are wanted.
e_to_beta_squared = Symbol("E", positive=True)


def attention(query: Matrix, keys: Sequence[Matrix]) -> list[Any]:
    """The weights of a query over some keys, in coordinates of the u's."""
    terms = [e_to_beta_squared ** query.dot(key) for key in keys]
    return [term / sum(terms) for term in terms]


def mixture(weights: Sequence[Any], values: Sequence[Matrix]) -> Matrix:
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), sympy.zeros(4, 1))


def squared_length(x: Matrix) -> Any:
    return beta**2 * x.dot(x)


def _vanishes(squared: Any, says: str) -> Evidence:
    at = squared.subs(e_to_beta_squared, exp(beta**2))
    return identity(sympy.limit(at, beta, sympy.oo), 0, says)


def _self_picture() -> Chart:
    weights: dict[str, Function] = {
        "x_2 = u_a": lambda b: math.exp(b**2) / (math.exp(b**2) + 2),
        "x_2 = u_a + u_d": lambda b: math.exp(b**2) ** 2 / (math.exp(b**2) ** 2 + (math.exp(b**2) + 1)),
    }
    title, lengths = "With K = Q = V = I a token attends to itself", [0.05 * i for i in range(61)]
    return curves(title, "β, the length of the u's", "weight on itself", lengths, weights)


Vector = list[arb]


def _coordinates(x: Matrix) -> Vector:
    return [arb(int(entry)) for entry in x]


def _attended(beta: arb, query: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> Vector:
    """Attention in coordinates of the u's, of length β: an inner product is β² times the plain one."""
    weights = softmax([beta * beta * dot(query, key) for key in keys])
    return [dot(weights, column) for column in zip(*values, strict=True)]


def _distance(beta: arb, one: Vector, two: Vector) -> arb:
    return beta * norm([a - b for a, b in zip(one, two, strict=True)])


def _copies_itself(tokens: Sequence[Matrix], beta: arb, gamma: arb, delta: arb) -> arb:
    """γ of u_c and δ of u_d are added to the second token."""
    sure = first, own, third = [_coordinates(token) for token in tokens]
    error = _distance(beta, _attended(beta, own, sure, sure), own)
    added = (arb(0), arb(0), gamma, delta)
    moved = [first, [x + more for x, more in zip(own, added, strict=True)], third]
    away = _distance(beta, _attended(beta, moved[1], moved, moved), _coordinates(u_b))
    return (error - arb(10).sqrt() * beta / ((beta * beta).exp() + 2)).max(arb(2).sqrt() * beta / 3 - away)


@claim(
    "self-attend-copies-self",
    expected="proved",
    statement=r"x_1=u_d+u_b,\ x_2=u_a,\ x_3=u_c+u_b,\ K=Q=V=I:\quad c_2\approx x_2, \text{ and no } x_2 + \gamma u_c +"
    r" \delta u_d \text{ has } c_2 \approx u_b",
    plain="With identity weights a token attends to itself: c_2 ≈ x_2, and adding u_c or u_d to x_2, in any amount,"
    " cannot make c_2 into u_b.",
    assumptions=("real arithmetic", "orthogonal u's of length β > 0, any dimension", "scores are not divided by √d"),
    subject=tokens,
    sabotage={
        "a first token twice as long": (2 * (u_d + u_b), u_a, u_c + u_b),
        "a first token that shares u_a": (u_a + u_b, u_a, u_c + u_b),
    },
    picture=_self_picture,
    falsifier=Falsifier({"β": (0.01, 4)} | numbered("γ δ", -3, 3), _copies_itself),
)
def self_attend_copies_self(tokens: Sequence[Matrix]) -> Iterator[Evidence]:
    e = e_to_beta_squared
    first, own, third = tokens
    weights = attention(own, tokens)
    yield identity(weights[1], e / (e + 2), "α_22 = e^(β²)/(e^(β²) + 2)")
    error = squared_length(mixture(weights, tokens) - own)
    yield identity(error, 10 * beta**2 / (e + 2) ** 2, "‖c_2 − x_2‖ = √10·β/(e^(β²) + 2) exactly")
    yield _vanishes(error, "which → 0 as β grows: c_2 ≈ x_2")
    for name, added, shares in (("u_d", u_d, (e, e**2, 1)), ("u_c", u_c, (1, e**2, e))):
        changed = attention(own + added, (first, own + added, third))
        for i, share in enumerate(shares):
            says = f"x_2 = u_a + {name}: α_2{i + 1} is {sympy.sstr(share)} over e^(2β²) + e^(β²) + 1, E = e^(β²)"
            yield identity(changed[i], share / (e**2 + e + 1), says)

    gamma, delta, own_weight, above = symbols(real="gamma delta", positive="alpha h")
    to_third, shrunk, low = symbols(nonnegative="s t h")
    moved = own + gamma * u_c + delta * u_d
    for name, token, square in (
        ("1", first, gamma**2 + (delta - Rational(1, 2)) ** 2),
        ("3", third, delta**2 + (gamma - Rational(1, 2)) ** 2),
    ):
        ahead = moved.dot(moved) - moved.dot(token) - Rational(3, 4)
        yield identity(ahead, square, f"x_2 = u_a + γu_c + δu_d scores over ¾β² more on itself than on x_{name}")
        yield nonnegative(square, "as squares are not negative, for every γ and δ")
    away = mixture((1 - own_weight - to_third, own_weight, to_third), (first, moved, third)) - u_b
    says = "along u_a and u_b alone, ‖c_2 − u_b‖² ≥ 2β²α_22²"
    yield identity(away.dot(u_a) ** 2 + away.dot(u_b) ** 2, 2 * own_weight**2, says)
    says = "α_22 falls with the other two terms: it is ≥ 1/(1 + 2e^(−3β²/4))"
    yield nonnegative(1 / (1 + shrunk) - 1 / (1 + shrunk + low), says)
    least = 1 / (1 + 2 * exp(-3 * beta**2 / 4))
    says = "e^(3β²/4) = 1 + h > 1, so α_22 > ⅓: c_2 stays √2·β/3 away from u_b at every β"
    yield positive(least.subs(exp(-3 * beta**2 / 4), 1 / (1 + above)) - Rational(1, 3), says)
    yield identity(sympy.limit(least, beta, sympy.oo), 1, "and α_22 → 1 as β grows: √2·β away")
    # In numbers, at β = 3.
    numbers = {
        "weight": 1 / (1 + 2 * arb(-9).exp()),
        "error": arb(10).sqrt() * 3 / (arb(9).exp() + 2),
        "least weight whatever is added": 1 / (1 + 2 * (arb(-27) / 4).exp()),
    }
    facts = {name: number.str(8 if name == "error" else 12) for name, number in numbers.items()}
    yield enclosed(numbers["weight"] > 0.9997, "β = 3: the weight on itself, in numbers", False, **facts)


class Weights(NamedTuple):
    """A layer's query and value matrices, in coordinates of the u's; K is the identity."""

    query: Matrix
    value: Matrix


routing = Weights(u_c * u_d.T + u_d * u_a.T, u_b * u_b.T - u_c * u_c.T)


def _route_picture() -> Chart:
    lengths = [0.05 * i for i in range(1, 81)]
    series = {
        name: (lengths, [math.sqrt(square) * length / (math.exp(length**2) + 2) for length in lengths])
        for name, square in (("c_1 from u_b − u_c", 5), ("c_2 from u_b", 2))
    }
    return Chart("How far the routed outputs are off", "β, the length of the u's", "distance", series, log_y=True)


def _routes(weights: Weights, beta: arb) -> arb:
    keys = [_coordinates(token) for token in tokens]
    values = [_coordinates(weights.value * token) for token in tokens]
    broken = []
    for token, target, square in ((tokens[0], u_b - u_c, 5), (tokens[1], u_b, 2)):
        routed = _attended(beta, _coordinates(weights.query * token), keys, values)
        error = _distance(beta, routed, _coordinates(target))
        broken.append(error - arb(square).sqrt() * beta / ((beta * beta).exp() + 2))
    return most(broken)


@claim(
    "route-by-weights",
    expected="proved",
    statement=r"V=\beta^{-2}(u_bu_b^\top-u_cu_c^\top),\ K=I,\ Q=\beta^{-2}(u_cu_d^\top+u_du_a^\top):\quad"
    r" c_1\approx u_b-u_c,\ c_2\approx u_b",
    plain="Rank-one terms in Q choose whom each token reads and those in V what it takes: token 1 gets u_b −"
    " u_c, token 2 u_b.",
    assumptions=("real arithmetic", "orthogonal u's of length β > 0, any dimension", "scores are not divided by √d"),
    subject=routing,
    sabotage={
        "Q transposed": Weights(routing.query.T, routing.value),
        "a plus for the minus in V": Weights(routing.query, u_b * u_b.T + u_c * u_c.T),
        "token 2 not told whom to read": Weights(u_c * u_d.T, routing.value),
    },
    picture=_route_picture,
    falsifier=Falsifier({"β": (0.01, 4)}, _routes),
)
def route_by_weights(weights: Weights) -> Iterator[Evidence]:
    e = e_to_beta_squared
    entry = Symbol("x_q", real=True)
    says = "β⁻²u_p·u_qᵀ takes the coordinate along u_q to u_p: u_qᵀx = β²·x_q"
    yield identity(beta**-2 * (beta**2 * entry), entry, says)
    values = [weights.value * token for token in tokens]
    for i, (target, reads, square) in enumerate(((u_b - u_c, 2, 5), (u_b, 0, 2))):
        shares = attention(weights.query * tokens[i], tokens)
        yield identity(shares[reads], e / (e + 2), f"token {i + 1} reads token {reads + 1}: α = e^(β²)/(e^(β²) + 2)")
        error = squared_length(mixture(shares, values) - target)
        says = f"‖c_{i + 1} − {('(u_b − u_c)', 'u_b')[i]}‖ = √{square}·β/(e^(β²) + 2) exactly"
        yield identity(error, square * beta**2 / (e + 2) ** 2, says)
        yield nonnegative(square * beta**2 / e**2 - error, f"hence below √{square}·β·e^(−β²)")
        yield _vanishes(error, "which → 0 as β grows")
    idle = mixture(attention(weights.query * tokens[2], tokens), values)
    off = idle - (2 * u_b - u_c) / 3
    yield identity(off.dot(off), 0, "token 3 is told nothing: it takes the mean of the values")
    for length in (2, 3):
        first, second = (arb(square).sqrt() * length * (1 / (arb(length**2).exp() + 2)) for square in (5, 2))
        below = first < arb(5).sqrt() * length * arb(-(length**2)).exp()
        facts = {"c_1 is off by": first.str(8), "c_2 is off by": second.str(8), "of": (arb(2).sqrt() * length).str(8)}
        yield enclosed(below, f"β = {length}: the errors in numbers", False, beta=length, **facts)
    yield kept(library_router(3.0), "the library's router at β = 3; it compiles any other routing as well")


class Layer(NamedTuple):
    """A transformer layer on letters: sums are multisets of terms, all else unnamed functions of their inputs."""

    causal: bool = False
    positions: bool = False

    def rows(self, letters: Sequence[str]) -> list[str]:
        """Each token's output as a term; equal terms are equal whatever the weights, norms and activations are."""
        tokens = [f"plus({x}, position {i})" if self.positions else x for i, x in enumerate(letters)]
        return [self._row(own, tokens[: i + 1] if self.causal else tokens) for i, own in enumerate(tokens)]

    @staticmethod
    def _row(own: str, seen: Sequence[str]) -> str:
        top = sorted(f"exp(score({own}, {x}))·value({x})" for x in seen)
        bottom = sorted(f"exp(score({own}, {x}))" for x in seen)
        mixed = f"norm(plus({own}, [{' + '.join(top)}]/[{' + '.join(bottom)}]))"
        return f"norm(plus({mixed}, feed_forward({mixed})))"

    def moved_by(self, order: Sequence[int]) -> bool:
        """Whether permuting the tokens does anything but permute the outputs."""
        letters = "abcdefgh"[: len(order)]
        permuted = self.rows([letters[i] for i in order])
        straight = self.rows(letters)
        return permuted != [straight[i] for i in order]


def _permutation_picture() -> Table:
    orders = list(itertools.permutations(range(4)))
    layers = {"plain": Layer(), "causal mask": Layer(causal=True), "positions": Layer(positions=True)}
    rows = [(name, len(orders), sum(layer.moved_by(order) for order in orders)) for name, layer in layers.items()]
    return Table("Orders of four tokens under which f(PX) ≠ P f(X) as terms", ("layer", "orders", "broken"), rows)


def _layer(layer: Layer, weights: Sequence[arb], tokens: Sequence[Vector]) -> list[Vector]:
    """Attention, then a feed-forward of tanh, each with its residual and a norm, on tokens of two numbers."""

    def normed(x: Vector) -> Vector:
        length = (1 + dot(x, x)).sqrt()
        return [entry / length for entry in x]

    entered = [[x + i * layer.positions for x in token] for i, token in enumerate(tokens)]
    rows = []
    for i, own in enumerate(entered):
        seen = entered[: i + 1] if layer.causal else entered
        query = [dot(own, weights[:2]), dot(own, weights[2:])]
        read = _attended(arb(1), query, seen, seen)
        mixed = normed([x + more for x, more in zip(own, read, strict=True)])
        rows.append(normed([x + (2 * x).tanh() for x in mixed]))
    return rows


def _permuted(layer: Layer, number: int, *case: arb) -> arb:
    """Three tokens of two numbers, the matrix of their scores, and one of their six orders."""
    order, weights = list(itertools.permutations(range(3)))[number], case[:4]
    tokens = [[*case[i : i + 2]] for i in (4, 6, 8)]
    straight = _layer(layer, weights, tokens)
    permuted = _layer(layer, weights, [tokens[i] for i in order])
    pairs = ((a, b) for row, i in zip(permuted, order, strict=True) for a, b in zip(row, straight[i], strict=True))
    return most([abs(a - b) for a, b in pairs])


@claim(
    "permutation",
    expected="proved",
    statement=r"f(PX) = P f(X) \text{ for every permutation } P",
    plain="Without positions a transformer layer is permutation equivariant: permuting its tokens permutes its"
    " outputs.",
    assumptions=(
        "real arithmetic: sums do not depend on their order",
        "softmax attention, feed-forward, residuals and norms that act on each token alone; no mask, no positions",
        "any number of tokens, heads and layers",
    ),
    subject=Layer(),
    sabotage={"a causal mask": Layer(causal=True), "positions": Layer(positions=True)},
    picture=_permutation_picture,
    falsifier=Falsifier({"order": range(6)} | numbered("w₁₁ w₁₂ w₂₁ w₂₂ x₁₁ x₁₂ x₂₁ x₂₂ x₃₁ x₃₂", -2, 2), _permuted),
)
def permutation(layer: Layer) -> Iterator[Evidence]:
    yield from _for_any_number_of_tokens(layer)
    for count in range(1, 6):
        orders = list(itertools.permutations(range(count)))
        broken = [order for order in orders if layer.moved_by(order)]
        if broken:
            raise Unproved(f"order {broken[0]} of {count} tokens moves more than their places")
        says = f"{count} tokens: the outputs are the same terms in every order, whatever the weights and activations"
        yield Evidence("symbolic", says, {"orders": len(orders)})
    yield _not_with("a causal mask", Layer(causal=True), (0, 1))
    yield _not_with("positions 0 and 1", Layer(positions=True), (0, 0))


def _not_with(name: str, layer: Layer, x: tuple[int, int]) -> Evidence:
    """Attention with Q = K = V = 1 on two numbers: swapping them does not swap the outputs."""

    def outputs(numbers: Sequence[int]) -> list[arb]:
        entered = [[arb(number + i * layer.positions)] for i, number in enumerate(numbers)]
        seen = [entered[: i + 1] if layer.causal else entered for i in range(len(entered))]
        return [_attended(arb(1), own, keys, keys)[0] for own, keys in zip(entered, seen, strict=True)]

    permuted, straight = outputs(x[::-1]), outputs(x)[::-1]
    apart = any(bool(abs(a - b) > 0.2) for a, b in zip(permuted, straight, strict=True))
    says = f"it is not so with {name}: attention alone, Q = K = V = 1, on two numbers"
    facts = {"x": list(x), "f(Px)": [row.str(8) for row in permuted], "P f(x)": [row.str(8) for row in straight]}
    return enclosed(apart, says, False, **facts)


def _for_any_number_of_tokens(layer: Layer) -> Iterator[Evidence]:
    """The same in words over matrices of any size, with PᵀP = I and P1 = 1."""
    P, Pt, X, Xt, W, V, A, D, M, E, Et, one, Y = sympy.symbols("P P^T X X^T W V A D M E E^T 1 Y", commutative=False)

    def reduced(word: Any) -> Any:
        return sympy.expand(sympy.expand(word).subs(Pt * P, 1).subs(Pt * one, one))

    def entered(x: Any) -> Any:
        return x + E if layer.positions else x

    def scores(x: Any, xt: Any) -> Any:
        return entered(x) * W * (xt + Et if layer.positions else xt) + (M if layer.causal else 0)

    yield identity(reduced(entered(P * X)), reduced(P * entered(X)), "what enters is permuted: PX")
    says = "scores S = XWXᵀ become PSPᵀ, W = W_Q·W_Kᵀ"
    yield identity(reduced(scores(P * X, Xt * Pt)), reduced(P * scores(X, Xt) * Pt), says)
    says = (
        "A = exp(S) by entries becomes PAPᵀ, for (PSPᵀ)_ij = S_π(i)π(j); its row sums A1 become P·A1, so D⁻¹"
        " becomes PD⁻¹Pᵀ"
    )
    yield identity(reduced(P * A * Pt * one), P * A * one, says)
    says = "attention D⁻¹AXV: P in front"
    yield identity(reduced((P * D * Pt) * (P * A * Pt) * (P * X) * V), P * D * A * X * V, says)
    says = "residuals: PX + PY = P(X + Y); feed-forward and norm take rows one by one, and row i of PX is row π(i) of X"
    yield identity(reduced(P * X + P * Y), reduced(P * (X + Y)), says)
