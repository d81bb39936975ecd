r"""The kernel of proofs: what a step is, when one is accepted, and when a statement is proved by its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from sympy import And, Equivalent, Implies, Indexed, Not, Or, Sum, Symbol, exp, log

from avow.theory.claims.evidence import Evidence, Unproved
from avow.theory.claims.formal import (
    ForAll,
    Formula,
    Statement,
    cases_of_sums,
    holds,
    is_whole,
    latex,
    text,
    unreadable,
    variables,
)
from avow.theory.claims.provers import bound_by, canonical, follows, refreshed, unbound


@dataclass(frozen=True, eq=False)
class Step:
    """A formula that holds for all values of its variables, by hypotheses of the statement if it rests on any.

    Attributes:
        formula: the formula.
        by: what accepted it: provers that agree, or the rule.
        says: why, in words, for who reads the proof.
        uses: the steps it rests on.
    """

    formula: Formula
    by: str
    says: str = ""
    uses: tuple[Step, ...] = ()

    def rests_on(self) -> Iterator[Step]:
        """The step and all it rests on, directly or not; a step may come more than once."""
        yield self
        for used in self.uses:
            yield from used.rests_on()


class Kernel:
    """A proof of a statement under way.

    Attributes:
        statement: what is to be proved.
        strict: whether nothing idle is allowed: no premise, step or hypothesis. A proof that is tried on another
            statement than its own may use all hypotheses everywhere, and leave steps idle.
        steps: the steps so far, in order.
    """

    def __init__(self, statement: Statement, strict: bool = True) -> None:
        self.statement = statement
        self.strict = strict
        self.steps: list[Step] = []
        self.concluded: dict[str, Step] = {}
        self.examples: list[Evidence] = []
        self.cited: set[str] = set()
        self._hypotheses = {formula: Step(formula, "hypothesis") for formula in statement.hypotheses}

    # ---- what a proof is written with

    def given(self, formula: Formula) -> Step:
        """A hypothesis of the statement, as it stands there."""
        step = self._hypotheses.get(self.statement.expanded(formula))
        if step is None:
            raise Unproved(f"{text(formula)} is not among the hypotheses")
        return step

    def have(self, formula: Formula, *uses: Step, says: str = "") -> Step:
        """A step that z3 finds to follow from others, none of which it can do without."""
        formula = self.statement.expanded(formula)
        answer = follows(formula, self._premises(uses))
        if not answer:
            raise Unproved(f"{says or text(formula)}: {answer.trouble}")
        self._none_idle(answer.idle, uses, says or text(formula))
        return self._add(formula, answer.by, says, uses)

    def conclude(self, part: str, *uses: Step, says: str = "") -> Step:
        """A part of the conclusion, by its name, from steps that imply it."""
        wanted = self.statement.parts.get(part)
        if wanted is None:
            raise Unproved(f"the conclusion has no part called {part!r}")
        for step in uses:
            # A step that is the part itself needs no prover.
            if alike(step.formula, wanted):
                self.concluded[part] = step
                return step
        self.concluded[part] = self.have(wanted, *uses, says=says)
        return self.concluded[part]

    def shows(self, example: Evidence) -> None:
        """An example beside the proof: it must hold, and nothing rests on it."""
        self.examples.append(replace(example, coverage="these cases"))

    def finish(self) -> None:
        """Raise unless the conclusion is proved, whole, and by all that was said and supposed."""
        if follows(sympy.false, list(self._hypotheses)):
            raise Unproved("the hypotheses contradict each other: no case meets them all")
        where = map(self.statement.expanded, self.statement.where.values())
        for formula in [*self._hypotheses, *self.statement.parts.values(), *where]:
            self._well_defined(formula)
        for name, part in self.statement.parts.items():
            if name not in self.concluded or not alike(self.concluded[name].formula, part):
                raise Unproved(f"not concluded: {name}")
        if not self.strict:
            return
        needed = {id(step) for last in self.concluded.values() for step in last.rests_on()}
        for step in self.steps:
            if id(step) not in needed:
                raise Unproved(f"{step.says or text(step.formula)}: nothing rests on this step")
        for formula, step in self._hypotheses.items():
            if id(step) not in needed and not self._defines(formula):
                raise Unproved(f"nothing rests on the hypothesis {text(formula)}: drop it from the statement")

    def evidence(self, amended: bool = False) -> Iterator[Evidence]:
        """What was shown, step by step, as evidence; examples come last."""
        for number, step in enumerate(self.steps, start=1):
            rests = [self.steps.index(used) + 1 if used in self.steps else text(used.formula) for used in step.uses]
            facts = {"step": number, "by": step.by, "from": rests, "formula": latex(step.formula)}
            kind: Any = "balls" if step.by.startswith("balls") else "symbolic"
            yield Evidence(kind, step.says or text(step.formula), facts, amended)
        yield from (replace(example, amended=amended) for example in self.examples)

    def known(self, claim: Any, part: str, values: Mapping[Any, Any], says: str = "") -> Step:
        """A part of another formal claim, which is judged before: terms in place of its variables.

        Args:
            claim: the claim; the one that is proved must name it in `needs`.
            part: the part of its conclusion, or of its corrected one.
            values: for each of its variables a term, for a sequence a function of the indices.
        """
        self.cited.add(claim.id)
        statement = claim.as_amended() or claim.as_stated()
        missing = set(statement.variables) - set(values)
        if missing:
            raise Unproved(f"{claim.id}: nothing is given for {', '.join(map(text, missing))}")
        formula = when_so(And(*statement.hypotheses), statement.parts[part])
        where = [statement.expanded(term) for term in statement.where.values()]
        self._whole(*(term for variable, term in values.items() if getattr(variable, "is_integer", False)))
        guard = [c for term in [formula, *where] for c in defined_by(term, values)]
        claimed, needed = self._guarded(put_all(formula, values), guard, ())
        return self._add(claimed, f"claim {claim.id}", says, needed)

    def at(self, step: Step, values: Mapping[Any, Any]) -> Step:
        """An instance of a step: terms in place of variables of its own, which the statement does not have."""
        for variable, term in values.items():
            if variable in self.statement.variables or variable not in step.formula.free_symbols:
                raise Unproved(f"{text(variable)} is not a variable of that step alone")
            if variable.is_integer:
                self._whole(term)
        # What cancels when terms are put in must have a value all the same.
        claimed, needed = self._guarded(put_all(step.formula, values), defined_by(step.formula, values), (step,))
        return self._add(claimed, "an instance", step.says, needed)

    # ---- how steps are taken

    def _add(self, formula: Formula, by: str, says: str, uses: Sequence[Step]) -> Step:
        if cases := cases_of_sums(formula):
            raise Unproved(f"{says or by}: SymPy may have changed the meaning of {text(cases)}")
        if trouble := unreadable(formula):
            raise Unproved(f"{says or by}: {trouble}")
        step = Step(formula, by, says, tuple(uses))
        self.steps.append(step)
        return step

    def _rule(
        self, formula: Formula, rule: str, uses: Sequence[Step], *defined: Any, guard: Sequence[Formula] = ()
    ) -> Step:
        """A step by a rule.

        Terms that are `defined` must have values by what the steps say. What the formula needs for its terms to have
        values, and the conditions of the `guard`, stand before it where neither steps nor hypotheses say them.
        """
        self._defined(defined, uses)
        formula = self.statement.expanded(formula)
        claimed, needed = self._guarded(formula, [*conditions(formula), *guard], uses)
        return self._add(claimed, rule, "", needed)

    def _guarded(
        self, formula: Formula, guard: Sequence[Formula], uses: Sequence[Step]
    ) -> tuple[Formula, tuple[Step, ...]]:
        """A formula under the conditions for its terms to have values, save those that steps and hypotheses say.

        With it come the steps and hypotheses that it then rests on.
        """
        formula, left, needed = self.statement.expanded(formula), [], list(uses)
        for condition in dict.fromkeys(map(self.statement.expanded, guard)):
            known = self._settled(condition, uses)
            if known is None:
                left.append(condition)
                # What is said of an index that is bound must hold for all it runs through.
                if variables(condition) - variables(formula) - set(self.statement.variables):
                    said = f"no step says that {text(condition)}, whatever the index"
                    raise Unproved(f"{text(formula)} may have no value: {said}")
            needed += [step for step in known or () if step not in needed]
        return when_so(And(*left), formula), tuple(needed)

    def _settled(self, condition: Formula, uses: Sequence[Step]) -> list[Step] | None:
        """The hypotheses that a condition needs to follow from steps and what is plain of sums; None if it does not."""
        plain = _plain_sums(condition)
        said = [step.formula for step in uses] + plain
        if follows(condition, said):
            return []
        hypotheses = list(self._hypotheses.values())
        answer = follows(condition, [step.formula for step in hypotheses] + said)
        if not answer:
            return None
        fewer = [step for place, step in enumerate(hypotheses) if place not in answer.idle]
        enough = follows(condition, [step.formula for step in fewer] + said)
        return fewer if enough else hypotheses

    def _needed(self, uses: Sequence[Step], *wanted: tuple[Any, Formula]) -> None:
        """Raise unless some steps say formulas, each under its condition, and no step is idle in all of them."""
        idle: set[int] = set(range(len(uses)))
        for when, formula in wanted:
            claimed = self.statement.expanded(when_so(when, formula))
            answer = follows(claimed, self._premises(uses))
            if not answer:
                raise Unproved(f"no step says that {text(claimed)}: {answer.trouble}")
            idle &= set(answer.idle)
        self._none_idle(sorted(idle), uses, text(claimed))

    def _premises(self, uses: Sequence[Step]) -> list[Formula]:
        more = [] if self.strict else list(self._hypotheses)
        return [step.formula for step in uses] + more

    def _none_idle(self, idle: Sequence[int], uses: Sequence[Step], says: str) -> None:
        if idle and self.strict:
            idle_ones = "; nor is ".join(text(uses[place].formula) for place in idle)
            raise Unproved(f"{says}: {idle_ones} is not needed for it, the others being there")

    def _for_any(self, index: Any, *others: Any) -> None:
        """Raise where an index is no variable of its own: what is said of it would not be said of any."""
        if index in self.statement.variables:
            raise Unproved(f"{text(index)} is a variable of the statement, and not just any number")
        if any(index in variables(sympy.sympify(other)) for other in others):
            raise Unproved(f"{text(index)} stands outside of its own range")

    def _whole(self, *terms: Any) -> None:
        """Raise where a term that counts or stands for a place is not known to be whole."""
        for term in map(sympy.sympify, terms):
            if not is_whole(self.statement.expanded(term)):
                raise Unproved(f"{text(term)} is not known to be whole")

    def _defined(self, terms: Sequence[Any], uses: Sequence[Step]) -> None:
        """Raise where a logarithm, a root or a quotient may have no value."""
        for term in terms:
            for condition in conditions(self.statement.expanded(sympy.sympify(term))):
                if not follows(condition, [step.formula for step in uses]):
                    raise Unproved(f"{text(term)} may have no value: no step says that {text(condition)}")

    def _well_defined(self, formula: Formula) -> None:
        """Raise where a part of the statement may have no value though its hypotheses hold."""
        for condition in conditions(formula):
            if not self._known(condition):
                raise Unproved(f"{text(formula)} may have no value: nothing says that {text(condition)}")

    def _known(self, condition: Formula) -> bool:
        """Whether a condition follows from the hypotheses, the parts of the conclusion, and what is plain of sums."""
        parts = [step.formula for step in self.concluded.values() if not conditions(step.formula)]
        return bool(follows(condition, [*self._hypotheses, *_plain_sums(condition), *parts]))

    def _defines(self, formula: Formula) -> bool:
        """Whether a hypothesis is there for some part of the statement to have a value."""
        others = [one for one in self._hypotheses if one != formula]
        needed = [c for part in self.statement.parts.values() for c in conditions(part)]
        return any(not follows(condition, [*others, *_plain_sums(condition)]) for condition in needed)


def alike(one: Formula, other: Formula) -> bool:
    """Whether two formulas are the same but for the names of bound indices and what stands before a sum."""
    return bool(unbound(canonical(one)) == unbound(canonical(other)))


def when_so(condition: Any, formula: Formula) -> Formula:
    return formula if condition in (True, sympy.true) else Implies(condition, formula)


def put_all(formula: Formula, values: Mapping[Any, Any]) -> Formula:
    """A formula with terms in place of some variables at once; a sequence's is a function of the indices."""
    for slope in formula.atoms(sympy.Derivative):
        if caught := variables(slope) & set(values):
            names = ", ".join(sorted(map(text, caught)))
            raise Unproved(f"{text(slope)} is a slope where {names} varies: nothing can be put in for it")
    stand_ins = {name: sympy.Dummy(integer=name.is_integer) for name in values if isinstance(name, Symbol)}
    # Bound indices are like no other symbol, so that no term is caught by a sum or a quantifier.
    formula = refreshed(formula).xreplace(stand_ins)
    for name, term in values.items():
        if name not in stand_ins:
            elements = [one for one in formula.atoms(Indexed) if one.base == name]
            formula = formula.xreplace({one: sympy.sympify(term(*one.indices)) for one in elements})
    return formula.subs({stand_in: values[name] for name, stand_in in stand_ins.items()}, simultaneous=True)


def put(formula: Formula, name: Any, term: Any) -> Formula:
    """A formula with a term in place of a symbol, or a function of the indices in place of a sequence."""
    return put_all(formula, {name: term})


def defined_by(formula: Formula, values: Mapping[Any, Any]) -> list[Formula]:
    """What must hold for a formula to have a value with terms in place of variables, before anything cancels."""
    formula = refreshed(formula)
    found = [put_all(condition, values) for condition in conditions(formula)]
    for name, term in values.items():
        if isinstance(name, Symbol):
            found += conditions(sympy.sympify(term))
            continue
        places = {one.indices for one in formula.atoms(Indexed) if one.base == name}
        found += [c for indices in places for c in conditions(sympy.sympify(term(*indices)))]
    return found


def conditions(formula: Any) -> list[Formula]:
    """What must hold for every logarithm, root and quotient in a formula to have a value."""
    if isinstance(formula, Implies):
        supposed, concluded = formula.args
        guarded = [Implies(supposed, condition) for condition in conditions(concluded)]
        return [*conditions(supposed), *(one for one in guarded if one != sympy.true)]
    if isinstance(formula, ForAll):
        index, low, high, body = formula.args
        guarded = [Implies(And(low <= index, index <= high), condition) for condition in conditions(body)]
        return [*conditions(low), *conditions(high), *(one for one in guarded if one != sympy.true)]
    if isinstance(formula, And | Or | Not | Equivalent):
        return [condition for part in formula.args for condition in conditions(part)]
    found: list[Formula] = []
    for term in sympy.preorder_traversal(formula):
        if isinstance(term, log):
            found.append(term.args[0] > 0)
        elif isinstance(term, sympy.Pow):
            base, exponent = term.args
            if exponent.is_Integer and exponent < 0:
                found.append(sympy.Ne(base, 0))
            elif not exponent.is_Integer:
                found.append(base >= 0 if exponent.is_positive else base > 0)
    trivial = (sympy.true, True)
    return [condition for condition in dict.fromkeys(found) if condition not in trivial and not _under_index(condition)]


def _under_index(condition: Formula) -> bool:
    """Whether numbers alone settle a condition."""
    return not condition.free_symbols and holds(condition, {}) is True


def _plain_sums(formula: Formula) -> list[Formula]:
    """What is known of sums without a word: those of squares are not negative, those of exponentials are positive."""
    known = []
    for one in formula.atoms(Sum) | canonical(formula).atoms(Sum):
        factors = sympy.Mul.make_args(one.function)
        if all(isinstance(factor, exp) for factor in factors):
            some = And(*(low <= high for _, low, high in one.limits))
            if not some.free_symbols & set(bound_by(one)):
                known.append(Implies(some, one > 0))
        elif all(isinstance(part, exp | sympy.Abs) or (part.is_Pow and part.exp.is_even) for part in factors):
            known.append(one >= 0)
    return known
