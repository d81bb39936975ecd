r"""Rules of real analysis: exponentials, logarithms, slopes, and numbers in balls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy import And, Equivalent, Implies, Sum, Symbol, exp, log

from avow.numerics import intervals
from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Formula, holds, is_whole, text
from avow.theory.claims.kernel import Kernel, Step, conditions, put
from avow.theory.claims.provers import cover, follows, same

# With their quotients, roots and logarithms where these have values, all that `rising` takes.
SMOOTH = (exp, log, sympy.sin, sympy.cos, sympy.tanh, sympy.sinh, sympy.cosh, sympy.erf, sympy.erfc)


class Analysis(Kernel):
    """What is known of functions of real numbers."""

    def exp_monotone(self, a: Any, b: Any, *uses: Step) -> Step:
        r""":math:`a \le b \iff e^a \le e^b`."""
        return self._rule(Equivalent(a <= b, exp(a) <= exp(b)), "exp rises", uses, a, b)

    def exp_tangent(self, u: Any, *uses: Step) -> Step:
        r""":math:`e^u \ge 1 + u`: a convex function stays above its tangent."""
        return self._rule(exp(u) >= 1 + u, "exp is above its tangent", uses, u)

    def log_monotone(self, a: Any, b: Any, *uses: Step) -> Step:
        r""":math:`a \le b \iff \ln a \le \ln b`, for positive a and b."""
        return self._rule(Equivalent(a <= b, log(a) <= log(b)), "ln rises", uses, log(a), log(b))

    def discriminant(self, form: Any, y: Symbol, *uses: Step) -> Step:
        r""":math:`c_0 + c_1 y + c_2 y^2 \ge 0` for every real y gives :math:`c_1^2 \le 4 c_0 c_2`."""
        self._for_any(y)
        self._needed(uses, (True, form >= 0))
        guard = conditions(self.statement.expanded(form))
        form = sympy.Poly(sympy.expand(self.statement.expanded(form)), y)
        if form.degree() > 2 or any(y in part.free_symbols for part in form.all_coeffs()) or y.is_integer:
            raise Unproved(f"{text(form.as_expr())} is not quadratic in a real {text(y)}")
        none, one, two = (form.coeff_monomial(y**power) for power in range(3))
        return self._rule(one**2 <= 4 * none * two, "a quadratic that is never negative", uses, guard=guard)

    def log_same(self, one: Any, other: Any, *uses: Step) -> Step:
        r""":math:`\ln a = \ln b` where the steps say that a = b > 0."""
        if not (isinstance(one, log) and isinstance(other, log)):
            raise Unproved(f"{text(one)} and {text(other)} are not both logarithms")
        self._needed(uses, (True, And(sympy.Eq(one.args[0], other.args[0], evaluate=False), one.args[0] > 0)))
        return self._add(sympy.Eq(one, other, evaluate=False), "ln of the same number", "", uses)

    def same_value(self, function: Any, a: Any, b: Any) -> Step:
        r""":math:`a = b \Rightarrow f(a) = f(b)`, whatever the function is."""
        a, b = map(sympy.sympify, (a, b))
        # A name of its own first: what is put in for it is not caught by a sum that the function makes.
        place = sympy.Dummy(real=True, integer=True if is_whole(a) and is_whole(b) else None)
        one, other = (put(sympy.sympify(function(place)), place, term) for term in (a, b))
        return self._rule(Implies(sympy.Eq(a, b), sympy.Eq(one, other)), "a function has one value", ())

    def sine_of_rational(self, x: Any) -> Step:
        r""":math:`x \ne 0 \Rightarrow \sin x \ne 0` for rational x, since :math:`\pi` is irrational (Lambert)."""
        x = self.statement.expanded(sympy.sympify(x))
        if not x.is_rational:
            raise Unproved(f"{text(x)} is not known to be rational")
        return self._rule(Implies(sympy.Ne(x, 0), sympy.Ne(sympy.sin(x), 0)), "π is irrational", ())

    def equal(self, a: Any, b: Any, *uses: Step, says: str = "") -> Step:
        """Two terms are the same by algebra, exponentials, logarithms and trigonometry, as SymPy knows them."""
        self._defined((a, b), uses)
        a, b = map(self.statement.expanded, map(sympy.sympify, (a, b)))
        known = [step.formula for step in uses]
        if not same(a, b, known):
            raise Unproved(f"{says or 'equality'}: SymPy cannot see that {a} is {b}")
        return self._add(sympy.Eq(a, b, evaluate=False), "SymPy", says, uses)

    def rising(self, term: Any, x: Symbol, start: Any, *uses: Step, says: str = "") -> Step:
        r""":math:`f \ge 0` from `start` on: it is so there, and its slope is so from there on.

        Args:
            term: f, smooth from `start` on.
            x: its variable, not one of the statement's.
            start: where it begins.
            *uses: the steps that say :math:`f(start) \ge 0`, :math:`x \ge start \Rightarrow f'(x) \ge 0`, and whatever
                shows that every quotient, root and logarithm in f has a value from `start` on.
        """
        beyond = x >= start
        self._for_any(x, start)
        for condition in (term.subs(x, start) >= 0, Implies(beyond, sympy.diff(term, x) >= 0)):
            if not follows(condition, [step.formula for step in uses]):
                raise Unproved(f"{says or text(term)}: no step says that {text(condition)}")
        if not all(isinstance(part, SMOOTH) for part in term.atoms(sympy.Function)) or term.has(sympy.Derivative, Sum):
            raise Unproved(f"{says or text(term)}: is not known to be smooth")
        for condition in conditions(term):
            if not follows(Implies(beyond, condition), [step.formula for step in uses]):
                raise Unproved(f"{says or text(term)}: may have no value, for want of {text(condition)}")
        return self._add(Implies(beyond, term >= 0), "its slope", says, uses)

    def computed(self, formula: Formula, says: str = "") -> Step:
        """A formula about numbers alone, in balls."""
        formula = self.statement.expanded(formula)
        if formula.free_symbols:
            raise Unproved(f"{text(formula)} is not about numbers alone")
        if not intervals.decided(lambda: holds(formula, {}), most=4096):
            raise Unproved(f"{says or text(formula)}: balls cannot show it")
        return self._add(formula, "balls", says, ())

    def covered(
        self, formula: Formula, box: Mapping[Symbol, tuple[Any, Any]], says: str = "", most: int = 20000
    ) -> Step:
        """A formula on a box, by balls on pieces of it that are halved until it shows."""
        formula = self.statement.expanded(formula)
        pieces = cover(formula, box, most, says)
        within = And(*(And(low <= x, x <= high) for x, (low, high) in box.items()))
        return self._add(Implies(within, formula), f"balls on {pieces:,} pieces", says, ())
