"""Coq rejects what is not proved or rests on an axiom of one's own; a changed statement is seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from avow.theory.coq_record import recorded
from proofs import check

pytestmark = pytest.mark.proofs

# The shortest theorem, and what stands in its statement.
NAME = "separable_rows"
POSITIVE = "(forall j, (j < n)%nat -> 0 < M j)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shortest theorem and what it imports."""
    for name in ("definitions.v", "sums.v", f"{NAME}.v"):
        shutil.copy(check.FOLDER / name, tmp_path)
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


def judged(folder: Path, work: Path, name: str = NAME) -> check.Theorem:
    work.mkdir(exist_ok=True)
    check.compile_in(work, sorted(folder.glob("*.v")))
    return check.judge(work, [(name, name)])[0]


def found(folder: Path, theorem: check.Theorem) -> dict[str, Any]:
    """The record, but for what Coq has just said of one theorem."""
    definitions = (folder / check.DEFINITIONS).read_text(encoding="utf-8")
    entry = {**recorded()["theorems"]["separable-rows"], "statement": theorem.statement, "axioms": theorem.axioms}
    return recorded() | {"definitions": definitions, "theorems": recorded()["theorems"] | {"separable-rows": entry}}


def test_what_coq_says_is_what_is_on_record(folder: Path, tmp_path: Path) -> None:
    theorem = judged(folder, tmp_path / "work")
    assert check.differences(found(folder, theorem), recorded(), check.catalogue_words()) == []


def test_an_admitted_proof_is_rejected(folder: Path, tmp_path: Path) -> None:
    path = folder / f"{NAME}.v"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.index("Proof.")] + "Proof. Admitted.\n", encoding="utf-8")
    with pytest.raises(check.Rejected, match=r"separable_rows\.v: Admitted leaves something unproved"):
        judged(folder, tmp_path / "work")


def test_an_admitted_proof_is_seen_by_coq_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "gaps", lambda text: [])
    path = folder / "sums.v"
    edit(path, "Proof. intros H. apply Rdiv_lt_0_compat", "Proof. Admitted. Lemma unused : 0 < 1. Proof. lra. Qed.\n(*")
    edit(path, "exp_sum_pos, H]. Qed.\n\nLemma softmax_sum", "exp_sum_pos, H]. Qed. *)\n\nLemma softmax_sum")
    with pytest.raises(check.Rejected, match=r"the proof of separable_rows rests on sums\.softmax_pos"):
        judged(folder, tmp_path / "work")


@pytest.mark.parametrize(
    "command", ["Axiom easy", "Parameter easy", "#[bypass_check(guard)] Fixpoint easy (n : nat) {struct n}"]
)
def test_an_axiom_of_ones_own_is_rejected(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    path, body = folder / f"{NAME}.v", " := easy n." if "Fixpoint" in command else "."
    text = path.read_text(encoding="utf-8").replace("Theorem", f"{command} : False{body}\n\nTheorem")
    number = " 0%nat" if "Fixpoint" in command else ""
    path.write_text(text[: text.index("Proof.")] + f"Proof. destruct (easy{number}). Qed.\n", encoding="utf-8")
    with pytest.raises(check.Rejected, match="leaves something unproved"):
        judged(folder, tmp_path / "work")
    # Were the word overlooked, Coq would still name it.
    monkeypatch.setattr(check, "gaps", lambda text: [])
    with pytest.raises(check.Rejected, match=r"the proof of separable_rows rests on separable_rows\.easy"):
        judged(folder, tmp_path / "more_work")


def test_a_proof_that_does_not_prove_is_rejected(folder: Path, tmp_path: Path) -> None:
    edit(folder / f"{NAME}.v", POSITIVE, POSITIVE.replace("0 <", "1 <"))
    with pytest.raises(check.Rejected, match=r"coqc separable_rows\.v"):
        judged(folder, tmp_path / "work")


def test_a_weaker_statement_that_is_proved_differs_from_the_record(folder: Path, tmp_path: Path) -> None:
    edit(folder / f"{NAME}.v", POSITIVE, POSITIVE.replace("0 <", "0 <="))
    edit(folder / f"{NAME}.v", "- intros j _. apply sum_pos", "- intros j _. apply Rlt_le, sum_pos")
    theorem = judged(folder, tmp_path / "work")
    faults = check.differences(found(folder, theorem), recorded(), check.catalogue_words())
    assert [fault for fault in faults if fault.startswith("separable-rows: its statement is")]
    assert [fault for fault in faults if "--read separable-rows" in fault]


def test_a_theorem_speaks_the_words_of_the_definitions_alone(folder: Path, tmp_path: Path) -> None:
    path = folder / f"{NAME}.v"
    edit(path, "Theorem", "Definition positive (x : R) : Prop := 0 < x.\n\nTheorem")
    edit(path, POSITIVE, POSITIVE.replace("0 < M j", "positive (M j)"))
    edit(path, "- intros j _. apply sum_pos", "- intros j _. unfold positive. apply sum_pos")
    with pytest.raises(check.Rejected, match=r"separable_rows speaks of separable_rows\.positive"):
        judged(folder, tmp_path / "work")


def test_a_notation_of_ones_own_does_not_hide_a_statement(folder: Path, tmp_path: Path) -> None:
    path = folder / f"{NAME}.v"
    edit(path, "Theorem", 'Notation "x < y" := (x <= y) : R_scope.\n\nTheorem')
    edit(path, "- intros j _. apply sum_pos", "- intros j _. apply Rlt_le, sum_pos")
    assert "0 <= M j" in judged(folder, tmp_path / "work").statement


def test_a_missing_theorem_is_rejected(folder: Path, tmp_path: Path) -> None:
    edit(folder / f"{NAME}.v", f"Theorem {NAME}", "Theorem another_name")
    with pytest.raises(check.Rejected, match=rf"{NAME} was not found"):
        judged(folder, tmp_path / "work")


@pytest.mark.parametrize("name", ["easy", "Classical_Prop"])
def test_coqchk_sees_an_axiom_below_a_theorem(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(check, "gaps", lambda text: [])
    # The second has the name of an axiom of Coq, and is not it.
    (folder / f"{name}.v").write_text("Axiom classic : 1 = 2.\n", encoding="utf-8")
    (tmp_path / "work").mkdir()
    check.compile_in(tmp_path / "work", [folder / f"{name}.v"])
    with pytest.raises(check.Rejected, match=rf"coqchk found more than the axioms of classical reals.*{name}\.classic"):
        check.recheck(tmp_path / "work", [name])
