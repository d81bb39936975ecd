"""A worker process seen from inside: requests come in as lines of JSON, and news goes out the same way.

For each claim: its verdict, then whether each sabotage was rejected, then its picture. Each line names what is next,
so that whoever waits knows what a worker was at when it fell silent.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from avow.core.chart import Picture
from avow.theory.claims.claim import Claim, Finding, as_json
from avow.theory.claims.ledger import load


def news_of(source: str, id: str, sabotage: bool) -> Iterator[dict[str, Any]]:
    """What there is to say about one claim, as it is found."""
    one = _found(source, id)
    finding = one.judge()
    worked = finding.verdict != "not applicable" and not finding.raised
    names = list(one.sabotage) if sabotage and worked else []
    stages = [*(f"the sabotage {name!r}" for name in names), "the picture", ""]
    yield {"news": "verdict", "next": stages[0], **_said(finding)}
    for name, following in zip(names, stages[1:], strict=False):
        yield {"news": "sabotage", "next": following, "name": name, "rejected": one.judge_sabotage(name).rejected}
    yield {"news": "picture", "next": "", **_drawn(one)}


@functools.cache
def _module(source: str) -> Any:
    """A module, loaded once; what lies beside a file can be imported by its checks too."""
    if source.endswith(".py"):
        sys.path.append(os.path.dirname(source))
    return load(source)


def _found(source: str, id: str) -> Claim:
    for item in vars(_module(source)).values():
        if isinstance(item, Claim) and item.id == id:
            return item
    raise LookupError(f"{source} has no claim {id!r} any more")


def _said(finding: Finding) -> dict[str, Any]:
    told = finding.plain()
    return {name: told[name] for name in ("verdict", "evidence", "seconds", "trouble")} | {"raised": finding.raised}


def _drawn(one: Claim) -> dict[str, Any]:
    if one.picture is None:
        return {"picture": None, "trouble": ""}
    try:
        drawn = one.picture()
        if not isinstance(drawn, Picture):
            raise TypeError(f"a picture is a Chart or a Table, not {type(drawn).__name__}")
        return {"picture": as_json(drawn.plain()), "trouble": ""}
    except Exception as error:
        return {"picture": None, "trouble": f"the picture raised {type(error).__name__}: {error}"}


def serve() -> None:
    """Answer requests until there are no more."""
    # Ctrl-C reaches the whole group: the one who started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # What a check prints must not mix with the news.
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**words: Any) -> None:
        news.write(json.dumps(as_json(words), allow_nan=False) + "\n")
        news.flush()

    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    tell(news="loaded", next="the claim")
    while True:
        request = json.loads(requests.get())
        try:
            for line in news_of(**request):
                tell(**line)
        except (Exception, SystemExit) as error:
            trouble = f"loading the claim raised {type(error).__name__}: {error}"
            tell(news="verdict", next="", verdict="no verdict", evidence=[], seconds=0.0, trouble=trouble, raised=True)
            tell(news="picture", next="", picture=None, trouble="")


def _read(requests: queue.Queue[str]) -> None:
    """Pass requests on; when nobody is left to send any, end, whatever a check is doing."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    serve()
