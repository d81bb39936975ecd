"""The ledger: every claim with its verdict, its evidence and its picture, and a search that tries to break it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from html import escape
from typing import Any, Literal

from avow.core.chart import Table
from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.report import formatting
from avow.report.claims import judged, stated
from avow.report.page import html_table
from avow.theory.claims import Claim, Finding, catalogue
from avow.theory.claims.claim import as_json
from avow.theory.claims.ledger import falsifiers
from avow.theory.claims.random_search import MOST_CASES, STATED, Outcome, search, variants
from avow.theory.claims.running import judged_after_needs

_FIRST = "relu-linear-a"
# Where the page of another claim is: the script takes links that begin so.
_LINK = "/claims?claim={}"
# A search ends by itself before the page's limit would end its process.
_SEARCH_SECONDS = 10.0
# Balls of 128 bits that still hold zero below this: the two sides agree.
_AGREES = 1e-30


class Asked(Inputs):
    verdict: Literal["every", "proved", "corrected", "refuted", "supported", "not applicable"] = control(
        "every", "Verdict"
    )
    topic: Literal[
        "every", "softmax", "queries", "heads", "efficient", "costs", "relu", "dynamics", "lemmas", "neighbours"
    ] = control("every", "Topic")
    claim: str = control(_FIRST, "Claim", longest=60, quiet=True)
    variant: str = control(STATED, "What is attacked", longest=80, quiet=True)
    hunt: bool = control(False, "Search", quiet=True)
    cases: int = control(2000, "Cases to try at most", low=100, high=MOST_CASES, log=True)
    seed: int = control(0, "Seed of what is drawn", low=0, high=99)


def preview(inputs: Asked) -> Answer:
    """The ledger as a list, and what the chosen claim says; nothing is judged yet."""
    ledger = [{"id": one.id, "topic": one.topic, "plain": one.plain} for one in catalogue().values()]
    try:
        claim = _chosen(inputs.claim)
    except ParameterError as error:
        return {"ledger": ledger, "trouble": error}
    absent = claim.not_applicable()
    return {
        "ledger": ledger,
        "claim": {
            "id": claim.id,
            "html": stated(claim),
            "variants": [] if absent else variants(claim),
            "note": f"{absent}, so there is nothing to try." if absent else "",
        },
        "facts": _facts(claim),
    }


def verdict(inputs: Asked) -> Answer:
    """The ledger's verdict on the chosen claim, computed now, with all its evidence; and the search, if asked for."""
    claim = _chosen(inputs.claim)
    finding = _found(claim.id)
    figures: dict[str, Any] = {}
    attack: dict[str, Any] | None = None
    if inputs.hunt and not claim.not_applicable():
        attack = _attacked(claim, _sabotages(claim.id), inputs)
    html = judged(finding, figures, set(catalogue()), _LINK)
    tone = finding.verdict if finding.verdict in ("proved", "refuted", "corrected", "supported") else "none"
    return {
        "id": claim.id,
        "html": html,
        "figures": figures,
        "attack": attack,
        "facts": _facts(claim, finding),
        "verdict": {"tone": tone, "word": finding.verdict, "says": _says(finding), "steps": []},
    }


def _chosen(id: str) -> Claim:
    known = catalogue()
    if id not in known:
        near = difflib.get_close_matches(id, known)
        raise ParameterError(
            "claim", repr(id), "is not known", f"did you mean {' or '.join(near)}?" if near else "choose from the list"
        )
    return known[id]


@functools.cache
def _judged(id: str) -> Finding:
    return _chosen(id).judge()


@functools.cache
def _found(id: str) -> Finding:
    """What came of a claim, after those it needs, with its picture."""
    finding = judged_after_needs(_chosen(id), lambda one: _judged(one.id))
    drawn = finding.claim.picture
    return finding if drawn is None else dataclasses.replace(finding, picture=as_json(drawn().plain()))


@functools.cache
def _sabotages(id: str) -> dict[str, bool]:
    claim = _chosen(id)
    return {name: claim.judge_sabotage(name).rejected for name in claim.sabotage}


_SAID = {
    "proved": "What the statement says holds for everything it speaks of.",
    "refuted": "There is a counterexample, evaluated rigorously.",
    "corrected": "False as stated; what is true instead is proved.",
    "supported": "Nothing was found against it, which is no proof.",
    "no verdict": "The check did not come to an end.",
    "not applicable": "It speaks of a package that is not installed here.",
}


def _says(finding: Finding) -> str:
    said = _SAID[finding.verdict]
    return said if finding.as_recorded else f"{said} It is recorded as {finding.claim.expected}."


def _facts(claim: Claim, finding: Finding | None = None) -> list[dict[str, str]]:
    facts = [fact("Topic", claim.topic), fact("Recorded verdict", claim.expected, "as the catalogue has it")]
    if finding is not None:
        kinds = ", ".join(finding.kinds) or "none"
        facts.append(fact("Judged just now", finding.verdict, f"in {formatting.seconds(finding.seconds)}, by {kinds}"))
    return facts


def _attacked(claim: Claim, sabotages: dict[str, bool], inputs: Asked) -> dict[str, Any]:
    """What came of the attack, in words."""
    found = search(claim, falsifiers()[claim.id], inputs.variant, inputs.cases, inputs.seed, _SEARCH_SECONDS)
    (word, says), reads = _told(found), falsifiers()[claim.id].reads
    rejected = f"{sum(sabotages.values())} of {len(sabotages)}"
    return {
        "tone": "refuted" if found.broken else "none",
        "word": word,
        "says": f"{says} The ledger's own check rejects {rejected} variants broken on purpose.",
        "html": html_table(_case(found)) + (f'<p class="soft">{escape(reads)}</p>' if reads else ""),
    }


def _told(found: Outcome) -> tuple[str, str]:
    tried = f"{found.tried:,} case{'' if found.tried == 1 else 's'}"
    if found.broken:
        how = f"by {found.excess:.3g}" if found.excess else "its two sides are equal, and they must not be"
        return "counterexample", f"Broken by case {found.tried:,}: {how}. Balls evaluated it, so it is certain."
    early = f" The time was up: {found.budget:,} were asked for." if found.tried < found.budget else ""
    near = (
        "The nearest miss meets it with equality."
        if abs(found.excess) < _AGREES
        else f"The nearest miss was {-found.excess:.3g} away."
    )
    moral = "That proves nothing: a search sees points, and the statement speaks of all of them."
    return "none found", f"{tried} tried, and none breaks it. {near}{early} {moral}"


def _case(found: Outcome) -> Table:
    name = "The counterexample" if found.broken else "The nearest miss"
    return Table(name, tuple(found.case), [[f"{float(x):g}" for x in found.case.values()]])


PAGE = Page(
    name="claims",
    title="Claims",
    summary="What is said of attention, each statement judged by a machine as you watch. Try to break one.",
    order=30,
    inputs=Asked,
    preview=preview,
    verdict=verdict,
    sign=(
        '<path class="faint" d="M28 10h54M28 24h54M28 38h54"/>'
        '<path d="m3 10 4 4 8 -8M3 24l4 4 8 -8M4 34l9 9m0 -9 -9 9"/>'
    ),
    body="""<div id="filters"></div>
<p id="count" class="soft" aria-live="polite"></p>
<ul id="ledger" aria-label="Claims"></ul>
<article id="chosen" aria-live="off"><h2 id="name"></h2><div id="stated"></div><div id="judged"></div></article>
<section id="breaking" class="card" aria-label="Try to break it" hidden>
<div class="role"><strong>Try to break it</strong>
<span id="caught" class="badge" hidden></span></div>
<p id="note" hidden></p>
<fieldset id="variants"><legend>What is attacked</legend></fieldset>
<div id="budget"></div>
<button type="button" id="attack">Search for a counterexample</button>
<p id="outcome" aria-live="polite"></p><div id="case"></div></section>""",
    seconds=40.0,
    kept=True,
)
