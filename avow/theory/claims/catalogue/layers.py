r"""What whole attention layers do: tokens that attend to themselves, tokens routed by weights, and tokens permuted.

The first two are about :math:`x_1 = u_d + u_b,\ x_2 = u_a,\ x_3 = u_c + u_b` with orthogonal :math:`u` of length
:math:`\beta`, in any dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import And, Eq, Implies, KroneckerDelta, Sum, exp

from avow.core.chart import Chart, Function, Table, curves
from avow.theory.claims.catalogue.singular import inner_products
from avow.theory.claims.claim import Formula, claims_on, numbered
from avow.theory.claims.formal import (
    Row,
    Spans,
    Statement,
    each,
    function,
    places,
    real,
    sequence,
    value,
    whole,
)
from avow.theory.claims.kernel import Step, put
from avow.theory.claims.proof import Proof
from avow.theory.claims.toolbox import kept
from avow.theory.constructions.routers import route_by_weights as library_router

claim = claims_on("heads")
n, d, width, heads, layers = whole("n d m H L")
t, h, c, f, i, j, k, p = whole("t h c f i j k p")
x, y, u = sequence("x y u")
beta, gamma, delta = real("beta gamma delta")
weights, moved_weights = real("alpha_1 alpha_2 alpha_3"), real("eta_1 eta_2 eta_3")

# A vector by its shares of the four u's, and a matrix by its shares of their outer products.
Shares = Sequence[Any]
Matrix = dict[tuple[int, int], int]
u_b: Shares = (0, 1, 0, 0)
A, B, C, D = 1, 2, 3, 4
tokens: tuple[Shares, Shares, Shares] = ((0, 1, 0, 1), (1, 0, 0, 0), (0, 1, 1, 0))
ORTHOGONAL = each(i, 1, 4, each(j, 1, 4, Eq(Sum(u[i, k] * u[j, k], (k, 1, d)), beta**2 * KroneckerDelta(i, j))))
VECTORS = {
    d: "the dimension",
    u: "vectors a, b, c and d, by their numbers 1 to 4: orthogonal to each other, and of one length",
    beta: "their length",
}
NOT_SCALED = ["real arithmetic", "scores are not divided by the root of the dimension"]


def _vector(shares: Shares, place: Any) -> Any:
    return sum((share * u[number, place] for number, share in enumerate(shares, start=1)), sympy.Integer(0))


def _product(one: Shares, other: Shares) -> Any:
    return Sum(_vector(one, k) * _vector(other, k), (k, 1, d))


def _attention(weights: Sequence[Any], scores: Sequence[Any]) -> Any:
    """Weights are those of softmax."""
    powers = list(map(exp, scores))
    return And(*(Eq(weight, power / sum(powers)) for weight, power in zip(weights, powers, strict=True)))


def _along_axes(numbers: dict[Any, Any], attentions: Sequence[Any]) -> dict[Any, Any]:
    """A case with the vectors along the axes, and weights as hypotheses give them."""
    case = numbers | {d: 4, u: [[numbers[beta] * int(one == axis) for axis in range(4)] for one in range(4)]}
    for weight in (part for attention in attentions for part in attention.args):
        case[weight.lhs] = value(weight.rhs, case)
    return case


def _products(proof: Proof) -> Step:
    """All products of the u's."""
    pairs = [(one, other) for one in range(1, 5) for other in range(one, 5)]
    products = [inner_products(proof, ORTHOGONAL, *pair) for pair in pairs]
    return proof.have(And(*(step.formula for step in products)), *products)


def _powers(proof: Proof, products: Step, scores: Sequence[Any], wanted: Sequence[Any]) -> list[Step]:
    """What e is raised to is what it comes to."""
    known = []
    for score, number in zip(scores, wanted, strict=True):
        comes_to = proof.have(Eq(score, number), products)
        known.append(
            proof.have(Eq(exp(score), exp(number)), comes_to, proof.same_value(exp, score, sympy.sympify(number)))
        )
    return known


def _largest(place: int) -> Any:
    """Weights of scores of β² for one key and of nothing for the two others."""
    e = exp(beta**2)
    return [(e if at == place else 1) / (e + 2) for at in range(3)]


def _self_picture() -> Chart:
    weights: dict[str, Function] = {
        "x_2 = u_a": lambda b: math.exp(b**2) / (math.exp(b**2) + 2),
        "x_2 = u_a + u_d": lambda b: math.exp(b**2) ** 2 / (math.exp(b**2) ** 2 + (math.exp(b**2) + 1)),
    }
    title, lengths = "With K = Q = V = I a token attends to itself", [0.05 * i for i in range(61)]
    return curves(title, "β, the length of the u's", "weight on itself", lengths, weights)


def _apart(weights: Sequence[Any], vectors: Sequence[Shares], target: Shares) -> Any:
    """The square of the distance of a mixture of vectors from a target."""
    columns = zip(zip(*vectors, strict=True), target, strict=True)
    shares = [sum(w * x for w, x in zip(weights, column, strict=True)) - aim for column, aim in columns]
    return _product(shares, shares)


def _changed(tokens: Sequence[Shares]) -> Sequence[Shares]:
    """The tokens, with some of c and of d added to the second."""
    first, own, third = tokens
    return first, [share + more for share, more in zip(own, (0, 0, gamma, delta), strict=True)], third


def _attend_to(tokens: Sequence[Shares]) -> list[Any]:
    """The scores of the second token for all of them."""
    return [_product(tokens[1], token) for token in tokens]


def _copies_itself(tokens: Sequence[Shares]) -> Statement:
    moved, e = _changed(tokens), exp(beta**2)
    attentions = [_attention(weights, _attend_to(tokens)), _attention(moved_weights, _attend_to(moved))]
    near, far = 10 * beta**2 / (e + 2) ** 2, 2 * beta**2 / (1 + 2 * exp(-3 * beta**2 / 4)) ** 2
    return Statement(
        variables=VECTORS
        | dict(zip(weights, (f"the weight of the second token on the {which}" for which in _WHICH), strict=True))
        | dict(zip(moved_weights, (f"that weight on the {which} once it is changed" for which in _WHICH), strict=True))
        | {gamma: "how much of c is added to the second token", delta: "how much of d"},
        given=[ORTHOGONAL, *attentions],
        then={
            "weight": Eq(weights[1], e / (e + 2)),
            "near": Eq(_apart(weights, tokens, tokens[1]), near),
            "far": _apart(moved_weights, moved, u_b) >= far,
        },
        terms={"weight": e / (e + 2), "near": near, "far": far},
        notes=[*NOT_SCALED, "queries, keys and values are the tokens: d + b, a, and c + b"],
        spans=Spans(
            {"β": (0.01, 4)} | numbered("γ δ", -3, 3),
            lambda *case: _along_axes(dict(zip((beta, gamma, delta), case, strict=True)), attentions),
            (ORTHOGONAL, *attentions),
        ),
    )


_WHICH = ("first", "second", "third")


@claim(
    "self-attend-copies-self",
    expected="proved",
    formal=_copies_itself,
    plain="With identity weights a token attends to itself: the second has a weight of {weight} on itself, and the"
    " square of the distance of its output from it is {near}. Adding c or d to it, in any amount, cannot make its"
    " output into b, which stays away by {far} at least, squared.",
    subject=tokens,
    sabotage={
        "a first token twice as long": ((0, 2, 0, 2), *tokens[1:]),
        "a first token that shares u_a": ((1, 1, 0, 0), *tokens[1:]),
    },
    picture=_self_picture,
)
def self_attend_copies_self(proof: Proof, tokens: Sequence[Shares]) -> None:
    products, scores = _products(proof), _attend_to(tokens)
    powers = _powers(proof, products, scores, [0, beta**2, 0])
    own = And(*(Eq(weight, share) for weight, share in zip(weights, _largest(1), strict=True)))
    shares = proof.have(own, proof.given(_attention(weights, scores)), *powers)
    proof.conclude("weight", shares)
    distance = _apart(weights, tokens, tokens[1])
    off = weights[0] ** 2 + weights[2] ** 2 + (weights[0] + weights[2]) ** 2 + (weights[1] - 1) ** 2
    proof.conclude("near", proof.have(Eq(distance, beta**2 * off), products), shares)
    # With γ of c and δ of d, it scores over ¾β² more on itself than on either of the others.
    moved = _changed(tokens)
    scores = _attend_to(moved)
    less = scores[1] - 3 * beta**2 / 4
    behind = [proof.have(exp(score) <= exp(less), proof.exp_monotone(score, less), products) for score in scores[::2]]
    shares = proof.given(_attention(moved_weights, scores))
    total = proof.have(Eq(sum(moved_weights), 1), shares)
    most = proof.have(moved_weights[1] >= 1 / (1 + 2 * exp(-3 * beta**2 / 4)), shares, *behind)
    says = "the shares of a and b alone are that far from those of b"
    along = 2 * beta**2 * moved_weights[1] ** 2
    proof.conclude("far", proof.have(_apart(moved_weights, moved, u_b) >= along, products, total, says=says), most)


class Weights(NamedTuple):
    """A layer's query and value matrices, over β²; K is the identity."""

    query: Matrix
    value: Matrix


routing = Weights({(C, D): 1, (D, A): 1}, {(B, B): 1, (C, C): -1})


def _applied(matrix: Matrix, shares: Shares, place: Any) -> Any:
    """A coordinate of a matrix times a vector: a sum of u_p·u_qᵀ/β² takes its share of u_q to u_p."""
    of = {column: _product([int(axis == column) for axis in range(1, 5)], shares) for _, column in matrix}
    return sum(factor * u[row, place] * of[column] / beta**2 for (row, column), factor in matrix.items())


def _route_picture() -> Chart:
    lengths = [0.05 * i for i in range(1, 81)]
    series = {
        name: (lengths, [math.sqrt(square) * length / (math.exp(length**2) + 2) for length in lengths])
        for name, square in (("c_1 from u_b − u_c", 5), ("c_2 from u_b", 2))
    }
    return Chart("How far the routed outputs are off", "β, the length of the u's", "distance", series, log_y=True)


# A token, by its number: what it is to get, whom it is to read for it, and the squares by which it then misses it.
_ROUTES = {
    "first": (weights, tokens[0], (0, 1, -1, 0), 2, 5),
    "second": (moved_weights, tokens[1], u_b, 0, 2),
}


def _asked(query: Matrix, token: Shares) -> list[Any]:
    """The scores of a token for all of them."""
    return [Sum(_applied(query, token, f) * _vector(other, f), (f, 1, d)) for other in tokens]


def _missed(layer: Weights, weights: Sequence[Any], target: Shares) -> Any:
    """The square of the distance of what weights give from a target."""
    read = sum(w * _applied(layer.value, token, f) for w, token in zip(weights, tokens, strict=True))
    return Sum((read - _vector(target, f)) ** 2, (f, 1, d))


def _routed(layer: Weights) -> Statement:
    attentions = [_attention(weights, _asked(layer.query, token)) for weights, token, *_ in _ROUTES.values()]
    off = {part: squares * beta**2 / (exp(beta**2) + 2) ** 2 for part, (*_, squares) in _ROUTES.items()}
    return Statement(
        variables=VECTORS
        | dict(zip(weights, (f"the weight of the first token on the {which}" for which in _WHICH), strict=True))
        | dict(zip(moved_weights, (f"the weight of the second on the {which}" for which in _WHICH), strict=True)),
        given=[beta > 0, ORTHOGONAL, *attentions],
        then={part: Eq(_missed(layer, route[0], route[2]), off[part]) for part, route in _ROUTES.items()},
        terms=off,
        notes=[*NOT_SCALED, "the tokens are d + b, a, and c + b; keys are the tokens"],
        spans=Spans(
            {"β": (0.01, 4)}, lambda length: _along_axes({beta: length}, attentions), (ORTHOGONAL, *attentions)
        ),
    )


@claim(
    "route-by-weights",
    expected="proved",
    formal=_routed,
    plain="Products of two vectors in the matrix of queries choose whom each token reads, and those in the matrix of"
    " values what it takes: the first token gets b − c, up to a distance whose square is {first}, and the second b, up"
    " to {second}.",
    subject=routing,
    sabotage={
        "Q transposed": Weights({(D, C): 1, (A, D): 1}, routing.value),
        "a plus for the minus in V": Weights(routing.query, {(B, B): 1, (C, C): 1}),
        "token 2 not told whom to read": Weights({(C, D): 1}, routing.value),
    },
    picture=_route_picture,
)
def route_by_weights(proof: Proof, layer: Weights) -> None:
    long, products = proof.given(beta > 0), _products(proof)
    all_known = proof.have(And(beta > 0, products.formula), long, products)
    for part, (weights, token, _, read, _) in _ROUTES.items():
        scores = _asked(layer.query, token)
        powers = _powers(proof, all_known, scores, [beta**2 * int(place == read) for place in range(3)])
        own = And(*(Eq(weight, share) for weight, share in zip(weights, _largest(read), strict=True)))
        shares = proof.have(own, proof.given(_attention(weights, scores)), *powers)
        proof.conclude(part, all_known, shares)
    proof.shows(kept(library_router(3.0), "the library's router at β = 3; it compiles any other routing as well"))


order, back = places("sigma tau")
score, answer, after = function("S V F")


class Layer(NamedTuple):
    """What a token sees: the others as far as a place, and of each what it shows there."""

    last: Formula = lambda i: n
    shown: Formula = lambda number, i: number


def _layer(layer: Layer, states: Any, i: Any, c: Any) -> Any:
    """A coordinate of a token after a layer, from all tokens before it."""
    own = _token(layer, states, i)
    return after(t, c, own, Row(h, 1, heads, Row(f, 1, width, _read(layer, states, i))))


def _read(layer: Layer, states: Any, i: Any) -> Any:
    """A coordinate of what a head reads for a token."""
    power, seen = exp(score(t, h, _token(layer, states, i), _token(layer, states, j))), (j, 1, layer.last(i))
    return Sum(power * answer(t, h, f, _token(layer, states, j)), seen) / Sum(power, seen)


def _token(layer: Layer, states: Any, i: Any) -> Any:
    return Row(k, 1, d, layer.shown(states[t, i, k], i))


_ORDER = each(i, 1, n, And(order[i] >= 1, order[i] <= n, Eq(back[order[i]], i)))
_BACK = each(i, 1, n, And(back[i] >= 1, back[i] <= n, Eq(order[back[i]], i)))


def _moved(t: Any) -> Any:
    """The tokens before a layer are those of the other run in another order."""
    return each(i, 1, n, each(c, 1, d, Eq(y[t, i, c], x[t, order[i], c])))


def _run(layer: Layer, states: Any) -> Any:
    return each(t, 1, layers, each(i, 1, n, each(c, 1, d, Eq(states[t + 1, i, c], _layer(layer, states, i, c)))))


def _after_one(layer: Layer, case: dict[Any, Any]) -> dict[Any, Any]:
    """A case of one layer, with its outputs."""
    outputs = {
        states: [
            [value(_layer(layer, states, i, c), {**case, t: 1, i: a, c: b}) for b in range(1, case[d] + 1)]
            for a in range(1, case[n] + 1)
        ]
        for states in (x, y)
    }
    return case | {states: [*case[states], rows] for states, rows in outputs.items()} | {layers: 1}


def _equivariant(layer: Layer) -> Statement:
    def case(number: int, one: arb, two: arb, *entries: arb) -> dict[Any, Any]:
        places = list(itertools.permutations((1, 2, 3)))[number]
        tokens = [list(entries[at : at + 2]) for at in (0, 2, 4)]
        return _after_one(
            layer,
            {
                **dict(zip((n, d, width, heads), (3, 2, 1, 1), strict=True)),
                **{order: places, back: [places.index(place) + 1 for place in (1, 2, 3)]},
                **{x: [tokens], y: [[tokens[place - 1] for place in places]]},
                score: lambda t, h, a, b: a[0] * b[0] * one + a[1] * b[0] * two,
                answer: lambda t, h, f, b: b[0] - b[1],
                after: lambda t, c, a, read: (a[1] + read[0][0] * c).tanh(),
            },
        )

    runs = [_run(layer, states) for states in (x, y)]
    return Statement(
        variables={
            n: "the number of tokens",
            d: "their coordinates",
            heads: "the number of heads",
            width: "the coordinates of what a head reads",
            layers: "the number of layers",
            order: "a permutation",
            back: "its inverse",
            score: "the score of a token for another, by layer and head: any function of the two",
            answer: "what a head reads of a token, by coordinate: any function of it",
            after: "what becomes of a token and of what its heads read for it, by coordinate: any function",
            x: "the tokens before each layer, and after the last",
            y: "the same, of the permuted tokens",
        },
        given=[n >= 1, layers >= 0, _ORDER, _BACK, _moved(1), *runs],
        then={"equivariant": _moved(layers + 1)},
        notes=[
            "real arithmetic: sums do not depend on their order",
            "residuals, norms and the feed-forward network are part of the functions of single tokens, before or after"
            " attention",
        ],
        spans=Spans(
            {"order": range(6)} | numbered("w₁ w₂ x₁₁ x₁₂ x₂₁ x₂₂ x₃₁ x₃₂", -2, 2),
            case,
            (_ORDER, _BACK, _moved(1), *runs),
        ),
    )


def _reordered(proof: Proof, term: Any) -> Step:
    """A sum over all tokens is the same in every order."""
    every, at = (j, 1, n), (p, 1, n)
    delta = KroneckerDelta(p, order[j])
    moved, plain = term.xreplace({j: order[j]}), term.xreplace({j: p})
    inside, backwards = proof.member(_ORDER, j), proof.member(_BACK, p)
    picked = proof.have(
        Implies(And(j >= 1, j <= n), Eq(Sum(plain * delta, at), moved, evaluate=False)),
        proof.sum_delta(plain, at, order[j]),
        inside,
        proof.given(_ORDER),
    )
    by_token = proof.sum_same(Sum(plain * delta, at), moved, every, picked)
    swapped = proof.sum_swap(plain * delta, at, every)
    there = proof.same_value(lambda place: back[place], p, order[j])
    and_back = proof.same_value(lambda place: order[place], j, back[p])
    within = And(p >= 1, p <= n)
    same = proof.have(
        Implies(And(within, j >= 1, j <= n), Eq(delta, KroneckerDelta(j, back[p]))),
        there,
        and_back,
        inside,
        backwards,
        proof.given(_ORDER),
        proof.given(_BACK),
    )
    once = proof.sum_same(delta, KroneckerDelta(j, back[p]), every, same, when=within)
    only = proof.sum_delta(1, every, back[p])
    one = proof.have(Implies(within, Eq(Sum(delta, every), 1)), once, only, backwards, proof.given(_BACK))
    each_once = proof.sum_same(plain * Sum(delta, every), plain, at, one)
    return proof.have(
        Eq(Sum(moved, every), Sum(plain, at), evaluate=False),
        by_token,
        swapped,
        each_once,
        says="every token is met once, in whatever order",
    )


def _permutation_picture() -> Table:
    rows = []
    for name, layer in {"plain": Layer(), "causal mask": _CAUSAL, "positions": _POSITIONS}.items():
        case = {n: 2, d: 1, heads: 1, width: 1, x: [[[arb(0)], [arb(1)]]], y: [[[arb(1)], [arb(0)]]]}
        case |= {score: lambda t, h, a, b: a[0] * b[0], answer: lambda t, h, f, b: b[0]}
        found = _after_one(layer, case | {after: lambda t, c, a, read: read[0][0]})
        straight, permuted = ([float(row[0].mid()) for row in found[states][1]] for states in (x, y))
        rows.append((name, *straight, *permuted))
    title = "Attention alone, Q = K = V = 1, on the numbers 0 and 1, and on 1 and 0"
    return Table(title, ("layer", "from 0, 1: the first", "the second", "from 1, 0: the first", "the second"), rows)


_CAUSAL = Layer(last=lambda i: i)
_POSITIONS = Layer(shown=lambda number, i: number + i - 1)


@claim(
    "permutation",
    expected="proved",
    formal=_equivariant,
    plain="Without positions a transformer is permutation equivariant: permuting its tokens permutes its outputs.",
    subject=Layer(),
    sabotage={"a causal mask": _CAUSAL, "positions": _POSITIONS},
    picture=_permutation_picture,
)
def permutation(proof: Proof, layer: Layer) -> None:
    deep = proof.given(layers >= 0)
    straight, permuted = (proof.given(_run(layer, states)) for states in (x, y))
    so_far = _moved(t)
    query, key = And(so_far, i >= 1, i <= n), And(so_far, i >= 1, i <= n, j >= 1, j <= n)

    def ours(i: Any) -> Any:
        return _token(layer, y, i)

    def theirs(i: Any) -> Any:
        return _token(layer, x, order[i])

    own = proof.member(so_far, i), proof.member(put(so_far.args[3], i, i), k)
    token = proof.row_same(y[t, i, k], x[t, order[i], k], (k, 1, d), *own, when=query)
    other = proof.at(token, {i: j})
    # A function has one value: equal tokens have equal scores, and are read alike.
    scores = [score(t, h, ours(i), ours(j)), score(t, h, theirs(i), ours(j)), score(t, h, theirs(i), theirs(j))]
    reads = answer(t, h, f, ours(j)), answer(t, h, f, theirs(j))
    same_score = (
        proof.same_value(lambda row: score(t, h, row, ours(j)), ours(i), theirs(i)),
        proof.same_value(lambda row: score(t, h, theirs(i), row), ours(j), theirs(j)),
        proof.same_value(exp, scores[0], scores[2]),
    )
    same_read = proof.same_value(lambda row: answer(t, h, f, row), ours(j), theirs(j))
    every = (j, 1, n)
    power = proof.have(Implies(key, Eq(exp(scores[0]), exp(scores[2]))), token, other, *same_score)
    product = proof.have(
        Implies(key, Eq(exp(scores[0]) * reads[0], exp(scores[2]) * reads[1])), power, other, same_read
    )
    sums = []
    for mine, yours, equal in (
        (exp(scores[0]), exp(scores[2]), power),
        (exp(scores[0]) * reads[0], exp(scores[2]) * reads[1], product),
    ):
        permuted_sum = proof.sum_same(mine, yours, every, equal, when=query)
        sums += [permuted_sum, _reordered(proof, yours.xreplace({order[j]: j}))]
    one, two = _read(layer, y, i), _read(layer, x, order[i])
    read = proof.have(Implies(query, Eq(one, two, evaluate=False)), *sums)
    by_head = proof.row_same(one, two, (f, 1, width), read, when=query)
    mine, yours = (Row(f, 1, width, part) for part in (one, two))
    by_layer = proof.row_same(mine, yours, (h, 1, heads), by_head, when=query)
    mine, yours = (Row(h, 1, heads, row) for row in (mine, yours))
    became = (
        proof.same_value(lambda row: after(t, c, row, mine), ours(i), theirs(i)),
        proof.same_value(lambda row: after(t, c, theirs(i), row), mine, yours),
    )
    # The two runs, a layer on.
    runs = []
    for run, place in ((straight, order[i]), (permuted, i)):
        outer = proof.member(run.formula, t)
        middle = proof.member(run.formula.args[3], place)
        runs += [run, outer, middle, proof.member(put(run.formula.args[3].args[3], i, place), c)]
    below = And(t >= 1, t <= layers)
    inside = proof.member(_ORDER, i), proof.given(_ORDER)
    entry = proof.have(
        Implies(And(query, below, c >= 1, c <= d), Eq(y[t + 1, i, c], x[t + 1, order[i], c])),
        *runs,
        *inside,
        token,
        by_layer,
        *became,
    )
    inner = proof.every(_moved(t + 1).args[3], entry, when=And(query, below))
    outer = proof.every(_moved(t + 1), inner, when=And(so_far, below))
    until = Implies(t <= layers + 1, so_far)
    start = proof.have(until.subs(t, 1), proof.given(_moved(1)))
    onward = proof.have(Implies(And(t >= 1, until), until.subs(t, t + 1)), outer)
    proof.conclude("equivariant", proof.at(proof.induction(until, t, 1, start, onward), {t: layers + 1}), deep)
