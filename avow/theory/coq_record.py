"""What Coq has checked of the ledger: the theorem beside a claim, as Coq printed it, and the file that proves it.

The theorems stand in the folder `proofs` of a clone. `python -m proofs.check` compiles them and asks Coq what was
proved and from which axioms; with `--record` it writes the answers to `coq_record.json`, which is what everybody sees
who has no Coq. `docs/proofs.md` says what is checked and how.

A theorem was read beside the words of its claim by a person. Who changes either of the two has to read them again:
`CoqRecord.covers` says whether the words are still those.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RECORD = Path(__file__).with_suffix(".json")
# Beside the package in a clone; a wheel has no such folder.
SOURCES = Path(__file__).parents[2] / "proofs"

# What a claim states and its theorem does not, where the two were read side by side.
NOT_IN_THEOREM = {
    "average-two": "the exact weight and length",
    "dropped-mass": "that the bound is reached",
    "ema-bias": "that the share lies between 0 and 1",
    "heads-discrete": "the most that head 1 has at half the length",
    "noise-one-key-discrete": "ε above 1",
    "tail-mass-output": "the output coordinate by coordinate",
}

Source = Literal["unchanged", "changed", "not here"]


@dataclass(frozen=True)
class CoqRecord:
    """A theorem that Coq has checked, and the claim it was read beside.

    Attributes:
        claim_id: the claim.
        theorem: the theorem's name in Coq.
        statement: the theorem as Coq printed it.
        corollaries: what certificates use of it, by name, as Coq printed it.
        definitions: the definitions it is written in, with their comments, as a Coq file.
        axioms: what Coq printed as the axioms of theorem and corollaries, by name: those of classical reals.
        file: the file that proves it, in the folder `proofs`.
        sha256: the SHA-256 of that file when it was checked.
        source: whether the folder of proofs is here as it was then.
        coq: the version of Coq that checked it.
        words_sha256: `words_sha256` of the claim that it was read beside.
    """

    claim_id: str
    theorem: str
    statement: str
    corollaries: Mapping[str, str]
    definitions: str
    axioms: tuple[str, ...]
    file: str
    sha256: str
    source: Source
    coq: str
    words_sha256: str

    def covers(self, statement: str, amended: str) -> bool:
        """Whether these are the words of the claim that the theorem was read beside.

        Args:
            statement: the claim's statement, as LaTeX.
            amended: how it would be right; empty if it is right.

        Returns:
            Whether they are, to the letter.
        """
        return self.words_sha256 == words_sha256(statement, amended)

    def __str__(self) -> str:
        found = {
            "unchanged": f"proofs/{self.file} is unchanged since",
            "changed": "the folder proofs has changed since: make proofs checks it again",
            "not here": f"recorded; {self.file} had SHA-256 {self.sha256}",
        }[self.source]
        without = NOT_IN_THEOREM.get(self.claim_id)
        but = f", but for {without}" if without else ""
        return f"checked by Coq {self.coq} as {self.theorem}{but} ({found})"


def machine_checked(claim_id: str) -> CoqRecord | None:
    """The theorem that Coq has checked of a claim, or None if there is none.

    Show it as "checked by Coq" only if it `covers` the claim's words.

    Args:
        claim_id: a claim's id.

    Returns:
        The theorem on record.

    >>> from avow.theory.coq_record import machine_checked
    >>> machine_checked("copy-gap").theorem
    'copy_gap'
    """
    record = recorded()
    theorem = record["theorems"].get(claim_id)
    if theorem is None:
        return None
    return CoqRecord(
        claim_id,
        theorem["theorem"],
        theorem["statement"],
        theorem["corollaries"],
        record["definitions"],
        tuple(theorem["axioms"]),
        theorem["file"],
        record["files"][theorem["file"]],
        _source(),
        record["coq"],
        theorem["read_beside"]["claim"],
    )


def words_sha256(statement: str, amended: str) -> str:
    """A SHA-256 of a claim's words."""
    return hashlib.sha256(json.dumps([statement, amended]).encode()).hexdigest()


@functools.cache
def recorded() -> Any:
    """The record as JSON has it."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _source() -> Source:
    hashes = recorded()["files"]
    if not any((SOURCES / name).is_file() for name in hashes):
        return "not here"
    # Proofs share lemmas, so a change of any file counts.
    return "unchanged" if all(sha256_of(SOURCES / name) == digest for name, digest in hashes.items()) else "changed"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file; empty if it is missing."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
