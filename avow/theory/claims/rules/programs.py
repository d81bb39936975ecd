r"""The rule of what programs take: their counts, from their structure."""

from __future__ import annotations

import itertools
from typing import Any

import sympy
from sympy import And, Implies

from avow.theory.claims.evidence import Unproved
from avow.theory.claims.formal import is_whole, text
from avow.theory.claims.kernel import Kernel, Step


class Programs(Kernel):
    """What is known of the operations and of the memory of programs."""

    def counted(self, term: Any, says: str = "") -> Step:
        """A count is the polynomial that the program's structure gives it, for sizes from one on.

        The program runs once on sizes that nothing can be asked of, so that it does the same whatever they are; a loop
        does its round as often as there are rounds. Where a size is one, PyTorch has shortcuts of its own: the count
        is compared with what it counts at the smallest sizes.
        """
        from avow.theory.claims.counting import Counted

        term = self.statement.expanded(term)
        if not isinstance(term, Counted):
            raise Unproved(f"{text(term)} is no count of a program")
        for size in term.args:
            if not is_whole(size):
                raise Unproved(f"{text(size)} is not known to be whole")
        found = term.structure()
        sizes = [sympy.Dummy(integer=True) for _ in term.args]
        general = term.func(*sizes).structure()
        for numbers in itertools.product((1, 2, 3), repeat=len(sizes)):
            foreseen = general.xreplace(dict(zip(sizes, map(sympy.Integer, numbers), strict=True))).doit()
            if foreseen != term.func.at(numbers):
                raise Unproved(f"at {numbers} PyTorch counts {term.func.at(numbers)}, and not {foreseen}")
        within = And(*(size >= 1 for size in term.args))
        return self._add(Implies(within, sympy.Eq(term, found, evaluate=False)), "its structure", says, ())
