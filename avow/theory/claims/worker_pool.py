"""A worker process seen from outside: it is sent claims, listened to, and ended when it is late."""

from __future__ import annotations

import json
import queue
import signal
import time
from typing import Any

from avow.theory.claims.claim import Claim, Evidence, Finding
from avow.workers import Process

# A fresh worker loads torch and the provers, on a busy machine too.
_START_SECONDS = 120.0


class Worker:
    """A process that judges one claim at a time, and what is known of the one it has.

    Its lines, and an empty one when it has ended, arrive in the queue it was given; `hear` takes them in.
    """

    def __init__(self, heard: queue.Queue[tuple[Worker, str]]) -> None:
        # Threads of its own would only wait for the other workers'.
        self._process = Process("avow.theory.claims.worker", lambda line: heard.put((self, line)), threads=1)
        self.claim: Claim | None = None
        self.alive = True
        self.deadline = self._since = self._limit = 0.0
        self._loaded = False

    def begin(self, one: Claim, limit: float, sabotage: bool) -> None:
        """Send a claim; its limit begins when the worker has loaded what every claim needs."""
        self.claim, self._limit, self._stage = one, limit, "the claim"
        self._verdict: dict[str, Any] = {}
        self._sabotages: dict[str, bool] = dict.fromkeys(one.sabotage, False) if sabotage else {}
        self._trouble = ""
        self._ended = False
        self._wait(limit if self._loaded else _START_SECONDS)
        self._process.send({"source": one.source, "id": one.id, "sabotage": sabotage})

    def _wait(self, limit: float) -> None:
        self._since = time.monotonic()
        self.deadline = self._since + limit

    def hear(self, line: str) -> None:
        """Take in a line of the worker's, or its end."""
        if not self.alive:
            return
        if not line:
            self._lose(self._last_words())
            return
        news = json.loads(line)
        match news["news"]:
            case "loaded":
                self._loaded = True
            case "verdict":
                self._verdict = news
            case "sabotage":
                self._sabotages[news["name"]] = news["rejected"]
            case "picture":
                self._verdict["picture"] = news["picture"]
                self._trouble = news["trouble"]
                self._ended = True
        self._stage = news["next"]
        self._wait(self._limit)

    def give_up(self) -> None:
        """End a worker that has passed its limit."""
        self._lose(f"{self._stage if self._loaded else 'loading'} ran out of time: {self._limit:g} s")

    def _lose(self, trouble: str) -> None:
        self.end()
        self._trouble, self._ended = trouble, True

    def _last_words(self) -> str:
        """How a process ended by itself; one that could not even load says why in the last line it printed."""
        code, last = self._process.last_words()
        how = f"ended the interpreter, with exit code {code}"
        if code < 0:
            how = f"broke the interpreter, with {signal.Signals(-code).name}"
        if self._loaded:
            return f"{self._stage} {how}"
        return f"loading {how}" + (f": {last}" if last else "")

    def end(self) -> None:
        """Leave no process behind."""
        self.alive = False
        self._process.end()

    def finding(self) -> Finding | None:
        """What came of the claim, once it has ended."""
        if self.claim is None or not self._ended:
            return None
        one, self.claim, told = self.claim, None, self._verdict
        if not told:
            return Finding(one, "no verdict", (), time.monotonic() - self._since, self._trouble)
        return Finding(
            one,
            told["verdict"],
            tuple(Evidence(**step) for step in told["evidence"]),
            told["seconds"],
            "; ".join(filter(None, (told["trouble"], self._trouble))),
            told["raised"],
            # Where the check does not apply, or breaks on the claim itself, it was shown nothing else.
            {} if told["raised"] or told["verdict"] == "not applicable" else self._sabotages,
            told.get("picture"),
        )
