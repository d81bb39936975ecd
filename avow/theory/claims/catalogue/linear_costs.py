r"""What linear time costs: factors of the matrix, separable attention, random features, latents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import sympy
import torch
from sympy import Eq, Sum, exp
from torch import Tensor

from avow.core.chart import Chart, Function, Table
from avow.theory.claims import counting
from avow.theory.claims.catalogue import costs
from avow.theory.claims.catalogue.costs import (
    GENEROUS,
    HELD,
    PRODUCTS,
    Program,
    between,
    library,
    of_library,
    over_lengths,
)
from avow.theory.claims.claim import claims_on
from avow.theory.claims.counting import Loop, counts
from avow.theory.claims.formal import Spans, Statement, real, sequence, whole
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import rational

claim = claims_on("costs")
n, d, k, m, more, inputs, blocks = whole("n d k m m' ell L")
_UP_TO = range(1, 49)


def by_factors(u: Any, s: Any, w: Any, v: Any) -> Any:
    return u @ (s @ (w.T @ v))


def put_together(u: Any, s: Any, w: Any, v: Any) -> Any:
    return (u @ s @ w.T) @ v


def _factor_inputs(length: Any, rank: Any, width: Any) -> Sequence[Tensor]:
    return counting.ones((length, rank), (rank, rank), (length, rank), (length, width))


def confused(u: Any, s: Any, w: Any, v: Any) -> Any:
    """W taken for the values, so that WᵀV = I."""
    return u @ s


def _uniform() -> tuple[Any, Any, Any, Any]:
    """Factors of the 4 × 4 matrix of quarters, which is softmax's with Q = 0, and the values 1, 2, 3, 4."""
    half = sympy.Matrix([sympy.Rational(1, 2)] * 4)
    return half, sympy.eye(1), half, sympy.Matrix([1, 2, 3, 4])


def _low_rank_picture() -> Table:
    rows = [
        ["U·(Σ·(Wᵀ·V))", "4nkd + 2k²d", str(by_factors(*_uniform())[0]), "the answer"],
        ["(U·Σ·Wᵀ)·V", "2nk² + 2n²k + 2n²d", str(put_together(*_uniform())[0]), "the answer, slowly"],
        ["U·Σ, W taken for V", "2nk²", str(confused(*_uniform())[0]), "wrong"],
    ]
    return Table("P = 1/4 everywhere, values 1, 2, 3, 4", ["product", "operations", "gives", "which is"], rows)


class Entries(NamedTuple):
    """A matrix by its entries, of a number of columns, to be multiplied as tensors are."""

    at: Callable[[Any, Any], Any]
    rows: Any
    columns: Any

    def __matmul__(self, other: Entries) -> Entries:
        """The product: one more sum."""
        x = sympy.Dummy("x", integer=True)
        return Entries(lambda i, j: Sum(self.at(i, x) * other.at(x, j), (x, 1, self.columns)), self.rows, other.columns)

    @property
    def T(self) -> Entries:
        """The matrix turned."""
        return Entries(lambda i, j: self.at(j, i), self.columns, self.rows)


row, column, i, j, x = whole("i c a b j")
_FACTORS = sequence("U S W V")


def _entry(factor: Any, i: Any, j: Any) -> Any:
    return factor[i, j]


def _answer(product: Program) -> Any:
    """An entry of what a product of the factors gives."""
    sizes = [(n, k), (k, k), (n, k), (n, d)]
    entries = [Entries(partial(_entry, factor), *shape) for factor, shape in zip(_FACTORS, sizes, strict=True)]
    return product(*entries).at(row, column)


def _some_factors(length: int, rank: int, width: int, which: int, *_: int) -> dict[Any, Any]:
    """Factors of small numbers, and an entry of the answer."""
    sizes = [(length, rank), (rank, rank), (length, rank), (length, width)]
    factors = [
        [[(17 * i + 5 * j + 3 * place + which) % 7 - 3 for j in range(columns)] for i in range(rows)]
        for place, (rows, columns) in enumerate(sizes)
    ]
    at = {row: 1 + which % length, column: 1 + which % min(width, rank)}
    return {n: length, k: rank, d: width, **at, **dict(zip(_FACTORS, factors, strict=True))}


def _low_rank(product: Program) -> Statement:
    time, _ = counts(product, _factor_inputs)
    return Statement(
        variables={
            n: "the number of keys",
            k: "the rank",
            d: "the width of the values",
            **dict(zip(_FACTORS, ("the left factor", "the middle one", "the right one", "the values"), strict=True)),
            row: "a row of the answer",
            column: "a column of it",
        },
        given=[k >= 1, d >= 1, k <= n],
        then={"time": time(n, k, d) <= 6 * n * k * d, "same": Eq(_answer(product), _answer(put_together))},
        terms={"time": 6 * n * k * d},
        notes=[
            PRODUCTS,
            "the decomposition is given; a softmax matrix is almost always of full rank",
            "W is not the value matrix, whatever letter it is given: nothing cancels",
        ],
        spans=Spans({**dict.fromkeys("nkd", range(1, 4)), "which": range(7)}, _some_factors),
    )


@claim(
    "low-rank-cost",
    expected="proved",
    formal=_low_rank,
    plain="If the softmax matrix has a singular value decomposition with as many terms as its rank, and it is known,"
    " multiplying the values by it, factor by factor, gives the same and takes {time} operations at most.",
    subject=by_factors,
    sabotage={"the matrix put together first": put_together, "W taken for the values, so that WᵀV = I": confused},
    picture=_low_rank_picture,
)
def low_rank_cost(proof: Proof, product: Program) -> None:
    given = [proof.given(one) for one in (k >= 1, d >= 1, k <= n)]
    time, _ = counts(product, _factor_inputs)
    proof.conclude("time", proof.counted(time(n, k, d)), *given)
    left, middle, right, values = _FACTORS
    term = left[row, i] * middle[i, j] * right[x, j] * values[x, column]
    by_rank, by_middle, by_key = (i, 1, k), (j, 1, k), (x, 1, n)
    inner = proof.sum_swap(term, by_key, by_middle)
    outer = proof.sum_swap(term, by_middle, by_rank)
    proof.conclude(
        "same",
        proof.sum_same(Sum(Sum(term, by_key), by_middle), Sum(Sum(term, by_middle), by_key), by_rank, inner),
        proof.sum_swap(Sum(term, by_middle), by_key, by_rank),
        proof.sum_same(Sum(Sum(term, by_middle), by_rank), Sum(Sum(term, by_rank), by_middle), by_key, outer),
        says="sums in any order: products may be taken in any",
    )
    good, wrong = product(*_uniform()), confused(*_uniform())
    says = "that WᵀV cancels takes W for the values: with P = 1/4 everywhere it gives something else"
    proof.shows(rational(good == put_together(*_uniform()) and good != wrong, says, right=list(good)))


def separable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax_row(Q)·(softmax_col(K)ᵀ·V)."""
    rows, columns = torch.softmax(q, -1), torch.softmax(k, -2)
    return rows @ (columns.T @ v)


def _attention_inputs(length: Any, width: Any) -> Sequence[Tensor]:
    return counting.ones(*[(length, width)] * 3)


def _separable_picture() -> Chart:
    methods = {name: costs.operations(library(name)) for name in ("exact", "separable")}
    return over_lengths(methods, "Operations of one head of width 64")


def _separable(program: Program) -> Statement:
    time, space = counts(program, _attention_inputs)
    return Statement(
        variables={n: "the number of keys", d: "their width, and that of the values"},
        given=[n >= 1, d >= 1],
        then={"time": Eq(time(n, d), 4 * n * d**2), "space": between(space(n, d), n * d + d**2, 1, 3)},
        terms={"time": 4 * n * d**2, "space": n * d + d**2},
        notes=[PRODUCTS, HELD, "no mask that differs by row"],
        spans=dict.fromkeys((n, d), _UP_TO),
    )


@claim(
    "separable-cost",
    expected="proved",
    formal=_separable,
    plain="Separable attention takes {time} operations and extra space in the order of {space}.",
    subject=separable,
    sabotage={"the n × n matrix written out": lambda q, k, v: (torch.softmax(q, -1) @ torch.softmax(k, -2).T) @ v},
    picture=_separable_picture,
)
def separable_cost(proof: Proof, program: Program) -> None:
    some, wide = proof.given(n >= 1), proof.given(d >= 1)
    time, space = (count(n, d) for count in counts(program, _attention_inputs))
    proof.conclude("time", proof.counted(time), some, wide)
    proof.conclude("space", proof.counted(space), some, wide)
    proof.shows(of_library(lambda: library("separable"), 4 * n * d**2, (n, d), [(9, 4), (130, 5), (1100, 2)]))


def _features_inputs(length: Any, features: Any, width: Any) -> Sequence[Tensor]:
    return counting.ones(*[(length, width)] * 3, (features, width))


def by_features(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensor:
    """Attention by a positive feature map: sums over keys once, then every row reads them."""
    rows, keys = torch.exp(q @ directions.T), torch.exp(k @ directions.T)
    sums, total = keys.T @ v, keys.sum(0).unsqueeze(-1)
    return (rows @ sums) / (rows @ total)


def by_features_pairwise(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensor:
    rows, keys = torch.exp(q @ directions.T), torch.exp(k @ directions.T)
    weights = rows @ keys.T
    return (weights @ v) / weights.sum(-1, keepdim=True)


def _features_picture() -> Chart:
    features = {f"{m} features": library("random_features", features=m) for m in (64, 256, 1024)}
    methods = {name: costs.operations(method) for name, method in {"exact": library("exact"), **features}.items()}
    return over_lengths(methods, "Operations of one head of width 64")


def _features(program: Program) -> Statement:
    time, space = counts(program, _features_inputs)
    orders = n * m * d, n * m + m * d + n * d
    return Statement(
        variables={n: "the number of keys", m: "the number of features", d: "the width"},
        given=[n >= 1, m >= 1, d >= 1],
        then={"time": between(time(n, m, d), orders[0], 8, 10), "space": between(space(n, m, d), orders[1], 1, 3)},
        terms={"space": orders[1], "least": 8 * orders[0], "most": 10 * orders[0]},
        notes=[
            "a feature map is an m × d product and a function of each entry; other maps may cost more",
            "the features of all rows are written out; by tiles nm becomes a constant times m",
            PRODUCTS,
            HELD,
        ],
        spans=dict.fromkeys((n, m, d), _UP_TO),
    )


@claim(
    "features-cost",
    expected="proved",
    formal=_features,
    plain="With a feature map, attention takes between {least} and {most} operations, and extra space in the order of"
    " {space}.",
    subject=by_features,
    sabotage={"features multiplied pair by pair": by_features_pairwise},
    picture=_features_picture,
)
def features_cost(proof: Proof, program: Program) -> None:
    given = [proof.given(one) for one in (n >= 1, m >= 1, d >= 1)]
    time, space = (count(n, m, d) for count in counts(program, _features_inputs))
    proof.conclude("time", proof.counted(time), *given)
    proof.conclude("space", proof.counted(space), *given)


size = real("s")


class Trade(NamedTuple):
    """A program of features, and the variance of what it computes, relative to the square of its mean."""

    program: Program = by_features
    variance: Program = lambda m: (exp(size) - 1) / m


def _trade(trade: Trade) -> Statement:
    time, _ = counts(trade.program, _features_inputs)
    return Statement(
        variables={
            n: "the number of keys",
            m: "a number of features",
            more: "a larger one",
            d: "the width",
            size: "the squared length of query and key together",
        },
        given=[n >= 1, m >= 1, d >= 1, m < more, size > 0],
        then={
            "error": trade.variance(more) < trade.variance(m),
            "cost": Eq(m * time(n, more, d), more * time(n, m, d)),
        },
        terms={"error": trade.variance(m)},
        notes=[PRODUCTS, "that this is the variance of positive features: claim features-variance"],
        spans={**dict.fromkeys((n, d), _UP_TO), m: range(1, 25), more: range(25, 49), size: (0.01, 4)},
    )


@claim(
    "features-trade",
    expected="proved",
    formal=_trade,
    plain="With more features the error is smaller, as the variance relative to the squared mean is {error}, and the"
    " cost is in proportion to their number.",
    subject=Trade(),
    sabotage={
        "features of which every one meets every other": Trade(
            program=lambda q, k, v, w: by_features(q, k, v, (w @ w.T) @ w)
        ),
        "an error that grows with them": Trade(variance=lambda m: (exp(size) - 1) * m),
    },
    picture=_features_picture,
    needs=("features-variance",),
)
def features_trade(proof: Proof, trade: Trade) -> None:
    some, own, wide, larger, apart = map(proof.given, (n >= 1, m >= 1, d >= 1, m < more, size > 0))
    rise = proof.exp_tangent(size)
    proof.conclude("error", rise, own, larger, apart)
    time, _ = counts(trade.program, _features_inputs)
    few, many = proof.counted(time(n, m, d)), proof.counted(time(n, more, d))
    proof.conclude("cost", few, many, some, own, wide, larger)


def attended(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.T, -1) @ keys


class Perceiver(NamedTuple):
    """Latents that read the inputs once, and a block in which they read each other."""

    cross: Program = attended
    block: Program = lambda latents, inputs: attended(latents, latents)

    def whole(self) -> Loop:
        """All of it, a block a round."""
        return Loop(
            lambda state, latents, inputs: ((self.block(state[0], inputs),), ()),
            first=lambda latents, inputs: (self.cross(latents, inputs),),
        )


def _perceiver_picture() -> Chart:
    costs: dict[str, Function] = {
        "self-attention, 4ℓ²d a block": lambda length: 6 * 4 * length**2 * 64,
        "128 latents, counted: 4ℓmd + 4Lm²d": lambda length: 4 * length * 128 * 64 + 6 * 4 * 128**2 * 64,
        "128 latents, as stated: dm + Lm²": lambda length: 64 * 128 + 6 * 128**2,
    }
    return over_lengths(costs, "Six blocks of width 64")


def _perceiver_inputs(length: Any, latents: Any, width: Any) -> Sequence[Tensor]:
    return counting.ones((latents, width), (length, width))


def _no_inputs(*sizes: Any) -> Sequence[Tensor]:
    return []


def _times(perceiver: Perceiver) -> list[Any]:
    """The operations of reading the inputs, of a block, and of the whole."""
    cross, _ = counts(perceiver.cross, _perceiver_inputs, name="cross")
    block, _ = counts(perceiver.block, _perceiver_inputs, name="block")
    return [cross(inputs, m, d), block(inputs, m, d)]


_PERCEIVER = {inputs: "the number of inputs", m: "the number of latents", d: "their width", blocks: "the blocks"}
_SOME = [inputs >= 1, m >= 1, d >= 1]
_SPANS = dict.fromkeys((inputs, m, d), _UP_TO) | {blocks: range(1, 6)}


def _as_sloppy(perceiver: Perceiver) -> Statement:
    cross, block = _times(perceiver)
    return Statement(
        variables={name: words for name, words in _PERCEIVER.items() if name != blocks},
        given=_SOME,
        then={"cross": cross <= GENEROUS * d * m, "block": block <= GENEROUS * m**2},
        terms={"cross": GENEROUS * d * m, "block": GENEROUS * m**2},
        notes=[PRODUCTS],
        spans=_SPANS,
    )


def _whole(perceiver: Perceiver) -> Statement:
    cross, block = _times(perceiver)
    time, _ = counts(_LOOPS(perceiver), _perceiver_inputs, _no_inputs, name="perceiver")
    return Statement(
        variables=_PERCEIVER,
        given=[*_SOME, blocks >= 1],
        then={
            "cross": Eq(cross, 4 * inputs * m * d),
            "block": Eq(block, 4 * m**2 * d),
            "whole": Eq(time(inputs, m, d, blocks), 4 * inputs * m * d + 4 * blocks * m**2 * d),
        },
        terms={"cross": 4 * inputs * m * d, "block": 4 * m**2 * d},
        notes=["the products of attention itself; projections of width d add Θ(d²(ℓ + m + Lm))"],
        spans=_SPANS,
    )


# One loop for each, so that its counts are the same functions wherever they stand.
_LOOPS = functools.cache(Perceiver.whole)


@claim(
    "perceiver-cost",
    expected="corrected",
    formal=_as_sloppy,
    plain="A Perceiver takes up to {cross} operations to read its inputs, and up to {block} for each block.",
    amendment=_whole,
    amended_plain="Every latent reads every one of the inputs: {cross}; and each block takes {block}.",
    subject=Perceiver(),
    sabotage={
        "latents that read one input only": Perceiver(cross=lambda latents, inputs: attended(latents, inputs[:1])),
        "blocks that read the inputs again": Perceiver(block=attended),
    },
    picture=_perceiver_picture,
)
def perceiver_cost(against: Refutation, proof: Proof, perceiver: Perceiver) -> None:
    against.case({inputs: 20, m: 2, d: 3, blocks: 1}, "twenty inputs: every latent reads every one")
    against.case({inputs: 1, m: 2, d: 20, blocks: 1}, "a width of twenty: a product of m × d matrices takes m²d")
    several, latents, wide, some = map(proof.given, [*_SOME, blocks >= 1])
    cross, block = _times(perceiver)
    proof.conclude("cross", proof.counted(cross), several, latents, wide)
    proof.conclude("block", proof.counted(block), several, latents, wide)
    time, _ = counts(_LOOPS(perceiver), _perceiver_inputs, _no_inputs, name="perceiver")
    proof.conclude("whole", proof.counted(time(inputs, m, d, blocks)), several, latents, wide, some)
