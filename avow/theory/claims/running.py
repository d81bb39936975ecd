"""The running of claims: several at once in worker processes, those that others need first."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from avow.core.chart import Picture
from avow.errors import ParameterError
from avow.theory.claims.claim import Claim, Evidence, Finding, as_json
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
    """The finding on each claim, as it comes; `tell` is called with each claim as its judging begins.

    A claim that loops, breaks the interpreter or runs out of time gets "no verdict" with the trouble in words, and all
    the others still run. The limit holds for the claim, and again for each of its sabotages. A claim that needs others
    is judged after them, if they were proved or corrected; those not asked for are judged as well, and not reported.
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
    return _requested_findings(requested, _all_findings(requested, seconds_each, workers, tell, sabotage))


def judged_after_needs(one: Claim, judge: Callable[[Claim], Finding] = Claim.judge) -> Finding:
    """The finding on one claim, judged in this process after those it needs: for who may end the process."""
    agenda = _Agenda({one.id: one})
    findings: dict[str, Finding] = {}
    while one.id not in findings:
        news = list(agenda.hopeless())
        if not news:
            news = [judge(agenda.begin())] if agenda.ready else list(agenda.circular())
            agenda.done(news[0])
        findings |= {finding.claim.id: finding for finding in news}
    return findings[one.id]


def _requested_findings(requested: dict[str, Claim], findings: Generator[Finding]) -> Iterator[Finding]:
    """Of all findings, those that were asked for; who stops iterating ends the workers too."""
    with contextlib.closing(findings):
        yield from (finding for finding in findings if finding.claim.id in requested)


def _all_findings(
    requested: dict[str, Claim], limit: float, workers: int, tell: Tell | None, sabotage: bool
) -> Generator[Finding]:
    """The findings on the claims asked for, and on those they need."""
    agenda = _Agenda(requested)
    running: set[concurrent.futures.Future[Finding]] = set()
    with contextlib.closing(WorkerPool(functools.partial(Worker, "avow.theory.claims.running:handler"))) as pool:
        while True:
            yield from agenda.hopeless()
            while agenda.ready and len(running) < workers:
                one = agenda.begin()
                if tell and one.id in requested:
                    tell(one)
                task = functools.partial(_finding, one=one, limit=limit, sabotage=sabotage and one.id in requested)
                running.add(pool.submit(task))
            if not running:
                yield from agenda.circular()
                return
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                agenda.done(future.result())
                yield future.result()


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
    claims = (item for item in vars(_module(source)).values() if isinstance(item, Claim) and item.id == id)
    one = next(claims, None)
    if one is None:
        raise LookupError(f"{source} has no claim {id!r} any more")
    finding = one.judge()
    worked = finding.verdict != "not applicable" and not finding.raised
    names = list(one.sabotage) if sabotage and worked else []
    stages = [*(f"the sabotage {name!r}" for name in names), "the picture"]
    facts = finding.plain()
    facts = {name: facts[name] for name in ("verdict", "evidence", "seconds", "trouble")} | {"raised": finding.raised}
    yield {"kind": "verdict", "next": stages[0], **facts}
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
    if one.picture is None:
        return {"picture": None, "trouble": ""}
    try:
        picture = one.picture()
        if not isinstance(picture, Picture):
            raise TypeError(f"a picture is a Chart or a Table, not {type(picture).__name__}")
        return {"picture": as_json(picture.plain()), "trouble": ""}
    except Exception as error:
        return {"picture": None, "trouble": f"the picture raised {type(error).__name__}: {error}"}


class _Agenda:
    """What is left to judge, in the order given, each after what it needs."""

    def __init__(self, asked: dict[str, Claim]) -> None:
        known = catalogue() | asked
        self._left = dict(asked)
        self._verdicts: dict[str, str] = {}
        more = collections.deque(asked.values())
        while more:
            for name in more.popleft().needs:
                if name in known and name not in self._left:
                    self._left[name] = known[name]
                    more.append(known[name])
        self._all = frozenset(self._left)

    @property
    def ready(self) -> list[Claim]:
        """Claims whose needs have all been judged."""
        return [one for one in self._left.values() if all(name in self._verdicts for name in one.needs)]

    def begin(self) -> Claim:
        return self._left.pop(self.ready[0].id)

    def done(self, finding: Finding) -> None:
        self._verdicts[finding.claim.id] = finding.verdict

    def hopeless(self) -> Iterator[Finding]:
        """Claims that need what is not there or was not proved, with the reason; one may take others with it."""
        while found := next((pair for one in self._left.values() if (pair := (one, self._hindrance(one)))[1]), None):
            yield self._without_verdict(*found)

    def circular(self) -> Iterator[Finding]:
        """What is left when all else has been judged: claims that wait for each other."""
        circle = " and ".join(self._left)
        for one in list(self._left.values()):
            yield self._without_verdict(one, f"it waits for claims that wait for it: {circle}")

    def _hindrance(self, one: Claim) -> str:
        for name in one.needs:
            if name not in self._all:
                return f"it needs the claim {name}, and there is none of that name"
            if self._verdicts.get(name, "proved") not in ("proved", "corrected"):
                return f"it needs the claim {name}, on which the verdict was: {self._verdicts[name]}"
        return ""

    def _without_verdict(self, one: Claim, reason: str) -> Finding:
        finding = Finding(self._left.pop(one.id), "no verdict", (), 0.0, reason)
        self.done(finding)
        return finding
