"""From a slider to the screen: `python -m benchmarks.lab` moves sliders of every page 200 times in Chromium and times
each move.

A move counts from the browser's event to the end of the frame that shows it; a move that was overtaken by the next one
counts until that one is shown. Besides, the processor time of one preview and of the page's main thread for one move,
which a busy machine hardly changes. Needs chromium and playwright, as the lab's tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from typing import Any
from urllib.parse import parse_qs

import torch

from avow.errors import AvowError
from avow.lab.answers import plain
from avow.lab.page import all_pages
from tests.lab import running
from tests.lab_visits import CHROMIUM, QUIET

# A state of a page, and the slider that is moved there: on every page with sliders, one that asks for much.
SLIDERS = {
    "explorer": "angle",
    "explorer?show=noise&law=Gaussian": "x",
    "bench": "norm",
    "bench?method=low_rank&kind=clustered": "rank",
    "bench?method=sparse&kind=clustered": "drop",
    "claims": "seed",
    "relu": "eps",
    "relu?follow=a+formula&within=0.001": "within",
    "relu?follow=a+formula&formula=sin(9*x)": "end",
    "dynamics": "gain",
    "dynamics?beta=0.98": "penalty",
}
MOST = 100.0  # milliseconds

WATCH = """name => {
  window.moves = [];
  document.getElementById(name).addEventListener("input", event => moves.push(event.timeStamp));
  performance.clearMeasures();
}"""
SHOWN = """() => [moves, performance.getEntriesByName("avow:paint")
  .map(one => [one.startTime, one.startTime + one.duration])]"""

DRAWN = "() => performance.getEntriesByName('avow:figure').map(one => one.duration)"
JUDGED = "() => !['starting …', 'preview', 'proving …'].includes(document.getElementById('mark').textContent)"


def latencies(moves: list[float], paints: list[tuple[float, float]]) -> list[float]:
    """For every move, until the end of the first paint that was asked for at or after it."""
    return [min(end for start, end in paints if start >= move) - move for move in moves]


def worked(inside: Any) -> float:
    """Milliseconds of processor time that the page's main thread has taken so far."""
    found = {one["name"]: one["value"] for one in inside.send("Performance.getMetrics")["metrics"]}
    return 1000 * float(found["TaskDuration"])


def measured(page: Any, slider: str, moves: int, pause: float) -> tuple[list[float], list[float], float]:
    """The latencies of so many moves by arrow keys, to and fro; how long each figure took that was drawn anew
    meanwhile; and what a move takes of the page's processor."""
    inside = page.context.new_cdp_session(page)
    inside.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.focus(f"#{slider}")
    for key in ("ArrowRight", "ArrowLeft") * 5:  # figures are drawn, and known to be quick or not
        page.keyboard.press(key)
        page.wait_for_timeout(200)
    page.evaluate(WATCH, slider)
    since = worked(inside)
    for i in range(moves):
        page.keyboard.press("ArrowRight" if i // 25 % 2 == 0 else "ArrowLeft")
        page.wait_for_timeout(pause)
    drawn, spent = page.evaluate(DRAWN), worked(inside) - since
    page.wait_for_timeout(1000)
    found, paints = page.evaluate(SHOWN)
    return latencies(found, paints), drawn, spent / moves


def thought(state: str, slider: str, places: int = 20) -> list[float]:
    """Milliseconds of processor time that previews take, at so many places of a slider, first visits left out."""
    name, _, query = state.partition("?")
    page = all_pages()[name]
    set_so_far = {key: values[0] for key, values in parse_qs(query).items()}
    bounds = page.inputs.model_json_schema()["properties"][slider]
    ends = next((kind for kind in bounds.get("anyOf", [bounds]) if "minimum" in kind), bounds)
    low, high = ends["minimum"], ends["maximum"]
    log = bounds["control"]["log"]
    took = []
    for i in range(places + 1):
        share = (i % places + 0.5) / places
        place = low * (high / low) ** share if log else low + (high - low) * share
        inputs = page.inputs(**set_so_far | {slider: round(place) if ends["type"] == "integer" else place})
        since = time.process_time()
        with contextlib.suppress(AvowError):  # an interval that ends before it begins takes no time at all
            json.dumps(plain(page.preview(inputs, {}) if page.takes_files else page.preview(inputs)))
        took.append(1000 * (time.process_time() - since))
    return took[1:]


def main() -> int:
    from playwright.sync_api import sync_playwright

    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--moves", type=int, default=200)
    options.add_argument("--pause", type=float, default=50.0, help="milliseconds between moves")
    chosen = options.parse_args()
    late = False
    torch.set_num_threads(1)
    thoughts = {name: thought(name, slider) for name, slider in SLIDERS.items()}
    with running() as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        for name, slider in SLIDERS.items():
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(lab.address + name)
            page.wait_for_function(JUDGED, timeout=120_000)
            found, drawn, spent = measured(page, slider, chosen.moves, chosen.pause)
            p95 = statistics.quantiles(found, n=20)[-1]
            late |= p95 > MOST
            figures = (
                f"; figures drawn anew {len(drawn)} times in {statistics.median(drawn):.0f} ms each" if drawn else ""
            )
            thinks = thoughts[name]
            print(
                f"{name}: {len(found)} moves of {slider}, p50 {statistics.median(found):.0f} ms, p95 {p95:.0f} ms, "
                f"largest {max(found):.0f} ms{figures}; processor of a preview {statistics.median(thinks):.0f} ms, "
                f"at most {max(thinks):.0f}, of the page {spent:.0f} ms "
                f"(load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
                flush=True,
            )
            page.close()
        browser.close()
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
