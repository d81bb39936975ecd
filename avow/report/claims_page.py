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
from avow.report.document import document
from avow.report.mathml import display, formula

VERDICTS: tuple[Verdict, ...] = ("proved", "corrected", "refuted", "supported", "no verdict", "not applicable")

_STYLE = """
:root { --proved: #1a7f4b; --refuted: #c0362c; --corrected: #9a6700; --supported: #0b66c3; --none: #6b7580; }
@media (prefers-color-scheme: dark) {
  :root { --proved: #4ac27c; --refuted: #ff7b72; --corrected: #e3b341; --supported: #6cb0ff; --none: #9aa4af; }
}
html { scroll-padding-top: 1rem; }
a { color: inherit; text-decoration-color: var(--line); text-underline-offset: .2em; }
a:hover { text-decoration-color: currentColor; }
code { font-size: .88em; overflow-wrap: anywhere; }
.badge { --c: var(--none); color: var(--c); background: color-mix(in srgb, var(--c) 13%, transparent);
  border-radius: 1rem; padding: .1rem .6rem; font-size: .8rem; font-weight: 650; white-space: nowrap; }
.proved { --c: var(--proved); } .refuted { --c: var(--refuted); } .corrected { --c: var(--corrected); }
.supported { --c: var(--supported); } .badge.differs { --c: var(--refuted); }
.filters { display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; margin: 1.2rem 0 .7rem; }
.filters button, .filters select { font: inherit; font-size: .85rem; padding: .25rem .8rem; border-radius: 1rem;
  border: 1px solid var(--line); background: var(--page); color: var(--ink); cursor: pointer; max-width: 100%; }
.filters button[aria-pressed=true] { background: var(--ink); border-color: var(--ink); color: var(--page); }
.overview td { text-align: left; white-space: normal; vertical-align: baseline; }
.overview th { text-align: left; }
.overview td:first-child, .overview td.verdict { white-space: nowrap; }
article { border: 1px solid var(--line); border-radius: .7rem; padding: 1rem 1.2rem 1.1rem; margin: 1rem 0; }
article:target { border-color: var(--soft); }
article header { display: flex; flex-wrap: wrap; gap: .2rem .7rem; align-items: center; }
h3 { font-size: 1rem; margin: 0; font-family: ui-monospace, monospace; font-weight: 600; }
h3 a { text-decoration: none; }
h4 { font-size: .8rem; margin: 1.1rem 0 .2rem; color: var(--soft); font-weight: 600; }
article > p { max-width: 50rem; }
.says { font-size: 1.06rem; margin: .45rem 0; }
.formula { overflow-x: auto; overflow-y: hidden; padding: .35rem 0; line-height: 2; }
.formula code { line-height: 1.5; }
math, .formula { font-size: 1.12rem; font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math",
  "Libertinus Math", "DejaVu Math TeX Gyre", "Noto Sans Math", "DejaVu Serif", math; }
li math, .facts math { font-size: 1rem; }
.instead { border-left: 3px solid var(--corrected); padding-left: 1rem; margin: .8rem 0; }
.instead h4 { margin-top: 0; color: var(--corrected); }
ul, ol { margin: .2rem 0; padding-left: 1.3rem; max-width: 52rem; }
summary { cursor: pointer; font-size: .92rem; margin-top: 1rem; }
ol.steps > li { margin: .45rem 0; }
.kind { font-size: .78rem; color: var(--soft); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .35rem;
  margin-right: .2rem; white-space: nowrap; }
.facts { color: var(--soft); font-size: .85rem; overflow-x: auto; overflow-wrap: anywhere; }
.facts span { margin-right: 1rem; }
.broken { list-style: none; padding: 0; font-size: .92rem; }
.trouble { color: var(--refuted); }
.figure { height: 20rem; }
.caption { font-weight: 600; margin-top: 1rem; }
article td.wordy { white-space: normal; min-width: 14rem; }
article td, article th { text-align: left; }
footer { margin-top: 1rem; font-size: .85rem; color: var(--soft); }
@media (max-width: 40rem) {
  .wide { display: none; }
  article { padding: .8rem .8rem 1rem; }
  .overview thead { display: none; }
  .overview tr { display: grid; grid-template-columns: 1fr auto; border-top: 1px solid var(--line); padding: .4rem 0; }
  .overview tr[hidden] { display: none; }
  .overview td { border: 0; padding: .1rem .75rem; }
  .overview td:nth-child(3) { grid-column: 1 / 3; }
}
[hidden] { display: none; }
@media print { .filters { display: none; } article { break-inside: avoid; } }
"""

_FILTER = """
const topic = document.getElementById("topic"), verdicts = [...document.querySelectorAll("button[data-verdict]")];
const kept = document.getElementById("kept");
function filter() {
  const wanted = verdicts.filter(b => b.ariaPressed === "true").map(b => b.dataset.verdict);
  let count = 0;
  for (const item of document.querySelectorAll("[data-topic]")) {
    const seen = (!topic.value || item.dataset.topic === topic.value)
      && (!wanted.length || wanted.includes(item.dataset.verdict));
    item.hidden = !seen;
    count += seen && item.tagName === "ARTICLE";
  }
  for (const section of document.querySelectorAll("section"))
    section.hidden = !section.querySelector("article:not([hidden])");
  kept.textContent = count + (count === 1 ? " claim" : " claims");
}
const unfold = () => document.querySelectorAll("details").forEach(details => details.open = true);
document.getElementById("unfold").addEventListener("click", unfold);
addEventListener("beforeprint", unfold);
topic.addEventListener("change", filter);
verdicts.forEach(b => b.addEventListener("click", () => {
  b.ariaPressed = b.ariaPressed === "true" ? "false" : "true";
  filter();
}));
filter();
"""


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
    return document("avow claims", body, figures, _STYLE, _FILTER)


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
