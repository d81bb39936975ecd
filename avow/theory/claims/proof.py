r"""The proof of a statement: steps that a prover accepts one by one, each resting on the ones it names.

A step is a formula that holds for all values of its variables. `Proof.have` asks z3, over the reals, whether the steps
and hypotheses named imply it; whatever is not arithmetic (exponentials, logarithms, sums, elements of sequences) is an
unknown to z3, and what must be known of it comes from the rules below, each a fact of real analysis or of finite sums.

Nothing proves by being mentioned. A conclusion that does not follow, a step that nobody needs, a hypothesis that
nothing rests on: each ends the proof with `Unproved`. So a statement that is changed in one word is another one to
prove.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sympy import Not

from avow.numerics import intervals
from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.formal import Case, Statement, holds, instance, text
from avow.theory.claims.rules.analysis import Analysis
from avow.theory.claims.rules.chances import Chances
from avow.theory.claims.rules.programs import Programs
from avow.theory.claims.rules.sums import Sums


class Proof(Analysis, Chances, Programs, Sums):
    """A proof of a statement under way, with all rules."""


def _written(number: Any) -> str:
    """A number, or lists of them, as it is written: 1/2 and not Fraction(1, 2)."""
    return f"[{', '.join(map(_written, number))}]" if isinstance(number, list | tuple) else str(number)


class Refutation:
    """What is shown against a statement: cases in which it fails, evaluated in fractions or balls.

    Attributes:
        statement: what is to be refuted.
    """

    def __init__(self, statement: Statement) -> None:
        self.statement = statement
        self._cases: list[Evidence] = []
        self._proofs: list[tuple[Proof, Evidence]] = []

    def case(self, values: Case, says: str, part: str = "", **facts: Any) -> None:
        """A case in which every hypothesis holds, and a part of the conclusion (this one, or any) does not for sure."""
        # What is all but equal needs more bits to be distinguished.
        fails = intervals.decided(lambda: self.statement.violated(values, part), most=4096)
        if fails is None:
            raise Unproved(f"{says}: this is not a counterexample")
        self._cases.append(Evidence("counterexample", says, self._facts(values, fails) | facts))

    def impossible(self, values: Case, part: str, says: str) -> Proof:
        """A proof to be given that a part of the conclusion fails in a case: for what no evaluation can deny.

        Args:
            values: numbers for the variables of the statement.
            part: the part, which says that something exists, or holds for infinitely many.
            says: the case in words.
        """
        if not all(holds(formula, values) is True for formula in self.statement.hypotheses):
            raise Unproved(f"{says}: a hypothesis does not hold in this case")
        denied = Not(instance(self.statement.parts[part], values))
        proof = Proof(Statement({}, {part: denied}))
        self._proofs.append((proof, Evidence("counterexample", says, self._facts(values, part))))
        return proof

    def _facts(self, values: Case, part: str) -> dict[str, Any]:
        shown = {text(name): _written(number) for name, number in values.items()}
        return {"evaluated by": "fractions and balls", "fails": part, **shown}

    def evidence(self) -> Iterator[Evidence]:
        """The cases, and what proves those that need a proof."""
        if not self._cases and not self._proofs:
            raise Unproved("no case was given in which the statement fails")
        yield from self._cases
        for proof, case in self._proofs:
            proof.finish()
            yield from proof.evidence()
            yield case
