"""What earns each verdict, what a claim must say of itself, and what a finding tells."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb

from avow.errors import ParameterError
from avow.theory.claims import Claim, Evidence, Finding, Unproved, claim, verdict_of
from avow.theory.claims.evidence import PROOFS, as_json

KINDS = [*sorted(PROOFS), "counterexample", "search"]


def step(kind: Any, amended: bool = False) -> Evidence:
    return Evidence(kind, "a step", {}, amended)


def made(evidence: list[Evidence], **words: Any) -> Claim:
    """A claim whose check yields what it is given."""
    words = {"topic": "test", "statement": "x", "plain": "x", "expected": "proved", "source": "avow.x"} | words
    return Claim("a-claim", check=lambda subject: iter(subject), subject=evidence, **words)


@pytest.mark.parametrize("kind", sorted(PROOFS))
def test_steps_that_cover_the_domain_prove(kind: str) -> None:
    assert verdict_of([step(kind)], False) == "proved"
    assert verdict_of([step(kind), step("symbolic")], False) == "proved"


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_among_the_steps_is_never_a_proof(kind: str) -> None:
    assert verdict_of([step(kind), step("search")], False) != "proved"
    assert verdict_of([step("search"), step(kind)], False) != "proved"
    assert verdict_of([step("search")], False) == "supported"


@pytest.mark.parametrize("kind", KINDS)
def test_a_counterexample_refutes_whatever_else_was_found(kind: str) -> None:
    assert verdict_of([step(kind), step("counterexample")], False) == "refuted"


@pytest.mark.parametrize("kind", sorted(PROOFS))
def test_a_correction_is_a_counterexample_and_a_proof_of_the_amendment(kind: str) -> None:
    assert verdict_of([step("counterexample"), step(kind, True)], True) == "corrected"


@pytest.mark.parametrize(
    "evidence",
    [
        [step("counterexample")],
        [step("counterexample"), step("search", True)],
        [step("counterexample"), step("symbolic", True), step("search", True)],
        [step("counterexample"), step("counterexample", True)],
        [step("counterexample"), step("symbolic")],
        [step("symbolic", True)],
        [step("symbolic"), step("symbolic", True)],
        [],
    ],
)
def test_an_amendment_that_is_not_proved_corrects_nothing(evidence: list[Evidence]) -> None:
    assert verdict_of(evidence, True) == "no verdict"


def test_no_evidence_is_no_verdict() -> None:
    assert verdict_of([], False) == "no verdict"
    found = made([]).judge()
    assert (found.verdict, found.trouble) == ("no verdict", "the check yielded no evidence")


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ([step("counterexample")], "the statement is refuted, and nothing proves the amendment"),
        ([step("counterexample"), step("search", True)], "the statement is refuted, and nothing proves the amendment"),
        ([step("symbolic", True)], "there is evidence for an amendment, and no counterexample"),
        ([step("symbolic"), step("symbolic", True)], "there is evidence for an amendment, and no counterexample"),
    ],
)
def test_no_verdict_says_what_it_lacks(evidence: list[Evidence], words: str) -> None:
    def check(_: Any) -> Iterator[Evidence]:
        yield from evidence

    one = Claim("x", topic="t", statement="x", plain="x", expected="corrected", amended="y", check=check)
    assert (one.judge().verdict, one.judge().trouble[: len(words)]) == ("no verdict", words)


def test_a_step_that_does_not_hold_leaves_no_verdict_and_its_words() -> None:
    def check(_: Any) -> Iterator[Evidence]:
        yield step("symbolic")
        raise Unproved("the second step does not hold")

    found = Claim("x", topic="t", statement="x", plain="x", expected="proved", check=check).judge()
    assert (found.verdict, found.trouble, len(found.evidence)) == ("no verdict", "the second step does not hold", 1)
    assert not found.as_recorded and not found.raised


@pytest.mark.parametrize("problem", [ZeroDivisionError("by zero"), SystemExit(2)])
def test_a_check_that_raises_has_not_rejected_anything(problem: BaseException) -> None:
    def check(subject: Any) -> Iterator[Evidence]:
        if subject == "broken":
            raise problem
        yield step("symbolic")

    words = {"topic": "t", "statement": "x", "plain": "x", "expected": "proved", "source": "avow.x"}
    one = Claim("x", check=check, sabotage={"raises": "broken"}, **words)  # type: ignore[arg-type]
    assert one.judge().as_recorded
    found = one.judge_sabotage("raises")
    assert found.verdict == "no verdict" and found.raised and not found.rejected
    line = check.__code__.co_firstlineno + 2
    assert found.trouble == f"the check raised {type(problem).__name__}: {problem} (line {line})"


def test_a_sabotage_is_rejected_when_the_check_says_no() -> None:
    proved, searched = [step("symbolic")], [step("search")]
    one = made(proved, sabotage={"weaker": searched, "as good": proved})
    assert one.judge_sabotage("weaker").rejected
    assert not one.judge_sabotage("as good").rejected


def test_a_check_that_yields_anything_but_evidence_is_told_so() -> None:
    found = made(["proved, trust me"]).judge()  # type: ignore[list-item]
    assert found.verdict == "no verdict"
    assert found.trouble == "the check raised TypeError: a check yields Evidence, not str"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"expected": "true"}, "claim a-claim: expected='true' is not a verdict; one of ['proved', 'refuted', "),
        ({"expected": "no verdict"}, "claim a-claim: expected='no verdict' is not a verdict; one of "),
        ({"expected": "corrected"}, "claim a-claim: amended='' must go with a correction; give `amended`"),
        ({"amended": "y"}, "claim a-claim: amended='y' must go with a correction; give `amended`"),
        ({"needs": "x"}, "claim a-claim: needs='x' must be a tuple of strings; write needs=('x',)"),
        ({"assumptions": None}, "claim a-claim: assumptions=None must be a tuple of strings; write assumptions=('one'"),
        ({"requires": (5,)}, "claim a-claim: requires=(5,) must be a tuple of strings; write requires=('one', 'two')"),
        ({"topic": 5}, "claim a-claim: topic=5 must be a string; write it in quotes"),
        ({"plain": "half a \ud800"}, "claim a-claim: plain='half a \\ud800' must be a string; write it in quotes"),
        ({"sabotage": [2]}, 'claim a-claim: sabotage=[2] must hold broken subjects by name; write sabotage={"half of'),
        ({"sabotage": {1: 2}}, "claim a-claim: sabotage={1: 2} must hold broken subjects by name; write "),
        ({"picture": "x"}, "claim a-claim: picture='x' must be a function; give it uncalled"),
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        made([], **words)


@pytest.mark.parametrize("id", ["", "two words", " padded", "two\nlines", 5])
def test_a_claim_has_a_name(id: Any) -> None:
    with pytest.raises(ParameterError, match=re.escape(f'claim: id={id!r} must be a word; try "copy-gap"')):
        claim(id, topic="t", statement="x", plain="x", expected="proved")(lambda _: [])


@pytest.mark.parametrize("unlike", [("magic", "a step"), ("symbolic", 5), ("symbolic", "a step", 7)])
def test_evidence_is_of_a_kind_and_says_something(unlike: Any) -> None:
    with pytest.raises(TypeError, match="evidence is of a kind, says something and has facts by name, unlike Evidence"):
        Evidence(*unlike)


def test_a_claim_whose_function_would_take_another_s_place_is_refused() -> None:
    words = {"topic": "t", "statement": "x", "plain": "x", "expected": "proved", "source": "avow.x"}
    scope: dict[str, Any] = {"claim": claim, "words": words}
    exec("@claim('first', **words)\ndef check(_): return []", scope)
    exec("@claim('first', **words)\ndef check(_): return []", scope)  # the same file, loaded again
    message = "claim second: name of its function='check' is also that of the claim first, which would be lost; give"
    with pytest.raises(ParameterError, match=re.escape(message)):
        exec("@claim('second', **words)\ndef check(_): return []", scope)


def test_a_claim_about_a_missing_package_does_not_apply_and_is_no_failure() -> None:
    one = made([step("symbolic")], requires=("json", "no_such_package"))
    found = one.judge()
    assert (found.verdict, found.trouble) == ("not applicable", "no_such_package is not installed here")
    assert found.as_recorded and found.evidence == ()
    assert made([step("symbolic")], requires=("json",)).judge().verdict == "proved"
    assert made([step("search")], requires=("json",)).judge().as_recorded is False


def test_a_package_that_is_there_but_broken_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_neighbour.py").write_text("raise RuntimeError('wants an older torch')")
    monkeypatch.syspath_prepend(tmp_path)
    found = made([step("symbolic")], requires=("broken_neighbour",)).judge()
    assert found.verdict == "not applicable"
    assert found.trouble == "broken_neighbour cannot be loaded here: RuntimeError: wants an older torch"


def test_a_claim_about_another_version_does_not_apply(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "versioned_neighbour.py").write_text("__version__ = '0.4'\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = made([step("symbolic")], requires=("versioned_neighbour==0.3",)).judge()
    assert found.verdict == "not applicable"
    assert found.trouble == "it is about versioned_neighbour 0.3, and 0.4 is installed here"
    assert made([step("symbolic")], requires=("versioned_neighbour==0.4",)).judge().verdict == "proved"


def test_a_finding_is_json_all_the_way() -> None:
    facts = {
        "third": Fraction(1, 3),
        "ball": arb(2),
        "tensor": torch.ones(2),
        "nothing": math.nan,
        "far": [math.inf, (1, True)],
        "by": {1: None},
    }
    one = made([Evidence("symbolic", "a step", facts)], assumptions=("real arithmetic",))
    told = json.loads(json.dumps(one.judge().plain(), allow_nan=False))
    assert told["evidence"][0]["facts"] == {
        "third": "1/3",
        "ball": "2.00000000000000",
        "tensor": [1.0, 1.0],
        "nothing": "nan",
        "far": ["inf", [1, True]],
        "by": {"1": None},
    }
    assert told["verdict"] == told["expected"] == "proved" and told["as_recorded"] is True
    assert told["kinds"] == ["symbolic"] and told["used_by"] == []
    for name in ("id", "topic", "statement", "plain", "amended", "assumptions", "seconds", "trouble", "needs"):
        assert name in told
    assert told["sabotages"] == {} and told["picture"] is None


def test_numbers_json_cannot_hold_are_spelled_out() -> None:
    assert as_json(-math.inf) == "-inf"
    assert as_json({"a": {2}}) == {"a": [2]}


def test_kinds_are_named_once_in_order() -> None:
    steps = (step("balls"), step("symbolic"), step("balls"))
    assert Finding(made([]), "proved", steps, 0.0).kinds == ("balls", "symbolic")
