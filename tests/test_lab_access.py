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
# Judged and drawn: axe takes what moves under its hands for broken.
STILL = """() => {
  const mark = document.querySelector("#verdict:not([hidden]) #mark")?.textContent ?? "";
  const figures = [...document.querySelectorAll(".figure")].filter(one => one.offsetParent);
  return !/^(starting …|preview|proving …|≈.*)$/.test(mark) && figures.every(one => one.querySelector("svg"));
}"""


def serious(page: Any) -> list[Any]:
    """What axe finds on a page that keeps people from using it."""
    # Past the page's content policy, which lets no stranger's script in.
    page.evaluate(AXE + ";0")
    return [found for found in page.evaluate(RUN) if found[0] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_violation(visit: Opener, lab: Lab, scheme: str) -> None:
    found = visit("", color_scheme=scheme)
    assert serious(found.page) == []
    for name in all_pages():
        found.page.goto(lab.address + name)
        found.page.wait_for_selector("#facts dd")
        found.page.wait_for_function(STILL)
        assert serious(found.page) == [], name


def test_a_violation_would_be_found(visit: Opener) -> None:
    found = visit("")
    found.page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<input><img src=\"data:,\">')")
    assert {"label", "image-alt"} <= {name for _, name, _ in serious(found.page)}
