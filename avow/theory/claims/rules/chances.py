r"""Rules of means over independent normal numbers, each of mean zero and variance one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy import IndexedBase, KroneckerDelta, Sum, exp

from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import Mean, text
from avow.theory.claims.kernel import Kernel, Step


class Chances(Kernel):
    """What is known of means."""

    def mean_sum(self, w: IndexedBase, factor: Any, exponent: Any, *limits: tuple[Any, Any, Any]) -> Step:
        r""":math:`E \sum_j c_j e^{u_j} = \sum_j c_j E e^{u_j}`: a mean is linear, where each term has one.

        Args:
            w: the normal numbers.
            factor: c, without them.
            exponent: u, linear in them, so that its exponential has a mean.
            *limits: of the sum, or of a sum of sums from the innermost on.
        """
        factor, exponent = self._apart(w, factor), self.statement.expanded(sympy.sympify(exponent))
        if not _linear(exponent, w):
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
        self._whole(*limits, *slopes)
        index, offset = limits[0], self._apart(w, offset)
        slopes = {place: self._apart(w, slope) for place, slope in slopes.items()}
        self._apart(w, *limits[1:], *slopes)
        if any(sympy.sympify(term).has(index) for term in (*slopes, *limits[1:])):
            raise Unproved(f"{text(index)} stands outside of its own sum")
        exponent = offset + sum(Sum(slope * w[place, index], limits) for place, slope in slopes.items())
        variance = sum(KroneckerDelta(p, q) * Sum(a * b, limits) for p, a in slopes.items() for q, b in slopes.items())
        claimed = sympy.Eq(Mean(w, exp(exponent)), exp(offset + variance / 2), evaluate=False)
        return self._rule(claimed, "the mean of a log-normal number", ())

    def _apart(self, w: IndexedBase, *terms: Any) -> Any:
        """The first of some terms, none of which may speak of the random numbers."""
        terms = tuple(self.statement.expanded(sympy.sympify(term)) for term in terms)
        for term in terms:
            if term.has(w):
                raise Unproved(f"{text(term)} is random itself")
        return terms[0] if terms else None


def _linear(term: Any, w: IndexedBase) -> bool:
    """Whether a term is linear in random numbers."""
    if not term.has(w):
        return True
    if isinstance(term, sympy.Add):
        return all(_linear(part, w) for part in term.args)
    if isinstance(term, Sum):
        return not any(part.has(w) for limit in term.limits for part in limit) and _linear(term.function, w)
    if isinstance(term, sympy.Mul):
        moving = [factor for factor in term.args if factor.has(w)]
        return len(moving) == 1 and _linear(moving[0], w)
    return isinstance(term, sympy.Indexed) and term.base == w and not any(index.has(w) for index in term.indices)
