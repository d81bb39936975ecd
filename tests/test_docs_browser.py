"""The site in a real browser, from files and offline: it asks for nothing, fits a phone, and its links lead on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.site.build import build
from tests.test_browser import Visit, browser  # noqa: F401  # a fixture
from tests.test_readme import ROOT

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    for address, text in build(ROOT).files.items():
        (made / address).parent.mkdir(exist_ok=True)
        (made / address).write_text(text)
    return made


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (820, "light"), (390, "dark")])
def test_no_page_complains_fetches_or_scrolls_sideways(browser: Any, folder: Path, width: int, scheme: str) -> None:  # noqa: F811
    size = {"width": width, "height": 900}
    visit = Visit(browser, folder / "index.html", viewport=size, color_scheme=scheme)
    for path in sorted(folder.rglob("*.html")):
        visit.page.goto(path.as_uri())
        sideways = visit.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert sideways <= 0, f"{path.name} is {sideways} px too wide"
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith(("file:", "data:"))] == []


def test_a_page_that_is_too_wide_would_be_caught(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "wide.html"
    path.write_text("<div style='width: 3000px'>wide</div>")
    assert Visit(browser, path).page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0


def test_the_contents_are_beside_the_text_or_on_a_phone_below_it(browser: Any, folder: Path) -> None:  # noqa: F811
    def places(width: int) -> tuple[dict[str, float], dict[str, float]]:
        visit = Visit(browser, folder / "choosing.html", viewport={"width": width, "height": 900})
        return visit.page.locator("main").bounding_box(), visit.page.locator("nav").bounding_box()

    text, contents = places(1280)
    assert contents["x"] + contents["width"] <= text["x"] and contents["y"] < 200
    text, contents = places(390)
    assert contents["y"] >= text["y"] + text["height"]


def test_the_search_finds_a_part_of_a_page_and_leads_there(browser: Any, folder: Path) -> None:  # noqa: F811
    visit = Visit(browser, folder / "methods" / "exact.html")
    visit.page.fill("header input", "key value cache")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_url("**/search.html?q=key+value+cache")
    assert visit.page.inner_text("#found").endswith("places") and visit.page.locator("#results li").count() > 3
    visit.page.fill("main input", "extra logit")
    assert (
        visit.page.inner_text("#results li >> nth=0 >> a") == "Decoding from a cache: Several queries, windows, sinks"
    )
    visit.page.click("#results a >> nth=0")
    assert visit.page.url.endswith("decoding.html#several-queries-windows-sinks")
    visit.page.goto((folder / "search.html").as_uri() + "?q=nosuchword")
    assert visit.page.inner_text("#found") == "Nothing was found." and visit.complaints == []


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("how much memory does decoding take?", "avow: plan_decode"),
        ("replace scaled_dot_product_attention", "Modules and a drop-in for SDPA: Replace SDPA"),
        ("write my own claim", "The ledger: Claims of your own"),
        ("avow.attend", "avow: attend"),
        ("attend()", "avow: attend"),
        ("train on my own text", "Models and training"),
        ("validation loss", "Models and training: Held-out loss"),
        ("KV cache", "Decoding from a cache"),
        ("audit somebody's kernel", "Audit somebody's attention"),
    ],
)
def test_questions_in_a_readers_own_words_find_their_page(
    question: str,
    first: str,
    browser: Any,  # noqa: F811
    folder: Path,
) -> None:
    visit = Visit(browser, folder / "search.html")
    visit.page.fill("main input", question)
    assert visit.page.inner_text("#results li >> nth=0 >> a") == first
    assert visit.page.inner_text("#found").endswith("places") and visit.complaints == []


def test_where_no_place_has_all_words_those_with_the_most_are_found(browser: Any, folder: Path) -> None:  # noqa: F811
    visit = Visit(browser, folder / "search.html")
    visit.page.fill("main input", "nosuchword landmarks")
    assert visit.page.inner_text("#found").startswith("No place has all of these words; ")
    assert "low_rank" in visit.page.inner_text("#results")


def test_links_and_keys_lead_from_page_to_page(browser: Any, folder: Path) -> None:  # noqa: F811
    visit = Visit(browser, folder / "index.html")
    visit.page.click("nav >> text=low_rank")
    assert visit.page.title() == "low_rank · avow"
    assert visit.page.inner_text("nav [aria-current]") == "low_rank"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.textContent") == "to the text"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert visit.page.evaluate(outline) == "solid", "whoever has no mouse sees where they are"
    visit.page.click("[rel=next]")
    assert visit.page.title() == "polynomial · avow"
    visit.page.click("[rel=next]")
    assert visit.page.title() == "random_features · avow"
    visit.page.click("code >> text=avow.features_needed >> nth=0")
    assert visit.page.title() == "avow · avow" and visit.page.url.endswith("#features_needed")
