"""A statement about attention as an object: its words, its check, and the rules that turn evidence into a verdict.

    proved          every step of evidence covers the whole stated domain: symbolic, rational, or balls
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
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import avow
from avow.core.chart import Picture
from avow.errors import ParameterError, value_text
from avow.theory.claims.evidence import PROOFS, Evidence, Unproved, as_json
from avow.theory.coq_record import machine_checked

if TYPE_CHECKING:
    from avow.theory.claims.formal import Statement

Verdict = Literal["proved", "refuted", "corrected", "supported", "no verdict", "not applicable"]
# Of a formal claim a check writes a proof, a refutation, or both; of another one it yields evidence.
Check = Callable[..., Any]
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


# The statement as data, or what makes it of the claim's subject.
Formal = Any
# Stands for the claim's own subject, where None may be a subject.
_OWN: Any = object()


@dataclass(frozen=True)
class Claim:
    """A statement with everything needed to judge it and to show it.

    Attributes:
        id: its name, a word.
        topic: the heading it is listed under.
        plain: the statement in words; of a formal claim each formula in them is a term of the statement, by name in
            braces.
        expected: the verdict it is recorded with: "proved", "refuted", "corrected" or "supported".
        check: writes the proof of a formal claim: a function of its `Proof`, its `Refutation`, or both, and of the
            subject; of another claim a function of the subject that yields `Evidence`. `claim` makes a `Claim` of it.
        statement: the statement in LaTeX; of a formal claim it is made of the formal statement.
        formal: the statement as data, or a function of the subject that makes it.
        amendment: for a correction of a formal claim, the corrected statement as data, likewise.
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
        as_written: of a formal claim, `plain` and `amended_plain` before terms took the place of their names.
    """

    id: str
    topic: str
    plain: str
    expected: Verdict
    check: Check
    statement: str = ""
    formal: Formal | None = None
    amendment: Formal | None = None
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
    as_written: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.formal is not None:
            self._spell_out()
        if not _is_text(self.id) or self.id.split() != [self.id]:
            raise ParameterError("claim: id", repr(self.id), "must be a word", 'try "copy-gap"')
        recorded = [verdict for verdict in get_args(Verdict) if verdict not in ("no verdict", "not applicable")]
        if self.expected not in recorded:
            self._refuse("expected", "is not a verdict", f"one of {recorded}")
        if (self.expected == "corrected") != bool(self.amended):
            self._refuse(
                "amended", "must go with a correction", "give `amended` with expected='corrected', and only then"
            )
        if not self.statement:
            self._refuse("statement", "is needed", "give the statement as data: formal=Statement(…)")
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

    def _spell_out(self) -> None:
        """Make the words of a formal claim: whatever they say of formulas is made of the formulas."""
        for made in ("statement", "amended", "assumptions", "falsifier"):
            # A copy brings what was made for the original, and gets its own.
            if getattr(self, made) and not self.as_written:
                self._refuse(made, "is made of the formal statement", "leave it out")
        stated, amended = self.as_stated(), self.as_amended()
        as_written = self.as_written or (self.plain, self.amended_plain)
        words: dict[str, Any] = {"as_written": as_written, "statement": stated.latex()}
        words["plain"] = self._words("plain", as_written[0], stated)
        if amended is not None:
            words |= {"amended": amended.latex()}
            words["amended_plain"] = self._words("amended_plain", as_written[1], amended)
        words["assumptions"] = (amended or stated).assumptions()
        if (amended or stated).spans is not None:
            words["falsifier"] = _falsifier(self)
        for part, value in words.items():
            object.__setattr__(self, part, value)

    def _words(self, part: str, words: str, statement: Statement) -> str:
        """The words of a statement with its terms in place of their names."""
        if re.search(r"[0-9=<>≤≥√½¼⅓¾∞^α-ωΑ-Ω]", re.sub(r"\{\w+\}", "", words)):
            self._refuse(part, "spells a formula out", "name it in `terms` of the statement, and write {its name}")
        try:
            return words.format_map(statement.spelled())
        except KeyError as error:
            self._refuse(part, f"names {error}, which no term of the statement has", "add it to `terms`")

    def as_stated(self, subject: Any = _OWN) -> Statement:
        """The formal statement, of the claim's own subject or of another.

        Args:
            subject: another subject.
        """
        return _made(self.formal, self.subject if subject is _OWN else subject)

    def as_amended(self, subject: Any = _OWN) -> Statement | None:
        """What is true instead, as data; None of a claim that is not corrected.

        Args:
            subject: another subject than the claim's own.
        """
        return None if self.amendment is None else _made(self.amendment, self.subject if subject is _OWN else subject)

    @property
    def symbols(self) -> dict[str, str]:
        """What the symbols of a formal claim stand for, in words."""
        if self.formal is None:
            return {}
        return self.as_stated().symbol_key() | (self.as_amended() or self.as_stated()).symbol_key()

    @property
    def coq(self) -> str:
        """What Coq has checked of the claim, in words; empty if nothing, or if the claim has changed since."""
        record = machine_checked(self.id)
        return str(record) if record is not None and record.covers(self.statement, self.amended) else ""

    @property
    def used_by(self) -> tuple[str, ...]:
        """The modules of avow whose comments cite the claim."""
        return citations().get(self.id, ())

    def words(self) -> dict[str, Any]:
        """What the claim says and rests on, as JSON has it."""
        names = ["id", "topic", "statement", "plain", "amended", "amended_plain", "assumptions", "symbols", "used_by"]
        names += ["needs", "coq"]
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

    def judge_answer(self, subject: Any) -> Finding:
        """The verdict on the claim with another subject, by its own proof with every hypothesis at hand.

        Args:
            subject: the other subject.
        """
        return self._judged(subject, strict=False)

    def _judged(self, subject: Any, strict: bool = True) -> Finding:
        start = time.perf_counter()
        evidence: list[Evidence] = []
        trouble, raised = "", False
        try:
            for step in self.check(subject) if self.formal is None else self._formal_evidence(subject, strict):
                if not isinstance(step, Evidence):
                    raise TypeError(f"a check yields Evidence, not {type(step).__name__}")
                evidence.append(step)
        except Unproved as error:
            trouble = str(error) or "a step does not hold"
        except (Exception, SystemExit) as error:
            trouble, raised = f"the check raised {type(error).__name__}: {error}{_line(error, self.check)}", True
        verdict = "no verdict" if trouble else verdict_of(evidence, bool(self.amended))
        if verdict == "proved" and self.formal is None and not self.source.startswith("avow."):
            verdict, trouble = "supported", "only a formal statement can be proved: give formal=Statement(…)"
        if verdict == "no verdict" and not trouble:
            trouble = _lacking(evidence)
        searched = trouble and not raised and strict and self.formal and self.falsifier and subject is self.subject
        if searched and (found := _searched(self)):
            # A case speaks for itself, better than what a prover made of its unknowns.
            evidence, verdict, trouble = [*evidence, *found], "refuted", trouble if self.amended else ""
        return Finding(self, verdict, tuple(evidence), time.perf_counter() - start, trouble, raised)

    def _formal_evidence(self, subject: Any, strict: bool) -> Iterator[Evidence]:
        """The evidence of a formal claim: what its check showed against it, and what it proved."""
        from avow.theory.claims.proof import Proof, Refutation

        amended = self.as_amended(subject)
        against, proof = Refutation(self.as_stated(subject)), Proof(amended or self.as_stated(subject), strict)
        parts = {"proved": (proof,), "refuted": (against,), "corrected": (against, proof)}[self.expected]
        self.check(*parts, subject)
        if against in parts:
            yield from against.evidence()
        if strange := proof.cited - set(self.needs):
            raise Unproved(f"the proof uses {', '.join(sorted(strange))}, which `needs` does not name")
        if proof in parts:
            proof.finish()
            yield from proof.evidence(amended is not None)


def _made(formal: Formal | None, subject: Any) -> Statement:
    from avow.theory.claims.formal import Statement

    made = formal(subject) if callable(formal) else formal
    if not isinstance(made, Statement):
        raise ParameterError("claim: formal", value_text(made), "is not a Statement", "give formal=Statement(…)")
    return made


def _falsifier(claim: Claim) -> Falsifier:
    """The search for a counterexample to a formal claim, by its own formulas."""
    from avow.theory.claims.formal import spread

    def excess(make: Callable[[Any], Any]) -> Excess:
        def by(subject: Any, *case: Any) -> Any:
            if id(subject) not in held:
                statement = make(subject)
                # Where a hypothesis says what the subject does, so does a case.
                held[id(subject)] = statement, spans if statement.spans is None else spread(statement)
            statement, own = held[id(subject)]
            return statement.excess(own.case(*case))

        held: dict[int, tuple[Statement, Any]] = {}
        return by

    spans = spread(claim.as_amended() or claim.as_stated())
    return Falsifier(dict(spans.ranges), excess(claim.as_stated), claim.amendment and excess(claim.as_amended))


def _searched(claim: Claim) -> list[Evidence]:
    """A counterexample to a claim whose proof fails, if a short search finds one."""
    from avow.theory.claims.random_search import search

    found = search(claim, cases=2000, seconds=5)
    if not found.broken:
        return []
    case = {name: str(number) for name, number in found.case.items()}
    says = f"found by a search, in case {found.tried}"
    return [Evidence("counterexample", says, {"evaluated by": "balls", **case, "excess": found.excess})]


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
