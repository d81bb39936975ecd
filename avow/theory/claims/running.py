"""The running of claims: several at once in worker processes, those that others need first.

`run` asks an `_Agenda` which claim is next and hands it to a worker. There `handler` loads the claim, `Claim.judge`
runs its check and its sabotages, and the evidence comes back as messages. `_finding` makes one `Finding` of them: a
claim with the verdict that its evidence gives.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from avow.core.chart import Picture
from avow.errors import ParameterError
from avow.theory.claims.claim import Claim, Finding
from avow.theory.claims.evidence import Evidence, as_json
from avow.theory.claims.ledger import catalogue, load
from avow.worker_pool import Handler, Send, TimeLimitError, Worker, WorkerError, WorkerPool

Tell = Callable[[Claim], None]


def run(
    claims: Mapping[str, Claim] | Iterable[Claim],
    seconds_each: float = 60.0,
    workers: int = 2,
    tell: Tell | None = None,
    sabotage: bool = True,
) -> Iterator[Finding]:
    """The finding on each claim, as it comes.

    A claim that loops, breaks the interpreter or runs out of time gets "no verdict" with the trouble in words, and all
    the others still run. A claim that needs others is judged after them, if they were proved or corrected; those not
    asked for are judged as well, and not reported.

    Args:
        claims: what is judged.
        seconds_each: the limit for a claim, and again for each of its sabotages.
        workers: processes that judge.
        tell: called with each claim as its judging begins.
        sabotage: whether each check is also shown what it must refuse.

    Returns:
        Findings, in the order in which they come.

    Raises:
        ParameterError: a number is out of range.
    """
    if not seconds_each > 0:
        raise ParameterError("run: seconds_each", seconds_each, "must be above 0", "try seconds_each=60")
    if workers < 1:
        raise ParameterError("run: workers", workers, "must be at least 1", "try workers=2")
    requested = {one.id: one for one in (claims.values() if isinstance(claims, Mapping) else claims)}
    for one in requested.values():
        if not one.source:
            remedy = "take claims from catalogue(), or from claims_in(path)"
            raise ParameterError(f"run: source of {one.id}", "''", "must say where a worker finds the claim", remedy)
    return _findings(requested, seconds_each, workers, tell, sabotage)


def judged_after_needs(
    one: Claim, judge: Callable[[Claim], Finding] = Claim.judge, known: Mapping[str, Claim] | None = None
) -> Finding:
    """The finding on one claim, judged in this process after those it needs: for who may end the process.

    What it needs is found in the catalogue, and among the claims that are `known` besides.
    """
    agenda = _Agenda({one.id: one}, known)
    while True:
        due = agenda.next(idle=True)
        assert due is not None  # the claim itself is still to come
        finding = judge(due) if isinstance(due, Claim) else due
        agenda.done(finding)
        if finding.claim.id == one.id:
            return finding


def _findings(
    requested: dict[str, Claim], limit: float, workers: int, tell: Tell | None, sabotage: bool
) -> Iterator[Finding]:
    """The findings on the claims asked for; what they need is judged too. Who stops iterating ends the workers."""
    agenda = _Agenda(requested)
    running: set[concurrent.futures.Future[Finding]] = set()
    with contextlib.closing(WorkerPool(functools.partial(Worker, "avow.theory.claims.running:handler"))) as pool:
        while True:
            due = agenda.next(idle=not running) if len(running) < workers else None
            if isinstance(due, Claim):
                if tell and due.id in requested:
                    tell(due)
                task = functools.partial(_finding, one=due, limit=limit, sabotage=sabotage and due.id in requested)
                running.add(pool.submit(task))
                continue
            if isinstance(due, Finding):
                findings = [due]
            elif running:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                findings = [future.result() for future in done]
            else:
                return
            for finding in findings:
                agenda.done(finding)
                if finding.claim.id in requested:
                    yield finding


def _finding(worker: Worker, one: Claim, limit: float, sabotage: bool) -> Finding:
    """The finding on one claim, from a worker's messages; where the worker fails, what it had said before."""
    since, stage = time.monotonic(), "the claim" if worker.loaded else "loading"
    verdict: dict[str, Any] = {}
    sabotages: dict[str, bool] = dict.fromkeys(one.sabotage, False) if sabotage else {}
    trouble = ""
    try:
        for line in worker.messages({"source": one.source, "id": one.id, "sabotage": sabotage}, limit):
            message = json.loads(line)
            stage = message["next"]
            match message["kind"]:
                case "verdict":
                    verdict = message
                case "sabotage":
                    sabotages[message["name"]] = message["rejected"]
                case "picture":
                    verdict["picture"], trouble = message["picture"], message["trouble"]
    except WorkerError as error:
        if stage == "loading" and worker.loaded:
            stage = "the claim"
        trouble = f"{stage} {error}" if isinstance(error, TimeLimitError) else f"{stage}: its process {error}"
    if not verdict:
        return Finding(one, "no verdict", (), time.monotonic() - since, trouble)
    return Finding(
        one,
        verdict["verdict"],
        tuple(Evidence(**step) for step in verdict["evidence"]),
        verdict["seconds"],
        "; ".join(filter(None, (verdict["trouble"], trouble))),
        verdict["raised"],
        # Where the check does not apply, or breaks on the claim itself, it was shown nothing else.
        {} if verdict["raised"] or verdict["verdict"] == "not applicable" else sabotages,
        verdict.get("picture"),
    )


def handler() -> Handler:
    """What a worker does with a claim: its verdict, then whether each sabotage was rejected, then its picture.

    Each message names what is next, so that the trouble of a worker that falls silent can be said.
    """

    def handle(request: dict[str, Any], content: bytes, send: Send) -> None:
        try:
            for message in _messages(**request):
                send(json.dumps(as_json(message), allow_nan=False).encode())
        except (Exception, SystemExit) as error:
            trouble = f"loading the claim raised {type(error).__name__}: {error}"
            words = {"verdict": "no verdict", "evidence": [], "seconds": 0.0, "trouble": trouble, "raised": True}
            send(json.dumps(as_json({"kind": "verdict", "next": "the picture", **words})).encode())

    return handle


def _messages(source: str, id: str, sabotage: bool) -> Iterator[dict[str, Any]]:
    one = next((item for item in vars(_module(source)).values() if isinstance(item, Claim) and item.id == id), None)
    if one is None:
        raise LookupError(f"{source} has no claim {id!r} any more")
    finding = one.judge()
    worked = finding.verdict != "not applicable" and not finding.raised
    names = list(one.sabotage) if sabotage and worked else []
    stages = [*(f"the sabotage {name!r}" for name in names), "the picture"]
    plain = finding.plain()
    facts = {name: plain[name] for name in ("verdict", "evidence", "seconds", "trouble")}
    yield {"kind": "verdict", "next": stages[0], **facts, "raised": finding.raised}
    for name, following in zip(names, stages[1:], strict=True):
        yield {"kind": "sabotage", "next": following, "name": name, "rejected": one.judge_sabotage(name).rejected}
    yield {"kind": "picture", "next": "", **_picture(one)}


@functools.cache
def _module(source: str) -> Any:
    """A module, loaded once; what lies beside a file can be imported by its checks too."""
    if source.endswith(".py"):
        sys.path.append(os.path.dirname(source))
    return load(source)


def _picture(one: Claim) -> dict[str, Any]:
    try:
        picture = one.picture and one.picture()
        if not isinstance(picture, Picture | None):
            raise TypeError(f"a picture is a Chart or a Table, not {type(picture).__name__}")
        return {"picture": picture and as_json(picture.plain()), "trouble": ""}
    except Exception as error:
        return {"picture": None, "trouble": f"the picture raised {type(error).__name__}: {error}"}


class _Agenda:
    """What is left to judge, in the order given, each after what it needs."""

    def __init__(self, requested: dict[str, Claim], more_known: Mapping[str, Claim] | None = None) -> None:
        known = catalogue() | dict(more_known or {}) | requested
        self._left = dict(requested)
        self._verdicts: dict[str, str] = {}
        self._circle = ""
        for one in (more := list(requested.values())):
            for name in one.needs:
                if name in known and name not in self._left:
                    more.append(self._left.setdefault(name, known[name]))
        self._all = frozenset(self._left)

    def next(self, idle: bool) -> Claim | Finding | None:
        """A claim to judge now, or the finding on one that cannot be judged; None if all wait, or none is left.

        When idle, those that wait can only wait for each other.
        """
        if not self._circle:
            for one in self._left.values():
                if reason := self._hindrance(one):
                    return self._without_verdict(one, reason)
            for one in self._left.values():
                if self._verdicts.keys() >= set(one.needs):
                    return self._left.pop(one.id)
            self._circle = " and ".join(self._left) if idle else ""
        if not self._circle or not self._left:
            return None
        one = next(iter(self._left.values()))
        return self._without_verdict(one, f"it waits for claims that wait for it: {self._circle}")

    def done(self, finding: Finding) -> None:
        self._verdicts[finding.claim.id] = finding.verdict

    def _hindrance(self, one: Claim) -> str:
        """Why a claim cannot be judged: it needs what is not there, or was not proved."""
        for name in one.needs:
            if name not in self._all:
                return f"it needs the claim {name}, and there is none of that name"
            if self._verdicts.get(name, "proved") not in ("proved", "corrected"):
                return f"it needs the claim {name}, on which the verdict was: {self._verdicts[name]}"
        return ""

    def _without_verdict(self, one: Claim, reason: str) -> Finding:
        return Finding(self._left.pop(one.id), "no verdict", (), 0.0, reason)
