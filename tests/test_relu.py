"""ReLU networks keep what they promise, in fractions and in balls, for the weights as they were rounded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from torch import nn

from avow.errors import (
    AvowError,
    DtypeError,
    NonFiniteError,
    ParameterError,
    RangeError,
    ToleranceUnreachable,
)
from avow.theory.constructions import ReluSquare, relu_linear, relu_piecewise, relu_square
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.relu import (
    Layer,
    Layers,
    as_fractions,
    hinges,
    pieces,
    sawtooth,
    sawtooth_error,
    square_error,
)
from avow.theory.constructions.relu_curves import chain, curve_of
from tests.helpers.draws_relu import DRAWS, WEAKENED, with_output

X = sympy.Symbol("x")
COUNTS = {1e-2: (4, 8), 1e-3: (11, 11), 1e-4: (35, 17), 1e-6: (354, 26)}
kinds = pytest.mark.parametrize("kind", DRAWS)


def evaluated(layers: Layers, x: Fraction) -> Fraction:
    """A network at a point, in fractions, by the definition."""
    values = [x]
    for i, (rows, bias) in enumerate(layers):
        values = [sum((w * v for w, v in zip(row, values, strict=True)), b) for row, b in zip(rows, bias, strict=True)]
        if i < len(layers) - 1:
            values = [max(value, Fraction(0)) for value in values]
    return values[0]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@kinds
def test_what_is_drawn_keeps_its_promise(kind: str) -> None:
    for seed in range(12):
        proof = DRAWS[kind](generator(seed)).verify()
        assert proof, str(proof)


@kinds
def test_what_is_weakened_is_rejected(kind: str) -> None:
    for seed in range(6):
        proof = WEAKENED[kind](DRAWS[kind](generator(seed))).verify()
        assert not proof, str(proof)


@kinds
def test_the_module_stays_within_the_bound(kind: str) -> None:
    """Computed in float64, so only the weights' own rounding is seen, and a hair of the arithmetic's."""
    for seed in range(4):
        made = DRAWS[kind](generator(seed))
        picture = made.picture().plain()
        json.dumps(picture, allow_nan=False)
        (_, true), (_, network), _ = picture["series"].values()
        scale = max(1.0, *map(abs, true))
        error = max(abs(a - b) for a, b in zip(true, network, strict=True))
        assert error <= made.bound + 1e-12 * scale
        assert isinstance(made.as_module(), nn.Sequential)


@kinds
def test_the_module_holds_the_tensors_and_learns(kind: str) -> None:
    made = DRAWS[kind](generator(3))
    module = made.as_module()
    held = {name: value for name, value in made.tensors().items() if name.startswith("w")}
    for value, weight in zip(held.values(), (p for n, p in module.named_parameters() if "weight" in n), strict=True):
        assert torch.equal(value, weight)
        assert weight.dtype == value.dtype
    module.double()(torch.full((3, 1), 0.3, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("eps", COUNTS)
def test_the_square_takes_as_many_units_as_the_ledger_says(eps: float) -> None:
    shallow, deep = relu_square(eps), relu_square(eps, deep=True)
    assert (shallow.units, deep.units) == COUNTS[eps]
    assert shallow.exact_error == Fraction(1, 2 * (2 * shallow.units + 1) ** 2)
    assert deep.exact_error == Fraction(1, 4 ** (deep.depth + 1))
    assert deep.units == 3 * deep.depth - 1
    for made in (shallow, deep):
        assert made.exact_error <= made.bound <= eps
        assert made.bound - made.exact_error <= 1e-13
        assert made.verify()


@pytest.mark.parametrize("units", [1, 2, 3, 7])
def test_the_rational_weights_are_off_by_exactly_the_formula(units: int) -> None:
    n = 2 * units + 1
    assert square_error(hinges(units)) == Fraction(1, 2 * n * n)
    # Reached, with alternating sign, at every multiple of 1/n.
    for i in range(n + 1):
        x = Fraction(i, n)
        sign = -1 if i % 2 == 0 else 1
        assert x * x - evaluated(hinges(units), x) == sign * Fraction(1, 2 * n * n)


def test_one_unit_fewer_is_not_enough() -> None:
    for eps, (units, _) in COUNTS.items():
        assert square_error(hinges(units)) <= Fraction(eps)
        assert Fraction(1, 2 * (2 * units - 1) ** 2) > Fraction(eps)


def test_no_search_finds_a_better_layer_of_three_units() -> None:
    """The proof is the claim's; this would show a formula that is not the best."""
    best = square_error(hinges(3))
    for seed in range(200):
        draw = torch.rand(7, generator=generator(seed), dtype=torch.float64).tolist()
        (rows, bias), (outs, shift) = hinges(3)
        moved = (
            Layer(rows, tuple(b + Fraction(d - 0.5) / 50 for b, d in zip(bias, draw[:3], strict=True))),
            Layer(
                (tuple(w + Fraction(d - 0.5) / 500 for w, d in zip(outs[0], draw[3:6], strict=True)),),
                (shift[0] + Fraction(draw[6] - 0.5) / 500,),
            ),
        )
        assert square_error(moved) > best


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_sawtooth_meets_the_square_at_every_dyadic(depth: int) -> None:
    layers = sawtooth(depth)
    for i in range(2**depth + 1):
        x = Fraction(i, 2**depth)
        assert evaluated(layers, x) == x * x
    for i in range(2**depth):
        x = Fraction(2 * i + 1, 2 ** (depth + 1))
        assert evaluated(layers, x) - x * x == Fraction(1, 4 ** (depth + 1))
    assert sawtooth_error(layers) == Fraction(1, 4 ** (depth + 1))


def test_what_is_carried_through_a_spoilt_sawtooth_covers_its_error() -> None:
    for layer, row, column in ((0, 1, 0), (1, 0, 1), (2, 2, 0), (3, 0, 1)):
        spoilt = [[list(map(list, rows)), list(bias)] for rows, bias in sawtooth(3)]
        spoilt[layer][0][row][column] += Fraction(1, 64)
        layers = tuple(Layer(tuple(map(tuple, rows)), tuple(bias)) for rows, bias in spoilt)
        grid = (Fraction(i, 128) for i in range(129))
        assert max(abs(evaluated(layers, x) - x * x) for x in grid) <= sawtooth_error(layers)
        assert sawtooth_error(layers) > Fraction(1, 4**4)


def test_a_sawtooth_without_a_unit_is_no_sawtooth() -> None:
    rows, bias = sawtooth(3)[0]
    assert math.isinf(sawtooth_error((Layer(rows[:1], bias[:1]), *sawtooth(3)[1:])))


def test_depth_goes_as_far_as_floats_do() -> None:
    made = relu_square(5e-324, deep=True)
    assert made.depth == 536
    assert made.verify()


def test_pieces_agree_with_the_definition_for_units_of_every_kind() -> None:
    """Rising, falling, constant and never awake; kinks inside, outside, and at the ends."""
    rows = tuple((Fraction(w),) for w in (2, -3, 0, 0, 1, -1, 4))
    bias = tuple(map(Fraction, ("-1/2", "1", "2", "-2", "0", "1", "9")))
    outs = tuple(map(Fraction, (1, "-1/3", 5, 7, -2, "3/2", "1/5")))
    layers = (Layer(rows, bias), Layer((outs,), (Fraction(-1, 7),)))
    found = pieces(layers, Fraction(0), Fraction(1))
    assert [piece.low for piece in found] == [0, Fraction(1, 4), Fraction(1, 3)]
    for low, high, slope, height in found:
        for x in (low, (low + high) / 2, high):
            assert slope * x + height == evaluated(layers, Fraction(x))


@pytest.mark.parametrize("m", [0, 1, -2.5, 1e300, Fraction(1, 8)])
def test_a_line_is_exact_on_the_whole_line(m: float) -> None:
    made = relu_linear(m, -0.75)
    assert made.units == 2
    assert made.bound == 0.0 == made.verify().achieved
    assert evaluated(made.exact, Fraction(-10)) == -10 * Fraction(m) - Fraction(3, 4)


def test_a_rounded_slope_is_counted_on_an_interval() -> None:
    third = Fraction(1, 3)
    made = relu_linear(third, 0, (-6, 2), torch.float32)
    assert made.bound == pytest.approx(6 * abs(float(torch.tensor(1 / 3)) - 1 / 3), rel=1e-6)
    assert made.verify()
    assert not dataclasses.replace(made, eps=made.bound / 2).verify()


def test_rounding_counts_against_the_square() -> None:
    """K = 354 leaves 5e-9 of 1e-6, which float32 cannot do with: more units make up for it."""
    assert relu_square(1e-6, dtype=torch.float32).units > 354
    coarse = relu_square(1e-2, dtype=torch.bfloat16)
    assert coarse.exact_error * Fraction(1001, 1000) < coarse.bound <= 1e-2
    assert coarse.bound == pytest.approx(float(square_error(as_fractions(coarse.layers))))


def test_a_square_without_one_unit_is_rejected() -> None:
    for unit in range(4):
        made = relu_square(1e-2)
        weight = made.tensors()["w_1"].clone()
        weight[0, unit] = 0
        assert not with_output(made, weight).verify()


@pytest.mark.parametrize(
    ("f", "interval", "most"),
    [
        (sympy.exp(X), (0, 1), 4),
        (X**2, (0, 1), 4),
        (-sympy.sqrt(X), (0, 1), 5),
        (sympy.sin(X), (0, 6), 13),
        (1 / (1 + X**2), (-5, 5), 11),
        (sympy.Abs(X - sympy.Rational(1, 3)), (-1, 1), 2),
        (2**X, (-1, 3), 11),
        (X * sympy.erf(X / sympy.sqrt(2)), (-2, 2), 8),
        (sympy.Float(0.5) * sympy.pi * X + sympy.E, (-3, 4), 1),
        (sympy.Integer(2), (0, 1), 1),
    ],
    ids=str,
)
def test_a_curve_is_followed_with_few_units(f: sympy.Expr, interval: tuple[float, float], most: int) -> None:
    made = relu_piecewise(f, interval, 1e-2)
    assert made.units <= most
    proof = made.verify()
    assert proof and proof.achieved <= made.bound <= 1e-2


def test_the_bound_of_a_curve_is_hardly_above_the_error() -> None:
    made = relu_piecewise(sympy.exp(X), (0, 1), 1e-2)
    x = torch.linspace(0, 1, 10001, dtype=torch.float64)
    error = float((made.as_module().requires_grad_(False)(x[:, None])[:, 0] - x.exp()).abs().max())
    assert 0.998 * made.bound <= error <= made.bound


def test_a_convex_curve_takes_no_more_lines_than_needed() -> None:
    """N lines for x² err by at least 1/(8N²): three would miss 1e-2."""
    assert relu_piecewise(X**2, (0, 1), 1e-2).units == 4
    assert Fraction(1, 8 * 9) > Fraction(1, 100)


@pytest.mark.parametrize(
    ("f", "interval", "units"),
    [
        (sympy.Abs(X), (-1, 1), 2),
        (sympy.tanh(1000 * X), (-10, 10), 28),
        (sympy.sin(20 * X), (0, 3), 364),
        (sympy.sqrt(X), (0, 4), 22),
    ],
    ids=str,
)
def test_lines_reach_as_far_as_the_band_lets_them(f: sympy.Expr, interval: tuple[float, float], units: int) -> None:
    """Corners are met exactly, steps that are thin beside the interval are not stepped over, samples tell truly."""
    curve = curve_of(f)
    knots = chain(curve, interval, 1e-3)
    assert len(knots) - 1 <= units
    xs, ys = (np.array(column) for column in zip(*knots, strict=True))
    assert xs[0] == interval[0] and xs[-1] == interval[1] and (np.diff(xs) > 0).all()
    # A thousand points of every line.
    there = np.concatenate([np.linspace(low, high, 1000) for low, high in itertools.pairwise(xs)])
    assert np.abs(curve.values(there) - np.interp(there, xs, ys)).max() <= 1.0005e-3
    # And no line could be longer by a hundredth: what begins where it begins leaves the band before it ends.
    for (x, y), (end, _) in itertools.pairwise(knots[:-1]):
        further = x + 1.01 * (end - x)
        some = np.linspace(x, further, 1000)
        for rise in (-1e-3, 0.0, 1e-3):
            line = np.interp(some, (x, further), (y, float(curve.values(np.array([further]))[0]) + rise))
            assert np.abs(curve.values(some) - line).max() > 0.99e-3


def test_types_with_few_bits_are_counted() -> None:
    made = relu_piecewise(sympy.tanh(X), (-1, 1), 5e-2, torch.bfloat16)
    assert made.tensors()["w_1"].dtype == torch.bfloat16
    assert made.verify()
    with pytest.raises(ToleranceUnreachable, match="finer than can be proved for tanh") as caught:
        relu_piecewise(sympy.tanh(X), (-1, 1), 1e-4, torch.bfloat16)
    assert 1e-4 < caught.value.best < 0.1


y = sympy.Symbol("y")


@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        (lambda: relu_square(0), ParameterError, "relu_square: eps=0 must lie in (0, 1); try eps=0.01"),
        (lambda: relu_square(1.0), ParameterError, "relu_square: eps=1.0 must lie in (0, 1)"),
        (lambda: relu_square(math.nan, deep=True), ParameterError, "relu_square: eps=nan must lie in (0, 1)"),
        (lambda: relu_square("0.1"), ParameterError, "relu_square: eps='0.1' must be a number; pass one"),
        (lambda: relu_square(1e-12), ParameterError, "needs 353,553 units in one layer, and at most 16,384 are made"),
        (
            lambda: relu_square(1e-2, dtype=torch.int32),
            DtypeError,
            "relu_square: dtype=torch.int32 must be one of float64, ",
        ),
        (
            lambda: relu_square(1e-4, dtype=torch.bfloat16),
            ToleranceUnreachable,
            "relu_square: eps=0.0001 is finer than weights of type bfloat16 can follow x²; use eps of at least",
        ),
        (lambda: relu_linear(math.inf, 0), NonFiniteError, "relu_linear: m=inf must be a finite number"),
        (lambda: relu_linear(0, math.nan), NonFiniteError, "relu_linear: b=nan must be a finite number"),
        (lambda: relu_linear(Fraction(1, 3), 0), ParameterError, "relu_linear: m=1/3 is not a float64 number"),
        (lambda: relu_linear(0.1, 0, dtype=torch.float32), ParameterError, "drifts from the line without end; give an"),
        (lambda: relu_linear(1e300, 0, (0, 1), torch.float32), RangeError, "cannot carry the weights; use a wider"),
        (lambda: relu_linear(Fraction(10) ** 400, 0), RangeError, "relu_linear: dtype=torch.float64 cannot carry"),
        (
            lambda: relu_linear(Fraction(10**40, 7), 0, (2, 1e300)),
            ParameterError,
            "drifts from the line without end; give an interval, or a shorter one",
        ),
        (lambda: relu_linear(1, 0, (2, 1)), ParameterError, "relu_linear: interval=(2, 1) must rise"),
        (lambda: relu_piecewise(X, (0, 0), 0.1), ParameterError, "relu_piecewise: interval=(0, 0) must rise"),
        (
            lambda: relu_piecewise(1 / X, (1e-300, Fraction(1, 3)), 0.1),
            ToleranceUnreachable,
            "eps=0.1 is finer than float64 can follow 1/x at x=1e-300; give a larger eps",
        ),
        (lambda: relu_piecewise(X, (0, math.inf), 0.1), NonFiniteError, "relu_piecewise: interval=inf must be a"),
        (lambda: relu_piecewise(X, (0, 1, 2), 0.1), ParameterError, "relu_piecewise: interval=(0, 1, 2) must have two"),
        (lambda: relu_piecewise(X, (0, 1), 2), ParameterError, "relu_piecewise: eps=2 must lie in (0, 1)"),
        (lambda: relu_piecewise(X * y, (0, 1), 0.1), ParameterError, "f=x*y must have one symbol, not 2; give the"),
        (lambda: relu_piecewise(math.exp, (0, 1), 0.1), ParameterError, "must be a SymPy expression; try sympy.exp"),
        (lambda: relu_piecewise(sympy.gamma(X), (1, 2), 0.1), ParameterError, "holds gamma(_x), which is not known"),
        (lambda: relu_piecewise(sympy.I * X, (0, 1), 0.1), ParameterError, "holds I, which is not known here; use +"),
        (lambda: relu_piecewise(sympy.log(X), (-1, 1), 0.1), NonFiniteError, "log(x)=nan or inf at x="),
        (lambda: relu_piecewise(sympy.exp(X), (10, 10.00001), 1e-15), ToleranceUnreachable, "finer than can be proved"),
    ],
)
def test_what_has_no_answer_is_refused_with_its_reason(
    made: Callable[[], Construction], kind: type[AvowError], words: str
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        made()


@pytest.mark.parametrize("f", [1 / X, sympy.exp(50 * X)], ids=str)
def test_what_takes_too_many_units_is_refused(f: sympy.Expr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avow.theory.constructions.relu_curves.MOST_UNITS", 32)
    with pytest.raises(ParameterError, match=re.escape("needs more than 32 units; give a larger eps")):
        relu_piecewise(f, (-1, 2), 0.1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: relu_square(10**400), ParameterError, "must lie in (0, 1); try eps=0.01"),
        (lambda: relu_piecewise(X, (0, Fraction(10**400)), 0.1), RangeError, "reaches beyond float64"),
        (lambda: relu_piecewise(X, (0, 5e-324), 0.1), RangeError, "is too narrow for float64; widen it"),
        (lambda: relu_piecewise(X, (1, 1 + 1e-12), 0.1), RangeError, "is too narrow for float64; widen it"),
        (
            lambda: relu_piecewise(X, (0, 1), 0.1, torch.complex64),
            DtypeError,
            "dtype=torch.complex64 must be one of float64",
        ),
        (lambda: relu_piecewise(X, (0, 1e9), 0.1, torch.float16), RangeError, "cannot carry the interval"),
    ],
)
def test_numbers_at_the_ends_of_types_are_refused_in_words(
    make: Callable[[], object], error: type[AvowError], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_a_promise_reads_as_a_sentence() -> None:
    made = relu_square(1e-2)
    assert isinstance(made, ReluSquare)
    assert made.promise == ("within 0.00617284 of x² everywhere on [0, 1], with 4 hidden units in one layer")
    assert "everywhere, with 2 hidden units" in relu_linear(2, 1).promise
    assert "of exp(x) everywhere on [0, 1], with 4 hidden units" in relu_piecewise(sympy.exp(X), (0, 1), 0.01).promise
