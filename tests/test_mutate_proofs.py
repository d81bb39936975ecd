"""What `tests.mutate_proofs` changes in a proof, and when it may not count."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from avow.theory.claims import catalogue
from tests.mutate_proofs import _is_unread, _script, mutants, survivors


def test_what_only_examples_read_is_left_out_and_every_step_stays() -> None:
    text = ast.unparse(_script(catalogue()["features-variance"]))
    assert "torch" not in text and "shows" not in text and "intervals" not in text
    assert all(step in text for step in ("against.case", "proof.known", "proof.sum_delta", "proof.conclude('needed'"))


def test_a_step_that_nothing_reads_stays() -> None:
    script = ast.parse("def prove(proof):\n    step = proof.have(1)\n    number = 2\n    proof.conclude('all', 3)\n")
    (function,) = script.body
    assert isinstance(function, ast.FunctionDef)
    assert [_is_unread(line, function) for line in function.body] == [False, True, False]


def test_each_operation_comparison_and_number_is_changed_once() -> None:
    found = [done for _, done, _ in mutants(ast.parse("if a < b + 1: pass"))]
    assert found == ["comparison: a >= b + 1", "operation: b - 1", "number: 2"]


def test_mutants_of_a_claim_without_its_verdict_do_not_count() -> None:
    with pytest.raises(AssertionError, match="ema-bias has no verdict without its examples"):
        survivors(dataclasses.replace(catalogue()["ema-bias"], expected="refuted"))
