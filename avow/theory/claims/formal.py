r"""A formal statement: variables, hypotheses and conclusions as data, from which words, searches and proofs are made.

A statement says: for all values of the variables that fulfil every hypothesis, each part of the conclusion holds. Its
formulas are SymPy's. A variable carries nothing but that it is real or whole: what else is known of it is a hypothesis,
which can be seen, dropped and missed. Beside sums, the formulas may hold

    ForAll(j, low, high, body)   for every whole j from low to high
    Exists(x, body)              for some real x, or some sequence x
    Mean(w, term)                the mean over a sequence w of independent normal numbers
    Chance(w, event)             the probability of an event over such a sequence
    Row(f, low, high, term)      the numbers of a row, as one thing that a function may take

A sequence is an `IndexedBase`: ``s[j]`` is a number of it. A `function` may be any function. Every logarithm, root and
quotient of a statement must have a value wherever the hypotheses hold, which is proved with everything else.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
from flint import arb
from sympy import And, Equivalent, Implies, IndexedBase, Not, Or, Sum, Symbol
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFunction
from sympy.printing.latex import LatexPrinter
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from avow.errors import ParameterError
from avow.numerics import intervals

Formula = Any
# Numbers, and nested lists of them for sequences, by variable.
Case = Mapping[Any, Any]


class _Ranged:
    """What binds an index that runs from one whole number to another."""

    args: Any
    func: Any

    @property
    def free_symbols(self) -> set[Any]:
        index, low, high, body = self.args
        return low.free_symbols | high.free_symbols | (body.free_symbols - {index})

    def _eval_subs(self, old: Any, new: Any) -> Any:
        index, low, high, body = self.args
        low, high = low.subs(old, new), high.subs(old, new)
        if old == index:
            return self.func(index, low, high, body)
        index, body = _apart(index, body, new)
        return self.func(index, low, high, body.subs(old, new))


class ForAll(_Ranged, BooleanFunction):
    """A condition on every whole number from one to another.

    Args:
        *args: the index, where it begins, where it ends, and the condition.
    """

    nargs = (4,)


class Exists(BooleanFunction):
    """A condition on some real number, or on some sequence."""

    nargs = (2,)

    @property
    def free_symbols(self) -> set[Any]:
        found, body = self.args
        return body.free_symbols - {found, *found.free_symbols}

    def _eval_subs(self, old: Any, new: Any) -> Exists:
        found, body = self.args
        if old == found or isinstance(found, IndexedBase):
            # A sequence that is bound keeps its name: nothing that takes a symbol's place may hold it.
            if isinstance(found, IndexedBase) and sympy.sympify(new).has(found):
                raise ValueError(f"{new} holds {found}, which is bound")
            return self if old == found else Exists(found, body.subs(old, new))
        found, body = _apart(found, body, new)
        return Exists(found, body.subs(old, new))


def _apart(index: Any, body: Any, new: Any) -> tuple[Any, Any]:
    """A bound index and its body, by a new name where a term that is put in has the old one."""
    if index not in sympy.sympify(new).free_symbols:
        return index, body
    fresh = sympy.Dummy(index.name, integer=index.is_integer, real=True)
    return fresh, body.xreplace({index: fresh})


class Row(_Ranged, sympy.Function):
    """The numbers of a row, as one thing that a function may take: two rows are equal where all their numbers are.

    Args:
        *args: the index, where it begins, where it ends, and the number at it.
    """

    nargs = (4,)

    def in_balls(self, case: Case) -> list[Any]:
        index, low, high, body = self.args
        return [_argument(body, {**case, index: i}) for i in _through(low, high, case)]


def _argument(term: Any, case: Case) -> Any:
    """What a function takes, in balls: a number, or a list of them."""
    return term.in_balls(case) if isinstance(term, Row) else value(term, case)


class Random(sympy.Function):
    """What depends on the law of a sequence of independent numbers, each normal of mean zero and variance one."""

    nargs = (2,)
    is_real = True

    @property
    def free_symbols(self) -> set[Any]:
        found, body = self.args
        return {symbol for symbol in body.free_symbols if not symbol.has(found)} - {found, *found.free_symbols}

    def _line(self, case: Case, term: Any) -> tuple[arb, dict[Any, arb]]:
        """What a term that is linear in the sequence is without it, and its slopes."""
        found = self.args[0]
        if not term.has(found):
            return value(term, case), {}
        if isinstance(term, Sum | sympy.Add):
            lines = [self._line(inside, part) for part, inside in _parts(term, case)]
            return intervals.total(constant for constant, _ in lines), _added([slopes for _, slopes in lines])
        if isinstance(term, sympy.Indexed) and term.base == found:
            return arb(0), {tuple(_whole(index, case) for index in term.indices): arb(1)}
        moving = [factor for factor in sympy.Mul.make_args(term) if factor.has(found)]
        if not isinstance(term, sympy.Mul) or len(moving) > 1:
            raise TypeError(f"{term} is not linear in {found}")
        factor = value(term / moving[0], case)
        constant, slopes = self._line(case, moving[0])
        return factor * constant, {place: factor * slope for place, slope in slopes.items()}


class Mean(Random):
    """The mean of a term over a sequence of independent numbers, each normal of mean zero and variance one.

    In balls it has a value where the term is a sum of products of exponentials that are linear in the sequence: the
    mean of each is e to half the sum of the squares of its slopes. That closed form is trusted.
    """

    def in_balls(self, case: Case) -> arb:
        return intervals.total(
            factor * (intervals.dot(slopes, slopes) / 2).exp()
            for factor, slopes in ((factor, list(slopes.values())) for factor, slopes in self._exponentials(case))
        )

    def _exponentials(self, case: Case, term: Any = None) -> list[tuple[arb, dict[Any, arb]]]:
        """A term as a sum of exponentials: the factor of each, and its slopes by places of the sequence."""
        term = self.args[1] if term is None else term
        if not term.has(self.args[0]):
            return [(value(term, case), {})]
        if isinstance(term, sympy.exp):
            constant, slopes = self._line(case, term.args[0])
            return [(constant.exp(), slopes)]
        if isinstance(term, Sum | sympy.Add):
            return [found for part, inside in _parts(term, case) for found in self._exponentials(inside, part)]
        if isinstance(term, sympy.Pow) and term.exp.is_Integer and term.exp > 0:
            factors = [term.base] * int(term.exp)
        elif isinstance(term, sympy.Mul):
            factors = list(term.args)
        else:
            raise TypeError(f"{term} has no mean in balls")
        out: list[tuple[arb, dict[Any, arb]]] = [(arb(1), {})]
        for factor in factors:
            more = self._exponentials(case, factor)
            out = [(a * b, _added([one, two])) for a, one in out for b, two in more]
        return out


class Chance(Random):
    """The probability of an event over a sequence of independent numbers, each normal of mean zero and variance one.

    In balls it is known where the event compares what is linear in the sequence, or the size of that, with a number; of
    any other event it lies between 0 and 1.
    """

    @property
    def sides(self) -> tuple[Any, Any] | None:
        """What is to be no more than what, if the event is of that kind."""
        event = self.args[1]
        if not isinstance(event, sympy.Le | sympy.Ge):
            return None
        low, high = (event.lhs, event.rhs) if isinstance(event, sympy.Le) else (event.rhs, event.lhs)
        factor, size = low.as_independent(sympy.Abs, as_Add=False)
        if isinstance(size, sympy.Abs) and factor.is_positive:
            low, high = size, high / factor
            return (low, high) if linear(low.args[0], self.args[0]) and not high.has(self.args[0]) else None
        return (low, high) if linear(low - high, self.args[0]) else None

    def in_balls(self, case: Case) -> arb:
        if self.sides is None:
            return arb(0.5, 0.5)
        low, high = self.sides
        size = isinstance(low, sympy.Abs)
        constant, slopes = self._line(case, low.args[0] if size else low - high)
        spread = intervals.dot(list(slopes.values()), list(slopes.values())).sqrt()
        if not size:
            return intervals.normal_cdf(-constant / spread)
        most = value(high, case)
        if not most >= 0:
            return arb(0) if most < 0 else arb(0.5, 0.5)
        return intervals.normal_cdf((most - constant) / spread) - intervals.normal_cdf((-most - constant) / spread)


def linear(term: Any, w: Any) -> bool:
    """Whether a term is linear in a sequence of random numbers."""
    if not term.has(w):
        return True
    if isinstance(term, sympy.Add):
        return all(linear(part, w) for part in term.args)
    if isinstance(term, Sum):
        return not any(part.has(w) for limit in term.limits for part in limit) and linear(term.function, w)
    if isinstance(term, sympy.Mul):
        moving = [factor for factor in term.args if factor.has(w)]
        return len(moving) == 1 and linear(moving[0], w)
    return isinstance(term, sympy.Indexed) and term.base == w and not any(index.has(w) for index in term.indices)


def _parts(term: Any, case: Case) -> list[tuple[Any, Case]]:
    """The terms of a sum, each with a case that has a number for its index."""
    if isinstance(term, sympy.Add):
        return [(part, case) for part in term.args]
    (index, low, high), others = term.limits[-1], term.limits[:-1]
    body = Sum(term.function, *others) if others else term.function
    return [(body, {**case, index: i}) for i in _through(low, high, case)]


def _added(lines: Iterable[Mapping[Any, arb]]) -> dict[Any, arb]:
    out: dict[Any, arb] = {}
    for line in lines:
        for place, slope in line.items():
            out[place] = out.get(place, arb(0)) + slope
    return out


def real(names: str) -> Any:
    """Real variables with these names in LaTeX; one alone comes as itself.

    Args:
        names: the names, with spaces between them.

    Returns:
        The variables, or the only one.
    """
    return _declared(names, real=True)


def whole(names: str) -> Any:
    """Whole variables with these names; one alone comes as itself.

    Args:
        names: the names, with spaces between them.

    Returns:
        The variables, or the only one.
    """
    return _declared(names, integer=True)


def sequence(names: str) -> Any:
    """Sequences of real numbers with these names, indexed from 1; one alone comes as itself.

    Args:
        names: the names, with spaces between them.

    Returns:
        The sequences, or the only one.
    """
    made = [IndexedBase(name, real=True) for name in names.split()]
    return made[0] if len(made) == 1 else made


def places(names: str) -> Any:
    """Sequences of whole numbers with these names, indexed from 1; one alone comes as itself.

    Args:
        names: the names, with spaces between them.

    Returns:
        The sequences, or the only one.
    """
    made = [IndexedBase(name, integer=True) for name in names.split()]
    return made[0] if len(made) == 1 else made


def function(names: str) -> Any:
    """Functions with these names, of numbers and rows, and real: any functions; one alone comes as itself.

    Args:
        names: the names, with spaces between them.

    Returns:
        The functions, or the only one.
    """
    made = [sympy.Function(name, real=True) for name in names.split()]
    return made[0] if len(made) == 1 else made


def _declared(names: str, **known: bool) -> Any:
    made = [Symbol(name, **known) for name in names.split()]
    return made[0] if len(made) == 1 else made


def each(index: Any, low: Any, high: Any, body: Formula) -> Formula:
    """`ForAll`, written in the order it is read.

    Args:
        index: the whole number that the condition speaks of.
        low: where it begins.
        high: where it ends; below `low` there is nothing to hold.
        body: the condition.

    Returns:
        The condition on all of them.
    """
    return ForAll(index, sympy.sympify(low), sympy.sympify(high), body)


class Spans(NamedTuple):
    """Where cases of a search lie: two ends by name, and how a case is made of one number of each.

    `meets` are hypotheses that no evaluation can see and that every case meets by how it is made. `denied` tells by how
    much the best there is in a case falls short of what the statement says there is: no evaluation sees that, either.
    """

    ranges: Mapping[str, Any]
    case: Any
    meets: tuple[Formula, ...] = ()
    denied: Any = None


@dataclass(frozen=True)
class Statement:
    """A statement with everything it says, as data.

    Attributes:
        variables: what each variable stands for, in words.
        given: the hypotheses.
        then: the parts of the conclusion, by name.
        where: abbreviations that formulas use, and the terms they stand for.
        terms: terms of the formulas that the words of a claim name, each by a name of its own.
        notes: how the statement models what it speaks of, each a short sentence; nothing in a proof rests on them.
        spans: where a search looks for counterexamples: two ends for each real variable, a `range` for each whole one,
            and for a sequence two ends and its shape; or `Spans`. None leaves the statement without a search.
    """

    variables: Mapping[Any, str]
    then: Mapping[str, Formula]
    given: Sequence[Formula] = ()
    where: Mapping[Any, Any] = field(default_factory=dict)
    terms: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    spans: Mapping[Any, Any] | Spans | None = None

    def __post_init__(self) -> None:
        if not self.then:
            raise ParameterError("statement: then", "{}", "must hold a conclusion", 'write then={"it": x > 0}')
        for name, formula in [*(("given", one) for one in self.given), *self.then.items()]:
            if not isinstance(formula, Boolean):
                raise ParameterError(f"statement: {name}", formula, "is not a formula", "compare two terms in it")
            if formula in (sympy.true, sympy.false):
                rule = f"is {formula} whatever the variables are"
                raise ParameterError(f"statement: {name}", formula, rule, "state what is not settled by itself")
            if trouble := unreadable(self.expanded(formula)):
                remedy = "write it with sums, exponentials and what else avow.theory.claims.formal knows"
                raise ParameterError(f"statement: {name}", text(formula), f"cannot be proved: {trouble}", remedy)
            if cases := cases_of_sums(self.expanded(formula)):
                rule, remedy = "holds a sum within a case", "write the sum of terms times Heaviside or Max"
                raise ParameterError(f"statement: {name}", text(cases), rule, remedy)
            strange = variables(self.expanded(formula)) - set(self.variables)
            if strange:
                names = ", ".join(sorted(map(str, strange)))
                raise ParameterError(
                    f"statement: {name}", names, "is not a variable of it", "declare it in `variables`"
                )

    def expanded(self, formula: Formula) -> Formula:
        """A formula with every abbreviation written out.

        Args:
            formula: the formula.
        """
        for _ in range(len(self.where)):
            formula = formula.xreplace(dict(self.where))
        return formula

    @functools.cached_property
    def hypotheses(self) -> list[Formula]:
        """The hypotheses, written out."""
        return [self.expanded(formula) for formula in self.given]

    @functools.cached_property
    def parts(self) -> dict[str, Formula]:
        """The parts of the conclusion, written out."""
        return {name: self.expanded(formula) for name, formula in self.then.items()}

    def without(self, place: int) -> Statement:
        """The statement without one of its hypotheses: a bolder one, and most often a false one.

        Args:
            place: which, counted from 0.
        """
        return replace(self, given=[formula for i, formula in enumerate(self.given) if i != place])

    def spelled(self) -> dict[str, str]:
        """The terms that words name, as text; each must occur in the statement."""
        formulas = [*self.given, *self.then.values(), *self.where.values(), *self.hypotheses, *self.parts.values()]
        said = {part for formula in formulas for part in sympy.preorder_traversal(formula)}
        for name, term in self.terms.items():
            if term not in said and self.expanded(term) not in said:
                raise ParameterError(f"statement: terms[{name!r}]", text(term), "is no term of it", "name one that is")
        return {name: text(term) for name, term in self.terms.items()}

    def latex(self) -> str:
        """The statement in LaTeX."""
        given = r",\ ".join(map(latex, self.given))
        then = r";\quad ".join(map(latex, self.then.values()))
        where = r",\ ".join(f"{latex(name)} = {latex(term)}" for name, term in self.where.items())
        line = rf"{given} \;\Rightarrow\; {then}" if given else then
        return rf"{line}, \quad\text{{where }} {where}" if where else line

    def assumptions(self) -> tuple[str, ...]:
        """The hypotheses and the notes, in words."""
        return (*map(text, self.given), *self.notes)

    def symbol_key(self) -> dict[str, str]:
        """What each variable and each abbreviation stands for, by its name as text."""
        named = {text(variable): words for variable, words in self.variables.items()}
        return named | {text(name): text(term) for name, term in self.where.items()}

    def violated(self, case: Case, part: str = "") -> str | None:
        """The name of a part that fails for certain in a case where every hypothesis holds; None if there is none.

        Args:
            case: numbers for the variables.
            part: the only part that is asked for, where it is given.
        """
        if not all(holds(formula, case) is True for formula in self.hypotheses):
            return None
        parts = {part: self.parts.get(part, sympy.true)} if part else self.parts
        return next((name for name, formula in parts.items() if holds(formula, case) is False), None)

    def unmet(self, case: Case) -> list[Formula]:
        """The hypotheses that a case may not meet; some it meets by how it is made.

        Args:
            case: numbers for the variables.
        """
        met = self.spans.meets if isinstance(self.spans, Spans) else ()
        return [one for one in self.hypotheses if one not in met and holds(one, case) is not True]

    def excess(self, case: Case) -> arb:
        """By how much a case breaks the statement, a ball: above zero it does.

        Args:
            case: numbers for the variables.
        """
        if unmet := self.unmet(case):
            return -abs(intervals.most([violation(formula, case) for formula in unmet]))
        denied = [self.spans.denied(case)] if isinstance(self.spans, Spans) and self.spans.denied else []
        seen = [violation(part, case) for part in self.parts.values() if not _only_proved(part)]
        return intervals.most(seen + denied)


def _only_proved(formula: Formula) -> bool:
    """Whether no evaluation can tell: that something exists, or how probable an event is whose law is not known."""
    return formula.has(Exists) or any(one.sides is None for one in formula.atoms(Chance))


def variables(formula: Formula) -> set[Any]:
    """The variables of a formula: symbols, functions, and sequences in place of their elements."""
    symbols = set(formula.free_symbols)
    elements = {symbol for symbol in symbols if isinstance(symbol, sympy.Indexed)}
    bases = {base for base in formula.atoms(IndexedBase)}
    bound = {one.args[0] for one in formula.atoms(Exists, Random)}
    labels = {base.label for base in bases}
    functions = {one.func for one in formula.atoms(AppliedUndef)}
    return (symbols - elements - labels - bound | bases | functions) - bound


def is_whole(term: Any) -> bool:
    """Whether a term is a whole number wherever it has a value."""
    term = sympy.sympify(term)
    parts = isinstance(term, sympy.Add | sympy.Mul) and all(map(is_whole, term.args))
    return bool(term.is_integer or parts or isinstance(term, sympy.floor))


def unreadable(formula: Formula) -> str:
    """What in a formula a proof cannot read, in words; empty if nothing.

    Provers take every term they do not know for some number, one and the same for all: so each must have a value
    wherever the conditions of logarithms, roots and quotients hold, and bind no name that nobody sees to be bound.
    """
    for term in sympy.preorder_traversal(formula):
        if isinstance(term, _BINDING) and not isinstance(term, Sum):
            return f"{text(term)} binds a name, as only sums and the conditions of this module may"
        if isinstance(term, sympy.Function) and not isinstance(term, _KNOWN):
            return f"{type(term).__name__} is none of the functions that are known to have a value everywhere"
        if isinstance(term, _NO_NUMBERS):
            return f"{term} is not a real number"
        if isinstance(term, Symbol) and _supposed(term) not in _VISIBLE:
            rule = "carries more than that it is real or whole"
            return f"{text(term)} {rule}: make it by real() or whole(), and what else is known a hypothesis"
        if isinstance(term, Sum) and not all(map(is_whole, itertools.chain(*term.limits))):
            return f"{text(term)} does not run from a whole number to a whole number"
    return ""


def _supposed(symbol: Symbol) -> frozenset[str]:
    """What SymPy supposes of a symbol."""
    return frozenset(name for name, value in symbol.assumptions0.items() if value)


def cases_of_sums(formula: Formula) -> Formula | None:
    """A choice between cases in a formula, one of which holds a sum; None if there is none.

    SymPy pulls a choice out of a sum within a sum even if it depends on the inner index, which is then bound no more.
    """
    return next((one for one in formula.atoms(sympy.Piecewise) if one.has(Sum)), None)


# ---- values in balls


def value(term: Any, case: Case) -> arb:
    """A term as a ball, for numbers in place of its variables."""
    if term in case:
        return intervals.ball(case[term])
    if isinstance(term, sympy.Indexed):
        element = case[term.args[0]]
        for index in term.args[1:]:
            element = element[_place(_whole(index, case))]
        return element if isinstance(element, arb) else intervals.ball(element)
    if isinstance(term, Sum):
        return intervals.total(value(part, inside) for part, inside in _parts(term, case))
    if isinstance(term, Random):
        return term.in_balls(case)
    if isinstance(term, AppliedUndef):
        return case[term.func](*(_argument(part, case) for part in term.args))
    if isinstance(term, Measured):
        return term.measured([value(part, case) for part in term.args])
    if isinstance(term, sympy.Rational):
        return intervals.ball(Fraction(int(term.p), int(term.q)))
    if isinstance(term, sympy.Piecewise):
        return _chosen(term, case)
    if isinstance(term, sympy.Derivative):
        return value(term.doit(), case)
    if term is sympy.pi:
        return arb.pi()
    if isinstance(term, sympy.Pow):
        base, exponent = term.args
        if exponent.is_Integer:
            power = functools.reduce(operator.mul, [value(base, case)] * abs(int(exponent)), arb(1))
            return power if exponent > 0 else 1 / power
        if exponent == sympy.Rational(1, 2):
            return value(base, case).sqrt()
        return (value(exponent, case) * value(base, case).log()).exp()
    compute = _OPERATIONS.get(type(term)) or next(
        (of for kind, of in _OPERATIONS.items() if isinstance(term, kind)), None
    )
    if compute is not None:
        return compute(*(value(part, case) for part in term.args))
    raise TypeError(f"{term} has no value in balls")


def _chosen(term: sympy.Piecewise, case: Case) -> arb:
    for branch, condition in term.args:
        found = holds(condition, case)
        if found is None:
            return arb("nan")
        if found:
            return value(branch, case)
    return arb("nan")


_OPERATIONS: dict[Any, Any] = {
    sympy.Add: lambda *parts: intervals.total(parts),
    sympy.Mul: lambda *parts: functools.reduce(operator.mul, parts),
    sympy.exp: lambda x: x.exp(),
    sympy.log: lambda x: x.log(),
    sympy.Abs: abs,
    sympy.Max: lambda *parts: intervals.most(parts),
    sympy.Min: lambda *parts: intervals.least(parts),
    sympy.sin: lambda x: x.sin(),
    sympy.cos: lambda x: x.cos(),
    sympy.tanh: lambda x: x.tanh(),
    sympy.erf: lambda x: x.erf(),
    sympy.erfc: lambda x: x.erfc(),
    sympy.floor: lambda x: x.floor(),
    sympy.KroneckerDelta: lambda i, j: arb(1) if i == j else arb(0) if i != j else arb("nan"),
}


def _whole(term: Any, case: Case) -> int:
    term = sympy.sympify(term)
    if term.is_Integer:
        return int(term)
    if isinstance(term, Symbol):
        return int(case[term])
    if isinstance(term, sympy.Indexed):
        number: Any = case[term.base]
        for index in term.indices:
            number = number[_place(_whole(index, case))]
        return int(number)
    found = term.xreplace({name: sympy.Integer(_whole(name, case)) for name in _innermost(term)})
    if not found.is_Integer:
        raise TypeError(f"{term} is {found}, and no whole number")
    return int(found)


def _innermost(term: Any) -> set[Any]:
    """The symbols of a term, and the elements of its sequences in place of what is in them."""
    elements = term.atoms(sympy.Indexed)
    return elements | (term.free_symbols - set().union(*(one.free_symbols for one in elements)))


def _place(index: int) -> int:
    """Where a list holds the number with an index of a sequence, which counts from 1."""
    if index < 1:
        raise TypeError(f"a sequence has no number {index}: its first is number 1")
    return index - 1


def _through(low: Any, high: Any, case: Case) -> range:
    return range(_whole(low, case), _whole(high, case) + 1)


def holds(formula: Formula, case: Case) -> bool | None:
    """Whether a formula holds in a case, as balls can tell; None where they cannot."""
    if formula is sympy.true or formula is sympy.false:
        return bool(formula)
    if isinstance(formula, ForAll):
        index, low, high, body = formula.args
        return _all(holds(body, {**case, index: i}) for i in _through(low, high, case))
    if isinstance(formula, And):
        return _all(holds(part, case) for part in formula.args)
    if isinstance(formula, Or):
        return _not(_all(_not(holds(part, case)) for part in formula.args))
    if isinstance(formula, Not):
        return _not(holds(formula.args[0], case))
    if isinstance(formula, Implies):
        return holds(Or(Not(formula.args[0]), formula.args[1]), case)
    if isinstance(formula, Equivalent):
        one, two = (holds(part, case) for part in formula.args)
        return None if one is None or two is None else one == two
    if isinstance(formula, Relational):
        return _compared(formula, case)
    if isinstance(formula, Exists):
        return None
    if isinstance(formula, Judged):
        return formula.holds([value(part, case) for part in formula.args])
    raise TypeError(f"{formula} cannot be evaluated")


class Judged(BooleanFunction):
    """A condition that only its own rule can judge, from the values of its terms; a subclass gives the rule."""

    def holds(self, values: Sequence[arb]) -> bool | None:
        raise NotImplementedError


class Measured(sympy.Function):
    """A number that only its own rule can tell, from the values of its arguments; a subclass gives the rule."""

    is_real = True

    def measured(self, values: Sequence[arb]) -> arb:
        raise NotImplementedError

    def exact(self, values: Sequence[Any]) -> Any:
        """The number for rational values, if it is rational for sure; else None."""
        return None


# What binds names beside the conditions of this module, and of what provers know nothing.
_BINDING = (sympy.concrete.expr_with_limits.ExprWithLimits, sympy.Limit, sympy.Subs, sympy.Lambda)
# Functions with a value wherever the conditions of logarithms, roots and quotients hold.
_KNOWN = (
    *(sympy.exp, sympy.log, sympy.Abs, sympy.sign, sympy.floor, sympy.ceiling, sympy.sin, sympy.cos),
    *(sympy.sinh, sympy.cosh, sympy.tanh, sympy.erf, sympy.erfc, sympy.Heaviside, sympy.KroneckerDelta),
    *(sympy.Piecewise, AppliedUndef, Random, Row, Measured),
)
_NO_NUMBERS = tuple(type(x) for x in (sympy.I, sympy.oo, -sympy.oo, sympy.zoo, sympy.nan))
_VISIBLE = [_supposed(Symbol("x", **known)) for known in ({}, {"real": True}, {"integer": True})]


class Prime(Judged):
    """Whether a whole number is prime."""

    nargs = (1,)

    def holds(self, values: Sequence[arb]) -> bool | None:
        exact = values[0].unique_fmpz()
        return None if exact is None else bool(sympy.isprime(int(exact)))


_SIGNS = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


def _compared(formula: Relational, case: Case) -> bool | None:
    exact = _difference(formula, case)
    if exact is not None:
        return bool(_SIGNS[formula.rel_op](exact, 0))
    one, two = value(formula.lhs, case), value(formula.rhs, case)
    if not (one.is_finite() and two.is_finite()):
        return None
    same = one.is_exact() and two.is_exact() and bool(one == two)
    sure = {
        "<=": (one <= two, one > two),
        "<": (one < two, one >= two),
        ">=": (one >= two, one < two),
        ">": (one > two, one <= two),
        "==": (same, one != two),
        "!=": (one != two, same),
    }[formula.rel_op]
    return True if sure[0] else False if sure[1] else None


def _difference(formula: Relational, case: Case) -> Fraction | None:
    """What the left side has over the right, if the case's numbers and the terms that do not cancel are rational."""
    sides = _fraction(formula.lhs, case), _fraction(formula.rhs, case)
    if sides[0] is not None and sides[1] is not None:
        return sides[0] - sides[1]
    left = _fraction(formula.lhs - formula.rhs, case)
    # What cancels must have a value, too.
    return left if left is not None and all(value(side, case).is_finite() for side in formula.args) else None


def _fraction(term: Any, case: Case) -> Fraction | None:
    try:
        return _rational(term, case)
    except (ArithmeticError, LookupError):
        return None


def _rational(term: Any, case: Case) -> Fraction:
    """A term's value as a fraction; an `ArithmeticError` where it is not rational for sure."""
    if isinstance(term, sympy.Rational):
        return Fraction(int(term.p), int(term.q))
    if isinstance(term, Symbol | sympy.Indexed):
        number = case[term.base if isinstance(term, sympy.Indexed) else term]
        for index in term.indices if isinstance(term, sympy.Indexed) else ():
            number = number[_place(_whole(index, case))]
        if isinstance(number, arb):
            raise ArithmeticError
        return Fraction(number)
    if isinstance(term, Sum):
        return sum((_rational(part, inside) for part, inside in _parts(term, case)), Fraction(0))
    if isinstance(term, sympy.Pow) and term.exp.is_Integer:
        return _rational(term.base, case) ** int(term.exp)
    compute = _EXACT.get(type(term))
    if compute is None and not isinstance(term, Measured):
        raise ArithmeticError
    parts = [_rational(part, case) for part in term.args]
    if compute is not None:
        return Fraction(compute(*parts))
    exact = term.exact([sympy.Rational(part.numerator, part.denominator) for part in parts])
    return _rational(sympy.sympify(exact), {})


# Functions that fractions go through as fractions.
_EXACT: dict[Any, Any] = {
    sympy.Add: lambda *parts: sum(parts),
    sympy.Mul: lambda *parts: functools.reduce(operator.mul, parts),
    sympy.Abs: abs,
    sympy.Max: max,
    sympy.Min: min,
    sympy.floor: lambda x: x // 1,
    sympy.KroneckerDelta: operator.eq,
}


def _all(answers: Iterable[bool | None]) -> bool | None:
    answers = list(answers)
    if any(answer is False for answer in answers):
        return False
    return True if all(answer is True for answer in answers) else None


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def violation(formula: Formula, case: Case) -> arb:
    """By how much a formula fails in a case: above zero it fails, below zero it holds."""
    if isinstance(formula, ForAll):
        index, low, high, body = formula.args
        failed = [violation(body, {**case, index: i}) for i in _through(low, high, case)]
        return intervals.most(failed) if failed else arb(-1)
    if isinstance(formula, And):
        return intervals.most([violation(part, case) for part in formula.args])
    if isinstance(formula, Or):
        return intervals.least([violation(part, case) for part in formula.args])
    if isinstance(formula, Not):
        return -violation(formula.args[0], case)
    if isinstance(formula, Implies):
        return (-violation(formula.args[0], case)).min(violation(formula.args[1], case))
    if isinstance(formula, Equivalent):
        one, two = formula.args
        return violation(Implies(one, two), case).max(violation(Implies(two, one), case))
    if isinstance(formula, Relational):
        # What fractions show to be equal is; balls could only say that it may be.
        if formula.rel_op == "==" and _difference(formula, case) == 0:
            return arb(-1)
        gap = value(formula.lhs, case) - value(formula.rhs, case)
        if gap.is_exact() and gap == 0:
            # An equality that is certain settles the formula, where a gap of nothing would leave it open.
            return arb(-1 if formula.rel_op in ("<=", ">=", "==") else 1)
        if formula.rel_op in ("==", "!="):
            return abs(gap) if formula.rel_op == "==" else -abs(gap)
        if formula.rel_op in ("<", ">") and _difference(formula, case) == 0:
            return arb(1)
        return gap if formula.rel_op in ("<=", "<") else -gap
    answer = holds(formula, case)
    return arb("nan") if answer is None else arb(-1 if answer else 1)


def instance(formula: Formula, case: Case) -> Formula:
    """A formula for numbers in place of its variables: what then runs over whole numbers is written out."""
    numbers = {
        name: sympy.Rational(*Fraction(number).as_integer_ratio())
        for name, number in case.items()
        if not isinstance(number, list | tuple)
    }
    formula = formula.xreplace(numbers).replace(lambda term: isinstance(term, ForAll | Sum), _written_out)
    elements = {}
    for element in formula.atoms(sympy.Indexed):
        number: Any = case.get(element.base)
        if number is not None:
            for index in element.indices:
                number = number[_place(int(index))]
            elements[element] = sympy.Rational(*Fraction(number).as_integer_ratio())
    return formula.xreplace(elements)


def _written_out(term: Any) -> Any:
    if isinstance(term, Sum):
        body, (index, low, high) = (
            (Sum(term.function, *term.limits[:-1]) if term.limits[1:] else term.function),
            term.limits[-1],
        )
        if not (low.is_Integer and high.is_Integer):
            return term
        return sympy.Add(*(body.xreplace({index: sympy.Integer(i)}) for i in range(int(low), int(high) + 1)))
    index, low, high, body = term.args
    if not (low.is_Integer and high.is_Integer):
        return term
    return And(*(body.xreplace({index: sympy.Integer(i)}) for i in range(int(low), int(high) + 1)))


# ---- cases of a search


def decimal(x: Any) -> Fraction:
    """A number that a search drew, as the short decimal it is: of fractions a case can fulfil an equality exactly."""
    return Fraction(round(float(x) * 1000), 1000)


def spread(statement: Statement) -> Spans:
    """Where cases of a statement lie, one number each: a sequence's numbers are drawn one by one."""
    spans = statement.spans
    if spans is None or isinstance(spans, Spans):
        return spans or Spans({}, None)
    ranges: dict[str, Any] = {}
    places: list[tuple[Any, tuple[int, ...] | None]] = []
    for variable, span in spans.items():
        shape = tuple(span[2:]) if isinstance(variable, IndexedBase) else None
        names = (
            [text(variable)]
            if shape is None
            else [
                text(variable) + _lowered(place) for place in itertools.product(*(range(1, size + 1) for size in shape))
            ]
        )
        ranges |= dict.fromkeys(names, span if isinstance(span, range) else (span[0], span[1]))
        places.append((variable, shape))

    def case(*numbers: Any) -> dict[Any, Any]:
        left = iter(numbers)
        return {variable: next(left) if shape is None else _nested(left, shape) for variable, shape in places}

    return Spans(ranges, case)


def _nested(numbers: Iterator[Any], shape: Sequence[int]) -> Any:
    return [next(numbers) if len(shape) == 1 else _nested(numbers, shape[1:]) for _ in range(shape[0])]


def _lowered(place: Sequence[Any]) -> str:
    return "".join(map(str, place)).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


# ---- words


class _Latex(LatexPrinter):
    def _print_ForAll(self, formula: ForAll) -> str:
        index, low, high, body = map(self._print, formula.args)
        return rf"\forall\, {low} \le {index} \le {high}:\ {body}"

    def _print_Exists(self, formula: Exists) -> str:
        found, body = map(self._print, formula.args)
        return rf"\exists\, {found}:\ {body}"

    def _print_Row(self, formula: Row) -> str:
        index, low, high, body = map(self._print, formula.args)
        return rf"\left({body}\right)_{{{index}={low}}}^{{{high}}}"

    def _print_Chance(self, formula: Chance) -> str:
        found, body = map(self._print, formula.args)
        return rf"\mathbb{{P}}_{{{found}}}\left[{body}\right]"

    def _print_Mean(self, formula: Mean, exp: str | None = None) -> str:
        found, body = map(self._print, formula.args)
        mean = rf"\mathbb{{E}}_{{{found}}}\left[{body}\right]"
        return mean if exp is None else rf"{mean}^{{{exp}}}"


class _Text(StrPrinter):
    # Terms have no say in how they are printed.
    printmethod = "_avow_text"

    def _print_Dummy(self, symbol: Any) -> str:
        return str(symbol.name)

    def _print_IndexedBase(self, base: IndexedBase) -> str:
        return self._print(base.label)

    def _print_ForAll(self, formula: ForAll) -> str:
        index, low, high, body = map(self._print, formula.args)
        return f"{body} for every {index} from {low} to {high}"

    def _print_Exists(self, formula: Exists) -> str:
        found, body = map(self._print, formula.args)
        return f"{body} for some {found}"

    def _print_Mean(self, formula: Mean) -> str:
        found, body = map(self._print, formula.args)
        return f"E_{found}({body})"

    def _print_Chance(self, formula: Chance) -> str:
        found, body = map(self._print, formula.args)
        return f"P_{found}({body})"

    def _print_Row(self, formula: Row) -> str:
        index, low, high, body = map(self._print, formula.args)
        return f"({body})_{{{index}={low}..{high}}}"

    def _print_Implies(self, formula: Implies) -> str:
        return " implies ".join(map(self._print, formula.args))

    def _print_Equivalent(self, formula: Equivalent) -> str:
        return " exactly when ".join(map(self._print, formula.args))

    def _print_And(self, formula: And) -> str:
        return " and ".join(map(self._print, formula.args))

    def parenthesize(self, item: Any, level: Any, strict: bool = False) -> str:
        if isinstance(item, Sum | ForAll | Exists):
            return f"({self._print(item)})"
        return super().parenthesize(item, level, strict)

    def _print_Sum(self, formula: Sum) -> str:
        line = self.parenthesize(formula.function, PRECEDENCE["Mul"])
        for limit in formula.limits:
            index, low, high = map(self._print, limit)
            line = f"Σ_{{{index}={low}..{high}}} {line}"
        return line

    def _print_Indexed(self, formula: Any) -> str:
        places = [self._print(index) for index in formula.indices]
        if all(place.isdigit() for place in places):
            return self._print(formula.base) + _lowered(places)
        lowered = places[0] if len(places) == 1 and places[0].isalnum() else f"({','.join(places)})"
        return f"{self._print(formula.base)}_{lowered}"

    def _print_exp(self, formula: Any) -> str:
        inside = self._print(formula.args[0])
        return f"e^{inside}" if re.fullmatch(r"\w", inside) else f"e^({inside})"

    def _print_Rational(self, number: Any) -> str:
        # Two decimals, as a reader would write them, but not what is below one.
        return f"{float(number):.2f}" if number.q in (50, 100) and number > 1 else str(super()._print_Rational(number))

    def _print_KroneckerDelta(self, formula: Any) -> str:
        return f"[{' = '.join(map(self._print, formula.args))}]"

    def _print_log(self, formula: Any) -> str:
        return f"ln({self._print(formula.args[0])})"

    def _print_Relational(self, formula: Relational) -> str:
        sign = {"<=": "≤", ">=": "≥", "==": "=", "!=": "≠"}.get(formula.rel_op, formula.rel_op)
        return f"{self._print(formula.lhs)} {sign} {self._print(formula.rhs)}"


_GREEK = {
    "varepsilon": "ε",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "eta": "η",
    "ell": "ℓ",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "sigma": "σ",
    "tau": "τ",
    "theta": "θ",
    "phi": "φ",
    "rho": "ρ",
    "omega": "ω",
    "Delta": "Δ",
    "epsilon": "ϵ",
}


def text(term: Any) -> str:
    """A term or a formula in a line of plain text."""
    line = _Text().doprint(term)
    # The longest first: there is an "eta" in theta.
    for name, letter in sorted(_GREEK.items(), key=lambda one: -len(one[0])):
        line = line.replace(name, letter)
    return line.replace("**", "^").replace("*", "·")


def latex(term: Any) -> str:
    """A term or a formula in LaTeX."""
    return _Latex({"ln_notation": True}).doprint(term)
