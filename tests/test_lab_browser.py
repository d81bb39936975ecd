"""The lab in a real browser: drawn, dragged, typed at, addressed, in the dark and on a phone, without a network."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from avow.lab.page import PACKAGE, all_pages
from avow.lab.rendering import row, workshop
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import Opener, Visit

pytestmark = pytest.mark.browser


def drag(found: Visit, angle: float, reach: float, let_go: bool = True) -> None:
    """From the handle to a place on the stage, in degrees and in parts of the keys' circle."""
    box = found.page.locator("#stage").bounding_box()
    size = min(box["width"], box["height"]) / 2.9  # the circle of keys, in pixels
    centre = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    knob = found.page.locator(".handle .knob").bounding_box()
    found.page.mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2)
    found.page.mouse.down()
    turn = math.radians(angle)
    found.page.mouse.move(centre[0] + math.cos(turn) * reach * size, centre[1] - math.sin(turn) * reach * size, steps=8)
    if let_go:
        found.page.mouse.up()


def test_a_page_that_complains_or_asks_a_stranger_would_be_caught(browser: Any, lab: Lab) -> None:
    bad = Visit(browser, lab, "")
    with bad.page.expect_console_message(lambda said: "Content Security Policy" in said.text):
        bad.page.evaluate("() => { const img = new Image(); img.src = 'https://example.org/a.png'; }")
    assert any("Content Security Policy" in said for said in bad.complaints)
    with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
        bad.page.goto("https://example.org/")
    assert bad.strangers[-1] == "https://example.org/"
    with pytest.raises(AssertionError):
        bad.close()
    bad.page.close()


NAMELESS = "all => all.filter(one => !one.labels.length || !one.labels[0].textContent.trim()).length"


def test_the_row_and_the_workshop_lead_to_every_page_and_each_shows_what_it_found(visit: Opener) -> None:
    found = visit("")
    in_row, in_workshop = row(PACKAGE), workshop(PACKAGE)
    for place in (*in_row, *in_workshop):
        if place in in_row:
            found.page.click(f".bar nav a[href='{place.address}']")
        else:
            found.page.click(".bar nav a[href='/workshop']")
            found.page.click(f".pages a[href='{place.address}']")
        found.page.wait_for_selector(f"body[data-page='{place.name}']" if place.name != "workshop" else ".pages")
        found.settled()
        assert found.page.locator(".bar [aria-current]").count() == 1
        assert found.page.eval_on_selector_all("input", NAMELESS) == 0


def test_each_page_leads_to_the_next_and_the_last_one_to_the_first(visit: Opener) -> None:
    found = visit("")
    ways = [*row(PACKAGE), *workshop(PACKAGE)]
    for place in (*ways[1:], ways[0]):
        found.page.click(".following a")
        found.page.wait_for_url(re.compile(f"{place.address}$"))


def test_on_a_stored_story_the_slider_greys_words_and_changes_the_next_word(visit: Opener) -> None:
    page = visit("?story=names&word=194&head=18.6").page
    page.wait_for_selector("#text .asking[data-t='194']")
    grey = "() => document.querySelectorAll('#text .gone').length"
    assert page.evaluate(grey) == 0 and page.inner_text("#slot") == "He"
    page.focus("#tolerance")
    page.keyboard.press("End")
    assert page.evaluate(grey) > 150 and page.inner_text("#slot") == "new line"
    assert "changes from “He” to a new line" in page.inner_text("#sentence")
    # Below the heads stands the same text, in the same colours.
    page.hover("#head-0")
    page.wait_for_function("""() => {
      const words = id => [...document.querySelectorAll(`#${id} .word`)];
      const looks = id => words(id).map(one => one.className + one.style.cssText).join();
      return words("echo").length > 100 && looks("echo") === looks("text");
    }""")
    assert page.locator("#echo :is([role], [tabindex], [id])").count() == 0


def test_the_explorer_draws_its_stage_weights_curve_and_formulas(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    assert found.page.locator("#stage .key").count() == found.page.locator("#weights div").count() == 8
    found.page.wait_for_selector("#curve svg .line", state="attached")
    sizes = found.page.eval_on_selector_all(".formula math", "all => all.map(one => one.getBoundingClientRect().width)")
    assert len(sizes) >= 2 and min(sizes) > 5
    assert found.fact("Weight of what is read").startswith("0.997") and "error ≤" in found.fact("Certificate")


def test_dragging_moves_the_query_and_a_verdict_comes_only_when_it_is_let_go(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    drag(found, 90.0, 0.75, let_go=False)
    found.page.wait_for_function(
        "() => document.querySelector('#weights span.wanted').style.getPropertyValue('--share') < 0.1"
    )
    found.page.wait_for_timeout(400)
    assert found.page.inner_text("#mark") == "≈ not kept" and not found.page.locator("#facts.sure").count()
    found.page.mouse.up()
    assert found.judged("not kept") == "Key 1 gets less than the weight 1/(1 + 0.01) this query should give."
    assert abs(float(found.inputs["angle"]) - 90) < 2 and abs(float(found.inputs["length"]) - 22.5) < 1
    assert found.page.locator("#facts.sure").count() == 1


def test_arrow_keys_turn_the_query_and_home_gives_it_back(visit: Opener) -> None:
    found = visit("explorer")
    found.judged("kept")
    found.page.focus(".handle")
    for _ in range(6):
        found.page.keyboard.press("Shift+ArrowLeft")
    found.judged("not kept")
    assert float(found.inputs["angle"]) == 105.0
    assert "direction 105 degrees" in found.page.get_attribute(".handle", "aria-valuetext")
    found.page.keyboard.press("ArrowUp")
    found.page.keyboard.press("Home")
    found.judged("kept")
    assert found.inputs == {}


def test_a_touch_drags_too(visit: Opener) -> None:
    found = visit("explorer", has_touch=True, viewport={"width": 390, "height": 844})
    found.judged("kept")
    box = found.page.locator("#stage").bounding_box()
    found.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.9)
    found.judged("not kept")
    assert abs(float(found.inputs["angle"]) + 90) < 3


# Whatever can be used: links, buttons, boxes, sliders, things to drag; of a group of radios the one that is chosen.
USABLE = """[...document.querySelectorAll("a, button, input, summary, [tabindex='0']")].filter(one =>
  one.checkVisibility() && !one.disabled && !(one.type === "radio" && !one.checked))"""
UNREACHED = f"() => {USABLE}.filter(one => !one.reached).map(one => one.id || one.textContent || one.outerHTML)"
# The one that has the focus: marked, with the width of the ring around it or around what it stands in.
FOCUSED = """() => {
  const one = document.activeElement, knob = one.querySelector(".knob");
  if (one === document.body) return null;
  one.reached = true;
  if (knob) return getComputedStyle(knob).stroke === getComputedStyle(document.querySelector(".shaft")).stroke ? 0 : 3;
  const rings = [one, one.parentElement].map(getComputedStyle).filter(style => style.outlineStyle !== "none");
  return Math.max(0, ...rings.map(style => parseFloat(style.outlineWidth)));
}"""


@pytest.mark.parametrize("path", ["workshop", *all_pages(), "explorer?space=sphere", "relu?follow=a+formula"])
def test_whatever_can_be_used_is_reached_by_tab_and_its_focus_is_seen(visit: Opener, path: str) -> None:
    found = visit(path)
    found.settled()
    count = len(found.page.evaluate(UNREACHED))
    assert count >= 7
    for _ in range(count + 10):
        found.page.keyboard.press("Tab")
        width = found.page.evaluate(FOCUSED)
        assert width is None or width >= 2, found.page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
    assert found.page.evaluate(UNREACHED) == []


def test_a_control_without_a_ring_or_out_of_reach_would_be_found(visit: Opener) -> None:
    found = visit("workshop")
    found.page.evaluate("document.querySelector('main a').tabIndex = -1")
    found.page.evaluate("document.querySelector('nav a').style.outline = 'none'")
    count = len(found.page.evaluate(UNREACHED))
    rings = []
    for _ in range(count):
        found.page.keyboard.press("Tab")
        rings.append(found.page.evaluate(FOCUSED))
    assert 0 in rings and found.page.evaluate(UNREACHED) != []


@pytest.mark.parametrize(
    ("path", "picture", "slider"),
    [
        ("explorer", "#stage", "#eps"),
        ("relu", "#graph", "#eps"),
        ("bench?method=random_features", "#breaking", "#norm"),
    ],
)
def test_on_a_phone_the_picture_stays_in_sight_of_the_slider_that_moves_it(
    visit: Opener, path: str, picture: str, slider: str
) -> None:
    found = visit(path, viewport={"width": 390, "height": 844})
    found.settled()
    found.page.focus(slider)
    shown, used = (found.page.locator(one).bounding_box() for one in (picture, slider))
    assert shown["y"] >= 0 and shown["y"] + shown["height"] <= used["y"] and used["y"] + used["height"] <= 844


# The lines and marks of every figure, as they are drawn.
DRAWN = """() => [...document.querySelectorAll(".figure")].map(figure =>
  [...figure.querySelectorAll(".line, .points")].map(one => one.getAttribute("d")).join(" ")).join("; ")"""


@pytest.mark.parametrize(
    ("path", "slider"),
    [
        ("explorer", "length"),
        ("bench?method=random_features&norm=2", "norm"),
        ("bench?method=sparse&kind=clustered&n=256", "drop"),
        ("relu?eps=0.001", "eps"),
        ("relu?follow=a+formula", "within"),
        ("dynamics", "penalty"),
    ],
)
def test_figures_follow_a_slider_that_is_held(visit: Opener, path: str, slider: str) -> None:
    found = visit(path)
    found.settled()
    found.page.focus(f"#{slider}")
    found.page.dispatch_event(f"#{slider}", "pointerdown")  # what is held is not proved
    for _ in range(3):
        before = found.page.evaluate(DRAWN)
        found.page.keyboard.press("ArrowRight")
        found.page.wait_for_function(f"before => ({DRAWN})() !== before", arg=before)
    assert found.page.inner_text("#mark").startswith(("preview", "≈"))


STATES = [
    ("explorer?space=sphere&n=10&target=4", "kept", "Key 4 gets"),
    ("explorer?show=average", "kept", "Keys 1 and 2 each get"),
    ("explorer?show=average&other=4", "impossible", "No query reads just keys 1 and 4 alike"),
    ("explorer?show=noise", "proved", "one head stays within 0.1 of the average in 0%, two heads in 100%."),
    ("explorer?show=noise&law=Gaussian&variance=0.5", "proved", "one head stays within 0.1 of the average in 3.9"),
    ("explorer?show=route&ahead=3", "kept", "Each of 8 tokens receives what its source carries"),
]


def test_a_state_in_the_address_is_the_state_on_the_page(visit: Opener, lab: Lab) -> None:
    found = visit("")
    for path, word, says in STATES:
        found.page.goto(lab.address + path)
        assert says in found.judged(word)
        assert found.page.url.endswith(path), "the address stays as it came"


def test_what_was_set_comes_back_from_the_address(visit: Opener) -> None:
    first = visit("explorer")
    first.judged("kept")
    first.page.get_by_role("button", name="… two heads").click()
    first.judged("proved")
    first.page.focus("#x")
    first.page.keyboard.press("PageUp")
    first.page.wait_for_url(re.compile("x="))
    first.judged("proved")
    second = visit(first.page.url.rpartition("/")[2])
    second.judged("proved")
    for selector in ("#facts", "#weights"):
        assert second.page.inner_text(selector) == first.page.inner_text(selector)
    assert second.page.input_value("#x") == first.page.input_value("#x") != "0.5"
    first.page.go_back()
    first.judged("kept")


def test_a_phone_need_not_scroll_sideways_and_the_dark_is_dark(visit: Opener, lab: Lab) -> None:
    phone = visit("", viewport={"width": 390, "height": 844}, color_scheme="dark", reduced_motion="reduce")
    for path in ("", "workshop", *all_pages(), "explorer?show=noise"):
        phone.page.goto(lab.address + path)
        phone.settled()
        assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colour = phone.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) < 64
        assert phone.page.evaluate("document.getAnimations().length") == 0


def test_forced_colours_leave_the_bars_and_what_is_chosen_to_be_seen(visit: Opener) -> None:
    found = visit("explorer", forced_colors="active")
    found.judged("kept")
    colours = "one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"
    ink, ground = found.page.eval_on_selector(".presets [aria-pressed=true]", colours)
    assert (
        ink != ground
        and found.page.eval_on_selector(
            ".presets [aria-pressed=true]", "one => getComputedStyle(one).forcedColorAdjust"
        )
        == "none"
    ), "no plate hides its words"
    bar = found.page.eval_on_selector("#weights span.wanted", "one => getComputedStyle(one).backgroundColor")
    assert bar != found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert found.page.eval_on_selector("#weights span", "one => getComputedStyle(one).printColorAdjust") == "exact"


def test_formulas_of_a_claim_are_as_large_on_paper_as_the_sheet_lets_them(visit: Opener) -> None:
    found = visit("claims?claim=copy-possible", viewport={"width": 1366, "height": 650})
    found.judged("corrected")
    found.page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    found.page.emulate_media(media="print")
    wide = """() => [...document.querySelectorAll(".formula, .facts")].filter(one => one.checkVisibility())
      .map(one => [Number(one.style.zoom || 1),
        Math.max(0, ...[...one.querySelectorAll("math")].map(part => part.getBoundingClientRect().right))])"""
    found.page.set_viewport_size({"width": 673, "height": 900})  # the text of A4 between its margins
    zooms, ends = zip(*found.page.evaluate(wide), strict=True)
    assert len(zooms) > 20 and min(zooms[:2]) > 0.7 and min(zooms) < 1
    assert max(ends) <= 673, "nothing is cut off"


def test_paper_is_white_and_says_where_the_controls_stand(visit: Opener) -> None:
    found = visit("explorer", color_scheme="dark")
    found.judged("kept")
    found.page.wait_for_selector("#curve svg .line", state="attached")
    found.page.emulate_media(media="print")
    found.page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert found.page.locator("#steps").is_visible(), "how it was proved is unfolded"
    assert found.page.locator("#n").is_hidden() and found.page.locator("[for=n] + output").is_visible()
    assert found.page.locator("[data-name=space] label:visible").all_inner_texts() == ["plane"]
    ink = "() => getComputedStyle(document.querySelector('#curve .tick.x')).fill"
    found.page.wait_for_function(f"() => ({ink})() === 'rgb(28, 33, 40)'")
    found.page.emulate_media(media="screen")
    found.page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    found.page.wait_for_function(f"() => ({ink})() === 'rgb(230, 237, 243)'")
    assert found.page.locator("#steps").is_hidden()
