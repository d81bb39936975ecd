"""A statement about attention as an object: its words, its check, and the rules that turn evidence into a verdict.

    proved      every step of evidence covers the whole stated domain: symbolic, rational, balls, or an exact law
    refuted     a concrete counterexample, evaluated again rigorously
    corrected   refuted as stated, and the amended statement proved beside it
    supported   search or sampling found no violation; never called proved
    no verdict  the check failed, raised, or ran out of time

A check is a generator: it yields `Evidence` made by `avow.claims.toolbox`, whose functions raise `Unproved` when what
they were given does not hold. It is a function of its *subject* (the formula, constant or object the claim is about),
so a broken subject — a sabotage — goes through the very same check and must be rejected by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from avow.chart import Picture

Verdict = Literal["proved", "refuted", "corrected", "supported", "no verdict"]
Kind = Literal["symbolic", "rational", "balls", "exact law", "counterexample", "search"]
PROOFS: frozenset[str] = frozenset({"symbolic", "rational", "balls", "exact law"})


class Unproved(Exception):
    """A step of a check that does not hold, or that could not be shown to."""


@dataclass(frozen=True)
class Evidence:
    """One step: what kind, about which statement, in words, with the numbers worth keeping (as JSON has them)."""

    kind: Kind
    says: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    amended: bool = False


Check = Callable[[Any], Iterable[Evidence]]


@dataclass(frozen=True)
class Claim:
    """A statement with everything needed to judge it and to show it."""

    id: str
    topic: str
    statement: str
    plain: str
    expected: Verdict
    check: Check
    subject: Any = None
    sabotage: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    amended: str = ""
    amended_plain: str = ""
    picture: Callable[[], Picture] | None = None
    used_by: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def judge(self) -> Finding:
        """The verdict on the claim, and all that was found on the way."""
        return self._judged(self.subject)

    def judge_sabotage(self, name: str) -> Finding:
        """The verdict on a broken variant, which must not be the expected one."""
        return self._judged(self.sabotage[name])

    def _judged(self, subject: Any) -> Finding:
        start = time.perf_counter()
        found: list[Evidence] = []
        trouble = ""
        try:
            found.extend(self.check(subject))
        except Unproved as problem:
            trouble = str(problem) or "a step does not hold"
        except Exception as problem:
            trouble = f"the check raised {type(problem).__name__}: {problem}"
        verdict = "no verdict" if trouble else verdict_of(found, bool(self.amended))
        return Finding(self, verdict, tuple(found), time.perf_counter() - start, trouble)


def verdict_of(evidence: Iterable[Evidence], has_amendment: bool) -> Verdict:
    """The verdict some evidence earns."""
    stated: list[Kind] = []
    amended: list[Kind] = []
    for step in evidence:
        (amended if step.amended else stated).append(step.kind)
    amendment_proved = bool(amended) and PROOFS.issuperset(amended)
    if "counterexample" in stated:
        if not has_amendment:
            return "refuted"
        return "corrected" if amendment_proved else "no verdict"
    if amended or not stated:
        return "no verdict"
    return "proved" if PROOFS.issuperset(stated) else "supported"


@dataclass(frozen=True)
class Finding:
    """What came of a claim."""

    claim: Claim
    verdict: Verdict
    evidence: tuple[Evidence, ...]
    seconds: float
    trouble: str = ""

    @property
    def as_recorded(self) -> bool:
        """Whether the verdict is the one the catalogue records."""
        return self.verdict == self.claim.expected

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of evidence, each once, in order."""
        return tuple(dict.fromkeys(step.kind for step in self.evidence))


def claim(id: str, **words: Any) -> Callable[[Check], Claim]:
    """A check made into a claim.

    @claim("copy-gap", topic="softmax", expected="proved", statement=r"…", plain="…", subject=…, sabotage={"…": …})
    def copy_gap(subject): yield toolbox.identity(…)
    """

    def made(check: Check) -> Claim:
        return Claim(id, check=check, **words)

    return made
