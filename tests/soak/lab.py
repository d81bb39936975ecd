"""The lab through a storm that does not end: hostile requests, crowds, visitors who hang up; right answers after it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests import fuzz_lab, load_lab
from tests.helpers.lab_outside import Watched, watched
from tests.soak.turns import GROWTH, SPARE, Case, Found, Wrong

# Requests and seconds of one case.
REQUESTS, SECONDS, CLIENTS = 90, 5.0, 12


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """One lab for all cases."""
    with watched(folder) as at:
        # Every process is at work and every page has been seen before the level is taken.
        load_lab.run(at, CLIENTS, SECONDS, verdicts=0.3)
        known = _answers(at)
        levels: list[int] = []

        def case(seed: int) -> Found:
            rng = random.Random(seed)
            kind = rng.choice(("hostile", "crowd", "hung up"))
            if kind == "hostile":
                tally = fuzz_lab.run(at, REQUESTS, rng.getrandbits(30))
                stories = tally.stories
            elif kind == "crowd":
                _, came = load_lab.run(at, CLIENTS, SECONDS, verdicts=0.1)
                stories = [f"{count} × {what}" for what, count in came.items() if what != "answered"]
            else:
                stories = [story for _ in range(40) if (story := _hung_up(rng, at))]
            if _answers(at) != known:
                stories.append("what a page computes is another after the storm")
            stories += [f"it did {note}" for note in at.notes]
            levels.append(at.memory())
            third = len(levels) // 3
            if third and min(levels[-third:]) > GROWTH * max(levels[:third]) + SPARE:
                stories.append(f"memory grew from {max(levels[:third]):,} to {min(levels[-third:]):,} bytes")
            if stories:
                raise Wrong(" | ".join(stories[:3]))
            return Found(kind)

        yield case


def _answers(at: Watched) -> dict[str, bytes]:
    """What every page computes of its own defaults, but for the time it took."""
    own = {"X-Avow-Token": at.token, "Content-Type": "application/json"}
    found = {}
    for path in at.lab.get("/openapi.json").said["paths"]:
        if path.endswith("/preview") and "bench" not in path and "runs" not in path:
            done = at.lab.ask("POST", path, b"{}", own)
            said = done.said if done.status == 200 else {}
            found[path] = json.dumps([done.status, sorted(said), said.get("headline"), said.get("verdict")]).encode()
    return found


def _hung_up(rng: random.Random, at: Watched) -> str:
    """A visitor who goes in the middle of a request, or of its answer; the next one is served."""
    body = json.dumps({"length": rng.randrange(200)}).encode() * rng.choice((1, 1, 40))
    head = (
        f"POST /api/explorer/{rng.choice(('preview', 'verdict'))} HTTP/1.1\r\nHost: 127.0.0.1:{at.lab.port}\r\n"
        f"X-Avow-Token: {at.token}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body
    try:
        with socket.create_connection(("127.0.0.1", at.lab.port), timeout=60) as wire:
            wire.sendall(whole[: rng.choice((len(whole), rng.randrange(len(whole)), len(head)))])
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.05)
            if rng.random() < 0.3:
                wire.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    wire.recv(rng.choice((1, 200)))
            if rng.random() < 0.5:
                # Gone at once, with a reset instead of a farewell.
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    except ConnectionError:
        pass
    status = at.lab.get("/").status
    return "" if status == 200 else f"the next visitor got {status}"
