"""Steps of a proof: each function checks something by machine and returns the evidence, or raises `Unproved`.

First comes equality in symbols (SymPy), then fractions and balls, then what refutes; `search` is the weakest, support
and never proof. A ball is a number with a radius (python-flint's `arb`): the true value lies within it, so a comparison
of balls that comes out true is proved.

Args:
    left, right: the two sides; numbers in them are exact, never floats.
    says: the step in words, for whoever reads the proof.
    amended: whether the step is about the correction and not about the statement.
    holds: the outcome of the comparison, True or False.
    facts: the numbers worth showing beside the step, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from avow.numerics import intervals
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.constructions.construction import Construction


def identity(left: Any, right: Any, says: str, amended: bool = False) -> Evidence:
    """Two expressions are equal, symbolically, wherever both are defined."""
    left, right = _exact(left), _exact(right)
    difference = sympy.simplify(sympy.expand(left - right))
    if difference != 0:
        hint = "to refute a statement, yield toolbox.counterexample with numbers at which it fails"
        raise Unproved(f"{says}: the two sides differ by {difference}; {hint}")
    return Evidence("symbolic", says, {"left": sympy.latex(left), "right": sympy.latex(right)}, amended)


def rational(holds: bool, says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A comparison of fractions came out true; floats among the facts would betray that it was none."""
    for name, fact in facts.items():
        for number in fact if isinstance(fact, list | tuple) else [fact]:
            if isinstance(number, float):
                raise TypeError(f"{name}={number} is a float; exact evidence holds fractions and integers")
    if not _truth(holds):
        raise Unproved(f"{says}: does not hold for {_shown(facts)}")
    return Evidence("rational", says, {name: str(fact) for name, fact in facts.items()}, amended)


def enclosed(holds: bool | Callable[[], bool], says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A comparison of balls is true; given as a function, it is asked with more bits until it is.

    Args:
        holds: the outcome of the comparison, or a function that makes it.
    """
    ask = holds if callable(holds) else lambda: holds
    if not intervals.decided(lambda: True if _truth(ask()) else None, most=4096):
        raise Unproved(f"{says}: balls cannot show it for {_shown(facts)}")
    return Evidence("balls", says, facts, amended)


def kept(construction: Construction, says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A construction of the library keeps its promise, on the numbers it returned.

    Args:
        construction: what `avow.theory.constructions` made.
    """
    proof = construction.verify()
    if not proof:
        raise Unproved(f"{says}: {proof}")
    numbers = {"promise": proof.promise, "proved": proof.achieved, "promised": proof.bound}
    return Evidence("balls", says, {**numbers, **facts}, amended)


def counterexample(violated: bool, says: str, by: str, **facts: Any) -> Evidence:
    """A concrete case in which the statement fails; `by` names the arithmetic that evaluated it again.

    Args:
        violated: whether the statement fails in this case, True or False.
        by: the arithmetic, such as "fractions" or "balls".
    """
    if not _truth(violated):
        raise Unproved(f"{says}: this is not a counterexample ({_shown(facts)})")
    return Evidence("counterexample", says, {"evaluated by": by, **facts})


def search(
    excess: Callable[[torch.Tensor], torch.Tensor],
    start: Callable[[torch.Generator], torch.Tensor],
    says: str,
    restarts: int = 64,
    steps: int = 50,
    amended: bool = False,
) -> Evidence:
    """No violation was found by climbing `excess` (violated where above zero) from random starts.

    Args:
        excess: by how much a case violates the statement, a differentiable function of a tensor.
        start: draws a case from a generator.
        restarts: how many starts are tried.
        steps: how many steps are climbed from each.
    """
    if restarts < 1 or steps < 1:
        raise ValueError(f"{says}: {restarts} restarts of {steps} steps try nothing")
    generator = torch.Generator().manual_seed(0)
    worst = -math.inf
    for _ in range(restarts):
        x = start(generator).requires_grad_()
        climber = torch.optim.Adam([x], lr=0.05)
        for _ in range(steps):
            value = excess(x)
            worst = max(float(value.detach()), worst)
            if not worst <= 0:  # nan included
                raise Unproved(f"{says}: violated by {worst:.3g} at {x.detach().flatten()[:8].tolist()}")
            climber.zero_grad()
            (-value).backward()
            climber.step()
    return Evidence("search", says, {"trials": restarts * steps, "closest": worst}, amended)


def _exact(expression: Any) -> Any:
    expression = sympy.sympify(expression)
    if expression.has(sympy.Float):
        raise TypeError(f"{expression} holds a float; symbolic evidence holds exact numbers")
    return expression


def _truth(answer: Any) -> bool:
    """A truth value as it is: a list, a ball or a formula is none, however true it looks."""
    of_booleans = getattr(answer, "dtype", None) in (bool, torch.bool)
    if of_booleans or isinstance(answer, bool | sympy.logic.boolalg.BooleanAtom):
        return bool(answer)
    raise TypeError(f"{answer!r} is not a truth value")


def _shown(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in facts.items()) or "the case given"
