"""Claims and what came of them, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from avow.report import charts, formatting
from avow.report.claims_article import fact_told
from avow.report.terminal import Columns
from avow.theory.claims.claim import Claim, Finding, Verdict

_COLOURS: dict[Verdict, str] = {
    "proved": "green",
    "refuted": "red",
    "corrected": "yellow",
    "supported": "blue",
}


def catalogue_table(claims: Iterable[Claim]) -> Columns:
    """Every claim with its topic, the verdict on record and its words."""
    rows = [(claim.id, claim.topic, _coloured(claim.expected), claim.plain) for claim in claims]
    return Columns("lllw", ("claim", "topic", "recorded", "in words"), rows)


def findings_table(findings: Iterable[Finding]) -> Columns:
    """The verdict on every claim, what it rests on, how long it took and how many broken variants were rejected."""
    rows = []
    for finding in findings:
        kinds = ", ".join(finding.kinds) or formatting.NOTHING
        tried = len(finding.sabotages)
        rejected = f"{sum(finding.sabotages.values())} of {tried}" if tried else formatting.NOTHING
        rows.append(
            (finding.claim.id, _coloured(finding.verdict), kinds, formatting.seconds(finding.seconds), rejected)
        )
    return Columns("llwrr", ("claim", "verdict", "evidence", "time", "sabotage\nrejected"), rows)


def faults(findings: Iterable[Finding]) -> list[str]:
    """What contradicts the record, one line each; nothing where nothing does."""
    found = []
    for finding in findings:
        why = f": {finding.trouble}" if finding.trouble else ""
        if not finding.as_recorded:
            found.append(f"{finding.claim.id}: {finding.verdict}, recorded as {finding.claim.expected}{why}")
        for name, rejected in finding.sabotages.items():
            if not rejected:
                found.append(f"{finding.claim.id}: accepts what was broken on purpose ({name})")
    return found


def told(finding: Finding) -> Iterator[RenderableType]:
    """Everything about one claim, part after part."""
    claim = finding.claim
    recorded = "" if finding.as_recorded else f", recorded as {claim.expected}"
    yield Text.assemble((claim.id, "bold"), f" ({claim.topic}): ", _coloured(finding.verdict), recorded)
    yield _indented(claim.plain)
    yield _indented(claim.statement, "dim")
    if claim.amended:
        yield Text("\nwhat is true instead", "bold")
        yield from (
            _indented(text, style) for text, style in ((claim.amended_plain, ""), (claim.amended, "dim")) if text
        )
    yield from _listed("assumes", claim.assumptions)
    yield from _listed("evidence", (_step(step.kind, step.amended, step.says) for step in finding.evidence), finding)
    if finding.trouble:
        yield _indented(finding.trouble, "red")
    outcomes = ((name, "rejected" if rejected else "ACCEPTED") for name, rejected in finding.sabotages.items())
    yield from _listed("broken on purpose", (f"{name} → {outcome}" for name, outcome in outcomes))
    if finding.picture is not None:
        yield Text()
        yield charts.columns(charts.picture_from(finding.picture))
    yield from _listed("used by", claim.used_by)
    yield from _listed("rests on", claim.needs)


def _step(kind: str, amended: bool, says: str) -> str:
    return f"{kind}{', of what is true instead' if amended else ''}: {says}"


def _listed(title: str, lines: Iterable[str], finding: Finding | None = None) -> Iterator[RenderableType]:
    """Lines under a title, and under each step of evidence its facts."""
    for i, line in enumerate(lines):
        if i == 0:
            yield Text(f"\n{title}", "bold")
        yield _indented(line)
        if finding is not None and finding.evidence[i].facts:
            facts = (f"{name} = {fact_told(fact)}" for name, fact in finding.evidence[i].facts.items())
            yield Padding(Text("; ".join(facts), "dim"), (0, 0, 0, 4))


def _indented(text: str, style: str = "") -> RenderableType:
    return Padding(Text(text, style), (0, 0, 0, 2))


def _coloured(verdict: Verdict) -> Text:
    return Text(verdict, _COLOURS.get(verdict, ""))
