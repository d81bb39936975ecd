"""One claim on a page: what it says, and what came of it; the report and the lab show it alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from avow.core.chart import Chart, Picture
from avow.report import charts, formatting
from avow.report.mathml import display, formula
from avow.theory.claims.claim import Claim, Evidence, Finding

# Where claims of the same page are found, by id.
LINK = "#{}"


def stated(claim: Claim) -> str:
    """The claim in words and as a formula, what is true instead, and what it assumes."""
    parts = [
        f'<p class="says">{escape(claim.plain)}</p>',
        _formula(claim.statement),
        _instead(claim),
        _list("Assumes", [escape(assumption) for assumption in claim.assumptions]),
    ]
    return "\n".join(filter(None, parts))


def judged(finding: Finding, figures: dict[str, Any], known: set[str], link: str = LINK) -> str:
    """Its picture, its evidence and what it rests on; figures are added by the id of their element.

    `link` is where the page of another claim is, with a place for its anchor.
    """
    parts = [_picture(finding, figures), _evidence(finding), _footer(finding, known, link)]
    return "\n".join(filter(None, parts))


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
    name = f"picture-{anchor(finding.claim.id)}"
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
        summary = f"<summary>Evidence: {count}, {formatting.listed(list(finding.kinds))}</summary>"
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
    return formatting.number(fact)


def _footer(finding: Finding, known: set[str], link: str) -> str:
    claim = finding.claim
    told = []
    if claim.used_by:
        told.append(f"Used by {formatting.listed([f'<code>{escape(place)}</code>' for place in claim.used_by])}.")
    if claim.needs:
        links = [linked(need, link) if need in known else f"<code>{escape(need)}</code>" for need in claim.needs]
        told.append(f"Rests on {formatting.listed(links)}.")
    told.append(f"Judged in {formatting.seconds(finding.seconds)}.")
    return f"<footer>{' '.join(told)}</footer>"


def _list(title: str, items: list[str]) -> str:
    return f"<h4>{title}</h4><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _formula(latex: str) -> str:
    return f'<div class="formula">{display(latex)}</div>' if latex else ""


def badge(finding: Finding) -> str:
    """The verdict, in its colour."""
    return f'<span class="badge {finding.verdict.replace(" ", "-")}">{finding.verdict}</span>'


def linked(id: str, link: str = LINK) -> str:
    """The id of a claim as a way to its page."""
    return f'<a href="{escape(link.format(anchor(id)))}"><code>{escape(id)}</code></a>'


def anchor(id: str) -> str:
    """An id as an address: what is no letter, digit or dash becomes its number."""
    return re.sub(r"[^A-Za-z0-9-]", lambda found: f"_{ord(found[0]):x}", id)
