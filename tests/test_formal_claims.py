"""Every formal claim of the catalogue, attacked: hypotheses dropped, steps made idle, words changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
from flint import arb
from sympy.core.relational import Relational

from avow.theory.claims import Claim, Statement, Unproved, catalogue
from avow.theory.claims.formal import text
from avow.theory.claims.kernel import Kernel, Step
from avow.theory.claims.proof import Proof, Refutation
from avow.theory.claims.random_search import trials

FORMAL = [one for one in catalogue().values() if one.formal is not None]
PROVED = [one for one in FORMAL if one.expected in ("proved", "corrected")]
# A step that says nothing of anything.
IDLE = sympy.Dummy("idle", real=True) >= 0
REVIEWED = Path(__file__).with_name("reviewed_claims.json")


def prove(one: Claim, statement: Statement) -> Proof:
    """A claim's proof, written for a statement and finished."""
    proof = Proof(statement)
    parts = {"proved": (proof,), "corrected": (Refutation(one.as_stated()), proof)}[one.expected]
    one.check(*parts, one.subject)
    proof.finish()
    return proof


def about(one: Claim) -> Statement:
    return one.as_amended() or one.as_stated()


@pytest.mark.claims
@pytest.mark.parametrize("one", PROVED, ids=lambda one: one.id)
def test_no_hypothesis_can_be_dropped(one: Claim) -> None:
    statement = about(one)
    for place, hypothesis in enumerate(statement.given):
        with pytest.raises(Unproved):
            prove(one, statement.without(place))
            pytest.fail(f"{one.id} is proved without {text(hypothesis)}")


@pytest.mark.claims
@pytest.mark.parametrize("one", PROVED, ids=lambda one: one.id)
def test_no_step_can_be_left_out(one: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(prove(one, about(one)).steps)
    honest = Kernel._add
    for place in range(count):
        numbers = itertools.count()

        def add(self: Kernel, formula: Any, by: str, says: str, uses: Any) -> Step:
            idle = next(numbers) == place  # noqa: B023 (used before the next turn)
            return honest(self, IDLE if idle else formula, by, says, uses)

        monkeypatch.setattr(Kernel, "_add", add)
        with pytest.raises(Unproved):
            prove(one, about(one))
            pytest.fail(f"{one.id} is proved without step {place + 1} of {count}")
        monkeypatch.setattr(Kernel, "_add", honest)


@pytest.mark.claims
@pytest.mark.parametrize("one", [one for one in FORMAL if not one.not_applicable()], ids=lambda one: one.id)
def test_some_case_meets_every_hypothesis(one: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that speaks of nothing would be true."""
    assert one.falsifier is not None, "a claim without a search has nothing to press on its page"
    monkeypatch.setattr(Statement, "excess", lambda self, case: arb(-1 if self.unmet(case) else 1))
    for variant in ["as stated", *(["what is true instead"] if one.amended else [])]:
        assert any(trial.broken for trial in itertools.islice(trials(one, variant), 500)), variant


def digest(one: Claim) -> str:
    """What changes with any word or formula of a claim, in the statement or beside it."""
    formal = [one.as_stated(), one.as_amended()] if one.formal is not None else []
    said = [[s.latex(), s.assumptions(), s.symbol_key(), {k: text(v) for k, v in s.terms.items()}] for s in formal if s]
    words = [one.id, one.topic, one.expected, one.plain, one.amended_plain, said]
    if not formal:
        words += [one.statement, one.amended, one.assumptions]
    return hashlib.sha256(json.dumps(words, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def test_words_and_formulas_are_those_that_were_read_side_by_side() -> None:
    """A changed word is a changed claim. Read both, then `python -m tests.test_formal_claims` notes that they agree."""
    noted = json.loads(REVIEWED.read_text(encoding="utf-8"))
    assert noted == {one.id: digest(one) for one in catalogue().values()}


def sabotages(one: Claim) -> Iterator[tuple[str, Claim]]:
    """A claim with a word of it changed, a hypothesis left out, a comparison turned round, a number changed."""
    for word in ("not", "some"):
        first, *rest = one.as_written
        yield f"{word} before it", replace(one, as_written=(f"{word} {first}", *rest))
    statement = one.as_stated()
    for place in range(len(statement.given)):
        yield f"without {text(statement.given[place])}", replace(one, formal=statement.without(place))
    for name, part in statement.then.items():
        for found in part.atoms(Relational):
            turned = part.xreplace({found: found.func(found.rhs, found.lhs, evaluate=False)})
            if turned not in (part, sympy.true, sympy.false):
                yield f"{name}: {text(found)} turned round", stated(one, statement, name, turned)
        for number in part.atoms(sympy.Integer):
            other = part.xreplace({number: number + 1})
            if other not in (part, sympy.true, sympy.false):
                yield f"{name}: {number} is {number + 1}", stated(one, statement, name, other)


def stated(one: Claim, statement: Statement, name: str, part: Any) -> Claim:
    changed = replace(statement, then={**statement.then, name: part}, terms={})
    return replace(one, formal=changed, as_written=tuple(re.sub(r"\{\w+\}", "it", words) for words in one.as_written))


def test_no_word_sign_number_or_hypothesis_changes_unnoticed() -> None:
    """Of one claim of every file, all that a slip of the pen could change: the digest tells, and so does the gate."""
    noticed = 0
    for one in {one.source: one for one in FORMAL if one.expected != "corrected"}.values():
        for what, broken in itertools.islice(sabotages(one), 8):
            assert digest(broken) != digest(one), f"{one.id}: {what}"
            noticed += 1
    assert noticed >= 30


if __name__ == "__main__":
    noted = {one.id: digest(one) for one in catalogue().values()}
    REVIEWED.write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
