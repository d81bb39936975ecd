"""From a slider to the screen: sliders of every page are moved in Chromium, and each move is timed.

A move counts from the browser's event to the end of the frame that shows it; a move that was overtaken by the next one
counts until that one is shown. Besides, the processor time of one preview and of the page's main thread for one move,
which a busy machine hardly changes. Needs chromium and playwright, as the lab's tests do.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch

from avow.bench.results import Goal, Result, Row, tell_row
from avow.errors import AvowError
from avow.lab.page import all_pages, json_bytes
from benchmarks.options import Options
from tests.helpers.lab import running
from tests.helpers.lab_outside import watched
from tests.helpers.lab_visits import CHROMIUM, QUIET, SETTLED

# A state of a page, and the slider that is moved there: on every page with sliders, one that asks for much.
SLIDERS = {
    "": "tolerance",
    "explorer": "angle",
    "explorer?show=noise&law=Gaussian": "x",
    "bench?method=random_features&kind=diffuse": "norm",
    "bench?method=low_rank&kind=clustered": "rank",
    "bench?method=sparse&kind=clustered": "drop",
    "claims": "seed",
    "relu": "eps",
    "relu?follow=a+formula&within=0.001": "within",
    "relu?follow=a+formula&formula=sin(9*x)": "end",
    "dynamics": "gain",
    "dynamics?beta=0.98": "penalty",
}
MOST = 60.0  # milliseconds
SOON, STARTS = 1.5, 5  # seconds, and starts

WATCH = """name => {
  window.moves = [];
  document.getElementById(name).addEventListener("input", event => moves.push(event.timeStamp));
  performance.clearMeasures();
}"""
STEPS = "name => { const {min, max, step} = document.getElementById(name); return (max - min) / step; }"
SHOWN = """() => [moves, performance.getEntriesByName("avow:paint")
  .map(one => [one.startTime, one.startTime + one.duration])]"""

DRAWN = "() => performance.getEntriesByName('avow:figure').map(one => one.duration)"
# A page whose proof takes seconds: whatever moves in another tab meanwhile must not be later for that.
PROVING = "bench?method=random_features&kind=diffuse&n=2048&norm=4"
AT_PROOF = """() => document.getElementById("mark").textContent === "proving …" ||
  document.getElementById("verdict").dataset.proving"""
# Whenever it is through with a proof, it is given another head to prove the same of; `begun` counts them.
AGAIN = """() => {
  const head = document.getElementById("head");
  window.begun = 1;
  setInterval(() => {
    if (document.getElementById("verdict").getAttribute("aria-busy")) return;
    window.begun++;
    head.value = (Number(head.value) + 1) % 32;
    head.dispatchEvent(new Event("input", {bubbles: true}));
  }, 100);
}"""


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
    for key in ("ArrowRight", "ArrowLeft") * 5:  # the worker's caches and the browser's compiler are warm
        page.keyboard.press(key)
        page.wait_for_timeout(200)
    page.evaluate(WATCH, slider)
    sweep = min(25, int(page.evaluate(STEPS, slider)))  # beyond its end a slider does not move
    since = worked(inside)
    for i in range(moves):
        page.keyboard.press("ArrowRight" if i // sweep % 2 == 0 else "ArrowLeft")
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
    bounds = page.inputs.schema()["properties"][slider]
    low, high = bounds["minimum"], bounds["maximum"]
    log = page.inputs.controls()[slider]["log"]
    took = []
    for i in range(places + 1):
        share = (i % places + 0.5) / places
        place = low * (high / low) ** share if log else low + (high - low) * share
        inputs = page.inputs(**set_so_far | {slider: round(place) if bounds["type"] == "integer" else place})
        since = time.process_time()
        with contextlib.suppress(AvowError):  # an interval that ends before it begins takes no time at all
            json_bytes(page.preview(inputs, {}) if page.takes_files else page.preview(inputs))
        took.append(1000 * (time.process_time() - since))
    return took[1:]


def first_use(browser: Any) -> dict[str, float]:
    """Seconds until a lab of its own prints its address, and from then until the first page's slider has moved."""
    with tempfile.TemporaryDirectory() as home:
        page, since = browser.new_page(), time.monotonic()
        with watched(Path(home)) as started:
            printed = time.monotonic()
            page.goto(started.lab.address)
            page.wait_for_selector("#text .word")
            page.focus("#tolerance")
            page.keyboard.press("End")
            page.wait_for_function("() => document.getElementById('stop').textContent !== 'exact'")
            used = time.monotonic()
            page.close()
    return {"address s": printed - since, "first move s": used - printed}


def run(options: Options) -> list[Result]:
    """Every slider, moved; late is what takes longer than people call immediate. Then the first page is opened."""
    from playwright.sync_api import sync_playwright

    moves, pause = (5 if options.quick else 200), 50.0
    sliders = dict(list(SLIDERS.items())[: 1 if options.quick else None])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The first page asks nobody: what its slider shows was computed with the story.
    thoughts = {name: thought(name, slider) for name, slider in sliders.items() if name}
    torch.set_num_threads(threads)
    rows: list[Row] = []
    with running() as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        pages = {name.partition("?")[0]: (name, slider) for name, slider in reversed(sliders.items())}
        beside_a_proof = [(*one, PROVING) for one in reversed(pages.values())]
        for name, slider, besides in [*((*one, "") for one in sliders.items()), *beside_a_proof]:
            page, second = browser.new_page(viewport={"width": 1280, "height": 900}), None
            page.goto(lab.address + name)
            page.wait_for_function(SETTLED, timeout=120_000)
            if besides:
                second = browser.new_page()
                second.goto(lab.address + besides)
                second.wait_for_function(AT_PROOF)
                second.evaluate(AGAIN)
                page.bring_to_front()
            found, drawn, spent = measured(page, slider, moves, pause)
            rows.append(
                {
                    "page": (name or "reading") + (", a proof in a second tab" if besides else ""),
                    "slider": slider,
                    "p50 ms": statistics.median(found),
                    "p95 ms": statistics.quantiles(found, n=20)[-1],
                    "largest ms": max(found),
                    "figures drawn": len(drawn),
                    "ms a figure": statistics.median(drawn) if drawn else None,
                    "preview ms": statistics.median(thoughts[name]) if name else None,
                    "page's ms": spent,
                    "proofs meanwhile": second.evaluate("begun") if second else None,
                }
            )
            tell_row(rows[-1])
            page.close()
            if second:
                second.close()
        starts = [first_use(browser) for _ in range(1 if options.quick else STARTS)]
        browser.close()
    worst = max(float(row["p95 ms"] or 0) for row in rows)
    goal = Goal(f"95 of 100 moves shown within {MOST:g} ms on every page", f"{worst:.0f} ms at worst", worst <= MOST)
    usual = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    opened: Row = {"starts": len(starts), **usual, "slowest s": max(start["first move s"] for start in starts)}
    tell_row(opened)
    soon = Goal(
        f"the first page can be used within {SOON:g} s of its address",
        f"{usual['first move s']:.2f} s, the median of {len(starts)} starts",
        usual["first move s"] <= SOON,
    )
    return [
        Result(f"lab: {moves} moves of every slider, every {pause:g} ms", rows, [goal]),
        Result("lab: the first page, opened as soon as its address is printed", [opened], [soon]),
    ]
