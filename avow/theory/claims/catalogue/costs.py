r"""What attention costs: operations counted by PyTorch's own counter, numbers held counted to the last one.

Time is counted in multiply-adds of matrix products, space in numbers held beyond the inputs. Counts at a few sizes
become polynomials by exact interpolation, so that every order below is shown for all sizes from one on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import sympy
import torch
from flint import arb
from torch import Tensor

from avow.core import Method, Sizes
from avow.core.chart import Chart, Function, curves
from avow.methods import all_methods
from avow.numerics.intervals import most
from avow.theory.claims import counting
from avow.theory.claims.claim import Evidence, Falsifier, Formula, claims_on, numbered
from avow.theory.claims.elementary import exp
from avow.theory.claims.toolbox import counterexample, identity, rational

claim = claims_on("costs")
n, d, h, w = (counting.length(name) for name in ("n", "d", "h", "w"))
Program = Formula
FIXED = "the program is a fixed list of matrix products whose sides are lengths, so its count is a polynomial"
PRODUCTS = "time is counted in multiply-adds of matrix products; what is done entry by entry is of no higher order"


def library(name: str, **settings: int) -> Method:
    return all_methods()[name](**settings)


def over_lengths(costs: Mapping[str, Function], title: str, y: str = "operations") -> Chart:
    return curves(title, "keys", y, [2**i for i in range(7, 18)], costs, log_x=True, log_y=True)


def operations(method: Method, dim: int = 64) -> Function:
    return lambda length: method.cost(Sizes(1, 1, 1, int(length), int(length), dim, dim)).flops


def one_head(x: Tensor, *weights: Tensor) -> Tensor:
    """Self-attention with its softmax matrix written out."""
    queries, keys, values = (x @ weight for weight in weights)
    logits = queries @ keys.T
    shares = torch.softmax(logits, -1)
    return shares @ values


def kept(head: Program, x: Tensor, *weights: Tensor) -> Tensor:
    """Heads in sequence: each answer is kept until all are put side by side."""
    return torch.cat([head(x, *weights[first : first + 3]) for first in range(0, len(weights), 3)], -1)


def added(head: Program, x: Tensor, *weights: Tensor) -> Tensor:
    """Heads in sequence, each answer added to the ones before: another mechanism."""
    answer = head(x, *weights[:3])
    for first in range(3, len(weights), 3):
        answer = answer + head(x, *weights[first : first + 3])
    return answer


class Heads(NamedTuple):
    """One head, and how several follow each other."""

    head: Program
    sequence: Program

    def of(self, length: int, width: int, own: int | None = None, heads: int = 1) -> Sequence[Tensor]:
        """Tokens of a width, and three matrices for each head of a width of its own, by default the tokens'."""
        return counting.ones((length, width), *[(width, own or width)] * 3 * heads)

    def in_sequence(self, *inputs: Tensor) -> Tensor:
        return self.sequence(self.head, *inputs)


def _heads_picture() -> Chart:
    costs: dict[str, Function] = {"projections, 6nd²": lambda n: 6 * n * 64**2, "pairs, 4n²d": lambda n: 4 * n**2 * 64}
    return over_lengths(costs, "One head of width 64: where the operations are")


# An order leaves its constants open. Those of an order that is proved are the ones its evidence finds. An order that is
# only stated may be passed this many times, either way.
GENEROUS = 16  # the docstrings below, which a page shows, say it too


def between(count: int, order: int, low: float, high: float) -> arb:
    """By how much a count, over its order, is outside of two numbers."""
    ratio = arb(count) / order
    return (ratio - high).max(low - ratio)


@cache
def _held(heads: Heads, length: int, width: int, count: int) -> int:
    """The most numbers that heads in sequence hold beyond their inputs."""
    return counting.most_held(heads.in_sequence, *heads.of(length, width, heads=count))


def _as_sloppy(heads: Heads, length: int, width: int, count: int) -> arb:
    """h heads of width d on n tokens, run and counted; as stated, 16 times its order is allowed."""
    order = length**2 + length * width + width**2
    return most([between(_held(heads, length, width, h), order, 1 / GENEROUS, GENEROUS) for h in (1, count)])


def _one_and_many(heads: Heads, length: int, width: int, count: int) -> arb:
    time = counting.flops(lambda: heads.head(*heads.of(length, width)))
    # At most a head's 2n² + 4nd with (h − 1)nd before it, or 2hnd side by side; and at least 2n², and 2hnd.
    space = between(_held(heads, length, width, count), length**2 + count * length * width, 1, 4)
    return between(time, length * width**2 + length**2 * width, 4, 6).max(space)


@claim(
    "cost-exact",
    expected="corrected",
    statement=r"\text{one head: time } \Theta(nd^2 + n^2d),\ \text{extra space } \Theta(n^2 + nd + d^2);\quad "
    r"h \text{ heads in sequence multiply the time only}",
    plain="One attention head takes time in the order of nd² + n²d and extra space in the order of n² + nd + d²;"
    " several heads after each other multiply the time and nothing else.",
    amended=r"\text{one head: time } \Theta(nd^2 + n^2d),\ \text{extra space } \Theta(n^2 + nd)\text{ with the matrix"
    r" written out}; \quad h \text{ heads of width } d \text{ in sequence: time }\Theta(h(nd^2 + n^2d)),\ \text{extra"
    r" space } \Theta(n^2 + hnd); \quad \text{of width } d/h: \text{ time }\Theta(nd^2 + n^2d)",
    amended_plain="The time of one head is right. The d² are the weights, which are given and not extra. Heads in"
    " sequence keep their answers, so space grows by nd a head (unless each is projected and added at once); and heads"
    " of the usual width d/h take no more products together than one head of width d.",
    assumptions=(
        "projections are d × d, and the softmax matrix is written out",
        "extra space does not hold the inputs, nor the weights",
        PRODUCTS,
        FIXED,
    ),
    subject=Heads(one_head, kept),
    sabotage={
        "a head without its softmax": Heads(lambda x, q, k, v: (x @ q) @ ((x @ k).T @ (x @ v)), kept),
        "answers added up, not kept": Heads(one_head, added),
    },
    picture=_heads_picture,
    falsifier=Falsifier({"n": range(1, 25), "d": range(1, 129), "h": range(1, 13)}, _as_sloppy, _one_and_many),
)
def cost_exact(heads: Heads) -> Iterator[Evidence]:
    total, steps = yield from counting.memory(heads.head, heads.of, [n, d], amended=True)
    vanishes, by = sympy.limit(total.subs(n, 1) / (1 + d + d**2), d, sympy.oo) == 0, "the limit of an exact count"
    says = "the d² are no extra space: with one token, what is held beside the weights is a vanishing part of d²"
    yield counterexample(vanishes, says, by, held_at_most=str(total.subs(n, 1)))
    together = 2 * h * n * d
    says = (
        "heads in sequence do not multiply the time only: side by side at the end they hold 2hnd numbers, beyond any"
        " multiple of what one head held"
    )
    yield counterexample(counting.unbounded(together / total, h), says, by)
    # Each head starts from what the heads before it left: their answers, nd each.
    matches = []
    for length, width in ((1, 1), (2, 3), (5, 2), (3, 7)):
        alone, answer = counting.held(heads.head, *heads.of(length, width)), length * width
        for count in (1, 2, 3, 4):
            trace = counting.held(heads.in_sequence, *heads.of(length, width, heads=count))
            expected = [size + i * answer for i in range(count) for size in alone] + [2 * count * answer]
            matches.append(len(alone) == steps and trace == expected)
    says = (
        "step by step, head i holds what head 1 held and i − 1 answers of nd numbers more, and side by side they hold"
        " 2hnd: every head is the same program and leaves one answer more, so by induction for any h"
    )
    yield rational(all(matches), says, True, traces=len(matches))
    says = f"space of one head, between 1/{steps} of this count and all of it"
    yield from counting.theta(total, n**2 + n * d, says, True)
    grown = total + (h - 1) * n * d + together
    says = f"space of h heads, between 1/{2 * steps} of this and all of it"
    yield from counting.theta(grown, n**2 + h * n * d, says, True)
    yield from _times(heads)


def _times(heads: Heads) -> Iterator[Evidence]:
    says = "one head of width w on tokens of width d"
    own = yield from counting.operations(heads.head, heads.of, [n, d, w], (50, 7, 9), says, True)
    one = own.subs(w, d)
    yield from counting.theta(one, n * d**2 + n**2 * d, "time of one head of width d", True)
    sizes = [(5, 6, 3, 4), (7, 8, 2, 3), (3, 4, 4, 5)]
    counts = [counting.flops(partial(heads.in_sequence, *heads.of(*z))) for z in sizes]
    foreseen = [(h * own).subs(dict(zip((n, d, w, h), z, strict=True))) for z in sizes]
    yield rational(counts == foreseen, "h heads one after another take h times as long", True, counted=counts)
    yield from counting.theta(h * one, h * (n * d**2 + n**2 * d), "time of h heads of width d", True)
    yield identity(h * own.subs(w, d / h), one, "h heads of width d/h take as long as one of width d", True)
    says = "the library's exact attention, its cost model equal to PyTorch's counter each time"
    exact = partial(counting.of_library, library("exact"))
    pairs = yield from counting.counted(exact, [n, d], [(130, 5), (1100, 2)], says, True)
    yield identity(pairs, one - 6 * n * d**2, "it is the head without its three projections", True)


class Tiling(NamedTuple):
    """Exact attention tile by tile, and how the sums of two tiles become one."""

    program: Program
    merge: Formula

    def held(self, tiles: int, tile: int, width: int) -> list[int]:
        """How many numbers are held beyond the inputs and the answer after each operation."""
        length = tiles * tile
        trace = counting.held(lambda *x: self.program(*x, tile), *counting.ones(*[(length, width)] * 3))
        return [size - length * width for size in trace]


def merged(first: Any, second: Any, top: Any, other: Any, most: Any) -> Any:
    """Sums relative to e^top and to e^other, as one relative to e^most."""
    return first * exp(top - most) + second * exp(other - most)


def tiled(q: Tensor, k: Tensor, v: Tensor, tile: int, hoard: list[Tensor] | None = None) -> Tensor:
    """Exact attention that never writes its matrix out: sums relative to a running maximum."""
    out = torch.empty_like(v)
    for rows in q.split(tile):
        full, zeros = rows.new_full, rows.new_zeros
        top, total, sums = full((tile, 1), -math.inf), zeros(tile, 1), zeros(tile, v.shape[1])
        for keys, values in zip(k.split(tile), v.split(tile), strict=True):
            logits = rows @ keys.T
            most = torch.maximum(top, logits.amax(-1, keepdim=True))
            shares, shrink = torch.exp(logits - most), torch.exp(top - most)
            total = total * shrink + shares.sum(-1, keepdim=True)
            sums = sums * shrink + shares @ values
            top = most
            if hoard is not None:
                hoard.append(shares)
        first = rows.storage_offset() // q.shape[1]
        out[first : first + tile] = sums / total
    return out


def _bottleneck_picture() -> Chart:
    costs: dict[str, Function] = {
        "the softmax matrix": lambda length: 4 * length**2,
        "exact attention by tiles": lambda length: _fused_bytes(int(length), 64),
    }
    return over_lengths(costs, "Bytes held beyond the inputs, width 64, float32", "bytes")


def _fused_bytes(length: int, width: int) -> int:
    """What the library predicts for its fused kernel, in float32."""
    return library("exact").cost(Sizes(1, 1, 1, length, length, width, width, device="cuda")).peak_bytes


# Sizes are few, and come up again.
_held_by_tiles = cache(Tiling.held)


def _dominates(tiling: Tiling, tiles: int, tile: int, width: int, *_: arb) -> arb:
    """Tiles of b keys, run and counted; sums x and y relative to t and u, merged."""
    return arb(tiles * tile * (tiles * tile - width) - max(_held_by_tiles(tiling, tiles, tile, width)))


def _by_tiles(tiling: Tiling, tiles: int, tile: int, width: int, *sums: arb) -> arb:
    beyond = max(_held_by_tiles(tiling, tiles, tile, width))
    first, second, top, other = sums
    larger = top.max(other)
    merged = tiling.merge((first - top).exp(), (second - other).exp(), top, other, larger)
    apart = abs(merged - (first.exp() + second.exp()) * (-larger).exp())
    # Beyond the answer at most 4b² + bd + 4b, 2b² + bd + 7b or 2b² + 4bd + 4b, step by step.
    return apart.max(arb(beyond - 6 * (tile**2 + tile * width)))


@claim(
    "cost-bottleneck",
    expected="corrected",
    statement=r"n \to \infty:\ \text{the } n \times n \text{ softmax matrix dominates time and space}",
    plain="For long sequences the softmax matrix of n² weights is the bottleneck, in time and in space.",
    amended=r"n \to \infty:\ \frac{4n^2d}{4n^2d + 6nd^2} \to 1 \text{ of the time};\quad"
    r"\text{exact attention by tiles of } b \text{ keys holds } nd + O(b^2 + bd) \text{ numbers}",
    amended_plain="Of the time, yes. Of the space, no longer: exact attention tile by tile holds its answer and one"
    " tile's work, never the matrix.",
    assumptions=("real arithmetic for the answer, exact counts for the rest", "the tile b divides n", PRODUCTS, FIXED),
    subject=Tiling(tiled, merged),
    sabotage={
        "tiles that are kept": Tiling(lambda q, k, v, tile: tiled(q, k, v, tile, []), merged),
        "sums merged without the maxima": Tiling(tiled, lambda first, second, *maxima: first + second),
    },
    picture=_bottleneck_picture,
    falsifier=Falsifier(
        {"n/b": range(1, 5), "b": range(1, 9), "d": range(1, 9)} | numbered("x y t u", -3, 3), _dominates, _by_tiles
    ),
)
def cost_bottleneck(tiling: Tiling) -> Iterator[Evidence]:
    length, tile, width = 128, 16, 4
    most = length * width + max(tiling.held(length // tile, tile, width))
    says = "space is not dominated by the matrix: attention by tiles holds less than its n² numbers"
    held = {"held": most, "matrix": length**2}
    yield counterexample(most < length**2, says, "an exact count", n=length, d=width, tile=tile, **held)
    runs = [tiling.held(tiles, 4, 3) for tiles in (3, 4, 5, 6)]
    yield counting.settled(
        runs, "each tile leaves what it found, so any number of tiles holds nd and the same more", True
    )
    b = counting.length("b")
    # No step's work exceeds the sum over all steps of three tiles a side.
    says = "numbers held beyond the answer, over all steps"
    work = yield from counting.counted(lambda *z: sum(tiling.held(3, *z)), [b, d], [(5, 6)], says, True)
    yield counting.at_most(work, b**2 + b * d, "work beyond the answer, in the tile b and d alone", True)
    yield from _same_answer(tiling)
    heads = Heads(one_head, kept)
    time = yield from counting.operations(heads.head, heads.of, [n, d], (50, 7), "time of one head", True)
    pairs = 4 * n**2 * d
    yield identity(sympy.limit(pairs / time, n, sympy.oo), 1, "of the time, all but a vanishing part is pairs", True)
    by_tiles = yield from counting.counted(
        lambda *z: counting.flops(lambda: tiling.program(*counting.ones(*[(4 * z[0], z[1])] * 3), z[0])),
        [b, d],
        [(7, 5)],
        "operations of four tiles a side",
        True,
    )
    says = "so each of the 16 takes 4b²d, and (n/b)² tiles the same 4n²d"
    yield identity(by_tiles / 16 * (n / b) ** 2, pairs, says, True)
    says = "bytes the library predicts for its fused kernel, in float32"
    model = yield from counting.counted(_fused_bytes, [n, d], [(100000, 128)], says, True)
    yield counting.at_most(model, n * d, "the library's own model", True)


def _same_answer(tiling: Tiling) -> Iterator[Evidence]:
    top, other, most = sympy.symbols("t u m", real=True)
    x, y, v = (sympy.IndexedBase(name, real=True) for name in "xyv")
    a, b, i = (counting.length(name) for name in "abi")
    for what, first, second in (
        ("normalisers", sympy.Sum(sympy.exp(x[i]), (i, 1, a)), sympy.Sum(sympy.exp(y[i]), (i, 1, b))),
        ("values", sympy.Sum(sympy.exp(x[i]) * v[i], (i, 1, a)), sympy.Sum(sympy.exp(y[i]) * v[a + i], (i, 1, b))),
    ):
        together = tiling.merge(first * sympy.exp(-top), second * sympy.exp(-other), top, other, most)
        says = f"{what} of two tiles, each relative to its own maximum, merge into those of both relative to the larger"
        yield identity(together, (first + second) * sympy.exp(-most), says, True)
    one, both = sympy.symbols("N D", positive=True)
    says = "what is relative to the maximum cancels: the answer is exact"
    yield identity(one * sympy.exp(-most) / (both * sympy.exp(-most)), one / both, says, True)
