"""Every formal claim of the catalogue, attacked: hypotheses dropped, steps made idle, words changed."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import sympy

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
@pytest.mark.parametrize("one", FORMAL, ids=lambda one: one.id)
def test_some_case_meets_every_hypothesis(one: Claim) -> None:
    """A statement that speaks of nothing would be true."""
    assert one.falsifier is not None, "a claim without a search has nothing to press on its page"
    if reason := one.not_applicable():
        pytest.skip(reason)
    for variant in ["as stated", *(["what is true instead"] if one.amended else [])]:
        cases = itertools.islice(trials(one, variant), 500)
        assert any((trial.excess is not None and trial.excess > -1e-3) or trial.broken for trial in cases), variant


def digest(one: Claim) -> str:
    """What changes with any word or formula of a claim, in the statement or beside it."""
    formal = [one.as_stated(), one.as_amended()]
    said = [[s.latex(), s.assumptions(), s.symbol_key(), {k: text(v) for k, v in s.terms.items()}] for s in formal if s]
    words = [one.id, one.topic, one.expected, one.plain, one.amended_plain, said]
    return hashlib.sha256(json.dumps(words, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def test_words_and_formulas_are_those_that_were_read_side_by_side() -> None:
    """A changed word is a changed claim. Read both, then `python -m tests.test_formal_claims` notes that they agree."""
    noted = json.loads(REVIEWED.read_text(encoding="utf-8"))
    assert noted == {one.id: digest(one) for one in FORMAL}


if __name__ == "__main__":
    REVIEWED.write_text(json.dumps({one.id: digest(one) for one in FORMAL}, indent=1) + "\n", encoding="utf-8")
