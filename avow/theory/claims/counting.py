"""Operations and memory of a program, from its structure: it is run once on tensors whose sizes are symbols.

Nothing can be asked of such a size: a program that does something else from some size on ends with an error, and no
count. What is counted, by PyTorch's own formulas, is a polynomial of the sizes for that reason alone. A loop is data, a
`Loop`: its round is traced once and sees neither how many there are nor which it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from flint import arb
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from torch.utils.weak import TensorWeakRef

from avow.calibration import random_problem
from avow.core import Method, Sizes
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Measured

Program = Callable[..., Any]
Inputs = Callable[..., Sequence[Tensor]]
# PyTorch counts its CPU attention kernel nowhere; its own formula for the others applies.
_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(q, k, v)
}
# How often the round of a loop is traced: one that counts its calls must not do so unseen for long.
_AGAIN = 12


def flops(call: Callable[[], object]) -> int:
    """The operations of one call, as `torch.utils.flop_counter` counts them: a multiply-add is two."""
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        call()
    return int(counter.get_total_flops())


def held(program: Program, *inputs: Tensor) -> list[Any]:
    """How many numbers are held beyond the inputs after each operation of a program, to the last one."""
    with torch.no_grad(), _Held(inputs) as ledger:
        program(*inputs)
    return ledger.steps


class _Held(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says nothing of its types
        self.given = {_storage(x) for x in inputs}
        self.references: list[TensorWeakRef] = []
        self.steps: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.references += [TensorWeakRef(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.steps.append(self.now())
        return out

    def now(self) -> Any:
        """What is held at this moment."""
        alive = [(reference, x) for reference in self.references if (x := reference()) is not None]
        self.references = [reference for reference, _ in alive]
        # Views share a storage: it is counted once.
        storages = {_storage(x): x.untyped_storage().nbytes() // x.element_size() for _, x in alive}
        return sum(size for storage, size in storages.items() if storage not in self.given)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def ones(*shapes: tuple[Any, Any]) -> list[Tensor]:
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


@dataclass(frozen=True)
class Trace:
    """What a program takes: its operations, what it holds after each, and what it leaves."""

    time: Any
    steps: tuple[Any, ...]
    left: Any

    @property
    def most(self) -> Any:
        """The most that is held at once."""
        steps = [sympy.expand(sympy.sympify(step)) for step in self.steps]
        least = [one for one in dict.fromkeys(steps) if not any(_exceeds(other, one) for other in steps)]
        return sympy.Max(*least, evaluate=False) if len(least) > 1 else least[0]


def _exceeds(larger: Any, one: Any) -> bool:
    """Whether one polynomial is another with more in it, whatever the sizes."""
    more = sympy.expand(larger - one)
    return bool(more != 0 and all(number > 0 for number in more.as_coefficients_dict().values()))


def traced(program: Program, inputs: Inputs, sizes: Sequence[Any]) -> Trace:
    """What a program takes on inputs of these sizes, which may be numbers or symbols, for any number from one on."""
    symbols = [size for size in sizes if isinstance(size, sympy.Symbol)]
    environment = ShapeEnv()
    held_by = {symbol: environment.create_unbacked_symint() for symbol in symbols}
    # Sizes are one at least, as SymPy must know to see what strides come to.
    positive = {symbol: sympy.Dummy(symbol.name, integer=True, positive=True) for symbol in symbols}
    names = {number.node.expr: positive[symbol] for symbol, number in held_by.items()}
    back = {name: symbol for symbol, name in positive.items()}

    def spelled(count: Any) -> Any:
        if not isinstance(count, torch.SymInt):
            return sympy.Integer(count)
        return sympy.expand(count.node.expr.xreplace(names)).xreplace(back)

    with FakeTensorMode(shape_env=environment), torch.no_grad():
        for number in held_by.values():
            torch._check(number >= 1)
        known = _asserted(environment)
        given = inputs(*(held_by.get(size, size) for size in sizes))
        try:
            with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter, _Held(given) as ledger:
                answer = program(*given)
            left = ledger.now()
        except GuardOnDataDependentSymNode as error:
            asked = next((line for line in str(error).splitlines() if line.strip()), "")
            raise Unproved(f"the program does something else from some size on: {asked}") from None
        if _asserted(environment) != known:
            raise Unproved("the program is right for some sizes only")
        answers = {_storage(x): x.numel() for x in tree_leaves(answer) if isinstance(x, Tensor)}
        own = sum(size for storage, size in answers.items() if storage not in ledger.given)
        if sympy.expand(spelled(left) - spelled(own)) != 0:
            raise Unproved(f"the program keeps {spelled(left)} numbers, and its answer has {spelled(own)}")
        return Trace(sympy.expand(spelled(counter.get_total_flops())), tuple(map(spelled, ledger.steps)), spelled(left))


def _asserted(environment: ShapeEnv) -> set[str]:
    """What is taken for granted of sizes."""
    later = environment.deferred_runtime_asserts.values()
    return {str(one.expr) for asserts in later for one in asserts} | {str(guard.expr) for guard in environment.guards}


@dataclass(frozen=True)
class Loop:
    """A program with a loop: what is there before the first round, a round, and what follows the last.

    Attributes:
        body: a round: from what is carried, then the inputs that every round sees, then the round's own, to what is
            carried on and the round's answer, which is kept; either may be (). Or a loop, with as many rounds, that
            sees the round's own inputs.
        first: makes what is carried from round to round, of the shared inputs.
        last: makes the answer of what is carried.
        joined: whether the answers kept are put side by side in the end.
    """

    body: Any
    first: Program = lambda *shared: ()
    last: Program | None = None
    joined: bool = False

    def __call__(self, shared: Sequence[Tensor], rounds: Sequence[Any]) -> Any:
        """The loop as it runs; to a loop of loops each round's own inputs come with those of its rounds."""
        carried, kept = self.first(*shared), []
        for own in rounds:
            carried, answer = (
                ((), self.body(*own)) if isinstance(self.body, Loop) else self.body(carried, *shared, *own)
            )
            kept.append(answer)
            del answer
        if self.last is not None:
            return self.last(*carried)
        return torch.cat(kept, -1) if self.joined else (carried, kept)


def looped(loop: Loop, inputs: Sequence[Inputs], sizes: Sequence[Any], rounds: Any) -> Trace:
    """What a loop takes, by induction: each round is the same program, and keeps one answer more than the one before.

    Args:
        loop: the loop.
        inputs: make the inputs that every round sees, those of a round, and those of a round of its loop, of the sizes.
        sizes: the sizes.
        rounds: how many rounds there are, one at least.
    """
    shared, own, *inner = inputs
    start, carried = traced(loop.first, shared, sizes), list[Tensor]()

    def given(*z: Any) -> list[Tensor]:
        carried[:] = tree_leaves(loop.first(*shared(*z)))
        return [*carried, *shared(*z), *own(*z)]

    if isinstance(loop.body, Loop):
        once = looped(loop.body, [own, *inner], sizes, rounds)
    else:
        body = loop.body
        found = {
            traced(lambda *x: body(tuple(x[: len(carried)]), *x[len(carried) :]), given, sizes) for _ in range(_AGAIN)
        }
        if len(found) != 1:
            raise Unproved("a round is not the same program every time")
        (once,) = found
    # What a round leaves, beside what takes the place of what was carried, is its answer.
    answer = once.left - start.left
    kept = start.left + rounds * answer
    steps = [*start.steps, *(start.left + step + (rounds - 1) * answer for step in once.steps)]
    time, left = start.time + rounds * once.time, kept
    if loop.last is not None:
        end = traced(loop.last, lambda *z: tree_leaves(loop.first(*shared(*z))), sizes)
        time, steps, left = time + end.time, [*steps, *(kept + step for step in end.steps)], end.left
    if loop.joined:
        steps, left = [*steps, 2 * kept], kept
    return Trace(sympy.expand(time), tuple(steps), left)


class Counted(Measured):
    """A count of a program, a function of its sizes: PyTorch counts it at any, and its structure gives it for all."""

    trace: Callable[..., Trace]
    run: Callable[..., tuple[int, int]]
    space = False

    def measured(self, values: Sequence[arb]) -> arb:
        return arb(self.at(tuple(int(float(value)) for value in values)))

    def exact(self, values: Sequence[Any]) -> Any:
        return sympy.Integer(self.at(tuple(map(int, values))))

    @classmethod
    @functools.cache
    def at(cls, sizes: tuple[int, ...]) -> int:
        """The count at these sizes, as PyTorch makes it."""
        return cls.run(*sizes)[cls.space]

    def structure(self) -> Any:
        """The count as the program's structure gives it."""
        names = [sympy.Dummy(f"n_{place}", integer=True, positive=True) for place, _ in enumerate(self.args)]
        trace = type(self).trace(*names)
        count = trace.most if self.space else trace.time
        return count.xreplace(dict(zip(names, self.args, strict=True)))


@functools.cache
def counts(program: Any, *inputs: Inputs, name: str = "") -> tuple[Any, Any]:
    """The time and the space of a program, as functions of its sizes; of a loop the last one is how many rounds.

    Args:
        program: the program, or a `Loop`.
        inputs: make its inputs of the sizes; of a loop those that every round sees, those of a round, and so on.
        name: what is counted, if a statement counts more than one program.
    """
    deep = isinstance(program, Loop)

    def trace(*sizes: Any) -> Trace:
        return looped(program, inputs, sizes[:-1], sizes[-1]) if deep else traced(program, inputs[0], sizes)

    def run(*sizes: int) -> tuple[int, int]:
        def made() -> tuple[Program, Sequence[Tensor]]:
            if not deep:
                return program, inputs[0](*sizes)
            own = [make(*sizes[:-1]) for make in inputs]
            rounds: list[Any] = [own[-1]] * sizes[-1]
            for shared in reversed(own[1:-1]):
                rounds = [(shared, rounds)] * sizes[-1]
            return (lambda *_: program(own[0], rounds)), [x for one in own for x in one]

        # Nothing is computed: what a program takes depends on shapes alone.
        with FakeTensorMode():
            call, given = made()
            return flops(lambda: call(*given)), max(held(call, *given), default=0)

    made = [
        type(
            f"{kind}_{name}" if name else kind,
            (Counted,),
            {"trace": staticmethod(trace), "run": staticmethod(run), "space": space},
        )
        for kind, space in (("time", False), ("space", True))
    ]
    return made[0], made[1]
