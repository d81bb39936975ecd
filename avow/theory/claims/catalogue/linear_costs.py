r"""What linear time costs: factors of the matrix, separable attention, random features, latents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb, arb_mat
from sympy import MatrixSymbol
from torch import Tensor

from avow.calibration import random_problem
from avow.core import Problem, Sizes
from avow.core.chart import Chart, Function, Table
from avow.numerics.intervals import dot, grid, softmax
from avow.theory.claims import counting
from avow.theory.claims.catalogue import costs
from avow.theory.claims.catalogue.costs import FIXED, GENEROUS, PRODUCTS, Program, between, library, over_lengths
from avow.theory.claims.claim import Evidence, Falsifier, claims_on
from avow.theory.claims.toolbox import counterexample, enclosed, identity, nonnegative, rational, same_product

claim = claims_on("costs")
n, d, k, m = (counting.length(name) for name in ("n", "d", "k", "m"))


def by_factors(u: Any, s: Any, w: Any, v: Any) -> Any:
    return u @ (s @ (w.T @ v))


def put_together(u: Any, s: Any, w: Any, v: Any) -> Any:
    return (u @ s @ w.T) @ v


def _factor_inputs(length: int, rank: int, width: int) -> Sequence[Tensor]:
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


def _by_factors(product: Program, length: int, rank: int, width: int) -> arb:
    """Run and counted, k being n where it is larger."""
    rank = min(rank, length)
    inputs = _factor_inputs(length, rank, width)
    # Ones add up to whole numbers that float32 holds: what differs, differs.
    wrong = not torch.equal(product(*inputs), put_together(*inputs))
    return between(counting.flops(lambda: product(*inputs)), length * rank * width, 0, 6).max(arb(wrong))


_SIZES = range(1, 49)


@claim(
    "low-rank-cost",
    expected="proved",
    statement=r"P = \mathrm{softmax}(QK^\top) = U \Sigma W^\top,\ \Sigma \in \mathbb{R}^{k \times k}"
    r"\;\Rightarrow\; PV \text{ costs } O(nkd)",
    plain="If the softmax matrix has rank k and its singular value decomposition is known, multiplying it by the values"
    " takes in the order of nkd operations.",
    assumptions=(
        "the decomposition is given: P is almost always of full rank, and finding it costs more than attention",
        "W is not the value matrix, whatever letter it is given: nothing cancels",
        "k ≤ n",
        FIXED,
    ),
    subject=by_factors,
    sabotage={"the matrix put together first": put_together, "W taken for the values, so that WᵀV = I": confused},
    picture=_low_rank_picture,
    falsifier=Falsifier(dict.fromkeys("nkd", _SIZES), _by_factors),
)
def low_rank_cost(product: Program) -> Iterator[Evidence]:
    U, S, W, V = MatrixSymbol("U", n, k), MatrixSymbol("S", k, k), MatrixSymbol("W", n, k), MatrixSymbol("V", n, d)
    yield same_product(product(U, S, W, V), (U * S * W.T) * V, "products may be taken in any order, at any size")
    says = "the product by its factors"
    time = yield from counting.operations(product, _factor_inputs, [n, k, d], (7, 5, 6), says, False)
    more = sympy.Symbol("(n-k)", integer=True, nonnegative=True)
    yield counting.at_most(time, n * k * d, "time, for k ≤ n", given={n: k + more})
    right, wrong = product(*_uniform()), confused(*_uniform())
    says = (
        "the usual argument, that WᵀV cancels, takes W for the values: with P = 1/4 everywhere it gives something else"
    )
    facts = {"right": list(right), "confused": list(wrong)}
    yield rational(right == put_together(*_uniform()) and right != wrong, says, False, **facts)
    yield from _full_rank()
    j, more = sympy.Symbol("j", integer=True, positive=True), sympy.Symbol("(n-3d/2)", nonnegative=True)
    work = sympy.summation(8 * j**2, (j, 1, n))
    says = (
        "n reflections from either side, 8j² operations on what is left at size j, bring P to two diagonals: from"
        " n = 3d/2 on this first half of its decomposition costs more than attention, 4n²d"
    )
    yield nonnegative(sympy.expand((work - 4 * n**2 * d).subs(n, 3 * d / 2 + more)), says)


def _full_rank() -> Iterator[Evidence]:
    for size in (2, 3, 4):
        x = sympy.symbols(f"x1:{size + 1}")
        powers = sympy.Matrix([[base ** (j + 1) for j in range(size)] for base in x])
        product = sympy.prod(x) * sympy.prod([x[j] - x[i] for j in range(size) for i in range(j)])
        yield identity(powers.det(), product, f"Vandermonde's determinant, {size} × {size}")
    determinants = [sympy.Matrix(size, size, lambda i, j: 2 ** ((i + 1) * (j + 1))).det() for size in range(1, 8)]
    says = (
        "q_i = i·ln 2 and k_j = j give exp(q_i·k_j) = (2^i)^j, whose determinant is no zero by Vandermonde, for any n"
        " and from d = 1 on; a real-analytic function that is not zero is zero almost nowhere, so P has full rank n for"
        " almost all Q and K"
    )
    yield rational(all(determinant != 0 for determinant in determinants), says, determinants=determinants)
    problem = random_problem(Sizes(1, 1, 1, 12, 12, 2, 2, torch.float64))
    q, keys = (grid(x[0, 0]).tolist() for x in (problem.q, problem.k))
    says = "twelve Gaussian queries and keys in the plane: the determinant of their softmax matrix is not zero"
    yield enclosed(arb_mat([softmax([dot(row, key) for key in keys]) for row in q]).det() != 0, says)


def separable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax_row(Q)·(softmax_col(K)ᵀ·V)."""
    rows, columns = torch.softmax(q, -1), torch.softmax(k, -2)
    return rows @ (columns.T @ v)


def _attention_inputs(length: int, width: int) -> Sequence[Tensor]:
    return counting.ones(*[(length, width)] * 3)


def _separable_picture() -> Chart:
    methods = {name: costs.operations(library(name)) for name in ("exact", "separable")}
    return over_lengths(methods, "Operations of one head of width 64")


def _separable(program: Program, length: int, width: int) -> arb:
    """Run and counted."""
    inputs = _attention_inputs(length, width)
    time = between(counting.flops(lambda: program(*inputs)), length * width**2, 4, 4)
    # It holds at most 3nd + d².
    return time.max(between(counting.most_held(program, *inputs), length * width + width**2, 1, 3))


@claim(
    "separable-cost",
    expected="proved",
    statement=r"\mathrm{softmax}_{row}(Q)\,\big(\mathrm{softmax}_{col}(K)^\top V\big)\ \text{costs time } \Theta(nd^2)"
    r"\text{ and space } \Theta(nd + d^2)",
    plain="Separable attention takes time in the order of nd² and extra space in the order of nd + d².",
    assumptions=("values as wide as queries and keys, d", "no mask that differs by row", PRODUCTS, FIXED),
    subject=separable,
    sabotage={"the n × n matrix written out": lambda q, k, v: (torch.softmax(q, -1) @ torch.softmax(k, -2).T) @ v},
    picture=_separable_picture,
    falsifier=Falsifier(dict.fromkeys("nd", _SIZES), _separable),
)
def separable_cost(program: Program) -> Iterator[Evidence]:
    says, inputs = "the definition, right to left", _attention_inputs
    time = yield from counting.operations(program, inputs, [n, d], (50, 7), says, False)
    yield from counting.theta(time, n * d**2, "time")
    space, steps = yield from counting.memory(program, inputs, [n, d])
    yield from counting.theta(space, n * d + d**2, f"space, between 1/{steps} of this count and all of it")
    method = library("separable")
    says = "the library's method, its cost model equal to PyTorch's counter each time"
    own = yield from counting.counted(partial(counting.of_library, method), [n, d], [(130, 5), (1100, 2)], says)
    yield from counting.theta(own, n * d**2, "time of the library's method")

    def compute(*tensors: Tensor) -> object:
        return method.compute(Problem.of(*tensors))

    held = {length: counting.most_held(compute, *inputs(length, 16)) for length in (1024, 2048, 4096)}
    says = "measured on the library's method: twice the keys hold at most twice the numbers"
    yield rational(held[2048] <= 2 * held[1024] and held[4096] <= 2 * held[2048], says, held=held)


def _features_inputs(length: int, features: int, width: int) -> Sequence[Tensor]:
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


def _features(program: Program, length: int, features: int, width: int) -> arb:
    """Run and counted."""
    inputs = _features_inputs(length, features, width)
    time = between(counting.flops(lambda: program(*inputs)), length * features * width, 8, 10)
    order = length * features + features * width + length * width
    # It holds at most 3nm, or md + 2nd + 2nm + m + n.
    return time.max(between(counting.most_held(program, *inputs), order, 1, 3))


@claim(
    "features-cost",
    expected="proved",
    statement=r"e^{q \cdot k} \approx f(q) \cdot f(k),\ f: \mathbb{R}^d \to \mathbb{R}^m \;\Rightarrow\;"
    r"\text{time } \Theta(nmd),\ \text{space } \Theta(nm + md + nd)",
    plain="With a feature map into m dimensions, attention takes time in the order of nmd and extra space in the order"
    " of nm + md + nd.",
    assumptions=(
        "f(x) is an m × d product and a function of each entry; other maps may cost more",
        "the features of all rows are written out; by tiles nm becomes a constant times m",
        PRODUCTS,
        FIXED,
    ),
    subject=by_features,
    sabotage={"features multiplied pair by pair": by_features_pairwise},
    picture=_features_picture,
    falsifier=Falsifier(dict.fromkeys("nmd", _SIZES), _features),
)
def features_cost(program: Program) -> Iterator[Evidence]:
    says, inputs = "features, then sums", _features_inputs
    time = yield from counting.operations(program, inputs, [n, m, d], (9, 7, 8), says, False)
    yield from counting.theta(time, n * m * d, "time")
    space, steps = yield from counting.memory(program, inputs, [n, m, d])
    yield from counting.theta(space, n * m + m * d + n * d, f"space, between 1/{steps} of this count and all of it")

    def of_library(length: int, features: int, width: int) -> int:
        return counting.of_library(library("random_features", features=features), length, width)

    says = "the library's method, its cost model equal to PyTorch's counter each time"
    own = yield from counting.counted(of_library, [n, m, d], [(130, 7, 5), (1100, 6, 2)], says)
    yield from counting.theta(own, n * m * d, "time of the library's method")


def attended(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.T, -1) @ keys


class Perceiver(NamedTuple):
    """Latents that read the inputs once, and a block in which they read each other."""

    cross: Program = attended
    block: Program = lambda latents, inputs: attended(latents, latents)

    def of(self, length: int, latents: int, width: int, blocks: int) -> Tensor:
        """All of it, on inputs and latents of these sizes."""
        inputs, state = counting.ones((length, width), (latents, width))
        state = self.cross(state, inputs)
        for _ in range(blocks):
            state = self.block(state, inputs)
        return state


def _perceiver_picture() -> Chart:
    costs: dict[str, Function] = {
        "self-attention, 4ℓ²d a block": lambda length: 6 * 4 * length**2 * 64,
        "128 latents, counted: 4ℓmd + 4Lm²d": lambda length: 4 * length * 128 * 64 + 6 * 4 * 128**2 * 64,
        "128 latents, as stated: dm + Lm²": lambda length: 64 * 128 + 6 * 128**2,
    }
    return over_lengths(costs, "Six blocks of width 64")


def _counts(perceiver: Perceiver, length: int, latents: int, width: int) -> Iterator[int]:
    """The operations of cross-attention and of a latent block."""
    inputs, state = counting.ones((length, width), (latents, width))
    return (counting.flops(partial(part, state, inputs)) for part in perceiver)


def _as_sloppy(perceiver: Perceiver, length: int, latents: int, width: int) -> arb:
    """Run and counted; as stated, 16 times its order is allowed."""
    cross, block = _counts(perceiver, length, latents, width)
    return between(cross, latents * width, 0, GENEROUS).max(between(block, latents**2, 0, GENEROUS))


def _perceiver(perceiver: Perceiver, length: int, latents: int, width: int) -> arb:
    cross, block = _counts(perceiver, length, latents, width)
    return between(cross, length * latents * width, 4, 4).max(between(block, latents**2 * width, 4, 4))


@claim(
    "perceiver-cost",
    expected="corrected",
    statement=r"\text{cross-attention } O(dm),\ \text{a latent block } O(m^2),\ \text{in all } O(dm + Lm^2)",
    plain="A Perceiver with m latents of width d costs in the order of dm to read its inputs, m² for each of L blocks.",
    amended=r"\text{cross-attention } \Theta(\ell md),\ \text{a latent block } \Theta(m^2d),\ \text{in all }"
    r"\Theta(\ell md + Lm^2d)",
    amended_plain="Every latent reads every one of the ℓ inputs, d numbers each: ℓmd; and each block m²d.",
    assumptions=(
        "the products of attention itself, inputs and latents of width d",
        "projections to queries, keys and values of width d add Θ(d²(ℓ + m + Lm))",
        FIXED,
    ),
    subject=Perceiver(),
    sabotage={
        "latents that read one input only": Perceiver(cross=lambda latents, inputs: attended(latents, inputs[:1])),
        "blocks that read the inputs again": Perceiver(block=attended),
    },
    picture=_perceiver_picture,
    falsifier=Falsifier(dict.fromkeys("ℓmd", _SIZES), _as_sloppy, _perceiver),
)
def perceiver_cost(perceiver: Perceiver) -> Iterator[Evidence]:
    inputs, blocks = counting.length("ℓ"), counting.length("L")

    def shapes(length: int, latents: int, width: int) -> Sequence[Tensor]:
        return counting.ones((latents, width), (length, width))

    sizes = [inputs, m, d]
    cross = yield from counting.operations(perceiver.cross, shapes, sizes, (9, 7, 8), "cross-attention", True)
    block = yield from counting.operations(perceiver.block, partial(shapes, 5), [m, d], (9, 8), "a latent block", True)
    for name, count, order, grows in (
        ("cross-attention is not O(dm): every latent reads every input", cross, d * m, inputs),
        ("a latent block is not O(m²): a product of m × d matrices takes m²d", block, m**2, d),
    ):
        violated = counting.unbounded(count / order, grows)
        yield counterexample(violated, name, "the limit of an exact count", count=str(count), grows_with=str(grows))
    yield from counting.theta(cross, inputs * m * d, "cross-attention", True)
    yield from counting.theta(block, m**2 * d, "a latent block", True)
    cases = [(9, 7, 8, 5), (4, 3, 2, 6)]
    counts = [counting.flops(partial(perceiver.of, *z)) for z in cases]
    whole = cross + blocks * block
    foreseen = [whole.subs(dict(zip((*sizes, blocks), z, strict=True))) for z in cases]
    yield rational(counts == foreseen, "one part after another: their counts add up", True, counted=counts)
    yield from counting.theta(whole, inputs * m * d + blocks * m**2 * d, "the whole", True)

    def rows_and_weights(rows: int, width: int) -> Sequence[Tensor]:
        return counting.ones((rows, width), (width, width))

    says = "a projection of n rows"
    one = yield from counting.operations(torch.matmul, rows_and_weights, [n, d], (9, 8), says, True)
    # Latents ask of inputs, which have keys and values; in every block latents have all three.
    projections = one.subs(n, m) + 2 * one.subs(n, inputs) + 3 * blocks * one.subs(n, m)
    says = "projections, which are not counted above"
    yield from counting.theta(projections, d**2 * (inputs + m + blocks * m), says, True)
