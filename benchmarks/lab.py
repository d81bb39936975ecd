"""From a slider to the screen: `python -m benchmarks.lab` moves a slider 200 times in Chromium and times each.

A move counts from the browser's event to the end of the frame that shows it; a move that was overtaken by the next one
counts until that one is shown. Needs chromium and playwright, as the lab's tests do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from tests.lab import running
from tests.lab_visits import CHROMIUM, QUIET

# A page, and the slider that is moved there.
SLIDERS = {"explorer": "angle", "dynamics": "gain"}
MOST = 100.0  # milliseconds

WATCH = """name => {
  window.moves = [];
  document.getElementById(name).addEventListener("input", event => moves.push(event.timeStamp));
  performance.clearMeasures("avow:paint");
}"""
SHOWN = """() => [moves, performance.getEntriesByName("avow:paint")
  .map(one => [one.startTime, one.startTime + one.duration])]"""


def latencies(moves: list[float], paints: list[tuple[float, float]]) -> list[float]:
    """For every move, until the end of the first paint that was asked for at or after it."""
    return [min(end for start, end in paints if start >= move) - move for move in moves]


def measured(page: Any, slider: str, moves: int, pause: float) -> list[float]:
    """The latencies of so many moves by arrow keys, to and fro."""
    page.focus(f"#{slider}")
    for key in ("ArrowRight", "ArrowLeft") * 5:  # figures are drawn, and known to be quick or not
        page.keyboard.press(key)
        page.wait_for_timeout(200)
    page.evaluate(WATCH, slider)
    for i in range(moves):
        page.keyboard.press("ArrowRight" if i // 25 % 2 == 0 else "ArrowLeft")
        page.wait_for_timeout(pause)
    page.wait_for_timeout(1000)
    found, paints = page.evaluate(SHOWN)
    return latencies(found, paints)


def main() -> int:
    from playwright.sync_api import sync_playwright

    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--moves", type=int, default=200)
    options.add_argument("--pause", type=float, default=50.0, help="milliseconds between moves")
    chosen = options.parse_args()
    late = False
    with running() as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        for name, slider in SLIDERS.items():
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(lab.address + name)
            page.wait_for_selector("#facts.sure", timeout=120_000)
            found = measured(page, slider, chosen.moves, chosen.pause)
            p95 = statistics.quantiles(found, n=20)[-1]
            late |= p95 > MOST
            print(
                f"{name:10} {len(found)} moves of {slider}: p50 {statistics.median(found):.0f} ms, p95 {p95:.0f} ms, "
                f"largest {max(found):.0f} ms (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
                flush=True,
            )
            page.close()
        browser.close()
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
