r"""Rules of finite sums, of quantifiers over whole numbers, and induction."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import And, Implies, Sum, Symbol

from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Exists, Formula, Row, each, text
from avow.theory.claims.kernel import Kernel, Step, defined_by, put, when_so


class Sums(Kernel):
    """What is known of finite sums, and of what holds for every number or for some."""

    def sum_most(self, smaller: Any, larger: Any, limits: tuple[Any, Any, Any], *uses: Step, when: Any = True) -> Step:
        r""":math:`\sum_j f_j \le \sum_j g_j` where every :math:`f_j \le g_j`, which the steps must say for any j."""
        index, low, high = self._limits(limits, when)
        self._needed(uses, (And(when, low <= index, index <= high), smaller <= larger))
        claimed = when_so(when, Sum(smaller, limits) <= Sum(larger, limits))
        return self._rule(claimed, "sums keep the order of their terms", uses)

    def sum_member(self, term: Any, limits: tuple[Any, Any, Any], member: Any, *uses: Step, when: Any = True) -> Step:
        r""":math:`f_i \le \sum_j f_j` where no term is negative, which the steps must say for any j."""
        index, low, high = self._limits(limits, when)
        self._needed(uses, (And(when, low <= index, index <= high), term >= 0))
        self._whole(member)
        term = self.statement.expanded(term)
        claimed = when_so(And(when, low <= member, member <= high), put(term, index, member) <= Sum(term, limits))
        guard = defined_by(term, {index: member})
        return self._rule(claimed, "no term exceeds a sum of what is not negative", uses, guard=guard)

    def sum_first(self, term: Any, limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`\sum_{j=a}^b f_j = f_a + \sum_{j=a+1}^b f_j` where :math:`a \le b`."""
        index, low, high = self._limits(limits)
        whole_sum, parts = Sum(term, limits), put(term, index, low) + Sum(term, (index, low + 1, high))
        claimed = Implies(low <= high, sympy.Eq(whole_sum, parts, evaluate=False))
        return self._rule(claimed, "a sum without its first term", (), guard=defined_by(term, {index: low}))

    def sum_split(self, term: Any, limits: tuple[Any, Any, Any], middle: Any) -> Step:
        r""":math:`\sum_{j=a}^b f_j = \sum_{j=a}^m f_j + \sum_{j=m+1}^b f_j` where :math:`a - 1 \le m \le b`."""
        index, low, high = self._limits(limits)
        self._whole(middle)
        parts = Sum(term, (index, low, middle)) + Sum(term, (index, middle + 1, high))
        within = And(low - 1 <= middle, middle <= high)
        return self._rule(Implies(within, sympy.Eq(Sum(term, limits), parts, evaluate=False)), "a sum in two", ())

    def sum_last(self, term: Any, limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`\sum_{j=a}^{b+1} f_j = \sum_{j=a}^b f_j + f_{b+1}` where :math:`a \le b + 1`."""
        index, low, high = self._limits(limits)
        longer, parts = Sum(term, (index, low, high + 1)), Sum(term, limits) + put(term, index, high + 1)
        claimed = Implies(low <= high + 1, sympy.Eq(longer, parts, evaluate=False))
        return self._rule(claimed, "a sum with one more term", (), guard=defined_by(term, {index: high + 1}))

    def sum_empty(self, term: Any, limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`\sum_{j=a}^b f_j = 0` where :math:`b < a`."""
        _, low, high = self._limits(limits)
        claimed = Implies(high < low, sympy.Eq(Sum(term, limits), 0, evaluate=False))
        return self._rule(claimed, "a sum of nothing", ())

    def sum_same(
        self, one: Any, other: Any, limits: tuple[Any, Any, Any], *uses: Step, times: Any = 1, when: Any = True
    ) -> Step:
        r""":math:`\sum_j f_j = c \sum_j g_j` where every :math:`f_j = c g_j`, which the steps must say for any j."""
        index, low, high = self._limits(limits, when)
        self._for_any(index, times)
        equal = sympy.Eq(one, times * other, evaluate=False)
        self._needed(uses, (And(when, low <= index, index <= high), equal))
        claimed = when_so(when, sympy.Eq(Sum(one, limits), times * Sum(other, limits), evaluate=False))
        return self._rule(claimed, "sums of the same terms", uses)

    def row_same(self, one: Any, other: Any, limits: tuple[Any, Any, Any], *uses: Step, when: Any = True) -> Step:
        """Rows are the same where all their numbers are, which the steps must say for any place."""
        index, low, high = self._limits(limits, when)
        self._needed(uses, (And(when, low <= index, index <= high), sympy.Eq(one, other, evaluate=False)))
        claimed = when_so(when, sympy.Eq(Row(*limits, one), Row(*limits, other), evaluate=False))
        return self._rule(claimed, "rows of the same numbers", uses)

    def sum_delta(self, term: Any, limits: tuple[Any, Any, Any], place: Any) -> Step:
        r""":math:`\sum_{j=a}^b f_j \delta_{ij} = f_i` where :math:`a \le i \le b`: all other terms are zero."""
        index, low, high = self._limits(limits)
        self._for_any(index, place)
        self._whole(place)
        term = sympy.sympify(term)
        only = Sum(term * sympy.KroneckerDelta(index, place), limits), put(term, index, place)
        claimed = Implies(And(low <= place, place <= high), sympy.Eq(*only, evaluate=False))
        return self._rule(claimed, "a sum with one term that is not zero", (), guard=defined_by(term, {index: place}))

    def sum_swap(self, term: Any, one: tuple[Any, Any, Any], two: tuple[Any, Any, Any]) -> Step:
        r""":math:`\sum_i \sum_j f_{ij} = \sum_j \sum_i f_{ij}`."""
        ends = set().union(*(sympy.sympify(end).free_symbols for end in (*one[1:], *two[1:])))
        if one[0] == two[0] or {one[0], two[0]} & ends:
            raise Unproved("sums whose ends depend on each other cannot be swapped so")
        self._whole(*one, *two)
        sides = Sum(Sum(term, one), two), Sum(Sum(term, two), one)
        return self._rule(sympy.Eq(*sides, evaluate=False), "sums in the other order", ())

    def cauchy_schwarz(self, a: Any, b: Any, limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`(\sum_j a_j b_j)^2 \le \sum_j a_j^2 \sum_j b_j^2`."""
        self._limits(limits)
        square = Sum(a * b, limits) ** 2
        return self._rule(square <= Sum(a**2, limits) * Sum(b**2, limits), "Cauchy–Schwarz", ())

    def member(self, every: Formula, index: Any) -> Step:
        """What holds for every j holds for this one."""
        every = self.statement.expanded(every)
        bound, low, high, body = every.args
        self._whole(index)
        claimed = Implies(And(every, low <= index, index <= high), put(body, bound, index))
        return self._rule(claimed, "what holds for all holds for one", (), guard=defined_by(body, {bound: index}))

    def every(self, every: Formula, *uses: Step, when: Any = True) -> Step:
        """What holds for any j, by steps that say so, holds for every j."""
        every = self.statement.expanded(every)
        index, low, high, body = every.args
        self._for_any(index, when, low, high)
        self._needed(uses, (And(when, low <= index, index <= high), body))
        return self._rule(when_so(when, every), "what holds for any holds for all", uses)

    def sum_positive(self, term: Any, limits: tuple[Any, Any, Any], *uses: Step, when: Any = True) -> Step:
        r""":math:`\sum_j f_j > 0` over at least one term, where every :math:`f_j > 0`, which the steps must say."""
        index, low, high = self._limits(limits, when)
        self._needed(uses, (And(when, low <= index, index <= high), term > 0))
        return self._rule(Implies(And(when, low <= high), Sum(term, limits) > 0), "a sum of what is positive", uses)

    def whichever(self, exists: Formula, formula: Formula, *uses: Step) -> Step:
        """What follows from the body of an `Exists`, whatever it is that exists, follows from the `Exists`."""
        exists, formula = map(self.statement.expanded, (exists, formula))
        found, body = exists.args
        self._for_any(found, formula)
        self._needed(uses, (True, Implies(body, formula)))
        return self._rule(Implies(exists, formula), "whatever it is that exists", uses)

    def some(self, exists: Formula, witness: Any, *uses: Step, when: Any = True) -> Step:
        """What holds for a witness holds for some; of a sequence the witness is a function of the index."""
        exists = self.statement.expanded(exists)
        found, body = exists.args
        if getattr(found, "is_integer", False):
            self._whole(witness)
        shown = put(body, found, witness)
        self._needed(uses, (when, shown))
        return self._rule(when_so(when, exists), "a witness", uses, guard=defined_by(body, {found: witness}))

    def inside_or_apart(
        self, point: Any, points: Any, among: tuple[Any, Any, Any], limits: tuple[Any, Any, Any], *names: Any
    ) -> Step:
        r"""A point of :math:`R^d` is a convex combination of some points, or a direction parts it from all of them.

        .. math::
            \exists\, \lambda \ge 0:\ \sum_j \lambda_j = 1,\ \sum_j \lambda_j x_{jf} = p_f
            \quad\text{or}\quad \exists\, q\ \forall j:\ \sum_f q_f p_f - \sum_f q_f x_{jf} \ge 1

        The theorem of the separating hyperplane for finitely many points, whose convex hull is closed.

        Args:
            point: its coordinate f.
            points: the coordinate f of point j.
            among: j and its ends.
            limits: f and its ends.
            *names: the sequences :math:`\lambda` and q.
        """
        (index, low, high), (coordinate, first, last) = self._limits(among), self._limits(limits)
        share, query = names
        if any(sympy.sympify(term).has(name) for term in (point, points, low, high, first, last) for name in names):
            raise Unproved(f"{text(points)} or its ends hold a sequence that is bound")
        self._for_any(index, point, first, last)
        mixed = each(coordinate, first, last, sympy.Eq(Sum(share[index] * points, among), point))
        inside = And(each(index, low, high, share[index] >= 0), sympy.Eq(Sum(share[index], among), 1), mixed)
        gap = Sum(query[coordinate] * point, limits) - Sum(query[coordinate] * points, limits)
        apart = Exists(query, each(index, low, high, gap >= 1))
        return self._rule(sympy.Or(Exists(share, inside), apart), "a separating hyperplane", ())

    def next_whole(self, a: Any, b: Any) -> Step:
        r""":math:`a < b \iff a + 1 \le b`, for whole a and b."""
        self._whole(a, b)
        return self._rule(sympy.Equivalent(a < b, a + 1 <= b), "whole numbers are one apart", ())

    def whole_below(self, x: Any, *uses: Step) -> Step:
        r""":math:`\lfloor x \rfloor \le x < \lfloor x \rfloor + 1`."""
        x = sympy.sympify(x)
        return self._rule(And(sympy.floor(x) <= x, x < sympy.floor(x) + 1), "the whole number below", uses, x)

    def induction(self, formula: Formula, n: Symbol, first: int, *uses: Step, says: str = "") -> Step:
        """A formula holds for every whole n from `first` on, by steps that say it for the first and from n to n + 1."""
        self._for_any(n)
        if not n.is_integer:
            raise Unproved(f"{text(n)} is not whole")
        formula = self.statement.expanded(formula)
        start, step = put(formula, n, sympy.Integer(first)), put(formula, n, n + 1)
        self._needed(uses, (True, start), (And(n >= first, formula), step))
        return self._add(Implies(n >= first, formula), "induction", says, uses)

    def _limits(self, limits: tuple[Any, Any, Any], when: Any = True) -> tuple[Any, Any, Any]:
        """The limits of a sum: an index that may be any whole number, and two whole ends."""
        index, low, high = (limits[0], *map(sympy.sympify, limits[1:]))
        self._for_any(index, when, low, high)
        self._whole(index, low, high)
        return index, low, high
