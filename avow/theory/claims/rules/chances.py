r"""Rules of means and probabilities over independent normal numbers, each of mean zero and variance one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy import And, Implies, IndexedBase, KroneckerDelta, Sum, exp

from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Chance, Exists, Formula, Mean, linear, text
from avow.theory.claims.kernel import Kernel, Step, when_so


class Chances(Kernel):
    """What is known of means and of probabilities."""

    def mean_sum(self, w: IndexedBase, factor: Any, exponent: Any, *limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`E \sum_j c_j e^{u_j} = \sum_j c_j E e^{u_j}`: a mean is linear, where each term has one.

        Args:
            w: the normal numbers.
            factor: c, without them.
            exponent: u, linear in them, so that its exponential has a mean.
            *limits: of the sum, or of a sum of sums from the innermost on.
        """
        factor, exponent = self._apart(w, factor), self.statement.expanded(sympy.sympify(exponent))
        if not linear(exponent, w):
            raise Unproved(f"{text(exponent)} is not linear in {text(w)}")
        self._whole(*(part for limit in limits for part in limit))
        self._apart(w, *(end for limit in limits for end in limit))
        sums = Mean(w, Sum(factor * exp(exponent), *limits)), Sum(factor * Mean(w, exp(exponent)), *limits)
        return self._rule(sympy.Eq(*sums, evaluate=False), "the mean of a sum is the sum of the means", ())

    def mean_exp(
        self, w: IndexedBase, slopes: Mapping[Any, Any], limits: tuple[Any, Any, Any], offset: Any = 0
    ) -> Step:
        r""":math:`E e^{c + X} = e^{c + V/2}`, where X is normal of mean zero and V is its variance.

        .. math:: X = \sum_p \sum_f a_{pf} w_{pf},\quad V = \sum_p \sum_q \delta_{pq} \sum_f a_{pf} a_{qf}

        Args:
            w: the normal numbers, of two indices.
            slopes: by place p, which may be equal or not, the factor :math:`a_{pf}` of :math:`w_{pf}`.
            limits: f and its ends.
            offset: c.
        """
        offset = self._apart(w, offset)
        form, variance = self._normal(w, slopes, limits)
        exponent = offset + form
        claimed = sympy.Eq(Mean(w, exp(exponent)), exp(offset + variance / 2), evaluate=False)
        return self._rule(claimed, "the mean of a log-normal number", ())

    def chance_normal(
        self,
        w: IndexedBase,
        slopes: Mapping[Any, Any],
        limits: tuple[Any, Any, Any],
        most: Any,
        variance: Any,
        *uses: Step,
        when: Any = True,
    ) -> Step:
        r""":math:`P(X \le t) = \tfrac12(1 + \mathrm{erf}\tfrac{t}{\sqrt{2V}})`, and for
        :math:`t \ge 0` :math:`P(|X| \le t) = \mathrm{erf}\tfrac{t}{\sqrt{2V}}`.

        X is made of the normal numbers as in `mean_exp`, and V > 0 is its variance, as the steps say: a sum of
        independent normal numbers with factors is normal, of mean zero, with the squares of the factors for its
        variance. Its density is even, so that half of what lies within t lies above zero.
        """
        most, variance = (self._apart(w, term) for term in (most, variance))
        form, squares = self._normal(w, slopes, limits)
        self._needed(uses, (when, And(sympy.Eq(squares, variance, evaluate=False), variance > 0)))
        size = sympy.erf(most / sympy.sqrt(2 * variance))
        below = sympy.Eq(Chance(w, form <= most), (1 + size) / 2, evaluate=False)
        within = Implies(most >= 0, sympy.Eq(Chance(w, sympy.Abs(form) <= most), size, evaluate=False))
        return self._rule(when_so(when, And(below, within)), "the law of a normal number", uses)

    def chance_implied(self, w: IndexedBase, one: Formula, other: Formula, *uses: Step, when: Any = True) -> Step:
        """An event that another one implies is as probable at least; what implies it steps must say of any numbers."""
        self._events(w, one, other)
        self._apart(w, when)
        self._needed(uses, (when, Implies(one, other)))
        claimed = when_so(when, Chance(w, one) <= Chance(w, other))
        return self._rule(claimed, "what is implied is as probable at least", uses)

    def chance_all(self, w: IndexedBase, event: Formula, others: Formula) -> Step:
        r""":math:`P(A \wedge \forall j\ B_j) \ge P(A) - \sum_j (1 - P(B_j))`: what fails, fails one of them (Boole)."""
        event, others = map(self.statement.expanded, (event, others))
        index, low, high, other = others.args
        self._for_any(index, event, low, high)
        self._whole(index, low, high)
        self._events(w, event, others)
        failing = Sum(1 - Chance(w, other), (index, low, high))
        claimed = Chance(w, And(event, others)) >= Chance(w, event) - failing
        return self._rule(claimed, "what fails is one of them", ())

    def _events(self, w: IndexedBase, *events: Formula) -> None:
        """Raise unless numbers are bound in events that have a probability: comparisons of what can be computed."""
        self._for_any(w)
        for event in events:
            if self.statement.expanded(event).has(Exists):
                raise Unproved(f"{text(event)} is not known to have a probability")

    def _normal(self, w: IndexedBase, slopes: Mapping[Any, Any], limits: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """The sum of normal numbers with factors, and its variance; see `mean_exp`."""
        self._whole(*limits, *slopes)
        index = limits[0]
        slopes = {place: self._apart(w, slope) for place, slope in slopes.items()}
        self._apart(w, *limits[1:], *slopes)
        if any(sympy.sympify(term).has(index) for term in (*slopes, *limits[1:])):
            raise Unproved(f"{text(index)} stands outside of its own sum")
        form = sum(Sum(slope * w[place, index], limits) for place, slope in slopes.items())
        variance = sum(KroneckerDelta(p, q) * Sum(a * b, limits) for p, a in slopes.items() for q, b in slopes.items())
        return form, variance

    def _apart(self, w: IndexedBase, *terms: Any) -> Any:
        """The first of some terms, none of which may speak of the random numbers."""
        terms = tuple(self.statement.expanded(sympy.sympify(term)) for term in terms)
        for term in terms:
            if term.has(w):
                raise Unproved(f"{text(term)} is random itself")
        return terms[0] if terms else None
