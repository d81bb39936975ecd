"""The ledger: every claim with its verdict, its evidence and its picture, and a search that tries to break it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any, Literal

from avow.core.chart import Table
from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, Words, control, judgement
from avow.report.claims import judged, stated
from avow.report.page import html_table
from avow.theory.claims import Claim, Finding, catalogue
from avow.theory.claims.claim import as_json
from avow.theory.claims.random_search import MOST_CASES, STATED, search, variants
from avow.theory.claims.running import judged_after_needs

_FIRST = "relu-linear-a"
# Where the page of another claim is: the script takes links that begin so.
_LINK = "/claims?claim={}"
# A search ends by itself before the page's limit would end its process.
_SEARCH_SECONDS = 10.0
# Balls of 128 bits that still hold zero below this: the two sides agree.
_AGREES = 1e-30
_WORDS = Words("claims.txt")


@dataclasses.dataclass(frozen=True)
class ClaimsInputs(Inputs):
    verdict: Literal["every", "proved", "corrected", "refuted", "supported", "not applicable"] = control(
        "every", "Verdict"
    )
    topic: Literal[
        "every", "softmax", "queries", "heads", "efficient", "costs", "relu", "dynamics", "lemmas", "neighbours"
    ] = control("every", "Topic")
    claim: str = control(_FIRST, "Claim", longest=60, quiet=True)
    variant: str = control(STATED, "What is attacked", longest=80, quiet=True)
    hunt: bool = control(False, "Search", quiet=True)
    cases: int = control(2000, "Cases to try at most", (100, MOST_CASES), log=True)
    seed: int = control(0, "Seed of what is drawn", (0, 99))


def preview(inputs: ClaimsInputs) -> Answer:
    """The ledger as a list, and what the chosen claim says; nothing is judged yet."""
    ledger = [{"id": one.id, "topic": one.topic, "plain": one.plain} for one in catalogue().values()]
    try:
        claim = _chosen(inputs.claim)
    except ParameterError as error:
        return {"ledger": ledger, "trouble": error}
    absent = claim.not_applicable()
    note = f"{absent}, so there is nothing to try." if absent else ""
    shown = {"id": claim.id, "html": stated(claim), "variants": [] if absent else variants(claim), "note": note}
    return {"ledger": ledger, "claim": shown, "facts": _WORDS.facts("facts", claim, None)}


def verdict(inputs: ClaimsInputs) -> Answer:
    """The ledger's verdict on the chosen claim, computed now, with all its evidence; and the search, if asked for."""
    claim = _chosen(inputs.claim)
    finding = _finding(claim.id)
    figures: dict[str, Any] = {}
    tone = finding.verdict if finding.verdict in ("proved", "refuted", "corrected", "supported") else "none"
    return {
        "id": claim.id,
        "html": judged(finding, figures, set(catalogue()), _LINK),
        "figures": figures,
        "attack": _attack(claim, inputs) if inputs.hunt and not claim.not_applicable() else None,
        "facts": _WORDS.facts("facts", claim, finding),
        "verdict": judgement(tone, finding.verdict, _WORDS.say("meaning", finding)),
    }


def _chosen(id: str) -> Claim:
    known = catalogue()
    if id not in known:
        near = difflib.get_close_matches(id, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "choose from the list"
        raise ParameterError("claim", repr(id), "is not known", remedy)
    return known[id]


@functools.cache
def _judged(id: str) -> Finding:
    return _chosen(id).judge()


@functools.cache
def _finding(id: str) -> Finding:
    """The finding on a claim, after those it needs, with its picture."""
    finding = judged_after_needs(_chosen(id), lambda one: _judged(one.id))
    picture = finding.claim.picture
    return finding if picture is None else dataclasses.replace(finding, picture=as_json(picture().plain()))


@functools.cache
def _rejected_sabotages(id: str) -> list[bool]:
    claim = _chosen(id)
    return [claim.judge_sabotage(name).rejected for name in claim.sabotage]


def _attack(claim: Claim, inputs: ClaimsInputs) -> dict[str, Any]:
    """The outcome of a search for a counterexample."""
    outcome = search(claim, inputs.variant, inputs.cases, inputs.seed, _SEARCH_SECONDS)
    tone, word, title = "none", "none found", "The nearest miss"
    if outcome.broken:
        tone, word, title = "refuted", "counterexample", "The counterexample"
    html = html_table(Table(title, tuple(outcome.case), [[f"{float(x):g}" for x in outcome.case.values()]]))
    says = _WORDS.say("search", outcome, _AGREES, _rejected_sabotages(claim.id))
    return {"tone": tone, "word": word, "says": says, "html": html, "reads": outcome.reads}


_SUMMARY = "What is said of attention, each statement judged by a machine as you watch. Try to break one."
PAGE = Page("claims", "Claims", _SUMMARY, 30, ClaimsInputs, preview, verdict, seconds=40.0, cacheable=True)
