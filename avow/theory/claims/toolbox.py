"""Steps of a proof: each function checks something by machine and returns the evidence, or raises `Unproved`.

First come equality and signs in symbols (SymPy), then fractions and balls, then what refutes; `search`
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

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from flint import arb

from avow.numerics import intervals
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


def rounded(number: Callable[[], arb], dtype: torch.dtype) -> Fraction | float:
    """The number of a floating point type nearest to a real one, exactly, or ±inf where it overflows.

    `number` is asked with more bits until its ball lies strictly between two halfway points; on one, it never does.
    """
    form = torch.finfo(dtype)
    top, relative, tiny = Fraction(form.max), Fraction(form.eps), Fraction(form.tiny)

    def spacing(size: Fraction) -> Fraction:
        """From one number of the type to the next; below the smallest normal number it stays the same."""
        if size < 2 * tiny:
            return relative * tiny
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        # 2^exponent is within a factor of two of the size.
        return relative * Fraction(2) ** (exponent if Fraction(2) ** exponent <= size else exponent - 1)

    overflow, vanish = top + spacing(top) / 2, spacing(Fraction(0)) / 2

    def nearest() -> Any:
        x = number()
        if not x.is_finite():
            return None
        # Far beyond either end of the type, the number itself would be too long to write out.
        if abs(x) < intervals.ball(vanish):
            return Fraction(0)
        sign = -1 if x < 0 else 1
        magnitude = sign * x
        if magnitude > intervals.ball(overflow):
            return sign * math.inf
        mantissa, exponent = (int(part) for part in x.mid().man_exp())
        size = abs(mantissa) * Fraction(2) ** exponent
        candidate = round(size / spacing(size)) * spacing(size)
        # Half the way to either neighbour; the one below is nearer where the exponent changes.
        above, below = spacing(candidate) / 2, spacing(candidate * (1 - relative / 4)) / 2
        low, high = intervals.ball(candidate - below), intervals.ball(min(candidate + above, overflow))
        return sign * candidate if low < magnitude < high else None

    decided = intervals.decided(nearest)
    if decided is None:
        raise Unproved(f"balls cannot tell which {dtype} is nearest to {number()}")
    return decided


def stored(number: Callable[[], arb], dtype: torch.dtype) -> arb:
    """A real number as a type holds it, exactly; what overflows is the largest number there."""
    value = rounded(number, dtype)
    return intervals.ball(value if isinstance(value, Fraction) else torch.finfo(dtype).max)


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
