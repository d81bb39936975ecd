r"""What a network of ReLUs can be: a line, a continuous function, a square from one layer or many, but not on R.

:math:`f(x) = w_1^\top \sigma(w_0 x + b_0) + b_1`, :math:`\sigma(z) = \max(z, 0)`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import Abs, And, Eq, Equivalent, Heaviside, Implies, Max, Not, Or, Piecewise, Rational, Sum

from avow.core.chart import Chart, Table, curves
from avow.numerics.intervals import ball, most
from avow.theory.claims.claim import Formula, Versions, claims_on
from avow.theory.claims.formal import Exists, Spans, Statement, decimal, each, real, sequence, whole
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import kept, rational
from avow.theory.constructions import relu_linear, relu_square
from avow.theory.constructions.relu import Layer, Layers, hinges, sawtooth, square_error

claim = claims_on("relu")
m, b, x, y, eps = real("m b x y varepsilon")
K, M, N, i, j, k, n = whole("K M N i j k n")


def relu(z: Any) -> Any:
    """:math:`\\sigma(z) = \\max(z, 0)`, for symbols, balls and numbers alike."""
    if isinstance(z, arb):
        return z.max(arb(0))
    return Max(0, z) if isinstance(z, sympy.Basic) else max(z, 0 * z)


def evaluated(layers: Layers, x: Fraction) -> Fraction:
    """A network at a point, in fractions."""
    values = [x]
    for number, (rows, bias) in enumerate(layers, start=1):
        sums = [sum(map(operator.mul, row, values), shift) for row, shift in zip(rows, bias, strict=True)]
        values = sums if number == len(layers) else [relu(z) for z in sums]
    return values[0]


class Units(NamedTuple):
    """Weights w_0, biases b_0 and output weights w_1 as functions of the line's m and b."""

    weights: Formula
    biases: Formula
    outs: Formula

    def at(self, m: Any, b: Any, x: Any) -> Any:
        """The network at x."""
        parts = zip(self.weights(m, b), self.biases(m, b), self.outs(m, b), strict=True)
        return sum((out * relu(weight * x + bias) for weight, bias, out in parts), 0 * x)


ONE_UNIT = Units(lambda m, b: [m, 0], lambda m, b: [b, 0], lambda m, b: [1, 0])
OUTPUT_SLOPE = Units(lambda m, b: [1, 1], lambda m, b: [0, 0], lambda m, b: [m, 0])
TWO_UNITS = Units(lambda m, b: [m, -m], lambda m, b: [b, -b], lambda m, b: [1, -1])


def _lines_picture(units: Units, name: str) -> Chart:
    heights: Any = {"x + 1": lambda x: x + 1, name: partial(units.at, 1, 1), "two units": partial(TWO_UNITS.at, 1, 1)}
    xs: Any = [Fraction(i, 10) for i in range(-30, 31)]
    return curves("The line x + 1 and networks said to be it", "x", "f(x)", xs, heights)


def _line(units: Units) -> Statement:
    network = units.at(m, b, x)
    return Statement(
        variables={m: "the slope", b: "the height at nought", x: "the input"},
        then={"line": Eq(network, m * x + b)},
        terms={"line": m * x + b, "network": network},
        notes=["real arithmetic"],
        spans={m: (-3, 3), b: (-3, 3), x: (-3, 3)},
    )


@claim(
    "relu-linear-a",
    expected="corrected",
    formal=lambda lines: _line(lines.stated),
    plain="One ReLU with a slope and a bias, {network}, computes the line {line}.",
    amendment=lambda lines: _line(lines.amended),
    amended_plain="One unit gives nothing wherever the line is negative. Two units, one for each sign, subtracted, are"
    " the line everywhere: {network}.",
    subject=Versions(ONE_UNIT, TWO_UNITS),
    sabotage={
        "two units added": Versions(ONE_UNIT, TWO_UNITS._replace(outs=lambda m, b: [1, 1])),
        "the same bias twice": Versions(ONE_UNIT, TWO_UNITS._replace(biases=lambda m, b: [b, b])),
        "a network that is right to begin with": Versions(TWO_UNITS, TWO_UNITS),
    },
    picture=lambda: _lines_picture(ONE_UNIT, "one unit"),
)
def relu_linear_a(against: Refutation, proof: Proof, _: Versions) -> None:
    against.case({m: 1, b: 0, x: -1}, "the line is −1 at −1, and the network 0")
    proof.conclude("line", says="max(z, 0) − max(−z, 0) = z")
    proof.shows(kept(relu_linear(Fraction(-7, 4), 3), "the library's −7/4·x + 3, on the whole line"))


@claim(
    "relu-linear-b",
    expected="refuted",
    formal=_line,
    plain="Two units of slope one without biases, the first weighted by the slope, compute the line {line}.",
    subject=OUTPUT_SLOPE,
    sabotage={"the two units that do it": TWO_UNITS},
    picture=lambda: _lines_picture(OUTPUT_SLOPE, "w_0 = [1, 1], w_1 = [1, 0]"),
)
def relu_linear_b(against: Refutation, _: Units) -> None:
    against.case({m: 1, b: 1, x: 0}, "without a bias the network is 0 at 0, whatever b is")
    against.case({m: 1, b: 0, x: -1}, "left of 0 no unit is awake, whatever m is")


# ε and the units it takes, as the ledger records them.
WIDE = {Fraction(1, 100): 4, Fraction(1, 1000): 11, Fraction(1, 10**4): 35, Fraction(1, 10**6): 354}


class Hinges(NamedTuple):
    """One layer of K units for x², in n = 2K + 1: unit i is σ(weight·x + offset), all with one output weight."""

    weight: Formula = lambda n: n
    offset: Formula = lambda i: 1 - 2 * i
    out: Formula = lambda n: 4 / n**2
    bias: Formula = lambda n: 1 / (2 * n**2)

    def unit(self, i: Any, x: Any) -> Any:
        """A unit at x, before its output weight."""
        return relu(self.weight(2 * K + 1) * x + self.offset(i))

    def layers(self, units: int) -> Layers:
        """The network in fractions."""
        n = Fraction(2 * units + 1)
        offsets = tuple(Fraction(self.offset(i)) for i in range(1, units + 1))
        hidden = Layer(((Fraction(self.weight(n)),),) * units, offsets)
        return hidden, Layer(((Fraction(self.out(n)),) * units,), (Fraction(self.bias(n)),))


def _square_picture() -> Chart:
    units = [*range(1, 20), *range(20, 401, 20)]
    series = {
        "one layer, best": (units, [1 / (2 * (2 * k + 1) ** 2) for k in units]),
        "one layer, through the knots": (units, [1 / (4 * k**2) for k in units]),
        "deep": ([3 * m - 1 for m in range(1, 14)], [4.0 ** -(m + 1) for m in range(1, 14)]),
    }
    return Chart("How near ReLUs come to x² on [0, 1]", "hidden units", "largest error", series, True, True)


_ERROR = 1 / (2 * (2 * K + 1) ** 2)
_ON_UNIT = [K >= 1, x >= 0, x <= 1]


def _square(network: Hinges) -> Statement:
    hidden = Sum(network.unit(i, x), (i, 1, K))
    answer = network.out(2 * K + 1) * hidden + network.bias(2 * K + 1)
    return Statement(
        variables={K: "the number of units", x: "the input", eps: "how near it is to come"},
        given=[*_ON_UNIT, eps > 0],
        then={"within": Abs(answer - x**2) <= _ERROR, "any": Exists(k, And(k >= 1, _ERROR.subs(K, k) <= eps))},
        terms={"square": x**2, "error": _ERROR, "eps": eps},
        notes=["real arithmetic"],
        spans={K: range(1, 41), x: (0, 1), eps: (0.001, 1)},
    )


@claim(
    "relu-square",
    expected="proved",
    formal=_square,
    plain="For any {eps} above nought some finite network is within it of {square} on the unit interval: one hidden"
    " layer of K units with an output bias comes within {error}, which some K brings below.",
    subject=Hinges(),
    sabotage={
        "without the output bias": Hinges(bias=lambda n: 0 * n),
        "knots at multiples of 1/K": Hinges(weight=lambda n: (n - 1) / 2, offset=lambda i: 1 - i),
        "jumps half as large": Hinges(out=lambda n: 2 / n**2),
    },
    picture=_square_picture,
)
def relu_square_wide(proof: Proof, network: Hinges) -> None:
    some, low, high, above = map(proof.given, [*_ON_UNIT, eps > 0])

    def partly(last: Any) -> Any:
        """The first units at y = nx: near enough where the next one rests, and a line where it is awake."""
        total, next_ = Sum(relu(y + network.offset(i)), (i, 1, last)), y + network.offset(last + 1)
        line = Implies(next_ > 0, Eq(total, last * y - last**2))
        near = Implies(And(y >= 0, next_ <= 0), Abs(4 * total + Rational(1, 2) - y**2) <= Rational(1, 2))
        return And(line, near)

    longer = proof.sum_last(relu(y + network.offset(i)), (i, 1, k))
    step = Implies(And(k >= 1, partly(k)), partly(k + 1))
    onward = proof.have(step, longer, says="unit k + 1 wakes at 2k + 1, and bends the line to the next even number")
    scaled = proof.at(proof.induction(partly(k), k, 1, onward), {k: K})
    at = proof.at(scaled, {y: network.weight(2 * K + 1) * x})
    total = Sum(network.unit(i, x), (i, 1, K))
    near = proof.have(
        Abs(4 * total + Rational(1, 2) - ((2 * K + 1) * x) ** 2) <= Rational(1, 2), at, some, low, high, says="y = nx"
    )
    proof.conclude("within", near, some, says="over n²")
    more = sympy.floor(1 / eps) + 1
    below, next_ = proof.whole_below(1 / eps, above), proof.next_whole(sympy.Integer(0), more)
    exists = proof.statement.parts["any"]
    enough = proof.have(And(more >= 1, _ERROR.subs(K, more) < eps), below, next_, above, says="K > 1/ε")
    proof.conclude("any", proof.some(exists, more, enough))
    for bound, units in WIDE.items():
        error = square_error(network.layers(units))
        says = f"{units} units come within ε = {bound}"
        proof.shows(rational(error == Fraction(1, 2 * (2 * units + 1) ** 2) <= bound, says, units=units, error=error))
    proof.shows(kept(relu_square(1e-3), "the library's network for ε = 1e-3, its weights rounded to float64"))


slopes, kinks, heights = sequence("a t w")
grid = whole("g")
steep, bias, out = real("alpha tau omega")
N_ = 2 * K + 1


def _layer(x: Any) -> Any:
    """Any layer of K units with an output bias, at x."""
    return Sum(heights[i] * relu(slopes[i] * x + kinks[i]), (i, 1, K)) + b


OFF = Exists(x, And(x >= 0, x <= 1, Abs(_layer(x) - x**2) >= _ERROR))


def _best(units: Mapping[Fraction, int]) -> Statement:
    near = {f"near_{count}": Rational(bound.numerator, bound.denominator) >= _ERROR for bound, count in WIDE.items()}
    enough = {f"units_{count}": units[bound] <= K for bound, count in WIDE.items()}

    def case(count: int, *one: Any) -> dict[Any, Any]:
        *unit, shift = map(decimal, one)
        none = [Fraction(0)] * (count - 1)
        return {
            K: count,
            b: shift,
            **{of: [part, *none] for of, part in zip((slopes, kinks, heights), unit, strict=True)},
        }

    def denied(case: Any) -> arb:
        """By how much the network's largest distance to x² on [0, 1] is below: at an end, at a kink, or between."""
        weight, start, height = (ball(case[of][0]) for of in (slopes, kinks, heights))
        places = [y.max(arb(0)).min(arb(1)) for y in (arb(0), arb(1), -start / weight, height * weight / 2)]
        far = most([abs(height * relu(weight * y + start) + ball(case[b]) - y * y) for y in places])
        return 1 / arb(2 * (2 * case[K] + 1) ** 2) - far

    return Statement(
        variables={
            K: "the number of units",
            slopes: "the weights",
            kinks: "the biases",
            heights: "the output weights",
            b: "the output bias",
        },
        given=[K >= 1],
        then={"off": OFF} | {name: Equivalent(near[f"near_{name[6:]}"], least) for name, least in enough.items()},
        terms={"square": x**2, "error": _ERROR} | near | enough,
        notes=["real arithmetic"],
        spans=Spans(
            {"K": range(1, 60), "w₀": (0.01, 3), **dict.fromkeys(("b₀", "w₁", "b₁"), (-2, 2))}, case, (), denied
        ),
    )


@claim(
    "relu-square-best",
    expected="proved",
    formal=_best,
    plain="No hidden layer of K units with an output bias comes closer to {square} on the unit interval than {error}:"
    " so {near_4} exactly for {units_4}, {near_11} for {units_11}, {near_35} for {units_35} and {near_354} for"
    " {units_354}.",
    subject=WIDE,
    sabotage={"one unit fewer": {eps: units - 1 for eps, units in WIDE.items()}},
    picture=_square_picture,
)
def relu_square_best(proof: Proof, units: Mapping[Fraction, int]) -> None:
    some, all_units, windows = proof.given(K >= 1), (i, 1, K), (k, 1, K)

    def unit(of: Any, at: Any, place: Any) -> Any:
        return relu(of * place + at)

    def bend(of: Any, at: Any, place: Any) -> Any:
        """What a unit adds to the second difference over the window around an even place of the grid."""
        return unit(of, at, 2 * place - 1) + unit(of, at, 2 * place + 1) - 2 * unit(of, at, 2 * place)

    def first(of: Any, at: Any) -> Any:
        return unit(of, at, 1) - unit(of, at, 0)

    def counts(term: Any) -> Any:
        """One where a term is above zero, else nothing."""
        return Heaviside(term, 0)

    own, at_ = slopes[i] / N_, kinks[i]
    # Were the network nearer everywhere, it would be nearer on a grid of 2K + 1 pieces.
    here = Abs(_layer(grid / N_) - (grid / N_) ** 2) >= _ERROR
    on_grid = proof.some(OFF, grid / N_, when=And(grid >= 0, grid <= N_, here))
    near, inside = Not(OFF), And(k >= 1, k <= K)
    bends, rise = heights[i] * bend(own, at_, k), heights[i] * first(own, at_)
    ends = [proof.at(on_grid, {grid: place}) for place in (2 * k - 1, 2 * k, 2 * k + 1)]
    bent = proof.have(Implies(And(near, inside), Sum(bends, all_units) > 0), *ends, says="x² bends up in each window")
    starts = [proof.at(on_grid, {grid: sympy.Integer(place)}) for place in (0, 1)]
    risen = proof.have(Implies(near, Sum(rise, all_units) > 0), *starts, some, says="and rises from 0")
    # So some unit bends up in each of the windows, and some unit rises before them.
    found = []
    for term, so, when in ((bends, bent, And(near, inside)), (rise, risen, near)):
        sum_of = Sum(counts(term), all_units)
        member = proof.sum_member(counts(term), all_units, j)
        none = proof.have(Implies(And(j >= 1, j <= K, sum_of < 1), term.subs(i, j) <= 0), member)
        less = proof.sum_most(term, 0, all_units, proof.at(none, {j: i}), when=sum_of < 1)
        found.append(proof.have(Implies(when, sum_of >= 1), less, so))
    # But no unit does so in two places: it has one kink.

    def once(last: Any) -> Any:
        total = counts(out * first(steep, bias)) + Sum(counts(out * bend(steep, bias, k)), (k, 1, last))
        behind = Or(out < 0, steep * (steep * (2 * last + 1) + bias) > 0)
        return Or(Eq(total, 0), And(Eq(total, 1), behind))

    longer = proof.sum_last(counts(out * bend(steep, bias, k)), (k, 1, n))
    onward = proof.have(Implies(And(n >= 1, once(n)), once(n + 1)), longer)
    always = proof.at(proof.induction(once(n), n, 1, onward), {n: K})
    each_ = proof.at(always, {steep: own, bias: at_, out: heights[i]})
    both = counts(rise) + Sum(counts(bends), windows)
    one = proof.have(both <= 1, each_, some)
    most_ = proof.sum_most(both, 1, all_units, one)
    least = proof.sum_most(1, Sum(counts(bends), all_units), windows, found[0], when=near)
    swapped = proof.sum_swap(counts(bends), all_units, windows)
    proof.conclude("off", most_, least, swapped, found[1], says="K units for K + 1 places")
    for count in WIDE.values():
        proof.conclude(f"units_{count}", some, proof.next_whole(sympy.Integer(count - 1), K))


def _without_bias(parts: tuple[Formula, Formula, Formula]) -> Statement:
    weight, offset, out = parts
    network = Sum(out(i) * relu(weight(i) * x + offset(i)), (i, 1, K + 1))
    return Statement(
        variables={K: "the number of units that bend", x: "the input", eps: "how near it is to come"},
        given=[*_ON_UNIT, eps > 0],
        then={"within": Abs(network - x**2) <= _ERROR, "any": Exists(k, And(k >= 1, _ERROR.subs(K, k) <= eps))},
        terms={"square": x**2, "error": _ERROR, "eps": eps},
        notes=["real arithmetic"],
        spans={K: range(1, 21), x: (0, 1), eps: (0.001, 1)},
    )


_ODD = 2 * K + 1
_PARTS: tuple[Formula, ...] = (
    lambda i: Piecewise((_ODD, i <= K), (0, True)),
    lambda i: Piecewise((1 - 2 * i, i <= K), (1, True)),
    lambda i: Piecewise((4 / _ODD**2, i <= K), (1 / (2 * _ODD**2), True)),
)


@claim(
    "relu-square-no-bias",
    expected="proved",
    formal=_without_bias,
    plain="Without an output bias a hidden layer comes within any {eps} of {square} on the unit interval as well: one"
    " more unit that is constant takes its place, and the layer comes within {error}.",
    subject=_PARTS,
    sabotage={
        "no unit in the place of the bias": (*_PARTS[:2], lambda i: Piecewise((4 / _ODD**2, i <= K), (0, True))),
        "a unit that sleeps": (_PARTS[0], lambda i: Piecewise((1 - 2 * i, i <= K), (-1, True)), _PARTS[2]),
    },
    picture=_square_picture,
    needs=("relu-square",),
)
def relu_square_no_bias(proof: Proof, parts: tuple[Formula, Formula, Formula]) -> None:
    weight, offset, out = parts
    some, low, high, above = map(proof.given, [*_ON_UNIT, eps > 0])
    values = {K: K, x: x, eps: eps}
    biased = proof.known(relu_square_wide, "within", values, says="the layer with an output bias")
    unit = out(i) * relu(weight(i) * x + offset(i))
    more = proof.sum_last(unit, (i, 1, K))
    bends = proof.sum_same(unit, 4 / _ODD**2 * relu(_ODD * x + 1 - 2 * i), (i, 1, K))
    proof.conclude("within", biased, more, bends, some, low, high, above)
    proof.conclude("any", proof.known(relu_square_wide, "any", values), some, low, high, above)


f = sequence("f")


def _continuous_picture() -> Chart:
    def through(pieces: int, at: float) -> float:
        place = min(int(at * pieces), pieces - 1)
        low, high = (math.sin(7 * (place + more) / pieces) for more in (0, 1))
        return low + (high - low) * (at * pieces - place)

    heights: Any = {"sin 7x": lambda x: math.sin(7 * x)}
    heights |= {f"{pieces} pieces": partial(through, pieces) for pieces in (3, 6)}
    return curves("A layer through a function's values on a grid", "x", "f(x)", [i / 60 for i in range(61)], heights)


_CLOSE = each(i, 1, N + 1, Implies(Abs(x - (i - 1) / N) <= 1 / N, Abs(y - f[i]) <= eps))


def _continuous(bend: Formula) -> Statement:
    hat = relu(x - (i - 1) / N) - relu(x - i / N)
    network = f[1] + Sum(bend(N) * (f[i + 1] - f[i]) * hat, (i, 1, N))

    def case(pieces: int, *numbers: Any) -> dict[Any, Any]:
        at, size, start, *steps = map(decimal, numbers)
        values = [start]
        for number in range(pieces):
            values.append(values[-1] + size * steps[number])
        place = min(int(at * pieces), pieces - 1)
        return {N: pieces, x: at, eps: size, f: values, y: values[place]}

    return Statement(
        variables={
            N: "the number of pieces",
            x: "the input",
            f: "the function at the grid's points, (i − 1)/N",
            y: "the function at x",
            eps: "how much the function can change over a piece, by its modulus of continuity",
        },
        given=[*(N >= 1, x >= 0, x <= 1), _CLOSE],
        then={"near": Abs(network - y) <= eps},
        terms={"eps": eps, "piece": 1 / N},
        notes=[
            "a continuous function on the unit interval is uniformly so: for any ε there is such an N",
            "the network is one hidden layer of units at the grid's points, with an output bias",
        ],
        spans=Spans(
            {"N": range(1, 5), "x": (0, 1), "ε": (0.1, 1), **dict.fromkeys(("f₁", "a", "b", "c", "d"), (-1, 1))}, case
        ),
    )


@claim(
    "relu-continuous",
    expected="proved",
    formal=_continuous,
    plain="One hidden layer approximates any continuous function on the unit interval: where the function changes by no"
    " more than {eps} over a distance of {piece}, the network through its values on that grid is nowhere more than"
    " that off.",
    subject=lambda N: N,
    sabotage={"bends half as large": lambda N: N / 2, "bends for twice as many pieces": lambda N: 2 * N},
    picture=_continuous_picture,
)
def relu_continuous(proof: Proof, bend: Formula) -> None:
    some, low, high = (proof.given(one) for one in (N >= 1, x >= 0, x <= 1))
    close = proof.given(_CLOSE)
    hat = relu(x - (i - 1) / N) - relu(x - i / N)
    term = bend(N) * (f[i + 1] - f[i]) * hat

    def partly(last: Any) -> Any:
        """The first pieces: the network has reached the next value, or is near enough already."""
        network = f[1] + Sum(term, (i, 1, last))
        done = Implies(x >= last / N, Eq(network, f[last + 1]))
        return Implies(last <= N, And(done, Implies(x <= last / N, Abs(network - y) <= eps)))

    zero = proof.member(close.formula, sympy.Integer(1))
    first = proof.have(partly(sympy.Integer(0)), zero, close, some, low)
    longer = proof.sum_last(term, (i, 1, k))
    ends = [proof.member(close.formula, k + 1), proof.member(close.formula, k + 2)]
    onward = proof.have(Implies(And(k >= 0, partly(k)), partly(k + 1)), longer, close, *ends)
    proof.conclude("near", proof.at(proof.induction(partly(k), k, 0, first, onward), {k: N}), some, high)


# ε and the units it takes, as the ledger records them.
DEEP = {Fraction(1, 100): 8, Fraction(1, 1000): 11, Fraction(1, 10**4): 17, Fraction(1, 10**6): 26}


class Sawtooth(NamedTuple):
    """The deep network: the tooth from its two units' outputs, what f_k takes of g_k, the units of m layers."""

    tooth: Formula = lambda a, b: 2 * a - 4 * b
    share: Formula = lambda k: sympy.Integer(4) ** -k
    units: Formula = lambda m: 3 * m - 1

    def at(self, y: Any) -> Any:
        """The tooth at y."""
        return self.tooth(relu(y), relu(y - (Rational(1, 2) if isinstance(y, sympy.Basic) else Fraction(1, 2))))


def _deep_picture() -> Table:
    networks = {eps: relu_square(eps, deep=True) for eps in WIDE}
    rows = [[f"{float(eps):g}", WIDE[eps], x.units, x.depth, str(x.exact_error)] for eps, x in networks.items()]
    headings = ("ε", "units in one layer", "units, deep", "layers", "deep error, exactly")
    return Table("x² on [0, 1] to within ε", headings, rows)


g = sequence("g")


def _teeth(network: Sawtooth) -> list[Any]:
    return [Eq(g[1], network.at(x)), each(k, 2, M, Eq(g[k], network.at(g[k - 1])))]


def _deep(network: Sawtooth) -> Statement:
    answer = x - Sum(network.share(k) * g[k], (k, 1, M))
    error = sympy.Integer(4) ** -(M + 1)
    # What a layer of K units needs, by claim relu-square-best; and M − 1 layers do not come as near.
    needed, least = eps >= _ERROR, And(error <= eps, eps < 4 * error)

    def case(depth: int, at: Any, near: Any, units: int) -> dict[Any, Any]:
        at, teeth = decimal(at), list[Fraction]()
        for _ in range(depth):
            teeth.append(Fraction(network.at(teeth[-1] if teeth else at)))
        return {M: depth, x: at, g: teeth, eps: decimal(near) / 1000, K: units}

    return Statement(
        variables={
            M: "the number of layers",
            x: "the input",
            g: "the sawtooth after each layer",
            eps: "how near it is to come",
            K: "the units of a single layer that comes as near",
        },
        given=[M >= 1, K >= 1, x >= 0, x <= 1, *_teeth(network)],
        then={
            "within": And(answer - x**2 >= 0, answer - x**2 <= error),
            "reached": Implies(Eq(g[M], Rational(1, 2)), Eq(answer - x**2, error)),
            "units": Eq(2 + Sum(3, (k, 2, M)), network.units(M)),
            "fewer": Implies(And(least, eps <= Rational(1, 10**4), needed), network.units(M) < K),
        },
        terms={"error": error, "units": network.units(M), "small": eps <= Rational(1, 10**4), "half": Rational(1, 2)},
        notes=["real arithmetic", "that one layer of K units needs as large an ε: claim relu-square-best"],
        spans=Spans({"m": range(1, 9), "x": (0, 1), "1000ε": (0.01, 1), "K": range(1, 400)}, case),
    )


@claim(
    "relu-square-deep",
    expected="proved",
    formal=_deep,
    plain="Depth helps: a sawtooth composed with itself once a layer comes within {error} of the square on the unit"
    " interval, and is that far off where the last tooth is {half}. It takes {units} units: two in the first layer and"
    " three in each other. From {small} on, that is fewer than any single layer can do with.",
    subject=Sawtooth(),
    sabotage={
        "a tooth that does not come back down": Sawtooth(tooth=lambda a, b: 2 * a - 2 * b),
        "halves in place of quarters": Sawtooth(share=lambda k: sympy.Integer(2) ** -k),
        "two units a layer": Sawtooth(units=lambda m: 2 * m),
    },
    picture=_deep_picture,
    needs=("relu-square-best",),
)
def relu_square_deep(proof: Proof, network: Sawtooth) -> None:
    some, low, high = (proof.given(one) for one in (M >= 1, x >= 0, x <= 1))
    first, later = map(proof.given, _teeth(network))
    four = sympy.Integer(4)

    def left(last: Any) -> Any:
        """What is left of x − x² after some layers, and where the tooth lies."""
        taken = Sum(network.share(k) * g[k], (k, 1, last))
        rest = Eq(x - x**2, taken + four**-last * (g[last] - g[last] ** 2))
        return Implies(last <= M, And(rest, g[last] >= 0, g[last] <= 1))

    base = proof.have(left(sympy.Integer(1)), first, low, high, says="x − x² = g/4 + (g − g²)/4, on either side of ½")
    step, longer = proof.member(later.formula, j + 1), proof.sum_last(network.share(k) * g[k], (k, 1, j))
    says = "and so for g in the place of x"
    onward = proof.have(Implies(And(j >= 1, left(j)), left(j + 1)), later, step, longer, says=says)
    ends = proof.at(proof.induction(left(j), j, 1, base, onward), {j: M})
    proof.conclude("within", ends, some, says="g − g² lies between 0 and ¼")
    proof.conclude("reached", ends, some)
    proof.conclude("units", some, says="two, and three for each layer but the first")
    # Before that, they have fewer units than the 35 that a single layer takes for 1e-4.
    grows = four**-j < _ERROR.subs(K, network.units(j))
    outgrown = proof.at(proof.induction(grows, j, 11, says="4^M outgrows 2(6M − 1)² from M = 11 on"), {j: M})
    proof.conclude("fewer", outgrown, proof.given(K >= 1), says="2(2K + 1)² > 4^M, and 70 < 2K + 1 at 1e-4")
    for depth in (1, 2, 3, 4):
        layers, worst = sawtooth(depth), Fraction(1, 4 ** (depth + 1))
        grid = [Fraction(i, 2 ** (depth + 1)) for i in range(2 ** (depth + 1) + 1)]
        errors = [evaluated(layers, x) - x * x for x in grid]
        says = f"the library's {depth} layers are x² at every multiple of 2^-{depth}, and off by 4^-{depth + 1} between"
        proof.shows(rational(errors[0::2] == [0] * len(errors[0::2]) and set(errors[1::2]) == {worst}, says))
    for bound, units in DEEP.items():
        depth = next(m for m in range(1, 99) if Fraction(1, 4 ** (m + 1)) <= bound)
        proof.shows(rational(int(network.units(depth)) == units, f"ε = {bound} takes {units} units", layers=depth))
    proof.shows(kept(relu_square(1e-6, deep=True), "the library's network for ε = 1e-6, rounded to float64"))


class Growth(NamedTuple):
    """What a network is to follow on the whole line."""

    function: Formula
    name: str


def _line_picture() -> Chart:
    heights: Any = {"x²": lambda x: x * x, "11 units, within 1e-3 on [0, 1]": partial(evaluated, hinges(11))}
    xs: Any = [Fraction(i, 20) for i in range(-40, 61)]
    return curves("Beyond its last kink a network is a straight line", "x", "f(x)", xs, heights)


step = real("h")


def _through(target: Growth) -> Statement:
    def slope(side: int, i: Any) -> Any:
        return (target.function(side * i * step) - target.function(side * (i - 1) * step)) / step

    def one_side(side: int) -> Any:
        bends = (slope(side, i) - slope(side, i - 1)) * relu(side * x - (i - 1) * step)
        return slope(side, sympy.Integer(1)) * relu(side * x) + Sum(sympy.expand(bends), (i, 2, K))

    network = target.function(sympy.Integer(0)) + one_side(1) + one_side(-1)
    return Statement(
        variables={K: "the number of kinks a side", step: "from one kink to the next", x: "the input"},
        given=[K >= 1, step > 0],
        then={"everywhere": Abs(network - target.function(x)) <= step**2 / 4},
        terms={"target": target.function(x), "error": step**2 / 4},
        notes=["real arithmetic", "the network is the target at the kinks, and a line between two of them"],
        spans=Spans(
            {"kinks a side": range(1, 9), "reach": (0.1, 50), "x": (-200, 200)},
            lambda kinks, reach, at: {K: kinks, step: reach / kinks, x: at},
        ),
    )


@claim(
    "relu-square-line",
    expected="refuted",
    formal=_through,
    plain="What works on an interval works everywhere: the network that is {target} at evenly spaced points, and within"
    " {error} of it between them, stays as near on the whole line.",
    subject=Growth(lambda x: x**2, "x²"),
    sabotage={
        "something a network can follow: |x|": Growth(lambda x: abs(x), "|x|"),
        "a line": Growth(lambda x: 3 * x + 1, "3x + 1"),
    },
    picture=_line_picture,
)
def relu_square_line(against: Refutation, target: Growth) -> None:
    against.case({K: 4, step: Fraction(1, 4), x: 2}, "four kinks a side, a quarter apart: at 2 the last line is below")


W, h, c, shift = sequence("W h c s")
bound, far, growth = real("omega X G")
_REACH = growth ** (M + 1)


_WITHIN = And(Abs(W[1, i, 1]) <= bound, Abs(shift[1, i]) <= bound)
_DEEPER = And(Abs(W[k, i, j]) <= bound, Abs(shift[k, i]) <= bound)
_LAYERED = [
    *(M >= 1, N >= 1, bound >= 1, eps > 0, Abs(b) <= bound, (N + 1) * bound <= growth),
    each(i, 1, N, _WITHIN),
    each(k, 2, M, each(i, 1, N, each(j, 1, N, _DEEPER))),
    each(j, 1, N, Abs(c[j]) <= bound),
    each(i, 1, N, Eq(h[1, i], Max(0, W[1, i, 1] * far + shift[1, i]))),
    each(k, 2, M, each(i, 1, N, Eq(h[k, i], Max(0, Sum(W[k, i, j] * h[k - 1, j], (j, 1, N)) + shift[k, i])))),
    far >= 2 * _REACH + eps,
]


def _layered(target: Growth) -> Statement:
    here = target.function(far)
    answer = Sum(c[j] * h[M, j], (j, 1, N)) + b

    def case(depth: int, size: Any, at: Any, height: Any, *numbers: Any) -> dict[Any, Any]:
        size, height, *rest = map(decimal, (size, height, *numbers))
        weights = [[[size * w for w in rest[:2]], [size * w for w in rest[2:4]]]] * depth
        biases, outs = [[size * w for w in rest[4:6]]] * depth, [size * w for w in rest[6:8]]
        start = 2 * (3 * size) ** (depth + 1) + 1
        at = start + decimal(at)
        values: list[list[Fraction]] = []
        for layer in range(depth):
            before = values[-1] if layer else [at]
            values.append(
                [
                    relu(sum(map(operator.mul, row, before)) + b_)
                    for row, b_ in zip(weights[layer], biases[layer], strict=True)
                ]
            )
        return {
            **{M: depth, N: 2, bound: size, far: at, eps: Fraction(1, 2), b: height * size, W: weights, shift: biases},
            **{h: values, c: outs, growth: 3 * size},
        }

    return Statement(
        variables={
            M: "the number of hidden layers",
            N: "the number of units in each",
            W: "the weights, by layer, unit and input",
            shift: "the biases, by layer and unit",
            c: "the output weights",
            b: "the output bias",
            bound: "what no weight and no bias exceeds in magnitude",
            growth: "by how much a layer can stretch its inputs",
            far: "the input",
            h: "the answer of each unit, by layer",
            eps: "how near the network is to come",
        },
        given=_LAYERED,
        then={"off": Abs(answer - here) > eps},
        terms={"target": here, "eps": eps, "start": 2 * _REACH + eps},
        notes=["real arithmetic"],
        spans=Spans(
            {"layers": range(1, 4), "ω": (1, 2), "further": (0, 5), **dict.fromkeys(("b", *"pqrstuvw"), (-1, 1))}, case
        ),
    )


@claim(
    "relu-square-far",
    expected="proved",
    formal=_layered,
    plain="No finite network follows the square on the whole line, whatever its depth and width: from {start} on it is"
    " more than {eps} off {target}.",
    subject=Growth(lambda x: x**2, "x²"),
    sabotage={
        "something a network can follow: |x|": Growth(lambda x: abs(x), "|x|"),
        "nothing at all": Growth(lambda x: 0 * x, "0"),
    },
    picture=_line_picture,
)
def relu_square_far(proof: Proof, target: Growth) -> None:
    given = map(proof.given, _LAYERED)
    layers, width, size, above, height, stretch, within, deeper, outs, first, later, start = given
    one = proof.have(growth >= 2, stretch, width, size)
    grown = growth**k >= 1
    powers = proof.induction(grown, k, 1, one)
    last = proof.at(powers, {k: M})
    away = proof.have(far >= 0, start, one, above)

    def most_(layer: Any) -> Any:
        return growth**layer * (far + 1)

    def all_small(layer: Any) -> Any:
        return each(i, 1, N, And(h[layer, i] >= 0, h[layer, i] <= most_(layer)))

    def small(layer: Any) -> Any:
        return Implies(layer <= M, all_small(layer))

    # The first layer.
    here = proof.member(within.formula, i), proof.member(first.formula, i)
    top = proof.have(bound * (far + 1) <= growth * (far + 1), stretch, width, size, away)
    own = And(h[1, i] >= 0, h[1, i] <= growth * (far + 1))
    unit = proof.have(Implies(And(i >= 1, i <= N), own), within, first, *here, away, top)
    base = proof.every(each(i, 1, N, own), unit)
    # Any other: a sum of as many terms as there are units, each at most what weight and unit can be.
    row = And(k >= 1, k + 1 <= M, i >= 1, i <= N, all_small(k))
    outer = deeper.formula.args[3].subs(k, k + 1)
    inner = outer.args[3]
    weights = proof.member(deeper.formula, k + 1), proof.member(outer, i), proof.member(inner, j)
    sized = proof.have(
        Implies(And(row, j >= 1, j <= N), And(Abs(W[k + 1, i, j]) <= bound, Abs(shift[k + 1, i]) <= bound)),
        deeper,
        *weights,
    )
    inputs = proof.member(all_small(k), j)
    each_ = proof.have(
        Implies(And(row, j >= 1, j <= N), W[k + 1, i, j] * h[k, j] <= bound * most_(k)),
        sized,
        inputs,
        says="at most ω by what the layer before has",
    )
    together = proof.sum_most(W[k + 1, i, j] * h[k, j], bound * most_(k), (j, 1, N), each_, when=row)
    lesser = proof.have(Implies(k >= 1, bound <= bound * most_(k)), powers, away, size)
    larger = proof.have(Implies(k >= 1, (N + 1) * bound * most_(k) <= most_(k + 1)), stretch, away, one)
    bias = proof.at(sized, {j: sympy.Integer(1)})
    units = proof.member(later.formula, k + 1), proof.member(later.formula.args[3].subs(k, k + 1), i)
    next_ = And(h[k + 1, i] >= 0, h[k + 1, i] <= most_(k + 1))
    unit = proof.have(Implies(row, next_), later, *units, together, lesser, larger, bias, says="N + 1 such terms")
    every = proof.every(each(i, 1, N, next_), unit, when=And(k >= 1, k + 1 <= M, all_small(k)))
    onward = proof.have(Implies(And(k >= 1, small(k)), small(k + 1)), every)
    ends = proof.at(proof.induction(small(k), k, 1, base, onward), {k: M})
    # The output is one more such sum.
    at, out = proof.member(all_small(M), j), proof.member(outs.formula, j)
    term = c[j] * h[M, j]
    upper = proof.have(
        Implies(And(j >= 1, j <= N), And(term <= bound * most_(M), -bound * most_(M) <= term)),
        ends,
        at,
        outs,
        out,
        layers,
    )
    sums = (
        proof.sum_most(term, bound * most_(M), (j, 1, N), upper),
        proof.sum_most(-bound * most_(M), term, (j, 1, N), upper),
    )
    total = Sum(term, (j, 1, N)) + b
    lesser, larger = proof.at(lesser, {k: M}), proof.at(larger, {k: M})
    line = proof.have(
        Abs(total) <= most_(M + 1),
        *sums,
        lesser,
        larger,
        height,
        width,
        layers,
        says="so the answer grows no faster than a line",
    )
    proof.conclude("off", line, start, last, layers, one, says="and a square does")
