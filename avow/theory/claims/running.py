"""The running of claims: side by side in worker processes, those that others need first."""

from __future__ import annotations

import collections
import contextlib
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

from avow.errors import ParameterError
from avow.theory.claims.claim import Claim, Finding
from avow.theory.claims.ledger import catalogue
from avow.theory.claims.worker_pool import Worker

Tell = Callable[[Claim], None]


def run(
    claims: Mapping[str, Claim] | Iterable[Claim],
    seconds_each: float = 60.0,
    workers: int = 2,
    tell: Tell | None = None,
    sabotage: bool = True,
) -> Iterator[Finding]:
    """What comes of each claim, as it comes; `tell` hears of each as its judging begins.

    A claim that loops, breaks the interpreter or runs out of time gets "no verdict" with the trouble in words, and all
    the others still run. The limit holds for the claim, and again for each of its sabotages. A claim that needs others
    is judged after them, if they were proved or corrected; those not asked for are judged as well, and not reported.
    """
    if not seconds_each > 0:
        raise ParameterError("run: seconds_each", seconds_each, "must be above 0", "try seconds_each=60")
    if workers < 1:
        raise ParameterError("run: workers", workers, "must be at least 1", "try workers=2")
    asked = {one.id: one for one in (claims.values() if isinstance(claims, Mapping) else claims)}
    for one in asked.values():
        if not one.source:
            remedy = "take claims from catalogue(), or from claims_in(path)"
            raise ParameterError(f"run: source of {one.id}", "''", "must say where a worker finds the claim", remedy)
    return _reported(asked, _all(asked, seconds_each, workers, tell, sabotage))


def judged_after_needs(one: Claim, judge: Callable[[Claim], Finding] = Claim.judge) -> Finding:
    """What comes of one claim, judged in this process after those it needs: for who may end the process."""
    agenda = _Agenda({one.id: one})
    found: dict[str, Finding] = {}
    while one.id not in found:
        news = list(agenda.hopeless())
        if not news:
            news = [judge(agenda.begin())] if agenda.ready else list(agenda.circular())
            agenda.done(news[0])
        found |= {finding.claim.id: finding for finding in news}
    return found[one.id]


def _reported(asked: dict[str, Claim], everything: Generator[Finding]) -> Iterator[Finding]:
    """Of everything that was found, what was asked for; who stops listening ends the workers too."""
    with contextlib.closing(everything):
        yield from (finding for finding in everything if finding.claim.id in asked)


def _all(asked: dict[str, Claim], limit: float, workers: int, tell: Tell | None, sabotage: bool) -> Generator[Finding]:
    """What comes of the claims asked for, and of those they need."""
    agenda = _Agenda(asked)
    heard: queue.Queue[tuple[Worker, str]] = queue.Queue()
    crew: list[Worker] = []
    try:
        while True:
            yield from agenda.hopeless()
            while agenda.ready and (free := _free(crew, workers, heard)):
                one = agenda.begin()
                if tell and one.id in asked:
                    tell(one)
                free.begin(one, limit, sabotage and one.id in asked)
            busy = [worker for worker in crew if worker.claim]
            if not busy:
                yield from agenda.circular()
                return
            for finding in _news(busy, heard):
                agenda.done(finding)
                yield finding
            crew = [worker for worker in crew if worker.alive]
    finally:
        for worker in crew:
            worker.end()


def _free(crew: list[Worker], most: int, heard: queue.Queue[tuple[Worker, str]]) -> Worker | None:
    """A worker with nothing to do; a new one where there may be more."""
    idle = next((worker for worker in crew if worker.claim is None and worker.alive), None)
    if idle is None and len(crew) < most:
        crew.append(idle := Worker(heard))
    return idle


def _news(busy: list[Worker], heard: queue.Queue[tuple[Worker, str]]) -> list[Finding]:
    """What has ended, by a line from a worker, its death, or a limit that has passed; waits for any of these."""
    try:
        worker, line = heard.get(timeout=max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        worker.hear(line)
    except queue.Empty:
        pass
    for worker in busy:
        if worker.deadline <= time.monotonic():
            worker.give_up()
    return [finding for worker in busy if (finding := worker.finding())]


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
