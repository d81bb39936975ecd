"""The record of what Coq has checked says what stands in the files, and is about the claims as they are worded now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from avow.theory import coq_record
from avow.theory.claims import catalogue
from avow.theory.claims.claim import citations
from avow.theory.coq_record import machine_checked, recorded, words_sha256
from proofs import check

ROOT = Path(__file__).parent.parent
THEOREMS = recorded()["theorems"]


def as_found() -> dict[str, object]:
    """The record as if Coq had just said it."""
    return json.loads(json.dumps(recorded()))


def words() -> dict[str, str]:
    return check.catalogue_words()


def test_every_theorem_is_about_a_claim_of_the_catalogue_and_has_a_file_of_its_name() -> None:
    assert set(THEOREMS) <= set(catalogue())
    assert sorted(THEOREMS) == sorted(check.claim_of(path) for path in check.theorem_files())
    assert all((check.FOLDER / theorem["file"]).is_file() for theorem in THEOREMS.values())


def test_the_files_are_those_on_record() -> None:
    assert recorded()["files"] == {path.name: coq_record.sha256_of(path) for path in check.FOLDER.glob("*.v")}
    assert recorded()["definitions"] == (check.FOLDER / check.DEFINITIONS).read_text(encoding="utf-8")


def table() -> list[list[str]]:
    """The rows of the table of docs/proofs.md: claims, corollaries, what rests on them, and their checker."""
    lines = (ROOT / "docs" / "proofs.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| claim | corollary | what rests on it | checked by |") + 2
    end = lines.index("", start)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


def test_the_page_lists_every_lemma_with_its_checker_and_every_corollary() -> None:
    checkers = {claim: checker for claims, _, _, checker in table() for claim in re.findall(r"`([\w-]+)`", claims)}
    by_coq = {claim for claim, checker in checkers.items() if checker == "Coq and the ledger"}
    assert by_coq == set(THEOREMS) and set(checkers.values()) == {"Coq and the ledger", "the ledger"}
    assert set(checkers) <= set(catalogue())
    listed = {claims.strip("`"): re.findall(r"`(\w+)`", corollaries) for claims, corollaries, _, _ in table()}
    for claim, theorem in THEOREMS.items():
        assert listed.get(claim, []) == list(theorem["corollaries"])


def test_every_claim_that_the_library_cites_is_on_the_page() -> None:
    # The ledger and the pages of the lab show claims; constructions are proved by their own checks.
    cited = {
        claim
        for claim, modules in citations().items()
        if any(not module.startswith(("theory/", "lab/")) for module in modules)
    }
    assert len(cited) > 10
    assert cited <= {claim for claims, *_ in table() for claim in re.findall(r"`([\w-]+)`", claims)}


def test_theorems_and_claims_are_as_they_were_when_one_was_read_beside_the_other() -> None:
    assert check.differences(as_found(), recorded(), words()) == []


@pytest.mark.parametrize("part", ["statement", "amended"])
def test_a_changed_word_of_a_claim_has_to_be_read_beside_its_theorem_again(part: str) -> None:
    claim = catalogue()["heads-discrete"]
    record = machine_checked(claim.id)
    assert record is not None and record.covers(claim.statement, claim.amended)
    changed = {"statement": claim.statement, "amended": claim.amended}
    changed[part] = changed[part].replace(r"\ln", r"2\ln", 1)
    assert not record.covers(**changed)
    faults = check.differences(as_found(), recorded(), words() | {claim.id: words_sha256(**changed)})
    assert len(faults) == 1 and "--read heads-discrete" in faults[0]


def test_a_changed_statement_of_a_theorem_has_to_be_read_beside_its_claim_again() -> None:
    found = as_found()
    theorem = found["theorems"]["separable-rows"]
    theorem["statement"] = theorem["statement"].replace("0 < M j", "0 <= M j")
    faults = check.differences(found, recorded(), words())
    assert [fault for fault in faults if "--read separable-rows" in fault] and len(faults) == 2
    # Another layout is no other statement.
    theorem["statement"] = theorem["statement"].replace("0 <= M j", "0 <\n  M j")
    assert check.differences(found, recorded(), words()) == []


def test_a_changed_definition_has_to_be_read_beside_every_claim_again_and_a_comment_does_not() -> None:
    found = as_found()
    found["definitions"] = found["definitions"].replace("Rmax (largest m f) (f m)", "Rmin (largest m f) (f m)")
    assert found["definitions"] != recorded()["definitions"]
    assert len(check.differences(found, recorded(), words())) == len(THEOREMS)
    found["definitions"] = recorded()["definitions"] + "\n(* More words. *)\n"
    assert check.differences(found, recorded(), words()) == []


def test_a_file_that_is_new_gone_or_different_differs_from_the_record() -> None:
    for change in ({"sums.v": "0"}, {"more.v": "0"}):
        found = as_found()
        found["files"] |= change
        assert len(check.differences(found, recorded(), words())) == 1
    found = as_found()
    del found["files"]["copy_gap.v"], found["theorems"]["copy-gap"]
    assert len(check.differences(found, recorded(), words())) == 2


def test_a_theorem_that_names_no_claim_is_a_fault() -> None:
    known = words()
    del known["copy-gap"]
    assert check.differences(as_found(), recorded(), known) == [
        "copy-gap: is no claim of the catalogue; a file has the name of the claim that it proves"
    ]


def test_no_theorem_rests_on_more_than_classical_reals() -> None:
    for theorem in THEOREMS.values():
        assert theorem["axioms"] and set(theorem["axioms"]) <= check.CLASSICAL_REALS


def test_no_file_leaves_anything_unproved() -> None:
    for path in check.FOLDER.glob("*.v"):
        assert check.gaps(path.read_text(encoding="utf-8")) == []
    assert check.gaps("Lemma a : 1 = 2.\nProof. (* admit nothing *) Admitted.") == ["Admitted"]
    assert check.gaps("Axiom a : 1 = 2.") == ["Axiom"]
    assert check.gaps("Section s. Variable x : R. Hypothesis h : x = 1.") == ["Variable", "Hypothesis"]
    assert check.gaps("Lemma a : 1 = 1. Proof. give_up. Abort.") == ["give_up", "Abort"]


def test_a_record_says_whether_the_source_is_here_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> str:
        record = machine_checked("copy-gap")
        assert record is not None
        return record.source

    assert source() == "unchanged"
    monkeypatch.setattr(coq_record, "SOURCES", tmp_path)
    assert source() == "not here"
    assert str(machine_checked("copy-gap")).endswith(f"copy_gap.v had SHA-256 {recorded()['files']['copy_gap.v']})")
    for path in check.FOLDER.glob("*.v"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert source() == "unchanged"
    (tmp_path / "sums.v").write_text("")
    assert source() == "changed"
    assert "make proofs checks it again" in str(machine_checked("copy-gap"))


def test_a_claim_without_a_theorem_has_none() -> None:
    assert machine_checked("finite-mask") is None
    assert machine_checked("no-such-claim") is None


def test_who_has_no_coq_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    assert check.main([]) == 1
    assert "apt-get install coq" in capsys.readouterr().err
