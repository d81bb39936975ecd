"""The ledger: every claim with the verdict on record, its proof run again, a search that tries to break it, a quiz."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal

from avow.errors import ParameterError
from avow.lab.claim_cases import CASE, case_chart
from avow.lab.page import Answer, Inputs, Page, Words, control, judgement
from avow.lab.scenes import SCENES
from avow.report.claims import judged, sentence, stated, title
from avow.theory.claims import Claim, Finding, catalogue, claims_in
from avow.theory.claims.evidence import as_json
from avow.theory.claims.random_search import (
    MOST_CASES,
    STATED,
    Outcome,
    Trial,
    check_variant,
    excess_along,
    trials,
    variants,
)
from avow.theory.claims.running import judged_after_needs

# The file of the reader's own claims, if any: set by whoever starts the lab, and never by a request.
VARIABLE = "AVOW_LAB_CLAIMS"
OWN_TOPIC = "yours"

# False as stated, and what is true instead can be found by hand in the explorer.
_FIRST = "copy-possible"
# Where the page of another claim is: the script takes links that begin so.
_LINK = "?claim={}"
# A search comes in slices of this long, so that it can be followed and stopped; and ends by itself after a while.
_SLICE_SECONDS, _SEARCH_SECONDS = 0.3, 10.0
# Cases of a slice that are drawn, besides those that came nearest so far.
_MARKS = 60
# Curves along each number of a case must not take longer than this, all together.
_CURVES_SECONDS = 0.5
# Balls of 128 bits that still hold zero below this: the two sides agree.
_AGREES = 1e-30
# A proof this old has not been run just now.
_JUST_NOW_SECONDS = 20.0
_WORDS = Words("claims.txt")


@dataclasses.dataclass(frozen=True)
class ClaimsInputs(Inputs):
    mode: Literal["read", "guess first"] = control("read", "How to go through the claims")
    verdict: Literal["every", "proved", "corrected", "refuted", "supported"] = control("every", "Verdict on record")
    topic: Literal[
        "every",
        "softmax",
        "queries",
        "heads",
        "efficient",
        "costs",
        "relu",
        "dynamics",
        "lemmas",
        "neighbours",
        "yours",
    ] = control("every", "Topic")
    claim: str = control(_FIRST, "Claim", longest=60, quiet=True)
    variant: str = control(STATED, "What is attacked", longest=80, quiet=True)
    hunt: bool = control(False, "Search", quiet=True)
    cases: int = control(2000, "Cases to try at most", (100, MOST_CASES), log=True)
    seed: int = control(0, "Seed of what is drawn", (0, 99))
    after: int | None = control(None, "Cases that the search has tried already", (0, MOST_CASES), quiet=True)


def preview(inputs: ClaimsInputs) -> Answer:
    """Every claim with the verdict on record, and what the chosen one says; nothing is judged yet."""
    ledger = [_row(one) for one in _known().values()]
    try:
        claim = _chosen(inputs.claim)
        if inputs.hunt:
            check_variant(claim, inputs.variant)
    except ParameterError as error:
        return {"ledger": ledger, "trouble": error}
    live = {"tone": _tone(claim.expected), "word": claim.expected, "says": _WORDS.say("awaited")}
    return {"ledger": ledger, "claim": _shown(claim), "facts": _WORDS.facts("facts", claim, None), "live": live}


def verdict(inputs: ClaimsInputs) -> Answer:
    """The chosen claim judged now, with all its evidence; or, `after` some cases, the next slice of the search."""
    claim = _chosen(inputs.claim)
    if inputs.after is not None:
        return {"id": claim.id, "attack": _attack(claim, inputs, inputs.after)}
    finding, since = _finding(claim.id)
    figures: dict[str, Any] = {}
    age = time.monotonic() - since
    return {
        "id": claim.id,
        "html": judged(finding, figures, set(_known()), _LINK),
        "figures": figures,
        "reason": _WORDS.say("reason", finding),
        "facts": _WORDS.facts("facts", claim, finding),
        "verdict": judgement(
            _tone(finding.verdict),
            finding.verdict,
            _WORDS.say("again", finding, age if age > _JUST_NOW_SECONDS else None),
        ),
    }


def static() -> Answer:
    """Every claim with all that the page shows of it, judged now: what a copy without a server needs."""
    whole = []
    for claim in catalogue().values():
        finding, _ = _finding(claim.id)
        figures: dict[str, Any] = {}
        found = {
            "judged": judged(finding, figures, set(catalogue()), _LINK),
            "figures": figures,
            "reason": _WORDS.say("reason", finding),
            "word": finding.verdict,
            "tone": _tone(finding.verdict),
            "says": _WORDS.say("copied", finding),
        }
        whole.append(_row(claim) | _shown(claim) | found)
    return {"ledger": whole, "first": _FIRST}


def _known() -> dict[str, Claim]:
    return catalogue() | _own()


@functools.cache
def _own() -> dict[str, Claim]:
    """The claims of the reader's own file. It is Python: whoever started the lab said that it may run."""
    path = os.environ.get(VARIABLE)
    return claims_in(path) if path else {}


def _chosen(id: str) -> Claim:
    known = _known()
    if id not in known:
        near = difflib.get_close_matches(id, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "choose from the list"
        raise ParameterError("claim", repr(id), "is not known", remedy)
    return known[id]


def _row(claim: Claim) -> dict[str, Any]:
    """A claim in the list."""
    topic = OWN_TOPIC if claim.id in _own() else claim.topic
    return {"id": claim.id, "topic": topic, "plain": _short(claim.id, claim.plain), "recorded": claim.expected}


@functools.lru_cache(200)
def _short(id: str, plain: str) -> str:
    """The sentence of a claim in the list, without long formulas; a formal statement takes a while to be made."""
    return sentence(_known()[id]).short


def _shown(claim: Claim) -> dict[str, Any]:
    """What the chosen claim says, what is on record, and what can be done with it."""
    note = _WORDS.say("not_searched", claim.not_applicable(), claim.falsifier is None)
    numbers = {} if note or claim.falsifier is None else claim.falsifier.ranges
    scene = SCENES.get(claim.id)
    return {
        "id": claim.id,
        "title": title(claim),
        "html": stated(claim),
        "terms": _WORDS.facts("terms", f"{claim.plain} {claim.amended_plain}"),
        "recorded": claim.expected,
        "meaning": _WORDS.say("meaning", claim.expected),
        "pictured": claim.picture is not None,
        "python": _WORDS.html("python", claim).strip() if claim.id in catalogue() else None,
        "scene": scene and scene._asdict(),
        "variants": [] if note else variants(claim),
        "note": note,
        "numbers": [
            {"name": name, "low": span[0], "high": span[-1], "whole": isinstance(span, range)}
            for name, span in numbers.items()
        ],
        "reads": (claim.falsifier.stated.__doc__ or "") if claim.falsifier else "",
    }


def _tone(word: str) -> str:
    return word if word in ("proved", "refuted", "corrected", "supported") else "none"


# ---- the proof


@functools.lru_cache(64)
def _finding(id: str) -> tuple[Finding, float]:
    """The finding on a claim, after those it needs, with its picture, and when it was found."""
    finding = judged_after_needs(_chosen(id), known=_known())
    picture = finding.claim.picture
    if picture is None:
        return finding, time.monotonic()
    try:
        finding = dataclasses.replace(finding, picture=as_json(picture().plain()))
    except Exception as error:  # a reader's own file may draw anything
        trouble = f"the picture raised {type(error).__name__}: {error}"
        finding = dataclasses.replace(finding, trouble="; ".join(filter(None, (finding.trouble, trouble))))
    return finding, time.monotonic()


# ---- the search


class Hunt:
    """A search that is taken up again where it stopped."""

    def __init__(self, claim: Claim, variant: str, seed: int) -> None:
        self._trials = trials(claim, variant, seed)
        self.tried, self.seconds, self.broken = 0, 0.0, False
        self.nearest: Trial | None = None

    def go_on(self, cases: int, seconds: float) -> Iterator[Trial]:
        """Cases until so many have been tried in all, one breaks the statement, or the time is up."""
        before, start = self.seconds, time.monotonic()
        while self.tried < cases and not self.broken and self.seconds - before <= seconds:
            trial = next(self._trials)
            self.tried, self.broken = trial.number, trial.broken
            self.nearest = trial if trial.nearest else self.nearest
            self.seconds = before + time.monotonic() - start
            yield trial


@functools.lru_cache(4)
def _hunt(id: str, variant: str, seed: int) -> list[Hunt]:
    """The search that was last begun, in a list so that it can be begun again."""
    return [Hunt(_chosen(id), variant, seed)]


def _attack(claim: Claim, inputs: ClaimsInputs, after: int) -> dict[str, Any]:
    """A slice of a search for a counterexample, from the case `after` those that the page has seen."""
    box = _hunt(claim.id, inputs.variant, inputs.seed)
    if box[0].tried != after:
        # Another process has gone so far, or the page begins again: the same seed leads to the same cases.
        box[0] = Hunt(claim, inputs.variant, inputs.seed)
        for _ in box[0].go_on(after, _SEARCH_SECONDS):
            pass
    hunt = box[0]
    slice = list(hunt.go_on(inputs.cases, _SLICE_SECONDS))
    done = hunt.broken or hunt.tried >= inputs.cases or hunt.seconds > _SEARCH_SECONDS
    answer = {
        "tried": hunt.tried,
        "cases": inputs.cases,
        "done": done,
        "marks": [[t.number, t.excess, t.nearest, [float(x) for x in t.case]] for t in _sample(slice)],
    }
    return answer | _end(claim, inputs, hunt) if done else answer


def _sample(slice: list[Trial]) -> list[Trial]:
    """The cases of a slice that are drawn: every so many, and the last that came nearer than all before."""
    seen = [trial for trial in slice if trial.excess is not None]
    every = max(1, len(seen) // _MARKS)
    nearest = {trial.number for trial in [trial for trial in seen if trial.nearest][-_MARKS:]}
    return [trial for place, trial in enumerate(seen) if place % every == 0 or trial.number in nearest]


def _end(claim: Claim, inputs: ClaimsInputs, hunt: Hunt) -> dict[str, Any]:
    """What a search came to, and the case that it found, drawn."""
    tone, word = ("refuted", "counterexample") if hunt.broken else ("none", "none found")
    assert claim.falsifier is not None  # or nothing could have been tried
    nearest = hunt.nearest
    case = nearest.case if nearest else (Fraction(0),) * len(claim.falsifier.ranges)
    named = dict(zip(claim.falsifier.ranges, case, strict=True))
    excess = nearest.excess if nearest and nearest.excess is not None else -float("inf")
    outcome = Outcome(
        inputs.variant, inputs.seed, hunt.tried, inputs.cases, hunt.broken, excess, named, "", hunt.seconds
    )
    chart = case_chart(claim, inputs.variant, {name: float(x) for name, x in named.items()}) if hunt.broken else None
    return {
        "tone": tone,
        "word": word,
        "says": _WORDS.say("search", outcome, _AGREES),
        "curves": _curves(claim, inputs.variant, case),
        "chart": chart and chart.plain() | {"mark": CASE},
    }


def _curves(claim: Claim, variant: str, case: tuple[Fraction, ...]) -> list[list[tuple[float, float]]]:
    """For each number of a case, by how much the statement is broken as it runs through its range and others stay.

    Where a case takes long to evaluate, the curves of the last numbers are left out.
    """
    end = time.monotonic() + _CURVES_SECONDS
    curves: list[list[tuple[float, float]]] = []
    for place in range(len(case)):
        curve = []
        for point in excess_along(claim, variant, case, place):
            if time.monotonic() > end:
                return curves
            curve.append(point)
        curves.append(curve)
    return curves


_SUMMARY = "What is said of attention. Each statement has a verdict on record. Open one to see why, or guess first."
PAGE = Page(
    "claims",
    "Claims",
    _SUMMARY,
    30,
    ClaimsInputs,
    preview,
    verdict,
    seconds=120.0,  # a proof of seconds on a quiet machine
    preview_seconds=40.0,  # every statement is spelled out before the first one
    static=static,
)
