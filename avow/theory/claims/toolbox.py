"""Steps of a proof: each function checks something by machine and returns the evidence, or raises `Unproved`.

First come equality, signs and induction in symbols (SymPy), then fractions, balls and laws, then what refutes; `search`
is the weakest, support and never proof. A ball is a number with a radius (python-flint's `arb`): the true value lies
within it, so a comparison of balls that comes out true is proved.

Args:
    left, right: the two sides; numbers in them are exact, never floats.
    expression: a SymPy expression without floats.
    says: the step in words, for whoever reads the proof.
    amended: whether the step is about the correction and not about the statement.
    holds: the outcome of the comparison, True or False.
    facts: the numbers worth showing beside the step, by name.
    number: gives the number as a ball, in the precision that is set when it is called.
    dtype: a floating point type of torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from flint import arb

from avow.numerics import intervals
from avow.theory.claims.claim import Formula
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.kernel import conditions
from avow.theory.claims.rules.analysis import SMOOTH
from avow.theory.constructions.construction import Construction

Box = Sequence[tuple[float | Fraction, float | Fraction]]


def symbols(**names: str) -> list[Any]:
    """Symbols by what is known of them: symbols(real="x y", positive="p", integer_nonnegative="n").

    Args:
        **names: to each kind of symbol, the names of those that are of it.
    """
    known = {kind: dict.fromkeys(kind.split("_"), True) for kind in names}
    return [sympy.Symbol(name, **known[kind]) for kind, words in names.items() for name in words.split()]


def identity(left: Any, right: Any, says: str, amended: bool = False) -> Evidence:
    """Two expressions are equal, symbolically, wherever both are defined."""
    left, right = _exact(left), _exact(right)
    difference = sympy.simplify(sympy.expand(left - right))
    if difference != 0:
        hint = "to refute a statement, yield toolbox.counterexample with numbers at which it fails"
        raise Unproved(f"{says}: the two sides differ by {difference}; {hint}")
    return Evidence("symbolic", says, {"left": sympy.latex(left), "right": sympy.latex(right)}, amended)


def equal_matrices(left: Any, right: Any, says: str, amended: bool = False) -> Evidence:
    """Two matrices of expressions are equal, entry by entry."""
    left, right = sympy.Matrix(left), sympy.Matrix(right)
    if left.shape != right.shape:
        raise Unproved(f"{says}: shapes {left.shape} and {right.shape} differ")
    for row in range(left.rows):
        for column in range(left.cols):
            identity(left[row, column], right[row, column], f"{says}, entry ({row + 1}, {column + 1})")
    return Evidence("symbolic", says, {"left": sympy.latex(left), "right": sympy.latex(right)}, amended)


def same_product(left: Any, right: Any, says: str, amended: bool = False) -> Evidence:
    """Two expressions in matrix symbols are equal, whatever sizes the symbols stand for."""
    left, right = (sympy.expand(side).doit() for side in (left, right))
    if left.shape != right.shape or left != right:
        raise Unproved(f"{says}: {left} is not {right}")
    return Evidence("symbolic", says, {"equal": sympy.latex(left), "size": str(left.shape)}, amended)


def nonnegative(expression: Any, says: str, amended: bool = False) -> Evidence:
    """An expression is never negative under the assumptions its symbols carry; SymPy must be able to see it."""
    return _signed("nonnegative", expression, says, amended)


def positive(expression: Any, says: str, amended: bool = False) -> Evidence:
    """An expression is above zero under the assumptions its symbols carry; SymPy must be able to see it."""
    return _signed("positive", expression, says, amended)


def _signed(sign: str, expression: Any, says: str, amended: bool) -> Evidence:
    expression = _exact(expression)
    for rewritten in (lambda given: given, sympy.simplify, sympy.factor, sympy.expand):
        form = rewritten(expression)
        if getattr(form, f"is_{sign}"):
            return Evidence("symbolic", says, {sign: sympy.latex(form)}, amended)
    raise Unproved(f"{says}: cannot see that {expression} is {sign}")


def rising(expression: Any, variable: sympy.Symbol, start: Any, says: str, amended: bool = False) -> Evidence:
    """An expression is never negative from `start` on: it is not there, and its slope is not beyond.

    Where the slope's own sign cannot be seen, it is asked the same way, up to the third. The expression must be smooth
    from `start` on; its other symbols keep their assumptions.

    Args:
        variable: the symbol that grows.
        start: the number or expression it grows from.
    """
    expression, start = _exact(expression), _exact(start)
    beyond = start + sympy.Dummy("beyond", nonnegative=True)
    if not all(isinstance(part, SMOOTH) for part in expression.atoms(sympy.Function)):
        raise Unproved(f"{says}: {expression} is not known to be smooth")
    for condition in conditions(expression):
        # What jumps may be above zero, and rise wherever it is smooth, and fall below zero all the same.
        there = condition.subs(variable, beyond)
        side = there.lhs - there.rhs if there != sympy.true else sympy.Integer(1)
        forms = (sympy.expand(side), sympy.factor(side))
        signs = ("is_positive", "is_negative") if isinstance(condition, sympy.Ne) else ("is_positive",)
        if not any(getattr(form, sign) for form in forms for sign in signs):
            raise Unproved(f"{says}: {expression} may have no value, unless {there}")
    slopes = [expression]
    for _ in range(3):
        nonnegative(slopes[-1].subs(variable, start), f"{says}, at the start")
        slopes.append(sympy.diff(slopes[-1], variable))
        try:
            nonnegative(slopes[-1].subs(variable, beyond), f"{says}, the slope beyond")
        except Unproved as error:
            trouble = error
        else:
            facts = {"nonnegative": sympy.latex(expression), "from": sympy.latex(start)}
            return Evidence("symbolic", says, facts | {"slopes": list(map(sympy.latex, slopes[1:]))}, amended)
    raise trouble


def induction(form: Formula, first: int, start: Any, step: Formula, says: str, amended: bool = False) -> Evidence:
    """A quantity that is `start` at `first` and goes from n to n+1 by `step(quantity, n)` is `form(n)` at every n.

    Args:
        form: the formula, a function of n.
        first: the n to begin at.
        start: the quantity there.
        step: the quantity at n + 1, a function of the quantity at n and of n.
    """
    n = sympy.Symbol("n", integer=True, positive=first > 0, nonnegative=True if first >= 0 else None)
    identity(form(sympy.Integer(first)), start, f"{says}, at n = {first}")
    identity(form(n + 1), step(form(n), n), f"{says}, from n to n + 1")
    return Evidence("symbolic", says, {"for all n from": first, "form": sympy.latex(_exact(form(n)))}, amended)


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


def cover(
    holds: Callable[..., bool], box: Box, says: str, amended: bool = False, most: int = 20000, bits: int = 64
) -> Evidence:
    """A condition on balls is true on every piece of a box, which is halved where it is not yet.

    `holds(x, y, …)` gets one ball per side and may only return True when it is so for all their numbers.

    Args:
        holds: the condition, a function of one ball for each side of the box.
        box: the two ends of each side.
        most: how many pieces are tried at most.
        bits: the precision of the balls.
    """
    for side in box:
        if not side[0] <= side[1]:
            raise ValueError(f"{says}: [{side[0]}, {side[1]}] is not an interval")
    pieces = [(0.0, 0, tuple((Fraction(low), Fraction(high)) for low, high in box))]
    tried = 0
    with intervals.precision(bits):
        while pieces:
            _, _, piece = heapq.heappop(pieces)
            tried += 1
            if tried > most:
                where = ", ".join(f"[{float(low):.6g}, {float(high):.6g}]" for low, high in piece)
                raise Unproved(f"{says}: still open after {most} pieces, at {where}")
            if _truth(holds(*(intervals.interval(low, high) for low, high in piece))):
                continue
            widest = max(range(len(piece)), key=lambda i: piece[i][1] - piece[i][0])
            low, high = piece[widest]
            middle = (low + high) / 2
            for i, half in enumerate(((low, middle), (middle, high))):
                halved = (*piece[:widest], half, *piece[widest + 1 :])
                heapq.heappush(pieces, (-float(high - low), 2 * tried + i, halved))
    domain = " × ".join(f"[{float(low):g}, {float(high):g}]" for low, high in box)
    return Evidence("balls", says, {"domain": domain, "pieces": tried}, amended)


def law(probability: arb, low: float, high: float, says: str, amended: bool = False, **facts: Any) -> Evidence:
    """A probability from its exact law lies between two numbers.

    Args:
        probability: as a ball.
        low, high: the two numbers.
    """
    if not (probability >= arb(low) and probability <= arb(high)):
        raise Unproved(f"{says}: the law gives {probability}, not within [{low}, {high}]")
    return Evidence("exact law", says, {"probability": probability.str(20), **facts}, amended)


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
