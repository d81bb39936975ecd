"""Claims and what came of them: as a page, each by itself as the page and the lab show it, and for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from avow.core.chart import Chart
from avow.extras import require
from avow.report import charts, formatting
from avow.report.terminal import Columns
from avow.theory.claims.claim import Claim, Finding, Verdict

if TYPE_CHECKING:
    from markupsafe import Markup

    from avow.theory.claims.formal import Statement
    from avow.theory.claims.grading import Grade, Question

VERDICTS: tuple[Verdict, ...] = ("proved", "corrected", "refuted", "supported", "no verdict", "not applicable")
# The address of another claim on the same page, with a place for its anchor.
LINK = "#{}"
_COLOURS: dict[Verdict, str] = {"proved": "green", "refuted": "red", "corrected": "yellow", "supported": "blue"}


def headline(findings: Sequence[Finding]) -> str:
    """How many claims got each verdict, and what contradicts the record."""
    counts = Counter(finding.verdict for finding in findings)
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]] or ["none"]
    wrong = [f.claim.id for f in findings if not f.as_recorded]
    accepted = [f"{f.claim.id} ({name})" for f in findings for name, rejected in f.sabotages.items() if not rejected]
    sentences = [f"{formatting.count(len(findings), 'claim')}: {formatting.listed(verdicts)}."]
    if wrong:
        sentences.append(f"Not as recorded: {formatting.listed(wrong)}.")
    if accepted:
        sentences.append(f"Broken on purpose, yet accepted: {formatting.listed(accepted)}.")
    if not wrong and not accepted:
        tried = sum(len(f.sabotages) for f in findings)
        sentences.append(f"All as recorded{f', and all {tried} broken variants rejected' if tried > 1 else ''}.")
    return " ".join(sentences)


def claims_page(findings: Sequence[Finding], command: str) -> str:
    """The page: every claim with its verdict, formula, evidence and picture; `command` is what made it."""
    from avow.report.page import render

    figures: dict[str, Any] = {}
    known, counts = {finding.claim.id for finding in findings}, Counter(finding.verdict for finding in findings)
    topics: dict[str, list[tuple[Finding, str]]] = {}
    for finding in findings:
        topics.setdefault(finding.claim.topic, []).append((finding, judged(finding, figures, known)))
    return render(
        "claims.html",
        figures,
        title="avow claims",
        headline=headline(findings),
        counts={verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
        topics=topics,
        findings=findings,
        anchor=_anchor,
        sentence=sentence,
        command=command,
    )


class Sentence(NamedTuple):
    """A claim in words: its short terms typeset, the long ones numbered below it; and as text without the long ones."""

    words: Markup
    below: list[Markup]
    short: str


# A term that is longer than this as text, or is a sum, breaks a sentence.
_LONG, _FIRST = 36, ord("①")


def sentence(claim: Claim, amended: bool = False) -> Sentence:
    """The words of a claim, or of what is true instead, as a reader can take them in."""
    require("jinja2", "latex2mathml", purpose="to write HTML pages")
    from markupsafe import Markup

    from avow.report.mathml import display, formula
    from avow.theory.claims.formal import latex, text

    written = (claim.as_written or (claim.plain, claim.amended_plain))[amended]
    statement = claim.as_amended() if amended else claim.as_stated() if claim.formal else None
    words, short, long = Markup(), "", dict[str, Markup]()
    parts = re.split(r"\{([^{}]+)\}", written) if statement else [written]
    for place, part in enumerate(parts):
        if place % 2 == 0 or statement is None:
            words, short = words + part, short + part
            continue
        term = statement.terms[part]
        said = text(term)
        if "Σ" not in said and len(said) <= _LONG:
            words, short = words + Markup(formula(latex(term))), short + said
        else:
            long.setdefault(said, Markup(display(latex(term))))
            words, short = words + chr(_FIRST + list(long).index(said)), short + "…"
    below = [Markup("{} {}").format(chr(_FIRST + place), one) for place, one in enumerate(long.values())]
    return Sentence(words, below, short.replace("….", "…"))


def stated(claim: Claim) -> str:
    """The claim in words and as a formula, what is true instead, and what it assumes, in HTML."""
    from avow.report.page import macro

    return str(macro("claim.html", "stated")(claim, sentence(claim), sentence(claim, amended=True)))


def title(claim: Claim) -> str:
    """The claim in words alone, in HTML: a heading, and the terms that are too long for it."""
    from avow.report.page import macro

    return str(macro("claim.html", "says")(sentence(claim), "h2")).strip()


def judged(finding: Finding, figures: dict[str, Any], known: set[str], link: str = LINK) -> str:
    """Its picture, its evidence and what it rests on, in HTML; figures are added by the id of their element.

    `link` is the address of the page of another claim, with a place for its anchor.
    """
    from avow.report.page import macro

    picture = None if finding.picture is None else charts.picture_from(finding.picture)
    id = ""
    if isinstance(picture, Chart):
        id = f"picture-{_anchor(finding.claim.id)}"
        figures[id] = charts.figure(picture)
    needs = {need: link.format(_anchor(need)) if need in known else "" for need in finding.claim.needs}
    return str(macro("claim.html", "judged")(finding, picture, id, needs))


def _anchor(id: str) -> str:
    """An id as an address: a character that is no letter, digit or dash becomes its number."""
    return re.sub(r"[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}", id)


def catalogue_table(claims: Iterable[Claim]) -> Columns:
    """Every claim with its topic, the verdict on record and its words."""
    rows = [(claim.id, claim.topic, _coloured(claim.expected), claim.plain) for claim in claims]
    return Columns("lllw", ("claim", "topic", "recorded", "in words"), rows)


def questions_table(questions: Iterable[Question]) -> Columns:
    """Every question with its words and the letters of its answers."""
    rows = [(one.id, one.asks, ", ".join(one.letters)) for one in questions]
    return Columns("lwl", ("question", "in words", "letters"), rows)


def graded(grade: Grade) -> Iterator[RenderableType]:
    """A grade for a terminal: the judgement, why, and the proof or what it lacks."""
    colour = {"right": "green", "wrong": "red", "not shown": "yellow"}[grade.judgement]
    yield Text.assemble((grade.judgement, f"bold {colour}"), f": {grade.why}")
    yield _indented(f"read as {grade.read}", "dim")
    steps = grade.finding.evidence if grade.finding and grade.judgement == "right" else ()
    yield from _section("proof", [f"{step.facts.get('by', step.kind)}: {step.says}" for step in steps])


def findings_table(findings: Iterable[Finding]) -> Columns:
    """The verdict on every claim, what it rests on, how long it took and how many broken variants were rejected."""
    rows = []
    for finding in findings:
        kinds = ", ".join(finding.kinds) or formatting.NOTHING
        tried = len(finding.sabotages)
        rejected = f"{sum(finding.sabotages.values())} of {tried}" if tried else formatting.NOTHING
        verdict, seconds = _coloured(finding.verdict), formatting.seconds(finding.seconds)
        rows.append((finding.claim.id, verdict, kinds, seconds, rejected))
    return Columns("llwrr", ("claim", "verdict", "evidence", "time", "sabotage\nrejected"), rows)


def faults(findings: Iterable[Finding]) -> list[str]:
    """What contradicts the record, one line each."""
    lines = []
    for finding in findings:
        if not finding.as_recorded:
            cases = [step.facts for step in finding.evidence if step.kind == "counterexample"]
            shown = [
                f"{name} = {x}" for name, x in (cases or [{}])[0].items() if name not in ("evaluated by", "excess")
            ]
            why = f": {finding.trouble or ', '.join(shown)}".rstrip(": ")
            lines.append(f"{finding.claim.id}: {finding.verdict}, recorded as {finding.claim.expected}{why}")
        for name, rejected in finding.sabotages.items():
            if not rejected:
                lines.append(f"{finding.claim.id}: accepts what was broken on purpose ({name})")
    return lines


def explanation(finding: Finding) -> Iterator[RenderableType]:
    """Everything about one claim for a terminal, part after part."""
    claim = finding.claim
    recorded = "" if finding.as_recorded else f", recorded as {claim.expected}"
    yield Text.assemble((claim.id, "bold"), f" ({claim.topic}): ", _coloured(finding.verdict), recorded)
    yield _indented(claim.plain)
    yield _indented(_formula(claim.as_stated() if claim.formal else None) or claim.statement, "dim")
    if claim.amended:
        yield Text("\nwhat is true instead", "bold")
        if claim.amended_plain:
            yield _indented(claim.amended_plain)
        yield _indented(_formula(claim.as_amended()) or claim.amended, "dim")
    yield from _section("symbols", [f"{name}: {words}" for name, words in claim.symbols.items()])
    yield from _section("assumes", claim.assumptions)
    steps: list[RenderableType] = []
    for step in finding.evidence:
        about = "" if step.coverage == "for all" else f" ({step.coverage})"
        steps.append(Text(f"{step.kind}{about}{', of what is true instead' if step.amended else ''}: {step.says}"))
        # The formula is what the step says, in LaTeX; a step may rest on nothing.
        facts = {k: formatting.number(fact) for k, fact in step.facts.items() if k != "formula"}
        if shown := [f"{name} = {fact}" for name, fact in facts.items() if fact]:
            steps.append(_indented("; ".join(shown), "dim"))
    yield from _section("evidence", steps)
    if finding.trouble:
        yield _indented(finding.trouble, "red")
    outcomes = ((name, "rejected" if rejected else "ACCEPTED") for name, rejected in finding.sabotages.items())
    yield from _section("broken on purpose", [f"{name} → {outcome}" for name, outcome in outcomes])
    if finding.picture is not None:
        yield Text()
        yield charts.columns(charts.picture_from(finding.picture))
    yield from _section("machine-checked", [claim.coq] if claim.coq else [])
    yield from _section("used by", claim.used_by)
    yield from _section("rests on", claim.needs)


def _formula(statement: Statement | None) -> str:
    """The conclusion of a formal statement for a terminal; its hypotheses and abbreviations stand below it."""
    from avow.theory.claims.formal import text

    return "" if statement is None else "; ".join(map(text, statement.then.values()))


def _section(title: str, lines: Sequence[str | RenderableType]) -> Iterator[RenderableType]:
    if lines:
        yield Text(f"\n{title}", "bold")
        yield from map(_indented, lines)


def _indented(text: str | RenderableType, style: str = "") -> RenderableType:
    return Padding(Text(text, style) if isinstance(text, str) else text, (0, 0, 0, 2))


def _coloured(verdict: Verdict) -> Text:
    return Text(verdict, _COLOURS.get(verdict, ""))
