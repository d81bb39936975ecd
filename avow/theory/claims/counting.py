"""Operations and memory of a program, counted at a few sizes and thereby known at all of them.

A matrix product takes twice the product of its three sides in operations. So a program that is a fixed list of
products, whose sides are lengths, takes a number of operations that is a polynomial of degree three; and the numbers it
holds, two sides a matrix, are one of degree two. As many exact counts as it has coefficients determine it:
`interpolated` finds it, and `counted` tries it again at sizes it has not seen. What is then said of it — that it is of
an order, `theta` — holds for all sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from flint import fmpq_mat
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from torch.utils.weak import TensorWeakRef

from avow.calibration import random_problem
from avow.core import Method, Sizes
from avow.theory.claims.claim import Evidence, Unproved
from avow.theory.claims.toolbox import nonnegative, rational

Lengths = Sequence[sympy.Symbol]
Inputs = Callable[..., Sequence[Tensor]]
# PyTorch counts its CPU attention kernel nowhere; its own formula for the others applies.
_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(q, k, v)
}


def length(name: str) -> sympy.Symbol:
    """A length of a program: any positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def flops(call: Callable[[], object]) -> int:
    """The operations of one call, as `torch.utils.flop_counter` counts them: a multiply-add is two."""
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        call()
    return int(counter.get_total_flops())


def held(program: Callable[..., object], *inputs: Tensor) -> list[int]:
    """How many numbers are held beyond the inputs after each operation of a program, to the last one."""
    with torch.no_grad(), _Held(inputs) as ledger:
        program(*inputs)
    return ledger.steps


def most_held(program: Callable[..., object], *inputs: Tensor) -> int:
    return max(held(program, *inputs))


class _Held(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says nothing of its types
        self.given = {x.untyped_storage().data_ptr() for x in inputs}
        self.references: list[TensorWeakRef] = []
        self.steps: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.references += [TensorWeakRef(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
        alive = [(reference, x) for reference in self.references if (x := reference()) is not None]
        self.references = [reference for reference, _ in alive]
        # Views share a storage: it is counted once.
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.element_size() for _, x in alive}
        self.steps.append(sum(size for storage, size in storages.items() if storage not in self.given))
        return out


def ones(*shapes: tuple[int, int]) -> list[Tensor]:
    """Inputs of these shapes: what they hold changes no count."""
    return [torch.ones(shape) for shape in shapes]


def of_library(method: Method, length: int, dim: int) -> int:
    """The operations that the library takes for a head, which its cost model must foresee to the last one."""
    # Two heads in float64: a CPU with threads computes a head twice that is alone, and in float32 a row.
    sizes = Sizes(1, 2, 2, length, length, dim, dim, torch.float64)
    problem = random_problem(sizes)
    count = flops(lambda: method.compute(problem, torch.Generator().manual_seed(0)))
    if method.cost(sizes).flops != count:
        raise Unproved(f"{method}: the cost model says {method.cost(sizes).flops} operations, the counter {count}")
    return count // 2


def interpolated(count: Callable[..., int], lengths: Lengths, degree: int) -> sympy.Expr:
    """The only polynomial of this total degree that agrees with the counts, exactly.

    `count` gets its sizes in the order of `lengths`. The nodes are all sizes whose excesses over one sum to at most the
    degree.
    """
    orders = [order for order in itertools.product(range(degree + 1), repeat=len(lengths)) if sum(order) <= degree]
    nodes = [[1 + part for part in order] for order in orders]
    powers = fmpq_mat([[math.prod(map(pow, node, order)) for order in orders] for node in nodes])
    coefficients = powers.solve(fmpq_mat([[count(*node)] for node in nodes])).entries()
    terms = (sympy.prod(map(pow, lengths, order)) for order in orders)
    return sympy.Add(*(sympy.Rational(int(c.p), int(c.q)) * term for c, term in zip(coefficients, terms, strict=True)))


def counted(
    count: Callable[..., int],
    lengths: Lengths,
    unseen: Sequence[tuple[int, ...]],
    says: str,
    amended: bool = False,
    degree: int = 3,
) -> Generator[Evidence, None, sympy.Expr]:
    """Returns the polynomial a count follows; yields that it is right again at sizes beyond its nodes."""
    polynomial = interpolated(count, lengths, degree)
    beyond = {sizes: (polynomial.subs(dict(zip(lengths, sizes, strict=True))), count(*sizes)) for sizes in unseen}
    nodes, names = math.comb(len(lengths) + degree, degree), ", ".join(map(str, lengths))
    says = f"{says}: by interpolation, as {nodes} exact counts determine a polynomial of degree {degree} in {names}"
    shown = {sizes: f"{foreseen} and {got}" for sizes, (foreseen, got) in beyond.items()}
    agrees = all(foreseen == got for foreseen, got in beyond.values())
    yield rational(agrees, says, amended, polynomial=polynomial, foreseen_and_counted_beyond=shown)
    return polynomial


def operations(
    program: Callable[..., object], inputs: Inputs, lengths: Lengths, unseen: tuple[int, ...], says: str, amended: bool
) -> Generator[Evidence, None, sympy.Expr]:
    """Returns the polynomial that the operations of a program follow; yields as `counted` does."""
    count = counted(lambda *z: flops(lambda: program(*inputs(*z))), lengths, [unseen], says, amended)
    return (yield from count)


def memory(
    program: Callable[..., object], inputs: Inputs, lengths: Lengths, amended: bool = False
) -> Generator[Evidence, None, tuple[sympy.Expr, int]]:
    r"""Returns the numbers held beyond the inputs, summed over all steps of a program, and how many steps; yields why.

    With T steps, a fixed number, the peak lies between sum / T and sum: both are of the same order.
    """
    traces: dict[tuple[int, ...], list[int]] = {}

    def total(*sizes: int) -> int:
        traces[sizes] = held(program, *inputs(*sizes))
        return sum(traces[sizes])

    unseen = tuple(5 + place for place in range(len(lengths)))
    says = "numbers held beyond the inputs, summed over the steps"
    polynomial = yield from counted(total, lengths, [unseen], says, amended, degree=2)
    counts = {len(trace) for trace in traces.values()}
    if len(counts) != 1:
        raise Unproved(f"the program has {sorted(counts)} steps, depending on its sizes")
    return polynomial, counts.pop()


def theta(count: sympy.Expr, order: sympy.Expr, says: str, amended: bool = False) -> Iterator[Evidence]:
    """A count lies between two multiples of an order, for all lengths from one on."""
    terms = sympy.expand(count).as_coefficients_dict()
    least = min((terms.get(term, 0) for term in sympy.Add.make_args(sympy.expand(order))), default=0)
    if not least > 0:
        raise Unproved(f"{says}: {count} has not every term of {order}")
    yield at_most(count, order, says, amended)
    yield nonnegative(_from_one(count - least * order), f"{says}: at least {least} times {order}", amended)


def at_most(
    count: sympy.Expr, order: sympy.Expr, says: str, amended: bool = False, given: Mapping[Any, Any] | None = None
) -> Evidence:
    """A count is at most a multiple of an order, for all lengths from one on; `given` writes out what more is known."""
    most = sum(max(coefficient, 0) for coefficient in sympy.expand(count).as_coefficients_dict().values())
    spare = (most * order - count).subs(given or {})
    return nonnegative(_from_one(spare), f"{says}: at most {most} times {order}", amended)


def _from_one(expression: sympy.Expr) -> sympy.Expr:
    """An expression in what its lengths exceed one by, where positive coefficients show that it is nonnegative."""
    lengths = [symbol for symbol in expression.free_symbols if symbol.is_positive]
    excess = {symbol: 1 + sympy.Dummy(f"({symbol}-1)", nonnegative=True) for symbol in lengths}
    return sympy.expand(expression.subs(excess))


def unbounded(ratio: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Whether a ratio grows beyond all bounds with one of its lengths, the others being one."""
    others = {other: 1 for other in ratio.free_symbols - {symbol}}
    return bool(sympy.limit(ratio.subs(others), symbol, sympy.oo) == sympy.oo)


def settled(traces: Sequence[Sequence[int]], says: str, amended: bool = False) -> Evidence:
    """Longer and longer runs of a loop hold the same numbers again and again, so by induction any run does."""
    sets = [sorted(set(trace)) for trace in traces]
    same = all(a == b for a, b in itertools.pairwise(sets))
    return rational(same, says, amended, most=[max(one) for one in sets], runs=len(sets))
