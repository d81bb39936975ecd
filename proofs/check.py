"""Check every theorem of this folder with Coq, and compare what Coq says with the record.

    python -m proofs.check                                 or: make proofs
    python -m proofs.check --record                        write avow/theory/coq_record.json
    python -m proofs.check --record --read copy-gap        the same, once theorem and claim were read side by side

The files are compiled in an empty folder, so nothing that was compiled before counts. Then Coq prints each theorem, and
the axioms that its proof rests on, and the independent checker of compiled files, coqchk, goes over all of it again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from avow.theory.coq_record import RECORD, sha256_of, words_sha256

FOLDER = Path(__file__).parent
# Coq's real numbers are Dedekind cuts with classical logic; the proofs may rest on what they rest on, and on no more.
CLASSICAL_REALS = frozenset(
    {
        "ClassicalDedekindReals.sig_forall_dec",
        "ClassicalDedekindReals.sig_not_dec",
        "Classical_Prop.classic",
        "FunctionalExtensionality.functional_extensionality_dep",
    }
)
# Files that prove no claim: what theorems speak of, lemmas they share, and that their hypotheses can be met.
DEFINITIONS, SHARED = "definitions.v", ("definitions.v", "sums.v", "examples.v")
# What would make a file say more than it proves. Coq reports each of these, too; this is seen without Coq.
GAPS = re.compile(
    r"\b(Admitted|admit|give_up|Abort|Axioms?|Parameters?|Conjecture|Hypothes[ie]s|Variables?|Context|Unset|bypass_check)\b"
)
MISSING = "make proofs needs Coq 8.16 or newer, and there is no coqc here; on Debian and Ubuntu: apt-get install coq"


class Rejected(Exception):
    """A file that Coq does not accept, or that proves something else than it should."""


class Theorem(NamedTuple):
    """A theorem or corollary as Coq printed it, with the axioms that its proof rests on."""

    statement: str
    axioms: tuple[str, ...]


def theorem_files(folder: Path = FOLDER) -> list[Path]:
    """The files that prove a claim each, by name."""
    return sorted(path for path in folder.glob("*.v") if path.name not in SHARED)


def claim_of(path: Path) -> str:
    """The id of the claim that a file proves; its theorem has the file's name."""
    return path.stem.replace("_", "-")


def names_in(path: Path) -> list[str]:
    """The theorem of a file, which has the file's name, and the corollaries that certificates use."""
    text = without_comments(path.read_text(encoding="utf-8"))
    return [path.stem, *re.findall(r"\bCorollary (\w+)", text)]


def without_comments(text: str) -> str:
    """A Coq file without its comments, which do not nest here, one space between words."""
    return " ".join(re.sub(r"\(\*.*?\*\)", " ", text, flags=re.DOTALL).split())


def gaps(text: str) -> list[str]:
    """The words in a Coq file that leave something unproved."""
    return GAPS.findall(without_comments(text))


def compile_in(work: Path, files: Iterable[Path]) -> None:
    """Compile Coq files, copied to an empty folder, in the order of their imports.

    Raises:
        Rejected: a file has a gap, or Coq refuses it.
    """
    for path in files:
        found = gaps(path.read_text(encoding="utf-8"))
        if found:
            raise Rejected(f"{path.name}: {found[0]} leaves something unproved; prove it")
        shutil.copy(path, work)
    order = _coq(work, "coqdep", "-Q", ".", "avow", "-sort", *(path.name for path in work.glob("*.v"))).split()
    for name in order:
        _coq(work, "coqc", "-q", "-Q", ".", "avow", name)


def judge(work: Path, names: Sequence[tuple[str, str]]) -> list[Theorem]:
    """What Coq says of theorems that were compiled, each given by its file and its name.

    Raises:
        Rejected: a theorem is missing, is not in the words of the definitions, or rests on more than classical reals.
    """
    # Of the theorems' own files nothing is imported: a notation or a definition of their own would show.
    lines = ["From avow Require Import definitions.", "Set Printing Width 110."]
    for file, name in names:
        lines.append(f"From avow Require {file}.")
        lines.append(f'Redirect "{file}.{name}.statement" Check {file}.{name}.')
        lines.append(f'Redirect "{file}.{name}.axioms" Print Assumptions {file}.{name}.')
    (work / "judge.v").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _coq(work, "coqc", "-q", "-Q", ".", "avow", "judge.v")
    return [_theorem(work, file, name) for file, name in names]


def _theorem(work: Path, file: str, name: str) -> Theorem:
    said, listed = (
        (work / f"{file}.{name}.{part}.out").read_text(encoding="utf-8") for part in ("statement", "axioms")
    )
    # Of a statement Coq prints name, colon and type, indented by seven; of axioms, a heading and a type for each.
    statement = textwrap.dedent(said.removeprefix(f"{file}.{name}").replace("     : ", " " * 7, 1)).strip()
    heading, *entries = listed.splitlines()
    if heading not in ("Axioms:", "Closed under the global context"):
        raise Rejected(f"{file}.v: Coq said of what {name} rests on: {listed.strip()}")
    # Continued lines of a type are indented; every other line names an axiom, or says what else was assumed.
    axioms = sorted(entry.partition(" : ")[0] for entry in entries if not entry.startswith(" "))
    more = sorted(set(axioms) - CLASSICAL_REALS)
    if more:
        raise Rejected(
            f"{file}.v: the proof of {name} rests on {', '.join(more)}; only the axioms of classical reals may be used"
        )
    files = "|".join(path.stem for path in work.glob("*.v"))
    own = re.search(rf"\b({files})\.\w+", statement)
    if own:
        raise Rejected(f"{file}.v: {name} speaks of {own[0]}; its words belong in {DEFINITIONS}")
    return Theorem(statement, tuple(axioms))


def recheck(work: Path, names: Sequence[str]) -> None:
    """Go over compiled theorems, and all of Coq's library below them, with coqchk.

    Raises:
        Rejected: coqchk refuses one, or finds other axioms than those of classical reals.
    """
    said = _coq(work, "coqchk", "-silent", "-o", "-Q", ".", "avow", *(f"avow.{name}" for name in names))
    parts = {
        title: body.split() for title, body in re.findall(r"^\* ([^:\n]+):(.*?)(?=^\* |\Z)", said, re.DOTALL | re.M)
    }
    axioms = parts.pop("Axioms", [])
    # Here an axiom has its full name, and Coq's own begin with Coq.
    allowed = tuple(f".{axiom}" for axiom in CLASSICAL_REALS)
    others = [axiom for axiom in axioms if not (axiom.startswith("Coq.") and axiom.endswith(allowed))]
    unsafe = [title for title, body in parts.items() if title != "Theory" and body != ["<none>"]]
    if not axioms or others or unsafe:
        raise Rejected(f"coqchk found more than the axioms of classical reals: {'; '.join(others + unsafe) or said}")


def _coq(work: Path, program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise Rejected(f"{program} {arguments[-1]}: {(done.stderr or done.stdout).strip()}")
    # coqchk sums up on the stream of errors.
    return done.stdout or done.stderr


def meaning_sha256(theorem: Mapping[str, Any], definitions: str) -> str:
    """A SHA-256 of what a theorem and its corollaries say, and of the definitions, apart from comments and layout."""
    return words_sha256(
        json.dumps(_flat([theorem["statement"], theorem["corollaries"]])), without_comments(definitions)
    )


def found_by_coq(folder: Path = FOLDER) -> dict[str, Any]:
    """What Coq says of every theorem of a folder, as the record has it, but for what was read beside what."""
    files = sorted(folder.glob("*.v"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        compile_in(work, files)
        names = [(path.stem, theorem) for path in theorem_files(folder) for theorem in names_in(path)]
        judged = dict(zip(names, judge(work, names), strict=True))
        recheck(work, [path.stem for path in files])
    theorems = {}
    for path in theorem_files(folder):
        own = {name: theorem for (file, name), theorem in judged.items() if file == path.stem}
        theorems[claim_of(path)] = {
            "theorem": path.stem,
            "file": path.name,
            "statement": own[path.stem].statement,
            "corollaries": {name: theorem.statement for name, theorem in own.items() if name != path.stem},
            "axioms": sorted({axiom for theorem in own.values() for axiom in theorem.axioms}),
        }
    return {
        "coq": _coq(folder, "coqc", "--print-version").split()[0],
        "files": {path.name: sha256_of(path) for path in files},
        "definitions": (folder / DEFINITIONS).read_text(encoding="utf-8"),
        "theorems": theorems,
    }


def differences(found: Mapping[str, Any], record: Mapping[str, Any], words: Mapping[str, str]) -> list[str]:
    """Where what Coq found differs from the record, or a pair of theorem and claim has not been read side by side.

    Args:
        found: of every theorem, as `found_by_coq` returns it.
        record: the record.
        words: of every claim, its `words_sha256`.
    """
    faults = []
    for name in sorted(set(found["files"]) | set(record["files"])):
        if found["files"].get(name) != record["files"].get(name):
            faults.append(f"{name} is not the file on record; write the record again: python -m proofs.check --record")
    for id in sorted(set(record["theorems"]) - set(found["theorems"])):
        faults.append(f"{id} is on record, and no file proves it; write the record again")
    for id, theorem in found["theorems"].items():
        kept = record["theorems"].get(id, {"read_beside": {}})
        for part in ("theorem", "file", "statement", "corollaries", "axioms"):
            if id in record["theorems"] and _flat(theorem[part]) != _flat(kept[part]):
                faults.append(f"{id}: its {part} is {theorem[part]!r}, and on record {kept[part]!r}")
        if id not in words:
            faults.append(f"{id}: is no claim of the catalogue; a file has the name of the claim that it proves")
        elif kept["read_beside"] != pair(found, id, words):
            faults.append(
                f"{id}: the theorem or the claim's words have changed since one was read beside the other; read both,"
                f" then: python -m proofs.check --record --read {id}"
            )
    return faults


def _flat(part: Any) -> Any:
    """A string, or a list or table of strings, without its layout."""
    if isinstance(part, str):
        return " ".join(part.split())
    if isinstance(part, Mapping):
        return {name: _flat(one) for name, one in part.items()}
    return [_flat(one) for one in part]


def pair(found: Mapping[str, Any], id: str, words: Mapping[str, str]) -> dict[str, str]:
    """What a theorem says and the words of its claim, each as a SHA-256."""
    meaning = meaning_sha256(found["theorems"][id], found["definitions"])
    return {"theorem": meaning, "claim": words.get(id, "")}


def catalogue_words() -> dict[str, str]:
    """Of every claim of the catalogue, its `words_sha256`."""
    from avow.theory.claims import catalogue

    return {id: words_sha256(claim.statement, claim.amended) for id, claim in catalogue().items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and print what was found; 1 if Coq rejects a file or the record says something else."""
    parser = argparse.ArgumentParser(prog="python -m proofs.check", description="Check every theorem with Coq.")
    parser.add_argument("--record", action="store_true", help="write what Coq said to the record")
    parser.add_argument(
        "--read", nargs="+", default=[], metavar="CLAIM", help="claims that were read beside their theorems"
    )
    options = parser.parse_args(arguments)
    if shutil.which("coqc") is None:
        print(MISSING, file=sys.stderr)
        return 1
    start = time.monotonic()
    try:
        found = found_by_coq()
    except Rejected as error:
        print(error, file=sys.stderr)
        return 1
    words = catalogue_words()
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"files": {}, "theorems": {}}
    unknown = sorted(set(options.read) - set(found["theorems"]))
    if unknown:
        print(f"--read {' '.join(unknown)}: no theorem; known: {' '.join(found['theorems'])}", file=sys.stderr)
        return 1
    if options.record:
        for id, theorem in found["theorems"].items():
            kept = record["theorems"].get(id, {}).get("read_beside", {})
            theorem["read_beside"] = pair(found, id, words) if id in options.read else kept
        record = found
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    faults = differences(found, record, words)
    for id, theorem in found["theorems"].items():
        print(f"{id}: {', '.join([theorem['theorem'], *theorem['corollaries']])}")
        print(f"  axioms: {', '.join(axiom.rpartition('.')[2] for axiom in theorem['axioms'])}")
    count = sum(1 + len(theorem["corollaries"]) for theorem in found["theorems"].values())
    print(f"{count} lemmas checked by Coq {found['coq']} and coqchk in {time.monotonic() - start:.0f} s;")
    print(f"no axioms but those of classical reals: {', '.join(sorted(CLASSICAL_REALS))}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
