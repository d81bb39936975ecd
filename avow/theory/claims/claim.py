"""A statement about attention as an object: its words, its check, and the rules that turn evidence into a verdict.

    proved          every step of evidence covers the whole stated domain: symbolic, rational, balls, or an exact law
    refuted         a concrete counterexample, evaluated again rigorously
    corrected       refuted as stated, and the amended statement proved beside it
    supported       search or sampling found no violation; never called proved
    no verdict      the check failed, raised, or ran out of time
    not applicable  the claim is about a package that cannot be loaded here

A check is a generator: it yields `Evidence` made by the toolbox, whose functions raise `Unproved` when what they were
given does not hold. It is a function of its *subject* (the formula, constant or object the claim is about),
so a broken subject — a sabotage — goes through the very same check and must be rejected by it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import avow
from avow.core.chart import Picture
from avow.errors import ParameterError, value_text

Verdict = Literal["proved", "refuted", "corrected", "supported", "no verdict", "not applicable"]
Kind = Literal["symbolic", "rational", "balls", "exact law", "counterexample", "search"]
PROOFS: frozenset[str] = frozenset({"symbolic", "rational", "balls", "exact law"})


class Unproved(Exception):
    """A step of a check that does not hold, or that could not be shown to."""


@dataclass(frozen=True)
class Evidence:
    """One step: what kind, about which statement, in words, with the numbers worth keeping (as JSON has them).

    Attributes:
        kind: how it was shown: by symbols, fractions, balls, an exact law, a counterexample, or a search.
        says: the step in words.
        facts: numbers to show beside it, by name.
        amended: whether it is about the correction and not about the statement.
    """

    kind: Kind
    says: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    amended: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or not isinstance(self.says, str) or not isinstance(self.facts, Mapping):
            raise TypeError(f"evidence is of a kind, says something and has facts by name, unlike {self!r}")

    def plain(self) -> dict[str, Any]:
        """The step as JSON has it."""
        return as_json(vars(self))


Check = Callable[[Any], Iterable[Evidence]]
# Of symbols, of fractions and of balls alike.
Formula = Callable[..., Any]


class Versions(NamedTuple):
    """What a claim that is to be corrected is about: as stated, and as amended."""

    stated: Any
    amended: Any


Excess = Callable[..., Any]
"""By how much a case breaks a statement, from its subject and a ball or a whole number each: above zero it does.

An equality is broken by the size of the difference of its sides, an inequality by what one side has over the other.
A docstring says what the numbers stand for, to who reads a case on a page.
"""
# By name, the two ends that a number lies between, or a `range` of whole numbers.
Ranges = dict[str, Any]


class Falsifier(NamedTuple):
    """How to search for a counterexample to a claim: the numbers of a case, and its excess."""

    ranges: Ranges
    stated: Excess
    amended: Excess | None = None
    # Whether equality, where balls can be sure of it, breaks the statement too.
    strict: bool = False


def numbered(names: str, low: float, high: float) -> Ranges:
    """Numbers with these names, all of one range."""
    return dict.fromkeys(names.split(), (low, high))


def of_versions(excess: Excess) -> tuple[Excess, Excess]:
    """The excess of a claim on two `Versions`: as stated, and as amended."""
    return lambda pair, *case: excess(pair.stated, *case), lambda pair, *case: excess(pair.amended, *case)


@dataclass(frozen=True)
class Claim:
    """A statement with everything needed to judge it and to show it.

    Attributes:
        id: its name, a word.
        topic: the heading it is listed under.
        statement: the statement in LaTeX.
        plain: the statement in words.
        expected: the verdict it is recorded with: "proved", "refuted", "corrected" or "supported".
        check: a function of the subject that yields `Evidence`; `claim` makes a `Claim` of it.
        subject: what the claim is about: a formula, a constant, an object.
        sabotage: broken subjects by name; the check must reject each.
        assumptions: what the statement takes for granted, each a short sentence.
        amended: for a correction, the corrected statement in LaTeX.
        amended_plain: the corrected statement in words.
        picture: makes a chart or a table for the page.
        falsifier: how to search for a counterexample, for `avow lab`.
        needs: ids of claims that the proof uses.
        requires: packages the claim is about, "name" or "name==version"; without one of them it does not apply.
        source: the module or file it was found in, from which a worker process loads it.
    """

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
    falsifier: Falsifier | None = None
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _is_text(self.id) or self.id.split() != [self.id]:
            raise ParameterError("claim: id", repr(self.id), "must be a word", 'try "copy-gap"')
        recorded = [verdict for verdict in get_args(Verdict) if verdict not in ("no verdict", "not applicable")]
        if self.expected not in recorded:
            self._refuse("expected", "is not a verdict", f"one of {recorded}")
        if (self.expected == "corrected") != bool(self.amended):
            self._refuse(
                "amended", "must go with a correction", "give `amended` with expected='corrected', and only then"
            )
        for part in ("topic", "statement", "plain", "amended", "amended_plain"):
            if not _is_text(getattr(self, part)):
                self._refuse(part, "must be a string", "write it in quotes")
        for part in ("assumptions", "needs", "requires"):
            words = getattr(self, part)
            if not isinstance(words, tuple) or not all(map(_is_text, words)):
                shown = (words,) if isinstance(words, str) else ("one", "two")
                self._refuse(part, "must be a tuple of strings", f"write {part}={shown}")
        if not isinstance(self.sabotage, Mapping) or not all(map(_is_text, self.sabotage)):
            self._refuse("sabotage", "must hold broken subjects by name", 'write sabotage={"half of it": …}')
        for part in ("check", "picture"):
            if not callable(getattr(self, part)) and (part == "check" or self.picture is not None):
                self._refuse(part, "must be a function", "give it uncalled")

    def _refuse(self, part: str, rule: str, remedy: str) -> NoReturn:
        raise ParameterError(f"claim {self.id}: {part}", value_text(getattr(self, part)), rule, remedy)

    @property
    def used_by(self) -> tuple[str, ...]:
        """The modules of avow whose comments cite the claim."""
        return citations().get(self.id, ())

    def words(self) -> dict[str, Any]:
        """What the claim says and rests on, as JSON has it."""
        names = ("id", "topic", "statement", "plain", "amended", "amended_plain", "assumptions", "used_by", "needs")
        return {name: as_json(getattr(self, name)) for name in names}

    def judge(self) -> Finding:
        """The verdict on the claim, and all that was found on the way."""
        if reason := self.not_applicable():
            return Finding(self, "not applicable", (), 0.0, reason)
        return self._judged(self.subject)

    def not_applicable(self) -> str:
        """Why the claim cannot be judged here, in words; empty where it can."""
        for needed in self.requires:
            package, _, version = needed.partition("==")
            try:
                installed = version_of(package)
            except ModuleNotFoundError as error:
                known = error.name == package
                return f"{package} is not installed here" if known else f"{package} cannot be loaded here: {error}"
            except Exception as error:
                return f"{package} cannot be loaded here: {type(error).__name__}: {error}"
            if version not in ("", installed):
                return f"it is about {package} {version}, and {installed} is installed here"
        return ""

    def judge_sabotage(self, name: str) -> Finding:
        """The verdict on a broken variant, which must not be the expected one.

        Args:
            name: that of the variant in `sabotage`.
        """
        return self._judged(self.sabotage[name])

    def _judged(self, subject: Any) -> Finding:
        start = time.perf_counter()
        evidence: list[Evidence] = []
        trouble, raised = "", False
        try:
            for step in self.check(subject):
                if not isinstance(step, Evidence):
                    raise TypeError(f"a check yields Evidence, not {type(step).__name__}")
                evidence.append(step)
        except Unproved as error:
            trouble = str(error) or "a step does not hold"
        except (Exception, SystemExit) as error:
            trouble, raised = f"the check raised {type(error).__name__}: {error}{_line(error, self.check)}", True
        verdict = "no verdict" if trouble else verdict_of(evidence, bool(self.amended))
        if verdict == "no verdict" and not trouble:
            trouble = _lacking(evidence)
        return Finding(self, verdict, tuple(evidence), time.perf_counter() - start, trouble, raised)


def verdict_of(evidence: Iterable[Evidence], has_amendment: bool) -> Verdict:
    """The verdict some evidence earns.

    Args:
        evidence: what a check yielded.
        has_amendment: whether the claim says how it would be right.

    Returns:
        The verdict.
    """
    steps = list(evidence)
    stated, amended = ([step.kind for step in steps if bool(step.amended) == about] for about in (False, True))
    if "counterexample" in stated:
        if not has_amendment:
            return "refuted"
        return "corrected" if amended and PROOFS.issuperset(amended) else "no verdict"
    if amended or not stated:
        return "no verdict"
    return "proved" if PROOFS.issuperset(stated) else "supported"


def _line(error: BaseException, check: Check) -> str:
    """The line in a check's own file that raised an exception, in brackets; empty if it is not known."""
    file = getattr(getattr(check, "__code__", None), "co_filename", None)
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def _lacking(evidence: Sequence[Evidence]) -> str:
    """What evidence that earns no verdict would need."""
    if not evidence:
        return "the check yielded no evidence"
    if any(step.kind == "counterexample" and not step.amended for step in evidence):
        return "the statement is refuted, and nothing proves the amendment: yield evidence with amended=True"
    return "there is evidence for an amendment, and no counterexample to the statement"


@dataclass(frozen=True)
class Finding:
    """What came of a claim.

    Attributes:
        claim: the claim.
        verdict: the verdict that the evidence earns.
        evidence: the steps, in order.
        seconds: how long the check took.
        trouble: why there is no verdict; empty if there is one.
        raised: whether the check raised anything but `Unproved`: then it broke, and did not reject its subject.
        sabotages: of each broken variant, whether the check rejected it; empty if none was tried.
        picture: the claim's chart or table as data; None if it was not asked for.
    """

    claim: Claim
    verdict: Verdict
    evidence: tuple[Evidence, ...]
    seconds: float
    trouble: str = ""
    raised: bool = False
    sabotages: Mapping[str, bool] = field(default_factory=dict)
    picture: Mapping[str, Any] | None = None

    @property
    def as_recorded(self) -> bool:
        """Whether nothing here contradicts the catalogue: the verdict is the recorded one, or cannot be had here."""
        return self.verdict in (self.claim.expected, "not applicable")

    @property
    def rejected(self) -> bool:
        """Of a broken variant: whether the check itself saw through it."""
        return self.verdict != self.claim.expected and not self.raised

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of evidence, each once, in order."""
        return tuple(dict.fromkeys(step.kind for step in self.evidence))

    def plain(self) -> dict[str, Any]:
        """The claim and what came of it, as JSON has it."""
        names = ("verdict", "as_recorded", "kinds", "seconds", "trouble", "sabotages", "picture")
        return {
            **self.claim.words(),
            **{name: as_json(getattr(self, name)) for name in names},
            "expected": self.claim.expected,
            "evidence": [step.plain() for step in self.evidence],
            "requires": list(self.claim.requires),
        }


@functools.cache
def citations(root: Path = Path(avow.__file__).parent) -> dict[str, tuple[str, ...]]:
    """Every claim that a comment or docstring of a tree cites, as `[claim copy-gap]`, with the modules that do."""
    modules: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for cited in re.findall(r"\[claims? ([\w,\s-]+)\]", path.read_text(encoding="utf-8")):
            for id in re.split(r",\s+", cited):
                modules.setdefault(id, set()).add(path.relative_to(root).with_suffix("").as_posix())
    return {id: tuple(sorted(paths)) for id, paths in modules.items()}


def version_of(package: str) -> str:
    """The version of a package that can be loaded."""
    module = importlib.import_module(package)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "of no version"))


def _is_text(words: Any) -> bool:
    """Whether something is a string that a page can hold: halves of characters (surrogates) it cannot."""
    return isinstance(words, str) and words == as_json(words)


def as_json(fact: Any) -> Any:
    """A number, a word, or lists and tables of them, as JSON can hold it; what it cannot hold is spelled out."""
    if fact is None or isinstance(fact, bool | int):
        return fact
    if isinstance(fact, str):
        return fact.encode(errors="replace").decode()
    if isinstance(fact, float):
        return fact if math.isfinite(fact) else str(fact)
    if isinstance(fact, Mapping):
        return {str(name): as_json(value) for name, value in fact.items()}
    if isinstance(fact, list | tuple | set | frozenset):
        return [as_json(value) for value in fact]
    return as_json(fact.tolist()) if hasattr(fact, "tolist") else str(fact)


def claim(id: str, **words: Any) -> Callable[[Check], Claim]:
    """A check made into a claim.

        @claim("copy-gap", topic="softmax", expected="proved", statement=r"…", plain="…", subject=…, sabotage={"…": …})
        def copy_gap(subject): yield toolbox.identity(…)

    Args:
        id: its name, a word.
        **words: the fields of `Claim`: topic, statement, plain, expected, subject, sabotage and more.

    Returns:
        A decorator that makes a `Claim` of a check, a function that yields evidence.

    Raises:
        ParameterError: a field is missing or does not fit.
    """

    def as_claim(check: Check) -> Claim:
        name = getattr(check, "__name__", "")
        before = getattr(check, "__globals__", {}).get(name)
        if isinstance(before, Claim) and before.id != id:
            rule = f"is also that of the claim {before.id}, which would be lost"
            raise ParameterError(f"claim {id}: name of its function", repr(name), rule, "give each function its own")
        return Claim(id, check=check, **words)

    return as_claim


def claims_on(topic: str) -> Callable[..., Callable[[Check], Claim]]:
    """`claim` for a file whose claims have one topic."""
    return functools.partial(claim, topic=topic)
