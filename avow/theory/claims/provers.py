r"""What decides whether a formula follows from others: z3 over the reals, SymPy beside it, and balls on boxes.

z3 knows arithmetic: what is none (an exponential, a logarithm, a sum, an element of a sequence) is an unknown real
number to it, the same for the same term. Of exponentials it is given that they are positive and that sums of exponents
are products, of roots what they are roots of. So whatever it proves holds, and what it does not may hold all the
same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import sympy
import z3
from sympy import And, Equivalent, Implies, Indexed, Not, Or, Sum, Symbol, exp
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from avow.numerics import intervals
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Case, Exists, ForAll, Formula, Random, Row, holds, text

# How far z3 looks before it gives up, in its own units, so that no verdict depends on how busy a machine is.
EFFORT = 4_000_000
# What binds a name.
BINDERS = (Sum, ForAll, Exists, Random, Row)
_HEIGHT = "index "


# ---- terms in one form


def canonical(formula: Any) -> Any:
    """A formula in which every sum is linear: factors without the index before it, and each term by itself."""
    return formula.replace(lambda term: isinstance(term, Sum), _linear) if formula.has(Sum) else formula


def _linear(total: Sum) -> Any:
    body, (index, low, high) = total.function, total.limits[-1]
    if len(total.limits) > 1:
        body = canonical(Sum(body, *total.limits[:-1]))
    # SymPy would settle an equation about no term, or one, before any prover sees it.
    length = high - low
    if length.is_Integer and length <= 0:
        return canonical(refreshed(body).xreplace({index: low})) if length == 0 else sympy.Integer(0)
    # A logarithm is the same unknown inside a sum and outside of it: what it is of stays as it was written.
    kept = {one: sympy.Dummy(real=True) for one in body.atoms(sympy.log)}
    body = sympy.expand(_split(body.xreplace(kept)), power_exp=False, log=False, power_base=False)
    body = body.xreplace({dummy: one for one, dummy in kept.items()})
    out: Any = sympy.Integer(0)
    for term in sympy.Add.make_args(body):
        outside, inside = sympy.Mul(sympy.Integer(1)), []
        for factor in sympy.Mul.make_args(term):
            if index in factor.free_symbols:
                inside.append(factor)
            else:
                outside *= factor
        rest = sympy.Mul(*inside)
        out += outside * (Sum(rest, (index, low, high)) if inside else _Count(low, high))
    return out


def _split(term: Any) -> Any:
    """A term in which no exponent is a sum of terms: SymPy's own way would make products of sums, too."""

    def apart(power: Any) -> Any:
        parts = sympy.Add.make_args(sympy.expand(power.args[0]))
        return sympy.Mul(*map(exp, parts), evaluate=False) if len(parts) > 1 else exp(parts[0])

    return term.replace(lambda one: isinstance(one, exp), apart) if term.has(exp) else term


class _Count(sympy.Function):
    """How many whole numbers lie between two: their distance and one more, or none."""

    nargs = (2,)
    is_real = True


# ---- z3


@dataclass(frozen=True)
class Answer:
    """Whether a formula follows, which provers say so, why not, and which premises were not needed."""

    by: str = ""
    trouble: str = ""
    idle: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.by)


def follows(goal: Formula, premises: Sequence[Formula]) -> Answer:
    """Whether premises imply a goal, for all values of their variables."""
    return _follows(goal, tuple(premises))


# A proof asks the same of many of its terms.
@functools.lru_cache(maxsize=4096)
def _follows(goal: Formula, premises: tuple[Formula, ...]) -> Answer:
    found = _by_z3(goal, premises)
    if isinstance(found, str):
        return Answer(trouble=found)
    idle = [
        place
        for place in range(len(premises))
        if _by_z3(goal, [*premises[:place], *premises[place + 1 :]], EFFORT // 20) is True
    ]
    second = " and SymPy" if _by_signs(goal, premises) else ""
    return Answer(f"z3{second}", "", tuple(idle))


def _by_z3(goal: Formula, premises: Sequence[Formula], effort: int = EFFORT) -> Literal[True] | str:
    """True where z3 proves it, else the trouble in words."""
    translator = _Translator()
    try:
        facts = [translator.boolean(canonical(premise)) for premise in premises]
        wanted = translator.boolean(canonical(goal))
    except TypeError as error:
        return str(error)
    solver = z3.SolverFor("QF_NRA")
    solver.set("rlimit", effort)
    solver.set("timeout", 20_000)
    solver.add(*facts, *translator.known, z3.Not(wanted))
    outcome = solver.check()
    if outcome == z3.unsat:
        return True
    if outcome == z3.unknown:
        return f"z3 cannot decide it ({solver.reason_unknown()})"
    return f"it does not follow: {translator.shown(solver.model())}"


class _Translator:
    """Formulas in z3's terms: arithmetic as it is, and every other term an unknown real number."""

    def __init__(self) -> None:
        self.unknowns: dict[Any, Any] = {}
        self.known: list[Any] = []

    def boolean(self, formula: Any) -> Any:
        if formula in (sympy.true, True, sympy.false, False):
            return z3.BoolVal(bool(formula))
        for kind, combine in ((And, z3.And), (Or, z3.Or), (Not, z3.Not), (Implies, z3.Implies)):
            if isinstance(formula, kind):
                return combine(*map(self.boolean, formula.args))
        if isinstance(formula, Equivalent):
            one, *others = map(self.boolean, formula.args)
            return z3.And(*(one == other for other in others))
        if isinstance(formula, Relational):
            one, two = self.real(formula.lhs), self.real(formula.rhs)
            return {"<=": one <= two, "<": one < two, ">=": one >= two, ">": one > two}.get(
                formula.rel_op, one == two if formula.rel_op == "==" else one != two
            )
        if isinstance(formula, ForAll) and formula.args[3] == sympy.true:
            return z3.BoolVal(True)
        if isinstance(formula, Boolean):
            return self._unknown(unbound(formula), z3.Bool)
        raise TypeError(f"{formula} is not a formula")

    def real(self, term: Any) -> Any:
        if term.is_Rational:
            return z3.RealVal(str(term))
        if isinstance(term, sympy.Add):
            return z3.Sum(*map(self.real, term.args))
        if isinstance(term, sympy.Mul):
            return z3.Product(*map(self.real, term.args))
        if isinstance(term, exp):
            return self._exponential(term)
        if isinstance(term, sympy.Pow):
            return self._power(*term.args)
        if isinstance(term, sympy.Abs):
            inside = self.real(term.args[0])
            return z3.If(inside >= 0, inside, -inside)
        if isinstance(term, sympy.Max | sympy.Min):
            first, *others = map(self.real, term.args)
            for other in others:
                better = other > first if isinstance(term, sympy.Max) else other < first
                first = z3.If(better, other, first)
            return first
        if isinstance(term, sympy.Piecewise):
            out = self._unknown(("elsewhere", unbound(term)), z3.Real)
            for branch, condition in reversed(term.args):
                out = z3.If(self.boolean(condition), self.real(branch), out)
            return out
        if isinstance(term, sympy.Heaviside):
            inside, at_zero = map(self.real, term.args)
            return z3.If(inside > 0, z3.RealVal(1), z3.If(inside < 0, z3.RealVal(0), at_zero))
        if isinstance(term, sympy.tanh):
            return self.real((exp(2 * term.args[0]) - 1) / (exp(2 * term.args[0]) + 1))
        if isinstance(term, sympy.KroneckerDelta):
            one, two = map(self.real, term.args)
            return z3.If(one == two, z3.RealVal(1), z3.RealVal(0))
        if isinstance(term, _Count):
            low, high = map(self.real, term.args)
            return z3.If(high >= low - 1, high - low + 1, z3.RealVal(0))
        return self._unknown(unbound(term), z3.Real)

    def _unknown(self, term: Any, kind: Any) -> Any:
        if term not in self.unknowns:
            self.unknowns[term] = kind(
                f"{len(self.unknowns)}: {text(term) if not isinstance(term, tuple) else 'other'}"
            )
            if term == sympy.pi:
                self.known += [
                    self.unknowns[term] > z3.RealVal("3.1415926"),
                    self.unknowns[term] < z3.RealVal("3.1415927"),
                ]
        return self.unknowns[term]

    def _exponential(self, term: Any) -> Any:
        """An exponential as a product of powers of exponentials, each of which is above zero."""
        out = z3.RealVal(1)
        for part in sympy.Add.make_args(sympy.expand(canonical(term.args[0]))):
            factor, rest = part.as_coeff_Mul()
            if not factor.is_Rational:
                factor, rest = sympy.Integer(1), part
            base = exp(rest / factor.q)
            if not isinstance(base, exp):
                out = out * self._power(base, sympy.Integer(int(factor.p)))
                continue
            unknown = self._unknown(unbound(base), z3.Real)
            self.known.append(unknown > 0)
            out = out * _to_power(unknown, int(factor.p))
        return out

    def _power(self, base: Any, exponent: Any) -> Any:
        if exponent.is_Integer:
            return _to_power(self.real(base), int(exponent))
        if exponent.is_Rational:
            below, root = self.real(base), self._unknown(("root", unbound(base), exponent.q), z3.Real)
            self.known.append(z3.Implies(below >= 0, z3.And(root >= 0, _to_power(root, int(exponent.q)) == below)))
            return _to_power(root, int(exponent.p))
        return self._open_power(base, exponent)

    def _open_power(self, base: Any, exponent: Any) -> Any:
        """A power whose exponent is no number: an unknown, of which a step more is the base once more."""
        unknown, below = self._unknown(unbound(base**exponent), z3.Real), self.real(base)
        self.known.append(z3.Implies(below > 0, unknown > 0))
        steps, rest = exponent.as_coeff_Add()
        if steps.is_Integer and steps != 0:
            shorter = self._unknown(unbound(base**rest), z3.Real)
            known = below != 0 if rest.is_integer else below > 0
            self.known.append(z3.Implies(known, unknown == shorter * _to_power(below, int(steps))))
        return unknown

    def shown(self, model: Any) -> str:
        """A case that z3 found, in words."""
        found = [
            (text(term), model.eval(unknown)) for term, unknown in self.unknowns.items() if not isinstance(term, tuple)
        ]
        case = ", ".join(f"{name} = {number}" for name, number in found[:6]) or "whatever the variables are"
        opaque = next((text(term) for term in self.unknowns if not isinstance(term, tuple | Symbol | Indexed)), "")
        return f"{case}; of terms like {opaque} no more is known than the steps say" if opaque else case


def _to_power(base: Any, exponent: int) -> Any:
    # One over nothing is some number to z3; it is the same in every power.
    factor, out = (base if exponent >= 0 else 1 / base), z3.RealVal(1)
    for _ in range(abs(exponent)):
        out = out * factor
    return out


def unbound(term: Any) -> Any:
    """A term whose bound indices are named by how much they bind, so that equal terms are the same."""
    return term.replace(lambda one: isinstance(one, BINDERS), _by_height) if term.has(*BINDERS) else term


def _by_height(one: Any) -> Any:
    # Those inside have their names already, those outside have not: no name of this kind is free here.
    inner = [name for part in one.args for below in part.atoms(*BINDERS) for name in bound_by(below)]
    heights = [int(str(getattr(name, "label", name)).removeprefix(_HEIGHT)) for name in inner]
    return renamed(one, itertools.count(1 + max(heights, default=0)))


def refreshed(term: Any) -> Any:
    """A term whose bound indices are like no other symbol, so that nothing put into it is caught."""
    if not term.has(*BINDERS):
        return term
    return term.replace(lambda one: isinstance(one, BINDERS), lambda one: renamed(one, None))


def renamed(one: Any, heights: Iterator[int] | None) -> Any:
    """A sum or a quantifier that binds names by these heights, or names of its own where none are given."""
    own: dict[Any, Any] = {}
    for name in bound_by(one):
        old = name.label if isinstance(name, sympy.IndexedBase) else name
        known = {"integer": old.is_integer, "real": old.is_real}
        new = Symbol(f"{_HEIGHT}{next(heights)}", **known) if heights else sympy.Dummy(old.name, **known)
        own[name] = sympy.IndexedBase(new, real=True) if isinstance(name, sympy.IndexedBase) else new
    if isinstance(one, Sum):
        # An end of a sum may speak of the sums around it, and of no index that is bound further in.
        limits = [
            (own[index], *(end.xreplace({name: own[name] for name, *_ in one.limits[place + 1 :]}) for end in ends))
            for place, (index, *ends) in enumerate(one.limits)
        ]
        return Sum(one.function.xreplace(own), *limits)
    (name, *ends, body), (new,) = one.args, own.values()
    if isinstance(name, sympy.IndexedBase):
        own |= {element: new[element.indices] for element in body.atoms(Indexed) if element.base == name}
    return one.func(new, *ends, body.xreplace(own))


def bound_by(one: Any) -> list[Any]:
    """The names that a sum or a quantifier binds: a sum of sums binds several, the innermost first."""
    return [limit[0] for limit in one.limits] if isinstance(one, Sum) else [one.args[0]]


# ---- SymPy as a second opinion


def bounds(premises: Sequence[Formula]) -> dict[Symbol, Any]:
    """What premises say of single symbols, as terms that SymPy can see it in: x > 2 is two and something positive."""
    known: dict[Symbol, Any] = {}
    for premise in premises:
        for part in And.make_args(premise):
            if not isinstance(part, Relational) or part.rel_op not in ("<=", "<", ">=", ">"):
                continue
            below, above = (part.rhs, part.lhs) if part.rel_op in (">=", ">") else (part.lhs, part.rhs)
            strict = part.rel_op in ("<", ">")
            if isinstance(above, Symbol) and below.is_Rational and above not in known:
                known[above] = below + sympy.Dummy(above.name, **{"positive" if strict else "nonnegative": True})
    return known


def same(a: Any, b: Any, premises: Sequence[Formula] = ()) -> bool:
    """Whether SymPy sees that two terms are equal, symbols being as positive as premises say."""
    difference = canonical(a) - canonical(b)
    # Sums stay closed: SymPy lets one that ends before it begins be negative, where here it is empty.
    sums = {one: sympy.Dummy(real=True) for one in unbound(difference).atoms(Sum)}
    difference = unbound(difference).xreplace(sums).xreplace(bounds(premises))
    return bool(sympy.simplify(sympy.expand(difference)) == 0)


def _by_signs(goal: Formula, premises: Sequence[Formula]) -> bool:
    """Whether SymPy sees a goal too, by the signs of its terms."""
    if not isinstance(goal, Relational) or goal.has(ForAll, Exists):
        return False
    known = bounds(premises)
    try:
        if goal.rel_op == "==":
            return same(goal.lhs, goal.rhs, premises)
        term = canonical(goal.lhs - goal.rhs if goal.rel_op in (">=", ">") else goal.rhs - goal.lhs).xreplace(known)
        sign = "is_nonnegative" if goal.rel_op in ("<=", ">=") else "is_positive"
        return any(getattr(form(term), sign) for form in (sympy.factor, sympy.expand))
    except Exception:
        # A second opinion may fail; the first stands.
        return False


# ---- balls


def cover(formula: Formula, box: Mapping[Symbol, tuple[Any, Any]], most: int, says: str) -> int:
    """How many pieces of a box it took for balls to show a formula on each."""
    pieces = [tuple((Fraction(low), Fraction(high)) for low, high in box.values())]
    tried = 0
    with intervals.precision(64):
        while pieces:
            piece = pieces.pop()
            tried += 1
            case: Case = {x: intervals.interval(*ends) for x, ends in zip(box, piece, strict=True)}
            if holds(formula, case):
                continue
            if tried > most:
                where = ", ".join(f"[{float(low):.6g}, {float(high):.6g}]" for low, high in piece)
                raise Unproved(f"{says or text(formula)}: still open after {most} pieces, at {where}")
            widest = max(range(len(piece)), key=lambda i: piece[i][1] - piece[i][0])
            low, high = piece[widest]
            middle = (low + high) / 2
            pieces += [(*piece[:widest], half, *piece[widest + 1 :]) for half in ((low, middle), (middle, high))]
    return tried
