"""Many at once: `python -m tests.load_lab --clients 50 --seconds 60`.

Each client moves sliders of every page and now and then asks for a verdict. Nothing but answers may come back, and
afterwards the server and its workers hold no more memory than before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.lab_outside import Watched, watched

# Caches of the pages may fill up, and allocators keep some of what they had.
GROWTH = 1.10
VERDICTS = 0.02


def moves(document: dict[str, Any]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """For every page, its numbers with their bounds."""
    found = {}
    for path, operation in document["paths"].items():
        if path.endswith("/preview"):
            schema = operation["post"]["requestBody"]["content"]["application/json"]["schema"]
            kinds = [(name, spec) for name, spec in schema["properties"].items() if "minimum" in spec]
            found[path.removesuffix("/preview")] = kinds
    return found


def one_client(
    at: Watched, pages: dict[str, Any], until: float, seed: int, verdicts: float, took: list[float], came: Counter[str]
) -> None:
    draw = random.Random(seed)
    own = {"X-Avow-Token": at.token, "Content-Type": "application/json"}
    while time.monotonic() < until:
        page = draw.choice(list(pages))
        inputs: dict[str, Any] = {}
        if pages[page]:
            name, spec = draw.choice(pages[page])
            low, high = spec["minimum"], spec["maximum"]
            inputs[name] = draw.randint(int(low), int(high)) if "integer" in spec["type"] else draw.uniform(low, high)
        what = "verdict" if draw.random() < verdicts else "preview"
        since = time.monotonic()
        try:
            done = at.lab.ask("POST", f"{page}/{what}", json.dumps(inputs).encode(), own)
            # A key to read may be beyond the few that a page begins with: a refusal is an answer.
            kind = "answered" if done.status in (200, 404, 422) else f"{done.status} {done.body[:120]!r}"
        except Exception as error:
            kind = f"{type(error).__name__}: {error}"
        came[kind] += 1
        took.append(time.monotonic() - since)


def run(at: Watched, clients: int, seconds: float, verdicts: float = VERDICTS) -> tuple[list[float], Counter[str]]:
    """What came back, and after how long."""
    pages = moves(at.lab.get("/openapi.json").said)
    took: list[float] = []
    came: Counter[str] = Counter()
    until = time.monotonic() + seconds
    crowd = [
        threading.Thread(target=one_client, args=(at, pages, until, i, verdicts, took, came)) for i in range(clients)
    ]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    return took, came


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--seconds", type=float, default=60.0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, watched(Path(folder)) as at:
        # Every process is at work and every page has been seen before the level is taken.
        run(at, 12, min(12.0, chosen.seconds), verdicts=0.5)
        before, hands = at.memory(), at.processes()
        took, came = run(at, chosen.clients, chosen.seconds)
        after, hands_after = at.memory(), at.processes()
    grown = after / before
    print(
        f"{chosen.clients} clients, {chosen.seconds:g} s: {came['answered']:,} answers, "
        f"{came.total() - came['answered']} errors; p50 {statistics.median(took):.2f} s, largest {max(took):.2f} s; "
        f"memory {before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after ({grown:.2f}), "
        f"processes {hands} and {hands_after}; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for kind, count in came.items():
        if kind != "answered":
            print(f"  {count} × {kind}")
    return int(came.total() > came["answered"] or grown > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
