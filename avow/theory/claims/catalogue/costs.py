r"""What attention costs: operations and numbers held, counted from the structure of programs, for all sizes at once.

Time is counted in operations of matrix products, space in numbers held beyond the inputs. A count is a function of the
sizes: PyTorch's own counter gives it at any of them, and the program run on symbols gives the polynomial that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sympy import And, Eq, Sum
from torch import Tensor

from avow.core import Method, Sizes
from avow.core.chart import Chart, Function, curves
from avow.methods import all_methods
from avow.theory.claims import counting
from avow.theory.claims.claim import Formula, claims_on
from avow.theory.claims.counting import Loop, counts
from avow.theory.claims.elementary import exp
from avow.theory.claims.evidence import Evidence
from avow.theory.claims.formal import Statement, real, sequence, whole
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.toolbox import rational

claim = claims_on("costs")
n, d, h, w, b, m, i = whole("n d h w b m i")
O = real("O")
Program = Formula
PRODUCTS = "time is counted in operations of matrix products; what is done entry by entry is of no higher order"
HELD = "space is the most numbers held at once beyond the inputs"
# An order leaves its constants open; one that is only stated may be passed this many times, either way.
GENEROUS = 16


def library(name: str, **settings: int) -> Method:
    return all_methods()[name](**settings)


def over_lengths(costs: Mapping[str, Function], title: str, y: str = "operations") -> Chart:
    return curves(title, "keys", y, [2**i for i in range(7, 18)], costs, log_x=True, log_y=True)


def operations(method: Method, dim: int = 64) -> Function:
    return lambda length: method.cost(Sizes(1, 1, 1, int(length), int(length), dim, dim)).flops


def between(count: Any, order: Any, low: Any, high: Any) -> Any:
    """That a count lies between two multiples of an order."""
    return And(low * order <= count, count <= high * order)


def of_library(method: Callable[..., Method], polynomial: Any, sizes: Sequence[Any], cases: Sequence[Any]) -> Evidence:
    """An example: the library's method takes as many operations, and its cost model says so to the last one.

    Args:
        method: the method, made of the sizes after the length and the width.
        polynomial: the count, in the sizes.
        sizes: the length, the width, and what the method is made of.
        cases: numbers for them.
    """
    found = [counting.of_library(method(*rest), length, width) for length, width, *rest in cases]
    foreseen = [int(polynomial.subs(dict(zip(sizes, case, strict=True)))) for case in cases]
    return rational(found == foreseen, "the library's method takes what is proved", counted=found)


def one_head(x: Tensor, *weights: Tensor) -> Tensor:
    """Self-attention with its softmax matrix written out."""
    queries, keys, values = (x @ weight for weight in weights)
    logits = queries @ keys.T
    shares = torch.softmax(logits, -1)
    return shares @ values


def without_softmax(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (x @ q) @ ((x @ k).T @ (x @ v))


def changed_from_65_rows(x: Tensor, *weights: Tensor) -> Tensor:
    """A head that does more from 65 rows on."""
    return one_head(x + x @ (x.T @ x) if x.shape[0] >= 65 else x, *weights)


def kept(head: Program) -> Loop:
    """Heads in sequence: each answer is kept until all are put side by side."""
    return Loop(lambda carried, x, *weights: ((), head(x, *weights)), joined=True)


def added(head: Program) -> Loop:
    """Heads in sequence, each answer added to the ones before: another mechanism."""
    return Loop(
        lambda carried, x, *weights: ((carried[0] + head(x, *weights),), ()),
        first=lambda x: (torch.zeros_like(x),),
        last=lambda answer: answer + 0,
    )


def changed_from(number: int, program: Program, more: Program) -> Program:
    """A program that is another one from some call on."""
    calls = 0

    def counted(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return (more if calls >= number else program)(*inputs)

    return counted


class Heads(NamedTuple):
    """One head, and several after each other."""

    head: Program
    heads: Loop


def _tokens(length: Any, width: Any) -> list[Tensor]:
    return counting.ones((length, width))


def _weights(length: Any, width: Any) -> list[Tensor]:
    return counting.ones(*[(width, width)] * 3)


def _head_inputs(length: Any, width: Any) -> list[Tensor]:
    return [*_tokens(length, width), *_weights(length, width)]


def _narrow_inputs(length: Any, width: Any, own: Any) -> list[Tensor]:
    return counting.ones((length, width), *[(width, own)] * 3)


def _heads_picture() -> Chart:
    costs: dict[str, Function] = {"projections, 6nd²": lambda n: 6 * n * 64**2, "pairs, 4n²d": lambda n: 4 * n**2 * 64}
    return over_lengths(costs, "One head of width 64: where the operations are")


_SIZES = {n: "the number of tokens", d: "their width", h: "the number of heads"}
_SOME = [n >= 1, d >= 1, h >= 1]
_ONE_TIME, _ONE_SPACE = n * d**2 + n**2 * d, n**2 + n * d
_FEW = {n: range(1, 129), d: range(1, 129), h: range(1, 13)}


def _as_sloppy(heads: Heads) -> Statement:
    _, space = counts(heads.head, _head_inputs)
    _, together = counts(heads.heads, _tokens, _weights, name="heads")
    order = n**2 + n * d + d**2
    return Statement(
        variables=_SIZES,
        given=_SOME,
        then={
            "one": And(space(n, d) >= O / GENEROUS, space(n, d) <= GENEROUS * O),
            "several": together(n, d, h) <= GENEROUS * O,
        },
        where={O: order},
        terms={"space": order},
        notes=[PRODUCTS, HELD, f"an order is passed if by more than {GENEROUS} times"],
        spans=_FEW | {w: range(1, 9)},
    )


def _counted(heads: Heads) -> Statement:
    (time, space), (all_time, all_space) = (
        counts(heads.head, _head_inputs),
        counts(heads.heads, _tokens, _weights, name="heads"),
    )
    narrow, _ = counts(heads.head, _narrow_inputs, name="narrow")
    return Statement(
        variables=_SIZES | {w: "the width of a narrow head"},
        given=[*_SOME, w >= 1],
        then={
            "time": between(time(n, d), _ONE_TIME, 4, 6),
            "space": between(space(n, d), _ONE_SPACE, 1, 4),
            "times": between(all_time(n, d, h), h * _ONE_TIME, 4, 6),
            "spaces": between(all_space(n, d, h), n**2 + h * n * d, 1, 4),
            "narrow": Eq(h * narrow(n, h * w, w), time(n, h * w)),
        },
        terms={"space": _ONE_SPACE, "spaces": n**2 + h * n * d, "width": h * w},
        notes=[PRODUCTS, HELD, "a head has three projections, and writes its softmax matrix out"],
        spans=_FEW | {w: range(1, 9)},
    )


@claim(
    "cost-exact",
    expected="corrected",
    formal=_as_sloppy,
    plain="One attention head takes extra space in the order of {space}; several heads after each other multiply the"
    " time and nothing else.",
    amendment=_counted,
    amended_plain="One head takes space in the order of {space}: the squared width is that of the weights, which are"
    " given. Heads in sequence keep their answers, so that their space is in the order of {spaces} (unless each is"
    " projected and added at once). And heads whose widths sum to {width} take no more products than one that wide.",
    subject=Heads(one_head, kept(one_head)),
    sabotage={
        "a head without its softmax": Heads(without_softmax, kept(without_softmax)),
        "answers added up, not kept": Heads(one_head, added(one_head)),
        "a head that does more from 65 rows on": Heads(changed_from_65_rows, kept(one_head)),
        "heads that do more from the sixth on": Heads(
            one_head, kept(changed_from(6, one_head, lambda x, *weights: one_head(x @ (x.T @ x), *weights)))
        ),
    },
    picture=_heads_picture,
)
def cost_exact(against: Refutation, proof: Proof, heads: Heads) -> None:
    against.case({n: 1, d: 64, h: 1, w: 1}, "with one token, what is held beside the weights is a sixteenth of d²")
    against.case({n: 4, d: 4, h: 100, w: 1}, "a hundred heads hold a hundred answers, twice at the end")
    some = dict(zip((n, d, h, w), map(proof.given, [*_SOME, w >= 1]), strict=True))
    time, space = (count(n, d) for count in counts(heads.head, _head_inputs))
    all_time, all_space = (count(n, d, h) for count in counts(heads.heads, _tokens, _weights, name="heads"))
    proof.conclude("time", proof.counted(time), some[n], some[d])
    proof.conclude("space", proof.counted(space), some[n], some[d])
    proof.conclude("times", proof.counted(all_time, says="h times one head"), some[n], some[d], some[h])
    proof.conclude("spaces", proof.counted(all_space), some[n], some[d], some[h])
    narrow, _ = counts(heads.head, _narrow_inputs, name="narrow")
    proof.conclude(
        "narrow", proof.counted(narrow(n, h * w, w)), proof.counted(time.func(n, h * w)), some[n], some[h], some[w]
    )
    pairs = 4 * n**2 * d
    proof.shows(of_library(lambda: library("exact"), pairs, (n, d), [(9, 4), (130, 5), (1100, 2)]))


def _project_inputs(length: Any, width: Any, heads: Any) -> list[Tensor]:
    return counting.ones((length, heads * width), (heads * width, width))


def _with_output(order: Formula) -> Statement:
    heads, _ = counts(_KEPT, _tokens, _weights, name="heads")
    output, _ = counts(torch.matmul, _project_inputs, name="output")
    time = heads(n, d, h) + output(n, d, h)
    return Statement(
        variables=_SIZES,
        given=_SOME,
        then={"order": And(time >= O / GENEROUS, time <= GENEROUS * O)},
        where={O: order()},
        terms={"order": order()},
        notes=[PRODUCTS, f"an order is passed if by more than {GENEROUS} times"],
        spans={n: range(1, 4097), d: range(1, 65), h: range(1, 5)},
    )


_KEPT = kept(one_head)


@claim(
    "multi-head-cost",
    expected="refuted",
    formal=_with_output,
    plain="Attention of several heads with an output projection takes time in the order of {order}.",
    subject=lambda: (3 * d**2 + 7 * n * d + 2 * n**2 + n * d**2) * h,
    sabotage={"the products counted, and no space": lambda: (n * d**2 + n**2 * d) * h},
    picture=_heads_picture,
)
def multi_head_cost(against: Refutation, _: Formula) -> None:
    says = "of n²d products 2n² are left: numbers held were added to operations, and the products of pairs forgotten"
    against.case({n: 4096, d: 64, h: 1}, says)


class Tiling(NamedTuple):
    """Exact attention tile by tile, and how the sums of two tiles become one."""

    program: Loop
    merge: Formula


def merged(first: Any, second: Any, top: Any, other: Any, most: Any) -> Any:
    """Sums relative to e^top and to e^other, as one relative to e^most."""
    return first * exp(top - most) + second * exp(other - most)


def _no_keys(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_full((rows.shape[0], 1), -math.inf), rows.new_zeros(rows.shape[0], 1), torch.zeros_like(rows)


def _one_tile(carried: Any, rows: Tensor, keys: Tensor, values: Tensor) -> Any:
    top, total, sums = carried
    logits = rows @ keys.T
    most = torch.maximum(top, logits.amax(-1, keepdim=True))
    shares, shrink = torch.exp(logits - most), torch.exp(top - most)
    total = total * shrink + shares.sum(-1, keepdim=True)
    sums = sums * shrink + shares @ values
    return (most, total, sums), ()


def _kept_tile(carried: Any, rows: Tensor, keys: Tensor, values: Tensor) -> Any:
    """A tile whose products are kept as its answer."""
    carried, _ = _one_tile(carried, rows, keys, values)
    return carried, rows @ keys.T


def by_tiles(tile: Program) -> Loop:
    """Exact attention that never writes its matrix out: sums relative to a running maximum."""
    return Loop(Loop(tile, first=_no_keys, last=lambda top, total, sums: sums / total))


def tiled(q: Tensor, k: Tensor, v: Tensor, tile: int, program: Loop | None = None) -> Tensor:
    """Attention by tiles, on tensors."""
    tiles = list(zip(k.split(tile), v.split(tile), strict=True))
    _, answers = (program or TILES)([], [([rows], tiles) for rows in q.split(tile)])
    return torch.cat(answers)


TILES = by_tiles(_one_tile)


def _nothing(*sizes: Any) -> list[Tensor]:
    return []


def _rows(tile: Any, width: Any) -> list[Tensor]:
    return counting.ones((tile, width))


def _tile_inputs(tile: Any, width: Any) -> list[Tensor]:
    return counting.ones((tile, width), (tile, width))


def _bottleneck_picture() -> Chart:
    costs: dict[str, Function] = {
        "the softmax matrix": lambda length: 4 * length**2,
        "exact attention by tiles": lambda length: _fused_bytes(int(length), 64),
    }
    return over_lengths(costs, "Bytes held beyond the inputs, width 64, float32", "bytes")


def _fused_bytes(length: int, width: int) -> int:
    """What the library predicts for its fused kernel, in float32."""
    return library("exact").cost(Sizes(1, 1, 1, length, length, width, width, device="cuda")).peak_bytes


_TILED = {m: "the number of tiles a side", b: "the keys of a tile", d: "the width"}
_TILES = [m >= 1, b >= 1, d >= 1]
top, other, most = real("t u r")
x, y = sequence("x y")
a, c = whole("a c")
_FEW_TILES = {m: range(1, 6), b: range(1, 7), d: range(1, 7)}
_SUMS = {top: (-3, 3), other: (-3, 3), most: (-3, 3), a: range(2, 3), c: range(3, 4), x: (-3, 3, 2), y: (-3, 3, 3)}


def _dominates(tiling: Tiling) -> Statement:
    _, space = counts(tiling.program, _nothing, _rows, _tile_inputs, name="tiles")
    return Statement(
        variables=_TILED,
        given=_TILES,
        then={"space": space(b, d, m) >= (m * b) ** 2},
        terms={"matrix": (m * b) ** 2},
        notes=[HELD],
        spans=_FEW_TILES | _SUMS,
    )


def _by_tiles(tiling: Tiling) -> Statement:
    all_time, all_space = counts(tiling.program, _nothing, _rows, _tile_inputs, name="tiles")
    time, _ = counts(one_head, _head_inputs)
    first, second = Sum(exp(x[i] - top), (i, 1, a)), Sum(exp(y[i] - other), (i, 1, c))
    return Statement(
        variables=_TILED
        | {
            n: "the number of keys",
            x: "the scores of some keys",
            y: "the scores of others",
            a: "how many there are",
            c: "how many others",
            top: "what the first sum is relative to",
            other: "what the second is relative to",
            most: "what the merged one is relative to",
        },
        given=[*_TILES, n >= 1],
        then={
            "time": 4 * n**2 * d >= (1 - 3 * d / (2 * n)) * time(n, d),
            "space": all_space(b, d, m) <= m * b * d + 9 * (b**2 + b * d),
            "as long": Eq(all_time(b, d, m), 4 * (m * b) ** 2 * d),
            "merged": Eq(
                tiling.merge(first, second, top, other, most),
                (Sum(exp(x[i]), (i, 1, a)) + Sum(exp(y[i]), (i, 1, c))) * exp(-most),
            ),
        },
        terms={"pairs": 4 * n**2 * d, "space": m * b * d + 9 * (b**2 + b * d)},
        notes=[PRODUCTS, HELD, "values are summed as normalisers are, and their quotient is the answer"],
        spans=_FEW_TILES | {n: range(1, 65)} | _SUMS,
    )


@claim(
    "cost-bottleneck",
    expected="corrected",
    formal=_dominates,
    plain="For long sequences the softmax matrix of {matrix} weights is the bottleneck, in space as in time.",
    amendment=_by_tiles,
    amended_plain="Of the time, yes: all but a vanishing part is {pairs}. Of the space, no longer: exact attention by"
    " tiles holds {space} numbers at most, its answer and one tile's work, never the matrix.",
    subject=Tiling(TILES, merged),
    sabotage={
        "tiles that are kept": Tiling(by_tiles(_kept_tile), merged),
        "sums merged without the maxima": Tiling(TILES, lambda first, second, *maxima: first + second),
        "tiles that are kept from the ninth on": Tiling(by_tiles(changed_from(9, _one_tile, _kept_tile)), merged),
    },
    picture=_bottleneck_picture,
)
def cost_bottleneck(against: Refutation, proof: Proof, tiling: Tiling) -> None:
    says = "128 keys of width 4 in tiles of 16 hold less than their 128² weights"
    against.case({m: 8, b: 16, d: 4}, says)
    some, tile, width, long = (proof.given(one) for one in [*_TILES, n >= 1])
    time, _ = counts(one_head, _head_inputs)
    all_time, all_space = (
        count(b, d, m) for count in counts(tiling.program, _nothing, _rows, _tile_inputs, name="tiles")
    )
    proof.conclude("time", proof.counted(time(n, d)), long, width)
    proof.conclude("space", proof.counted(all_space), some, tile, width)
    proof.conclude("as long", proof.counted(all_time, says="m rounds of m tiles"), some, tile, width)
    proof.conclude("merged", says="each sum relative to its own maximum, both relative to one")
