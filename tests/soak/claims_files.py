"""A file of claims after an accident: its claims, or a refusal; now and then judged in workers, which give verdicts."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from avow.errors import AvowError
from avow.theory.claims import claims_in, run
from avow.theory.claims.claim import Verdict
from tests.soak.damage import STRANGE, bytes_of
from tests.soak.turns import Case, Found, Wrong, tried

SOURCE = Path(__file__).parent.parent / "helpers" / "sample_claims.py"
# Words that stand in place of others, each a mistake that somebody makes.
WORDS = (
    *("None", "1", "''", "[]", "{}", "lambda: 0", "toolbox", "claim", "yield", "return", "raise", "pass", "Evidence"),
    *("1/0", "exit()", "print", "()", "'proved'", "'refuted'", "float('nan')", "...", "*", "not", "b''", "x", "a"),
    *("'corrected'", "'no verdict'", "'é'", "'<b>'", "'\\0'", "('', '')", "object()", "sympy.oo", "sympy.nan", "10**5"),
)
# Workers take seconds to start: of so many files one is judged.
JUDGED = 60


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Files in a folder, loaded here, judged by workers."""
    text = SOURCE.read_text()
    loaded = set(sys.modules)

    def case(seed: int) -> Found:
        rng, path = random.Random(seed), folder / "own.py"
        path.write_bytes(changed(rng, text))
        content = path.read_bytes()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = tried(lambda: claims_in(path))
        finally:
            for name in set(sys.modules) - loaded:
                if name.startswith("claims_of_"):
                    del sys.modules[name]
        if path.read_bytes() != content or {x.name for x in folder.iterdir()} - {"__pycache__"} != {"own.py"}:
            raise Wrong("a file was lost, or left")
        if isinstance(found, AvowError):
            if str(path) not in str(found) and not str(found).startswith("claim"):
                raise Wrong(f"a refusal that does not name the file: {found}")
            return Found("refused")
        if not found:
            raise Wrong("a file without claims was taken")
        if seed % JUDGED:
            return Found("loaded")
        findings = list(run(found, seconds_each=20, workers=1))
        if {one.claim.id for one in findings} != set(found):
            raise Wrong("a claim got lost")
        for one in findings:
            if one.verdict not in get_args(Verdict) or (
                one.verdict == "no verdict" and not one.trouble and one.evidence
            ):
                raise Wrong(f"{one.claim.id}: {one.verdict} without a word")
            one.plain()
        return Found("judged")

    yield case


def changed(rng: random.Random, text: str) -> bytes:
    """The file after an accident, or after words of it were changed for others."""
    if rng.random() < 0.25:
        return bytes_of(rng, text.encode())
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.2:
            del lines[at]
        elif kind < 0.3:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif "=" in lines[at] and kind < 0.7:
            name, _, _ = lines[at].partition("=")
            value = (
                rng.choice(WORDS) if rng.random() < 0.7 else repr(rng.choice(STRANGE)).replace("nan", "float('nan')")
            )
            lines[at] = f"{name}={value}{',' if lines[at].endswith(',') else ''}"
        else:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = rng.choice(WORDS)
            lines[at] = " ".join(words)
    return "\n".join(lines).encode()
