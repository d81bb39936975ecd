"""Every page of the lab by the rules of axe-core: names, roles, order, contrast, in the light and in the dark."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from avow.lab.page import all_pages
from tests.helpers.lab import Lab
from tests.helpers.lab_visits import Opener

pytestmark = pytest.mark.browser

# The script is axe-core's own, as a package of the tests brings it along.
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
# Preloading stylesheets is a stranger to the page, and its content policy says so in the console.
RUN = """async () => (await axe.run({preload: false})).violations
  .map(v => [v.impact, v.id, v.nodes.map(n => n.html.slice(0, 160))])"""
# Axe takes what moves under its hands for broken.
DRAWN = """() => [...document.querySelectorAll(".figure")].filter(one => one.offsetParent)
  .every(one => one.querySelector("svg"))"""


def violations(page: Any) -> list[Any]:
    """What axe finds on a page, down to moderate and minor."""
    # Past the page's content policy, which lets no stranger's script in.
    page.evaluate(AXE + ";0")
    return list(page.evaluate(RUN))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_violation(visit: Opener, lab: Lab, scheme: str) -> None:
    found = visit("", color_scheme=scheme)
    for name in ("", "workshop", *all_pages()):
        found.page.goto(lab.address + name)
        found.settled()
        found.page.wait_for_function(DRAWN)
        assert violations(found.page) == [], name


def test_every_figure_has_a_name(visit: Opener, lab: Lab) -> None:
    found = visit("")
    for name in all_pages():
        found.page.goto(lab.address + name)
        found.settled()
        found.page.wait_for_function(DRAWN)
        names = found.page.eval_on_selector_all(
            ".figure, #stage, canvas:not([aria-hidden])",
            "all => all.filter(one => one.offsetParent || one.ownerSVGElement === null && one.checkVisibility())"
            ".map(one => one.getAttribute('aria-label') ?? one.querySelector('svg[aria-label]')?.ariaLabel ?? '')",
        )
        assert all(len(words) > 5 for words in names), (name, names)


@pytest.mark.parametrize("path", ["explorer", "relu"])
def test_what_colours_say_is_still_said_in_the_reader_s_own_colours_and_on_paper(visit: Opener, path: str) -> None:
    found = visit(path, forced_colors="active")
    found.settled()
    assert violations(found.page) == []
    if path == "explorer":
        bars = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        colours = found.page.eval_on_selector_all("#weights span", bars)
        ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert len(set(colours)) == 2 and ground not in colours, "one is marked, and none is lost in the ground"
        signs = found.page.eval_on_selector_all("#signs b", "all => all.map(one => getComputedStyle(one).color)")
        assert len(set(signs)) == 5, "the signs have the colours of what they stand for"
        found.page.emulate_media(media="print", forced_colors="none")
        kept = found.page.eval_on_selector("#weights span", "one => getComputedStyle(one).printColorAdjust")
        assert kept == "exact"


LOST = """() => [...document.querySelectorAll("button")].filter(one => one.checkVisibility() && one.textContent.trim())
  .filter(one => getComputedStyle(one).color === getComputedStyle(one).backgroundColor).map(one => one.textContent)"""


@pytest.mark.parametrize("name", ["", "claims"])
def test_no_button_is_lost_in_the_reader_s_own_colours(visit: Opener, name: str) -> None:
    found = visit(name, forced_colors="active")
    found.settled()
    assert found.page.evaluate(LOST) == []
    found.page.evaluate("document.querySelector('#copy-link').style.setProperty('color', 'white', 'important')")
    found.page.evaluate("document.querySelector('#copy-link').style.forcedColorAdjust = 'none'")
    found.page.evaluate("document.querySelector('#copy-link').style.setProperty('background', 'white', 'important')")
    assert found.page.evaluate(LOST) == ["Copy link"], "it would be noticed"


def test_the_first_tab_leads_past_the_row_of_pages(visit: Opener) -> None:
    found = visit("relu")
    found.settled()
    found.page.keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.textContent") == "Skip to the page"
    assert found.page.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    found.page.keyboard.press("Enter")
    found.page.keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.closest('main') !== null")


def test_without_scripts_every_page_says_what_it_needs(browser: Any, lab: Lab) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    for name in ("", "workshop", "relu"):
        page.goto(lab.address + name)
        assert "drawn by a script" in page.locator("noscript").first.inner_text()
    page.context.close()


def test_a_violation_would_be_found(visit: Opener) -> None:
    found = visit("")
    found.page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<input><img src=\"data:,\">')")
    assert {"label", "image-alt"} <= {name for _, name, _ in violations(found.page)}
