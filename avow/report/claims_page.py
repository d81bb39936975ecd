"""The ledger as a page: every claim with its verdict, its formula, its evidence and its picture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from avow.chart import Chart, Picture
from avow.claims.claim import Claim, Evidence, Finding, Verdict
from avow.report import charts, words
from avow.report.claims_style import FILTER, STYLE
from avow.report.document import document
from avow.report.mathml import display, formula

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
    body = f"""<p class="soft">avow claims</p>
<h1>{escape(headline(findings))}</h1>
<p class="soft">{_HOW_TO_READ}</p>
{_filters(findings, topics)}
{_overview(findings)}
{sections}
<p class="soft">Made by <code>{escape(command)}</code>.</p>"""
    return document("avow claims", body, figures, STYLE, FILTER)


_HOW_TO_READ = (
    "Statements that are made about attention, each judged by a machine. <b>Proved</b>: symbols, fractions or ball "
    "arithmetic cover everything the statement speaks of. <b>Refuted</b>: a counterexample, evaluated rigorously. "
    "<b>Corrected</b>: refuted as stated, and what is true instead is proved beside it. <b>Supported</b>: nothing "
    "found against it, which is no proof. Every check was also shown variants broken on purpose, and must reject them."
)


def headline(findings: Sequence[Finding]) -> str:
    """What came of all claims, in a sentence or two."""
    counts = Counter(finding.verdict for finding in findings)
    told = words.listed([f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]] or ["none"])
    claims = "1 claim" if len(findings) == 1 else f"{len(findings)} claims"
    return f"{claims}: {told}. {verdict_on_all(findings)}"


def verdict_on_all(findings: Sequence[Finding]) -> str:
    """Whether everything is as recorded, and what is not."""
    wrong = [f.claim.id for f in findings if not f.as_recorded]
    accepted = [f"{f.claim.id} ({name})" for f in findings for name, rejected in f.sabotages.items() if not rejected]
    tried = sum(len(f.sabotages) for f in findings)
    said = []
    if wrong:
        said.append(f"Not as recorded: {words.listed(wrong)}.")
    if accepted:
        said.append(f"Broken on purpose, yet accepted: {words.listed(accepted)}.")
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
    rows = ""
    for finding in findings:
        claim = finding.claim
        rows += (
            f"<tr {_data(finding)}><td>{_link(claim.id)}</td>"
            f'<td class="verdict">{_badge(finding)}</td><td>{escape(claim.plain)}</td>'
            f'<td class="wide soft">{escape(", ".join(finding.kinds))}</td></tr>\n'
        )
    head = '<th>claim</th><th>verdict</th><th>in words</th><th class="wide">evidence</th>'
    table = f"<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody>"
    return f'<div class="scroll"><table class="overview">{table}</table></div>'


def _article(finding: Finding, figures: dict[str, Any], known: set[str]) -> str:
    claim = finding.claim
    differs = ""
    if not finding.as_recorded:
        differs = f'<span class="badge differs">recorded as {escape(claim.expected)}</span>'
    parts = [
        f'<header><h3><a href="#{_anchor(claim.id)}">{escape(claim.id)}</a></h3>{_badge(finding)}{differs}</header>',
        f'<p class="says">{escape(claim.plain)}</p>',
        _formula(claim.statement),
        _instead(claim),
        _list("Assumes", [escape(assumption) for assumption in claim.assumptions]),
        _picture(finding, figures),
        _evidence(finding),
        _footer(finding, known),
    ]
    return f'<article id="{_anchor(claim.id)}" {_data(finding)}>\n' + "\n".join(filter(None, parts)) + "\n</article>\n"


def _instead(claim: Claim) -> str:
    if not claim.amended:
        return ""
    said = f'<p class="says">{escape(claim.amended_plain)}</p>' if claim.amended_plain else ""
    return f'<div class="instead"><h4>What is true instead</h4>{said}{_formula(claim.amended)}</div>'


def _picture(finding: Finding, figures: dict[str, Any]) -> str:
    if finding.picture is None:
        return ""
    picture: Picture = charts.picture_from(finding.picture)
    caption = f'<p class="caption">{escape(picture.title)}</p>'
    if not isinstance(picture, Chart):
        return caption + charts.html_table(picture)
    name = f"picture-{_anchor(finding.claim.id)}"
    figures[name] = charts.figure(picture)
    return f'{caption}<div class="figure" id="{name}"></div>'


def _evidence(finding: Finding) -> str:
    steps = ""
    for amended in (False, True):
        own = [_step(step) for step in finding.evidence if step.amended == amended]
        heading = "<h4>Of what is true instead</h4>" if amended else ""
        steps += f'{heading}<ol class="steps">{"".join(own)}</ol>' if own else ""
    shown = ""
    if steps:
        count = f"{len(finding.evidence)} step{'s' if len(finding.evidence) > 1 else ''}"
        summary = f"<summary>Evidence: {count}, {words.listed(list(finding.kinds))}</summary>"
        shown = f"<details{' open' if finding.trouble else ''}>{summary}{steps}</details>"
    if finding.trouble:
        shown += f'<p class="trouble">{escape(finding.trouble)}</p>'
    broken = ""
    for name, rejected in finding.sabotages.items():
        outcome = "rejected" if rejected else '<b class="trouble">accepted</b>'
        broken += f"<li>broken on purpose: {escape(name)} → {outcome}</li>"
    return shown + (f'<ul class="broken">{broken}</ul>' if broken else "")


def _step(step: Evidence) -> str:
    facts = "".join(f"<span>{told}</span> " for told in _facts(step))
    shown = f'<div class="facts">{facts}</div>' if facts else ""
    return f'<li><span class="kind">{step.kind}</span> {escape(step.says)}{shown}</li>'


# How a symbolic step tells of its formulas.
_RELATIONS = {"nonnegative": r"\ge 0", "positive": "> 0"}


def _facts(step: Evidence) -> Iterator[str]:
    """The facts of a step, in HTML; words that SymPy wrote in LaTeX are formulas."""
    facts = step.facts
    if step.kind != "symbolic":
        yield from (f"{escape(name)}: {escape(fact_told(fact))}" for name, fact in facts.items())
        return
    left, right = facts.get("left"), facts.get("right")
    if left is not None and left == right:
        yield f"both sides are {formula(left)}"
    elif left is not None:
        yield formula(f"{left} = {right}")
    for name, fact in facts.items():
        if name in _RELATIONS:
            yield formula(f"{fact} {_RELATIONS[name]}")
        elif name not in ("left", "right"):
            latex = isinstance(fact, str) and "\\" in fact
            yield f"{escape(name)}: {formula(fact) if latex else escape(fact_told(fact))}"


def fact_told(fact: Any) -> str:
    """A fact as people read it: numbers short, lists in a row."""
    if isinstance(fact, list | tuple):
        return ", ".join(map(fact_told, fact))
    if isinstance(fact, Mapping):
        return ", ".join(f"{name} {fact_told(value)}" for name, value in fact.items())
    return words.number(fact)


def _footer(finding: Finding, known: set[str]) -> str:
    claim = finding.claim
    told = []
    if claim.used_by:
        told.append(f"Used by {words.listed([f'<code>{escape(place)}</code>' for place in claim.used_by])}.")
    if claim.needs:
        links = [_link(need) if need in known else f"<code>{escape(need)}</code>" for need in claim.needs]
        told.append(f"Rests on {words.listed(links)}.")
    told.append(f"Judged in {words.seconds(finding.seconds)}.")
    return f"<footer>{' '.join(told)}</footer>"


def _list(title: str, items: list[str]) -> str:
    return f"<h4>{title}</h4><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _formula(latex: str) -> str:
    return f'<div class="formula">{display(latex)}</div>' if latex else ""


def _badge(finding: Finding) -> str:
    return f'<span class="badge {finding.verdict.replace(" ", "-")}">{finding.verdict}</span>'


def _data(finding: Finding) -> str:
    return f'data-topic="{escape(finding.claim.topic)}" data-verdict="{finding.verdict}"'


def _link(id: str) -> str:
    return f'<a href="#{_anchor(id)}"><code>{escape(id)}</code></a>'


def _anchor(id: str) -> str:
    """An id as an address: what is no letter, digit or dash becomes its number."""
    return re.sub(r"[^A-Za-z0-9-]", lambda found: f"_{ord(found[0]):x}", id)
