"""The ledger as a page: every claim with its verdict, its formula, its evidence and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from avow.core.chart import Table
from avow.report import formatting
from avow.report.claims_article import anchor, badge, judged, linked, stated
from avow.report.claims_style import FILTER, STYLE
from avow.report.document import report
from avow.report.markup import Raw, html_table
from avow.theory.claims.claim import Finding, Verdict

VERDICTS: tuple[Verdict, ...] = ("proved", "corrected", "refuted", "supported", "no verdict", "not applicable")


def claims_page(findings: Sequence[Finding], command: str) -> str:
    """The whole page; `command` is what made it."""
    figures: dict[str, Any] = {}
    known = {finding.claim.id for finding in findings}
    topics = list(dict.fromkeys(finding.claim.topic for finding in findings))
    sections = ""
    for topic in topics:
        articles = "".join(_article(f, figures, known) for f in findings if f.claim.topic == topic)
        sections += f"<section><h2>{escape(topic)}</h2>\n{articles}</section>\n"
    body = f"""<p class="soft">{_HOW_TO_READ}</p>
{_filters(findings, topics)}
{_overview(findings)}
{sections}
<p class="soft">Made by <code>{escape(command)}</code>.</p>"""
    return report("avow claims", headline(findings), body, figures, STYLE, FILTER)


_HOW_TO_READ = (
    "Statements that are made about attention, each judged by a machine. <b>Proved</b>: symbols, fractions or ball "
    "arithmetic cover everything the statement speaks of. <b>Refuted</b>: a counterexample, evaluated rigorously. "
    "<b>Corrected</b>: refuted as stated, and what is true instead is proved beside it. <b>Supported</b>: nothing "
    "found against it, which is no proof. Every check was also shown variants broken on purpose, and must reject them."
)


def headline(findings: Sequence[Finding]) -> str:
    """What came of all claims, in a sentence or two."""
    counts = Counter(finding.verdict for finding in findings)
    told = formatting.listed([f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]] or ["none"])
    claims = "1 claim" if len(findings) == 1 else f"{len(findings)} claims"
    return f"{claims}: {told}. {verdict_on_all(findings)}"


def verdict_on_all(findings: Sequence[Finding]) -> str:
    """Whether everything is as recorded, and what is not."""
    wrong = [f.claim.id for f in findings if not f.as_recorded]
    accepted = [f"{f.claim.id} ({name})" for f in findings for name, rejected in f.sabotages.items() if not rejected]
    tried = sum(len(f.sabotages) for f in findings)
    said = []
    if wrong:
        said.append(f"Not as recorded: {formatting.listed(wrong)}.")
    if accepted:
        said.append(f"Broken on purpose, yet accepted: {formatting.listed(accepted)}.")
    if not said:
        said.append(f"All as recorded{f', and all {tried} broken variants rejected' if tried > 1 else ''}.")
    return " ".join(said)


def _filters(findings: Sequence[Finding], topics: list[str]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    buttons = "".join(
        f'<button type="button" data-verdict="{verdict}" aria-pressed="false">{verdict} {counts[verdict]}</button>'
        for verdict in VERDICTS
        if counts[verdict]
    )
    options = "".join(f'<option value="{escape(topic)}">{escape(topic)}</option>' for topic in topics)
    return f"""<div class="filters">{buttons}
<select id="topic" aria-label="topic"><option value="">every topic</option>{options}</select>
<button type="button" id="unfold">open all evidence</button>
<span class="soft" id="kept" aria-live="polite"></span></div>"""


def _overview(findings: Sequence[Finding]) -> str:
    rows = []
    for found in findings:
        verdict, kinds = Raw(badge(found), "verdict"), Raw(escape(", ".join(found.kinds)), "wide soft")
        rows.append((Raw(linked(found.claim.id)), verdict, found.claim.plain, kinds))
    table = Table("", ("claim", "verdict", "in words", "evidence"), rows)
    return html_table(table, "overview", [_data(found) for found in findings])


def _article(finding: Finding, figures: dict[str, Any], known: set[str]) -> str:
    claim = finding.claim
    differs = ""
    if not finding.as_recorded:
        differs = f'<span class="badge differs">recorded as {escape(claim.expected)}</span>'
    parts = [
        f'<header><h3><a href="#{anchor(claim.id)}">{escape(claim.id)}</a></h3>{badge(finding)}{differs}</header>',
        stated(claim),
        judged(finding, figures, known),
    ]
    return f'<article id="{anchor(claim.id)}" {_data(finding)}>\n' + "\n".join(parts) + "\n</article>\n"


def _data(finding: Finding) -> str:
    return f'data-topic="{escape(finding.claim.topic)}" data-verdict="{finding.verdict}"'
