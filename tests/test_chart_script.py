"""The chart script in a real browser: what it draws, says and saves, by pointer, by keys and without colour vision."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any
from xml.etree import ElementTree

import pytest

from avow.core.chart import Chart
from avow.report.charts import Axis, Plot, Trace, figure
from avow.report.page import asset
from avow.report.style import LOOKS
from tests.test_browser import browser  # noqa: F401  # a fixture

pytestmark = pytest.mark.browser

PAGE = """<!doctype html><html lang="en"><style>{style} #place {{ width: 700px; height: 400px }}</style>
<div class="figure" id="place"></div>
<script type="module">{script} Object.assign(window, {{draw, frame, svgText, savePicture}})</script>"""
LINES = Chart(
    "Errors", "units", "error", {"wide <b>": ([1, 2, 4], [1e-1, 1e-3, 1e-5]), "deep": ([1, 4], [0.5, 1e-2])}, log_y=True
)
# Where a value stands on the screen.
AT = """([x, y]) => {
  const {left, top} = document.querySelector("#place > svg").getBoundingClientRect(), at = frame(place);
  return [left + at.x.at(x), top + at.y.at(y)];
}"""


@pytest.fixture
def page(browser: Any) -> Any:  # noqa: F811
    made = browser.new_page()
    complaints: list[str] = []
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.set_content(PAGE.format(style=asset("style.css"), script=asset("chart.js")))
    made.wait_for_function("() => window.draw")
    yield made
    assert complaints == []
    made.close()


def draw(page: Any, description: dict[str, Any]) -> None:
    page.evaluate("figure => draw(place, figure)", json.loads(json.dumps(description, allow_nan=False)))


def ticks(page: Any, axis: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(f"#place .tick.{axis}", "all => all.map(one => one.textContent)")
    return found


def tip(page: Any) -> str | None:
    found: str | None = page.evaluate(
        "() => { const tip = place.querySelector('.tip'); return tip.hidden ? null : tip.textContent; }"
    )
    return found


def hover(page: Any, x: object, y: object) -> str | None:
    page.mouse.move(*page.evaluate(AT, [x, y]))
    return tip(page)


def test_lines_stand_where_their_axes_say(page: Any) -> None:
    draw(page, figure(LINES))
    assert ticks(page, "y")[0] == "10−5" and "1" in ticks(page, "x")
    first = page.get_attribute("#place .line >> nth=0", "d")
    points = [tuple(map(float, part.split())) for part in first.removeprefix("M").split("L")]
    frame = "([x, y]) => [frame(place).x.at(x), frame(place).y.at(y)]"
    for point, (x, y) in zip(points, zip(*LINES.series["wide <b>"], strict=True), strict=True):
        assert point == pytest.approx(page.evaluate(frame, [x, y]), abs=0.06)
    assert page.evaluate("frame(place).y.back(frame(place).y.at(0.02))") == pytest.approx(0.02)
    assert page.evaluate("frame(place).y.at(1e-5) > frame(place).y.at(0.5)"), "large numbers stand above small ones"


def test_what_a_point_says_is_shown_by_pointer_and_gone_with_it(page: Any) -> None:
    draw(page, figure(LINES))
    assert hover(page, 2, 1e-3) == "wide <b>\nunits 2\nerror 0.001"
    assert page.locator("#place .here").count() == 1
    page.mouse.move(1, 1)
    assert tip(page) is None and page.locator("#place .here").count() == 0


def test_arrow_keys_read_every_point_and_escape_ends_it(page: Any) -> None:
    draw(page, figure(LINES))
    page.focus("#place > svg")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        said.append(tip(page))
    assert said == [
        "wide <b>\nunits 1\nerror 0.1",
        "wide <b>\nunits 2\nerror 0.001",
        "wide <b>\nunits 4\nerror 10⁻⁵",
        "deep\nunits 4\nerror 0.01",
        "deep\nunits 1\nerror 0.5",
    ]
    page.keyboard.press("Escape")
    assert tip(page) is None
    draw(page, figure(Plot("", Axis("x"), Axis("y"), [Trace("", [1, 2, 3], [1, None, 3], "line", LOOKS[0])])))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip(page) == "x 3\ny 3", "over a gap"


def test_what_a_finger_found_stays(browser: Any) -> None:  # noqa: F811
    phone = browser.new_page(has_touch=True, viewport={"width": 390, "height": 844})
    phone.set_content(PAGE.format(style=asset("style.css"), script=asset("chart.js")).replace("700px", "380px"))
    phone.wait_for_function("() => window.draw")
    draw(phone, figure(LINES))
    phone.touchscreen.tap(*phone.evaluate(AT, [2, 1e-3]))
    assert tip(phone) == "wide <b>\nunits 2\nerror 0.001"
    phone.close()


def test_a_series_is_hidden_and_shown_by_its_key_and_the_axes_follow(page: Any) -> None:
    draw(page, figure(LINES))
    assert page.locator("#place .line").count() == 2
    page.focus("#place .keys button >> nth=0")
    page.keyboard.press("Enter")
    assert page.locator("#place .line").count() == 1 and ticks(page, "y")[0] == "0.01"
    assert page.get_attribute("#place .keys button >> nth=0", "aria-pressed") == "false"
    draw(page, figure(LINES, x={"range": (0, 8)}))
    assert page.locator("#place .line").count() == 1, "it stays hidden when other numbers come"
    assert page.evaluate("document.activeElement.dataset.series") == "wide <b>", "and the focus stays"
    page.keyboard.press("Enter")
    assert page.locator("#place .line").count() == 2


def test_whoever_sees_nothing_gets_a_name_and_what_every_series_spans(page: Any) -> None:
    draw(page, figure(LINES))
    svg = page.locator("#place > svg")
    assert svg.get_attribute("aria-label") == "Errors"
    about = page.inner_text(f"#{svg.get_attribute('aria-describedby')}")
    spans = "wide <b>: units 1 to 4, error 10⁻⁵ to 0.1; deep: units 1 to 4, error 0.01 to 0.5"
    assert about == f"{spans}. Arrow keys read its points."
    draw(page, figure(Chart("", "steps", "loss", {"a": ([1, 2], [3, 4])})))
    assert svg.get_attribute("aria-label") == "loss against steps"


def test_no_word_becomes_markup(page: Any) -> None:
    evil = '<img src=x onerror="window.caught = 1">"&'
    trace = Trace(evil, [1, 2], [1, 2], "points", LOOKS[0], hover=[evil, evil], labels=[evil, evil])
    draw(page, figure(Plot(evil, Axis(evil), Axis(evil), [trace], levels={1.5: evil})))
    assert hover(page, 1, 1) == evil and page.inner_text("#place .keys") == evil
    assert page.locator("#place img").count() == 0 and page.evaluate("window.caught") is None
    names = figure(Plot("", Axis(""), Axis("", names=[evil]), [Trace("", [0.5], [evil], "bars", LOOKS[0])]))
    draw(page, names)
    assert page.locator("#place img").count() == 0 and ticks(page, "y")[0].startswith("<img")


def test_bars_have_their_names_lengths_and_whiskers(page: Any) -> None:
    bars = [
        Trace("a", [0.5], ["a, 50%"], "bars", LOOKS[0], legend=False, hover=["half"], intervals=[(0.4, 0.7)]),
        Trace("b", [0.25], ["b, 25%"], "bars", LOOKS[1], legend=False, hover=["quarter"], intervals=[(0.2, 0.3)]),
    ]
    draw(page, figure(Plot("", Axis("right", format="%", range=(0, 1)), Axis("", names=["a, 50%", "b, 25%"]), bars)))
    assert ticks(page, "y") == ["a, 50%", "b, 25%"] and ticks(page, "x")[-1] == "100%"
    first, second = (float(page.get_attribute(f"#place .bar >> nth={i}", "width")) for i in (0, 1))
    assert first == pytest.approx(2 * second, abs=0.2)
    assert page.locator("#place .whiskers").count() == 2 and page.locator("#place .keys").is_hidden()
    assert hover(page, 0.1, "b, 25%") == "quarter"


def test_upright_bars_of_several_series_stand_side_by_side(page: Any) -> None:
    draw(page, figure(Chart("", "key", "weight", {"a": ([0, 1], [1, 2]), "b": ([0, 1], [2, 1])}, marks="bars")))
    places = page.eval_on_selector_all(
        "#place .bar", "all => all.map(one => [+one.getAttribute('x'), +one.getAttribute('width')])"
    )
    places.sort()
    assert all(x + width <= other + 0.11 for (x, width), (other, _) in itertools.pairwise(places))


def test_gaps_steps_fills_levels_and_marks(page: Any) -> None:
    traces = [
        Trace("bound", [1, 2, 3], [3, 4, 3], "line", LOOKS[0], dash=1),
        Trace("error", [1, 2, 3], [1, None, 2], "steps", LOOKS[0], fill=True),
        Trace("open", [2], [2], "open points", LOOKS[1]),
        Trace("cross", [3], [3], "crosses", LOOKS[2]),
    ]
    draw(page, figure(Plot("", Axis("x"), Axis("y"), traces, upright=2, levels={1.0: "no use"})))
    paths = page.eval_on_selector_all("#place .line", "all => all.map(one => one.getAttribute('d'))")
    assert paths[0].count("L") == 2 and paths[1].count("M") == 2, "a gap breaks a line"
    assert page.locator("#place [fill-opacity='.12']").count() == 1
    assert page.get_attribute("#place .points >> nth=0", "fill") == "var(--page)"
    assert page.get_attribute("#place .points >> nth=1", "fill") == "none"
    assert "no use" in page.text_content("#place > svg")


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis("", log=True, range=(1e-9, 8), every=2), ["10−8", "10−6", "10−4", "10−2", "1"]),
        (Axis("", log=True, range=(0.2, 6), format="×"), ["0.2×", "0.5×", "1×", "2×", "5×"]),
        (Axis("", range=(-0.05, 1.05), format="%"), ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (Axis("", range=(-1.35, 1.35), ticks=(-1, 0, 1), labels=("−ε", "0", "ε")), ["−ε", "0", "ε"]),
        (Axis("", log=True, ticks=(1024, 4096)), ["1,024", "4,096"]),
        (Axis("", range=(-1e-6, 1e-6)), ["−1×10−6", "−5×10−7", "0", "5×10−7", "10−6"]),
    ],
)
def test_ticks_are_written_as_people_read_them(page: Any, axis: Axis, labels: list[str]) -> None:
    trace = Trace(
        "", [1, 2], [1024, 4096] if axis.ticks and axis.ticks[0] > 9 else [0.5, 0.6], "line", LOOKS[0], legend=False
    )
    page.evaluate("place.style.height = '260px'")
    draw(page, figure(Plot("", Axis(""), axis, [trace])))
    assert ticks(page, "y") == labels


def test_other_colours_need_no_redrawing_and_another_width_is_drawn(page: Any) -> None:
    draw(page, figure(LINES))
    ink = "getComputedStyle(document.querySelector('#place .tick')).fill"
    drawn = "performance.getEntriesByName('avow:figure').length"
    count, light = page.evaluate(drawn), page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ink) != light and page.evaluate(drawn) == count
    page.evaluate("place.style.width = '300px'")
    page.wait_for_function("() => frame(place).right <= 300")
    assert page.evaluate(drawn) > count


def test_a_thousand_points_are_drawn_again_within_a_frame_or_two(page: Any) -> None:
    def wave(turn: float) -> dict[str, Any]:
        xs = [i / 100 for i in range(1000)]
        return figure(Chart("", "x", "y", {"wave": (xs, [math.sin(x + turn) for x in xs])}))

    for i in range(20):
        draw(page, wave(i / 10))
    took = page.evaluate("performance.getEntriesByName('avow:figure').map(one => one.duration)")
    assert len(took) >= 20 and sorted(took)[len(took) // 2] < 30
    draw(page, wave(1.9))
    assert page.evaluate("performance.getEntriesByName('avow:figure').length") == len(took), (
        "the same is not drawn again"
    )


def test_a_saved_picture_is_a_document_of_its_own(page: Any) -> None:
    draw(page, figure(LINES))
    with page.expect_download() as saved:
        page.evaluate("savePicture(place, 'errors')")
    assert saved.value.suggested_filename == "errors.svg"
    text = saved.value.path().read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in text
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Errors", "wide <b>", "deep", "units", "error"} <= set(words)
    page.click("#place .keys button >> nth=1")
    with page.expect_download() as saved:
        page.evaluate("savePicture(place, 'errors')")
    assert "deep" not in saved.value.path().read_text(), "what is hidden is not saved"


def test_a_map_reads_each_square(page: Any) -> None:
    heat = {
        "title": "Heads",
        "x": {"title": "layer", "names": ["0", "1"]},
        "y": {"title": "head", "names": ["0", "1"]},
        "cells": [[0, 1], [2, None]],
        "texts": [["none", "half"], ["all", None]],
        "colours": {"range": [0, 2], "ticks": [0, 2], "labels": ["low", "high"]},
    }
    draw(page, heat)
    colours = page.eval_on_selector_all("#place .cell", "all => all.map(one => one.getAttribute('fill'))")
    assert colours == ["rgb(68 1 84)", "rgb(35 144 140)", "rgb(253 231 37)"], "a head that is not there has no square"
    assert hover(page, "1", "0") == "half" and "low" in page.text_content("#place > svg")
    page.focus("#place > svg")
    page.keyboard.press("ArrowDown")
    assert tip(page) == "all"
    assert page.evaluate("figure => svgText(figure).includes('layer')", heat)


def test_labels_of_points_do_not_lie_on_each_other(page: Any) -> None:
    spread = Trace("a", [1, 2, 3], [1, 2, 3], "points", LOOKS[0], labels=["one", "two", "three"])
    draw(page, figure(Plot("", Axis("x"), Axis("y"), [spread])))
    assert page.locator("#place .label").all_text_contents() == ["one", "two", "three"]
    crowd = Trace("a", [1] * 9 + [2], [1] * 9 + [2], "points", LOOKS[0], labels=["same"] * 10)
    draw(page, figure(Plot("", Axis("x"), Axis("y"), [crowd])))
    boxes = page.eval_on_selector_all(
        "#place .label", "all => all.map(one => one.getBBox()).map(b => [b.x, b.y, b.width, b.height])"
    )
    assert 2 <= len(boxes) <= 5
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x >= a + c - 1 or a >= x + w - 1 or y >= b + d - 4 or b >= y + h - 4
