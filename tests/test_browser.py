"""The pages in a real browser, offline: formulas and plots are drawn, filters filter, and nothing complains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from avow.report.claims import claims_page
from avow.report.page import document
from tests.test_claims_page import sample

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-sync"])
        yield launched
        launched.close()


class Visit:
    """A page opened from a file, with all it complained of and all it asked the network for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**options)
        self.page.context.set_offline(True)
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda problem: self.complaints.append(str(problem)))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.page.goto(path.as_uri())
        self.requests = [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]

    def sizes(self, selector: str) -> list[tuple[float, float]]:
        measured = "all => all.map(one => one.getBoundingClientRect()).map(box => [box.width, box.height])"
        return [tuple(size) for size in self.page.eval_on_selector_all(selector, measured)]

    def shown(self, selector: str) -> list[str]:
        """What can be seen, by the ids or the first cells of it."""
        seen = [one for one in self.page.query_selector_all(selector) if one.is_visible()]
        return [one.get_attribute("id") or one.query_selector("td").inner_text() for one in seen]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "claims.html"
    path.write_text(claims_page(sample(), "avow claims run"))
    return path


@pytest.fixture(scope="module")
def visit(browser: Any, file: Path) -> Visit:
    return Visit(browser, file)


def test_the_page_opens_offline_without_a_complaint_or_a_request(visit: Visit) -> None:
    assert visit.complaints == [] and visit.requests == []


def test_a_page_that_complains_and_fetches_would_be_caught(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<img src='https://example.org/a.png'><script>undefined.x</script>")
    bad = Visit(browser, path)
    assert bad.requests == ["https://example.org/a.png"] and len(bad.complaints) >= 1


def test_the_policy_stops_what_a_page_would_fetch(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "tempted.html"
    path.write_text(document("tempted", "<img src='https://example.org/a.png'>"))
    assert any("Content Security Policy" in said for said in Visit(browser, path).complaints)


def test_formulas_are_drawn(visit: Visit) -> None:
    sizes = visit.sizes("article .formula math")
    assert len(sizes) >= 5 and all(width > 5 and height > 5 for width, height in sizes)
    raised = visit.page.eval_on_selector("math msup", "m => m.lastChild.getBoundingClientRect().bottom")
    base = visit.page.eval_on_selector("math msup", "m => m.firstChild.getBoundingClientRect().bottom")
    assert raised < base, "an exponent stands above its base"


def test_plots_are_drawn(visit: Visit) -> None:
    visit.page.wait_for_selector(".figure svg .line", state="attached")
    assert all(width > 200 and height > 100 for width, height in visit.sizes(".figure > svg"))
    assert visit.complaints == []


def test_filters_keep_what_was_asked_for_and_give_the_rest_back(visit: Visit) -> None:
    everything = ["binomial", "square-grows", "primes-odd", "cosine-small"]
    assert visit.shown("article") == everything
    visit.page.select_option("#topic", "numbers")
    assert visit.shown("article") == ["primes-odd", "cosine-small"]
    visit.page.click("button[data-verdict=refuted]")
    assert visit.shown("article") == ["primes-odd"] == visit.shown(".overview tbody tr")
    assert visit.page.inner_text("#kept") == "1 claim"
    visit.page.select_option("#topic", "")
    visit.page.click("button[data-verdict=refuted]")
    assert visit.shown("article") == everything == visit.shown(".overview tbody tr")


def test_evidence_unfolds(visit: Visit) -> None:
    step = visit.page.locator("#binomial ol.steps li").first
    assert not step.is_visible()
    visit.page.click("#unfold")
    assert step.is_visible() and step.locator("math").is_visible()


def test_a_phone_need_not_scroll_sideways_and_the_dark_is_dark(browser: Any, file: Path) -> None:
    phone = Visit(browser, file, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colour = phone.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) < 64
